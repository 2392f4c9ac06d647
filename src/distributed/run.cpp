// A call of all ranks. Rank c computes the queries of its node, `head_ranks` ranks side by side,
// for a part of the heads, over all keys: it fetches these, calls the one-device engine for each
// run of rows, and returns what it has computed to the ranks that have the rows. No result is ever
// merged: the sums of a row are those of one device. The heads go in steps, and what a step needs
// comes while the one before is computed.
#include <fmt/format.h>

#include <algorithm>
#include <future>
#include <memory>
#include <type_traits>

#include "base/check.h"
#include "base/convert.h"
#include "call/check_tensors.h"
#include "call/make_problem.h"
#include "distributed/plan.h"

namespace fulgur::distributed {
namespace {

using Impl = DistributedPlan::Impl;

/// A step that has its memory.
struct StepInMemory {
  StepInMemory(const Impl& plan, int64_t step)
      : memory(new std::byte[plan.step_bytes + 64]),
        arena(memory.get() + (64 - reinterpret_cast<uintptr_t>(memory.get()) % 64)),
        tensors(plan, arena, step) {}
  std::unique_ptr<std::byte[]> memory;
  StepMemory arena;
  Step tensors;
};

/// What is sent and received, one after the other, while other work goes on.
class Line {
 public:
  template <class Task>
  std::shared_future<void> add(Task task) {
    last_ = std::async(std::launch::async, [before = last_, task = std::move(task)] {
              if (before.valid()) before.get();
              task();
            }).share();
    return last_;
  }

 private:
  std::shared_future<void> last_;
};

/// Elements [begin, begin + count) of the last dimension.
ConstTensor slice(ConstTensor t, const Heads& heads) {
  if (!t.given()) return t;
  const int dim = t.rank - 1;
  t.data = static_cast<const std::byte*>(t.data) + heads.begin * t.strides[dim] * size_of(t.dtype);
  t.shape[dim] = heads.count;
  return t;
}

/// One run of a plan.
template <class Args>
class Work {
  static constexpr bool kBackward = std::is_same_v<Args, BackwardArgs>;

 public:
  Work(const Impl& plan, const Args& args, const Run& run)
      : plan_(plan), p_(plan.problem), group_(plan.group.impl()), args_(args), run_(run) {
    run_.workspace = {};
    if constexpr (kBackward) {
      if (p_.has(Arg::kDsinks)) dsinks_.resize(p_.hq);
      if (!plan.gathers_queries()) make_sums();
    }
  }

  void operator()() {
    Line line;
    using Shared = std::shared_ptr<StepInMemory>;
    const auto fetched = [&](int64_t number, Shared* step) {
      *step = std::make_shared<StepInMemory>(plan_, number);
      return line.add([this, number, step = *step] { fetch(number, step->tensors); });
    };
    Shared now, next;
    std::shared_future<void> returned, arrived = fetched(0, &next);
    for (int64_t number = 0; number < plan_.steps; ++number) {
      arrived.get();
      if (returned.valid()) returned.get();
      now = std::exchange(next, nullptr);
      if (number + 1 < plan_.steps) arrived = fetched(number + 1, &next);
      compute(number, now->tensors);
      returned = line.add([this, number, now] { give_back(number, now->tensors); });
    }
    returned.get();
    if constexpr (kBackward) {
      if (!plan_.gathers_queries()) round_sums();
      if (!dsinks_.empty()) finish_dsinks();
    }
  }

 private:
  static Part part(const ConstTensor& t) { return Part::of_rows(t); }
  static Part part(const Tensor& t) { return Part::of_rows(t); }

  /// Calls visit(source rank, run) for all runs of ranks whose queries, or keys, rank `computing`
  /// has to compute.
  template <class Visit>
  void each_run(const Rows& rows, int computing, const Visit& visit) const {
    for (int source = 0; source < group_.ranks; ++source) {
      if (!plan_.same_node(computing, source)) continue;
      for (const RowRun& run : rows.of(source)) visit(source, run);
    }
  }

  void fetch(int64_t number, const Step& step) {
    Shipment all(group_);
    const auto queries = [&](const Part& local, const Part& to) {
      for (int r = 0; r < group_.ranks; ++r) {
        const Heads heads = plan_.q_heads(plan_.heads(r, number));
        if (plan_.has_queries_of(r, plan_.me)) {
          for (const RowRun& run : plan_.q_rows.of(plan_.me)) {
            all.send(r, local.heads(heads.begin, heads.count).rows(run.place, run.size()));
          }
        }
        if (!plan_.has_queries_of(plan_.me, r)) continue;
        for (const RowRun& run : plan_.q_rows.of(r)) {
          all.receive(r, to.rows(plan_.place(plan_.me, r, run), run.size()));
        }
      }
    };
    const auto keys = [&](const Part& local, const Part& to) {
      for (int r = 0; r < group_.ranks; ++r) {
        const Heads heads = plan_.heads(r, number);
        for (const RowRun& run : plan_.k_rows.of(plan_.me)) {
          all.send(r, local.heads(heads.begin, heads.count).rows(run.place, run.size()));
        }
        for (const RowRun& run : plan_.k_rows.of(r)) {
          all.receive(r, to.rows(plan_.k_rows.row(run), run.size()));
        }
      }
    };
    queries(part(args_.q), step.q);
    keys(part(args_.k), step.k);
    keys(part(args_.v), step.v);
    if constexpr (kBackward) {
      queries(part(args_.out), step.out);
      queries(Part::of_lse(args_.lse), step.lse);
      queries(part(args_.dout), step.dout);
      if (p_.has(Arg::kDlse)) queries(Part::of_lse(args_.dlse), step.dlse);
    }
    all.run(false);
  }

  /// To the ranks that have the rows.
  void give_back(int64_t number, const Step& step) {
    Shipment all(group_);
    const auto queries = [&](const Part& from, const Part& local) {
      for (int r = 0; r < group_.ranks; ++r) {
        if (!plan_.same_node(plan_.me, r)) continue;
        for (const RowRun& run : plan_.q_rows.of(r)) {
          all.send(r, from.rows(plan_.place(plan_.me, r, run), run.size()));
        }
        const Heads heads = plan_.q_heads(plan_.heads(r, number));
        for (const RowRun& run : plan_.q_rows.of(plan_.me)) {
          all.receive(r, local.heads(heads.begin, heads.count).rows(run.place, run.size()));
        }
      }
    };
    if constexpr (!kBackward) {
      queries(step.out, part(args_.out));
      if (p_.has(Arg::kLse)) queries(step.lse, Part::of_lse(args_.lse));
      all.run(plan_.head_ranks == 1);
    } else {
      queries(step.dq, part(args_.dq));
      const bool sums = !plan_.gathers_queries();
      const auto keys = [&](const Part& from, const Part& local) {
        for (int r = 0; r < group_.ranks; ++r) {
          if (!sums && !plan_.same_node(plan_.me, r)) continue;
          for (const RowRun& run : plan_.k_rows.of(r)) {
            all.send(r, from.rows(plan_.k_rows.row(run), run.size()));
          }
          const Heads heads = plan_.heads(r, number);
          for (const RowRun& run : plan_.k_rows.of(plan_.me)) {
            const Part to = local.heads(heads.begin, heads.count).rows(run.place, run.size());
            sums ? all.receive_sum(r, to) : all.receive(r, to);
          }
        }
      };
      keys(step.dk, sums ? sum_dk_ : part(args_.dk));
      keys(step.dv, sums ? sum_dv_ : part(args_.dv));
      all.run(!sums && plan_.head_ranks == 1);
    }
  }

  /// The options of a call of a part of a sequence.
  Options options_of(int64_t sequence, const Heads& heads, int64_t query, int64_t key) const {
    Options options = plan_.options;
    options.max_seqlen_q = options.max_seqlen_k = options.max_workspace = 0;
    options.origin = {.batch = sequence,
                      .head = heads.begin,
                      .query = query,
                      .key = key,
                      .heads = p_.hq,
                      .queries = plan_.q_rows.length(sequence),
                      .keys = plan_.k_rows.length(sequence)};
    return options;
  }

  void compute(int64_t number, const Step& step) {
    const Heads heads = plan_.q_heads(plan_.heads(plan_.me, number));
    if constexpr (kBackward) {
      if (!dsinks_.empty()) compute_dsinks(heads, step);
      if (!plan_.gathers_queries()) {
        std::memset(step.dk.data, 0, step.dk.bytes());
        std::memset(step.dv.data, 0, step.dv.bytes());
      }
    }
    each_run(plan_.q_rows, plan_.me, [&](int source, const RowRun& run) {
      const int64_t at = plan_.place(plan_.me, source, run);
      const auto rows = [&](const Part& x) { return x.rows(at, run.size()); };
      const int64_t first = plan_.k_rows.begin(run.sequence);
      const int64_t count = plan_.k_rows.length(run.sequence);
      Args call;
      call.q = rows(step.q).tensor();
      call.k = step.k.rows(first, count).tensor();
      call.v = step.v.rows(first, count).tensor();
      call.out = rows(step.out).tensor();
      if (p_.has(Arg::kLse)) call.lse = rows(step.lse).lse();
      call.alibi_slopes = slopes(heads, run.sequence);
      call.rng_state = args_.rng_state;
      const Options options = options_of(run.sequence, heads, run.begin, 0);
      if constexpr (kBackward) {
        call.dout = rows(step.dout).tensor();
        if (p_.has(Arg::kDlse)) call.dlse = rows(step.dlse).lse();
        call.dq = rows(step.dq).tensor();
        const Part dk = step.part_dk.rows(0, count), dv = step.part_dv.rows(0, count);
        call.dk = dk.tensor();
        call.dv = dv.tensor();
        fulgur::backward(call, options, run_);
        if (plan_.gathers_queries()) return;
        add(dk, step.dk.rows(first, count));
        add(dv, step.dv.rows(first, count));
      } else {
        call.sinks = slice(args_.sinks, heads);
        fulgur::forward(call, options, run_);
      }
    });
    if constexpr (kBackward) {
      if (plan_.gathers_queries()) compute_key_gradients(heads, step);
    }
  }

  ConstTensor slopes(const Heads& heads, int64_t sequence) const {
    ConstTensor t = slice(args_.alibi_slopes, heads);
    if (!plan_.packed || t.rank != 2) return t;
    t.data = static_cast<const std::byte*>(t.data) + sequence * t.strides[0] * size_of(t.dtype);
    t.shape[0] = 1;
    return t;
  }

  /// dK and dV of the keys of this node, by all queries.
  void compute_key_gradients(const Heads& heads, const Step& step) {
    each_run(plan_.k_rows, plan_.me, [&](int, const RowRun& run) {
      const int64_t first = plan_.q_rows.begin(run.sequence);
      const int64_t count = plan_.q_rows.length(run.sequence);
      const auto queries = [&](const Part& x) { return x.rows(first, count); };
      const auto keys = [&](const Part& x) {
        return x.rows(plan_.k_rows.row(run), run.size()).tensor();
      };
      Args call;
      call.q = queries(step.q).tensor();
      call.k = keys(step.k);
      call.v = keys(step.v);
      call.out = queries(step.out).tensor();
      call.lse = queries(step.lse).lse();
      call.dout = queries(step.dout).tensor();
      if (p_.has(Arg::kDlse)) call.dlse = queries(step.dlse).lse();
      call.alibi_slopes = slopes(heads, run.sequence);
      call.rng_state = args_.rng_state;
      call.dq = queries(step.unused_dq).tensor();
      call.dk = keys(step.dk);
      call.dv = keys(step.dv);
      fulgur::backward(call, options_of(run.sequence, heads, 0, run.begin), run_);
    });
  }

  /// Those of the queries at hand, which need no keys: LSE knows of them.
  void compute_dsinks(const Heads& heads, const Step& step) {
    const bool whole = plan_.gathers_queries();
    if (whole && group_.rank >= plan_.head_ranks) return;       // others have the same
    std::vector<double> sinks(heads.count), sums(heads.count);  // room for any dtype
    const DType dtype = whole ? args_.sinks.dtype : DType::kF32;
    for (int64_t h = 0; h < heads.count; ++h) {
      const ConstTensor& given = args_.sinks;
      store_element(sinks.data(), dtype, h,
                    load_element(given.data, given.dtype, (heads.begin + h) * given.strides[0]));
    }
    Args call;
    call.q = step.q.tensor();
    call.k = step.k.rows(0, 0).tensor();
    call.v = step.v.rows(0, 0).tensor();
    call.out = step.out.tensor();
    call.lse = step.lse.lse();
    call.dout = step.dout.tensor();
    if (p_.has(Arg::kDlse)) call.dlse = step.dlse.lse();
    call.dq = step.dq.tensor();
    call.dk = step.part_dk.rows(0, 0).tensor();
    call.dv = step.part_dv.rows(0, 0).tensor();
    call.sinks = ConstTensor::contiguous(sinks.data(), dtype, {heads.count});
    call.dsinks = Tensor::contiguous(sums.data(), dtype, {heads.count});
    Options options;
    options.invariant = p_.invariant;
    options.threads = plan_.options.threads;
    options.engine = plan_.options.engine;
    fulgur::backward(call, options);
    for (int64_t h = 0; h < heads.count; ++h) {
      dsinks_[heads.begin + h] = load_element(sums.data(), dtype, h);
    }
  }

  void finish_dsinks() {
    std::vector<double> total(p_.hq);
    const auto part_of = [&](std::vector<double>& sums) {
      return Part::of_rows(Tensor::contiguous(sums.data(), DType::kF64, {1, p_.hq, 1}));
    };
    Shipment all(group_);
    for (int r = 0; r < group_.ranks; ++r) {
      all.send(r, part_of(dsinks_));
      all.receive_sum(r, part_of(total));
    }
    all.run(false);
    const Tensor& to = args_.dsinks;
    for (int64_t h = 0; h < p_.hq; ++h) {
      store_element(to.data, to.dtype, h * to.strides[0], total[h]);
    }
  }

  static void add(const Part& from, const Part& to) {
    const auto both = [&](auto zero) {
      using T = decltype(zero);
      for (int64_t b = 0; b < to.shape[0]; ++b) {
        const T* x = reinterpret_cast<const T*>(from.data) + b * from.strides[0];
        T* sum = reinterpret_cast<T*>(to.data) + b * to.strides[0];
        for (int64_t i = 0; i < to.shape[1] * to.strides[1]; ++i) sum[i] += x[i];
      }
    };
    to.dtype == DType::kF64 ? both(double{}) : both(float{});
  }

  /// Sums of dK and dV of the rows of this rank.
  void make_sums() {
    const int64_t rows = plan_.k_rows.count(plan_.me);
    const auto lay_out = [&](StepMemory arena) {
      sum_dk_ = arena.rows(plan_.sum_dtype(), p_.batch, rows, p_.hk, p_.d);
      sum_dv_ = arena.rows(plan_.sum_dtype(), p_.batch, rows, p_.hk, p_.dv);
      return arena.used();
    };
    sums_ = std::make_unique<std::byte[]>(lay_out(StepMemory(nullptr)));  // zeros
    lay_out(StepMemory(sums_.get()));
  }

  void round_sums() {
    const auto round = [](const Part& from, const Part& to) {
      for (int64_t b = 0; b < to.shape[0]; ++b) {
        for (int64_t r = 0; r < to.shape[1]; ++r) {
          for (int64_t h = 0; h < to.shape[2]; ++h) {
            const auto at = [&](const Part& x) {
              return b * x.strides[0] + r * x.strides[1] + h * x.strides[2];
            };
            for (int64_t c = 0; c < to.shape[3]; ++c) {
              store_element(to.data, to.dtype, at(to) + c,
                            load_element(from.data, from.dtype, at(from) + c));
            }
          }
        }
      }
    };
    round(sum_dk_, part(args_.dk));
    round(sum_dv_, part(args_.dv));
  }

  const Impl& plan_;
  const Problem& p_;
  Group::Impl& group_;
  const Args& args_;
  Run run_;
  std::unique_ptr<std::byte[]> sums_;
  Part sum_dk_, sum_dv_;
  std::vector<double> dsinks_;
};

template <class Args>
void run_as_planned(const Impl& plan, const Args& planned, const Args& args, const Run& run) {
  Group::Impl& group = plan.group.impl();
  try {
    if (run.workspace.data != nullptr) fail("workspace", "given with a group, which has its own");
    check_as_planned(planned, args);
    check_memory(args);
    check_random_numbers(args, run);
    Work<Args>(plan, args, run)();
  } catch (const std::exception& error) {
    group.leave(fmt::format("rank {} failed: {}", group.rank, error.what()));
    throw;
  }
}

}  // namespace

void run_plan(const Impl& plan, const ForwardArgs& args, const Run& run) {
  run_as_planned(plan, plan.planned_forward, args, run);
}

void run_plan(const Impl& plan, const BackwardArgs& args, const Run& run) {
  run_as_planned(plan, plan.planned_backward, args, run);
}

}  // namespace fulgur::distributed

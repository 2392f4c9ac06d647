// A call of all ranks. Rank c computes the queries of its node, `head_ranks` ranks side by side,
// for a part of the heads, over all keys: it fetches these, calls the one-device engine for each
// run of rows, and returns what it has computed to the ranks that have the rows. No result is ever
// merged: the sums of a row are those of one device. The heads go in steps, and what a step needs
// comes while the one before is computed.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/convert.h"
#include "distributed/plan.h"
#include "distributed/shipment.h"

namespace fulgur::distributed {
namespace {

/// What is sent and received, one after the other, while other work goes on: in threads, or, where
/// a stream computes meanwhile, when it is waited for.
class Line {
 public:
  explicit Line(bool in_threads)
      : launch_(in_threads ? std::launch::async : std::launch::deferred) {}

  template <class Task>
  std::shared_future<void> add(Task task) {
    last_ = std::async(launch_, [before = last_, task = std::move(task)] {
              if (before.valid()) before.get();
              task();
            }).share();
    return last_;
  }

 private:
  std::launch launch_;
  std::shared_future<void> last_;
};

/// Elements [begin, begin + count) of a dimension, of which there may be one for all.
template <class T>
T narrow(T t, int dim, int64_t begin, int64_t count) {
  if (!t.given() || t.shape[dim] == 1) return t;
  using Byte = std::conditional_t<std::is_same_v<T, Tensor>, std::byte, const std::byte>;
  t.data = static_cast<Byte*>(t.data) + begin * t.strides[dim] * size_of(t.dtype);
  t.shape[dim] = count;
  return t;
}

/// Calls visit(part, part) for all of two tensors of one shape, the first of which lies side by
/// side. The columns of a part lie so, too: where the other's do not there is one.
template <class Visit>
void each_part(const Tensor& x, const Tensor& y, const Visit& visit) {
  const bool apart = y.rank > 0 && y.shape[y.rank - 1] > 1 && y.strides[y.rank - 1] != 1;
  const int split = apart && y.rank == Tensor::kMaxRank ? 1 : 0;  // the first dimension, one by one
  const auto part_of = [&](const Tensor& t, int64_t i) {
    Part part{static_cast<std::byte*>(t.data) + i * t.strides[0] * size_of(t.dtype),
              t.dtype,
              {1, 1, 1, 1},
              {0, 0, 0, 1},
              t.device};
    for (int dim = split; dim < t.rank; ++dim) {
      const int at = dim + Tensor::kMaxRank - t.rank - (apart ? 1 : 0);
      part.shape[at] = t.shape[dim];
      part.strides[at] = t.strides[dim];
    }
    return part;
  };
  for (int64_t i = 0; i < (split == 1 ? y.shape[0] : 1); ++i) visit(part_of(x, i), part_of(y, i));
}

/// Sequences of the batch, side by side, that a call computes, and their lengths. The first one's
/// number is that of all packed sequences.
struct Sequences {
  int64_t number, first, count, queries, keys;

  Part of(const Part& x) const { return x.slice(0, first, count); }
};

/// One run of a plan.
template <class Args>
class Work {
  static constexpr bool kBackward = std::is_same_v<Args, BackwardArgs>;

 public:
  Work(const RowsPlan& plan, const Args& args, const Run& run)
      : plan_(plan),
        p_(plan.problem),
        group_(plan.group.impl()),
        args_(args),
        run_(run),
        host_(*plan.host_memory),
        memory_(*plan.memory),
        computing_(memory_.computing(run)) {
    run_.workspace = {};
    memory_.after(computing_->mark());
    used_q_ = plan.used_queries(args.lengths);
    used_k_ = plan.used_keys(args.lengths);
    if constexpr (kBackward) {
      make_sums();
    }
  }

  void operator()() {
    Line line(p_.device == Device{});
    // What steps compute with, and up to where memory of earlier ones is in use.
    std::array<std::optional<Step>, 2> steps;
    std::array<Order::Mark, 2> computed;
    computed.fill(computing_->mark());
    const auto fetched = [&](int64_t number) {
      const Memory::Use use = number % 2 == 0 ? Memory::kStep : Memory::kNextStep;
      StepMemory own(memory_.room(use, plan_.step_bytes), p_.device);
      StepMemory common(plan_.in_common() ? memory_.common() : nullptr);
      Step& step = steps[number % 2].emplace(plan_, plan_.in_common() ? common : own, own, number);
      if (plan_.queries_stay()) set_queries(number, step);
      return line.add([this, number, step, mark = computed[number % 2]] {
        memory_.after(mark);
        fetch(number, step);
      });
    };
    std::shared_future<void> arrived = fetched(0);
    for (int64_t number = 0; number < plan_.steps; ++number) {
      arrived.get();
      computing_->after(memory_.mark());
      const Step step = *steps[number % 2];
      if (number + 1 < plan_.steps) arrived = fetched(number + 1);
      compute(number, step);
      computed[number % 2] = computing_->mark();
      if (!kBackward && plan_.queries_stay()) continue;
      line.add(
          [this, number, step, mark = computed[number % 2]] { give_back(number, step, mark); });
    }
    line.add([this, mark = computing_->mark()] {
          if constexpr (kBackward) finish_gradients(mark);
          memory_.settle();
        })
        .get();
    computing_->after(memory_.mark());
    memory_.after(computing_->mark());  // what comes next may compute elsewhere
  }

 private:
  static Part part(const ConstTensor& t) { return Part::of_rows(t); }
  static Part part(const Tensor& t) { return Part::of_rows(t); }

  bool has_lengths() const { return !used_q_.empty() || !used_k_.empty(); }

  /// Calls visit(source rank, run, sequences) for all runs of ranks whose queries, or keys, this
  /// rank has to compute; of each sequence where they have lengths of their own.
  template <class Visit>
  void each_run(const Rows& rows, const Visit& visit) const {
    const bool alone = !plan_.packed && has_lengths();
    for (int source = 0; source < group_.ranks; ++source) {
      if (!plan_.same_node(group_.rank, source)) continue;
      for (const RowRun& run : rows.of(source)) {
        for (int64_t b = 0; b < (alone ? p_.batch : 1); ++b) {
          const int64_t number = alone ? b : run.sequence;
          visit(
              source, run,
              Sequences{
                  .number = number,
                  .first = b,
                  .count = alone ? 1 : p_.batch,
                  .queries = used_q_.empty() ? plan_.q_rows.length(run.sequence) : used_q_[number],
                  .keys = used_k_.empty() ? plan_.k_rows.length(run.sequence) : used_k_[number]});
        }
      }
    }
  }

  /// The queries of this rank, where they are.
  void set_queries(int64_t number, Step& step) const {
    const Heads heads = plan_.q_heads(plan_.heads(plan_.me, number));
    const auto of_heads = [&](const Part& x) { return x.heads(heads.begin, heads.count); };
    step.q = of_heads(part(args_.q));
    step.out = of_heads(part(args_.out));
    if (p_.has(Arg::kLse)) step.lse = of_heads(Part::of_lse(args_.lse));
    if constexpr (kBackward) {
      step.dout = of_heads(part(args_.dout));
      if (p_.has(Arg::kDlse)) step.dlse = of_heads(Part::of_lse(args_.dlse));
      step.dq = of_heads(part(args_.dq));
    }
  }

  void fetch(int64_t number, const Step& step) {
    Shipment all(group_, memory_);
    // In memory that ranks have in common each brings its own rows, for all.
    const auto brings = [&](int r) { return !plan_.in_common() || r == group_.rank; };
    const auto queries = [&](const Part& local, const Part& to) {
      if (plan_.queries_stay()) return;
      for (int r = 0; r < group_.ranks; ++r) {
        if (!brings(r)) continue;
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
        if (!brings(r)) continue;
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
    all.run(plan_.in_common());
    if (plan_.in_common()) memory_.meet();
  }

  /// To the ranks that have the rows.
  void give_back(int64_t number, const Step& step, const Order::Mark& computed) {
    memory_.after(computed);
    Shipment all(group_, memory_);
    const auto queries = [&](const Part& from, const Part& local) {
      if (plan_.queries_stay()) return;
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
      keys(step.dk, sums ? sums_.dk : part(args_.dk));
      keys(step.dv, sums ? sums_.dv : part(args_.dv));
      all.run(!sums && plan_.head_ranks == 1);
    }
  }

  /// The options of a call of a part of a sequence.
  Options options_of(const Sequences& s, const Heads& heads, int64_t query, int64_t key) const {
    Options options = plan_.options;
    options.max_seqlen_q = options.max_seqlen_k = options.max_workspace = 0;
    options.origin = {.batch = s.number,
                      .head = heads.begin,
                      .query = query,
                      .key = key,
                      .heads = p_.hq,
                      .queries = s.queries,
                      .keys = s.keys};
    return options;
  }

  void compute(int64_t number, const Step& step) {
    const Heads heads = plan_.q_heads(plan_.heads(plan_.me, number));
    if (has_lengths() || !dsinks_.empty()) memory_.settle();  // the host waits for the step
    if constexpr (kBackward) {
      if (args_.dsinks.given()) compute_dsinks(heads, step);
      if (has_lengths() || (!plan_.gathers_queries() && !first_call_covers())) {
        computing_->clear(step.dk);
        computing_->clear(step.dv);
      }
    }
    if (has_lengths()) write_padding(step);
    bool first_call = true;
    each_run(plan_.q_rows, [&](int source, const RowRun& run, const Sequences& s) {
      const int64_t size = std::min(run.end, s.queries) - run.begin;
      if (size <= 0) return;
      const int64_t at = plan_.place(plan_.me, source, run);
      const auto rows = [&](const Part& x) { return s.of(x).rows(at, size); };
      const int64_t first = plan_.k_rows.begin(run.sequence), count = s.keys;
      const auto keys = [&](const Part& x) { return s.of(x).rows(first, count); };
      Args call;
      call.q = rows(step.q).tensor();
      call.k = keys(step.k).tensor();
      call.v = keys(step.v).tensor();
      call.out = rows(step.out).tensor();
      if (p_.has(Arg::kLse)) call.lse = rows(step.lse).lse();
      call.alibi_slopes = slopes(heads, s);
      call.rng_state = args_.rng_state;
      const auto of_bias = [&](const auto& whole) {
        return part_of_bias(whole, s, heads, {run.begin, size}, {0, count});
      };
      call.bias = of_bias(args_.bias);
      call.tensors = args_.tensors;
      const Options options = options_of(s, heads, run.begin, 0);
      if constexpr (kBackward) {
        call.dout = rows(step.dout).tensor();
        if (p_.has(Arg::kDlse)) call.dlse = rows(step.dlse).lse();
        call.dq = rows(step.dq).tensor();
        const auto unused = [&](const Part& x) { return s.of(x).rows(0, count); };
        const bool covers = std::exchange(first_call, false) && first_call_covers();
        const Part dk = covers ? keys(step.dk) : unused(step.part_dk);
        const Part dv = covers ? keys(step.dv) : unused(step.part_dv);
        call.dk = dk.tensor();
        call.dv = dv.tensor();
        auto whole = sums_.whole.begin();
        Part bias, sum_of_bias;
        if (args_.dbias.given()) {
          const Tensor sums = of_bias(whole->shaped(whole->sums));
          bias = whole->of_call;
          bias.shape = sums.shape;
          sum_of_bias = Part::of_rows(sums);
          bias = bias.packed(bias.data);
          call.dbias = bias.tensor();
          ++whole;
        }
        const auto of_tensors = whole;
        for (TensorBinding& t : call.tensors) {
          if (!t.grad.given()) continue;
          t.grad = whole->shaped(whole->of_call);
          ++whole;
        }
        fulgur::backward(call, options, run_);
        if (args_.dbias.given()) computing_->add(bias, sum_of_bias);
        for (auto g = of_tensors; g != whole; ++g) computing_->add(g->of_call, g->sums);
        if (plan_.gathers_queries() || covers) return;
        computing_->add(dk, keys(step.dk));
        computing_->add(dv, keys(step.dv));
      } else {
        call.sinks = narrow(args_.sinks, 0, heads.begin, heads.count);
        fulgur::forward(call, options, run_);
      }
    });
    if constexpr (kBackward) {
      if (plan_.gathers_queries()) compute_key_gradients(heads, step);
    }
  }

  /// Whether the first call of a step has all keys of all sequences, so that its dk and dv are
  /// where others are added.
  bool first_call_covers() const {
    return !plan_.gathers_queries() && !plan_.packed && !has_lengths() && plan_.queries() > 0;
  }

  /// What no query and no key gets: no results, and gradients of 0.
  void write_padding(const Step& step) const {
    if constexpr (kBackward) {
      fill(step.dq, 0);
    } else {
      fill(step.out, 0);
      if (p_.has(Arg::kLse)) fill(step.lse, -std::numeric_limits<float>::infinity());
    }
  }

  void fill(Part to, float value) const {
    const std::vector<float> row(to.shape[3], value);
    const int64_t bytes = std::ssize(row) * int64_t{sizeof(float)};
    Part from{memory_.room(Memory::kRow, bytes), DType::kF32, to.shape, {0, 0, 0, 1}, p_.device};
    computing_->upload(from.data, row.data(), bytes);
    computing_->round(from, to);
  }

  ConstTensor slopes(const Heads& heads, const Sequences& s) const {
    const ConstTensor& t = args_.alibi_slopes;
    const ConstTensor own = t.rank == 2 ? narrow(t, 0, s.number, s.count) : t;
    return narrow(own, t.rank - 1, heads.begin, heads.count);
  }

  /// Of the bias of all ranks, or of its gradient: some queries and keys.
  template <class T>
  static T part_of_bias(const T& whole, const Sequences& s, const Heads& heads,
                        const Heads& queries, const Heads& keys) {
    T t = narrow(whole, 0, s.number, s.count);
    t = narrow(t, 1, heads.begin, heads.count);
    t = narrow(t, 2, queries.begin, queries.count);
    return narrow(t, 3, keys.begin, keys.count);
  }

  /// dK and dV of the keys of this node, by all queries.
  void compute_key_gradients(const Heads& heads, const Step& step) {
    each_run(plan_.k_rows, [&](int, const RowRun& run, const Sequences& s) {
      const int64_t size = std::min(run.end, s.keys) - run.begin;
      if (size <= 0) return;
      const int64_t first = plan_.q_rows.begin(run.sequence), count = s.queries;
      const auto queries = [&](const Part& x) { return s.of(x).rows(first, count); };
      const auto keys = [&](const Part& x) {
        return s.of(x).rows(plan_.k_rows.row(run), size).tensor();
      };
      Args call;
      call.q = queries(step.q).tensor();
      call.k = keys(step.k);
      call.v = keys(step.v);
      call.out = queries(step.out).tensor();
      call.lse = queries(step.lse).lse();
      call.dout = queries(step.dout).tensor();
      if (p_.has(Arg::kDlse)) call.dlse = queries(step.dlse).lse();
      call.alibi_slopes = slopes(heads, s);
      call.rng_state = args_.rng_state;
      call.bias = part_of_bias(args_.bias, s, heads, {0, count}, {run.begin, size});
      call.tensors = args_.tensors;
      for (TensorBinding& t : call.tensors) t.grad = {};
      call.dq = queries(step.unused_dq).tensor();
      call.dk = keys(step.dk);
      call.dv = keys(step.dv);
      fulgur::backward(call, options_of(s, heads, 0, run.begin), run_);
    });
  }

  /// Those of the queries at hand, which need no keys: LSE knows of them.
  void compute_dsinks(const Heads& heads, const Step& step) {
    const bool whole = plan_.gathers_queries();
    if (whole && group_.rank >= plan_.head_ranks) return;       // others have the same
    std::vector<double> sinks(heads.count), sums(heads.count);  // room for any dtype
    const DType dtype = whole ? args_.sinks.dtype : DType::kF32;
    for (int64_t h = 0; h < heads.count; ++h) {
      const ConstTensor one = narrow(args_.sinks, 0, heads.begin + h, 1);
      double element = 0;  // room for any dtype
      if (on_host(one)) {
        host_.download(&element, one.data, size_of(one.dtype));
      } else {
        computing_->download(&element, one.data, size_of(one.dtype));
      }
      store_element(sinks.data(), dtype, h, load_element(&element, one.dtype, 0));
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
    std::byte* const dsinks = memory_.room(Memory::kRow, p_.hq * int64_t{sizeof(double)});
    call.dsinks = Tensor::contiguous(dsinks, dtype, {heads.count});
    call.dsinks.device = p_.device;
    Options options;
    options.invariant = p_.invariant;
    options.threads = plan_.options.threads;
    options.engine = plan_.options.engine;
    fulgur::backward(call, options, run_);
    computing_->download(sums.data(), dsinks, heads.count * size_of(dtype));
    for (int64_t h = 0; h < heads.count; ++h) {
      dsinks_[heads.begin + h] = load_element(sums.data(), dtype, h);
    }
  }

  void make_sums() {
    StepMemory counted(nullptr);
    Sums(plan_, args_, counted);
    StepMemory arena(memory_.room(Memory::kSums, counted.used()), p_.device);
    sums_ = Sums(plan_, args_, arena);
    memory_.clear(sums_.dk);
    memory_.clear(sums_.dv);
    for (const WholeGradient& g : sums_.whole) memory_.clear(g.sums);
    if (args_.dsinks.given()) dsinks_.resize(p_.hq);
  }

  /// What all ranks have computed, in the order of ranks, rounded once.
  void finish_gradients(const Order::Mark& computed) {
    if (!plan_.gathers_queries()) {
      memory_.round(sums_.dk, part(args_.dk));
      memory_.round(sums_.dv, part(args_.dv));
    }
    if (!sums_.whole.empty()) memory_.after(computed);
    for (const WholeGradient& g : sums_.whole) {
      for (int64_t at = 0; at < g.sums.shape[1]; at += Sums::kAtATime) {
        const int64_t count = std::min(Sums::kAtATime, g.sums.shape[1] - at);
        add_ranks(g.sums.rows(at, count), sums_.total.rows(0, count), memory_);
      }
      each_part(g.shaped(g.sums), g.to,
                [&](const Part& sums, const Part& to) { memory_.round(sums, to); });
    }
    if (!args_.dsinks.given()) return;
    const auto on_host = [&](void* data, DType dtype) {
      return Part::of_rows(Tensor::contiguous(data, dtype, {1, 1, p_.hq}));
    };
    std::vector<double> total(p_.hq), rounded(p_.hq);  // room for any dtype
    add_ranks(on_host(dsinks_.data(), DType::kF64), on_host(total.data(), DType::kF64), host_);
    const Part result = on_host(rounded.data(), args_.dsinks.dtype);
    host_.round(on_host(dsinks_.data(), DType::kF64), result);
    memory_.settle();  // before the host waits
    memory_.upload(args_.dsinks.data, result.data, result.bytes());
  }

  /// Sums of this rank become those of all.
  void add_ranks(const Part& sums, const Part& total, Memory& memory) const {
    memory.clear(total);
    Shipment all(group_, memory);
    for (int r = 0; r < group_.ranks; ++r) {
      all.send(r, sums);
      all.receive_sum(r, total);
    }
    all.run(false);
    memory.copy(total, sums);
  }

  const RowsPlan& plan_;
  const Problem& p_;
  Group::Impl& group_;
  const Args& args_;
  Run run_;
  Memory& host_;
  Memory& memory_;
  std::unique_ptr<Order> computing_;
  Sums sums_;
  std::vector<double> dsinks_;
  std::vector<int64_t> used_q_, used_k_;  // of each sequence, where not all rows exist
};

}  // namespace

void RowsPlan::run(const ForwardArgs& args, const Run& run) const {
  if (problem.pass != Pass::kForward) return Impl::run(args, run);
  run_as_planned(group.impl(), planned_forward, args, run,
                 [&] { Work<ForwardArgs>(*this, args, run)(); });
}

void RowsPlan::run(const BackwardArgs& args, const Run& run) const {
  if (problem.pass != Pass::kBackward) return Impl::run(args, run);
  run_as_planned(group.impl(), planned_backward, args, run,
                 [&] { Work<BackwardArgs>(*this, args, run)(); });
}

}  // namespace fulgur::distributed

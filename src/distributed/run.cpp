// A call of all ranks. A rank computes the queries of its node (`head_ranks` consecutive ranks) for
// a part of the heads, over all keys: it gathers these, calls a one-device engine for each run of
// rows, and returns the results to the ranks that have the rows. Heads are divided into steps, and
// the rows of a step are transferred while the previous step is computed. No results are merged,
// unless ranks form a ring: then each step has the keys of one rank for all heads, its own first.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <deque>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "base/check.h"
#include "base/convert.h"
#include "call/mask.h"
#include "distributed/plan.h"
#include "distributed/shared_work.h"
#include "distributed/shipment.h"
#include "distributed/step_calls.h"

namespace fulgur::distributed {
namespace {

/// Executes transfers one after the other: in threads, while the caller computes; or, with a single
/// step or on a GPU, whose streams run on their own, when the caller waits for the result.
class TransferQueue {
 public:
  explicit TransferQueue(bool in_threads)
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

/// Calls visit(part, part) for parts that cover two tensors of the same shape, of which the first
/// is contiguous. The columns of parts are contiguous: if those of the second tensor are not, parts
/// have one column.
template <class Visit>
void each_part(const Tensor& x, const Tensor& y, const Visit& visit) {
  const bool apart = y.rank > 0 && y.shape[y.rank - 1] > 1 && y.strides[y.rank - 1] != 1;
  const int split = apart && y.rank == Tensor::kMaxRank ? 1 : 0;  // splits the first dimension
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
        memory_(*plan.memory),
        calls_(plan, args, run) {
    if constexpr (!kBackward) {
      if (plan.work_bytes > 0) shared_.emplace(plan, args, calls_, memory_);
    }
  }

  void operator()() {
    TransferQueue transfers(p_.device == Device{} && plan_.steps > 1);
    // The last two steps, and the events after which their memory may be reused.
    std::array<std::optional<Step>, 2> steps;
    std::array<Events, 2> computed;
    computed.fill(calls_.record());
    const auto fetched = [&](int64_t number) {
      StepMemory own(memory_.buffer(buffer_of(number), plan_.step_bytes), p_.device);
      StepMemory shared(plan_.shares_rows() ? memory_.shared_buffer() : nullptr);
      Step& step =
          steps[number % 2].emplace(plan_, plan_.shares_rows() ? shared : own, own, number);
      if (plan_.queries_stay()) calls_.set_queries(number, step);
      return transfers.add([this, number, step, events = computed[number % 2]] {
        wait(events);
        if (!plan_.ring || number > 0) fetch(number, step);
      });
    };
    std::shared_future<void> arrived = fetched(0);
    for (int64_t number = 0; number < plan_.steps; ++number) {
      arrived.get();
      calls_.wait(memory_.record());
      const Step step = *steps[number % 2];
      if (number + 1 < plan_.steps) arrived = fetched(number + 1);
      shared_ ? shared_->compute(step) : calls_.compute(number, step);
      computed[number % 2] = calls_.record();
      if (!kBackward && plan_.queries_stay()) continue;
      transfers.add([this, number, step, events = computed[number % 2]] {
        return_results(number, step, events);
      });
    }
    if (shared_) {
      memory_.barrier();
      shared_->collect();
    }
    calls_.join();
    if (!kBackward && plan_.ring) calls_.round_merged();
    transfers
        .add([this, events = calls_.record()] {
          if constexpr (kBackward) finish_gradients(events);
          memory_.complete_transfers();
        })
        .get();
    calls_.wait(memory_.record());
    wait(calls_.record());  // the next run may compute in another stream
  }

 private:
  /// The buffer of a step.
  static Memory::Use buffer_of(int64_t number) {
    return number % 2 == 0 ? Memory::kStep : Memory::kNextStep;
  }
  using Events = typename StepCalls<Args>::Events;
  void wait(const Events& events) {
    for (const Queue::Event& event : events) memory_.wait(event);
  }

  static Part part(const ConstTensor& t) { return Part::of_rows(t); }
  static Part part(const Tensor& t) { return Part::of_rows(t); }

  void fetch(int64_t number, const Step& step) {
    Shipment all(group_, memory_);
    // A rank writes its own rows to a shared buffer once, for all ranks.
    const auto brings = [&](int r) { return !plan_.shares_rows() || r == group_.rank; };
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
      if (plan_.ring) {
        all.send(plan_.reader(number), local);
        all.receive(plan_.source(number), to);
        return;
      }
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
    all.run(plan_.shares_rows());
    if (shared_) shared_->offer();
    if (plan_.shares_rows()) memory_.barrier();
  }

  /// Returns the results of a step to the ranks that have the rows.
  void return_results(int64_t number, const Step& step, const Events& computed) {
    wait(computed);
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
      std::deque<Part>
          terms;  // sums so far, for each run of keys and each head_ranks-th of the heads
      const auto keys = [&](const Part& from, const Part& of_sums, const Part& gradient) {
        if (plan_.ring) {
          all.send(plan_.source(number), from);
          all.receive_sum(plan_.reader(number), of_sums);
          return;
        }
        const auto& own = plan_.k_rows.of(plan_.me);
        const size_t first = terms.size();
        terms.resize(first + plan_.head_ranks * own.size());
        for (int r = 0; r < group_.ranks; ++r) {
          if (!sums && !plan_.same_node(plan_.me, r)) continue;
          for (const RowRun& run : plan_.k_rows.of(r)) {
            all.send(r, from.rows(plan_.k_rows.row(run), run.size()));
          }
          const Heads heads = plan_.heads(r, number);
          for (size_t i = 0; i < own.size(); ++i) {
            const auto of_run = [&](const Part& x) {
              return x.heads(heads.begin, heads.count).rows(own[i].place, own[i].size());
            };
            if (!sums) {
              all.receive(r, of_run(gradient));
              continue;
            }
            Part& term = terms[first + r % plan_.head_ranks * own.size() + i];
            add_term(all, r, term, plan_.keeps_key_sums() ? of_run(of_sums) : Part{},
                     of_run(gradient));
          }
        }
      };
      keys(step.dk, calls_.sums.dk, part(args_.dk));
      keys(step.dv, calls_.sums.dv, part(args_.dv));
      // Ranks that compute the same heads have their sums at the same place of the buffer of a
      // step.
      if (sums && !plan_.ring && plan_.head_ranks == 1 && plan_.steps <= 2 &&
          memory_.fetches_in_place()) {
        const Memory::Use use = buffer_of(number);
        all.run_in(use, memory_.buffer(use, plan_.step_bytes));
      } else {
        all.run((!sums && plan_.head_ranks == 1) || (plan_.ring && number == 0));
      }
    }
  }

  /// Receives the term of a rank: adds it to those of earlier ranks, and rounds with the last one.
  void add_term(Shipment& all, int rank, Part& term, const Part& sums, const Part& gradient) {
    const bool first = rank < plan_.head_ranks, last = rank + plan_.head_ranks >= group_.ranks;
    all.receive(rank, gradient.as(plan_.sum_dtype()), [=, this, &term](const Part& came) {
      const Part& to = last ? gradient : sums;
      if (!first) memory_.sum(came, term, to);
      if (first && last) memory_.round(came, to);
      term = first ? came : to;
    });
  }

  /// Adds gradients that all ranks have computed, in the order of ranks, and rounds them once.
  void finish_gradients(const Events& computed) {
    if (plan_.ring) {
      wait(computed);
      memory_.round(calls_.sums.dq, part(args_.dq));
      memory_.round(calls_.sums.dk, part(args_.dk));
      memory_.round(calls_.sums.dv, part(args_.dv));
    }
    if (!calls_.sums.whole.empty()) wait(computed);
    for (const WholeGradient& g : calls_.sums.whole) {
      for (int64_t at = 0; at < g.sums.shape[1]; at += Sums::kAtATime) {
        const int64_t count = std::min(Sums::kAtATime, g.sums.shape[1] - at);
        add_ranks(g.sums.rows(at, count), calls_.sums.total.rows(0, count), memory_);
      }
      each_part(g.shaped(g.sums), g.to,
                [&](const Part& sums, const Part& to) { memory_.round(sums, to); });
    }
    if (!args_.dsinks.given()) return;
    const auto on_host = [&](void* data, DType dtype) {
      return Part::of_rows(Tensor::contiguous(data, dtype, {1, 1, p_.hq}));
    };
    std::vector<double> total(p_.hq), rounded(p_.hq);  // of 8 bytes, as large as any dtype
    add_ranks(on_host(calls_.dsinks.data(), DType::kF64), on_host(total.data(), DType::kF64),
              *plan_.host_memory);
    const Part result = on_host(rounded.data(), args_.dsinks.dtype);
    plan_.host_memory->round(on_host(calls_.dsinks.data(), DType::kF64), result);
    memory_.complete_transfers();  // upload() waits for the stream
    memory_.upload(args_.dsinks.data, result.data, result.bytes());
  }

  /// Replaces the sums of this rank by those of all ranks.
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
  Memory& memory_;
  StepCalls<Args> calls_;
  std::optional<SharedWork> shared_;
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

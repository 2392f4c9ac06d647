// A call of all ranks. Rank c computes the queries of its node, `head_ranks` ranks side by side,
// for a part of the heads, over all keys: it fetches these, calls the one-device engine for each
// run of rows, and returns what it has computed to the ranks that have the rows. The heads go in
// steps, and what a step needs comes while the one before is computed. No result is merged, but
// where ranks form a ring: a step then has the keys of one rank, for all heads, its own first.
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

/// What is sent and received, one after the other, while other work goes on: in threads, or, where
/// a stream computes meanwhile or nothing does, when it is waited for.
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
    Line line(p_.device == Device{} && plan_.steps > 1);
    // What steps compute with, and up to where memory of earlier ones is in use.
    std::array<std::optional<Step>, 2> steps;
    std::array<Marks, 2> computed;
    computed.fill(calls_.marks());
    const auto fetched = [&](int64_t number) {
      StepMemory own(memory_.room(room_of(number), plan_.step_bytes), p_.device);
      StepMemory common(plan_.in_common() ? memory_.common() : nullptr);
      Step& step = steps[number % 2].emplace(plan_, plan_.in_common() ? common : own, own, number);
      if (plan_.queries_stay()) calls_.set_queries(number, step);
      return line.add([this, number, step, marks = computed[number % 2]] {
        after(marks);
        if (!plan_.ring || number > 0) fetch(number, step);
      });
    };
    std::shared_future<void> arrived = fetched(0);
    for (int64_t number = 0; number < plan_.steps; ++number) {
      arrived.get();
      calls_.after(memory_.mark());
      const Step step = *steps[number % 2];
      if (number + 1 < plan_.steps) arrived = fetched(number + 1);
      shared_ ? shared_->compute(step) : calls_.compute(number, step);
      computed[number % 2] = calls_.marks();
      if (!kBackward && plan_.queries_stay()) continue;
      line.add(
          [this, number, step, marks = computed[number % 2]] { give_back(number, step, marks); });
    }
    if (shared_) {
      memory_.meet();
      shared_->collect();
    }
    calls_.join();
    if (!kBackward && plan_.ring) calls_.round_merged();
    line.add([this, marks = calls_.marks()] {
          if constexpr (kBackward) finish_gradients(marks);
          memory_.settle();
        })
        .get();
    calls_.after(memory_.mark());
    after(calls_.marks());  // what comes next may compute elsewhere
  }

 private:
  /// That of a step.
  static Memory::Use room_of(int64_t number) {
    return number % 2 == 0 ? Memory::kStep : Memory::kNextStep;
  }
  using Marks = typename StepCalls<Args>::Marks;
  void after(const Marks& marks) {
    for (const Order::Mark& mark : marks) memory_.after(mark);
  }

  static Part part(const ConstTensor& t) { return Part::of_rows(t); }
  static Part part(const Tensor& t) { return Part::of_rows(t); }

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
    all.run(plan_.in_common());
    if (shared_) shared_->offer();
    if (plan_.in_common()) memory_.meet();
  }

  /// To the ranks that have the rows.
  void give_back(int64_t number, const Step& step, const Marks& computed) {
    after(computed);
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
      std::deque<Part> terms;  // of each run of keys and the heads that some ranks compute
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
      // Sums of ranks that compute the same heads lie alike in all of their memory.
      if (sums && !plan_.ring && plan_.head_ranks == 1 && plan_.steps <= 2 &&
          memory_.offers_steps()) {
        const Memory::Use use = room_of(number);
        all.run_in(use, memory_.room(use, plan_.step_bytes));
      } else {
        all.run((!sums && plan_.head_ranks == 1) || (plan_.ring && number == 0));
      }
    }
  }

  /// What comes of a rank is added to what came of those before it, and rounded with the last one.
  void add_term(Shipment& all, int rank, Part& term, const Part& sums, const Part& gradient) {
    const bool first = rank < plan_.head_ranks, last = rank + plan_.head_ranks >= group_.ranks;
    all.receive(rank, gradient.as(plan_.sum_dtype()), [=, this, &term](const Part& came) {
      const Part& to = last ? gradient : sums;
      if (!first) memory_.sum(came, term, to);
      if (first && last) memory_.round(came, to);
      term = first ? came : to;
    });
  }

  /// What all ranks have computed, in the order of ranks, rounded once.
  void finish_gradients(const Marks& computed) {
    if (plan_.ring) {
      after(computed);
      memory_.round(calls_.sums.dq, part(args_.dq));
      memory_.round(calls_.sums.dk, part(args_.dk));
      memory_.round(calls_.sums.dv, part(args_.dv));
    }
    if (!calls_.sums.whole.empty()) after(computed);
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
    std::vector<double> total(p_.hq), rounded(p_.hq);  // room for any dtype
    add_ranks(on_host(calls_.dsinks.data(), DType::kF64), on_host(total.data(), DType::kF64),
              *plan_.host_memory);
    const Part result = on_host(rounded.data(), args_.dsinks.dtype);
    plan_.host_memory->round(on_host(calls_.dsinks.data(), DType::kF64), result);
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

#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/check.h"
#include "call/check_tensors.h"
#include "call/make_problem.h"
#include "call/problem.h"
#include "distributed/group/group.h"
#include "distributed/group/memory.h"
#include "distributed/sharding.h"
#include "fulgur/distributed/plan.h"

namespace fulgur {
namespace distributed {

/// Heads [begin, begin + count).
struct Heads {
  int64_t begin = 0, count = 0;
};

}  // namespace distributed

/// The interface of plans: RowsPlan and PagesPlan.
struct DistributedPlan::Impl {
  virtual ~Impl() = default;
  virtual void run(const ForwardArgs& args, const Run& run) const;
  virtual void run(const BackwardArgs& args, const Run& run) const;
  virtual std::string explain() const = 0;
  virtual int64_t workspace_bytes() const = 0;
};

namespace distributed {

/// A plan that distributes the rows of sequences among ranks.
struct RowsPlan final : DistributedPlan::Impl {
  template <class Args>
  RowsPlan(const Args& args, const Options& in_options, const Group& in_group,
           const Distribution& in);
  void run(const ForwardArgs& args, const Run& run) const override;
  void run(const BackwardArgs& args, const Run& run) const override;
  std::string explain() const override;
  /// Two steps, if there are as many, the data of the current exchange and, on GPUs, of the last
  /// one. A rank counts its fraction of shared buffers.
  int64_t workspace_bytes() const override {
    const int64_t exchanges = problem.device == Device{} ? 1 : 2;
    return (std::min<int64_t>(steps, 2) + exchanges) * step_bytes +
           (Memory::kSharedBuffers * shared_bytes + work_bytes) / group.size() + sum_bytes;
  }

  /// The kv heads that a rank computes in a step.
  Heads heads(int rank, int64_t step) const {
    if (ring) return {0, problem.hk};
    const int64_t all = problem.hk / head_ranks, first = rank % head_ranks * all;
    const int64_t begin = step * all / steps, end = (step + 1) * all / steps;
    return {first + begin, end - begin};
  }
  /// The q heads of kv heads.
  Heads q_heads(const Heads& kv) const {
    return {kv.begin * problem.group(), kv.count * problem.group()};
  }
  /// In a ring: the rank whose keys this rank receives in a step, and the one that receives its
  /// own.
  int source(int64_t step) const { return static_cast<int>((me + step) % group.size()); }
  int reader(int64_t step) const {
    return static_cast<int>((me + group.size() - step) % group.size());
  }
  /// How many keys this rank has in a step.
  int64_t keys(int64_t step) const { return ring ? k_rows.count(source(step)) : k_rows.total(); }
  bool same_node(int a, int b) const { return a / head_ranks == b / head_ranks; }
  /// Whether rank `computing` needs the queries of rank `source` for its heads. A backward pass
  /// that gathers queries needs all.
  bool has_queries_of(int computing, int source) const {
    return gathers_queries() || same_node(computing, source);
  }
  bool gathers_queries() const { return problem.pass == Pass::kBackward && problem.invariant; }
  /// The first row of a run of rank `source` among the queries that rank `computing` has.
  int64_t place(int computing, int source, const RowRun& run) const {
    if (gathers_queries()) return q_rows.row(run);
    int64_t at = run.place;
    for (int r = computing / head_ranks * head_ranks; r < source; ++r) at += q_rows.count(r);
    return at;
  }
  int64_t queries() const {
    if (gathers_queries()) return q_rows.total();
    int64_t rows = 0;
    for (int r = 0; r < group.size(); ++r) rows += same_node(r, me) ? q_rows.count(r) : 0;
    return rows;
  }
  /// How many rows of each sequence a call uses (seqused); empty: all.
  std::vector<int64_t> used_queries(const VarLen& lengths) const;
  std::vector<int64_t> used_keys(const VarLen& lengths) const;
  /// Whether sums of dk and dv need memory: those of two ranks are rounded as they are added.
  bool keeps_key_sums() const {
    return !gathers_queries() && (ring || group.size() > 2 * head_ranks);
  }
  /// Whether a rank computes its own queries alone, which are not transferred then.
  bool queries_stay() const { return head_ranks == 1 && !gathers_queries(); }
  /// Whether ranks share the buffer of gathered rows, as all of them need the same rows.
  bool shares_rows() const { return memory->has_shared_buffers() && head_ranks == 1 && !ring; }
  DType sum_dtype() const { return problem.dtypes.q == DType::kF64 ? DType::kF64 : DType::kF32; }

  Group group;
  int me;
  Options options;
  Problem problem;  ///< the rows of this rank, as a call of its own
  Sharding sharding;
  int head_ranks;
  bool ring;
  bool packed = false;
  Rows q_rows, k_rows;
  int64_t steps = 1;
  int64_t step_bytes = 0, shared_bytes = 0;  ///< of a step: memory of its own, and shared by ranks
  int64_t work_bytes = 0;                    ///< of Offers; 0: each rank computes its own rows only
  Memory* memory = nullptr;                  ///< of the device of the tensors
  Memory* host_memory = nullptr;             ///< for dsinks
  int64_t sum_bytes = 0;                     ///< of Sums
  ForwardArgs planned_forward;
  BackwardArgs planned_backward;

 private:
  template <class Args>
  void measure(const Args& args);
  template <class Args>
  void choose_steps(const Args& args);
  void measure_shared_work();
};

/// Allocates the parts of a step in a buffer; without a base it only counts bytes.
class StepMemory {
 public:
  explicit StepMemory(std::byte* base, Device device = {}) : base_(base), device_(device) {}
  Part rows(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim) {
    return take({nullptr,
                 dtype,
                 {batch, rows, heads, dim},
                 {rows * heads * dim, heads * dim, dim, 1},
                 device_});
  }
  Part lse(DType dtype, int64_t batch, int64_t rows, int64_t heads) {
    return take({nullptr, dtype, {batch, rows, heads, 1}, {rows * heads, 1, rows, 1}, device_});
  }
  int64_t used() const { return used_; }

 private:
  Part take(Part part) {
    if (base_ != nullptr) part.data = base_ + used_;
    used_ += (part.bytes() + 63) / 64 * 64;
    return part;
  }
  std::byte* base_;
  Device device_;
  int64_t used_ = 0;
};

/// What a rank computes with in a step: queries and all keys of some heads or, in a ring, the keys
/// of one rank. Queries that are not transferred have no memory here.
struct Step {
  Part q, k, v, out, lse;       // both passes
  Part dout, dlse, dq, dk, dv;  // backward; dk and dv: sums, or gradients
  Part part_dk, part_dv;        // of one call, before they are added to dk and dv

  Step() = default;
  /// `gathered`: the memory of gathered rows.
  Step(const RowsPlan& plan, StepMemory& gathered, StepMemory& arena, int64_t step) {
    const Problem& p = plan.problem;
    const int64_t batch = p.batch, queries = plan.queries(), keys = plan.keys(step);
    const int64_t hk = plan.heads(plan.me, step).count, hq = hk * p.group();
    k = gathered.rows(p.dtypes.k, batch, keys, hk, p.d);
    v = gathered.rows(p.dtypes.v, batch, keys, hk, p.dv);
    const bool backward = p.pass == Pass::kBackward;
    if (!plan.queries_stay()) {
      q = gathered.rows(p.dtypes.q, batch, queries, hq, p.d);
      out = gathered.rows(p.dtypes.out, batch, queries, hq, p.dv);
      if (p.has(Arg::kLse)) lse = gathered.lse(p.lse_dtype(), batch, queries, hq);
      if (backward) {
        dout = gathered.rows(p.dtypes.out, batch, queries, hq, p.dv);
        if (p.has(Arg::kDlse)) dlse = gathered.lse(p.lse_dtype(), batch, queries, hq);
        dq = arena.rows(p.dtypes.q, batch, queries, hq, p.d);
      }
    }
    if (!backward) return;
    const bool gathers = plan.gathers_queries();
    const DType gradient = gathers ? p.dtypes.k : plan.sum_dtype();
    dk = arena.rows(gradient, batch, keys, hk, p.d);
    dv = arena.rows(gradient, batch, keys, hk, p.dv);
    if (gathers) return;
    part_dk = arena.rows(gradient, batch, keys, hk, p.d);
    part_dv = arena.rows(gradient, batch, keys, hk, p.dv);
  }
};

/// The number of steps in which a rank computes so many kv heads, unless max_workspace requires
/// more.
int64_t steps_of(Pass pass, bool on_host, int64_t heads);

/// The memory of a device, by which ranks of a group exchange tensors there. Collective in its
/// first call for a device.
Memory& memory_of(Group::Impl& group, Device device);

/// The gradient of a bias or of a tensor of expressions, which every rank gets completely: the sum
/// over the calls of a rank, then over ranks in their order.
struct WholeGradient {
  static constexpr int64_t kColumns = 32;
  Tensor to;
  Part sums;     // its elements, contiguous, in rows of kColumns
  Part of_call;  // the gradient of one call, likewise

  WholeGradient(const Tensor& t, DType of, StepMemory& arena) : to(t) {
    const bool host = t.device == Device{};
    const int64_t rows = (t.numel() + kColumns - 1) / kColumns;
    sums = arena.rows(host ? DType::kF64 : DType::kF32, 1, rows, 1, kColumns);
    of_call = arena.rows(host && of == DType::kF64 ? of : DType::kF32, 1, rows, 1, kColumns);
  }
  /// A part with the shape of the tensor.
  Tensor shaped(const Part& x) const {
    Tensor t = Tensor::contiguous(x.data, x.dtype, std::span(to.shape).first(to.rank));
    t.device = x.device;
    return t;
  }
};

/// Sums over the steps of a run and, in a ring, the results of one call before they are added.
struct Sums {
  static constexpr int64_t kAtATime = 1 << 13;  // rows of a WholeGradient that ranks exchange
  Part dk, dv;                                  // the rows of this rank
  Part out, lse, of_call_out, of_call_lse;      // a ring's forward pass: merged results
  Part dq, of_call_dq;                          // a ring's backward pass
  std::deque<WholeGradient> whole;              // the bias, then tensors
  Part total;                                   // of all ranks, kAtATime rows

  Sums() = default;
  Sums(const RowsPlan& plan, const ForwardArgs&, StepMemory& arena) {
    if (!plan.ring) return;
    const Problem& p = plan.problem;
    const int64_t rows = plan.queries();
    out = arena.rows(plan.sum_dtype(), p.batch, rows, p.hq, p.dv);
    lse = arena.lse(p.lse_dtype(), p.batch, rows, p.hq);
    of_call_out = arena.rows(p.dtypes.out, p.batch, rows, p.hq, p.dv);
    of_call_lse = arena.lse(p.lse_dtype(), p.batch, rows, p.hq);
  }
  Sums(const RowsPlan& plan, const BackwardArgs& args, StepMemory& arena) {
    const Problem& p = plan.problem;
    if (plan.ring) {
      dq = arena.rows(plan.sum_dtype(), p.batch, plan.queries(), p.hq, p.d);
      of_call_dq = arena.rows(p.dtypes.q, p.batch, plan.queries(), p.hq, p.d);
    }
    if (plan.keeps_key_sums()) {
      const int64_t rows = plan.k_rows.count(plan.me);
      dk = arena.rows(plan.sum_dtype(), p.batch, rows, p.hk, p.d);
      dv = arena.rows(plan.sum_dtype(), p.batch, rows, p.hk, p.dv);
    }
    if (args.dbias.given()) whole.emplace_back(args.dbias, args.bias.dtype, arena);
    for (const TensorBinding& t : args.tensors) {
      if (t.grad.given()) whole.emplace_back(t.grad, t.tensor.dtype, arena);
    }
    if (whole.empty()) return;
    total = arena.rows(whole.front().sums.dtype, 1, kAtATime, 1, WholeGradient::kColumns);
  }
};

/// The work buffer of a forward pass, in which ranks of one machine steal work (SharedWork).
struct Offers {
  /// The next unit of a rank that may be claimed, and the number of its units.
  struct alignas(64) Counter {
    int64_t next, count;
  };
  /// Queries and results of a rank, which other ranks read and write.
  struct Rank {
    Part q, out, lse;
  };
  Counter* counters;  // of each rank
  std::vector<Rank> ranks;

  Offers(const RowsPlan& plan, StepMemory& arena) {
    const Problem& p = plan.problem;
    const int size = plan.group.size();
    const Part of_counters = arena.rows(DType::kU8, 1, size, 1, sizeof(Counter));
    counters = reinterpret_cast<Counter*>(of_counters.data);
    for (int r = 0; r < size; ++r) {
      const int64_t count = plan.q_rows.count(r);
      // The rows of a head are contiguous, so that rows that are not offered touch no pages.
      const auto rows = [&](DType dtype, int64_t dim) {
        Part part = arena.rows(dtype, p.batch, count, p.hq, dim);
        part.strides = {p.hq * count * dim, dim, count * dim, 1};
        return part;
      };
      Rank& of = ranks.emplace_back();
      of.q = rows(p.dtypes.q, p.d);
      of.out = rows(p.dtypes.out, p.dv);
      if (p.has(Arg::kLse)) of.lse = arena.lse(p.lse_dtype(), p.batch, count, p.hq);
    }
  }
};

/// What must be the same on all ranks. `Args`: ForwardArgs or BackwardArgs.
template <class Args>
Fields fields_of(const Args& args, const Problem& problem, const Distribution& distribution);
/// The text of a field with the values of lengths.
std::string values_of(const ConstTensor& lengths);

/// Checks the arguments of a run and calls body(). If either throws, the group is dead.
template <class Args, class Body>
void run_as_planned(Group::Impl& group, const Args& planned, const Args& args, const Run& run,
                    const Body& body) {
  try {
    if (run.workspace.data != nullptr) fail("workspace", "given with a group, which has its own");
    check_as_planned(planned, args);
    check_memory(args);
    check_random_numbers(args, run);
    body();
  } catch (const std::exception& error) {
    group.leave(fmt::format("rank {} failed: {}", group.rank, error.what()));
    throw;
  }
}

}  // namespace distributed
}  // namespace fulgur

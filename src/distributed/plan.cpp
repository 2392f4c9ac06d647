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
#include "call/lengths.h"
#include "call/make_problem.h"
#include "distributed/sharding.h"
#include "distributed/shipment.h"

namespace fulgur {

using distributed::Fields;
using distributed::Part;
using distributed::RowRun;
using distributed::Rows;
using distributed::Shipment;

namespace {

constexpr int64_t kSteps = 4;  // of heads: the transfers of one run during the products of another

const char* name_of(Sharding sharding) {
  switch (sharding) {
    case Sharding::kContiguous:
      return "contiguous";
    case Sharding::kZigzag:
      return "zigzag";
    case Sharding::kByArea:
      break;
  }
  return "by_area";
}

/// The tensors of rows and those of LSE, with their names.
template <class Args, class Visit>
void each_rows(Args& args, const Visit& visit) {
  visit("q", args.q);
  visit("k", args.k);
  visit("v", args.v);
  visit("out", args.out);
  if constexpr (requires { args.dout; }) {
    visit("dout", args.dout);
    visit("dq", args.dq);
    visit("dk", args.dk);
    visit("dv", args.dv);
  }
}
template <class Args, class Visit>
void each_lse(Args& args, const Visit& visit) {
  visit("lse", args.lse);
  if constexpr (requires { args.dlse; }) visit("dlse", args.dlse);
}

template <class T>
void to_batch(const char* name, bool packed, bool of_rows, T& t) {
  if (!packed || !t.given()) return;
  const int rank = of_rows ? 3 : 2;
  if (t.rank != rank) {
    fail(name, "got {}, want {}", t.describe(),
         of_rows ? "(total, heads, dim) with cu_seqlens_q" : "(hq, total_q) with cu_seqlens_q");
  }
  const Part part = of_rows ? Part::of_rows(t) : Part::of_lse(t);
  const Tensor batch = of_rows ? part.tensor() : part.lse();
  t.rank = batch.rank;
  t.shape = batch.shape;
  t.strides = batch.strides;
}

/// The rows of a rank as a call of its own, which has the shapes and dtypes of what it computes.
template <class Args>
Args own_call(Args args) {
  const bool packed = args.lengths.cu_seqlens_q.given();
  each_rows(args, [&](const char* name, auto& t) { to_batch(name, packed, true, t); });
  each_lse(args, [&](const char* name, auto& t) { to_batch(name, packed, false, t); });
  args.lengths = {};
  return args;
}

template <class Args>
void check_supported(const Args& args, const Options& options) {
  const auto refuse = [](const char* name, const ConstTensor& t) {
    if (t.given()) fail(name, "given with a group, which takes none");
  };
  refuse("seqused_q", args.lengths.seqused_q);
  refuse("seqused_k", args.lengths.seqused_k);
  refuse("bias", args.bias);
  if constexpr (requires { args.cache; }) {
    refuse("page_table", args.cache.page_table);
    refuse("cache_batch_idx", args.cache.cache_batch_idx);
    refuse("leftpad_k", args.cache.leftpad_k);
    refuse("tree_mask", args.tree_mask);
    if (appends(args)) fail("append", "given with a group, which takes none");
  }
  if (options.score_mod.given()) fail("score_mod", "given with a group, which takes none");
  if (options.mask_mod.given()) fail("mask_mod", "given with a group, which takes none");
  if (options.origin != Origin{}) fail("origin", "given with a group, which sets it");
  for (const auto& [name, t] :
       {std::pair{"q", &args.q}, std::pair{"k", &args.k}, std::pair{"v", &args.v}}) {
    if (!is_float(t->dtype)) fail(name, "got {}, want f32, bf16, f16 or f64", name_of(t->dtype));
    if (on_host(*t)) continue;
    throw Error(Status::kUnsupported,
                fmt::format("{}: got {}, want cpu: groups compute there alone", name,
                            fulgur::name_of(t->device)));
  }
}

/// Where packed sequences begin and end, as every rank knows them; one sequence without.
std::vector<int64_t> ends_of(const char* name, const ConstTensor& cu) {
  check_indices(name, cu, cu.rank == 1 ? cu.shape[0] : -1, "(batch + 1)", {});
  check_data(name, cu);
  longest_sequence(name, cu, "rows", INT32_MAX);
  const auto* const ends = static_cast<const int32_t*>(cu.data);
  return {ends, ends + cu.shape[0]};
}

/// Heads [begin, begin + count).
struct Heads {
  int64_t begin = 0, count = 0;
};

}  // namespace

struct DistributedPlan::Impl {
  template <class Args>
  Impl(const Args& args, const Options& in_options, const Group& in_group, const Distribution& in);

  /// The kv heads that a rank computes in a step.
  Heads heads(int rank, int64_t step) const {
    const int64_t all = problem.hk / head_ranks, first = rank % head_ranks * all;
    const int64_t begin = step * all / steps, end = (step + 1) * all / steps;
    return {first + begin, end - begin};
  }
  /// The q heads of these.
  Heads q_heads(const Heads& kv) const {
    return {kv.begin * problem.group(), kv.count * problem.group()};
  }
  bool same_node(int a, int b) const { return a / head_ranks == b / head_ranks; }
  /// Whether a rank has the queries of another one, for its heads: the backward pass by gathered
  /// queries has all.
  bool has_queries_of(int computing, int source) const {
    return gathers_queries() || same_node(computing, source);
  }
  bool gathers_queries() const { return problem.pass == Pass::kBackward && problem.invariant; }
  /// Where a run of a rank lies among the queries that rank `computing` has.
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
  DType sum_dtype() const { return problem.dtypes.q == DType::kF64 ? DType::kF64 : DType::kF32; }

  Group group;
  int me;
  Options options;
  Problem problem;  ///< of the rows of this rank, as a call of its own
  Sharding sharding;
  int head_ranks;
  bool packed = false;
  Rows q_rows, k_rows;
  int64_t steps = 1;
  int64_t step_bytes = 0;  ///< memory of a step
  ForwardArgs planned_forward;
  BackwardArgs planned_backward;
};

namespace {

using Impl = DistributedPlan::Impl;

/// Memory of a step; without a base it only counts.
class StepMemory {
 public:
  explicit StepMemory(std::byte* base) : base_(base) {}
  Part rows(DType dtype, int64_t batch, int64_t rows, int64_t heads, int64_t dim) {
    return take(
        {nullptr, dtype, {batch, rows, heads, dim}, {rows * heads * dim, heads * dim, dim, 1}});
  }
  Part lse(DType dtype, int64_t batch, int64_t rows, int64_t heads) {
    return take({nullptr, dtype, {batch, rows, heads, 1}, {rows * heads, 1, rows, 1}});
  }
  int64_t used() const { return used_; }

 private:
  Part take(Part part) {
    if (base_ != nullptr) part.data = base_ + used_;
    used_ += (part.bytes() + 63) / 64 * 64;
    return part;
  }
  std::byte* base_;
  int64_t used_ = 0;
};

/// What a rank computes with in a step: some queries and all keys, of some heads.
struct Step {
  Part q, k, v, out, lse;            // both passes
  Part dout, dlse, dq, dk, dv;       // backward; dk and dv: sums, or gradients
  Part unused_dq, part_dk, part_dv;  // of a call

  Step(const Impl& plan, StepMemory& arena, int64_t step) {
    const Problem& p = plan.problem;
    const int64_t batch = p.batch, queries = plan.queries(), keys = plan.k_rows.total();
    const int64_t hk = plan.heads(plan.me, step).count, hq = hk * p.group();
    q = arena.rows(p.dtypes.q, batch, queries, hq, p.d);
    k = arena.rows(p.dtypes.k, batch, keys, hk, p.d);
    v = arena.rows(p.dtypes.v, batch, keys, hk, p.dv);
    out = arena.rows(p.dtypes.out, batch, queries, hq, p.dv);
    if (p.has(Arg::kLse)) lse = arena.lse(p.lse_dtype(), batch, queries, hq);
    if (p.pass == Pass::kForward) return;
    dout = arena.rows(p.dtypes.out, batch, queries, hq, p.dv);
    if (p.has(Arg::kDlse)) dlse = arena.lse(p.lse_dtype(), batch, queries, hq);
    dq = arena.rows(p.dtypes.q, batch, queries, hq, p.d);
    const bool gathers = plan.gathers_queries();
    const DType gradient = gathers ? p.dtypes.k : plan.sum_dtype();
    dk = arena.rows(gradient, batch, keys, hk, p.d);
    dv = arena.rows(gradient, batch, keys, hk, p.dv);
    if (gathers) unused_dq = arena.rows(p.dtypes.q, batch, queries, hq, p.d);
    part_dk = arena.rows(gradient, batch, keys, hk, p.d);
    part_dv = arena.rows(gradient, batch, keys, hk, p.dv);
  }
};

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
void run_plan(const Impl& plan, const Args& planned, const Args& args, const Run& run) {
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

template <class Args>
DistributedPlan::Impl::Impl(const Args& args, const Options& in_options, const Group& in_group,
                            const Distribution& in)
    : group(in_group),
      me(in_group.rank()),
      options(in_options),
      sharding(in.sharding),
      head_ranks(in.head_ranks) {
  const ConstTensor &cu_q = args.lengths.cu_seqlens_q, &cu_k = args.lengths.cu_seqlens_k;
  const int ranks = group.size();
  std::vector<int64_t> q_ends, k_ends;
  std::optional<Error> error;
  Fields fields;
  try {
    check_supported(args, options);
    packed = cu_q.given();
    if (packed) q_ends = ends_of("cu_seqlens_q", cu_q);
    if (packed) k_ends = cu_k.given() ? ends_of("cu_seqlens_k", cu_k) : q_ends;
    if (!packed && cu_k.given()) fail("cu_seqlens_q", "not given, want it with cu_seqlens_k");
    if (q_ends.size() != k_ends.size()) {
      fail("cu_seqlens_k", "has {} sequences, want the {} of cu_seqlens_q", k_ends.size() - 1,
           q_ends.size() - 1);
    }
    if (sharding == Sharding::kByArea && q_ends != k_ends) {
      fail("cu_seqlens_k", "differs from cu_seqlens_q, want the same for rows by area");
    }
    Args own = own_call(args);
    // Slopes of packed sequences are those of their batch.
    if (packed && own.alibi_slopes.rank == 2) own.alibi_slopes.shape[0] = 1;
    problem = make_problem(own, options);
    problem.batch = own.q.shape[0];  // also of a rank that has no rows
    problem.sq = own.q.shape[1];
    problem.sk = own.k.shape[1];
    if (head_ranks < 1 || ranks % head_ranks != 0 || problem.hk % head_ranks != 0) {
      fail("head_ranks", "got {}, want a divisor of the {} ranks and of the {} heads of k",
           head_ranks, ranks, problem.hk);
    }
    const Problem& p = problem;
    const auto same = [&](const char* name, const auto& value) {
      fields.emplace_back(name, fmt::format("{}", value));
    };
    same("pass", p.pass == Pass::kForward ? "forward" : "backward");
    const auto rows = [&](DType dtype, int64_t heads, int64_t dim) {
      return fmt::format("{}, {} heads of {} columns in a batch of {}", fulgur::name_of(dtype),
                         heads, dim, p.batch);
    };
    same("q", rows(p.dtypes.q, p.hq, p.d));
    same("k", rows(p.dtypes.k, p.hk, p.d));
    same("v", rows(p.dtypes.v, p.hk, p.dv));
    same("sharding", name_of(sharding));
    same("head_ranks", head_ranks);
    same("window_left", p.mask.left);
    same("window_right", p.mask.right);
    same("chunk", p.mask.chunk);
    same("top_left", p.mask.top_left);
    same("scale", p.scale);
    same("softcap", p.softcap);
    same("dropout_p", p.dropout_p);
    same("invariant", p.invariant);
    same("max_workspace", p.max_workspace);
    for_each_tensor(
        [&](const TensorRule& rule, const auto& t) {
          same(rule.name, t.given() ? fulgur::name_of(t.dtype) : "none");
        },
        args);
    same("cu_seqlens_q", fmt::format("({})", fmt::join(q_ends, ", ")));
    same("cu_seqlens_k", fmt::format("({})", fmt::join(k_ends, ", ")));
  } catch (const Error& wrong) {
    error = wrong;
  }
  const auto counts = group.impl().agree(error, fields, {problem.sq, problem.sk});
  const auto rows_by = [&](const char* name, int which, std::vector<int64_t> ends) {
    if (!packed) {
      ends = {0, 0};
      for (const auto& of_rank : counts) ends[1] += of_rank[which];
    }
    const int64_t total = ends.back() - ends.front();
    Rows rows(sharding, std::move(ends), ranks, problem.mask);
    std::vector<int64_t> have, want;
    for (int r = 0; r < ranks; ++r) {
      have.push_back(counts[r][which]);
      want.push_back(rows.count(r));
    }
    if (have != want) {
      fail(name, "ranks have {} rows, want {} of the {} ({})", fmt::join(have, ", "),
           fmt::join(want, ", "), total, name_of(sharding));
    }
    return rows;
  };
  q_rows = rows_by("q", 0, std::move(q_ends));
  k_rows = rows_by("k", 1, std::move(k_ends));

  // As few steps as hide transfers and fit the memory; gradients of keys by gathered queries are
  // shared out among threads by heads.
  const int64_t most = problem.hk / head_ranks;
  steps = gathers_queries() ? 1 : std::min(kSteps, most);
  for (;; ++steps) {
    step_bytes = 0;
    for (int64_t step = 0; step < steps; ++step) {
      StepMemory arena(nullptr);
      Step(*this, arena, step);
      step_bytes = std::max(step_bytes, arena.used());
    }
    const int64_t bytes = 3 * step_bytes;
    if (options.max_workspace == 0 || bytes <= options.max_workspace) break;
    if (steps == most) {
      fail("max_workspace", "got {} bytes, want at least {}", options.max_workspace, bytes);
    }
  }
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    planned_forward = args;
  } else {
    planned_backward = args;
  }
}

void DistributedPlan::run(const ForwardArgs& args, const Run& run) const {
  if (impl_->problem.pass != Pass::kForward)
    fail("args", "got those of the forward pass, want those of the backward pass, as planned");
  run_plan(*impl_, impl_->planned_forward, args, run);
}

void DistributedPlan::run(const BackwardArgs& args, const Run& run) const {
  if (impl_->problem.pass != Pass::kBackward)
    fail("args", "got those of the backward pass, want those of the forward pass, as planned");
  run_plan(*impl_, impl_->planned_backward, args, run);
}

int64_t DistributedPlan::workspace_bytes() const { return 3 * impl_->step_bytes; }

std::string DistributedPlan::explain() const {
  const Impl& plan = *impl_;
  const Problem& p = plan.problem;
  return fmt::format(
      "rank {} of {}: {} of {} queries and {} of {} keys ({}), {} runs of rows\n"
      "  computes {} queries of {} of {} kv heads, in {} steps, while what the next one needs "
      "comes\n"
      "  {}\n"
      "  {} bytes of memory: a step's, the next one's, and what is on its way",
      plan.me, plan.group.size(), plan.q_rows.count(plan.me), plan.q_rows.total(),
      plan.k_rows.count(plan.me), plan.k_rows.total(), name_of(plan.sharding),
      plan.q_rows.of(plan.me).size(), plan.queries(), p.hk / plan.head_ranks, p.hk, plan.steps,
      p.pass == Pass::kForward ? "gathers keys and values: a row has the bits of one device"
      : p.invariant
          ? "gathers keys, values and queries: gradients have the bits of one device"
          : "gathers keys and values; dK and dV of all ranks are added in their order, in f32",
      workspace_bytes());
}

DistributedPlan plan(const ForwardArgs& args, const Options& options, const Group& group,
                     const Distribution& distribution) {
  return DistributedPlan(std::make_shared<Impl>(args, options, group, distribution));
}

DistributedPlan plan(const BackwardArgs& args, const Options& options, const Group& group,
                     const Distribution& distribution) {
  return DistributedPlan(std::make_shared<Impl>(args, options, group, distribution));
}

void forward(const ForwardArgs& args, const Options& options, const Group& group,
             const Distribution& distribution, const Run& run) {
  plan(args, options, group, distribution).run(args, run);
}

void backward(const BackwardArgs& args, const Options& options, const Group& group,
              const Distribution& distribution, const Run& run) {
  plan(args, options, group, distribution).run(args, run);
}

}  // namespace fulgur

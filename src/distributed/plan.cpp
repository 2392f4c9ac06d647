// Plans of calls of all ranks: the checks of each rank, the agreement of all, and how rows, heads
// and steps are divided among them.
#include "distributed/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <type_traits>

#include "base/check.h"
#include "call/lengths.h"
#include "call/mask.h"
#include "distributed/device/device_memory.h"
#include "distributed/host_memory.h"

namespace fulgur {

using distributed::Fields;
using distributed::Part;
using distributed::Rows;
using distributed::RowsPlan;

namespace {

const char* name_of(Sharding sharding) {
  switch (sharding) {
    case Sharding::kContiguous:
      return "contiguous";
    case Sharding::kZigzag:
      return "zigzag";
    case Sharding::kByArea:
      return "by_area";
    case Sharding::kByPage:
      break;
  }
  return "by_page";
}

/// Visits the tensors of rows and those of the shape of LSE, with their names.
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

/// The rows of a rank as a call of its own, with its shapes and dtypes, but without lengths and a
/// bias, which belong to the rows of all ranks.
template <class Args>
Args own_call(Args args) {
  const bool packed = args.lengths.cu_seqlens_q.given();
  each_rows(args, [&](const char* name, auto& t) { to_batch(name, packed, true, t); });
  each_lse(args, [&](const char* name, auto& t) { to_batch(name, packed, false, t); });
  args.lengths = {};
  args.bias = {};
  if constexpr (requires { args.dbias; }) args.dbias = {};
  return args;
}

template <class Args>
void check_supported(const Args& args, const Options& options) {
  const auto refuse = [](const char* name, const ConstTensor& t) {
    if (t.given()) fail(name, "given with a group, which takes none");
  };
  if constexpr (requires { args.cache; }) {
    if (args.cache.page_table.given()) fail("page_table", "given, want rows by page with it");
    refuse("cache_batch_idx", args.cache.cache_batch_idx);
    refuse("leftpad_k", args.cache.leftpad_k);
    refuse("tree_mask", args.tree_mask);
    if (appends(args)) fail("append", "given with a group, which takes none");
  }
  if (options.origin != Origin{}) fail("origin", "given with a group, which sets it");
  for (const auto& [name, t] :
       {std::pair{"q", &args.q}, std::pair{"k", &args.k}, std::pair{"v", &args.v}}) {
    if (!is_float(t->dtype)) fail(name, "got {}, want f32, bf16, f16 or f64", name_of(t->dtype));
  }
}

/// The text of a shape and dtype.
std::string layout_of(const ConstTensor& t) {
  const auto shape = std::span(t.shape).first(t.rank);
  return fmt::format("{} ({})", fulgur::name_of(t.dtype), fmt::join(shape, ", "));
}

/// Rejects expressions that use the first row of a packed sequence, which no call of a rank has.
void check_symbols(const expression::Expressions& expressions) {
  for (const expression::Node& node : expressions.graph(false).graph.nodes) {
    if (node.op() == expression::Op::kSymbol && node.content.symbol == expression::Symbol::kQ0) {
      fail("score_mod, mask_mod", "ask for q0 with a group, want q, a query of its sequence");
    }
  }
}

/// The boundaries of packed sequences, which every rank knows.
std::vector<int64_t> ends_of(const char* name, const ConstTensor& cu) {
  check_indices(name, cu, cu.rank == 1 ? cu.shape[0] : -1, "(batch + 1)", {});
  check_data(name, cu);
  longest_sequence(name, cu, "rows", INT32_MAX);
  const auto* const ends = static_cast<const int32_t*>(cu.data);
  return {ends, ends + cu.shape[0]};
}

/// Checks a bias, which every rank has completely.
template <class Args>
void check_whole_bias(const Args& args, const RowsPlan& plan) {
  Problem whole = plan.problem;
  const auto longest = [&](const Rows& rows) {
    int64_t max_length = 0;
    for (int64_t s = 0; s < rows.sequences(); ++s)
      max_length = std::max(max_length, rows.length(s));
    return max_length;
  };
  if (plan.packed) whole.batch = plan.q_rows.sequences();
  whole.packed = plan.packed;
  whole.sq = longest(plan.q_rows);
  whole.sk = longest(plan.k_rows);
  checked_bias(args.bias, whole);
  if constexpr (requires { args.dbias; }) {
    if (args.dbias.given()) checked_dbias(args.dbias, args.bias, whole);
  }
}

std::vector<int64_t> used_of(const char* name, const ConstTensor& t, bool packed,
                             const Rows& rows) {
  if (!t.given()) return {};
  check_data(name, t);
  const auto* const values = static_cast<const int32_t*>(t.data);
  for (int64_t b = 0; b < t.shape[0]; ++b) {
    const int64_t length = rows.length(packed ? b : 0);
    if (values[b] < 0 || values[b] > length) {
      fail(name, "got {} at {}, want 0 to {}", values[b], b, length);
    }
  }
  return {values, values + t.shape[0]};
}

}  // namespace

template <class Args>
Fields distributed::fields_of(const Args& args, const Problem& p,
                              const Distribution& distribution) {
  Fields fields;
  const auto same = [&](const char* name, const auto& value) {
    fields.emplace_back(name, fmt::format("{}", value));
  };
  same("pass", p.pass == Pass::kForward ? "forward" : "backward");
  same("device", p.device == Device{} ? "cpu" : "cuda");
  same("sharding", name_of(distribution.sharding));
  same("head_ranks", distribution.head_ranks);
  same("ring", distribution.ring);
  const auto rows = [&](DType dtype, int64_t heads, int64_t dim) {
    return fmt::format("{}, {} heads of {} columns in a batch of {}", fulgur::name_of(dtype), heads,
                       dim, p.batch);
  };
  same("q", rows(p.dtypes.q, p.hq, p.d));
  same("k", rows(p.dtypes.k, p.hk, p.d));
  same("v", rows(p.dtypes.v, p.hk, p.dv));
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
  return fields;
}

std::string distributed::values_of(const ConstTensor& lengths) {
  if (!lengths.given()) return "()";
  const auto* const values = static_cast<const int32_t*>(lengths.data);
  return fmt::format("({})", fmt::join(values, values + lengths.shape[0], ", "));
}

std::vector<int64_t> RowsPlan::used_queries(const VarLen& lengths) const {
  return used_of("seqused_q", lengths.seqused_q, packed, q_rows);
}

std::vector<int64_t> RowsPlan::used_keys(const VarLen& lengths) const {
  return used_of("seqused_k", lengths.seqused_k, packed, k_rows);
}

template <class Args>
RowsPlan::RowsPlan(const Args& args, const Options& in_options, const Group& in_group,
                   const Distribution& in)
    : group(in_group),
      me(in_group.rank()),
      options(in_options),
      sharding(in.sharding),
      head_ranks(in.head_ranks),
      ring(in.ring) {
  const ConstTensor &cu_q = args.lengths.cu_seqlens_q, &cu_k = args.lengths.cu_seqlens_k;
  const int ranks = group.size();
  std::vector<int64_t> q_ends, k_ends;
  std::optional<Error> error;
  Fields fields;
  try {
    check_supported(args, options);
    if (sharding == Sharding::kByPage) {
      fail("sharding", "got by_page, want rows of sequences: caches have no gradients");
    }
    if constexpr (requires { args.dbias; }) {
      if (args.dbias.given() && !args.bias.given()) fail("dbias", "given without bias");
    }
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
    // Slopes of packed sequences have the batch of all sequences.
    if (packed && own.alibi_slopes.rank == 2) own.alibi_slopes.shape[0] = 1;
    problem = make_problem(own, options);
    // Bounds that follow from a mask_mod may depend on the lengths of all ranks.
    problem.mask = options.mask;
    problem.expressions = expression::Expressions(
        options, args.tensors, {problem.device, std::is_same_v<Args, BackwardArgs>});
    problem.batch = own.q.shape[0];  // also if this rank has no rows
    problem.sq = own.q.shape[1];
    problem.sk = own.k.shape[1];
    if (head_ranks < 1 || ranks % head_ranks != 0 || problem.hk % head_ranks != 0) {
      fail("head_ranks", "got {}, want a divisor of the {} ranks and of the {} heads of k",
           head_ranks, ranks, problem.hk);
    }
    if (ring && head_ranks != 1) {
      fail("ring", "given with {} ranks that share out heads, want head_ranks 1", head_ranks);
    }
    if (ring && problem.invariant) {
      fail("ring", "given with invariant, want none: it divides the sums of a row among ranks");
    }
    const Problem& p = problem;
    fields = distributed::fields_of(args, p, in);
    const auto same = [&](const char* name, const std::string& value) {
      fields.emplace_back(name, value);
    };
    same("cu_seqlens_q", fmt::format("({})", fmt::join(q_ends, ", ")));
    same("cu_seqlens_k", fmt::format("({})", fmt::join(k_ends, ", ")));
    const int64_t sequences = packed ? std::ssize(q_ends) - 1 : p.batch;
    for (const auto& [name, used] : {std::pair{"seqused_q", &args.lengths.seqused_q},
                                     std::pair{"seqused_k", &args.lengths.seqused_k}}) {
      if (!used->given()) continue;
      check_indices(name, *used, sequences, "(batch)", {});
      check_data(name, *used);
      same(name, distributed::values_of(*used));
    }
    if (args.bias.given()) same("bias", layout_of(args.bias));
    const auto text = [](const std::string& of) { return of.empty() ? "none" : of; };
    same("score_mod", text(p.expressions.score_text()));
    same("mask_mod", text(p.expressions.mask_text()));
    if (packed && p.expressions.given()) check_symbols(p.expressions);
    for (const TensorBinding& t : args.tensors) same(t.name.c_str(), layout_of(t.tensor));
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

  used_queries(args.lengths);  // only to check them
  used_keys(args.lengths);
  if (args.bias.given()) check_whole_bias(args, *this);
  host_memory = &distributed::memory_of(group.impl(), {});
  memory = &distributed::memory_of(group.impl(), problem.device);
  choose_steps(args);
  memory->reserve(shared_bytes, work_bytes);
  if constexpr (std::is_same_v<Args, ForwardArgs>) {
    planned_forward = args;
  } else {
    planned_backward = args;
  }
}

/// Measures the memory of the current number of steps.
template <class Args>
void RowsPlan::measure(const Args& args) {
  if (ring) steps = group.size();
  distributed::StepMemory sums(nullptr);
  distributed::Sums(*this, args, sums);
  sum_bytes = sums.used();
  step_bytes = shared_bytes = 0;
  for (int64_t step = 0; step < steps; ++step) {
    distributed::StepMemory shared(nullptr), own(nullptr);
    distributed::Step(*this, shares_rows() ? shared : own, own, step);
    step_bytes = std::max(step_bytes, own.used());
    shared_bytes = std::max(shared_bytes, shared.used());
  }
}

/// Decides whether ranks steal work from each other; all ranks decide the same.
void RowsPlan::measure_shared_work() {
  constexpr double kMinFlops =
      5e8;  // per rank: for less, copies of queries and a barrier cost more
  if (!shares_rows() || problem.pass != Pass::kForward || group.size() == 1) return;
  double scores = 0;
  for (int64_t s = 0; s < q_rows.sequences(); ++s) {
    scores += visible_scores(problem.mask, {.sq = q_rows.length(s), .sk = k_rows.length(s)});
  }
  const int64_t of_score = 2 * (problem.d + problem.dv) * problem.batch * problem.hq;
  if (scores * static_cast<double>(of_score) < kMinFlops * group.size()) return;
  distributed::StepMemory arena(nullptr);
  distributed::Offers(*this, arena);
  work_bytes = arena.used();
}

/// Sets the number of steps, and whether ranks form a ring; all ranks decide the same.
template <class Args>
void RowsPlan::choose_steps(const Args& args) {
  // As few steps as hide transfers and fit max_workspace. A pass that gathers queries has one step,
  // because its gradients of keys are divided among threads by heads.
  const int64_t max_steps = problem.hk / head_ranks;
  steps = gathers_queries() || shares_rows()
              ? 1
              : distributed::steps_of(problem.pass, problem.device == Device{}, max_steps);
  measure(args);
  if (options.max_workspace == 0) return measure_shared_work();
  const auto fits = [&] { return workspace_bytes() <= options.max_workspace; };
  while (!ring && !fits() && steps < max_steps) {
    ++steps;
    measure(args);
  }
  const int64_t gathered = workspace_bytes();
  if (!ring && !fits() && !problem.invariant && head_ranks == 1 && group.size() > 1) {
    ring = true;
    measure(args);
  }
  // The numbers of rows of ranks differ a little, so that their decisions may differ here.
  const int64_t min_bytes = fits() ? 0 : std::min(gathered, workspace_bytes());
  int64_t wanted = 0;
  for (const auto& of_rank : group.impl().agree({}, {}, {ring, steps, min_bytes})) {
    ring = ring || of_rank[0] == 1;
    steps = std::max(steps, of_rank[1]);
    wanted = std::max(wanted, of_rank[2]);
  }
  if (wanted > 0) {
    fail("max_workspace", "got {} bytes, want at least {}", options.max_workspace, wanted);
  }
  measure(args);
}

int64_t distributed::steps_of(Pass pass, bool on_host, int64_t heads) {
  // The transfers of one step overlap with the computation of another. On a GPU SMs idle at the end
  // of each step for about as long as the transfer of 8 kv heads takes: two steps are faster for
  // more than kHeadsOfStep heads, and for backward passes, which return sums in f32.
  constexpr int64_t kSteps = 4, kStepsOfGpu = 2, kHeadsOfStep = 16;
  const int64_t of_gpu = pass == Pass::kBackward || heads > kHeadsOfStep ? kStepsOfGpu : int64_t{1};
  return std::min(on_host ? kSteps : of_gpu, heads);
}

distributed::Memory& distributed::memory_of(Group::Impl& group, Device device) {
  auto& memory = group.memories[{device.type, device.index}];
  if (memory == nullptr && device == Device{}) {
    memory = std::make_unique<HostMemory>(group);
  } else if (memory == nullptr) {
    memory = std::make_unique<DeviceMemory>(group, device.index);
  }
  return *memory;
}

std::string RowsPlan::explain() const {
  const RowsPlan& plan = *this;
  const Problem& p = plan.problem;
  return fmt::format(
      "rank {} of {}: {} of {} queries and {} of {} keys ({}), {} runs of rows\n"
      "  computes {} queries of {} of {} kv heads, in {} steps, while what the next one needs "
      "comes{}\n"
      "  {}\n"
      "  {} bytes of memory: a step's, the next one's, and what is on its way",
      plan.me, plan.group.size(), plan.q_rows.count(plan.me), plan.q_rows.total(),
      plan.k_rows.count(plan.me), plan.k_rows.total(), name_of(plan.sharding),
      plan.q_rows.of(plan.me).size(), plan.queries(), p.hk / plan.head_ranks, p.hk, plan.steps,
      work_bytes > 0 ? "; then queries of ranks that are slower" : "",
      p.pass == Pass::kForward && plan.ring ? "keys and values of one rank at a time, the next "
                                              "one's first: partial results are merged"
      : plan.ring
          ? "keys and values of one rank at a time, the next one's first: dQ is added up in "
            "that order, dK and dV of all ranks in f32"
      : p.pass == Pass::kForward ? "gathers keys and values: a row has the bits of one device"
      : p.invariant
          ? "gathers keys, values and queries: gradients have the bits of one device"
          : "gathers keys and values; dK and dV of all ranks are added in their order, in f32",
      workspace_bytes());
}

template RowsPlan::RowsPlan(const ForwardArgs&, const Options&, const Group&, const Distribution&);
template RowsPlan::RowsPlan(const BackwardArgs&, const Options&, const Group&, const Distribution&);
template Fields distributed::fields_of(const ForwardArgs&, const Problem&, const Distribution&);

}  // namespace fulgur

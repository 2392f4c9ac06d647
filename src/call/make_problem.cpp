#include "call/make_problem.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "base/check.h"
#include "base/convert.h"
#include "call/append_then_attend.h"
#include "call/check_tensors.h"
#include "call/kv_cache.h"
#include "call/lengths.h"
#include "call/tree.h"
#include "expression/band.h"

namespace fulgur {
namespace {

Problem::Bias bias_layout(const ConstTensor& t) {
  const auto stride = [&](int i) { return t.shape[i] == 1 ? 0 : t.strides[i]; };
  const bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  return {t.dtype, stride(0), stride(1), stride(2), stride(3), aligned};
}

}  // namespace

Problem::Bias checked_bias(const ConstTensor& bias, const Problem& p) {
  check_sizes("bias", bias, "(batch or 1, hq or 1, sq or 1, sk or 1)", 4);
  const bool f64 = bias.dtype == DType::kF64;
  if (bias.dtype != DType::kBool && (f64 ? p.dtypes.q != bias.dtype : !is_float(bias.dtype))) {
    fail("bias", "got {}, want bool, f32, bf16, f16, or f64 where q is", name_of(bias.dtype));
  }
  check_device("bias", bias, p.device);
  // If lengths are known only at run time, the bias may be larger than the longest sequence.
  const bool longer = p.packed || p.packed_k || p.has(Arg::kSeqUsedK);
  const std::array want{p.batch, p.hq, p.sq, p.sk};
  for (size_t i = 0; i < 4; ++i) {
    const int64_t size = bias.shape[i];
    if (size != 1 && size != want[i] && !(i >= 2 && longer && size > want[i])) {
      fail("bias", "got shape {}, want ({}), or 1 for any of them{}", list(bias, bias.shape),
           fmt::join(want, ", "), longer ? ", or more queries and keys" : "");
    }
  }
  return bias_layout(bias);
}

Problem::Bias checked_dbias(const ConstTensor& dbias, const ConstTensor& bias, const Problem& p) {
  if (bias.dtype == DType::kBool) fail("dbias", "given with a bias of bools, which has none");
  check_sizes("dbias", dbias, "(batch or 1, hq or 1, sq or 1, sk or 1)", 4);
  check_no_overlap("dbias", dbias);
  if (dbias.shape != bias.shape) {
    fail("dbias", "got shape {}, want {} of the bias", list(dbias, dbias.shape),
         list(bias, bias.shape));
  }
  if (dbias.dtype != DType::kF32) check_dtype("dbias", dbias, bias.dtype, "that of bias, or f32");
  check_device("dbias", dbias, p.device);
  return bias_layout(dbias);
}

namespace {

constexpr int kMaxThreads = 1024;  // a thread takes scratch memory; OpenMP ends the process when
                                   // it cannot start one

/// The longest sequence of packed tensors: what the user says, or what host memory says.
int64_t longest(const char* name, const ConstTensor& cu, const char* things, int64_t total,
                const char* max_name, int64_t given) {
  if (given < 0) fail(max_name, "got {}, want >= 0", given);
  const bool readable = cu.device.type == DeviceType::kCpu && (cu.data != nullptr || given == 0);
  if (!readable) {
    if (given == 0)
      fail(max_name, "not given, want the longest length (cu_seqlens is not on the CPU)");
    return given;
  }
  const int64_t longest = longest_sequence(name, cu, things, total);
  if (given > 0 && given < longest)
    fail(max_name, "got {}, want at least the longest sequence {}", given, longest);
  return given > 0 ? given : longest;
}

/// The sequences of a call.
int64_t batch_of(const ConstTensor& q, const ConstTensor& cu_q, bool packed) {
  if (!packed) return q.shape[0];
  if (cu_q.rank != 1 || cu_q.shape[0] < 1) {
    fail("cu_seqlens_q", "got {}, want i32 (batch + 1)", cu_q.describe());
  }
  return cu_q.shape[0] - 1;
}

/// The rows of q.
void set_queries(const ConstTensor& q, const ConstTensor& cu_q, const Options& options,
                 Problem& p) {
  if (!p.packed) {
    if (options.max_seqlen_q != 0) fail("max_seqlen_q", "given without cu_seqlens_q");
    p.sq = q.shape[1];
    p.total_q = p.batch * p.sq;
    return;
  }
  p.total_q = q.shape[0];
  // No sequence is longer than all rows, whatever the caller says.
  p.sq = std::min(p.total_q, longest("cu_seqlens_q", cu_q, "rows of q", p.total_q, "max_seqlen_q",
                                     options.max_seqlen_q));
}

/// The rows of packed k and v.
void set_packed_keys(const ConstTensor& k, const ConstTensor& v, const ConstTensor& cu_k,
                     const Options& options, Problem& p) {
  p.total_k = p.total_keys = k.shape[0];
  p.sk = std::min(p.total_k, longest("cu_seqlens_k", cu_k, "rows of k", p.total_k, "max_seqlen_k",
                                     options.max_seqlen_k));
  check_shape("k", k, "(total_k, hk, d)", {p.total_k, p.hk, p.d}, false);
  check_shape("v", v, "(total_k, hk, dv)", {p.total_k, p.hk, p.dv}, false);
}

/// Groups of sequences that begin with the same keys.
void set_prefixes(const ForwardArgs& args, Problem& p) {
  const ConstTensor &groups = args.shared_prefix.prefix_groups,
                    &lens = args.shared_prefix.prefix_lens;
  if (!groups.given() && !lens.given()) return;
  if (!groups.given()) fail("prefix_groups", "not given, want it with prefix_lens");
  if (!lens.given()) fail("prefix_lens", "not given, want it with prefix_groups");
  if (!args.cache.page_table.given()) fail("prefix_groups", "given without page_table");
  if (groups.rank != 1 || groups.shape[0] < 2) {
    fail("prefix_groups", "got {}, want i32 (groups + 1) of at least one group", groups.describe());
  }
  p.prefix_groups = groups.shape[0] - 1;
}

void set_descales(const ForwardArgs& args, Problem& p) {
  const Descales& d = args.descales;
  const Coded q{"q", args.q, p.batch, p.hk}, k{"k", args.k, p.batch, p.hk},
      v{"v", args.v, p.batch, p.hk};
  p.q_descale = checked_scales("q_descale", d.q_descale, q);
  p.k_descale = checked_scales("k_descale", d.k_descale, k);
  p.v_descale = checked_scales("v_descale", d.v_descale, v);
  p.k_zero_point = checked_zero_points("k_zero_point", d.k_zero_point, "k_descale", d.k_descale, k);
  p.v_zero_point = checked_zero_points("v_zero_point", d.v_zero_point, "v_descale", d.v_descale, v);
  check_means("k_mean", d.k_mean, k);
}

template <class Args>
const ConstTensor& values_of(const Args& args) {
  return args.v;
}
/// Scores have no V: K stands for it.
const ConstTensor& values_of(const ScoresArgs& args) { return args.k; }

/// All tensors have one dtype.
template <class Args>
OperandTypes checked_dtypes(const Args& args) {
  const ConstTensor &q = args.q, &k = args.k, &v = values_of(args);
  const char* const pass =
      std::is_same_v<Args, BackwardArgs> ? "the backward pass takes" : "scores() takes";
  for (const auto& [name, t] : {std::pair{"q", &q}, std::pair{"k", &k}, std::pair{"v", &v}}) {
    if (!is_low_bit(t->dtype)) continue;
    fail(name, "got {}, want f32, bf16, f16 or f64: {} no low-bit tensors", name_of(t->dtype),
         pass);
  }
  if (!is_float(q.dtype)) fail("q", "got {}, want f32, bf16, f16 or f64", name_of(q.dtype));
  check_dtype("k", k, q.dtype, "the dtype of q");
  check_dtype("v", v, q.dtype, "the dtype of q");
  return OperandTypes::all(q.dtype);
}

/// f64 goes with f64; else k and v may be codes or other floats than q, and q floats of 8 bits.
OperandTypes checked_dtypes(const ForwardArgs& args) {
  const DType q = args.q.dtype;
  const bool codes = q == DType::kE4M3 || q == DType::kE5M2;
  if (!is_float(q) && !codes) {
    fail("q", "got {}, want f32, bf16, f16, f64, e4m3 or e5m2", name_of(q));
  }
  for (const auto& [name, t] : {std::pair{"k", &args.k}, std::pair{"v", &args.v}}) {
    if (is_low_bit(t->dtype)) continue;
    if (is_float(t->dtype) && (t->dtype == DType::kF64) == (q == DType::kF64)) continue;
    fail(name, "got {}, want {} or a low-bit format", name_of(t->dtype),
         q == DType::kF64 ? "f64, the dtype of q," : "f32, bf16, f16");
  }
  return {q, args.k.dtype, args.v.dtype, codes ? args.out.dtype : q};
}

/// The origin of a part of a larger call with all of its sizes, or one of zeros.
Origin checked_origin(const Origin& given, const Problem& p) {
  if (given == Origin{}) return given;
  const char* const other = !p.alike() || p.cache.paged() || p.has(Arg::kCacheBatchIdx)
                                ? "lengths or caches"
                            : p.has(Arg::kTreeMask) ? "a tree_mask"
                                                    : nullptr;
  if (other != nullptr) fail("origin", "given with {}, want sequences of one length alone", other);
  Origin o = given;
  const auto complete = [](const char* first_name, int64_t first, const char* name, int64_t count,
                           int64_t* all) {
    if (first < 0) fail(first_name, "got {}, want >= 0", first);
    if (*all == 0) *all = first + count;
    if (*all < first + count) {
      fail(name, "got {}, want at least {}, where this call ends", *all, first + count);
    }
  };
  if (o.batch < 0) fail("origin.batch", "got {}, want >= 0", o.batch);
  if (o.key % 4 != 0) fail("origin.key", "got {}, want a multiple of 4", o.key);
  complete("origin.head", o.head, "origin.heads", p.hq, &o.heads);
  complete("origin.query", o.query, "origin.queries", p.sq, &o.queries);
  complete("origin.key", o.key, "origin.keys", p.sk, &o.keys);
  return o;
}

/// Moves bounds of distances from mask_mod to the mask of the options, if both count from the same
/// diagonal: then no expression is computed for the scores, and no map of tiles is made. Not if the
/// rotation of queries depends on the mask of the options.
Options with_bounds(const Options& options, bool rotates_by_mask, Problem& p) {
  Options with = options;
  if (!options.mask_mod.given() || rotates_by_mask) return with;
  const bool larger = p.origin != Origin{};
  const bool same = p.alike() && (larger ? p.origin.queries == p.origin.keys : p.sq == p.sk);
  const expression::Diagonals diagonals{.bottom_right = same || !p.mask.top_left,
                                        .top_left = same || p.mask.top_left};
  with.mask_mod = expression::take_bounds(options.mask_mod, diagonals, &p.mask);
  return with;
}

/// The part of the problem that all passes have.
template <class Args>
Problem make_shared(const Args& args, const Options& options, bool rotates_by_mask = false) {
  Problem p;
  const ConstTensor &q = args.q, &k = args.k, &v = values_of(args);
  const ConstTensor &cu_q = args.lengths.cu_seqlens_q, &cu_k = args.lengths.cu_seqlens_k;
  const KvCache cache = cache_of(args);
  check_cache_given(cache, cu_k, args.lengths.seqused_k);
  p.packed = cu_q.given() || cu_k.given();
  // Packed queries may stand with a cache, whose rows are no packed ones.
  const bool may_be_cache = !std::is_same_v<Args, BackwardArgs> && (given(cache) || k.rank == 4);
  p.packed_k = cu_k.given() || (cu_q.given() && !may_be_cache);
  const auto dims = [](bool packed) {
    return packed ? "(total, heads, dim)" : "(batch, seqlen, heads, dim)";
  };
  const char* const key_dims =
      cache.page_table.given() ? "(pages, page, heads, dim)" : dims(p.packed_k);
  const int rank = p.packed ? 3 : 4, key_rank = p.packed_k ? 3 : 4;
  check_tensor("q", q, dims(p.packed), rank, false);
  check_tensor("k", k, key_dims, key_rank, false);
  check_tensor("v", v, key_dims, key_rank, false);
  p.dtypes = checked_dtypes(args);
  p.device = q.device;
  check_device("k", k, q.device);
  check_device("v", v, q.device);

  p.hq = q.shape[rank - 2];
  p.hk = k.shape[key_rank - 2];
  p.d = q.shape[rank - 1];
  constexpr bool kHasValues = !std::is_same_v<Args, ScoresArgs>;
  p.dv = kHasValues ? v.shape[key_rank - 1] : p.d;
  if (p.hq < 1) fail("q", "got {} heads, want at least 1", p.hq);
  if (p.hk < 1) fail("k", "got {} heads, want at least 1", p.hk);
  if (p.hq % p.hk != 0) {
    fail("q", "got {} heads, want a multiple of the {} heads of k", p.hq, p.hk);
  }
  if (p.d < 1 || p.d > kMaxDim) fail("q", "got head dim {}, want 1 to {}", p.d, kMaxDim);
  if (kHasValues && (p.dv < 1 || p.dv > kMaxValueDim)) {
    fail("v", "got head dim {}, want 1 to {}", p.dv, kMaxValueDim);
  }

  if (p.packed && !cu_q.given()) fail("cu_seqlens_q", "not given, want it with cu_seqlens_k");
  if (p.packed_k && !cu_k.given()) fail("cu_seqlens_k", "not given, want it with cu_seqlens_q");
  p.batch = batch_of(q, cu_q, p.packed);
  if constexpr (std::is_same_v<Args, ForwardArgs>) set_prefixes(args, p);
  set_given(args, p);
  check_tensors(args, Sizes::kOfCall, p);
  set_queries(q, cu_q, options, p);
  if (p.packed_k) set_packed_keys(k, v, cu_k, options, p);
  check_cache(cache, k, v, options.max_seqlen_k, p);
  check_tensors(args, Sizes::kOfRows, p);
  if constexpr (std::is_same_v<Args, ForwardArgs>) set_descales(args, p);
  p.q = rows_layout(q);
  p.k = rows_layout(k);
  p.v = rows_layout(v);

  p.mask = checked_mask(options);
  p.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(p.d)));
  if (!std::isfinite(p.scale)) fail("scale", "got {}, want a finite number", p.scale);
  p.softcap = options.softcap;
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    fail("softcap", "got {}, want a finite number >= 0 (0 = off)", p.softcap);
  }
  // Scores are computed in f32, in units of log2.
  if (p.dtypes.q != DType::kF64 &&
      !std::isfinite(static_cast<float>(p.scale * std::numbers::log2e))) {
    fail("scale", "got {}, want scale * log2(e) within the range of f32", p.scale);
  }
  p.dropout_p = options.dropout_p;
  if (!(p.dropout_p >= 0 && p.dropout_p < 1))
    fail("dropout_p", "got {}, want 0 <= p < 1", p.dropout_p);
  if (const ConstTensor& slopes = args.alibi_slopes; slopes.given()) {
    p.slopes_of_batch = slopes.rank == 2;
    p.slopes_batch = p.slopes_of_batch ? slopes.strides[0] : 0;
    p.slopes_head = slopes.strides[slopes.rank - 1];
  }
  if (args.bias.given()) p.bias = checked_bias(args.bias, p);
  const bool backward = std::is_same_v<Args, BackwardArgs>;
  p.origin = checked_origin(options.origin, p);
  p.expressions = expression::Expressions(with_bounds(options, rotates_by_mask, p), args.tensors,
                                          {p.device, backward});
  p.deterministic = options.deterministic;
  p.invariant = options.invariant;
  p.algorithm = algorithm_called(options.algorithm);
  p.fast_codes = options.fast_codes;
  p.hadamard = options.hadamard;
  if (p.hadamard && !is_low_bit(p.dtypes.k)) {
    fail("hadamard", "given with k of {}, want codes of a low-bit format", name_of(p.dtypes.k));
  }
  p.max_workspace = options.max_workspace;
  if (p.max_workspace < 0) {
    fail("max_workspace", "got {} bytes, want >= 0 (0 = no bound)", p.max_workspace);
  }
  return p;
}

/// A word for each query, side by side.
void check_tree(const ConstTensor& t, const Problem& p) {
  if (!p.packed && t.numel() > 0 && p.batch > 1 && t.strides[0] != p.sq) {
    fail("tree_mask", "got strides {}, want rows side by side: ({}, 1)", list(t, t.strides), p.sq);
  }
  if (p.sq > kMaxTreeTokens) {
    fail("tree_mask", "given for sequences of {} queries, want at most {}", p.sq, kMaxTreeTokens);
  }
  if (p.mask.top_left) fail("top_left", "given with a tree_mask, want a mask aligned bottom-right");
}

/// Removes the sequences of a call of which only dsinks and dbias are written, because a number of
/// sequences of size 0 may be too large to walk.
void drop_sequences(Problem& p) {
  if (p.packed) return;
  p.batch = p.sq = p.sk = p.total_k = p.total_keys = p.prefix_groups = 0;
  const bool sinks = p.on_host.has(Arg::kSinks) && p.has(Arg::kDsinks);
  p.on_host = {};
  p.on_host.set(Arg::kSinks, sinks);
}

Problem make_forward(const ForwardArgs& args, const Options& options,
                     bool rotates_by_mask = false) {
  if (appends(args)) {
    const AppendThenAttend appending(args, checked_mask(options), options.hadamard);
    const bool rotates = appending.call().pairs > 0;
    Problem p = make_forward(appending.attention(), options, rotates && options.mask == full());
    p.append = append_of(appending);
    p.on_host.set(Arg::kSeqUsedK, false);  // they are computed where the caches lie
    return p;
  }
  Problem p = make_shared(args, options, rotates_by_mask);
  p.out = rows_layout(args.out);
  if (p.has(Arg::kLse)) p.lse = lse_layout(args.lse);
  if (p.has(Arg::kTreeMask)) check_tree(args.tree_mask, p);
  if (p.total_q == 0) drop_sequences(p);
  return p;
}

template <class Args>
void check_random_numbers_of(const Args& args, const Run& run) {
  if (args.rng_state.given() && (run.dropout_seed != 0 || run.dropout_offset != 0)) {
    fail("rng_state",
         "given with a dropout_seed of {} and a dropout_offset of {}, want one of both ways",
         run.dropout_seed, run.dropout_offset);
  }
}

}  // namespace

Mask checked_mask(const Options& options) {
  const Mask& mask = options.mask;
  if (mask.left < -1) fail("window_left", "got {}, want -1 (unbounded) or >= 0", mask.left);
  if (mask.right < -1) fail("window_right", "got {}, want -1 (unbounded) or >= 0", mask.right);
  if (mask.chunk < 0) fail("chunk", "got {}, want 0 (off) or >= 1", mask.chunk);
  return mask;
}

int checked_threads(const Options& options) {
  if (options.threads < 0 || options.threads > kMaxThreads) {
    fail("threads", "got {}, want >= 0 (0 = all) and <= {}", options.threads, kMaxThreads);
  }
  return options.threads;
}

Problem make_problem(const ForwardArgs& args, const Options& options) {
  return make_forward(args, options);
}

Problem make_problem(const BackwardArgs& args, const Options& options) {
  if (args.dsinks.given() && !args.sinks.given()) fail("dsinks", "given without sinks");
  if (args.dbias.given() && !args.bias.given()) fail("dbias", "given without bias");
  if (args.dk.given() != args.dv.given()) {
    const bool has_dk = args.dk.given();
    fail(has_dk ? "dv" : "dk", "not given, want it with {}", has_dk ? "dk" : "dv");
  }
  if (!args.dq.given() && !args.dk.given()) fail("dq", "not given, want it, or dk and dv");
  Problem p = make_shared(args, options);
  if (args.dsinks.given())
    check_dtype("dsinks", args.dsinks, args.sinks.dtype, "the dtype of sinks");
  if (args.dbias.given()) p.dbias = checked_dbias(args.dbias, args.bias, p);
  p.pass = Pass::kBackward;
  p.dout = rows_layout(args.dout);
  p.out = rows_layout(args.out);
  p.lse = lse_layout(args.lse);
  if (p.has(Arg::kDlse)) p.dlse = lse_layout(args.dlse);
  if (p.wants_dq()) p.dq = rows_layout(args.dq);
  if (p.wants_dk_dv()) {
    p.dk = rows_layout(args.dk);
    p.dv_grad = rows_layout(args.dv);
    p.f32_key_gradients = args.dk.dtype != p.dtypes.k;
  }
  if (args.dk.dtype != args.dv.dtype) {
    fail("dv", "got {}, want {}, the dtype of dk", name_of(args.dv.dtype), name_of(args.dk.dtype));
  }
  if (p.total_q == 0 && p.total_k == 0) drop_sequences(p);
  return p;
}

Problem make_problem(const ScoresArgs& args, const Options& options) {
  Problem p = make_shared(args, options);
  p.pass = Pass::kScores;
  if (p.dropout_p != 0) {
    fail("dropout_p", "got {}, want 0: scores are those before dropout", p.dropout_p);
  }
  if (p.algorithm != Algorithm::kAny) {
    fail("algorithm", "got \"{}\", want none: scores are rows of S", name_of(p.algorithm));
  }
  if (p.has(Arg::kTreeMask)) check_tree(args.tree_mask, p);
  if (p.has(Arg::kRows)) {
    check_tensor("rows", args.rows, "(rows)", 1, false);
    check_dtype("rows", args.rows, DType::kI64, "rows are int64");
    check_device_or_host("rows", args.rows, p.device);
  }
  return p;
}

std::array<int64_t, 4> sizes_of_scores(const ScoresArgs& args, const Problem& p) {
  return {p.batch, p.hq, args.rows.given() ? args.rows.shape[0] : p.sq, p.sk};
}

void check_scores(const ScoresArgs& args, const Problem& p) {
  check_shape("scores", args.scores, "(batch, hq, rows, sk)", sizes_of_scores(args, p), true);
  check_dtype("scores", args.scores, p.lse_dtype(), "scores are f32, f64 where q is");
  check_device("scores", args.scores, p.device);
}

void check_random_numbers(const ForwardArgs& args, const Run& run) {
  check_random_numbers_of(args, run);
}
void check_random_numbers(const BackwardArgs& args, const Run& run) {
  check_random_numbers_of(args, run);
}

}  // namespace fulgur

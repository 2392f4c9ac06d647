#include "call/make_problem.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numbers>
#include <type_traits>

#include "base/check.h"
#include "call/append_then_attend.h"
#include "call/kv_cache.h"
#include "call/lengths.h"
#include "call/tree.h"

namespace fulgur {
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

/// The rows of q.
void set_queries(const ConstTensor& q, const ConstTensor& cu_q, const Options& options,
                 Problem& p) {
  if (!p.packed) {
    if (options.max_seqlen_q != 0) fail("max_seqlen_q", "given without cu_seqlens_q");
    p.batch = q.shape[0];
    p.sq = q.shape[1];
    p.total_q = p.batch * p.sq;
    return;
  }
  if (cu_q.rank != 1 || cu_q.shape[0] < 1) {
    fail("cu_seqlens_q", "got {}, want i32 (batch + 1)", cu_q.describe());
  }
  p.batch = cu_q.shape[0] - 1;
  p.total_q = q.shape[0];
  check_lengths("cu_seqlens_q", cu_q, p.batch + 1, "(batch + 1)", q.device);
  // No sequence is longer than all rows, whatever the caller says.
  p.sq = std::min(p.total_q, longest("cu_seqlens_q", cu_q, "rows of q", p.total_q, "max_seqlen_q",
                                     options.max_seqlen_q));
}

/// The rows of packed k and v.
void set_packed_keys(const ConstTensor& k, const ConstTensor& v, const ConstTensor& cu_k,
                     const Options& options, Problem& p) {
  p.total_k = p.total_keys = k.shape[0];
  check_lengths("cu_seqlens_k", cu_k, p.batch + 1, "(batch + 1)", k.device);
  p.sk = std::min(p.total_k, longest("cu_seqlens_k", cu_k, "rows of k", p.total_k, "max_seqlen_k",
                                     options.max_seqlen_k));
  check_shape("k", k, "(total_k, hk, d)", {p.total_k, p.hk, p.d}, false);
  check_shape("v", v, "(total_k, hk, dv)", {p.total_k, p.hk, p.dv}, false);
}

/// Sinks, or their gradient.
void check_per_head(const char* name, const ConstTensor& t, const Problem& p, bool written) {
  check_shape(name, t, "(hq)", {p.hq}, written);
  check_dtype(name, t, DType::kF32, "sinks and dsinks are f32");
  if (written) {
    check_device(name, t, p.device);
  } else {
    check_device_or_host(name, t, p.device);
  }
}

/// Groups of sequences that begin with the same keys.
void set_prefixes(const ForwardArgs& args, Problem& p) {
  const ConstTensor &groups = args.prefix_groups, &lens = args.prefix_lens;
  if (!groups.given() && !lens.given()) return;
  if (!groups.given()) fail("prefix_groups", "not given, want it with prefix_lens");
  if (!lens.given()) fail("prefix_lens", "not given, want it with prefix_groups");
  if (!p.cache.paged()) fail("prefix_groups", "given without page_table");
  if (groups.rank != 1 || groups.shape[0] < 2) {
    fail("prefix_groups", "got {}, want i32 (groups + 1) of at least one group", groups.describe());
  }
  p.prefix_groups = groups.shape[0] - 1;
  check_lengths("prefix_groups", groups, p.prefix_groups + 1, "(groups + 1)", p.device);
  check_lengths("prefix_lens", lens, p.prefix_groups, "(groups)", p.device);
  const bool beside_a_device = p.device.type != DeviceType::kCpu;
  p.host.prefix_groups = beside_a_device && on_host(groups);
  p.host.prefix_lens = beside_a_device && on_host(lens);
}

/// Where the lengths, slopes and sinks lie.
template <class Args>
void set_host_numbers(const Args& args, const CacheTensors& cache, Problem& p) {
  const auto beside_a_device = [&](const ConstTensor& t) {
    return t.given() && on_host(t) && p.device.type != DeviceType::kCpu;
  };
  p.host = {beside_a_device(args.cu_seqlens_q), beside_a_device(args.cu_seqlens_k),
            beside_a_device(args.seqused_q),    beside_a_device(args.seqused_k),
            beside_a_device(cache.leftpad_k),   beside_a_device(args.alibi_slopes),
            beside_a_device(args.sinks)};
}

/// What both passes have.
template <class Args>
Problem make_shared(const Args& args, const Options& options) {
  Problem p;
  const ConstTensor &q = args.q, &k = args.k, &v = args.v;
  const ConstTensor &cu_q = args.cu_seqlens_q, &cu_k = args.cu_seqlens_k;
  const CacheTensors cache = cache_of(args);
  check_cache_given(cache, cu_k, args.seqused_k);
  p.packed = cu_q.given() || cu_k.given();
  // Packed queries may stand with a cache, whose rows are no packed ones.
  const bool may_be_cache = std::is_same_v<Args, ForwardArgs> && (cache.given() || k.rank == 4);
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
  if (is_integer(q.dtype)) fail("q", "got {}, want f32, bf16, f16 or f64", name_of(q.dtype));
  p.dtype = q.dtype;
  p.device = q.device;
  check_dtype("k", k, q.dtype, "the dtype of q");
  check_dtype("v", v, q.dtype, "the dtype of q");
  check_device("k", k, q.device);
  check_device("v", v, q.device);

  p.hq = q.shape[rank - 2];
  p.hk = k.shape[key_rank - 2];
  p.d = q.shape[rank - 1];
  p.dv = v.shape[key_rank - 1];
  if (p.hq < 1) fail("q", "got {} heads, want at least 1", p.hq);
  if (p.hk < 1) fail("k", "got {} heads, want at least 1", p.hk);
  if (p.hq % p.hk != 0) {
    fail("q", "got {} heads, want a multiple of the {} heads of k", p.hq, p.hk);
  }
  if (p.d < 1 || p.d > 512) fail("q", "got head dim {}, want 1 to 512", p.d);
  if (p.dv < 1 || p.dv > 512) fail("v", "got head dim {}, want 1 to 512", p.dv);

  if (p.packed && !cu_q.given()) fail("cu_seqlens_q", "not given, want it with cu_seqlens_k");
  if (p.packed_k && !cu_k.given()) fail("cu_seqlens_k", "not given, want it with cu_seqlens_q");
  set_queries(q, cu_q, options, p);
  if (p.packed_k) set_packed_keys(k, v, cu_k, options, p);
  check_cache(cache, k, v, options.max_seqlen_k, p);
  p.seqused_q = args.seqused_q.given();
  if (p.seqused_q) check_lengths("seqused_q", args.seqused_q, p.batch, "(batch)", q.device);
  p.seqused_k = args.seqused_k.given();
  if (p.seqused_k) check_lengths("seqused_k", args.seqused_k, p.batch, "(batch)", q.device);
  set_host_numbers(args, cache, p);
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
  if (p.dtype != DType::kF64 && !std::isfinite(static_cast<float>(p.scale * std::numbers::log2e))) {
    fail("scale", "got {}, want scale * log2(e) within the range of f32", p.scale);
  }
  p.dropout_p = options.dropout_p;
  if (!(p.dropout_p >= 0 && p.dropout_p < 1))
    fail("dropout_p", "got {}, want 0 <= p < 1", p.dropout_p);
  if (const ConstTensor& slopes = args.alibi_slopes; slopes.given()) {
    p.alibi = slopes.rank == 2 ? Problem::Alibi::kBatchHeads : Problem::Alibi::kHeads;
    if (slopes.rank == 2) {
      check_shape("alibi_slopes", slopes, "(batch, hq)", {p.batch, p.hq}, false);
      p.slopes_batch = slopes.strides[0];
    } else {
      check_shape("alibi_slopes", slopes, "(hq) or (batch, hq)", {p.hq}, false);
    }
    p.slopes_head = slopes.strides[slopes.rank - 1];
    check_dtype("alibi_slopes", slopes, DType::kF32, "slopes are f32");
    check_device_or_host("alibi_slopes", slopes, q.device);
  }
  p.has_sinks = args.sinks.given();
  if (p.has_sinks) check_per_head("sinks", args.sinks, p, false);
  p.has_rng_state = args.rng_state.given();
  if (p.has_rng_state) {
    check_shape("rng_state", args.rng_state, "(2)", {2}, false);
    check_dtype("rng_state", args.rng_state, DType::kI64, "seed and offset are 64-bit integers");
    check_device("rng_state", args.rng_state, q.device);
  }
  p.deterministic = options.deterministic;
  p.invariant = options.invariant;
  p.max_workspace = options.max_workspace;
  if (p.max_workspace < 0) {
    fail("max_workspace", "got {} bytes, want >= 0 (0 = no bound)", p.max_workspace);
  }
  return p;
}

/// A word for each query, side by side.
void check_tree(const ConstTensor& t, const Problem& p) {
  if (p.packed) {
    check_shape("tree_mask", t, "(total_q)", {p.total_q}, false);
  } else {
    check_shape("tree_mask", t, "(batch, sq)", {p.batch, p.sq}, false);
    if (t.numel() > 0 && p.batch > 1 && t.strides[0] != p.sq) {
      fail("tree_mask", "got strides {}, want rows side by side: ({}, 1)", list(t, t.strides),
           p.sq);
    }
  }
  check_dtype("tree_mask", t, DType::kI64, "a bit for each of 64 tokens");
  check_device("tree_mask", t, p.device);
  if (p.sq > kMaxTreeTokens) {
    fail("tree_mask", "given for sequences of {} queries, want at most {}", p.sq, kMaxTreeTokens);
  }
}

/// A tensor with the rows and heads of q (out, dout, dq) or of k (dk, dv).
Layout check_like(const char* name, const ConstTensor& t, const Problem& p, bool of_q, int64_t dim,
                  bool written) {
  const int64_t heads = of_q ? p.hq : p.hk;
  if (p.packed) {
    check_shape(name, t, of_q ? "(total_q, hq, dim)" : "(total_k, hk, dim)",
                {of_q ? p.total_q : p.total_k, heads, dim}, written);
  } else {
    check_shape(name, t, of_q ? "(batch, sq, hq, dim)" : "(batch, sk, hk, dim)",
                {p.batch, of_q ? p.sq : p.sk, heads, dim}, written);
  }
  check_dtype(name, t, p.dtype, "the dtype of q");
  check_device(name, t, p.device);
  return rows_layout(t);
}

/// lse, or its gradient dlse.
Layout check_lse(const char* name, const ConstTensor& t, const Problem& p, bool written) {
  if (p.packed) {
    check_shape(name, t, "(hq, total_q)", {p.hq, p.total_q}, written);
  } else {
    check_shape(name, t, "(batch, hq, sq)", {p.batch, p.hq, p.sq}, written);
  }
  check_dtype(name, t, p.dtype == DType::kF64 ? DType::kF64 : DType::kF32,
              "lse and dlse are f32, f64 where q is");
  check_device(name, t, p.device);
  return lse_layout(t);
}

/// Nothing but dsinks is written: no sequence is left, as the sizes with a 0 may be too large to
/// walk.
void drop_sequences(Problem& p) {
  if (p.packed) return;
  p.batch = p.sq = p.sk = p.total_k = p.total_keys = p.prefix_groups = 0;
  p.host = {.sinks = p.host.sinks && p.want_dsinks};
}

/// Strides that address the same elements: those of single rows and of empty tensors do not count.
bool same_strides(const ConstTensor& a, const ConstTensor& b) {
  if (a.numel() == 0) return true;
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

struct Named {
  const char* name;
  ConstTensor tensor;
  bool written = false;
};

/// The tensors of a call by name.
std::array<Named, 31> named(const ForwardArgs& a) {
  const AppendArgs none;
  const AppendArgs& rows = a.append == nullptr ? none : *a.append;
  return {{{"q", a.q},
           {"k", a.k},
           {"v", a.v},
           {"out", a.out, true},
           {"lse", a.lse, true},
           {"alibi_slopes", a.alibi_slopes},
           {"cu_seqlens_q", a.cu_seqlens_q},
           {"cu_seqlens_k", a.cu_seqlens_k},
           {"seqused_q", a.seqused_q},
           {"seqused_k", a.seqused_k},
           {"rng_state", a.rng_state},
           {"page_table", a.page_table},
           {"page_indptr", a.page_indptr},
           {"cache_batch_idx", a.cache_batch_idx},
           {"leftpad_k", a.leftpad_k},
           {"sinks", a.sinks},
           {"tree_mask", a.tree_mask},
           {"prefix_groups", a.prefix_groups},
           {"prefix_lens", a.prefix_lens},
           {"k_cache", rows.k_cache, true},
           {"v_cache", rows.v_cache, true},
           {"k_new", rows.k_new},
           {"v_new", rows.v_new},
           {"cu_seqlens_k_new", rows.cu_seqlens_k_new},
           {"cache_seqlens", rows.cache_seqlens},
           {"page_table", rows.page_table},
           {"page_indptr", rows.page_indptr},
           {"cache_batch_idx", rows.cache_batch_idx},
           {"cos", rows.cos},
           {"sin", rows.sin},
           {"rotary_seqlens", rows.rotary_seqlens}}};
}

std::array<Named, 18> named(const BackwardArgs& a) {
  return {{{"dout", a.dout},
           {"q", a.q},
           {"k", a.k},
           {"v", a.v},
           {"out", a.out},
           {"lse", a.lse},
           {"dq", a.dq, true},
           {"dk", a.dk, true},
           {"dv", a.dv, true},
           {"alibi_slopes", a.alibi_slopes},
           {"cu_seqlens_q", a.cu_seqlens_q},
           {"cu_seqlens_k", a.cu_seqlens_k},
           {"seqused_q", a.seqused_q},
           {"seqused_k", a.seqused_k},
           {"dlse", a.dlse},
           {"rng_state", a.rng_state},
           {"sinks", a.sinks},
           {"dsinks", a.dsinks, true}}};
}

template <class Args>
void check_shapes_of(const Args& planned, const Args& args) {
  const auto all = named(args), wanted = named(planned);
  for (size_t i = 0; i < all.size(); ++i) {
    const ConstTensor &t = all[i].tensor, &want = wanted[i].tensor;
    if (t.rank == want.rank && t.dtype == want.dtype && t.device == want.device &&
        t.shape == want.shape && same_strides(t, want)) {
      continue;
    }
    fail(all[i].name, "got {} strides {} on {}, want {} strides {} on {} as planned", t.describe(),
         list(t, t.strides), name_of(t.device), want.describe(), list(want, want.strides),
         name_of(want.device));
  }
}

template <class Args>
void check_random_numbers_of(const Args& args, const Run& run) {
  if (args.rng_state.given() && (run.dropout_seed != 0 || run.dropout_offset != 0)) {
    fail("rng_state",
         "given with a dropout_seed of {} and a dropout_offset of {}, want one of both ways",
         run.dropout_seed, run.dropout_offset);
  }
}

template <class Args>
void check_pointers_of(const Args& args) {
  const auto all = named(args);
  for (const Named& t : all) {
    if (t.tensor.given()) check_data(t.name, t.tensor);
  }
  for (const Named& t : all) {
    if (!t.written || !t.tensor.given()) continue;
    for (const Named& other : all) {
      if (&t != &other && other.tensor.given() && share_memory(t.tensor, other.tensor)) {
        fail(t.name, "shares its memory with {}; an output needs its own", other.name);
      }
    }
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
  if (args.append != nullptr) {
    const AppendThenAttend appending(args, checked_mask(options));
    Problem p = make_problem(appending.attention(), options);
    p.append = append_of(appending);
    p.host.seqused_k = false;  // they are computed where the caches lie
    return p;
  }
  Problem p = make_shared(args, options);
  p.out = check_like("out", args.out, p, true, p.dv, true);
  p.want_lse = args.lse.given();
  if (p.want_lse) p.lse = check_lse("lse", args.lse, p, true);
  p.has_tree = args.tree_mask.given();
  if (p.has_tree) check_tree(args.tree_mask, p);
  set_prefixes(args, p);
  if (p.total_q == 0) drop_sequences(p);
  return p;
}

Problem make_problem(const BackwardArgs& args, const Options& options) {
  Problem p = make_shared(args, options);
  p.pass = Pass::kBackward;
  p.dout = check_like("dout", args.dout, p, true, p.dv, false);
  p.out = check_like("out", args.out, p, true, p.dv, false);
  p.lse = check_lse("lse", args.lse, p, false);
  p.want_lse = true;
  p.has_dlse = args.dlse.given();
  if (p.has_dlse) p.dlse = check_lse("dlse", args.dlse, p, false);
  p.dq = check_like("dq", args.dq, p, true, p.d, true);
  p.dk = check_like("dk", args.dk, p, false, p.d, true);
  p.dv_grad = check_like("dv", args.dv, p, false, p.dv, true);
  p.want_dsinks = args.dsinks.given();
  if (p.want_dsinks && !p.has_sinks) fail("dsinks", "given without sinks");
  if (p.want_dsinks) check_per_head("dsinks", args.dsinks, p, true);
  if (p.total_q == 0 && p.total_k == 0) drop_sequences(p);
  return p;
}

void check_shapes(const ForwardArgs& planned, const ForwardArgs& args) {
  check_shapes_of(planned, args);
}
void check_shapes(const BackwardArgs& planned, const BackwardArgs& args) {
  check_shapes_of(planned, args);
}
void check_pointers(const ForwardArgs& args) { check_pointers_of(args); }
void check_pointers(const BackwardArgs& args) { check_pointers_of(args); }
void check_random_numbers(const ForwardArgs& args, const Run& run) {
  check_random_numbers_of(args, run);
}
void check_random_numbers(const BackwardArgs& args, const Run& run) {
  check_random_numbers_of(args, run);
}

}  // namespace fulgur

#include "call/append_call.h"

#include "base/convert.h"
#include "base/scales.h"
#include "call/check_tensors.h"

namespace fulgur {
namespace {

void check_float(const char* name, const ConstTensor& t) {
  if (!is_float(t.dtype)) fail(name, "got {}, want f32, bf16, f16 or f64", name_of(t.dtype));
}

int64_t checked_dim(const char* name, int64_t dim) {
  if (dim < 1 || dim > AppendCall::kMaxDim)
    fail(name, "got head dim {}, want 1 to {}", dim, AppendCall::kMaxDim);
  return dim;
}

/// Why tensors have the dtype of the rows.
const char* like_rows(const AppendCall& c) {
  return is_low_bit(c.args.rows.k_cache.dtype) ? "the dtype of k_new" : "the dtype of k_cache";
}

void set_descales(AppendCall& c) {
  const NewRows& r = c.args.rows;
  const ConstTensor k_cache = r.k_cache, v_cache = r.v_cache;
  const Coded k{"k_cache", k_cache, c.p.batch, c.p.hk}, v{"v_cache", v_cache, c.p.batch, c.p.hk};
  c.p.k_descale = checked_scales("k_cache_descale", r.k_cache_descale, k);
  c.p.v_descale = checked_scales("v_cache_descale", r.v_cache_descale, v);
  c.p.k_zero_point = checked_zero_points("k_cache_zero_point", r.k_cache_zero_point,
                                         "k_cache_descale", r.k_cache_descale, k);
  c.p.v_zero_point = checked_zero_points("v_cache_zero_point", r.v_cache_zero_point,
                                         "v_cache_descale", r.v_cache_descale, v);
  check_means("k_cache_mean", r.k_cache_mean, k);
  const auto check_own = [](const TensorRule& rule, const auto& t) {
    if (rule.type != TensorType::kDescale || !rule.written()) return;
    if (t.rank > 2) check_no_overlap(rule.name, t);
  };
  for_each_tensor(check_own, r);
}

void check_caches(AppendCall& c) {
  const ConstTensor k = c.args.rows.k_cache, v = c.args.rows.v_cache,
                    seqlens = c.args.rows.cache_seqlens;
  Problem& p = c.p;
  const bool paged = c.tables.page_table.given();
  const char* const dims = paged ? "(pages, page, heads, dim)" : "(batch, seqlen, heads, dim)";
  check_tensor("k_cache", k, dims, 4, true);
  check_tensor("v_cache", v, dims, 4, true);
  if (!is_low_bit(k.dtype)) check_float("k_cache", k);
  c.rows = is_low_bit(k.dtype) ? c.args.rows.k_new.dtype : k.dtype;
  if (c.args.rows.k_new.given()) check_float("k_new", c.args.rows.k_new);
  if (!is_low_bit(v.dtype)) check_dtype("v_cache", v, c.rows, like_rows(c));
  check_device("v_cache", v, k.device, AppendCall::kLike);
  p.dtypes = {c.rows, k.dtype, v.dtype, c.rows};
  p.device = k.device;
  p.hk = k.shape[2];
  if (p.hk < 1) fail("k_cache", "got {} heads, want at least 1", p.hk);
  p.d = checked_dim("k_cache", k.shape[3]);
  p.dv = checked_dim("v_cache", v.shape[3]);
  if (seqlens.rank != 1) fail("cache_seqlens", "got {}, want i32 (batch)", seqlens.describe());
  p.batch = seqlens.shape[0];
  set_given(c.args, p);
  check_tensors(c.args, Sizes::kOfCall, p, AppendCall::kLike);
  check_cache_given(c.tables, {}, seqlens);
  check_cache(c.tables, k, v, 0, p, {"k_cache", "v_cache", AppendCall::kLike});
  p.k = rows_layout(k);
  p.v = rows_layout(v);
  set_descales(c);
}

/// A tensor of `heads` whose rows are packed, or those of the batch; its first dimensions are as
/// `rows` has them.
void check_rows(const char* name, const ConstTensor& t, const AppendCall& c, bool packed,
                const ConstTensor& rows, int64_t heads, int64_t dim, bool written) {
  if (packed) {
    check_shape(name, t, "(total, heads, dim)", {rows.shape[0], heads, dim}, written);
  } else {
    check_shape(name, t, "(batch, seqlen, heads, dim)", {c.p.batch, rows.shape[1], heads, dim},
                written);
  }
  check_dtype(name, t, c.rows, like_rows(c));
  check_device(name, t, c.p.device, AppendCall::kLike);
}

void check_new(AppendCall& c) {
  const AppendArgs& a = c.args;
  c.packed_new = a.rows.cu_seqlens_k_new.given();
  check_rows("k_new", a.rows.k_new, c, c.packed_new, a.rows.k_new, c.p.hk, c.p.d, false);
  check_rows("v_new", a.rows.v_new, c, c.packed_new, a.rows.k_new, c.p.hk, c.p.dv, false);
  c.tokens = c.packed_new ? a.rows.k_new.shape[0] : c.p.batch * a.rows.k_new.shape[1];
  c.k_new = rows_layout(a.rows.k_new);
  c.v_new = rows_layout(a.rows.v_new);
}

void check_rotary(AppendCall& c) {
  const AppendArgs& a = c.args;
  const ConstTensor &cos = a.rows.rotary.cos, &sin = a.rows.rotary.sin;
  if (!cos.given() && !sin.given()) {
    if (a.rows.rotary.rotary_seqlens.given()) fail("rotary_seqlens", "given without cos and sin");
    if (a.q.given() && !c.hadamard_q) {
      fail("q", "given without cos and sin, want what rotates it");
    }
    return;
  }
  check_tensor("cos", cos, "(positions, rotary_dim / 2)", 2, false);
  check_shape("sin", sin, "the shape of cos", {cos.shape[0], cos.shape[1]}, false);
  if (cos.dtype != c.rows && cos.dtype != DType::kF32) {
    fail("cos", "got {}, want {} as {}, or f32", name_of(cos.dtype), name_of(c.rows),
         is_low_bit(c.p.dtypes.k) ? "k_new" : "k_cache");
  }
  check_dtype("sin", sin, cos.dtype, "the dtype of cos");
  check_device("cos", cos, c.p.device, AppendCall::kLike);
  check_device("sin", sin, c.p.device, AppendCall::kLike);
  c.pairs = cos.shape[1];
  if (c.pairs < 1 || c.pairs > c.p.d / 2) {
    fail("cos", "got {} columns, a rotary_dim of {}, want 2 to the head dim {}", c.pairs,
         2 * c.pairs, c.p.d);
  }
}

void check_queries(AppendCall& c) {
  const AppendArgs& a = c.args;
  Problem& p = c.p;
  if (!a.q.given()) return;
  p.packed = a.cu_seqlens_q.given();
  c.hq = a.q.shape[p.packed ? 1 : 2];
  check_rows("q", a.q, c, p.packed, a.q, c.hq, p.d, false);
  if (c.hq < 1) fail("q", "got {} heads, want at least 1", c.hq);
  check_rows("q_out", a.q_out, c, p.packed, a.q, c.hq, p.d, true);
  p.total_q = p.packed ? a.q.shape[0] : p.batch * a.q.shape[1];
  p.sq = p.packed ? p.total_q : a.q.shape[1];
  p.q = rows_layout(a.q);
  c.q_out = rows_layout(a.q_out);
}

}  // namespace

AppendCall checked_append(const AppendArgs& args, const Mask& mask, bool hadamard,
                          bool hadamard_q) {
  if (!args.q.given()) {
    if (args.q_out.given()) fail("q", "not given, want what goes to q_out");
    if (args.cu_seqlens_q.given()) fail("cu_seqlens_q", "given without q");
  }
  AppendCall c{
      .args = args,
      .tables = {args.cache.page_table, args.cache.page_indptr, args.cache.cache_batch_idx},
      .hadamard = hadamard,
      .hadamard_q = hadamard_q};
  check_caches(c);
  if (hadamard && !is_low_bit(c.p.dtypes.k)) {
    fail("hadamard", "given with k_cache of {}, want codes of a low-bit format",
         name_of(c.p.dtypes.k));
  }
  check_new(c);
  check_rotary(c);
  check_queries(c);
  if (mask.top_left && args.q.given() && c.pairs > 0) {
    fail("top_left", "given with queries to rotate, want a mask aligned bottom-right");
  }
  c.advance = mask != full();
  return c;
}

}  // namespace fulgur

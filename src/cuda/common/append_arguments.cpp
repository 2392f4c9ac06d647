#include "cuda/common/append_arguments.h"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/common/call_kernel.h"
#include "cuda/common/kernel_key.h"

namespace fulgur::cuda {
namespace {

int count_of(const char* name, int64_t count, const char* of_what) {
  return counted(name, count, of_what, "append");
}

const int* ints(const ConstTensor& t) { return static_cast<const int*>(t.data); }

AppendScales scales_of(const ScaleTensor& t) {
  const Scales& at = t.at;
  // Only append with fitted scales writes them.
  return {const_cast<void*>(t.data), at.dtype == DType::kF32, at.batch, at.row, at.head, at.group};
}

/// Whether rows, angles and their halves consist of 16-byte pieces that are aligned to 16 bytes.
bool all_wide(const AppendCall& c) {
  const AppendArgs& a = c.args;
  if (is_low_bit(c.p.dtypes.k) || is_low_bit(c.p.dtypes.v)) return false;
  const int64_t width = 16 / size_of(c.p.dtypes.k);
  if (c.p.d % width != 0 || c.p.dv % width != 0 || c.pairs % width != 0) return false;
  for (const Layout* rows : {&c.p.k, &c.p.v, &c.k_new, &c.v_new, &c.p.q, &c.q_out}) {
    if (!rows_aligned(*rows, c.p.dtypes.k)) return false;
  }
  for (const ConstTensor* t : {&a.rows.rotary.cos, &a.rows.rotary.sin}) {
    if (reinterpret_cast<uintptr_t>(t->data) % 16 != 0) return false;
    if (t->strides[0] * size_of(t->dtype) % 16 != 0) return false;
  }
  return true;
}

}  // namespace

AppendRows rows_between(const void* from, const Layout& at, void* to, const Layout& to_at,
                        int64_t heads, int64_t dim, int64_t pairs) {
  return {from,
          at.batch,
          at.row,
          at.head,
          to,
          to_at.batch,
          to_at.row,
          to_at.head,
          static_cast<int>(heads),
          static_cast<int>(dim),
          static_cast<int>(pairs),
          0,
          nullptr,
          0,
          0,
          {}};
}

AppendCodes codes_of(DType format, const Scaling& scaling) {
  if (!is_low_bit(format)) return {};
  const bool of_rows = scaling.scale.at.of_rows;
  return {static_cast<int>(element_of(format)),
          static_cast<int>(scaling.scale.at.groups),
          of_rows,
          of_rows,
          scales_of(scaling.scale),
          scales_of(scaling.zero_point)};
}

void set_means(const Means& means, AppendRows& rows) {
  rows.mean = means.data;
  rows.mean_batch = means.batch;
  rows.mean_head = means.head;
}

AppendParams append_params(const AppendCall& c) {
  const AppendArgs& a = c.args;
  const Problem::Cache& cache = c.p.cache;
  AppendParams p{};
  p.tokens.count = count_of("k_new", c.tokens, "rows");
  p.tokens.each = static_cast<int>(c.packed_new ? 0 : a.rows.k_new.shape[1]);
  p.queries.count = count_of("q", c.p.total_q, "rows");
  p.queries.each = static_cast<int>(c.p.packed ? 0 : c.p.sq);
  p.batch = count_of("cache_seqlens", c.p.batch, "sequences");
  count_of("k_cache", c.p.hk, "heads");
  count_of("q", c.hq, "heads");
  const NewRows& rows = a.rows;
  p.k = rows_between(rows.k_new.data, c.k_new, rows.k_cache.data, c.p.k, c.p.hk, c.p.d, c.pairs);
  p.v = rows_between(rows.v_new.data, c.v_new, rows.v_cache.data, c.p.v, c.p.hk, c.p.dv, 0);
  p.k.codes = codes_of(c.p.dtypes.k, {{rows.k_cache_descale.data, c.p.k_descale},
                                      {rows.k_cache_zero_point.data, c.p.k_zero_point}});
  p.v.codes = codes_of(c.p.dtypes.v, {{rows.v_cache_descale.data, c.p.v_descale},
                                      {rows.v_cache_zero_point.data, c.p.v_zero_point}});
  p.k.hadamard = c.hadamard;
  set_means(Means(rows.k_cache_mean), p.k);
  p.q = rows_between(a.q.data, c.p.q, a.q_out.data, c.q_out, c.hq, c.p.d, c.pairs);
  p.q.hadamard = c.hadamard_q;
  p.page_table = ints(a.cache.page_table);
  p.page_indptr = ints(a.cache.page_indptr);
  p.cache_batch_idx = ints(a.cache.cache_batch_idx);
  p.table_stride = cache.table_stride;
  p.id_stride = cache.id_stride;
  p.ids = cache.ids;
  p.capacity = c.p.sk;
  p.entries = cache.entries;
  constexpr int64_t kMaxPage = std::numeric_limits<unsigned>::max();  // more than any length
  p.page = static_cast<unsigned>(std::clamp(cache.page, int64_t{1}, kMaxPage));
  p.cos = a.rows.rotary.cos.data;
  p.sin = a.rows.rotary.sin.data;
  p.cos_row = a.rows.rotary.cos.strides[0];
  p.sin_row = a.rows.rotary.sin.strides[0];
  p.positions = a.rows.rotary.cos.shape[0];
  p.f32_angles = a.rows.rotary.cos.dtype == DType::kF32;
  p.interleaved = a.rows.rotary.interleaved;
  p.advance = c.advance;
  p.wide = all_wide(c);
  const bool codes = p.k.codes.format != 0 || p.v.codes.format != 0;
  const int64_t steps = std::max(c.p.d, c.p.dv) / (p.wide ? 16 / size_of(c.p.dtypes.k) : 1);
  p.lanes_log2 = codes ? kCodeLanesLog2 : lanes_log2(steps);
  return p;
}

void set_lengths(const AppendArgs& a, AppendParams& p) {
  p.tokens.cu_seqlens = ints(a.rows.cu_seqlens_k_new);
  p.queries.cu_seqlens = ints(a.cu_seqlens_q);
  p.cache_seqlens = ints(a.rows.cache_seqlens);
  p.first_positions = ints(first_positions(a));
}

}  // namespace fulgur::cuda

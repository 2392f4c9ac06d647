#include "call/kv_cache.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "base/check.h"

namespace fulgur {
namespace {

/// Sets the maximum number of keys: `max_keys` of a sequence, and `in_all` of all sequences
/// together. The latter may exceed the rows of k, because sequences may share rows.
void set_keys(const char* name, const ConstTensor& t, int64_t max_keys, int64_t in_all,
              Problem& p) {
  p.sk = max_keys;
  p.total_keys = in_all;
  int64_t bytes = std::max({int64_t{1}, size_of(p.dtypes.k) / block_of(p.dtypes.k),
                            size_of(p.dtypes.v) / block_of(p.dtypes.v)});
  for (const int64_t size : {in_all, p.hk, std::max(p.d, p.dv)}) {
    if (!__builtin_mul_overflow(bytes, size, &bytes) && bytes <= kMaxTensorBytes) continue;
    fail(name, "got {}, want sequences of at most 2^47 bytes of keys in all", t.describe());
  }
}

int64_t product(const char* name, const ConstTensor& t, int64_t x, int64_t y) {
  int64_t xy = 0;
  if (__builtin_mul_overflow(x, y, &xy)) {
    fail(name, "got {}, want sequences of less than 2^63 keys", t.describe());
  }
  return xy;
}

void check_pages(const KvCache& tensors, const ConstTensor& k, const ConstTensor& v,
                 int64_t max_seqlen_k, Problem& p, const CacheNames& names) {
  using Pages = Problem::Cache::Pages;
  const ConstTensor& table = tensors.page_table;
  p.cache.page = k.shape[1];
  if (p.cache.page < 1) fail(names.k, "got pages of {} keys, want at least 1", p.cache.page);
  check_shape(names.k, k, "(pages, page, hk, d)", {p.cache.entries, p.cache.page, p.hk, p.d},
              false);
  check_shape(names.v, v, "(pages, page, hk, dv)", {p.cache.entries, p.cache.page, p.hk, p.dv},
              false);
  if (tensors.page_indptr.given()) {
    p.cache.pages = Pages::kLists;
    check_sizes("page_table", table, "(ids), as with page_indptr", 1);
  } else {
    p.cache.pages = Pages::kTable;
    check_sizes("page_table", table, "(batch, max_pages)", 2);
    if (table.shape[0] != p.batch) {
      fail("page_table", "got shape {}, want ({}, {}) = (batch, max_pages)",
           list(table, table.shape), p.batch, table.shape[1]);
    }
    p.cache.table_stride = p.batch > 1 ? table.strides[0] : 0;
  }
  check_dtype("page_table", table, DType::kI32, "page ids are int32");
  check_device("page_table", table, p.device, names.like);
  p.cache.ids = table.shape[table.rank - 1];
  // The strides of an empty table have no meaning.
  const bool strided = p.cache.ids > 1 && table.numel() > 0;
  p.cache.id_stride = strided ? table.strides[table.rank - 1] : 1;
  if (std::abs(p.cache.id_stride) > std::numeric_limits<int32_t>::max()) {
    fail("page_table", "last stride is {}, want one between -2^31 and 2^31", p.cache.id_stride);
  }
  p.total_k = p.cache.entries * p.cache.page;
  if (max_seqlen_k < 0) fail("max_seqlen_k", "got {}, want >= 0", max_seqlen_k);
  const int64_t room = product("page_table", table, p.cache.ids, p.cache.page);
  const int64_t max_keys = max_seqlen_k == 0 ? room : std::min(room, max_seqlen_k);
  const bool lists = p.cache.pages == Pages::kLists;
  set_keys("page_table", table, max_keys,
           lists ? room : product("page_table", table, p.batch, max_keys), p);
}

}  // namespace

void check_cache_given(const KvCache& tensors, const ConstTensor& cu_seqlens_k,
                       const ConstTensor& seqused_k) {
  const bool paged = tensors.page_table.given();
  if (tensors.page_indptr.given() && !paged)
    fail("page_table", "not given, want the ids that page_indptr divides");
  if (paged && tensors.cache_batch_idx.given())
    fail("cache_batch_idx", "given with page_table, want one of both");
  if (paged && !seqused_k.given())
    fail("seqused_k", "not given, want the lengths of the sequences with page_table");
  for (const auto& [name, t] : {std::pair{"page_table", &tensors.page_table},
                                std::pair{"cache_batch_idx", &tensors.cache_batch_idx}}) {
    if (t->given() && cu_seqlens_k.given())
      fail("cu_seqlens_k", "given with {}, want seqused_k to say the lengths", name);
  }
}

void check_cache(const KvCache& tensors, const ConstTensor& k, const ConstTensor& v,
                 int64_t max_seqlen_k, Problem& p, const CacheNames& names) {
  if (p.packed_k) return;
  p.cache.entries = k.shape[0];
  if (tensors.page_table.given()) return check_pages(tensors, k, v, max_seqlen_k, p, names);
  if (max_seqlen_k != 0) fail("max_seqlen_k", "given without cu_seqlens_k or page_table");
  p.sk = k.shape[1];
  if (!p.has(Arg::kCacheBatchIdx)) p.cache.entries = p.batch;
  const int64_t rows = p.cache.entries;
  check_shape(names.k, k, "(batch, sk, hk, d)", {rows, p.sk, p.hk, p.d}, false);
  check_shape(names.v, v, "(batch, sk, hk, dv)", {rows, p.sk, p.hk, p.dv}, false);
  p.total_k = p.total_keys = rows * p.sk;
  if (!p.has(Arg::kCacheBatchIdx)) return;
  const ConstTensor& index = tensors.cache_batch_idx;
  set_keys("cache_batch_idx", index, p.sk, product("cache_batch_idx", index, p.batch, p.sk), p);
}

}  // namespace fulgur

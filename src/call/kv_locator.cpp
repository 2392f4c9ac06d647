#include "call/kv_locator.h"

namespace fulgur {

KvLocator::KvLocator(const Problem& problem, const KvCache& tensors, const char* k)
    : p_(&problem),
      k_(k),
      batch_idx_(static_cast<const int32_t*>(tensors.cache_batch_idx.data)),
      table_(static_cast<const int32_t*>(tensors.page_table.data)),
      indptr_(static_cast<const int32_t*>(tensors.page_indptr.data)) {}

KvLocator::KvLocator(const Problem& problem, const Sequences& sequences, const KvCache& tensors)
    : KvLocator(problem, tensors, "k") {
  if (!problem.cache.paged() && !problem.has(Arg::kCacheBatchIdx)) return;
  for (int64_t b = 0; b < problem.batch; ++b) check(b, sequences[b]);
}

void KvLocator::check(int64_t b, const Sequence& s) const {
  if (s.sk == 0) return;
  if (p_->cache.paged()) {
    check_pages(b, s);
  } else if (p_->has(Arg::kCacheBatchIdx) &&
             (batch_idx_[b] < 0 || batch_idx_[b] >= p_->cache.entries)) {
    fail("cache_batch_idx", "got {} at {}, want one of the {} rows of {}", batch_idx_[b], b,
         p_->cache.entries, k_);
  }
}

PageIds KvLocator::pages(int64_t b) const {
  const Problem::Cache& cache = p_->cache;
  const int64_t first = indptr_ != nullptr ? indptr_[b] * cache.id_stride : b * cache.table_stride;
  return {table_ + first, cache.id_stride};
}

void KvLocator::check_pages(int64_t b, const Sequence& s) const {
  const PageIds ids = pages(b);
  const int64_t page = p_->cache.page, end = (s.k_begin + s.sk + page - 1) / page;
  for (int64_t i = s.k_begin / page; i < end; ++i) {
    if (ids[i] < 0 || ids[i] >= p_->cache.entries) {
      fail("page_table", "got {} as page {} of sequence {}, want one of the {} pages of {}", ids[i],
           i, b, p_->cache.entries, k_);
    }
  }
}

KvSpan KvLocator::of(int64_t b, const Sequence& s) const {
  if (p_->cache.paged()) return {s.k_begin, 0, pages(b), p_->cache.page};
  return {s.k_begin, p_->has(Arg::kCacheBatchIdx) ? batch_idx_[b] : b, {}};
}

}  // namespace fulgur

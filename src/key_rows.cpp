#include "key_rows.h"

namespace fulgur {

KeyPlaces::KeyPlaces(const Problem& problem, const Sequences& sequences,
                     const CacheTensors& tensors)
    : p_(&problem),
      batch_idx_(static_cast<const int32_t*>(tensors.cache_batch_idx.data)),
      table_(static_cast<const int32_t*>(tensors.page_table.data)),
      indptr_(static_cast<const int32_t*>(tensors.page_indptr.data)) {
  if (!problem.cache.paged() && !problem.cache.batch_idx) return;
  for (int64_t b = 0; b < problem.batch; ++b) {
    const Sequence s = sequences[b];
    if (s.sk == 0) continue;
    if (problem.cache.paged()) {
      check_pages(b, s);
    } else if (batch_idx_[b] < 0 || batch_idx_[b] >= problem.cache.entries) {
      fail("cache_batch_idx", "got {} at {}, want one of the {} rows of k", batch_idx_[b], b,
           problem.cache.entries);
    }
  }
}

const int32_t* KeyPlaces::pages(int64_t b) const {
  return table_ + (indptr_ != nullptr ? indptr_[b] : b * p_->cache.table_stride);
}

void KeyPlaces::check_pages(int64_t b, const Sequence& s) const {
  const int32_t* const ids = pages(b);
  const int64_t page = p_->cache.page, end = (s.k_begin + s.sk + page - 1) / page;
  for (int64_t i = s.k_begin / page; i < end; ++i) {
    if (ids[i] < 0 || ids[i] >= p_->cache.entries) {
      fail("page_table", "got {} as page {} of sequence {}, want one of the {} pages of k", ids[i],
           i, b, p_->cache.entries);
    }
  }
}

KeyRows KeyPlaces::of(int64_t b, const Sequence& s) const {
  if (p_->cache.paged()) return {s.k_begin, 0, pages(b), p_->cache.page};
  return {s.k_begin, p_->cache.batch_idx ? batch_idx_[b] : b};
}

}  // namespace fulgur

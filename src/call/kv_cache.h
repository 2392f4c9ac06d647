#pragma once

#include <cstdint>

#include "base/check.h"
#include "call/problem.h"
#include "fulgur/attention.h"
#include "fulgur/scores.h"

namespace fulgur {

/// Whether a call has tables that say where its keys lie, or left padding.
inline bool given(const KvCache& cache) {
  return cache.page_table.given() || cache.page_indptr.given() || cache.cache_batch_idx.given() ||
         cache.leftpad_k.given();
}

/// Whether the host can read the tables of a cache.
inline bool tables_readable(const KvCache& cache) {
  return on_host(cache.page_table) && on_host(cache.page_indptr) && on_host(cache.cache_batch_idx);
}

/// The cache of a call; an empty one for the backward pass, which has no cache.
inline KvCache cache_of(const ForwardArgs& args) { return args.cache; }
inline KvCache cache_of(const ScoresArgs& args) { return args.cache; }
inline KvCache cache_of(const BackwardArgs&) { return {}; }

/// The names that errors use: of the caches of K and V, and of the tensor on whose device the
/// tables must be.
struct CacheNames {
  const char *k = "k", *v = "v", *like = "q";
};

/// Checks that the tensors of a cache may be given together, and with the lengths.
void check_cache_given(const KvCache& tensors, const ConstTensor& cu_seqlens_k,
                       const ConstTensor& seqused_k);

/// Checks the shapes, dtypes and devices of a cache's tensors, and of k and v unless they are
/// packed. Sets sk, total_k, total_keys and the cache of a problem whose batch, heads, dims and
/// device are set. `max_seqlen_k` is that of the Options.
void check_cache(const KvCache& tensors, const ConstTensor& k, const ConstTensor& v,
                 int64_t max_seqlen_k, Problem& problem, const CacheNames& names = {});

}  // namespace fulgur

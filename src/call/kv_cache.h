#pragma once

#include <cstdint>

#include "base/check.h"
#include "call/problem.h"
#include "fulgur/attention.h"
#include "fulgur/scores.h"

namespace fulgur {

/// Whether a call's sequences lie where tables say, or begin after left padding.
inline bool given(const KvCache& cache) {
  return cache.page_table.given() || cache.page_indptr.given() || cache.cache_batch_idx.given() ||
         cache.leftpad_k.given();
}

/// Whether the host can read where rows lie.
inline bool tables_readable(const KvCache& cache) {
  return on_host(cache.page_table) && on_host(cache.page_indptr) && on_host(cache.cache_batch_idx);
}

/// The cache of a call. The backward pass has none.
inline KvCache cache_of(const ForwardArgs& args) { return args.cache; }
inline KvCache cache_of(const ScoresArgs& args) { return args.cache; }
inline KvCache cache_of(const BackwardArgs&) { return {}; }

/// What a call names its cache, and the tensor whose device its tables are on.
struct CacheNames {
  const char *k = "k", *v = "v", *like = "q";
};

/// Checks which of them are given together, and with what else.
void check_cache_given(const KvCache& tensors, const ConstTensor& cu_seqlens_k,
                       const ConstTensor& seqused_k);

/// Checks their shapes, dtypes and devices, and those of k and v where they are no packed tensors.
/// Sets what a problem says of keys: sk, total_k, total_keys and the cache. It knows the batch, the
/// heads, the dims and the device. `max_seqlen_k`: as Options says.
void check_cache(const KvCache& tensors, const ConstTensor& k, const ConstTensor& v,
                 int64_t max_seqlen_k, Problem& problem, const CacheNames& names = {});

}  // namespace fulgur

#pragma once

#include <cstdint>

#include "base/check.h"
#include "call/problem.h"
#include "fulgur/attention.h"

namespace fulgur {

/// The tensors that say where the sequences of a cache of K and V lie.
struct CacheTensors {
  ConstTensor page_table{}, page_indptr{}, cache_batch_idx{}, leftpad_k{};

  bool given() const {
    return page_table.given() || page_indptr.given() || cache_batch_idx.given() ||
           leftpad_k.given();
  }
  /// Whether the host can read where rows lie.
  bool readable() const {
    return on_host(page_table) && on_host(page_indptr) && on_host(cache_batch_idx);
  }
};

/// Those of a call. The backward pass has none.
inline CacheTensors cache_of(const ForwardArgs& args) {
  return {args.page_table, args.page_indptr, args.cache_batch_idx, args.leftpad_k};
}
inline CacheTensors cache_of(const BackwardArgs&) { return {}; }

/// What a call names its cache, and the tensor whose device its tables are on.
struct CacheNames {
  const char *k = "k", *v = "v", *like = "q";
};

/// Checks which of them are given together, and with what else.
void check_cache_given(const CacheTensors& tensors, const ConstTensor& cu_seqlens_k,
                       const ConstTensor& seqused_k);

/// Checks their shapes, dtypes and devices, and those of k and v where they are no packed tensors.
/// Sets what a problem says of keys: sk, total_k, total_keys and the cache. It knows the batch, the
/// heads, the dims and the device. `max_seqlen_k`: as Options says.
void check_cache(const CacheTensors& tensors, const ConstTensor& k, const ConstTensor& v,
                 int64_t max_seqlen_k, Problem& problem, const CacheNames& names = {});

}  // namespace fulgur

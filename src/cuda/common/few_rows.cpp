#include "cuda/common/few_rows.h"

#include <algorithm>

namespace fulgur::cuda {

bool rows_decide(const Problem& p) {
  return p.invariant && p.dtypes.q != DType::kE4M3 && !has_cache(p) && !p.has(Arg::kTreeMask) &&
         p.dropout_p == 0;
}

int64_t few_queries(const Problem& p) { return rows_decide(p) ? kFewRows / p.group() : 0; }

int64_t deciding_queries(const Problem& p) { return std::max(p.sq, p.origin.queries); }

bool takes_both(const Problem& p) {
  const int64_t few = few_queries(p);
  return few > 0 && p.sq > few && (p.packed || p.has(Arg::kSeqUsedQ));
}

AnyForwardKey forward_key_by_rows(const Problem& p) {
  AnyForwardKey key = any_forward_key(p);
  if (takes_both(p)) key.few_queries = static_cast<int>(few_queries(p));
  return key;
}

}  // namespace fulgur::cuda

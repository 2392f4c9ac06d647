/// Split-KV: with few queries and many keys, parts of the keys are attended to independently, and
/// the partial results are combined by their LSE. FlashAttention-3's combine step.
#include <cmath>

#include "reference/algorithms.h"
#include "reference/blocks.h"
#include "reference/sink.h"

namespace fulgur::reference {

Forward split_kv_forward(const Head& h, int64_t splits, int64_t M, Traffic* traffic) {
  std::vector<Forward> parts;
  for (int64_t s = 0; s < splits; ++s) {
    parts.push_back(flash2_forward_keys(h, s * h.sk / splits, (s + 1) * h.sk / splits, M, traffic));
  }
  Forward out = combine(parts, traffic);
  join_sink(h, out);
  return out;
}

Forward combine(const std::vector<Forward>& parts, Traffic* traffic) {
  const int64_t sq = parts[0].lse.size(), sq_dv = parts[0].o.size();
  Forward out{std::vector<double>(sq_dv), std::vector<double>(sq, -kInf)};
  load(traffic, parts.size() * (sq_dv + sq));
  for (int64_t i = 0; i < sq; ++i) {
    const int64_t dv = sq_dv / sq;
    double lse_max = -kInf;
    for (const Forward& part : parts) lse_max = maximum(lse_max, part.lse[i]);
    if (lse_max == -kInf) continue;  // no part sees a key
    double l = 0;                    // the normalizer of the union, relative to exp(lse_max)
    for (const Forward& part : parts) l += std::exp(part.lse[i] - lse_max);
    out.lse[i] = lse_max + std::log(l);
    for (const Forward& part : parts) {
      const double weight = std::exp(part.lse[i] - out.lse[i]);  // the part's share of the softmax
      add_scaled(dv, weight, &part.o[i * dv], &out.o[i * dv]);
    }
  }
  store(traffic, sq_dv + sq);
  return out;
}

}  // namespace fulgur::reference

#include "host/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "base/convert.h"
#include "base/parallel.h"

namespace fulgur::host {

void merge(const MergeCall& call, int threads) {
  parallel_for(call.batch * call.rows, threads, [&](int64_t row) {
    const int64_t b = row / call.rows, r = row % call.rows;
    std::vector<double> weight(call.from.size()), sum(call.dim);
    for (int64_t h = 0; h < call.heads; ++h) {
      double m = -std::numeric_limits<double>::infinity(), total = 0;
      for (size_t i = 0; i < call.from.size(); ++i) {
        const ConstTensor& lse = call.from[i].lse;
        weight[i] = load_element(lse.data, lse.dtype, call.from[i].lse_rows.offset(b, r, h));
        m = std::fmax(m, weight[i]);
      }
      // All parts saw no key: subtracting -inf from itself would give NaN instead of 0.
      const double shift = std::isinf(m) && m < 0 ? 0 : m;
      // An infinite sink takes all of the weight: less itself it would give NaN.
      for (double& w : weight) total += w = w == shift ? 1 : std::exp(w - shift);
      std::fill(sum.begin(), sum.end(), 0.0);
      for (size_t i = 0; i < call.from.size(); ++i) {
        if (weight[i] == 0) continue;  // an unseen part may hold anything
        const ConstTensor& out = call.from[i].out;
        const int64_t at = call.from[i].out_rows.offset(b, r, h);
        for (int64_t c = 0; c < call.dim; ++c) {
          sum[c] += weight[i] / total * load_element(out.data, out.dtype, at + c);
        }
      }
      const int64_t at = call.out_rows.offset(b, r, h);
      for (int64_t c = 0; c < call.dim; ++c) {
        store_element(call.to.out.data, call.to.out.dtype, at + c, sum[c]);
      }
      if (call.to.lse.given()) {
        store_element(call.to.lse.data, call.to.lse.dtype, call.lse_rows.offset(b, r, h),
                      shift + std::log(total));
      }
    }
  });
}

}  // namespace fulgur::host

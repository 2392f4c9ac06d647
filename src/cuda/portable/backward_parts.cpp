#include "cuda/portable/backward_parts.h"

#include <algorithm>

#include "cuda/common/launch.h"
#include "kernels/portable/backward/bias_tile.h"

namespace fulgur::cuda::portable {

KernelUse reduce_kernel(const AnyBackwardKey& of) {
  BackwardKey key;
  static_cast<AnyBackwardKey&>(key) = reduce_key(of);
  key.splits_heads = true;
  return {{"portable/backward/reduce.cu", kernel_config(key)}, "fulgur_portable_reduce", 0};
}

void launch_reduce(CUstream stream, CUfunction kernel, const BackwardParams& params, int sms) {
  constexpr int kThreads = 256, kBlocks = 8, kMaxGridY = 65535;  // kBlocks: CTAs per SM
  const int heads = std::clamp(params.batch * (params.hq / params.group), 1, kMaxGridY);
  cuda::launch(stream, kernel, &params, {ceil_div(kBlocks * sms, heads), heads}, kThreads, 0,
               "launching the kernel that reduces dK and dV");
}

BackwardKey key_of_tiles(const AnyBackwardKey& of, bool whole_columns) {
  BackwardKey key;
  static_cast<KernelKey&>(key) = of;
  key.maps_tiles = false;
  key.block_rows = key.block_keys = kernels::kPortableBiasTile;
  key.dropout = of.dropout;
  key.whole_columns = whole_columns;
  key.dq_by_fours = of.dq_by_fours;
  key.early_starts = of.early_starts;
  return key;
}

BiasGradientKernel bias_gradient_kernel(const AnyBackwardKey& of, const AnyBackwardPlan& plan,
                                        bool whole_columns) {
  if (!plan.dbias) return {};
  const BackwardKey key = key_of_tiles(of, whole_columns);
  const int shared_bytes =
      kernels::portable_bias_layout(operands_of(key), key.head_dim, key.value_dim).bytes;
  return {{{"portable/backward/bias_gradient.cu", kernel_config(key)},
           "fulgur_portable_bias_gradient",
           shared_bytes},
          kernels::kPortableBiasTile,
          128,
          2};
}

}  // namespace fulgur::cuda::portable

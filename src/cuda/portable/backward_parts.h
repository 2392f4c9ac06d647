#pragma once

#include "cuda/passes/backward.h"
#include "cuda/portable/backward_config.h"

namespace fulgur::cuda::portable {

// The kernels of portable/backward/ that backward passes of all head dims launch after those that
// compute dQ, dK and dV.

/// The kernel that adds dK and dV of splits.
KernelUse reduce_kernel(const AnyBackwardKey& key);
void launch_reduce(CUstream stream, CUfunction kernel, const BackwardParams& params, int sms);

/// The key of kernels with tiles of 64 queries and 64 keys, whatever tiles the others have.
BackwardKey key_of_tiles(const AnyBackwardKey& key, bool whole_columns);
/// The kernel of dbias; none if it is not requested.
BiasGradientKernel bias_gradient_kernel(const AnyBackwardKey& key, const AnyBackwardPlan& plan,
                                        bool whole_columns);

}  // namespace fulgur::cuda::portable

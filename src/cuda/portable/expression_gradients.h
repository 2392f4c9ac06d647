#pragma once

#include <cstdint>
#include <vector>

#include "cuda/common/expression.h"
#include "cuda/common/launch.h"
#include "cuda/device/gpu.h"
#include "cuda/portable/backward_config.h"
#include "kernels/backward/params.h"

namespace fulgur::cuda::portable {

/// The kernels that compute gradients of the tensors that score_mod indexes. `key`: of tiles of 64
/// queries and 64 keys.
std::vector<KernelUse> expression_gradient_kernels(const BackwardKey& key);

/// Launches these kernels, if any gradient is requested.
class ExpressionGradients {
 public:
  ExpressionGradients() = default;
  ExpressionGradients(const Problem& problem, const BackwardKey& key, Gpu& gpu);

  /// Bytes of the sums in a workspace.
  static int64_t bytes(const Problem& problem);

  /// Launches the kernels. `params`: of the call; `sums`: the sums in the workspace.
  void launch(CUstream stream, BackwardParams params, const BackwardArgs& args, char* sums) const;

 private:
  expression::Expressions expressions_;
  CUfunction add_ = nullptr, round_ = nullptr;
  int ctas_ = 0, shared_bytes_ = 0, log_scores_ = 0, round_ctas_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace fulgur::cuda::portable

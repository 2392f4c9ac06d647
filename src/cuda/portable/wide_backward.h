#pragma once

#include <vector>

#include "cuda/portable/expression_gradients.h"
#include "cuda/portable/wide_backward_plan.h"

namespace fulgur::cuda::portable {

/// The kernels that a plan launches, that of the first gradient first.
std::vector<KernelUse> wide_backward_kernels(const WideBackwardPlan& plan);

/// The host half of portable/wide_backward/gradient.cu: a plan with its compiled kernels on a
/// device.
class WideBackwardExecutable final : public BackwardPassExecutable {
 public:
  WideBackwardExecutable(const Problem& problem, Gpu& gpu, const WideBackwardPlan& plan,
                         Explanation explanation);

 private:
  void launch(const BackwardArgs& args, const Run& run, char* workspace) const override;

  /// The kernel of a gradient, and its launch.
  struct GradientLaunch {
    CUfunction kernel;
    int ctas, threads, shared_bytes;
  };

  WideBackwardWorkspace at_;
  ExpressionGradients tensor_gradients_;
  std::vector<GradientLaunch> gradients_;
  CUfunction reduce_ = nullptr, repair_ = nullptr;
};

using WideBackwardCandidate =
    PlannedCandidate<WideBackwardPlan, WideBackwardExecutable, wide_backward_kernels>;

/// The kernel of portable/wide_backward/, for heads wider than those of other kernels.
const Family& wide_backward_family();

}  // namespace fulgur::cuda::portable

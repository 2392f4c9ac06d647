#pragma once

#include <vector>

#include "cuda/passes/backward.h"
#include "cuda/portable/backward_plan.h"
#include "cuda/portable/expression_gradients.h"

namespace fulgur::cuda::portable {

/// The kernels that a plan launches, the kernel by keys first.
std::vector<KernelUse> backward_kernels(const BackwardPlan& plan);

/// The host half of portable/backward/keys.cu: a plan with its compiled kernels on a device.
class BackwardExecutable final : public BackwardPassExecutable {
 public:
  BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan,
                     Explanation explanation);

 private:
  void launch(const BackwardArgs& args, const Run& run, char* workspace) const override;

  BackwardPlan plan_;
  BackwardWorkspace at_;
  ExpressionGradients tensor_gradients_;
  CUfunction keys_ = nullptr, reduce_ = nullptr;
};

using BackwardCandidate = PlannedCandidate<BackwardPlan, BackwardExecutable, backward_kernels>;

/// The kernels of portable/backward/.
const Family& backward_family();
/// On Hopper, for what its own kernels do not compute, or not as well: f32, and calls with
/// expressions.
const Family& backward_family_for_hopper();

}  // namespace fulgur::cuda::portable

#pragma once

#include <vector>

#include "cuda/common/forward.h"
#include "cuda/common/planned_family.h"
#include "cuda/portable/forward_plan.h"
#include "kernels/portable/forward/params.h"

namespace fulgur::cuda::portable {

/// What a plan launches: the forward kernel first, if there is work, then those with it.
std::vector<KernelUse> forward_kernels(const ForwardPlan& plan);

/// The host's half of portable/forward/forward.cu: a plan with its compiled kernels on a device.
class ForwardExecutable final : public ForwardPassExecutable {
 public:
  ForwardExecutable(const Problem& problem, Gpu& gpu, const ForwardPlan& plan,
                    Explanation explanation);

 private:
  void launch(const ForwardArgs& args, const Run& run, char* workspace) const override;

  ForwardPlan plan_;
  TileMap map_;
  int64_t map_at_ = 0;  ///< where in the workspace
  CUfunction kernel_ = nullptr;
  PortableForwardParams params_{};  ///< what every run has in common
};

using ForwardCandidate = PlannedCandidate<ForwardPlan, ForwardExecutable, forward_kernels>;

/// The kernels of portable/forward/.
const Family& forward_family();

}  // namespace fulgur::cuda::portable

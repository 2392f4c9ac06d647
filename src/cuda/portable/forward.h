#pragma once

#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/passes/forward.h"
#include "cuda/portable/forward_plan.h"
#include "kernels/portable/forward/params.h"

namespace fulgur::cuda::portable {

/// The kernels of a plan: first the forward kernel, if there is work.
std::vector<KernelUse> forward_kernels(const ForwardPlan& plan);

/// The host half of portable/forward/forward.cu: a plan with its compiled kernels on a device.
class ForwardExecutable final : public ForwardPassExecutable {
 public:
  ForwardExecutable(const Problem& problem, Gpu& gpu, const ForwardPlan& plan,
                    Explanation explanation);

 private:
  void launch(const ForwardArgs& args, const Run& run, char* workspace) const override;

  ForwardPlan plan_;
  TileMap map_;
  int64_t map_at_ = 0;  ///< offset in the workspace
  CUfunction kernel_ = nullptr;
  PortableForwardParams params_{};  ///< the arguments that are the same in every run
};

using ForwardCandidate = PlannedCandidate<ForwardPlan, ForwardExecutable, forward_kernels>;

/// The kernels of portable/forward/.
const Family& forward_family();
/// On Hopper, for what its own kernels do not compute: f32.
const Family& forward_family_for_hopper();

}  // namespace fulgur::cuda::portable

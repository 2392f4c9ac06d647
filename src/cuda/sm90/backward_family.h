#pragma once

#include "cuda/sm90/backward_plan.h"

namespace fulgur::cuda {

/// The kernels of sm90/backward_*.cu.
const Family& hopper_backward_family();

/// A tile of theirs, planned for a problem.
class HopperBackwardCandidate final : public Candidate {
 public:
  HopperBackwardCandidate(const Problem& problem, const HopperBackwardTile& fitting);
  std::vector<KernelUse> kernels() const override;
  std::unique_ptr<const Executable> executable(Gpu& gpu, Reasons reasons) const override;

  const HopperBackwardPlan& plan() const { return plan_; }

 private:
  Problem problem_;
  HopperBackwardPlan plan_;
};

}  // namespace fulgur::cuda

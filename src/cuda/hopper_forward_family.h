#pragma once

#include "cuda/family.h"
#include "cuda/hopper_forward_plan.h"

namespace fulgur::cuda {

/// sm90/forward.cu.
const Family& hopper_forward_family();

/// A tile of it.
class HopperForwardCandidate final : public Candidate {
 public:
  HopperForwardCandidate(const Problem& problem, const HopperForwardTile& tile);

  std::vector<KernelUse> kernels() const override;
  std::unique_ptr<const Executable> executable(Gpu& gpu, Reasons reasons) const override;

  const HopperForwardPlan& plan() const { return plan_; }

 private:
  Problem problem_;
  HopperForwardPlan plan_;
};

}  // namespace fulgur::cuda

#pragma once

#include <optional>

#include "cuda/common/family.h"
#include "cuda/sm90/decode_plan.h"
#include "cuda/sm90/forward_plan.h"

namespace fulgur::cuda {

/// sm90/forward/forward.cu.
const Family& hopper_forward_family();

/// A tile of it, and with it what decode.cu has of a problem that takes_both.
class HopperForwardCandidate final : public Candidate {
 public:
  HopperForwardCandidate(const Problem& problem, const Target& target,
                         const HopperForwardTile& tile);

  std::vector<KernelUse> kernels() const override;
  std::unique_ptr<const Executable> executable(Gpu& gpu, Reasons reasons) const override;

  const HopperForwardPlan& plan() const { return plan_; }

 private:
  Problem problem_;
  HopperForwardPlan plan_;
  std::optional<HopperDecodePlan> few_;
};

}  // namespace fulgur::cuda

#pragma once

#include "cuda/common/family.h"
#include "cuda/sm90/decode_plan.h"

namespace fulgur::cuda {

/// sm90/decode/decode.cu.
const Family& hopper_decode_family();

/// Its tile for a problem.
class HopperDecodeCandidate final : public Candidate {
 public:
  HopperDecodeCandidate(const Problem& problem, const HopperDecodeTile& tile);

  std::vector<KernelUse> kernels() const override;
  std::unique_ptr<const Executable> executable(Gpu& gpu, Reasons reasons) const override;
  std::shared_ptr<const Candidate> fused(const Problem::Append& append,
                                         std::string* why_not) const override;

  const HopperDecodePlan& plan() const { return plan_; }

 private:
  Problem problem_;
  HopperDecodePlan plan_;
};

}  // namespace fulgur::cuda

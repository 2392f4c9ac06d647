#include "cuda/sm90/backward_family.h"

#include "cuda/sm90/backward.h"

namespace fulgur::cuda {
namespace {

class HopperBackwardFamily final : public Family {
 public:
  Pass pass() const override { return Pass::kBackward; }
  std::string rejects(const Problem& problem) const override { return backward_rejects(problem); }
  Candidates candidates(const Problem& problem, const Target& target,
                        std::vector<std::string>* rejected) const override {
    Candidates result;
    for (const HopperBackwardTile& tile : backward_candidates(problem, target, rejected)) {
      result.push_back(std::make_shared<HopperBackwardCandidate>(problem, tile));
    }
    return result;
  }
};

}  // namespace

HopperBackwardCandidate::HopperBackwardCandidate(const Problem& problem,
                                                 const HopperBackwardTile& fitting)
    : problem_(problem), plan_(fitting.plan) {
  tile = plan_.tile();
  cycles = fitting.cycles;
  workspace = workspace_of(problem, plan_).end;
}

std::vector<KernelUse> HopperBackwardCandidate::kernels() const {
  return hopper_backward_kernels(plan_);
}

std::unique_ptr<const Executable> HopperBackwardCandidate::executable(Gpu& gpu,
                                                                      Reasons reasons) const {
  return std::make_unique<HopperBackward>(problem_, gpu, plan_, std::move(reasons));
}

const Family& hopper_backward_family() {
  static const HopperBackwardFamily kFamily;
  return kFamily;
}

}  // namespace fulgur::cuda

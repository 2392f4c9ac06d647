#include "cuda/hopper_forward_family.h"

#include "cuda/hopper_forward.h"

namespace fulgur::cuda {
namespace {

class HopperForwardFamily final : public Family {
 public:
  Pass pass() const override { return Pass::kForward; }
  std::string rejects(const Problem& problem) const override {
    return hopper_forward_rejects(problem);
  }
  Candidates candidates(const Problem& problem, const Target& target,
                        std::vector<std::string>* rejected) const override {
    Candidates result;
    for (const HopperForwardTile& tile : hopper_forward_tiles(problem, target, rejected)) {
      result.push_back(std::make_shared<HopperForwardCandidate>(problem, tile));
    }
    return result;
  }
};

}  // namespace

HopperForwardCandidate::HopperForwardCandidate(const Problem& problem,
                                               const HopperForwardTile& fitting)
    : problem_(problem), plan_(fitting.plan) {
  tile = plan_.tile();
  cycles = fitting.cycles;
  workspace = workspace_of(problem, plan_).end;
  tuned_only = fitting.tuned_only;
}

std::vector<KernelUse> HopperForwardCandidate::kernels() const {
  return hopper_forward_kernels(plan_);
}

std::unique_ptr<const Executable> HopperForwardCandidate::executable(Gpu& gpu,
                                                                     Reasons reasons) const {
  return std::make_unique<HopperForward>(problem_, gpu, plan_, std::move(reasons));
}

const Family& hopper_forward_family() {
  static const HopperForwardFamily kFamily;
  return kFamily;
}

}  // namespace fulgur::cuda

#include "cuda/sm90/decode_family.h"

#include "cuda/sm90/decode.h"

namespace fulgur::cuda {
namespace {

class HopperDecodeFamily final : public Family {
 public:
  Pass pass() const override { return Pass::kForward; }
  std::string rejects(const Problem& problem) const override { return decode_rejects(problem); }
  Candidates candidates(const Problem& problem, const Target& target,
                        std::vector<std::string>*) const override {
    return {std::make_shared<HopperDecodeCandidate>(problem, decode_candidate(problem, target))};
  }
};

}  // namespace

HopperDecodeCandidate::HopperDecodeCandidate(const Problem& problem, const HopperDecodeTile& only)
    : problem_(problem), plan_(only.plan) {
  tile = plan_.tile();
  cycles = only.cycles;
  workspace = workspace_of(problem, plan_).end;
  tuned_only = only.tuned_only;
}

std::vector<KernelUse> HopperDecodeCandidate::kernels() const {
  return hopper_decode_kernels(plan_);
}

std::unique_ptr<const Executable> HopperDecodeCandidate::executable(Gpu& gpu,
                                                                    Reasons reasons) const {
  return std::make_unique<HopperDecode>(problem_, gpu, plan_, std::move(reasons));
}

std::shared_ptr<const Candidate> HopperDecodeCandidate::fused(const Problem::Append& append,
                                                              std::string* why_not) const {
  Problem problem = problem_;
  problem.append = append;
  *why_not = hopper_decode_not_fused(problem, plan_);
  if (!why_not->empty()) return nullptr;
  return std::make_shared<HopperDecodeCandidate>(
      problem, HopperDecodeTile{fused_plan(problem, plan_), cycles, tuned_only});
}

const Family& hopper_decode_family() {
  static const HopperDecodeFamily kFamily;
  return kFamily;
}

}  // namespace fulgur::cuda

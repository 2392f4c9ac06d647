#include "cuda/sm90/forward_family.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "cuda/sm90/common.h"
#include "cuda/sm90/decode.h"
#include "cuda/sm90/forward.h"

namespace fulgur::cuda {
namespace {

/// A run of both kernels, each of the sequences that are its own, one after the other in one
/// workspace.
class HopperBoth final : public Executable {
 public:
  HopperBoth(std::unique_ptr<const Executable> forward, std::unique_ptr<const Executable> decode)
      : forward_(std::move(forward)), decode_(std::move(decode)) {}

  void run(const Call& call, const Run& run) const override {
    forward_->run(call, run);
    decode_->run(call, run);
  }
  Explanation explain() const override {
    Explanation both = forward_->explain();
    for (const std::string& sentence : decode_->explain().decisions)
      both.decisions.push_back(
          fmt::format("of sequences of up to {} rows of a kv head: {}", kFewRows, sentence));
    return both;
  }
  WorkspaceNeed workspace() const override {
    WorkspaceNeed need = forward_->workspace();
    need.bytes = std::max(need.bytes, decode_->workspace().bytes);
    return need;
  }

 private:
  std::unique_ptr<const Executable> forward_, decode_;
};

class HopperForwardFamily final : public Family {
 public:
  Pass pass() const override { return Pass::kForward; }
  std::string rejects(const Problem& problem) const override {
    const std::string why = forward_rejects(problem);
    return why.empty() && takes_both(problem) ? hopper_decode_rejects_few(problem) : why;
  }
  Candidates candidates(const Problem& problem, const Target& target,
                        std::vector<std::string>* rejected) const override {
    Candidates result;
    for (const HopperForwardTile& tile : forward_candidates(problem, target, rejected)) {
      result.push_back(std::make_shared<HopperForwardCandidate>(problem, target, tile));
    }
    return result;
  }
};

}  // namespace

HopperForwardCandidate::HopperForwardCandidate(const Problem& problem, const Target& target,
                                               const HopperForwardTile& fitting)
    : problem_(problem), plan_(fitting.plan) {
  tile = plan_.tile();
  cycles = fitting.cycles;
  workspace = workspace_of(problem, plan_).end;
  tuned_only = fitting.tuned_only;
  if (!takes_both(problem)) return;
  few_ = decode_candidate(problem, target).plan;
  workspace = std::max(workspace, workspace_of(problem, *few_).end);
}

std::vector<KernelUse> HopperForwardCandidate::kernels() const {
  std::vector<KernelUse> kernels = hopper_forward_kernels(plan_);
  if (few_) std::ranges::move(hopper_decode_kernels(*few_), std::back_inserter(kernels));
  return kernels;
}

std::unique_ptr<const Executable> HopperForwardCandidate::executable(Gpu& gpu,
                                                                     Reasons reasons) const {
  auto forward = std::make_unique<HopperForward>(problem_, gpu, plan_, std::move(reasons));
  if (!few_) return forward;
  return std::make_unique<HopperBoth>(
      std::move(forward), std::make_unique<HopperDecode>(problem_, gpu, *few_, Reasons{}));
}

const Family& hopper_forward_family() {
  static const HopperForwardFamily kFamily;
  return kFamily;
}

}  // namespace fulgur::cuda

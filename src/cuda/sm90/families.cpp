#include "cuda/sm90/families.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

#include "cuda/common/expression.h"
#include "cuda/decode/candidates.h"
#include "cuda/decode/family.h"
#include "cuda/decode/rejects.h"
#include "cuda/passes/forward.h"
#include "cuda/sm90/backward_candidates.h"
#include "cuda/sm90/forward.h"
#include "cuda/sm90/forward_candidates.h"
#include "cuda/sm90/forward_rejects.h"

namespace fulgur::cuda::sm90 {
namespace {

/// Whether one kernel computes all sequences of a forward pass.
bool takes_one(const Problem& p) {
  return p.pass == Pass::kForward && !exceeds_16_bits(p.dtypes) && !takes_both(p);
}

/// Whether it is a backward pass of this family. Here tensors of expressions have no gradients, and
/// derivatives of scores have 16 bits: those of a user's score_mod need the range of bf16.
bool is_backward(const Problem& p) {
  return p.pass == Pass::kBackward && !exceeds_16_bits(p.dtypes) &&
         !p.expressions.wants_gradients() &&
         (p.dtypes.out == DType::kBF16 || !DeviceExpressions(p).has_slope());
}

Explanation described(Explanation many, const Explanation& few) {
  many.details.add("few_rows", few.details);
  for (const std::string& sentence : few.decisions) {
    many.decisions.push_back(
        fmt::format("of sequences of up to {} rows of a kv head: {}", kFewRows, sentence));
  }
  return many;
}

/// Runs both kernels, one after the other, in one workspace.
class ByRowsExecutable final : public Executable {
 public:
  ByRowsExecutable(std::unique_ptr<const Executable> many, std::unique_ptr<const Executable> few)
      : many_(std::move(many)), few_(std::move(few)) {}

  void run(const Call& call, const Run& run) const override {
    many_->run(call, run);
    few_->run(call, run);
  }
  Explanation explain() const override { return described(many_->explain(), few_->explain()); }
  WorkspaceNeed workspace() const override {
    WorkspaceNeed need = many_->workspace();
    need.bytes = std::max(need.bytes, few_->workspace().bytes);
    return need;
  }

 private:
  std::unique_ptr<const Executable> many_, few_;
};

/// A candidate that consists of one for sequences of many rows and one for sequences of few rows.
class ByRowsCandidate final : public Candidate {
 public:
  ByRowsCandidate(std::shared_ptr<const Candidate> many, std::shared_ptr<const Candidate> few)
      : many_(std::move(many)), few_(std::move(few)) {
    tile = many_->tile;
    cycles = many_->cycles;
    workspace = std::max(many_->workspace, few_->workspace);
    tuned_only = many_->tuned_only;
  }

  Explanation explain() const override { return described(many_->explain(), few_->explain()); }
  std::vector<KernelUse> kernels() const override {
    std::vector<KernelUse> kernels = many_->kernels();
    std::ranges::move(few_->kernels(), std::back_inserter(kernels));
    return kernels;
  }
  std::unique_ptr<const Executable> executable(Gpu& gpu, const Reasons& reasons) const override {
    return std::make_unique<ByRowsExecutable>(many_->executable(gpu, reasons),
                                              few_->executable(gpu, {}));
  }

 private:
  std::shared_ptr<const Candidate> many_, few_;
};

class InvariantByRows final : public Family {
 public:
  bool is_for(const Problem& p) const override {
    return p.pass == Pass::kForward && !exceeds_16_bits(p.dtypes) && takes_both(p);
  }
  std::string rejects(const Problem& problem) const override {
    const std::string why = forward_rejects(problem);
    return why.empty() ? decode::decode_rejects_few(problem) : why;
  }
  Candidates candidates(const Problem& problem, const Card& card,
                        std::vector<std::string>* rejected) const override {
    const auto few =
        std::make_shared<decode::DecodeCandidate>(problem, decode::decode_candidate(problem, card));
    Candidates result;
    for (const Fitting<ForwardPlan>& tile : forward_candidates(problem, card, rejected)) {
      result.push_back(std::make_shared<ByRowsCandidate>(
          std::make_shared<ForwardCandidate>(problem, tile), few));
    }
    return result;
  }
};

}  // namespace

const Family& forward_family() {
  static const PlannedFamily<ForwardCandidate> kFamily(takes_one, forward_rejects,
                                                       forward_candidates);
  return kFamily;
}

const Family& invariant_by_rows_family() {
  static const InvariantByRows kFamily;
  return kFamily;
}

const Family& backward_family() {
  static const PlannedFamily<BackwardCandidate> kFamily(is_backward, backward_rejects,
                                                        backward_candidates);
  return kFamily;
}

}  // namespace fulgur::cuda::sm90

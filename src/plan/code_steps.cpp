#include "plan/code_steps.h"

#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "base/convert.h"
#include "base/hadamard.h"
#include "call/append_then_attend.h"
#include "fulgur/error.h"
#include "plan/step_places.h"

namespace fulgur {
namespace {

/// Codes are of rotated rows already.
bool rotates_queries(const Problem& p) { return p.hadamard && !is_low_bit(p.dtypes.q); }

/// `begin`: the end of the attention's workspace.
StepPlaces places_of(const Problem& p, const CodeSteps& steps, int64_t begin) {
  return {rotates_queries(p) ? rotated_bytes(p) : 0, steps.bytes(), begin};
}

class CodeStepsExecutable final : public Executable {
 public:
  CodeStepsExecutable(const Problem& p, const Engine& engine,
                      std::unique_ptr<const CodeSteps> steps,
                      std::unique_ptr<const Executable> attention)
      : p_(p),
        engine_(engine),
        steps_(std::move(steps)),
        attention_(std::move(attention)),
        at_(places_of(p, *steps_, attention_->workspace().bytes)) {}

  void run(const Call& call, const Run& run) const override {
    ForwardArgs args = *std::get<const ForwardArgs*>(call);
    engine_.with_workspace(p_.device, workspace(), run, [&](void* memory) {
      auto* const bytes = static_cast<std::byte*>(memory);
      if (rotates_queries(p_) && p_.total_q > 0) {
        const Tensor to = rotated_like(args.q, bytes + at_.rotated);
        const int64_t batch = p_.packed ? 1 : p_.batch;
        steps_->rotate({args.q, to, false, batch, p_.total_q / batch, p_.hq, p_.d}, run);
        args.q = to;
      }
      Run attend = run;
      if (at_.end > 0) attend.workspace = {bytes, attention_->workspace().bytes};
      attention_->run(&args, attend);
      if (adds_means()) steps_->add_means(args, bytes + at_.step, run);
    });
  }

  Explanation explain() const override {
    Explanation e = attention_->explain();
    if (rotates_queries(p_)) {
      e.decisions.insert(e.decisions.begin(), "q is rotated first, as the keys are (hadamard)");
    }
    if (adds_means()) e.decisions.push_back("lse takes the products of q and k_mean at last");
    return e;
  }

  Estimate estimate(const std::vector<Sequence>& lengths) const override {
    Estimate attention = attention_->estimate(lengths);
    attention.at_least = true;
    return attention;
  }

  WorkspaceNeed workspace() const override { return at_.need(attention_->workspace()); }

 private:
  bool adds_means() const { return p_.has(Arg::kKMean) && p_.has(Arg::kLse); }

  Problem p_;
  const Engine& engine_;
  std::unique_ptr<const CodeSteps> steps_;
  std::unique_ptr<const Executable> attention_;
  StepPlaces at_;
};

}  // namespace

bool has_code_steps(const Problem& p) { return p.hadamard || p.has(Arg::kKMean); }

Problem without_code_steps(Problem p) {
  if (rotates_queries(p)) p = with_rotated_queries(p);
  p.hadamard = false;
  p.given.set(Arg::kKMean, false);
  return p;
}

std::unique_ptr<const Executable> plan_code_steps(const Problem& p, const Engine& engine,
                                                  int threads, const PlanAttention& plan_attention,
                                                  std::vector<std::string>* rejected) {
  if (p.has(Arg::kKMean)) {
    const char* const other = p.softcap > 0                    ? "softcap"
                              : p.has(Arg::kSinks)             ? "sinks"
                              : p.expressions.changes_scores() ? "score_mod"
                                                               : nullptr;
    if (other != nullptr) {
      throw Error(Status::kUnsupported,
                  fmt::format("k_mean: given with {}, want none: scores are less q times the mean, "
                              "which the softmax alone does not see",
                              other));
    }
  }
  auto steps = engine.code_steps(rotates_queries(p) ? with_rotated_queries(p) : p, threads);
  Problem attention = without_code_steps(p);
  if (attention.max_workspace > 0) {
    attention.max_workspace = places_of(p, *steps, 0).left_of(attention.max_workspace);
  }
  return std::make_unique<CodeStepsExecutable>(p, engine, std::move(steps),
                                               plan_attention(attention, rejected));
}

}  // namespace fulgur

#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// A plan that fits a problem and a card.
template <class Plan>
struct Fitting {
  Plan plan;
  double cycles = 0;         ///< predicted
  std::string tuned_only{};  ///< Candidate::tuned_only
};

/// A candidate that consists of a `Plan`; `kKernels` lists its kernels, `Launcher` launches them.
template <class Plan_, class Launcher, std::vector<KernelUse> (*kKernels)(const Plan_&)>
class PlannedCandidate final : public Candidate {
 public:
  using Plan = Plan_;

  PlannedCandidate(const Problem& problem, const Fitting<Plan>& fitting)
      : problem_(problem), plan_(fitting.plan) {
    tile = plan_.tile();
    cycles = fitting.cycles;
    workspace = workspace_of(problem, plan_).end;
    tuned_only = fitting.tuned_only;
  }

  Explanation explain() const override {
    if constexpr (requires { describe(plan_, problem_); }) {
      return describe(plan_, problem_);
    } else {
      return describe(plan_);
    }
  }

  std::vector<KernelUse> kernels() const override { return kKernels(plan_); }

  std::unique_ptr<const Executable> executable(Gpu& gpu, const Reasons& reasons) const override {
    return std::make_unique<Launcher>(problem_, gpu, plan_, with_reasons(explain(), reasons));
  }

  std::shared_ptr<const Candidate> fused(const Problem::Append& append,
                                         std::string* why_not) const override {
    Problem problem = problem_;
    problem.append = append;
    if constexpr (requires { fused_plan(problem, plan_); }) {
      *why_not = not_fused(problem, plan_);
      if (!why_not->empty()) return nullptr;
      return std::make_shared<PlannedCandidate>(
          problem, Fitting<Plan>{fused_plan(problem, plan_), cycles, tuned_only});
    } else {
      return Candidate::fused(append, why_not);
    }
  }

  const Plan& plan() const { return plan_; }

 private:
  Problem problem_;
  Plan plan_;
};

/// A family whose candidates are plans.
template <class Planned>
class PlannedFamily final : public Family {
 public:
  using Fittings = std::vector<Fitting<typename Planned::Plan>>;
  using IsFor = bool(const Problem&);
  using Rejects = std::string(const Problem&);
  using Plans = Fittings(const Problem&, const Card&, std::vector<std::string>*);
  /// Returns plans, each with a problem that it computes.
  using Reachable = std::vector<std::pair<Problem, typename Planned::Plan>>(const Problem&,
                                                                            const Card&);

  PlannedFamily(IsFor* is_for, Rejects* rejects, Plans* plans, Reachable* reachable = nullptr)
      : is_for_(is_for), rejects_(rejects), plans_(plans), reachable_(reachable) {}

  bool is_for(const Problem& problem) const override { return is_for_(problem); }
  std::string rejects(const Problem& problem) const override { return rejects_(problem); }
  Candidates candidates(const Problem& problem, const Card& card,
                        std::vector<std::string>* rejected) const override {
    Candidates result;
    for (const auto& fitting : plans_(problem, card, rejected)) {
      result.push_back(std::make_shared<Planned>(problem, fitting));
    }
    return result;
  }
  Candidates reachable(const Problem& problem, const Card& card) const override {
    Candidates result;
    if (reachable_ == nullptr) return result;
    for (const auto& [like, plan] : reachable_(problem, card)) {
      result.push_back(
          std::make_shared<Planned>(like, Fitting<typename Planned::Plan>{plan, 0, {}}));
    }
    return result;
  }

 private:
  IsFor* is_for_;
  Rejects* rejects_;
  Plans* plans_;
  Reachable* reachable_;
};

}  // namespace fulgur::cuda

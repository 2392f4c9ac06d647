#include "cuda/engine/card_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <variant>

#include "call/mask.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/choose.h"
#include "cuda/papers/counts.h"
#include "engine/workspace.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

constexpr double kExponentials = 16;  // per SM and cycle

[[noreturn]] void not_here(const Card& card) {
  throw Error(Status::kUnsupported,
              fmt::format("this plan says what to expect of one {}, and runs nowhere", card.name));
}

/// The card with the rates that the cost models of its kernels were fitted to.
Card as_planned(const Card& card, const Architecture& architecture) {
  if (!features_of(card.target).has_wgmma) return card;
  return card_of(architecture, card.sms, card.shared_bytes);
}

/// The details of a plan without the times that were measured on another device.
Details without_estimate(const Details& plan) {
  Details rest;
  for (const auto& [name, value] : plan.entries()) {
    if (name == "estimate_us" || name == "bound") continue;
    std::visit([&, &name = name](const auto& v) { rest.add(name, v); }, value);
  }
  return rest;
}

class CardExecutable final : public Executable {
 public:
  CardExecutable(const Problem& problem, const Card& card, const Card& planned,
                 std::shared_ptr<const Candidate> best, Reasons reasons)
      : problem_(problem),
        card_(card),
        planned_(planned),
        best_(std::move(best)),
        reasons_(std::move(reasons)) {}

  void run(const Call&, const Run&) const override { not_here(card_); }
  Explanation explain() const override {
    Explanation e = with_reasons(best_->explain(), reasons_);
    e.details = without_estimate(e.details);
    return e;
  }
  WorkspaceNeed workspace() const override { return {best_->workspace, kWorkspaceAlignment}; }

  Estimate estimate(const std::vector<Sequence>& lengths) const override {
    double scores = 0;
    for (const Sequence& s : lengths) scores += visible_scores(problem_.mask, s);
    scores *= static_cast<double>(problem_.hq * (problem_.alike() ? problem_.batch : 1));
    const double flops = scores * flops_per_score(problem_);
    const double rate = tensor_rate(problem_.dtypes.q, card_);
    const double peak = card_.sms * card_.megahertz * rate;  // FLOP per microsecond
    const double read = card_.bytes_per_cycle * card_.megahertz;
    const std::array<std::pair<const char*, double>, 3> limits = {
        {{"products", flops / peak},
         {"exponentials", scores / (card_.sms * card_.megahertz * kExponentials)},
         {"memory", bytes(problem_) / read}}};
    const auto longest =
        std::ranges::max_element(limits, {}, [](const auto& l) { return l.second; });
    const double modelled = planned_.launch_microseconds + best_->cycles / planned_.megahertz;
    Estimate e;
    e.microseconds = std::max(modelled, longest->second);
    e.bound =
        longest == &limits[2] ? "memory" : "products";  // exponentials count as part of products
    e.at_least = modelled < longest->second;
    e.sentence = fmt::format(
        "{} {:.4g} us on one {} ({} SMs at {:.0f} MHz), {:.4g} TFLOP/s: {:.0f}% of the peak of {}, "
        "which binds; at peaks products take {:.4g} us ({:.4g} TFLOP/s), exponentials {:.4g} us, "
        "memory {:.4g} us ({:.0f} GB/s; L2 {} MB)",
        e.at_least ? "at least" : "about", e.microseconds, card_.name, card_.sms, card_.megahertz,
        1e-6 * flops / e.microseconds, 1e2 * longest->second / e.microseconds, longest->first,
        limits[0].second, 1e-6 * peak, limits[1].second, limits[2].second, 1e-3 * read,
        card_.l2_bytes >> 20);
    return e;
  }

 private:
  Problem problem_;
  Card card_, planned_;
  std::shared_ptr<const Candidate> best_;
  Reasons reasons_;
};

class CardEngine final : public Engine {
 public:
  explicit CardEngine(const Card& card)
      : card_(card), architecture_(architecture_of(card.target)) {}

  std::string name() const override { return "cuda"; }
  DeviceType device() const override { return DeviceType::kCuda; }
  std::string description() const override {
    return fmt::format("kernels for {}, on one {} of compute capability {}, which need not be here",
                       card_.target.name(), card_.name, capability_text(card_.capability));
  }
  std::string unavailable() const override { return {}; }
  std::string rejects(const Problem& p) const override {
    if (p.device.type != DeviceType::kCuda) return "computes tensors on cuda";
    return no_family_computes(p, families_of(card_.target, p.algorithm));
  }
  std::unique_ptr<const Executable> plan(const Problem& p, int) const override {
    const Card planned = as_planned(card_, architecture_);
    Reasons reasons;
    const Candidates all = ranked(p, families_of(card_.target, p.algorithm), planned, {}, &reasons);
    papers::add_counts(p, *all.at(0), &reasons);
    return std::make_unique<CardExecutable>(p, card_, planned, all.at(0), std::move(reasons));
  }
  std::unique_ptr<const AppendStep> append_step(const Problem&, int) const override {
    throw Error(Status::kUnsupported,
                "append: given with `card`, want none: such a plan is of attention alone");
  }
  std::unique_ptr<const CodeSteps> code_steps(const Problem&, int) const override {
    throw Error(
        Status::kUnsupported,
        "hadamard, k_mean: given with `card`, want neither: such a plan is of attention alone");
  }
  void with_workspace(Device, const WorkspaceNeed&, const Run&,
                      const std::function<void(void*)>&) const override {
    not_here(card_);
  }
  void append(const AppendCall&, int, const Run&) const override { not_here(card_); }
  void merge(const MergeCall&, int, const Run&) const override { not_here(card_); }
  void quantize(const QuantizeCall&, int, const Run&) const override { not_here(card_); }
  void dequantize(const DequantizeCall&, int, const Run&) const override { not_here(card_); }
  void hadamard(const HadamardCall&, int, const Run&) const override { not_here(card_); }

 private:
  Card card_;
  const Architecture& architecture_;
};

}  // namespace

const Engine& card_engine(const Card& card) {
  static auto& engines = *new std::map<std::string_view, std::unique_ptr<CardEngine>>;
  static std::mutex mutex;
  const std::scoped_lock lock(mutex);
  std::unique_ptr<CardEngine>& engine = engines[card.name];
  if (engine == nullptr) engine = std::make_unique<CardEngine>(card);
  return *engine;
}

}  // namespace fulgur::cuda

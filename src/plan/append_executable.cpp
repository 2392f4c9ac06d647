#include "plan/append_executable.h"

#include <fmt/format.h>

#include <cstddef>
#include <utility>

#include "call/append_then_attend.h"
#include "call/kv_locator.h"
#include "call/lengths.h"
#include "plan/shared_prefix.h"
#include "plan/step_places.h"

namespace fulgur {
namespace {

/// Checks all lengths and tables of the attention that the host can read, so that a call that fails
/// has appended nothing.
void check_attention(const Problem& p, const ForwardArgs& args) {
  const Sequences sequences(p, args);
  if (tables_readable(args.cache)) const KvLocator checked(p, sequences, args);
  check_prefixes(p, args);
}

/// The places of a plan whose attention's workspace ends at `begin`.
StepPlaces places_of(const Problem& p, const AppendStep& append, int64_t begin) {
  return {rotated_bytes(p), append.bytes(), begin};
}

class AppendFirstExecutable final : public Executable {
 public:
  AppendFirstExecutable(const Problem& p, const Engine& engine,
                        std::unique_ptr<const AppendStep> append,
                        std::unique_ptr<const Executable> attention)
      : p_(p),
        follows_(without_append(p)),
        engine_(engine),
        append_(std::move(append)),
        attention_(std::move(attention)),
        at_(places_of(p, *append_, attention_->workspace().bytes)) {}

  void run(const Call& call, const Run& run) const override {
    AppendThenAttend appending(*std::get<const ForwardArgs*>(call), p_.mask, p_.hadamard);
    check_attention(follows_, appending.attention());
    engine_.with_workspace(p_.device, workspace(), run, [&](void* memory) {
      auto* const bytes = static_cast<std::byte*>(memory);
      appending.rotate_into(bytes + at_.rotated);
      const int32_t* const lengths = append_->append(appending.call(), bytes + at_.step, run);
      if (lengths != nullptr) appending.attend_to(lengths);
      Run attend = run;
      if (at_.end > 0) attend.workspace = {bytes, attention_->workspace().bytes};
      attention_->run(&appending.attention(), attend);
    });
  }

  Explanation explain() const override {
    Explanation e = attention_->explain();
    e.details.add("append", "before_attention");
    e.decisions.insert(
        e.decisions.begin(),
        fmt::format("new rows of k and v, {} in all, go to their caches first{}, and are attended "
                    "then",
                    p_.append.tokens, p_.append.rotates ? ", keys and queries rotated" : ""));
    return e;
  }

  Estimate estimate(const std::vector<Sequence>& lengths) const override {
    Estimate attention = attention_->estimate(lengths);
    attention.at_least = true;
    if (!attention.sentence.empty()) attention.sentence += "; besides it, what appending takes";
    return attention;
  }

  WorkspaceNeed workspace() const override { return at_.need(attention_->workspace()); }

 private:
  Problem p_, follows_;
  const Engine& engine_;
  std::unique_ptr<const AppendStep> append_;
  std::unique_ptr<const Executable> attention_;
  StepPlaces at_;
};

}  // namespace

std::unique_ptr<const Executable> plan_append(const Problem& p, const Engine& engine, int threads,
                                              const PlanAttention& plan_attention,
                                              std::vector<std::string>* rejected) {
  std::string why_not;
  if (auto fused = engine.plan_fused(p, &why_not)) return fused;
  if (!why_not.empty()) {
    rejected->push_back(fmt::format("append by the kernel that attends: {}", why_not));
  }
  auto append = engine.append_step(p, threads);
  Problem follows = without_append(p);
  if (follows.max_workspace > 0) {
    follows.max_workspace = places_of(p, *append, 0).left_of(follows.max_workspace);
  }
  return std::make_unique<AppendFirstExecutable>(p, engine, std::move(append),
                                                 plan_attention(follows, rejected));
}

}  // namespace fulgur

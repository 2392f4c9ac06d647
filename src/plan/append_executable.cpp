#include "plan/append_executable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "call/append_then_attend.h"
#include "call/kv_locator.h"
#include "call/lengths.h"
#include "engine/workspace.h"
#include "plan/shared_prefix.h"

namespace fulgur {
namespace {

/// Checks all numbers of the attention that the host can read: nothing is appended before a call
/// that fails.
void check_attention(const Problem& p, const ForwardArgs& args) {
  const Sequences sequences(p, args);
  if (tables_readable(args.cache)) const KvLocator checked(p, sequences, args);
  check_prefixes(p, args);
}

/// Where things lie in the workspace, after that of the attention.
struct Places {
  int64_t rotated, step, end;

  Places(const Problem& p, const AppendStep& append, int64_t begin) {
    Arena arena(begin);
    rotated = arena.take(rotated_bytes(p));
    step = arena.take(append.bytes());
    end = arena.end();
  }
};

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
        at_(p, *append_, attention_->workspace().bytes) {}

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

  WorkspaceNeed workspace() const override {
    WorkspaceNeed need = attention_->workspace();
    need.bytes = at_.end;
    need.alignment = std::max(need.alignment, kWorkspaceAlignment);
    return need;
  }

 private:
  Problem p_, follows_;
  const Engine& engine_;
  std::unique_ptr<const AppendStep> append_;
  std::unique_ptr<const Executable> attention_;
  Places at_;
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
    const int64_t besides = Places(p, *append, 0).end + kWorkspaceAlignment;
    follows.max_workspace = std::max<int64_t>(follows.max_workspace - besides, 1);
  }
  return std::make_unique<AppendFirstExecutable>(p, engine, std::move(append),
                                                 plan_attention(follows, rejected));
}

}  // namespace fulgur

#include "plan/append_executable.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <utility>

#include "call/append_then_attend.h"
#include "call/kv_locator.h"
#include "call/lengths.h"
#include "cpu/append.h"
#include "cpu/memory.h"
#include "cuda/engine/append.h"
#include "engine/workspace.h"
#include "plan/shared_prefix.h"

namespace fulgur {
namespace {

/// Checks all numbers of the attention that the host can read: nothing is appended before a call
/// that fails.
void check_attention(const Problem& p, const ForwardArgs& args) {
  const Sequences sequences(p, args);
  if (p.device.type == DeviceType::kCpu) const KvLocator checked(p, sequences, args);
  check_prefixes(p, args);
}

/// Where things lie in the workspace, after that of the attention.
struct Places {
  int64_t turned, lengths, numbers, end;

  Places(const Problem& p, int64_t begin) {
    end = workspace_aligned(begin);
    const auto take = [&](int64_t bytes) {
      return std::exchange(end, end + workspace_aligned(bytes));
    };
    turned = take(rotated_bytes(p));
    const bool on_cpu = p.device.type == DeviceType::kCpu;  // which keeps lengths itself
    lengths = take(on_cpu ? 0 : p.append.batch * int64_t{sizeof(int32_t)});
    numbers = take(p.append.host_numbers * int64_t{sizeof(int32_t)});
  }
};

class AppendFirstExecutable final : public Executable {
 public:
  AppendFirstExecutable(const Problem& p, int threads, std::string sentence,
                        std::unique_ptr<const Executable> attention)
      : p_(p),
        follows_(without_append(p)),
        threads_(threads),
        sentence_(std::move(sentence)),
        attention_(std::move(attention)),
        at_(p, begin_of(p, attention_->workspace())) {}

  void run(const Call& call, const Run& run) const override {
    AppendThenAttend appending(*std::get<const ForwardArgs*>(call), p_.mask);
    check_attention(follows_, appending.attention());
    if (p_.device.type == DeviceType::kCpu) {
      const bool own = run.workspace.data == nullptr;
      const cpu::ScratchMemory memory(own ? at_.end : 0);
      auto* const bytes = static_cast<std::byte*>(own ? memory.data() : run.workspace.data);
      appending.rotate_into(bytes + at_.turned);
      cpu::append(appending.call(), threads_);
      attend(appending, run, bytes);
      return;
    }
    cuda::with_workspace(p_.device, at_.end, run, [&](void* memory) {
      auto* const bytes = static_cast<std::byte*>(memory);
      auto* const lengths = reinterpret_cast<int32_t*>(bytes + at_.lengths);
      appending.rotate_into(bytes + at_.turned);
      cuda::append(appending.call(), {bytes + at_.numbers, lengths}, run);
      appending.attend_to(lengths);
      attend(appending, run, bytes);
    });
  }

  Explanation explain() const override {
    Explanation e = attention_->explain();
    e.decisions.insert(e.decisions.begin(), sentence_);
    return e;
  }

  std::string expects(const std::vector<Sequence>& lengths) const override {
    std::string attention = attention_->expects(lengths);
    if (!attention.empty()) attention += "; besides it, what appending takes";
    return attention;
  }

  WorkspaceNeed workspace() const override {
    WorkspaceNeed need = attention_->workspace();
    need.bytes = at_.end;
    need.alignment = std::max(need.alignment, kWorkspaceAlignment);
    return need;
  }

  /// Bytes that a call wants besides those of its attention.
  static int64_t bytes_besides(const Problem& p) { return Places(p, 0).end + kWorkspaceAlignment; }

 private:
  static int64_t begin_of(const Problem& p, const WorkspaceNeed& attention) {
    return p.device.type == DeviceType::kCpu ? attention.bytes : cuda::free_from(attention);
  }

  void attend(const AppendThenAttend& appending, const Run& run, std::byte* memory) const {
    Run part = run;
    if (at_.end > 0) part.workspace = {memory, attention_->workspace().bytes};
    attention_->run(&appending.attention(), part);
  }

  Problem p_, follows_;
  int threads_;
  std::string sentence_;
  std::unique_ptr<const Executable> attention_;
  Places at_;
};

}  // namespace

std::unique_ptr<const Executable> plan_append(const Problem& p, const Engine& engine, int threads,
                                              const PlanAttention& plan_attention,
                                              std::vector<std::string>* rejected) {
  const bool on_cpu = p.device.type == DeviceType::kCpu;
  std::string why_not;
  if (auto fused = engine.plan_fused(p, &why_not)) return fused;
  if (!on_cpu) rejected->push_back(fmt::format("append by the kernel that attends: {}", why_not));
  Problem follows = without_append(p);
  if (follows.max_workspace > 0) {
    const int64_t left = follows.max_workspace - AppendFirstExecutable::bytes_besides(p);
    follows.max_workspace = std::max<int64_t>(left, 1);
  }
  std::string sentence =
      fmt::format("new rows of k and v, {} in all, go to their caches first{}, {}", p.append.tokens,
                  p.append.turns ? ", keys and queries turned" : "",
                  on_cpu ? "and are attended then" : "by a launch of their own");
  if (!on_cpu) cuda::prepare_append(p.device, p.dtype, p.append.host_numbers > 0);
  return std::make_unique<AppendFirstExecutable>(p, threads, std::move(sentence),
                                                 plan_attention(follows, rejected));
}

}  // namespace fulgur

#include "cpu/engine.h"

#include <fmt/format.h>

#include <cmath>
#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "base/parallel.h"
#include "cpu/estimate.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/plan.h"
#include "cpu/run.h"
#include "fulgur/error.h"
#include "host/host_engine.h"
#include "host/memory.h"
#include "host/prefix_steps.h"

namespace fulgur::cpu {
namespace {

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(const Problem& problem, int threads)
      : p_(problem), k_(choose_kernels(p_, &rejected_)) {
    if (p_.expressions.given()) {
      expressions_.emplace(p_.expressions.graph(p_.pass == Pass::kBackward));
    }
    plan_ = make_plan(p_, threads, k_, &rejected_, expressions());
  }

  void run(const Call& call, const Run& run) const override {
    const bool own = run.workspace.data == nullptr;
    const host::ScratchMemory memory(own ? plan_.workspace_bytes() : 0);
    auto* const floats = static_cast<float*>(own ? memory.data() : run.workspace.data);
    if (p_.pass == Pass::kForward) {
      compute(p_, k_, plan_, expressions(), *std::get<const ForwardArgs*>(call), run, floats);
    } else {
      compute(p_, k_, plan_, expressions(), *std::get<const BackwardArgs*>(call), run, floats);
    }
  }

  Explanation explain() const override {
    Explanation e = describe(plan_, k_, p_);
    e.rejected = rejected_;
    return e;
  }

  Estimate estimate(const std::vector<Sequence>& lengths) const override {
    if (p_.expressions.given()) return {};  // it is unknown which scores they hide
    const Cost cost = cost_of(plan_, k_, p_, lengths);
    if (cost.tasks == 0) return {};
    const double busy = std::min<double>(plan_.threads, std::ceil(cost.tasks));
    return cpu::estimate(cost, peaks_of(static_cast<int>(busy)));
  }

  WorkspaceNeed workspace() const override {
    return {plan_.workspace_bytes(), host::ScratchMemory::kAlignment, 0};
  }

 private:
  const expression::StagedGraph* expressions() const {
    return expressions_ ? &*expressions_ : nullptr;
  }

  Problem p_;
  std::vector<std::string> rejected_;
  const Kernels& k_;
  std::optional<expression::StagedGraph> expressions_;
  CpuPlan plan_;
};

class CpuEngine final : public host::HostEngine {
 public:
  std::string name() const override { return "cpu"; }
  std::string description() const override {
    if (!unavailable().empty()) return "SIMD";
    const Machine& m = machine();
    std::string text = fmt::format("{} vectors, ", m.vectors.target);
    for (const Bf16Path& path : m.bf16) {
      if (path.bf16 != nullptr) {
        text += fmt::format("{} for bf16{}, ", path.name, path.f16 != nullptr ? " and f16" : "");
        break;
      }
      text += fmt::format("no {} ({}), ", path.name, path.unavailable);
    }
    return text + fmt::format("{} threads", thread_count(0));
  }
  std::string unavailable() const override {
    try {
      machine();
      return {};
    } catch (const Error& error) {
      return error.what();
    }
  }
  std::string rejects(const Problem& p) const override {
    if (p.device.type != DeviceType::kCpu) return "computes tensors on cpu";
    if (p.pass == Pass::kScores) return "keeps no scores";
    if (std::string why = algorithm_rejected(p.algorithm, {Algorithm::kFa2}); !why.empty()) {
      return why;
    }
    if (p.dtypes.has(DType::kF64)) return "computes no f64";
    return {};
  }
  std::unique_ptr<const Executable> plan(const Problem& problem, int threads) const override {
    return std::make_unique<CpuExecutable>(problem, threads);
  }
  std::unique_ptr<const PrefixSteps> prefix_steps(const Problem&, int) const override {
    return host::prefix_steps();
  }
};

}  // namespace

const Engine& engine() {
  static const CpuEngine kEngine;
  return kEngine;
}

}  // namespace fulgur::cpu

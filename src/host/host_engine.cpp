#include "host/host_engine.h"

#include "host/append.h"
#include "host/code_steps.h"
#include "host/memory.h"
#include "host/merge.h"

namespace fulgur::host {
namespace {

class HostAppendStep final : public AppendStep {
 public:
  explicit HostAppendStep(int threads) : threads_(threads) {}

  int64_t bytes() const override { return 0; }
  const int32_t* append(const AppendCall& call, void*, const Run&) const override {
    host::append(call, threads_);
    return nullptr;
  }

 private:
  int threads_;
};

}  // namespace

std::unique_ptr<const AppendStep> HostEngine::append_step(const Problem&, int threads) const {
  return std::make_unique<HostAppendStep>(threads);
}

std::unique_ptr<const CodeSteps> HostEngine::code_steps(const Problem& p, int threads) const {
  return host::code_steps(p, threads);
}

void HostEngine::with_workspace(Device, const WorkspaceNeed& need, const Run& run,
                                const std::function<void(void*)>& compute) const {
  const bool own = run.workspace.data == nullptr;
  const ScratchMemory memory(own ? need.bytes : 0);
  compute(own ? memory.data() : run.workspace.data);
}

void HostEngine::append(const AppendCall& call, int threads, const Run&) const {
  host::append(call, threads);
}

void HostEngine::merge(const MergeCall& call, int threads, const Run&) const {
  host::merge(call, threads);
}

void HostEngine::quantize(const QuantizeCall& call, int threads, const Run&) const {
  fulgur::quantize(call, threads);
}

void HostEngine::dequantize(const DequantizeCall& call, int threads, const Run&) const {
  fulgur::dequantize(call, threads);
}

void HostEngine::hadamard(const HadamardCall& call, int threads, const Run&) const {
  fulgur::hadamard(call, threads);
}

}  // namespace fulgur::host

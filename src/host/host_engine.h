#pragma once

#include <functional>
#include <memory>

#include "engine/engine.h"

namespace fulgur::host {

/// What all engines of tensors in the host's memory have in common: everything but attention.
class HostEngine : public Engine {
 public:
  DeviceType device() const final { return DeviceType::kCpu; }
  std::unique_ptr<const AppendStep> append_step(const Problem& problem, int threads) const final;
  void with_workspace(Device device, const WorkspaceNeed& need, const Run& run,
                      const std::function<void(void*)>& compute) const final;
  void append(const AppendCall& call, int threads, const Run& run) const final;
  void merge(const MergeCall& call, int threads, const Run& run) const final;
  void quantize(const QuantizeCall& call, int threads, const Run& run) const final;
  void dequantize(const DequantizeCall& call, int threads, const Run& run) const final;
  std::unique_ptr<const CodeSteps> code_steps(const Problem& problem, int threads) const final;
  void hadamard(const HadamardCall& call, int threads, const Run& run) const final;
};

}  // namespace fulgur::host

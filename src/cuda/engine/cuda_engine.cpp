#include "cuda/engine/cuda_engine.h"

#include <fmt/format.h>

#include <utility>

#include "base/check.h"
#include "call/append_then_attend.h"
#include "cuda/common/kernel_key.h"
#include "cuda/driver/driver.h"
#include "cuda/engine/append.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/choose.h"
#include "cuda/engine/devices.h"
#include "cuda/engine/merge.h"
#include "cuda/engine/prefix_steps.h"
#include "cuda/engine/quantize.h"
#include "cuda/engine/tuning.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

/// The ranked candidates of a problem, the best first.
Candidates candidates_of(const Problem& p, Gpu& gpu, Reasons* reasons) {
  const std::vector<MeasuredTile> measured = Tunings::here().find(tuning_key(gpu, p));
  return ranked(p, families_of(gpu.target(), p.algorithm), card_of(gpu), measured, reasons);
}

class CudaEngine final : public Engine {
 public:
  std::string name() const override { return "cuda"; }
  DeviceType device() const override { return DeviceType::kCuda; }
  std::string description() const override { return Machine::here().description; }
  std::string unavailable() const override {
    const std::string& why = driver_unavailable();
    return why.empty() ? Machine::here().unavailable : why;
  }
  std::string rejects(const Problem& p) const override {
    if (p.device.type != DeviceType::kCuda) return "computes tensors on cuda";
    if (std::string why = origin_rejected(p); !why.empty()) return why;
    if (std::string why = codes_rejected(p); !why.empty()) return why;
    return no_family_computes(p, families_at(p.device.index, p.algorithm));
  }
  std::unique_ptr<const Executable> plan(const Problem& p, int) const override {
    Gpu& gpu = attending_gpu(p.device.index);
    Reasons reasons;
    const Candidates candidates = candidates_of(p, gpu, &reasons);
    return load_best(candidates, p, gpu, std::move(reasons));
  }
  std::unique_ptr<const Executable> plan_fused(const Problem& p, std::string* why) const override {
    if (p.prefix_groups > 0) {
      *why = "shared prefixes are given, whose parts are calls of their own";
      return nullptr;
    }
    Gpu& gpu = attending_gpu(p.device.index);
    Reasons reasons;
    const auto best = candidates_of(without_append(p), gpu, &reasons).at(0);
    const auto fused = best->fused(p.append, why);
    if (fused == nullptr) return nullptr;
    *why = gpu.kernel(fused->kernels()[0]).defect;
    if (why->empty() && !p.has_room(fused->workspace)) {
      *why = fmt::format("wants {} bytes of workspace, max_workspace is {}", fused->workspace,
                         p.max_workspace);
    }
    return why->empty() ? fused->executable(gpu, reasons) : nullptr;
  }
  std::unique_ptr<const AppendStep> append_step(const Problem& p, int) const override {
    return cuda::append_step(p);
  }
  std::unique_ptr<const PrefixSteps> prefix_steps(const Problem& p, int) const override {
    return cuda::prefix_steps(p, attending_gpu(p.device.index));
  }
  std::unique_ptr<const CodeSteps> code_steps(const Problem& p, int) const override {
    return cuda::code_steps(p, attending_gpu(p.device.index));
  }
  void with_workspace(Device device, const WorkspaceNeed& need, const Run& run,
                      const std::function<void(void*)>& compute) const override {
    Gpu& gpu = usable_gpu(device.index);
    const CurrentContext current(gpu.context());
    const LaunchMemory::Lease lease = gpu.launch_memory().of(run, need);
    compute(lease.data);
  }
  void append(const AppendCall& call, int, const Run& run) const override {
    cuda::append(call, run);
  }
  void prepare(const AppendCall& call) const override { cuda::prepare(call); }
  void merge(const MergeCall& call, int, const Run& run) const override { cuda::merge(call, run); }
  void quantize(const QuantizeCall& call, int, const Run& run) const override {
    cuda::quantize(call, run);
  }
  void dequantize(const DequantizeCall& call, int, const Run& run) const override {
    cuda::dequantize(call, run);
  }
  void hadamard(const HadamardCall& call, int, const Run& run) const override {
    cuda::hadamard(call, run);
  }
  void check_plannable(const Problem& p, const Run& run) const override {
    const CurrentContext current(attending_gpu(p.device.index).context());
    if (!is_capturing(static_cast<CUstream>(run.stream))) return;
    fail(
        "stream",
        "is being captured, and this is the first call of its shape, which compiles and allocates; "
        "make one before the capture, or a plan");
  }
  uint64_t generation() const override { return Tunings::generation(); }
};

}  // namespace

const Engine& engine() {
  static const CudaEngine kEngine;
  return kEngine;
}

}  // namespace fulgur::cuda

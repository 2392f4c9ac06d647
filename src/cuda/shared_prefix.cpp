#include "cuda/shared_prefix.h"

#include "cuda/call_kernel.h"
#include "cuda/host_numbers.h"
#include "cuda/launch.h"
#include "cuda/launch_memory.h"
#include "cuda/merge.h"

namespace fulgur::cuda {
namespace {

/// Two small kernels and another launch of attention take about eight microseconds, which an H200
/// reads so much in.
constexpr int64_t kCostBytes = int64_t{32} << 20;
constexpr int kThreads = 256, kGroupThreads = 32;

class CudaPrefixSteps final : public PrefixSteps {
 public:
  CudaPrefixSteps(const Problem& problem, Gpu& gpu) : gpu_(gpu), numbers_(problem, gpu) {
    divide_kernel_ = gpu.kernel(use_of(CallKernel::kDivide)).function;
    load(CallKernel::kMerge, gpu);
  }

  int64_t cost_bytes() const override { return kCostBytes; }

  void with_workspace(const WorkspaceNeed& need, const Run& run,
                      const std::function<void(void*)>& compute) const override {
    const CurrentContext current(gpu_.context());
    if (run.workspace.data != nullptr) return compute(run.workspace.data);
    const LaunchMemory::Lease lease =
        gpu_.launch_memory().take(static_cast<CUstream>(run.stream), need.bytes);
    compute(reinterpret_cast<void*>(lease.data));
  }

  int64_t numbers_bytes() const override { return numbers_.bytes(); }
  ForwardArgs moved(const ForwardArgs& args, const Run& run, void* numbers) const override {
    numbers_.check(args);
    numbers_.store(args, static_cast<CUstream>(run.stream), numbers);
    return numbers_.moved(args, numbers);
  }

  void divide(const kernels::SharedPrefixParams& params, const Run& run) const override {
    const int blocks =
        static_cast<int>((int64_t{params.groups} * kGroupThreads + kThreads - 1) / kThreads);
    launch(static_cast<CUstream>(run.stream), divide_kernel_, &params, {blocks}, kThreads, 0,
           "launching the kernel that divides calls at the ends of prefixes");
  }

  void merge(const MergeCall& call, const Run& run) const override { cuda::merge(call, run); }

 private:
  Gpu& gpu_;
  HostNumbers numbers_;
  CUfunction divide_kernel_ = nullptr;
};

}  // namespace

std::unique_ptr<const PrefixSteps> prefix_steps(const Problem& problem, Gpu& gpu) {
  return std::make_unique<CudaPrefixSteps>(problem, gpu);
}

}  // namespace fulgur::cuda

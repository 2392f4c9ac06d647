#include "cuda/engine/prefix_steps.h"

#include <cmath>

#include "cuda/common/call_kernel.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/launch.h"
#include "cuda/engine/devices.h"

namespace fulgur::cuda {
namespace {

// Measured on an H200 (docs/serving.md, "Shared prefixes"). Costs of a divided call: its launches,
// and products over the prefix. An undivided call reads the keys of a prefix again for each
// sequence, at a fraction of the memory bandwidth, or kL2Speedup times as fast if they fit a
// fraction of L2.
constexpr double kCostMicroseconds = 35, kFlopsPerMicrosecond = 500e6;
constexpr double kReadFraction = 0.9375, kL2Speedup = 2.667, kL2Fraction = 0.8;
constexpr int kThreads = 256, kGroupThreads = 32;

int64_t cost_bytes_of(const Problem& p, const Card& card) {
  const auto keys = static_cast<double>(p.sk);
  const double flops = 2 * keys * static_cast<double>((p.d + p.dv) * p.hq * p.total_q);
  const double bytes = keys * static_cast<double>(p.key_bytes());
  const bool in_cache = bytes <= kL2Fraction * static_cast<double>(card.l2_bytes);
  const double rate =  // bytes per microsecond
      (in_cache ? kL2Speedup : 1) * kReadFraction * card.bytes_per_cycle * card.megahertz;
  return std::llround(rate * (kCostMicroseconds + flops / kFlopsPerMicrosecond));
}

class CudaPrefixSteps final : public PrefixSteps {
 public:
  CudaPrefixSteps(const Problem& problem, Gpu& gpu)
      : numbers_(problem, gpu), cost_bytes_(cost_bytes_of(problem, card_of(gpu))) {
    divide_kernel_ = gpu.kernel(use_of(CallKernel::kDivide)).function;
    load(CallKernel::kMerge, gpu);
  }

  int64_t cost_bytes() const override { return cost_bytes_; }

  int64_t metadata_bytes() const override { return numbers_.bytes(); }
  ForwardArgs moved(const ForwardArgs& args, const Run& run, void* numbers) const override {
    numbers_.check(args);
    numbers_.store(args, static_cast<CUstream>(run.stream), numbers);
    return numbers_.moved(args, numbers);
  }

  void divide(const kernels::PrefixSplit& split, const Run& run) const override {
    const int blocks =
        static_cast<int>((int64_t{split.groups} * kGroupThreads + kThreads - 1) / kThreads);
    launch(static_cast<CUstream>(run.stream), divide_kernel_, &split, {blocks}, kThreads, 0,
           "launching the kernel that divides calls at the ends of prefixes");
  }

 private:
  HostMetadata numbers_;
  int64_t cost_bytes_;
  CUfunction divide_kernel_ = nullptr;
};

}  // namespace

std::unique_ptr<const PrefixSteps> prefix_steps(const Problem& problem, Gpu& gpu) {
  return std::make_unique<CudaPrefixSteps>(problem, gpu);
}

}  // namespace fulgur::cuda

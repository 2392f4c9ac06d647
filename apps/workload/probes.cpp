#include "workload/probes.h"

#include <omp.h>

#include <algorithm>
#include <memory>

#include "fulgur/cuda.h"
#include "src/cpu/kernels/probes.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "workload/probes.cpp"
#include <hwy/foreach_target.h>
// Highway wants what it compiles after foreach_target.
#include "src/cpu/kernels/probes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::bench::HWY_NAMESPACE {

double fma_rounds(int64_t rounds, float* sink) {
  return cpu::HWY_NAMESPACE::fma_rounds(rounds, sink);
}

std::string target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace fulgur::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fulgur::bench {
namespace {

HWY_EXPORT(fma_rounds);
HWY_EXPORT(target_name);

const cpu::Effort& amount_of(Effort effort) {
  return effort == Effort::kBrief ? cpu::kBrief : cpu::kThorough;
}

}  // namespace

double fma_peak(int threads, Effort effort) {
  const auto rounds_of = [](int64_t rounds, float* sink) {
    return HWY_DYNAMIC_DISPATCH(fma_rounds)(rounds, sink);
  };
  return cpu::fma_rate(rounds_of, threads, amount_of(effort));
}

double read_bandwidth(int threads, Effort effort) {
  return cpu::read_rate(threads, amount_of(effort));
}

double copy_bandwidth(int device) {
  constexpr int kCopies = 5;
  constexpr int64_t kBytes = int64_t{512} << 20;
  const auto free = [device](void* data) { cuda::deallocate(data, device); };
  const std::unique_ptr<void, decltype(free)> from(cuda::allocate(kBytes, device), free);
  const std::unique_ptr<void, decltype(free)> to(cuda::allocate(kBytes, device), free);
  double best = 0;
  for (int copy = 0; copy < kCopies; ++copy) {
    const double start = cpu::probe_clock();
    cuda::copy(to.get(), from.get(), kBytes, device);
    cuda::synchronize(device);
    best = std::max(best, 2.0 * kBytes / (cpu::probe_clock() - start));
  }
  return best;
}

std::string simd_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

int all_threads() { return omp_get_max_threads(); }

}  // namespace fulgur::bench
#endif  // HWY_ONCE

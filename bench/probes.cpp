#include "bench/probes.h"

#include <omp.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>

#include "fulgur/cuda.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "bench/probes.cpp"
#include <hwy/foreach_target.h>
// Highway wants its own header after foreach_target.
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace fulgur::bench::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using F32 = hn::ScalableTag<float>;
using V = hn::Vec<F32>;

/// Flops of `rounds` rounds of multiply-adds on chains that fill the registers; `sink` keeps them
/// alive. Eight chains hide a latency of 4 cycles on 2 ports; more hide the scheduler's jitter.
double fma_rounds(int64_t rounds, float* sink) {
  const F32 d;
  const V factor = hn::Set(d, sink[0]), addend = hn::Set(d, sink[1]);
  constexpr int kChains = HWY_TARGET <= HWY_AVX3 ? 24 : 12;
  // Chains must start apart, or the compiler finds them equal and runs one.
  const auto start = [&](int i) { return hn::Set(d, static_cast<float>(i)); };
  V a0 = start(0), a1 = start(1), a2 = start(2), a3 = start(3), a4 = start(4), a5 = start(5),
    a6 = start(6), a7 = start(7), a8 = start(8), a9 = start(9), a10 = start(10), a11 = start(11);
  V b0 = start(12), b1 = start(13), b2 = start(14), b3 = start(15), b4 = start(16), b5 = start(17),
    b6 = start(18), b7 = start(19), b8 = start(20), b9 = start(21), b10 = start(22),
    b11 = start(23);
  for (int64_t i = 0; i < rounds; ++i) {
    a0 = hn::MulAdd(a0, factor, addend);
    a1 = hn::MulAdd(a1, factor, addend);
    a2 = hn::MulAdd(a2, factor, addend);
    a3 = hn::MulAdd(a3, factor, addend);
    a4 = hn::MulAdd(a4, factor, addend);
    a5 = hn::MulAdd(a5, factor, addend);
    a6 = hn::MulAdd(a6, factor, addend);
    a7 = hn::MulAdd(a7, factor, addend);
    a8 = hn::MulAdd(a8, factor, addend);
    a9 = hn::MulAdd(a9, factor, addend);
    a10 = hn::MulAdd(a10, factor, addend);
    a11 = hn::MulAdd(a11, factor, addend);
    if constexpr (kChains == 24) {
      b0 = hn::MulAdd(b0, factor, addend);
      b1 = hn::MulAdd(b1, factor, addend);
      b2 = hn::MulAdd(b2, factor, addend);
      b3 = hn::MulAdd(b3, factor, addend);
      b4 = hn::MulAdd(b4, factor, addend);
      b5 = hn::MulAdd(b5, factor, addend);
      b6 = hn::MulAdd(b6, factor, addend);
      b7 = hn::MulAdd(b7, factor, addend);
      b8 = hn::MulAdd(b8, factor, addend);
      b9 = hn::MulAdd(b9, factor, addend);
      b10 = hn::MulAdd(b10, factor, addend);
      b11 = hn::MulAdd(b11, factor, addend);
    }
  }
  const V a =
      hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
  const V b =
      hn::Add(hn::Add(hn::Add(b0, b1), hn::Add(b2, b3)), hn::Add(hn::Add(b4, b5), hn::Add(b6, b7)));
  const V c = hn::Add(hn::Add(hn::Add(a8, a9), hn::Add(a10, a11)),
                      hn::Add(hn::Add(b8, b9), hn::Add(b10, b11)));
  sink[2] = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), c)));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

/// Sums `n` floats, a multiple of 8 vectors of 64 bytes, as four streams.
float read_streams(const float* data, int64_t n) {
  const F32 d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t stream = n / 4;
  V s0 = hn::Zero(d), s1 = s0, s2 = s0, s3 = s0;
  for (int64_t i = 0; i < stream; i += lanes) {
    s0 = hn::Add(s0, hn::Load(d, data + i));
    s1 = hn::Add(s1, hn::Load(d, data + stream + i));
    s2 = hn::Add(s2, hn::Load(d, data + 2 * stream + i));
    s3 = hn::Add(s3, hn::Load(d, data + 3 * stream + i));
  }
  return hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(s0, s1), hn::Add(s2, s3))));
}

std::string target_name() { return hwy::TargetName(HWY_TARGET); }

}  // namespace fulgur::bench::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace fulgur::bench {
namespace {

HWY_EXPORT(fma_rounds);
HWY_EXPORT(read_streams);
HWY_EXPORT(target_name);

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

double fma_peak(int threads) {
  constexpr int kRuns = 4;
  constexpr int64_t kRounds = 2'000'000;  // 10 to 50 ms
  double best = 0;
  for (int run = 0; run < kRuns; ++run) {
    double flops = 0;
    const double start = now();
#pragma omp parallel num_threads(threads) reduction(+ : flops)
    {
      float sink[3] = {0.999f, 0.001f, 0};
      flops += HWY_DYNAMIC_DISPATCH(fma_rounds)(kRounds, sink);
      volatile float keep = sink[2];
      (void)keep;
    }
    best = std::max(best, flops / (now() - start));
  }
  return best;
}

double read_bandwidth(int threads) {
  constexpr int kPasses = 3;
  constexpr int64_t kChunk = 1 << 20;  // floats: 4 MiB, the streams of one thread at a time
  const int64_t cache_bytes = std::max<int64_t>(0, ::sysconf(_SC_LEVEL3_CACHE_SIZE));
  const int64_t memory_bytes = ::sysconf(_SC_PHYS_PAGES) * ::sysconf(_SC_PAGESIZE);
  const int64_t bytes =
      std::min(memory_bytes / 4, std::max<int64_t>(int64_t{256} << 20, 2 * cache_bytes));
  const int64_t chunks = std::max<int64_t>(threads, bytes / (4 * kChunk));
  constexpr std::align_val_t kAlign{64};
  const auto free = [](float* p) { ::operator delete[](p, kAlign); };
  const std::unique_ptr<float[], decltype(free)> data(
      static_cast<float*>(::operator new[](chunks* kChunk * 4, kAlign)), free);
  // Written first, so that every page exists, near the thread that will read it.
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t c = 0; c < chunks; ++c) std::fill_n(&data[c * kChunk], kChunk, 1.0f);

  double best = 0;
  for (int pass = 0; pass < kPasses; ++pass) {
    float sum = 0;
    const double start = now();
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : sum)
    for (int64_t c = 0; c < chunks; ++c) {
      sum += HWY_DYNAMIC_DISPATCH(read_streams)(&data[c * kChunk], kChunk);
    }
    volatile float keep = sum;
    (void)keep;
    best = std::max(best, static_cast<double>(chunks * kChunk * 4) / (now() - start));
  }
  return best;
}

double copy_bandwidth(int device) {
  constexpr int kCopies = 5;
  constexpr int64_t kBytes = int64_t{512} << 20;
  const auto free = [device](void* data) { cuda::deallocate(data, device); };
  const std::unique_ptr<void, decltype(free)> from(cuda::allocate(kBytes, device), free);
  const std::unique_ptr<void, decltype(free)> to(cuda::allocate(kBytes, device), free);
  double best = 0;
  for (int copy = 0; copy < kCopies; ++copy) {
    const double start = now();
    cuda::copy(to.get(), from.get(), kBytes, device);
    cuda::synchronize(device);
    best = std::max(best, 2.0 * kBytes / (now() - start));
  }
  return best;
}

std::string simd_target() { return HWY_DYNAMIC_DISPATCH(target_name)(); }

int all_threads() { return omp_get_max_threads(); }

}  // namespace fulgur::bench
#endif  // HWY_ONCE

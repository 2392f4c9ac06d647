#pragma once

#include <hwy/cache_control.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <memory>

namespace fulgur::cpu {

// Probes of the machine's peak rates, which reports compare speeds with and estimates are made
// from. They are headers because both the library and the benchmarks use them.

/// The amount of work of a probe.
struct Effort {
  int64_t fma_rounds, read_bytes;
};
constexpr Effort kBrief = {50'000, int64_t{16} << 20};  ///< about 20 ms, for a caller who waits
constexpr Effort kThorough = {500'000, int64_t{256} << 20};  ///< ten times as much

inline double probe_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

constexpr int kProbeRuns = 16;

/// The rate of `threads` threads together, per second. Each thread prepares, waits for the others,
/// and calls run(thread, i), which returns the amount of work it did, several times. The sum of the
/// medians of the threads' rates is not changed by other processes that run for a short while.
template <class Prepare, class Run>
double rate_of_threads(int threads, const Prepare& prepare, const Run& run) {
  double sum = 0;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
  {
    const int thread = omp_get_thread_num();
    prepare(thread);
#pragma omp barrier
    std::array<double, kProbeRuns> rates;
    for (int i = 0; i < kProbeRuns; ++i) {
      const double start = probe_clock();
      const double done = run(thread, i);
      rates[i] = done / (probe_clock() - start);
    }
    const auto median = rates.begin() + kProbeRuns / 2;
    std::nth_element(rates.begin(), median, rates.end());
    sum += *median;
  }
  return sum;
}

/// Flops per second of `threads` threads that do `fma_rounds` (probes-inl.h).
inline double fma_rate(double (*fma_rounds)(int64_t rounds, float* sink), int threads,
                       const Effort& effort) {
  const auto run = [&](int, int) {
    float sink[3] = {0.999f, 0.001f, 0};
    const double flops = fma_rounds(effort.fma_rounds, sink);
    volatile float keep = sink[2];
    (void)keep;
    return flops;
  };
  // The first run wakes the vector units up.
  return rate_of_threads(
      threads, [&](int thread) { run(thread, 0); }, run);
}

constexpr int64_t kLineWords = 8;  // words of a cache line

/// Evicts the words from all caches, so that the next read comes from memory.
inline void flush(const uint64_t* words, int64_t n) {
  for (int64_t i = 0; i < n; i += kLineWords) {
#if defined(__aarch64__)
    asm volatile("dc civac, %0" : : "r"(words + i) : "memory");
#else
    hwy::FlushCacheline(words + i);
#endif
  }
}

/// Sums a word of each line, as four streams.
inline uint64_t read_lines(const uint64_t* words, int64_t n) {
  const int64_t stream = n / 4;
  uint64_t s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  for (int64_t i = 0; i < stream; i += kLineWords) {
    s0 += words[i];
    s1 += words[stream + i];
    s2 += words[2 * stream + i];
    s3 += words[3 * stream + i];
  }
  return s0 + s1 + s2 + s3;
}

/// Bytes per second that `threads` threads read from memory.
inline double read_rate(int threads, const Effort& effort) {
  constexpr int64_t kMin = 1 << 15;  // words of a run at least: streams of 64 KiB
  const int64_t wanted = effort.read_bytes / (int64_t{sizeof(uint64_t)} * kProbeRuns * threads);
  const int64_t words = std::max(kMin, wanted / kMin * kMin), all = kProbeRuns * words;
  const auto data = std::make_unique_for_overwrite<uint64_t[]>(threads * all);
  const auto prepare = [&](int thread) {
    // Writing allocates every page, near the thread that will read it.
    std::fill_n(&data[thread * all], all, 1);
    flush(&data[thread * all], all);
  };
  return rate_of_threads(threads, prepare, [&](int thread, int i) {
    volatile uint64_t keep = read_lines(&data[thread * all + i * words], words);
    (void)keep;
    return static_cast<double>(words * int64_t{sizeof(uint64_t)});
  });
}

}  // namespace fulgur::cpu

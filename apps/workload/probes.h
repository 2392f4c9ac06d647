#pragma once

#include <cstdint>
#include <string>

namespace fulgur::bench {

/// How long a probe measures: some 20 ms, for one who waits, or ten times as long.
enum class Effort { kBrief, kThorough };

/// Measured peaks of this machine, to which the speed of attention is related.
///
/// f32 multiply-adds, counted as 2 flops, per second, of `threads` threads: many independent
/// chains of FMA in registers, the sum of each thread's median of several short runs.
double fma_peak(int threads, Effort effort = Effort::kThorough);
/// Bytes per second read from memory by `threads` threads that each read several streams of lines
/// that no cache holds, likewise.
double read_bandwidth(int threads, Effort effort = Effort::kThorough);
/// Bytes per second read and written by a CUDA device that copies within its memory, more than its
/// caches hold; the best of several copies.
double copy_bandwidth(int device);

/// The widest SIMD target of this machine, e.g. "AVX3".
std::string simd_target();
/// Threads that OpenMP would use: OMP_NUM_THREADS or all cores.
int all_threads();

}  // namespace fulgur::bench

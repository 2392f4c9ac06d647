#pragma once

#include <cstdint>
#include <string>

namespace fulgur::bench {

/// What this machine can do at most, measured; the speed of attention is told against it.
///
/// f32 multiply-adds, counted as 2 flops, per second, of `threads` threads: many independent
/// chains of FMA in registers, the best of several short runs.
double fma_peak(int threads);
/// Bytes per second read from memory by `threads` threads that each sum several streams of a buffer
/// at least twice as large as the last-level cache; the best of several passes.
double read_bandwidth(int threads);
/// Bytes per second read and written by a CUDA device that copies within its memory, more than its
/// caches hold; the best of several copies.
double copy_bandwidth(int device);

/// The widest SIMD target of this machine, e.g. "AVX3".
std::string simd_target();
/// Threads that OpenMP would use: OMP_NUM_THREADS or all cores.
int all_threads();

}  // namespace fulgur::bench

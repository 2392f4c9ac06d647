#pragma once

#include <string>
#include <vector>

#include "call/lengths.h"
#include "call/problem.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/plan.h"
#include "engine/engine.h"

namespace fulgur::cpu {

/// The work of a call.
struct Cost {
  double flops = 0;       ///< of the visible scores
  double as_fma = 0;      ///< the flops that multiply-adds at their peak do in the same time
  double bytes = 0;       ///< of the rows that are read and written, each counted once
  double tasks = 0;       ///< that threads share
  bool at_least = false;  ///< a minimum: softcap and dropout take time that was not measured
};

/// The cost of sequences of these lengths, or of `batch` sequences of the one length if all are
/// alike.
Cost cost_of(const CpuPlan& plan, const Kernels& kernels, const Problem& problem,
             const std::vector<Sequence>& lengths);

/// The peak rates of a number of threads of this machine.
struct Peaks {
  int threads = 1;
  double fma = 0;  ///< flops per second of one thread: multiply-adds of f32 on the engine's vectors
  double read = 0;  ///< bytes per second that all threads together read from memory
};

/// The peaks of so many threads. The first call for a number of threads measures them, in 10 to
/// 40 ms.
Peaks peaks_of(int threads);

/// The expected time of a call, and whether products or memory bind it.
Estimate estimate(const Cost& cost, const Peaks& peaks);

}  // namespace fulgur::cpu

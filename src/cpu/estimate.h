#pragma once

#include <string>
#include <vector>

#include "call/lengths.h"
#include "call/problem.h"
#include "cpu/kernels/dispatch.h"
#include "cpu/plan.h"
#include "engine/engine.h"

namespace fulgur::cpu {

/// What a call takes.
struct Cost {
  double flops = 0;       ///< of the visible scores
  double as_fma = 0;      ///< that multiply-adds at their peak do in the time that these take
  double bytes = 0;       ///< of the rows that are read and written, each counted once
  double tasks = 0;       ///< to be shared out to threads
  bool at_least = false;  ///< softcap or dropout take longer than what was measured
};

/// Of sequences of these lengths; of `batch` of the one length where all are alike.
Cost cost_of(const CpuPlan& plan, const Kernels& kernels, const Problem& problem,
             const std::vector<Sequence>& lengths);

/// What some threads of this machine can do at most.
struct Peaks {
  int threads = 1;
  double fma = 0;   ///< flops per second of each: multiply-adds of f32 on the engine's vectors
  double read = 0;  ///< bytes per second that all together read from memory
};

/// Measures, in some 10 to 40 ms, when first asked for so many threads.
Peaks peaks_of(int threads);

/// How long a call takes and what binds it.
Estimate estimate(const Cost& cost, const Peaks& peaks);

}  // namespace fulgur::cpu

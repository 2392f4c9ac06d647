/// Counts of what kernels have done in the emulator; tests get them from its driver by this name.
#pragma once

#include <cstdint>

namespace emulator {

struct Counts {
  uint64_t read, written;  ///< bytes of global memory
  uint64_t products;       ///< multiplications, each with an addition, of tensor cores
  uint64_t exponentials;
};

}  // namespace emulator

extern "C" emulator::Counts emulator_counts;

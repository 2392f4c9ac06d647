/// What kernels have done in the emulator, which tests ask its driver for by this name.
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

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels/simd/kernels.h"

namespace fulgur::cpu {

/// A faster way of bf16, and maybe of f16, than vectors of f32.
struct Bf16Path {
  std::string_view name;
  const Kernels* bf16;      ///< null where the path is not taken
  const Kernels* f16;       ///< null, too, where vectors are faster
  std::string unavailable;  ///< why it is not taken
};

/// What this process computes with: the best of the machine, or what the environment variable
/// FULGUR_CPU_TARGET names. "sse4", "avx2", "avx512" and "neon" force the vectors of an instruction
/// set, for bf16 and f16, too; "amx" and "avx512_bf16" force a path of bf16.
struct Machine {
  const Kernels& vectors;
  std::vector<Bf16Path> bf16;  ///< the fastest first
};
/// Throws Error(kUnavailable) when this machine or build lacks the named one.
const Machine& machine();

}  // namespace fulgur::cpu

#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cpu/kernels/simd/kernels.h"

namespace fulgur::cpu {

/// A path that multiplies bf16, and may multiply f16, faster than vectors of f32 do.
struct Bf16Path {
  std::string_view name;
  const Kernels* bf16;      ///< null if the path is not used
  const Kernels* f16;       ///< null if the path is not used, or vectors are faster
  std::string unavailable;  ///< why it is not used
};

/// The kernels that this process uses: the fastest of the machine, or those that the environment
/// variable FULGUR_CPU_TARGET names. "sse4", "avx2", "avx512" and "neon" force the vectors of an
/// instruction set, for bf16 and f16, too; "amx" and "avx512_bf16" force a path of bf16.
struct Machine {
  const Kernels& vectors;
  std::vector<Bf16Path> bf16;  ///< the fastest first
};
/// Throws Error(kUnavailable) if this machine or build lacks the kernels that are named.
const Machine& machine();

}  // namespace fulgur::cpu

#pragma once

#include <span>
#include <string>

#include "cuda/kernel_sources.h"

namespace fulgur::cuda {

/// What NVRTC made of a kernel.
struct Cubin {
  std::string image;  ///< for cuModuleLoadData
  std::string log;    ///< what the compiler said: registers, spills, warnings
};

/// Why there is no NVRTC to use; empty when there is. Loads it, once.
const std::string& nvrtc_unavailable();

/// "13.0, 104857600 bytes": a different compiler has a different identity. Throws
/// Error(kUnavailable) when there is none.
const std::string& nvrtc_identity();

/// Compiles `sources.at(kernel)`; the others are its headers, and so is plan.h with `plan_header`.
/// Throws Error: kUnavailable without NVRTC; kInternal with the compiler's log when it fails.
Cubin nvrtc_compile(const KernelSources& sources, const std::string& kernel,
                    const std::string& plan_header, std::span<const std::string> options);

}  // namespace fulgur::cuda

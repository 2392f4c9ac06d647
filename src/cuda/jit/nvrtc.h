#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver/shared_library.h"
#include "cuda/jit/sources.h"

namespace fulgur::cuda {

/// What NVRTC made of a kernel.
struct Cubin {
  std::string image;  ///< for cuModuleLoadData: machine code, or PTX
  std::string log;    ///< what the compiler said: registers, spills, warnings
};

/// The first NVRTC of CUDA 12 or newer in `places`, and none of a newer major than that of a driver
/// (12040 is 12.4; 0: none is here), which would not load its code.
SharedLibrary open_nvrtc(std::span<const std::filesystem::path> places, int driver_version);

/// Why there is no NVRTC to use; empty when there is. Loads it, once, after the driver.
const std::string& nvrtc_unavailable();

/// The compute capabilities that it compiles for, in ascending order: 90 is 9.0. Throws as
/// nvrtc_identity does.
const std::vector<int>& nvrtc_capabilities();

/// "13.0, 104857600 bytes": a different compiler has a different identity. Throws
/// Error(kUnavailable) when there is none.
const std::string& nvrtc_identity();

/// Compiles `sources.at(kernel)`; the others are its headers, and so is kernel_config.h with
/// `kernel_config`. `options` name the architecture: for a virtual one the image is PTX. Throws
/// Error: kUnavailable without NVRTC; kInternal with the compiler's log when it fails.
Cubin nvrtc_compile(const KernelSources& sources, const std::string& kernel,
                    const std::string& kernel_config, std::span<const std::string> options);

}  // namespace fulgur::cuda

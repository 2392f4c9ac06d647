#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver/shared_library.h"
#include "cuda/jit/sources.h"

namespace fulgur::cuda {

/// A compiled kernel.
struct Cubin {
  std::string image;  ///< machine code or PTX, for cuModuleLoadData
  std::string log;    ///< of the compiler: registers, spills, warnings
};

/// The first NVRTC in `places` of CUDA 12 or newer whose major version is not newer than the
/// driver's, which could not load its code. `driver_version`: 12040 is 12.4; 0 without a driver.
SharedLibrary open_nvrtc(std::span<const std::filesystem::path> places, int driver_version);

/// Why there is no usable NVRTC; empty if there is one. Loads it once, after the driver.
const std::string& nvrtc_unavailable();

/// The compute capabilities for which NVRTC compiles, in ascending order: 90 is 9.0. Throws the
/// errors of nvrtc_identity.
const std::vector<int>& nvrtc_capabilities();

/// A text that differs between compilers: "13.0, 104857600 bytes". Throws Error(kUnavailable)
/// without NVRTC.
const std::string& nvrtc_identity();

/// Compiles `sources.at(kernel)`. The other sources are its headers, and `kernel_config` is the
/// text of kernel_config.h. `options` name the architecture; for a virtual one the image is PTX.
/// Throws Error: kUnavailable without NVRTC; kInternal, with the compiler's log, if it fails.
Cubin nvrtc_compile(const KernelSources& sources, const std::string& kernel,
                    const std::string& kernel_config, std::span<const std::string> options);

}  // namespace fulgur::cuda

#pragma once

#include <map>
#include <string>

namespace fulgur::cuda {

/// Device text by its name, the path below src/kernels: "sm90/forward/forward.cu".
using KernelSources = std::map<std::string, std::string>;

/// The text built into the library.
KernelSources embedded_sources();

/// The text to compile: that of the folder FULGUR_KERNEL_DIR if it is set, the embedded otherwise.
/// Read once. Throws Error(kInvalidArgument) for a relative path, and for a folder of which not all
/// can be read.
const KernelSources& kernel_sources();

/// The part of `sources` that a kernel is compiled from: its own text and all that it includes,
/// over other files too. kernel_config.h is the request's, and what stands in <...> and is not
/// among the sources is the compiler's. Throws Error(kInternal) when another one is missing.
KernelSources sources_of(const KernelSources& sources, const std::string& kernel);

/// SHA-256 over name, size and text of each source, in the order of names.
std::string digest(const KernelSources& sources);

}  // namespace fulgur::cuda

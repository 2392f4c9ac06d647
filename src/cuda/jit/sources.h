#pragma once

#include <map>
#include <string>

namespace fulgur::cuda {

/// Device text by name, which is the path below src/kernels: "sm90/forward/forward.cu".
using KernelSources = std::map<std::string, std::string>;

/// The text that is built into the library.
KernelSources embedded_sources();

/// The text that is compiled: that of the folder FULGUR_KERNEL_DIR if it is set, else the embedded
/// text. Read once. Throws Error(kInvalidArgument) for a relative path, and for a folder with files
/// that cannot be read.
const KernelSources& kernel_sources();

/// The part of `sources` that a kernel is compiled from: its own text and all that it includes,
/// directly or not. kernel_config.h belongs to the request, and includes in <...> that are not
/// among the sources to the compiler. Throws Error(kInternal) if any other file is missing.
KernelSources sources_of(const KernelSources& sources, const std::string& kernel);

/// SHA-256 over name, size and text of each source, in the order of names.
std::string digest(const KernelSources& sources);

}  // namespace fulgur::cuda

#pragma once

#include "io/array.h"

namespace fulgur::io {

class OutputFiles;

/// The array of an .npy file (NumPy's format, versions 1 to 3): float16, float32, float64 or int32,
/// little endian, C order, 1 to 4 dimensions; the data must fill the file to its end. Allocates
/// only after the sizes have been checked against the file. `name` begins every message. Throws
/// Error(kInvalidArgument).
Array parse_npy(Bytes file, std::string_view name);
Array read_npy(const std::string& path, std::string_view name);

/// Adds `array` as an .npy file. Throws Error(kInvalidArgument) for bf16, which .npy lacks.
void write_npy(OutputFiles& files, const std::string& path, const Array& array);

}  // namespace fulgur::io

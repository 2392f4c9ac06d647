#pragma once

#include <map>

#include "io/array.h"

namespace fulgur::io {

class OutputFiles;

/// Arrays by name.
using Arrays = std::map<std::string, Array>;

/// The arrays called `wanted` of a .safetensors file (F32, F16, BF16, F64 or I32); those that the
/// file lacks are left out. The whole header is checked before anything is copied: at most 100 MB,
/// nested at most 16 deep, offsets in range, without overlap or gap, sizes as the shapes say.
/// `name` begins every message. Throws Error(kInvalidArgument).
Arrays parse_safetensors(Bytes file, std::span<const std::string> wanted, std::string_view name);
Arrays read_safetensors(const std::string& path, std::span<const std::string> wanted,
                        std::string_view name);

/// Adds the arrays, in the order of their names, as one .safetensors file.
void write_safetensors(OutputFiles& files, const std::string& path, const Arrays& arrays);

}  // namespace fulgur::io

/// Any bytes as a .safetensors file: arrays that lie in the file without overlap, or an error.
#include <cstdlib>

#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string wanted[] = {"q", "k", "v", "dout"};
  try {
    size_t bytes = 0;
    for (const auto& [name, array] :
         fulgur::io::parse_safetensors(std::as_bytes(std::span(data, size)), wanted, "file")) {
      if (array.tensor().numel() != array.numel()) std::abort();
      bytes += array.bytes().size();
    }
    if (bytes > size) std::abort();
  } catch (const fulgur::Error& e) {
    if (e.status() != fulgur::Status::kInvalidArgument) std::abort();
  }
  return 0;
}

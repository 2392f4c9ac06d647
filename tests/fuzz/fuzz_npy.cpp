/// Any bytes as an .npy file: an array that fills the file, or an error; no crash, no big
/// allocation.
#include <cstdlib>

#include "io/npy.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto array = fulgur::io::parse_npy(std::as_bytes(std::span(data, size)), "file");
    if (array.bytes().size() >= size || array.tensor().numel() != array.numel()) std::abort();
  } catch (const fulgur::Error& e) {
    if (e.status() != fulgur::Status::kInvalidArgument) std::abort();
  }
  return 0;
}

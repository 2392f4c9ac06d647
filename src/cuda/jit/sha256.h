#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace fulgur::cuda {

/// SHA-256 (FIPS 180-4). The cache returns code that is executed, so its keys and checksums must
/// not collide.
class Sha256 {
 public:
  Sha256& add(std::string_view bytes);
  /// The digest in hexadecimal. No data may be added after it.
  std::string hex();

 private:
  void block(const unsigned char* data);

  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> rest_{};
  uint64_t bytes_ = 0;
};

}  // namespace fulgur::cuda

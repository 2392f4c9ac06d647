/// Philox4x32-10, the counter-based random numbers of dropout (Salmon et al., "Parallel random
/// numbers: as easy as 1, 2, 3", SC 2011), and the keep rule that every engine follows.
#pragma once

#include <array>
#include <cstdint>

namespace fulgur {

using PhiloxCounter = std::array<uint32_t, 4>;
using PhiloxKey = std::array<uint32_t, 2>;

/// Four random words: a pure function of counter and key.
constexpr PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

/// Which entries of P dropout keeps. An entry's fate depends on (p, seed, offset, head_index, i, j)
/// alone, never on tiling or threads. head_index = b * hq + h; i < 2^32, j < 2^34.
class DropoutMask {
 public:
  /// p in [0, 1): the probability of dropping an entry.
  constexpr DropoutMask(double p, uint64_t seed, uint64_t offset) : threshold_(threshold_of(p)) {
    const PhiloxCounter words = philox({low(offset), high(offset), 0, 0}, {low(seed), high(seed)});
    key_ = {words[0], words[1]};
  }

  /// The words of the four entries 4 * (j / 4) .. 4 * (j / 4) + 3 of row i.
  constexpr PhiloxCounter words(uint64_t head_index, uint64_t i, uint64_t j) const {
    return philox({low(j / 4), low(i), low(head_index), high(head_index)}, key_);
  }

  constexpr bool keep(uint64_t head_index, uint64_t i, uint64_t j) const {
    return words(head_index, i, j)[j % 4] >= threshold_;
  }

  /// kept[n] = keep(head_index, i, j + n) for n < 4; j is a multiple of 4.
  constexpr void keep4(uint64_t head_index, uint64_t i, uint64_t j, bool kept[4]) const {
    const PhiloxCounter w = words(head_index, i, j);
    for (int n = 0; n < 4; ++n) kept[n] = w[n] >= threshold_;
  }

  /// For engines that run Philox themselves: an entry is kept iff its word >= threshold().
  constexpr PhiloxKey key() const { return key_; }
  constexpr uint32_t threshold() const { return threshold_; }

 private:
  static constexpr uint32_t low(uint64_t x) { return static_cast<uint32_t>(x); }
  static constexpr uint32_t high(uint64_t x) { return static_cast<uint32_t>(x >> 32); }

  /// round(p * 2^32), at most 2^32 - 1.
  static constexpr uint32_t threshold_of(double p) {
    const double scaled = p * 4294967296.0 + 0.5;
    return scaled >= 4294967295.0 ? UINT32_MAX : static_cast<uint32_t>(scaled);
  }

  PhiloxKey key_{};
  uint32_t threshold_;
};

}  // namespace fulgur

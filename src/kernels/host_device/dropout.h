// The entries of P that dropout keeps. Whether an entry is kept is a function of (p, seed, offset, head, query, key),
// and does not depend on tiles, threads or engines. By Philox4x32-10, the counter-based random numbers of Salmon et
// al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). docs/contract.md says which word decides about which
// entry.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

// Constants of Philox4x32: rounds, multipliers, and the increments of the key in each round.
enum : int { kPhiloxRounds = 10 };
enum : u32 {
  kPhiloxMultiplier0 = 0xD2511F53u,
  kPhiloxMultiplier2 = 0xCD9E8D57u,
  kPhiloxWeyl0 = 0x9E3779B9u,
  kPhiloxWeyl1 = 0xBB67AE85u
};

struct PhiloxWords {
  u32 word[4];
  FULGUR_SHARED u32 operator[](int i) const { return word[i]; }
  friend FULGUR_SHARED bool operator==(const PhiloxWords&, const PhiloxWords&) = default;
};

struct PhiloxKey {
  u32 word[2];
  FULGUR_SHARED u32 operator[](int i) const { return word[i]; }
  FULGUR_SHARED PhiloxKey next() const { return {{word[0] + kPhiloxWeyl0, word[1] + kPhiloxWeyl1}}; }
};

FULGUR_SHARED u32 low_word(u64 x) { return u32(x); }
FULGUR_SHARED u32 high_word(u64 x) { return u32(x >> 32); }

// Four random words.
FULGUR_SHARED PhiloxWords philox(PhiloxWords counter, PhiloxKey key) {
  for (int round = 0; round < kPhiloxRounds; ++round, key = key.next()) {
    const u64 a = u64(kPhiloxMultiplier0) * counter[0];
    const u64 b = u64(kPhiloxMultiplier2) * counter[2];
    counter = {{high_word(b) ^ counter[1] ^ key[0], low_word(b), high_word(a) ^ counter[3] ^ key[1], low_word(a)}};
  }
  return counter;
}

// Consecutive keys of a query for which the words of one call decide.
enum : int { kDropoutKeys = 4 };

// An entry is kept if its word is not below this: round(p * 2^32), at most 2^32 - 1. p in [0, 1) is the probability of
// dropping one.
FULGUR_SHARED u32 dropout_threshold(double p) {
  const double scaled = p * 4294967296.0 + 0.5;
  return scaled >= 4294967295.0 ? 0xffffffffu : u32(scaled);
}

struct DropoutMask {
  PhiloxKey key;
  u32 threshold;

  // The words of keys 4 * (key / 4) to 4 * (key / 4) + 3 of a query. head = b * hq + h; query < 2^32, key < 2^34.
  FULGUR_SHARED PhiloxWords words(u64 head, u64 query, u64 key_index) const {
    return philox({{low_word(key_index / kDropoutKeys), low_word(query), low_word(head), high_word(head)}}, key);
  }
  FULGUR_SHARED bool keeps(u64 head, u64 query, u64 key_index) const {
    const PhiloxWords all = words(head, query, key_index);
    u32 word = all[0];
    for (int i = 1; i < kDropoutKeys; ++i) word = int(key_index % kDropoutKeys) == i ? all[i] : word;  // in registers
    return word >= threshold;
  }
};

// Combines seed and offset to a key, so that different pairs have different keys.
FULGUR_SHARED DropoutMask dropout_mask(u32 threshold, u64 seed, u64 offset) {
  const PhiloxWords words =
      philox({{low_word(offset), high_word(offset), 0, 0}}, PhiloxKey{{low_word(seed), high_word(seed)}});
  return {{{words[0], words[1]}}, threshold};
}

}  // namespace fulgur::kernels

// NaN and infinity in V at keys that some rows do not see: P is 0 there, but 0 * NaN is NaN.
// decode/codes/non_finite.cuh has the same for codes.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/scores.cuh"

// V of a tile in shared memory, and the factors of its keys where these come of codes (kVFactors).
enum : int { kVFactors = kConverts && kVScales > 0 };
struct ValueTile {
  u32 v, factors = 0;
};

enum : int { kVWords = kWarpColumns * ElementV::kBytes / 4 };  // of a key

template <int panel_bytes = kPanelBytes>
__device__ __forceinline__ u32 word_place(u32 v, int key, int word) {
  return v + word / 32 * panel_bytes + swizzled(key, word % 32 / 4) + word % 4 * 4;
}

// A word of V with zeros for what is not finite.
__device__ __forceinline__ u32 finite_part(u32 word) {
  if constexpr (ElementV::kType == kF32) return fabsf(__uint_as_float(word)) < infinity() ? word : 0;
  return (ElementV::is_finite(word) ? word & 0xffff : 0) | (ElementV::is_finite(word >> 16) ? word & 0xffff0000 : 0);
}

// Two adjacent columns of V with zeros for what is finite.
__device__ __forceinline__ void load_not_finite(u32 at, float (&x)[2]) {
  const u32 word = load_shared(at), rest = word ^ finite_part(word);
  if constexpr (ElementV::kType == kF32) {
    const u32 next = load_shared(at + 4);
    x[0] = __uint_as_float(rest);
    x[1] = __uint_as_float(next ^ finite_part(next));
  } else {
    x[0] = ElementV::low(rest);
    x[1] = ElementV::high(rest);
  }
}

// Replaces NaN and infinity of `keys` keys of V by 0, by `threads` threads of which this is number `thread`.
template <int panel_bytes = kPanelBytes>
__device__ __forceinline__ void replace_non_finite(u32 v, int keys, int thread, int threads) {
#pragma unroll 1
  for (int at = thread; at < keys * kVWords; at += threads) {
    const u32 address = word_place<panel_bytes>(v, at / kVWords, at % kVWords);
    store_shared(address, finite_part(load_shared(address)));
  }
}

// Adds NaN and infinity of V to O in the rows that see their key, and replaces them by 0 in shared memory for the
// product. `sync` is a barrier of the warp group, which shares the tile.
template <class Sync>
__device__ __forceinline__ void add_non_finite(const DecodeParams& p, float (&O)[kWarpColumns / 2],
                                               const ThreadRows& rows, const HiddenScores<ByRows>& hidden,
                                               int key_tile, const ValueTile& values, Sync sync) {
  sync();
#pragma unroll 1
  for (int key = 0; key < kBlockKeys; ++key) {
    const bool seen[2] = {sees(p, rows, hidden, 0, key_tile, key), sees(p, rows, hidden, 1, key_tile, key)};
#pragma unroll
    for (int i = 0; i < kWarpColumns / 2; i += 4) {
      float x[2];
      load_not_finite(word_place(values.v, key, (2 * i + int(thread_column())) * ElementV::kBytes / 4), x);
      if (kVFactors) {
        const float factor = __int_as_float(load_shared(values.factors + 4 * key));
#pragma unroll
        for (int j = 0; j < 2; ++j) x[j] = x[j] == 0 ? 0 : x[j] * factor;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (seen[j / 2]) O[i + j] += x[j % 2];
      }
    }
  }
  sync();
  replace_non_finite(values.v, kBlockKeys, threadIdx.x % kWarpGroupThreads, kWarpGroupThreads);
  sync();
}

// Whether one of `threads` threads, of which this is number `thread`, finds NaN or infinity in the `count` keys of V
// from key `first` on, at a key of the sequence that some row does not see.
template <int panel_bytes = kPanelBytes>
__device__ __forceinline__ bool finds_hidden_non_finite(u32 v, int first, int count, const KeyRange& seen_by_all,
                                                        int sk, int thread, int threads) {
  constexpr int kChunks = kVWords / 4;
  const int keys = min(count, sk - first);
  const int before = max(min(seen_by_all.begin - first, keys), 0);
  const int after = max(min(seen_by_all.end - first, keys), before);
  const int hidden = before + keys - after;
  bool found = false;
#pragma unroll 1
  for (int at = thread; at < hidden * kChunks; at += threads) {
    const int i = at / kChunks;
    const int key = i < before ? i : i - before + after;
    u32 x[4];
    load_shared16(word_place<panel_bytes>(v, key, at % kChunks * 4), x);
#pragma unroll
    for (int j = 0; j < 4; ++j) found = found || x[j] != finite_part(x[j]);
  }
  return found;
}

// Whether V of a tile has NaN or infinity at a key of the sequence that some row does not see.
__device__ __forceinline__ bool hides_non_finite(u32 v, int key_tile, const KeyRange& seen_by_all, int sk) {
  return __any_sync(0xffffffff, finds_hidden_non_finite(v, key_tile * kBlockKeys, kBlockKeys, seen_by_all, sk,
                                                        threadIdx.x % 32, 32));
}

// Keeps NaN and infinity of V in a tile that the mask cuts away from the rows that do not see their keys.
template <class Sync>
__device__ __forceinline__ void add_hidden_non_finite(const DecodeParams& p, float (&O)[kWarpColumns / 2],
                                                      const TileMask& mask, const HiddenScores<ByRows>& hidden,
                                                      int key_tile, const ValueTile& values,
                                                      const SavedWorkTiles& saved, Sync sync) {
  if (hides_non_finite(values.v, key_tile, mask.seen_by_all, saved.keys()))
    add_non_finite(p, O, mask.rows, hidden, key_tile, values, sync);
}

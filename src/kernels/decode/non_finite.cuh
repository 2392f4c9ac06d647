// NaN and infinity in V at keys that some rows do not see: P is 0 there, but 0 * NaN is NaN.
// decode/codes/non_finite.cuh has the same for codes.
#pragma once
#include "decode/scores.cuh"

// V of a tile in shared memory, and the factors of its keys where these come of codes (kVFactors).
enum : int { kVFactors = kConverts && kVScales > 0 };
struct ValueTile {
  u32 v, factors = 0;
};

// Adds NaN and infinity of V to O in the rows that see their key, and replaces them by 0 in shared memory for the
// product. `sync` is a barrier of the warp group, which shares the tile.
template <class Sync>
__device__ __forceinline__ void add_non_finite(const DecodeParams& p, float (&O)[kValueDim / 2], const ThreadRows& rows,
                                               const HiddenScores<ByRows>& hidden, int key_tile,
                                               const ValueTile& values, Sync sync) {
  const auto pair_at = [&](int key, int column) {
    return values.v + column / 64 * kPanelBytes + swizzled(key, column % 64 / 8) + column % 8 * 2;
  };
  sync();
#pragma unroll 1
  for (int key = 0; key < kBlockKeys; ++key) {
    const bool seen[2] = {sees(p, rows, hidden, 0, key_tile, key), sees(p, rows, hidden, 1, key_tile, key)};
#pragma unroll
    for (int i = 0; i < kValueDim / 2; i += 4) {
      const u32 pair = load_shared(pair_at(key, 2 * i + int(thread_column())));
      const float factor = kVFactors ? __int_as_float(load_shared(values.factors + 4 * key)) : 1;
      const float x[2] = {ElementV::is_finite(pair) ? 0 : ElementV::low(pair) * factor,
                          ElementV::is_finite(pair >> 16) ? 0 : ElementV::high(pair) * factor};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (seen[j / 2]) O[i + j] += x[j % 2];
      }
    }
  }
  sync();
#pragma unroll 1
  for (int at = threadIdx.x % kWarpGroupThreads; at < kBlockKeys * kValueDim / 2; at += kWarpGroupThreads) {
    const u32 address = pair_at(at / (kValueDim / 2), at % (kValueDim / 2) * 2);
    const u32 pair = load_shared(address);
    store_shared(address, (ElementV::is_finite(pair) ? pair & 0xffff : 0) |
                              (ElementV::is_finite(pair >> 16) ? pair & 0xffff0000 : 0));
  }
  sync();
}

// Whether V of a tile has NaN or infinity at a key of the sequence that some row does not see.
__device__ __forceinline__ bool hides_non_finite(u32 v, int key_tile, const KeyRange& seen_by_all, int sk) {
  constexpr int kChunks = kValueDim / 8;
  const int first = key_tile * kBlockKeys;
  const int keys = min(int(kBlockKeys), sk - first);
  const int before = max(min(seen_by_all.begin - first, keys), 0);
  const int after = max(min(seen_by_all.end - first, keys), before);
  const int hidden = before + keys - after;
  bool found = false;
#pragma unroll 1
  for (int at = threadIdx.x % 32; at < hidden * kChunks; at += 32) {
    const int i = at / kChunks;
    const int key = i < before ? i : i - before + after;
    const int column = at % kChunks * 8;
    u32 x[4];
    load_shared16(v + column / 64 * kPanelBytes + swizzled(key, column % 64 / 8), x);
#pragma unroll
    for (int j = 0; j < 4; ++j) found = found || !ElementV::is_finite(x[j]) || !ElementV::is_finite(x[j] >> 16);
  }
  return __any_sync(0xffffffff, found);
}

// Keeps NaN and infinity of V in a tile that the mask cuts away from the rows that do not see their keys.
template <class Sync>
__device__ __forceinline__ void add_hidden_non_finite(const DecodeParams& p, float (&O)[kValueDim / 2],
                                                      const TileMask& mask, const HiddenScores<ByRows>& hidden,
                                                      int key_tile, const ValueTile& values,
                                                      const SavedWorkTiles& saved, Sync sync) {
  if (hides_non_finite(values.v, key_tile, mask.seen_by_all, saved.keys()))
    add_non_finite(p, O, mask.rows, hidden, key_tile, values, sync);
}

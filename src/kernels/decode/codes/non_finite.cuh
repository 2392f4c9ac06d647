// NaN and infinity in codes of V, or in their scales, at keys that some rows do not see: P is 0 there, but 0 * NaN is
// NaN. decode/non_finite.cuh has the same for V of 16 bits.
#pragma once
#include "decode/codes/coded_values.cuh"
#include "decode/codes/output.cuh"
#include "decode/codes/value_products.cuh"
#include "decode/codes/mask.cuh"

// Adds NaN and infinity of V to O in the rows that see their key, and replaces them by 0 in shared memory for the
// product. Only keys that some row does not see are looked at. `sync` is a barrier of the warp group.
template <class Sync>
__device__ __forceinline__ void add_hidden_non_finite(const DecodeParams& p, float (&O)[kRowTiles][kOutputs],
                                                      const TransposedMask& mask,
                                                      const HiddenScores<Transposed> (&hidden)[kRowTiles], int key_tile,
                                                      const CodedValues& values, const SavedWorkTiles& saved,
                                                      Sync sync) {
  const int first = key_tile * kBlockKeys;
  const int keys = min(int(kBlockKeys), saved.keys() - first);
  const int lane = threadIdx.x % 32, thread = kHeads > 1 ? lane : int(threadIdx.x % kWarpGroupThreads);
  sync();
#pragma unroll 1
  for (int key = 0; key < keys; ++key) {
    if (first + key >= mask.seen_by_all.begin && first + key < mask.seen_by_all.end) continue;
    if (__all_sync(0xffffffff, values.is_finite_key(key, lane))) continue;
    bool seen[2 * kRowTiles];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) seen[i] = sees(p, mask.tiles[i / 2], hidden[i / 2], i % 2, key_tile, key);
#pragma unroll
    for (int j = 0; j < kOutputs; j += 2) {
      int at = key, pairs_before = pairs_before_values(values.v, values.scales);
      asm volatile("" : "+r"(at), "+r"(pairs_before));  // the places of all columns at once would take registers
      const int column = output_column(j, pairs_before);
      if (column < 0) continue;
      const float addend = values.addend(at, column);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i)
        if (seen[i]) O[i / 2][j + i % 2] += addend;
    }
    sync();
    if (thread < 32) values.clear(key, lane);
    if (kBoxKeys > 0) fence_async_proxy();
    sync();
  }
}

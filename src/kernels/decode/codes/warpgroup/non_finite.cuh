// NaN and infinity of V at keys that some rows do not see (decode/codes/non_finite.cuh), where scores are transposed on
// warpgroups.
#pragma once
#include "decode/codes/coded_values.cuh"
#include "decode/codes/warpgroup/softmax.cuh"

// Adds them to O in the rows that see their key, and replaces them by 0 in shared memory. `seen_by_all`: keys that all
// rows see, counted from the first one of the tile. S of hidden keys is -inf. The P of the tile is not there yet.
__device__ __forceinline__ void add_hidden_non_finite(const float (&S)[kScores], float (&O)[kStrips][kScores],
                                                      const CodedValues& values, const KeyRange& seen_by_all,
                                                      const WarpgroupMemory& memory) {
  const int lane = threadIdx.x % 32, warp_in_group = uniform(threadIdx.x / 32 % kWarpsPerGroup);
  const auto has_non_finite = [&](int key) {
    return (key < seen_by_all.begin || key >= seen_by_all.end) &&
           !__all_sync(0xffffffff, values.is_finite_key(key, lane));
  };
  bool found = false;
#pragma unroll 1
  for (int key = warp_in_group; key < kBlockKeys; key += kWarpsPerGroup) found = found || has_non_finite(key);
  if (lane == 0) store_shared(memory.flags() + 4 * warp_in_group, found);
  sync_warpgroup();
  found = false;
#pragma unroll
  for (int i = 0; i < kWarpsPerGroup; ++i) found = found || load_shared(memory.flags() + 4 * i) != 0;
  sync_warpgroup();
  if (!found) return;
  // [key][row]: whether the row sees the key.
  const auto place = [&](int key, int row) {
    return memory.p() + key * kPanelRowBytes + row * 2;
  };
  const int first_key = threadIdx.x % 128 / 32 * 16 + int(thread_row());
#pragma unroll
  for (int i = 0; i < kScores; ++i)
    store_shared_u16(place(first_key + i / 2 % 2 * 8, i / 4 * 8 + int(thread_column()) + i % 2), S[i] != -infinity());
  sync_warpgroup();
#pragma unroll 1
  for (int key = 0; key < kBlockKeys; ++key) {
    if (!has_non_finite(key)) continue;
#pragma unroll
    for (int i = 0; i < 2 * kStrips; ++i) {
      const float addend = values.addend(key, StripColumns::column(i / 2, i % 2));
#pragma unroll
      for (int j = 0; j < 2 * kEights; ++j)
        if (load_shared_u16(place(key, j / 2 * 8 + int(thread_column()) + j % 2)) != 0)
          O[i / 2][j / 2 * 4 + i % 2 * 2 + j % 2] += addend * (1 / NumbersOf<kOfV>::kFactor);
    }
    sync_warpgroup();
    if (warp_in_group == 0) values.clear(key, lane);
    sync_warpgroup();
  }
}

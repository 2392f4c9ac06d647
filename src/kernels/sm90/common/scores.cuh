// What happens to scores between the product and the softmax: transform_scores changes them, mask_scores hides keys.
#pragma once
#include "sm90/common/fragment.cuh"
#include "sm90/common/work_tiles.cuh"
#include "device/transform.cuh"

// All scores of a strip at `view` for a key tile.
__device__ __forceinline__ void transform_scores(const AttentionParams& p, float (&S)[kBlockKeys / 2], u32 view,
                                                 int diagonal, int key_tile) {
  float slope = 0;
  float distance = 0;
  if (kAlibi) {
    const Place place = load_place(view);
    slope = alibi_slope(p, place.batch, place.head);
    distance = float(diagonal + int(warp_row() + thread_row()) - key_tile * kBlockKeys - int(thread_column()));
  }
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i)
    S[i] = transform_score(p, S[i], slope, distance + float((i & 2 ? 8 : 0) - i / 4 * 8 - (i & 1)));
}

// The keys that rows r and r + 8 of this thread may see, [low0, high0) and [low1, high1), relative to its first column.
// Without chunks low1 is low0 + 8, and not kept.
struct Visible {
  int low0, low1, high0, high1;
};

__device__ __forceinline__ Visible visible_of_thread(const AttentionParams& p, int sk, int diagonal) {
  const int column = thread_column();
  diagonal += warp_row() + thread_row();
  if (kHasChunk) {
    const KeyRange keys0 = keys_seen_from(band_of(p), sk, diagonal);
    const KeyRange keys1 = keys_seen_from(band_of(p), sk, diagonal + 8);
    return {keys0.begin - column, keys1.begin - column, keys0.end - column, keys1.end - column};
  }
  Visible visible = {0, 0, sk - column, sk - column};
  if (kHasRight) {
    visible.high0 = min(visible.high0, diagonal + p.window_right + 1 - column);
    visible.high1 = min(visible.high1, diagonal + 8 + p.window_right + 1 - column);
  }
  if (kHasLeft) visible.low0 = diagonal - p.window_left - column;
  return visible;
}

// All other keys score -inf.
__device__ __forceinline__ void mask_scores(float (&S)[kBlockKeys / 2], const Visible& visible, int key_tile) {
  const int key = key_tile * kBlockKeys;
  const int low0 = visible.low0 - key;
  const int low1 = kHasChunk ? visible.low1 - key : low0 + 8;
  const int high0 = visible.high0 - key;
  const int high1 = visible.high1 - key;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    const int column = i / 4 * 8 + (i & 1);
    bool seen = column < (i & 2 ? high1 : high0);
    if (kHasLeft) seen = seen && column >= (i & 2 ? low1 : low0);
    S[i] = seen ? S[i] : -infinity();
  }
}

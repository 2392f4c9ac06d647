// P V in e4m3. Its sums keep 13 bits below their largest term and cut off the rest of the others, so that n keys lose
// n / 2^16 of their sum. Numbers of both signs lose as much of either sign, so V is centred: the keys of a sequence are
// cut into segments, and V of a segment is 2 W + M + a rounding error, with M of a channel such that the error has mean
// 0. The products take W, in codes; at the end O takes M of each segment, in f32, times the segment's share in the
// softmax. Columns of W are permuted: of 32 columns a thread has 8 in its accumulators, which are adjacent ones of V.
#pragma once
#include "attention/pages.cuh"
#include "sm90/forward/layout.cuh"
#include "sm90/forward/params.h"

enum : int {
  kSegmentKeys = segment_keys(kBlockKeys),
  kSegmentTiles = kSegmentKeys / kBlockKeys,
  // Means of four segments are a step of a product. As many steps as a buffer of K holds come with the last V, in the
  // place of K. Strips that end at different keys on the left have none.
  kMeanStepBytes = mean_step_bytes(kValueDim),
  kMeanSteps = kMeanProducts ? kLayout.k_bytes / kMeanStepBytes : 0,
};
static_assert(!kMeanProducts || (kCentersV && kPairs && !kHasLeft && kMeanSteps > 0));

// The tile of the image at which a sequence begins. Packed, each has room for one more than its rows fill.
__device__ __forceinline__ long long first_image_tile(const ForwardParams& p, int batch, int kv_head, int k_start) {
  const CenteredValues& v = p.values;
  return (long long)(kv_head) * v.head_tiles + (long long)(batch) * v.batch_tiles +
         (kPackedK ? k_start / kBlockKeys + batch : 0);
}

// Where the means of a sequence begin. `kv_head`: counted over the batch.
__device__ __forceinline__ float* means_of(const ForwardParams& p, int kv_head) {
  return p.values.means + (long long)(kv_head) * p.values.segments * kValueDim;
}

// The steps of a product with the means of a sequence. A step has four rows for each of four segments: the mean in bf16
// twice, and its rounding error in bf16 twice. They are multiplied with a row's weight in bf16 and its rounding error.
__device__ __forceinline__ unsigned char* mean_steps_of(const ForwardParams& p, int kv_head) {
  return p.values.mean_steps + (long long)(kv_head) * mean_steps_of_segments(p.values.segments) * kMeanStepBytes;
}

// Where row `row` of a step has column `column` of the accumulators.
__device__ __forceinline__ int place_in_mean_step(int row, int column) {
  constexpr int kColumns = kPanelRowBytes / 2, kChunk = 8;
  return column / kColumns * kSegmentsOfStep * kRowsOfMean * kPanelRowBytes + row * kPanelRowBytes +
         ((column % kColumns / kChunk ^ row % 8) * kChunk + column % kChunk) * 2;
}

// The steps of a q tile's segments [first, last] that come with the last V.
__device__ __forceinline__ int mean_steps(int first, int last) {
  return min(last / kSegmentsOfStep - first / kSegmentsOfStep + 1, +kMeanSteps);
}

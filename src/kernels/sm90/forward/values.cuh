// P V in e4m3. Its sums keep 13 bits below their largest term and cut off the rest of the others, so that n keys lose
// n / 2^16 of what they add up to. Numbers of both signs lose as much of either: the keys of a sequence are cut into
// segments, and V of a segment is 2 W + M + what W rounds, with M of a channel such that this has mean 0. The products
// take W, in codes, and the share of a segment in the softmax takes its M in f32 in the end. Columns of W are permuted:
// of 32 a thread's 8 in the accumulators of a product are adjacent ones of V.
#pragma once
#include "attention/pages.cuh"
#include "attention/softmax.cuh"
#include "sm90/forward/layout.cuh"
#include "sm90/forward/params.h"
#include "sm90/ptx/wgmma.cuh"

enum : int {
  kSegmentKeys = segment_keys(kBlockKeys),
  kSegmentTiles = kSegmentKeys / kBlockKeys,
  // The means of four segments are a step of a product, too, which comes with the last V in the buffer of K that has
  // none: as many steps as it holds. Not where strips end at different keys on the left.
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

// The steps of a product with the means of a sequence. A step has four rows of each of four segments: twice what bf16
// has of a mean, and twice what it leaves of it. They are multiplied with what bf16 has of a row's share, and leaves.
__device__ __forceinline__ unsigned char* mean_steps_of(const ForwardParams& p, int kv_head) {
  return p.values.mean_steps + (long long)(kv_head) * mean_steps_of_segments(p.values.segments) * kMeanStepBytes;
}

// Where row `row` of a step has column `column` of the accumulators.
__device__ __forceinline__ int place_in_mean_step(int row, int column) {
  constexpr int kColumns = kPanelRowBytes / 2, kChunk = 8;
  return column / kColumns * kSegmentsOfStep * kRowsOfMean * kPanelRowBytes + row * kPanelRowBytes +
         ((column % kColumns / kChunk ^ row % 8) * kChunk + column % kChunk) * 2;
}

// The steps that a q tile has of those that begin with segment `first`.
__device__ __forceinline__ int mean_steps(int first, int last) {
  return min(last / kSegmentsOfStep - first / kSegmentsOfStep + 1, +kMeanSteps);
}

// This thread's sums of row r, or of r + 8; of a segment each.
__device__ __forceinline__ RowSum* sums_of_row(const ForwardParams& p, int half) {
  const int row = (blockIdx.x * kConsumers + consumer()) * kStripRows + warp_row() + thread_row() + 8 * half;
  return p.values.sums + (long long)(row) * p.values.segments;
}

// After the last tile of a segment that is not the row's last: its sum begins anew.
__device__ __forceinline__ void store_segment_sum(const ForwardParams& p, Rows& rows, int segment) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    if (threadIdx.x % 4 == 0) sums_of_row(p, half)[segment] = {rows.shift[half], sum};
    rows.sum[half] = 0;
  }
}

// The means of a segment in this thread's columns.
__device__ __forceinline__ void load_means(const ForwardParams& p, int kv_head, int segment,
                                           float (&mean)[kValueDim / 4]) {
  const float* const from = means_of(p, kv_head) + segment * kValueDim + threadIdx.x % 4 * 8;
#pragma unroll
  for (int i = 0; i < kValueDim / 4; i += 4) {
    const Pack<float, 4> four = load_pack<4>(from + i / 8 * 32 + i % 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) mean[i + j] = four.x[j];
  }
}

// The sum that a row has left of a segment.
__device__ __forceinline__ float stored_sum(const ForwardParams& p, const Rows& rows, int half, int segment) {
  const RowSum left = sums_of_row(p, half)[segment];
  return left.sum == 0 ? 0 : left.sum * exp2_fast(rows.shift[half] - left.shift);
}

// The rows' shares in the segments of a step, as the product takes them; they are added to `sum`, of which lanes 2 n
// and 2 n + 1 have one half. `own`: of segment `first`. The row has left those after it, up to `last`.
__device__ __forceinline__ void weights_in_step(const ForwardParams& p, const Rows& rows, const float (&own)[2],
                                               int step, int first, int last, u32 (&A)[4], float (&sum)[2]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int segment = kSegmentsOfStep * step + 2 * pair + int(threadIdx.x % 4 / 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float share = segment == first ? own[half] : 0;
      if (segment > first && segment <= last) share = stored_sum(p, rows, half, segment);
      sum[half] += share;
      share *= 0.5f;
      const u32 both = ElementType<kBF16>::pack(share, 0);
      A[2 * pair + half] = ElementType<kBF16>::pack(share, share - ElementType<kBF16>::low(both));
    }
  }
}

// O += shares * means of a step
__device__ __forceinline__ void issue_means(float (&O)[kValueDim / 2], const u32 (&A)[4], u32 step) {
  Wgmma<kValueDim, kBF16>::template multiply<kAcrossK>(O, A, step, 1);
  wgmma_commit();
}

// O of W becomes half of O of V by the means from segment `first` on, and the sums those of rows. The row has left
// the segments up to `last`; `weight`: what it has of `first`; `mean`: of `first`.
__device__ __forceinline__ void add_means(const ForwardParams& p, int kv_head, float (&mean)[kValueDim / 4],
                                          float (&O)[kValueDim / 2], Rows& rows, float (&weight)[2], int first,
                                          int last) {
  float sum[2] = {0, 0};
#pragma unroll 1
  for (int segment = first;;) {
    sum[0] += weight[0];
    sum[1] += weight[1];
    const float half[2] = {0.5f * weight[0], 0.5f * weight[1]};
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] += half[i / 2 % 2] * mean[i / 4 * 2 + i % 2];
    if (segment == last) break;
    load_means(p, kv_head, ++segment, mean);
#pragma unroll
    for (int i = 0; i < 2; ++i) weight[i] = stored_sum(p, rows, i, segment);
  }
  rows.sum[0] = sum[0];
  rows.sum[1] = sum[1];
}

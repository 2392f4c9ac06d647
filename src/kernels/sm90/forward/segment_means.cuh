// What the rows of a strip add to O where V is centred (values.cuh): the means of V in segments of keys, each times the
// sum of P over its segment. A row stores its sum of a segment when the walk goes on to the next segment, on the left;
// the sum of the leftmost segment stays in registers.
#pragma once
#include "attention/softmax.cuh"
#include "device/memory.cuh"
#include "sm90/forward/products.cuh"
#include "sm90/forward/rings.cuh"
#include "sm90/forward/values.cuh"

// The stored sums of this thread's row r, or of r + 8: one of each segment.
__device__ __forceinline__ RowSum* sums_of_row(const ForwardParams& p, int half) {
  const int row = (blockIdx.x * kConsumers + consumer()) * kStripRows + warp_row() + thread_row() + 8 * half;
  return p.values.sums + (long long)(row) * p.values.segments;
}

// Stores the sums of both rows and resets them for the next segment; `segment` is not the row's last one.
__device__ __forceinline__ void store_segment_sum(const ForwardParams& p, Rows& rows, int segment) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float sum = quad_sum(rows.sum[half]);
    if (threadIdx.x % 4 == 0) sums_of_row(p, half)[segment] = {rows.shift[half], sum};
    rows.sum[half] = 0;
  }
}

// The stored sum of a segment, relative to the row's maximum now.
__device__ __forceinline__ float stored_sum(const ForwardParams& p, const Rows& rows, int half, int segment) {
  const RowSum stored = sums_of_row(p, half)[segment];
  return stored.sum == 0 ? 0 : stored.sum * exp2_fast(rows.shift[half] - stored.shift);
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

// The sums of the segments of a step, as a product takes them. They are added to `sum`, of which lanes 2 n and 2 n + 1
// have one half. `own`: the rows' sums of segment `first`; those up to `last` are stored.
__device__ __forceinline__ void weights_in_step(const ForwardParams& p, const Rows& rows, const float (&own)[2],
                                                int step, int first, int last, u32 (&A)[4], float (&sum)[2]) {
#pragma unroll
  for (int pair = 0; pair < 2; ++pair) {
    const int segment = kSegmentsOfStep * step + 2 * pair + int(threadIdx.x % 4 / 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float weight = segment == first ? own[half] : 0;
      if (segment > first && segment <= last) weight = stored_sum(p, rows, half, segment);
      sum[half] += weight;
      weight *= 0.5f;
      const u32 both = ElementType<kBF16>::pack(weight, 0);
      A[2 * pair + half] = ElementType<kBF16>::pack(weight, weight - ElementType<kBF16>::low(both));
    }
  }
}

// O += weights * means of a step
__device__ __forceinline__ void issue_means(float (&O)[kValueDim / 2], const u32 (&A)[4], u32 step) {
  Wgmma<kValueDim, kBF16>::template multiply<kAcrossK>(O, A, step, 1);
  wgmma_commit();
}

// O += 1/2 sum * mean of the segments [first, last]; the rows' sums become the sums over these. `own`: their sums of
// `first`, whose means are `mean`.
__device__ __forceinline__ void add_means(const ForwardParams& p, int kv_head, float (&mean)[kValueDim / 4],
                                          float (&O)[kValueDim / 2], Rows& rows, float (&own)[2], int first,
                                          int last) {
  float sum[2] = {0, 0};
#pragma unroll 1
  for (int segment = first;;) {
    sum[0] += own[0];
    sum[1] += own[1];
    const float half[2] = {0.5f * own[0], 0.5f * own[1]};
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] += half[i / 2 % 2] * mean[i / 4 * 2 + i % 2];
    if (segment == last) break;
    load_means(p, kv_head, ++segment, mean);
#pragma unroll
    for (int i = 0; i < 2; ++i) own[i] = stored_sum(p, rows, i, segment);
  }
  rows.sum[0] = sum[0];
  rows.sum[1] = sum[1];
}

// The segments [first, last] of a strip, whose walk begins in `last`. Their means are added with the last O += P V: by
// products the steps that come with the last V in the place of K (kMeanSteps), and by each thread the others.
struct SegmentMeans {
  int last;
  int first;
  float mean[kValueDim / 4];  // of a segment, in this thread's columns
  float own[2] = {0, 0};      // the rows' sums of segment `first`
  // For products:
  int step_count;  // steps in the place of K
  int step;
  u32 steps;       // the operand of the first one
  u32 weights[4];
  float sum[2];

  // The first tile of the walk.
  __device__ __forceinline__ void begin(int tile) {
    if constexpr (kCentersV) last = tile / kSegmentTiles;
  }
  // The next tile of the walk.
  __device__ __forceinline__ void enter(const ForwardParams& p, Rows& rows, int tile) {
    if constexpr (kCentersV) {
      const int previous = tile + 1;
      if (previous % kSegmentTiles == 0) store_segment_sum(p, rows, previous / kSegmentTiles);
    }
  }

  // After the softmax of the last tile of the walk.
  __device__ __forceinline__ void weigh(const ForwardParams& p, const Rows& rows, int tile) {
    if constexpr (kCentersV) {
      first = tile / kSegmentTiles;
      own[0] = quad_sum(rows.sum[0]);
      own[1] = quad_sum(rows.sum[1]);
      __syncwarp();  // the first lane of a quad has stored the sums
    }
    if constexpr (kMeanSteps > 0) {
      step_count = mean_steps(first, last);
      step = first / kSegmentsOfStep;
      sum[0] = sum[1] = 0;
      weights_in_step(p, rows, own, step, first, last, weights, sum);
    }
  }

  // After the last O += P V has been issued: the first step.
  __device__ __forceinline__ void issue(float (&O)[kValueDim / 2], const KBuffers& k) {
    if constexpr (kMeanSteps > 0) {
      steps = uniform_descriptor(k.address(), kSegmentsOfStep * kRowsOfMean * kPanelRowBytes);
      wgmma_fence();
      issue_means(O, weights, steps);
    }
  }

  // While the products run.
  __device__ __forceinline__ void load(const ForwardParams& p, int kv_head) {
    if constexpr (kCentersV && kMeanSteps == 0) load_means(p, kv_head, first, mean);
  }

  // The other steps in the place of K, before it is released.
  __device__ __forceinline__ void multiply(const ForwardParams& p, const Rows& rows, float (&O)[kValueDim / 2]) {
    if constexpr (kMeanSteps > 0) {
#pragma unroll 1
      for (int i = 1; i < step_count; ++i) {
        weights_in_step(p, rows, own, ++step, first, last, weights, sum);
        register_fence(O);
        wgmma_fence();
        issue_means(O, weights, steps + (i * kMeanStepBytes >> 4));
        wait_for_products<0>(O);
      }
    }
  }

  // The means that no product has added. The sums of the rows become those of all segments.
  __device__ __forceinline__ void add(const ForwardParams& p, Rows& rows, float (&O)[kValueDim / 2], int kv_head) {
    if constexpr (kMeanSteps > 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) rows.sum[half] = sum[half] + __shfl_xor_sync(0xffffffff, sum[half], 2);
      const int next = (step + 1) * kSegmentsOfStep;
      if (next <= last) {
        const float before[2] = {rows.sum[0], rows.sum[1]};
        load_means(p, kv_head, next, mean);
        float of_next[2] = {stored_sum(p, rows, 0, next), stored_sum(p, rows, 1, next)};
        add_means(p, kv_head, mean, O, rows, of_next, next, last);
        rows.sum[0] += before[0];
        rows.sum[1] += before[1];
      }
    } else if constexpr (kCentersV) {
      add_means(p, kv_head, mean, O, rows, own, first, last);
    }
    if constexpr (kCentersV) __syncwarp();  // before the next strip's sums take the place of these
  }
};

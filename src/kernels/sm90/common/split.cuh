// Blocks that are cut into splits: each split stores its O and its row statistics, and the last one to finish combines
// all of them in order, so that the result does not depend on which one is last.
#pragma once
#include "attention/softmax.cuh"
#include "sm90/common/work_tiles.cuh"

// A partial result of a thread: O, two shifts and two sums, as floats at a distance of 128.
enum : int { kPartialShift = kValueDim / 2, kPartialSum = kPartialShift + 2 };

// Stores the partial result of this strip. Returns true in the split that finishes last, with the combined result in
// `rows` and `O`. `barrier` is a named barrier of the warpgroup, `flag` an int in shared memory that only it uses.
__device__ __forceinline__ bool combine_splits(const AttentionParams& p, const Place& place, Rows& rows,
                                              float (&O)[kValueDim / 2], u32 barrier, u32 flag) {
  if (place.split < 0) return true;
  const int thread = threadIdx.x % 128;
  const int count = p.work.splits;
  const Split now = split_of(p.work, place.split);
  const int ticket = now.block * kConsumers + consumer();
  constexpr int kStrip = partial_floats(kValueDim);
  constexpr int kSplit = kConsumers * kStrip;
  float* partials = p.partial + now.block * count * kSplit + consumer() * kStrip + thread;
  float* mine = partials + now.index * kSplit;
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) mine[i * 128] = O[i];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    mine[(kPartialShift + i) * 128] = rows.shift[i];
    mine[(kPartialSum + i) * 128] = rows.sum[i];
  }
  __threadfence();
  named_barrier_sync(barrier, 128);
  if (thread == 0) {
    const u32 before = atomicInc(reinterpret_cast<unsigned*>(p.tickets) + ticket, count - 1);
    __threadfence();
    store_shared(flag, before == u32(count - 1));
  }
  named_barrier_sync(barrier, 128);
  if (!uniform(load_shared(flag))) return false;  // as finish() says of its row

  rows = rows_without_keys();
#pragma unroll 4
  for (int split = 0; split < count; ++split)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = load_global_fresh(partials + split * kSplit + (kPartialShift + i) * 128);
      rows.shift[i] = fminf(rows.shift[i], shift);
    }
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;
#pragma unroll 1
  for (int split = 0; split < count; ++split) {
    const float* from = partials + split * kSplit;
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = load_global_fresh(from + (kPartialShift + i) * 128);
      factor[i] = shift == infinity() ? 0 : exp2_fast(rows.shift[i] - shift);
      rows.sum[i] += factor[i] * load_global_fresh(from + (kPartialSum + i) * 128);
    }
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] += factor[i / 2 % 2] * load_global_fresh(from + i * 128);
  }
  return true;
}

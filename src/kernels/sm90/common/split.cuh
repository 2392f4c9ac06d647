// Blocks cut into parts: each part leaves its O and its row statistics, and the last to finish combines all in order,
// so that the result does not depend on which one that is.
#pragma once
#include "sm90/common/softmax.cuh"
#include "sm90/common/work_tiles.cuh"

// In units of floats, 128 apart, after each other: O, two shifts, two sums.
enum : int { kPartialShift = kValueDim / 2, kPartialSum = kPartialShift + 2 };

// Leaves this strip's part. True in the part that finishes last, with all of them in `rows` and `O`. `barrier` is a
// named barrier of the warpgroup, `flag` an int in shared memory of its own.
__device__ __forceinline__ bool combine_parts(const AttentionParams& p, const Place& place, Rows& rows,
                                              float (&O)[kValueDim / 2], u32 barrier, u32 flag) {
  if (place.part < 0) return true;
  const int thread = threadIdx.x % 128;
  const int count = p.work.split_parts;
  const Part now = part_of(p.work, place.part);
  const int ticket = now.block * kConsumers + consumer();
  constexpr int kStrip = partial_floats(kValueDim);
  constexpr int kPart = kConsumers * kStrip;
  float* parts = p.partial + now.block * count * kPart + consumer() * kStrip + thread;
  float* mine = parts + now.index * kPart;
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
  if (!load_shared(flag)) return false;

  rows = rows_without_keys();
#pragma unroll 4
  for (int part = 0; part < count; ++part)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = load_global_fresh(parts + part * kPart + (kPartialShift + i) * 128);
      rows.shift[i] = fminf(rows.shift[i], shift);
    }
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;
#pragma unroll 1
  for (int part = 0; part < count; ++part) {
    const float* from = parts + part * kPart;
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

// Online softmax of transposed scores on warpgroups (decode/codes/softmax.cuh): a thread has two keys of all rows, and
// the four warps of a warpgroup have 16 keys each. P goes to shared memory as f16, [key][row].
#pragma once
#include "attention/softmax.cuh"
#include "decode/codes/warpgroup/numbers.cuh"
#include "decode/scores.cuh"

// Where a thread's scores lie, in eight rows: as Transposed, from the first key of its warp on.
struct TransposedOfWarpgroup : Transposed {
  static __device__ __forceinline__ u32 first_column() {
    return threadIdx.x % 128 / 32 * 16 + Transposed::first_column();
  }
};

// What a warpgroup has in shared memory beside its tiles.
class WarpgroupMemory {
 public:
  __device__ __forceinline__ explicit WarpgroupMemory(int warpgroup)
      : base_(shared_base() + kLayout.states + warpgroup * kLayout.state_bytes),
        p_(shared_base() + warpgroup * kLayout.group_bytes) {}

  // P of a tile.
  __device__ __forceinline__ u32 p() const { return p_; }
  // [row]{factor, sum of its Q times the bias}.
  __device__ __forceinline__ u32 factors() const { return base_; }
  __device__ __forceinline__ u32 shifts() const { return base_ + 8 * kTileRows; }
  // [warp][row]
  __device__ __forceinline__ u32 exchange() const { return base_ + 12 * kTileRows; }
  __device__ __forceinline__ u32 flags() const { return base_ + 28 * kTileRows; }
  __device__ __forceinline__ u32 value_scales() const { return base_ + 28 * kTileRows + 16; }

 private:
  u32 base_, p_;
};

// The sums of rows, of a thread's keys.
struct WarpgroupRows {
  float sum[2 * kEights];
};

__device__ __forceinline__ void load_shared_floats4(u32 at, float (&x)[4]) {
  u32 words[4];
  load_shared16(at, words);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __uint_as_float(words[i]);
}

// S becomes scores, but for the factors of keys.
__device__ __forceinline__ void apply_row_factors(float (&S)[kScores], const WarpgroupMemory& memory) {
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    float x[4];
    load_shared_floats4(memory.factors() + 8 * (8 * j + thread_column()), x);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& s = S[4 * j + i];
      const float factor = x[i % 2 * 2], offset = x[i % 2 * 2 + 1];
      s = CodesOfK::kBias > 0 && NumbersOf<kOfK>::kPlain ? __fmaf_rn(s, factor, offset) : s * factor;
    }
  }
}

// P = exp2(c * S + shift) to shared memory as f16, times the factors of V, and the sums without these. Returns a word
// of two f16 that is the largest of P. `exact`: as in attention/softmax.cuh.
template <bool exact>
__device__ __forceinline__ u32 transposed_exponentials(const float (&S)[kScores], const float (&c)[2],
                                                       const float (&factor)[2], const WarpgroupMemory& memory,
                                                       float (&sum)[2 * kEights]) {
  const int lane = threadIdx.x % 32, key = threadIdx.x % 128 / 32 * 16 + lane / 8 % 2 * 8 + lane % 8;
  const u32 row = memory.p() + swizzled(key, lane / 16);
  u32 largest = 0;
#pragma unroll
  for (int j = 0; j < kEights; j += 2) {
    u32 words[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float shift[2], x[4];
      load_shared_pair(memory.shifts() + 4 * (8 * (j + k) + thread_column()), shift[0], shift[1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float s = S[4 * (j + k) + i];
        if (exact && shift[i % 2] == infinity()) shift[i % 2] = 0;
        const float of_key = c[i / 2], of_row = shift[i % 2];
        x[i] = exp2_fast(exact ? __fadd_rn(__fmul_rn(s, of_key), of_row) : __fmaf_rn(s, of_key, of_row));
      }
      sum[2 * (j + k)] = x[0] + x[2];
      sum[2 * (j + k) + 1] = x[1] + x[3];
#pragma unroll
      for (int i = 0; kVScales > 0 && i < 4; ++i)
        x[i] *= factor[i / 2];
      words[2 * k] = Half::pack(x[0], x[1]);
      words[2 * k + 1] = Half::pack(x[2], x[3]);
    }
    store_shared_matrices(row ^ 16 * j, words);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(largest) : "r"(kVScales > 0 ? words[i] & 0x7fff7fff : words[i]));
  }
  return largest;
}

// A barrier of a warpgroup.
__device__ __forceinline__ void sync_warpgroup() {
  const int warpgroup = uniform(threadIdx.x / 128);
#pragma unroll
  for (int i = 0; i < kComputeWarps / 4; ++i)
    if (warpgroup == i) named_barrier_sync(kSoftmaxBarrier + i, 128);
}

// A step of the softmax. P is there for all warps of the warpgroup then.
__device__ __forceinline__ void transposed_softmax_step(const float (&S)[kScores], float (&O)[kStrips][kScores],
                                                        WarpgroupRows& rows, const float (&c)[2],
                                                        const float (&factor)[2], const WarpgroupMemory& memory) {
  constexpr u32 kLimit = 0x6c00;  // 2^12 as f16
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  float sum[2 * kEights];
  const u32 largest = transposed_exponentials<false>(S, c, factor, memory, sum);
  const bool settled = (largest & 0xffff) <= kLimit && largest >> 16 <= kLimit;
  const bool all = __all_sync(0xffffffff, settled);
  if (lane == 0) store_shared(memory.flags() + 4 * warp, !all);
  fence_async_proxy();
  sync_warpgroup();
  u32 flags[4];
  load_shared16(memory.flags(), flags);
  if ((flags[0] | flags[1] | flags[2] | flags[3]) != 0) {
    float exponent[2] = {0, 0};
#pragma unroll
    for (int i = 0; kVScales > 0 && i < 2; ++i)
      exponent[i] = float(__float_as_int(within_exponents_of_p(fabsf(factor[i]))) >> 23) - 127;
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float row_max = fmaxf(__fadd_rn(__fmul_rn(S[4 * j + i], c[0]), exponent[0]),
                              __fadd_rn(__fmul_rn(S[4 * j + 2 + i], c[1]), exponent[1]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) row_max = fmaxf(row_max, __shfl_xor_sync(0xffffffff, row_max, step));
        if (lane < 4)
          store_shared(memory.exchange() + 4 * (warp * kTileRows + 8 * j + int(thread_column()) + i),
                       __float_as_int(row_max));
      }
    sync_warpgroup();
    float moved[2 * kEights];
#pragma unroll
    for (int j = 0; j < kEights; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 8 * j + int(thread_column()) + i;
        float row_max = -infinity();
#pragma unroll
        for (int k = 0; k < 4; ++k)
          row_max = fmaxf(row_max, __int_as_float(load_shared(memory.exchange() + 4 * (k * kTileRows + row))));
        const float old = __int_as_float(load_shared(memory.shifts() + 4 * row));
        const float shift = fminf(old, -row_max);
        moved[2 * j + i] = shift;
        const float by = shift == infinity() ? 1 : exp2_fast(shift - old);
        rows.sum[2 * j + i] *= by;
#pragma unroll
        for (int strip = 0; strip < kStrips; ++strip) {
          O[strip][4 * j + i] *= by;
          O[strip][4 * j + 2 + i] *= by;
        }
      }
    sync_warpgroup();
#pragma unroll
    for (int j = 0; j < kEights; ++j)
      if (warp == 0 && lane < 4) {
        store_shared(memory.shifts() + 4 * (8 * j + int(thread_column())), __float_as_int(moved[2 * j]));
        store_shared(memory.shifts() + 4 * (8 * j + int(thread_column()) + 1), __float_as_int(moved[2 * j + 1]));
      }
    sync_warpgroup();
    transposed_exponentials<true>(S, c, factor, memory, sum);
    fence_async_proxy();
    sync_warpgroup();
  }
#pragma unroll
  for (int i = 0; i < 2 * kEights; ++i) rows.sum[i] += sum[i];
}

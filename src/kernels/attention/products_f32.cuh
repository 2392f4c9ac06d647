// Products of f32 by mma.sync, which multiplies tf32, numbers of 11 bits. A number x of f32 is the sum of two of them,
// big + rest: a b is a.rest b.big + a.big b.rest + a.big b.big, and a.rest b.rest is left out, at most 2^-21 of it.
// Sums of mma.sync are rounded toward zero, which would add up over the keys: a sum of few products is added to an
// accumulator by an addition that rounds to nearest. Where mma.sync does not multiply tf32, FMAs multiply the numbers
// themselves.
#pragma once
#include "device/memory.cuh"
#include "device/mma_sync.cuh"

// Words of a fragment. The lower 13 bits of a word of tf32 do not count.
template <int words>
struct Parts {
  u32 big[words];  // until split() the numbers themselves
  u32 rest[words];

  // The factor adds between 0.4 and 0.8 of a unit of the last of 11 bits, so that big is above x as often as below, and
  // keeps NaN and infinity what they are.
  __device__ __forceinline__ void split() {
    if constexpr (!kHasAllProducts) return;
#pragma unroll
    for (int i = 0; i < words; ++i) {
      const float x = __uint_as_float(big[i]);
      big[i] = __float_as_uint(__fmaf_rn(x, 0x1.ap-12f, x));
      rest[i] = __float_as_uint(x - __uint_as_float(big[i] & 0xffffe000));
    }
  }
};
using PartsOfA = Parts<4>;  // of a step of 8 columns of A

// A sum of products of 16 x 8 by 8 x 8.
class SumOfProducts {
 public:
  // b: two words of `of`, from `at` on.
  template <int words>
  __device__ __forceinline__ void add(const PartsOfA& a, const Parts<words>& of, int at) {
    if constexpr (!kHasAllProducts) return multiply_by_fma<kF32>(big_, a.big, of.big[at], of.big[at + 1]);
    multiply_tf32(small_, a.rest, of.big + at);
    multiply_tf32(small_, a.big, of.rest + at);
    multiply_tf32(big_, a.big, of.big + at);
  }
  // The rest of an infinite number is NaN, as infinity times a rest of 0 is. The sum of big products is what it should
  // be then, whatever number is added.
  __device__ __forceinline__ void add_to(float* c) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[i] += big_[i] + fmaxf(small_[i], -3.402823466e38f);
  }

 private:
  float big_[4] = {}, small_[4] = {};
};

// C += A B^T for `steps` steps of a panel, which both operands have in rows of their tiles. `load_a(t, step, a)` loads
// those of A in tile t of 16 rows; `b`: the address of the lane's part of the panel of B.
template <int steps, int tiles, int words, class LoadA>
__device__ __forceinline__ void add_panel(float (&C)[tiles][words], const LoadA& load_a, int first_step, u32 b) {
  PartsOfA a[tiles][steps];
#pragma unroll
  for (int t = 0; t < tiles; ++t)
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      load_a(t, first_step + step, a[t][step].big);
      a[t][step].split();
    }
#pragma unroll
  for (int row = 0; row < 2 * words; row += 8) {
    Parts<2 * steps> of_b;
#pragma unroll
    for (int step = 0; step < steps; step += 2)
      load_shared_matrices((b ^ step * kStepBytes) + row * kPanelRowBytes, of_b.big + 2 * step);
    of_b.split();
#pragma unroll
    for (int t = 0; t < tiles; ++t) {
      SumOfProducts sum;
#pragma unroll
      for (int step = 0; step < steps; ++step) sum.add(a[t][step], of_b, 2 * step);
      sum.add_to(C[t] + row / 2);
    }
  }
}

// The same for all `columns` columns. `b`: the address of the first row of B in a tile with panels of `panel_bytes`.
template <int columns, int tiles, int words, class LoadA>
__device__ __forceinline__ void add_products_of_rows(float (&C)[tiles][words], const LoadA& load_a, u32 b,
                                                     int panel_bytes) {
  constexpr int kPanels = columns / 32, kLastSteps = columns % 32 / 8;
  const u32 lane = lane_of_warp();
  b += swizzled(lane % 8, lane / 8);
#pragma unroll 1
  for (int panel = 0; panel < kPanels; ++panel)
    add_panel<kPanelSteps>(C, load_a, kPanelSteps * panel, b + panel * panel_bytes);
  if constexpr (kLastSteps > 0) add_panel<kLastSteps>(C, load_a, kPanelSteps * kPanels, b + kPanels * panel_bytes);
}

// Fragments of a tile in shared memory whose rows are k. Of each 8 rows, rows 2 q and 2 q + 1 are rows q and q + 4 of
// B, or columns q and q + 4 of A, as in words of pack_words.

// The address of the element of row 2 q and column r.
__device__ __forceinline__ u32 pair_address(u32 tile) {
  const u32 lane = lane_of_warp();
  return tile + swizzled(lane % 4 * 2, lane / 16) + lane / 4 % 4 * 4;
}
// The address of a lane's element in column `column`, a multiple of 8, of a tile with panels of `panel_bytes`.
__device__ __forceinline__ u32 column_address(u32 pair, int column, int panel_bytes) {
  return (pair ^ column % 32 * 4) + column / 32 * panel_bytes;
}
// Loads the elements of rows 2 q and 2 q + 1. The exclusive or with 16 is the swizzle of the next row.
__device__ __forceinline__ void load_pair(u32 at, u32& first, u32& second) {
  first = u32(load_shared(at));
  second = u32(load_shared((at ^ 16) + kPanelRowBytes));
}

// Sums of products for 16 columns of `tiles` tiles of 16 rows of C.
template <int tiles>
struct SumsOfColumns {
  SumOfProducts sums[tiles][2];

  // Adds A B for a step. `a(t)`: that of A in tile t; `at`: the address of the lane's element of B in these columns and
  // 8 rows.
  template <class A>
  __device__ __forceinline__ void add(const A& a, u32 at) {
    Parts<4> b;
    load_pair(at, b.big[0], b.big[1]);
    load_pair(at ^ 32, b.big[2], b.big[3]);
    b.split();
#pragma unroll
    for (int t = 0; t < tiles; ++t)
#pragma unroll
      for (int half = 0; half < 2; ++half) sums[t][half].add(a(t), b, 2 * half);
  }
  __device__ __forceinline__ void add_to(int t, float* c) const {
    sums[t][0].add_to(c);
    sums[t][1].add_to(c + 4);
  }
};

// C += A B. `A`: words of pack_words; `b`: B in panels of `panel_bytes`.
template <int tiles, int words, int accumulators>
__device__ __forceinline__ void add_products_of_columns(float (&C)[tiles][accumulators], const u32 (&A)[tiles][words],
                                                        u32 b, int panel_bytes) {
  constexpr int kSteps = words / 4;
  PartsOfA a[tiles][kSteps];
#pragma unroll
  for (int t = 0; t < tiles; ++t)
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int word = 0; word < 4; ++word) a[t][i].big[word] = A[t][4 * i + word];
      a[t][i].split();
    }
  const u32 pair = pair_address(b);
#pragma unroll
  for (int column = 0; column < 2 * accumulators; column += 16) {
    SumsOfColumns<tiles> sums;
#pragma unroll
    for (int i = 0; i < kSteps; ++i)
      sums.add([&](int t) -> const PartsOfA& { return a[t][i]; },
               column_address(pair, column, panel_bytes) + i * 8 * kPanelRowBytes);
#pragma unroll
    for (int t = 0; t < tiles; ++t) sums.add_to(t, C[t] + column / 2);
  }
}

// The accumulators or words of one tile, as those of an array of tiles.
template <class T, int n>
__device__ __forceinline__ T (&one_tile(T (&x)[n]))[1][n] {
  return reinterpret_cast<T (&)[1][n]>(x);
}

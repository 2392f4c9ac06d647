// How a warpgroup holds a strip's accumulators: 16 rows a warp. For each 8 columns a thread holds columns 2q and 2q + 1
// (q = lane % 4) of rows r and r + 8 (r = lane / 4): x[4j], x[4j + 1] belong to row r, x[4j + 2], x[4j + 3] to row
// r + 8. Four lanes, a quad, share two rows.
#pragma once
#include "host_device/host_device.h"

// Where a thread's elements lie: of which of its two rows element i is, and in which column, from its first one on; and
// the lane and element that have another column of the thread's rows. Accumulators as above, or those of a transposed
// product, whose rows are the columns here: a thread has rows 2q and 2q + 1, and columns r + 8 n.
struct ByRows {
  static __device__ constexpr int row(int i) { return i >> 1 & 1; }
  static __device__ constexpr int column(int i) { return i / 4 * 8 + (i & 1); }
  static __device__ __forceinline__ u32 first_column() { return threadIdx.x % 4 * 2; }
  static __device__ __forceinline__ int lane_of(int column) { return int(threadIdx.x) % 32 / 4 * 4 + column % 8 / 2; }
  static __device__ __forceinline__ int element_of(int row, int column) {
    return column / 8 * 4 + 2 * row + column % 2;
  }
};
struct Transposed {
  static __device__ constexpr int row(int i) { return i & 1; }
  static __device__ constexpr int column(int i) { return i / 2 * 8; }
  static __device__ __forceinline__ u32 first_column() { return threadIdx.x % 32 / 4; }
  static __device__ __forceinline__ int lane_of(int column) { return column % 8 * 4 + int(threadIdx.x) % 4; }
  static __device__ __forceinline__ int element_of(int row, int column) { return column / 8 * 2 + row; }
};

// Accumulators as words of the first operand A of mma.sync: a word has two adjacent elements of 16 bits, or one of f32.
// Of f32 the order is that of A if its columns q and q + 4 of each 8 are columns 2q and 2q + 1 of the accumulators. The
// number of the accumulator that is a word of f32:
__device__ constexpr int accumulator_of_word(int i) { return (i & ~3) | (i & 1) << 1 | (i >> 1 & 1); }
template <class Type>
__device__ constexpr int words_of(int accumulators) { return accumulators * Type::kBytes / 4; }

template <class Type, int count>
__device__ __forceinline__ void pack_words(const float (&x)[count], u32 (&words)[words_of<Type>(count)]) {
#pragma unroll
  for (int i = 0; i < words_of<Type>(count); ++i) {
    if constexpr (Type::kBytes == 4) words[i] = __float_as_uint(x[accumulator_of_word(i)]);
    else words[i] = Type::pack(x[2 * i], x[2 * i + 1]);
  }
}
template <class Type, int count>
__device__ __forceinline__ void unpack_words(const u32 (&words)[words_of<Type>(count)], float (&x)[count]) {
#pragma unroll
  for (int i = 0; i < words_of<Type>(count); ++i) {
    if constexpr (Type::kBytes == 4) {
      x[accumulator_of_word(i)] = __uint_as_float(words[i]);
    } else {
      x[2 * i] = Type::low(words[i]);
      x[2 * i + 1] = Type::high(words[i]);
    }
  }
}

__device__ __forceinline__ u32 consumer() { return threadIdx.x / 128 - 1; }           // after the producer
__device__ __forceinline__ u32 warp_row() { return threadIdx.x % 128 / 32 * 16; }     // the warp's first
__device__ __forceinline__ u32 thread_row() { return threadIdx.x % 32 / 4; }          // r
__device__ __forceinline__ u32 thread_column() { return threadIdx.x % 4 * 2; }        // 2q

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffff, x, 1);
  return x + __shfl_xor_sync(0xffffffff, x, 2);
}

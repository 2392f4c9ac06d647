// Stores of a warp's accumulators from registers to rows of a tensor.
#pragma once
#include "kernel_config.h"
#include "host_device/attention_params.h"
#include "attention/fragment.cuh"
#include "device/math.cuh"
#include "device/memory.cuh"
#include "device/operands.cuh"
#include "device/schedule.cuh"

template <class Type>
__device__ __forceinline__ typename Type::Memory* row_of(const StridedTensor& t, int batch, int row, int head) {
  return static_cast<typename Type::Memory*>(t.data) + (kPacked ? 0 : batch * t.batch) + row * t.row + head * t.head;
}

// Tracks whether all values that are stored are finite. Of the rows r and r + 8 of a thread row r alone is tracked,
// which is enough where what is not finite comes by products of both, unless `both_rows`.
template <class Type, bool both_rows = false>
struct Finite {
  enum : bool { kBothRows = both_rows };
  u32 trace = 0;  // 0 * everything; of f32 whether some was not
  __device__ __forceinline__ void add(u32 packed) {
    if (kHidesKeys) trace = Type::fma(packed, 0, trace);
  }
  __device__ __forceinline__ void add(float x) {
    if (kHidesKeys) trace |= !(fabsf(x) < infinity());
  }
  // Reports values that were not finite.
  __device__ __forceinline__ void report(int* not_finite) const {
    if (kHidesKeys && trace != 0) *not_finite = 1;
  }
};

// Of gradients: what is not finite in a row that nothing sees reaches no gradient but that of the row itself.
template <class Type>
using GradientFinite = Finite<Type, true>;

// Sets a thread's rows r and r + 8 of an accumulator to 0 where only `rows` rows exist from r on.
template <int count>
__device__ __forceinline__ void clear_rows_after(float (&x)[count], int rows) {
#pragma unroll
  for (int i = 0; i < count; ++i)
    if (rows <= i / 2 % 2 * 8) x[i] = 0;
}

// 8 columns of a row, of which `count` exist.
template <bool elements, bool streaming = false, class Memory>
__device__ __forceinline__ void store_global_columns(Memory* to, const u32 (&x)[4], int count) {
  if (!elements) {
    if (count <= 0) return;
    if constexpr (streaming) store_global_streaming16(to, x);
    else *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) to[i] = static_cast<Memory>(x[i / 2] >> (i % 2 * 16));
  }
}

// A pair of adjacent columns in f32, of which `count` exist. Quads store 32 bytes side by side.
template <class Tracked>
__device__ __forceinline__ void store_global_pair(float* to, float low, float high, int count, bool counts,
                                                  Tracked& finite) {
  if (counts) {
    finite.add(low);
    finite.add(high);
  }
  if (count > 0) to[0] = low;
  if (count > 1) to[1] = high;
}

// A 4 x 4 transposition over a quad, in two exchanges: x[j] of lane i goes to x[i] of lane j.
__device__ __forceinline__ void quad_transpose(u32 (&x)[4]) {
  const u32 quad = threadIdx.x % 4;
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (!(j & bit)) {
        const u32 give = quad & bit ? x[j] : x[j + bit];
        const u32 got = __shfl_xor_sync(0xffffffff, give, bit);
        if (quad & bit) x[j] = got;
        else x[j + bit] = got;
      }
  }
}

// Stores 32 columns, or the last 16, of the thread's row r (half 0) or r + 8 (half 1), from x[i] on. `out`: the address
// of the first of these columns; `dims`: how many of them exist. Quads exchange elements so that a thread holds 8
// adjacent columns, 16 bytes, which are stored at once or by `elements`. Where columns are `permuted`
// (sm90/forward/values.cuh) it holds them already, and they are stored as streaming data, as L2 is to keep the images
// of V.
template <class Type, int columns, bool elements, bool permuted = false, class Tracked>
__device__ __forceinline__ void store_global_row(typename Type::Memory* out, int dims, const float (&x)[columns / 2],
                                                 int i, int half, float scale, Tracked& finite) {
  const bool counts = half == 0 || Tracked::kBothRows;
  if constexpr (Type::kType == kF32) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = i + 4 * j + 2 * half;
      const int column = 2 * i + 8 * j + 2 * int(threadIdx.x % 4);
      if (at < columns / 2) {
        store_global_pair(out + column, x[at] * scale, x[at + 1] * scale, dims - column, counts, finite);
      }
    }
  } else {
    u32 y[4];  // y[j]: this thread's pair of columns of the j-th group of 8
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int at = i + 4 * j + 2 * half;
      y[j] = at < columns / 2 ? Type::pack(x[at] * scale, x[at + 1] * scale) : 0;
      if (counts) finite.add(y[j]);
    }
    if (!permuted) quad_transpose(y);
    const int column = 2 * i + 8 * u32(threadIdx.x % 4);
    store_global_columns<elements, permuted>(out + column, y, dims - column);
  }
}

// `columns` columns of the rows r, at `out`, and r + 8; `rows` rows exist from r on.
template <class Type, int columns, bool elements, bool permuted = false, class Tracked>
__device__ __forceinline__ void store_global_fragment(typename Type::Memory* out, long long row_stride, int rows,
                                                      int dims, const float (&x)[columns / 2], float scale0,
                                                      float scale1, Tracked& finite) {
#pragma unroll
  for (int i = 0; i < columns / 2; i += 16) {
    store_global_row<Type, columns, elements, permuted>(out, rows > 0 ? dims : 0, x, i, 0, scale0, finite);
    store_global_row<Type, columns, elements, permuted>(out + 8 * row_stride, rows > 8 ? dims : 0, x, i, 1, scale1,
                                                        finite);
  }
}

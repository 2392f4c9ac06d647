// Tiles of a dense bias in shared memory, rows of queries and columns of keys: panels of 128 bytes of each row,
// swizzled, as TMA loads them; and what a thread's scores, which are fragments (fragment.cuh), take from them.
#pragma once
#include "device/memory.cuh"
#include "device/mma_sync.cuh"
#include "device/score.cuh"
#include "attention/bias_tile.h"
#include "attention/fragment.cuh"

using BiasType = ElementType<kBias == 1 + kF16 ? kF16 : kBF16>;  // a word has two elements of it

// The address of the element of a row and a column, in a tile of `rows` rows.
template <int rows>
__device__ __forceinline__ u32 bias_address(u32 tile, u32 row, u32 column) {
  const u32 at = column * bias_bytes(kBias);
  const u32 swizzle = kBiasRows ? row % 8 : 0;
  return tile + at / kPanelRowBytes * bias_panel_bytes(kBiasRows, rows) + (kBiasRows ? row * kPanelRowBytes : 0) +
         ((at % kPanelRowBytes / 16 ^ swizzle) << 4) + at % 16;
}

__device__ __forceinline__ float bias_of_byte(u32 byte) { return byte & 0xff ? 0 : -infinity(); }

// Where a thread loads its words of a bias of 16 bits: those of 16 columns from `column` on, which a strip's scores 8i
// to 8i + 7 have.
__device__ __forceinline__ u32 bias_words_address(u32 tile, int column) {
  const u32 lane = threadIdx.x % 32;
  return bias_address<64>(tile, warp_row() + lane % 16, column + lane / 16 * 8);
}
__device__ __forceinline__ void unpack_bias(const u32* words, float (&bias)[8]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bias[2 * i] = BiasType::low(words[i]);
    bias[2 * i + 1] = BiasType::high(words[i]);
  }
}

// The bias of 16 columns from `column` on, which a strip's scores 8i to 8i + 7 have.
__device__ __forceinline__ void load_bias_of_strip(u32 tile, int column, float (&bias)[8]) {
  if constexpr (bias_bytes(kBias) == 2) {
    u32 x[4];
    load_shared_matrices(bias_words_address(tile, column), x);
    unpack_bias(x, bias);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 row = warp_row() + thread_row() + i % 2 * 8;
      const u32 at = bias_address<64>(tile, row, column + i / 2 * 8 + thread_column());
      if constexpr (kBias == 1 + kBool) {
        const u32 pair = load_shared_u16(at);
        bias[2 * i] = bias_of_byte(pair);
        bias[2 * i + 1] = bias_of_byte(pair >> 8);
      } else {
        load_shared_pair(at, bias[2 * i], bias[2 * i + 1]);
      }
    }
  }
}

// Words of the bias where products are transposed, as of load_bias_of_keys: those of scores 4j to 4j + 7, j even.
template <int rows>
__device__ __forceinline__ void load_bias_words_of_keys(u32 tile, u32 key, int j, u32* words) {
  const u32 lane = threadIdx.x % 32;
  const u32 query = 8 * j + lane / 16 * 8 + lane % 8;
  load_shared_matrices_transposed(bias_address<rows>(tile, query, key + warp_row() + lane / 8 % 2 * 8), words);
}

// The bias where products are transposed, so that rows of fragments are keys: of the queries of a thread's scores 4j to
// 4j + 3, and of the warp's keys from `key` + warp_row() on. It is called for an even j before j + 1; elements of 16
// bits for both are loaded together.
template <int rows>
__device__ __forceinline__ void load_bias_of_keys(u32 tile, u32 key, int j, float (&bias)[8]) {
  if constexpr (bias_bytes(kBias) == 2) {
    if (j % 2 == 1) return;
    u32 x[4];
    load_bias_words_of_keys<rows>(tile, key, j, x);
    unpack_bias(x, bias);
  } else {
    key += warp_row();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 at = bias_address<rows>(tile, 8 * j + thread_column() + i % 2, key + thread_row() + i / 2 * 8);
      float& x = bias[j % 2 * 4 + i];
      if constexpr (kBias == 1 + kBool) x = bias_of_byte(load_shared_u8(at));
      else x = __int_as_float(load_shared(at));
    }
  }
}

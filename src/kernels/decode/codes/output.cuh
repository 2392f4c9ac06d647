// The result of a work tile over codes, as the threads of a warp hold it: O^T with its columns in the order of V's
// codes.
#pragma once
#include "decode/codes/softmax.cuh"
#include "decode/output.cuh"

// The column of V of a thread's `i`-th element of O in eight rows. -1: it has none, as its code is the scale of a
// block, or lies before the first block or after the last. `pairs_before`: as in pairs_before_values.
__device__ __forceinline__ int output_column(int i, int pairs_before) {
  constexpr int kCodesPerHalf = CodesOfV::kCodesPerHalf;
  const int chunk = i / 2 / kCodesPerHalf, number = i / 2 % kCodesPerHalf, row = int(thread_row());
  if constexpr (is_block(StoredV::kType)) {
    constexpr int kBlockPairs = block_bytes(StoredV::kType) / 2;
    const int first = first_block(StoredV::kType, chunk);
    const int pair_of_row = 8 * chunk + row - pairs_before;
    const int block = first + (pair_of_row >= kBlockPairs * (first + 1));
    const int pair = pair_of_row - kBlockPairs * block - 1;
    return pair < 0 || block * kBlockColumns >= kValueDim ? -1
                                                          : block * kBlockColumns + CodesOfV::column_of(pair, number);
  }
  return chunk * 8 * kCodesPerHalf + CodesOfV::column_of(row, number);
}

// Whether output_column may be one of kExchangeColumns columns from `first` on.
__device__ constexpr bool may_be_column(int i, int first) {
  const int chunk = i / 2 / CodesOfV::kCodesPerHalf;
  if (!is_block(StoredV::kType)) return i >= first / 4 && i < first / 4 + kExchangeColumns / 4;
  return first_block(StoredV::kType, chunk) * kBlockColumns < first + kExchangeColumns &&
         (last_block(StoredV::kType, kValueDim, chunk) + 1) * kBlockColumns > first;
}

// Completes O and the sums of rows: adds up the lanes' sums, and applies what V's codes have in common. A row without
// keys stays 0.
__device__ __forceinline__ void finish(const DecodeParams& p, const WorkTile& tile, float (&O)[kRowTiles][kOutputs],
                                       SoftmaxRows& rows, int pairs_before) {
  using Steps = CodeSteps<kOfV>;
  const float sequence_scale = kCodesV && kVScales == 0 ? scale_of_sequence(p.v_scale, tile) : 1;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    float& sum = rows.tiles[i / 2].sum[i % 2];
    sum = sum_of_row(sum);
#pragma unroll
    for (int j = i % 2; j < kOutputs; j += 2) {
      float& o = O[i / 2][j];
      if (kOffsets > 0) {
        const int step = j / (2 * Steps::kWords), first = Steps::first_group(step), last = Steps::last_group(step);
        const auto offset_of = [&](int group) {
          const float* const row_offsets = rows.offsets[group][i / 2] + i % 2;
          return kVZeroPoint ? row_offsets[0] + row_offsets[2] : row_offsets[0];
        };
        float offset = offset_of(first);
        if (last > first && int(thread_row()) > first + pairs_before) offset = offset_of(last);
        o = __fmaf_rn(o, CodesOfV::scale(j / 2 % CodesOfV::kCodesPerHalf), -offset);
      }
      if (kCodesV && kVScales == 0 && sum != 0) o *= sequence_scale;
    }
  }
}

// The result of a warp for combine_warp_groups.
struct TransposedResult {
  const SoftmaxRows& rows;
  const float (&O)[kRowTiles][kOutputs];
  int pairs_before;

  // A thread's `i`-th row of those of its warp, and of the block of rows.
  static __device__ __forceinline__ int row(int i) { return i / 2 * 8 + int(thread_column()) + i % 2; }
  static __device__ __forceinline__ int place(int i) {
    return kHeads == 1 ? row(i) : row_of_warps(head_of_warp() * kRowsOfWarp + row(i));
  }
  static __device__ __forceinline__ bool has_row(int i) {
    return row(i) < kHeadRows && (kHeads == 1 || place(i) < kTileRows);
  }

  __device__ __forceinline__ void put_stats(float2* stats, int first_row) const {
    if (threadIdx.x % 32 >= 4) return;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i)
      if (has_row(i)) stats[first_row + place(i)] = {rows.tiles[i / 2].shift[i % 2], rows.tiles[i / 2].sum[i % 2]};
  }
  __device__ __forceinline__ void put_columns(float* columns, int first_row, int first) const {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      if (!has_row(i)) continue;
      float* const to = columns + (first_row + place(i)) * kExchangeStride - first;
#pragma unroll
      for (int j = 0; j < kOutputs; j += 2) {
        if (!may_be_column(j, first)) continue;
        const int column = output_column(j, pairs_before);
        if (!is_block(StoredV::kType) || (column >= first && column < first + kExchangeColumns))
          to[column] = O[i / 2][j + i % 2];
      }
    }
  }
};

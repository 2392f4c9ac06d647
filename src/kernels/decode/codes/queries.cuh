// Q for products with codes of K: its rows as f16, with columns in the order in which products meet the codes.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/codes/rows.cuh"
#include "decode/codes/scales.cuh"

// The elements of Q that have been loaded to shared memory.
using QueryNumber = ElementType<kCodesQ ? kF16 : StoredQ::kType>;

// Where the codes of K have a column, in its 16 bytes or in its block.
__device__ __forceinline__ CodesOfK::Place code_place(int column) {
  return CodesOfK::place(column % (is_block(StoredK::kType) ? int(kBlockColumns) : 8 * CodesOfK::kCodesPerHalf));
}

// The place of a column of Q in the order of products: a lane's word has columns in both halves, and a product takes
// two columns of each lane. `pairs_before`: how many pairs of bytes come before the first block in the first 16 bytes
// of a row of K (BlockRows::begin).
__device__ __forceinline__ int query_column(int column, int pairs_before) {
  constexpr int kColumns = 8 * CodesOfK::kCodesPerHalf;
  constexpr bool kBlocks = is_block(StoredK::kType);
  const CodesOfK::Place at = code_place(column);
  const int pair = 2 * at.word + at.half;
  if constexpr (kBlocks && !kConvertsInRegisters) {
    const int block = column / kBlockColumns;
    const int in_row = pairs_before + block_bytes(StoredK::kType) / 2 * block + 1 + pair, chunk = in_row / 8;
    const int pass = passes_before_chunk(StoredK::kType, kHeadDim, chunk) + block;
    return (pass - first_block(StoredK::kType, chunk)) * kColumns + at.number * 8 + in_row % 8;
  }
  constexpr int kTogether = kBlocks ? int(kBlockColumns) : kColumns;
  return column / kTogether * kTogether + pair / 8 * kColumns + at.number * 8 + pair % 8;
}

// The descale of a row of Q of codes, 1 where the call has none.
__device__ __forceinline__ float query_descale(const DecodeParams& p, const WorkTile& tile, int row) {
  const CodeScales& t = p.q_scale;
  if (t.data == nullptr) return 1;
  const int head = tile.head * kGroup + row % kGroup;
  const long long of_row = t.of_rows ? (tile.sequence.n.q_start + row / kGroup) * t.row + head * t.head
                                     : head / kGroupOfHead * t.head;
  return nan_unless_finite(scale_at(t, tile.batch * t.batch + of_row));
}

// What a row of Q is divided by, the power of 2 that makes its max 2^14 or more, and the inverse of that. `max_bits`:
// those of the max.
struct RowExponent {
  float factor, inverse;

  __device__ __forceinline__ explicit RowExponent(u32 max_bits) {
    // The exponent of the max with the bias of f32. Rows divided by `factor` keep an exponent of 14.
    const int f32_exponent = QueryNumber::kType == kBF16 ? int(max_bits >> 7) : int(max_bits >> 10) + 112;
    const int exponent = min(max(f32_exponent, 15), 254);
    factor = __int_as_float((exponent - 14) << 23);
    inverse = __int_as_float((268 - exponent) << 23);
  }
};

// Rewrites the Q of a block of rows, which lies in shared memory as in memory, in that order and as f16. Each row is
// divided by the power of 2 that makes its max 2^14 or more. That factor, times the descale of the row, goes to
// kLayout.q_factors. `pairs_before` is a function of a kv head of the CTA. All threads that compute call this between
// two barriers.
template <class PairsBefore>
__device__ __forceinline__ void prepare_queries(const DecodeParams& p, const WorkTile& tile, PairsBefore pairs_before) {
  enum : int { kLaneColumns = (kHeadDim + 31) / 32 };
  const int pairs_of_cta = kHeads == 1 ? pairs_before(0) : 0;
  const int lane = threadIdx.x % 32;
  const u32 q = shared_base() + kLayout.q;
  const auto place = [&](int row, int column) {
    return q + column / 64 * kQPanelBytes + swizzled(row, column % 64 / 8) + column % 8 * 2;
  };
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < kQueryRows; row += kComputeWarps) {
    const int pairs = kHeads == 1 ? pairs_of_cta : pairs_before(row / kRowsOfWarp);
    float descale = 1;  // its load comes first, as the columns take as long as it does
    if constexpr (kCodesQ) {
      const TileRows rows = rows_of_tile(p, tile);
      const int in_block = row_of_warps(row);
      if (in_block < rows.count) descale = query_descale(p, tile, rows.first + in_block);
    }
    u32 x[kLaneColumns];
    u32 row_max = 0;
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      x[i] = lane + 32 * i < kHeadDim ? load_shared_u16(place(row, lane + 32 * i)) : 0;
      row_max = max(row_max, x[i] & 0x7fff);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) row_max = max(row_max, __shfl_xor_sync(0xffffffff, row_max, step));
    const RowExponent exponent(row_max);
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i) {
      // Codes come multiplied by powers of 2 that depend on their number in a word.
      constexpr bool kAlike = kConvertsInRegisters && (kKScales > 1 || kKZeroPoint);
      const float code_factor =
          kAlike ? 1 : CodesOfK::scale(code_place(lane + 32 * i).number) / CodesOfK::scale(0);
      const float number = QueryNumber::to_float(static_cast<unsigned short>(x[i]));
      x[i] = Half::pack(number * (exponent.inverse * code_factor), 0) & 0xffff;
    }
    __syncwarp();
    if constexpr (is_block(StoredK::kType) && !kConvertsInRegisters) {
      // Columns that meet scales, or codes of another block, are 0.
      for (int column = 2 * lane; column < query_columns(StoredK::kType, kHeadDim); column += 64)
        store_shared(place(row, column), 0);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kLaneColumns; ++i)
      if (lane + 32 * i < kHeadDim) store_shared_u16(place(row, query_column(lane + 32 * i, pairs)), x[i]);
    if (lane == 0) reinterpret_cast<float*>(raw + kLayout.q_factors)[row] = exponent.factor * descale;
  }
}

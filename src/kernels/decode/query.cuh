// Where Q of a work tile comes from, and where it goes in shared memory.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/work_tile.cuh"

enum : int { kQueryChunks = kHeadDim / 8 };  // of a row, 16 bytes each

// Where the `at`-th chunk of the Q of a block of rows lies.
__device__ __forceinline__ u32 query_place(int at) {
  const int column = at % kQueryChunks * 8;
  return kLayout.q + column / 64 * kQueryRows * 128 + swizzled(at / kQueryChunks, column % 64 / 8);
}

// Numbers of Q in shared memory: of codes they are f16, which has each of them.
using QueryNumber = ElementType<kCodesQ ? kF16 : StoredQ::kType>;

// A chunk of Q in memory: 8 columns of a row, of which `count` exist; none where `count` is not positive.
template <Element type>
struct ChunkOf {
  const typename InMemory<type>::Type* from;
  int count;

  __device__ __forceinline__ uint4 load() const {
    if constexpr (is_code(type)) {
      const uint2 codes = load_codes(from, count, 1, kQWhole);
      return {code_pair<type>(codes, 0), code_pair<type>(codes, 1), code_pair<type>(codes, 2),
              code_pair<type>(codes, 3)};
    }
    if (kQWhole) return count > 0 ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    u32 pairs[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) pairs[i / 2] |= u32(from[i]) << (i % 2 * 16);
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
};
using QueryChunk = ChunkOf<StoredQ::kType>;

__device__ __forceinline__ QueryChunk query_chunk(const DecodeParams& p, const WorkTile& tile, int at) {
  const TileRows rows = rows_of_tile(p, tile);
  const int row = row_of_warps(at / kQueryChunks);
  const int column = at % kQueryChunks * 8;
  const int count = row < rows.count ? p.d - column : 0;
  return {count > 0 ? row_of_tile<StoredQ>(p, p.q, tile, rows.first + row) + column
                    : static_cast<const StoredQ::Memory*>(p.q.data),
          count};
}

enum : int { kQPanelBytes = kQueryRows * kPanelRowBytes };

// Where the codes of K have a column, of 16 bytes or of a block.
__device__ __forceinline__ CodesOfK::Place code_place(int column) {
  return CodesOfK::place(column % (is_block(StoredK::kType) ? int(kBlockColumns) : 8 * CodesOfK::kOfHalf));
}

// Where a column of Q lies for products with codes: a lane's word has the columns of two halves of it, and products
// take two columns of each lane at a time. Rows of blocks begin with so many pairs of bytes that are not theirs.
__device__ __forceinline__ int query_column(int column, int pairs_before) {
  constexpr int kOfHalf = CodesOfK::kOfHalf, kColumns = 8 * kOfHalf;
  if constexpr (is_block(StoredK::kType)) {
    const int block = column / kBlockColumns;
    const CodesOfK::Place at = code_place(column);
    const int pair = pairs_before + block_bytes(StoredK::kType) / 2 * block + 1 + 2 * at.word + at.half;
    const int chunk = pair / 8;
    const int product = products_before_chunk(StoredK::kType, kHeadDim, chunk) + block;
    return (product - first_block(StoredK::kType, chunk)) * kColumns + at.number * 8 + pair % 8;
  }
  const CodesOfK::Place at = code_place(column);
  return column / kColumns * kColumns + at.number * 8 + at.word * 2 + at.half;
}

// What the codes of a row of Q are multiplied by, which its scores take. One that is not finite makes NaN, as sums of
// infinities of both signs are.
__device__ __forceinline__ float query_descale(const DecodeParams& p, const WorkTile& tile, int row) {
  const CodeScales& t = p.q_scale;
  if (t.data == nullptr) return 1;
  const int head = tile.head * kGroup + row % kGroup;
  const long long of_row = t.of_rows ? (tile.sequence.n.q_start + row / kGroup) * t.row + head * t.head
                                     : head / kGroupOfHead * t.head;
  const float descale = scale_at(t, tile.batch * t.batch + of_row);
  return fabsf(descale) < infinity() ? descale : __int_as_float(0x7fffffff);
}

// Makes the Q of a block of rows, which is there as memory has it, one of f16 in that order, as large as f16 may be:
// rows are divided by powers of 2. `pairs_before`: as query_column has it, of a kv head of the CTA's. By all threads
// that compute, between barriers.
template <class PairsBefore>
__device__ __forceinline__ void prepare_queries(const DecodeParams& p, const WorkTile& tile, PairsBefore pairs_before) {
  enum : int { kOfLane = (kHeadDim + 31) / 32, kWarps = kComputeThreads / 32 };
  const int of_all = kHeads == 1 ? pairs_before(0) : 0;
  const int lane = threadIdx.x % 32;
  const u32 q = u32(__cvta_generic_to_shared(raw)) + kLayout.q;
  const auto place = [&](int row, int column) {
    return q + column / 64 * kQueryRows * 128 + swizzled(row, column % 64 / 8) + column % 8 * 2;
  };
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < kQueryRows; row += kWarps) {
    const int pairs = kHeads == 1 ? of_all : pairs_before(row / kRowsOfWarp);
    u32 x[kOfLane];
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      x[i] = lane + 32 * i < kHeadDim ? load_shared_u16(place(row, lane + 32 * i)) : 0;
      largest = max(largest, x[i] & 0x7fff);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, step));
    // That of f32; the largest becomes 2^14 and more.
    const int of_f32 = QueryNumber::kType == kBF16 ? int(largest >> 7) : int(largest >> 10) + 112;
    const int exponent = min(max(of_f32, 15), 254);
    const float factor = __int_as_float((exponent - 14) << 23), inverse = __int_as_float((268 - exponent) << 23);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      // Codes may come multiplied by different powers of 2.
      const float of_codes = CodesOfK::scale(code_place(lane + 32 * i).number) / CodesOfK::scale(0);
      x[i] = Half::pack(QueryNumber::to_float(static_cast<unsigned short>(x[i])) * (inverse * of_codes), 0) & 0xffff;
    }
    __syncwarp();
    if constexpr (is_block(StoredK::kType)) {  // products with what is no code of their block
      for (int column = 2 * lane; column < query_columns(StoredK::kType, kHeadDim); column += 64)
        store_shared(place(row, column), 0);
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (lane + 32 * i < kHeadDim) store_shared_u16(place(row, query_column(lane + 32 * i, pairs)), x[i]);
    if (lane == 0) {
      const TileRows rows = rows_of_tile(p, tile);
      const int in_block = row_of_warps(row);
      const bool has_descale = kCodesQ && in_block < rows.count;
      const float descale = has_descale ? query_descale(p, tile, rows.first + in_block) : 1;
      reinterpret_cast<float*>(raw + kLayout.q_factors)[row] = factor * descale;
    }
  }
}

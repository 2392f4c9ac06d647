// Q of a work tile: where its chunks lie in memory and in shared memory.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/work_tile.cuh"

enum : int { kQueryChunks = kHeadDim / 8 };  // chunks of 16 bytes in a row of Q

// The place in shared memory of the `at`-th chunk of a block of rows.
__device__ __forceinline__ u32 query_place(int at) {
  const int column = at % kQueryChunks * 8;
  return kLayout.q + column / 64 * kQPanelBytes + swizzled(at / kQueryChunks, column % 64 / 8);
}

// A chunk of Q in memory: 8 columns of a row, of which the first `count` exist, and none if `count` is not positive.
// Codes are loaded as the numbers of f16 that they stand for.
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

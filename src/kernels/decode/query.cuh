// Where Q of a work tile comes from, and where it goes in shared memory.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/work_tile.cuh"

enum : int { kQueryChunks = kHeadDim / 8 };  // of a row, 16 bytes each

// Where the `at`-th chunk of the Q of a block of rows lies.
__device__ __forceinline__ u32 query_place(int at) {
  const int column = at % kQueryChunks * 8;
  return kLayout.q + column / 64 * kBlockRows * 128 + swizzled(at / kQueryChunks, column % 64 / 8);
}

// A chunk of Q in memory: 8 columns of a row, of which `count` exist; none where `count` is not positive.
struct QueryChunk {
  const ElementQ::Memory* from;
  int count;

  __device__ __forceinline__ uint4 load() const {
    if (kQWhole) return count > 0 ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    u32 pairs[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) pairs[i / 2] |= u32(from[i]) << (i % 2 * 16);
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
  }
};

__device__ __forceinline__ QueryChunk query_chunk(const DecodeParams& p, const WorkTile& tile, int at) {
  const TileRows rows = rows_of_tile(p, tile);
  const int row = at / kQueryChunks;
  const int column = at % kQueryChunks * 8;
  const int count = row < rows.count ? p.d - column : 0;
  return {count > 0 ? row_of_tile<ElementQ>(p, p.q, tile, rows.first + row) + column
                    : static_cast<const ElementQ::Memory*>(p.q.data),
          count};
}

// Q of a work tile: where its chunks lie in memory and in shared memory.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/work_tile.cuh"

enum : int {
  kQueryColumns = chunk_columns(ElementQ::kType),  // of a chunk of 16 bytes
  kQueryChunks = kHeadDim / kQueryColumns,         // of a row of Q
};

// The place in shared memory of the `at`-th chunk of a block of rows.
__device__ __forceinline__ u32 query_place(int at) {
  const int chunk = at % kQueryChunks;
  return kLayout.q + chunk / 8 * kQPanelBytes + swizzled(at / kQueryChunks, chunk % 8);
}

// A chunk of Q in memory: kQueryColumns columns of a row, of which the first `count` exist, and none if `count` is not
// positive.
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
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < kQueryColumns; ++i) {
      if (i >= count) continue;
      if constexpr (type == kF32) words[i] = __float_as_uint(from[i]);
      else words[i / 2] |= u32(from[i]) << (i % 2 * 16);
    }
    return {words[0], words[1], words[2], words[3]};
  }
};
using QueryChunk = ChunkOf<StoredQ::kType>;

__device__ __forceinline__ QueryChunk query_chunk(const DecodeParams& p, const WorkTile& tile, int at) {
  const TileRows rows = rows_of_tile(p, tile);
  const int row = row_of_warps(at / kQueryChunks);
  const int column = at % kQueryChunks * kQueryColumns;
  const int count = row < rows.count ? p.d - column : 0;
  return {count > 0 ? row_of_tile<StoredQ>(p, p.q, tile, rows.first + row) + column
                    : static_cast<const StoredQ::Memory*>(p.q.data),
          count};
}

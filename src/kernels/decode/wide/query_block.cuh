// Q of a work tile of the wide path, in shared memory.
#pragma once
#include "device/cp_async.cuh"
#include "decode/loads/query.cuh"
#include "decode/wide/tile.cuh"

// Loads it, by all threads of the CTA, which meet at a barrier. Chunks of K and V that are on their way arrive, too.
__device__ __forceinline__ void load_queries(const DecodeParams& p, const WorkTile& tile) {
#pragma unroll 1
  for (int i = threadIdx.x; i < kQueryRows * kQueryChunks; i += kComputeThreads) {
    const QueryChunk chunk = query_chunk(p, tile, i);
    if (kQWhole)
      async_copy16(shared_base() + query_place(i), chunk.from, chunk.count > 0 ? 16 : 0);
    else
      *reinterpret_cast<uint4*>(raw + query_place(i)) = chunk.load();
  }
  async_copy_commit();
  async_copy_wait<0>();
  __syncthreads();
}

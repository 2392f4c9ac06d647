// Q of the work tiles on its way into shared memory: of warp-path groups through registers, before its place is free;
// of wide ones by warps that load, while they compute.
#pragma once
#include "device/cp_async.cuh"
#include "sm90/common/ring.cuh"
#include "sm90/common/fragment_store.cuh"
#include "sm90/ptx/tma.cuh"
#include "sm90/decode/work_tiles.cuh"

enum : int {
  kTileWarps = kWarpgroupPath ? kLoadWarps / kWarpGroups : kWarpsPerGroup,  // that load a tile
  kQueryChunks = kHeadDim / 8,
  // Of warp group 0 of the warpgroup path, that load Q, too: those that have nothing else to do, where there are some.
  kQueryWarps = kBoxKeys == 0 ? int(kTileWarps) : kTileWarps == 4 ? 2 : 1,
};

// Of a warpgroup path's CTA.
using QueryBuffer = Buffers<kLayout.q, 0, kLayout.q_full, kLayout.q_empty, 1>;

// Where chunk `chunk` of 16 bytes lies in a panel's row: no two rows of eight have a chunk in the same banks.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ row) % 8 << 4); }

// Where 16 bytes of Q lie, of the `at`-th chunk of a block of rows.
__device__ __forceinline__ u32 query_place(int at) {
  const int column = at % kQueryChunks * 8;
  return kLayout.q + column / 64 * kBlockRows * 128 + swizzled(at / kQueryChunks, column % 64 / 8);
}

// Where they come from: 8 columns of a row, of which `count` exist; none where `count` is not positive.
struct QueryChunk {
  const unsigned short* from;
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

__device__ __forceinline__ QueryChunk query_chunk(const DecodeParams& p, const WorkTile& item, int at) {
  const TileRows rows = rows_of_tile(p, item);
  const int row = at / kQueryChunks;
  const int column = at % kQueryChunks * 8;
  const int count = row < rows.count ? p.d - column : 0;
  return {count > 0 ? row_of_tile(p, p.q, item, rows.first + row) + column : p.q.data, count};
}

// Q of a work tile, zeros where there is none, copied by `threads` threads, of which this is number `thread`.
template <int threads>
__device__ __forceinline__ void copy_query(const DecodeParams& p, const WorkTile& item, int thread) {
#pragma unroll kWarpgroupPath ? 4 : 1  // warp-path groups have no registers for more
  for (int at = thread; at < kBlockRows * kQueryChunks; at += threads) {
    const QueryChunk chunk = query_chunk(p, item, at);
    if (kQWhole && kWarpgroupPath)
      async_copy16(u32(__cvta_generic_to_shared(raw + query_place(at))), chunk.from, chunk.count > 0 ? 16 : 0);
    else
      *reinterpret_cast<uint4*>(raw + query_place(at)) = chunk.load();
  }
}

// The loads of Q of warpgroups, but for the first one, by kQueryWarps warps.
class QueryLoader {
 public:
  // The warp groups brought the first work tile's, unless they skip it.
  __device__ __forceinline__ QueryLoader(const TileWalk& tiles)
      : buffer_(u32(__cvta_generic_to_shared(raw)), !tiles.first_tile()) {}

  // Brings Q of the work tile that `tiles` begins.
  __device__ __forceinline__ void begin_tile(const DecodeParams& p, const TileWalk& tiles, int thread) {
    if (tiles.first_tile()) return;
    buffer_.wait_empty();
    copy_query<32 * kQueryWarps>(p, tiles.item(), thread);
    if (kQWhole)
      async_copy_arrive(buffer_.full());
    else
      mbarrier_arrive(buffer_.full());
    buffer_.advance();
  }

 private:
  QueryBuffer buffer_;
};

// Q of all work tiles by warps of their own.
__device__ __forceinline__ void load_queries(const DecodeParams& p, TileWalk tiles, int thread) {
  QueryLoader query(tiles);
#pragma unroll 1
  for (; tiles.more(); tiles.next_work_tile()) query.begin_tile(p, tiles, thread);
}

// Q of the work tiles that have keys, one after the other, as the warp groups see it.
template <bool wide>
class Queries;

// All threads bring it, through registers: ahead of its place, or when that is free where registers are full, which
// elements need, and all that scores may with the widest heads.
template <>
class Queries<false> {
 public:
  __device__ __forceinline__ Queries(const DecodeParams& p, const WorkTile& item, bool more) {
    if (kEarly && more) fetch(p, item);
  }
  __device__ __forceinline__ void begin_tile(const DecodeParams& p, const WorkTile& item) {
    if (!kEarly) copy_query<kComputeThreads>(p, item, threadIdx.x);
#pragma unroll
    for (int i = 0; kEarly && i < kOfThread; ++i)
      if (at(i) < kBlockRows * kQueryChunks) *reinterpret_cast<uint4*>(raw + query_place(at(i))) = chunks_[i];
    sync_compute_warps();
  }
  // The warp groups have read it.
  __device__ __forceinline__ void release() {}
  // The work tile's results are on their way.
  __device__ __forceinline__ void end_tile(const DecodeParams& p, const WorkTile& next, bool more) {
    if (kEarly && more) fetch(p, next);
  }

 private:
  enum : int {
    kOfThread = (kBlockRows * kQueryChunks + kComputeThreads - 1) / kComputeThreads,
    kEarly = kQWhole && !(kHeadDim > 240 && kScoreMode && kHasLeft),
  };

  static __device__ __forceinline__ int at(int i) { return threadIdx.x + i * kComputeThreads; }

  __device__ __forceinline__ void fetch(const DecodeParams& p, const WorkTile& item) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i)
      if (at(i) < kBlockRows * kQueryChunks) chunks_[i] = query_chunk(p, item, at(i)).load();
  }

  uint4 chunks_[kOfThread];
};

// Warps that load bring it, but for the first one.
template <>
class Queries<true> {
 public:
  __device__ __forceinline__ Queries(const DecodeParams& p, const WorkTile& item, bool more)
      : buffer_(u32(__cvta_generic_to_shared(raw)), 0), is_there_(more && item.has_keys()) {
    if (is_there_) copy_query<kComputeThreads>(p, item, threadIdx.x);
    async_copy_commit();
    // It is asked for before K and V, after which it would come late.
    named_barrier_arrive(kFirstQuery, kCtaThreads);
    async_copy_wait<0>();
    sync_compute_warps();
  }
  __device__ __forceinline__ void begin_tile(const DecodeParams&, const WorkTile&) {
    if (!is_there_) {
      buffer_.wait_full();
      buffer_.advance();
    }
    is_there_ = false;
    fence_async_proxy();
  }
  __device__ __forceinline__ void release() const { mbarrier_arrive_if(buffer_.empty(), threadIdx.x % 32 == 0); }
  __device__ __forceinline__ void end_tile(const DecodeParams&, const WorkTile&, bool) {}

 private:
  QueryBuffer buffer_;
  bool is_there_;
};

// Appends new rows of K and V to their caches, and rotates queries, before the warp groups compute (kAppends). The
// compute warps of a CTA write the new rows that its own work tiles read, and wait for no other CTA. Other CTAs may
// write the same rows: blocks of rows of a kv head read the same keys, and splits of a q block rotate the same queries.
// All write the same bits, so that a row is valid from the CTA's own write on, in whatever order the writes arrive.
#pragma once
#include "device/append.cuh"
#include "device/semaphore.cuh"
#include "decode/schedule/schedule.cuh"

// Appends a head of K or V of a new row.
__device__ __forceinline__ void append_key_head(const AppendParams& a, const AppendToken& token, bool of_v, int head,
                                                int lane) {
  const AppendPlace to = place_of(a, token);
  if (!to.exists) return;
  if (of_v) append_head<ElementV::kType>(a, a.v, token, to, head, lane);
  else append_head<ElementK::kType>(a, a.k, token, to, head, lane);
}

// Writes rows by groups of lanes, each of which takes a row at a time.
class RowWriter {
 public:
  __device__ __forceinline__ explicit RowWriter(const AppendParams& a) : a_(a) {
    lane_ = threadIdx.x & ((1 << a.lanes_log2) - 1);
    row_ = threadIdx.x >> a.lanes_log2;
  }

  // Writes the new rows that a work tile reads, and its queries. The groups share the rows of all work tiles evenly.
  __device__ __forceinline__ void append(const DecodeParams& p, const WorkTile& tile) {
    const DecodeSequence& s = tile.sequence;
    const int old = a_.cache_seqlens[tile.batch];
    const int offset = s.n.k_start - max(old, 0);  // from a key's number to that of a new row
    const int first = max(tile.begin * kBlockKeys + offset, 0);
    const int last = min(min(tile.end * kBlockKeys, s.n.sk) + offset, new_rows(a_.tokens, tile.batch));
    const int keys = old >= 0 ? 2 * max(last - first, 0) : 0;
    const TileRows queries = rows_of_tile(p, tile);
    const int rows = keys + (kRotatesQ ? queries.count : 0);
#pragma unroll 1
    for (; row_ < rows; row_ += kComputeThreads >> a_.lanes_log2) {
      if (row_ < keys)
        append_key_head(a_, new_token(a_.tokens, tile.batch, first + row_ / 2), row_ % 2, tile.head, lane_);
      else
        rotate_query(tile, queries.first + row_ - keys);
    }
    row_ -= rows;
  }

  // Writes all new rows. Perhaps no work tile reads some of them, as a mask hides them or no query came with them.
  __device__ __forceinline__ void append_unread() const {
    const int groups = 32 >> a_.lanes_log2;  // of a warp
    const int steps = (2 * a_.k.heads + groups - 1) / groups;
#pragma unroll 1
    for (int at = blockIdx.x + gridDim.x * (threadIdx.x / 32); at < a_.tokens.count * steps;
         at += gridDim.x * kComputeWarps) {
      const AppendToken token = token_of(a_.tokens, a_.batch, at / steps);
      const int head = at % steps * groups + threadIdx.x % 32 / (1 << a_.lanes_log2);
      if (head < 2 * a_.k.heads) append_key_head(a_, token, head % 2, head / 2, lane_);
    }
  }

 private:
  // Rotates a row of a kv head: (query, head of its group).
  __device__ __forceinline__ void rotate_query(const WorkTile& tile, int row) const {
    const int query = row / kGroup;
    const AppendToken token = {true, tile.batch, query, tile.sequence.n.q_start + query};
    const AppendPlace to = place_of_query(a_, token);
    if (to.exists) append_head<ElementQ::kType>(a_, a_.q, token, to, tile.head * kGroup + row % kGroup, lane_);
  }

  const AppendParams& a_;
  int lane_, row_;
};

// Appends, by the compute warps, before any warp loads what is written here. `work_tiles` is at the first work
// tile, if there are `more`, and is there again afterwards.
__device__ __forceinline__ void append_rows(const DecodeParams& p, WorkTiles& work_tiles, bool more) {
  RowWriter writer(append_of(p));
  if (kUnreadRows) writer.append_unread();
  if (!more) return;
  const SavedWorkTiles saved(uniform(threadIdx.x / 32));
  saved.save(work_tiles);
#pragma unroll 1
  do writer.append(p, work_tiles.tile);
  while (work_tiles.next(p));
  if (kBoxKeys > 0) fence_async_proxy_global();  // TMA reads them
  sync_compute_warps();
  work_tiles = saved.load();
}

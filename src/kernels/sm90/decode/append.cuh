// New rows of K and V, and queries turned, before the warp groups attend (kAppends). A CTA writes to the caches what
// its own work tiles read of the new rows, and waits for nobody else. Others may write the same rows, as all blocks of
// rows of a kv head read the same keys, and turn the same queries, as all splits of a q block do. All write the same
// bits, so that whoever comes first or last, a row holds these from the CTA's own write on.
#pragma once
#include "device/append.cuh"
#include "device/semaphore.cuh"
#include "sm90/decode/query.cuh"

constexpr Element kElement = FULGUR_INPUT[0] == 'b' ? kBF16 : kF16;

// Head `head` of the K of a new row, or of its V.
__device__ __forceinline__ void append_key_head(const AppendParams& a, const AppendToken& token, bool of_v, int head,
                                                int lane) {
  const AppendPlace to = place_of(a, token);
  if (to.exists) append_head<kElement>(a, of_v ? a.v : a.k, token, to, head, lane);
}

// The thread's part of appending: groups of lanes take a row each.
class RowWriter {
 public:
  __device__ __forceinline__ explicit RowWriter(const AppendParams& a) : a_(a) {
    lane_ = threadIdx.x & ((1 << a.lanes_log2) - 1);
    row_ = threadIdx.x >> a.lanes_log2;
  }

  // The new rows that a work tile reads, and its queries. All groups share out the rows of all work tiles one after
  // the other.
  __device__ __forceinline__ void append(const DecodeParams& p, const WorkTile& item) {
    const DecodeSequence& s = item.sequence;
    const int old = a_.cache_seqlens[item.batch];
    const int behind = s.n.k_start - max(old, 0);  // from a key's number to that of a new row
    const int first = max(item.begin * kBlockKeys + behind, 0);
    const int last = min(min(item.end * kBlockKeys, s.n.sk) + behind, new_rows(a_.tokens, item.batch));
    const int keys = old >= 0 ? 2 * max(last - first, 0) : 0;
    const TileRows queries = rows_of_tile(p, item);
    const int rows = keys + (kRotatesQ ? queries.count : 0);
#pragma unroll 1
    for (; row_ < rows; row_ += kCtaThreads >> a_.lanes_log2) {
      if (row_ < keys)
        append_key_head(a_, new_token(a_.tokens, item.batch, first + row_ / 2), row_ % 2, item.head, lane_);
      else
        rotate_query(item, queries.first + row_ - keys);
    }
    row_ -= rows;
  }

  // Those that perhaps no work tile reads, as a mask hides them or no query has come with them: all of them.
  __device__ __forceinline__ void append_unread() const {
    const int of_warp = 32 >> a_.lanes_log2;  // groups
    const int steps = (2 * a_.k.heads + of_warp - 1) / of_warp;
#pragma unroll 1
    for (int at = blockIdx.x + gridDim.x * (threadIdx.x / 32); at < a_.tokens.count * steps;
         at += gridDim.x * kCtaWarps) {
      const AppendToken token = token_of(a_.tokens, a_.batch, at / steps);
      const int head = at % steps * of_warp + threadIdx.x % 32 / (1 << a_.lanes_log2);
      if (head < 2 * a_.k.heads) append_key_head(a_, token, head % 2, head / 2, lane_);
    }
  }

 private:
  // A row of a kv head: (query, head of its group).
  __device__ __forceinline__ void rotate_query(const WorkTile& item, int row) const {
    const int query = row / kGroup;
    const AppendToken token = {true, item.batch, query, item.sequence.n.q_start + query};
    const AppendPlace to = place_of_query(a_, token);
    if (to.exists) append_head<kElement>(a_, a_.q, token, to, item.head * kGroup + row % kGroup, lane_);
  }

  const AppendParams& a_;
  int lane_, row_;
};

// What all work tiles of a slice read, there for the loads of all threads of the block.
__device__ __forceinline__ void append_of_tiles(const DecodeParams& p, const Slice& slice, WorkTiles items, bool more) {
  RowWriter writer(append_of(p));
#pragma unroll 1
  while (more) {
    writer.append(p, items.item);
    more = items.next(p, slice);
  }
  if (kBoxKeys > 0) fence_async_proxy_global();  // TMA reads them
  __syncthreads();
}

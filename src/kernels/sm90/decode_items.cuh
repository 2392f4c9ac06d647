// Which lines, and which keys of them, a thread block computes: from lengths on the device, by every warp for itself.
#pragma once
#include "plan.h"
#include "shared/memory.cuh"
#include "shared/schedule.cuh"
#include "shared/shares.h"
#include "sm90/decode_layout.h"
#include "sm90/decode_params.h"

enum : int {
  kWarps = kTeams * kTeamWarps,
  kThreads = 32 * kWarps,
  kBlockRows = kWarpRows * kTeamWarps,
};

constexpr DecodeLayout kLayout = decode_layout({kHeadDim, kValueDim, kTeamWarps, kTeams, kBlockKeys, kStages});

// A sequence: its lengths, where lengths.k_start is the row of its first key, and where such rows lie.
struct DecodeSequence {
  Lengths n;
  int entry;         // of the batch, kPage == 0
  long long pages;   // its first entry of the page table, kPage > 0
};

// The one place of this kernel that reads lengths and tables' beginnings, as lengths_of does: whatever they say, no
// access leaves the tensors.
__device__ __forceinline__ DecodeSequence sequence_of(const DecodeParams& p, int batch) {
  DecodeSequence s = {{0, 0, p.sq, 0}, batch, 0};
  if (kPacked) packed_rows(p.cu_seqlens_q, batch, p.total_q, p.sq, s.n.q_start, s.n.sq);
  int rows = p.rows_k;
  if (kPackedK) packed_rows(p.cu_seqlens_k, batch, p.total_k, p.sk, s.n.k_start, rows);
  if (kPage > 0) {
    int ids = p.ids;
    s.pages = batch * p.table_stride;
    if (kPageLists) {
      int first;
      packed_rows(p.page_indptr, batch, p.ids, p.ids, first, ids);
      s.pages = first;
    }
    rows = int(min((long long)(ids) * kPage, (long long)(p.sk)));
  }
  int end = min(rows, p.sk);
  if (kSeqUsedK) end = min(end, max(p.seqused_k[batch], 0));
  int begin = 0;
  if (kLeftPad) begin = min(max(p.leftpad_k[batch], 0), end);
  if (kBatchIdx) {
    s.entry = p.cache_batch_idx[batch];
    if (u32(s.entry) >= u32(p.entries)) end = begin;
  }
  s.n.k_start += begin;
  s.n.sk = end - begin;
  return s;
}

// Rows of a kv head, (query, head of its group), go into blocks.
__device__ __forceinline__ int row_blocks_of(const Lengths& n) {
  return (n.sq * kGroup + kBlockRows - 1) / kBlockRows;
}

// The keys that some of the rows [first, last] of a kv head see.
__device__ __forceinline__ KeyRange keys_of_rows(const DecodeParams& p, const Lengths& n, int first, int last) {
  const Band band = band_of(p);
  return {visible_keys(band, n, first / kGroup).begin, visible_keys(band, n, last / kGroup).end};
}

// The keys that a block of rows sees.
__device__ __forceinline__ KeyRange keys_of_block(const DecodeParams& p, const Lengths& n, int block) {
  return keys_of_rows(p, n, block * kBlockRows, min((block + 1) * kBlockRows, n.sq * kGroup) - 1);
}

// Of the lines of a kv head.
__device__ __forceinline__ int head_units(const DecodeParams& p, const Lengths& n) {
  const int blocks = row_blocks_of(n);
  int units = kEntryUnits * blocks;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) units += units_of(keys_of_block(p, n, block)).count;
  return units;
}

__device__ __forceinline__ int sequence_units(const DecodeParams& p, int batch) {
  return p.hk * head_units(p, sequence_of(p, batch).n);
}

// The share of this thread block, and the sequence in which it begins.
struct Share {
  Shares all;
  int begin, end;
  int batch;
  int at;  // where that sequence stands
};

// Prefix sums over the sequences, by all threads of the block.
__device__ __forceinline__ Share find_share(const DecodeParams& p, unsigned char* shared) {
  int* const sums = reinterpret_cast<int*>(shared + kLayout.scan);  // of warps, then what is found
  const int lane = threadIdx.x % 32;
  const int each = (p.batch + kThreads - 1) / kThreads;
  const int first = threadIdx.x * each;
  const int last = min(first + each, p.batch);
  int mine = 0;
#pragma unroll 1
  for (int b = first; b < last; ++b) mine += sequence_units(p, b);
  int before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xffffffff, before, step);
    if (lane >= step) before += x;
  }
  if (lane == 31) sums[threadIdx.x / 32] = before;
  __syncthreads();
  before -= mine;
  int units = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < threadIdx.x / 32) before += sums[warp];
    units += sums[warp];
  }
  Share share = {shares_of(units, gridDim.x), 0, 0, 0, 0};
  if (int(blockIdx.x) >= share.all.count) return share;
  share.begin = share_begin(share.all, blockIdx.x);
  share.end = share_begin(share.all, blockIdx.x + 1);
  if (share.begin >= before && share.begin < before + mine) {
    int b = first;
#pragma unroll 1
    for (;;) {
      const int after = before + sequence_units(p, b);
      if (share.begin < after) break;
      before = after;
      ++b;
    }
    sums[kWarps] = b;
    sums[kWarps + 1] = before;
  }
  __syncthreads();
  share.batch = sums[kWarps];
  share.at = sums[kWarps + 1];
  return share;
}

// Keys of a line that this thread block computes.
struct DecodeItem {
  int batch, head, block;  // of k, of rows
  DecodeSequence sequence;
  int begin, end;    // tiles of kBlockKeys keys
  int part, parts;   // of the line
  int first_share;   // of the line
};

// The items of a share, one after the other.
class DecodeItems {
 public:
  __device__ __forceinline__ DecodeItems(const DecodeParams& p, const Share& share) : p_(p), share_(share) {
    item.batch = share.batch - 1;
    item.head = item.block = 0;
    at_ = share.at;
  }

  DecodeItem item;

  // Goes on to the next one; false when there are no more.
  __device__ __forceinline__ bool next() {
    for (;;) {
      at_ += units_;
      if (++item.block >= blocks_) {
        item.block = 0;
        ++item.head;
      }
      while (item.head >= heads_) {
        if (++item.batch >= p_.batch) return false;
        begin_sequence();
      }
      if (at_ >= share_.end) return false;
      const KeyRange keys = keys_of_block(p_, item.sequence.n, item.block);
      const Units units = units_of(keys);
      units_ = kEntryUnits + units.count;
      const UnitRange mine = units_in_share(at_, units.count, share_.begin, share_.end);
      if (!mine.any()) continue;
      take(keys, units, mine);
      return true;
    }
  }

 private:
  // Goes to the head in which the share begins, or to the first.
  __device__ __forceinline__ void begin_sequence() {
    item.sequence = sequence_of(p_, item.batch);
    blocks_ = row_blocks_of(item.sequence.n);
    item.head = item.block = units_ = 0;
    heads_ = blocks_ > 0 ? p_.hk : 0;
    if (at_ >= share_.begin || heads_ == 0) return;
    const int units = head_units(p_, item.sequence.n);
    item.head = (share_.begin - at_) / units;
    at_ += item.head * units;
  }

  __device__ __forceinline__ void take(const KeyRange& keys, const Units& units, const UnitRange& mine) {
    item.begin = (units.first + mine.begin) * kUnitKeys / kBlockKeys;
    item.end = min((units.first + mine.end) * kUnitKeys, keys.end + kBlockKeys - 1) / kBlockKeys;
    item.part = 0;
    item.parts = 1;
    if (mine.end - mine.begin < units.count) {
      const int first = at_ + kEntryUnits;
      item.first_share = share_of_unit(share_.all, first);
      item.part = blockIdx.x - item.first_share;
      item.parts = share_of_unit(share_.all, first + units.count - 1) - item.first_share + 1;
    }
  }

  const DecodeParams& p_;
  const Share& share_;
  int at_;
  int heads_ = 0, blocks_ = 0, units_ = 0;
};

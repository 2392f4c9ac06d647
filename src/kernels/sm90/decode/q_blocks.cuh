// What all files of the decode kernel know: its sizes, its barriers, and the q blocks of sequences, by lengths on the
// device.
#pragma once
#include "kernel_config.h"
#include "device/append.cuh"
#include "sm90/ptx/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/schedule.cuh"
#include "host_device/stream_k.h"
#include "device/warp.cuh"
#include "sm90/decode/layout.h"
#include "sm90/decode/params.h"

constexpr DecodeTile kTile = {kHeadDim,  kValueDim,  kWarpsPerGroup, kWarpGroups,
                              kTileRows, kBlockKeys, kKStages,       kVStages};

enum : int {
  kComputeWarps = kWarpGroups * kWarpsPerGroup,  // of the warp groups
  kComputeThreads = 32 * kComputeWarps,
  kCtaWarps = decode_warps(kTile),
  kCtaThreads = 32 * kCtaWarps,
  kBlockRows = kWarpRows * kWarpsPerGroup,
  kWarpGroupThreads = 32 * kWarpsPerGroup,
  kWarpgroupPath = is_warpgroup_path(kTile),
  // sm90/decode/combine.cu puts the splits of q blocks together, in place of the last CTA at each.
  kCombinesLater = kSplitting == kInvariantSplits || (kSplitting == kSplitToFill && kWarpgroupPath),
  // Warps that load need few registers, which others may have where there are three warpgroups: 504 of three threads.
  kMovesRegisters = kWarpgroupPath && kCtaWarps == 12,
  kLoadRegisters = kBoxKeys > 0 ? 72 : kBlockKeys <= 16 ? 56 : 88,
  kComputeRegisters = (504 - kLoadRegisters) / 2,
};

// What the kernels of a plan are given.
template <bool appends>
struct ParamsOf {
  using Type = DecodeParams;
};
template <>
struct ParamsOf<true> {
  using Type = DecodeAppendParams;
};
using PlanParams = ParamsOf<kAppends != 0>::Type;

__device__ __forceinline__ const AppendParams& append_of(const DecodeParams& p) {
  return static_cast<const DecodeAppendParams&>(p).append;
}

// Barriers by number: those of each warp group, then where the two warpgroups of a warp group take turns, where all
// warp groups meet that are not the CTA, and where the warps that load wait until the warp groups have asked for their
// first Q.
enum : int { kWarpGroupBarrier = 1, kAlternate = 8, kComputeBarrier = 10, kFirstQuery = 11 };

// A barrier of a warp group. Of numbers that are no constants the compiler assumes all 16.
__device__ __forceinline__ void sync_warp_group(int warp_group) {
  if (kWarpsPerGroup == 1) {
    __syncwarp();
    return;
  }
#pragma unroll
  for (int i = 0; i < kWarpGroups; ++i)
    if (warp_group == i) named_barrier_sync(kWarpGroupBarrier + i, kWarpGroupThreads);
}

// A barrier of all warp groups.
__device__ __forceinline__ void sync_compute_warps() {
  if (kWarpgroupPath)
    named_barrier_sync(kComputeBarrier, kComputeThreads);
  else
    __syncthreads();
}

constexpr DecodeLayout kLayout = decode_layout(kTile);

extern __shared__ __align__(1024) unsigned char raw[];

// Of a slice.
constexpr int kKeysPerChunk = chunk_keys(kBlockKeys);
// A sequence: its lengths, where n.k_start is the row of its first key, and where such rows lie.
struct DecodeSequence {
  Lengths n;
  int entry;  // of the batch; with kPageLists its first one of the page table
};

// The one place of this kernel that reads lengths and tables' beginnings, as lengths_of does: whatever they say, no
// access leaves the tensors.
__device__ __forceinline__ DecodeSequence sequence_of(const DecodeParams& p, int batch) {
  DecodeSequence s = {{0, 0, p.sq, 0}, batch};
  if (kPacked) packed_rows(p.cu_seqlens_q, batch, p.total_q, p.sq, s.n.q_start, s.n.sq);
  if (kSeqUsedQ) s.n.sq = used_rows(p.seqused_q, batch, s.n.sq);
  if (kFewQueries > 0 && s.n.sq > kFewQueries) s.n.sq = 0;
  int rows = p.sk;
  if (kPackedK) packed_rows(p.cu_seqlens_k, batch, p.total_k, p.sk, s.n.k_start, rows);
  if (kPage > 0) {
    int ids = p.pages.ids;
    if (kPageLists) packed_rows(p.pages.indptr, batch, p.pages.ids, p.pages.ids, s.entry, ids);
    rows = int(min((long long)(ids) * kPage, (long long)(p.sk)));
  }
  int end = min(rows, p.sk);
  if (kAppends)
    end = min(end, max(appended_length(append_of(p), batch), 0));
  else if (kSeqUsedK)
    end = used_rows(p.seqused_k, batch, end);
  int begin = 0;
  if (kLeftPad) begin = min(max(p.leftpad_k[batch], 0), end);
  if (kBatchIdx) {
    s.entry = p.cache_batch_idx[batch];
    if (u32(s.entry) >= u32(p.pages.entries)) end = begin;
  }
  s.n.k_start += begin;
  s.n.sk = end - begin;
  return s;
}

// Rows of a kv head, (query, head of its group), go into blocks.
__device__ __forceinline__ int q_blocks_of(const Lengths& n) {
  return (n.sq * kGroup + kBlockRows - 1) / kBlockRows;
}

// The keys that some of the rows [first, last] of a kv head see.
__device__ __forceinline__ KeyRange keys_of_rows(const DecodeParams& p, const Lengths& n, int first, int last) {
  const Band band = band_of(p);
  return {visible_keys(band, n, first / kGroup).begin, visible_keys(band, n, last / kGroup).end};
}

// The keys that a block of rows sees.
__device__ __forceinline__ KeyRange keys_of_q_block(const DecodeParams& p, const Lengths& n, int block) {
  return keys_of_rows(p, n, block * kBlockRows, min((block + 1) * kBlockRows, n.sq * kGroup) - 1);
}

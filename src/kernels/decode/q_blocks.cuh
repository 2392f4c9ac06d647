// What all files of the decode kernels know: sizes, barriers, and the q blocks of sequences, by lengths on the device.
#pragma once
#include "device/operands.cuh"
#include "device/append.cuh"
#include "device/codes.cuh"
#include "sm90/ptx/mbarrier.cuh"
#include "device/memory.cuh"
#include "device/schedule.cuh"
#include "host_device/stream_k.h"
#include "device/warp.cuh"
#include "decode/layout.h"
#include "decode/params.h"

// As memory has q, k and v: k and v, and with them q, may have codes, of which products take the numbers as f16.
using StoredQ = ElementType<Element(kStoredQ)>;
using StoredK = ElementType<Element(kStoredK)>;
using StoredV = ElementType<Element(kStoredV)>;
using CodesOfK = Codes<StoredK::kType>;
using CodesOfV = Codes<StoredV::kType>;

enum : int {
  kCodesQ = is_code(StoredQ::kType),
  kCodesK = is_code(StoredK::kType),
  kCodesV = is_code(StoredV::kType),
  kScalesOfKey = kKScales * (1 + kKZeroPoint) + kVScales * (1 + kVZeroPoint),
};

// The tensors of scales that a tile of codes has with it: so many numbers of a key each, in words of their own. In
// shared memory they follow each other, and in each its keys.
enum : int { kOfK, kOfV, kZeroOfK, kZeroOfV, kScaleTensors };
__device__ constexpr int scale_count(int tensor) {
  const int count = tensor % 2 == 0 ? kKScales : kVScales;
  return tensor == kZeroOfK ? count * kKZeroPoint : tensor == kZeroOfV ? count * kVZeroPoint : count;
}
__device__ constexpr Element scale_type(int tensor) {
  return Element(tensor == kOfK       ? kKScaleType
                 : tensor == kOfV     ? kVScaleType
                 : tensor == kZeroOfK ? kKZeroPointType
                                      : kVZeroPointType);
}
// Whether they come with the codes, in blocks.
__device__ constexpr bool scales_in_rows(int tensor) {
  return is_block(tensor % 2 == 0 ? StoredK::kType : StoredV::kType);
}
__device__ constexpr int scale_words_before(int tensor) {
  if (tensor == 0) return 0;
  const int words = scale_words(scale_count(tensor - 1), scale_type(tensor - 1));
  return scale_words_before(tensor - 1) + (scales_in_rows(tensor - 1) ? 0 : words);
}

// Bytes of those of a key and a head, and of several heads, from one key to the next.
__device__ constexpr int scale_bytes(int tensor) {
  return scales_in_rows(tensor) ? 0 : scale_count(tensor) * bytes_of(scale_type(tensor));
}
__device__ constexpr int scale_pitch(int tensor) {
  return scale_bytes(tensor) == 0 ? 0 : pitch_of_heads(kHeads * scale_bytes(tensor));
}
__device__ constexpr int scale_pitches_before(int tensor) {
  return tensor == 0 ? 0 : scale_pitches_before(tensor - 1) + scale_pitch(tensor - 1);
}

constexpr DecodeTile kTile = {kOperands,      {StoredQ::kType, StoredK::kType, StoredV::kType, ElementO::kType},
                              kHeads > 1 ? scale_pitches_before(kScaleTensors) / 4 : scale_words_before(kScaleTensors),
                              kHeads,
                              kKPiece,        kVPiece,
                              kHeadDim,       kValueDim,
                              kWarpsPerGroup, kWarpGroups,
                              kTileRows,      kBlockKeys,
                              kBoxKeys,       kKStages,
                              kVStages};

enum : int {
  kWarpgroupPath = is_warpgroup_path(kTile),  // decode_warpgroup.cu, else decode_warp.cu
  kComputeWarps = kWarpGroups * kWarpsPerGroup,
  kComputeThreads = 32 * kComputeWarps,
  kCtaWarps = decode_warps(kTile),
  kCtaThreads = 32 * kCtaWarps,
  kBlockRows = kWarpRows * kWarpsPerGroup,
  kRowsOfWarp = rows_of_warp(kTile),  // of Q in shared memory
  kQueryRows = kRowsOfWarp * kWarpsPerGroup,
  kWarpGroupThreads = 32 * kWarpsPerGroup,
  kFirstLoadWarp = kComputeWarps % kCtaWarps,  // warps that load come after those that compute, or are the same
  kLoadsAhead = kComputeWarps == kCtaWarps,    // a warp loads for its own products
  kKeysPerChunk = chunk_keys(kBlockKeys),      // of stream-K
  kHeadRows = kTileRows / kHeads,              // rows of a kv head
  kGroupOfHead = kGroup / kHeads,
  kTileLoaders = kHeads > 1 ? 1 : int(kWarpsPerGroup),  // warps that load a tile of the warp path
};

// The argument of the kernels of a plan.
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

// Named barriers: kWarpGroupBarrier and the next ones are those of each warp group; at kAlternate and the next one two
// warpgroups of a warp group alternate; at kComputeBarrier all warp groups meet where they are not the whole CTA; at
// kFirstQuery the warps that load wait until the warp groups have requested their first Q.
enum : int { kWarpGroupBarrier = 1, kAlternate = 8, kComputeBarrier = 10, kFirstQuery = 11 };

// The kv head of a warp, of those that its CTA has.
__device__ __forceinline__ int head_of_warp() { return kHeads == 1 ? 0 : int(threadIdx.x / 32 % kHeads); }

// A barrier of the warps that share rows of K and V, or 16 bytes of those of V. The loop makes its number a constant,
// without which the compiler reserves all 16.
__device__ __forceinline__ void sync_warp_group(int warp_group) {
  if constexpr (kWarpsPerGroup == 1 || (kHeads > 1 && kVPiece != kMiddle)) {
    __syncwarp();
  } else {
#pragma unroll
    for (int i = 0; i < kWarpGroups; ++i)
      if (warp_group == i) named_barrier_sync(kWarpGroupBarrier + i, kWarpGroupThreads);
  }
}

// A barrier of all warp groups.
__device__ __forceinline__ void sync_compute_warps() {
  if (kComputeWarps == kCtaWarps)
    __syncthreads();
  else
    named_barrier_sync(kComputeBarrier, kComputeThreads);
}

constexpr DecodeLayout kLayout = decode_layout(kTile);

extern __shared__ __align__(1024) unsigned char raw[];

// A sequence: its lengths, where n.k_start is the row of its first key, and where such rows lie.
struct DecodeSequence {
  Lengths n;
  int entry;  // its row of the batch; kPageLists: its first entry of the page table
};

// The one place of these kernels that reads lengths and where page lists begin, as lengths_of does for other kernels:
// whatever these tensors say, no access leaves K, V and Q.
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

// The blocks of rows that a kv head has.
__device__ __forceinline__ int q_blocks_of(const Lengths& n) {
  return (n.sq * kGroup + kBlockRows - 1) / kBlockRows;
}

// The keys that some of the rows [first, last] of a kv head see.
__device__ __forceinline__ KeyRange keys_of_rows(const DecodeParams& p, const Lengths& n, int first, int last) {
  return keys_seen_by_any(band_of(p), n, first / kGroup, last / kGroup);
}

// The keys that a block of rows sees.
__device__ __forceinline__ KeyRange keys_of_q_block(const DecodeParams& p, const Lengths& n, int block) {
  return keys_of_rows(p, n, block * kBlockRows, min((block + 1) * kBlockRows, n.sq * kGroup) - 1);
}

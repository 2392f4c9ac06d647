// The q blocks of sequences, by the lengths that lie on the device.
#pragma once
#include "device/append.cuh"
#include "device/schedule.cuh"
#include "decode/cta.cuh"

// The argument of the kernels of a plan: with AppendParams, if these append.
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

// A sequence: its lengths, of which n.k_start is the row of its first key, and where its rows lie.
struct DecodeSequence {
  Lengths n;
  int entry;  // its entry of the batch of K and V; kPageLists: its first entry of the page table
};

// Reads the lengths of a sequence, and where its page list begins. No other place of these kernels does, so that no
// access leaves K, V and Q, whatever these tensors hold.
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

// The number of q blocks of a kv head: blocks of rows, or all of kRowBlocks together.
__device__ __forceinline__ int q_blocks_of(const Lengths& n) {
  if (kRowBlocks > 1) return n.sq > 0;
  return (n.sq * kGroup + kBlockRows - 1) / kBlockRows;
}

// The keys that some of the rows [first, last] of a kv head see.
__device__ __forceinline__ KeyRange keys_of_rows(const DecodeParams& p, const Lengths& n, int first, int last) {
  return keys_seen_by_any(band_of(p), n, first / kGroup, last / kGroup);
}

// The keys that a q block sees.
__device__ __forceinline__ KeyRange keys_of_q_block(const DecodeParams& p, const Lengths& n, int block) {
  if (kRowBlocks > 1) return keys_of_rows(p, n, 0, n.sq * kGroup - 1);
  return keys_of_rows(p, n, block * kBlockRows, min((block + 1) * kBlockRows, n.sq * kGroup) - 1);
}

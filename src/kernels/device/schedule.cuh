// The lengths and the band of a call, from the arguments of a kernel, and whether its mask hides anything.
#pragma once
#include "kernel_config.h"
#include "host_device/attention_params.h"
#include "device/lengths.cuh"
#include "device/memory.cuh"
#include "host_device/key_walk.h"

__device__ __forceinline__ Lengths lengths_of(const CallParams& p, int batch) {
  Lengths n = {0, 0, p.sq, p.sk};
  if (kPacked) packed_rows(p.cu_seqlens_q, batch, p.total_q, p.sq, n.q_start, n.sq);
  if (kPackedK) packed_rows(p.cu_seqlens_k, batch, p.total_k, p.sk, n.k_start, n.sk);
  if (kSeqUsedQ) n.sq = used_rows(p.seqused_q, batch, n.sq);
  if (kSeqUsedK) n.sk = used_rows(p.seqused_k, batch, n.sk);
  return n;
}

// Any key of any tile may be hidden by its score.
enum : int { kScoresHide = kBias || kScoreMod || kMaskMod };
// Whether keys that exist may be hidden from some rows.
enum : int { kHidesKeys = kHasLeft || kHasRight || kTree || kScoresHide };

__device__ __forceinline__ Band band_of(const CallParams& p) {
  return {bool(kHasLeft), bool(kHasRight), p.window_left, p.window_right, kHasChunk ? p.chunk : 0, bool(kTopLeft),
          kPart ? p.part.shift : 0, kPart ? p.part.key : 0};
}

// Rows of q of a sequence, including those beyond seqused_q.
__device__ __forceinline__ int query_rows(const CallParams& p, int batch) {
  int start = 0;
  int count = p.sq;
  if (kPacked) packed_rows(p.cu_seqlens_q, batch, p.total_q, p.sq, start, count);
  return count;
}

// Rows of k of a sequence, including those beyond seqused_k.
__device__ __forceinline__ int key_rows(const CallParams& p, int batch) {
  int start = 0;
  int count = p.sk;
  if (kPackedK) packed_rows(p.cu_seqlens_k, batch, p.total_k, p.sk, start, count);
  return count;
}

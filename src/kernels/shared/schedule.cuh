// The lengths and the band of a call, from the arguments of a kernel.
#pragma once
#include "plan.h"
#include "shared/attention_params.h"
#include "shared/memory.cuh"
#include "shared/key_walk.h"

// Where packed sequence `batch` starts, inside the `total` rows, and how many of at most `longest` rows it has.
__device__ __forceinline__ void packed_rows(const int* cu_seqlens, int batch, int total, int longest, int& start,
                                            int& count) {
  start = min(max(cu_seqlens[batch], 0), total);
  count = min(max(min(cu_seqlens[batch + 1], total) - start, 0), longest);
}

// The one place that reads lengths on the device, where nobody has checked them: whatever they say, no access leaves
// the tensors, and no sequence is longer than the plan was told.
__device__ __forceinline__ Lengths lengths_of(const CallParams& p, int batch) {
  Lengths n = {0, 0, p.sq, p.sk};
  if (kPacked) packed_rows(p.cu_seqlens_q, batch, p.total_q, p.sq, n.q_start, n.sq);
  if (kPackedK) packed_rows(p.cu_seqlens_k, batch, p.total_k, p.sk, n.k_start, n.sk);
  if (kSeqUsedK) n.sk = min(n.sk, max(p.seqused_k[batch], 0));
  return n;
}

__device__ __forceinline__ Band band_of(const CallParams& p) {
  return {bool(kHasLeft), bool(kHasRight), p.window_left, p.window_right, kHasChunk ? p.chunk : 0};
}

// Rows of k that a sequence has, beyond seqused_k too.
__device__ __forceinline__ int key_rows(const CallParams& p, int batch) {
  int start = 0;
  int count = p.sk;
  if (kPackedK) packed_rows(p.cu_seqlens_k, batch, p.total_k, p.sk, start, count);
  return count;
}

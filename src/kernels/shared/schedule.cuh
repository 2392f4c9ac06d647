// The lengths, band and items of a call, from the arguments of a kernel.
#pragma once
#include "plan.h"
#include "shared/attention_params.h"
#include "shared/memory.cuh"
#include "shared/key_walk.h"

__device__ __forceinline__ Lengths lengths_of(const AttentionParams& p, int batch) {
  Lengths n = {0, 0, p.sq, p.sk};
  if (kPacked) {
    n.q_start = p.cu_seqlens_q[batch];
    n.k_start = p.cu_seqlens_k[batch];
    n.sq = p.cu_seqlens_q[batch + 1] - n.q_start;
    n.sk = p.cu_seqlens_k[batch + 1] - n.k_start;
  }
  if (kSeqUsedK) n.sk = min(n.sk, p.seqused_k[batch]);
  return n;
}

__device__ __forceinline__ Band band_of(const AttentionParams& p) {
  return {bool(kHasLeft), bool(kHasRight), p.window_left, p.window_right};
}

__device__ __forceinline__ Item item_of(const AttentionParams& p, int number) {
  return item_of(p.work, p.hq, kSplitTail, band_of(p), number);
}

// What of a view the end of an item needs, from shared memory.
__device__ __forceinline__ Place load_place(u32 view) {
  return load_shared_struct_uniform<Place>(view + sizeof(KeyWalk));
}

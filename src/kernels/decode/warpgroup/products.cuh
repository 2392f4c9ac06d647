// The products of a tile of keys by wgmma, which are issued and then waited for.
#pragma once
#include "decode/cta.cuh"
#include "sm90/ptx/descriptor.cuh"

// Issues S = Q K^T.
__device__ __forceinline__ void issue_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
  const u32 Q = uniform_descriptor(q, 0);
  const u32 K = uniform_descriptor(k, 0);
#pragma unroll
  for (int step = 0; step < kHeadDim / ElementK::kStep; ++step) {
    const int inside = step % kPanelSteps * kStepBytes;
    Wgmma<kBlockKeys, ElementK::kType>::multiply<kAlongK, kAlongK>(
        S, Q + ((step / kPanelSteps * kQPanelBytes + inside) >> 4),
        K + ((step / kPanelSteps * kPanelBytes + inside) >> 4), step != 0);
  }
  wgmma_commit();
}

// Issues O += P V.
__device__ __forceinline__ void issue_values(float (&O)[kWarpColumns / 2], const u32 (&P)[kBlockKeys / 4], u32 v) {
  const u32 V = uniform_descriptor(v, kPanelBytes);
#pragma unroll
  for (int step = 0; step < kBlockKeys / ElementV::kStep; ++step)
    Wgmma<kWarpColumns, ElementV::kType>::multiply<kAcrossK>(O, P + 4 * step,
                                                          V + (step * ElementV::kStep * kPanelRowBytes >> 4), 1);
  wgmma_commit();
}

// The two products of a key tile, which are issued and then waited for.
#pragma once
#include "attention/bias_products.cuh"
#include "attention/softmax.cuh"
#include "sm90/forward/layout.cuh"
#include "sm90/ptx/wgmma.cuh"

// S = Q K^T, or S += Q K^T where it begins with the bias.
__device__ __forceinline__ void issue_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / ElementK::kStep; ++step) {
    const int panel = step / kPanelSteps;
    const int inside = step % kPanelSteps * kStepBytes;
    Wgmma<kBlockKeys, ElementK::kType>::multiply<kAlongK, kAlongK>(
        S, q + ((panel * kStripPanelBytes + inside) >> 4), k + ((panel * kPanelBytes + inside) >> 4), step != 0 || kBiasByProducts);
  }
  wgmma_commit();
}

// O += P V
__device__ __forceinline__ void issue_values(float (&O)[kValueDim / 2], const u32 (&P)[kPWords], u32 v) {
#pragma unroll
  for (int step = 0; step < kBlockKeys / ElementV::kStep; ++step)
    Wgmma<kValueDim, ElementV::kType>::multiply<kCentersV ? kInSteps : kAcrossK>(O, P + 4 * step,
                                                                                v + (step * kVStepBytes >> 4), 1);
  wgmma_commit();
}

// Waits until no product but the last `running` ones runs. X, the accumulators of the others, may then be read.
template <int running, class... Accumulators>
__device__ __forceinline__ void wait_for_products(Accumulators&... X) {
  wgmma_wait<running>();
  (register_fence(X), ...);
}

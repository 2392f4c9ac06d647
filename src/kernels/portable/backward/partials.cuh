// Partial dK and dV in f32 of the splits of kv heads, kSplits: [b, hk, splits][keys of whole key blocks][dim].
#pragma once
#include "backward/layout.cuh"

template <int dim>
__device__ __forceinline__ float* partial_row(const BackwardParams& p, float* partial, int batch, int head, int split,
                                              int key) {
  const long long split_of_all = ((long long)(batch) * (p.hq / p.group) + head) * p.splits + split;
  return partial + (split_of_all * (p.key_blocks.blocks * kBlockKeys) + key) * dim;
}

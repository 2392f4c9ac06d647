// dS = P o (dP - D), D = P . dP - dLSE, row by row in memory (FlashAttention, algorithm 3, line 3). A warp computes a
// row.
#include "papers/softmax_rows.cuh"

extern "C" __global__ void __launch_bounds__(32 * kCtaRows)
    fulgur_softmax_gradient(const __grid_constant__ SoftmaxParams p) {
  const RowOfWarp at(p);
  if (at.row >= p.rows) return;
  const Memory* const P = reinterpret_cast<const Memory*>(p.s + at.row * p.stride);
  Memory* const dP = static_cast<Memory*>(p.dp) + at.row * p.stride;
  float D = 0;
  for_each_chunk(p.sk, [&](int first) {
    if (first >= p.sk) return;
    const Chunk x = load_pack<kLaneElements>(P + first), y = load_pack<kLaneElements>(dP + first);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      if (first + i < p.sk) D += ElementQ::to_float(x.x[i]) * ElementQ::to_float(y.x[i]);
  });
  D = sum_of_warp(D);
  if (p.dlse != nullptr) D -= p.dlse[at.batch * p.dlse_batch_stride + at.head * p.dlse_head_stride + at.query];
  for_each_chunk(p.sk, [&](int first) {
    if (first >= p.sk) return;
    const Chunk x = load_pack<kLaneElements>(P + first), y = load_pack<kLaneElements>(dP + first);
    Chunk dS;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      dS.x[i] = from_f32<ElementQ::kType>(ElementQ::to_float(x.x[i]) * (ElementQ::to_float(y.x[i]) - D));
    store_pack(dP + first, dS);
  });
}

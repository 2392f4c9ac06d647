// P = softmax(S) row by row in memory, and LSE (FlashAttention, algorithm 0, line 2). A warp computes a row.
#include "papers/softmax_rows.cuh"

extern "C" __global__ void __launch_bounds__(32 * kCtaRows) fulgur_softmax(const __grid_constant__ SoftmaxParams p) {
  constexpr float kLog2e = 1.44269504f;
  const RowOfWarp at(p);
  if (at.row >= p.rows) return;
  const float* const S = p.s + at.row * p.stride;
  float m = -infinity();
  for_each_chunk(p.sk, [&](int first) {
    if (first >= p.sk) return;
    const Scores s = load_pack<kLaneElements>(S + first);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      if (first + i < p.sk) m = fmaxf(m, s.x[i]);
  });
  m = max_of_warp(m);
  const float shift = m == -infinity() ? 0 : m;
  const auto exponential = [&](float s) { return exp2_fast((s - shift) * kLog2e); };
  float l = 0;
  for_each_chunk(p.sk, [&](int first) {
    if (first >= p.sk) return;
    const Scores s = load_pack<kLaneElements>(S + first);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i)
      if (first + i < p.sk) l += exponential(s.x[i]);
  });
  l = sum_of_warp(l);
  const float scale = l == 0 ? 0 : 1 / l;
  Memory* const P = reinterpret_cast<Memory*>(p.s + at.row * p.stride);
  for_each_chunk(p.sk, [&](int first) {
    Scores s = {};
    if (first < p.sk) s = load_pack<kLaneElements>(S + first);
    __syncwarp();  // all lanes have read the chunks of S that P replaces
    Chunk chunk;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) chunk.x[i] = from_f32<ElementQ::kType>(exponential(s.x[i]) * scale);
    if (first < p.sk) store_pack(P + first, chunk);
  });
  if (p.lse != nullptr && threadIdx.x % 32 == 0)
    p.lse[at.batch * p.lse_batch_stride + at.head * p.lse_head_stride + at.query] =
        l == 0 ? -infinity() : m + log2_fast(l) * 0.693147180559945f;
}

// The gradient of a dense bias on every GPU since Turing: dbias = dS, with P = exp(S - LSE) and dS = P o (dO V^T - D)
// computed again, and summed where scores share an element of the bias (backward/bias_sums.cuh). prepare.cu has
// computed LSE and D of each row.
//
// A CTA computes tiles of dbias of 64 queries x 64 keys, whose sums stay in registers.
#include "portable/backward/score_tiles.cuh"

// All warps of the CTA have sums of a tile.
struct AllWarps {
  static __device__ __forceinline__ u32 strip() { return 0; }
  static __device__ __forceinline__ int thread() { return threadIdx.x; }
  __device__ __forceinline__ void operator()() const { __syncthreads(); }
};

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kThreads)
    fulgur_portable_bias_gradient(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (kDropout && threadIdx.x == 0) store_dropout_key(p, smem + kLayout.dropout_key);
  for (TileIterator it(p); it.more();) {
    float sums[kBlockKeys / 2] = {};
#pragma unroll 1
    for (; it.key_tile < it.key_end; ++it.key_tile) {
      const int first_key = it.key_tile * kBlockKeys;
      it.for_each_score_tile([&](int batch, int head, int row, const Lengths& n) {
        float X[kBlockKeys / 2];
        add_score_tile(p, smem, sums, X, batch, head, row, first_key, n);
      });
      if (!p.bias_sums.of_keys && it.key_tile + 1 < it.key_end) continue;  // the next key tile adds to the same sum
      store_sums<kThreads / 32>(p, it, it.key_tile, sums, smem + kLayout.scratch, AllWarps{});
#pragma unroll
      for (int i = 0; i < kBlockKeys / 2; ++i) sums[i] = 0;
    }
  }
}

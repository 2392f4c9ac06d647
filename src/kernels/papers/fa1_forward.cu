// FlashAttention (2022), algorithm 2, by mma.sync: key blocks in the outer loop, row blocks in the inner one. O is kept
// normalized; O, l and m are loaded from memory and stored again for every key block.
//
// A CTA computes a head or, where there are too few heads to fill the GPU, a slice of its row blocks. The first release
// of FlashAttention divides the work likewise. K and V of a key block stay in shared memory while the CTA iterates over
// the row blocks that see it; Q of the next row block is loaded while the current one is computed. A row block has 64
// rows, 16 for each warp.
#include "attention/mask.cuh"
#include "attention/repair.cuh"
#include "attention/softmax.cuh"
#include "papers/fa1_params.h"
#include "portable/forward/products.cuh"

static_assert(kStrips == 1 && kWarpStrips == 1 && kStages == 1 && !kQInRegisters && kScoreMode == 0);

// O, l and m of a row block in memory: the elements that this thread holds, of two rows. The four threads of a quad
// hold the same l and m.
class State {
 public:
  __device__ __forceinline__ State(const Fa1Params& p, int batch_head, int row_tile) {
    const long long tile = (long long)(batch_head) * p.row_tiles + row_tile;
    o_ = p.o_rows + (tile * (kValueDim / 8) * kThreads + threadIdx.x) * 4;
    rows_ = p.statistics + (tile * kStripRows + warp_row() + thread_row()) * 2;
  }
  __device__ __forceinline__ void load(float (&O)[kValueDim / 2], Rows& rows) const {
#pragma unroll
    for (int i = 0; i < kValueDim / 8; ++i) {
      const float4 x = *reinterpret_cast<const float4*>(o_ + i * kThreads * 4);
      O[4 * i] = x.x;
      O[4 * i + 1] = x.y;
      O[4 * i + 2] = x.z;
      O[4 * i + 3] = x.w;
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.shift[i] = rows_[16 * i];
      rows.sum[i] = rows_[16 * i + 1];
    }
  }
  __device__ __forceinline__ void store(const float (&O)[kValueDim / 2], const Rows& rows) const {
#pragma unroll
    for (int i = 0; i < kValueDim / 8; ++i)
      *reinterpret_cast<float4*>(o_ + i * kThreads * 4) = {O[4 * i], O[4 * i + 1], O[4 * i + 2], O[4 * i + 3]};
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) *reinterpret_cast<float2*>(rows_ + 16 * i) = {rows.shift[i], rows.sum[i]};
  }

 private:
  float *o_, *rows_;
};

// Starts the loads of the rows of K or V of a key block. Rows after the last key become zeros.
template <class Type, int columns>
__device__ __forceinline__ void start_keys(u32 to, const StridedTensor& t, int dim, int batch, int head, int key,
                                           int count) {
  copy_rows<Type, kThreads, kBlockKeys, columns, false>(to, t.data, dim, [&](int i) {
    return key + i < count ? row_of<Type>(t, batch, key + i, head) : nullptr;
  });
}

// Algorithm 2, lines 10 to 15, for a row block and a key block: updates O, l and m of the previous key blocks.
__device__ __forceinline__ void attend(const Fa1Params& p, const Lengths& n, const Queries& q, u32 k, int row,
                                       int key_tile, float (&O)[1][kValueDim / 2], Rows& rows) {
  float S[1][kBlockKeys / 2];
  u32 P[1][kBlockKeys / 4];
  multiply_scores(S, q, k);
  const KeyTiles full = full_tiles_of_strip(p, n, row);
  if (key_tile < full.begin || key_tile >= full.end)
    hide_keys<true>(S[0], visible_keys_of_strip(p, n.sk, diagonal_of(band_of(p), n, row)),
                    key_tile * kBlockKeys + int(thread_column()));
  float max0 = S[0][0];
  float max1 = S[0][2];
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 4) {
    max0 = fmaxf(max0, fmaxf(S[0][i], S[0][i + 1]));
    max1 = fmaxf(max1, fmaxf(S[0][i + 2], S[0][i + 3]));
  }
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) O[0][i] *= rows.sum[i >> 1 & 1];  // O is normalized in memory
  const float c = score_factor(p);
  rescale<false>(O[0], rows, max0, max1, c);
  float sum0, sum1;
  exponentials<true>(S[0], P[0], c, rows.shift[0] == infinity() ? 0 : rows.shift[0],
                     rows.shift[1] == infinity() ? 0 : rows.shift[1], sum0, sum1);
  rows.sum[0] += quad_sum(sum0);
  rows.sum[1] += quad_sum(sum1);
  multiply_values(O, P, k + kLayout.k_bytes);
  const float scale[2] = {normalizer(rows.sum[0]), normalizer(rows.sum[1])};
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) O[0][i] *= scale[i >> 1 & 1];
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kThreads, kResidents)
    fulgur_fa1_forward(const __grid_constant__ Fa1Params p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  const u32 k = smem + kLayout.stages;
  const int batch_head = int(blockIdx.x) / p.slices;
  const QTile at = {0, batch_head % p.hq, batch_head / p.hq, -1};
  const Lengths n = lengths_of(p, at.batch);
  const int first = int(blockIdx.x) % p.slices * p.slice_tiles;
  const RowTiles mine = {first, min(first + p.slice_tiles, (n.sq + kStripRows - 1) / kStripRows)};
  const auto start_rows = [&](int tile) {
    start_q(p, smem + tile % 2 * fa1_second_q(kLayout), at, n, [&](int) { return tile * kStripRows; });
  };
  float O[1][kValueDim / 2];
  Rows rows;

#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) O[0][i] = 0;
  for (int tile = mine.begin; tile < mine.end; ++tile)
    State(p, batch_head, tile).store(O[0], rows_without_keys());  // line 3

#pragma unroll 1
  for (int key_tile = 0; key_tile * kBlockKeys < n.sk; ++key_tile) {  // line 6
    const int key = key_tile * kBlockKeys;
    const RowTiles seeing = row_tiles(band_of(p), n, kStripRows, key, kBlockKeys);
    const int end = min(mine.end, seeing.end);
    int tile = max(mine.begin, seeing.begin);
    if (tile >= end) continue;
    __syncthreads();  // all warps have read the previous key block
    start_keys<ElementK, kHeadDim>(k, p.k, p.d, at.batch, at.head / p.group, key, n.sk);  // line 7
    start_keys<ElementV, kValueDim>(k + kLayout.k_bytes, p.v, p.dv, at.batch, at.head / p.group, key, n.sk);
    start_rows(tile);
#pragma unroll 1
    for (; tile < end; ++tile) {  // line 8
      async_copy_wait<0>();
      __syncthreads();
      if (tile + 1 < end) start_rows(tile + 1);
      const State state(p, batch_head, tile);
      state.load(O[0], rows);  // line 9
      const Queries q(smem + tile % 2 * fa1_second_q(kLayout), 0);
      attend(p, n, q, k, tile * kStripRows, key_tile, O, rows);
      state.store(O[0], rows);  // lines 15, 16
    }
  }

  __syncthreads();
#pragma unroll 1
  for (int tile = mine.begin; tile < mine.end; ++tile) {  // line 19
    State(p, batch_head, tile).load(O[0], rows);
    const Place place = {tile * kStripRows, at.head, at.batch, -1};
    const int row = place.row + int(warp_row());
    if (row >= n.sq) continue;
    Finite<ElementO> finite;
    store_global_rows(p, place, n, row, O[0], 1, 1, finite);
    if (kHasLse) store_global_lse(p, place, n, row + int(thread_row()), rows);
    if (kHidesKeys && __any_sync(0xffffffff, finite.trace != 0))
      repair_rows(p, place, n, row, {0, (n.sk + kBlockKeys - 1) / kBlockKeys}, rows);
  }
}

// Attention forward where K and V are read from memory for few rows of Q, or from a cache: O = softmax(scale Q K^T) V
// and LSE, exact, fp32 accumulation. The warp path: up to 32 rows of a kv head, by mma.sync and cp.async.
//
// Rows are (query, head of the group) of a kv head, so that K and V are read once for all of them. The schedule
// (decode/schedule/) decides which work tiles a CTA computes. Its warp groups, of one or two warps of 16 rows, take the
// tiles of a work tile in turn, each with its own state of the online softmax. Every warp loads for its warp group,
// ahead of its products and over the ends of work tiles, so that memory never waits for products, barriers and
// combines. docs/kernels/decode.md derives this; decode/decode_warpgroup.cu is the path of more rows.
#include "attention/products_f32.cuh"
#include "decode/combine.cuh"
#include "decode/decode_warp.cuh"
#include "decode/non_finite.cuh"

static_assert(!kCodesK && !kCodesV && !Schedule::kCombineKernel);

// S = Q K^T. Q of the warp lies at `q`, the tile of K at `k`.
__device__ __forceinline__ void multiply_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
  const u32 lane = threadIdx.x % 32;
  const auto load_query = [&](int step, u32 (&a)[4]) {
    load_shared_matrices(q + step / 4 * kQPanelBytes + swizzled(lane % 16, step % 4 * 2 + lane / 16), a);
  };
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) S[i] = 0;
  if constexpr (ElementK::kType == kF32) {
    return add_products_of_rows<kHeadDim>(
        one_tile(S), [&](int, int step, u32 (&a)[4]) { load_query(step, a); }, k, kPanelBytes);
  }
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    u32 a[4];
    load_query(step, a);
#pragma unroll
    for (int keys = 0; keys < kBlockKeys; keys += 16) {
      u32 b[4];
      const u32 row = keys + lane % 8 + lane / 16 * 8;
      load_shared_matrices(k + step / 4 * kPanelBytes + swizzled(row, step % 4 * 2 + lane / 8 % 2), b);
      multiply_16_8_16<ElementK::kType>(S + keys / 2, a, b[0], b[1]);
      multiply_16_8_16<ElementK::kType>(S + keys / 2 + 4, a, b[2], b[3]);
    }
  }
}

// O += P V of the tile at `v`.
__device__ __forceinline__ void multiply_values(float (&O)[kValueDim / 2], const u32 (&P)[kPWords], u32 v) {
  if constexpr (ElementV::kType == kF32) return add_products_of_columns(one_tile(O), one_tile(P), v, kPanelBytes);
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int keys = 0; keys < kBlockKeys; keys += 16)
#pragma unroll
    for (int column = 0; column < kValueDim; column += 16) {
      u32 b[4];
      load_shared_matrices_transposed(
          v + column / 64 * kPanelBytes + swizzled(keys + lane % 16, column % 64 / 8 + lane / 16), b);
      multiply_16_8_16<ElementV::kType>(O + column / 2, P + keys / 4, b[0], b[1]);
      multiply_16_8_16<ElementV::kType>(O + column / 2 + 4, P + keys / 4, b[2], b[3]);
    }
}

__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, Queries& queries,
                                        TileRing& ring) {
  const int warp = uniform(threadIdx.x / 32);
  const int warp_group = warp / kWarpsPerGroup, warp_in_group = warp % kWarpsPerGroup;
  const auto sync = [&] { sync_warp_group(warp_group); };
  const float c = score_factor(p);
  const u32 q = query_of_warp(warp_in_group);
  const SavedWorkTiles saved(warp);
  bool more = true;
#pragma unroll 1
  while (more) {
    const WorkTile& tile = work_tiles.tile;
    saved.save(work_tiles);
    if (tile.has_keys()) queries.begin_work_tile(p, tile);
    const bool has_rows = warp_in_group * kWarpRows < rows_of_tile(p, tile).count;
    const TileMask mask(p, tile, warp_in_group);
    float O[kValueDim / 2];
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;
    Rows rows = rows_without_keys();
#pragma unroll 1
    for (int key_tile = tile.begin + warp_group; key_tile < tile.end; key_tile += kWarpGroups) {
      float S[kBlockKeys / 2];
      u32 P[kPWords];
      const u32 k = ring.keys(sync);
      const bool masked = mask.cuts(key_tile);
      HiddenScores<ByRows> hidden;
      if (has_rows) {
        multiply_scores(S, q, k);
        hidden = adjust_scores<ByRows>(p, S, mask.rows, key_tile, masked);
        softmax_step<false>(S, P, O, rows, c);
      }
      if (kHidesKeys && masked)
        add_hidden_non_finite(p, O, mask, hidden, key_tile, ValueTile{ring.values()}, saved, sync);
      if (has_rows) multiply_values(O, P, ring.values());
      ring.advance();
    }
    work_tiles = saved.load();
    rows.sum[0] = quad_sum(rows.sum[0]);
    rows.sum[1] = quad_sum(rows.sum[1]);
    if constexpr (kWarpGroups > 1) {
      combine_warp_groups(p, tile, WarpResult{rows, O});
    } else {
      store_warp_group(p, tile, rows, O);
      sync_compute_warps();  // all have read Q, in whose place the next one is stored
    }
    more = end_work_tile(p, work_tiles);
    if (more) queries.prefetch(p, tile);
  }
}

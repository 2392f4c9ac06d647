// The warp path (decode/decode_warp.cu) where K or V are codes. Its products are transposed, S^T = K Q^T and
// O^T += V^T P^T, so that eight rows of Q fill them, and a warp converts each code once for all of its rows.
// docs/kernels/decode.md derives this.
#include "decode/codes/key_products.cuh"
#include "decode/codes/mask.cuh"
#include "decode/codes/non_finite.cuh"
#include "decode/codes/output.cuh"
#include "decode/codes/value_products.cuh"
#include "decode/combine.cuh"
#include "decode/decode_warp.cuh"

static_assert(kCodesK || kCodesV);

__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, Queries& queries,
                                        TileRing& ring) {
  const int warp = uniform(threadIdx.x / 32);
  const int warp_group = warp / kWarpsPerGroup, warp_in_group = warp % kWarpsPerGroup;
  const auto sync = [&] { sync_warp_group(warp_group); };
  const float c = score_factor(p);
  const u32 q = query_of_warp(warp_in_group);
  const SavedWorkTiles saved(warp);
  constexpr bool kSkips = kHeads > 1;  // tiles of other warp groups, which are in the same ring
  constexpr int kStep = kSkips ? 1 : int(kWarpGroups);
  bool more = true;
#pragma unroll 1
  while (more) {
    const WorkTile& tile = work_tiles.tile;
    saved.save(work_tiles);
    if (tile.has_keys()) queries.begin_work_tile(p, tile);
    const bool has_rows = kHeads > 1 || warp_in_group * kWarpRows < rows_of_tile(p, tile).count;
    const TransposedMask mask(p, tile, warp_in_group);
    const u32 k_begin = BlockRows<kOfK>::begin(p, tile), v_begin = BlockRows<kOfV>::begin(p, tile);
    KeyProducts products(p, tile, warp_in_group, q);
    float O[kRowTiles][kOutputs];
    SoftmaxRows rows;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      rows.tiles[i] = rows_without_keys();
#pragma unroll
      for (int j = 0; j < kOutputs; ++j) O[i][j] = 0;
#pragma unroll
      for (int j = 0; j < 4 * kOffsets; ++j) rows.offsets[j / 4][i][j % 4] = 0;
    }
#pragma unroll 1
    for (int key_tile = tile.begin + (kSkips ? 0 : warp_group); key_tile < tile.end; key_tile += kStep) {
      if (kSkips && !ring.is_of(warp_group)) {
        ring.skip();
        continue;
      }
      float S[kRowTiles][kScores], P[kRowTiles][kScores];
      HiddenScores<Transposed> hidden[kRowTiles];
      const u32 k = ring.keys(sync), v = ring.values();
      const u32 k_scales = scales_in_rows(kOfK) ? k + k_begin : ring.scales();
      const u32 v_scales = scales_in_rows(kOfV) ? v + v_begin : ring.scales();
      const bool masked = mask.cuts(key_tile);
      if (kHeads == 1 && kBoxKeys > 0 && masked) clear_tail(v, saved.keys() - key_tile * kBlockKeys, sync);
      if (kHeads > 1) {
        products.multiply(S, k, k_scales);
        ring.release_keys();
        ring.wait_values();
        if (masked) clear_tail(v + v_begin, saved.keys() - key_tile * kBlockKeys, sync);
      }
      if (has_rows) {
        if (kHeads == 1) products.multiply(S, k, k_scales);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
          hidden[i] = adjust_scores<Transposed>(p, S[i], mask.tiles[i], key_tile, masked);
        softmax_step(P, S, O, rows, c, v_scales);
      }
      if (kHidesKeys && masked)
        add_hidden_non_finite(p, O, mask, hidden, key_tile, {v, v_scales}, saved, sync);
      if (has_rows) multiply_values(O, rows, P, v, v_scales);
      ring.advance();
    }
    work_tiles = saved.load();
    finish(p, tile, O, rows, int(v_begin / 2));
    combine_warp_groups(p, tile, TransposedResult{rows, O, int(v_begin / 2)});
    more = end_work_tile(p, work_tiles);
    if (more) queries.prefetch(p, tile);
  }
}

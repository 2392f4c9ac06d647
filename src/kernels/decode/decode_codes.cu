// The warp path (decode/decode_warp.cu) where K or V are codes. Its products are transposed, so that eight rows of Q
// fill them and each code becomes a number once for all rows of a warp. docs/kernels/decode.md derives this.
#include "decode/decode_codes.cuh"
#include "decode/combine.cuh"
#include "decode/decode_warp.cuh"

static_assert(kCodesK || kCodesV);

__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, Queries& queries,
                                        TileRing& ring) {
  const int warp = uniform(threadIdx.x / 32);
  const int warp_group = warp / kWarpsPerGroup;
  const int warp_of_group = warp % kWarpsPerGroup;
  const auto sync = [&] { sync_warp_group(warp_group); };
  const float c = score_factor(p);
  const u32 q = u32(__cvta_generic_to_shared(raw)) + kLayout.q + warp_of_group * kRowsOfWarp * 128;
  const SavedWorkTiles saved(warp);
  constexpr bool kSkips = kHeads > 1;  // tiles of the other warp groups, in the same ring
  constexpr int kStep = kSkips ? 1 : int(kWarpGroups);
  bool more = true;
#pragma unroll 1
  while (more) {
    const WorkTile& tile = work_tiles.tile;
    saved.save(work_tiles);
    if (tile.has_keys()) queries.begin_work_tile(p, tile);
    const bool has_rows = kHeads > 1 || warp_of_group * kWarpRows < rows_of_tile(p, tile).count;
    const TransposedRows of_thread(p, tile, warp_of_group);
    const u32 k_begin = BlockRows<kOfK>::begin(p, tile), v_begin = BlockRows<kOfV>::begin(p, tile);
    KeyProducts products(p, tile, warp_of_group, q);
    float O[kRowTiles][kOutputs];
    SoftmaxRows rows;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      rows.of[i] = rows_without_keys();
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
      const bool masked = of_thread.cuts(key_tile);
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
          hidden[i] = adjust_scores<Transposed>(p, S[i], of_thread.of[i], key_tile, masked);
        softmax_step(P, S, O, rows, c, v_scales);
      }
      if (kHidesKeys && masked)
        add_hidden_non_finite(p, O, of_thread, hidden, key_tile, {v, v_scales}, saved, sync);
      if (has_rows) multiply_values(O, rows, P, v, v_scales);
      ring.advance();
    }
    work_tiles = saved.load();
    finish(p, tile, O, rows, int(v_begin / 2));
    combine_warp_groups(p, tile, TransposedResult{rows, O, int(v_begin / 2)});
    if constexpr (!Schedule::kCombineKernel)
      if (tile.splits > 1) end_split<Schedule>(p, tile);
    more = work_tiles.next(p);
    if (more) queries.prefetch(p, tile);
  }
}

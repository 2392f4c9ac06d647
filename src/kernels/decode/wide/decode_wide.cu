// Attention forward of wide heads, d and dv above 256, for any number of rows: the wide path. As decode/decode_warp.cu,
// whose warps hold whole rows of O, but for the sharing of rows by several warps, each with some columns of O
// (decode/wide/tile.cuh). docs/kernels/decode.md derives this.
#include "decode/combine.cuh"
#include "decode/wide/chunk_ring.cuh"
#include "decode/wide/non_finite.cuh"
#include "decode/wide/output.cuh"
#include "decode/wide/products.cuh"
#include "decode/wide/query_block.cuh"

static_assert(!kCodesK && !kCodesV && !kAppends);

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  WorkTiles work_tiles;
  if (!work_tiles.first(p)) return;
  const WideWarp warp;
  const SavedWorkTiles saved(uniform(threadIdx.x / 32));
  const float c = score_factor(p);
  ChunkRing ring(p, work_tiles);
  bool more = true;
#pragma unroll 1
  while (more) {
    const WorkTile& tile = work_tiles.tile;
    ring.look_ahead(work_tiles);
    saved.save(work_tiles);
    if (tile.has_keys()) load_queries(p, tile);
    const bool has_rows = warp.first_row < rows_of_tile(p, tile).count;
    const WorkTileMask mask(p, tile);
    ThreadRows rows[kWarpStrips];
    WideOutput O;
    WideSoftmax softmax(warp);
#pragma unroll
    for (int strip = 0; strip < kWarpStrips; ++strip) {
      rows[strip] = rows_of_thread(p, tile, warp.first_row + strip * kWarpRows + int(thread_row()), 8);
#pragma unroll
      for (int i = 0; i < kShareColumns / 2; ++i) O[strip][i] = 0;
    }
#pragma unroll 1
    for (int key_tile = tile.begin; key_tile < tile.end; ++key_tile) {
      WideScores S;
#pragma unroll
      for (int strip = 0; strip < kWarpStrips; ++strip)
#pragma unroll
        for (int i = 0; i < kWarpKeys / 2; ++i) S[strip][i] = 0;
#pragma unroll 1
      for (int chunk = 0; chunk < kKChunks; ++chunk) {
        const u32 k = ring.next();
        if (has_rows) multiply_scores(S, warp, k, chunk);
        ring.start();
      }
      const bool masked = mask.cuts(key_tile);
#pragma unroll
      for (int strip = 0; strip < kWarpStrips; ++strip)
        adjust_scores_from<ByRows>(p, S[strip], rows[strip], key_tile * kBlockKeys + warp.first_key(), masked);
      if (__syncthreads_or(softmax.store_probabilities(S, c))) softmax.move_maxima(S, O, c);
      else softmax.settle();
#pragma unroll 1
      for (int chunk = 0; chunk < kVChunks; ++chunk) {
        const u32 v = ring.next();
        const int key = chunk * kVChunkKeys;
        if (kHidesKeys && masked)
          keep_hidden_non_finite(p, O, warp, mask, rows, v, key_tile * kBlockKeys + key, key, saved.keys());
        if (has_rows) multiply_values(O, warp, v, chunk);
        ring.start();
      }
    }
    work_tiles = saved.load();
    if (tile.has_keys()) softmax.add_up();
    if (has_rows) store_work_tile(p, tile, warp, softmax, O);
    more = end_work_tile(p, work_tiles);
  }
}

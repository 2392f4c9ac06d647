// Attention forward for every GPU since Turing: O = softmax(scale Q K^T) V and LSE, exact, fp32 accumulation, by
// mma.sync, ldmatrix and cp.async (FlashAttention-2, algorithm 1).
//
// A CTA computes a q tile: Br = 64 * kStrips rows of Q of one head, in strips of 64. It iterates over their keys from
// right to left in tiles of Bc. A warp has 16 rows of each of its strips, whose S, P and O never leave its registers; K
// and V are loaded to shared memory for all warps. docs/kernels/portable.md derives the tiles.
#include "attention/mask.cuh"
#include "attention/repair.cuh"
#include "attention/seen_tiles.cuh"
#include "attention/softmax.cuh"
#include "portable/forward/products.cuh"

// A strip of a q tile.
struct QStrip {
  int row;         // the first one; n.sq if the strip is empty
  KeyTiles tiles;  // of which some row sees some key
  KeyTiles full;   // of which all rows see all keys
};

__device__ __forceinline__ QStrip strip_at(const PortableForwardParams& p, const Lengths& n, int row) {
  return {row, key_tiles(band_of(p), n, kBlockKeys, row, min(row + kStripRows, n.sq) - 1),
          full_tiles_of_strip(p, n, row)};
}

// Iterates over the key tiles of a q tile from right to left: over all of them, or over those that the map shows.
template <bool maps>
struct TileWalk : KeyWalk {
  __device__ __forceinline__ TileWalk(const PortableForwardParams&, const QTile&, const KeyTiles& tiles)
      : KeyWalk(walk_of_tiles(tiles)) {}
  __device__ __forceinline__ bool mask_hides() const { return false; }
};
template <>
struct TileWalk<true> : SeenTiles<> {
  template <class Params>
  __device__ __forceinline__ TileWalk(const Params& p, const QTile& of, const KeyTiles& tiles)
      : SeenTiles<>(walk_of_block(p.expression.map, of.batch, of.head, of.block, tiles.begin, tiles.end,
                                  /*down=*/true)) {}
  __device__ __forceinline__ bool mask_hides() const { return is_partial(); }
};

// Makes scores of the products of a strip and a key tile: softcap, ALiBi, bias, and -inf where the mask hides a key.
__device__ __forceinline__ void adjust_scores(const PortableForwardParams& p, float (&S)[kBlockKeys / 2],
                                              const ScoreHead& head, const QStrip& strip, const Lengths& n, int batch,
                                              int tile, bool masked) {
  const int key = tile * kBlockKeys + int(thread_column());
  // Otherwise the compiler divides before the loop and keeps the quotient in a register, though none is free.
  int first_row = strip.row;
  if constexpr (kHasChunk) {
    u32 now[1] = {u32(first_row)};
    register_fence(now);
    first_row = int(now[0]);
  }
  const int row = first_row + int(warp_row() + thread_row());
  const ScoreContext at = score_context(head, row, diagonal_of(band_of(p), n, row), key);
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    const ScoreContext entry = at.moved(i & 2 ? 8 : 0, i / 4 * 8 + (i & 1));
    // Rows after the end of a sequence have the bias of its last row, because the lazy rescale is decided by all rows
    // of a warp.
    S[i] = score<!kMapsTiles>(p, entry, S[i], bias_up_to(p, entry, n.sq - 1));
  }
  if (!masked) return;
  if constexpr (kMapsTiles) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i)
      if (mask_mod_hides(p, at.moved(i & 2 ? 8 : 0, i / 4 * 8 + (i & 1)))) S[i] = -infinity();
  }
  VisibleKeys visible = visible_keys_of_strip(p, n.sk, diagonal_of(band_of(p), n, first_row));
  if (kTree) {
    visible.tokens = n.sk - n.sq;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      visible.tree[i] = tree_word(p.tree_mask, p, n, batch, min(row + 8 * i, n.sq - 1));
  }
  hide_keys<true>(S, visible, key);
}

// O = O / sum, LSE = max + log(sum). `touched`: the key tiles whose products the strip has computed.
__device__ __forceinline__ void finish(const PortableForwardParams& p, const Place& place, const Lengths& n,
                                       const KeyTiles& touched, Rows& rows, const float (&O)[kValueDim / 2]) {
  const int row = place.row + int(warp_row());
  if (row >= n.sq) return;
  rows.sum[0] = quad_sum(rows.sum[0]);
  rows.sum[1] = quad_sum(rows.sum[1]);
  Finite<ElementO> finite;
  const float v_descale = value_descale(p, place.batch, place.head / p.group);
  store_global_rows(p, place, n, row, O, output_scale(p, place.head, rows.sum[0], rows.shift[0], v_descale),
                    output_scale(p, place.head, rows.sum[1], rows.shift[1], v_descale), finite);
  if (kHasLse) store_global_lse(p, place, n, row + int(thread_row()), rows);
  if (kHidesKeys && __any_sync(0xffffffff, finite.trace != 0)) repair_rows(p, place, n, row, touched, rows);
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kThreads, kResidents)
    fulgur_portable_forward(const __grid_constant__ PortableForwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  const QTile q_tile = q_tile_of(p.work, p.hq, /*splits=*/false, band_of(p), blockIdx.x);
  const Lengths n = lengths_of(p, q_tile.batch);
  const int first = first_strip(n.sq, kStrips, q_tile.block);
  const int end = first_strip(n.sq, kStrips, q_tile.block + 1);
  if (kStripRows * first >= n.sq) return;
  const auto strip_row = [&](int strip) { return first + strip < end ? kStripRows * (first + strip) : n.sq; };
  const KeyTiles tiles = key_tiles_of(p.work, band_of(p), n, kStrips, kBlockKeys, /*splits=*/false, q_tile);

  if (kDropout && threadIdx.x == 0) store_dropout_key(p, smem + kLayout.dropout_key);
  start_q(p, smem, q_tile, n, strip_row);
  TileWalk<kMapsTiles != 0> walk(p, q_tile, tiles);
  KeyValueTiles kv(p, smem, q_tile, n, walk);
  const int first_of_warp = kStrips == kWarpStrips ? 0 : uniform(threadIdx.x / 128) * kWarpStrips;
  Queries q(smem, first_of_warp);
  if (kKeptSteps > 0) {
    async_copy_wait<1>();
    __syncthreads();
    q.load();
  }

  const float c = score_factor(p);
  const ScoreHead head = score_head(p, n, q_tile.batch, q_tile.head);
  QStrip strips[kWarpStrips];
  Rows rows[kWarpStrips];
  float O[kWarpStrips][kValueDim / 2];
#pragma unroll
  for (int s = 0; s < kWarpStrips; ++s) {
    strips[s] = strip_at(p, n, strip_row(first_of_warp + s));
    rows[s] = rows_without_keys();
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[s][i] = 0;
  }

#pragma unroll 1
  while (walk.more()) {
    const int tile = walk.tile;
    bool masked[kWarpStrips];
#pragma unroll
    for (int s = 0; s < kWarpStrips; ++s) {
      const KeyTiles& full = strips[kAllSteps && !kHidesKeys ? 0 : s].full;
      masked[s] = walk.mask_hides() || tile < full.begin || tile >= full.end;
    }
    walk.next();
    // With one strip per warp, a warp may see no key of a tile that other warps see.
    const bool sees = kWarpStrips > 1 || !kHidesKeys || (tile >= strips[0].tiles.begin && tile < strips[0].tiles.end);
    float S[kWarpStrips][kBlockKeys / 2];
    u32 P[kWarpStrips][kPWords];
    const u32 k = kv.keys(tile, walk);
    if (sees) multiply_scores(S, q, k);
    const u32 v = kv.values(k, walk);
    if (sees) {
#pragma unroll
      for (int s = 0; s < kWarpStrips; ++s) {
        adjust_scores(p, S[s], head, strips[s], n, q_tile.batch, tile, masked[s]);
        softmax_step<false>(S[s], P[s], O[s], rows[s], c);
        if (kDropout)
          kept_scores<kBlockKeys>(p, smem + kLayout.dropout_key, dropout_head(p, q_tile.batch, q_tile.head),
                                  strips[s].row + warp_row(), tile * kBlockKeys)
              .drop_words<ElementP>(P[s]);
      }
      multiply_values(O, P, v);
    }
  }

  if constexpr (kAllSteps != 0) {  // rows are computed again, because the loop has no registers to keep them
    u32 cta[1] = {blockIdx.x};
    register_fence(cta);
    const QTile done = q_tile_of(p.work, p.hq, /*splits=*/false, band_of(p), int(cta[0]));
    const Lengths of_done = lengths_of(p, done.batch);
    const int first_done = first_strip(of_done.sq, kStrips, done.block) + first_of_warp;
    const int end_done = first_strip(of_done.sq, kStrips, done.block + 1);
#pragma unroll
    for (int s = 0; s < kWarpStrips; ++s) {
      const int row = first_done + s < end_done ? kStripRows * (first_done + s) : of_done.sq;
      finish(p, {row, done.head, done.batch, -1}, of_done, tiles, rows[s], O[s]);
    }
  } else {
#pragma unroll
    for (int s = 0; s < kWarpStrips; ++s)
      finish(p, {strips[s].row, q_tile.head, q_tile.batch, -1}, n, tiles, rows[s], O[s]);
  }
}

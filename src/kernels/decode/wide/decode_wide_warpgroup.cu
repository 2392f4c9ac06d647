// Attention forward over wide heads, where O = softmax(scale Q K^T) V of 64 rows does not fit the registers of a
// warpgroup: d up to 576 and dv up to 512, as in absorbed multi-head latent attention (MLA), by wgmma and TMA. Exact,
// with LSE and fp32 accumulation.
//
// Rows are (query, head of the group) of a kv head, in blocks of 64. Two warpgroups share the rows and keys of a CTA;
// each has half of the columns of O. They take the tiles of keys in turn: one of them computes S and P of a tile, and
// passes P to the other one through shared memory, in the order in which its threads hold it, so that both multiply it
// with their columns of V, from registers. Warps pass it to each other in pairs, which have the same 16 rows. The shift
// of the softmax goes with P: the next tile begins with it, and O is rescaled where it has moved. Each warpgroup adds
// up the rows of its own P only.
//
// A tile arrives by panels of 64 columns, so that products with the first ones begin while the others are loaded. Where
// V is the first columns of K (DecodeParams::v_in_k), a tile of K is loaded once and serves as V. The schedule
// and what becomes of splits are those of the other decode kernels (decode_warpgroup.cu).
#include "decode/combine.cuh"
#include "decode/fragments.cuh"
#include "decode/wide/panel_ring.cuh"
#include "decode/non_finite.cuh"
#include "decode/warpgroup/products.cuh"
#include "decode/warpgroup/queries.cuh"

static_assert(kWarpgroupPath && kWarpGroups == 1 && kColumnGroups == 2 && kVStages == 0 && kWarpsPerGroup == 4);
static_assert(kWarpColumns % 64 == 0 && kBlockKeys <= 64);

enum : int {
  kWideLoadRegisters = 56,
  kWideComputeRegisters = (504 - kWideLoadRegisters) / 2,
};

// Computes S = Q K^T of the next tile, panel after panel as they arrive.
__device__ __forceinline__ void compute_scores(float (&S)[kBlockKeys / 2], u32 q, const PanelRing& tiles) {
  const u32 Q = uniform_descriptor(q, 0);
  const u32 K = uniform_descriptor(tiles.address(), 0);
#pragma unroll
  for (int step = 0; step < kHeadDim / ElementK::kStep; ++step) {
    const int panel = step / kPanelSteps, inside = step % kPanelSteps * kStepBytes;
    if (step % kPanelSteps == 0) {
      tiles.wait_full(panel);
      wgmma_fence();
    }
    Wgmma<kBlockKeys, ElementK::kType>::multiply<kAlongK, kAlongK>(
        S, Q + ((panel * kQPanelBytes + inside) >> 4), K + ((panel * kPanelBytes + inside) >> 4), step != 0);
  }
  wgmma_commit();
  wgmma_wait<0>();
  register_fence(S);
}

// The columns of a warpgroup in V of the next tile, which have arrived.
__device__ __forceinline__ u32 wait_for_values(const PanelRing& tiles, int warpgroup) {
  constexpr int kPanels = kWarpColumns / 64;
#pragma unroll
  for (int panel = 0; panel < kPanels; ++panel) tiles.wait_full(kPanels * warpgroup + panel);
  return tiles.address() + warpgroup * (kPanels * kPanelBytes);
}

// How a warp passes P of a tile to the warp of the other warpgroup that has the same rows.
class SharedP {
 public:
  __device__ __forceinline__ SharedP(int warpgroup, int warp_in_group)
      : warpgroup_(warpgroup),
        words_(shared_base() + kLayout.p + warp_in_group * (kPWords * 128) + threadIdx.x % 32 * 16),
        shifts_(shared_base() + kLayout.p_rows + (warp_in_group * kWarpRows + int(thread_row())) * 4),
        hidden_(shared_base() + kLayout.p_hidden + threadIdx.x % 128 * 4) {}

  // Passes P of this warpgroup's tile on. The warp has read P of the tile before.
  __device__ __forceinline__ void put(const u32 (&P)[kPWords], const Rows& rows,
                                      const HiddenScores<ByRows>& hidden) const {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPWords; i += 4) store_shared16(words_ + 128 * i, P + i);
    if (threadIdx.x % 4 == 0) {
      store_shared(shifts_, __float_as_int(rows.shift[0]));
      store_shared(shifts_ + 32, __float_as_int(rows.shift[1]));
    }
    if (kScoreMod) store_shared(hidden_, int(hidden.word()));
    named_barrier_arrive(kAlternate + warpgroup_, 256);
  }

  // Takes P of the other one's tile, and its shift, to which O and the sums are rescaled.
  __device__ __forceinline__ HiddenScores<ByRows> take(u32 (&P)[kPWords], float (&O)[kWarpColumns / 2],
                                                       Rows& rows) const {
    named_barrier_sync(kAlternate + 1 - warpgroup_, 256);
    const float shift[2] = {__int_as_float(load_shared(shifts_)), __int_as_float(load_shared(shifts_ + 32))};
#pragma unroll
    for (int i = 0; i < kPWords; i += 4) load_shared16(words_ + 128 * i, P + i);
    if (__any_sync(0xffffffff, shift[0] != rows.shift[0] || shift[1] != rows.shift[1])) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        factor[i] = shift[i] == rows.shift[i] ? 1 : exp2_fast(shift[i] - rows.shift[i]);
        rows.shift[i] = shift[i];
        rows.sum[i] *= factor[i];
      }
#pragma unroll
      for (int i = 0; i < kWarpColumns / 2; ++i) O[i] *= factor[i / 2 % 2];
    }
    return HiddenScores<ByRows>(kScoreMod ? u32(load_shared(hidden_)) : 0);
  }

  // Adds the sums of both warpgroups, after the last tile. All warps that compute call this together.
  __device__ __forceinline__ void add_sums(Rows& rows) const {
    const u32 sums = shared_base() + kLayout.p + threadIdx.x % 128 * 8;
    sync_compute_warps();  // P of the last tile is in registers
    store_shared_pair(sums + warpgroup_ * 1024, rows.sum[0], rows.sum[1]);
    sync_compute_warps();
    float others[2];
    load_shared_pair(sums + (1 - warpgroup_) * 1024, others[0], others[1]);
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.sum[i] = quad_sum(rows.sum[i] + others[i]);
    sync_compute_warps();  // the next P may come
  }

 private:
  int warpgroup_;
  u32 words_, shifts_, hidden_;
};

// Computes the work tiles of the CTA, if there are `more`.
__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, bool more, Queries& queries,
                                        PanelRing tiles) {
  const int warp = uniform(threadIdx.x / 32);
  const int warpgroup = warp / kWarpsPerGroup, warp_in_group = warp % kWarpsPerGroup;
  const SharedP shared_p(warpgroup, warp_in_group);
  const auto sync = [&] {
    fence_async_proxy();
    sync_warp_group(warpgroup);
  };
  const float c = score_factor(p);
  const u32 q = shared_base() + kLayout.q;
  const SavedWorkTiles saved(warp);
#pragma unroll 1
  while (more) {
    const WorkTile& tile = work_tiles.tile;
    saved.save(work_tiles);
    if (tile.has_keys()) queries.begin_work_tile(p, tile);
    const TileMask mask(p, tile, warp_in_group);
    float O[kWarpColumns / 2];
#pragma unroll
    for (int i = 0; i < kWarpColumns / 2; ++i) O[i] = 0;
    Rows rows = rows_without_keys();
    bool mine = warpgroup == 0;
#pragma unroll 1
    for (int key_tile = tile.begin; key_tile < tile.end; ++key_tile, mine = !mine) {
      const bool masked = mask.cuts(key_tile);
      u32 P[kPWords];
      HiddenScores<ByRows> hidden;
      if (mine) {
        float S[kBlockKeys / 2];
        compute_scores(S, q, tiles);
        hidden = adjust_scores<ByRows>(p, S, mask.rows, key_tile, masked);
        softmax_step<false>(S, P, O, rows, c);
        shared_p.put(P, rows, hidden);
      } else {
        tiles.wait_full(0);  // so that it is this K that is released
        hidden = shared_p.take(P, O, rows);
      }
      if (!p.v_in_k) tiles.release();
      const u32 v = wait_for_values(tiles, warpgroup);
      if (kHidesKeys && masked) add_hidden_non_finite(p, O, mask, hidden, key_tile, {v}, saved, sync);
      register_fence(O);
      register_fence(P);
      wgmma_fence();
      issue_values(O, P, v);
      wgmma_wait<0>();
      register_fence(O);
      tiles.release();
    }
    if (tile.has_keys()) queries.release();
    work_tiles = saved.load();
    shared_p.add_sums(rows);
    if constexpr (Schedule::kFragments)
      store_fragments(p, tile, rows, O);
    else
      store_warp_group(p, tile, rows, O);
    more = end_work_tile(p, work_tiles);
  }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  const u32 smem = shared_base();
  if (threadIdx.x == 0) {
    PanelRing::init(smem);
    mbarrier_init(smem + kLayout.v_tail, 1);
    QueryBuffer::init(smem, 32 * kQueryWarps, kComputeWarps);
    fence_mbarrier_init();
  }
  if (threadIdx.x == 32 * kComputeWarps) {
    tma_prefetch_map(&p.k_map);
    tma_prefetch_map(&p.v_map);
  }
  WorkTiles work_tiles;
  bool more = true;
  if (!work_tiles.first(p)) {
    if (!Schedule::kCombinesAtEnd) return;
    more = false;
  }
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= kComputeWarps) {
    registers_drop<kWideLoadRegisters>();
    const TileWalk tiles(p, work_tiles, more, 0);
    named_barrier_sync(kFirstQuery, kCtaThreads);
    const int tile_warp = warp - kComputeWarps;
    if (tile_warp == 0)
      load_panels(p, PanelLoader(p, tiles), smem);
    else if (tile_warp >= kTileLoaders - kQueryWarps)
      load_queries(p, tiles, threadIdx.x % (32 * kQueryWarps));
    return;
  }
  registers_raise<kWideComputeRegisters>();
  Queries queries(p, work_tiles.tile, more);
  compute(p, work_tiles, more, queries, PanelRing(smem, 0));
  if constexpr (Schedule::kCombinesAtEnd) CombineAtEnd<Schedule>::run(p);
}

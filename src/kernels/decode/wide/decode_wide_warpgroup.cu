// Attention forward over wide heads, where O = softmax(scale Q K^T) V of 64 rows does not fit the registers of a
// warpgroup: d up to 576 and dv up to 512, as in absorbed multi-head latent attention (MLA), by wgmma and TMA. Exact,
// with LSE and fp32 accumulation.
//
// Rows are (query, head of the group) of a kv head, in blocks of 64. Two warpgroups share the rows and keys of a CTA;
// each has half of the columns of O. Tiles of keys come in pairs: the first warpgroup computes S and P of the first
// tile, the second one those of the second tile, and both multiply each P with their columns of V. So that the tensor
// cores always have products, the second warpgroup computes S during the softmax of the first one, and is at its own
// softmax while both multiply the first P:
//
//   first:   S1 = Q K1^T   P1            O += P1 V1                    O += P2 V2
//   second:                S2 = Q K2^T   O += P1 V1, during it P2      O += P2 V2
//
// A warpgroup multiplies its own P from registers, and the other one's from shared memory. The shift of the softmax
// goes with P: the next tile begins with it, and O is rescaled where it has moved. Each warpgroup adds up the rows of
// its own P only. Once it has multiplied its columns of a V, these are loaded anew.
//
// A tile arrives by panels of 64 columns, so that products with the first ones begin while the others are loaded. Where
// V is the first columns of K (DecodeParams::v_in_k), a tile of K is loaded once and serves as V. The schedule
// and what becomes of splits are those of the other decode kernels (decode_warpgroup.cu).
#include "decode/wide/panel_ring.cuh"
#include "decode/non_finite.cuh"
#include "decode/warpgroup/products.cuh"
#include "decode/warpgroup/queries.cuh"
#include "decode/warpgroup/work_tiles.cuh"

static_assert(kWarpgroupPath && kWarpGroups == 1 && kColumnGroups == 2 && kVStages == 0 && kWarpsPerGroup == 4);
static_assert(kWarpColumns % 64 == 0 && kBlockKeys == 64 && kLayout.code_full <= kLayout.q);

enum : int {
  kWideLoadRegisters = 56,
  kWideComputeRegisters = (504 - kWideLoadRegisters) / 2,
};

// Where K and V of a tile lie.
struct KeysAndValues {
  PanelRing k, v;
};

__device__ __forceinline__ KeysAndValues next_tile(const DecodeParams& p, PanelRing& ring) {
  KeysAndValues tile = {ring, ring};
  if (!p.v_in_k) {
    ring.advance();
    tile.v = ring;
  }
  ring.advance();
  return tile;
}

// Computes S = Q K^T of a tile, panel after panel as they arrive: first those that the warpgroup itself has released.
template <int warpgroup>
__device__ __forceinline__ void compute_scores(float (&S)[kBlockKeys / 2], u32 q, const PanelRing& k) {
  constexpr int kFirst = warpgroup * PanelRing::kWarpgroupPanels, kSteps = kHeadDim / ElementK::kStep;
  const u32 Q = uniform_descriptor(q, 0);
  const u32 K = uniform_descriptor(k.address(), 0);
  int keep = 0;
#pragma unroll
  for (int i = 0; i < max_of(kKPanels, kVPanels); ++i) {
    const int panel = i < kVPanels ? (i + kFirst) % kVPanels : i;
    if (panel >= kKPanels) continue;
    k.wait_full(panel);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < min_of(kPanelSteps, kSteps - panel * kPanelSteps); ++step) {
      const int inside = step * kStepBytes;
      Wgmma<kBlockKeys, ElementK::kType>::multiply<kAlongK, kAlongK>(
          S, Q + ((panel * kQPanelBytes + inside) >> 4), K + ((panel * kPanelBytes + inside) >> 4), keep);
      keep = 1;
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  register_fence(S);
}

// Releases K of the other warpgroup's tile, once it is there.
__device__ __forceinline__ void release_unread_keys(const PanelRing& k, int warpgroup) {
#pragma unroll
  for (int panel = 0; panel < PanelRing::kPanels; ++panel) k.wait_full(panel);
  k.release(warpgroup);
}

// The columns of a warpgroup in V of a tile, once they have arrived. If V is in K, they have where there is P.
__device__ __forceinline__ u32 values_of(const DecodeParams& p, const PanelRing& v, int warpgroup) {
  const int first = warpgroup * PanelRing::kWarpgroupPanels;
  if (!p.v_in_k)
    for (int panel = 0; panel < PanelRing::kWarpgroupPanels; ++panel) v.wait_full(first + panel);
  return v.address() + first * kPanelBytes;
}

// Issues O += P V with P in shared memory.
__device__ __forceinline__ void issue_shared_values(float (&O)[kWarpColumns / 2], u32 p, u32 v) {
  const u32 P = uniform_descriptor(p, 0);
  const u32 V = uniform_descriptor(v, kPanelBytes);
#pragma unroll
  for (int step = 0; step < kBlockKeys / ElementV::kStep; ++step)
    Wgmma<kWarpColumns, ElementV::kType>::multiply<kAlongK, kAcrossK>(
        O, P + (step * kStepBytes >> 4), V + (step * ElementV::kStep * kPanelRowBytes >> 4), 1);
  wgmma_commit();
}

// How a warpgroup passes P of its tile to the other one.
class SharedP {
 public:
  __device__ __forceinline__ SharedP(int warpgroup, int warp_in_group)
      : warpgroup_(warpgroup),
        row_(warp_in_group * kWarpRows),
        shifts_(shared_base() + kLayout.p_rows + (row_ + int(thread_row())) * 4),
        hidden_(shared_base() + kLayout.p_hidden + threadIdx.x % 128 * 4) {}

  // Passes P on, in the panel `to`, in which the warpgroup may have had a panel of K.
  __device__ __forceinline__ void put(const u32 (&P)[kPWords], const Rows& rows, const HiddenScores<ByRows>& hidden,
                                      u32 to) const {
    sync_warp_group(warpgroup_);  // all warps have multiplied with K
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kPWords; i += 4)
      store_shared_matrices(to + swizzled(row_ + lane % 16, i / 2 + lane / 16), {P[i], P[i + 1], P[i + 2], P[i + 3]});
    if (threadIdx.x % 4 == 0) {
      store_shared(shifts_, __float_as_int(rows.shift[0]));
      store_shared(shifts_ + 32, __float_as_int(rows.shift[1]));
    }
    if (kScoreMod) store_shared(hidden_, int(hidden.word()));
    fence_async_proxy();
    named_barrier_arrive(kAlternate + warpgroup_, 256);
  }

  // Waits for P of the other one's tile, and rescales O and the sums to its shift.
  __device__ __forceinline__ HiddenScores<ByRows> take(float (&O)[kWarpColumns / 2], Rows& rows) const {
    named_barrier_sync(kAlternate + 1 - warpgroup_, 256);
    const float shift[2] = {__int_as_float(load_shared(shifts_)), __int_as_float(load_shared(shifts_ + 32))};
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
    const u32 sums = shared_base() + kLayout.sums + (row_ + int(thread_row())) * 4;
    constexpr u32 kGroupBytes = kQueryRows * 4;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.sum[i] = quad_sum(rows.sum[i]);
      if (threadIdx.x % 4 == 0) store_shared(sums + warpgroup_ * kGroupBytes + 32 * i, __float_as_int(rows.sum[i]));
    }
    sync_compute_warps();
#pragma unroll
    for (int i = 0; i < 2; ++i)
      rows.sum[i] += __int_as_float(load_shared(sums + (1 - warpgroup_) * kGroupBytes + 32 * i));
    sync_compute_warps();  // the next P may come
  }

 private:
  int warpgroup_, row_;
  u32 shifts_, hidden_;
};

// Computes the tiles of a work tile, as one of the two warpgroups does.
template <int warpgroup>
__device__ __forceinline__ void compute_tiles(const DecodeParams& p, const WorkTile& tile, const TileMask& mask,
                                              const SharedP& shared_p, const SavedWorkTiles& saved, PanelRing& tiles,
                                              float (&O)[kWarpColumns / 2], Rows& rows) {
  const float c = score_factor(p);
  const u32 q = shared_base() + kLayout.q;
  const auto sync = [&] {
    fence_async_proxy();
    sync_warp_group(warpgroup);
  };
  const auto wait_for_o = [&] {
    wgmma_wait<0>();
    register_fence(O);
  };
  // Issues O += P V of the other warpgroup's tile.
  const auto take_tile = [&](int key_tile, const PanelRing& values) __attribute__((always_inline)) {
    const HiddenScores<ByRows> hidden = shared_p.take(O, rows);
    const u32 v = values_of(p, values, warpgroup);
    if (kHidesKeys && mask.cuts(key_tile)) add_hidden_non_finite(p, O, mask, hidden, key_tile, {v}, saved, sync);
    register_fence(O);
    wgmma_fence();
    issue_shared_values(O, values.p(), v);
  };
  float S[kBlockKeys / 2];
#pragma unroll 1
  for (int pair = tile.begin; pair < tile.end; pair += 2) {
    const bool both = pair + 1 < tile.end;
    const KeysAndValues first = next_tile(p, tiles);
    KeysAndValues second = first;
    if (both) second = next_tile(p, tiles);
    const KeysAndValues& mine = warpgroup == 0 ? first : second;
    if (!p.v_in_k && warpgroup == 1) release_unread_keys(first.k, warpgroup);
    if (warpgroup == 0 || both) {
      compute_scores<warpgroup>(S, q, mine.k);
      if (!p.v_in_k) mine.k.release(warpgroup);
    }
    if (warpgroup == 1) take_tile(pair, first.v);
    if (warpgroup == 0 || both) {
      const int key_tile = pair + warpgroup;
      const bool masked = mask.cuts(key_tile);
      u32 P[kPWords];
      const HiddenScores<ByRows> hidden = adjust_scores<ByRows>(p, S, mask.rows, key_tile, masked);
      softmax_step<false>(S, P, O, rows, c, wait_for_o);
      if (!p.v_in_k && warpgroup == 1) {  // this V may come to the buffer of the first one
        wait_for_o();
        first.v.release(warpgroup);
      }
      const u32 v = values_of(p, mine.v, warpgroup);
      shared_p.put(P, rows, hidden, mine.v.p());
      wait_for_o();
      if (p.v_in_k && warpgroup == 1) first.v.release(warpgroup);
      if (kHidesKeys && masked) add_hidden_non_finite(p, O, mask, hidden, key_tile, {v}, saved, sync);
      register_fence(O);
      register_fence(P);
      wgmma_fence();
      issue_values(O, P, v);
    }
    wait_for_o();
    mine.v.release(warpgroup);  // if it has no tile, that of the first tile
    if (warpgroup == 0 && both) {
      if (!p.v_in_k) release_unread_keys(second.k, warpgroup);
      take_tile(pair + 1, second.v);
      wait_for_o();
      second.v.release(warpgroup);
    }
  }
}

// Computes the work tiles of the CTA, if there are `more`.
__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, bool more, Queries& queries,
                                        PanelRing tiles) {
  const int warp = uniform(threadIdx.x / 32);
  const int warpgroup = warp / kWarpsPerGroup, warp_in_group = warp % kWarpsPerGroup;
  const SharedP shared_p(warpgroup, warp_in_group);
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
    if (warpgroup == 0)
      compute_tiles<0>(p, tile, mask, shared_p, saved, tiles, O, rows);
    else
      compute_tiles<1>(p, tile, mask, shared_p, saved, tiles, O, rows);
    if (tile.has_keys()) queries.release();
    work_tiles = saved.load();
    shared_p.add_sums(rows);
    store_work_tile(p, tile, rows, O);
    more = end_work_tile(p, work_tiles);
  }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  const u32 smem = shared_base();
  if (threadIdx.x == 0) {
    PanelRing::init();
    QueryBuffer::init(smem, 32 * kQueryWarps, kComputeWarps);
    fence_mbarrier_init();
  }
  prefetch_maps(p);
  WorkTiles work_tiles;
  bool more;
  if (!work_tiles.first(p, more)) return;
  const int warp = uniform(threadIdx.x / 32);
  if (warp >= kComputeWarps) {
    registers_drop<kWideLoadRegisters>();
    const TileWalk tiles(p, work_tiles, more, 0);
    named_barrier_sync(kFirstQuery, kCtaThreads);
    const int tile_warp = warp - kComputeWarps;
    if (tile_warp < kColumnGroups)
      load_panels(p, PanelLoader(p, tiles, tile_warp), smem + kLayout.v_tail + 8 * tile_warp);
    else if (tile_warp >= kTileLoaders - kQueryWarps)
      load_queries(p, tiles, threadIdx.x % (32 * kQueryWarps));
    return;
  }
  registers_raise<kWideComputeRegisters>();
  Queries queries(p, work_tiles.tile, more);
  compute(p, work_tiles, more, queries, PanelRing(0));
  if constexpr (Schedule::kCombinesAtEnd) CombineAtEnd<Schedule>::run(p);
}

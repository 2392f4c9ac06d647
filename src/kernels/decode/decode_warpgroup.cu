// Attention forward where K and V are read from memory for few rows of Q, or from a cache: O = softmax(scale Q K^T) V
// and LSE, exact, fp32 accumulation. The warpgroup path: blocks of 64 or 128 rows of a kv head, by wgmma and TMA.
//
// Rows are (query, head of the group) of a kv head, so that K and V are read once for all of them. The schedule
// (decode/schedule/) says which work tiles a CTA computes. Its warp groups, of one or two warpgroups, take the
// tiles of a work tile in turn, each with a state of the online softmax of its own. Four warps do nothing but load,
// over the ends of work tiles, so that memory never waits for products, barriers and combines. docs/kernels/decode.md
// derives this; decode/decode_warp.cu is the path of fewer rows. Where K and V are codes, four or eight warps that load
// also convert them.
#include "decode/append.cuh"
#include "decode/codes/warpgroup/converter.cuh"
#include "decode/codes/warpgroup/row_factors.cuh"
#include "decode/loads/warpgroup_loads.cuh"
#include "decode/non_finite.cuh"
#include "decode/warpgroup/products.cuh"
#include "decode/warpgroup/queries.cuh"
#include "decode/warpgroup/work_tiles.cuh"

static_assert(kWarpgroupPath);

enum : int {
  kAlternates = kWarpsPerGroup == 8,  // a warp group is two warpgroups
  // With three or four warpgroups the warps that load give registers to the others. Three threads, one of each
  // warpgroup, have 504, and four have 512.
  kMovesRegisters = kCtaWarps >= 12,
  kComputeGroups = kComputeWarps / 4,
  kLoadGroups = kCtaWarps / 4 - kComputeGroups,
  kPageOfEachKey = kPage > 0 && (kPage % 16 != 0 || kLeftPad),
  kConvertRegisters = kConverts && kBlockKeys == 128 && kLoadGroups == 2 ? 72
                      : kComputeGroups == 1 ? 128 : kPageOfEachKey && kLoadGroups == 1 ? 120 : 88,
  kLoadRegisters = kConverts ? kConvertRegisters : kBoxKeys > 0 ? 72 : kBlockKeys <= 16 ? 56 : 88,
  kComputeRegisters = ((kCtaWarps == 16 ? 512 : 504) - kLoadGroups * kLoadRegisters) / kComputeGroups,
};

// So many scores of a thread become exponentials while O += P V of the tile before still runs. Smaller tiles gain
// nothing from that, and more columns of O or factors of V leave no registers for it.
enum : int { kScoresAhead = kBlockKeys == 128 && kValueDim <= 64 && !kVFactors ? 16 : 0 };

// Scores of 16-bit Q and K are products as they are.
struct NoFactors {
  __device__ __forceinline__ NoFactors(const DecodeParams&, const WorkTile&, int) {}
  __device__ __forceinline__ void load_shared_factors(u32) {}
  __device__ __forceinline__ void multiply_keys(float (&)[kBlockKeys / 2], u32) {}
  __device__ __forceinline__ ScoreScale scale(float) const { return {}; }
};

template <bool converts>
struct OfCodes {
  using Q = Queries;
  using Factors = NoFactors;
};
template <>
struct OfCodes<true> {
  using Q = ConvertedQueries;
  using Factors = RowFactors;
};
using QueriesOfCta = OfCodes<(kConverts != 0)>::Q;
using ScoreFactors = OfCodes<(kConverts != 0)>::Factors;

struct KeysAndValues {
  u32 k, v;
};

// The ring of K and V of a warp group, which other warps fill.
class Tiles {
 public:
  __device__ __forceinline__ explicit Tiles(u32 buffers) : keys_(buffers, 0), values_(buffers, 0) {}

  // K of the next tile and, unless it is the `first`, V of the tile before, for products.
  __device__ __forceinline__ KeysAndValues keys_and_values(bool first) const {
    keys_.wait_full();
    if (!first) values_.wait_full();
    if (kStoredByLanes) fence_async_proxy();
    return {keys_.address(), values_.address()};
  }
  __device__ __forceinline__ u32 key_factors() const {
    return keys_.smem + kLayout.k_factors + keys_.ring.stage() * (kBlockKeys * 4);
  }
  __device__ __forceinline__ u32 shared_key_factors() const {
    return shared_factors<kOfK>(keys_.smem, keys_.ring.stage());
  }
  __device__ __forceinline__ void release_keys() {
    if (kConverts) __syncwarp();  // all lanes have read the factors
    keys_.release(threadIdx.x % 32 == 0);
  }
  __device__ __forceinline__ u32 values() const {
    values_.wait_full();
    if (kStoredByLanes) fence_async_proxy();
    return values_.address();
  }
  __device__ __forceinline__ u32 value_factors() const {
    if (kVFactors) values_.wait_full();
    return values_.smem + kLayout.v_factors + values_.ring.stage() * (kBlockKeys * 4);
  }
  __device__ __forceinline__ u32 shared_value_factors() const {
    return shared_factors<kOfV>(values_.smem, values_.ring.stage());
  }
  __device__ __forceinline__ void release_values() { values_.release(threadIdx.x % 32 == 0); }

 private:
  KBuffers keys_;
  VBuffers values_;
};

// The products of a warpgroup over the tiles of a work tile: O += P V of a tile goes with S = Q K^T of the next one.
// The two warpgroups of a warp group alternate, so that one multiplies while the other one is at its softmax.
class Products {
 public:
  __device__ __forceinline__ Products(const Tiles& tiles, int warpgroup) : tiles_(tiles), warpgroup_(warpgroup) {
    if (warpgroup_ == 1) pass();
  }

  // Computes S of the next tile, and O += P V of the tile before, unless the next tile is the `first` of its work tile.
  // With kScoresAhead O += P V still runs, until wait_for_o.
  __device__ __forceinline__ void scores(bool first, float (&S)[kBlockKeys / 2], float (&O)[kValueDim / 2],
                                         u32 (&P)[kBlockKeys / 4], u32 q, ScoreFactors& factors) {
    const KeysAndValues tile = tiles_.keys_and_values(first);
    if (kAlternates) named_barrier_sync(kAlternate + warpgroup_, 256);
    register_fence(O);
    register_fence(P);
    wgmma_fence();
    issue_scores(S, q, tile.k);
    if (!first) issue_values(O, P, tile.v);
    if (kAlternates) pass();
    factors.load_shared_factors(tiles_.shared_key_factors());
    if (first || kScoresAhead == 0)
      wgmma_wait<0>();
    else
      wgmma_wait<1>();
    register_fence(S);
    if (kScoresAhead == 0) register_fence(O);
    factors.multiply_keys(S, tiles_.key_factors());
    tiles_.release_keys();
    if (!first && kScoresAhead == 0) tiles_.release_values();
  }
  // Waits for O += P V, and releases that V.
  __device__ __forceinline__ void wait_for_o(float (&O)[kValueDim / 2]) {
    wgmma_wait<0>();
    register_fence(O);
    tiles_.release_values();
  }
  // V of the tile whose S was computed last.
  __device__ __forceinline__ ValueTile values() const { return {tiles_.values(), tiles_.value_factors()}; }
  __device__ __forceinline__ u32 value_factors() const { return tiles_.value_factors(); }
  __device__ __forceinline__ u32 shared_value_factors() const { return tiles_.shared_value_factors(); }
  // Computes O += P V of the last tile.
  __device__ __forceinline__ void finish(float (&O)[kValueDim / 2], u32 (&P)[kBlockKeys / 4]) {
    const u32 v = tiles_.values();
    register_fence(O);
    register_fence(P);
    wgmma_fence();
    issue_values(O, P, v);
    wait_for_o(O);
  }

 private:
  __device__ __forceinline__ void pass() const { named_barrier_arrive(kAlternate + 1 - warpgroup_, 256); }

  Tiles tiles_;
  int warpgroup_;
};

// Computes the work tiles of the CTA, if there are `more`.
__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, bool more, QueriesOfCta& queries,
                                        const Tiles& tiles) {
  const int warp = uniform(threadIdx.x / 32);
  const int warp_group = warp / kWarpsPerGroup, warp_in_group = warp % kWarpsPerGroup;
  const auto sync = [&] {
    fence_async_proxy();
    sync_warp_group(warp_group);
  };
  Products products(tiles, warp_in_group / 4);
  const float c = score_factor(p);
  const u32 q = shared_base() + kLayout.q + warp_in_group / 4 * 64 * kPanelRowBytes;
  const SavedWorkTiles saved(warp);
#pragma unroll 1
  while (more) {
    const WorkTile& tile = work_tiles.tile;
    saved.save(work_tiles);
    if (tile.has_keys()) queries.begin_work_tile(p, tile);
    const TileMask mask(p, tile, warp_in_group);
    ScoreFactors factors(p, tile, warp_in_group);
    float O[kValueDim / 2];
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;
    Rows rows = rows_without_keys();
    u32 P[kBlockKeys / 4];
    const auto take_tile = [&](bool first, int key_tile) __attribute__((always_inline)) {
      float S[kBlockKeys / 2];
      products.scores(first, S, O, P, q, factors);
      const bool masked = mask.cuts(key_tile);
      ScoreScale scale = factors.scale(c);
      if (kConverts && (!kVFactors || kScoreMode || masked)) {
        scale = factors.scale(1);
#pragma unroll
        for (int i = 0; i < kBlockKeys / 2; ++i) S[i] *= scale(i);
        scale.set(c);
      }
      const HiddenScores<ByRows> hidden = adjust_scores<ByRows>(p, S, mask.rows, key_tile, masked);
      if constexpr (kVFactors)
        scaled_softmax_step(S, P, O, rows, scale, products.value_factors(), products.shared_value_factors());
      else
        softmax_step<false, kScoresAhead>(S, P, O, rows, c, [&] {
          if (!first && kScoresAhead > 0) products.wait_for_o(O);
        });
      if (kHidesKeys && masked) add_hidden_non_finite(p, O, mask, hidden, key_tile, products.values(), saved, sync);
    };
    int key_tile = tile.begin + warp_group;
    if (key_tile < tile.end) {
      take_tile(true, key_tile);
#pragma unroll 1
      for (key_tile += kWarpGroups; key_tile < tile.end; key_tile += kWarpGroups) take_tile(false, key_tile);
      queries.release();
      products.finish(O, P);
    } else if (tile.has_keys()) {
      queries.release();
    }
    work_tiles = saved.load();
    rows.sum[0] = quad_sum(rows.sum[0]);
    rows.sum[1] = quad_sum(rows.sum[1]);
    if constexpr (kConverts && kVScales == 0) {
      const float of_sequence = scale_of_sequence(p.v_scale, tile);
#pragma unroll
      for (int i = 0; i < kValueDim / 2; ++i) O[i] *= rows.sum[i / 2 % 2] != 0 ? of_sequence : 1;
    }
    store_work_tile(p, tile, rows, O);
    more = end_work_tile(p, work_tiles);
  }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  const u32 smem = shared_base();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group) {
      const u32 buffers = smem + warp_group * kLayout.group_bytes;
      KBuffers::init(buffers, kFills, kWarpsPerGroup);
      VBuffers::init(buffers, kFills, kWarpsPerGroup);
      mbarrier_init(buffers + kLayout.v_tail, 1);
      if constexpr (kConverts) {
        CodesRing<kOfK>::init(buffers);
        CodesRing<kOfV>::init(buffers);
      }
    }
    QueryBuffer::init(smem, 32 * kQueryWarps, kComputeWarps);
    fence_mbarrier_init();
  }
  prefetch_maps(p);
  WorkTiles work_tiles;
  bool more;
  if (!work_tiles.first(p, more)) return;
  const int warp = uniform(threadIdx.x / 32);
  const auto buffers_of = [&](int warp_group) {
    return smem + (kWarpGroups > 1 ? warp_group * kLayout.group_bytes : 0);
  };
  if (warp >= kComputeWarps) {
    if (kMovesRegisters) registers_drop<kLoadRegisters>();
    const int warp_group = (warp - kComputeWarps) / kGroupLoaders;
    const int tile_warp = (warp - kComputeWarps) % kGroupLoaders;
    const TileWalk tiles(p, work_tiles, more, warp_group);
    named_barrier_sync(kFirstQuery, kCtaThreads);
    if constexpr (kConverts) {
      const LaneLoader load(p, tiles, tile_warp % kTileLoaders);
      if (tile_warp < kTileLoaders)
        convert_codes<kOfK>(load, KBuffers(buffers_of(warp_group), 1), kLayout.k_factors);
      else
        convert_codes<kOfV>(load, VBuffers(buffers_of(warp_group), 1), kLayout.v_factors);
      return;
    }
    if (kBoxKeys == 0)
      load_by_lanes(p, LaneLoader(p, tiles, tile_warp), buffers_of(warp_group));
    else if (tile_warp == 0)
      load_keys_by_boxes(p, BoxLoader<kKPanels>(p, tiles), buffers_of(warp_group));
    else if (tile_warp == 1)
      load_values_by_boxes(p, BoxLoader<kVPanels>(p, tiles), buffers_of(warp_group));
    else
      load_queries(p, tiles, threadIdx.x % 64);
    return;
  }
  if (kMovesRegisters) registers_raise<kComputeRegisters>();
  if (kAppends) append_rows(p, work_tiles, more);
  QueriesOfCta queries(p, work_tiles.tile, more);
  compute(p, work_tiles, more, queries, Tiles(buffers_of(warp / kWarpsPerGroup)));
  if constexpr (Schedule::kCombinesAtEnd) CombineAtEnd<Schedule>::run(p);
}

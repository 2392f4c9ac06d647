// Attention forward where K and V are read from memory for few rows of Q, or from a cache: O = softmax(scale Q K^T) V
// and LSE, exact, fp32 accumulation. The warp path: up to 32 rows of a kv head, by mma.sync and cp.async.
//
// Rows are (query, head of the group) of a kv head, so that K and V are read once for all of them. The schedule
// (decode/schedule/) says which work tiles a CTA computes. Its warp groups, of one or two warps of 16 rows, take
// the tiles of a work tile in turn, each with a state of the online softmax of its own. Every warp loads for its warp
// group, ahead of its products and over the ends of work tiles, so that memory never waits for products, barriers and
// combines. docs/kernels/decode.md derives this; decode/decode_warpgroup.cu is the path of more rows.
#include "device/mma_sync.cuh"
#include "decode/append.cuh"
#include "decode/codes.cuh"
#include "decode/combine.cuh"

static_assert(!kWarpgroupPath && !Schedule::kCombineKernel);

// Q of the work tiles that have keys, one after another. All threads copy it through registers: ahead of its place in
// shared memory, or when that is free where registers are full, as elements need them, and all that scores may need
// with the widest heads.
class Queries {
 public:
  __device__ __forceinline__ Queries(const DecodeParams& p, const WorkTile& first) {
    if (kAhead) fetch(p, first);
  }
  __device__ __forceinline__ void begin_work_tile(const DecodeParams& p, const WorkTile& tile) {
    if (!kAhead) {
#pragma unroll 1
      for (int i = threadIdx.x; i < kBlockRows * kQueryChunks; i += kComputeThreads)
        *reinterpret_cast<uint4*>(raw + query_place(i)) = query_chunk(p, tile, i).load();
    }
#pragma unroll
    for (int i = 0; kAhead && i < kOfThread; ++i)
      if (at(i) < kBlockRows * kQueryChunks) *reinterpret_cast<uint4*>(raw + query_place(at(i))) = chunks_[i];
    __syncthreads();
    if constexpr (kCodesK) {
      prepare_queries();
      __syncthreads();
    }
  }
  // The results of the work tile before are on their way.
  __device__ __forceinline__ void prefetch(const DecodeParams& p, const WorkTile& next) {
    if (kAhead) fetch(p, next);
  }

 private:
  enum : int {
    kOfThread = (kBlockRows * kQueryChunks + kComputeThreads - 1) / kComputeThreads,
    kAhead = kQWhole && !(kHeadDim > 128 && (kCodesK || kCodesV)) &&
             !(kHeadDim > 240 && ((kPage > 0 && kBlockKeys == 16) || (kScoreMode && kHasLeft))),
  };

  static __device__ __forceinline__ int at(int i) { return threadIdx.x + i * kComputeThreads; }

  __device__ __forceinline__ void fetch(const DecodeParams& p, const WorkTile& tile) {
#pragma unroll
    for (int i = 0; i < kOfThread; ++i)
      if (at(i) < kBlockRows * kQueryChunks) chunks_[i] = query_chunk(p, tile, at(i)).load();
  }

  uint4 chunks_[kOfThread];
};

// The ring of K and V of a warp group: the loads of kAhead tiles are on their way while one is computed.
class KeyValueRing {
 public:
  __device__ __forceinline__ KeyValueRing(const LaneLoader<kWarpsPerGroup>& load, u32 buffers)
      : load_(load), buffers_(buffers) {
    // Where all wait for the first tile, the second one finds its instructions in the cache.
#pragma unroll Schedule::kOneTile ? 1 : kAhead
    for (int tile = 0; tile < kAhead; ++tile) start();
  }

  // K of the next tile, once it is there, and a load in the place that is free then. `sync` is a barrier of the warp
  // group.
  template <class Sync>
  __device__ __forceinline__ u32 keys(Sync sync) {
    async_copy_wait<kAhead - 1>();
    if constexpr (kScalesOfKey > 0) load_.widen_scales(upper_halves_ >> kHalfBits * (kAhead - 1), scales());
    sync();
    start();
    return buffers_ + kLayout.k + stage_ * kLayout.k_bytes;
  }
  // V of that tile.
  __device__ __forceinline__ u32 values() const { return buffers_ + kLayout.v + stage_ * kLayout.v_bytes; }
  // What scales that tile.
  __device__ __forceinline__ u32 scales() const { return buffers_ + kLayout.scales + stage_ * kLayout.scale_bytes; }
  __device__ __forceinline__ void advance() {
    if (++stage_ == kStages) stage_ = 0;
  }

 private:
  using Loader = LaneLoader<kWarpsPerGroup>;
  enum : int { kStages = kKStages, kAhead = kStages - 1, kHalfBits = Loader::kHalfBits };
  static_assert(kKStages == kVStages && kHalfBits * kAhead <= 32);

  // The loads of the next tile, of which there may be none, are one group.
  __device__ __forceinline__ void start() {
    if constexpr (kScalesOfKey > 0) upper_halves_ <<= kHalfBits;
    if (load_.more()) {
      if constexpr (kScalesOfKey > 0)
        upper_halves_ |= load_.copy_scales(buffers_ + kLayout.scales + free_ * kLayout.scale_bytes);
      const u32 k = buffers_ + kLayout.k + free_ * kLayout.k_bytes;
      const u32 v = buffers_ + kLayout.v + free_ * kLayout.v_bytes;
      if (load_.whole()) {
        load_.copy_keys<true>(k);
        load_.copy_values<true>(v);
      } else {
        load_.copy_keys<false>(k);
        load_.copy_values<false>(v);
      }
      load_.next();
    }
    async_copy_commit();
    if (++free_ == kStages) free_ = 0;
  }

  Loader load_;
  u32 buffers_;
  int stage_ = 0, free_ = 0;
  u32 upper_halves_ = 0;  // LaneLoader::copy_scales of the tiles on their way, the last one lowest
};

// S = Q K^T of the warp's rows, whose Q lies at `q`, and the tile at `k`.
__device__ __forceinline__ void multiply_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) S[i] = 0;
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    u32 a[4];
    load_shared_matrices(q + step / 4 * kQPanelBytes + swizzled(lane % 16, step % 4 * 2 + lane / 16), a);
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
__device__ __forceinline__ void multiply_values(float (&O)[kValueDim / 2], const u32 (&P)[kBlockKeys / 4], u32 v) {
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

// Computes the work tiles of the CTA, of which there is one.
__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, Queries& queries,
                                        KeyValueRing& ring) {
  const int warp = uniform(threadIdx.x / 32);
  const int warp_group = warp / kWarpsPerGroup;
  const int warp_of_group = warp % kWarpsPerGroup;
  const auto sync = [&] { sync_warp_group(warp_group); };
  const float c = score_factor(p);
  const u32 q = u32(__cvta_generic_to_shared(raw)) + kLayout.q + warp_of_group * kWarpRows * 128;
  const SavedWorkTiles saved(warp);
  bool more = true;
#pragma unroll 1
  while (more) {
    const WorkTile& tile = work_tiles.tile;
    saved.save(work_tiles);
    if (tile.has_keys()) queries.begin_work_tile(p, tile);
    const bool has_rows = warp_of_group * kWarpRows < rows_of_tile(p, tile).count;
    const TileMask mask(p, tile, warp_of_group);
    WorkTileScales scales(p, tile, warp_of_group);
    float O[kValueDim / 2];
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;
    Rows rows = rows_without_keys();
#pragma unroll 1
    for (int key_tile = tile.begin + warp_group; key_tile < tile.end; key_tile += kWarpGroups) {
      float S[kBlockKeys / 2];
      u32 P[kBlockKeys / 4];
      const u32 k = ring.keys(sync);
      const bool masked = mask.cuts(key_tile);
      HiddenScores hidden;
      if (has_rows) {
        if constexpr (kCodesK)
          multiply_codes<CodesOfK>(S, q, k, ring.scales(), scales);
        else
          multiply_scores(S, q, k);
        hidden = adjust_scores(p, S, mask.rows, key_tile, masked);
        softmax_step<false>(S, P, O, rows, c);
      }
      if constexpr (kHidesKeys && kCodesV) {
        if (masked) {
          const CodedValues values{ring.values(), ring.scales()};
          add_hidden_non_finite_codes(p, O, mask, hidden, key_tile, values, saved, sync);
        }
      } else if constexpr (kHidesKeys) {
        if (masked) add_hidden_non_finite(p, O, mask, hidden, key_tile, ring.values(), saved, sync);
      }
      if constexpr (kCodesV) {
        if (has_rows) multiply_value_codes<CodesOfV>(O, P, ring.values(), ring.scales(), scales);
      } else {
        if (has_rows) multiply_values(O, P, ring.values());
      }
      ring.advance();
    }
    work_tiles = saved.load();
    rows.sum[0] = quad_sum(rows.sum[0]);
    rows.sum[1] = quad_sum(rows.sum[1]);
    if constexpr (kCodesV) scales.finish(p, tile, O, rows);
    if constexpr (kWarpGroups > 1)
      combine_warp_groups(p, tile, rows, O);
    else
      store_warp_group(p, tile, rows, O);
    if (tile.splits > 1) end_split<Schedule>(p, tile);
    more = work_tiles.next(p);
    if (more) queries.prefetch(p, tile);
  }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  WorkTiles work_tiles;
  const bool more = work_tiles.first(p);
  if (kAppends) append_rows(p, work_tiles, more);
  if (!more) return;
  const int warp = uniform(threadIdx.x / 32);
  const int warp_group = warp / kWarpsPerGroup;
  const u32 buffers =
      u32(__cvta_generic_to_shared(raw)) + (kWarpGroups > 1 ? warp_group * kLayout.group_bytes : 0);
  const TileWalk tiles(p, work_tiles, true, warp_group);
  const LaneLoader<kWarpsPerGroup> load(p, tiles, warp % kWarpsPerGroup);
  Queries queries(p, work_tiles.tile);
  KeyValueRing ring(load, buffers);
  compute(p, work_tiles, queries, ring);
}

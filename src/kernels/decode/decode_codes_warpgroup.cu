// The warpgroup path (decode/decode_warpgroup.cu) where K and V are codes. Its products are transposed, S^T = K Q^T and
// O^T += V^T P^T, as on the warp path (decode/decode_codes.cu), so that codes become operands in registers, once for
// all rows of a warpgroup. docs/kernels/decode.md derives this.
#include "decode/codes/warpgroup/numbers.cuh"
#include "decode/codes/warpgroup/non_finite.cuh"
#include "decode/combine.cuh"
#include "decode/loads/warpgroup_loads.cuh"
#include "sm90/ptx/descriptor.cuh"

static_assert(kConvertsInRegisters && kKStages == kVStages && kWarpsPerGroup == 4);

enum : int {
  kByLanes = kBoxKeys == 0 || scale_words_before(kScaleTensors) > 0,  // lanes copy scales at least
  kArrivals = (kBoxKeys > 0) + (kByLanes ? int(kTileLoaders) : 0),    // that fill a buffer
  kRegisters = 2048 / kCtaWarps / 8 * 8,
  kLoadRegisters = kBoxKeys == 0 ? 72 : kByLanes ? 56 : 32,
  kComputeRegisters =
      (kCtaWarps * kRegisters - (kCtaWarps - kComputeWarps) * kLoadRegisters) / kComputeWarps / 8 * 8,
};

// The ring of codes of a warp group, which other warps fill.
class CodeTiles {
 public:
  __device__ __forceinline__ explicit CodeTiles(u32 buffers) : ring_(buffers, 0) {}

  __device__ __forceinline__ u32 keys() const {
    ring_.wait_full();
    return ring_.address();
  }
  __device__ __forceinline__ u32 values() const {
    return ring_.smem + kLayout.v + ring_.ring.stage() * kLayout.v_bytes;
  }
  // Where the scales of a tensor begin, whose codes lie at `codes`.
  template <int tensor>
  __device__ __forceinline__ u32 scales(u32 codes) const {
    if (scales_in_rows(tensor)) return codes;
    return ring_.smem + kLayout.scales + ring_.ring.stage() * kLayout.scale_bytes;
  }
  __device__ __forceinline__ void release() {
    __syncwarp();
    ring_.release(threadIdx.x % 32 == 0);
  }

 private:
  KBuffers ring_;
};

// Fills the ring: with boxes by TMA where it can address K and V, and with scales, and else codes, by lanes.
__device__ __forceinline__ void load_codes(LaneLoader load, u32 buffers) {
  enum : int { kAhead = kKStages - 2, kBits = LaneLoader::kHalfBits };
  KBuffers to(buffers, 1), landed(buffers, 1);
  unsigned long long upper_halves = 0;
  int in_flight = 0;
  const auto land = [&](u32 halves) __attribute__((always_inline)) {
    const u32 stage = landed.ring.stage();
    load.take_lower_halves(halves, landed.smem + kLayout.scales + stage * kLayout.scale_bytes);
    __syncwarp();
    mbarrier_arrive_if(landed.full(), threadIdx.x % 32 == 0);
    landed.advance();
  };
#pragma unroll 1
  for (; load.more(); load.next()) {
    to.wait_empty();
    const u32 stage = to.ring.stage();
    const u32 k = to.address(), v = to.smem + kLayout.v + stage * kLayout.v_bytes;
    if constexpr (kByLanes)
      upper_halves =
          upper_halves << kBits | load.copy_scales(to.smem + kLayout.scales + stage * kLayout.scale_bytes);
    if constexpr (kBoxKeys > 0) {
      load.copy_boxes(k, v, to.full());
    } else {
      load.copy<kOfK>(k);
      load.copy<kOfV>(v);
    }
    to.advance();
    if constexpr (!kByLanes) continue;
    async_copy_commit();
    if (++in_flight > kAhead) {
      async_copy_wait<kAhead>();
      land(u32(upper_halves >> kBits * kAhead));
      --in_flight;
    }
  }
  async_copy_wait<0>();
#pragma unroll 1
  for (; in_flight > 0; --in_flight) land(u32(upper_halves >> kBits * (in_flight - 1)));
}

// Q of the work tiles that have keys, one after another, which the warps that compute load and prepare.
class Queries {
 public:
  __device__ __forceinline__ Queries(const DecodeParams& p, const WorkTile& first, bool more)
      : is_there_(more && first.has_keys()) {
    if (is_there_) copy_query<kComputeThreads, kQueryRows>(p, first, threadIdx.x);
    async_copy_commit();
    named_barrier_arrive(kFirstQuery, kCtaThreads);
  }
  __device__ __forceinline__ void begin_work_tile(const DecodeParams& p, const WorkTile& tile) {
    if (!is_there_) {
      sync_compute_warps();  // no warp reads the Q before any more
      copy_query<kComputeThreads, kQueryRows>(p, tile, threadIdx.x);
      async_copy_commit();
    }
    is_there_ = false;
    async_copy_wait<0>();
    sync_compute_warps();
    prepare_queries(p, tile, [](int) { return 0; });
    fence_async_proxy();
    sync_compute_warps();
  }

 private:
  bool is_there_;
};

// A thread's i-th row of Q, and the sum of that row, which the warps of the warpgroup have left.
__device__ __forceinline__ int row_of(int i) { return i / 2 * 8 + int(thread_column()) + i % 2; }
__device__ __forceinline__ float sum_of_row(const WarpgroupMemory& memory, int i) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < 4; ++warp)
    sum += __int_as_float(load_shared(memory.exchange() + 4 * (warp * kTileRows + row_of(i))));
  return sum;
}

// The result of a warpgroup for combine_warp_groups.
struct WarpgroupResult {
  const float (&O)[kStrips][kScores];
  const WarpgroupMemory& memory;

  __device__ __forceinline__ void put_stats(float2* stats, int) const {
    if (threadIdx.x % 128 >= 4) return;
#pragma unroll
    for (int j = 0; j < 2 * kEights; ++j) {
      const float shift = __int_as_float(load_shared(memory.shifts() + 4 * row_of(j)));
      stats[threadIdx.x / 128 * kTileRows + row_of(j)] = {shift, sum_of_row(memory, j)};
    }
  }
  __device__ __forceinline__ void put_columns(float* columns, int, int first) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int column = StripColumns::column(strip, half) - first;
        if (column < 0 || column >= kExchangeColumns) continue;
        float* const to = columns + threadIdx.x / 128 * kTileRows * kExchangeStride + column;
#pragma unroll
        for (int j = 0; j < kEights; ++j)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            to[(8 * j + int(thread_column()) + i) * kExchangeStride] = O[strip][4 * j + 2 * half + i];
      }
  }
};

// Completes the sums of rows and O.
__device__ __forceinline__ void finish(const DecodeParams& p, const WorkTile& tile, float (&O)[kStrips][kScores],
                                       WarpgroupRows& rows, const WarpgroupMemory& memory) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const float of_sequence = kVScales == 0 ? scale_of_sequence(p.v_scale, tile) : 1;
#pragma unroll
  for (int j = 0; j < 2 * kEights; ++j) {
    float sum = rows.sum[j];
#pragma unroll
    for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
    if (lane < 4) store_shared(memory.exchange() + 4 * (warp * kTileRows + row_of(j)), __float_as_int(sum));
  }
  sync_warpgroup();
#pragma unroll
  for (int j = 0; j < 2 * kEights; ++j) {
    const float factor = NumbersOf<kOfV>::kFactor * (kVScales == 0 && sum_of_row(memory, j) != 0 ? of_sequence : 1);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      O[strip][j / 2 * 4 + j % 2] *= factor;
      O[strip][j / 2 * 4 + 2 + j % 2] *= factor;
    }
  }
}

// Sets the factors of the rows of a warpgroup, and rows without keys.
__device__ __forceinline__ void begin_rows(const DecodeParams& p, const WorkTile& tile, const WarpgroupMemory& memory) {
  const float of_sequence = kKScales == 0 ? nan_unless_finite(scale_of_sequence(p.k_scale, tile)) : 1;
  const int row = threadIdx.x % 128;
  if (row < kTileRows) {
    constexpr float kFactor = NumbersOf<kOfK>::kPlain ? CodesOfK::scale(0) : NumbersOf<kOfK>::kFactor;
    float factor = of_sequence * kFactor, bias = 0;
    if (tile.has_keys()) factor *= reinterpret_cast<const float*>(raw + kLayout.q_factors)[row];
    if (CodesOfK::kBias > 0 && NumbersOf<kOfK>::kPlain && tile.has_keys()) {
      // The sum of Q times the bias, as products with -kBias in place of codes would be.
      for (int column = 0; column < kHeadDim; column += 8) {
        u32 x[4];
        load_shared16(shared_base() + kLayout.q + column / 64 * kQPanelBytes +
                          swizzled(row, column % 64 / 8), x);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // Columns are in the order of products: 16 of a number each.
          const int number = column / 8 % CodesOfK::kCodesPerHalf;
          bias += (Half::low(x[i]) + Half::high(x[i])) * (-float(CodesOfK::kBias) / CodesOfK::scale(number));
        }
      }
    }
    store_shared(memory.factors() + 8 * row, __float_as_int(factor));
    store_shared(memory.factors() + 8 * row + 4, __float_as_int(factor * bias));
    store_shared(memory.shifts() + 4 * row, __float_as_int(infinity()));
  }
  sync_warpgroup();
}

// Computes the work tiles of the CTA, if there are `more`.
__device__ __forceinline__ void compute(const DecodeParams& p, WorkTiles& work_tiles, bool more, Queries& queries,
                                        CodeTiles tiles) {
  const int warp = uniform(threadIdx.x / 32);
  const int warp_group = warp / 4;
  const float c = score_factor(p);
  const u32 q = uniform_descriptor(shared_base() + kLayout.q, 0);
  const SavedWorkTiles saved(warp);
  const WarpgroupMemory memory(warp_group);
#pragma unroll 1
  while (more) {
    const WorkTile& tile = work_tiles.tile;
    saved.save(work_tiles);
    if (tile.has_keys()) queries.begin_work_tile(p, tile);
    begin_rows(p, tile, memory);
    const WorkTileMask mask(p, tile);
    float O[kStrips][kScores];
    WarpgroupRows rows;
#pragma unroll
    for (int i = 0; i < 2 * kEights; ++i) rows.sum[i] = 0;
#pragma unroll
    for (int i = 0; i < kStrips * kScores; ++i) O[i / kScores][i % kScores] = 0;
    const int end = tile.end;
    const u32 begin_of_k = BlockRows<kOfK>::begin(p, tile), begin_of_v = BlockRows<kOfV>::begin(p, tile);
#pragma unroll 1
    for (int key_tile = tile.begin + warp_group; key_tile < end; key_tile += kWarpGroups) {
      float S[kScores];
      const u32 k = tiles.keys() + begin_of_k, v = tiles.values() + begin_of_v;
      const u32 v_scales = tiles.scales<kOfV>(v);
      const int first_key = threadIdx.x % 128 / 32 * 16 + int(thread_row());
      const bool masked = mask.cuts(key_tile);
      if (masked) clear_tail(tiles.values(), saved.keys() - key_tile * kBlockKeys, sync_warpgroup);
      float c_of_key[2];
      {
        const KeyNumbers keys(tiles.scales<kOfK>(k), first_key);
        multiply_keys(S, k, q, keys);
        c_of_key[0] = keys.factor[0];
        c_of_key[1] = keys.factor[1];
      }
      apply_row_factors(S, memory);
      if (kScoreMode || masked) {
        const WorkTile now = saved.load().tile;
#pragma unroll
        for (int j = 0; j < kEights; ++j) {
          float scores[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[i] = S[4 * j + i] * c_of_key[i / 2];
          const ThreadRows at = rows_of_thread(p, now, 8 * j + int(thread_column()), 1);
          adjust_scores<TransposedOfWarpgroup>(p, scores, at, key_tile, masked);
#pragma unroll
          for (int i = 0; i < 4; ++i) S[4 * j + i] = scores[i];
        }
        c_of_key[0] = c_of_key[1] = c;
      } else {
        c_of_key[0] *= c;
        c_of_key[1] *= c;
      }
      sync_warpgroup();  // all warps have multiplied with the P before
      if (kHidesKeys && masked) {
        const int first = key_tile * kBlockKeys;
        const KeyRange seen_by_all = {mask.seen_by_all.begin - first, mask.seen_by_all.end - first};
        add_hidden_non_finite(S, O, {v, v_scales}, seen_by_all, memory);
      }
      float v_factor[2] = {1, 1};
      if (kVScales == 1) {
        v_factor[0] = load_scale<kOfV>(v_scales, first_key, 0);
        v_factor[1] = load_scale<kOfV>(v_scales, first_key + 8, 0);
      }
      ValueScales::make(memory.value_scales(), v_scales, v_factor);
      transposed_softmax_step(S, O, rows, c_of_key, v_factor, memory);
      multiply_values(O, v, uniform_descriptor(memory.p(), kBlockKeys * kPanelRowBytes), memory.value_scales());
      tiles.release();
    }
    work_tiles = saved.load();
    finish(p, tile, O, rows, memory);
    combine_warp_groups(p, tile, WarpgroupResult{O, memory});
    more = end_work_tile(p, work_tiles);
  }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  const u32 smem = shared_base();
  if (threadIdx.x == 0) {
#pragma unroll
    for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group)
      KBuffers::init(smem + warp_group * kLayout.group_bytes, kArrivals, kWarpsPerGroup);
    fence_mbarrier_init();
  }
  WorkTiles work_tiles;
  bool more = true;
  if (!work_tiles.first(p)) {
    if (!Schedule::kCombinesAtEnd) return;
    more = false;
  }
  const int warp = uniform(threadIdx.x / 32);
  const auto buffers_of = [&](int warp_group) { return smem + warp_group * kLayout.group_bytes; };
  if (warp >= kComputeWarps) {
    registers_drop<kLoadRegisters>();
    const int warp_group = (warp - kComputeWarps) / kGroupLoaders;
    const int tile_warp = (warp - kComputeWarps) % kGroupLoaders;
    const TileWalk tiles(p, work_tiles, more, warp_group);
    named_barrier_sync(kFirstQuery, kCtaThreads);
    if (warp_group < kWarpGroups) load_codes(LaneLoader(p, tiles, tile_warp), buffers_of(warp_group));
    return;
  }
  registers_raise<kComputeRegisters>();
  Queries queries(p, work_tiles.tile, more);
  compute(p, work_tiles, more, queries, CodeTiles(buffers_of(warp / kWarpsPerGroup)));
  if constexpr (Schedule::kCombinesAtEnd) CombineAtEnd<Schedule>::run(p);
}

// Attention forward where K and V are read from memory for few rows of Q, or from a cache: O = softmax(scale Q K^T) V
// and LSE, exact, fp32 accumulation.
//
// Rows are (query, head of the group) of a kv head, so that K and V are read once for all of them. Each CTA computes an
// equal slice of all keys (host_device/stream_k.h). Its warp groups take turns at the tiles of a work tile,
// each with its own state of the online softmax; every warp has 16 rows. Loads run ahead of them over the ends of work
// tiles, so that memory never waits for products, barriers and merges: warp-path groups start them themselves, and
// wide ones, whose products are those of warpgroups, have warps that do nothing else. docs/kernels/decode.md derives
// this.
#include "sm90/common/softmax.cuh"
#include "device/transform.cuh"
#include "sm90/decode/append.cuh"
#include "sm90/decode/output.cuh"
#include "sm90/decode/products.cuh"

enum : int { kHidesKeys = kHasLeft || kHasRight || kTree };  // that exist
static_assert(!kTree || kBlockKeys <= 64);                    // a word of bits

// The keys that rows r and r + 8 of this thread may see: [low[i], high[i]), and from `tokens` on those with a bit in
// tree[i].
struct RowKeys {
  int low[2], high[2];
  int tokens;  // kTree
  unsigned long long tree[2];

  // A bit for each of 64 keys from `key` on: all, but for tokens that the tree mask hides.
  __device__ __forceinline__ unsigned long long bits(int i, int key) const {
    const int token = key - tokens;
    if (token >= 0) return tree[i] >> min(token, 63);
    return token > -64 ? ~(~tree[i] << -token) : ~0ull;
  }
};

// The keys that all rows of a work tile see.
__device__ __forceinline__ KeyRange keys_seen_by_all(const DecodeParams& p, const WorkTile& item) {
  const TileRows rows = rows_of_tile(p, item);
  const Band band = band_of(p);
  const Lengths& n = item.sequence.n;
  KeyRange keys = {visible_keys(band, n, (rows.first + rows.count - 1) / kGroup).begin,
                   visible_keys(band, n, rows.first / kGroup).end};
  if (kTree) keys.end = min(keys.end, n.sk - n.sq);  // the tokens have bits
  return keys;
}

// What a thread knows of its two rows.
struct ThreadRows {
  RowKeys keys;
  int diagonal[2];
  float slope[2];
};

__device__ __forceinline__ ThreadRows rows_of_thread(const DecodeParams& p, const WorkTile& item, int warp_of_group) {
  ThreadRows rows;
  const Lengths& n = item.sequence.n;
  if (kTree) rows.keys.tokens = n.sk - n.sq;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = item.block * kBlockRows + kWarpRows * warp_of_group + int(thread_row()) + 8 * i;
    const int query = min(row / kGroup, n.sq - 1);
    const KeyRange keys = visible_keys(band_of(p), n, query);
    rows.keys.low[i] = keys.begin;
    rows.keys.high[i] = keys.end;
    if (kTree) rows.keys.tree[i] = p.tree_mask[(kPacked ? n.q_start : (long long)(item.batch) * p.sq) + query];
    rows.diagonal[i] = diagonal_of(n, query);
    rows.slope[i] = kAlibi ? alibi_slope(p, item.batch, item.head * kGroup + row % kGroup) : 0;
  }
  return rows;
}

// What a score becomes before the softmax, and -inf where its key is hidden.
__device__ __forceinline__ void adjust_scores(const DecodeParams& p, float (&S)[kBlockKeys / 2],
                                              const ThreadRows& rows, int tile, bool masked) {
  const int first = tile * kBlockKeys + int(thread_column());
  if (kScoreMode) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) {
      const int half = i >> 1 & 1;
      S[i] = transform_score(p, S[i], rows.slope[half], float(rows.diagonal[half] - (first + i / 4 * 8 + (i & 1))));
    }
  }
  if (!masked) return;
  const unsigned long long bits[2] = {kTree ? rows.keys.bits(0, first) : 0, kTree ? rows.keys.bits(1, first) : 0};
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; ++i) {
    const int half = i >> 1 & 1;
    const int key = first + i / 4 * 8 + (i & 1);
    if (key < rows.keys.low[half] || key >= rows.keys.high[half]) S[i] = -infinity();
    if (kTree && (bits[half] >> (key - first) & 1) == 0) S[i] = -infinity();
  }
}

__device__ __forceinline__ bool is_finite(u32 half) {
  constexpr u32 kExponent = FULGUR_INPUT[0] == 'b' ? 0x7f80 : 0x7c00;
  return (half & kExponent) != kExponent;
}

// P is 0 at a hidden key, but 0 * NaN is NaN: NaN and infinity of V count by hand in the rows that see their key, and
// are 0 in the product. `sync` is a barrier of the warp group, which has the tile in common.
template <class Sync>
__device__ __forceinline__ void add_non_finite(float (&O)[kValueDim / 2], const RowKeys& keys, int tile, u32 v,
                                               Sync sync) {
  const auto pair_at = [&](int key, int column) {
    return v + column / 64 * kPanelBytes + swizzled(key, column % 64 / 8) + column % 8 * 2;
  };
  sync();
#pragma unroll 1
  for (int key = 0; key < kBlockKeys; ++key)
#pragma unroll
    for (int i = 0; i < kValueDim / 2; i += 4) {
      const u32 pair = load_shared(pair_at(key, 2 * i + int(thread_column())));
      const float x[2] = {is_finite(pair) ? 0 : low_of(pair), is_finite(pair >> 16) ? 0 : high_of(pair)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = tile * kBlockKeys + key;
        const bool shown = !kTree || (keys.bits(j / 2, at) & 1);
        if (at >= keys.low[j / 2] && at < keys.high[j / 2] && shown) O[i + j] += x[j % 2];
      }
    }
  sync();
#pragma unroll 1
  for (int at = threadIdx.x % kWarpGroupThreads; at < kBlockKeys * kValueDim / 2; at += kWarpGroupThreads) {
    const u32 address = pair_at(at / (kValueDim / 2), at % (kValueDim / 2) * 2);
    const u32 pair = load_shared(address);
    store_shared(address, (is_finite(pair) ? pair & 0xffff : 0) | (is_finite(pair >> 16) ? pair & 0xffff0000 : 0));
  }
  sync();
}

// Whether V of a tile holds NaN or infinity at a key that exists and that some row does not see.
__device__ __forceinline__ bool hides_non_finite(u32 v, int tile, const KeyRange& seen_by_all, int sk) {
  constexpr int kChunks = kValueDim / 8;
  const int first = tile * kBlockKeys;
  const int keys = min(int(kBlockKeys), sk - first);
  const int before = max(min(seen_by_all.begin - first, keys), 0);
  const int behind = max(min(seen_by_all.end - first, keys), before);
  const int hidden = before + keys - behind;
  bool found = false;
#pragma unroll 1
  for (int at = threadIdx.x % 32; at < hidden * kChunks; at += 32) {
    const int i = at / kChunks;
    const int key = i < before ? i : i - before + behind;
    const int column = at % kChunks * 8;
    u32 x[4];
    load_shared16(v + column / 64 * kPanelBytes + swizzled(key, column % 64 / 8), x);
#pragma unroll
    for (int j = 0; j < 4; ++j) found = found || !is_finite(x[j]) || !is_finite(x[j] >> 16);
  }
  return __any_sync(0xffffffff, found);
}

// Computes the work tiles of a slice, from the first one on if there is one.
template <bool wide>
__device__ __forceinline__ void compute_tiles(const DecodeParams& p, const Slice& slice, WorkTiles& items, bool more,
                                              Queries<wide>& queries, const Tiles<wide>& tiles) {
  const int warp = uniform(threadIdx.x / 32);
  const int warp_group = warp / kWarpsPerGroup;
  const int warp_of_group = warp % kWarpsPerGroup;
  const auto sync = [&] {
    if (kWarpgroupPath) fence_async_proxy();
    sync_warp_group(warp_group);
  };
  Products<wide> products(tiles, warp_of_group);
  const float c = kScoreMode == 0 ? p.scale_log2 : 1.f;
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  const u32 q = smem + kLayout.q + warp_of_group * kWarpRows / kProductRows * kProductRows * 128;
  const u32 saved_tiles = smem + kLayout.items + warp * int(sizeof(WorkTiles));
#pragma unroll 1
  while (more) {
    const WorkTile& item = items.item;
    if (lane_of_warp() == 0) store_shared_struct(saved_tiles, items);
    if (item.has_keys()) queries.begin_tile(p, item);
    // Products of warpgroups allow no branch; their rows without a query are zeros.
    const bool has_rows = kWarpgroupPath || warp_of_group * kWarpRows < rows_of_tile(p, item).count;
    const KeyRange seen_by_all = keys_seen_by_all(p, item);
    const ThreadRows thread_rows = rows_of_thread(p, item, warp_of_group);
    float O[kValueDim / 2];
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;
    Rows rows = rows_without_keys();
    u32 P[kBlockKeys / 4];
    const auto take_tile = [&](bool first, int tile) __attribute__((always_inline)) {
      float S[kBlockKeys / 2];
      products.scores(has_rows, first, S, O, P, q, sync);
      const bool masked = tile * kBlockKeys < seen_by_all.begin || (tile + 1) * kBlockKeys > seen_by_all.end;
      if (has_rows) {
        adjust_scores(p, S, thread_rows, tile, masked);
        softmax_step<false>(S, P, O, rows, c);
      }
      if (kHidesKeys && masked) {
        const u32 v = products.v();
        __syncwarp();  // sk, from where the work tiles were left, takes no register of the loop
        const int sk = reinterpret_cast<const WorkTiles*>(raw + kLayout.items)[warp].item.sequence.n.sk;
        if (hides_non_finite(v, tile, seen_by_all, sk)) add_non_finite(O, thread_rows.keys, tile, v, sync);
      }
      products.values(has_rows, O, P);
    };
    int tile = item.begin + warp_group;
    if (tile < item.end) {
      if (kWarpgroupPath) {
        take_tile(true, tile);
        tile += kWarpGroups;
      }
#pragma unroll 1
      for (; tile < item.end; tile += kWarpGroups) take_tile(false, tile);
      queries.release();
      products.finish(O, P);
    } else if (item.has_keys()) {
      queries.release();
    }
    items = load_shared_struct_uniform<WorkTiles>(saved_tiles);
    rows.sum[0] = quad_sum(rows.sum[0]);
    rows.sum[1] = quad_sum(rows.sum[1]);
    if constexpr (kSplitting == kSplitToFill && wide)
      store_split(p, item, rows, O, raw);
    else if constexpr (kWarpGroups > 1)
      combine_warp_groups(p, item, rows, O, raw);
    else
      store_warp_group(p, item, rows, O);
    if (!kCombinesLater && item.splits > 1) end_split(p, item, raw);
    more = items.next(p, slice);
    queries.end_tile(p, item, more);
  }
}

extern "C" __global__ void __launch_bounds__(kCtaThreads, kResidents)
    fulgur_decode(const __grid_constant__ PlanParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (kWarpgroupPath && threadIdx.x == 0) {
#pragma unroll
    for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group) {
      const u32 buffers = smem + warp_group * kLayout.group_bytes;
      KBuffers::init(buffers, kFills, kWarpsPerGroup);
      VBuffers::init(buffers, kFills, kWarpsPerGroup);
      mbarrier_init(buffers + kLayout.v_tail, 1);
    }
    QueryBuffer::init(smem, 32 * kQueryWarps, kComputeWarps);
    fence_mbarrier_init();
  }
  if (kBoxKeys > 0 && threadIdx.x == 32 * kComputeWarps) {
    tma_prefetch_map(&p.k_map);
    tma_prefetch_map(&p.v_map);
  }
  if (kAppends && kUnreadRows) RowWriter(append_of(p)).append_unread();
  Slice& slice = *reinterpret_cast<Slice*>(raw + kLayout.slice);
  WorkTiles items;
  bool more = true;
  if (kSplitting == kSplitToFill) {
    if (!find_split_to_fill(p, items.item)) return;
    if (kWarpgroupPath) __syncthreads();  // the barriers are there
  } else {
    if (kDynamic)
      begin_dynamic(p, raw, slice.turns);
    else if (!find_slice(p, raw, slice))
      return;
    items = tiles_of_slice(slice);
    more = items.next(p, slice);
  }
  if (kAppends) append_of_tiles(p, slice, items, more);
  const int warp = uniform(threadIdx.x / 32);
  const auto buffers_of = [&](int warp_group) {
    return smem + (kWarpGroups > 1 ? warp_group * kLayout.group_bytes : 0);
  };
  if (kWarpgroupPath && warp >= kComputeWarps) {
    if (kMovesRegisters) registers_drop<kLoadRegisters>();
    const int warp_group = (warp - kComputeWarps) / kTileWarps;
    const int tile_warp = (warp - kComputeWarps) % kTileWarps;
    const TileWalk tiles(p, slice, items, more, warp_group);
    named_barrier_sync(kFirstQuery, kCtaThreads);
    if (kBoxKeys == 0)
      load_by_lanes(p, LaneLoader(p, tiles, tile_warp), buffers_of(warp_group));
    else if (tile_warp == 0)
      load_keys_by_boxes(p, BoxLoader<kHeadPanels>(p, tiles), buffers_of(warp_group));
    else if (tile_warp == 1)
      load_values_by_boxes(p, BoxLoader<kValuePanels>(p, tiles), buffers_of(warp_group));
    else
      load_queries(p, tiles, threadIdx.x % 64);
    return;
  }
  if (kMovesRegisters) registers_raise<kComputeRegisters>();
  if constexpr (kWarpgroupPath) {
    Queries<true> queries(p, items.item, more);
    compute_tiles(p, slice, items, more, queries, Tiles<true>(buffers_of(warp / kWarpsPerGroup)));
  } else {
    const int warp_group = warp / kWarpsPerGroup;
    const TileWalk tiles(p, slice, items, more, warp_group);
    const LaneLoader load(p, tiles, warp % kWarpsPerGroup);
    Queries<false> queries(p, items.item, more);
    compute_tiles(p, slice, items, more, queries, Tiles<false>(load, buffers_of(warp_group)));
  }
  if constexpr (kCombinesAtEnd) combine_at_end(p, slice.turns, raw);
}

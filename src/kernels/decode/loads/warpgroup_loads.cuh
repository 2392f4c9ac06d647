// Loads of the warpgroup path, by warps that do nothing else (producers): K and V by TMA, or by lanes where TMA cannot
// address them, and Q.
#pragma once
#include "sm90/common/ring.cuh"
#include "decode/loads/lane_loader.cuh"
#include "decode/loads/page_ids.cuh"
#include "decode/loads/query.cuh"
#include "sm90/ptx/tma.cuh"

enum : int {
  // Warps that load Q, among those that load for warp group 0: two with nothing else to do, if there are four in all.
  kQueryWarps = kStoredByLanes ? int(kTileLoaders) : kTileLoaders == 4 ? 2 : 1,
  // Arrivals that fill a buffer: of the lane that requests boxes, of every lane that copies, or of warps that convert.
  kFills = kStoredByLanes ? (kConverts ? 1 : 32) * kTileLoaders : 1,
};

using QueryBuffer = Buffers<kLayout.q, 0, kLayout.q_full, kLayout.q_empty, 1>;
// K and V of a warp group, at byte offsets from its first buffer.
using KBuffers = Buffers<kLayout.k, kLayout.k_bytes, kLayout.k_full, kLayout.k_empty, kKStages>;
using VBuffers = Buffers<kLayout.v, kLayout.v_bytes, kLayout.v_full, kLayout.v_empty, kVStages>;

// Copies `rows` rows of Q of a work tile, from row `first` on, by `threads` threads, of which this is number `thread`.
// Rows and columns that do not exist become zeros.
template <int threads, int rows = kBlockRows>
__device__ __forceinline__ void copy_query(const DecodeParams& p, const WorkTile& tile, int thread, int first = 0) {
#pragma unroll 4
  for (int i = thread; i < rows * kQueryChunks; i += threads) {
    const int at = first * kQueryChunks + i;
    const QueryChunk chunk = query_chunk(p, tile, at);
    if (kQWhole && !kCodesQ)
      async_copy16(u32(__cvta_generic_to_shared(raw + query_place(at))), chunk.from, chunk.count > 0 ? 16 : 0);
    else
      *reinterpret_cast<uint4*>(raw + query_place(at)) = chunk.load();
  }
}

// Loads Q of all work tiles but the first one, which the warp groups load.
class QueryLoader {
 public:
  __device__ __forceinline__ QueryLoader(const TileWalk& tiles)
      : buffer_(shared_base(), !tiles.in_first_work_tile()) {}

  // Loads Q of the work tile that `tiles` begins.
  __device__ __forceinline__ void begin_work_tile(const DecodeParams& p, const TileWalk& tiles, int thread) {
    if (tiles.in_first_work_tile()) return;
    buffer_.wait_empty();
    copy_query<32 * kQueryWarps>(p, tiles.work_tile(), thread);
    if (kQWhole)
      async_copy_arrive(buffer_.full());
    else
      mbarrier_arrive(buffer_.full());
    buffer_.advance();
  }

 private:
  QueryBuffer buffer_;
};

// Loads Q of all work tiles, by warps that load nothing else.
__device__ __forceinline__ void load_queries(const DecodeParams& p, TileWalk tiles, int thread) {
  QueryLoader query(tiles);
#pragma unroll 1
  for (; tiles.more(); tiles.next_work_tile()) query.begin_work_tile(p, tiles, thread);
}

// Loads K and V of a warp group by the lanes of kTileLoaders warps. Those of warp group 0 load Q, too.
__device__ __forceinline__ void load_by_lanes(const DecodeParams& p, LaneLoader load, u32 buffers) {
  KBuffers keys(buffers, 1);
  VBuffers values(buffers, 1);
  QueryLoader query(load.tiles());
#pragma unroll 1
  for (; load.more(); load.next()) {
    if (load.tiles().begins_work_tile() && load.tiles().warp_group() == 0)
      query.begin_work_tile(p, load.tiles(), threadIdx.x % (32 * kTileLoaders));
    const bool whole = load.whole();
    keys.wait_empty();
    if (whole)
      load.copy_keys<true>(keys.address());
    else
      load.copy_keys<false>(keys.address());
    async_copy_arrive(keys.full());
    keys.advance();
    values.wait_empty();
    if (whole)
      load.copy_values<true>(values.address());
    else
      load.copy_values<false>(values.address());
    async_copy_arrive(values.full());
    values.advance();
  }
}

// The loads of K or of V by TMA, which one warp issues. Each lane requests a box: kBoxKeys rows of a panel. Lanes of
// the same rows and successive panels lie side by side, as memory then has these rows open.
template <int panels>
class BoxLoader {
 public:
  __device__ __forceinline__ BoxLoader(const DecodeParams& p, const TileWalk& tiles) : p_(p), tiles_(tiles) {
    if (tiles_.more()) fetch_id(true);
  }

  __device__ __forceinline__ const TileWalk& tiles() const { return tiles_; }
  __device__ __forceinline__ void next() {
    tiles_.next();
    if (tiles_.more()) fetch_id(tiles_.begins_work_tile());
  }

  __device__ __forceinline__ void copy(const TensorMapBlob& map, u32 to, u32 barrier) const {
    if (lane() == 0) mbarrier_arrive_expect(barrier, panels * kPanelBytes);
    if (box() >= kBoxes) return;
    const int panel = lane() % panels;
    tma_load(to + panel * kPanelBytes + box() * kBoxKeys * 128, &map, barrier,
             {64 * panel, row_, tiles_.work_tile().head, entry_}, Keep::kShort);
  }

 protected:
  enum : int { kBoxes = kBlockKeys / max_of(kBoxKeys, 1) };
  static_assert(kBoxKeys == 0 || kBoxes * panels <= 32 || kColumnGroups > 1);  // wide_loads.cuh has other loops

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int box() { return lane() / panels; }

 private:
  // Finds this lane's box, a tile before it is loaded. TMA writes zeros for boxes outside of the tensor.
  __device__ __forceinline__ void fetch_id(bool begins) {
    const DecodeSequence& s = tiles_.work_tile().sequence;
    const int key = tiles_.tile() * kBlockKeys + box() * kBoxKeys;
    row_ = s.n.k_start + key;
    entry_ = kPackedK ? 0 : s.entry;
    if (kPage == 0) return;
    const int from = s.n.k_start + tiles_.tile() * kBlockKeys;
    ids_.go(p_, tiles_.work_tile(), from / max_of(kPage, 1), begins);
    const int id = ids_.id(row_ / max_of(kPage, 1), (from + kBlockKeys - 1) / max_of(kPage, 1));
    entry_ = key < s.n.sk ? id : -1;
    row_ %= max_of(kPage, 1);
  }

 protected:
  const DecodeParams& p_;
  TileWalk tiles_;
  int row_, entry_;

 private:
  PageIds ids_;
};

// Loads K.
__device__ __forceinline__ void load_keys_by_boxes(const DecodeParams& p, BoxLoader<kKPanels> load, u32 buffers) {
  KBuffers keys(buffers, 1);
#pragma unroll 1
  for (; load.tiles().more(); load.next()) {
    keys.wait_empty();
    load.copy(p.k_map, keys.address(), keys.full());
    keys.advance();
  }
}

// Clears panels of V in a tile from row `valid` on, by a warp, once their boxes have arrived at the barrier `tail`.
template <int panels>
__device__ __forceinline__ void clear_values(u32 values, int valid, u32 tail, u32& tail_parity) {
  mbarrier_wait(tail, tail_parity);
  tail_parity ^= 1;
#pragma unroll 1
  for (int panel = 0; panel < panels; ++panel)
    for (int at = valid * 128 + 16 * int(threadIdx.x % 32); at < kPanelBytes; at += 512)
      store_shared_zero16(values + panel * kPanelBytes + at);
  fence_async_proxy();
  __syncwarp();
}

// Loads V of a warp group. Where no warp loads Q alone, that of warp group 0 loads Q, too.
__device__ __forceinline__ void load_values_by_boxes(const DecodeParams& p, BoxLoader<kVPanels> load, u32 buffers) {
  VBuffers values(buffers, 1);
  QueryLoader query(load.tiles());
  const u32 tail = buffers + kLayout.v_tail;
  u32 tail_parity = 0;
#pragma unroll 1
  for (; load.tiles().more(); load.next()) {
    if (kTileLoaders == 2 && load.tiles().begins_work_tile() && load.tiles().warp_group() == 0)
      query.begin_work_tile(p, load.tiles(), threadIdx.x % 32);
    values.wait_empty();
    // V after the end of a sequence meets P = 0, but 0 * NaN is NaN. It is cleared where memory may have other rows.
    const int valid = load.tiles().work_tile().sequence.n.sk - load.tiles().tile() * kBlockKeys;
    const bool clear = (kPackedK || kSeqUsedK || kPage > 0) && valid < kBlockKeys;
    load.copy(p.v_map, values.address(), clear ? tail : values.full());
    if (clear) {
      clear_values<kVPanels>(values.address(), valid, tail, tail_parity);
      if (threadIdx.x % 32 == 0) mbarrier_arrive(values.full());
    }
    values.advance();
  }
}

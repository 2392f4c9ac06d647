// Loads of K and V of wide heads by TMA, to one ring: a tile of K and, unless V is the first columns of K, the tile of
// V after it. Each panel of a tile has a barrier that says it is full. Two barriers say that a buffer is empty: one for
// the panels of the columns of V that the first warpgroup multiplies, one for all others.
#pragma once
#include "decode/loads/warpgroup_loads.cuh"

static_assert(kBoxKeys > 0 && kKStages > 1);

// The ring, as the warp that fills it or a warp that computes sees it.
class PanelRing {
 public:
  enum : int {
    kPanels = wide_panels(kTile),
    kWarpgroupPanels = kWarpColumns / 64,  // of V, that a warpgroup multiplies
  };

  __device__ __forceinline__ explicit PanelRing(u32 first_parity) : ring_(first_parity) {}

  __device__ __forceinline__ u32 address() const { return shared_base() + kLayout.k + ring_.stage() * kLayout.k_bytes; }
  // P of the tile of V.
  __device__ __forceinline__ u32 p() const { return address() + kVPanels * kPanelBytes; }
  __device__ __forceinline__ u32 full(int panel) const {
    return shared_base() + kLayout.k_full + 8 * (ring_.stage() * kPanels + panel);
  }
  __device__ __forceinline__ void wait_full(int panel) const { mbarrier_wait(full(panel), ring_.parity()); }
  __device__ __forceinline__ void wait_empty(int warpgroup) const { mbarrier_wait(empty(warpgroup), ring_.parity()); }
  __device__ __forceinline__ void advance() { ring_.advance(kKStages); }
  // Releases what a warpgroup has read of a tile by products, which are complete.
  __device__ __forceinline__ void release(int warpgroup) const {
    mbarrier_arrive_if(empty(warpgroup), threadIdx.x % 32 == 0);
  }
  static __device__ __forceinline__ void init() {
#pragma unroll 1
    for (int i = 0; i < kKStages * kPanels; ++i) mbarrier_init(shared_base() + kLayout.k_full + 8 * i, 1);
#pragma unroll 1
    for (int i = 0; i < kKStages * kColumnGroups; ++i)
      mbarrier_init(shared_base() + kLayout.k_empty + 8 * i, kWarpsPerGroup);
#pragma unroll 1
    for (int i = 0; i < kColumnGroups; ++i) mbarrier_init(shared_base() + kLayout.v_tail + 8 * i, 1);
  }

 private:
  __device__ __forceinline__ u32 empty(int warpgroup) const {
    return shared_base() + kLayout.k_empty + 8 * (ring_.stage() * kColumnGroups + warpgroup);
  }

  Ring ring_;
};

// The panels of a warpgroup in tiles, which one warp loads, those after V with those of the second warpgroup. Each lane
// finds a box of keys of the next tile, and the boxes of all panels are shared among the lanes.
class PanelLoader : public BoxLoader<1> {
 public:
  __device__ __forceinline__ PanelLoader(const DecodeParams& p, const TileWalk& tiles, int warpgroup)
      : BoxLoader(p, tiles), warpgroup_(warpgroup) {}

  // Keys of the tile that the sequence has.
  __device__ __forceinline__ int valid() const {
    return tiles_.work_tile().sequence.n.sk - tiles_.tile() * kBlockKeys;
  }
  __device__ __forceinline__ int first_panel() const { return warpgroup_ * kPanels; }

  // Loads a tile of `panels` panels once their buffer is empty. They arrive at their barriers or, if it is not 0, those
  // of the warpgroup in V at `tail`.
  template <int panels>
  __device__ __forceinline__ void copy_tile(const TensorMapBlob& map, const PanelRing& ring, u32 tail) const {
    ring.wait_empty(warpgroup_);
    if (!p_.v_in_k) ring.wait_empty(1 - warpgroup_);
    copy_panels<panels>(map, ring, first_panel(), first_panel() + kPanels, tail);
    if (warpgroup_ == 0) return;
    ring.wait_empty(0);  // both have read P, which was in the panel after V
    copy_panels<panels>(map, ring, 2 * kPanels, PanelRing::kPanels, 0);
  }

  // Clears V from row `valid` on, where all rows have arrived at `tail`, and passes it on.
  __device__ __forceinline__ void clear(const PanelRing& ring, u32 tail, u32& tail_parity) const {
    clear_values<kPanels>(ring.address() + first_panel() * kPanelBytes, valid(), tail, tail_parity);
    if (lane() < kPanels) mbarrier_arrive(ring.full(first_panel() + lane()));
  }

 private:
  enum : int { kPanels = PanelRing::kWarpgroupPanels };

  // Loads the panels from `first` to before `last` of a tile that has `panels`.
  template <int panels>
  __device__ __forceinline__ void copy_panels(const TensorMapBlob& map, const PanelRing& ring, int first, int last,
                                              u32 barrier) const {
    if (barrier != 0) {
      if (lane() == 0) mbarrier_arrive_expect(barrier, (last - first) * kPanelBytes);
    } else if (first + lane() < last) {
      mbarrier_arrive_expect(ring.full(first + lane()), first + lane() < panels ? kPanelBytes : 0);
    }
    __syncwarp();
#pragma unroll 1
    for (int at = 0; at < kBoxes * (last - first); at += 32) {
      const int panel = first + (at + lane()) / kBoxes, box = (at + lane()) % kBoxes;
      const int row = __shfl_sync(0xffffffff, row_, box), entry = __shfl_sync(0xffffffff, entry_, box);
      if (panel < min(last, panels))
        tma_load(ring.address() + panel * kPanelBytes + box * kBoxKeys * 128, &map,
                 barrier != 0 ? barrier : ring.full(panel), {64 * panel, row, tiles_.work_tile().head, entry},
                 Keep::kShort);
    }
  }

  int warpgroup_;
};

// Fills the ring, by a warp that loads nothing else.
__device__ __forceinline__ void load_panels(const DecodeParams& p, PanelLoader load, u32 tail) {
  PanelRing ring(1);
  u32 tail_parity = 0;
#pragma unroll 1
  for (; load.tiles().more(); load.next()) {
    // As in load_values_by_boxes. Scores of these keys are hidden, whatever K is.
    const bool clear = (kPackedK || kSeqUsedK || kPage > 0) && load.valid() < kBlockKeys;
    load.copy_tile<kKPanels>(p.k_map, ring, clear && p.v_in_k ? tail : 0);
    if (!p.v_in_k) {
      ring.advance();
      load.copy_tile<kVPanels>(p.v_map, ring, clear ? tail : 0);
    }
    if (clear) load.clear(ring, tail, tail_parity);
    ring.advance();
  }
}

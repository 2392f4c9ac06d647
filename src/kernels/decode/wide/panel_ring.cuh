// Loads of K and V of wide heads by TMA, to one ring: a tile of K and, unless V is the first columns of K, the tile of
// V after it. Each panel of a tile has a barrier of its own.
#pragma once
#include "decode/loads/warpgroup_loads.cuh"

static_assert(kBoxKeys > 0);

// The ring, as the warp that fills it or a warp that computes sees it.
class PanelRing {
 public:
  enum : int { kPanels = wide_panels(kTile) };

  __device__ __forceinline__ PanelRing(u32 smem, u32 first_parity) : smem_(smem), ring_(first_parity) {}

  __device__ __forceinline__ u32 address() const { return smem_ + kLayout.k + ring_.stage() * kLayout.k_bytes; }
  __device__ __forceinline__ u32 full(int panel) const {
    return smem_ + kLayout.k_full + 8 * (ring_.stage() * kPanels + panel);
  }
  __device__ __forceinline__ void wait_full(int panel) const { mbarrier_wait(full(panel), ring_.parity()); }
  __device__ __forceinline__ void wait_empty() const { mbarrier_wait(empty(), ring_.parity()); }
  __device__ __forceinline__ void advance() { ring_.advance(kKStages); }
  // Releases a tile that only products have read, which are complete.
  __device__ __forceinline__ void release() {
    mbarrier_arrive_if(empty(), threadIdx.x % 32 == 0);
    advance();
  }
  static __device__ __forceinline__ void init(u32 smem) {
#pragma unroll 1
    for (int i = 0; i < kKStages * kPanels; ++i) mbarrier_init(smem + kLayout.k_full + 8 * i, 1);
#pragma unroll 1
    for (int i = 0; i < kKStages; ++i) mbarrier_init(smem + kLayout.k_empty + 8 * i, kComputeWarps);
  }

 private:
  __device__ __forceinline__ u32 empty() const { return smem_ + kLayout.k_empty + 8 * ring_.stage(); }

  u32 smem_;
  Ring ring_;
};

// Each lane finds a box of keys of the next tile, and the boxes of all panels are shared among the lanes.
class PanelLoader : public BoxLoader<1> {
 public:
  __device__ __forceinline__ PanelLoader(const DecodeParams& p, const TileWalk& tiles) : BoxLoader(p, tiles) {}

  // Keys of the tile that the sequence has.
  __device__ __forceinline__ int valid() const {
    return tiles_.work_tile().sequence.n.sk - tiles_.tile() * kBlockKeys;
  }

  // Loads `panels` panels, which arrive at their barriers or, if it is not 0, all at `barrier`.
  template <int panels>
  __device__ __forceinline__ void copy_panels(const TensorMapBlob& map, const PanelRing& ring, u32 barrier) const {
    if (barrier != 0) {
      if (lane() == 0) mbarrier_arrive_expect(barrier, panels * kPanelBytes);
    } else if (lane() < PanelRing::kPanels) {
      mbarrier_arrive_expect(ring.full(lane()), lane() < panels ? kPanelBytes : 0);
    }
    __syncwarp();
#pragma unroll
    for (int first = 0; first < kBoxes * panels; first += 32) {
      const int panel = (first + lane()) / kBoxes, box = (first + lane()) % kBoxes;
      const int row = __shfl_sync(0xffffffff, row_, box), entry = __shfl_sync(0xffffffff, entry_, box);
      if (panel < panels)
        tma_load(ring.address() + panel * kPanelBytes + box * kBoxKeys * 128, &map,
                 barrier != 0 ? barrier : ring.full(panel), {64 * panel, row, tiles_.work_tile().head, entry},
                 Keep::kShort);
    }
  }
};

// Fills the ring, by a warp that loads nothing else.
__device__ __forceinline__ void load_panels(const DecodeParams& p, PanelLoader load, u32 smem) {
  PanelRing ring(smem, 1);
  const u32 tail = smem + kLayout.v_tail;
  u32 tail_parity = 0;
#pragma unroll 1
  for (; load.tiles().more(); load.next()) {
    // As in load_values_by_boxes. Scores of these keys are hidden, whatever K is.
    const int valid = load.valid();
    const bool clear = (kPackedK || kSeqUsedK || kPage > 0) && valid < kBlockKeys;
    ring.wait_empty();
    load.copy_panels<kKPanels>(p.k_map, ring, clear && p.v_in_k ? tail : 0);
    if (!p.v_in_k) {
      ring.advance();
      ring.wait_empty();
      load.copy_panels<kVPanels>(p.v_map, ring, clear ? tail : 0);
    }
    if (clear) {
      clear_values(ring.address(), valid, tail, tail_parity);
      if (threadIdx.x % 32 < PanelRing::kPanels) mbarrier_arrive(ring.full(threadIdx.x % 32));
    }
    ring.advance();
  }
}

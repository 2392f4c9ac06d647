// The keys that the lanes of a warp load, tile after tile, and where they lie in memory. Page ids are loaded a tile
// before the keys that need them, or far before (PageIds).
#pragma once
#include "decode/loads/page_ids.cuh"
#include "decode/loads/tile_walk.cuh"

class LaneKeys {
 public:
  enum : int {
    kRowLanes = max_of(kKRowBytes, kVRowBytes) / 16,    // that copy a row of a panel together, 16 bytes each
    kRowsAtOnce = 32 / kRowLanes,                       // of a warp
    kRows = kBlockKeys / (kRowsAtOnce * kTileLoaders),  // of a tile, of which a lane copies 16 bytes
    kRowsOfLoader = kRowsAtOnce * kRows,                // of a tile, that a warp copies
    kKeysOfLoader = kBlockKeys / kTileLoaders,          // of a tile, whose scales and blocks a warp copies
    kScaleKeys = (kKeysOfLoader + 31) / 32,             // of these, whose scales a lane copies
    kBoxes = kBlockKeys / max_of(kBoxKeys, 1),          // of a tile
  };

  // `warp`: the number of this warp among those that load a tile together.
  __device__ __forceinline__ LaneKeys(const DecodeParams& p, const TileWalk& tiles, int warp) : p_(p), tiles_(tiles) {
    const u32 lane = threadIdx.x % 32;
    row_ = kRowsOfLoader * warp + lane / kRowLanes;
    column_ = 8 * (lane % kRowLanes);
    if (more()) fetch_ids();
  }

  __device__ __forceinline__ const TileWalk& tiles() const { return tiles_; }
  // Whether there is a tile to load.
  __device__ __forceinline__ bool more() const { return tiles_.more(); }
  // Goes to the next tile.
  __device__ __forceinline__ void next() {
    tiles_.next();
    if (more()) fetch_ids();
  }

 protected:
  enum : int {
    // A warp that waited for the ids of each tile would wait for all that its SM has requested by TMA before.
    kFarIds = kPage > 0 && kBoxKeys > 0 && kWarpgroupPath,
    // Successive rows of a lane that are in one page for certain, and equally far apart in memory.
    kRunRows = kPage == 0 ? int(kRows) : kPage % 16 == 0 && !kLeftPad ? min_of(kRows, max_of(16 / kRowsAtOnce, 1)) : 1,
  };

  // The key of the lane's i-th row, counted from the first one of the sequence, and whether it exists.
  __device__ __forceinline__ int key(int i) const { return tiles_.tile() * kBlockKeys + row_ + kRowsAtOnce * i; }
  __device__ __forceinline__ bool is_there(int i) const {
    return key(i) < tiles_.work_tile().sequence.n.sk && (kPage == 0 || u32(ids_[i / kRunRows]) < u32(p_.pages.entries));
  }

  // The lane's i-th row of K or V, from the lane's column on.
  template <class Type>
  __device__ __forceinline__ const typename Type::Memory* row(const StridedTensor& t, int i) const {
    const WorkTile& tile = tiles_.work_tile();
    const DecodeSequence& s = tile.sequence;
    const long long entry = kPage > 0 ? ids_[i / kRunRows] : kPackedK ? 0 : s.entry;
    const int row = kPage > 0 ? (s.n.k_start + key(i)) % max_of(kPage, 1) : s.n.k_start + key(i);
    return static_cast<const typename Type::Memory*>(t.data) + entry * t.batch + row * t.row + tile.head * t.head +
           column_ * 2 / int(sizeof(typename Type::Memory));
  }

  // The i-th key of a tile whose scales this lane copies; -1: it has none.
  __device__ __forceinline__ int scale_key(int i) const {
    const int lane = threadIdx.x % 32;
    return kKeysOfLoader >= 32 || lane < kKeysOfLoader ? row_ / kRowsOfLoader * kKeysOfLoader + 32 * i + lane : -1;
  }

  // The page of a key of the tile, which may be another one in each lane of the warp.
  __device__ __forceinline__ int far_id(int key) const {
    const DecodeSequence& s = tiles_.work_tile().sequence;
    const int first_key = tiles_.tile() * kBlockKeys, row = s.n.k_start + first_key;
    const int id = far_ids_.id((row + key) / max_of(kPage, 1), (row + kBlockKeys - 1) / max_of(kPage, 1));
    return first_key + key < s.n.sk ? id : -1;
  }
  // The page of the lane's box, and of its i-th key with scales.
  __device__ __forceinline__ int id_of_box() const {
    return kFarIds ? far_id(int(threadIdx.x % 32) * kBoxKeys) : ids_[0];
  }
  __device__ __forceinline__ int id_of_scales(int i) const {
    return kFarIds ? far_id(max(scale_key(i), 0)) : scale_ids_[i];
  }

  const DecodeParams& p_;
  TileWalk tiles_;
  int row_, column_;            // of the lane's first row in a tile, in 16-bit elements; row_ says the warp, too
  int ids_[kRows / kRunRows];   // pages of the lane's rows, or in the first one of its box
  int scale_ids_[kScaleKeys];   // pages of scale_key()

 private:
  __device__ __forceinline__ void fetch_ids() {
    if (kPage == 0) return;
    const DecodeSequence& s = tiles_.work_tile().sequence;
    if constexpr (kFarIds) {
      const int row = s.n.k_start + tiles_.tile() * kBlockKeys;
      return far_ids_.go(p_, tiles_.work_tile(), row / max_of(kPage, 1), tiles_.begins_work_tile());
    }
    const int* const ids = page_ids(p_, tiles_.work_tile());
    if constexpr (kBoxKeys > 0) {
      const int box_key = tiles_.tile() * kBlockKeys + int(threadIdx.x % 32) * kBoxKeys;
      ids_[0] = box_key < s.n.sk ? page_id(p_, ids, (s.n.k_start + box_key) / max_of(kPage, 1)) : -1;
    }
#pragma unroll
    for (int i = 0; kBoxKeys == 0 && i < kRows; i += kRunRows)
      ids_[i / kRunRows] = key(i) < s.n.sk ? page_id(p_, ids, (s.n.k_start + key(i)) / max_of(kPage, 1)) : -1;
    if (kScalesOfKey == 0 || kHeads > 1) return;
#pragma unroll
    for (int i = 0; i < kScaleKeys; ++i) {
      const int with_scales = tiles_.tile() * kBlockKeys + max(scale_key(i), 0);
      scale_ids_[i] = with_scales < s.n.sk ? page_id(p_, ids, (s.n.k_start + with_scales) / max_of(kPage, 1)) : -1;
    }
  }

  PageIds far_ids_;  // if kFarIds, in place of ids_ and scale_ids_
};

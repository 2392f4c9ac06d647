// K and V on their way into the ring of a team, and Q into its place.
#pragma once
#include "shared/async_copy.cuh"
#include "shared/fragment_store.cuh"
#include "sm90/decode_items.cuh"

enum : int {
  kStageBytes = kLayout.k_bytes + kLayout.v_bytes,
  kPanelBytes = kBlockKeys * 128,
  kLoadRows = kBlockKeys / (4 * kTeamWarps),  // rows that a lane copies of: eight lanes copy 128 bytes of a row
};

// Where chunk `chunk` of 16 bytes lies in a panel's row: no two rows of eight have a chunk in the same banks.
__device__ __forceinline__ u32 swizzled(u32 row, u32 chunk) { return row * 128 + ((chunk ^ row) % 8 << 4); }

// Bytes of the 16 from column `column` on that a row of `dim` columns has.
__device__ __forceinline__ u32 bytes_of_chunk(int column, int dim) { return min(max(dim - column, 0), 8) * 2; }

// The loads of a warp, which run ahead of its products over all items: a tile of its team at a time.
class DecodeLoader {
 public:
  __device__ __forceinline__ DecodeLoader(const DecodeParams& p, const Share& share, u32 smem, int team, int team_warp)
      : p_(p), items_(p, share), team_(team) {
    const u32 lane = threadIdx.x % 32;
    row_ = 4 * team_warp + lane / 8;
    column_ = 8 * (lane % 8);
    ring_ = smem + kLayout.ring + team * kStages * kStageBytes;
    find_tile();
  }

  // Starts the loads of the next tile, of which there may be none, as one group.
  __device__ __forceinline__ void start() {
    if (more_) {
      copy();
      tile_ += kTeams;
      if (tile_ < items_.item.end)
        fetch_ids();
      else
        find_tile();
    }
    async_copy_commit();
    if (++stage_ == kStages) stage_ = 0;
  }

 private:
  // The first tile of the next item that has one for this team.
  __device__ __forceinline__ void find_tile() {
    do {
      more_ = items_.next();
      tile_ = items_.item.begin + team_;
    } while (more_ && tile_ >= items_.item.end);
    if (more_) fetch_ids();
  }

  // The key of this lane's i-th row, from the first of the sequence on.
  __device__ __forceinline__ int key(int i) const { return tile_ * kBlockKeys + row_ + 4 * kTeamWarps * i; }

  // Page ids come one tile ahead of the loads that need them.
  __device__ __forceinline__ void fetch_ids() {
    if (kPage == 0) return;
    const DecodeSequence& s = items_.item.sequence;
#pragma unroll
    for (int i = 0; i < kLoadRows; ++i)
      ids_[i] = key(i) < s.n.sk ? p_.page_table[s.pages + (s.n.k_start + key(i)) / most(kPage, 1)] : -1;
  }

  __device__ __forceinline__ void copy() {
    const DecodeItem& item = items_.item;
    const DecodeSequence& s = item.sequence;
    const u32 k = ring_ + stage_ * kStageBytes;
#pragma unroll
    for (int i = 0; i < kLoadRows; ++i) {
      const bool here = kPage > 0 ? u32(ids_[i]) < u32(p_.entries) : key(i) < s.n.sk;
      const long long entry = !here ? 0 : kPage > 0 ? ids_[i] : kPackedK ? 0 : s.entry;
      const int row = !here ? 0 : kPage > 0 ? (s.n.k_start + key(i)) % most(kPage, 1) : s.n.k_start + key(i);
      const u32 to = k + swizzled(row_ + 4 * kTeamWarps * i, column_ / 8);
      copy_row<kHeadDim>(to, p_.k, entry, row, item.head, here ? p_.d : 0);
      copy_row<kValueDim>(to + kLayout.k_bytes, p_.v, entry, row, item.head, here ? p_.dv : 0);
    }
  }

  // This lane's columns of a row, of which `dim` exist.
  template <int columns>
  __device__ __forceinline__ void copy_row(u32 to, const StridedTensor& t, long long entry, int row, int head,
                                           int dim) const {
    const unsigned short* from = t.data + entry * t.batch + row * t.row + head * t.head + column_;
#pragma unroll
    for (int panel = 0; panel < (columns + 63) / 64; ++panel)
      if (64 * panel + 64 <= columns || 64 * panel + column_ < columns) {
        const u32 bytes = bytes_of_chunk(64 * panel + column_, dim);
        async_copy16(to + panel * kPanelBytes, bytes > 0 ? from + 64 * panel : t.data, bytes);
      }
  }

  const DecodeParams& p_;
  DecodeItems items_;
  int team_, tile_ = 0, stage_ = 0;
  bool more_ = false;
  int row_, column_;
  u32 ring_;
  int ids_[kLoadRows];
};

// Rows of an item: of a kv head, (query, head of its group).
struct ItemRows {
  int first, count;
};

__device__ __forceinline__ ItemRows rows_of_item(const DecodeParams& p, const DecodeItem& item) {
  const int first = item.block * kBlockRows;
  return {first, min(item.sequence.n.sq * kGroup - first, int(kBlockRows))};
}

__device__ __forceinline__ unsigned short* item_row(const DecodeParams& p, const StridedTensor& t,
                                                    const DecodeItem& item, int row) {
  return row_of(t, item.batch, item.sequence.n.q_start + row / kGroup, item.head * kGroup + row % kGroup);
}

// Q of an item, by all threads; zeros where there is none.
__device__ __forceinline__ void load_q(const DecodeParams& p, const DecodeItem& item, unsigned char* shared) {
  constexpr int kChunks = kHeadDim / 8;
  const ItemRows rows = rows_of_item(p, item);
#pragma unroll 1
  for (int at = threadIdx.x; at < kBlockRows * kChunks; at += kThreads) {
    const int row = at / kChunks;
    const int column = at % kChunks * 8;
    uint4 x = {0, 0, 0, 0};
    if (row < rows.count) {
      const unsigned short* from = item_row(p, p.q, item, rows.first + row) + column;
      if (p.q_whole && column + 8 <= p.d) {
        x = *reinterpret_cast<const uint4*>(from);
      } else {
        unsigned short y[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) y[i] = column + i < p.d ? from[i] : 0;
        x = {y[0] | u32(y[1]) << 16, y[2] | u32(y[3]) << 16, y[4] | u32(y[5]) << 16, y[6] | u32(y[7]) << 16};
      }
    }
    *reinterpret_cast<uint4*>(shared + kLayout.q + column / 64 * kBlockRows * 128 + swizzled(row, column % 64 / 8)) =
        x;
  }
}

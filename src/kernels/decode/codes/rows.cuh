// How rows of codes lie in shared memory: in panels, in rows of blocks, or with the rows of several heads side by side.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/work_tile.cuh"

// K or V of a key where a CTA reads several heads (kHeads): their rows side by side.
template <int tensor>
struct RowsOfHeads {
  enum : int {
    kBytes = code_row_bytes(stored_type(tensor), columns_of(tensor)),  // of a head
    kPitch = pitch_of_heads(kHeads * kBytes),
  };
  // The 16 bytes in which the row of this warp's head begins.
  static __device__ __forceinline__ u32 place() { return kHeads == 1 ? 0 : head_of_warp() * kBytes / 16 * 16; }
};

// K or V of a key as blocks of codes with their scales.
template <int tensor>
struct BlockRows {
  static constexpr Element kType = stored_type(tensor);
  enum : int {
    kColumns = columns_of(tensor),
    kPiece = is_of_k(tensor) ? kKPiece : kVPiece,
    kBytes = row_of_blocks(kType, kColumns),
    kStride = kHeads > 1 ? int(RowsOfHeads<tensor>::kPitch) : shared_row_of_blocks(kType, kColumns, kPiece),
    // Bytes that a lane copies at once, and how many such pieces a row has. A row that may begin in the middle of a
    // word (kPiece 2) is copied with all words that it may touch.
    kCopied = kPiece == kMiddle ? 16 : max_of(kPiece, 4),
    kPieces = (kBytes + (kPiece == 2 ? 2 : 0) + kCopied - 1) / kCopied,
  };
  // How many bytes after a multiple of 16 the rows of a kv head begin, in memory and in shared memory alike. With
  // kHeads, `head` is one of those of the CTA.
  static __device__ __forceinline__ u32 begin(const DecodeParams& p, const WorkTile& tile, int head = head_of_warp()) {
    if (kHeads > 1) return kPiece == kMiddle ? u32(head * kBytes) % 16 : 0;
    return kPiece == kMiddle ? u32(tile.head * (is_of_k(tensor) ? p.k : p.v).head) % 16 : 0;
  }
};

// The place of a chunk of 16 bytes in a panel whose rows have `row_bytes`. Narrow rows lie two or four in a line of 128
// bytes. The swizzle keeps the rows of eight successive keys in different banks.
template <int row_bytes>
__device__ __forceinline__ u32 chunk_place(u32 row, u32 chunk) {
  if (row_bytes == 128) return swizzled(row, chunk);
  const u32 at = row * (row_bytes / 16) + chunk;
  return 16 * (at ^ (at / 8 & (row_bytes / 16 - 1)));
}

// Clears the rows of keys `begin` to `end` of the tile of K or V at `rows`, by `threads` threads, of which this is
// number `thread`. TMA brings what memory has after the last key of a sequence: P is 0 there, but V may be NaN if it is
// of floats, or if its blocks have scales (kMayBeNan).
template <int tensor>
__device__ __forceinline__ void clear_rows(u32 rows, int begin, int end, int thread, int threads) {
  using Rows = BlockRows<tensor>;
  constexpr bool kBlocks = is_block(Rows::kType);
  constexpr int kStride = kBlocks ? int(Rows::kStride) : panel_row_bytes(Rows::kType, Rows::kColumns);
#pragma unroll 1
  for (int panel = 0; panel < (kBlocks ? 1 : panels_of(Rows::kType, Rows::kColumns)); ++panel)
    for (int at = begin * kStride + 16 * thread; at < end * kStride; at += 16 * threads)
      store_shared_zero16(rows + panel * kBlockKeys * kStride + at);
}
template <int tensor>
constexpr bool kMayBeNan = stored_type(tensor) != kInt8 && stored_type(tensor) != kInt4;

// The chunks of K or V in shared memory.
template <int tensor>
struct CodeChunks {
  static constexpr Element kType = stored_type(tensor);
  using CodesOf = Codes<kType>;
  enum : int {
    kColumns = columns_of(tensor),
    kIsBlocks = is_block(kType),
    kRowBytes = tensor == kOfK ? kKRowBytes : kVRowBytes,  // of a panel
    kPanelChunks = kRowBytes / 16,
    kPitch = kHeads > 1 ? int(RowsOfHeads<tensor>::kPitch) : int(BlockRows<tensor>::kStride),
    kCount = kIsBlocks ? chunks_of_blocks(kType, kColumns) : kColumns / (8 * CodesOf::kCodesPerHalf),
  };
  // The place of a chunk of a key, in the tile at `rows`.
  static __device__ __forceinline__ u32 place(u32 rows, u32 key, int chunk) {
    if constexpr (kIsBlocks || kHeads > 1) return rows + key * kPitch + 16 * chunk;
    // Rows begin at multiples of their bytes, so that XOR with the chunk is the swizzle.
    return ((rows + chunk_place<kRowBytes>(key, 0)) ^ 16 * (chunk % kPanelChunks)) +
           chunk / kPanelChunks * (kBlockKeys * kRowBytes);
  }
};

// Work tiles: a work tile is a q block with some of its keys, which a CTA computes at a time.
#pragma once
#include "attention/fragment_store.cuh"
#include "decode/q_blocks.cuh"

// The keys that a q block sees, and their chunks.
struct QBlockKeys {
  KeyRange keys;
  Chunks chunks;
};

__device__ __forceinline__ QBlockKeys q_block_keys(const DecodeParams& p, const Lengths& n, int block) {
  const KeyRange keys = keys_of_q_block(p, n, block);
  return {keys, chunks_of(keys, kKeysPerChunk)};
}

struct WorkTile {
  int batch, head, block;  // the q block: its sequence, its kv head, its block of rows, with kRowBlocks the CTA's
  DecodeSequence sequence;
  int begin, end;     // its tiles of kBlockKeys keys
  int split, splits;  // which split of the q block it is, and how many there are
  int first_partial;  // the number of the q block's first partial result, and of its ticket

  __device__ __forceinline__ bool has_keys() const { return begin < end; }

  __device__ __forceinline__ void take_chunks(const QBlockKeys& q_block, const ChunkRange& mine) {
    begin = (q_block.chunks.first + mine.begin) * kKeysPerChunk / kBlockKeys;
    end = min((q_block.chunks.first + mine.end) * kKeysPerChunk, q_block.keys.end + kBlockKeys - 1) / kBlockKeys;
  }
  __device__ __forceinline__ void take_split(const QBlockKeys& q_block, const Splits& all, int number) {
    take_chunks(q_block, {number * all.chunks, min((number + 1) * all.chunks, q_block.chunks.count)});
    split = number;
    splits = all.count;
  }
  __device__ __forceinline__ void take_whole(const QBlockKeys& q_block) {
    take_chunks(q_block, {0, q_block.chunks.count});
    split = 0;
    splits = 1;
  }
};

// The rows of a work tile, among those of its kv head: (query, head of the group).
struct TileRows {
  int first, count;
};

__device__ __forceinline__ TileRows rows_of_tile(const DecodeParams& p, const WorkTile& tile) {
  const int first = tile.block * kBlockRows;
  return {first, min(tile.sequence.n.sq * kGroup - first, int(kBlockRows))};
}

// The row of a block that is number `at` in the order of its warps, which have kRowsOfWarp each. With kHeads a warp has
// the rows of one head, while rows of the block are (query, head).
__device__ __forceinline__ int row_of_warps(int at) {
  if (kHeads == 1) return at;
  const int row = at % kRowsOfWarp;
  return row / kGroupOfHead * kGroup + at / kRowsOfWarp * kGroupOfHead + row % kGroupOfHead;
}

template <class Type>
__device__ __forceinline__ typename Type::Memory* row_of_tile(const DecodeParams& p, const StridedTensor& t,
                                                       const WorkTile& tile, int row) {
  return row_of<Type>(t, tile.batch, tile.sequence.n.q_start + row / kGroup, tile.head * kGroup + row % kGroup);
}

// The page ids of a sequence.
__device__ __forceinline__ const int* page_ids(const DecodeParams& p, int batch, const DecodeSequence& sequence) {
  return p.pages.table + (kPageLists ? sequence.entry * p.pages.id_stride : batch * p.pages.table_stride);
}
// Those of the sequence of a work tile.
__device__ __forceinline__ const int* page_ids(const DecodeParams& p, const WorkTile& tile) {
  return page_ids(p, tile.batch, tile.sequence);
}

// The i-th page id. Their stride fits an int, as the host checks: a product of 64 bits would take too many registers.
__device__ __forceinline__ int page_id(const DecodeParams& p, const int* ids, int i) {
  return ids[i * static_cast<long long>(int(p.pages.id_stride))];
}

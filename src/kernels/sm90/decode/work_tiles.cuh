// Which q blocks, and which keys of them, a CTA computes: from lengths on the device, by every warp for itself.
#pragma once
#include "sm90/decode/dynamic.cuh"

// kInvariantSplits. Where a sequence has more than one block of rows there is enough to share out without.
__device__ __forceinline__ Splits splits_of_q_block(const Lengths& n, const Chunks& of_q_block) {
  return q_blocks_of(n) > 1 ? Splits{1, of_q_block.count} : invariant_splits(of_q_block.count);
}

// What the q blocks of a kv head take of slices.
__device__ __forceinline__ int head_chunks(const DecodeParams& p, const Lengths& n) {
  const int blocks = q_blocks_of(n);
  int chunks = kTileOverhead * blocks;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) chunks += chunks_of(keys_of_q_block(p, n, block), kKeysPerChunk).count;
  return chunks;
}

__device__ __forceinline__ int sequence_chunks(const DecodeParams& p, int batch) {
  return p.hk * head_chunks(p, sequence_of(p, batch).n);
}

// The slice of this CTA, and the sequence in which it begins.
struct Slice {
  Slices all;
  int begin, end;
  int batch;
  int at;  // where that sequence stands
  bool round_robin;  // kRoundRobin: CTA i takes the q blocks i, i + grid, and so on, in place of a slice
  DynamicTiles turns;   // kDynamic, in place of both
};
static_assert(sizeof(Slice) <= 64);  // decode_layout

// Prefix sums over the sequences, by all threads of the block. False where there is no slice for it.
__device__ __forceinline__ bool find_slice(const DecodeParams& p, unsigned char* shared, Slice& slice) {
  int* const sums = reinterpret_cast<int*>(shared + kLayout.scan);  // of warps
  const int lane = threadIdx.x % 32;
  const int each = (p.batch + kCtaThreads - 1) / kCtaThreads;
  const int first = threadIdx.x * each;
  const int last = min(first + each, p.batch);
  int mine = 0;
  int longest = 0;
#pragma unroll 1
  for (int b = first; b < last; ++b) {
    const int chunks = sequence_chunks(p, b);
    mine += chunks;
    longest = max(longest, chunks);
  }
  int before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xffffffff, before, step);
    if (lane >= step) before += x;
    if (kRoundRobin) longest = max(longest, __shfl_xor_sync(0xffffffff, longest, step));
  }
  if (lane == 31) sums[threadIdx.x / 32] = before;
  if (kRoundRobin && lane == 31) sums[kCtaWarps + threadIdx.x / 32] = longest;
  __syncthreads();
  before -= mine;
  int chunks = 0;
#pragma unroll
  for (int warp = 0; warp < kCtaWarps; ++warp) {
    if (warp < threadIdx.x / 32) before += sums[warp];
    chunks += sums[warp];
    if (kRoundRobin) longest = max(longest, sums[kCtaWarps + warp]);
  }
  const Slices all = slices_of(chunks, gridDim.x);
  if (kRoundRobin && round_robin_is_even(p.batch * p.hk, longest / p.hk, chunks, gridDim.x)) {
    if (threadIdx.x == 0) slice = {all, 0, chunks, 0, 0, true, {}};
    __syncthreads();
    return int(blockIdx.x) < p.batch * p.hk;
  }
  if (int(blockIdx.x) >= all.count) return false;
  const int begin = slice_begin(all, blockIdx.x);
  if (begin >= before && begin < before + mine) {
    int b = first;
#pragma unroll 1
    for (;;) {
      const int after = before + sequence_chunks(p, b);
      if (begin < after) break;
      before = after;
      ++b;
    }
    slice = {all, begin, slice_begin(all, blockIdx.x + 1), b, before, false, {}};
  }
  __syncthreads();
  return true;
}

// Keys of a q block that this CTA computes.
struct WorkTile {
  int batch, head, block;  // of k, of rows
  DecodeSequence sequence;
  int begin, end;    // tiles of kBlockKeys keys
  int split, splits;   // of the q block
  int first_slice;   // of the q block; kSplitToFill, kDynamic: the number of its first split, others are hk further on

  __device__ __forceinline__ bool has_keys() const { return begin < end; }

  // Of the q block that sees `keys`.
  __device__ __forceinline__ void take_chunks(const KeyRange& keys, const Chunks& of_q_block, const ChunkRange& mine) {
    begin = (of_q_block.first + mine.begin) * kKeysPerChunk / kBlockKeys;
    end = min((of_q_block.first + mine.end) * kKeysPerChunk, keys.end + kBlockKeys - 1) / kBlockKeys;
  }
  __device__ __forceinline__ void take_split(const KeyRange& keys, const Chunks& of_q_block, const Splits& pieces,
                                             int piece) {
    take_chunks(keys, of_q_block, {piece * pieces.chunks, min((piece + 1) * pieces.chunks, of_q_block.count)});
    split = piece;
    splits = pieces.count;
  }
};

// Rows of a work tile: of a kv head, (query, head of its group).
struct TileRows {
  int first, count;
};

__device__ __forceinline__ TileRows rows_of_tile(const DecodeParams& p, const WorkTile& item) {
  const int first = item.block * kBlockRows;
  return {first, min(item.sequence.n.sq * kGroup - first, int(kBlockRows))};
}

__device__ __forceinline__ unsigned short* row_of_tile(const DecodeParams& p, const StridedTensor& t,
                                                    const WorkTile& item, int row) {
  return row_of(t, item.batch, item.sequence.n.q_start + row / kGroup, item.head * kGroup + row % kGroup);
}

// kSplitToFill: a q block of a sequence, of which each kv head has one, and what it is cut into.
struct FillingBlock {
  DecodeSequence sequence;
  Splits pieces;  // of the q block; none where the sequence has no queries
  int first;      // the number of its first split: the first ones of all heads, then the second ones
};

// By a warp, each lane for the sequences of its number, and of 32 more where kLaneSequences is 2: few q blocks are
// those of few sequences.
struct FillingBlocks {
  FillingBlock of[kLaneSequences];
};

// The lanes that sequences have, as the end of a loop over powers of two.
__device__ __forceinline__ int lanes_of_sequences(const DecodeParams& p) { return kLaneSequences == 1 ? p.batch : 32; }

// The sum of what the lanes of sequences have, by a warp.
__device__ __forceinline__ int sum_of_sequences(const DecodeParams& p, int x) {
#pragma unroll 1
  for (int step = 1; step < lanes_of_sequences(p); step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return uniform(x);
}

// The least chunks of a split of a q block that has so many. Where another kernel combines a q block has up to
// kMaxSplits, and with 128 rows, whose parts take longer than a second chunk, two chunks each where that makes eight
// splits or more.
__device__ __forceinline__ int min_split(int chunks) {
  if (!kCombinesLater) return 1;
  return max_of((chunks + kMaxSplits - 1) / kMaxSplits, kBlockRows == 128 && chunks > 16 ? 2 : 1);
}

__device__ __forceinline__ FillingBlocks filling_blocks_of_lane(const DecodeParams& p) {
  const int lane = threadIdx.x % 32;
  FillingBlocks lines = {};
  int chunks[kLaneSequences];
  int units_of_lane = 0;
#pragma unroll
  for (int i = 0; i < kLaneSequences; ++i) {
    FillingBlock& line = lines.of[i];
    const int batch = lane + 32 * i;
    if (batch < p.batch) line.sequence = sequence_of(p, batch);
    const Lengths& n = line.sequence.n;
    chunks[i] = n.sq > 0 ? chunks_of(keys_of_q_block(p, n, 0), kKeysPerChunk).count : 0;
    units_of_lane += chunks[i];
  }
  const int all = p.hk * sum_of_sequences(p, units_of_lane);
  int max_chunks = fill_max_chunks(all, p.to_fill);
#pragma unroll 1
  for (;;) {
    int pieces = 0;
#pragma unroll
    for (int i = 0; i < kLaneSequences; ++i) {
      if (lines.of[i].sequence.n.sq == 0) continue;
      lines.of[i].pieces = fill_splits(chunks[i], max_of(max_chunks, min_split(chunks[i])));
      pieces += lines.of[i].pieces.count;
    }
    if (p.hk * sum_of_sequences(p, pieces) <= p.to_fill.by) break;
    max_chunks = fill_max_chunks(all, p.to_fit);
  }
  int first = 0;
#pragma unroll
  for (int i = 0; i < kLaneSequences; ++i) {
    const int count = lines.of[i].pieces.count;
    int before = count;
#pragma unroll 1
    for (int step = 1; step < lanes_of_sequences(p); step *= 2) {
      const int x = __shfl_up_sync(0xffffffff, before, step);
      if (lane >= step) before += x;
    }
    lines.of[i].first = p.hk * (first + before - count);
    if (i + 1 < kLaneSequences) first += __shfl_sync(0xffffffff, before, 31);
  }
  return lines;
}

// What the lane of a sequence has, for all lanes.
__device__ __forceinline__ FillingBlock filling_block_of(const FillingBlocks& lines, int batch) {
  FillingBlock line = lines.of[0];  // an index that is no constant would have q blocks in memory
  if (kLaneSequences > 1 && batch >= 32) line = lines.of[kLaneSequences - 1];
  const auto get = [&](int x) { return __shfl_sync(0xffffffff, x, batch % 32); };
  const DecodeSequence& s = line.sequence;
  return {{{get(s.n.q_start), get(s.n.k_start), get(s.n.sq), get(s.n.sk)}, get(s.entry)},
          {get(line.pieces.count), get(line.pieces.chunks)},
          get(line.first)};
}

// kSplitToFill: the split of this CTA, by every warp for itself. False where there is none.
__device__ __forceinline__ bool find_split_to_fill(const DecodeParams& p, WorkTile& item) {
  const FillingBlocks lines = filling_blocks_of_lane(p);
  item.batch = -1;
#pragma unroll
  for (int i = 0; i < kLaneSequences; ++i) {
    const int number = int(blockIdx.x) - lines.of[i].first;
    const u32 here = __ballot_sync(0xffffffff, number >= 0 && number < p.hk * lines.of[i].pieces.count);
    if (here != 0) item.batch = 32 * i + 31 - __clz(here);
  }
  if (item.batch < 0) return false;
  const FillingBlock line = filling_block_of(lines, item.batch);
  const int of_heads = int(blockIdx.x) - line.first;
  const int piece = quotient(of_heads, p.heads);
  item.head = of_heads - piece * p.hk;
  item.block = 0;
  item.sequence = line.sequence;
  item.first_slice = line.first + item.head;
  const KeyRange keys = keys_of_q_block(p, line.sequence.n, 0);
  item.take_split(keys, chunks_of(keys, kKeysPerChunk), line.pieces, piece);
  return true;
}

// The ids of its sequence's pages.
__device__ __forceinline__ const int* page_ids(const DecodeParams& p, const WorkTile& item) {
  return p.pages.table + (kPageLists ? item.sequence.entry : item.batch * p.pages.table_stride);
}

// The work tiles of a CTA, one after the other: 16 ints, which a warp may leave in shared memory.
struct WorkTiles {
  WorkTile item;
  int at, chunks;  // where the work tile's q block stands, and how long it is; kRoundRobin: its number; kDynamic: the
                   // turn, -1 after the last one, and the number of the next shorter q block
  int blocks;      // of rows, of its sequence

  // Goes on to the next one; false when there are no more. `ahead`: for the loads of a warp that goes there again.
  __device__ __forceinline__ bool next(const DecodeParams& p, const Slice& slice, bool ahead = false) {
    if (kSplitting == kSplitToFill) return false;  // a CTA has one
    if (kDynamic) return next_dynamic(p, slice.turns, ahead);
    return kRoundRobin && slice.round_robin ? next_q_block(p) : next_of_slice(p, slice);
  }

 private:
  __device__ __forceinline__ bool next_of_slice(const DecodeParams& p, const Slice& slice) {
    if (kSplitting && item.split + 1 < item.splits && take_split(p, slice, item.split + 1)) return true;
    for (;;) {
      at += chunks;
      if (++item.block >= blocks) {
        item.block = 0;
        ++item.head;
      }
      while (item.head >= p.hk || blocks == 0) {
        if (++item.batch >= p.batch) return false;
        begin_sequence(p, slice);
      }
      if (at >= slice.end) return false;
      const KeyRange keys = keys_of_q_block(p, item.sequence.n, item.block);
      const Chunks of_q_block = chunks_of(keys, kKeysPerChunk);
      chunks = kTileOverhead + of_q_block.count;
      if (kSplitting) {
        const Splits pieces = splits_of_q_block(item.sequence.n, of_q_block);
        if (take_split(p, slice, first_split(at, pieces, slice.begin))) return true;
        continue;
      }
      const ChunkRange mine = chunks_in_slice(at, of_q_block.count, slice.begin, slice.end);
      if (!mine.any()) continue;
      item.take_chunks(keys, of_q_block, mine);
      take_slice_of(slice, of_q_block, mine);
      return true;
    }
  }

  // Goes to the next q block that has queries, a grid of CTAs further on; all that run then read the same
  // sequences.
  __device__ __forceinline__ bool next_q_block(const DecodeParams& p) {
    do {
      at += gridDim.x;
      if (at >= p.batch * p.hk) return false;
      item.batch = at / p.hk;
      item.sequence = sequence_of(p, item.batch);
    } while (item.sequence.n.sq == 0);
    item.head = at % p.hk;
    const KeyRange keys = keys_of_q_block(p, item.sequence.n, 0);
    const Chunks of_q_block = chunks_of(keys, kKeysPerChunk);
    item.take_chunks(keys, of_q_block, {0, of_q_block.count});
    item.split = 0;
    item.splits = 1;
    return true;
  }

  // Goes to the split of the next turn, and after the last one to the next q block that is too short for turns.
  __device__ __forceinline__ bool next_dynamic(const DecodeParams& p, const DynamicTiles& lines, bool ahead) {
    DynamicTile piece = {0, 0, 0, 0, 0};
    if (at >= 0) {
      piece = DynamicQueue::tile_at(at++, !ahead);
      if (!piece.any()) at = -1;
    }
    if (at < 0) {
      if (chunks >= lines.shorter * p.hk) return false;
      piece = DynamicQueue::shorter_q_block(p, lines, chunks);
      chunks += gridDim.x;
    }
    item.batch = piece.batch;
    item.head = piece.head;
    item.sequence = sequence_of(p, item.batch);
    item.split = piece.split;
    item.splits = piece.splits;
    item.first_slice = piece.first;
    const KeyRange keys = keys_of_q_block(p, item.sequence.n, 0);
    const Chunks of_q_block = chunks_of(keys, kKeysPerChunk);
    const Slices pieces = {piece.splits, of_q_block.count / piece.splits, of_q_block.count % piece.splits};
    item.take_chunks(keys, of_q_block, {slice_begin(pieces, piece.split), slice_begin(pieces, piece.split + 1)});
    return true;
  }

  // Goes to the head in which the slice begins, or to the first.
  __device__ __forceinline__ void begin_sequence(const DecodeParams& p, const Slice& slice) {
    item.sequence = sequence_of(p, item.batch);
    blocks = q_blocks_of(item.sequence.n);
    item.head = item.block = chunks = 0;
    if (at >= slice.begin || blocks == 0) return;
    const int of_head = head_chunks(p, item.sequence.n);
    item.head = (slice.begin - at) / of_head;
    at += item.head * of_head;
  }

  __device__ __forceinline__ void take_slice_of(const Slice& slice, const Chunks& of_q_block, const ChunkRange& mine) {
    item.split = 0;
    item.splits = 1;
    if (mine.end - mine.begin == of_q_block.count) return;
    const int first = at + kTileOverhead;
    item.first_slice = slice_of_chunk(slice.all, first);
    item.split = blockIdx.x - item.first_slice;
    item.splits = slice_of_chunk(slice.all, first + of_q_block.count - 1) - item.first_slice + 1;
  }

  // False where the slice has no such split of the q block.
  __device__ __forceinline__ bool take_split(const DecodeParams& p, const Slice& slice, int piece) {
    const KeyRange keys = keys_of_q_block(p, item.sequence.n, item.block);
    const Chunks of_q_block = chunks_of(keys, kKeysPerChunk);
    const Splits pieces = splits_of_q_block(item.sequence.n, of_q_block);
    if (piece >= pieces.count || split_begin(at, pieces, piece) >= slice.end) return false;
    item.take_split(keys, of_q_block, pieces, piece);
    return true;
  }
};

// Before the first work tile.
__device__ __forceinline__ WorkTiles tiles_of_slice(const Slice& slice) {
  WorkTiles items;
  items.item.batch = slice.batch - 1;
  items.item.head = items.item.block = items.item.first_slice = 0;
  if (kSplitting) items.item.split = items.item.splits = 0;
  items.at = kDynamic ? 0 : kRoundRobin && slice.round_robin ? int(blockIdx.x) - int(gridDim.x) : slice.at;
  items.chunks = kDynamic ? blockIdx.x : 0;
  items.blocks = 0;
  return items;
}

// The tiles of a warp group over all of its work tiles.
class TileWalk {
 public:
  // `work tiles` is at the first work tile, if there are `more`.
  __device__ __forceinline__ TileWalk(const DecodeParams& p, const Slice& slice, const WorkTiles& items, bool more,
                                      int warp_group)
      : p_(p), share_(slice), items_(items), more_(more), team_(warp_group) {
    tile_ = item().begin + team_;
    if (!more_) return;
    if (asks()) begin_dynamic_tile();
    find_tile();
  }

  __device__ __forceinline__ bool more() const { return more_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ const WorkTile& item() const { return items_.item; }
  __device__ __forceinline__ int warp_group() const { return team_; }
  __device__ __forceinline__ bool begins_tile() const { return tile_ == item().begin + team_; }
  __device__ __forceinline__ bool first_tile() const { return first_item_; }
  __device__ __forceinline__ void next() {
    tile_ += kWarpGroups;
    if (asks() && tiles_left() == 2 * kAnswerTiles) ask();
    if (asks() && tiles_left() == kAnswerTiles) give();
    find_tile();
  }
  __device__ __forceinline__ void next_work_tile() {
    tile_ = item().end;
    find_tile();
  }

 private:
  // Goes to the next work tile that has a tile for this warp group, where this one has no more.
  __device__ __forceinline__ void find_tile() {
    while (tile_ >= item().end) {
      more_ = items_.next(p_, share_, !kWarpgroupPath);
      if (!more_) return;
      first_item_ = false;
      tile_ = item().begin + team_;
      if (asks()) begin_dynamic_tile();
    }
  }

  // Whether the warp asks for the split of the next turn, near the end of each, and then tells all what the answer is.
  __device__ __forceinline__ bool asks() const {
    return kDynamic && int(threadIdx.x / 32) == kAskingWarp && items_.at >= 0;
  }
  __device__ __forceinline__ int tiles_left() const { return (item().end - tile_ + kWarpGroups - 1) / kWarpGroups; }
  __device__ __forceinline__ void begin_dynamic_tile() {
    if (tiles_left() <= 2 * kAnswerTiles) ask();
  }
  __device__ __forceinline__ void ask() { answer_ = DynamicQueue::ask(p_, share_.turns); }
  __device__ __forceinline__ void give() {
    const DynamicTile piece = DynamicQueue::tile_of_number(p_, share_.turns, uniform(answer_));
    if (threadIdx.x % 32 == 0) DynamicQueue::give(items_.at, piece);
  }

  const DecodeParams& p_;
  const Slice& share_;
  WorkTiles items_;
  bool more_;
  bool first_item_ = true;
  int team_, tile_;
  int answer_;  // of the first lane, to the warp that asks
};

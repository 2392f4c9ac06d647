// Which lines, and which keys of them, a CTA computes: from lengths on the device, by every warp for itself.
#pragma once
#include "sm90/decode/dynamic.cuh"

// kOwnPieces. Where a sequence has more than one block of rows there is enough to share out without.
__device__ __forceinline__ Pieces pieces_of_line(const Lengths& n, const Units& of_line) {
  return row_blocks_of(n) > 1 ? Pieces{1, of_line.count} : pieces_of(of_line.count);
}

// What the lines of a kv head take of shares.
__device__ __forceinline__ int head_units(const DecodeParams& p, const Lengths& n) {
  const int blocks = row_blocks_of(n);
  int units = kEntryUnits * blocks;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) units += units_of(keys_of_block(p, n, block), kShareUnitKeys).count;
  return units;
}

__device__ __forceinline__ int sequence_units(const DecodeParams& p, int batch) {
  return p.hk * head_units(p, sequence_of(p, batch).n);
}

// The share of this CTA, and the sequence in which it begins.
struct Share {
  Shares all;
  int begin, end;
  int batch;
  int at;  // where that sequence stands
  bool whole_lines;  // kWholeLines: CTA i takes the lines i, i + grid, and so on, in place of a share
  TurnLines turns;   // kTurns, in place of both
};
static_assert(sizeof(Share) <= 64);  // decode_layout

// Prefix sums over the sequences, by all threads of the block. False where there is no share for it.
__device__ __forceinline__ bool find_share(const DecodeParams& p, unsigned char* shared, Share& share) {
  int* const sums = reinterpret_cast<int*>(shared + kLayout.scan);  // of warps
  const int lane = threadIdx.x % 32;
  const int each = (p.batch + kBlockThreads - 1) / kBlockThreads;
  const int first = threadIdx.x * each;
  const int last = min(first + each, p.batch);
  int mine = 0;
  int longest = 0;
#pragma unroll 1
  for (int b = first; b < last; ++b) {
    const int units = sequence_units(p, b);
    mine += units;
    longest = max(longest, units);
  }
  int before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xffffffff, before, step);
    if (lane >= step) before += x;
    if (kWholeLines) longest = max(longest, __shfl_xor_sync(0xffffffff, longest, step));
  }
  if (lane == 31) sums[threadIdx.x / 32] = before;
  if (kWholeLines && lane == 31) sums[kBlockWarps + threadIdx.x / 32] = longest;
  __syncthreads();
  before -= mine;
  int units = 0;
#pragma unroll
  for (int warp = 0; warp < kBlockWarps; ++warp) {
    if (warp < threadIdx.x / 32) before += sums[warp];
    units += sums[warp];
    if (kWholeLines) longest = max(longest, sums[kBlockWarps + warp]);
  }
  const Shares all = shares_of(units, gridDim.x);
  if (kWholeLines && whole_lines_do(p.batch * p.hk, longest / p.hk, units, gridDim.x)) {
    if (threadIdx.x == 0) share = {all, 0, units, 0, 0, true, {}};
    __syncthreads();
    return int(blockIdx.x) < p.batch * p.hk;
  }
  if (int(blockIdx.x) >= all.count) return false;
  const int begin = share_begin(all, blockIdx.x);
  if (begin >= before && begin < before + mine) {
    int b = first;
#pragma unroll 1
    for (;;) {
      const int after = before + sequence_units(p, b);
      if (begin < after) break;
      before = after;
      ++b;
    }
    share = {all, begin, share_begin(all, blockIdx.x + 1), b, before, false, {}};
  }
  __syncthreads();
  return true;
}

// Keys of a line that this CTA computes.
struct DecodeItem {
  int batch, head, block;  // of k, of rows
  DecodeSequence sequence;
  int begin, end;    // tiles of kBlockKeys keys
  int part, parts;   // of the line
  int first_share;   // of the line; kFillingPieces, kTurns: the number of its first piece, others are hk further on

  __device__ __forceinline__ bool has_keys() const { return begin < end; }

  // Of the line that sees `keys`.
  __device__ __forceinline__ void take_units(const KeyRange& keys, const Units& of_line, const UnitRange& mine) {
    begin = (of_line.first + mine.begin) * kShareUnitKeys / kBlockKeys;
    end = min((of_line.first + mine.end) * kShareUnitKeys, keys.end + kBlockKeys - 1) / kBlockKeys;
  }
  __device__ __forceinline__ void take_piece(const KeyRange& keys, const Units& of_line, const Pieces& pieces,
                                             int piece) {
    take_units(keys, of_line, {piece * pieces.units, min((piece + 1) * pieces.units, of_line.count)});
    part = piece;
    parts = pieces.count;
  }
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

// kFillingPieces: a line of a sequence, of which each kv head has one, and what it is cut into.
struct FillingLine {
  DecodeSequence sequence;
  Pieces pieces;  // of the line; none where the sequence has no queries
  int first;      // the number of its first piece: the first ones of all heads, then the second ones
};

// By a warp, each lane for the sequences of its number, and of 32 more where kLaneSequences is 2: few lines are those
// of few sequences.
struct FillingLines {
  FillingLine of[kLaneSequences];
};

// The lanes that sequences have, as the end of a loop over powers of two.
__device__ __forceinline__ int lanes_of_sequences(const DecodeParams& p) { return kLaneSequences == 1 ? p.batch : 32; }

// The sum of what the lanes of sequences have, by a warp.
__device__ __forceinline__ int sum_of_sequences(const DecodeParams& p, int x) {
#pragma unroll 1
  for (int step = 1; step < lanes_of_sequences(p); step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return uniform(x);
}

// The least units of a piece of a line that has so many. Where another kernel merges a line has up to kMaxPieces, and
// with 128 rows, whose parts take longer than a second unit, two units each where that makes eight pieces or more.
__device__ __forceinline__ int min_piece(int units) {
  if (!kMergesLater) return 1;
  return max_of((units + kMaxPieces - 1) / kMaxPieces, kBlockRows == 128 && units > 16 ? 2 : 1);
}

__device__ __forceinline__ FillingLines filling_lines_of_lane(const DecodeParams& p) {
  const int lane = threadIdx.x % 32;
  FillingLines lines = {};
  int units[kLaneSequences];
  int units_of_lane = 0;
#pragma unroll
  for (int i = 0; i < kLaneSequences; ++i) {
    FillingLine& line = lines.of[i];
    const int batch = lane + 32 * i;
    if (batch < p.batch) line.sequence = sequence_of(p, batch);
    const Lengths& n = line.sequence.n;
    units[i] = n.sq > 0 ? units_of(keys_of_block(p, n, 0), kShareUnitKeys).count : 0;
    units_of_lane += units[i];
  }
  const int all = p.hk * sum_of_sequences(p, units_of_lane);
  int max_units = filling_units(all, p.to_fill);
#pragma unroll 1
  for (;;) {
    int pieces = 0;
#pragma unroll
    for (int i = 0; i < kLaneSequences; ++i) {
      if (lines.of[i].sequence.n.sq == 0) continue;
      lines.of[i].pieces = filling_pieces(units[i], max_of(max_units, min_piece(units[i])));
      pieces += lines.of[i].pieces.count;
    }
    if (p.hk * sum_of_sequences(p, pieces) <= p.to_fill.by) break;
    max_units = filling_units(all, p.to_fit);
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
__device__ __forceinline__ FillingLine filling_line_of(const FillingLines& lines, int batch) {
  FillingLine line = lines.of[0];  // an index that is no constant would have lines in memory
  if (kLaneSequences > 1 && batch >= 32) line = lines.of[kLaneSequences - 1];
  const auto get = [&](int x) { return __shfl_sync(0xffffffff, x, batch % 32); };
  const DecodeSequence& s = line.sequence;
  return {{{get(s.n.q_start), get(s.n.k_start), get(s.n.sq), get(s.n.sk)}, get(s.entry)},
          {get(line.pieces.count), get(line.pieces.units)},
          get(line.first)};
}

// kFillingPieces: the piece of this CTA, by every warp for itself. False where there is none.
__device__ __forceinline__ bool find_piece(const DecodeParams& p, DecodeItem& item) {
  const FillingLines lines = filling_lines_of_lane(p);
  item.batch = -1;
#pragma unroll
  for (int i = 0; i < kLaneSequences; ++i) {
    const int number = int(blockIdx.x) - lines.of[i].first;
    const u32 here = __ballot_sync(0xffffffff, number >= 0 && number < p.hk * lines.of[i].pieces.count);
    if (here != 0) item.batch = 32 * i + 31 - __clz(here);
  }
  if (item.batch < 0) return false;
  const FillingLine line = filling_line_of(lines, item.batch);
  const int of_heads = int(blockIdx.x) - line.first;
  const int piece = quotient(of_heads, p.heads);
  item.head = of_heads - piece * p.hk;
  item.block = 0;
  item.sequence = line.sequence;
  item.first_share = line.first + item.head;
  const KeyRange keys = keys_of_block(p, line.sequence.n, 0);
  item.take_piece(keys, units_of(keys, kShareUnitKeys), line.pieces, piece);
  return true;
}

// The ids of its sequence's pages.
__device__ __forceinline__ const int* page_ids(const DecodeParams& p, const DecodeItem& item) {
  return p.pages.table + (kPageLists ? item.sequence.entry : item.batch * p.pages.table_stride);
}

// The items of a CTA, one after the other: 16 ints, which a warp may leave in shared memory.
struct DecodeItems {
  DecodeItem item;
  int at, units;  // where the item's line stands, and how long it is; kWholeLines: its number; kTurns: the turn,
                  // -1 after the last one, and the number of the next shorter line
  int blocks;     // of rows, of its sequence

  // Goes on to the next one; false when there are no more. `ahead`: for the loads of a warp that goes there again.
  __device__ __forceinline__ bool next(const DecodeParams& p, const Share& share, bool ahead = false) {
    if (kPieces == kFillingPieces) return false;  // a CTA has one
    if (kTurns) return next_turn(p, share.turns, ahead);
    return kWholeLines && share.whole_lines ? next_line(p) : next_of_share(p, share);
  }

 private:
  __device__ __forceinline__ bool next_of_share(const DecodeParams& p, const Share& share) {
    if (kPieces && item.part + 1 < item.parts && take_piece(p, share, item.part + 1)) return true;
    for (;;) {
      at += units;
      if (++item.block >= blocks) {
        item.block = 0;
        ++item.head;
      }
      while (item.head >= p.hk || blocks == 0) {
        if (++item.batch >= p.batch) return false;
        begin_sequence(p, share);
      }
      if (at >= share.end) return false;
      const KeyRange keys = keys_of_block(p, item.sequence.n, item.block);
      const Units of_line = units_of(keys, kShareUnitKeys);
      units = kEntryUnits + of_line.count;
      if (kPieces) {
        const Pieces pieces = pieces_of_line(item.sequence.n, of_line);
        if (take_piece(p, share, first_piece(at, pieces, share.begin))) return true;
        continue;
      }
      const UnitRange mine = units_in_share(at, of_line.count, share.begin, share.end);
      if (!mine.any()) continue;
      item.take_units(keys, of_line, mine);
      take_part(share, of_line, mine);
      return true;
    }
  }

  // Goes to the next line that has queries, a grid of CTAs further on; all that run then read the same
  // sequences.
  __device__ __forceinline__ bool next_line(const DecodeParams& p) {
    do {
      at += gridDim.x;
      if (at >= p.batch * p.hk) return false;
      item.batch = at / p.hk;
      item.sequence = sequence_of(p, item.batch);
    } while (item.sequence.n.sq == 0);
    item.head = at % p.hk;
    const KeyRange keys = keys_of_block(p, item.sequence.n, 0);
    const Units of_line = units_of(keys, kShareUnitKeys);
    item.take_units(keys, of_line, {0, of_line.count});
    item.part = 0;
    item.parts = 1;
    return true;
  }

  // Goes to the piece of the next turn, and after the last one to the next line that is too short for turns.
  __device__ __forceinline__ bool next_turn(const DecodeParams& p, const TurnLines& lines, bool ahead) {
    TurnPiece piece = {0, 0, 0, 0, 0};
    if (at >= 0) {
      piece = Turns::piece_of(at++, !ahead);
      if (!piece.any()) at = -1;
    }
    if (at < 0) {
      if (units >= lines.shorter * p.hk) return false;
      piece = Turns::shorter_line(p, lines, units);
      units += gridDim.x;
    }
    item.batch = piece.batch;
    item.head = piece.head;
    item.sequence = sequence_of(p, item.batch);
    item.part = piece.part;
    item.parts = piece.parts;
    item.first_share = piece.first;
    const KeyRange keys = keys_of_block(p, item.sequence.n, 0);
    const Units of_line = units_of(keys, kShareUnitKeys);
    const Shares pieces = {piece.parts, of_line.count / piece.parts, of_line.count % piece.parts};
    item.take_units(keys, of_line, {share_begin(pieces, piece.part), share_begin(pieces, piece.part + 1)});
    return true;
  }

  // Goes to the head in which the share begins, or to the first.
  __device__ __forceinline__ void begin_sequence(const DecodeParams& p, const Share& share) {
    item.sequence = sequence_of(p, item.batch);
    blocks = row_blocks_of(item.sequence.n);
    item.head = item.block = units = 0;
    if (at >= share.begin || blocks == 0) return;
    const int of_head = head_units(p, item.sequence.n);
    item.head = (share.begin - at) / of_head;
    at += item.head * of_head;
  }

  __device__ __forceinline__ void take_part(const Share& share, const Units& of_line, const UnitRange& mine) {
    item.part = 0;
    item.parts = 1;
    if (mine.end - mine.begin == of_line.count) return;
    const int first = at + kEntryUnits;
    item.first_share = share_of_unit(share.all, first);
    item.part = blockIdx.x - item.first_share;
    item.parts = share_of_unit(share.all, first + of_line.count - 1) - item.first_share + 1;
  }

  // False where the share has no such piece of the line.
  __device__ __forceinline__ bool take_piece(const DecodeParams& p, const Share& share, int piece) {
    const KeyRange keys = keys_of_block(p, item.sequence.n, item.block);
    const Units of_line = units_of(keys, kShareUnitKeys);
    const Pieces pieces = pieces_of_line(item.sequence.n, of_line);
    if (piece >= pieces.count || piece_begin(at, pieces, piece) >= share.end) return false;
    item.take_piece(keys, of_line, pieces, piece);
    return true;
  }
};

// Before the first item.
__device__ __forceinline__ DecodeItems items_of(const Share& share) {
  DecodeItems items;
  items.item.batch = share.batch - 1;
  items.item.head = items.item.block = items.item.first_share = 0;
  if (kPieces) items.item.part = items.item.parts = 0;
  items.at = kTurns ? 0 : kWholeLines && share.whole_lines ? int(blockIdx.x) - int(gridDim.x) : share.at;
  items.units = kTurns ? blockIdx.x : 0;
  items.blocks = 0;
  return items;
}

// The tiles of a team over all of its items.
class TileWalk {
 public:
  // `items` is at the first item, if there are `more`.
  __device__ __forceinline__ TileWalk(const DecodeParams& p, const Share& share, const DecodeItems& items, bool more,
                                      int team)
      : p_(p), share_(share), items_(items), more_(more), team_(team) {
    tile_ = item().begin + team_;
    if (!more_) return;
    if (asks()) begin_turn();
    find_tile();
  }

  __device__ __forceinline__ bool more() const { return more_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ const DecodeItem& item() const { return items_.item; }
  __device__ __forceinline__ int team() const { return team_; }
  __device__ __forceinline__ bool begins_item() const { return tile_ == item().begin + team_; }
  __device__ __forceinline__ bool first_item() const { return first_item_; }
  __device__ __forceinline__ void next() {
    tile_ += kTeams;
    if (asks() && tiles_left() == 2 * kAnswerTiles) ask();
    if (asks() && tiles_left() == kAnswerTiles) give();
    find_tile();
  }
  __device__ __forceinline__ void next_item() {
    tile_ = item().end;
    find_tile();
  }

 private:
  // Goes to the next item that has a tile for this team, where this one has no more.
  __device__ __forceinline__ void find_tile() {
    while (tile_ >= item().end) {
      more_ = items_.next(p_, share_, !kWide);
      if (!more_) return;
      first_item_ = false;
      tile_ = item().begin + team_;
      if (asks()) begin_turn();
    }
  }

  // Whether the warp asks for the piece of the next turn, near the end of each, and then tells all what the answer is.
  __device__ __forceinline__ bool asks() const {
    return kTurns && int(threadIdx.x / 32) == kAskingWarp && items_.at >= 0;
  }
  __device__ __forceinline__ int tiles_left() const { return (item().end - tile_ + kTeams - 1) / kTeams; }
  __device__ __forceinline__ void begin_turn() {
    if (tiles_left() <= 2 * kAnswerTiles) ask();
  }
  __device__ __forceinline__ void ask() { answer_ = Turns::ask(p_, share_.turns); }
  __device__ __forceinline__ void give() {
    const TurnPiece piece = Turns::piece_of_number(p_, share_.turns, uniform(answer_));
    if (threadIdx.x % 32 == 0) Turns::give(items_.at, piece);
  }

  const DecodeParams& p_;
  const Share& share_;
  DecodeItems items_;
  bool more_;
  bool first_item_ = true;
  int team_, tile_;
  int answer_;  // of the first lane, to the warp that asks
};

// Which lines, and which keys of them, a thread block computes: from lengths on the device, by every warp for itself.
#pragma once
#include "plan.h"
#include "shared/append.cuh"
#include "shared/mbarrier.cuh"
#include "shared/memory.cuh"
#include "shared/schedule.cuh"
#include "shared/shares.h"
#include "shared/warp.cuh"
#include "sm90/decode_layout.h"
#include "sm90/decode_params.h"

constexpr DecodeTile kTile = {kHeadDim, kValueDim, kTeamWarps, kTeams, kLineRows, kBlockKeys, kKStages, kVStages};

enum : int {
  kWarps = kTeams * kTeamWarps,  // of the teams
  kThreads = 32 * kWarps,
  kBlockWarps = decode_warps(kTile),
  kBlockThreads = 32 * kBlockWarps,
  kBlockRows = kWarpRows * kTeamWarps,
  kTeamThreads = 32 * kTeamWarps,
  kWide = is_wide(kTile),
  // decode_merge.cu puts the parts of lines together, in place of the last thread block at each.
  kMergesLater = kPieces == kOwnPieces || (kPieces == kFillingPieces && kWide),
  // Warps that load need few registers, which others may have where there are three warpgroups: 504 of three threads.
  kMovesRegisters = kWide && kBlockWarps == 12,
  kLoadRegisters = kBoxKeys > 0 ? 72 : kBlockKeys <= 16 ? 56 : 88,
  kTeamRegisters = (504 - kLoadRegisters) / 2,
};

// How lines are taken whole (kWholeLines), where lengths allow it: thread block i takes the lines i, i + grid, and so
// on, or with kTurns each asks for its next line while it is at the one before.
enum : int { kNoLines = 0, kLinesInSteps = 1, kLinesByTurns = 2 };
enum : int {
  // Tiles of its team for which the answer to the warp that asks for a line has time: it comes behind their loads.
  kAnswerTiles = 3,
  // Of a line by turns, at least: loads that run ahead of the products are in the line behind it at most.
  kLeastTiles = kTeams * (most(kKStages, kAnswerTiles) + 1),
  kAskingWarp = kWide ? kWarps : 0,  // the first one that loads
  // As a share of all lines, the longest line that is left to turns beside others that are shared out: the last thread
  // block may be alone at it. Wide teams gain more, as the ends of lines take them longer.
  kTurnsOfShare = kWide ? 5 : 10,
  kAnyUnits = 0x7fffffff,
};

// What the kernels of a plan are given.
template <bool appends>
struct ParamsOf {
  using Type = DecodeParams;
};
template <>
struct ParamsOf<true> {
  using Type = DecodeAppendParams;
};
using PlanParams = ParamsOf<kAppends != 0>::Type;

__device__ __forceinline__ const AppendParams& append_of(const DecodeParams& p) {
  return static_cast<const DecodeAppendParams&>(p).append;
}

// Barriers by number: those of each team, then where the two warpgroups of a team take turns, where all teams meet that
// are not the thread block, and where the warps that load wait until the teams have asked for their first Q.
enum : int { kOfTeam = 1, kTurn = 8, kOfTeams = 10, kFirstQuery = 11 };

// A barrier of a team. Of numbers that are no constants the compiler assumes all 16.
__device__ __forceinline__ void sync_team(int team) {
  if (kTeamWarps == 1) {
    __syncwarp();
    return;
  }
#pragma unroll
  for (int i = 0; i < kTeams; ++i)
    if (team == i) named_barrier_sync(kOfTeam + i, kTeamThreads);
}

// A barrier of all teams.
__device__ __forceinline__ void sync_teams() {
  if (kWide)
    named_barrier_sync(kOfTeams, kThreads);
  else
    __syncthreads();
}

constexpr DecodeLayout kLayout = decode_layout(kTile);

extern __shared__ __align__(1024) unsigned char raw[];

// Of a share.
constexpr int kShareUnitKeys = unit_keys(kBlockKeys);
// Of lines by turns: all tiles of the last unit but one may be behind the keys.
constexpr int kLeastUnits = ((kLeastTiles - 1) * kBlockKeys + kShareUnitKeys - 1) / kShareUnitKeys + 1;

// A sequence: its lengths, where n.k_start is the row of its first key, and where such rows lie.
struct DecodeSequence {
  Lengths n;
  int entry;  // of the batch; with kPageLists its first one of the page table
};

// The one place of this kernel that reads lengths and tables' beginnings, as lengths_of does: whatever they say, no
// access leaves the tensors.
__device__ __forceinline__ DecodeSequence sequence_of(const DecodeParams& p, int batch) {
  DecodeSequence s = {{0, 0, p.sq, 0}, batch};
  if (kPacked) packed_rows(p.cu_seqlens_q, batch, p.total_q, p.sq, s.n.q_start, s.n.sq);
  if (kSeqUsedQ) s.n.sq = used_rows(p.seqused_q, batch, s.n.sq);
  if (kFewQueries > 0 && s.n.sq > kFewQueries) s.n.sq = 0;
  int rows = p.sk;
  if (kPackedK) packed_rows(p.cu_seqlens_k, batch, p.total_k, p.sk, s.n.k_start, rows);
  if (kPage > 0) {
    int ids = p.pages.ids;
    if (kPageLists) packed_rows(p.pages.indptr, batch, p.pages.ids, p.pages.ids, s.entry, ids);
    rows = int(min((long long)(ids) * kPage, (long long)(p.sk)));
  }
  int end = min(rows, p.sk);
  if (kAppends)
    end = min(end, max(appended_length(append_of(p), batch), 0));
  else if (kSeqUsedK)
    end = used_rows(p.seqused_k, batch, end);
  int begin = 0;
  if (kLeftPad) begin = min(max(p.leftpad_k[batch], 0), end);
  if (kBatchIdx) {
    s.entry = p.cache_batch_idx[batch];
    if (u32(s.entry) >= u32(p.pages.entries)) end = begin;
  }
  s.n.k_start += begin;
  s.n.sk = end - begin;
  return s;
}

// Rows of a kv head, (query, head of its group), go into blocks.
__device__ __forceinline__ int row_blocks_of(const Lengths& n) {
  return (n.sq * kGroup + kBlockRows - 1) / kBlockRows;
}

// The keys that some of the rows [first, last] of a kv head see.
__device__ __forceinline__ KeyRange keys_of_rows(const DecodeParams& p, const Lengths& n, int first, int last) {
  const Band band = band_of(p);
  return {visible_keys(band, n, first / kGroup).begin, visible_keys(band, n, last / kGroup).end};
}

// The keys that a block of rows sees.
__device__ __forceinline__ KeyRange keys_of_block(const DecodeParams& p, const Lengths& n, int block) {
  return keys_of_rows(p, n, block * kBlockRows, min((block + 1) * kBlockRows, n.sq * kGroup) - 1);
}

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

// Whether the line of a head, of up to `most_units` units, is left to turns (kWholeLines: each head has one).
__device__ __forceinline__ bool is_by_turns(const DecodeParams& p, const Lengths& n, int most_units) {
  if (most_units == kAnyUnits) return true;
  if (most_units < kLeastUnits || n.sq == 0) return false;
  const int units = units_of(keys_of_block(p, n, 0), kShareUnitKeys).count;
  return units >= kLeastUnits && units <= most_units;
}

// The share of this thread block, and the sequence in which it begins.
struct Share {
  Shares all;
  int begin, end;
  int batch;
  int at;           // where that sequence stands
  int lines;        // kWholeLines: how lines are taken whole, by turns behind the share, else in place of it
  int most_units;   // kLinesByTurns: of these lines; others are shared out
  int first_lines;  // kLinesByTurns: so many thread blocks have a line of their number first, without asking

  __device__ __forceinline__ bool has_turns() const { return kTurns && lines == kLinesByTurns; }
};

// What the lines of a sequence take of shares, of those that are shared out.
__device__ __forceinline__ int shared_units(const DecodeParams& p, int batch, int most_units) {
  const DecodeSequence s = sequence_of(p, batch);
  if (kTurns && is_by_turns(p, s.n, most_units)) return 0;
  return p.hk * head_units(p, s.n);
}

// Counts to `last` and starts again from 0, as take_ticket does, where nothing but the number counts.
__device__ __forceinline__ int take_number(int* numbers, int last) {
  int before;
  asm volatile("atom.global.relaxed.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(numbers), "r"(last) : "memory");
  return before;
}

// The turns of a thread block at lines: slots in shared memory, each with the line of a turn, a barrier that says when
// it is there, and one that says when all warps have read it.
class Turns {
 public:
  // By one thread.
  static __device__ __forceinline__ void init() {
#pragma unroll
    for (int i = 0; i < kTurnSlots; ++i) {
      mbarrier_init(given(i), 1);
      mbarrier_init(read(i), kBlockWarps);
    }
  }
  // By one lane: the line of a turn, -1 behind the last one.
  static __device__ __forceinline__ void give(int turn, int line) {
    mbarrier_wait(read(turn), turn / kTurnSlots % 2 ^ 1);
    store_shared(line_at(turn), line);
    mbarrier_arrive(given(turn));
  }
  // By a warp. One that reads a turn twice, where its loads and its products are, says so the second time.
  static __device__ __forceinline__ int line_of(int turn, bool says_so) {
    mbarrier_wait(given(turn), turn / kTurnSlots % 2);
    const int line = uniform(load_shared(line_at(turn)));
    mbarrier_arrive_if(read(turn), says_so && threadIdx.x % 32 == 0);
    return line;
  }

  // Asks for a line, by a warp whose first lane has the answer. All thread blocks that may have lines ask until there
  // are no more, so that the count of all answers is known, and the last one leaves a zero.
  static __device__ __forceinline__ int ask(const DecodeParams& p, const Share& share) {
    const int last = p.batch * p.hk - 1 + (share.first_lines > 0 ? 0 : gridDim.x);
    return threadIdx.x % 32 == 0 ? take_number(p.tickets + 3 * gridDim.x, last) : 0;
  }
  // The line of an answer, or the next one where that is none by turns; -1 behind the last one.
  static __device__ __forceinline__ int line_of_answer(const DecodeParams& p, const Share& share, int answer) {
    return usable(p, share, uniform(answer) + share.first_lines);
  }
  static __device__ __forceinline__ int first_line(const DecodeParams& p, const Share& share) {
    if (share.first_lines == 0) return line_of_answer(p, share, ask(p, share));
    return usable(p, share, blockIdx.x);
  }

 private:
  static __device__ __forceinline__ int usable(const DecodeParams& p, const Share& share, int line) {
    while (line < p.batch * p.hk && !is_by_turns(p, sequence_of(p, line / p.hk).n, share.most_units))
      line = share.first_lines + uniform(ask(p, share));
    return line < p.batch * p.hk ? line : -1;
  }
  static __device__ __forceinline__ u32 slots() { return u32(__cvta_generic_to_shared(raw)) + kLayout.turns; }
  static __device__ __forceinline__ u32 given(int turn) { return slots() + turn % kTurnSlots * 8; }
  static __device__ __forceinline__ u32 read(int turn) { return given(turn) + kTurnSlots * 8; }
  static __device__ __forceinline__ u32 line_at(int turn) { return slots() + kTurnSlots * 16 + turn % kTurnSlots * 4; }
};

// Of numbers that the threads of the block have: the sum of those before a thread, and of all.
struct SumOfThreads {
  int before, all;
};

__device__ __forceinline__ SumOfThreads sum_of_threads(int x, unsigned char* shared) {
  int* const of_warps = reinterpret_cast<int*>(shared + kLayout.scan);
  SumOfThreads sum = {x, 0};
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffff, sum.before, step);
    if (threadIdx.x % 32 >= step) sum.before += before;
  }
  __syncthreads();  // what was there has been read
  if (threadIdx.x % 32 == 31) of_warps[threadIdx.x / 32] = sum.before;
  __syncthreads();
  sum.before -= x;
#pragma unroll
  for (int warp = 0; warp < kBlockWarps; ++warp) {
    if (warp < threadIdx.x / 32) sum.before += of_warps[warp];
    sum.all += of_warps[warp];
  }
  return sum;
}

// Whether lines are taken by turns, and then what is shared out before, by all threads of the block, each for the
// sequences [first, last). `units` are those of all lines, longest and shortest of a line.
__device__ __forceinline__ bool find_turns(const DecodeParams& p, unsigned char* shared, int first, int last, int units,
                                           int longest, int shortest, Share& share) {
  const int blocks = gridDim.x;
  const int lines = p.batch * p.hk;
  const bool whole = whole_lines_do(lines, longest, units, blocks);
  const int most_units = whole ? int(kAnyUnits) : units / blocks / kTurnsOfShare;
  if (whole && (lines < kRoundsByTurns * blocks || shortest < kEntryUnits + kLeastUnits)) return false;
  if (shortest - kEntryUnits > most_units || most_units < kLeastUnits) return false;
  int mine = 0;
  SumOfThreads sum = {0, 0};
  if (!whole) {
    int lines_shared = 0;
#pragma unroll 1
    for (int b = first; b < last; ++b) {
      const int of_sequence = shared_units(p, b, most_units);
      mine += of_sequence;
      if (of_sequence > 0) lines_shared += p.hk;
    }
    if (!turns_pay(lines - sum_of_threads(lines_shared, shared).all, blocks)) return false;
    sum = sum_of_threads(mine, shared);
  }
  // No shorter than they need be: whoever has one has fewer lines.
  const Shares all = shares_of(sum.all, least(blocks, (sum.all + kPieceUnits - 1) / kPieceUnits));
  const bool has_share = int(blockIdx.x) < all.count;
  // Where teams are wide, who puts parts together does so for long, and should not have a line yet.
  const int first_lines = !kWide || sum.all == 0 ? least(blocks, lines) : 0;
  Share here = {all, 0, 0, 0, 0, kLinesByTurns, most_units, first_lines};
  if (threadIdx.x == 0) Turns::init();
  if (threadIdx.x < 32 && !(kWide && has_share)) {
    const int line = Turns::first_line(p, here);
    if (threadIdx.x == 0) Turns::give(0, line);
  }
  if (!has_share) {
    if (threadIdx.x == 0) share = here;
  } else {
    here.begin = share_begin(all, blockIdx.x);
    here.end = share_begin(all, blockIdx.x + 1);
    if (here.begin >= sum.before && here.begin < sum.before + mine) {
      here.batch = first;
      here.at = sum.before;
#pragma unroll 1
      for (;; ++here.batch) {
        const int after = here.at + shared_units(p, here.batch, most_units);
        if (here.begin < after) break;
        here.at = after;
      }
      share = here;
    }
  }
  __syncthreads();
  return true;
}

// Prefix sums over the sequences, by all threads of the block. False where there is no share for it.
__device__ __forceinline__ bool find_share(const DecodeParams& p, unsigned char* shared, Share& share) {
  int* const sums = reinterpret_cast<int*>(shared + kLayout.scan);  // of warps
  const int lane = threadIdx.x % 32;
  const int each = (p.batch + kBlockThreads - 1) / kBlockThreads;
  const int first = threadIdx.x * each;
  const int last = min(first + each, p.batch);
  int mine = 0;
  int longest = 0;
  int shortest = kAnyUnits;
#pragma unroll 1
  for (int b = first; b < last; ++b) {
    const int units = sequence_units(p, b);
    mine += units;
    longest = max(longest, units);
    if (kTurns) shortest = min(shortest, units);
  }
  int before = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xffffffff, before, step);
    if (lane >= step) before += x;
    if (kWholeLines) longest = max(longest, __shfl_xor_sync(0xffffffff, longest, step));
    if (kTurns) shortest = min(shortest, __shfl_xor_sync(0xffffffff, shortest, step));
  }
  if (lane == 31) sums[threadIdx.x / 32] = before;
  if (kWholeLines && lane == 31) sums[kBlockWarps + threadIdx.x / 32] = longest;
  if (kTurns && lane == 31) sums[2 * kBlockWarps + threadIdx.x / 32] = shortest;
  __syncthreads();
  before -= mine;
  int units = 0;
#pragma unroll
  for (int warp = 0; warp < kBlockWarps; ++warp) {
    if (warp < threadIdx.x / 32) before += sums[warp];
    units += sums[warp];
    if (kWholeLines) longest = max(longest, sums[kBlockWarps + warp]);
    if (kTurns) shortest = min(shortest, sums[2 * kBlockWarps + warp]);
  }
  if (kTurns && find_turns(p, shared, first, last, units, longest / p.hk, shortest / p.hk, share)) return true;
  const Shares all = shares_of(units, gridDim.x);
  if (kWholeLines && whole_lines_do(p.batch * p.hk, longest / p.hk, units, gridDim.x)) {
    if (threadIdx.x == 0) share = {all, 0, units, 0, 0, kLinesInSteps, 0, 0};
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
    share = {all, begin, share_begin(all, blockIdx.x + 1), b, before, kNoLines, 0, 0};
  }
  __syncthreads();
  return true;
}

// Keys of a line that this thread block computes.
struct DecodeItem {
  int batch, head, block;  // of k, of rows
  DecodeSequence sequence;
  int begin, end;    // tiles of kBlockKeys keys
  int part, parts;   // of the line
  int first_share;   // of the line; kFillingPieces: the number of its first piece, others are hk further on

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

// Whether warps that load have Q of the next item in L2 before it is copied: behind all loads of K and V it would come
// late. Lanes that copy rows have no registers for it.
enum : int { kPrefetchesQ = kWide && kBoxKeys > 0 && kQWhole };

__device__ __forceinline__ void prefetch_query(const DecodeParams& p, const DecodeItem& item, int thread, int threads) {
  const ItemRows rows = rows_of_item(p, item);
  for (int row = thread; row < rows.count; row += threads)
    bulk_prefetch(item_row(p, p.q, item, rows.first + row), p.d * 2);
}

// Says to all warps, by one of them, which line a turn has.
__device__ __forceinline__ void give_turn(const DecodeParams& p, int turn, int line) {
  if (threadIdx.x % 32 == 0) Turns::give(turn, line);
  if (!kPrefetchesQ || line < 0) return;
  DecodeItem item = {line / p.hk, line % p.hk, 0};
  item.sequence = sequence_of(p, item.batch);
  prefetch_query(p, item, threadIdx.x % 32, 32);
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

// The least units of a piece of a line that has so many. Where another kernel merges a line has up to kMostPieces, and
// beside 128 rows, whose parts take longer than a second unit, two units each where that makes eight pieces or more.
__device__ __forceinline__ int least_piece(int units) {
  if (!kMergesLater) return 1;
  return most((units + kMostPieces - 1) / kMostPieces, kBlockRows == 128 && units > 16 ? 2 : 1);
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
  int most_units = filling_units(all, p.to_fill);
#pragma unroll 1
  for (;;) {
    int pieces = 0;
#pragma unroll
    for (int i = 0; i < kLaneSequences; ++i) {
      if (lines.of[i].sequence.n.sq == 0) continue;
      lines.of[i].pieces = filling_pieces(units[i], most(most_units, least_piece(units[i])));
      pieces += lines.of[i].pieces.count;
    }
    if (p.hk * sum_of_sequences(p, pieces) <= p.to_fill.by) break;
    most_units = filling_units(all, p.to_fit);
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

// kFillingPieces: the piece of this thread block, by every warp for itself. False where there is none.
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

// The items of a share and the lines behind it, one after the other: 16 ints, which a warp may leave in shared memory.
struct DecodeItems {
  DecodeItem item;
  int at, units;  // where the item's line stands, and how long it is
  int blocks;     // of rows, of its sequence

  // Goes on to the next one; false when there are no more. `ahead`: for the loads of a warp that goes there again.
  __device__ __forceinline__ bool next(const DecodeParams& p, const Share& share, bool ahead = false) {
    if (kPieces == kFillingPieces) return false;  // a thread block has one
    if (!takes_lines(share)) {
      if (next_of_share(p, share)) return true;
      if (!share.has_turns()) return false;
      begin_lines();
      if (kWide && threadIdx.x < 32) give_turn(p, 0, Turns::first_line(p, share));
    }
    return next_line(p, share, ahead);
  }
  // The same for warps that load, and must not wait: false, too, where nobody has asked for the next line yet.
  __device__ __forceinline__ bool next_at_once(const DecodeParams& p, const Share& share) {
    if (!share.has_turns()) return next(p, share);
    return !takes_lines(share) && next_of_share(p, share);
  }

  // Whether items are lines that are taken whole.
  __device__ __forceinline__ bool takes_lines(const Share& share) const {
    return kTurns ? blocks == kTakesLines : kWholeLines && share.lines != kNoLines;
  }
  // Before the first of them; `at` is the line then, `units` the turn.
  __device__ __forceinline__ void begin_lines() {
    blocks = kTakesLines;
    at = int(blockIdx.x) - int(gridDim.x);
    units = 0;
  }
  // Of the next line, by turns.
  __device__ __forceinline__ int turn() const { return units; }

 private:
  enum : int { kTakesLines = -1 };

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

  // Goes to the next line: by turns that of the next turn, else that a grid of thread blocks further on which has
  // queries; all that run then read the same sequences.
  __device__ __forceinline__ bool next_line(const DecodeParams& p, const Share& share, bool ahead) {
    if (share.has_turns()) {
      at = Turns::line_of(units++, !ahead);
      if (at < 0) return false;
      item.batch = at / p.hk;
      item.sequence = sequence_of(p, item.batch);
    } else {
      do {
        at += gridDim.x;
        if (at >= p.batch * p.hk) return false;
        item.batch = at / p.hk;
        item.sequence = sequence_of(p, item.batch);
      } while (item.sequence.n.sq == 0);
    }
    if (kTurns) item.block = 0;
    item.head = at % p.hk;
    const KeyRange keys = keys_of_block(p, item.sequence.n, 0);
    const Units of_line = units_of(keys, kShareUnitKeys);
    item.take_units(keys, of_line, {0, of_line.count});
    item.part = 0;
    item.parts = 1;
    return true;
  }

  // Goes to the head in which the share begins, or to the first.
  __device__ __forceinline__ void begin_sequence(const DecodeParams& p, const Share& share) {
    item.sequence = sequence_of(p, item.batch);
    blocks = row_blocks_of(item.sequence.n);
    if (share.has_turns() && is_by_turns(p, item.sequence.n, share.most_units)) blocks = 0;
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
  items.at = kWholeLines && share.lines == kLinesInSteps ? int(blockIdx.x) - int(gridDim.x) : share.at;
  items.units = items.blocks = 0;
  if (kTurns && (share.lines == kLinesInSteps || share.begin >= share.end)) items.begin_lines();
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
    if (asks()) answer_ = Turns::ask(p_, share_);
    find_tile();
  }

  __device__ __forceinline__ bool more() const { return more_; }
  __device__ __forceinline__ int tile() const { return tile_; }
  __device__ __forceinline__ const DecodeItem& item() const { return items_.item; }
  __device__ __forceinline__ const DecodeItems& items() const { return items_; }
  __device__ __forceinline__ const Share& share() const { return share_; }
  __device__ __forceinline__ int team() const { return team_; }
  __device__ __forceinline__ bool begins_item() const { return tile_ == item().begin + team_; }
  __device__ __forceinline__ bool first_item() const { return first_item_; }
  __device__ __forceinline__ void next() {
    tile_ += kTeams;
    if (asks() && tile_ == item().begin + kAnswerTiles * kTeams)
      give_turn(p_, items_.turn(), Turns::line_of_answer(p_, share_, answer_));
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
      if (asks()) answer_ = Turns::ask(p_, share_);
    }
  }

  // Whether the warp asks for the next line, when it begins one, and says then to all what the answer is.
  __device__ __forceinline__ bool asks() const {
    return int(threadIdx.x / 32) == kAskingWarp && share_.has_turns() && items_.takes_lines(share_);
  }

  const DecodeParams& p_;
  const Share& share_;
  DecodeItems items_;
  bool more_;
  bool first_item_ = true;
  int team_, tile_;
  int answer_;  // of the first lane, to the warp that asks
};

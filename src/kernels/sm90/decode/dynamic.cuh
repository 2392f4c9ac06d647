// Splits of q blocks by the dynamic scheduler (kDynamic): each CTA asks for its next one while it is at the one before.
// A SM in four reads memory a third faster than the others, and so has more of them. Longest first, what each CTA does
// last is short (Graham, Bounds on multiprocessing timing anomalies, 1969). Q blocks are cut where they are longer than
// what a CTA has in all; who has a split changes no bit of it.
#pragma once
#include "sm90/decode/q_blocks.cuh"

enum : int {
  // Tiles of its warp group before the end of a split where the warp that asks says what the answer is; it asks so many
  // earlier. Who asks sooner takes a split that another CTA would begin before it.
  kAnswerTiles = 3,
  kAskingWarp = kWarpgroupPath ? kComputeWarps : 0,  // the first one that loads
  // Of a split, at least: loads that run ahead of the products are in the split after it at most. All tiles of the
  // last chunk but one may be after the keys.
  kMinDynamicTiles = kWarpGroups * (max_of(kKStages, kAnswerTiles) + 1),
  kMinDynamicChunks = ((kMinDynamicTiles - 1) * kBlockKeys + kKeysPerChunk - 1) / kKeysPerChunk + 1,
};

// How q blocks go through the dynamic scheduler. Sequences have ranks, by the lengths of their q blocks.
struct DynamicTiles {
  int sequences;  // that have such q blocks
  int pieces;     // of these q blocks
  int first_cut;  // the first sequence whose q blocks may have more than one; those after it may, too
  int ends;       // sequences whose q blocks have more than kFewSplits
  int shorter;    // sequences after them: CTA i takes their q blocks i, i + grid, and so on
};

// A split of a q block, mostly all of it.
struct DynamicTile {
  int batch, head;
  int split, splits;
  int first;  // the number of the q block's first split among those of cut q blocks; others are hk further on, so that
              // heads are read side by side

  __device__ __forceinline__ bool any() const { return splits > 0; }
};

// As take_ticket, where nothing but the number counts.
__device__ __forceinline__ int take_number(int* numbers, int last) {
  int before;
  asm volatile("atom.global.relaxed.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(numbers), "r"(last) : "memory");
  return before;
}
// As take_ticket, of what does not count by ones.
__device__ __forceinline__ u32 add_to_ticket(int* ticket, u32 x) {
  u32 before;
  asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(ticket), "r"(x) : "memory");
  return before;
}

// Splits have numbers, which an atomic counts. Slots in shared memory have the splits of the turns that warps are at,
// and barriers: that a split is there, and that all warps have read it.
class DynamicQueue {
 public:
  // By one thread.
  static __device__ __forceinline__ void init() {
#pragma unroll
    for (int i = 0; i < kDynamicSlots; ++i) {
      mbarrier_init(given(i), 1);
      mbarrier_init(read(i), kCtaWarps);
    }
  }

  // By one lane: the split of a turn.
  static __device__ __forceinline__ void give(int turn, const DynamicTile& piece) {
    mbarrier_wait(read(turn), turn / kDynamicSlots % 2 ^ 1);
    *slot(turn) = {piece.batch, piece.head, piece.split << 16 | piece.splits, piece.first};
    mbarrier_arrive(given(turn));
  }
  // By a warp. One that reads a turn twice, where its loads and its products are, says so the second time.
  static __device__ __forceinline__ DynamicTile tile_at(int turn, bool says_so) {
    mbarrier_wait(given(turn), turn / kDynamicSlots % 2);
    const int4 x = *slot(turn);
    const int splits = uniform(x.z);
    mbarrier_arrive_if(read(turn), says_so && threadIdx.x % 32 == 0);
    return {uniform(x.x), uniform(x.y), splits >> 16, splits & 0xffff, uniform(x.w)};
  }

  // Asks for the number of a split, by a warp whose first lane has the answer. The first one of a CTA is its
  // own, and each that has it asks until there are no more: so the count of all answers is known, and the last one
  // leaves a zero.
  static __device__ __forceinline__ int ask(const DecodeParams& p, const DynamicTiles& lines) {
    return threadIdx.x % 32 == 0 ? int(gridDim.x) + take_number(p.tickets + 4 * gridDim.x, lines.pieces - 1) : 0;
  }

  // By a warp.
  static __device__ __forceinline__ DynamicTile tile_of_number(const DecodeParams& p, const DynamicTiles& lines,
                                                              int number) {
    if (number >= lines.pieces) return {0, 0, 0, 0, 0};
    const int at = number / p.hk;
    int ranks = 0;  // that begin there or before
#pragma unroll 1
    for (int i = 0; i < lines.sequences; i += 32) {
      const int rank = i + int(threadIdx.x % 32);
      ranks += __popc(__ballot_sync(0xffffffff, rank < lines.sequences && first_of(rank) <= at));
    }
    const int head = number - at * p.hk;
    const int first = first_of(ranks - 1);
    return {batch_of(ranks - 1), head, at - first, parts_of(lines, p.hk, ranks - 1),
            (first - first_of(lines.first_cut)) * p.hk + head};
  }

  // Of the q blocks that are too short for turns.
  static __device__ __forceinline__ DynamicTile shorter_q_block(const DecodeParams& p, const DynamicTiles& lines,
                                                                int line) {
    return {batch_of(lines.sequences + line / p.hk), line % p.hk, 0, 1, 0};
  }

  // The table of ranks: the sequence of each, and how many splits of a kv head those before it have.
  static __device__ __forceinline__ void set_rank(int rank, int batch, int first) {
    table()[rank] = first << 8 | batch;
  }
  static __device__ __forceinline__ int batch_of(int rank) { return table()[rank] & 255; }
  static __device__ __forceinline__ int first_of(int rank) { return table()[rank] >> 8; }
  static __device__ __forceinline__ int parts_of(const DynamicTiles& lines, int hk, int rank) {
    return (rank + 1 < lines.sequences ? first_of(rank + 1) : lines.pieces / hk) - first_of(rank);
  }

 private:
  static_assert(kDynamicSequences <= 256);  // a byte of an entry

  static __device__ __forceinline__ int* table() { return reinterpret_cast<int*>(raw + kLayout.ranks); }
  static __device__ __forceinline__ int4* slot(int turn) {
    return reinterpret_cast<int4*>(raw + kLayout.turns) + turn % kDynamicSlots;
  }
  static __device__ __forceinline__ u32 given(int turn) {
    return u32(__cvta_generic_to_shared(raw)) + kLayout.turns + 16 * kDynamicSlots + turn % kDynamicSlots * 8;
  }
  static __device__ __forceinline__ u32 read(int turn) { return given(turn) + 8 * kDynamicSlots; }
};

// The sum of what the lanes before this one have, and of all, by a warp.
struct SumOfLanes {
  int before, all;
};

__device__ __forceinline__ SumOfLanes sum_of_lanes(int x) {
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(0xffffffff, sum, step);
    if (threadIdx.x % 32 >= step) sum += before;
  }
  return {sum - x, __shfl_sync(0xffffffff, sum, 31)};
}

// Ranks the sequences, cuts their q blocks, and gives the first split, by all threads of the block. Each sequence has
// one block of rows at most (kRoundRobin), and there are up to kDynamicSequences. What is reckoned with lies where K
// will be.
__device__ __forceinline__ void begin_dynamic(const DecodeParams& p, unsigned char* shared, DynamicTiles& lines) {
  // In the order of lengths: chunks of a q block and 1, none where there are no queries, then 255 less the sequence.
  u32* const keys = reinterpret_cast<u32*>(shared);
  int2* const ranked = reinterpret_cast<int2*>(keys + kDynamicSequences);  // {chunks, later splits; sequence}
#pragma unroll 1
  for (int b = threadIdx.x; b < (p.batch + 3) / 4 * 4; b += kCtaThreads) {
    keys[b] = 0;
    if (b >= p.batch) continue;
    const Lengths n = sequence_of(p, b).n;
    const int chunks = n.sq > 0 ? chunks_of(keys_of_q_block(p, n, 0), kKeysPerChunk).count + 1 : 0;
    keys[b] = u32(chunks) << 8 | u32(255 - b);
  }
  if (threadIdx.x == kCtaThreads - 1) DynamicQueue::init();
  __syncthreads();
#pragma unroll 1
  for (int b = threadIdx.x; b < p.batch; b += kCtaThreads) {
    const u32 mine = keys[b];
    int rank = 0;
#pragma unroll 4
    for (int other = 0; other < p.batch; other += 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(keys + other);
      rank += (x.x > mine) + (x.y > mine) + (x.z > mine) + (x.w > mine);
    }
    ranked[rank] = {int(mine >> 8) - 1, b};
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    const int each = (p.batch + 31) / 32;
    const int first = threadIdx.x * each;
    const int last = min(first + each, p.batch);
    int chunks = 0;
    int kinds = 0;  // sequences that have q blocks by the dynamic scheduler, and 2^16 times those with shorter ones
#pragma unroll 1
    for (int rank = first; rank < last; ++rank) {
      const int of_q_block = ranked[rank].x;
      const bool is_dynamic = of_q_block >= kMinDynamicChunks;
      chunks += max_of(of_q_block + kTileOverhead, 0);
      kinds += is_dynamic ? 1 : of_q_block >= 0 ? 1 << 16 : 0;
    }
    chunks = sum_of_lanes(chunks).all;
    kinds = sum_of_lanes(kinds).all;
    const int sequences = kinds & 0xffff;
    const int max_chunks = dynamic_max_chunks(p.hk * chunks, gridDim.x, 2 * kMinDynamicChunks);
    // Where no q block is too long, all may be about as long as each other.
    const int longest = uniform(threadIdx.x == 0 ? ranked[0].x : 0);
    const bool cuts_longest = dynamic_splits(longest, max_chunks) > 1;
    const int cut_last = cuts_longest ? 0 : last_round_sequences(sequences, p.hk, gridDim.x);
    int pieces = 0;  // of a kv head, and 2^20 times sequences whose q blocks are combined at the end
#pragma unroll 1
    for (int rank = first; rank < last; ++rank) {
      int count = 0;
      if (rank < sequences - cut_last)
        count = dynamic_splits(ranked[rank].x, max_chunks);
      else if (rank < sequences)
        count = last_round_splits(ranked[rank].x, max_chunks, 2 * kMinDynamicChunks, cut_last * p.hk, gridDim.x);
      ranked[rank].x = count;
      pieces += count > kFewSplits ? count + (1 << 20) : count;
    }
    const SumOfLanes numbers = sum_of_lanes(pieces);
    int number = numbers.before & 0xfffff;
#pragma unroll 1
    for (int rank = first; rank < last; ++rank) {
      DynamicQueue::set_rank(rank, ranked[rank].y, number);
      number += ranked[rank].x;
    }
    const DynamicTiles here = {sequences, p.hk * (numbers.all & 0xfffff), cut_last > 0 ? sequences - cut_last : 0,
                            numbers.all >> 20, kinds >> 16};
    if (threadIdx.x == 0) lines = here;
    __syncwarp();
    const DynamicTile piece = DynamicQueue::tile_of_number(p, here, blockIdx.x);
    if (threadIdx.x == 0) DynamicQueue::give(0, piece);
  }
  if (kWarpgroupPath) fence_async_proxy();  // before TMA brings K
  __syncthreads();
}

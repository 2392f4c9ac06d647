// The dynamic scheduler: each CTA requests its next work tile while it computes the one before. One SM in four reads
// memory a third faster than the others, and so gets more work tiles. The longest come first, so that what each CTA
// does last is short (Graham, Bounds on multiprocessing timing anomalies, 1969). Q blocks that are longer than the mean
// work of a CTA are split. Which CTA computes a split changes no bit of it.
#pragma once
#include "decode/work_tile.cuh"
#include "sm90/ptx/tma.cuh"

// Counts like take_ticket, but orders no other accesses to memory.
__device__ __forceinline__ int take_number(int* numbers, int last) {
  int before;
  asm volatile("atom.global.relaxed.gpu.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(numbers), "r"(last) : "memory");
  return before;
}

// The sum over the lanes before this one, and over all lanes of a warp.
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

// The splits of the longer q blocks are numbered, and an atomic counter hands out the numbers. The first number of a
// CTA is that of the CTA, and each CTA requests numbers until there are no more. So the count of all requests is known,
// and the last one resets the counter to zero. Shorter q blocks follow by round robin: CTA i takes i, i + grid, and so
// on. A ring of slots in shared memory holds the current splits of the CTA, with barriers for "a split is there" and
// "all warps have read it". Each sequence has at most one block of rows, and there are at most kDynamicSequences.
class Dynamic {
 public:
  enum : int {
    kCombineKernel = 0,
    kFragments = 0,
    kOneTile = 0,
    // On the warpgroup path q blocks of more than kFewSplits are combined after the last work tile, so that no loads
    // wait.
    kCombinesAtEnd = kWarpgroupPath,
  };

  // Ranks the sequences, splits their q blocks, and takes the first split, by all threads of the CTA.
  __device__ __forceinline__ bool first(const DecodeParams& p, WorkTile& tile) {
    rank_sequences(p);
    request_ = 0;
    shorter_ = blockIdx.x;
    tile.block = 0;
    return next(p, tile);
  }

  // `ahead`: the warp loads ahead, and comes to the split again for its products.
  __device__ __forceinline__ bool next(const DecodeParams& p, WorkTile& tile, bool ahead = false) {
    const Queue& all = queue();
    Split split = {0, 0, 0, 0, 0};
    if (request_ >= 0) {
      split = split_at(request_++, !ahead);
      if (!split.any()) request_ = -1;
    }
    if (request_ < 0) {
      if (shorter_ >= all.shorter * p.hk) return false;
      split = {batch_of(all.sequences + shorter_ / p.hk), shorter_ % p.hk, 0, 1, 0};
      shorter_ += gridDim.x;
    }
    tile.batch = split.batch;
    tile.head = split.head;
    tile.sequence = sequence_of(p, tile.batch);
    tile.split = split.number;
    tile.splits = split.count;
    tile.first_partial = split.first;
    const QBlockKeys q_block = q_block_keys(p, tile.sequence.n, 0);
    const Slices slices = {split.count, q_block.chunks.count / split.count, q_block.chunks.count % split.count};
    tile.take_chunks(q_block, {slice_begin(slices, split.number), slice_begin(slices, split.number + 1)});
    return true;
  }

  static __device__ __forceinline__ int slot_of(const DecodeParams& p, const WorkTile& tile, int split) {
    return tile.first_partial + split * p.hk;
  }
  static __device__ __forceinline__ float* partial_of(const DecodeParams& p, const WorkTile& tile, int split) {
    return p.partial + (long long)(slot_of(p, tile, split)) * (kTileRows * partial_row_floats(kValueDim));
  }

  // The number of q blocks that are combined at the end, and one of them.
  static __device__ __forceinline__ int combined_at_end(const DecodeParams& p) { return queue().ends * p.hk; }
  static __device__ __forceinline__ WorkTile q_block_at_end(const DecodeParams& p, int number) {
    const int rank = number / p.hk;
    WorkTile tile = {batch_of(rank), number - rank * p.hk, 0};
    tile.sequence = sequence_of(p, tile.batch);
    tile.first_partial = first_of(rank) * p.hk + tile.head;
    tile.splits = splits_of(queue(), p.hk, rank);
    return tile;
  }

  // The requests of a CTA, by its first warp that loads: it requests the next split kRequestTiles before the end of
  // one, and passes the answer to all warps kAnswerTiles before the end. Earlier requests would take splits that
  // another CTA could begin sooner.
  class Requests {
   public:
    // `tiles`: how many tiles of the work tile are left for this warp group.
    __device__ __forceinline__ void begin_tile(const DecodeParams& p, const Dynamic& schedule, int tiles) {
      if (requests(schedule) && tiles <= kRequestTiles) request(p);
    }
    __device__ __forceinline__ void after_load(const DecodeParams& p, const Dynamic& schedule, int tiles) {
      if (requests(schedule) && tiles == kRequestTiles) request(p);
      if (requests(schedule) && tiles == kAnswerTiles) answer(p, schedule);
    }

   private:
    static __device__ __forceinline__ bool requests(const Dynamic& schedule) {
      return int(threadIdx.x / 32) == kFirstLoadWarp && schedule.request_ >= 0;
    }
    __device__ __forceinline__ void request(const DecodeParams& p) {
      number_ = threadIdx.x % 32 == 0 ? int(gridDim.x) + take_number(p.tickets + 4 * gridDim.x, queue().splits - 1) : 0;
    }
    __device__ __forceinline__ void answer(const DecodeParams& p, const Dynamic& schedule) {
      const Split split = split_of_number(p, queue(), uniform(number_));
      if (threadIdx.x % 32 == 0) give(schedule.request_, split);
    }

    int number_;  // of the first lane
  };

 private:
  enum : int {
    kAnswerTiles = 3,
    kRequestTiles = 2 * kAnswerTiles,
    // The minimum of tiles in a split: loads run ahead of the products, but never beyond the next split. All tiles of
    // the last chunk except one may lie after the keys.
    kMinTiles = kWarpGroups * (max_of(kKStages + kCodeStages, kAnswerTiles) + 1),
    kMinChunks = ((kMinTiles - 1) * kBlockKeys + kKeysPerChunk - 1) / kKeysPerChunk + 1,
  };
  static_assert(kDynamicSequences <= 256);  // a byte of an entry of the table

  // The q blocks of the call, in the order of their lengths. A sequence has a rank in that order.
  struct Queue {
    int sequences;   // the number of sequences whose q blocks are long enough to be requested
    int splits;      // the number of splits of these q blocks
    int first_split; // the rank of the first sequence whose q blocks have several splits; later ones may have, too
    int ends;        // the number of sequences whose q blocks have more than kFewSplits, which are the first ones
    int shorter;     // the number of sequences whose q blocks are shorter
  };
  static_assert(sizeof(Queue) <= 64);  // decode_layout

  // A split of a q block, which in most cases is the whole q block.
  struct Split {
    int batch, head;
    int number, count;
    // The number of the q block's first split among those of split q blocks. Its next splits are hk apart, so that CTAs
    // read the heads of a sequence at the same time.
    int first;

    __device__ __forceinline__ bool any() const { return count > 0; }
  };

  static __device__ __forceinline__ Queue& queue() { return *reinterpret_cast<Queue*>(raw + kLayout.schedule); }

  // The table of ranks: the sequence of each rank, and how many splits of a kv head the ranks before have.
  static __device__ __forceinline__ int* table() { return reinterpret_cast<int*>(raw + kLayout.ranks); }
  static __device__ __forceinline__ void set_rank(int rank, int batch, int first) {
    table()[rank] = first << 8 | batch;
  }
  static __device__ __forceinline__ int batch_of(int rank) { return table()[rank] & 255; }
  static __device__ __forceinline__ int first_of(int rank) { return table()[rank] >> 8; }
  static __device__ __forceinline__ int splits_of(const Queue& all, int hk, int rank) {
    return (rank + 1 < all.sequences ? first_of(rank + 1) : all.splits / hk) - first_of(rank);
  }

  // The slot of a request, by its number, and its two barriers.
  static __device__ __forceinline__ int4* slot(int request) {
    return reinterpret_cast<int4*>(raw + kLayout.slots) + request % kDynamicSlots;
  }
  static __device__ __forceinline__ u32 given(int request) {
    return shared_base() + kLayout.slots + 16 * kDynamicSlots + request % kDynamicSlots * 8;
  }
  static __device__ __forceinline__ u32 read(int request) { return given(request) + 8 * kDynamicSlots; }

  // Passes the split of a request to all warps, by one lane.
  static __device__ __forceinline__ void give(int request, const Split& split) {
    mbarrier_wait(read(request), request / kDynamicSlots % 2 ^ 1);
    *slot(request) = {split.batch, split.head, split.number << 16 | split.count, split.first};
    mbarrier_arrive(given(request));
  }
  // Reads the split of a request, by a warp. A warp that reads it twice, for its loads and for its products, releases
  // it the second time.
  static __device__ __forceinline__ Split split_at(int request, bool releases) {
    mbarrier_wait(given(request), request / kDynamicSlots % 2);
    const int4 x = *slot(request);
    const int numbers = uniform(x.z);
    mbarrier_arrive_if(read(request), releases && threadIdx.x % 32 == 0);
    return {uniform(x.x), uniform(x.y), numbers >> 16, numbers & 0xffff, uniform(x.w)};
  }

  // Finds the split with a number, by a warp.
  static __device__ __forceinline__ Split split_of_number(const DecodeParams& p, const Queue& all, int number) {
    if (number >= all.splits) return {0, 0, 0, 0, 0};
    const int at = number / p.hk;
    int ranks = 0;  // that begin at or before this split
#pragma unroll 1
    for (int i = 0; i < all.sequences; i += 32) {
      const int rank = i + int(threadIdx.x % 32);
      ranks += __popc(__ballot_sync(0xffffffff, rank < all.sequences && first_of(rank) <= at));
    }
    const int head = number - at * p.hk;
    const int first = first_of(ranks - 1);
    return {batch_of(ranks - 1), head, at - first, splits_of(all, p.hk, ranks - 1),
            (first - first_of(all.first_split)) * p.hk + head};
  }

  // Fills the queue and the table and passes on the first split, by all threads of the CTA. Intermediate values lie in
  // the buffers of K.
  static __device__ __forceinline__ void rank_sequences(const DecodeParams& p) {
    // Keys to sort by: the chunks of a q block plus 1, or 0 without queries; then 255 minus the sequence.
    u32* const keys = reinterpret_cast<u32*>(raw);
    int2* const ranked = reinterpret_cast<int2*>(keys + kDynamicSequences);  // {chunks, later splits; sequence}
#pragma unroll 1
    for (int b = threadIdx.x; b < (p.batch + 3) / 4 * 4; b += kCtaThreads) {
      keys[b] = 0;
      if (b >= p.batch) continue;
      const Lengths n = sequence_of(p, b).n;
      const int chunks = n.sq > 0 ? q_block_keys(p, n, 0).chunks.count + 1 : 0;
      keys[b] = u32(chunks) << 8 | u32(255 - b);
    }
    if (threadIdx.x == kCtaThreads - 1) {
#pragma unroll
      for (int i = 0; i < kDynamicSlots; ++i) {
        mbarrier_init(given(i), 1);
        mbarrier_init(read(i), kCtaWarps);
      }
    }
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
      int kinds = 0;  // the sequences whose q blocks are requested, plus 2^16 times those with shorter ones
#pragma unroll 1
      for (int rank = first; rank < last; ++rank) {
        const int of_q_block = ranked[rank].x;
        const bool is_requested = of_q_block >= kMinChunks;
        chunks += max_of(of_q_block + kTileOverhead, 0);
        kinds += is_requested ? 1 : of_q_block >= 0 ? 1 << 16 : 0;
      }
      chunks = sum_of_lanes(chunks).all;
      kinds = sum_of_lanes(kinds).all;
      const int sequences = kinds & 0xffff;
      const int max_chunks = dynamic_max_chunks(p.hk * chunks, gridDim.x, 2 * kMinChunks);
      // If no q block is too long, all may have about the same length, and then the last round may be split.
      const int longest = uniform(threadIdx.x == 0 ? ranked[0].x : 0);
      const bool splits_longest = dynamic_splits(longest, max_chunks) > 1;
      const int split_last = splits_longest ? 0 : last_round_sequences(sequences, p.hk, gridDim.x);
      int splits = 0;  // of a kv head, plus 2^20 times the sequences whose q blocks are combined at the end
#pragma unroll 1
      for (int rank = first; rank < last; ++rank) {
        int count = 0;
        if (rank < sequences - split_last)
          count = dynamic_splits(ranked[rank].x, max_chunks);
        else if (rank < sequences)
          count = last_round_splits(ranked[rank].x, max_chunks, 2 * kMinChunks, split_last * p.hk, gridDim.x);
        ranked[rank].x = count;
        splits += count > kFewSplits ? count + (1 << 20) : count;
      }
      const SumOfLanes numbers = sum_of_lanes(splits);
      int number = numbers.before & 0xfffff;
#pragma unroll 1
      for (int rank = first; rank < last; ++rank) {
        set_rank(rank, ranked[rank].y, number);
        number += ranked[rank].x;
      }
      const Queue all = {sequences, p.hk * (numbers.all & 0xfffff), split_last > 0 ? sequences - split_last : 0,
                         numbers.all >> 20, kinds >> 16};
      if (threadIdx.x == 0) queue() = all;
      __syncwarp();
      const Split split = split_of_number(p, all, blockIdx.x);
      if (threadIdx.x == 0) give(0, split);
    }
    if (kWarpgroupPath || kBoxKeys > 0) fence_async_proxy();  // before TMA brings K
    __syncthreads();
  }

  int request_;  // the number of the warp's next request in its CTA; -1: there are no more splits
  int shorter_;  // the number of the next shorter q block
};

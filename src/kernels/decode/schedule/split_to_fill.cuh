// Split-KV for few q blocks: these are split into about as many equal splits as there are CTAs, by the lengths that the
// call has when it runs. A CTA has at most one split, which every warp finds for itself: each lane computes the splits
// of `lane_sequences` sequences. On the warpgroup path, and on the wide path, decode/combine.cu combines the splits on
// all SMs, as one CTA would take 14 000 cycles for 16 splits of 64 rows. The warp path has few rows, which the last CTA
// at a q block combines before another kernel could start.
#pragma once
#include "decode/schedule/static.cuh"

template <int lane_sequences>
class SplitToFill : public StaticSchedule {
 public:
  enum : int {
    kCombineKernel = kWarpgroupPath || kWidePath,
    kFragments = kWarpgroupPath && !kConvertsInRegisters,
    kOneTile = 1,
  };

  __device__ __forceinline__ bool first(const DecodeParams& p, WorkTile& tile) {
    const QBlocks q_blocks = q_blocks_of_lane(p);
    tile.batch = -1;
#pragma unroll
    for (int i = 0; i < lane_sequences; ++i) {
      const int number = int(blockIdx.x) - q_blocks.of[i].first;
      const u32 here = __ballot_sync(0xffffffff, number >= 0 && number < p.hk * q_blocks.of[i].splits.count);
      if (here != 0) tile.batch = 32 * i + 31 - __clz(here);
    }
    if (tile.batch < 0) return false;
    const QBlock q_block = q_block_of(q_blocks, tile.batch);
    const int number = int(blockIdx.x) - q_block.first;
    const int split = quotient(number, p.heads);
    tile.head = number - split * p.hk;
    tile.block = blockIdx.y;
    tile.sequence = q_block.sequence;
    tile.first_partial = q_block.first + tile.head;
    tile.take_split(q_block_keys(p, q_block.sequence.n, 0), q_block.splits, split);
    if (kWarpgroupPath) __syncthreads();  // barriers in shared memory are there
    return true;
  }
  __device__ __forceinline__ bool next(const DecodeParams&, WorkTile&, bool = false) { return false; }

  // Splits are numbered by the split first and the head second. A CTA so finds its split by a product, not a division.
  static __device__ __forceinline__ int slot_of(const DecodeParams& p, const WorkTile& tile, int split) {
    return tile.first_partial + split * p.hk + (kRowBlocks > 1 ? p.to_fill.by * tile.block : 0);
  }
  static __device__ __forceinline__ float* partial_of(const DecodeParams& p, const WorkTile& tile, int split) {
    return p.partial + slot_of(p, tile, split) * (long long)(p.split_floats);
  }

  // For decode/combine.cu: completes the q block of tile.batch and tile.head, and returns its number of splits.
  static __device__ __forceinline__ int find_splits(const DecodeParams& p, WorkTile& tile) {
    const QBlock q_block = q_block_of(q_blocks_of_lane(p), tile.batch);
    tile.sequence = q_block.sequence;
    tile.first_partial = q_block.first + tile.head;
    return q_block.splits.count;
  }

 private:
  // The q blocks of a sequence: each kv head has one.
  struct QBlock {
    DecodeSequence sequence;
    Splits splits;  // none where the sequence has no queries
    int first;      // the number of the first split of the first head
  };

  // The q blocks of a lane: those of the sequence with its number, and if lane_sequences is 2, of the one 32 after it.
  struct QBlocks {
    QBlock of[lane_sequences];
  };

  // How many lanes may have sequences.
  static __device__ __forceinline__ int lanes(const DecodeParams& p) { return lane_sequences == 1 ? p.batch : 32; }

  // The sum of `x` over the lanes that have sequences.
  static __device__ __forceinline__ int sum_of_lanes(const DecodeParams& p, int x) {
#pragma unroll 1
    for (int step = 1; step < lanes(p); step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
    return uniform(x);
  }

  // The minimum of chunks in a split of a q block that has `chunks`. decode/combine.cu combines up to kMaxSplits. With
  // 128 rows a partial result takes longer than a second chunk, so that a split has two chunks if that makes eight
  // splits or more.
  static __device__ __forceinline__ int min_split(int chunks) {
    if (!kCombineKernel) return 1;
    return max_of((chunks + kMaxSplits - 1) / kMaxSplits, kBlockRows == 128 && chunks > 16 ? 2 : 1);
  }

  static __device__ __forceinline__ QBlocks q_blocks_of_lane(const DecodeParams& p) {
    const int lane = threadIdx.x % 32;
    QBlocks q_blocks = {};
    int chunks[lane_sequences];
    int chunks_of_lane = 0;
#pragma unroll
    for (int i = 0; i < lane_sequences; ++i) {
      QBlock& q_block = q_blocks.of[i];
      const int batch = lane + 32 * i;
      if (batch < p.batch) q_block.sequence = sequence_of(p, batch);
      const Lengths& n = q_block.sequence.n;
      chunks[i] = n.sq > 0 ? q_block_keys(p, n, 0).chunks.count : 0;
      chunks_of_lane += chunks[i];
    }
    const int all = p.hk * sum_of_lanes(p, chunks_of_lane);
    int max_chunks = fill_max_chunks(all, p.to_fill);
#pragma unroll 1
    for (;;) {
      int splits = 0;
#pragma unroll
      for (int i = 0; i < lane_sequences; ++i) {
        if (q_blocks.of[i].sequence.n.sq == 0) continue;
        q_blocks.of[i].splits = fill_splits(chunks[i], max_of(max_chunks, min_split(chunks[i])));
        splits += q_blocks.of[i].splits.count;
      }
      if (p.hk * sum_of_lanes(p, splits) <= p.to_fill.by) break;
      max_chunks = fill_max_chunks(all, p.to_fit);
    }
    int first = 0;
#pragma unroll
    for (int i = 0; i < lane_sequences; ++i) {
      const int count = q_blocks.of[i].splits.count;
      int before = count;
#pragma unroll 1
      for (int step = 1; step < lanes(p); step *= 2) {
        const int x = __shfl_up_sync(0xffffffff, before, step);
        if (lane >= step) before += x;
      }
      q_blocks.of[i].first = p.hk * (first + before - count);
      if (i + 1 < lane_sequences) first += __shfl_sync(0xffffffff, before, 31);
    }
    return q_blocks;
  }

  // Broadcasts the q blocks of a sequence from its lane.
  static __device__ __forceinline__ QBlock q_block_of(const QBlocks& q_blocks, int batch) {
    QBlock q_block = q_blocks.of[0];  // a variable index would put q blocks into memory
    if (lane_sequences > 1 && batch >= 32) q_block = q_blocks.of[lane_sequences - 1];
    const auto get = [&](int x) { return __shfl_sync(0xffffffff, x, batch % 32); };
    const DecodeSequence& s = q_block.sequence;
    return {{{get(s.n.q_start), get(s.n.k_start), get(s.n.sq), get(s.n.sk)}, get(s.entry)},
            {get(q_block.splits.count), get(q_block.splits.chunks)},
            get(q_block.first)};
  }
};

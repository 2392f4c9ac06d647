// Stream-K: the q blocks of a call are laid end to end, and each CTA takes an equal slice (host_device/stream_k.h).
// Every CTA finds its slice by a prefix sum over the sequences, so that no other kernel has to run before, and the host
// needs no lengths.
#pragma once
#include "decode/schedule/static.cuh"

// The length of the q blocks of a kv head in slices, in chunks.
__device__ __forceinline__ int head_chunks(const DecodeParams& p, const Lengths& n) {
  const int blocks = q_blocks_of(n);
  int chunks = kTileOverhead * blocks;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) chunks += q_block_keys(p, n, block).chunks.count;
  return chunks;
}

__device__ __forceinline__ int sequence_chunks(const DecodeParams& p, int batch) {
  return p.hk * head_chunks(p, sequence_of(p, batch).n);
}

// A prefix sum of the chunks of sequences. A thread has the sequences from `first` to before `last`.
struct SequenceScan {
  int first, last;
  int before, mine;  // chunks of all sequences before those of the thread, and of these
  int all;           // chunks of all sequences
  int longest;       // chunks of the longest sequence
};

// Computes it, by all threads of the CTA. They have to meet at a barrier before the next scan.
template <bool finds_longest>
__device__ __forceinline__ SequenceScan scan_sequences(const DecodeParams& p) {
  int* const sums = reinterpret_cast<int*>(raw + kLayout.scan);  // of warps
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
    if (finds_longest) longest = max(longest, __shfl_xor_sync(0xffffffff, longest, step));
  }
  if (lane == 31) sums[threadIdx.x / 32] = before;
  if (finds_longest && lane == 31) sums[kCtaWarps + threadIdx.x / 32] = longest;
  __syncthreads();
  before -= mine;
  int all = 0;
#pragma unroll
  for (int warp = 0; warp < kCtaWarps; ++warp) {
    if (warp < threadIdx.x / 32) before += sums[warp];
    all += sums[warp];
    if (finds_longest) longest = max(longest, sums[kCtaWarps + warp]);
  }
  return {first, last, before, mine, all, longest};
}

// The q blocks of a slice, one after another.
class SliceWalk : public StaticSchedule {
 protected:
  struct Slice {
    Slices all;
    int begin, end;
    int batch, at;     // the sequence in which it begins, and where that sequence begins
    int round_robin;   // StreamKOrRoundRobin: 1: the CTA takes whole q blocks and has no slice
  };
  static_assert(sizeof(Slice) <= 64);  // decode_layout

  static __device__ __forceinline__ Slice& slice() { return *reinterpret_cast<Slice*>(raw + kLayout.schedule); }

  // Finds the slice of the CTA, by all of its threads; false: it has none.
  __device__ __forceinline__ bool find_slice(const DecodeParams& p, const SequenceScan& scan, WorkTile& tile) {
    const Slices all = slices_of(scan.all, gridDim.x);
    if (int(blockIdx.x) >= all.count) return false;
    const int begin = slice_begin(all, blockIdx.x);
    int before = scan.before;
    if (begin >= before && begin < before + scan.mine) {
      int b = scan.first;
#pragma unroll 1
      for (;;) {
        const int after = before + sequence_chunks(p, b);
        if (begin < after) break;
        before = after;
        ++b;
      }
      slice() = {all, begin, slice_begin(all, blockIdx.x + 1), b, before, 0};
    }
    __syncthreads();
    tile.batch = slice().batch - 1;
    tile.head = tile.block = tile.first_partial = 0;
    tile.split = tile.splits = 0;
    at_ = slice().at;
    chunks_ = 0;
    blocks_ = 0;
    return true;
  }

  // Goes on to the next q block that the slice reaches.
  __device__ __forceinline__ bool next_q_block(const DecodeParams& p, WorkTile& tile) {
    at_ += chunks_;
    if (++tile.block >= blocks_) {
      tile.block = 0;
      ++tile.head;
    }
    while (tile.head >= p.hk || blocks_ == 0) {
      if (++tile.batch >= p.batch) return false;
      begin_sequence(p, tile);
    }
    if (at_ >= slice().end) return false;
    chunks_ = kTileOverhead + q_block_keys(p, tile.sequence.n, tile.block).chunks.count;
    return true;
  }

  // The CTA's block of rows of a q block, of which there is one a kv head.
  static __device__ __forceinline__ bool of_row_block(WorkTile& tile) {
    if (kRowBlocks > 1) tile.block = blockIdx.y;
    return true;
  }

  int at_;      // where the q block begins, in chunks of all q blocks
  int chunks_;  // its length

 private:
  // Goes to the head in which the slice begins, or to the first head of a sequence that begins in the slice.
  __device__ __forceinline__ void begin_sequence(const DecodeParams& p, WorkTile& tile) {
    tile.sequence = sequence_of(p, tile.batch);
    blocks_ = q_blocks_of(tile.sequence.n);
    tile.head = tile.block = chunks_ = 0;
    if (at_ >= slice().begin || blocks_ == 0) return;
    const int of_head = head_chunks(p, tile.sequence.n);
    tile.head = (slice().begin - at_) / of_head;
    at_ += tile.head * of_head;
  }

  int blocks_;  // q blocks of a head of the sequence
};

// Stream-K: a work tile is the part of a q block that is in the slice. The last CTA at a q block combines its splits.
class StreamK : public SliceWalk {
 public:
  __device__ __forceinline__ bool first(const DecodeParams& p, WorkTile& tile) {
    return find_slice(p, scan_sequences<false>(p), tile) && next(p, tile);
  }
  __device__ __forceinline__ bool next(const DecodeParams& p, WorkTile& tile, bool = false) {
    while (next_q_block(p, tile))
      if (take_slice(p, tile)) return of_row_block(tile);
    return false;
  }

  // A CTA has at most two partial results: of the q block in which its slice begins, and of that in which it ends.
  static __device__ __forceinline__ int slot_of(const DecodeParams&, const WorkTile& tile, int split) {
    return 2 * (tile.first_partial + split) + (split == 0) + (kRowBlocks > 1 ? 2 * gridDim.x * tile.block : 0);
  }
  static __device__ __forceinline__ float* partial_of(const DecodeParams& p, const WorkTile& tile, int split) {
    return p.partial + (long long)(slot_of(p, tile, split)) * (kTileRows * partial_row_floats(kValueDim));
  }

 private:
  // Takes the part of the q block that is in the slice, if there is one.
  __device__ __forceinline__ bool take_slice(const DecodeParams& p, WorkTile& tile) const {
    const QBlockKeys q_block = q_block_keys(p, tile.sequence.n, tile.block);
    const ChunkRange mine = chunks_in_slice(at_, q_block.chunks.count, slice().begin, slice().end);
    if (!mine.any()) return false;
    tile.take_chunks(q_block, mine);
    tile.split = 0;
    tile.splits = 1;
    if (mine.end - mine.begin == q_block.chunks.count) return true;
    const Slices all = slice().all;
    const int first = at_ + kTileOverhead;
    tile.first_partial = slice_of_chunk(all, first);
    tile.split = blockIdx.x - tile.first_partial;
    tile.splits = slice_of_chunk(all, first + q_block.chunks.count - 1) - tile.first_partial + 1;
    return true;
  }
};

// Round robin of whole q blocks where the lengths make that as even as slices, else stream-K: CTA i takes the q blocks
// i, i + grid, and so on. Nothing is combined, and all CTAs read the same sequences at the same time. Each sequence has
// at most one block of rows.
class StreamKOrRoundRobin : public StreamK {
 public:
  __device__ __forceinline__ bool first(const DecodeParams& p, WorkTile& tile) {
    const SequenceScan scan = scan_sequences<true>(p);
    if (!round_robin_is_even(p.batch * p.hk, scan.longest / p.hk, scan.all, gridDim.x))
      return find_slice(p, scan, tile) && next(p, tile);
    if (threadIdx.x == 0) slice().round_robin = 1;
    __syncthreads();
    tile.block = 0;
    at_ = int(blockIdx.x) - int(gridDim.x);
    return next_whole(p, tile);
  }
  __device__ __forceinline__ bool next(const DecodeParams& p, WorkTile& tile, bool = false) {
    return slice().round_robin ? next_whole(p, tile) : StreamK::next(p, tile);
  }

 private:
  // Goes to the next q block that has queries; at_ is its number.
  __device__ __forceinline__ bool next_whole(const DecodeParams& p, WorkTile& tile) {
    do {
      at_ += gridDim.x;
      if (at_ >= p.batch * p.hk) return false;
      tile.batch = at_ / p.hk;
      tile.sequence = sequence_of(p, tile.batch);
    } while (tile.sequence.n.sq == 0);
    tile.head = at_ % p.hk;
    tile.take_whole(q_block_keys(p, tile.sequence.n, 0));
    return of_row_block(tile);
  }
};

// Batch-invariant split-KV: the keys of a q block alone decide where it is split, so that its bits depend on nothing
// else. CTAs take whole splits, each in the slice in which it begins. decode/combine.cu combines them.
class InvariantSplits : public SliceWalk {
 public:
  enum : int { kCombineKernel = 1 };

  __device__ __forceinline__ bool first(const DecodeParams& p, WorkTile& tile) {
    return find_slice(p, scan_sequences<false>(p), tile) && next(p, tile);
  }
  __device__ __forceinline__ bool next(const DecodeParams& p, WorkTile& tile, bool = false) {
    if (tile.split + 1 < tile.splits && take_split(p, tile, tile.split + 1)) return true;
    while (next_q_block(p, tile)) {
      const Splits splits = splits_of(tile.sequence.n, q_block_keys(p, tile.sequence.n, tile.block).chunks);
      if (take_split(p, tile, first_split(at_, splits, slice().begin))) return true;
    }
    return false;
  }

  static __device__ __forceinline__ float* partial_of(const DecodeParams& p, const WorkTile& tile, int split) {
    const long long first = kPackedK ? tile.head * (long long)(p.total_k / kPackedSplitKeys) +
                                           tile.sequence.n.k_start / kPackedSplitKeys
                                     : ((long long)(tile.batch) * p.hk + tile.head) * p.max_splits;
    return p.partial + (first + split) * p.split_floats;
  }

  // For decode/combine.cu: completes the q block of tile.batch and tile.head, and returns its number of splits.
  static __device__ __forceinline__ int find_splits(const DecodeParams& p, WorkTile& tile) {
    tile.sequence = sequence_of(p, tile.batch);
    const Lengths& n = tile.sequence.n;
    return n.sq == 0 ? 0 : splits_of(n, q_block_keys(p, n, 0).chunks).count;
  }

 private:
  // A sequence with several blocks of rows has enough q blocks without splits.
  static __device__ __forceinline__ Splits splits_of(const Lengths& n, const Chunks& q_block) {
    return q_blocks_of(n) > 1 ? Splits{1, q_block.count} : invariant_splits(q_block.count);
  }

  // Takes a split of the q block; false: the slice does not have it.
  __device__ __forceinline__ bool take_split(const DecodeParams& p, WorkTile& tile, int split) const {
    const QBlockKeys q_block = q_block_keys(p, tile.sequence.n, tile.block);
    const Splits splits = splits_of(tile.sequence.n, q_block.chunks);
    if (split >= splits.count || split_begin(at_, splits, split) >= slice().end) return false;
    tile.take_split(q_block, splits, split);
    return true;
  }
};

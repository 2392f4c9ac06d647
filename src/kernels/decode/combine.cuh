// Combines the splits of a q block from their partial results, row by row (split-KV, as in Flash-Decoding): in the last
// CTA at the q block, or in decode/combine.cu.
#pragma once
#include "decode/output.cuh"

// The maximum of splits, and of rows of all splits, that one CTA combines. It would take too long for more.
enum : int { kMaxSplitsAtOnce = 64, kMaxSplitRows = 512 };

// How many of `count` splits are a group. Groups are combined by several CTAs, then the results of the groups by one.
__device__ __forceinline__ int splits_per_group(int count) { return count <= 24 ? 4 : count <= 80 ? 8 : 16; }

// `count` splits of a q block: `first`, `first` + `step`, and so on.
struct SplitRange {
  int first, step, count;
};

// Combines splits in the order of their keys. Stores O and LSE if they are the `whole` q block, else a partial result
// in place of the first split. Each of `warps` warps takes kRows rows and kAtOnce splits at a time, so that all of its
// loads are in flight together. A lane has the weight of one split of one row, and four columns of all rows.
template <int kRows, int kAtOnce>
__device__ __forceinline__ void combine_rows(const DecodeParams& p, const WorkTile& tile, const SplitRange& splits,
                                             bool whole, int warp, int warps) {
  constexpr int kRowFloats = partial_row_floats(kValueDim);
  constexpr int kLanes = 32 / kRows;  // that have the weights of a row
  const TileRows in_tile = rows_of_tile(p, tile);
  const int lane = threadIdx.x % 32;
  const auto row_of_split = [&](int i, int row) {
    return Schedule::partial_of(p, tile, splits.first + i * splits.step) + row * kRowFloats;
  };
#pragma unroll 1
  for (int row = warp * kRows; row < in_tile.count; row += warps * kRows)
#pragma unroll 1
    for (int column = 4 * lane; column - 4 * lane < kValueDim; column += 128) {
      float4 x[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[i] = {0, 0, 0, 0};
      const int row_of_lane = row + lane / kLanes;
      float shift = infinity();
      float sum = 0;
#pragma unroll 1
      for (int first = 0; first < splits.count; first += kAtOnce) {
        const int split_of_lane = lane % kLanes < kAtOnce ? first + lane % kLanes : splits.count;
        float2 lane_stats = {infinity(), 0};
        if (split_of_lane < splits.count && row_of_lane < in_tile.count)
          lane_stats = load_global_fresh2(row_of_split(split_of_lane, row_of_lane) + kValueDim);
        float4 y[kRows][kAtOnce];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int split = 0; split < kAtOnce; ++split) {
            y[i][split] = {0, 0, 0, 0};
            if (first + split < splits.count && row + i < in_tile.count && column < kValueDim)
              y[i][split] = load_global_fresh4(row_of_split(first + split, row + i) + column);
          }
        float next = lane_stats.x;
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) next = fminf(next, __shfl_xor_sync(0xffffffff, next, step));
        next = fminf(next, shift);
        const float before = factor_of(shift, next);
        const float weight = factor_of(lane_stats.x, next);
        float more = weight * lane_stats.y;
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) more += __shfl_xor_sync(0xffffffff, more, step);
        sum = sum * before + more;
        shift = next;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          float4 sum_of_row = {0, 0, 0, 0};
          add_scaled(sum_of_row, x[i], __shfl_sync(0xffffffff, before, i * kLanes));
#pragma unroll
          for (int split = 0; split < kAtOnce; ++split)
            add_scaled(sum_of_row, y[i][split], __shfl_sync(0xffffffff, weight, i * kLanes + split));
          x[i] = sum_of_row;
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float sum_of_row = __shfl_sync(0xffffffff, sum, i * kLanes);
        const float shift_of_row = __shfl_sync(0xffffffff, shift, i * kLanes);
        if (row + i >= in_tile.count || column >= kValueDim) continue;
        if (whole)
          store_columns(p, row_of_tile<ElementO>(p, p.o, tile, in_tile.first + row + i), column, x[i],
                        normalizer(p.sinks, head_of_row(tile, in_tile.first + row + i), sum_of_row, shift_of_row));
        else
          *reinterpret_cast<float4*>(row_of_split(0, row + i) + column) = x[i];
      }
      // After the last columns, as the statistics of the first split may lie where these go.
      if (column - 4 * lane + 128 >= kValueDim && lane % kLanes == 0 && row_of_lane < in_tile.count) {
        if (whole)
          store_lse(p, tile, in_tile.first + row_of_lane, shift, sum);
        else
          store_stats(row_of_split(0, row_of_lane), shift, sum);
      }
    }
}

__device__ __forceinline__ void combine_splits(const DecodeParams& p, const WorkTile& tile, const SplitRange& splits,
                                               bool whole) {
  // How many splits, and rows, registers have room for.
  constexpr int kSplitsOfOneRow = kHeads > 1 ? 8 : kValueDim <= 128 ? 20 : kTree ? 12 : 16;
  constexpr int kRowsOfTwoSplits = kValueDim <= 128 || !kHasSinks || !kHasLse ? 8 : 4;
  constexpr int kRowsAtOnce = kHeads > 1 ? 1 : int(kWarpsPerGroup);
  const int warp = threadIdx.x / 32;
  if constexpr (kWidePath)
    combine_rows<2, 8>(p, tile, splits, whole, warp, kComputeWarps);
  else if constexpr (!kWarpgroupPath)
    combine_rows<kRowsAtOnce, kRowsAtOnce == 1 ? kSplitsOfOneRow : 8>(p, tile, splits, whole, warp, kComputeWarps);
  else if (splits.count <= 2)
    combine_rows<kRowsOfTwoSplits, 2>(p, tile, splits, whole, warp, kComputeWarps);
  else
    combine_rows<4, 4>(p, tile, splits, whole, warp, kComputeWarps);
}

// Whether this CTA is the last of `count` CTAs that take this ticket. What all of them wrote before is visible to it.
__device__ __forceinline__ bool is_last(int* ticket, int count) {
  int* const flag = reinterpret_cast<int*>(raw + kLayout.scan);
  sync_compute_warps();
  if (threadIdx.x == 0) *flag = take_ticket(ticket, count - 1) == count - 1;
  sync_compute_warps();
  return *flag;
}

// Adds to a ticket like take_ticket, but any number. Returns what the ticket was.
__device__ __forceinline__ u32 add_to_ticket(int* ticket, u32 x) {
  u32 before;
  asm volatile("atom.global.acq_rel.gpu.add.u32 %0, [%1], %2;" : "=r"(before) : "l"(ticket), "r"(x) : "memory");
  return before;
}

// Combines q blocks of more than kFewSplits splits by all CTAs together, after their last work tile (kCombinesAtEnd),
// so that no loads of K and V wait for it. The rows of a q block are parts of several CTAs. No CTA waits: if splits are
// missing when the CTA of a part comes, it sets the part's bit in the ticket of the q block, and the CTA that brings
// the last split combines the part. The ticket counts the splits that are complete, below its bits.
template <class S>
class CombineAtEnd {
 public:
  // Combines the parts of this CTA. All warps that compute call it after the last work tile.
  static __device__ __forceinline__ void run(const DecodeParams& p) {
#pragma unroll 1
    for (int at = blockIdx.x; at < S::combined_at_end(p) * kParts; at += gridDim.x) {
      const int part = at % kParts;
      const WorkTile tile = S::q_block_at_end(p, at / kParts);
      const u32 before = arrive(p, tile, kPartBit << part);
      if (int(before % kPartBit) == tile.splits) combine_part(p, tile, part);
    }
  }

  // Ends a split of such a q block: the last one combines the parts whose CTAs have come.
  static __device__ __forceinline__ void end_split(const DecodeParams& p, const WorkTile& tile) {
    const u32 before = arrive(p, tile, 1);
    if (int(before % kPartBit) + 1 < tile.splits) return;
#pragma unroll 1
    for (int part = 0; part < kParts; ++part)
      if (before & kPartBit << part) combine_part(p, tile, part);
  }

 private:
  enum : int { kParts = kBlockRows / kComputeWarps };  // of a q block, with a row for each warp
  static constexpr u32 kPartBit = 1 << 16;             // the bit of the first part in a ticket
  static_assert(!S::kCombinesAtEnd || kParts <= 16);

  // Adds to the ticket of a q block, after all that the CTA has written. Returns what the ticket was to all threads.
  // The last split or part leaves a zero.
  static __device__ __forceinline__ u32 arrive(const DecodeParams& p, const WorkTile& tile, u32 x) {
    int* const ticket = p.tickets + tile.first_partial;
    u32* const seen = reinterpret_cast<u32*>(raw + kLayout.scan);
    sync_compute_warps();
    if (threadIdx.x == 0) {
      *seen = add_to_ticket(ticket, x);
      if (*seen + x == tile.splits + kPartBit * ((1u << kParts) - 1)) *ticket = 0;
    }
    sync_compute_warps();
    return *seen;
  }

  static __device__ __forceinline__ void combine_part(const DecodeParams& p, const WorkTile& tile, int part) {
    combine_rows<1, 16>(p, tile, {0, 1, tile.splits}, true, part * kComputeWarps + int(threadIdx.x / 32),
                        kParts * kComputeWarps);
  }
};

// Ends a split of a q block. The last CTA combines all splits. Where these are many, the last CTA at each group of
// splits combines the group first.
template <class S>
__device__ __forceinline__ void end_split(const DecodeParams& p, const WorkTile& tile) {
  if constexpr (S::kCombinesAtEnd)
    if (tile.splits > kFewSplits) return CombineAtEnd<S>::end_split(p, tile);
  SplitRange splits = {0, 1, tile.splits};
  if (tile.splits > kMaxSplitsAtOnce || tile.splits * rows_of_tile(p, tile).count > kMaxSplitRows) {
    const int each = splits_per_group(tile.splits);
    const int first = tile.split / each * each;
    const SplitRange group = {first, 1, min(tile.splits - first, each)};
    if (!is_last(p.tickets + 2 * kRowBlocks * gridDim.x + S::slot_of(p, tile, first), group.count)) return;
    combine_splits(p, tile, group, false);
    splits = {0, each, (tile.splits + each - 1) / each};
  }
  const int ticket = tile.first_partial + (kRowBlocks > 1 ? gridDim.x * tile.block : 0);
  if (is_last(p.tickets + ticket, splits.count)) combine_splits(p, tile, splits, true);
}

// Ends a work tile whose result is stored, and goes on to the next one. Returns whether there is one.
__device__ __forceinline__ bool end_work_tile(const DecodeParams& p, WorkTiles& work_tiles) {
  if constexpr (!Schedule::kCombineKernel)
    if (work_tiles.tile.splits > 1) end_split<Schedule>(p, work_tiles.tile);
  return work_tiles.next(p);
}

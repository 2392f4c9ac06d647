// The end of a work tile: what its warp groups have is combined, and so are the splits of a q block.
#pragma once
#include "sm90/common/sinks.cuh"
#include "sm90/decode/load.cuh"

// Four columns of a row of O on their way out; `scale` is one over the sum.
__device__ __forceinline__ void store_columns(const DecodeParams& p, unsigned short* row, int column,
                                              const float4& x, float scale) {
  const u32 low = pack(x.x * scale, x.y * scale);
  const u32 high = pack(x.z * scale, x.w * scale);
  if (kOWhole && column + 4 <= p.dv) {
    *reinterpret_cast<uint2*>(row + column) = {low, high};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i)
    if (column + i < p.dv) row[column + i] = static_cast<unsigned short>((i < 2 ? low : high) >> (i % 2 * 16));
}

// The q head of a row of a work tile.
__device__ __forceinline__ int head_of_row(const WorkTile& item, int row) {
  return item.head * kGroup + row % kGroup;
}

__device__ __forceinline__ void store_lse(const DecodeParams& p, const WorkTile& item, int row, float shift,
                                          float sum) {
  if (!kHasLse) return;
  const int head = head_of_row(item, row);
  float* lse = p.lse + item.batch * p.lse_batch_stride + head * p.lse_head_stride;
  lse[item.sequence.n.q_start + row / kGroup] = lse_of(p.sinks, head, sum, shift);
}

__device__ __forceinline__ void add_scaled(float4& sum, const float4& x, float factor) {
  sum.x += factor * x.x;
  sum.y += factor * x.y;
  sum.z += factor * x.z;
  sum.w += factor * x.w;
}

// Of a row of a part, after its O.
__device__ __forceinline__ void store_stats(float* row, float shift, float sum) {
  *reinterpret_cast<float2*>(row + kValueDim) = {shift, sum};
}

// What the sum and O relative to `shift` are multiplied with where `new_shift` counts.
__device__ __forceinline__ float factor_of(float shift, float new_shift) {
  return shift == infinity() ? 0 : exp2_fast(new_shift - shift);
}

// The CTA that has a part of a work tile's q block; kDynamic: the number of the split.
__device__ __forceinline__ int block_of(const DecodeParams& p, const WorkTile& item, int split) {
  return item.first_slice + (kSplitting == kSplitToFill || kDynamic ? split * p.hk : split);
}

// The number of a part of a work tile's q block among all parts. A CTA has at most two: of the q block in which its
// slice begins, and of the one in which it ends. By turns, q blocks that are cut come first.
__device__ __forceinline__ int slot_of(const DecodeParams& p, const WorkTile& item, int split) {
  return kDynamic ? block_of(p, item, split) : 2 * block_of(p, item, split) + (split == 0);
}

// Where that part is left.
static_assert(kSplitting != kInvariantSplits || !kPackedK || int(kKeysPerChunk) == int(kChunkKeys));
__device__ __forceinline__ float* partial_of(const DecodeParams& p, const WorkTile& item, int split) {
  if (kSplitting == kSplitToFill) return p.partial + block_of(p, item, split) * (long long)(p.split_floats);
  if (kSplitting == kInvariantSplits) {
    const long long first = kPackedK ? item.head * (long long)(p.total_k / kPackedSplitKeys) +
                                           item.sequence.n.k_start / kPackedSplitKeys
                                     : ((long long)(item.batch) * p.hk + item.head) * p.max_splits;
    return p.partial + (first + split) * p.split_floats;
  }
  return p.partial + (long long)(slot_of(p, item, split)) * (kTileRows * partial_row_floats(kValueDim));
}

// What the one warp group of a CTA has of a work tile leaves as it is: O, or this part of it.
__device__ __forceinline__ void store_warp_group(const DecodeParams& p, const WorkTile& item, const Rows& rows,
                                           const float (&O)[kValueDim / 2]) {
  const TileRows of_item = rows_of_tile(p, item);
  const bool whole = item.splits == 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x / 32 * kWarpRows + int(thread_row()) + 8 * half;
    const bool exists = row < of_item.count;
    const float shift = rows.shift[half];
    const float sum = rows.sum[half];
    if (whole) {
      const float scale = normalizer(p.sinks, head_of_row(item, of_item.first + row), sum, shift);
      unsigned short* const out = exists ? row_of_tile(p, p.o, item, of_item.first + row) : p.o.data;
      Finite any;
#pragma unroll
      for (int i = 0; i < kValueDim / 2; i += 16)
        store_global_row<kValueDim, !kOWhole>(out, exists ? p.dv : 0, O, i, half, scale, any);
      if (exists && threadIdx.x % 4 == 0) store_lse(p, item, of_item.first + row, shift, sum);
    } else if (exists) {
      float* const split = partial_of(p, item, item.split) + row * partial_row_floats(kValueDim);
#pragma unroll
      for (int i = 2 * half; i < kValueDim / 2; i += 4)
        *reinterpret_cast<float2*>(split + 2 * (i - 2 * half) + int(thread_column())) = {O[i], O[i + 1]};
      if (threadIdx.x % 4 == 0) store_stats(split, shift, sum);
    }
  }
}

// Puts together what the warp groups have of a work tile, in the order of the warp groups: O, or this part of it.
__device__ __forceinline__ void combine_warp_groups(const DecodeParams& p, const WorkTile& item, const Rows& rows,
                                            const float (&O)[kValueDim / 2], unsigned char* shared) {
  constexpr int kExchangeColumns = exchange_columns(kTile);
  constexpr int kExchangeStride = exchange_stride(kTile);
  const TileRows of_item = rows_of_tile(p, item);
  const bool whole = item.splits == 1;
  const int first_row = threadIdx.x / 32 / kWarpsPerGroup * kTileRows + threadIdx.x / 32 % kWarpsPerGroup * kWarpRows;
  const auto has_row = [](int half) { return kTileRows >= kWarpRows || int(thread_row()) + 8 * half < kTileRows; };
  float* const partial = whole ? nullptr : partial_of(p, item, item.split);
  float2* const stats = reinterpret_cast<float2*>(shared + kLayout.stats);
  float2* const totals = reinterpret_cast<float2*>(shared + kLayout.totals);
  float* const columns = reinterpret_cast<float*>(shared + kLayout.merge);
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (has_row(i)) stats[first_row + thread_row() + 8 * i] = {rows.shift[i], rows.sum[i]};
  }
  sync_compute_warps();
  for (int row = threadIdx.x; row < of_item.count; row += kComputeThreads) {
    float shift = infinity();
    float sum = 0;
#pragma unroll
    for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group)
      shift = fminf(shift, stats[warp_group * kTileRows + row].x);
#pragma unroll
    for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group) {
      float2& of_team = stats[warp_group * kTileRows + row];
      of_team.x = factor_of(of_team.x, shift);
      sum += of_team.x * of_team.y;
    }
    totals[row] = {shift, sum};
    if (whole)
      store_lse(p, item, of_item.first + row, shift, sum);
    else
      store_stats(partial + row * partial_row_floats(kValueDim), shift, sum);
  }
#pragma unroll
  for (int first = 0; first < kValueDim; first += kExchangeColumns) {
#pragma unroll
    for (int i = 0; i < kExchangeColumns / 2 && first / 2 + i < kValueDim / 2; i += 2) {
      const int row = first_row + thread_row() + (i & 2 ? 8 : 0);
      float2* const to = reinterpret_cast<float2*>(columns + row * kExchangeStride + i / 4 * 8 + thread_column());
      if (has_row(i >> 1 & 1)) *to = {O[first / 2 + i], O[first / 2 + i + 1]};
    }
    sync_compute_warps();
    constexpr int kFours = kExchangeColumns / 4;
#pragma unroll 1
    for (int at = threadIdx.x; at < of_item.count * kFours; at += kComputeThreads) {
      const int row = at / kFours;
      const int column = at % kFours * 4;
      if (first + column >= kValueDim) continue;
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int warp_group = 0; warp_group < kWarpGroups; ++warp_group) {
        const float factor = stats[warp_group * kTileRows + row].x;
        const float* const from = columns + (warp_group * kTileRows + row) * kExchangeStride + column;
        add_scaled(sum, *reinterpret_cast<const float4*>(from), factor);
      }
      if (whole)
        store_columns(p, row_of_tile(p, p.o, item, of_item.first + row), first + column, sum,
                      normalizer(p.sinks, head_of_row(item, of_item.first + row), totals[row].y, totals[row].x));
      else
        *reinterpret_cast<float4*>(partial + row * partial_row_floats(kValueDim) + first + column) = sum;
    }
    sync_compute_warps();
  }
}

// Of a warpgroup path's split that fills the card (kSplitToFill), with all rows of a block: what each thread has of O,
// four floats at a time, as its threads stand, and then {shift, sum} of each row.
__device__ __forceinline__ float* split_columns(float* piece, int warp_of_group, int eight) {
  return piece + 4 * ((warp_of_group * (kValueDim / 8) + eight) * 32 + int(threadIdx.x % 32));
}
__device__ __forceinline__ float* split_stats(float* piece, int row) {
  return piece + kBlockRows * kValueDim + 2 * row;
}

// Leaves what the warp groups have of such a split, which is all that the CTA computes. The second warp group hands
// over what it has, if it had a tile, where its keys were.
static_assert(kSplitting != kSplitToFill || !kWarpgroupPath || kWarpGroups == 1 ||
              (kWarpGroups == 2 && kLayout.k_full >= int(kBlockRows) * (kValueDim + 2) * 4));
__device__ __forceinline__ void store_split(const DecodeParams& p, const WorkTile& item, Rows& rows,
                                            float (&O)[kValueDim / 2], unsigned char* shared) {
  const int warp_group = threadIdx.x / kWarpGroupThreads;
  const int warp_of_group = threadIdx.x / 32 % kWarpsPerGroup;
  const int row = warp_of_group * kWarpRows + int(thread_row());
  if (kWarpGroups > 1 && item.begin + 1 < item.end) {
    float* const second = reinterpret_cast<float*>(shared + kLayout.group_bytes);
    if (warp_group == 1) {
      sync_warp_group(1);
#pragma unroll
      for (int i = 0; i < kValueDim / 8; ++i)
        *reinterpret_cast<float4*>(split_columns(second, warp_of_group, i)) = {O[4 * i], O[4 * i + 1], O[4 * i + 2],
                                                                           O[4 * i + 3]};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (threadIdx.x % 4 == 0)
          *reinterpret_cast<float2*>(split_stats(second, row + 8 * i)) = {rows.shift[i], rows.sum[i]};
    }
    sync_compute_warps();
    if (warp_group == 0) {
      float mine[2], others[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 of_other = *reinterpret_cast<const float2*>(split_stats(second, row + 8 * i));
        const float shift = fminf(rows.shift[i], of_other.x);
        mine[i] = factor_of(rows.shift[i], shift);
        others[i] = factor_of(of_other.x, shift);
        rows.shift[i] = shift;
        rows.sum[i] = mine[i] * rows.sum[i] + others[i] * of_other.y;
      }
#pragma unroll
      for (int i = 0; i < kValueDim / 8; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(split_columns(second, warp_of_group, i));
        O[4 * i] = mine[0] * O[4 * i] + others[0] * x.x;
        O[4 * i + 1] = mine[0] * O[4 * i + 1] + others[0] * x.y;
        O[4 * i + 2] = mine[1] * O[4 * i + 2] + others[1] * x.z;
        O[4 * i + 3] = mine[1] * O[4 * i + 3] + others[1] * x.w;
      }
    }
  }
  if (warp_group != 0 || warp_of_group * kWarpRows >= rows_of_tile(p, item).count) return;
  float* const piece = partial_of(p, item, item.split);
#pragma unroll
  for (int i = 0; i < kValueDim / 8; ++i)
    *reinterpret_cast<float4*>(split_columns(piece, warp_of_group, i)) = {O[4 * i], O[4 * i + 1], O[4 * i + 2],
                                                                      O[4 * i + 3]};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (threadIdx.x % 4 == 0)
      *reinterpret_cast<float2*>(split_stats(piece, row + 8 * i)) = {rows.shift[i], rows.sum[i]};
}

// Two columns of a row of O on their way out.
__device__ __forceinline__ void store_pair(const DecodeParams& p, unsigned short* row, int column, u32 pair) {
  if (kOWhole && column + 2 <= p.dv) {
    *reinterpret_cast<u32*>(row + column) = pair;
    return;
  }
  if (column < p.dv) row[column] = static_cast<unsigned short>(pair);
  if (column + 1 < p.dv) row[column + 1] = static_cast<unsigned short>(pair >> 16);
}

// Puts `count` such splits of a q block together in the order of their keys, as the result: a warp has what the warp
// `warp_of_group` of the warp groups left of kCombineEights times eight columns, the first of them `first_eight`.
__device__ __forceinline__ void combine_fragments(const DecodeParams& p, const WorkTile& item, int count,
                                                  int warp_of_group,
                                             int first_eight) {
  constexpr int kAtOnce = 16 / kCombineEights;  // splits whose loads are on their way together
  const auto exists = [&](int i) { return kValueDim / 8 % kCombineEights == 0 || first_eight + i < kValueDim / 8; };
  const int row = warp_of_group * kWarpRows + int(thread_row());
  float x[kCombineEights][4];
#pragma unroll
  for (int i = 0; i < kCombineEights; ++i) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0;
  float shift[2] = {infinity(), infinity()};
  float sum[2] = {0, 0};
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float4 y[kAtOnce][kCombineEights];
    float2 stats[2][kAtOnce];
#pragma unroll
    for (int split = 0; split < kAtOnce; ++split) {
      stats[0][split] = stats[1][split] = {infinity(), 0};
#pragma unroll
      for (int i = 0; i < kCombineEights; ++i) y[split][i] = {0, 0, 0, 0};
      if (first + split >= count) continue;
      float* const piece = partial_of(p, item, first + split);
#pragma unroll
      for (int i = 0; i < kCombineEights; ++i)
        if (exists(i)) y[split][i] = load_global_fresh4(split_columns(piece, warp_of_group, first_eight + i));
      stats[0][split] = load_global_fresh2(split_stats(piece, row));
      stats[1][split] = load_global_fresh2(split_stats(piece, row + 8));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float next = shift[half];
#pragma unroll
      for (int split = 0; split < kAtOnce; ++split) next = fminf(next, stats[half][split].x);
      const float before = factor_of(shift[half], next);
      shift[half] = next;
      sum[half] *= before;
#pragma unroll
      for (int i = 0; i < kCombineEights; ++i) {
        x[i][2 * half] *= before;
        x[i][2 * half + 1] *= before;
      }
#pragma unroll
      for (int split = 0; split < kAtOnce; ++split) {
        const float weight = factor_of(stats[half][split].x, next);
        sum[half] += weight * stats[half][split].y;
#pragma unroll
        for (int i = 0; i < kCombineEights; ++i) {
          x[i][2 * half] += weight * (half == 0 ? y[split][i].x : y[split][i].z);
          x[i][2 * half + 1] += weight * (half == 0 ? y[split][i].y : y[split][i].w);
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + 8 * half;
    if (at >= rows_of_tile(p, item).count) continue;
    const float scale = normalizer(p.sinks, head_of_row(item, at), sum[half], shift[half]);
    unsigned short* const out = row_of_tile(p, p.o, item, at);
#pragma unroll
    for (int i = 0; i < kCombineEights; ++i)
      if (exists(i))
        store_pair(p, out, 8 * (first_eight + i) + int(thread_column()),
                   pack(x[i][2 * half] * scale, x[i][2 * half + 1] * scale));
    if (first_eight == 0 && threadIdx.x % 4 == 0) store_lse(p, item, at, shift[half], sum[half]);
  }
}

// Parts that a CTA puts together at once: more of them, and more rows, would take it too long.
enum : int { kMaxSplitsAtOnce = 64, kMaxSplitRows = 512 };

// So many of them are a group of `count`: groups are combined side by side, and then what they leave.
__device__ __forceinline__ int splits_per_group(int count) { return count <= 24 ? 4 : count <= 80 ? 8 : 16; }

// Parts of a q block, `count` of them, `step` apart.
struct SplitRange {
  int first, step, count;
};

// Puts parts together in the order of the q block's keys: as the result, or where the first of them was. Each of
// `warps` takes kRows rows and kAtOnce parts at a time, so that all of its loads are on their way together: each lane
// the weight of one part of one row, and four columns of all.
template <int kRows, int kAtOnce>
__device__ __forceinline__ void combine_rows(const DecodeParams& p, const WorkTile& item, const SplitRange& splits,
                                           bool whole, int warp, int warps) {
  constexpr int kRow = partial_row_floats(kValueDim);
  constexpr int kLanes = 32 / kRows;  // of a row
  const TileRows of_item = rows_of_tile(p, item);
  const int lane = threadIdx.x % 32;
  const auto part_row = [&](int i, int row) {
    return partial_of(p, item, splits.first + i * splits.step) + row * kRow;
  };
#pragma unroll 1
  for (int row = warp * kRows; row < of_item.count; row += warps * kRows)
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
        const int part_of_lane = lane % kLanes < kAtOnce ? first + lane % kLanes : splits.count;
        float2 of_lane = {infinity(), 0};
        if (part_of_lane < splits.count && row_of_lane < of_item.count)
          of_lane = load_global_fresh2(part_row(part_of_lane, row_of_lane) + kValueDim);
        float4 y[kRows][kAtOnce];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int split = 0; split < kAtOnce; ++split) {
            y[i][split] = {0, 0, 0, 0};
            if (first + split < splits.count && row + i < of_item.count && column < kValueDim)
              y[i][split] = load_global_fresh4(part_row(first + split, row + i) + column);
          }
        float next = of_lane.x;
#pragma unroll
        for (int step = 1; step < kLanes; step *= 2) next = fminf(next, __shfl_xor_sync(0xffffffff, next, step));
        next = fminf(next, shift);
        const float before = factor_of(shift, next);
        const float weight = factor_of(of_lane.x, next);
        float more = weight * of_lane.y;
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
        if (row + i >= of_item.count || column >= kValueDim) continue;
        if (whole)
          store_columns(p, row_of_tile(p, p.o, item, of_item.first + row + i), column, x[i],
                        normalizer(p.sinks, head_of_row(item, of_item.first + row + i), sum_of_row, shift_of_row));
        else
          *reinterpret_cast<float4*>(part_row(0, row + i) + column) = x[i];
      }
      // After the last columns, as the first part's may be where they go.
      if (column - 4 * lane + 128 >= kValueDim && lane % kLanes == 0 && row_of_lane < of_item.count) {
        if (whole)
          store_lse(p, item, of_item.first + row_of_lane, shift, sum);
        else
          store_stats(part_row(0, row_of_lane), shift, sum);
      }
    }
}

__device__ __forceinline__ void combine_splits(const DecodeParams& p, const WorkTile& item, const SplitRange& splits,
                                            bool whole) {
  constexpr int kOfOneRow = kValueDim <= 128 ? 20 : kTree ? 12 : 16;        // as many as registers hold
  constexpr int kRowsOfTwo = kValueDim <= 128 || !kHasSinks || !kHasLse ? 8 : 4;  // likewise
  const int warp = threadIdx.x / 32;
  if constexpr (!kWarpgroupPath)
    combine_rows<kWarpsPerGroup, kWarpsPerGroup == 1 ? kOfOneRow : 8>(p, item, splits, whole, warp, kComputeWarps);
  else if (splits.count <= 2)
    combine_rows<kRowsOfTwo, 2>(p, item, splits, whole, warp, kComputeWarps);
  else
    combine_rows<4, 4>(p, item, splits, whole, warp, kComputeWarps);
}

// Whether this CTA is the last of `count` that come here, after all that it has written.
__device__ __forceinline__ bool is_last(int* ticket, int count, unsigned char* shared) {
  int* const flag = reinterpret_cast<int*>(shared + kLayout.scan);
  sync_compute_warps();
  if (threadIdx.x == 0) *flag = take_ticket(ticket, count - 1) == count - 1;
  sync_compute_warps();
  return *flag;
}

enum : int {
  kCombinesAtEnd = kDynamic && kWarpgroupPath,   // q blocks of more than kFewSplits
  kEndParts = kBlockRows / kComputeWarps,  // of the rows of such a q block: each warp has one
};
static_assert(!kCombinesAtEnd || kEndParts <= 16);
constexpr u32 kUnitBit = 1 << 16;  // of the first end part, in the ticket of a q block

// Adds to the ticket of a q block, after all that the CTA has written: what the ticket was, for all threads. The
// last split or end part leaves a zero.
__device__ __forceinline__ u32 arrive_at_q_block(const DecodeParams& p, const WorkTile& item, u32 x,
                                            unsigned char* shared) {
  int* const ticket = p.tickets + item.first_slice;
  u32* const seen = reinterpret_cast<u32*>(shared + kLayout.scan);
  sync_compute_warps();
  if (threadIdx.x == 0) {
    *seen = add_to_ticket(ticket, x);
    if (*seen + x == item.splits + kUnitBit * ((1u << kEndParts) - 1)) *ticket = 0;
  }
  sync_compute_warps();
  return *seen;
}

// Puts together some rows of a q block: kEndParts of these are all.
__device__ __forceinline__ void combine_end_rows(const DecodeParams& p, const WorkTile& item, int unit) {
  combine_rows<1, 16>(p, item, {0, 1, item.splits}, true, unit * kComputeWarps + int(threadIdx.x / 32),
                      kEndParts * kComputeWarps);
}

// Puts together the q blocks of many parts, which began first, once there are no more splits: then no loads wait for
// that. CTAs share out their rows, and wait for nobody: where splits are missing, whoever brings the last one does
// these rows, too. A ticket counts the splits of a q block that are there, and has a bit for each of its end parts whose
// CTA came.
__device__ __forceinline__ void combine_at_end(const DecodeParams& p, const DynamicTiles& lines,
                                               unsigned char* shared) {
#pragma unroll 1
  for (int at = blockIdx.x; at < lines.ends * p.hk * kEndParts; at += gridDim.x) {
    const int line = at / kEndParts;
    const int unit = at % kEndParts;
    const int rank = line / p.hk;
    WorkTile item = {DynamicQueue::batch_of(rank), line - rank * p.hk, 0};
    item.sequence = sequence_of(p, item.batch);
    item.first_slice = DynamicQueue::first_of(rank) * p.hk + item.head;
    item.splits = DynamicQueue::parts_of(lines, p.hk, rank);
    const u32 before = arrive_at_q_block(p, item, kUnitBit << unit, shared);
    if (int(before % kUnitBit) == item.splits) combine_end_rows(p, item, unit);
  }
}

// Ends a part of such a q block.
__device__ __forceinline__ void end_dynamic_split(const DecodeParams& p, const WorkTile& item, unsigned char* shared) {
  const u32 before = arrive_at_q_block(p, item, 1, shared);
  if (int(before % kUnitBit) + 1 < item.splits) return;
#pragma unroll 1
  for (int unit = 0; unit < kEndParts; ++unit)
    if (before & kUnitBit << unit) combine_end_rows(p, item, unit);
}

// Ends a split of a q block: whoever comes last puts the q block together; where parts are many, first each group of
// them.
__device__ __forceinline__ void end_split(const DecodeParams& p, const WorkTile& item, unsigned char* shared) {
  if (kCombinesAtEnd && item.splits > kFewSplits) return end_dynamic_split(p, item, shared);
  SplitRange splits = {0, 1, item.splits};
  if (item.splits > kMaxSplitsAtOnce || item.splits * rows_of_tile(p, item).count > kMaxSplitRows) {
    const int each = splits_per_group(item.splits);
    const int first = item.split / each * each;
    const SplitRange group = {first, 1, min(item.splits - first, each)};
    if (!is_last(p.tickets + 2 * gridDim.x + slot_of(p, item, first), group.count, shared)) return;
    combine_splits(p, item, group, false);
    splits = {0, each, (item.splits + each - 1) / each};
  }
  if (is_last(p.tickets + item.first_slice, splits.count, shared)) combine_splits(p, item, splits, true);
}

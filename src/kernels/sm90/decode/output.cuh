// The end of an item: what its teams have is put together, and so are the parts of a line.
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

// The q head of a row of an item.
__device__ __forceinline__ int head_of_row(const DecodeItem& item, int row) {
  return item.head * kGroup + row % kGroup;
}

__device__ __forceinline__ void store_lse(const DecodeParams& p, const DecodeItem& item, int row, float shift,
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

// The CTA that has a part of an item's line; kTurns: the number of the piece.
__device__ __forceinline__ int block_of(const DecodeParams& p, const DecodeItem& item, int part) {
  return item.first_share + (kPieces == kFillingPieces || kTurns ? part * p.hk : part);
}

// The number of a part of an item's line among all parts. A CTA has at most two: of the line in which its
// share begins, and of the one in which it ends. By turns, lines that are cut come first.
__device__ __forceinline__ int slot_of(const DecodeParams& p, const DecodeItem& item, int part) {
  return kTurns ? block_of(p, item, part) : 2 * block_of(p, item, part) + (part == 0);
}

// Where that part is left.
static_assert(kPieces != kOwnPieces || !kPackedK || int(kShareUnitKeys) == int(kUnitKeys));  // for kPackedPieceKeys
__device__ __forceinline__ float* partial_of(const DecodeParams& p, const DecodeItem& item, int part) {
  if (kPieces == kFillingPieces) return p.partial + block_of(p, item, part) * (long long)(p.piece_floats);
  if (kPieces == kOwnPieces) {
    const long long first = kPackedK ? item.head * (long long)(p.total_k / kPackedPieceKeys) +
                                           item.sequence.n.k_start / kPackedPieceKeys
                                     : ((long long)(item.batch) * p.hk + item.head) * p.max_pieces;
    return p.partial + (first + part) * p.piece_floats;
  }
  return p.partial + (long long)(slot_of(p, item, part)) * (kLineRows * partial_row_floats(kValueDim));
}

// What the one team of a CTA has of an item leaves as it is: O, or this part of it.
__device__ __forceinline__ void store_team(const DecodeParams& p, const DecodeItem& item, const Rows& rows,
                                           const float (&O)[kValueDim / 2]) {
  const ItemRows of_item = rows_of_item(p, item);
  const bool whole = item.parts == 1;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = threadIdx.x / 32 * kWarpRows + int(thread_row()) + 8 * half;
    const bool exists = row < of_item.count;
    const float shift = rows.shift[half];
    const float sum = rows.sum[half];
    if (whole) {
      const float scale = normalizer(p.sinks, head_of_row(item, of_item.first + row), sum, shift);
      unsigned short* const out = exists ? item_row(p, p.o, item, of_item.first + row) : p.o.data;
      Finite any;
#pragma unroll
      for (int i = 0; i < kValueDim / 2; i += 16)
        store_global_row<kValueDim, !kOWhole>(out, exists ? p.dv : 0, O, i, half, scale, any);
      if (exists && threadIdx.x % 4 == 0) store_lse(p, item, of_item.first + row, shift, sum);
    } else if (exists) {
      float* const part = partial_of(p, item, item.part) + row * partial_row_floats(kValueDim);
#pragma unroll
      for (int i = 2 * half; i < kValueDim / 2; i += 4)
        *reinterpret_cast<float2*>(part + 2 * (i - 2 * half) + int(thread_column())) = {O[i], O[i + 1]};
      if (threadIdx.x % 4 == 0) store_stats(part, shift, sum);
    }
  }
}

// Puts together what the teams have of an item, in the order of the teams: O, or this part of it.
__device__ __forceinline__ void merge_teams(const DecodeParams& p, const DecodeItem& item, const Rows& rows,
                                            const float (&O)[kValueDim / 2], unsigned char* shared) {
  constexpr int kMergeColumns = merge_columns(kTile);
  constexpr int kMergeStride = merge_stride(kTile);
  const ItemRows of_item = rows_of_item(p, item);
  const bool whole = item.parts == 1;
  const int first_row = threadIdx.x / 32 / kTeamWarps * kLineRows + threadIdx.x / 32 % kTeamWarps * kWarpRows;
  const auto has_row = [](int half) { return kLineRows >= kWarpRows || int(thread_row()) + 8 * half < kLineRows; };
  float* const partial = whole ? nullptr : partial_of(p, item, item.part);
  float2* const stats = reinterpret_cast<float2*>(shared + kLayout.stats);
  float2* const totals = reinterpret_cast<float2*>(shared + kLayout.totals);
  float* const columns = reinterpret_cast<float*>(shared + kLayout.merge);
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (has_row(i)) stats[first_row + thread_row() + 8 * i] = {rows.shift[i], rows.sum[i]};
  }
  sync_teams();
  for (int row = threadIdx.x; row < of_item.count; row += kThreads) {
    float shift = infinity();
    float sum = 0;
#pragma unroll
    for (int team = 0; team < kTeams; ++team) shift = fminf(shift, stats[team * kLineRows + row].x);
#pragma unroll
    for (int team = 0; team < kTeams; ++team) {
      float2& of_team = stats[team * kLineRows + row];
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
  for (int first = 0; first < kValueDim; first += kMergeColumns) {
#pragma unroll
    for (int i = 0; i < kMergeColumns / 2 && first / 2 + i < kValueDim / 2; i += 2) {
      const int row = first_row + thread_row() + (i & 2 ? 8 : 0);
      float2* const to = reinterpret_cast<float2*>(columns + row * kMergeStride + i / 4 * 8 + thread_column());
      if (has_row(i >> 1 & 1)) *to = {O[first / 2 + i], O[first / 2 + i + 1]};
    }
    sync_teams();
    constexpr int kFours = kMergeColumns / 4;
#pragma unroll 1
    for (int at = threadIdx.x; at < of_item.count * kFours; at += kThreads) {
      const int row = at / kFours;
      const int column = at % kFours * 4;
      if (first + column >= kValueDim) continue;
      float4 sum = {0, 0, 0, 0};
#pragma unroll
      for (int team = 0; team < kTeams; ++team) {
        const float factor = stats[team * kLineRows + row].x;
        add_scaled(sum, *reinterpret_cast<const float4*>(columns + (team * kLineRows + row) * kMergeStride + column),
                   factor);
      }
      if (whole)
        store_columns(p, item_row(p, p.o, item, of_item.first + row), first + column, sum,
                      normalizer(p.sinks, head_of_row(item, of_item.first + row), totals[row].y, totals[row].x));
      else
        *reinterpret_cast<float4*>(partial + row * partial_row_floats(kValueDim) + first + column) = sum;
    }
    sync_teams();
  }
}

// Of a wide team's piece that fills the card (kFillingPieces), with all rows of a block: what each thread has of O,
// four floats at a time, as its threads stand, and then {shift, sum} of each row.
__device__ __forceinline__ float* piece_columns(float* piece, int team_warp, int eight) {
  return piece + 4 * ((team_warp * (kValueDim / 8) + eight) * 32 + int(threadIdx.x % 32));
}
__device__ __forceinline__ float* piece_stats(float* piece, int row) {
  return piece + kBlockRows * kValueDim + 2 * row;
}

// Leaves what the teams have of such a piece, which is all that the CTA computes. The second team hands over
// what it has, if it had a tile, where its keys were.
static_assert(kPieces != kFillingPieces || !kWide || kTeams == 1 ||
              (kTeams == 2 && kLayout.k_full >= int(kBlockRows) * (kValueDim + 2) * 4));
__device__ __forceinline__ void store_piece(const DecodeParams& p, const DecodeItem& item, Rows& rows,
                                            float (&O)[kValueDim / 2], unsigned char* shared) {
  const int team = threadIdx.x / kTeamThreads;
  const int team_warp = threadIdx.x / 32 % kTeamWarps;
  const int row = team_warp * kWarpRows + int(thread_row());
  if (kTeams > 1 && item.begin + 1 < item.end) {
    float* const second = reinterpret_cast<float*>(shared + kLayout.team_bytes);
    if (team == 1) {
      sync_team(1);
#pragma unroll
      for (int i = 0; i < kValueDim / 8; ++i)
        *reinterpret_cast<float4*>(piece_columns(second, team_warp, i)) = {O[4 * i], O[4 * i + 1], O[4 * i + 2],
                                                                           O[4 * i + 3]};
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (threadIdx.x % 4 == 0)
          *reinterpret_cast<float2*>(piece_stats(second, row + 8 * i)) = {rows.shift[i], rows.sum[i]};
    }
    sync_teams();
    if (team == 0) {
      float mine[2], others[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 of_other = *reinterpret_cast<const float2*>(piece_stats(second, row + 8 * i));
        const float shift = fminf(rows.shift[i], of_other.x);
        mine[i] = factor_of(rows.shift[i], shift);
        others[i] = factor_of(of_other.x, shift);
        rows.shift[i] = shift;
        rows.sum[i] = mine[i] * rows.sum[i] + others[i] * of_other.y;
      }
#pragma unroll
      for (int i = 0; i < kValueDim / 8; ++i) {
        const float4 x = *reinterpret_cast<const float4*>(piece_columns(second, team_warp, i));
        O[4 * i] = mine[0] * O[4 * i] + others[0] * x.x;
        O[4 * i + 1] = mine[0] * O[4 * i + 1] + others[0] * x.y;
        O[4 * i + 2] = mine[1] * O[4 * i + 2] + others[1] * x.z;
        O[4 * i + 3] = mine[1] * O[4 * i + 3] + others[1] * x.w;
      }
    }
  }
  if (team != 0 || team_warp * kWarpRows >= rows_of_item(p, item).count) return;
  float* const piece = partial_of(p, item, item.part);
#pragma unroll
  for (int i = 0; i < kValueDim / 8; ++i)
    *reinterpret_cast<float4*>(piece_columns(piece, team_warp, i)) = {O[4 * i], O[4 * i + 1], O[4 * i + 2],
                                                                      O[4 * i + 3]};
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (threadIdx.x % 4 == 0)
      *reinterpret_cast<float2*>(piece_stats(piece, row + 8 * i)) = {rows.shift[i], rows.sum[i]};
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

// Puts `count` such pieces of a line together in the order of their keys, as the result: a warp has what the warp
// `team_warp` of the teams left of kMergeEights times eight columns, the first of them `first_eight`.
__device__ __forceinline__ void merge_pieces(const DecodeParams& p, const DecodeItem& item, int count, int team_warp,
                                             int first_eight) {
  constexpr int kAtOnce = 16 / kMergeEights;  // pieces whose loads are on their way together
  const auto exists = [&](int i) { return kValueDim / 8 % kMergeEights == 0 || first_eight + i < kValueDim / 8; };
  const int row = team_warp * kWarpRows + int(thread_row());
  float x[kMergeEights][4];
#pragma unroll
  for (int i = 0; i < kMergeEights; ++i) x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0;
  float shift[2] = {infinity(), infinity()};
  float sum[2] = {0, 0};
#pragma unroll 1
  for (int first = 0; first < count; first += kAtOnce) {
    float4 y[kAtOnce][kMergeEights];
    float2 stats[2][kAtOnce];
#pragma unroll
    for (int part = 0; part < kAtOnce; ++part) {
      stats[0][part] = stats[1][part] = {infinity(), 0};
#pragma unroll
      for (int i = 0; i < kMergeEights; ++i) y[part][i] = {0, 0, 0, 0};
      if (first + part >= count) continue;
      float* const piece = partial_of(p, item, first + part);
#pragma unroll
      for (int i = 0; i < kMergeEights; ++i)
        if (exists(i)) y[part][i] = load_global_fresh4(piece_columns(piece, team_warp, first_eight + i));
      stats[0][part] = load_global_fresh2(piece_stats(piece, row));
      stats[1][part] = load_global_fresh2(piece_stats(piece, row + 8));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float next = shift[half];
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part) next = fminf(next, stats[half][part].x);
      const float before = factor_of(shift[half], next);
      shift[half] = next;
      sum[half] *= before;
#pragma unroll
      for (int i = 0; i < kMergeEights; ++i) {
        x[i][2 * half] *= before;
        x[i][2 * half + 1] *= before;
      }
#pragma unroll
      for (int part = 0; part < kAtOnce; ++part) {
        const float weight = factor_of(stats[half][part].x, next);
        sum[half] += weight * stats[half][part].y;
#pragma unroll
        for (int i = 0; i < kMergeEights; ++i) {
          x[i][2 * half] += weight * (half == 0 ? y[part][i].x : y[part][i].z);
          x[i][2 * half + 1] += weight * (half == 0 ? y[part][i].y : y[part][i].w);
        }
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int at = row + 8 * half;
    if (at >= rows_of_item(p, item).count) continue;
    const float scale = normalizer(p.sinks, head_of_row(item, at), sum[half], shift[half]);
    unsigned short* const out = item_row(p, p.o, item, at);
#pragma unroll
    for (int i = 0; i < kMergeEights; ++i)
      if (exists(i))
        store_pair(p, out, 8 * (first_eight + i) + int(thread_column()),
                   pack(x[i][2 * half] * scale, x[i][2 * half + 1] * scale));
    if (first_eight == 0 && threadIdx.x % 4 == 0) store_lse(p, item, at, shift[half], sum[half]);
  }
}

// Parts that a CTA puts together at once: more of them, and more rows, would take it too long.
enum : int { kMaxParts = 64, kMaxPartRows = 512 };

// So many of them are a group of `count`: groups are put together side by side, and then what they leave.
__device__ __forceinline__ int group_parts(int count) { return count <= 24 ? 4 : count <= 80 ? 8 : 16; }

// Parts of a line, `count` of them, `step` apart.
struct Parts {
  int first, step, count;
};

// Puts parts together in the order of the line's keys: as the result, or where the first of them was. Each of `warps`
// takes kRows rows and kAtOnce parts at a time, so that all of its loads are on their way together: each lane the
// weight of one part of one row, and four columns of all.
template <int kRows, int kAtOnce>
__device__ __forceinline__ void merge_rows(const DecodeParams& p, const DecodeItem& item, const Parts& parts,
                                           bool whole, int warp, int warps) {
  constexpr int kRow = partial_row_floats(kValueDim);
  constexpr int kLanes = 32 / kRows;  // of a row
  const ItemRows of_item = rows_of_item(p, item);
  const int lane = threadIdx.x % 32;
  const auto part_row = [&](int i, int row) { return partial_of(p, item, parts.first + i * parts.step) + row * kRow; };
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
      for (int first = 0; first < parts.count; first += kAtOnce) {
        const int part_of_lane = lane % kLanes < kAtOnce ? first + lane % kLanes : parts.count;
        float2 of_lane = {infinity(), 0};
        if (part_of_lane < parts.count && row_of_lane < of_item.count)
          of_lane = load_global_fresh2(part_row(part_of_lane, row_of_lane) + kValueDim);
        float4 y[kRows][kAtOnce];
#pragma unroll
        for (int i = 0; i < kRows; ++i)
#pragma unroll
          for (int part = 0; part < kAtOnce; ++part) {
            y[i][part] = {0, 0, 0, 0};
            if (first + part < parts.count && row + i < of_item.count && column < kValueDim)
              y[i][part] = load_global_fresh4(part_row(first + part, row + i) + column);
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
          for (int part = 0; part < kAtOnce; ++part)
            add_scaled(sum_of_row, y[i][part], __shfl_sync(0xffffffff, weight, i * kLanes + part));
          x[i] = sum_of_row;
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float sum_of_row = __shfl_sync(0xffffffff, sum, i * kLanes);
        const float shift_of_row = __shfl_sync(0xffffffff, shift, i * kLanes);
        if (row + i >= of_item.count || column >= kValueDim) continue;
        if (whole)
          store_columns(p, item_row(p, p.o, item, of_item.first + row + i), column, x[i],
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

__device__ __forceinline__ void merge_parts(const DecodeParams& p, const DecodeItem& item, const Parts& parts,
                                            bool whole) {
  constexpr int kOfOneRow = kValueDim <= 128 ? 20 : kTree ? 12 : 16;        // as many as registers hold
  constexpr int kRowsOfTwo = kValueDim <= 128 || !kHasSinks || !kHasLse ? 8 : 4;  // likewise
  const int warp = threadIdx.x / 32;
  if constexpr (!kWide)
    merge_rows<kTeamWarps, kTeamWarps == 1 ? kOfOneRow : 8>(p, item, parts, whole, warp, kWarps);
  else if (parts.count <= 2)
    merge_rows<kRowsOfTwo, 2>(p, item, parts, whole, warp, kWarps);
  else
    merge_rows<4, 4>(p, item, parts, whole, warp, kWarps);
}

// Whether this CTA is the last of `count` that come here, after all that it has written.
__device__ __forceinline__ bool is_last(int* ticket, int count, unsigned char* shared) {
  int* const flag = reinterpret_cast<int*>(shared + kLayout.scan);
  sync_teams();
  if (threadIdx.x == 0) *flag = take_ticket(ticket, count - 1) == count - 1;
  sync_teams();
  return *flag;
}

enum : int {
  kMergesAtEnd = kTurns && kWide,   // lines of more than kFewParts
  kEndUnits = kBlockRows / kWarps,  // of the rows of such a line: each warp has one
};
static_assert(!kMergesAtEnd || kEndUnits <= 16);
constexpr u32 kUnitBit = 1 << 16;  // of the first unit, in the ticket of a line

// Adds to the ticket of a line, after all that the CTA has written: what the ticket was, for all threads. The
// last part or unit leaves a zero.
__device__ __forceinline__ u32 come_to_line(const DecodeParams& p, const DecodeItem& item, u32 x,
                                            unsigned char* shared) {
  int* const ticket = p.tickets + item.first_share;
  u32* const seen = reinterpret_cast<u32*>(shared + kLayout.scan);
  sync_teams();
  if (threadIdx.x == 0) {
    *seen = add_to_ticket(ticket, x);
    if (*seen + x == item.parts + kUnitBit * ((1u << kEndUnits) - 1)) *ticket = 0;
  }
  sync_teams();
  return *seen;
}

// Puts together some rows of a line: kEndUnits of these are all.
__device__ __forceinline__ void merge_end_unit(const DecodeParams& p, const DecodeItem& item, int unit) {
  merge_rows<1, 16>(p, item, {0, 1, item.parts}, true, unit * kWarps + int(threadIdx.x / 32), kEndUnits * kWarps);
}

// Puts together the lines of many parts, which began first, once there are no more pieces: then no loads wait for that.
// CTAs share out their rows, and wait for nobody: where parts are missing, whoever brings the last one does
// these rows, too. A ticket counts the parts of a line that are there, and has a bit for each of its units whose thread
// block came.
__device__ __forceinline__ void merge_at_end(const DecodeParams& p, const TurnLines& lines, unsigned char* shared) {
#pragma unroll 1
  for (int at = blockIdx.x; at < lines.ends * p.hk * kEndUnits; at += gridDim.x) {
    const int line = at / kEndUnits;
    const int unit = at % kEndUnits;
    const int rank = line / p.hk;
    DecodeItem item = {Turns::batch_of(rank), line - rank * p.hk, 0};
    item.sequence = sequence_of(p, item.batch);
    item.first_share = Turns::first_of(rank) * p.hk + item.head;
    item.parts = Turns::parts_of(lines, p.hk, rank);
    const u32 before = come_to_line(p, item, kUnitBit << unit, shared);
    if (int(before % kUnitBit) == item.parts) merge_end_unit(p, item, unit);
  }
}

// Ends a part of such a line.
__device__ __forceinline__ void end_turn(const DecodeParams& p, const DecodeItem& item, unsigned char* shared) {
  const u32 before = come_to_line(p, item, 1, shared);
  if (int(before % kUnitBit) + 1 < item.parts) return;
#pragma unroll 1
  for (int unit = 0; unit < kEndUnits; ++unit)
    if (before & kUnitBit << unit) merge_end_unit(p, item, unit);
}

// Ends a part of a line: whoever comes last puts the line together; where parts are many, first each group of them.
__device__ __forceinline__ void end_part(const DecodeParams& p, const DecodeItem& item, unsigned char* shared) {
  if (kMergesAtEnd && item.parts > kFewParts) return end_turn(p, item, shared);
  Parts parts = {0, 1, item.parts};
  if (item.parts > kMaxParts || item.parts * rows_of_item(p, item).count > kMaxPartRows) {
    const int each = group_parts(item.parts);
    const int first = item.part / each * each;
    const Parts group = {first, 1, min(item.parts - first, each)};
    if (!is_last(p.tickets + 2 * gridDim.x + slot_of(p, item, first), group.count, shared)) return;
    merge_parts(p, item, group, false);
    parts = {0, each, (item.parts + each - 1) / each};
  }
  if (is_last(p.tickets + item.first_share, parts.count, shared)) merge_parts(p, item, parts, true);
}

// What the backward pass wants of each row before it starts: p_log2 - LSE log2(e), and -(D - dLSE) with
// D = rowsum(dO o O) (FlashAttention-2, algorithm 2, line 4); whose turn it is to add to each unit of dQ; and zeros: a
// piece of dS, the sums of dQ that no turn begins, and the gradients of rows that belong to no sequence, which no
// kernel after it writes.
#include "sm90/common/fragment_store.cuh"
#include "device/dependent_launch.cuh"
#include "device/schedule.cuh"
#include "sm90/backward/layout.cuh"
#include "sm90/backward/params.h"

enum : int {
  kPrepareThreads = 256,
  kLanes = kValueDim <= 64 ? 8 : kValueDim <= 128 ? 16 : 32,  // of a row, 8 columns each
  kRowsAtOnce = kPrepareThreads / kLanes,
  kTurns = 64 / kRowsAtOnce,  // of a thread: a CTA takes 64 rows
};

// 8 columns from `column` on, of which `count` exist.
struct Columns {
  u32 packed[4];
};
__device__ __forceinline__ Columns load_columns(const unsigned short* from, int count) {
  Columns x = {};
  if (!kElements) {
    if (count > 0) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      x = {all.x, all.y, all.z, all.w};
    }
    return x;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) x.packed[i / 2] |= u32(from[i]) << (i % 2 * 16);
  return x;
}

// rowsum(dO o O) over the lanes of a row.
__device__ __forceinline__ float row_product(const Columns& out, const Columns& dout) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    sum += low_of(out.packed[i]) * low_of(dout.packed[i]) + high_of(out.packed[i]) * high_of(dout.packed[i]);
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  return sum;
}

// Zero rows [first, count) of a tensor without a batch.
__device__ __forceinline__ void clear_rows(const StridedTensor& t, int first, int count, int heads, int dim) {
  for (long long row = first + (long long)(blockIdx.x); row < count; row += gridDim.x)
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x) t.data[row * t.row + i / dim * t.head + i % dim] = 0;
}

// Zero packed rows before the first sequence and after the last one.
__device__ __forceinline__ void clear_around(const StridedTensor& t, const int* cu_seqlens, int batch, int total,
                                             int heads, int dim) {
  clear_rows(t, 0, min(cu_seqlens[0], total), heads, dim);
  clear_rows(t, max(cu_seqlens[batch], 0), total, heads, dim);
}

__device__ __forceinline__ float load_row_number(const StridedRows& rows, int batch, int row, int head) {
  return rows.data[batch * rows.batch + head * rows.head + row];
}

// p_log2 - LSE log2(e) and -(D - dLSE) of a row that exists; nothing of a row whose LSE is -inf is data.
__device__ __forceinline__ void store_statistics(const BackwardParams& p, int batch, int row, int head, float lse,
                                                 float product, long long at) {
  const bool counts = lse != -infinity();
  const float dlse = kHasDlse && counts ? load_row_number(p.dlse, batch, row, head) : 0;
  p.shift[at] = counts ? __fmaf_rn(-lse, 1.4426950408889634f, p.p_log2) : -infinity();
  p.delta[at] = counts ? dlse - product : 0;
}

// Grid: (chunks of 64 rows of the longest sequence, batch * hq).
extern "C" __global__ void __launch_bounds__(kPrepareThreads)
    fulgur_backward_prepare(const __grid_constant__ BackwardParams p) {
  let_next_kernel_start();
  if (blockIdx.y == 0) {
    if (p.cut_blocks > 0 && blockIdx.x == 0 && threadIdx.x == 0) *p.first_parts = 0;
    if (!kSums && blockIdx.x == 0)
      for (int i = threadIdx.x; i < kPieceBytes / 4; i += blockDim.x) reinterpret_cast<int*>(p.zeros)[i] = 0;
    if (kPacked) {
      clear_around(p.dq, p.cu_seqlens_q, p.batch, p.total_q, p.hq, p.d);
      clear_around(p.dk, p.cu_seqlens_k, p.batch, p.total_k, p.hq / p.group, p.d);
      clear_around(p.dv_grad, p.cu_seqlens_k, p.batch, p.total_k, p.hq / p.group, p.dv);
    }
  }
  const int lane = threadIdx.x % kLanes;
  const int column = 8 * lane;
  // The last pair first: what L2 still holds at the end is of the first, which the kernel by keys begins with.
  for (int pair = gridDim.y - 1 - blockIdx.y; pair < p.batch * p.hq; pair += gridDim.y) {
    const int batch = pair / p.hq;
    const int head = pair % p.hq;
    const Lengths n = lengths_of(p, batch);
    if (kSeqUsedQ) {
      StridedTensor dq = p.dq;
      dq.data = const_cast<unsigned short*>(row_of(p.dq, batch, n.q_start, head));
      clear_rows(dq, n.sq, query_rows(p, batch), 1, p.d);
    }
    const int end = count_of(n.sq, kStatisticsRows) * kStatisticsRows;
    const long long at = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq);
    for (int first = 64 * blockIdx.x; first < end; first += 64 * gridDim.x) {
      Columns out[kTurns];
      Columns dout[kTurns];
      float lse[kTurns];
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int row = first + turn * kRowsAtOnce + int(threadIdx.x / kLanes);
        const int count = row < n.sq ? p.dv - column : 0;
        out[turn] = load_columns(row_of(p.out, batch, n.q_start + row, head) + column, count);
        dout[turn] = load_columns(row_of(p.dout, batch, n.q_start + row, head) + column, count);
        lse[turn] = lane == 0 && row < n.sq ? load_row_number(p.lse, batch, n.q_start + row, head) : 0;
      }
      bool clears = kSums;
      if (kOrdered) {
        const KeyTiles blocks = key_tiles_of(band_of(p), n, kScoreTile, first / kBlockRows);
        const int of_heads = pair / p.pair_heads * p.row_parts + first / kBlockRows / p.part_tiles;
        const int turn = first_block_first(p.key_blocks, of_heads) ? blocks.begin : blocks.end - 1;
        if (threadIdx.x < kHeadPanels) p.turns[(at + first) / 64 * kHeadPanels + threadIdx.x] = kFirstTurn | turn;
        clears = blocks.begin >= blocks.end;  // nobody adds
      }
      if (clears) {
        float4* sums = reinterpret_cast<float4*>(p.dq_sums + (at + first) * (64 * kHeadPanels));
#pragma unroll
        for (int i = 0; i < 16 * kHeadDim / kPrepareThreads; ++i)  // a unit's columns are the first of its place
          sums[i * kPrepareThreads + threadIdx.x] = {0, 0, 0, 0};
      }
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const int row = first + turn * kRowsAtOnce + int(threadIdx.x / kLanes);
        const float product = row_product(out[turn], dout[turn]);
        if (lane != 0) continue;
        if (row < n.sq) {
          store_statistics(p, batch, n.q_start + row, head, lse[turn], product, at + row);
        } else {
          p.shift[at + row] = -infinity();
          p.delta[at + row] = 0;
        }
      }
    }
  }
}

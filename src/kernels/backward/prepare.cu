// Prepares the backward pass: computes the statistics of each row, p_log2 - LSE log2(e) and -(D - dLSE) with
// D = rowsum(dO o O) (FlashAttention-2, algorithm 2, line 4); sets the first values of the semaphores of dQ tiles; and
// clears a dS tile, dq_accum where the first addition is not a store, and the gradients of rows of no sequence, which
// no later kernel writes.
#include "kernel_config.h"  // first, as it may include attention/hulls.cuh
#include "attention/fragment_store.cuh"
#include "backward/prepare_map.cuh"
#include "device/dependent_launch.cuh"
#include "device/math.cuh"
#include "device/schedule.cuh"
#include "backward/layout.cuh"

enum : int {
  kPrepareThreads = 256,
  // Threads per row, with 8 columns each of the first 256, and as many of the others.
  kLanes = kValueDim <= 64 ? 8 : kValueDim <= 128 ? 16 : 32,
  kRowsAtOnce = kPrepareThreads / kLanes,
  kRowsOfThread = 64 / kRowsAtOnce,  // a CTA computes 64 rows
  kTilesOf64Rows = kBlockRows > 0 && kBlockRows < 64 ? 64 / kBlockRows : 1,
};

// 8 columns of a row, of which `count` exist.
struct Columns {
  u32 packed[2 * ElementO::kBytes];
};
__device__ __forceinline__ Columns load_columns(const ElementO::Memory* from, int count) {
  Columns x = {};
  if (!kElements) {
#pragma unroll
    for (int i = 0; i < ElementO::kBytes / 2; ++i)
      if (count > 4 * i) {
        const uint4 all = reinterpret_cast<const uint4*>(from)[i];
        x.packed[4 * i] = all.x, x.packed[4 * i + 1] = all.y, x.packed[4 * i + 2] = all.z, x.packed[4 * i + 3] = all.w;
      }
    return x;
  }
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < count) {
      if constexpr (ElementO::kBytes == 4) x.packed[i] = __float_as_uint(from[i]);
      else x.packed[i / 2] |= u32(from[i]) << (i % 2 * 16);
    }
  return x;
}

// rowsum(dO o O) over the lanes of a row.
__device__ __forceinline__ float row_product(const Columns& out, const Columns& dout) {
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 2 * ElementO::kBytes; ++i) {
    if constexpr (ElementO::kBytes == 4)
      sum += __uint_as_float(out.packed[i]) * __uint_as_float(dout.packed[i]);
    else
      sum += ElementO::low(out.packed[i]) * ElementO::low(dout.packed[i]) +
             ElementO::high(out.packed[i]) * ElementO::high(dout.packed[i]);
  }
#pragma unroll
  for (int bit = 1; bit < kLanes; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
  return sum;
}

// Sets rows [first, count) of a tensor without a batch to 0.
template <class Type>
__device__ __forceinline__ void clear_rows(const StridedTensor& t, int first, int count, int heads, int dim) {
  for (long long row = first + (long long)(blockIdx.x); row < count; row += gridDim.x)
    for (int i = threadIdx.x; i < heads * dim; i += blockDim.x)
      static_cast<typename Type::Memory*>(t.data)[row * t.row + i / dim * t.head + i % dim] = 0;
}

// Sets packed rows before the first sequence and after the last one to 0.
template <class Type>
__device__ __forceinline__ void clear_around(const StridedTensor& t, const int* cu_seqlens, int batch, int total,
                                             int heads, int dim) {
  clear_rows<Type>(t, 0, min(cu_seqlens[0], total), heads, dim);
  clear_rows<Type>(t, max(cu_seqlens[batch], 0), total, heads, dim);
}

__device__ __forceinline__ float load_row_number(const StridedRows& rows, int batch, int row, int head) {
  return rows.data[batch * rows.batch + head * rows.head + row];
}

// Stores p_log2 - LSE log2(e) and -(D - dLSE) of a row that exists. A row whose LSE is -inf has P = 0, whatever its
// other inputs are.
__device__ __forceinline__ void store_statistics(const BackwardParams& p, int batch, int row, int head, float lse,
                                                 float product, long long at) {
  const bool counts = lse != -infinity();
  const float dlse = kHasDlse && counts ? load_row_number(p.dlse, batch, row, head) : 0;
  p.shift[at] = counts ? __fmaf_rn(-lse, 1.4426950408889634f, p.p_log2) : -infinity();
  p.delta[at] = counts ? dlse - product : 0;
}

// Grid: (chunks of 64 rows of the longest sequence, batch * hq), after rows of CTAs that make a map of tiles.
#ifdef FULGUR_MAKES_MAP
extern "C" __global__ void __launch_bounds__(kPrepareThreads, 5)  // keeps the CTAs per SM of the kernel without a map
#else
extern "C" __global__ void __launch_bounds__(kPrepareThreads)
#endif
    fulgur_backward_prepare(const __grid_constant__ BackwardParams p) {
  let_next_kernel_start();
  const unsigned maps = rows_that_map(p), y = blockIdx.y - maps, ys = gridDim.y - maps;
  if (blockIdx.y < maps) return make_map(p);
  if (y == 0) {
    if (p.cut_blocks > 0 && blockIdx.x == 0 && threadIdx.x == 0) *p.first_parts = 0;
    if (kStoresDs && blockIdx.x == 0)
      for (int i = threadIdx.x; i < kDsTileBytes / 4; i += blockDim.x) reinterpret_cast<int*>(p.zeros)[i] = 0;
    if (kPacked) {
      if (kComputesDq) clear_around<ElementQ>(p.dq, p.cu_seqlens_q, p.batch, p.total_q, p.hq, p.d);
      if (kKeyGradients) {
        clear_around<ElementDk>(p.dk, p.cu_seqlens_k, p.batch, p.total_k, p.hq / p.group, p.d);
        clear_around<ElementDv>(p.dv_grad, p.cu_seqlens_k, p.batch, p.total_k, p.hq / p.group, p.dv);
      }
    }
  }
  const int lane = threadIdx.x % kLanes;
  const int column = 8 * lane;
  // From the last head to the first, so that L2 holds the rows of the first heads, with which the kernel by keys
  // begins.
  for (int batch_head = ys - 1 - y; batch_head < p.batch * p.hq; batch_head += ys) {
    const int batch = batch_head / p.hq;
    const int head = batch_head % p.hq;
    const Lengths n = lengths_of(p, batch);
    if (kSeqUsedQ && kComputesDq) {
      StridedTensor dq = p.dq;
      dq.data = row_of<ElementQ>(p.dq, batch, n.q_start, head);
      clear_rows<ElementQ>(dq, n.sq, query_rows(p, batch), 1, p.d);
    }
    const int end = count_of(n.sq, kStatisticsRows) * kStatisticsRows;
    const long long at = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq);
    for (int first = 64 * blockIdx.x; first < end; first += 64 * gridDim.x) {
      Columns out[kRowsOfThread];
      Columns dout[kRowsOfThread];
      float lse[kRowsOfThread];
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        const int row = first + i * kRowsAtOnce + int(threadIdx.x / kLanes);
        const int count = row < n.sq ? p.dv - column : 0;
        out[i] = load_columns(row_of<ElementO>(p.out, batch, n.q_start + row, head) + column, count);
        dout[i] = load_columns(row_of<ElementO>(p.dout, batch, n.q_start + row, head) + column, count);
        lse[i] = lane == 0 && row < n.sq ? load_row_number(p.lse, batch, n.q_start + row, head) : 0;
      }
      bool clears = kAccumulatesDq && !kOrderedDq;
      if constexpr (kOrderedDq != 0) {
#pragma unroll
        for (int row = 0; row < 64; row += kBlockRows) {
          const int tile = (first + row) / kBlockRows;
          const KeyTiles blocks = key_tiles_of(band_of(p), n, kScoreTile, tile);
          const int split = batch_head / p.split_heads * p.row_splits + tile / p.row_split_tiles;
          const int block = is_ascending(p.key_blocks, split) ? blocks.begin : blocks.end - 1;
          if (threadIdx.x < kDqParts)
            p.dq_semaphore[((at + first) / 64 * kTilesOf64Rows + row / kBlockRows) * kDqParts + threadIdx.x] =
                kFirstToAdd | (kMapsTiles ? 0 : block);
          // No key block adds to these rows; with a map of tiles perhaps none.
          clears = clears || kMapsTiles || blocks.begin >= blocks.end;
        }
      }
      if (kRoundsDq && threadIdx.x == 0) p.dq_additions[(at + first) / 64] = 0;
      if (clears) {
        float4* accum = reinterpret_cast<float4*>(p.dq_accum + (at + first) * (64 * kDqPanels));
#pragma unroll
        for (int i = 0; i < 16 * kHeadDim / kPrepareThreads; ++i)
          accum[i * kPrepareThreads + threadIdx.x] = {0, 0, 0, 0};
      }
#pragma unroll
      for (int i = 0; i < kRowsOfThread; ++i) {
        const int row = first + i * kRowsAtOnce + int(threadIdx.x / kLanes);
        float product = row_product(out[i], dout[i]);
        if constexpr (kValueDim > 8 * kLanes) {
          constexpr int kFirst = 8 * kLanes;
          const int count = row < n.sq ? p.dv - kFirst - column : 0;
          const auto* const out_row = row_of<ElementO>(p.out, batch, n.q_start + row, head);
          const auto* const dout_row = row_of<ElementO>(p.dout, batch, n.q_start + row, head);
          product += row_product(load_columns(out_row + kFirst + column, count),
                                 load_columns(dout_row + kFirst + column, count));
        }
        if (lane != 0) continue;
        if (row < n.sq) {
          store_statistics(p, batch, n.q_start + row, head, lse[i], product, at + row);
        } else {
          p.shift[at + row] = -infinity();
          p.delta[at + row] = 0;
        }
      }
    }
  }
}

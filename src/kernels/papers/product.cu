// A product of standard attention (FlashAttention, algorithms 0 and 3): C = scale A B for every head, with A, B and C
// in memory, by mma.sync, ldmatrix and cp.async. It computes all products of standard attention: S = Q K^T, O = P V,
// dV = P^T dO, dP = dO V^T, dQ = dS K and dK = dS^T Q.
//
// A CTA computes a tile of 128 rows and kColumns columns of C, a warp 32 rows and half of the columns of it. Tiles of
// 64 columns of A and 64 rows of B are loaded into two stages of shared memory.
#include "attention/fragment_store.cuh"
#include "device/math.cuh"
#include "device/schedule.cuh"
#include "papers/standard_params.h"
#include "portable/common/copy_rows.cuh"

enum : int {
  kThreads = 256,
  kRows = 128,
  kDepth = 64,  // columns of A of a stage: those of a panel
  kWarpColumns = kColumns / 2,
  kABytes = kRows * kPanelRowBytes,
  kBBytes = kColumns * kPanelRowBytes,
  kStageBytes = kABytes + kBBytes,
};

using Memory = ElementQ::Memory;

// Starts the loads of a tile of A or B into a stage: `outer` rows of A, or columns of B, from `first` on, of which
// there are `count`, and kDepth columns of A, or rows of B, from `at` on, of which there are `depth`.
template <int outer, bool depth_is_row>
__device__ __forceinline__ void start_tile(u32 to, const StridedTensor& t, int batch, int head, int first, int count,
                                           int at, int depth) {
  const Memory* const from = row_of<ElementQ>(t, batch, 0, head);
  if constexpr (depth_is_row) {  // memory has kDepth rows of `outer` columns; shared memory panels of 64 columns
    copy_rows<ElementQ, kThreads, kDepth, outer, false>(to, t.data, count - first, [&](int i) {
      return at + i < depth ? from + (at + i) * t.row + first : nullptr;
    });
  } else {  // memory has `outer` rows of kDepth columns: one panel
    copy_rows<ElementQ, kThreads, outer, kDepth, false>(to, t.data, depth - at, [&](int i) {
      return first + i < count ? from + (first + i) * t.row + at : nullptr;
    });
  }
}

// The fragment of 16 rows of A, from `row` on, and 16 columns, from 16 * step on.
__device__ __forceinline__ void load_a(u32 tile, int row, int step, u32 (&a)[4]) {
  const u32 lane = lane_of_warp();
  if constexpr (kTransposedA) {
    const u32 panel = tile + row / 64 * (kDepth * kPanelRowBytes);
    load_shared_matrices_transposed(
        panel + swizzled(16 * step + lane % 8 + lane / 16 * 8, row % 64 / 8 + lane / 8 % 2), a);
  } else {
    load_shared_matrices(tile + swizzled(row + lane % 16, 2 * step + lane / 16), a);
  }
}

// The fragment of 16 columns of B, from `column` on, and 16 rows, from 16 * step on.
__device__ __forceinline__ void load_b(u32 tile, int column, int step, u32 (&b)[4]) {
  const u32 lane = lane_of_warp();
  if constexpr (kTransposedB) {
    load_shared_matrices(tile + swizzled(column + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2), b);
  } else {
    const u32 panel = tile + column / 64 * (kDepth * kPanelRowBytes);
    load_shared_matrices_transposed(panel + swizzled(16 * step + lane % 16, column % 64 / 8 + lane / 16), b);
  }
}

// Stores this thread's scores of one query with the keys from `key` on; -inf for keys that the query does not see.
// `half`: 0 for the first of the thread's two rows, 1 for the second.
__device__ __forceinline__ void store_scores(const float (&S)[kWarpColumns / 2], const ProductParams& p, int batch,
                                             int head, int query, int key, int half) {
  if (query >= p.m) return;
  const KeyRange seen = visible_keys(band_of(p), lengths_of(p, batch), query);
  float* const to = static_cast<float*>(p.c.data) + batch * p.c.batch + head * p.c.head + query * p.c.row;
#pragma unroll
  for (int i = 2 * half; i < kWarpColumns / 2; i += 4) {
    const int at = key + i / 4 * 8;
    const auto score = [&](int j) {
      return at + j >= seen.begin && at + j < seen.end ? S[i + j] * p.scale : -infinity();
    };
    if (at < p.n) *reinterpret_cast<float2*>(to + at) = {score(0), score(1)};
  }
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kThreads, 2) fulgur_product(const __grid_constant__ ProductParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  const int column_tiles = (p.n + kColumns - 1) / kColumns;
  const int row_tiles = (p.m + kRows - 1) / kRows;
  const int tile_of_head = int(blockIdx.x) % (column_tiles * row_tiles);
  const int head = int(blockIdx.x) / (column_tiles * row_tiles) % p.heads;
  const int batch = int(blockIdx.x) / (column_tiles * row_tiles) / p.heads;
  const int column = tile_of_head % column_tiles * kColumns;
  const int row = tile_of_head / column_tiles * kRows;

  const int product_steps = (p.depth + kDepth - 1) / kDepth;
  const int steps = product_steps * p.summed;
  const auto start = [&](int step) {
    if (step < steps) {
      const u32 to = smem + step % 2 * kStageBytes;
      const int product = head * p.summed + step / product_steps;
      const int at = step % product_steps * kDepth;
      start_tile<kRows, kTransposedA>(to, p.a, batch, product / p.a_group, row, p.m, at, p.depth);
      start_tile<kColumns, !kTransposedB>(to + kABytes, p.b, batch, product / p.b_group, column, p.n, at, p.depth);
    }
    async_copy_commit();
  };

  const int warp = uniform(threadIdx.x / 32);
  const int warp_row = warp / 2 * 32;
  const int warp_column = warp % 2 * kWarpColumns;
  float C[2][kWarpColumns / 2] = {};
  start(0);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    start(step + 1);
    async_copy_wait<1>();
    __syncthreads();
    const u32 tile = smem + step % 2 * kStageBytes;
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      u32 a[2][4];
#pragma unroll
      for (int t = 0; t < 2; ++t) load_a(tile, warp_row + 16 * t, k, a[t]);
#pragma unroll
      for (int n = 0; n < kWarpColumns; n += 16) {
        u32 b[4];
        load_b(tile + kABytes, warp_column + n, k, b);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          multiply_16_8_16<ElementQ::kType>(C[t] + n / 2, a[t], b[0], b[1]);
          multiply_16_8_16<ElementQ::kType>(C[t] + n / 2 + 4, a[t], b[2], b[3]);
        }
      }
    }
    __syncthreads();
  }

#pragma unroll
  for (int t = 0; t < 2; ++t) {
    const int first = row + warp_row + 16 * t + int(thread_row());
    if constexpr (kScores) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
        store_scores(C[t], p, batch, head, first + 8 * half, column + warp_column + int(thread_column()), half);
    } else {
      Finite<ElementQ> unused;
      Memory* const to = row_of<ElementQ>(p.c, batch, first, head) + column + warp_column;
      store_global_fragment<ElementQ, kWarpColumns, false>(to, p.c.row, p.m - first, p.n - column - warp_column, C[t],
                                                           p.scale, p.scale, unused);
    }
  }
}

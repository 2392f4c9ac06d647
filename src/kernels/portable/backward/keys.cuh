// What the portable backward kernels by keys have in common: the key block of a CTA, additions to dQ, and stores of
// gradients.
#pragma once
#include "device/semaphore.cuh"
#include "portable/backward/partials.cuh"
#include "portable/backward/products.cuh"
#include "portable/backward/weights.cuh"

// The key block of this CTA. With kOrderedDq a counter numbers CTAs in the order in which they start, so that the CTAs
// of earlier blocks are running or have ended.
__device__ __forceinline__ Keys keys_of_cta(const BackwardParams& p, u32 smem) {
  int number = blockIdx.x;
  if constexpr (kOrderedDq != 0) {
    if (threadIdx.x == 0) store_shared(smem + kLayout.number, take_ticket(p.counters, gridDim.x - 1));
    __syncthreads();
    number = uniform(load_shared(smem + kLayout.number));
  }
  const BlockOfHead at = block_of(p.key_blocks, number);
  const int splits = kSplits ? p.splits : 1;
  const int heads = p.hq / p.group;
  const int head_of_all = at.batch_head / splits;
  const int batch = head_of_all / heads;
  return {at.block, head_of_all - batch * heads, batch, lengths_of(p, batch), at.batch_head - head_of_all * splits};
}

// X = -D of each row, to which dP^T is added; 0 with dropout.
__device__ __forceinline__ void start_from_delta(float (&X)[kKeyTiles][kHalfRows / 2], const Part& part,
                                                 u32 statistics) {
  statistics += 4 * (kBlockRows + part.half * kHalfRows + thread_column());
#pragma unroll
  for (int j = 0; j < kHalfRows / 8; ++j) {
    float delta[2] = {};
    if (!kDropout) load_shared_pair(statistics + 32 * j, delta[0], delta[1]);
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
      for (int i = 0; i < 4; ++i) X[t][4 * j + i] = delta[i & 1];
  }
}

// weights_of_tile for the warp's half of the rows of a step. `statistics`: those of the step.
__device__ __forceinline__ void weights_of_tile(const BackwardParams& p, u32 smem, const Keys& keys, const Part& part,
                                                const Steps& step, bool masked, u32 statistics, int first,
                                                float (&S)[kHalfRows / 2], u32 (&P)[words_of<ElementP>(kHalfRows / 2)],
                                                TileWeights<kHalfRows>& tile) {
  weights_of_tile<kHalfRows>(p, smem + kLayout.dropout_key, keys.n, keys.batch, step.head(), masked,
                             statistics + 4 * part.half * kHalfRows, step.row() + part.half * kHalfRows, first, S, P,
                             tile);
}

// Adds four sums of a thread to dq_accum, or stores them. `to`: the 128 floats of the warp.
__device__ __forceinline__ void add_four(float* to, const float* x, bool stores) {
  const int lane = threadIdx.x % 32;
  if constexpr (kDqByFours != 0) {
    to += 4 * lane;
    if (stores) *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    else
      asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                   "f"(x[3])
                   : "memory");
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (stores) to[32 * i + lane] = x[i];
      else asm volatile("red.global.add.f32 [%0], %1;" ::"l"(to + 32 * i + lane), "f"(x[i]) : "memory");
    }
  }
}

// Adds dS K of a warp to dQ. `statistics`: the index of the step's first row in the statistics.
__device__ __forceinline__ void add_dq(const BackwardParams& p, const Part& part, long long statistics, bool stores,
                                       u32 ds, u32 keys) {
  const long long row = statistics + part.half * kHalfRows;
  float* const tile = p.dq_accum + row / 64 * (kDqPanels * kDqTileFloats);
  const int sixteens = int(row % 64) / 16;
#pragma unroll
  for (int unit = 0; unit < kDqUnits; unit += kDqUnitsAtOnce) {
    float dQ[kRowTiles][8 * kDqUnitsAtOnce] = {};
    compute_dq(dQ, part, unit, ds, keys);
#pragma unroll
    for (int u = 0; u < kDqUnitsAtOnce; ++u) {
      if (!has_dq_unit(part, unit + u)) continue;
      const int at = (unit + u) * kDqGroups;  // a panel has 4 units; a warp has one of them, or every second one
      const int panel = at / 4;
      const int eights = min_of(8, kHeadDim / 8 - 8 * panel);
      const int eight = (at % 4 + part.columns) * 2;
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        float* const to = tile + panel * kDqTileFloats + ((sixteens + t) * eights + eight) * 128;
        add_four(to, dQ[t] + 8 * u, stores);
        add_four(to + 128, dQ[t] + 8 * u + 4, stores);
      }
    }
  }
}

// Stores 16 rows of dK or dV, one tile of the warp's keys. `rows`: how many exist from the thread's row on.
template <class Type, int dim>
__device__ __forceinline__ void store_gradient(const float (&G)[8 * units_of(dim)], const Part& part,
                                               typename Type::Memory* out, long long row_stride, int rows, int dims,
                                               float scale, GradientFinite<Type>& finite) {
#pragma unroll
  for (int unit = 0; unit < units_of(dim); unit += 2)
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // rows r and r + 8
      if constexpr (Type::kType == kF32) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = 8 * unit + 4 * j + 2 * half;
          const int column = 32 * (unit + j / 2) + 16 * part.half + j % 2 * 8 + 2 * int(threadIdx.x % 4);
          if (at < 8 * units_of(dim)) {
            store_global_pair(out + 8 * half * row_stride + column, G[at] * scale, G[at + 1] * scale,
                              rows > 8 * half ? dims - column : 0, true, finite);
          }
        }
      } else {
        u32 y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int at = 8 * unit + 4 * j + 2 * half;
          y[j] = at < 8 * units_of(dim) ? Type::pack(G[at] * scale, G[at + 1] * scale) : 0;
          finite.add(y[j]);
        }
        quad_transpose(y);
        const int quad = threadIdx.x % 4;
        const int column = 32 * (unit + quad / 2) + 16 * part.half + quad % 2 * 8;
        const bool there = rows > 8 * half && unit + quad / 2 < units_of(dim);
        store_global_columns<kElements>(out + 8 * half * row_stride + column, y, there ? dims - column : 0);
      }
    }
}

template <class Type, int dim>
__device__ __forceinline__ void store_gradients(const BackwardParams& p, const Keys& keys, const Part& part,
                                                float (&G)[kKeyTiles][8 * units_of(dim)], const StridedTensor& to,
                                                int dims, float scale) {
  GradientFinite<Type> finite;
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) {
    const int key = keys.first() + part.key + 16 * t + int(thread_row());
    if (kSeqUsedK) clear_rows_after(G[t], keys.n.sk - key);
    store_gradient<Type, dim>(G[t], part, row_of<Type>(to, keys.batch, keys.n.k_start + key, keys.head), to.row,
                              key_rows(p, keys.batch) - key, dims, scale, finite);
  }
  finite.report(p.not_finite);
}

// Stores the gradients of a split of a kv head in f32; reduce.cu adds the splits.
template <int dim>
__device__ __forceinline__ void store_partial(const BackwardParams& p, const Keys& keys, const Part& part,
                                              const float (&G)[kKeyTiles][8 * units_of(dim)], float* partial) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) {
    float* const row = partial_row<dim>(p, partial, keys.batch, keys.head, keys.split,
                                        keys.first() + part.key + 16 * t + int(thread_row()));
#pragma unroll
    for (int i = 0; i < 8 * units_of(dim); i += 2) {
      const int column = i / 8 * 32 + 16 * part.half + i / 4 % 2 * 8 + 2 * quad;
      if (column < dim) *reinterpret_cast<float2*>(row + i / 2 % 2 * 8 * dim + column) = {G[t][i], G[t][i + 1]};
    }
  }
}

// The thread that sets semaphores belongs to another warp than the one that waits for them.
enum : int { kReleases = kThreads - 32 };

// The semaphore of a step's row tile, kOrderedDq. Its value is the key block that adds next; with a map of tiles it is
// 1 + the last key block that has added.
__device__ __forceinline__ int* semaphore_of(const BackwardParams& p, const Keys& keys, const Steps& step) {
  return p.dq_semaphore + step.statistics(p, keys) / kBlockRows;
}

// The value of a semaphore after a block has added.
__device__ __forceinline__ int turn_after(const BackwardParams& p, const Keys& keys) {
  return keys.block + (blocks_descend(p) ? -1 : 1);
}

// Whether a block is the first to add to the rows of a step, and so stores. With a map of tiles prepare.cu has cleared
// them.
__device__ __forceinline__ bool adds_first(const BackwardParams& p, const Keys& keys, const Steps& step) {
  if (!kOrderedDq || kMapsTiles) return false;
  const KeyTiles blocks = key_tiles_of(band_of(p), keys.n, kScoreTile, step.tile());
  return keys.block == (blocks_descend(p) ? blocks.end - 1 : blocks.begin);
}

// The value of the semaphore when it is the turn of a step. Called by whole warps.
__device__ __forceinline__ int turn_of(const BackwardParams& p, const Keys& keys, const Steps& step) {
  if constexpr (kMapsTiles)
    return seen_block_before(p, keys.batch, step.head(), step.tile(), keys.block, p.key_blocks.blocks, true);
  return keys.block;
}

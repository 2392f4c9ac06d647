// The five products of a step by the warps of a CTA. Of S^T = K Q^T and dP^T = V dO^T a warp computes its keys and half
// of the rows; of dV += P^T dO and dK += dS^T Q its keys and half of the columns, every second unit of 16; of dQ = dS K
// half of the rows and every kKeyWarps-th unit of 16 columns. P and dS are fragments in registers, and tiles in shared
// memory for the other warps, whose rows are keys and whose columns are queries.
#pragma once
#include "attention/products_f32.cuh"
#include "portable/backward/tile.cuh"

// The warp's keys of a tile of K or V as the first operand of products. With kKeepsKeys they stay in registers, which
// saves a sixth of the loads from shared memory in a step.
template <int dim>
struct KeyOperands {
  u32 tile;
  u32 kept[kKeepsKeys ? dim / 16 : 1][kKeyTiles][4];  // of 16 bits alone
};

// Loads the dims of a step, 32 bytes of each row. `at`: the address of the lane's part of the warp's keys.
__device__ __forceinline__ void load_keys(u32 at, int t, int step, u32 (&a)[4]) {
  load_shared_matrices((at ^ step % 4 * 32) + step / 4 * kKeyPanelBytes + t * 16 * kPanelRowBytes, a);
}
__device__ __forceinline__ void load_keys(u32 at, int step, u32 (&a)[kKeyTiles][4]) {
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) load_keys(at, t, step, a[t]);
}

// The keys of the tile at `tile`; with kKeepsKeys its copy must be complete.
template <int dim>
__device__ __forceinline__ KeyOperands<dim> key_operands(const Part& part, u32 tile) {
  KeyOperands<dim> keys;
  keys.tile = tile;
  if constexpr (kKeepsKeys != 0) {
    const u32 lane = lane_of_warp();
#pragma unroll
    for (int step = 0; step < dim / 16; ++step)
      load_keys(tile + swizzled(part.key + lane % 16, lane / 16), step, keys.kept[step]);
  }
  return keys;
}

// X += A B^T, summed over dims: A are the warp's keys, B its rows of the tile at `rows`.
template <class Type, int dim>
__device__ __forceinline__ void add_scores(float (&X)[kKeyTiles][kHalfRows / 2], const Part& part,
                                           const KeyOperands<dim>& keys, u32 rows) {
  const u32 lane = lane_of_warp();
  const u32 at = keys.tile + swizzled(part.key + lane % 16, lane / 16);
  if constexpr (Type::kType == kF32) {
    const auto load = [&](int t, int step, u32 (&a)[4]) { load_keys(at, t, step, a); };
    return add_products_of_rows<dim>(X, load, rows + part.half * kHalfRows * kPanelRowBytes, kRowPanelBytes);
  }
  rows += swizzled(part.half * kHalfRows + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll dim > 128 ? 4 : 8
  for (int step = 0; step < dim / 16; ++step) {
    u32 a[kKeyTiles][4];
    if constexpr (kKeepsKeys != 0) {
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
        for (int i = 0; i < 4; ++i) a[t][i] = keys.kept[step][t][i];
    } else {
      load_keys(at, step, a);
    }
#pragma unroll
    for (int row = 0; row < kHalfRows; row += 16) {
      u32 b[4];
      load_shared_matrices((rows ^ step % 4 * 32) + step / 4 * kRowPanelBytes + row * kPanelRowBytes, b);
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        multiply_16_8_16<Type::kType>(X[t] + row / 2, a[t], b[0], b[1]);
        multiply_16_8_16<Type::kType>(X[t] + row / 2 + 4, a[t], b[2], b[3]);
      }
    }
  }
}

// Maximum of units of 16 columns of dK or dV of a warp.
__device__ constexpr int units_of(int dim) { return (dim / 16 + 1) / 2; }

using Weights = u32[kKeyTiles][words_of<ElementP>(kHalfRows / 2)];  // P^T or dS^T of a warp, as pack_words makes them

enum : int {
  kWeightsRowBytes = kBlockRows * ElementP::kBytes,     // of a key
  kHalfRowBytes = kWeightsRowBytes / 2,                 // of half of the rows
};
static_assert(kWeightsRowBytes == kPanelRowBytes || kWeightsRowBytes == kPanelRowBytes / 2);

// The address of the tile of dS. With rows of 64 bytes it is the second half of each row of 128 bytes (before the
// swizzle), of which P is the first.
__device__ __forceinline__ u32 ds_of(u32 p_tile) {
  return p_tile + (kWeightsRowBytes == kPanelRowBytes ? kKeyPanelBytes : 64);
}
__device__ __forceinline__ u32 weights_at(u32 tile, u32 key, u32 chunk) {
  if (kWeightsRowBytes == kPanelRowBytes) return tile + swizzled(key, chunk);
  return (tile & ~64u) + swizzled(key, chunk + tile % 128 / 16);
}

// Stores P^T or dS^T of a warp to the tile at `to`.
__device__ __forceinline__ void store_weights(const Weights& W, const Part& part, u32 to) {
  const u32 lane = lane_of_warp();
  const int chunk = part.half * kHalfRowBytes / 16;
  to = kStoresMatrices ? weights_at(to, part.key + lane % 16, lane / 16)
                       : weights_at(to, part.key + thread_row(), 0) + lane % 4 * 4;
  to ^= chunk << 4;
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < kHalfRowBytes / 8; i += 4) {  // 32 bytes
      const u32 at = (to ^ i / 2 << 4) + t * 16 * kPanelRowBytes;
      if constexpr (kStoresMatrices != 0) {
        const u32 x[4] = {W[t][i], W[t][i + 1], W[t][i + 2], W[t][i + 3]};
        store_shared_matrices(at, x);
      } else {
        store_shared(at, W[t][i]);
        store_shared(at + 8 * kPanelRowBytes, W[t][i + 1]);
        store_shared(at ^ 16, W[t][i + 2]);
        store_shared((at ^ 16) + 8 * kPanelRowBytes, W[t][i + 3]);
      }
    }
}

// Loads what the warp has stored by store_weights.
__device__ __forceinline__ void load_weights(Weights& W, const Part& part, u32 from) {
  const u32 lane = lane_of_warp();
  from = weights_at(from, part.key + lane % 16, lane / 16) ^ part.half * kHalfRowBytes;
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t)
#pragma unroll
    for (int i = 0; i < kHalfRowBytes / 8; i += 4)
      load_shared_matrices((from ^ i / 2 << 4) + t * 16 * kPanelRowBytes, W[t] + i);
}

// add_gradient of f32. `weights`: the address of the lane's part of the other half of the rows.
template <int dim>
__device__ __forceinline__ void add_gradient_f32(float (&G)[kKeyTiles][8 * units_of(dim)], const Part& part,
                                                 const Weights& own, u32 weights, u32 rows) {
  constexpr int kSteps = kHalfRows / 8;
  PartsOfA a[2][kSteps][kKeyTiles];  // of own rows, and of others
#pragma unroll
  for (int step = 0; step < kSteps; ++step)
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[0][step][t].big[i] = own[t][4 * step + i];
      load_shared_matrices((weights ^ step * kStepBytes) + t * 16 * kPanelRowBytes, a[1][step][t].big);
      a[0][step][t].split();
      a[1][step][t].split();
    }
  const u32 pair = pair_address(rows) ^ part.half * 64;
#pragma unroll
  for (int unit = 0; unit < units_of(dim); ++unit) {  // of each panel, half of the columns
    if (dim / 16 % 2 == 1 && unit == units_of(dim) - 1 && part.half == 1) continue;
    SumsOfColumns<kKeyTiles> sums;
#pragma unroll
    for (int others = 0; others < 2; ++others)
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int row = (others ? 1 - part.half : part.half) * kHalfRows + 8 * step;
        sums.add([&](int t) -> const PartsOfA& { return a[others][step][t]; },
                 pair + unit * kRowPanelBytes + row * kPanelRowBytes);
      }
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) sums.add_to(t, G[t] + 8 * unit);
  }
}

// G += W^T X: W has the warp's keys and all rows, half of these in registers and half in the tile at `weights`; X is
// the tile at `rows`.
template <class Type, int dim>
__device__ __forceinline__ void add_gradient(float (&G)[kKeyTiles][8 * units_of(dim)], const Part& part,
                                             const Weights& own, u32 weights, u32 rows) {
  const u32 lane = lane_of_warp();
  weights = weights_at(weights, part.key + lane % 16, lane / 16) ^ (1 - part.half) * kHalfRowBytes;
  if constexpr (Type::kType == kF32) return add_gradient_f32<dim>(G, part, own, weights, rows);
  rows = (rows + swizzled(lane % 16, lane / 16)) ^ part.half * 32;
#pragma unroll
  for (int others = 0; others < 2; ++others) {
    const u32 first = rows + (others ? 1 - part.half : part.half) * kHalfRows * kPanelRowBytes;
#pragma unroll
    for (int row = 0; row < kHalfRows; row += 16) {
      u32 a[kKeyTiles][4];
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        if (others) {
          load_shared_matrices((weights ^ row * 2) + t * 16 * kPanelRowBytes, a[t]);
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[t][i] = own[t][row / 4 + i];
        }
      }
#pragma unroll
      for (int unit = 0; unit < units_of(dim); ++unit) {
        if (dim / 16 % 2 == 1 && unit == units_of(dim) - 1 && part.half == 1) continue;
        u32 b[4];
        load_shared_matrices_transposed(
            (first ^ unit % 2 * 64) + unit / 2 * kRowPanelBytes + row * kPanelRowBytes, b);
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
          multiply_16_8_16<Type::kType>(G[t] + 8 * unit, a[t], b[0], b[1]);
          multiply_16_8_16<Type::kType>(G[t] + 8 * unit + 4, a[t], b[2], b[3]);
        }
      }
    }
  }
}

// Maximum of units of dQ of a warp, and how many of them it computes together.
enum : int { kDqUnits = (kHeadDim / 16 + kDqGroups - 1) / kDqGroups, kDqUnitsAtOnce = kDqUnits < 2 ? kDqUnits : 2 };

__device__ __forceinline__ bool has_dq_unit(const Part& part, int unit) {
  if (unit >= kDqUnits) return false;
  return kHeadDim / 16 % kDqGroups == 0 || unit * kDqGroups + part.columns < kHeadDim / 16;
}

// compute_dq of f32.
__device__ __forceinline__ void compute_dq_f32(float (&dQ)[kRowTiles][8 * kDqUnitsAtOnce], const Part& part, int unit,
                                               u32 ds, u32 keys) {
  const u32 lane = lane_of_warp();
  // The address of row r in the order of store_weights, of key 2 q.
  ds = (ds + swizzled(lane % 4 * 2, lane / 4 % 2) + lane / 8 * 4) ^ part.half * kHalfRowBytes;
  const u32 pair = pair_address(keys);
  SumsOfColumns<kRowTiles> sums[kDqUnitsAtOnce];
#pragma unroll
  for (int key = 0; key < kBlockKeys; key += 8) {
    PartsOfA a[kRowTiles];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) {
      const u32 at = (ds ^ t * 64) + key * kPanelRowBytes;
      load_pair(at, a[t].big[0], a[t].big[2]);
      load_pair(at ^ 32, a[t].big[1], a[t].big[3]);
      a[t].split();
    }
#pragma unroll
    for (int u = 0; u < kDqUnitsAtOnce; ++u) {
      if (!has_dq_unit(part, unit + u)) continue;
      const int column = ((unit + u) * kDqGroups + part.columns) * 16;
      sums[u].add([&](int t) -> const PartsOfA& { return a[t]; },
                  column_address(pair, column, kKeyPanelBytes) + key * kPanelRowBytes);
    }
  }
#pragma unroll
  for (int u = 0; u < kDqUnitsAtOnce; ++u)
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t) sums[u].add_to(t, dQ[t] + 8 * u);
}

// dQ of units [unit, unit + kDqUnitsAtOnce), from the tile of dS at `ds` and that of K at `keys`.
__device__ __forceinline__ void compute_dq(float (&dQ)[kRowTiles][8 * kDqUnitsAtOnce], const Part& part, int unit,
                                           u32 ds, u32 keys) {
  if constexpr (ElementK::kType == kF32) return compute_dq_f32(dQ, part, unit, ds, keys);
  const u32 lane = lane_of_warp();
  ds = weights_at(ds, lane % 8 + lane / 16 * 8, lane / 8 % 2) ^ part.half * kHalfRows * 2;
  keys = (keys + swizzled(lane % 16, lane / 16)) ^ part.columns % 4 * 32;
#pragma unroll
  for (int key = 0; key < kBlockKeys; key += 16) {
    u32 a[kRowTiles][4];
#pragma unroll
    for (int t = 0; t < kRowTiles; ++t)
      load_shared_matrices_transposed((ds ^ t * 32) + key * kPanelRowBytes, a[t]);
#pragma unroll
    for (int u = 0; u < kDqUnitsAtOnce; ++u) {
      const int column = (unit + u) * 16 * kDqGroups;
      if (!has_dq_unit(part, unit + u)) continue;
      u32 b[4];
      load_shared_matrices_transposed((keys ^ column % 64 * 2) + column / 64 * kKeyPanelBytes + key * kPanelRowBytes,
                                      b);
#pragma unroll
      for (int t = 0; t < kRowTiles; ++t) {
        multiply_16_8_16<ElementK::kType>(dQ[t] + 8 * u, a[t], b[0], b[1]);
        multiply_16_8_16<ElementK::kType>(dQ[t] + 8 * u + 4, a[t], b[2], b[3]);
      }
    }
  }
}

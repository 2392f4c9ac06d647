// What the two kernels by keys of the Hopper backward pass share: the producer's walk over blocks of keys and their
// steps, and the parts of a consumer's step. X is S^T or dP^T of 64 keys and kBlockRows rows, as a warpgroup holds it.
#pragma once
#include "sm90/common/dropout.cuh"
#include "sm90/common/fragment_store.cuh"
#include "device/transform.cuh"
#include "sm90/backward/key_partials.cuh"
#include "sm90/backward/load.cuh"

// The rows that a step's keys are seen by, from the block and the wave.
__device__ __forceinline__ RowTiles row_tiles_of_block(const BackwardParams& p, const Lengths& n, int block) {
  return row_tiles(band_of(p), n, kBlockRows, block * kBlockKeys, kBlockKeys);
}

// Blocks of keys that are cut.
__device__ __forceinline__ int cut_blocks(const BackwardParams& p) { return kCuts ? p.cut_blocks : 0; }

__device__ __forceinline__ KeyBlock key_block_of(const BackwardParams& p, int item) {
  if (item >= items_of(p.key_blocks, cut_blocks(p))) return {-1, 0, 0, 0};
  const BlockOfPair at = block_of(p.key_blocks, number_of_item(p.key_blocks, cut_blocks(p), item));
  const int batch = p.wave.batches == 1 ? 0 : at.pair / p.wave.heads;
  return {at.block, p.wave.first_head + at.pair - batch * p.wave.heads, p.wave.first_batch + batch,
          (first_block_first(p.key_blocks, at.pair) ? kNextBehind : 0) |
              (is_first_part(cut_blocks(p), item) ? kFirstPart : 0)};
}

// The first q head of a block's pair.
__device__ __forceinline__ int query_head(const BackwardParams& p, const KeyBlock& block) {
  return quotient(block.head, p.row_parts) * p.pair_heads;
}

// Tiles of rows [begin, end) that a block's item has of its pair's, or the wave.
__device__ __forceinline__ RowTiles own_tiles(const BackwardParams& p, const KeyBlock& block, int item) {
  if (!kSums) return {p.wave.first_tile, p.wave.first_tile + p.wave.tiles};
  const int first = (block.head - quotient(block.head, p.row_parts) * p.row_parts) * p.part_tiles;
  const RowTiles tiles = tiles_of_item(p.key_blocks, cut_blocks(p), item, p.part_tiles);
  return {first + tiles.begin, first + tiles.end};
}

// Under a right bound the blocks of a head have their last row in common. A round of them walks upwards from there,
// side by side. Those of the next begin one after another, the longest first, and end together if they walk downwards:
// so all that run are at the same rows, and Q, dO and the sums of dQ come from memory once. Waves would have to follow.
// With kOrdered those that the last keys begin walk downwards, each from its diagonal, where the one before it has just
// been; the others follow each other upwards.
__device__ __forceinline__ bool walks_upwards(const BackwardParams& p, const KeyBlock& block, int item) {
  if (!kSums || !kHasRight) return false;
  if (kHasLeft) return true;
  if (kOrdered || p.key_blocks.order == kAlternating) return block.state & kNextBehind;
  const int of_round = min(p.key_blocks.blocks * p.key_blocks.bunch, int(gridDim.x));
  return item < of_round || item / of_round % 2 == 0;
}

// What the producer warp does; Loader adds K and V of a block to a StepLoader.
template <class Loader>
__device__ __forceinline__ void produce(const BackwardParams& p, u32 smem) {
  Loader load(p, smem);
  const u32 lane = threadIdx.x % 32;
  const Band band = band_of(p);
  const auto take = [&](int first) {
    wait_for_earlier_kernels();  // they count in the same memory
    const int item = lane == 0 ? first + atomicAdd(&p.counters[0], 1) : 0;
    return __shfl_sync(0xffffffff, item, 0);
  };
  // A block waits for the turns of those in front of it alone, or for first parts: CTAs that run have taken
  // them.
  const bool waits = kOrdered || cut_blocks(p) > 0;
  const int given = waits ? 0 : gridDim.x;
  for (int item = waits ? take(given) : blockIdx.x;; item = take(given)) {
    KeyBlock block = key_block_of(p, item);
    if (block.block < 0) {
      load.load_keys(block, {});
      break;
    }
    const Lengths n = lengths_of(p, block.batch);
    const RowTiles all = row_tiles_of_block(p, n, block.block);
    const RowTiles own = own_tiles(p, block, item);
    const int begin = max(all.begin, own.begin);
    const int end = min(all.end, own.end);
    const bool has_steps = begin < end;
    const bool joins = p.parts > 1;
    const bool carries_in = (!kSums || (kCuts && !joins)) && all.begin < min(all.end, own.begin);
    const bool carries_out = joins || all.end > max(all.begin, own.end);
    block.state |= (has_steps ? kHasSteps : 0) | (carries_in ? kCarryIn : 0) | (carries_out ? kCarryOut : 0);
    // Keys that no row of this wave sees are left to the wave that has their last row, or to the first; but each part
    // has sums, even if they are 0.
    if (has_steps || (kSums && joins) || (all.begin >= all.end && own.begin == 0)) {
      load.load_keys(block, n);
      const int key = block.block * kBlockKeys;
      const int row_0 = statistics_row(n, kPacked, block.batch, p.sq);
      const bool upwards = walks_upwards(p, block, item);
#pragma unroll 1
      for (int i = begin; i < end; ++i) {
        const int tile = upwards ? begin + end - 1 - i : i;
        const int row = tile * kBlockRows;
        const bool full = all_visible(band, n, kBlockRows, row, key, kBlockKeys);
        const int head = query_head(p, block);
        const long long first_ds =
            kSums ? 0
                  : score_tile(score_tiles_of(p), p.wave, band, n, kScoreTile, p.pair_heads, block.batch,
                               head - p.wave.first_head * p.pair_heads, tile, block.block);
#pragma unroll 1
        for (int g = 0; g < p.pair_heads; ++g) {
          const bool last = i == end - 1 && g == p.pair_heads - 1;
          const float slope = kAlibi ? alibi_slope(p, block.batch, head + g) : 0;
          const long long statistics = (head + g) * (long long)(p.statistics_rows) + row_0 + row;
          const int place = kSums ? int(statistics / kBlockRows) : int(first_ds) + g * p.score_tiles.unit;
          const Step step = {place, row, __float_as_int(slope),
                             (full ? 0 : kMasked) | (last ? kLastStep : 0) | (kDropout ? kHeadOfPair * g : 0)};
          const Source source = {n.q_start, n.sq, head + g, kPacked ? 0 : block.batch};
          load.load_queries(step, source, statistics, i == begin && g == 0);
          if constexpr (kKStages > 1)
            if (i == begin && g == 0) load.load_values(block, n);
          load.load_gradients(step, source, statistics);
        }
      }
    }
  }
  // The last CTA to finish clears the counters for the next launch.
  if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1)
    p.counters[0] = 0;
}

// K or V of a warpgroup's 64 keys as a left operand along k: `front_steps` of 16 dims in registers, the others in
// shared memory, whose bandwidth binds.
template <int dim, int front_steps>
struct KeyOperand {
  enum : int { kSteps = dim / 16, kFront = front_steps };
  u32 front[max_of(4 * kFront, 1)];
  u32 rest;

  // From where the first steps lie, and those after them.
  __device__ __forceinline__ void load(u32 front_buffer, u32 rest_buffer) {
    const u32 lane = threadIdx.x % 32;
    const u32 line = front_buffer + (warp_row() + lane % 16) * 128;
#pragma unroll
    for (int step = 0; step < kFront; ++step) {
      const u32 chunk = step % 4 * 2 + lane / 16;
      load_shared_matrices(line + step / 4 * kBlockKeys * 128 + ((chunk ^ lane % 8) << 4), front + 4 * step);
    }
    if (kFront > 0) register_fence(front);
    rest = uniform_descriptor(rest_buffer, 0);
  }
  // From one buffer.
  __device__ __forceinline__ void load(u32 buffer) {
    load(buffer, buffer + kFront / 4 * kBlockKeys * 128 + kFront % 4 * 32);
  }

  // X = A B^T, or X += A B^T where `keep`. First the steps that read more of shared memory.
  __device__ __forceinline__ void issue_scores(float (&X)[kBlockRows / 2], u32 rows, int keep) const {
#pragma unroll
    for (int step = kFront; step < kSteps; ++step)
      Wgmma<kBlockRows>::template multiply<kAlongK, kAlongK>(
          X, rest + offset<kBlockKeys>(step) - offset<kBlockKeys>(kFront), rows + offset<kBlockRows>(step),
          keep | (step > kFront));
#pragma unroll
    for (int step = 0; step < kFront; ++step)
      Wgmma<kBlockRows>::template multiply<kAlongK>(X, front + 4 * step, rows + offset<kBlockRows>(step),
                                                    keep | (kSteps > kFront || step > 0));
    wgmma_commit();
  }

  // Of 16 dims of panels of so many rows, as descriptors count.
  template <int panel_rows>
  static __device__ __forceinline__ constexpr u32 offset(int step) {
    return (step / 4 * panel_rows * 128 + step % 4 * 32) >> 4;
  }
};

// G += P^T dO, or dS^T Q.
template <int dim>
__device__ __forceinline__ void issue_gradient(float (&G)[dim / 2], const u32 (&P)[kBlockRows / 4], u32 rows) {
#pragma unroll
  for (int step = 0; step < kBlockRows / 16; ++step)
    Wgmma<dim>::template multiply<kAcrossK>(G, P + 4 * step, rows + (step * 16 * 128 >> 4), 1);
  wgmma_commit();
}

// The rows of a tile that see this thread's keys r and r + 8, relative to its first column.
struct SeenBy {
  int begin0, begin1, end0, end1;
};

__device__ __forceinline__ SeenBy seen_by(const BackwardParams& p, const Lengths& n, int key, int row) {
  const int column = row + int(thread_column());
  const int offset = n.sk - n.sq;
  SeenBy seen = {-column, -column, kBlockRows, kBlockRows};
  if (kHasRight) {
    seen.begin0 = key - offset - p.window_right - column;
    seen.begin1 = seen.begin0 + 8;
  }
  if (kHasLeft) {
    seen.end0 = key - offset + p.window_left + 1 - column;
    seen.end1 = seen.end0 + 8;
  }
  if (kHasChunk) {  // r and r + 8 may lie in two of them
    // The compiler would divide ahead of the steps, and keep what comes of it where registers are full.
    u32 now[1] = {u32(key)};
    register_fence(now);
    const RowRange rows0 = rows_seeing(band_of(p), n, int(now[0]));
    const RowRange rows1 = rows_seeing(band_of(p), n, int(now[0]) + 8);
    seen = {rows0.begin - column, rows1.begin - column, rows0.end - column, rows1.end - column};
  }
  if (key >= n.sk) seen.end0 = 0, seen.begin0 = kBlockRows;
  if (key + 8 >= n.sk) seen.end1 = 0, seen.begin1 = kBlockRows;
  return seen;
}

// 0 where a row does not see a key, whatever was computed there.
__device__ __forceinline__ void hide(float (&X)[kBlockRows / 2], const SeenBy& seen) {
#pragma unroll
  for (int i = 0; i < kBlockRows / 2; ++i) {
    const int row = i / 4 * 8 + (i & 1);
    const bool visible = row >= (i & 2 ? seen.begin1 : seen.begin0) && row < (i & 2 ? seen.end1 : seen.end0);
    X[i] = visible ? X[i] : 0;
  }
}

// A score less its row's LSE, in units of log2. `distance`: of the row's diagonal from the key.
__device__ __forceinline__ float exponent(const BackwardParams& p, float score, float alibi, float distance,
                                          float minus_lse) {
  if (!kSoftcap && !kAlibi) return __fmaf_rn(score, p.scale_log2, minus_lse);
  return __fadd_rn(transform_score(p, score, alibi, distance), minus_lse);
}

// What all scores of a thread have in common in a step.
struct Exponents {
  float alibi, distance;  // of its first row's diagonal from its first key
  u32 shift;              // where -LSE of its first row lies
};

__device__ __forceinline__ Exponents exponents_of(const Step& step, const Lengths& n, int key, const QBuffers& q) {
  return {__int_as_float(step.slope), kAlibi ? float(step.row + int(thread_column()) + n.sk - n.sq - key) : 0,
          shift_of(q) + 4 * thread_column()};
}

// P^T = exp(S^T - LSE) in X: the j-th 8 rows. `slopes`: the derivative of softcap at their four scores.
__device__ __forceinline__ void probabilities(const BackwardParams& p, float (&X)[kBlockRows / 2], int j,
                                              const Exponents& at, float (&slopes)[4]) {
  float low;
  float high;
  load_shared_pair(at.shift + 32 * j, low, high);
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    float& left = X[4 * j + i];
    float& right = X[4 * j + i + 1];
    if (kSoftcap) {
      slopes[i] = softcap_slope(p, left);
      slopes[i + 1] = softcap_slope(p, right);
    }
    const float away = at.distance + float(8 * j - (i & 2 ? 8 : 0));
    left = exp2_fast(exponent(p, left, at.alibi, away, low));
    right = exp2_fast(exponent(p, right, at.alibi, away + 1, high));
  }
}

// What dropout keeps of a step of the block that is announced with K. `key`: the warp's first, in the block.
__device__ __forceinline__ Kept<kBlockRows> kept_of_step(const BackwardParams& p, const KBuffer& k, const Step& step,
                                                         int key) {
  const KeyBlock block = load_block(k);
  const int head = block.batch * p.hq + query_head(p, block) + u32(step.state) / kHeadOfPair;
  return kept_transposed<kBlockRows>(p, k.smem + kKeysLayout.dropout_key, head, step.row,
                                     block.block * kBlockKeys + key);
}

// -D of each row: where dP^T starts from.
__device__ __forceinline__ void start_from_delta(float (&X)[kBlockRows / 2], u32 delta) {
#pragma unroll
  for (int j = 0; j < kBlockRows / 8; ++j) {
    load_shared_pair(delta + 32 * j, X[4 * j], X[4 * j + 1]);
    X[4 * j + 2] = X[4 * j];
    X[4 * j + 3] = X[4 * j + 1];
  }
}

// P has no use for its sign: with dropout it says that an entry is dropped. `kept` is all ones in the halves that are
// not.
__device__ __forceinline__ u32 mark_dropped(u32 pair, u32 kept) { return (pair & 0x7fff7fff) | (~kept & 0x80008000); }

// dP^T - D from dP^T and -D, where dropped entries are without dP^T. Takes the marks from P.
__device__ __forceinline__ void drop_gradients(const BackwardParams& p, float (&X)[kBlockRows / 2],
                                               u32 (&P)[kBlockRows / 4], u32 delta) {
#pragma unroll
  for (int j = 0; j < kBlockRows / 8; ++j) {
    float low;
    float high;
    load_shared_pair(delta + 32 * j, low, high);
#pragma unroll
    for (int i = 2 * j; i < 2 * j + 2; ++i) {
      X[2 * i] = __fmaf_rn(P[i] & 0x8000 ? 0 : X[2 * i], p.keep_scale, low);
      X[2 * i + 1] = __fmaf_rn(P[i] & 0x80000000 ? 0 : X[2 * i + 1], p.keep_scale, high);
      P[i] &= 0x7fff7fff;
    }
  }
}

// The warp's 16 keys of dS^T to the shared memory `to`, where the warpgroup's pieces begin.
__device__ __forceinline__ void store_shared_ds(u32 to, const u32 (&dS)[kBlockRows / 4]) {
  const u32 lane = threadIdx.x % 32;
  const u32 line = to + (warp_row() + lane % 16) * 128;
#pragma unroll
  for (int i = 0; i < kBlockRows / 4; i += 4) {  // 16 rows
    const u32 chunk = (i / 2 + lane / 16) % 8;
    const u32 x[4] = {dS[i], dS[i + 1], dS[i + 2], dS[i + 3]};
    store_shared_matrices(line + i / 16 * kPieceBytes + ((chunk ^ lane % 8) << 4), x);
  }
}

// And from there to the workspace: `strip` counts the block's keys by 64, `tile` those of dS.
__device__ __forceinline__ void store_global_ds(const BackwardParams& p, u32 from, int strip, int tile) {
  const u32 warp = warp_row() * 128;
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
    unsigned char* to = p.ds + (long long)(tile) * kTileBytes + strip * kPieceBytes + warp;
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i)
      bulk_store(to + i * (kBlockKeys / kPieceKeys) * kPieceBytes, from + i * kPieceBytes + warp, 16 * 128);
  }
  tma_store_commit();
}

// What the two kernels by keys (keys.cu, keys_wide.cu) have in common: the producer's loop over work tiles and their
// steps, and the operations of a consumer's step. X is S^T or dP^T of 64 keys and kBlockRows rows, the accumulators of
// a warpgroup.
#pragma once
#include "attention/bias_products.cuh"
#include "attention/dropout.cuh"
#include "attention/fragment_store.cuh"
#include "attention/mask.cuh"
#include "attention/seen_tiles.cuh"
#include "device/score.cuh"
#include "sm90/backward/key_partials.cuh"
#include "sm90/backward/load.cuh"

// The row tiles in which some row sees some key of a key block.
__device__ __forceinline__ RowTiles row_tiles_of_block(const BackwardParams& p, const Lengths& n, int block) {
  return row_tiles(band_of(p), n, kBlockRows, block * kBlockKeys, kBlockKeys);
}

// The number of key blocks that are two work tiles.
__device__ __forceinline__ int cut_blocks(const BackwardParams& p) { return kCuts ? p.cut_blocks : 0; }

__device__ __forceinline__ KeyBlock key_block_of(const BackwardParams& p, int work_tile) {
  if (work_tile >= work_tiles_of(p.key_blocks, cut_blocks(p))) return {-1, 0, 0, 0};
  const BlockOfHead at = block_of(p.key_blocks, block_number(p.key_blocks, cut_blocks(p), work_tile));
  const int batch = p.wave.batches == 1 ? 0 : at.batch_head / p.wave.heads;
  return {at.block, p.wave.first_head + at.batch_head - batch * p.wave.heads, p.wave.first_batch + batch,
          (is_ascending(p.key_blocks, at.batch_head) ? kNextIsHigher : 0) |
              (is_first_part(cut_blocks(p), work_tile) ? kFirstPart : 0)};
}

// The first q head of a key block.
__device__ __forceinline__ int query_head(const BackwardParams& p, const KeyBlock& block) {
  return quotient(block.head, p.row_splits) * p.split_heads;
}

// The row tiles [begin, end) to which a work tile is limited: those of its split and part, or of the wave.
__device__ __forceinline__ RowTiles own_tiles(const BackwardParams& p, const KeyBlock& block, int work_tile) {
  if (!kAccumulatesDq) return {p.wave.first_tile, p.wave.first_tile + p.wave.tiles};
  const int first = (block.head - quotient(block.head, p.row_splits) * p.row_splits) * p.row_split_tiles;
  const RowTiles tiles = row_tiles_of_work_tile(p.key_blocks, cut_blocks(p), work_tile, p.row_split_tiles);
  return {first + tiles.begin, first + tiles.end};
}

// Whether a work tile iterates over its row tiles from the last one to the first. With a right bound all key blocks of
// a head end at the same row. The first round of CTAs iterates from there in step. The blocks of the next round begin
// one after the other, the longest first, and end together if they iterate in ascending order of rows. So CTAs that run
// at the same time read the same rows, and Q, dO and dq_accum stay in L2. If there is only one round, half of the heads
// iterate in ascending order, so that fewer CTAs add to the same rows of dq_accum at a time. Waves would need an order
// of their own. With kOrderedDq the blocks of a descending section begin at their diagonals, each at the row tile that
// the block with the next higher keys has just computed; those of an ascending section begin at the last row, one after
// the other. Also with a map, blocks in ascending order begin at the last row: if a row tile belongs to two documents,
// it is the first step of blocks of the earlier document and the last step of blocks of the later one, in the order of
// blocks.
__device__ __forceinline__ bool is_descending(const BackwardParams& p, const KeyBlock& block, int work_tile) {
  if (!kAccumulatesDq) return false;
  if (kMapsTiles && kOrderedDq && !kHasLeft) return block.state & kNextIsHigher;
  if (!kHasRight) return false;
  if (kRoundsDq) return true;
  if (kHasLeft) return true;
  if (kOrderedDq || p.key_blocks.order == kAlternating) return block.state & kNextIsHigher;
  const bool one_round = p.key_blocks.blocks * p.key_blocks.batch_heads <= int(gridDim.x);
  if (one_round && !kPacked) return (block.head + block.batch) % 2;
  const int of_round = min(p.key_blocks.blocks * p.key_blocks.section_heads, int(gridDim.x));
  return work_tile < of_round || work_tile / of_round % 2 == 0;
}

// The first row tile of a key block, of `tiles`, if no mask hides any. With kRoundsDq the blocks of a head
// begin at different rows, so that each of them completes dQ of some rows.
__device__ __forceinline__ int first_tile_of(const KeyBlock& block, int tiles) {
  if (!kRoundsDq || kHidesKeys) return 0;
  const int tile = block.block * kBlockKeys / kBlockRows;
  return tile < tiles ? tile : tile % tiles;
}

// Whether the warps that add to dq_accum count their additions after step i, kRoundsDq. For blocks that begin at
// different rows once before the last step is enough, so that different CTAs complete these rows.
__device__ __forceinline__ bool counts_after(int i, int end) {
  enum : int { kSteps = max_of(kDqStages / kDqTilesOfStep, 1) };  // in which each of these warps adds
  return kRoundsDq && (kHidesKeys || (i < end - 1 && i >= end - 1 - kSteps));
}

// The steps of a key block: those that the map shows, or without a map all of them.
template <bool maps, class Params>
struct OwnSteps {
  __device__ __forceinline__ OwnSteps(const Params&, const KeyBlock&, int, int, bool) {}
  __device__ __forceinline__ bool more() const { return true; }
};
template <class Params>
struct OwnSteps<true, Params> : SeenSteps<Params> {
  __device__ __forceinline__ OwnSteps(const Params& p, const KeyBlock& block, int begin, int end, bool down)
      : SeenSteps<Params>(p, block.batch, query_head(p, block), p.split_heads, block.block, begin, end, down) {}
};

// The place of the mask words of a step that the map shows, for the first 64 keys of the key block.
template <class Params, class Steps>
__device__ __forceinline__ int mask_place(const Params& p, const KeyBlock& block, const Steps& seen) {
  if (!seen.more() || !seen.is_partial()) return -1;
  const MaskBits& bits = p.expression.bits;
  const int rows = kBiasRows ? seen.tile() * (kBlockRows / kMaskWordColumns) * kMaskThreads : 0;
  return int(block.batch * bits.batch + (query_head(p, block) + seen.g) * bits.head +
             block.block * (kBlockKeys / kMaskWordColumns) * bits.strip) +
         rows;
}

// Loads these steps, as produce() does without a map.
template <class Params, class Loader, class Steps>
__device__ __forceinline__ void load_seen_steps(const Params& p, Loader& load, const KeyBlock& block,
                                                const Lengths& n, Steps& seen) {
  const int row_0 = statistics_row(n, kPacked, block.batch, p.sq);
  bool first = true;
  MaskPlaces mask = {-1, -1};
  if constexpr (kMaskBits) mask.here = mask_place(p, block, seen);
#pragma unroll 1
  while (seen.more()) {
    const int tile = seen.tile(), g = seen.g;
    const int row = tile * kBlockRows;
    const int first_head = query_head(p, block);
    const int head = first_head + g;
    int state = !kMaskBits && seen.is_partial() ? +kModHides : 0;
    // The bounds of the call are not part of the map.
    const KeyRange all = keys_seen_by_all(band_of(p), n, row, min(row + kBlockRows, n.sq) - 1);
    const int key = block.block * kBlockKeys;
    if (is_partial(all, key, key + kBlockKeys)) state |= kMasked;
    if (!seen.next()) state |= kLastStep;
    if constexpr (kMaskBits) mask.next = mask_place(p, block, seen);
    if (kOrderedDq)
      state |= kBlockBefore * seen_block_before(p, block.batch, head, tile, block.block, p.key_blocks.blocks,
                                                block.state & kNextIsHigher);
    const long long statistics = head * (long long)(p.statistics_rows) + row_0 + row;
    int place = int(statistics / kBlockRows);
    if (kStoresDs)
      place = int(score_tile(score_tiles_of(p), p.wave, band_of(p), n, kScoreTile, p.split_heads, block.batch,
                             first_head - p.wave.first_head * p.split_heads, tile, block.block)) +
              g * p.score_tiles.head_tiles;
    const Step step = {place, row, head, state};
    const Source source = {n.q_start, n.sq, head, kPacked ? 0 : block.batch};
    load.load_queries(block, step, source, statistics, first, mask);
    if constexpr (kKStages > 1)
      if (first) load.load_values(block, n);
    load.load_gradients(step, source, statistics);
    mask.here = mask.next;
    first = false;
  }
}

// The loop of the producer warp. Loader adds the loads of K and V to a StepLoader.
template <class Loader>
__device__ __forceinline__ void produce(const BackwardParams& p, u32 smem) {
  Loader load(p, smem);
  const u32 lane = threadIdx.x % 32;
  const Band band = band_of(p);
  const auto take = [&](int first) {
    wait_for_earlier_kernels();  // which use the same counter
    const int work_tile = lane == 0 ? first + atomicAdd(&p.counters[0], 1) : 0;
    return __shfl_sync(0xffffffff, work_tile, 0);
  };
  // A work tile may wait for earlier ones, for their semaphores or for first parts. Then CTAs take also the first work
  // tile from the counter, so that the CTAs of earlier ones are running.
  const bool waits = kOrderedDq || cut_blocks(p) > 0;
  const int given = waits ? 0 : gridDim.x;
  for (int work_tile = waits ? take(given) : blockIdx.x;; work_tile = take(given)) {
    KeyBlock block = key_block_of(p, work_tile);
    if (block.block < 0) {
      load.load_keys(block, {});
      break;
    }
    const Lengths n = lengths_of(p, block.batch);
    const RowTiles all = row_tiles_of_block(p, n, block.block);
    const RowTiles own = own_tiles(p, block, work_tile);
    const int begin = max(all.begin, own.begin);
    const int end = min(all.end, own.end);
    if (kMakesMap && work_tile < int(gridDim.x)) {  // the kernel that prepares rows makes the map
      if (begin < end) load.prefetch_keys(block, n);
      wait_for_earlier_kernels();
    }
    OwnSteps<kMapsTiles != 0, BackwardParams> seen(p, block, begin, end, is_descending(p, block, work_tile));
    const bool has_steps = begin < end && seen.more();
    const bool reduces = p.splits > 1;
    const bool loads_partial = (!kAccumulatesDq || (kCuts && !reduces)) && all.begin < min(all.end, own.begin);
    const bool stores_partial = reduces || all.end > max(all.begin, own.end);
    block.state |= (has_steps ? kHasSteps : 0) | (loads_partial ? kLoadsPartial : 0) |
                   (stores_partial ? kStoresPartial : 0);
    // A wave computes the keys that some of its rows see by the bounds of the call. The wave with the first rows also
    // stores 0 for keys that no row sees. Every split stores partial dK and dV, even if they are 0.
    if (begin < end || (kAccumulatesDq && reduces) || (all.begin >= all.end && own.begin == 0)) {
      load.load_keys(block, n);
      if constexpr (kMapsTiles != 0) {
        load_seen_steps(p, load, block, n, seen);
      } else {
        const int key = block.block * kBlockKeys;
        const int row_0 = statistics_row(n, kPacked, block.batch, p.sq);
        const bool descending = is_descending(p, block, work_tile);
        const int rotation = first_tile_of(block, end - begin);
#pragma unroll 1
        for (int i = begin; i < end; ++i) {
          const int next = i + rotation;
          const int tile = descending ? begin + end - 1 - i : next < end ? next : next - (end - begin);
          const int row = tile * kBlockRows;
          const KeyRange seen = keys_seen_by_all(band, n, row, min(row + kBlockRows, n.sq) - 1);
          const bool masked = is_partial(seen, key, key + kBlockKeys);
          const int head = query_head(p, block);
          const long long first_ds =
              !kStoresDs ? 0
                         : score_tile(score_tiles_of(p), p.wave, band, n, kScoreTile, p.split_heads, block.batch,
                                      head - p.wave.first_head * p.split_heads, tile, block.block);
#pragma unroll 1
          for (int g = 0; g < p.split_heads; ++g) {
            const bool last = i == end - 1 && g == p.split_heads - 1;
            const long long statistics = (head + g) * (long long)(p.statistics_rows) + row_0 + row;
            const int place = kStoresDs ? int(first_ds) + g * p.score_tiles.head_tiles
                                        : int(statistics / kBlockRows);
            const int slope = kAlibi ? __float_as_int(score_head(p, n, block.batch, head + g).alibi) : 0;
            const Step step = {place, row, kExpressions ? head + g : slope,
                               (masked ? kMasked : 0) | (last ? kLastStep : 0) | (counts_after(i, end) ? kCounted : 0) |
                                   (kDropout ? kHeadOfSplit * g : 0)};
            const Source source = {n.q_start, n.sq, head + g, kPacked ? 0 : block.batch};
            load.load_queries(block, step, source, statistics, i == begin && g == 0);
            if constexpr (kKStages > 1)
              if (i == begin && g == 0) load.load_values(block, n);
            load.load_gradients(step, source, statistics);
          }
        }
      }
    }
  }
  // The last CTA to finish clears the counters for the next launch.
  if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1)
    p.counters[0] = 0;
}

// K or V of a warpgroup's 64 keys as the left operand of a product over dims: the first `front_steps` steps of 16 dims
// are in registers, the others in shared memory, whose bandwidth is the bottleneck.
template <class Type, int dim, int front_steps>
struct KeyOperand {
  enum : int { kSteps = dim / Type::kStep, kFront = front_steps };
  u32 front[max_of(4 * kFront, 1)];
  u32 rest;

  // Loads the first steps from one buffer; the other steps are read from another one.
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
  // Both parts are in one buffer.
  __device__ __forceinline__ void load(u32 buffer) {
    load(buffer, buffer + kFront / 4 * kBlockKeys * 128 + kFront % 4 * 32);
  }

  // X = A B^T, or X += A B^T if `keep`. The steps that read both operands from shared memory come first.
  __device__ __forceinline__ void issue_scores(float (&X)[kBlockRows / 2], u32 rows, int keep) const {
#pragma unroll
    for (int step = kFront; step < kSteps; ++step)
      Wgmma<kBlockRows, Type::kType>::template multiply<kAlongK, kAlongK>(
          X, rest + offset<kBlockKeys>(step) - offset<kBlockKeys>(kFront), rows + offset<kBlockRows>(step),
          keep | (step > kFront));
#pragma unroll
    for (int step = 0; step < kFront; ++step)
      Wgmma<kBlockRows, Type::kType>::template multiply<kAlongK>(X, front + 4 * step, rows + offset<kBlockRows>(step),
                                                                 keep | (kSteps > kFront || step > 0));
    wgmma_commit();
  }

  // The offset of a step of 16 dims in panels of `panel_rows` rows, in units of a descriptor.
  template <int panel_rows>
  static __device__ __forceinline__ constexpr u32 offset(int step) {
    return (step / kPanelSteps * panel_rows * kPanelRowBytes + step % kPanelSteps * kStepBytes) >> 4;
  }
};

// G += P^T dO, or G += dS^T Q.
template <class Type, int dim>
__device__ __forceinline__ void issue_gradient(float (&G)[dim / 2], const u32 (&P)[kBlockRows / 4], u32 rows) {
#pragma unroll
  for (int step = 0; step < kBlockRows / Type::kStep; ++step)
    Wgmma<dim, Type::kType>::template multiply<kAcrossK>(G, P + 4 * step,
                                                         rows + (step * Type::kStep * kPanelRowBytes >> 4), 1);
  wgmma_commit();
}

// What the exponents of all scores of a thread in a step have in common.
struct Exponents {
  ScoreContext first;  // of the thread's first row and key
  u32 shift;           // address of -LSE of that row
};

__device__ __forceinline__ Exponents exponents_of(const BackwardParams& p, const Step& step, const Lengths& n,
                                                   int batch, int key, const QBuffers& q) {
  const int row = step.row + int(thread_column());
  const ScoreHead head = kExpressions || kMapsTiles ? score_head(p, n, batch, step.head)
                                       : head_of_slope(__int_as_float(step.head));
  return {score_context(head, row, diagonal_of(band_of(p), n, row), key), shift_of(q) + 4 * thread_column()};
}

// P^T = exp(S^T - LSE) in X, for the j-th 8 rows. `bias`: of the thread's four scores there. `slopes`: their
// derivatives, kHasScoreSlope.
__device__ __forceinline__ void probabilities(const BackwardParams& p, float (&X)[kBlockRows / 2], int j,
                                              const Exponents& at, const float* bias, float (&slopes)[4]) {
  float low;
  float high;
  load_shared_pair(at.shift + 32 * j, low, high);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float& x = X[4 * j + i];
    const ScoreContext entry = at.first.moved(8 * j + (i & 1), i & 2 ? 8 : 0);
    if (kHasScoreSlope) slopes[i] = score_slope(p, entry, x);
    const float shift = i & 1 ? high : low;
    if constexpr (kBiasByProducts) x = exp2_fast(min_or_nan(__fmaf_rn(x, p.scale_log2, shift), p.p_log2));
    else x = exp2_fast(exponent_up_to<!kMapsTiles>(p, entry, x, bias[i], shift, p.p_log2));
  }
}

// A bit for each of a thread's entries [first, end) of a step, at most 32: 1 where mask_mod hides it. They are computed
// in a loop: unrolled, they took a fifth of the compile time, and kernels were slower.
__device__ __forceinline__ u32 hidden_by_mask_mod(const BackwardParams& p, const Exponents& at, int first, int end) {
  u32 bits = 0;
#pragma unroll 1
  for (int j = first / 4; j < end / 4; ++j)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      bits = bits >> 1 | u32(mask_mod_hides(p, at.first.moved(8 * j + (i & 1), i & 2 ? 8 : 0))) << 31;
  return bits >> (32 - (end - first));
}

// Sets entries that mask_mod hides to 0.
__device__ __forceinline__ void hide_by_mask_mod(const BackwardParams& p, float (&X)[kBlockRows / 2],
                                                 const Exponents& at) {
#pragma unroll
  for (int first = 0; first < kBlockRows / 2; first += 32) {
    const int end = min_of(first + 32, kBlockRows / 2);
    const u32 hidden = hidden_by_mask_mod(p, at, first, end);
#pragma unroll
    for (int i = first; i < end; ++i) X[i] = hidden >> (i - first) & 1 ? 0 : X[i];
  }
}

// The entries of a step that dropout keeps. `key`: the warp's first key in the key block of K's current stage.
__device__ __forceinline__ Kept<kBlockRows> kept_of_step(const BackwardParams& p, const KBuffer& k, const Step& step,
                                                         int key) {
  const KeyBlock block = load_block(k);
  const u32 head = dropout_head(p, block.batch,
                                kMapsTiles ? step.head : query_head(p, block) + u32(step.state) / kHeadOfSplit);
  return kept_transposed<kBlockRows>(p, k.smem + kKeysLayout.dropout_key, head, step.row,
                                     block.block * kBlockKeys + key);
}

// X = -D of each row, to which dP^T is added.
__device__ __forceinline__ void start_from_delta(float (&X)[kBlockRows / 2], u32 delta) {
#pragma unroll
  for (int j = 0; j < kBlockRows / 8; ++j) {
    load_shared_pair(delta + 32 * j, X[4 * j], X[4 * j + 1]);
    X[4 * j + 2] = X[4 * j];
    X[4 * j + 3] = X[4 * j + 1];
  }
}

// P is never negative: with dropout its sign bit says that an entry is dropped. `kept` has all ones in the halves of
// kept entries.
__device__ __forceinline__ u32 mark_dropped(u32 pair, u32 kept) { return (pair & 0x7fff7fff) | (~kept & 0x80008000); }

// X = dP^T / (1 - p) - D from X = dP^T for kept entries and X = -D for dropped ones. Clears the sign bits of P.
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

// Stores dS^T of the warp's 16 keys to shared memory; `to` is the first dS tile of the warpgroup.
__device__ __forceinline__ void store_shared_ds(u32 to, const u32 (&dS)[kBlockRows / 4]) {
  const u32 lane = threadIdx.x % 32;
  const u32 line = to + (warp_row() + lane % 16) * 128;
#pragma unroll
  for (int i = 0; i < kBlockRows / 4; i += 4) {  // 16 rows
    const u32 chunk = (i / 2 + lane / 16) % 8;
    const u32 x[4] = {dS[i], dS[i + 1], dS[i + 2], dS[i + 3]};
    store_shared_matrices(line + i / 16 * kDsTileBytes + ((chunk ^ lane % 8) << 4), x);
  }
}

// Copies dS of the warp's 16 keys from shared memory to a score tile in the workspace. `strip` counts the block's keys
// by 64.
__device__ __forceinline__ void store_global_ds(const BackwardParams& p, u32 from, int strip, int tile) {
  const u32 warp = warp_row() * 128;
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
    unsigned char* to = p.ds + (long long)(tile) * kScoreTileBytes + strip * kDsTileBytes + warp;
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i)
      bulk_store(to + i * (kBlockKeys / kDsTileKeys) * kDsTileBytes, from + i * kDsTileBytes + warp, 16 * 128);
  }
  tma_store_commit();
}

// The end of a kernel's set-up by its first thread, after the barriers of its rings: the other barrier, the key of
// dropout, and the maps of TMA.
__device__ __forceinline__ void set_up(const BackwardParams& p, u32 smem) {
  mbarrier_init(smem + kKeysLayout.tail, 1);
  fence_mbarrier_init();
  if (kDropout) store_dropout_key(p, smem + kKeysLayout.dropout_key);
  tma_prefetch_map(&p.q_map);
  tma_prefetch_map(&p.k_map);
  tma_prefetch_map(&p.v_map);
  tma_prefetch_map(&p.dout_map);
}

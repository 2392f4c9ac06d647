// Attention backward for Hopper, by keys: dV = P^T dO, dK = scale dS^T Q, and dS, with P = exp(S - LSE) and
// dS = P o (dO V^T - D) computed again from the inputs (FlashAttention-2, algorithm 2, without its line for dQ).
//
// A thread block takes blocks of Bc = 64 * kConsumers keys, whose K and V stay in shared memory while it walks down the
// tiles of Br rows that see them. One producer warp feeds rings of Q and dO by TMA. Each consumer warpgroup owns 64 keys
// and holds S^T and dP^T, so that P^T and dS^T are the left operands of dV and dK straight from registers. dS leaves for
// the workspace, from which backward_rows.cu computes dQ: no sums in global memory, the same bits in every run.
// docs/kernels/backward.md derives the schedule.
#include "shared/fragment_store.cuh"
#include "shared/transform.cuh"
#include "sm90/backward_sums.cuh"

// The rows that a step's keys are seen by, from the block and the wave.
__device__ __forceinline__ RowTiles row_tiles_of_block(const BackwardParams& p, const Lengths& n, int block) {
  return row_tiles(band_of(p), n, kBlockRows, block * kBlockKeys, kBlockKeys);
}

__device__ __forceinline__ KeyBlock key_block_of(const BackwardParams& p, int number) {
  if (number >= p.key_blocks.blocks * p.key_blocks.pairs) return {-1, 0, 0, 0};
  const BlockOfPair at = block_of(p.key_blocks, number);
  // The keys that the most rows see come first.
  const int block = kHasLeft && !kHasRight ? p.key_blocks.blocks - 1 - at.block : at.block;
  return {block, p.wave.first_head + at.pair % p.wave.heads, p.wave.first_batch + at.pair / p.wave.heads, 0};
}

__device__ __forceinline__ void produce(const BackwardParams& p, u32 smem) {
  KeysLoader load(p, smem);
  const u32 lane = threadIdx.x % 32;
  const Band band = band_of(p);
  for (int number = blockIdx.x;;) {
    KeyBlock block = key_block_of(p, number);
    if (block.block < 0) {
      load.load_keys(block, {});
      break;
    }
    const Lengths n = lengths_of(p, block.batch);
    const RowTiles all = row_tiles_of_block(p, n, block.block);
    const int begin = max(all.begin, p.wave.first_tile);
    const int end = min(all.end, p.wave.first_tile + p.wave.tiles);
    const bool has_steps = begin < end;
    const bool carries_in = all.begin < min(all.end, p.wave.first_tile);
    const bool carries_out = all.end > max(all.begin, p.wave.first_tile + p.wave.tiles);
    block.state = (has_steps ? kHasSteps : 0) | (carries_in ? kCarryIn : 0) | (carries_out ? kCarryOut : 0);
    // Keys that no row of this wave sees are left to the wave that has their last row, or to the first.
    if (has_steps || (all.begin >= all.end && p.wave.first_tile == 0)) {
      load.load_keys(block, n);
      const int key = block.block * kBlockKeys;
      const int row_0 = statistics_row(n, kPacked, block.batch, p.sq);
#pragma unroll 1
      for (int tile = begin; tile < end; ++tile) {
        const int row = tile * kBlockRows;
        const bool full = all_visible(band, n, kBlockRows, row, key, kBlockKeys);
        const int head = block.head * p.group;
        const long long first_ds = kSums ? 0 : score_tile(p.score_tiles, p.wave, band, n, kScoreTile, p.group, block.batch,
                                              head - p.wave.first_head * p.group, tile, block.block);
#pragma unroll 1
        for (int g = 0; g < p.group; ++g) {
          const bool last = tile == end - 1 && g == p.group - 1;
          const float slope = kAlibi ? alibi_slope(p, block.batch, head + g) : 0;
          const long long statistics = (head + g) * (long long)(p.statistics_rows) + row_0 + row;
          const int ds_tile = int(first_ds) + g * p.score_tiles.unit;
          const Step step = {kSums ? int(statistics / kBlockRows) : ds_tile, row, __float_as_int(slope),
                             (full ? 0 : kMasked) | (last ? kLastStep : 0)};
          load.load_step(step, {n.q_start, n.sq, head + g, kPacked ? 0 : block.batch}, statistics);
        }
      }
    }
    const int next = lane == 0 ? int(gridDim.x) + atomicAdd(&p.counters[0], 1) : 0;
    number = __shfl_sync(0xffffffff, next, 0);
  }
  // The last thread block to finish clears the counters for the next launch.
  if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1)
    p.counters[0] = 0;
}

// X = A B^T, or X += A B^T where `keep`: both operands along k.
template <int dim>
__device__ __forceinline__ void issue_scores(float (&X)[kBlockRows / 2], u32 keys, u32 rows, int keep) {
#pragma unroll
  for (int step = 0; step < dim / 16; ++step) {
    const int panel = step / 4;
    const int inside = step % 4 * 32;
    Wgmma<kBlockRows>::multiply<kAlongK, kAlongK>(X, keys + ((panel * kBlockKeys * 128 + inside) >> 4),
                                                  rows + ((panel * kBlockRows * 128 + inside) >> 4), keep | step);
  }
  wgmma_commit();
}

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

// The derivative of softcap at each score of a step, in f16; nothing without softcap.
struct SoftcapSlopes {
  u32 packed[kSoftcap ? kBlockRows / 4 : 1];
};

// A score less its row's LSE, in units of log2. `distance`: of the row's diagonal from the key.
__device__ __forceinline__ float exponent(const BackwardParams& p, float score, float alibi, float distance,
                                          float minus_lse) {
  if (!kSoftcap && !kAlibi) return __fmaf_rn(score, p.scale_log2, minus_lse);
  return __fadd_rn(transform_score(p, score, alibi, distance), minus_lse);
}

// P^T = exp(S^T - LSE) in X.
__device__ __forceinline__ void probabilities(const BackwardParams& p, float (&X)[kBlockRows / 2], SoftcapSlopes& slopes,
                                              const Step& step, const Lengths& n, int key, u32 shift) {
  const float alibi = __int_as_float(step.slope);
  const float distance = kAlibi ? float(step.row + int(thread_column()) + n.sk - n.sq - key) : 0;
#pragma unroll
  for (int j = 0; j < kBlockRows / 8; ++j) {
    float low;
    float high;
    load_shared_pair(shift + 32 * j, low, high);
#pragma unroll
    for (int i = 4 * j; i < 4 * j + 4; i += 2) {
      if (kSoftcap) slopes.packed[i / 2] = pack_half(softcap_slope(p, X[i]), softcap_slope(p, X[i + 1]));
      const float away = distance + float(8 * j - (i & 2 ? 8 : 0));
      X[i] = exp2_fast(exponent(p, X[i], alibi, away, low));
      X[i + 1] = exp2_fast(exponent(p, X[i + 1], alibi, away + 1, high));
    }
  }
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

// dS^T = P^T o (dP^T - D) instead of P^T. The product is fp32: rounded factors would cost dQ and dK half their accuracy.
__device__ __forceinline__ void score_gradients(u32 (&P)[kBlockRows / 4], const float (&X)[kBlockRows / 2],
                                                const SoftcapSlopes& slopes) {
#pragma unroll
  for (int i = 0; i < kBlockRows / 4; ++i) {
    float low = low_of(P[i]) * X[2 * i];
    float high = high_of(P[i]) * X[2 * i + 1];
    if (kSoftcap) {
      low *= low_of_half(slopes.packed[i]);
      high *= high_of_half(slopes.packed[i]);
    }
    P[i] = pack(low, high);
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

// And from there to the workspace. `tile`: of dS.
__device__ __forceinline__ void store_global_ds(const BackwardParams& p, u32 from, int tile) {
  const u32 warp = warp_row() * 128;
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
    unsigned char* to = p.ds + (long long)(tile) * kTileBytes + consumer() * kPieceBytes + warp;
#pragma unroll
    for (int i = 0; i < kRowSteps; ++i)
      bulk_store(to + i * (kBlockKeys / kPieceKeys) * kPieceBytes, from + i * kPieceBytes + warp, 16 * 128);
  }
  tma_store_commit();
}

// Sums of a block between two waves, one thread's values 256 floats apart.
template <int count>
__device__ __forceinline__ void carry_in(float (&G)[count], const float* from) {
#pragma unroll
  for (int i = 0; i < count; ++i) G[i] = from[i * 128 * kConsumers];
}
template <int count>
__device__ __forceinline__ void carry_out(const float (&G)[count], float* to) {
#pragma unroll
  for (int i = 0; i < count; ++i) to[i * 128 * kConsumers] = G[i];
}

__device__ __forceinline__ void consume(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  KBuffer k(smem, 0);
  VBuffer v(smem, 0);
  QBuffers q(smem, 0);
  OBuffers o(smem, 0);
  u32 ds_stage = 0;
  int ds_stored = 0;
  const auto own_keys = [](u32 buffer) { return uniform_descriptor(buffer + consumer() * kBackwardPanelBytes, 0); };
  const auto along = [](u32 buffer) { return uniform_descriptor(buffer, 0); };
  const auto across = [](u32 buffer) { return uniform_descriptor(buffer, kBlockRows * 128); };

  for (;;) {
    k.wait_full();
    const KeyBlock block = load_shared_struct_uniform<KeyBlock>(smem + kKeysLayout.block);
    if (block.block < 0) break;
    const Lengths n = lengths_of(p, block.batch);
    const int key = block.block * kBlockKeys + 64 * consumer() + warp_row() + thread_row();
    const long long carry = ((long long)(block.batch) * (p.hq / p.group) + block.head) * p.key_blocks.blocks + block.block;
    float* const carry_dk = p.carry_dk + carry * (128 * kConsumers * kHeadDim / 2) + threadIdx.x - 128;
    float* const carry_dv = p.carry_dv + carry * (128 * kConsumers * kValueDim / 2) + threadIdx.x - 128;
    float dK[kHeadDim / 2];
    float dV[kValueDim / 2];
    if (block.state & kCarryIn) {
      carry_in(dK, carry_dk);
      carry_in(dV, carry_dv);
    } else {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dK[i] = 0;
#pragma unroll
      for (int i = 0; i < kValueDim / 2; ++i) dV[i] = 0;
    }

    if (block.state & kHasSteps) {
      const u32 k_operand = own_keys(k.address());
      const u32 v_operand = own_keys(v.address());
      float X[kBlockRows / 2];  // S^T and dP^T by turns

      // S^T = K Q^T of the first tile.
      q.wait_full();
      wgmma_fence();
      issue_scores<kHeadDim>(X, k_operand, along(q.address()), 0);
      v.wait_full();
      wgmma_wait<0>();
      register_fence(X);

      bool last;
      do {
        const Step step = load_shared_struct_uniform<Step>(smem + kKeysLayout.step + int(sizeof(Step)) * q.ring.stage());
        const SeenBy seen = seen_by(p, n, key, step.row);
        const bool masked = step.state & kMasked;
        last = step.state & kLastStep;

        // P^T = exp(S^T - LSE).
        u32 P[kBlockRows / 4];
        SoftcapSlopes slopes;
        probabilities(p, X, slopes, step, n, key, smem + kKeysLayout.shift + 4 * (kBlockRows * q.ring.stage() + thread_column()));
        if (masked) hide(X, seen);
#pragma unroll
        for (int i = 0; i < kBlockRows / 4; ++i) P[i] = pack(X[2 * i], X[2 * i + 1]);

        // dP^T - D = V dO^T - D and dV += P^T dO together.
        o.wait_full();
        start_from_delta(X, smem + kKeysLayout.delta + 4 * (kBlockRows * o.ring.stage() + thread_column()) + behind(P[kBlockRows / 4 - 1]));
        register_fence(X);
        register_fence(dV);
        wgmma_fence();
        issue_scores<kValueDim>(X, v_operand, along(o.address()), 1);
        issue_gradient<kValueDim>(dV, P, across(o.address()));
        wgmma_wait<0>();
        register_fence(X);
        register_fence(dV);
        o.release(leader);

        // dS^T = P^T o (dP^T - D).
        if (masked) hide(X, seen);
        score_gradients(P, X, slopes);
        const u32 ds = smem + kKeysLayout.ds + (ds_stage * kConsumers + consumer()) * kKeysLayout.ds_bytes;
        if (kSums) {
          if (ds_stored >= kDsStages) named_barrier_sync(ds_empty(ds_stage, consumer()), kDsEmptyThreads);
          if (threadIdx.x == 128) store_shared_struct(smem + kKeysLayout.ds_step + int(sizeof(Step)) * ds_stage, step);
        } else {
          tma_store_wait_read<kDsStages - 1>();
          __syncwarp();
        }
        store_shared_ds(ds, P);

        // S^T of the next tile, where there is one, and dK += dS^T Q of this one together.
        QBuffers next = q;
        if (!last) next.advance();
        next.wait_full();
        register_fence(dK);
        wgmma_fence();
        issue_scores<kHeadDim>(X, k_operand, along(next.address()), 0);
        issue_gradient<kHeadDim>(dK, P, across(q.address()));
        if (kSums) {
          fence_async_proxy();
          named_barrier_arrive(ds_full(ds_stage), kDsFullThreads);
          ds_stored = min(ds_stored + 1, int(kDsStages));
        } else {
          store_global_ds(p, ds, step.tile);
        }
        ds_stage = ds_stage + 1 == kDsStages ? 0 : ds_stage + 1;
        wgmma_wait<0>();
        register_fence(X);
        register_fence(dK);
        q.release(leader);
      } while (!last);
      v.release(leader);
    }
    k.release(leader);

    if (block.state & kCarryOut) {
      carry_out(dK, carry_dk);
      carry_out(dV, carry_dv);
    } else {
      Finite finite;
      const int rows = key_rows(p, block.batch) - key;
      unsigned short* dk = row_of(p.dk, block.batch, n.k_start + key, block.head);
      store_global_fragment<kHeadDim, kElements>(dk, p.dk.row, rows, p.d, dK, p.scale, p.scale, finite);
      unsigned short* dv = row_of(p.dv_grad, block.batch, n.k_start + key, block.head);
      store_global_fragment<kValueDim, kElements>(dv, p.dv_grad.row, rows, p.dv, dV, 1, 1, finite);
    }
  }
  tma_store_wait();
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kKeysThreads, 1)
    fulgur_backward_keys(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (threadIdx.x == 0) {
    KBuffer::init(smem, 1, kConsumers + kSums);
    VBuffer::init(smem, 1);
    QBuffers::init(smem, 2);
    OBuffers::init(smem, 2);
    mbarrier_init(smem + kKeysLayout.tail, 1);
    fence_mbarrier_init();
    tma_prefetch_map(&p.q_map);
    tma_prefetch_map(&p.k_map);
    tma_prefetch_map(&p.v_map);
    tma_prefetch_map(&p.dout_map);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_drop<kProducerRegisters>();
    if (threadIdx.x < 32) produce(p, smem);
  } else if (threadIdx.x < 128 * (kConsumers + 1)) {
    registers_raise<kConsumerRegisters>();
    consume(p, smem);
  } else {
    registers_drop<kSumsRegisters>();
    sum_queries(p, smem);
  }
}

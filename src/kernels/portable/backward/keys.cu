// Attention backward for every GPU since Turing, by mma.sync, ldmatrix and cp.async (FlashAttention-2, algorithm 2):
// dV = P^T dO, dK = scale dS^T Q and dQ += dS K, with P = exp(S - LSE) and dS = P o (dO V^T - D) computed again.
//
// A CTA has a key block of Bc keys, whose K and V stay in shared memory and whose dK and dV stay in registers. Its
// steps are the tiles of Br rows that see them, of which Q, dO and the statistics pass through shared memory. dQ is
// added to dq_accum in f32, which backward/round.cu rounds; with kOrderedDq in the order of the key blocks, by a
// semaphore of each row tile. With kSplits several CTAs share the q heads of a key block, and reduce.cu adds their dK
// and dV. With kWholeHeads a CTA has all key blocks of a kv head, one after another, as in FlashAttention (2022),
// algorithm 4. docs/kernels/portable.md derives the tiles. Above d 128 keys_wide.cu computes the same.
#include "portable/backward/keys.cuh"

enum : int { kOneBarrier = kStages == 3 };  // per step
static_assert(kRoles == 1 && kDsStages == 1 + kOneBarrier);

// P^T and dS^T of a warp in a step, from S^T in S, and dP^T - D in X (with dropout dP^T).
__device__ __forceinline__ void weights_of_step(const BackwardParams& p, u32 smem, const Keys& keys, const Part& part,
                                                const Steps& step, u32 statistics, float (&S)[kKeyTiles][kHalfRows / 2],
                                                float (&X)[kKeyTiles][kHalfRows / 2], Weights& P, Weights& dS) {
  const bool masked = step.is_masked(p, keys);
  const u32 deltas = statistics + 4 * (kBlockRows + part.half * kHalfRows + thread_column());
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) {
    TileWeights<kHalfRows> tile;
    weights_of_tile(p, smem, keys, part, step, masked, statistics, keys.first() + part.key + 16 * t, S[t], P[t], tile);
#pragma unroll
    for (int i = 0; i < kHalfRows / 2; ++i) {
      if (kDropout) {
        float delta[2];
        load_shared_pair(deltas + i / 4 * 32, delta[0], delta[1]);
        const u32 keeps = tile.kept.pair(i / 2) >> i % 2 * 16 & 1;
        X[t][i] = __fmaf_rn(keeps ? X[t][i] : 0, p.keep_scale, delta[i & 1]);
      }
      X[t][i] *= S[t][i];
      if (kHasScoreSlope) X[t][i] *= tile.slopes[i];
    }
    if (masked) hide_rows(X[t], tile.visible);
    pack_words<ElementDs>(X[t], dS[t]);
  }
}

extern __shared__ __align__(1024) unsigned char raw[];

// Computes dK and dV of a key block, and adds its terms to dQ.
__device__ __forceinline__ void compute_block(const BackwardParams& p, u32 smem, const Keys& keys) {
  if (keys.first() >= key_rows(p, keys.batch)) return;
  const Part part = part_of_warp();
  start_rows<ElementK, kBlockKeys, kHeadDim>(smem + kLayout.k, p.k, p.d, keys.batch, keys.n.k_start, keys.head,
                                             keys.first(), keys.n.sk);
  start_rows<ElementV, kBlockKeys, kValueDim>(smem + kLayout.v, p.v, p.dv, keys.batch, keys.n.k_start, keys.head,
                                              keys.first(), keys.n.sk);
  StepLoader<kOfBoth> loader(p, smem, keys);
  loader.start();
  if (kOneBarrier) {
    async_copy_wait<0>();
    __syncthreads();
    loader.start();
  }

  float dK[kKeyTiles][8 * units_of(kHeadDim)];
  float dV[kKeyTiles][8 * units_of(kValueDim)];
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 8 * units_of(kHeadDim); ++i) dK[t][i] = 0;
#pragma unroll
    for (int i = 0; i < 8 * units_of(kValueDim); ++i) dV[t][i] = 0;
  }

  const KeyOperands<kHeadDim> own_k = key_operands<kHeadDim>(part, smem + kLayout.k);
  const KeyOperands<kValueDim> own_v = key_operands<kValueDim>(part, smem + kLayout.v);
  int stage = 0;
  u32 weights = smem + kLayout.weights;
  int* added = nullptr;  // the semaphore of the previous step
#pragma unroll 1
  for (Steps step(p, keys); step.more(); step.advance()) {
    if (!kOneBarrier) {
      async_copy_wait<0>();
      __syncthreads();
      if (kStages > 1) loader.start();
    }
    int turn = 0, own_turn = 0;
    if (kOrderedDq && threadIdx.x < 32) own_turn = turn_of(p, keys, step);
    if (kOrderedDq && threadIdx.x == 0) turn = load_early(semaphore_of(p, keys, step));
    const u32 q = smem + kLayout.stages + stage * kLayout.stage_bytes;
    const u32 dout = q + kLayout.dout;
    const u32 statistics = smem + kLayout.statistics + stage * 8 * kBlockRows;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    Weights P;
    Weights dS;
    {
      float S[kKeyTiles][kHalfRows / 2] = {};
      float X[kKeyTiles][kHalfRows / 2];
      add_scores<ElementK, kHeadDim>(S, part, own_k, q);
      start_from_delta(X, part, statistics);
      add_scores<ElementV, kValueDim>(X, part, own_v, dout);
      weights_of_step(p, smem, keys, part, step, statistics, S, X, P, dS);
    }
    if (kKeyGradients) store_weights(P, part, weights);
    store_weights(dS, part, ds_of(weights));
    if (kOneBarrier) async_copy_wait<0>();
    if constexpr (kOrderedDq != 0) {
      // If it was the turn of this block already, earlier additions were complete then. Additions after the barrier are
      // performed in L2, as those were.
      if (threadIdx.x == 0)
        while ((turn & ~kFirstToAdd) != own_turn) turn = load_acquire(semaphore_of(p, keys, step));
    }
    __syncthreads();
    if constexpr (kOrderedDq != 0) {
      if (threadIdx.x == kReleases && added != nullptr) store_release(added, turn_after(p, keys));
      added = semaphore_of(p, keys, step);
    }
    if (kOneBarrier) loader.start();
    if (kKeyGradients) add_gradient<ElementO, kValueDim>(dV, part, P, weights, dout);
    if (kComputesDq)
      add_dq(p, part, step.statistics(p, keys), adds_first(p, keys, step), ds_of(weights), smem + kLayout.k);
    if (kKeyGradients) add_gradient<ElementQ, kHeadDim>(dK, part, dS, ds_of(weights), q);
    if (kOneBarrier) {
      weights = weights == smem + kLayout.weights ? smem + kLayout.weights + kLayout.weights_bytes
                                                  : smem + kLayout.weights;
    }
    if (kStages == 1) {
      __syncthreads();
      loader.start();
    }
  }
  if constexpr (kOrderedDq != 0) {
    __syncthreads();
    if (threadIdx.x == kReleases && added != nullptr) store_release(added, turn_after(p, keys));
  }
  if (!kKeyGradients) return;
  if constexpr (kSplits != 0) {
    store_partial<kHeadDim>(p, keys, part, dK, p.partial_dk);
    store_partial<kValueDim>(p, keys, part, dV, p.partial_dv);
  } else {
    store_gradients<ElementDk, kHeadDim>(p, keys, part, dK, p.dk, p.d, p.scale);
    store_gradients<ElementDv, kValueDim>(p, keys, part, dV, p.dv_grad, p.dv, p.dv_scale);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fulgur_portable_backward(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (kDropout && threadIdx.x == 0) store_dropout_key(p, smem + kLayout.dropout_key);
  if constexpr (kWholeHeads != 0) {
    const int heads = p.hq / p.group;
    Keys keys = {0, int(blockIdx.x) % heads, int(blockIdx.x) / heads};
    keys.n = lengths_of(p, keys.batch);
#pragma unroll 1
    for (; keys.block < p.key_blocks.blocks; ++keys.block) {
      compute_block(p, smem, keys);
      async_copy_wait<0>();  // K and V of a block that no row sees may still be in flight
      __syncthreads();
    }
  } else {
    compute_block(p, smem, keys_of_cta(p, smem));
  }
}

// The backward pass of keys.cu for d or dv above 128, where registers can hold dK and dV of 64 keys. Half of the warps
// compute P and dV, the other half dS and dK (two roles), so that a warp has 32 keys in each product, and the products
// of one role overlap with the exponentials of the other. Each role copies the operands of its first product, and only
// its own warps synchronize at the beginning of a step. P passes from one role to the other through shared memory.
#include "portable/backward/keys.cuh"

enum : int {
  // Factors of dS pass to the other role as f16, which has more bits than bf16 and enough range for 2^p_log2 P.
  kHalfFactors = ElementP::kType == kBF16 && !kScoreModSlope,
  // The factors are not P: with kHalfFactors, with derivatives of scores, and with dropout. They are stored in the
  // buffer of dS.
  kPassesFactors = kHalfFactors || kHasScoreSlope || kDropout,
  // All warps synchronize at the beginning of a step, because its buffers may be in use until then.
  kMeetsFirst = kStages == 1 || (kPassesFactors && kDsStages == 1),
};
static_assert(kRoles == 2);

// Named barriers: of all threads, before P and dS are read, and of the threads of a role.
enum : int { kAllMeet, kDsThere, kRoleMeets };
template <Role role>
__device__ __forceinline__ void role_meets() {
  named_barrier_sync(kRoleMeets + role, kRoleThreads);
}

// P^T of a warp in a step, from S^T in S, which becomes the factors of dS: P before dropout times the derivatives of
// scores.
__device__ __forceinline__ void weights_of_step(const BackwardParams& p, u32 smem, const Keys& keys, const Part& part,
                                                const Steps& step, u32 statistics, float (&S)[kKeyTiles][kHalfRows / 2],
                                                Weights& P) {
  const bool masked = step.is_masked(p, keys);
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) {
    TileWeights<kHalfRows> tile;
    weights_of_tile(p, smem, keys, part, step, masked, statistics, keys.first() + part.key + 16 * t, S[t], P[t], tile);
    if (kHasScoreSlope) {
#pragma unroll
      for (int i = 0; i < kHalfRows / 2; ++i) S[t][i] *= tile.slopes[i];
    }
  }
}

// dS^T of a warp in a step, from its factors in S, and dP^T - D in X (with dropout dP^T). Entries with P = 0 count as
// dropped.
__device__ __forceinline__ void gradients_of_step(const BackwardParams& p, const Keys& keys, const Part& part,
                                                  const Steps& step, u32 statistics,
                                                  const float (&S)[kKeyTiles][kHalfRows / 2], const Weights& P,
                                                  float (&X)[kKeyTiles][kHalfRows / 2], Weights& dS) {
  const int row = step.row() + part.half * kHalfRows;
  const bool masked = step.is_masked(p, keys);
  statistics += 4 * (kBlockRows + part.half * kHalfRows + thread_column());
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
    for (int i = 0; i < kHalfRows / 2; ++i) {
      if (kDropout) {
        float delta[2];
        load_shared_pair(statistics + i / 4 * 32, delta[0], delta[1]);
        const bool keeps = ElementP::kBytes == 4 ? P[t][accumulator_of_word(i)] != 0
                                                 : P[t][i / 2] & (i % 2 ? 0xffff0000 : 0xffff);
        X[t][i] = __fmaf_rn(keeps ? X[t][i] : 0, p.keep_scale, delta[i & 1]);
      }
      X[t][i] *= S[t][i];
    }
    if (masked) {
      const int key = keys.first() + part.key + 16 * t + int(thread_row());
      hide_rows(X[t], visible_rows<kHalfRows>(p, keys.n, key, row));
    }
    pack_words<ElementDs>(X[t], dS[t]);
  }
}

// The type of factors of dS that pass from one role to the other.
using ElementFactor = ElementType<kHalfFactors ? kF16 : ElementP::kType>;

__device__ __forceinline__ void store_factors(const float (&S)[kKeyTiles][kHalfRows / 2], const Part& part, u32 to) {
  Weights packed;
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) pack_words<ElementFactor>(S[t], packed[t]);
  store_weights(packed, part, to);
}
__device__ __forceinline__ void load_factors(float (&S)[kKeyTiles][kHalfRows / 2], const Part& part, u32 from) {
  Weights packed;
  load_weights(packed, part, from);
#pragma unroll
  for (int t = 0; t < kKeyTiles; ++t) unpack_words<ElementFactor>(packed[t], S[t]);
}

extern __shared__ __align__(1024) unsigned char raw[];

// Computes the part of a role in a key block: dV or dK, and a part of dQ.
template <Role role>
__device__ __forceinline__ void compute_block(const BackwardParams& p, u32 smem, const Keys& keys) {
  constexpr bool kP = role == kOfValues, kDs = role == kOfKeys;
  if (keys.first() >= key_rows(p, keys.batch)) return;
  const Part part = part_of_warp();
  if constexpr (kP) {
    start_rows<ElementK, kBlockKeys, kHeadDim>(smem + kLayout.k, p.k, p.d, keys.batch, keys.n.k_start, keys.head,
                                               keys.first(), keys.n.sk);
  }
  if constexpr (kDs) {
    start_rows<ElementV, kBlockKeys, kValueDim>(smem + kLayout.v, p.v, p.dv, keys.batch, keys.n.k_start, keys.head,
                                                keys.first(), keys.n.sk);
  }
  StepLoader<role> loader(p, smem, keys);
  loader.start();
#pragma unroll
  for (int stage = 2; stage < kStages; ++stage) loader.start();

  float dK[kDs ? kKeyTiles : 1][8 * units_of(kHeadDim)] = {};
  float dV[kP ? kKeyTiles : 1][8 * units_of(kValueDim)] = {};
  KeyOperands<kHeadDim> own_k;
  KeyOperands<kValueDim> own_v;
  if constexpr (kP) own_k = key_operands<kHeadDim>(part, smem + kLayout.k);
  if constexpr (kDs) own_v = key_operands<kValueDim>(part, smem + kLayout.v);
  int stage = 0;
  u32 weights = smem + kLayout.weights;
  int* added = nullptr;  // the semaphore of the previous step
#pragma unroll 1
  for (Steps step(p, keys); step.more(); step.advance()) {
    async_copy_wait<max_of(kStages - 2, 0)>();
    if (kMeetsFirst) named_barrier_sync(kAllMeet, kThreads);
    else role_meets<role>();
    int turn = 0, own_turn = 0;
    if (kOrderedDq && threadIdx.x < 32) own_turn = turn_of(p, keys, step);
    if (kOrderedDq && threadIdx.x == 0) turn = load_early(semaphore_of(p, keys, step));
    const u32 q = smem + kLayout.stages + stage * kLayout.stage_bytes;
    const u32 dout = q + kLayout.dout;
    const u32 statistics = smem + kLayout.statistics + stage * 8 * kBlockRows;
    stage = stage + 1 == kStages ? 0 : stage + 1;
    Weights P;
    Weights dS;
    float S[kKeyTiles][kHalfRows / 2] = {};
    float X[kKeyTiles][kHalfRows / 2];
    if constexpr (kP) {
      add_scores<ElementK, kHeadDim>(S, part, own_k, q);
      weights_of_step(p, smem, keys, part, step, statistics, S, P);
      store_weights(P, part, weights);
      if (kPassesFactors) store_factors(S, part, ds_of(weights));
    }
    if constexpr (kDs) {
      start_from_delta(X, part, statistics);
      add_scores<ElementV, kValueDim>(X, part, own_v, dout);
    }
    if constexpr (kOrderedDq != 0) {
      // If it was the turn of this block already, earlier additions were complete then. Additions after the barrier are
      // performed in L2, as those were.
      if (threadIdx.x == 0)
        while ((turn & ~kFirstToAdd) != own_turn) turn = load_acquire(semaphore_of(p, keys, step));
    }
    named_barrier_sync(kAllMeet, kThreads);  // P is stored, and the buffers of the previous step are free
    if constexpr (kOrderedDq != 0) {
      if (threadIdx.x == kReleases && added != nullptr) store_release(added, turn_after(p, keys));
      added = semaphore_of(p, keys, step);
    }
    if (kStages > 1) loader.start();
    if constexpr (kP && kKeyGradients) add_gradient<ElementO, kValueDim>(dV, part, P, weights, dout);
    if constexpr (kP) named_barrier_sync(kDsThere, kThreads);
    if constexpr (kDs) {
      if (kDropout) load_weights(P, part, weights);
      load_factors(S, part, kPassesFactors ? ds_of(weights) : weights);
      gradients_of_step(p, keys, part, step, statistics, S, P, X, dS);
      store_weights(dS, part, ds_of(weights));
      named_barrier_arrive(kDsThere, kThreads);
      role_meets<role>();
    }
    if constexpr (kDs && kKeyGradients && kDkFirst) add_gradient<ElementQ, kHeadDim>(dK, part, dS, ds_of(weights), q);
    if constexpr (kComputesDq)
      add_dq(p, part, step.statistics(p, keys), adds_first(p, keys, step), ds_of(weights), smem + kLayout.k);
    if constexpr (kDs && kKeyGradients && !kDkFirst) add_gradient<ElementQ, kHeadDim>(dK, part, dS, ds_of(weights), q);
    if (kDsStages == 2) {
      weights = weights == smem + kLayout.weights ? smem + kLayout.weights + kLayout.weights_bytes
                                                  : smem + kLayout.weights;
    }
    if (kStages == 1) {
      named_barrier_sync(kAllMeet, kThreads);
      loader.start();
    }
  }
  if constexpr (kOrderedDq != 0) {
    named_barrier_sync(kAllMeet, kThreads);
    if (threadIdx.x == kReleases && added != nullptr) store_release(added, turn_after(p, keys));
  }
  if (!kKeyGradients) return;
  if constexpr (kDs && kSplits) store_partial<kHeadDim>(p, keys, part, dK, p.partial_dk);
  if constexpr (kP && kSplits) store_partial<kValueDim>(p, keys, part, dV, p.partial_dv);
  if constexpr (kDs && !kSplits)
    store_gradients<ElementDk, kHeadDim>(p, keys, part, dK, p.dk, p.d, p.scale);
  if constexpr (kP && !kSplits)
    store_gradients<ElementDv, kValueDim>(p, keys, part, dV, p.dv_grad, p.dv, p.dv_scale);
}

// Computes the key block of this CTA, or all key blocks of its kv head.
template <Role role>
__device__ __forceinline__ void compute_blocks(const BackwardParams& p, u32 smem, Keys keys) {
  if constexpr (kWholeHeads != 0) {
#pragma unroll 1
    for (; keys.block < p.key_blocks.blocks; ++keys.block) {
      compute_block<role>(p, smem, keys);
      async_copy_wait<0>();  // K and V of a block that no row sees may still be in flight
      named_barrier_sync(kAllMeet, kThreads);
    }
  } else {
    compute_block<role>(p, smem, keys);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fulgur_portable_backward(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (kDropout && threadIdx.x == 0) store_dropout_key(p, smem + kLayout.dropout_key);
  Keys keys;
  if constexpr (kWholeHeads != 0) {
    const int heads = p.hq / p.group;
    keys = {0, int(blockIdx.x) % heads, int(blockIdx.x) / heads};
    keys.n = lengths_of(p, keys.batch);
  } else {
    keys = keys_of_cta(p, smem);
  }
  if (threadIdx.x < kRoleThreads) {
    compute_blocks<kOfValues>(p, smem, keys);
  } else {
    compute_blocks<kOfKeys>(p, smem, keys);
  }
}

// The Hopper backward kernel by keys: dV = P^T dO, dK = scale dS^T Q, and dS, with P = exp(S - LSE) and
// dS = P o (dO V^T - D) recomputed from the inputs (FlashAttention-2, algorithm 2, without its line for dQ).
//
// A CTA computes key blocks of Bc = 64 * kConsumers keys. It keeps their K and V in shared memory and iterates over the
// tiles of Br rows that see them. One producer warp loads Q and dO into rings by TMA. Each consumer warpgroup owns 64
// keys and holds S^T and dP^T, so that P^T and dS^T are the left operands of dV and dK directly from registers. dS goes
// to a warpgroup that adds dQ to dq_accum in global memory (dq_accum.cuh), or to the workspace, from which rows.cu
// computes dQ. A call for dQ alone has no products for dK and dV, a call for these alone no dS in memory.
// docs/kernels/backward.md derives the schedule.
#include "sm90/backward/keys.cuh"
#include "sm90/backward/dq_accum.cuh"
#include "backward/repair.cuh"
#include "backward/round.cuh"

// Two choices that are faster if dQ is accumulated, except in order for head dims above 96, and if some gradients are
// not requested. Arithmetic on scores overlaps with the second of two products, unless the derivative of softcap needs
// the registers. And K and V are kept in registers as far as gradients, scores, P and a margin for the compiler leave
// some; 16 dims need four registers. Steps in registers come last in a sum over dims. If some gradients are not
// requested, an operand is in registers as a whole or not at all, so that the others have the bits of a call for all
// gradients.
enum : int {
  kLeavesOut = !kComputesDq || !kKeyGradients,
  kScoresAhead = !kKeyGradients,  // the second product is S^T of the next step
  kOverlaps = kLeavesOut || (kAccumulatesDq && !(kOrderedDq && max_of(kHeadDim, kValueDim) > 96)),
  kProductsInFlight = kOverlaps && !kHasScoreSlope,  // products that run during arithmetic on scores
  // Selections by bits of a mask follow the exponentials, if words leave enough registers for operands. Up to 64 dims
  // they are interleaved with the exponentials, as steps of 128 rows leave no registers otherwise.
  kHidesAfter = kMaskBits && max_of(kHeadDim, kValueDim) > 64,
  kMaskRegisters = kBiasTile == 1 + kBool ? 16 : kMaskBits && !kHidesAfter ? 8 : 0,
  // The operand of products that add a bias; of 128 dims the margin has room for it.
  kBiasRegisters = kBiasByProducts && max_of(kHeadDim, kValueDim) < 128 ? 4 : 0,
  kHeldRegisters = (kKeyGradients ? kHeadDim / 2 + kValueDim / 2 : kBlockRows / 2) + kBlockRows / 2 +
                   kBlockRows / 4 * (1 + kHasScoreSlope + kDropout) + kMaskRegisters + kBiasRegisters,
  kFrontSteps = kOverlaps ? max_of(kConsumerRegisters - kHeldRegisters - 28, 0) / 4 : 0,
  kStepsOfK = kHeadDim / ElementK::kStep,
  kStepsOfV = kValueDim / ElementV::kStep,
  kFrontOfK = kLeavesOut && kFrontSteps < kStepsOfK ? 0 : min_of(kFrontSteps, kStepsOfK),
  kFrontOfV = kLeavesOut && kFrontSteps - kFrontOfK < kStepsOfV ? 0 : min_of(kFrontSteps - kFrontOfK, kStepsOfV),
};

// The producer's side.
struct KeysLoader : StepLoader {
  using StepLoader::StepLoader;

  // Loads K of a block, and V if K has one stage. For the end of all work, and for a block without steps, nothing is
  // loaded.
  __device__ __forceinline__ void load_keys(const KeyBlock& block, const Lengths& n) {
    if (block.state & kHasSteps) prefetch_keys(block, n);
    announce(block);
    if (block.block < 0 || !(block.state & kHasSteps)) {
      if (elect_one()) mbarrier_arrive(k.full());
      k.advance();
      return;
    }
    load_keys_into<ElementK, kKPanels>(k, &p.k_map, block, n);
    k.advance();
    if (kKStages == 1) load_values(block, n);
  }

  // Loads V of a block. If K has two stages, V is free later than K, and so is loaded after the first tile of Q.
  __device__ __forceinline__ void load_values(const KeyBlock& block, const Lengths& n) {
    v.wait_empty();
    load_keys_into<ElementV, kVPanels>(v, &p.v_map, block, n);
    v.advance();
  }
};

// The derivative of each score of a step; unused if all are 1. That of softcap is at most 1; that of a user's score_mod
// may be any number, and is rounded as P is.
using ElementSlope = ElementType<kScoreModSlope ? ElementP::kType : kF16>;
struct ScoreSlopes {
  u32 packed[kHasScoreSlope ? kBlockRows / 4 : 1];
};

// dS^T = P^T o (dP^T - D) in X. The product is f32: with rounded factors dQ and dK would lose half of their accuracy.
__device__ __forceinline__ void score_gradients(float (&X)[kBlockRows / 2], const u32 (&P)[kBlockRows / 4],
                                                const ScoreSlopes& slopes) {
#pragma unroll
  for (int i = 0; i < kBlockRows / 4; ++i) {
    X[2 * i] *= ElementP::low(P[i]);
    X[2 * i + 1] *= ElementP::high(P[i]);
    if (kHasScoreSlope) {
      X[2 * i] *= ElementSlope::low(slopes.packed[i]);
      X[2 * i + 1] *= ElementSlope::high(slopes.packed[i]);
    }
  }
}

// Rounds P^T or dS^T to the operand of a gradient.
template <class Type>
__device__ __forceinline__ void pack_scores(const float (&X)[kBlockRows / 2], u32 (&P)[kBlockRows / 4]) {
#pragma unroll
  for (int i = 0; i < kBlockRows / 4; ++i) P[i] = Type::pack(X[2 * i], X[2 * i + 1]);
}

// The ring of dS in shared memory, as a warpgroup that owns keys sees it: it fills stages for the warpgroup that
// computes dQ, or stores them to the workspace.
struct DsBuffers {
  u32 smem;
  u32 stage = 0;
  u32 filled = 0;  // up to kDsStages

  __device__ __forceinline__ explicit DsBuffers(u32 smem) : smem(smem) {}
  __device__ __forceinline__ u32 address() const {
    return smem + kKeysLayout.ds + (stage * kConsumers + consumer()) * kKeysLayout.ds_bytes;
  }
  __device__ __forceinline__ void wait_empty() const {
    if (kAccumulatesDq) {
      if (filled == kDsStages) named_barrier_sync(ds_empty(stage, consumer()), kDsEmptyThreads);
    } else if constexpr (kStoresDs != 0) {
      tma_store_wait_read<kDsStages - 1>();
      __syncwarp();
    }
  }
  __device__ __forceinline__ void commit(const BackwardParams& p, const Step& step) {
    if (kAccumulatesDq) {
      if (threadIdx.x == 128) store_shared_struct(smem + kKeysLayout.ds_step + int(sizeof(Step)) * stage, step);
      fence_async_proxy();
      named_barrier_arrive(ds_full(stage), kDsFullThreads);
      filled = min(filled + 1, u32(kDsStages));
    } else if (kStoresDs) {
      store_global_ds(p, address(), consumer(), step.tile);
    }
    stage = stage + 1 == kDsStages ? 0 : stage + 1;
  }
};

// K and V of the warpgroup's 64 keys as left operands.
struct OwnKeys {
  KeyOperand<ElementK, kHeadDim, kFrontOfK> K;
  KeyOperand<ElementV, kValueDim, kFrontOfV> V;

  __device__ __forceinline__ void load_k(u32 buffer) { K.load(buffer + consumer() * kBackwardPanelBytes); }
  __device__ __forceinline__ void load_v(u32 buffer) { V.load(buffer + consumer() * kBackwardPanelBytes); }
};
// The descriptor of a tile of Q or dO as the right operand of a product over dims.
__device__ __forceinline__ u32 along(u32 buffer) { return uniform_descriptor(buffer, 0); }

// The words of a bool mask for the scores of a step, kMaskBits.
struct StepMask {
  bool hides = false;  // whether it hides any score
  u32 words[max_of(kMaskWords, 1)];

  // Loads the words at a place of MaskPlaces.
  template <class Params>
  __device__ __forceinline__ void load(const Params& p, int place) {
    if constexpr (kMaskBits) {
      hides = place >= 0;
      if (!hides) return;
      const MaskBits& bits = p.expression.bits;
      const u32* const at = bits.words + place + consumer() * bits.strip + threadIdx.x % kMaskThreads;
#pragma unroll
      for (int i = 0; i < kMaskWords; ++i) words[i] = load_mask_word(at + (kBiasRows ? i * kMaskThreads : 0));
    }
  }
};

// S^T begins with the bias of the step whose Q this is, kBiasByProducts.
__device__ __forceinline__ void begin_scores(const BiasUnit& unit, const QBuffers& q, float (&X)[kBlockRows / 2]) {
  if constexpr (kBiasByProducts) {
#pragma unroll
    for (int j = 0; j < kBlockRows / 8; j += 2) {
      u32 words[4];
      load_bias_words_of_keys<kBlockRows>(q.address() + kKeysLayout.bias, 64 * consumer(), j, words);
      begin_with_bias<true>(X + 4 * j, words, unit);
    }
    register_fence(X);
  }
}

// S^T = K Q^T of a block's first step. `meanwhile` runs during the product.
template <class Meanwhile>
__device__ __forceinline__ void first_scores(const BackwardParams& p, const KBuffer& k, const QBuffers& q,
                                             const BiasUnit& unit, OwnKeys& own, float (&X)[kBlockRows / 2],
                                             StepMask& mask, const Meanwhile& meanwhile) {
  own.load_k(k.address());
  q.wait_full();
  if (kMaskBits) mask.load(p, load_shared(mask_places_of(q)));
  begin_scores(unit, q, X);
  wgmma_fence();
  own.K.issue_scores(X, along(q.address()), kBiasByProducts);
  meanwhile();
  wgmma_wait<0>();
  register_fence(X);
}

// Begins the next key block, if there is one. If K has two stages, its first scores are computed while `meanwhile`
// runs.
template <class Meanwhile>
__device__ __forceinline__ KeyBlock next_block(const BackwardParams& p, const KBuffer& k, const QBuffers& q,
                                               const BiasUnit& unit, OwnKeys& own, float (&X)[kBlockRows / 2],
                                               StepMask& mask, const Meanwhile& meanwhile) {
  if (kKStages == 1) meanwhile();
  k.wait_full();
  const KeyBlock block = load_block(k);
  if (kKStages > 1) {
    if (block.block >= 0 && block.state & kHasSteps) first_scores(p, k, q, unit, own, X, mask, meanwhile);
    else meanwhile();
  }
  return block;
}

// Repairs dK and dV of the warp's 16 keys where they are not finite.
__device__ __forceinline__ void repair_own_keys(const BackwardParams& p, bool finite) {
  if (__all_sync(0xffffffff, finite)) return;
  __syncwarp();
  const KeyBlock block = key_block_of(p, blockIdx.x);
  const int key = block.block * kBlockKeys + 64 * consumer() + warp_row();
  for (int i = 0; i < 16; ++i) repair_key(p, block.batch, block.head, key + i);
}

// Rounds dQ of all rows that this CTA has completed, 64 rows by each warpgroup that owns keys, and repairs them, 16
// rows by the warp that has stored them.
__device__ __forceinline__ void round_complete_rows(const BackwardParams& p, u32 smem) {
  const KeyBlock block = key_block_of(p, blockIdx.x);
  const Lengths n = lengths_of(p, block.batch);
  const int head = query_head(p, block);
  const long long at = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, block.batch, p.sq);
  named_barrier_sync(dq_added(), kDqAddedThreads);
  u32 complete = 0;
  int stays[max_of(kDqStages, 1)];
#pragma unroll
  for (int stage = 0; stage < kDqStages; ++stage) {
    complete |= load_shared(smem + kKeysLayout.complete + 4 * stage);
    stays[stage] = kKeepsDq ? load_shared(dq_tile_of_buffer(smem, stage)) : -1;
  }
  int turn = 0;
#pragma unroll 1
  for (int first = 0; first < n.sq; first += 64) {
    if ((complete >> (at + first) / 64 % 32 & 1) == 0) continue;
    if (turn++ % kConsumers != int(consumer())) continue;
    u32 own[kDqPanels] = {};  // tiles of these rows in shared memory
#pragma unroll
    for (int stage = 0; stage < kDqStages; ++stage)
#pragma unroll
      for (int panel = 0; panel < kDqPanels; ++panel)
        if (kKeepsDq && stays[stage] == (at + first) / 64 * kDqPanels + panel) own[panel] = dq_buffer(smem, stage);
    const auto add_own = [&](int panel, int eights, float(&dQ)[32]) {
      if (own[panel] == 0) return;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        if (j >= eights) break;
        u32 x[4];
        load_shared16(own[panel] + ((threadIdx.x % 128 / 32 * eights + j) * 32 + threadIdx.x % 32) * 16, x);
#pragma unroll
        for (int e = 0; e < 4; ++e) dQ[4 * j + e] += __uint_as_float(x[e]);
      }
    };
    const GradientFinite<ElementQ> finite = round_rows<kDqPanels>(p, n, block.batch, head, at, first, 0, add_own);
    if constexpr (kRepairs) {
      if (__all_sync(0xffffffff, finite.trace == 0)) continue;
      __syncwarp();
      for (int i = 0; i < 16; ++i) repair_query(p, block.batch, head, first + int(warp_row()) + i);
    }
  }
}

__device__ __forceinline__ void consume(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  KBuffer k(smem, 0);
  VBuffer v(smem, 0);
  QBuffers q(smem, 0);
  OBuffers o(smem, 0);
  DsBuffers ds(smem);
  const BiasUnit unit = bias_unit(p.bias_factor);
  const auto across = [](u32 buffer) { return uniform_descriptor(buffer, kBlockRows * 128); };

  OwnKeys own;
  float X[kBlockRows / 2];  // S^T, then dP^T
  float next_scores[kBlockRows / 2];  // kScoresAhead
  StepMask mask;
  bool finite = true;       // dK and dV of the thread, kRoundsDq
  for (KeyBlock block = next_block(p, k, q, unit, own, X, mask, [] {}); block.block >= 0;) {
    const Lengths n = lengths_of(p, block.batch);
    const int key = block.block * kBlockKeys + 64 * consumer() + warp_row() + thread_row();
    float dK[kHeadDim / 2];
    float dV[kValueDim / 2];
    if (kCuts && block.state & kLoadsPartial) wait_for_first_parts(p);
    begin_gradient<kHeadDim>(p, dK, block, consumer(), p.partial_dk);
    begin_gradient<kValueDim>(p, dV, block, consumer(), p.partial_dv);
    Kept<kBlockRows> kept;
    const auto decide_dropout = [&](const Step& of) {  // during the products
      if (kDropout) kept = kept_of_step(p, k, of, 64 * consumer() + warp_row());
    };

    if (block.state & kHasSteps) {
      if (kKStages == 1) first_scores(p, k, q, unit, own, X, mask, [] {});
      v.wait_full();
      own.load_v(v.address());

      Step step = load_shared_struct_uniform<Step>(step_of(q));
      ScoreSlopes slopes;
      // The mask of the step after that of `of`: words are loaded a step ahead.
      const auto next_mask = [&](const QBuffers& of) {
        StepMask next = mask;
        if (kMaskBits) next.load(p, load_shared(mask_places_of(of) + 4));
        return next;
      };
      const auto wait_for_scores = [&] {
        if constexpr (kScoresAhead != 0) {
          wgmma_wait<0>();
          register_fence(next_scores);
#pragma unroll
          for (int i = 0; i < kBlockRows / 2; ++i) X[i] = next_scores[i];
        } else {
          wgmma_wait<kProductsInFlight>();
          register_fence(X);
        }
      };
      // P^T = exp(S^T - LSE) in X. `in_flight`: the product that computes S^T may still run.
      const auto exponentiate = [&](const StepMask& next, bool in_flight) {
        const Exponents exponents = exponents_of(p, step, n, block.batch, key, q);
        const auto exponentials = [&](bool hides) {
          if (in_flight) wait_for_scores();
          float bias[8] = {};
#pragma unroll
          for (int j = 0; j < kBlockRows / 8; ++j) {
            float slope[4];
            if constexpr (kBiasTile != 0 && !kBiasByProducts)
              load_bias_of_keys<kBlockRows>(q.address() + kKeysLayout.bias, 64 * consumer(), j, bias);
            probabilities(p, X, j, exponents, bias + j % 2 * 4, slope);
            if (kHasScoreSlope) slopes.packed[2 * j] = ElementSlope::pack(slope[0], slope[1]);
            if (kHasScoreSlope) slopes.packed[2 * j + 1] = ElementSlope::pack(slope[2], slope[3]);
          }
          if (hides) hide_by_bits(X, mask.words, 0);
          if constexpr (kMapsTiles && !kMaskBits)
            if (step.state & kModHides) hide_by_mask_mod(p, X, exponents);
        };
        // The compiler interleaves selections with exponentials only if no branch lies between them, nor after the
        // wait.
        if (!kHidesAfter && mask.hides) exponentials(true);
        else exponentials(false);
        if (kHidesAfter && mask.hides) hide_by_bits(X, mask.words, 0);
        if (step.state & kMasked) hide_rows(X, visible_rows<kBlockRows>(p, n, key, step.row));
        mask = next;
      };
      u32 P[kBlockRows / 4];  // P^T, then dS^T
      decide_dropout(step);
      exponentiate(next_mask(q), false);
      pack_scores<ElementP>(X, P);
      for (;;) {
        // dP^T - D = V dO^T - D, then dV += P^T dO. dV has no terms of dropped entries, but their dS has -D.
        o.wait_full();
        const u32 delta = delta_of(o) + 4 * thread_column() + zero_after(P[kBlockRows / 4 - 1]);
        if (!kDropout) start_from_delta(X, delta);
        u32 Z[kBlockRows / 4];  // P^T without dropped entries
#pragma unroll
        for (int i = 0; kDropout && i < kBlockRows / 4; ++i) {
          Z[i] = P[i] & kept.pair(i);
          P[i] = mark_dropped(P[i], kept.pair(i));
        }
        register_fence(X);
        register_fence(dV);
        wgmma_fence();
        own.V.issue_scores(X, along(o.address()), !kDropout);
        if constexpr (kScoresAhead != 0) {
          if (step.state & kLastStep) {
            wgmma_wait<0>();
          } else {
            QBuffers next = q;
            next.advance();
            next.wait_full();
            register_fence(next_scores);
            wgmma_fence();
            own.K.issue_scores(next_scores, along(next.address()), 0);
            wgmma_wait<1>();
          }
        } else {
          issue_gradient<ElementO, kValueDim>(dV, kDropout ? Z : P, across(o.address()));
          wgmma_wait<kProductsInFlight>();
        }
        register_fence(X);

        // dS^T = P^T o (dP^T - D), during the product of dV.
        if (kDropout) drop_gradients(p, X, P, delta);
        score_gradients(X, P, slopes);
        if (step.state & kMasked) hide_rows(X, visible_rows<kBlockRows>(p, n, key, step.row));
        if constexpr (!kScoresAhead) {
          wgmma_wait<0>();
          register_fence(dV);
        }
        if (kDropout) o.release_loaded(leader);
        else o.release(leader);
        pack_scores<ElementDs>(X, P);
        ds.wait_empty();
        if (kComputesDq) store_shared_ds(ds.address(), P);

        // S^T = K Q^T of the next step, then dK += dS^T Q.
        if (step.state & kLastStep) {
          v.release(leader);
          if constexpr (kKeyGradients != 0) {
            register_fence(dK);
            wgmma_fence();
            issue_gradient<ElementQ, kHeadDim>(dK, P, across(q.address()));
          }
          ds.commit(p, step);
          block = load_block(k);  // loaded again, instead of being kept in registers
          finite &=
              end_gradient<ElementDv, kValueDim>(p, dV, block, consumer(), p.partial_dv, p.dv_grad, p.dv, p.dv_scale);
          wgmma_wait<0>();
          register_fence(dK);
          if (kBiasTile) q.release_loaded(leader);
          else q.release(leader);
          break;
        }
        QBuffers next = q;
        next.advance();
        if constexpr (!kScoresAhead) {
          next.wait_full();
          begin_scores(unit, next, X);
          register_fence(dK);
          wgmma_fence();
          own.K.issue_scores(X, along(next.address()), kBiasByProducts);
          issue_gradient<ElementQ, kHeadDim>(dK, P, across(q.address()));
        }
        ds.commit(p, step);
        step = load_shared_struct_uniform<Step>(step_of(next));
        const StepMask mask_ahead = next_mask(next);
        decide_dropout(step);

        // P^T of the next step, during the product of dK.
        const u32 read = q.empty();
        q = next;
        exponentiate(mask_ahead, true);
        wgmma_wait<0>();
        register_fence(dK);
        if (kBiasTile) fence_async_proxy();
        if (kBiasTile) __syncwarp();
        mbarrier_arrive_if(read, leader);
        pack_scores<ElementP>(X, P);
      }
    } else {
      end_gradient<ElementDv, kValueDim>(p, dV, block, consumer(), p.partial_dv, p.dv_grad, p.dv, p.dv_scale);
    }
    k.release(leader);

    block = next_block(p, k, q, unit, own, X, mask, [&, block] {
      finite &= end_gradient<ElementDk, kHeadDim>(p, dK, block, consumer(), p.partial_dk, p.dk, p.d, p.scale);
      if (kCuts && block.state & kFirstPart) arrive_first_part(p);
    });
  }
  if constexpr (kRoundsDq != 0) {
    if constexpr (kRepairs) repair_own_keys(p, finite);
    round_complete_rows(p, smem);
  }
  tma_store_wait();
  let_next_kernel_start();  // not earlier, or its CTAs would all run on the SMs that are idle already
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kKeysThreads, 1)
    fulgur_backward_keys(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (threadIdx.x == 0) {
    KBuffer::init(smem, 1, 4 * (kConsumers + kAccumulatesDq));
    VBuffer::init(smem, 1, 4 * kConsumers);
    QBuffers::init(smem, 2, 4 * kConsumers);
    OBuffers::init(smem, 2, 4 * kConsumers);
    set_up(p, smem);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_drop<kProducerRegisters>();
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) produce<KeysLoader>(p, smem);
    if constexpr (kAccumulatesDq != 0)
      if (warp > 0 && warp <= kDqStages) accumulate_dq(p, smem, warp - 1);
  } else if (threadIdx.x < kThreads) {
    registers_raise<kConsumerRegisters>();
    consume(p, smem);
  } else if constexpr (kAccumulatesDq != 0) {
    registers_drop<kDqRegisters>();
    compute_dq(p, smem);
  }
}

// The Hopper backward kernel by keys for wide heads: as keys.cu, for head dims whose dK and dV of 64 keys do not fit
// the registers of one warpgroup.
//
// A CTA computes key blocks of Bc = 64 keys and iterates over the tiles of Br = 64 rows that see them. One warpgroup
// computes S^T, P^T and dV, the other dP^T, dS^T and dK. P^T goes from the first to the second through a ring of two
// stages in shared memory. Each warpgroup issues two products a step, one after the other, and computes on scores
// between steps:
//
//   dV, step t   P(t) = exp(S(t) - LSE)      dV += P(t)^T dO(t)    S(t+1)^T = K Q(t+1)^T
//                      | P(t)
//   dK, step t   dS(t) = P(t) o (dP(t) - D)  dK += dS(t)^T Q(t)    dP(t+1)^T = V dO(t+1)^T
//
// Thus the tensor cores run the products of one warpgroup while the other one computes on scores; the places of the
// barriers between them decide how well the two overlap. The first 128 dims of K and V are operands in registers: this
// leaves shared memory to the rings of Q and dO, and saves its bandwidth, which is the bottleneck. K and V are loaded
// by way of a stage of Q and one of dO, as if they were a step. docs/kernels/backward.md derives the schedule.
#include "sm90/backward/keys.cuh"

enum : int {
  kHeadFront = panels_in_registers(ElementK::kType, kHeadDim),
  kValueFront = panels_in_registers(ElementV::kType, kValueDim),
  kHeadRest = kKPanels - kHeadFront,
  kValueRest = kVPanels - kValueFront,
};
static_assert(kConsumers == 2 && kBlockRows == 64 && kBlockKeys == 64 && !kMaskBits);
static_assert(kQStages >= 2 && kOStages >= 2 && kDsStages == (kStoresDs ? 2 : 0));
static_assert(kKeysLayout.bytes <= 232448);

// The panels of K and of V in shared memory have the same barriers.
using VRest = Buffers<kKeysLayout.v, kKeysLayout.v_bytes, kKeysLayout.k_full, kKeysLayout.k_empty, 1>;

// The producer's side.
struct KeysLoader : StepLoader {
  using StepLoader::StepLoader;

  // Loads K and V of a block. For the end of all work, and for a block without steps, nothing is loaded.
  __device__ __forceinline__ void load_keys(const KeyBlock& block, const Lengths& n) {
    if (block.block < 0 || !(block.state & kHasSteps)) {
      announce(block);
      arrive();
      arrive();
    } else {
      load_front<ElementK, kHeadFront>(q, &p.k_map, block, n);
      load_front<ElementV, kValueFront>(o, &p.v_map, block, n);
      announce(block);
      if (kHeadRest > 0) load_keys_into<ElementK, kHeadRest, kHeadFront>(k, &p.k_map, block, n);
      else arrive();
      if (kValueRest > 0) load_keys_into<ElementV, kValueRest, kValueFront>(VRest(smem, 0), &p.v_map, block, n);
      else arrive();
    }
    k.advance();
  }

  // Loads the panels for registers into a stage of Q or dO. Its barrier expects two arrivals of the producer.
  template <class Type, int panels, class Ring>
  __device__ __forceinline__ void load_front(Ring& to, const void* map, const KeyBlock& block, const Lengths& n) {
    to.wait_empty();
    if (elect_one()) mbarrier_arrive(to.full());
    __syncwarp();
    load_keys_into<Type, panels>(to, map, block, n);
    to.advance();
  }

  __device__ __forceinline__ void arrive() const {
    if (elect_one()) mbarrier_arrive(k.full());
    __syncwarp();
  }
};

// The steps of 16 dims in the panels for registers.
template <class Type>
__device__ constexpr int max_front_steps(int dim) {
  return min_of(dim / Type::kStep, kPanelSteps * panels_in_registers(Type::kType, dim));
}

// P^T in the type in which it passes to the other warpgroup: f16 has more bits than bf16, and the range that 2^p_log2 P
// needs.
__device__ __forceinline__ u32 pack_factors(float low, float high) {
  return kHalfP ? Half::pack(low, high) : ElementP::pack(low, high);
}
__device__ __forceinline__ float low_factor(u32 pair) { return kHalfP ? Half::low(pair) : ElementP::low(pair); }
__device__ __forceinline__ float high_factor(u32 pair) { return kHalfP ? Half::high(pair) : ElementP::high(pair); }

// The ring in which P^T passes from one warpgroup to the other, in the order of accumulators. Each of its two stages
// has two named barriers: for when it has been written, and for when it has been read.
struct Exchange {
  enum : u32 { kWritten = 1, kRead = 3, kArrivals = 256 };
  u32 smem;
  u32 stage = 0;

  __device__ __forceinline__ explicit Exchange(u32 smem) : smem(smem) {}
  __device__ __forceinline__ void arrive_written() const { named_barrier_arrive(kWritten + stage, kArrivals); }
  __device__ __forceinline__ void wait_written() const { named_barrier_sync(kWritten + stage, kArrivals); }
  __device__ __forceinline__ void arrive_read() const { named_barrier_arrive(kRead + stage, kArrivals); }
  __device__ __forceinline__ void wait_read() const { named_barrier_sync(kRead + stage, kArrivals); }
  __device__ __forceinline__ void advance() { stage ^= 1; }

  // The address of 16 rows: four words of each thread.
  __device__ __forceinline__ u32 address(int part) const {
    return smem + kKeysLayout.p + stage * kKeysLayout.p_bytes + part * 128 * 16 + threadIdx.x % 128 * 16;
  }
  __device__ __forceinline__ void store(int part, const u32* P) const { store_shared16(address(part), P); }
  __device__ __forceinline__ void load(int part, u32* P) const { load_shared16(address(part), P); }
};

// The descriptor of a tile of Q or dO, for products over dims and over rows.
__device__ __forceinline__ u32 tile_of(u32 buffer) { return uniform_descriptor(buffer, kBlockRows * 128); }

// The first consumer: S^T = K Q^T, P^T = exp(S^T - LSE), dV += P^T dO.
__device__ __forceinline__ void compute_dv(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  KBuffer k(smem, 0);
  QBuffers q(smem, 0);
  OBuffers o(smem, 0);
  Exchange exchange(smem);

  for (;;) {
    k.wait_full();
    KeyBlock block = load_block(k);
    if (block.block < 0) break;
    const Lengths n = lengths_of(p, block.batch);
    const int key = block.block * kBlockKeys + warp_row() + thread_row();
    float dV[kValueDim / 2];
    begin_gradient<kValueDim>(p, dV, block, 0, p.partial_dv);
    Kept<kBlockRows> kept;
    const auto decide_dropout = [&] {  // for the next step, during the products
      if (!kDropout) return;
      const Step step = load_shared_struct_uniform<Step>(step_of(q));
      kept = kept_of_step(p, k, step, warp_row());
    };
    const auto mark = [&](u32 (&P)[4], int part) {  // for the other warpgroup
#pragma unroll
      for (int i = 0; i < 4; ++i) P[i] = mark_dropped(P[i], kept.pair(4 * part + i));
    };

    if (block.state & kHasSteps) {
      KeyOperand<ElementK, kHeadDim, max_front_steps<ElementK>(kHeadDim)> K;
      q.wait_full();
      K.load(q.address(), k.address());
      q.release_loaded(leader);

      // S^T = K Q^T of the first step.
      float X[kBlockRows / 2];
      q.wait_full();
      wgmma_fence();
      K.issue_scores(X, tile_of(q.address()), 0);
      o.wait_full();
      o.release(leader);  // V, for the other warpgroup
      decide_dropout();
      wgmma_wait<0>();
      register_fence(X);

      for (;;) {
        const Step step = load_shared_struct_uniform<Step>(step_of(q));

        // P^T = exp(S^T - LSE). The other warpgroup gets P^T times the score's derivative, and masks it itself.
        exchange.wait_read();
        const Exponents exponents = exponents_of(p, step, n, block.batch, key, q);
        u32 hidden = 0;
        if constexpr (kMapsTiles != 0)
          if (step.state & kModHides) hidden = hidden_by_mask_mod(p, exponents, 0, kBlockRows / 2);
#pragma unroll
        for (int part = 0; part < kBlockRows / 16; ++part) {
          u32 factors[4];
          float bias[8] = {};
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int j = 2 * part + half;
            float slopes[4];
            if constexpr (kBiasTile != 0) load_bias_of_keys<kBlockRows>(q.address() + kKeysLayout.bias, 0, j, bias);
            probabilities(p, X, j, exponents, bias + 4 * half, slopes);
#pragma unroll
            for (int i = 4 * j; i < 4 * j + 4; ++i) X[i] = hidden >> i & 1 ? 0 : X[i];
            if (kHasScoreSlope) factors[2 * half] = pack_factors(X[4 * j] * slopes[0], X[4 * j + 1] * slopes[1]);
            if (kHasScoreSlope)
              factors[2 * half + 1] = pack_factors(X[4 * j + 2] * slopes[2], X[4 * j + 3] * slopes[3]);
          }
          if (kHasScoreSlope && kDropout) mark(factors, part);
          if (kHasScoreSlope) exchange.store(part, factors);
        }
        if (kBiasTile) fence_async_proxy();
        __syncwarp();
        q.release(leader);
        if (step.state & kMasked) hide_rows(X, visible_rows<kBlockRows>(p, n, key, step.row));
        u32 P[kBlockRows / 4];
#pragma unroll
        for (int i = 0; i < kBlockRows / 4; ++i) P[i] = ElementP::pack(X[2 * i], X[2 * i + 1]);
#pragma unroll
        for (int part = 0; part < kBlockRows / 16; ++part) {
          if (!kHasScoreSlope) {
            u32 factors[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) factors[i] = pack_factors(X[8 * part + 2 * i], X[8 * part + 2 * i + 1]);
            if (kDropout) mark(factors, part);
            exchange.store(part, factors);
          }
          if (kDropout) kept.drop(P, 4 * part, 4);
        }

        // dV += P^T dO.
        o.wait_full();
        register_fence(dV);
        register_fence(P);
        wgmma_fence();
        if (kKeyGradients) issue_gradient<ElementO, kValueDim>(dV, P, tile_of(o.address()));
        exchange.arrive_written();
        exchange.advance();
        if (step.state & kLastStep) {
          wgmma_wait<0>();
          register_fence(dV);
          register_fence(P);
          o.release(leader);
          break;
        }

        // S^T of the next step.
        q.wait_full();
        decide_dropout();
        register_fence(X);
        wgmma_fence();
        K.issue_scores(X, tile_of(q.address()), 0);
        wgmma_wait<1>();
        register_fence(dV);
        register_fence(P);
        o.release(leader);
        wgmma_wait<0>();
        register_fence(X);
      }
      block = load_block(k);  // loaded again, instead of being kept in registers
    }
    k.release(leader);
    end_gradient<ElementDv, kValueDim>(p, dV, block, 0, p.partial_dv, p.dv_grad, p.dv, p.dv_scale);
  }
}

// The second consumer: dP^T - D = V dO^T - D, dS^T = P^T o (dP^T - D), dK += dS^T Q.
__device__ __forceinline__ void compute_dk(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  KBuffer k(smem, 0);
  QBuffers q(smem, 0);
  OBuffers o(smem, 0);
  Exchange exchange(smem);
  // Both stages of P are empty.
  for (int i = 0; i < 2; ++i) {
    exchange.arrive_read();
    exchange.advance();
  }

  for (;;) {
    k.wait_full();
    KeyBlock block = load_block(k);
    if (block.block < 0) break;
    const Lengths n = lengths_of(p, block.batch);
    const int key = block.block * kBlockKeys + warp_row() + thread_row();
    float dK[kHeadDim / 2];
    begin_gradient<kHeadDim>(p, dK, block, 0, p.partial_dk);

    if (block.state & kHasSteps) {
      KeyOperand<ElementV, kValueDim, max_front_steps<ElementV>(kValueDim)> V;
      o.wait_full();
      V.load(o.address(), VRest(smem, 0).address());
      o.release_loaded(leader);

      // dP^T - D = V dO^T - D of the first step. With dropout only dP^T: D stays in its stage until entries are
      // dropped.
      float X[kBlockRows / 2];
      o.wait_full();
      if (!kDropout) start_from_delta(X, delta_of(o) + 4 * thread_column());
      register_fence(X);
      wgmma_fence();
      V.issue_scores(X, tile_of(o.address()), !kDropout);
      q.wait_full();
      q.release(leader);  // K
      wgmma_wait<0>();
      register_fence(X);
      if (!kDropout) o.release(leader);

      for (;;) {
        // dS^T = P^T o (dP^T - D). The product is f32, as in keys.cu.
        u32 P[kBlockRows / 4];
        exchange.wait_written();
#pragma unroll
        for (int part = 0; part < kBlockRows / 16; ++part) exchange.load(part, P + 4 * part);
        if (kDropout) {
          drop_gradients(p, X, P, delta_of(o) + 4 * thread_column());
          o.release_loaded(leader);
        }
        q.wait_full();
        const Step step = load_shared_struct_uniform<Step>(step_of(q));
#pragma unroll
        for (int i = 0; i < kBlockRows / 4; ++i) {
          X[2 * i] *= low_factor(P[i]);
          X[2 * i + 1] *= high_factor(P[i]);
        }
        if (step.state & kMasked) hide_rows(X, visible_rows<kBlockRows>(p, n, key, step.row));
#pragma unroll
        for (int i = 0; i < kBlockRows / 4; ++i) P[i] = ElementDs::pack(X[2 * i], X[2 * i + 1]);
        const u32 ds = smem + kKeysLayout.ds + exchange.stage * kKeysLayout.ds_bytes;
        if constexpr (kStoresDs != 0) {
          tma_store_wait_read<kDsStages - 1>();
          __syncwarp();
          store_shared_ds(ds, P);
        }
        exchange.arrive_read();
        exchange.advance();

        // dK += dS^T Q.
        register_fence(dK);
        register_fence(P);
        wgmma_fence();
        if (kKeyGradients) issue_gradient<ElementQ, kHeadDim>(dK, P, tile_of(q.address()));
        if (kStoresDs) store_global_ds(p, ds, 0, step.tile);
        if (step.state & kLastStep) {
          wgmma_wait<0>();
          register_fence(dK);
          register_fence(P);
          q.release(leader);
          break;
        }

        // dP^T - D of the next step.
        o.wait_full();
        if (!kDropout) start_from_delta(X, delta_of(o) + 4 * thread_column());
        register_fence(X);
        wgmma_fence();
        V.issue_scores(X, tile_of(o.address()), !kDropout);
        wgmma_wait<1>();
        register_fence(dK);
        register_fence(P);
        q.release(leader);
        wgmma_wait<0>();
        register_fence(X);
        if (!kDropout) o.release(leader);
      }
      block = load_block(k);  // loaded again, instead of being kept in registers
    }
    k.release(leader);
    end_gradient<ElementDk, kHeadDim>(p, dK, block, 0, p.partial_dk, p.dk, p.d, p.scale);
  }
  tma_store_wait();
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fulgur_backward_keys(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (threadIdx.x == 0) {
    KBuffer::init(smem, 2, 4 * kConsumers);
    QBuffers::init(smem, 2, 4 * kConsumers);
    OBuffers::init(smem, 2, 4 * kConsumers);
    set_up(p, smem);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_drop<kProducerRegisters>();
    if (threadIdx.x < 32) produce<KeysLoader>(p, smem);
  } else {
    registers_raise<kConsumerRegisters>();
    if (consumer() == 0) compute_dv(p, smem);
    else compute_dk(p, smem);
  }
}

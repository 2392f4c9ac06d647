// Attention forward for Hopper: O = softmax(scale Q K^T) V and LSE, exact, fp32 accumulation.
//
// A CTA takes q tiles: blocks of Br = 64 * kConsumers rows of Q, whose keys it walks from right to left in tiles of Bc.
// One producer warp feeds rings of K and V by TMA. Each consumer warpgroup owns a strip of 64 rows. In step t of the
// walk it issues S(t) = Q K(t)^T and O += P(t-1) V(t-1) together, waits, and turns S(t) into P(t) while the other
// warpgroups keep the tensor cores busy (FlashAttention-3, algorithm 2). docs/kernels/forward.md derives the schedule,
// and docs/kernels/README.md says what the words mean.
#include "sm90/forward/output.cuh"
#include "sm90/forward/producer.cuh"
#include "sm90/forward/products.cuh"
#include "sm90/forward/rings.cuh"
#include "sm90/forward/scores.cuh"
#include "sm90/forward/segment_means.cuh"
#include "sm90/forward/maps/tile_info.cuh"

__device__ __forceinline__ void consume(const ForwardParams& p, u32 smem) {
  if constexpr (kOrdersBlocks) sort_blocks(p, smem);
  const u32 leader = threadIdx.x % 32 == 0;
  const u32 barrier = kBarrierConsumer + consumer();
  const float c = score_factor(p);
  QBuffers q_buffers(smem, 0);
  KvBuffers kv(smem, leader);
  u32 storing = 0;  // TMA stores the previous O from a buffer of Q: the offset of its barrier
  const auto release_previous_q = [&] {
    tma_store_wait_read();
    __syncwarp();
    mbarrier_arrive_if(smem + storing, leader && storing);
    storing = 0;
  };

  for (;;) {
    q_buffers.wait_full();
    u32 view = view_address(smem, q_buffers.ring.stage(), consumer());
    if (kBiasInP) view = u32(uniform(int(view)));  // in a uniform register: threads have none to spare
    KeyWalk walk = load_shared_struct_uniform<KeyWalk>(view);
    if (walk.no_more_work()) break;
    if (!kMapsTiles) kv.skip_front(walk);
    const u32 strip = q_buffers.address() + consumer() * kLayout.strip_bytes;
    if (kPacked || kSeqUsedQ) clear_rows_after_sequence(p, walk, view, strip, barrier);
    const u32 q = uniform_descriptor(strip, 0);
    const u32 head_of_tile = head_address(smem, q_buffers.ring.stage());
    ProductScale scale = {1, c};
    if constexpr (kHasCodes) {
      const HeadOfCodes head = load_shared_struct_uniform<HeadOfCodes>(head_of_tile);
      scale = {head.of_products, head.of_scores};
    }
    const VisibleKeys visible = visible_keys_of_strip(p, walk.sk, walk.diagonal);
    float S[kBlockKeys / 2];
    float O[kValueDim / 2];
    u32 P[kPWords];
    u32 bias_words[kPWords];
    MaskWords mask_words;
    const StripScores scores = {p, view, walk, scale, visible};
    const auto adjust_scores = [&](bool rightmost, const u32 (&bias_words)[kPWords], int masked_by) {
      const int key = scores.first_key();
      scores.transform(S, key, kv.bias_tile(), bias_words);
      if (kBiasTile && !kBiasInRegisters) kv.release_loaded_k();
      if constexpr (!kMaskBits) scores.mask(S, key, rightmost, masked_by);
    };
    const BiasUnit unit = bias_unit(p.bias_factor);
    // Loads the words of a tile before its products, which take all that shared memory gives.
    const auto load_bias = [&](u32 (&words)[kPWords], bool rightmost) {
      load_bias_words(words, kv.bias_tile());
      if constexpr (kBiasByProducts) {
        if ((kHasLeft || kHasRight) && walk.masked(band_of(p), rightmost))
          clear_pairs_of_hidden_keys(words, visible, scores.first_key());
        begin_scores(S, words, unit);
      }
    };
    const auto hide_by_bias = [&] {  // before the softmax looks for a new maximum
      if constexpr (kBiasInRegisters) {
        // Addresses that are kept for this would take registers of the loop.
        load_bias_words(bias_words, kv.bias_tile(), kBiasInP ? lane_of_warp() : threadIdx.x % 32);
        hide_by_bias_words(S, bias_words);
        if constexpr (kBiasInP) fence_async_proxy();  // K is released without one
      }
    };
    Kept<kBlockKeys> kept;
    Rows rows = rows_without_keys();
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;

    Place place;
    HeadOfCodes head = {1, 1, 1, 0};
    const auto load_place_and_head = [&] {
      place = load_place(view);
      if constexpr (kHasCodes) head = load_shared_struct_uniform<HeadOfCodes>(head_of_tile);
    };
    const auto release_q = [&] {  // its View with it; O is stored from registers
      load_place_and_head();
      mbarrier_arrive_if(kQStages > 1 ? q_buffers.empty() : smem + kLayout.q_empty, leader);
    };

    SegmentMeans means;
    means.begin(walk.tile);
    if (skip_unseen(kv, walk)) {
      bool again = false;
      do {  // for each run of tiles that the strip sees; without a map there is one
        // The rightmost tile: S = Q K^T, and P = exp(S - max).
        kv.wait_k();
        if constexpr (kBiasInRegisters) load_bias(bias_words, true);
        wgmma_fence();
        issue_scores(S, q, kv.k_operand());
        if (kOThroughQ) release_previous_q();
        if (kDropout) kept = kept_of_tile(p, smem + kLayout.dropout_key, view, walk.tile);
        const int masked_by = walk.masked_by();
        load_next_tile(kv);
        if (kMaskBits && masked_by) mask_words.load(kv.bias_tile(), masked_by);
        wait_for_products<0>(S);
        if (!kBiasTile && !kMaskBits) kv.release_k();
        adjust_scores(true, bias_words, masked_by);
        if constexpr (kBiasInRegisters) hide_by_bias_words(S, bias_words);
        if constexpr (kMaskBits) {
          if (masked_by) scores.mask(S, mask_words, masked_by);
          if (masked_by) kv.release_loaded_k();
          else kv.release_k();
        }
        if (kSkipsTiles && again) softmax_step<false>(S, P, O, rows, scale.of_scores);
        else softmax_step<true>(S, P, O, rows, scale.of_scores);
        if constexpr (kBiasInRegisters) kv.release_loaded_k();
        if (kDropout) kept.drop(P);
        set_next_tile(walk, kv);

        // S(t) = Q K(t)^T and O += P(t-1) V(t-1) together, then P(t) in a second buffer while O += P V still runs.
        // Buffers of P are registers, so a turn of the loop computes two tiles. Where kMaskedTilesApart they are
        // such as the bounds do not cut, so that no branch is between the waits.
        u32 other_P[kPWords];
        const auto step = [&](const u32 (&previous_P)[kPWords], u32 (&P)[kPWords]) {
          walk.next();
          means.enter(p, rows, walk.tile);
          kv.wait_v();
          kv.wait_k();
          if constexpr (kBiasInP) load_bias(P, false);
          register_fence(O);
          wgmma_fence();
          issue_scores(S, q, kv.k_operand());
          issue_values(O, previous_P, kv.v_operand());
          wait_for_products<1>(S);
          if constexpr (kMaskedTilesApart) scores.transform(S, scores.first_key(), kv.bias_tile(), P);
          else adjust_scores(false, P, 0);
          softmax_step<false>(S, P, O, rows, scale.of_scores, [&] {
            wait_for_products<0>(O);
            hide_by_bias();
          });
          wait_for_products<0>(O);
          if constexpr (kBiasInP) kv.release_loaded_k();
          else kv.release_v();
        };

        if constexpr (kDoubleBuffersP && !kMaskedTilesApart) {
#pragma unroll 1
          while (walk.tile > walk.last + 1) {
            step(P, other_P);
            step(other_P, P);
          }
        }

#pragma unroll 1
        for (;;) {
          if constexpr (kMaskedTilesApart) {
#pragma unroll 1
            while (walk.two_are_whole(band_of(p))) {
              step(P, other_P);
              step(other_P, P);
            }
          }
          if (!next_in_run(walk)) break;
          with_masked_by(walk, [&](int masked_by) {
#pragma unroll 1
            do {
              // S(t) = Q K(t)^T and O += P(t-1) V(t-1) together, then P(t), which rescales O where the maximum moves.
              means.enter(p, rows, walk.tile);
              kv.wait_v();
              kv.wait_k();
              if constexpr (kBiasInRegisters) load_bias(bias_words, false);
              load_next_tile(kv);
              if (kMaskBits && masked_by) {
                mask_words.load(kv.bias_tile(), masked_by);
                fence_async_proxy();  // the release of K needs it; here no score waits for it
                __syncwarp();
              }
              register_fence(O);
              wgmma_fence();
              // With a mask of bits q is made uniform here; otherwise the compiler does it before each of the products.
              issue_scores(S, kMaskBits ? u32(uniform(int(q))) : q, kv.k_operand());
              issue_values(O, P, kv.v_operand());
              if (kDropout) kept = kept_of_tile(p, smem + kLayout.dropout_key, view, walk.tile);
              if constexpr (!kPairs || kBiasInP) {
                wgmma_wait<1>();  // S is complete; O += P V still runs
                if (kMapsTiles || kBiasInRegisters) register_fence(S);
                if constexpr (kBiasInRegisters) adjust_scores(false, bias_words, 0);
                if (kMaskBits && masked_by) scores.mask(S, mask_words, masked_by);
                if (!kBiasTile) kv.release_k();
              }
              wait_for_products<0>(S, O);
              if (!kBiasInP) kv.release_v();
              if constexpr (!kBiasInRegisters) adjust_scores(false, bias_words, masked_by);
              softmax_step<false>(S, P, O, rows, scale.of_scores, hide_by_bias);
              if constexpr (kBiasInRegisters) kv.release_loaded_k();
              if (kDropout) kept.drop(P);
            } while (kMapsTiles && walk.next_alike());
          });
          set_next_tile(walk, kv);
        }

        // O += P V of the leftmost tile. Where V is centred, its means are added, too.
        means.weigh(p, rows, walk.last);
        kv.wait_last_v();
        register_fence(O);
        wgmma_fence();
        issue_values(O, P, kv.v_operand());
        means.issue(O, kv.k);
        if (!kOThroughQ && !kSkipsTiles) release_q();
        means.load(p, head.kv_head);
        wait_for_products<0>(O);
        means.multiply(p, rows, O);
        kv.release_v();
        means.add(p, rows, O, head.kv_head);
        again = true;
      } while (kSkipsTiles && skip_unseen(kv, walk));
      if (!kOThroughQ && kSkipsTiles) release_q();
    } else if (kOThroughQ) {
      release_previous_q();
    } else {
      release_q();
    }
    if (kHasLeft) kv.skip(walk.skip_back);

    // O = O / sum, LSE = max + log(sum).
    if (!kCentersV) {
      rows.sum[0] = quad_sum(rows.sum[0]);
      rows.sum[1] = quad_sum(rows.sum[1]);
    }
    if (kOThroughQ) {
      load_place_and_head();
      named_barrier_sync(barrier, 128);  // every warp has read Q
    }
    const u32 last_flag = smem + kLayout.last + 4 * consumer();
    if (!kSplitTail || combine_splits(p, place, rows, O, barrier, last_flag))
      finish(p, place, rows, O, head.of_values, strip);
    storing = kLayout.q_empty + 8 * q_buffers.ring.stage();
    q_buffers.advance();
  }
  tma_store_wait_read();
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kThreads, kResidents)
    fulgur_forward(const __grid_constant__ ForwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (threadIdx.x == 0) {
    QBuffers::init(smem, kHasCodes ? 2 : 1, 4 * kConsumers);
    KBuffers::init(smem, kPairs ? 2 : 1, 4 * kConsumers);
    if constexpr (!kPairs) VBuffers::init(smem, 1, 4 * kConsumers);
    mbarrier_init(smem + kLayout.v_tail, 1);
    if (kOrdersBlocks) mbarrier_init(smem + kLayout.ordered, 128 * kConsumers);
    fence_mbarrier_init();
    if (kDropout) store_dropout_key(p, smem + kLayout.dropout_key);
    tma_prefetch_map(&p.q_map);
    tma_prefetch_map(&p.k_map);
    if (!kCentersV) tma_prefetch_map(&p.v_map);
    if (kStore == kStoreTiles) tma_prefetch_map(&p.o_map);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_drop<kProducerRegisters>();
    if (threadIdx.x < 32) produce(p, smem);
  } else {
    registers_raise<kConsumerRegisters>();
    consume(p, smem);
  }
}

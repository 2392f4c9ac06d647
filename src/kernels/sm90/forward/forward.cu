// Attention forward for Hopper: O = softmax(scale Q K^T) V and LSE, exact, fp32 accumulation.
//
// A CTA takes q tiles: blocks of Br = 64 * kConsumers rows of Q, whose keys it walks from right to left in tiles
// of Bc. One producer warp feeds rings of K and V by TMA. Each consumer warpgroup owns a strip of 64 rows; it issues
// S(t) = Q K(t)^T and O += P(t-1) V(t-1) together, waits, and turns S(t) into P(t) while the other warpgroups keep the
// tensor cores busy (FlashAttention-3, algorithm 2). docs/kernels/forward.md derives the schedule, and
// docs/kernels/README.md says what the words mean.
#include "attention/bias_tile.cuh"
#include "attention/dropout.cuh"
#include "attention/mask.cuh"
#include "attention/mask_bits.cuh"
#include "attention/seen_tiles.cuh"
#include "sm90/forward/output.cuh"
#include "sm90/forward/pipeline.cuh"
#include "sm90/forward/values.cuh"

// Loads the tiles of a q tile that the map shows, and Q before or after the first K.
template <class Params, class LoadQ, class StripOf>
__device__ __forceinline__ void load_seen_tiles(const Params& p, Loader& load, const QTile& q_tile, const Lengths& n,
                                                const KeyTiles& keys, const LoadQ& load_q, const StripOf& strip_of) {
  wait_for_earlier_kernels();  // they make the map
  SeenTiles<> seen = walk_of_block(p.expression.map, q_tile.batch, q_tile.head, q_tile.block, keys.begin, keys.end,
                                   /*down=*/true);
  const Keys source = keys_of(p, q_tile, n);
  // The map does not say what the bounds of the call hide, nor that the keys end in a tile.
  const int row = kStripRows * first_strip(n.sq, kConsumers, q_tile.block);
  const int end = kStripRows * first_strip(n.sq, kConsumers, q_tile.block + 1);
  const KeyRange seen_by_all = keys_seen_by_all(band_of(p), n, row, min(end, n.sq) - 1);
  const auto packed = [&] {  // the tile that the walk is at
    if (!seen.more()) return -1;
    const bool partial = is_partial(seen_by_all, seen.tile * kBlockKeys, (seen.tile + 1) * kBlockKeys);
    return pack_tile(seen.tile, (seen.is_partial() ? +kMaskedByMask : 0) |
                                    (partial ? +(!kMaskBits || kBoundsApart ? kMaskedByBounds : kMaskedByMask) : 0));
  };
  int current = packed();
  const KeyTiles first = {current, current};  // what the Views say of the tiles
  if (kQStages > 1 || !seen.more()) load_q(first);
#pragma unroll 1
  for (bool loads_q = kQStages == 1; seen.more(); loads_q = false) {
    const int tile = seen.tile;
    const bool last = !seen.next();
    const int next = packed();
    load.publish({tile, last ? tile : 0, packed_masked_by(current), next});
    load.load_k(source, tile, strip_of, kMaskBits && (current & kMaskedByMask));
    if (loads_q) load_q(first);
    load.load_v(source, tile);
    current = next;
  }
}

__device__ __forceinline__ void produce(const ForwardParams& p, u32 smem) {
  Loader load(p, smem);
  bool flip = false;
  const u32 lane = threadIdx.x % 32;
  const int heads = kSharesBlocks ? p.group : 1;
  int number = blockIdx.x;
  for (;;) {
    const QTile tile = q_tile_of(p, number);
    const Lengths n = lengths_of(p, tile.batch);
    const int strip = first_strip(n.sq, kConsumers, tile.block, heads);
    const int end = first_strip(n.sq, kConsumers, tile.block + 1, heads);
    if (tile.block < 0 || kStripRows * (strip / heads) < n.sq) {
      const KeyTiles keys = key_tiles_of(p.work, band_of(p), n, kConsumers, kBlockKeys, kSplitTail, tile, heads);
      // Under a band the lower a row the more keys it may see, so warpgroups take turns at the bottom; but the splits
      // of a block, which add up strip by strip, agree on whose strip is whose.
      flip = kHidesKeys && !(kSplitTail && tile.split >= 0) && !flip;
      const auto strip_of = [&](int group) -> Strip {  // from n.sq on: this warpgroup has none
        const int mine = strip + (flip ? kConsumers - 1 - group : group);
        if (mine >= end) return {n.sq, tile.head};
        return {kStripRows * (mine / heads), tile.head + mine % heads};
      };
      if (tile.block < 0) {
        load.load_q(tile, n, keys, strip_of);
        break;
      }
      if constexpr (kMapsTiles) {
        const auto load_q = [&](const KeyTiles& first) { load.load_q(tile, n, first, strip_of); };
        load_seen_tiles(p, load, tile, n, keys, load_q, strip_of);
      } else {
        // With one buffer of Q, which the previous q tile may still be using, the first K comes before.
        if (kQStages > 1 || keys.end <= keys.begin) load.load_q(tile, n, keys, strip_of);
        const Keys source = keys_of(p, tile, n);
#pragma unroll 1
        for (KeyWalk walk = walk_of_tiles(keys); walk.more(); walk.next()) {
          load.load_k(source, walk.tile, strip_of);
          if (kQStages == 1 && walk.tile == keys.end - 1) load.load_q(tile, n, keys, strip_of);
          if constexpr (!kPairs) load.load_v(source, walk.tile);
          else if (walk.tile == keys.end - 1) load.leave_v();
          else load.load_v(source, walk.tile + 1);
        }
        if constexpr (kPairs) {
          if (keys.end > keys.begin) {
            load.leave_k(source, keys);
            load.load_v(source, keys.begin);
            if constexpr (kCentersV) prefetch_means(p, source.means, keys);
          }
        }
      }
    }
    // Not earlier, lest a CTA with a long q tile hold another one, too. The consumers still have full buffers.
    const int next = lane == 0 ? int(gridDim.x) + atomicAdd(&p.counters[0], 1) : 0;
    number = __shfl_sync(0xffffffff, next, 0);
  }
  wait_for_earlier_kernels();  // there may have been nothing to load
  // The last CTA to finish clears the counters for the next launch.
  if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1)
    p.counters[0] = 0;
}

// S = Q K^T
__device__ __forceinline__ void issue_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / ElementK::kStep; ++step) {
    const int panel = step / kPanelSteps;
    const int inside = step % kPanelSteps * kStepBytes;
    Wgmma<kBlockKeys, ElementK::kType>::multiply<kAlongK, kAlongK>(
        S, q + ((panel * kStripPanelBytes + inside) >> 4), k + ((panel * kPanelBytes + inside) >> 4), step != 0);
  }
  wgmma_commit();
}

// How many rows of a strip belong to its sequence; maybe more than it has.
__device__ __forceinline__ int valid_rows(const ForwardParams& p, const KeyWalk& walk, u32 view) {
  if (!kTopLeft && !kPart) return walk.sk - walk.diagonal;
  const Place place = load_place(view);
  return lengths_of(p, place.batch).sq - place.row;
}

// The bias of rows after the end of a sequence is of no row that counts. It becomes what TMA gives where a tensor ends
// (clear_rows_after_sequence() says why).
__device__ __forceinline__ void clear_bias_after_sequence(const ForwardParams& p, const KeyWalk& walk, u32 view,
                                                          float (&bias)[8]) {
  const int valid = valid_rows(p, walk, view);
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (int(warp_row() + thread_row()) + i / 2 % 2 * 8 >= valid) bias[i] = kBias == 1 + kBool ? -infinity() : 0;
}

// The words of the bias of a tile, kBiasInRegisters: of each two scores one, as of P. A score that it hides is -inf, or
// such that P is 0, or no number, which is looked for with a new maximum.
__device__ __forceinline__ void hold_bias(u32 (&words)[kPWords], u32 tile) {
  // In a panel columns are bits of an address that nothing else is added to: no register for each of them.
  constexpr int kPanelWords = kPanelRowBytes / 8;
  const u32 first = bias_words_address(tile, 0);
#pragma unroll
  for (int i = 0; i < kBiasWords; i += 4) {
    const u32 panel = i / kPanelWords * bias_panel_bytes(kBiasRows, kStripRows);
    load_shared_matrices(kBiasInP ? (first + panel) ^ i % kPanelWords * 8 : bias_words_address(tile, 4 * i),
                         words + i);
  }
}

// -inf for the scores that it hides.
__device__ __forceinline__ void hide_by_bias(float (&S)[kBlockKeys / 2], const u32 (&words)[kPWords]) {
#pragma unroll
  for (int i = 0; i < kBiasWords; i += 4) {
    float bias[8];
    unpack_bias(words + i, bias);
#pragma unroll
    for (int j = 0; j < 8; ++j)
      if (bias[j] < float(kHidingBias)) S[2 * i + j] = -infinity();
  }
}

// Scores of the products of a strip at `view` from the key of this thread's first column on. `bias`: the tile of a
// dense bias, or `words` of it.
__device__ __forceinline__ void transform_scores(const ForwardParams& p, float (&S)[kBlockKeys / 2], u32 view,
                                                 const KeyWalk& walk, int key, u32 bias, const u32 (&words)[kPWords]) {
  if constexpr (kMapsTiles && kScoreMode == 0 && kBiasTile == 0) return;
  ScoreHead head = {};
  int row = int(warp_row() + thread_row());
  const int diagonal = walk.diagonal + row;
  if (kScoreReadsHead) {
    const Place place = load_place(view);
    head = score_head(p, lengths_of(p, place.batch), place.batch, place.head);
    row += place.row;
  }
  const ScoreContext at = score_context(head, row, diagonal, key);
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 8) {  // 16 keys
    float of_keys[8] = {};
    if constexpr (kBiasInRegisters) unpack_bias(words + i / 2, of_keys);
    else if constexpr (kBiasTile != 0) load_bias_of_strip(bias, 2 * i, of_keys);
    if constexpr (kBiasTile != 0 && kBiasRows != 0 && (kPacked || kSeqUsedQ))
      clear_bias_after_sequence(p, walk, view, of_keys);
#pragma unroll
    for (int j = i; j < i + 8; ++j)
      S[j] =
          score<!kMapsTiles, !kBiasInRegisters>(p, at.moved(j & 2 ? 8 : 0, j / 4 * 8 + (j & 1)), S[j], of_keys[j - i]);
  }
}

// -inf for the scores that mask_mod hides, likewise.
__device__ __forceinline__ void hide_by_mask_mod(const ForwardParams& p, float (&S)[kBlockKeys / 2], u32 view,
                                                 int diagonal, int key) {
  const Place place = load_place(view);
  const ScoreHead head = score_head(p, lengths_of(p, place.batch), place.batch, place.head);
  const int row = int(warp_row() + thread_row());
  const ScoreContext at = score_context(head, row + place.row, row + diagonal, key);
#pragma unroll
  for (int j = 0; j < kBlockKeys / 2; ++j)
    if (mask_mod_hides(p, at.moved(j & 2 ? 8 : 0, j / 4 * 8 + (j & 1)))) S[j] = -infinity();
}

// O += P V
__device__ __forceinline__ void issue_values(float (&O)[kValueDim / 2], const u32 (&P)[kPWords], u32 v) {
#pragma unroll
  for (int step = 0; step < kBlockKeys / ElementV::kStep; ++step)
    Wgmma<kValueDim, ElementV::kType>::multiply<kCentersV ? kInSteps : kAcrossK>(O, P + 4 * step,
                                                                                v + (step * kVStepBytes >> 4), 1);
  wgmma_commit();
}

// Rows of a box of Q after the end of a sequence may be the next sequence's, or padding. They become the zeros
// that TMA gives where a tensor ends: the lazy rescale votes over the rows of a warp, and so the bits of a row depend
// on the other rows of its warp. Zeros depend on nothing but where the sequence ends.
__device__ __forceinline__ void clear_rows_after_sequence(const ForwardParams& p, const KeyWalk& walk, u32 view,
                                                          u32 strip, u32 barrier) {
  if (!walk.more()) return;
  int valid = valid_rows(p, walk, view);
  if (kMapsTiles) valid = max(valid, 0);  // strips walk alike, those that do not exist, too
  if (valid >= kStripRows) return;
  for (int panel = 0; panel < kQPanels; ++panel)
    for (int at = valid * kPanelRowBytes + 16 * int(threadIdx.x % 128); at < kStripPanelBytes; at += 16 * 128)
      store_shared_zero16(strip + panel * kStripPanelBytes + at);
  fence_async_proxy();
  named_barrier_sync(barrier, 128);
}

__device__ __forceinline__ void consume(const ForwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  const u32 barrier = kBarrierConsumer + consumer();
  const float c = score_factor(p);
  QBuffers q_buffers(smem, 0);
  KBuffers keys(smem, 0);
  VBuffers values(smem, 0);
  const auto k_operand = [&] { return uniform_descriptor(keys.address(), 0); };
  const auto v_operand = [&] {
    if constexpr (kPairs)
      return uniform_descriptor(smem + kLayout.v + keys.ring.stage() * kLayout.v_bytes, kPanelBytes);
    else
      return uniform_descriptor(values.address(), kPanelBytes);
  };
  const auto wait_for_values = [&] {
    if constexpr (kPairs) keys.wait_full();
    else values.wait_full();
  };
  const auto release_values = [&] {
    if constexpr (kPairs) keys.release(leader);
    else values.release(leader);
  };
  const auto take_tile = [&](KeyWalk& walk) {  // K of the walk's next tile
    keys.wait_full();
    if constexpr (kMapsTiles && !kMaskBits)
      walk.go_to(load_shared_struct_uniform<TileInfo>(tile_info_address(keys)));
  };
  const auto skip = [&](int count) {  // key tiles that only other warpgroups see
#pragma unroll 1
    for (; count > 0; --count) {
      keys.wait_full();
      keys.release(leader);
      if constexpr (!kPairs) {
        values.wait_full();
        values.release(leader);
      }
    }
  };
  u32 leaving = 0;  // the buffer through which the previous O is still leaving, as the offset of its barrier
  const auto release_q = [&] {
    tma_store_wait_read();
    __syncwarp();
    mbarrier_arrive_if(smem + leaving, leader && leaving);
    leaving = 0;
  };

  for (;;) {
    q_buffers.wait_full();
    u32 view = view_address(smem, q_buffers.ring.stage(), consumer());
    if (kBiasInP) view = u32(uniform(int(view)));  // no register of each thread
    KeyWalk walk = load_shared_struct_uniform<KeyWalk>(view);
    if (walk.no_more_work()) break;
    skip(walk.skip_front);
    if constexpr (kPairs) skip(!walk.more() && walk.skip_front + walk.skip_back > 0);  // there is one more
    const u32 strip = q_buffers.address() + consumer() * kLayout.strip_bytes;
    if (kPacked || kSeqUsedQ) clear_rows_after_sequence(p, walk, view, strip, barrier);
    const u32 q = uniform_descriptor(strip, 0);
    const u32 head_of_tile = head_address(smem, q_buffers.ring.stage());
    ProductScale scale = {1, c};
    if constexpr (kHasCodes) {
      const HeadOfCodes head = load_shared_struct_uniform<HeadOfCodes>(head_of_tile);
      scale = {head.first, head.then};
    }
    const VisibleKeys visible = visible_keys_of_strip(p, walk.sk, walk.diagonal);
    float S[kBlockKeys / 2];
    float O[kValueDim / 2];
    u32 P[kPWords];
    u32 words[kPWords];  // of the bias of a tile, where they do not lie in a P
    const auto bias_tile = [&] { return keys.address() + kLayout.bias + consumer() * kLayout.strip_bias_bytes; };
    const auto hide_what_bias_hides = [&] {
      hold_bias(words, bias_tile());
      hide_by_bias(S, words);
    };
    const auto adjust_scores = [&](bool rightmost, const u32 (&words)[kPWords]) {
      const int key = walk.tile * kBlockKeys + int(thread_column());
      if (kHasCodes && (kScoreMode != 0 || scale.first != 1)) {
#pragma unroll
        for (float& s : S) s *= scale.first;
      }
      transform_scores(p, S, view, walk, key, bias_tile(), words);
      if (kBiasTile && !kBiasInRegisters) keys.release_loaded(leader);
      if constexpr (kMaskBits) return;  // the caller hides
      const bool masked = kMapsTiles ? walk.masked_by() : walk.masked(band_of(p), rightmost);
      if (masked) hide_keys<true>(S, visible, key);
      if constexpr (kMapsTiles && !kMaskBits) {
        // Without bounds few tiles have keys hidden by them, at the end of a sequence.
        if (kHasLeft || kHasRight ? walk.masked_by() & kMaskedByMask : masked)
          hide_by_mask_mod(p, S, view, walk.diagonal, key);
      }
    };
    // The words of a mask of bits lie with K. `masked_by`: bits of MaskedBy of its tile.
    u32 mask[max_of(kMaskWords, 1)];
    const auto load_mask = [&](int masked_by) {
      const u32 at = keys.address() + kLayout.bias + consumer() * kLayout.strip_bias_bytes + threadIdx.x % 128 * 4;
#pragma unroll
      for (int i = 0; i < kMaskWords; ++i)
        mask[i] = masked_by & kMaskedByMask ? load_shared(at + i * kMaskThreads * 4) : ~0;
    };
    const auto hide = [&](int masked_by) {
      if constexpr (kBiasRows && kSeqUsedQ) {  // rows after the end of a sequence are seen
        const int valid = valid_rows(p, walk, view) - int(warp_row() + thread_row());
        const u32 ones = (valid <= 0 ? 0x33333333u : 0) | (valid <= 8 ? 0xccccccccu : 0);
#pragma unroll
        for (u32& word : mask) word |= ones;
      }
      hide_by_bits(S, mask, -infinity());
      if (masked_by & kMaskedByBounds) hide_keys<true>(S, visible, walk.tile * kBlockKeys + int(thread_column()));
    };
    const auto uniform_after_scores = [&](int x) { return uniform(same_after(x, S[0])); };
    Kept<kBlockKeys> kept;
    const auto decide_dropout = [&] {  // with the products
      if (!kDropout) return;
      const Place at = load_place(view);
      kept = kept_scores<kBlockKeys>(p, smem + kLayout.dropout_key, dropout_head(p, at.batch, at.head),
                                     at.row + warp_row(), walk.tile * kBlockKeys);
    };
    Rows rows = rows_without_keys();
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;

    Place place;
    HeadOfCodes head = {1, 1, 1, 0};
    const auto place_rows = [&] {
      place = load_place(view);
      if constexpr (kHasCodes) head = load_shared_struct_uniform<HeadOfCodes>(head_of_tile);
    };
    const auto leave_q = [&] {  // O needs no shared memory: the next Q, and its view, may come at once
      place_rows();
      mbarrier_arrive_if(kQStages > 1 ? q_buffers.empty() : smem + kLayout.q_empty, leader);
    };

    const int last_segment = kCentersV ? walk.tile / kSegmentTiles : 0;
    const auto store_old_segment_sum = [&] {
      const int old_tile = walk.tile + 1;
      if (old_tile % kSegmentTiles == 0) store_segment_sum(p, rows, old_tile / kSegmentTiles);
    };
    if (walk.more()) {
      // The rightmost tile: S = Q K^T, and P = exp(S - max).
      take_tile(walk);
      if constexpr (kBiasInRegisters) hold_bias(words, bias_tile());
      wgmma_fence();
      issue_scores(S, q, k_operand());
      if (kOThroughQ) release_q();
      decide_dropout();
      const int masked_by = walk.masked_by();
      const int loaded_next = load_next_tile(keys);
      if (kMaskBits && masked_by) load_mask(masked_by);
      wgmma_wait<0>();
      register_fence(S);
      const int next = kMaskBits ? uniform_after_scores(loaded_next) : 0;
      if (!kBiasTile && !kMaskBits) keys.release(leader);
      adjust_scores(true, words);
      if constexpr (kBiasInRegisters) hide_by_bias(S, words);
      if constexpr (kMaskBits) {
        if (masked_by) hide(masked_by);
        if (masked_by) keys.release_loaded(leader);
        else keys.release(leader);
      }
      softmax_step<true>(S, P, O, rows, scale.then);
      if constexpr (kBiasInRegisters) keys.release_loaded(leader);
      if (kDropout) kept.drop(P);
      if constexpr (kMaskBits) walk.set_next(next);

      if constexpr (kDoubleBuffersP) {
        // P(t) while P V(t + 1) is multiplied. Two tiles a turn, since sets of P are registers: a bias lies in one of
        // them until P replaces it.
        u32 next_P[kPWords];
        const auto step = [&](const u32 (&of_last)[kPWords], u32 (&of_this)[kPWords]) {
          walk.next();
          if (kCentersV) store_old_segment_sum();
          if constexpr (!kPairs) values.wait_full();
          take_tile(walk);
          // Before the products, which take all that shared memory gives.
          if constexpr (kBiasInP) hold_bias(of_this, bias_tile());
          register_fence(O);
          wgmma_fence();
          issue_scores(S, q, k_operand());
          issue_values(O, of_last, v_operand());
          wgmma_wait<1>();
          register_fence(S);
          adjust_scores(false, of_this);
          softmax_step<false>(S, of_this, O, rows, scale.then, [&] {
            wgmma_wait<0>();
            register_fence(O);
            if constexpr (kBiasInP) hide_what_bias_hides();
          });
          wgmma_wait<0>();
          register_fence(O);
          release_values();
          if constexpr (kBiasInP) keys.release_loaded(leader);
        };
#pragma unroll 1
        while (walk.tile > walk.last + 1) {
          step(P, next_P);
          step(next_P, P);
        }
      }

#pragma unroll 1
      while (walk.next()) {
        if (kCentersV) store_old_segment_sum();
        // S = Q K(t)^T and O += P V(t + 1) together, then P of this tile, which rescales O where the maximum moves.
        if constexpr (!kPairs) values.wait_full();
        take_tile(walk);
        if constexpr (kBiasInRegisters) hold_bias(words, bias_tile());
        const auto step = [&](int masked_by) {
          const int loaded_next = load_next_tile(keys);
          if (masked_by) {
            load_mask(masked_by);
            fence_async_proxy();  // here the scores need not wait for it
            __syncwarp();
          }
          register_fence(O);
          wgmma_fence();
          // Made uniform anew, or the compiler would do so before each of the products.
          issue_scores(S, kMaskBits ? u32(uniform(int(q))) : q, k_operand());
          issue_values(O, P, v_operand());
          if constexpr (kBiasInRegisters) {
            // Scores and the first exponentials while O += P V is multiplied.
            wgmma_wait<1>();
            register_fence(S);
            adjust_scores(false, words);
            wgmma_wait<0>();
            register_fence(S);
            register_fence(O);
            release_values();
            softmax_step<false>(S, P, O, rows, scale.then, hide_what_bias_hides);
            keys.release_loaded(leader);
          } else {
            decide_dropout();
            if constexpr (!kPairs) {
              wgmma_wait<1>();
              if (kMaskBits) register_fence(S);
              if (masked_by) hide(masked_by);  // while O += P V is multiplied
              if (!kBiasTile) keys.release(leader);
            }
            const int next = kMaskBits ? uniform_after_scores(loaded_next) : 0;
            wgmma_wait<0>();
            register_fence(S);
            register_fence(O);
            release_values();
            adjust_scores(false, words);
            softmax_step<false>(S, P, O, rows, scale.then);
            if (kDropout) kept.drop(P);
            if constexpr (kMaskBits) walk.set_next(next);
          }
        };
        if constexpr (kMaskBits) {
          // No branch comes between the products and the softmax, so that the compiler moves exponentials before the
          // last wait; where bounds hide, too, few tiles of a call have one.
          const int masked_by = walk.masked_by();
          if (masked_by == 0) step(0);
          else if (!kBoundsApart || masked_by == kMaskedByMask) step(kMaskedByMask);
          else step(masked_by);
        } else {
          step(0);
        }
      }

      const int first_segment = kCentersV ? walk.last / kSegmentTiles : 0;
      float own[2] = {0, 0};  // sums of the leftmost segment
      if constexpr (kCentersV) {
        own[0] = quad_sum(rows.sum[0]);
        own[1] = quad_sum(rows.sum[1]);
        __syncwarp();  // the first lane of a quad has left the sums
      }
      // O += P V of the leftmost tile.
      if constexpr (kMeanSteps > 0) {
        const int steps = mean_steps(first_segment, last_segment);
        int step = first_segment / kSegmentsOfStep;
        u32 shares[4];
        float sum[2] = {0, 0};
        weights_in_step(p, rows, own, step, first_segment, last_segment, shares, sum);
        wait_for_values();
        register_fence(O);
        wgmma_fence();
        issue_values(O, P, v_operand());
        const u32 means = uniform_descriptor(keys.address(), kSegmentsOfStep * kRowsOfMean * kPanelRowBytes);
        wgmma_fence();
        issue_means(O, shares, means);
        leave_q();
        wgmma_wait<0>();
        register_fence(O);
#pragma unroll 1
        for (int i = 1; i < steps; ++i) {
          weights_in_step(p, rows, own, ++step, first_segment, last_segment, shares, sum);
          register_fence(O);
          wgmma_fence();
          issue_means(O, shares, means + (i * kMeanStepBytes >> 4));
          wgmma_wait<0>();
          register_fence(O);
        }
        release_values();
#pragma unroll
        for (int half = 0; half < 2; ++half) rows.sum[half] = sum[half] + __shfl_xor_sync(0xffffffff, sum[half], 2);
        const int next = (step + 1) * kSegmentsOfStep;
        if (next <= last_segment) {  // steps that the buffer did not hold
          const float before[2] = {rows.sum[0], rows.sum[1]};
          float mean[kValueDim / 4];
          load_means(p, head.kv_head, next, mean);
          float weight[2] = {stored_sum(p, rows, 0, next), stored_sum(p, rows, 1, next)};
          add_means(p, head.kv_head, mean, O, rows, weight, next, last_segment);
          rows.sum[0] += before[0];
          rows.sum[1] += before[1];
        }
      } else {
        wait_for_values();
        register_fence(O);
        wgmma_fence();
        issue_values(O, P, v_operand());
        if (!kOThroughQ) leave_q();
        float mean[kValueDim / 4];  // of V in the leftmost segment, kCentersV
        if constexpr (kCentersV) load_means(p, head.kv_head, first_segment, mean);
        wgmma_wait<0>();
        register_fence(O);
        release_values();
        if constexpr (kCentersV) add_means(p, head.kv_head, mean, O, rows, own, first_segment, last_segment);
      }
      if constexpr (kCentersV) __syncwarp();  // before the next row's sums take the place of these
    } else if (kOThroughQ) {
      release_q();
    } else {
      leave_q();
    }
    if (kHasLeft) skip(walk.skip_back);

    // O = O / sum, LSE = max + log(sum).
    if (!kCentersV) {
      rows.sum[0] = quad_sum(rows.sum[0]);
      rows.sum[1] = quad_sum(rows.sum[1]);
    }
    if (kOThroughQ) {
      place_rows();
      named_barrier_sync(barrier, 128);  // every warp has read Q
    }
    const u32 last_flag = smem + kLayout.last + 4 * consumer();
    if (!kSplitTail || combine_splits(p, place, rows, O, barrier, last_flag))
      finish(p, place, rows, O, head.values, strip);
    leaving = kLayout.q_empty + 8 * q_buffers.ring.stage();
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

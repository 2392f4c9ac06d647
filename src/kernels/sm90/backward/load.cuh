// The rings of shared memory of the kernels by keys, and how their producer warp fills them.
#pragma once
#include "sm90/common/ring.cuh"
#include "sm90/common/load_rows.cuh"
#include "device/dependent_launch.cuh"
#include "device/schedule.cuh"
#include "sm90/backward/layout.cuh"
#include "backward/params.h"

using KBuffer = Buffers<kKeysLayout.k, kKeysLayout.k_bytes, kKeysLayout.k_full, kKeysLayout.k_empty, kKStages>;
using VBuffer = Buffers<kKeysLayout.v, kKeysLayout.v_bytes, kKeysLayout.v_full, kKeysLayout.v_empty, 1>;
using QBuffers = Buffers<kKeysLayout.q, kKeysLayout.q_bytes, kKeysLayout.q_full, kKeysLayout.q_empty, kQStages>;
using OBuffers = Buffers<kKeysLayout.o, kKeysLayout.o_bytes, kKeysLayout.o_full, kKeysLayout.o_empty, kOStages>;

// The KeyBlock of K's current stage.
__device__ __forceinline__ u32 block_of(const KBuffer& k) {
  return k.smem + kKeysLayout.block + (kKStages > 1 ? int(sizeof(KeyBlock)) * k.ring.stage() : 0);
}
__device__ __forceinline__ KeyBlock load_block(const KBuffer& k) {
  return load_shared_struct_uniform<KeyBlock>(block_of(k));
}

// The Step and the statistics of the current stage of Q, and the statistics of the current stage of dO.
__device__ __forceinline__ u32 step_of(const QBuffers& q) {
  return q.smem + kKeysLayout.step + int(sizeof(Step)) * q.ring.stage();
}
__device__ __forceinline__ u32 shift_of(const QBuffers& q) {
  return q.smem + kKeysLayout.shift + 4 * kBlockRows * q.ring.stage();
}
__device__ __forceinline__ u32 delta_of(const OBuffers& o) {
  return o.smem + kKeysLayout.delta + 4 * kBlockRows * o.ring.stage();
}

// The MaskPlaces of the current stage of Q.
__device__ __forceinline__ u32 mask_places_of(const QBuffers& q) {
  return q.smem + kKeysLayout.mask + int(sizeof(MaskPlaces)) * q.ring.stage();
}

// The producer's loads of Q and dO, and the common part of its loads of K and V.
struct StepLoader {
  enum : int {
    kStatisticsBytes = 4 * kBlockRows,
    kBiasPanels = bias_panels(kBiasTile, kBlockKeys),
    kBiasBytes = kBiasPanels * (kBiasRows ? kBlockRows : 1) * kPanelRowBytes,
  };

  const BackwardParams& p;
  u32 smem;
  KBuffer k;
  VBuffer v;
  QBuffers q;
  OBuffers o;
  u32 tail_parity = 0;

  __device__ __forceinline__ StepLoader(const BackwardParams& p, u32 smem)
      : p(p), smem(smem), k(smem, 1), v(smem, 1), q(smem, 1), o(smem, 1) {}

  // The kv head of a key block.
  __device__ __forceinline__ int key_head(const KeyBlock& block) const { return quotient(block.head, p.splits); }

  // Loads panels of rows into a stage and makes the last arrival at its barrier.
  template <class Type, int panels, int rows, int first = 0, class Ring>
  __device__ __forceinline__ void load(const Ring& to, const void* map, const Source& source, int row, bool may_clear,
                                       Keep keep) {
    const bool cleared = load_rows<Type::kType, panels, rows, first>(
        to.address(), map, to.full(), smem + kKeysLayout.tail, tail_parity, source, row, may_clear, keep);
    if (cleared)
      if (elect_one()) mbarrier_arrive(to.full());
  }

  // Loads panels of K or V of a key block.
  template <class Type, int panels, int first = 0, class Ring>
  __device__ __forceinline__ void load_keys_into(const Ring& to, const void* map, const KeyBlock& block,
                                                 const Lengths& n) {
    const Source source = {n.k_start, n.sk, key_head(block), kPacked ? 0 : block.batch};
    load<Type, panels, kBlockKeys, first>(to, map, source, block.block * kBlockKeys, kPacked || kSeqUsedK,
                                          Keep::kShort);
  }

  // Prefetches K and V of a key block to L2, during the last steps of the previous block.
  __device__ __forceinline__ void prefetch_keys(const KeyBlock& block, const Lengths& n) const {
    if (!elect_one()) return;
    const int row = n.k_start + block.block * kBlockKeys;
    const int head = key_head(block);
#pragma unroll
    for (int box = 0; box < kBlockKeys; box += 64) {
#pragma unroll
      for (int panel = 0; panel < kKPanels; ++panel)
        tma_prefetch(&p.k_map, {ElementK::kPanelColumns * panel, row + box, head, kPacked ? 0 : block.batch});
#pragma unroll
      for (int panel = 0; panel < kVPanels; ++panel)
        tma_prefetch(&p.v_map, {ElementV::kPanelColumns * panel, row + box, head, kPacked ? 0 : block.batch});
    }
  }

  // Stores a key block for the consumers, with the stage of K.
  __device__ __forceinline__ void announce(const KeyBlock& block) {
    k.wait_empty();
    if (elect_one()) store_shared_struct(block_of(k), block);
    __syncwarp();
  }

  // Loads the bias of a step into the stage of Q.
  __device__ __forceinline__ void load_bias(const KeyBlock& block, const Step& step, const Source& source) {
    const int head = p.bias.head == 0 ? 0 : source.head;
    const int batch = p.bias.batch == 0 ? 0 : block.batch;
#pragma unroll
    for (int panel = 0; panel < kBiasPanels; ++panel)
#pragma unroll
      for (int box = 0; box < (kBiasRows ? kBlockRows : 1); box += 64)
        tma_load(q.address() + kKeysLayout.bias + panel * bias_panel_bytes(kBiasRows, kBlockRows) +
                     box * kPanelRowBytes,
                 &p.bias_map, q.full(),
                 {block.block * kBlockKeys + panel * kPanelRowBytes / bias_bytes(kBias), kBiasRows ? step.row + box : 0,
                  head, batch},
                 Keep::kShort);
  }

  // Stores the places of mask words for the consumers, with the stage of Q.
  __device__ __forceinline__ void store_mask_places(const MaskPlaces& mask) const {
    store_shared(mask_places_of(q), mask.here);
    store_shared(mask_places_of(q) + 4, mask.next);
  }

  // Loads a tile of Q with its LSE and bias, LSE at row `statistics` of shift. An earlier kernel prepares LSE,
  // so that the first step of a work tile waits for it.
  __device__ __forceinline__ void load_queries(const KeyBlock& block, const Step& step, const Source& source,
                                               long long statistics, bool first, const MaskPlaces& mask = {}) {
    q.wait_empty();
    load<ElementQ, kQPanels, kBlockRows>(q, &p.q_map, source, step.row, kPacked || kSeqUsedQ, Keep::kLong);
    if (first) wait_for_earlier_kernels();
    if (elect_one()) {
      store_shared_struct(step_of(q), step);
      if (kMaskBits) store_mask_places(mask);
      mbarrier_arrive_expect(q.full(), kStatisticsBytes + kBiasBytes);
      if (kBiasTile) load_bias(block, step, source);
      bulk_load(shift_of(q), p.shift + statistics, kStatisticsBytes, q.full(), Keep::kLong);
    }
    __syncwarp();
    q.advance();
  }

  // Loads a tile of dO with its D, at row `statistics` of delta.
  __device__ __forceinline__ void load_gradients(const Step& step, const Source& source, long long statistics) {
    o.wait_empty();
    if (elect_one()) {
      mbarrier_arrive_expect(o.full(), kStatisticsBytes);
      bulk_load(delta_of(o), p.delta + statistics, kStatisticsBytes, o.full(), Keep::kLong);
    }
    __syncwarp();
    load<ElementO, kOPanels, kBlockRows>(o, &p.dout_map, source, step.row, kPacked || kSeqUsedQ, Keep::kLong);
    o.advance();
  }
};

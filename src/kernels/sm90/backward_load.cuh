// How the producer warp of backward_keys.cu fills shared memory, and the rings through which it does.
#pragma once
#include "shared/buffers.cuh"
#include "shared/load_rows.cuh"
#include "sm90/backward_layout.cuh"
#include "sm90/backward_params.h"

using KBuffer = Buffers<kKeysLayout.k, kKeysLayout.k_bytes, kKeysLayout.k_full, kKeysLayout.k_empty, 1>;
using VBuffer = Buffers<kKeysLayout.v, kKeysLayout.v_bytes, kKeysLayout.v_full, kKeysLayout.v_empty, 1>;
using QBuffers = Buffers<kKeysLayout.q, kKeysLayout.q_bytes, kKeysLayout.q_full, kKeysLayout.q_empty, kQStages>;
using OBuffers = Buffers<kKeysLayout.o, kKeysLayout.o_bytes, kKeysLayout.o_full, kKeysLayout.o_empty, kOStages>;

// The producer's side of backward_keys.cu.
struct KeysLoader {
  const BackwardParams& p;
  u32 smem;
  KBuffer k;
  VBuffer v;
  QBuffers q;
  OBuffers o;
  u32 tail_parity = 0;

  __device__ __forceinline__ KeysLoader(const BackwardParams& p, u32 smem)
      : p(p), smem(smem), k(smem, 1), v(smem, 1), q(smem, 1), o(smem, 1) {}

  // K and V of a block, and what the consumers must know of it, which comes with K. The end of all work, and a block
  // without steps, are that alone.
  __device__ __forceinline__ void load_keys(const KeyBlock& block, const Lengths& n) {
    k.wait_empty();
    if (elect_one()) store_shared_struct(smem + kKeysLayout.block, block);
    __syncwarp();
    const u32 tail = smem + kKeysLayout.tail;
    if (block.block < 0 || !(block.state & kHasSteps)) {
      if (elect_one()) mbarrier_arrive(k.full());
      k.advance();
      return;
    }
    const Source source = {n.k_start, n.sk, block.head, kPacked ? 0 : block.batch};
    const int row = block.block * kBlockKeys;
    const bool may_clear = kPacked || kSeqUsedK;
    if (load_rows<kHeadPanels, kBlockKeys>(k.address(), &p.k_map, k.full(), tail, tail_parity, source, row, may_clear,
                                           Keep::kShort))
      if (elect_one()) mbarrier_arrive(k.full());
    k.advance();
    v.wait_empty();
    if (load_rows<kValuePanels, kBlockKeys>(v.address(), &p.v_map, v.full(), tail, tail_parity, source, row, may_clear,
                                            Keep::kShort))
      if (elect_one()) mbarrier_arrive(v.full());
    v.advance();
  }

  // A tile of Q with its LSE, and of dO with its D. `statistics`: the tile's first row among them.
  __device__ __forceinline__ void load_step(const Step& step, const Source& source, long long statistics) {
    constexpr int kStatisticsBytes = 4 * kBlockRows;
    const u32 tail = smem + kKeysLayout.tail;
    q.wait_empty();
    if (elect_one()) {
      store_shared_struct(smem + kKeysLayout.step + int(sizeof(Step)) * q.ring.stage(), step);
      mbarrier_arrive_expect(q.full(), kStatisticsBytes);
      bulk_load(smem + kKeysLayout.shift + kStatisticsBytes * q.ring.stage(), p.shift + statistics, kStatisticsBytes,
                q.full(), Keep::kLong);
    }
    __syncwarp();
    if (load_rows<kHeadPanels, kBlockRows>(q.address(), &p.q_map, q.full(), tail, tail_parity, source, step.row,
                                           kPacked, Keep::kLong))
      if (elect_one()) mbarrier_arrive(q.full());
    q.advance();
    o.wait_empty();
    if (elect_one()) {
      mbarrier_arrive_expect(o.full(), kStatisticsBytes);
      bulk_load(smem + kKeysLayout.delta + kStatisticsBytes * o.ring.stage(), p.delta + statistics, kStatisticsBytes,
                o.full(), Keep::kLong);
    }
    __syncwarp();
    if (load_rows<kValuePanels, kBlockRows>(o.address(), &p.dout_map, o.full(), tail, tail_parity, source, step.row,
                                            kPacked, Keep::kLong))
      if (elect_one()) mbarrier_arrive(o.full());
    o.advance();
  }
};

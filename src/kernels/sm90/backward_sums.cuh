// dQ = dS K as sums in global memory, by a warpgroup beside those that own keys: it takes each step's dS from shared
// memory, and adds its product to what the blocks of other keys have left, in no fixed order.
#pragma once
#include "sm90/backward_load.cuh"

// Named barriers of backward_keys.cu.
__device__ __forceinline__ u32 ds_full(u32 stage) { return 1 + stage; }
__device__ __forceinline__ u32 ds_empty(u32 stage, u32 owner) { return 1 + kDsStages + stage * kConsumers + owner; }
enum NamedBarrier : u32 { kBarrierSums = 1 + kDsStages * (1 + kConsumers) };

enum : int {
  kDsFullThreads = 128 * (kConsumers + 1),  // those that own keys arrive, this warpgroup waits
  kDsEmptyThreads = 256,                    // this warpgroup arrives, one that owns keys waits
  kStepUnits = kRowSteps * kHeadPanels,
};

// A unit of dQ, 64 rows x 64 columns, through shared memory to its sum.
__device__ __forceinline__ void add_unit(const float (&dQ)[32], float* to, u32 shared) {
  const u32 thread = threadIdx.x % 128;
  if (thread < 32) tma_store_wait_read<kSumsStages - 1>();
  named_barrier_sync(kBarrierSums, 128);
#pragma unroll
  for (int j = 0; j < 8; ++j)
    store_shared_four(shared + ((thread / 32 * 8 + j) * 32 + thread % 32) * 16, dQ[4 * j], dQ[4 * j + 1],
                      dQ[4 * j + 2], dQ[4 * j + 3]);
  fence_async_proxy();
  named_barrier_sync(kBarrierSums, 128);
  if (thread < 32) {
    if (elect_one()) bulk_add(to, shared, 4 * kUnitFloats);
    tma_store_commit();
  }
}

__device__ __forceinline__ void sum_queries(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  KBuffer k(smem, 0);
  u32 stage = 0;
  u32 first_buffer = 0;  // of the next step: buffers take turns, whatever the units of a step are
  for (;;) {
    k.wait_full();
    const KeyBlock block = load_shared_struct_uniform<KeyBlock>(smem + kKeysLayout.block);
    if (block.block < 0) break;
    bool last = !(block.state & kHasSteps);
    const u32 k_operand = uniform_descriptor(k.address(), kBlockKeys * 128);
    while (!last) {
      named_barrier_sync(ds_full(stage), kDsFullThreads);
      const Step step = load_shared_struct_uniform<Step>(smem + kKeysLayout.ds_step + int(sizeof(Step)) * stage);
      last = step.state & kLastStep;
      const u32 ds = uniform_descriptor(smem + kKeysLayout.ds + stage * kConsumers * kKeysLayout.ds_bytes, 0);
      float* const sums = p.dq_sums + (long long)(step.tile) * (kBlockRows * 64 * kHeadPanels);
#pragma unroll
      for (int unit = 0; unit < kStepUnits; ++unit) {
        const int row_step = unit / kHeadPanels;
        const int panel = unit % kHeadPanels;
        float dQ[32];
        wgmma_fence();
#pragma unroll
        for (int part = 0; part < kBlockKeys / 16; ++part) {
          // The pieces of a warpgroup's 64 keys lie behind each other, then come those of the next.
          const int piece = part / 4 * kKeysLayout.ds_bytes + row_step * kPieceBytes + part % 4 * 16 * 128;
          Wgmma<64>::multiply<kAcrossK, kAcrossK>(dQ, ds + (piece >> 4),
                                                  k_operand + ((panel * kBlockKeys * 128 + part * 16 * 128) >> 4),
                                                  part);
        }
        wgmma_commit();
        wgmma_wait<0>();
        register_fence(dQ);
        if (unit == kStepUnits - 1) {
#pragma unroll
          for (int owner = 0; owner < kConsumers; ++owner)
            named_barrier_arrive(ds_empty(stage, owner), kDsEmptyThreads);
          mbarrier_arrive_if(k.empty(), leader && last);  // the next block's K may come
        }
        const u32 buffer = (first_buffer + unit) % kSumsStages;
        add_unit(dQ, sums + unit * kUnitFloats, smem + kKeysLayout.sums + buffer * 4 * kUnitFloats);
      }
      first_buffer = (first_buffer + kStepUnits) % kSumsStages;
      stage = stage + 1 == kDsStages ? 0 : stage + 1;
    }
    mbarrier_arrive_if(k.empty(), leader && !(block.state & kHasSteps));
    k.advance();
  }
  tma_store_wait();
}

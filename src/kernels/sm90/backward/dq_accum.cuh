// dQ = dS K as sums in global memory, by a warpgroup with those that own keys: it takes each step's dS from shared
// memory, and warps with the producer add its product to what the blocks of other keys have left: in no fixed
// order, or, with kOrdered, in that in which blocks are taken, of which the first stores.
#pragma once
#include "device/dependent_launch.cuh"
#include "device/semaphore.cuh"
#include "sm90/backward/load.cuh"

// Named barriers of sm90/backward/keys.cu.
__device__ __forceinline__ u32 ds_full(u32 stage) { return 1 + stage; }
__device__ __forceinline__ u32 ds_empty(u32 stage, u32 owner) { return 1 + kDsStages + stage * kConsumers + owner; }
__device__ __forceinline__ u32 sums_full(u32 stage) { return 1 + kDsStages * (1 + kConsumers) + stage; }
__device__ __forceinline__ u32 sums_empty(u32 stage) { return sums_full(kSumsStages) + stage; }

enum : int {
  kDsFullThreads = 128 * (kConsumers + 1),  // those that own keys arrive, this warpgroup waits
  kDsEmptyThreads = 256,                    // this warpgroup arrives, one that owns keys waits
  kSumsThreads = 128 + 32,                  // this warpgroup, and the warp that a buffer of sums has
};

__device__ __forceinline__ u32 sums_buffer(u32 smem, u32 stage) {
  return smem + kKeysLayout.sums + stage * 4 * kUnitFloats;
}
__device__ __forceinline__ u32 unit_of_buffer(u32 smem, u32 stage) {
  return smem + kKeysLayout.sum_unit + int(sizeof(SumUnit)) * stage;
}

// The buffers of shared memory through which units of dQ leave the warpgroup that computes them.
struct SumsBuffers {
  u32 smem;
  u32 stage = 0;
  u32 filled = 0;  // up to kSumsStages

  __device__ __forceinline__ explicit SumsBuffers(u32 smem) : smem(smem) {}
  __device__ __forceinline__ void wait_empty() const {
    if (filled == kSumsStages) named_barrier_sync(sums_empty(stage), kSumsThreads);
  }
  __device__ __forceinline__ void leave(const SumUnit& unit) {
    if (threadIdx.x % 128 == 0) store_shared_struct(unit_of_buffer(smem, stage), unit);
    fence_async_proxy();
    named_barrier_arrive(sums_full(stage), kSumsThreads);
    filled = min(filled + 1, u32(kSumsStages));
    stage = stage + 1 == kSumsStages ? 0 : stage + 1;
  }
};

// 64 rows of dQ = dS K, and a panel's columns. `computed` runs when dS and K have been read.
template <int kColumns, class Computed>
__device__ __forceinline__ void sum_unit(SumsBuffers& sums, u32 ds, u32 k, SumUnit unit, const Computed& computed) {
  const u32 thread = threadIdx.x % 128;
  float dQ[kColumns / 2];
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < kBlockKeys / 16; ++part) {
    // The pieces of a warpgroup's 64 keys lie after each other, then come those of the next.
    const int piece = part / 4 * kKeysLayout.ds_bytes + part % 4 * 16 * 128;
    Wgmma<kColumns>::template multiply<kAcrossK, kAcrossK>(dQ, ds + (piece >> 4), k + (part * 16 * 128 >> 4), part);
  }
  wgmma_commit();
  wgmma_wait<0>();
  register_fence(dQ);
  computed();
  sums.wait_empty();
  const u32 to = sums_buffer(sums.smem, sums.stage) + (thread / 32 * (kColumns / 8) * 32 + thread % 32) * 16;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
    store_shared_four(to + j * 512, dQ[4 * j], dQ[4 * j + 1], dQ[4 * j + 2], dQ[4 * j + 3]);
  unit.bytes = 4 * 64 * kColumns;
  sums.leave(unit);
}

// What the warpgroup does.
__device__ __forceinline__ void sum_queries(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  KBuffer k(smem, 0);
  SumsBuffers sums(smem);
  u32 stage = 0;
  for (;;) {
    k.wait_full();
    const KeyBlock block = load_block(k);
    if (block.block < 0) break;
    bool last = !(block.state & kHasSteps);
    const int next = block.block + (block.state & kNextBehind ? 1 : -1);
    const u32 k_operand = uniform_descriptor(k.address(), kBlockKeys * 128);
    while (!last) {
      named_barrier_sync(ds_full(stage), kDsFullThreads);
      const Step step = load_shared_struct_uniform<Step>(smem + kKeysLayout.ds_step + int(sizeof(Step)) * stage);
      last = step.state & kLastStep;
      const u32 ds = uniform_descriptor(smem + kKeysLayout.ds + stage * kConsumers * kKeysLayout.ds_bytes, 0);
#pragma unroll
      for (int unit = 0; unit < kStepUnits; ++unit) {
        const int panel = unit % kHeadPanels;
        const u32 rows = ds + (unit / kHeadPanels * kPieceBytes >> 4);
        const u32 columns = k_operand + (panel * kBlockKeys * 128 >> 4);
        const SumUnit to = {step.tile * kStepUnits + unit, block.block, next, 0};
        const auto computed = [&] {
          if (unit < kStepUnits - 1) return;
#pragma unroll
          for (int owner = 0; owner < kConsumers; ++owner)
            named_barrier_arrive(ds_empty(stage, owner), kDsEmptyThreads);
          mbarrier_arrive_if(k.empty(), leader && last);  // the next block's K may come
        };
        if (panel < kHeadPanels - 1) sum_unit<64>(sums, rows, columns, to, computed);
        else sum_unit<kLastColumns>(sums, rows, columns, to, computed);
      }
      stage = stage + 1 == kDsStages ? 0 : stage + 1;
    }
    mbarrier_arrive_if(k.empty(), leader && !(block.state & kHasSteps));
    k.advance();
  }
#pragma unroll 1
  for (int i = 0; i < kSumsStages; ++i) {
    sums.wait_empty();
    sums.leave({-1, 0, 0, 0});
  }
}

// What each of these warps does, which has a buffer of its own: it adds the units of dQ that come there to their
// sums. With kOrdered it waits for the turn of a unit's block, and passes that on when what it has added is there.
__device__ __forceinline__ void add_units(const BackwardParams& p, u32 smem, u32 stage) {
  const u32 buffer = sums_buffer(smem, stage);
  wait_for_earlier_kernels();
  for (;;) {
    named_barrier_sync(sums_full(stage), kSumsThreads);
    const SumUnit now = load_shared_struct_uniform<SumUnit>(unit_of_buffer(smem, stage));
    if (now.unit < 0) break;
    int turn = 0;
    if (kOrdered) {
      do {
        turn = uniform(load_turn(p.turns + now.unit));
      } while ((turn & ~kFirstTurn) != now.turn);
      fence_async_proxy_global();
    }
    if (elect_one()) {
      float* const to = p.dq_sums + (long long)(now.unit) * kUnitFloats;
      if (turn & kFirstTurn) bulk_store(to, buffer, now.bytes);
      else bulk_add(to, buffer, now.bytes);
    }
    tma_store_commit();
    tma_store_wait_read();
    named_barrier_arrive(sums_empty(stage), kSumsThreads);
    if (kOrdered) {
      tma_store_wait();
      if (elect_one()) pass_turn(p.turns + now.unit, now.next);
    }
  }
  tma_store_wait();
}

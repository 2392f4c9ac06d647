// dQ = dS K by a third consumer warpgroup, which reads dS of each step from shared memory and computes dQ tiles. Warps
// next to the producer add these to dq_accum in global memory. Key blocks add to the same tiles in no fixed order; with
// kOrderedDq a semaphore of each dQ tile makes them add in the order in which CTAs take them, and the first one stores.
// With kRoundsDq they count additions, and the warp that counts the last one of 64 rows has its CTA round these. With
// kKeepsDq a tile of the last step stays in shared memory, to be added when it is rounded, if all other key blocks have
// added to its rows.
#pragma once
#include "device/dependent_launch.cuh"
#include "device/semaphore.cuh"
#include "sm90/backward/load.cuh"

// Named barriers of keys.cu.
__device__ __forceinline__ u32 ds_full(u32 stage) { return 1 + stage; }
__device__ __forceinline__ u32 ds_empty(u32 stage, u32 owner) { return 1 + kDsStages + stage * kConsumers + owner; }
__device__ __forceinline__ u32 dq_full(u32 stage) { return 1 + kDsStages * (1 + kConsumers) + stage; }
__device__ __forceinline__ u32 dq_empty(u32 stage) { return dq_full(kDqStages) + stage; }
__device__ __forceinline__ u32 dq_added() { return dq_empty(kDqStages); }  // kRoundsDq

enum : int {
  // Measured as faster for key blocks of two warpgroups that begin at different rows: each block is last at some rows.
  kKeepsDq = kRoundsDq && !kHidesKeys && kConsumers == 2 && kDqTilesOfStep <= kDqStages,
  kDsFullThreads = 128 * (kConsumers + 1),  // the warpgroups that own keys arrive, the one that computes dQ waits
  kDsEmptyThreads = 256,                    // the warpgroup that computes dQ arrives, one that owns keys waits
  kDqThreads = 128 + 32,                    // the warpgroup that computes dQ, and the warp of the stage
  kDqAddedThreads = 32 * kDqStages + 128 * kConsumers,  // the warps of all stages arrive, those that round dQ wait
};

__device__ __forceinline__ u32 dq_buffer(u32 smem, u32 stage) {
  return smem + kKeysLayout.dq + stage * 4 * kDqTileFloats;
}
__device__ __forceinline__ u32 dq_tile_of_buffer(u32 smem, u32 stage) {
  return smem + kKeysLayout.dq_tile + int(sizeof(DqTile)) * stage;
}

// The ring of dQ tiles in shared memory, as the warpgroup that fills it sees it.
struct DqBuffers {
  u32 smem;
  u32 stage = 0;
  u32 filled = 0;  // up to kDqStages

  __device__ __forceinline__ explicit DqBuffers(u32 smem) : smem(smem) {}
  __device__ __forceinline__ void wait_empty() const {
    if (filled == kDqStages) named_barrier_sync(dq_empty(stage), kDqThreads);
  }
  __device__ __forceinline__ void commit(const DqTile& tile) {
    if (threadIdx.x % 128 == 0) store_shared_struct(dq_tile_of_buffer(smem, stage), tile);
    fence_async_proxy();
    named_barrier_arrive(dq_full(stage), kDqThreads);
    filled = min(filled + 1, u32(kDqStages));
    stage = stage + 1 == kDqStages ? 0 : stage + 1;
  }
};

// Computes a dQ tile of kColumns columns from dS of 64 rows and a panel of K. `computed` runs when the product has read
// both.
template <int kColumns, class Computed>
__device__ __forceinline__ void compute_dq_tile(DqBuffers& buffers, u32 ds, u32 k, DqTile tile,
                                                const Computed& computed) {
  const u32 thread = threadIdx.x % 128;
  float dQ[kColumns / 2];
  wgmma_fence();
#pragma unroll
  for (int part = 0; part < kBlockKeys / ElementK::kStep; ++part) {
    // The dS tiles of a warpgroup's 64 keys follow each other, then come those of the next warpgroup.
    const int ds_offset = part / 4 * kKeysLayout.ds_bytes + part % 4 * 16 * 128;
    Wgmma<kColumns, ElementK::kType>::template multiply<kAcrossK, kAcrossK>(
        dQ, ds + (ds_offset >> 4), k + (part * ElementK::kStep * kPanelRowBytes >> 4), part);
  }
  wgmma_commit();
  wgmma_wait<0>();
  register_fence(dQ);
  computed();
  buffers.wait_empty();
  const u32 to = dq_buffer(buffers.smem, buffers.stage) + (thread / 32 * (kColumns / 8) * 32 + thread % 32) * 16;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j)
    store_shared_four(to + j * 512, dQ[4 * j], dQ[4 * j + 1], dQ[4 * j + 2], dQ[4 * j + 3]);
  tile.bytes = 4 * 64 * kColumns;
  buffers.commit(tile);
}

// The additions to dq_accum of each 64 rows of a step, by all key blocks.
__device__ __forceinline__ int additions_of(const BackwardParams& p, const KeyBlock& block, const Step& step) {
  const KeyTiles blocks = key_tiles_of(band_of(p), lengths_of(p, block.batch), kScoreTile, step.row / kBlockRows);
  return (blocks.end - blocks.begin) * kDqPanels;
}

// Whether all other key blocks have counted their additions to 64 rows. It polls for a while, because they are about to
// do so, but not longer, because they need not run at the same time.
__device__ __forceinline__ bool others_have_added(const BackwardParams& p, int rows, int all) {
  enum : int { kLooks = 4 };
  bool added = false;
#pragma unroll 1
  for (int i = 0; i < kLooks && !added; ++i) added = look_acquire(p.dq_additions + rows) == all - kDqPanels;
  return added;
}

// The loop of the warpgroup that computes dQ.
__device__ __forceinline__ void compute_dq(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  KBuffer k(smem, 0);
  DqBuffers buffers(smem);
  u32 stage = 0;
  for (;;) {
    k.wait_full();
    const KeyBlock block = load_block(k);
    if (block.block < 0) break;
    bool last = !(block.state & kHasSteps);
    const int next = block.block + (block.state & kNextIsHigher ? 1 : -1);
    const u32 k_operand = uniform_descriptor(k.address(), kBlockKeys * 128);
    while (!last) {
      named_barrier_sync(ds_full(stage), kDsFullThreads);
      const Step step = load_shared_struct_uniform<Step>(smem + kKeysLayout.ds_step + int(sizeof(Step)) * stage);
      last = step.state & kLastStep;
      bool stays = false;  // kKeepsDq; known to the thread that commits tiles
      const u32 ds = uniform_descriptor(smem + kKeysLayout.ds + stage * kConsumers * kKeysLayout.ds_bytes, 0);
#pragma unroll
      for (int tile = 0; tile < kDqTilesOfStep; ++tile) {
        const int panel = tile % kDqPanels;
        const u32 rows = ds + (tile / kDqPanels * kDsTileBytes >> 4);
        const u32 columns = k_operand + (panel * kBlockKeys * 128 >> 4);
        DqTile to = {step.tile * kDqTilesOfStep + tile, block.block, next, 0};
        if (kMapsTiles && kOrderedDq) to.block = u32(step.state) / kBlockBefore;
        if (kMapsTiles && kOrderedDq) to.next = block.block + 1;
        if (kRoundsDq) to.block = step.state & kCounted;
        if (kRoundsDq) to.next = additions_of(p, block, step);
        if (kKeepsDq && last && panel == 0 && threadIdx.x % 128 == 0)
          stays = others_have_added(p, to.tile / kDqPanels, to.next);
        if (kKeepsDq && stays) to.block = kStays;
        const auto computed = [&] {
          if (tile < kDqTilesOfStep - 1) return;
#pragma unroll
          for (int owner = 0; owner < kConsumers; ++owner)
            named_barrier_arrive(ds_empty(stage, owner), kDsEmptyThreads);
          mbarrier_arrive_if(k.empty(), leader && last);  // frees K for the next block
        };
        if (panel < kDqPanels - 1) compute_dq_tile<64>(buffers, rows, columns, to, computed);
        else compute_dq_tile<kLastColumns>(buffers, rows, columns, to, computed);
      }
      stage = stage + 1 == kDsStages ? 0 : stage + 1;
    }
    mbarrier_arrive_if(k.empty(), leader && !(block.state & kHasSteps));
    k.advance();
  }
#pragma unroll 1
  for (int i = 0; i < kDqStages; ++i) {
    buffers.wait_empty();
    buffers.commit({-1, 0, 0, 0});
  }
}

// Counts the additions to dq_accum of this warp when they are complete, kRoundsDq. `added`: a bit for each 64 rows to
// which it has added, by their number over all q heads modulo 32; `first_rows`: the first of these numbers. The bits of
// those rows that have all of their additions now.
__device__ __forceinline__ u32 count_additions(const BackwardParams& p, u32 added, int first_rows, int all) {
  tma_store_wait();
  __syncwarp();
  const u32 lane = threadIdx.x % 32;
  const int rows = first_rows + int((lane - first_rows) % 32);
  const bool last = added >> lane & 1 && take_ticket(p.dq_additions + rows, all - 1) == all - 1;
  return __ballot_sync(0xffffffff, last);
}

// The loop of the warp of one stage: it adds the dQ tiles of this stage to dq_accum. With kOrderedDq it waits until the
// semaphore of the tile says that it is its turn, and sets it to the next one after the addition is complete.
// With kRoundsDq it counts additions that are complete, as the tiles say, and at the end.
__device__ __forceinline__ void accumulate_dq(const BackwardParams& p, u32 smem, u32 stage) {
  const u32 buffer = dq_buffer(smem, stage);
  u32 added = 0;     // kRoundsDq: a bit for each 64 rows to which it has added since it has counted
  u32 complete = 0;  // and for those that it has completed
  int first_rows = 0;
  int all = 0;
  int stays = -1;  // kKeepsDq: the tile that is left in shared memory
  wait_for_earlier_kernels();
  for (;;) {
    named_barrier_sync(dq_full(stage), kDqThreads);
    const DqTile now = load_shared_struct_uniform<DqTile>(dq_tile_of_buffer(smem, stage));
    if (now.tile < 0) break;
    if (kKeepsDq && now.block == kStays) {
      stays = now.tile;
      named_barrier_arrive(dq_empty(stage), kDqThreads);  // no further tile
      continue;
    }
    int semaphore = 0;
    if (kOrderedDq) {
      do {
        semaphore = uniform(load_acquire(p.dq_semaphore + now.tile));
      } while ((semaphore & ~kFirstToAdd) != now.block);
      fence_async_proxy_global();
    }
    if (elect_one()) {
      float* const to = p.dq_accum + (long long)(now.tile) * kDqTileFloats;
      if (semaphore & kFirstToAdd) bulk_store(to, buffer, now.bytes);
      else bulk_add(to, buffer, now.bytes);
    }
    tma_store_commit();
    tma_store_wait_read();
    named_barrier_arrive(dq_empty(stage), kDqThreads);
    if (kOrderedDq) {
      tma_store_wait();
      if (elect_one()) store_release(p.dq_semaphore + now.tile, now.next);
    }
    if (kRoundsDq) {
      const int rows = now.tile / kDqPanels;
      first_rows = added == 0 ? rows : min(first_rows, rows);
      added |= 1u << rows % 32;
      all = now.next;
      if (now.block) {
        complete |= count_additions(p, added, first_rows, all);
        added = 0;
      }
    }
  }
  tma_store_wait();
  if (kRoundsDq) {
    complete |= count_additions(p, added, first_rows, all);
    if (kKeepsDq && stays >= 0) complete |= 1u << stays / kDqPanels % 32;
    if (elect_one()) store_shared(smem + kKeysLayout.complete + 4 * stage, complete);
    if (kKeepsDq && elect_one()) store_shared(dq_tile_of_buffer(smem, stage), stays);
    named_barrier_arrive(dq_added(), kDqAddedThreads);
  }
}

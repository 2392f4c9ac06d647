// Attention forward for Hopper: O = softmax(scale Q K^T) V and LSE, exact, fp32 accumulation.
//
// A block owns Br = 64 * kConsumers rows of Q and walks the keys from right to left in tiles of Bc. One producer warp feeds rings of K and V
// through the copy engine; each consumer warpgroup owns 64 rows, and issues S(t) = Q K(t)^T and O += P(t-1) V(t-1) together, waits, and turns
// S(t) into P(t) while the other warpgroups keep the tensor cores busy. docs/kernels/forward.md derives the schedule.
#include "sm90/forward_output.cuh"
#include "shared/wgmma.cuh"

__device__ __forceinline__ void produce(const ForwardParams& p, u32 smem) {
  Ring q_ring(1), k_ring(1), v_ring(1);
  u32 tail_parity = 0;
  bool flip = false;
  const u32 lane = threadIdx.x % 32;
  int item = blockIdx.x;
  for (;;) {
    const Tile tile = tile_of(p, item);
    const int next = lane == 0 ? int(gridDim.x) + atomicAdd(&p.counters[0], 1) : 0;  // in flight while this tile is loaded
    const Lengths n = lengths_of(p, tile.batch);
    const int strip = first_strip(n, tile.block), end = first_strip(n, tile.block + 1);
    if (tile.block < 0 || 64 * strip < n.sq) {
      const KeyTiles keys = block_key_tiles(p, n, tile);
      const int kv_head = tile.head / p.group;

      // Under a band the lower a row the more keys it may see, so warpgroups take turns at the bottom.
      flip = (kHasLeft || kHasRight) && !flip;
      auto group_row = [&](int group) {  // n.sq: this warpgroup has none
        const int mine = strip + (flip ? kConsumers - 1 - group : group);
        return mine < end ? 64 * mine : n.sq;
      };

      auto load_q = [&] {
        mbarrier_wait(smem + sQEmpty + 8 * q_ring.stage(), q_ring.parity());
        const u32 full = smem + sQFull + 8 * q_ring.stage(), buffer = smem + sQ + q_ring.stage() * kQBytes;
        if (elect_one()) {
#pragma unroll
          for (int group = 0; group < kConsumers; ++group)
            write_view(p, tile, n, keys, view_address(smem, q_ring.stage(), group), group_row(group));
          if (tile.block < 0) {
            mbarrier_arrive(full);
          } else {
            mbarrier_arrive_expect(full, kConsumers * kHeadPanels * 64 * kPanelRowBytes);
#pragma unroll
            for (int group = 0; group < kConsumers; ++group)
#pragma unroll
              for (int panel = 0; panel < kHeadPanels; ++panel)
                tma_load(buffer + group * kQGroupBytes + panel * 64 * kPanelRowBytes, &p.q_map, full, 64 * panel, n.q_start + group_row(group),
                         tile.head, kPacked ? 0 : tile.batch, Keep::kShort);
          }
        }
        q_ring.advance(kQStages);
      };
      auto load_panels = [&](u32 shared, const void* map, u32 barrier, int panels, int key_tile) {
#pragma unroll
        for (int panel = 0; panel < panels; ++panel)
          tma_load(shared + panel * kPanelBytes, map, barrier, 64 * panel, n.k_start + key_tile * kBlockKeys, kv_head, kPacked ? 0 : tile.batch,
                   Keep::kLong);
      };
      auto load_k = [&](int key_tile) {
        mbarrier_wait(smem + sKEmpty + 8 * k_ring.stage(), k_ring.parity());
        const u32 full = smem + sKFull + 8 * k_ring.stage(), buffer = smem + sK + k_ring.stage() * kKBytes;
        if (elect_one()) {
          mbarrier_arrive_expect(full, kKBytes);
          load_panels(buffer, &p.k_map, full, kHeadPanels, key_tile);
        }
        k_ring.advance(kKStages);
      };
      auto load_v = [&](int key_tile) {
        mbarrier_wait(smem + sVEmpty + 8 * v_ring.stage(), v_ring.parity());
        const u32 full = smem + sVFull + 8 * v_ring.stage(), buffer = smem + sV + v_ring.stage() * kVBytes;
        // Rows of V beyond this sequence would meet P = 0, and 0 * NaN is NaN. Where they are not the copy engine's zeros, clear them.
        const int valid = n.sk - key_tile * kBlockKeys;
        const bool clear = (kPacked || kSeqUsedK) && valid < kBlockKeys;
        const u32 landed = clear ? smem + sVTail : full;
        if (elect_one()) {
          mbarrier_arrive_expect(landed, kVBytes);
          load_panels(buffer, &p.v_map, landed, kValuePanels, key_tile);
        }
        if (clear) {
          mbarrier_wait(landed, tail_parity);
          tail_parity ^= 1;
          for (int panel = 0; panel < kValuePanels; ++panel)
            for (int at = valid * kPanelRowBytes + 16 * lane; at < kPanelBytes; at += 512) shared_store_zero16(buffer + panel * kPanelBytes + at);
          fence_async_proxy();
          __syncwarp();
          if (lane == 0) mbarrier_arrive(full);
        }
        v_ring.advance(kVStages);
      };

      if (tile.block < 0) {
        load_q();
        break;
      }
      // With one buffer of Q, which the previous tile may still be using, the first K comes before.
      if (kQStages > 1 || keys.end <= keys.begin) load_q();
#pragma unroll 1
      for (int key_tile = keys.end - 1; key_tile >= keys.begin; --key_tile) {
        load_k(key_tile);
        if (kQStages == 1 && key_tile == keys.end - 1) load_q();
        load_v(key_tile);
      }
    }
    item = __shfl_sync(0xffffffff, next, 0);
  }
  // The last block to finish clears the counters for the next launch.
  if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1) p.counters[0] = 0;
}

__device__ __forceinline__ void issue_scores(float (&S)[kBlockKeys / 2], u32 q, u32 k) {
#pragma unroll
  for (int step = 0; step < kHeadDim / 16; ++step) {
    const int panel = step / 4, inside = step % 4 * 32;
    Wgmma<kBlockKeys>::shared(S, q + ((panel * 64 * kPanelRowBytes + inside) >> 4), k + ((panel * kPanelBytes + inside) >> 4), step != 0);
  }
}

__device__ __forceinline__ void issue_values(float (&O)[kValueDim / 2], const u32 (&P)[kBlockKeys / 4], u32 v) {
#pragma unroll
  for (int step = 0; step < kBlockKeys / 16; ++step) Wgmma<kValueDim>::registers(O, P + 4 * step, v + (step * 16 * kPanelRowBytes >> 4));
}

__device__ __forceinline__ void consume(const ForwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  const float c = kScoreMode == 0 ? p.scale_log2 : 1.f;
  Ring q_ring(0), k_ring(0), v_ring(0);
  auto wait_k = [&] { mbarrier_wait(smem + sKFull + 8 * k_ring.stage(), k_ring.parity()); };
  auto wait_v = [&] { mbarrier_wait(smem + sVFull + 8 * v_ring.stage(), v_ring.parity()); };
  auto release_k = [&] {
    mbarrier_arrive_if(smem + sKEmpty + 8 * k_ring.stage(), leader);
    k_ring.advance(kKStages);
  };
  auto release_v = [&] {
    mbarrier_arrive_if(smem + sVEmpty + 8 * v_ring.stage(), leader);
    v_ring.advance(kVStages);
  };
  auto skip = [&](int count) {  // tiles that only other warpgroups of the block see
#pragma unroll 1
    for (; count > 0; --count) wait_k(), release_k(), wait_v(), release_v();
  };
  auto k_tile = [&] { return u32(uniform(tile_descriptor(smem + sK + k_ring.stage() * kKBytes, 0))); };
  auto v_tile = [&] { return u32(uniform(tile_descriptor(smem + sV + v_ring.stage() * kVBytes, kPanelBytes))); };
  auto q_tile = [&] {
    return u32(uniform(tile_descriptor(smem + sQ + q_ring.stage() * kQBytes + (threadIdx.x / 128 - 1) * kQGroupBytes, 0)));
  };
  u32 leaving = 0;  // the buffer through which the previous O is still leaving, as the offset of its barrier
  auto release_q = [&] {
    tma_store_wait_read();
    __syncwarp();
    mbarrier_arrive_if(smem + leaving, leader && leaving);
    leaving = 0;
  };

  for (;;) {
    mbarrier_wait(smem + sQFull + 8 * q_ring.stage(), q_ring.parity());
    const u32 view = view_address(smem, q_ring.stage(), threadIdx.x / 128 - 1);
    int key_tile, last_tile, skip_front, skip_back, clear_begin, clear_end, sk, diagonal;
    shared_load4_uniform(view, key_tile, last_tile, skip_front, skip_back);
    shared_load4_uniform(view + 16, clear_begin, clear_end, sk, diagonal);
    if (skip_front < 0) break;
    skip(skip_front);
    const u32 q = q_tile();
    const Visible visible = visible_of_thread(p, sk, diagonal);
    float S[kBlockKeys / 2], O[kValueDim / 2];
    u32 P[kBlockKeys / 4];
    auto adjust_scores = [&](bool rightmost) {
      if (kScoreMode) transform_scores(p, S, view, diagonal, key_tile);
      bool partial = rightmost || kHasRight ? key_tile >= clear_end : false;
      if (kHasLeft) partial = partial || key_tile < clear_begin;
      if (partial) mask_scores(S, visible, key_tile);
    };
    Rows rows = {{__int_as_float(0x7f800000), __int_as_float(0x7f800000)}, {0, 0}};
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;

    Place place;
    auto leave_q = [&] {  // O needs no shared memory: the next Q, and its view, may come at once
      place = read_place(view);
      mbarrier_arrive_if(smem + sQEmpty, leader);
    };

    if (key_tile >= last_tile) {
      wait_k();
      wgmma_fence();
      issue_scores(S, q, k_tile());
      wgmma_commit();
      if (kQStages > 1) release_q();
      wgmma_wait<0>();
      register_fence(S);
      release_k();
      adjust_scores(true);
      softmax_step<true>(S, P, O, rows, c);

#pragma unroll 1
      while (--key_tile >= last_tile) {
        wait_v();
        wait_k();
        register_fence(O);
        wgmma_fence();
        issue_scores(S, q, k_tile());
        wgmma_commit();
        issue_values(O, P, v_tile());
        wgmma_commit();
        wgmma_wait<1>();
        release_k();
        wgmma_wait<0>();
        register_fence(S);
        register_fence(O);
        release_v();
        adjust_scores(false);
        softmax_step<false>(S, P, O, rows, c);
      }

      wait_v();
      register_fence(O);
      wgmma_fence();
      issue_values(O, P, v_tile());
      wgmma_commit();
      if (kQStages == 1) leave_q();
      wgmma_wait<0>();
      register_fence(O);
      release_v();
    } else {
      if (kQStages > 1) release_q();
      else leave_q();
    }
    if (kHasLeft) skip(skip_back);

    rows.sum[0] = quad_sum(rows.sum[0]);
    rows.sum[1] = quad_sum(rows.sum[1]);
    if (kQStages > 1) {
      place = read_place(view);
      named_barrier_sync(kBarrierConsumer + threadIdx.x / 128 - 1, 128);  // every warp has read Q
    }
    if (!kSplitTail || combine_parts(p, place, rows, O, smem)) finish(p, place, rows, O, smem, q_ring.stage());
    leaving = sQEmpty + 8 * q_ring.stage();
    q_ring.advance(kQStages);
  }
  tma_store_wait_read();
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kThreads, 1) fulgur_forward(const __grid_constant__ ForwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (threadIdx.x == 0) {
    for (int i = 0; i < kQStages; ++i) mbarrier_init(smem + sQFull + 8 * i, 1), mbarrier_init(smem + sQEmpty + 8 * i, 4 * kConsumers);
    for (int i = 0; i < kKStages; ++i) mbarrier_init(smem + sKFull + 8 * i, 1), mbarrier_init(smem + sKEmpty + 8 * i, 4 * kConsumers);
    for (int i = 0; i < kVStages; ++i) mbarrier_init(smem + sVFull + 8 * i, 1), mbarrier_init(smem + sVEmpty + 8 * i, 4 * kConsumers);
    mbarrier_init(smem + sVTail, 1);
    fence_mbarrier_init();
    tma_prefetch_map(&p.q_map), tma_prefetch_map(&p.k_map), tma_prefetch_map(&p.v_map);
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

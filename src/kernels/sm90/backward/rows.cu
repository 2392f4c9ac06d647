// The Hopper backward kernel by rows: dQ = scale dS K (FlashAttention-2, algorithm 2, line 15), from dS that the kernel
// by keys has stored.
//
// A CTA computes row blocks. Each consumer warpgroup holds dQ of kRowTiles tiles of 64 rows and iterates over the keys
// that the block sees, 64 at a time. One producer warp loads K and dS tiles into a ring. If no row of a score
// tile sees any of its keys, or a map does not show the tile, no step has stored dS, and the producer loads a dS tile
// of zeros.
#include "sm90/common/ring.cuh"
#include "attention/fragment_store.cuh"
#include "attention/seen_tiles.cuh"
#include "sm90/common/load_rows.cuh"
#include "device/dependent_launch.cuh"
#include "device/schedule.cuh"
#include "sm90/backward/layout.cuh"
#include "backward/params.h"

enum : int {
  kRowsOfBlock = kConsumers * kRowTiles * kDsTileRows,
  kTilesOfBlock = kRowsOfBlock / kBlockRows,
  kStepsOfTile = kBlockKeys / kDsTileKeys,  // of a tile of keys, each of 64
};

using Stages =
    Buffers<kRowsLayout.stages, kRowsLayout.stage_bytes, kRowsLayout.full, kRowsLayout.empty, kRowStages>;
using BlockView = Buffers<kRowsLayout.block, 16, kRowsLayout.block_full, kRowsLayout.block_empty, 1>;

// The row block with a number. RowBlock::head is a q head.
__device__ __forceinline__ RowBlock row_block_of(const BackwardParams& p, int number) {
  if (number >= p.row_blocks.blocks * p.row_blocks.batch_heads) return {-1, 0, 0, 0};
  const BlockOfHead at = block_of(p.row_blocks, number);
  const int heads = p.wave.heads * p.split_heads;
  return {p.wave.first_tile * kBlockRows + at.block * kRowsOfBlock,
          p.wave.first_head * p.split_heads + at.batch_head % heads, p.wave.first_batch + at.batch_head / heads, 0};
}

// The steps of 64 keys [begin, end) that some row of a row block sees.
__device__ __forceinline__ KeyTiles key_steps(const BackwardParams& p, const Lengths& n, int row) {
  const KeyTiles tiles =
      key_tiles(band_of(p), n, kBlockKeys, row, min(row + kRowsOfBlock, n.sq) - 1);
  return {tiles.begin * kStepsOfTile, min(tiles.end * kStepsOfTile, count_of(n.sk, kDsTileKeys))};
}

// The address of dS of a row tile in the workspace, and the key tiles that it sees.
struct TileSource {
  const unsigned char* ds;  // the score tile of its first key tile
  KeyTiles keys;
};

// The words of a map for all row tiles of a row block: key tiles that any of its rows see.
struct WordsOfRows {
  const u64* first;
  int block_words, count;  // words of a row tile, row tiles
  bool has_spans;
  __device__ __forceinline__ u64 operator[](int at) const {
    u64 word = 0;
    for (int i = 0; i < count; ++i) word |= first[i * block_words + at];
    return word;
  }
  // The steps among `steps` that lie in the spans of the row tiles.
  __device__ __forceinline__ KeyTiles spanned(const KeyTiles& steps) const {
    if (!has_spans) return steps;
    int begin = steps.end, end = steps.begin;
    for (int i = 0; i < count; ++i) {
      const u64 span = first[i * block_words - 1];
      if (span >> 32 == 0) continue;  // an empty span
      begin = min(begin, int(u32(span)) * kStepsOfTile);
      end = max(end, int(span >> 32) * kStepsOfTile);
    }
    return {max(begin, steps.begin), min(end, steps.end)};
  }
  // A bit for each row tile that sees a tile of keys.
  __device__ __forceinline__ u32 rows_of(int tile) const {
    u32 rows = 0;
    for (int i = 0; i < count; ++i) rows |= u32(first[i * block_words + tile / 32] >> tile % 32 & 1) << i;
    return rows;
  }
};

template <class Params>
__device__ __forceinline__ WordsOfRows words_of_rows(const Params& p, const RowBlock& block, const Lengths& n) {
  const SeenWords& map = p.expression.map_of_rows;
  const int tile = block.row / kBlockRows;
  return {words_of_block(map, block.batch, block.head, tile), map.block,
          min(int(kTilesOfBlock), count_of(n.sq, kBlockRows) - tile), map.has_spans()};
}

// The number of `steps` that the map shows. Called by whole warps.
__device__ __forceinline__ int seen_steps(const WordsOfRows& words, const KeyTiles& steps) {
  if (steps.begin >= steps.end) return 0;
  const int last = (steps.end - 1) / kStepsOfTile;
  int count = 0;
  for (int at = steps.begin / kStepsOfTile / 32 + threadIdx.x % 32; at <= last / 32; at += 32) {
    const u32 seen = words[at];
    count += __popc(seen) * kStepsOfTile;
    if (at == last / 32 && seen >> last % 32 & 1) count -= (last + 1) * kStepsOfTile - steps.end;
  }
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) count += __shfl_xor_sync(0xffffffff, count, bit);
  return count;
}

__device__ __forceinline__ void produce(const BackwardParams& p, u32 smem) {
  Stages stages(smem, 1);
  BlockView view(smem, 1);
  const u32 lane = threadIdx.x % 32;
  const Band band = band_of(p);
  u32 tail_parity = 0;
  for (int number = blockIdx.x;;) {
    RowBlock block = row_block_of(p, number);
    const Lengths n = block.row < 0 ? Lengths{} : lengths_of(p, block.batch);
    if (block.row < 0 || block.row < n.sq) {
      KeyTiles steps = block.row < 0 ? KeyTiles{} : key_steps(p, n, block.row);
      block.steps = max(steps.end - steps.begin, 0);
      if constexpr (kMapsTiles != 0) {
        if (block.row >= 0) {
          const WordsOfRows words = words_of_rows(p, block, n);
          steps = words.spanned(steps);
          block.steps = seen_steps(words, steps);
        }
      }
      view.wait_empty();
      if (elect_one()) {
        store_shared_struct(view.address(), block);
        mbarrier_arrive(view.full());
      }
      __syncwarp();
      view.advance();
      if (block.row < 0) break;
      TileSource tiles[kTilesOfBlock];
#pragma unroll
      for (int i = 0; i < kTilesOfBlock; ++i) {
        const int tile = block.row / kBlockRows + i;
        tiles[i].keys = tile * kBlockRows < n.sq ? key_tiles_of(band, n, kScoreTile, tile) : KeyTiles{0, 0};
        const long long first =
            score_tile(score_tiles_of(p), p.wave, band, n, kScoreTile, p.split_heads, block.batch,
                       block.head - p.wave.first_head * p.split_heads, tile, tiles[i].keys.begin);
        tiles[i].ds = p.ds + first * kScoreTileBytes;
      }
      const Source source = {n.k_start, n.sk, block.head / p.group, kPacked ? 0 : block.batch};
      // `rows`: the row tiles that may have stored dS.
      const auto load_step = [&](int step, u32 rows) {
        const int key_tile = step / kStepsOfTile;
        const int part = step % kStepsOfTile;
        stages.wait_empty();
        const u32 buffer = stages.address();
        if (elect_one()) {
          mbarrier_arrive_expect(stages.full(), kRowsLayout.ds_bytes);
#pragma unroll
          for (int i = 0; i < kTilesOfBlock; ++i) {
            const bool seen = rows >> i & 1 && key_tile >= tiles[i].keys.begin && key_tile < tiles[i].keys.end;
            const unsigned char* tile = tiles[i].ds + (long long)(key_tile - tiles[i].keys.begin) * kScoreTileBytes;
#pragma unroll
            for (int j = 0; j < kRowSteps; ++j) {
              const int ds_tile = j * kStepsOfTile + part;
              bulk_load(buffer + (i * kRowSteps + j) * kDsTileBytes, seen ? tile + ds_tile * kDsTileBytes : p.zeros,
                        kDsTileBytes, stages.full(), Keep::kShort);
            }
          }
        }
        __syncwarp();
        if (load_rows<ElementK::kType, kKPanels, kDsTileKeys>(buffer + kRowsLayout.ds_bytes, &p.k_map, stages.full(),
                                               smem + kRowsLayout.tail, tail_parity, source, step * kDsTileKeys,
                                               kPacked || kSeqUsedK, Keep::kLong))
          if (elect_one()) mbarrier_arrive(stages.full());
        stages.advance();
      };
      if constexpr (kMapsTiles != 0) {
        const WordsOfRows words = words_of_rows(p, block, n);
        SeenTiles<WordsOfRows> walk(words, steps.begin / kStepsOfTile, count_of(steps.end, kStepsOfTile), false);
#pragma unroll 1
        for (; walk.more(); walk.next())
          for (int step = walk.tile * kStepsOfTile; step < min((walk.tile + 1) * kStepsOfTile, steps.end); ++step)
            load_step(step, words.rows_of(walk.tile));
      } else {
#pragma unroll 1
        for (int step = steps.begin; step < steps.end; ++step) load_step(step, ~0u);
      }
    }
    const int next = lane == 0 ? int(gridDim.x) + atomicAdd(&p.counters[0], 1) : 0;
    number = __shfl_sync(0xffffffff, next, 0);
  }
  // The last CTA to finish clears the counters for the next launch.
  if (lane == 0 && atomicInc(reinterpret_cast<unsigned*>(&p.counters[1]), gridDim.x - 1) == gridDim.x - 1)
    p.counters[0] = 0;
}

__device__ __forceinline__ void consume(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  Stages stages(smem, 0);
  BlockView view(smem, 0);
  for (;;) {
    view.wait_full();
    const RowBlock block = load_shared_struct_uniform<RowBlock>(view.address());
    view.release(leader);
    if (block.row < 0) break;
    float dQ[kRowTiles][kHeadDim / 2];
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) dQ[tile][i] = 0;

    // dQ += dS K.
#pragma unroll 1
    for (int step = 0; step < block.steps; ++step) {
      stages.wait_full();
      const u32 ds = uniform_descriptor(stages.address() + consumer() * kRowTiles * kDsTileBytes, 0);
      const u32 k = uniform_descriptor(stages.address() + kRowsLayout.ds_bytes, kBackwardPanelBytes);
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) register_fence(dQ[tile]);
      wgmma_fence();
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile)
#pragma unroll
        for (int part = 0; part < kDsTileKeys / ElementK::kStep; ++part)
          Wgmma<kHeadDim, ElementK::kType>::template multiply<kAcrossK, kAcrossK>(
              dQ[tile], ds + ((tile * kDsTileBytes + part * ElementK::kStep * kPanelRowBytes) >> 4),
              k + (part * ElementK::kStep * kPanelRowBytes >> 4), 1);
      wgmma_commit();
      wgmma_wait<0>();
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) register_fence(dQ[tile]);
      stages.release(leader);
    }

    const Lengths n = lengths_of(p, block.batch);
    GradientFinite<ElementQ> finite;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int first = block.row + int(consumer() * kRowTiles + tile) * kDsTileRows;
      if (first >= n.sq) break;  // without this exit the compiler may not unroll the loop, and then keeps dQ in memory
      const int row = first + int(warp_row() + thread_row());
      ElementQ::Memory* dq = row_of<ElementQ>(p.dq, block.batch, n.q_start + row, block.head);
      store_global_fragment<ElementQ, kHeadDim, kElements>(dq, p.dq.row, n.sq - row, p.d, dQ[tile], p.scale, p.scale,
                                                           finite);
    }
    finite.report(p.not_finite);
  }
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fulgur_backward_rows(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (threadIdx.x == 0) {
    Stages::init(smem, 2, 4 * kConsumers);
    BlockView::init(smem, 1, 4 * kConsumers);
    mbarrier_init(smem + kRowsLayout.tail, 1);
    fence_mbarrier_init();
    tma_prefetch_map(&p.k_map);
  }
  __syncthreads();
  wait_for_earlier_kernels();
  if (threadIdx.x < 128) {
    registers_drop<40>();  // the producer holds the sources of all row tiles
    if (threadIdx.x < 32) produce(p, smem);
  } else {
    registers_raise<232>();
    consume(p, smem);
  }
}

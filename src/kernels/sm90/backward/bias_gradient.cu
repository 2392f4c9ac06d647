// The gradient of a dense bias: dbias = dS, with P = exp(S - LSE) and dS = P o (dO V^T - D) computed again, and summed
// where scores share an element of the bias. prepare.cu has computed LSE and D of each row.
//
// A CTA takes tiles of dbias, of 128 queries and 64 keys, whose sums stay in registers: two consumer warpgroups have 64
// queries each, and one producer warp loads Q and dO, and K, V and the bias, by TMA. Each element is summed in an order
// that only the sizes decide, so that the same inputs give the same bits.
#include "attention/bias_tile.cuh"
#include "attention/dropout.cuh"
#include "sm90/common/load_rows.cuh"
#include "attention/mask.cuh"
#include "sm90/common/ring.cuh"
#include "sm90/backward/layout.cuh"
#include "backward/params.h"

__device__ constexpr BiasGradientLayout kSums = bias_gradient_layout(kTile);
enum : int {
  kStrip = 64,
  kStages = kSums.stages,
  kQTilePanelBytes = kBlockRows * kPanelRowBytes,  // of Q and dO
  kKeyPanelBytes = kBlockKeys * kPanelRowBytes,    // of K and V
  kBiasPanels = bias_panels(kBias, kBlockKeys),
  kBiasTiles = kBiasRows ? kConsumers : 1,
};
static_assert(kBlockRows == kStrip * kConsumers);
using RowBuffer = Buffers<kSums.q, kSums.row_bytes, kSums.rows_full, kSums.rows_empty, 1>;
using KeyBuffers = Buffers<kSums.k, kSums.key_bytes, kSums.keys_full, kSums.keys_empty, kStages>;

// The scores that share a tile of dbias, one tile of them after the other. The producer and the consumers walk through
// the same tiles.
struct Walk {
  const BackwardParams& p;
  const BiasSums& s;
  int batch, head, row_tile, key_tile;  // of dbias
  int key_end;                          // after the last key tile of this work tile
  long long work;

  __device__ __forceinline__ explicit Walk(const BackwardParams& p) : p(p), s(p.bias_sums), work(blockIdx.x) {}

  __device__ __forceinline__ bool more() {
    if (work >= s.work_tiles) return false;
    long long rest = work;
    const int chunk = int(rest % s.key_chunks);
    rest /= s.key_chunks;
    row_tile = int(rest % s.row_tiles);
    rest /= s.row_tiles;
    head = int(rest % s.heads);
    batch = int(rest / s.heads);
    key_tile = chunk * s.chunk_tiles;
    key_end = min(key_tile + s.chunk_tiles, s.key_tiles);
    work += gridDim.x;
    return true;
  }

  // Calls use(batch, head, row, n) for each tile of scores that is summed in the current tile of dbias, and has rows
  // that see some of its keys.
  template <class Use>
  __device__ __forceinline__ void for_each_score_tile(Use use) const {
    const int batches = s.of_batch ? batch + 1 : p.batch;
    const int heads = s.of_heads ? head + 1 : p.hq;
#pragma unroll 1
    for (int b = s.of_batch ? batch : 0; b < batches; ++b) {
      const Lengths n = lengths_of(p, b);
      const int row_end = s.of_rows ? min((row_tile + 1) * kBlockRows, n.sq) : n.sq;
#pragma unroll 1
      for (int h = s.of_heads ? head : 0; h < heads; ++h)
#pragma unroll 1
        for (int row = s.of_rows ? row_tile * kBlockRows : 0; row < row_end; row += kBlockRows) {
          const KeyTiles seen = key_tiles(band_of(p), n, kBlockKeys, row, min(row + kBlockRows, n.sq) - 1);
          if (key_tile >= seen.begin && key_tile < seen.end) use(b, h, row, n);
        }
    }
  }
};

// Which rows of Q and dO are in shared memory.
struct LoadedRows {
  int batch = -1, head = -1, row = -1;

  // Whether others are wanted, which are there from then on.
  __device__ __forceinline__ bool change(int b, int h, int r) {
    const bool others = b != batch || h != head || r != row;
    batch = b;
    head = h;
    row = r;
    return others;
  }
};

__device__ __forceinline__ void produce(const BackwardParams& p, u32 smem) {
  RowBuffer rows(smem, 1);
  KeyBuffers keys(smem, 1);
  LoadedRows here;
  for (Walk walk(p); walk.more();) {
#pragma unroll 1
    for (; walk.key_tile < walk.key_end; ++walk.key_tile) {
      walk.for_each_score_tile([&](int batch, int head, int row, const Lengths& n) {
        if (here.change(batch, head, row)) {
          rows.wait_empty();
          if (elect_one()) {
            mbarrier_arrive_expect(rows.full(), (kSums.q_panels + kSums.o_panels) * kQTilePanelBytes);
            const auto load = [&](u32 to, const void* map, int panels, int columns) {
              for (int panel = 0; panel < panels; ++panel)
                for (int box = 0; box < kBlockRows; box += kStrip)
                  tma_load(to + panel * kQTilePanelBytes + box * kPanelRowBytes, map, rows.full(),
                           {columns * panel, n.q_start + row + box, head, kPacked ? 0 : batch}, Keep::kShort);
            };
            load(rows.address(), &p.q_map, kSums.q_panels, ElementQ::kPanelColumns);
            load(rows.address() + kSums.dout, &p.dout_map, kSums.o_panels, ElementO::kPanelColumns);
          }
          rows.advance();
        }
        keys.wait_empty();
        if (elect_one()) {
          const int key = walk.key_tile * kBlockKeys;
          mbarrier_arrive_expect(keys.full(), (kSums.k_panels + kSums.v_panels) * kKeyPanelBytes +
                                                  kBiasTiles * kBiasPanels * kPanelRowBytes * (kBiasRows ? kStrip : 1));
          const auto load = [&](u32 to, const void* map, int panels, int columns) {
            for (int panel = 0; panel < panels; ++panel)
              tma_load(to + panel * kKeyPanelBytes, map, keys.full(),
                       {columns * panel, n.k_start + key, head / p.group, kPacked ? 0 : batch}, Keep::kLong);
          };
          load(keys.address(), &p.k_map, kSums.k_panels, ElementK::kPanelColumns);
          load(keys.address() + kSums.v, &p.v_map, kSums.v_panels, ElementV::kPanelColumns);
          for (int strip = 0; strip < kBiasTiles; ++strip)
            for (int panel = 0; panel < kBiasPanels; ++panel)
              tma_load(keys.address() + kSums.bias + strip * kSums.strip_bias_bytes +
                           panel * bias_panel_bytes(kBiasRows, kStrip),
                       &p.bias_map, keys.full(),
                       {key + panel * kPanelRowBytes / bias_bytes(kBias), kBiasRows ? row + strip * kStrip : 0,
                        p.bias.head == 0 ? 0 : head, p.bias.batch == 0 ? 0 : batch},
                       Keep::kShort);
        }
        keys.advance();
      });
    }
  }
}

// X = A B^T of a strip: rows of 64 in a tile of kBlockRows, and keys, along dims.
template <class Type, int dim>
__device__ __forceinline__ void issue_product(float (&X)[kBlockKeys / 2], u32 a, u32 b) {
#pragma unroll
  for (int step = 0; step < dim / Type::kStep; ++step) {
    const int panel = step / kPanelSteps;
    const int inside = step % kPanelSteps * kStepBytes;
    Wgmma<kBlockKeys, Type::kType>::template multiply<kAlongK, kAlongK>(
        X, a + ((panel * kQTilePanelBytes + inside) >> 4), b + ((panel * kKeyPanelBytes + inside) >> 4), step != 0);
  }
  wgmma_commit();
}

// Adds dS of a strip to the sums: S in X, dP in Y. `row`: the strip's first.
__device__ __forceinline__ void add_gradients(const BackwardParams& p, float (&sums)[kBlockKeys / 2],
                                              const float (&X)[kBlockKeys / 2], const float (&Y)[kBlockKeys / 2],
                                              int batch, int head, int row, int first_key, const Lengths& n, u32 bias,
                                              const Kept<kBlockKeys>& kept) {
  const ScoreHead of_head = kAlibi ? score_head(p, batch, head) : ScoreHead{};
  const int query = row + int(warp_row() + thread_row());
  const int diagonal = diagonal_of(band_of(p), n, query);
  const int key = first_key + int(thread_column());
  const long long statistics = head * (long long)(p.statistics_rows) + statistics_row(n, kPacked, batch, p.sq) + query;
  VisibleKeys visible = visible_keys_of_strip(p, n.sk, diagonal_of(band_of(p), n, row));
  float shift[2] = {};
  float delta[2] = {};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (query + 8 * i >= n.sq) {
      visible.high[i] = visible.low[i];
      continue;
    }
    shift[i] = p.shift[statistics + 8 * i];
    delta[i] = p.delta[statistics + 8 * i];
  }
  const ScoreContext at = score_context(of_head, query, diagonal, key);
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 8) {  // 16 keys
    float of_keys[8];
    load_bias_of_strip(bias, 2 * i, of_keys);
#pragma unroll
    for (int j = i; j < i + 8; ++j) {
      const int half = j >> 1 & 1;
      const int column = j / 4 * 8 + (j & 1);
      const ScoreContext entry = at.moved(8 * half, column);
      const bool seen = key + column >= visible.low[half] && key + column < visible.high[half] &&
                        !(of_keys[j - i] < float(kHidingBias));
      const float probability = exp2_fast(exponent_up_to(p, entry, X[j], of_keys[j - i], shift[half], p.p_log2));
      const bool keeps = !kDropout || (kept.pair(j / 2) >> (j % 2 * 16) & 1);
      const float dp = kDropout ? (keeps ? Y[j] * p.keep_scale : 0) : Y[j];
      sums[j] += seen ? probability * (dp + delta[half]) : 0;
    }
  }
}

// An element of dbias that is summed up.
__device__ __forceinline__ void store_sum(const BackwardParams& p, const Walk& walk, int query, int key, float sum) {
  const BiasSums& s = p.bias_sums;
  if (query >= s.rows || key >= s.keys) return;
  const long long at = walk.batch * s.batch_stride + walk.head * s.head_stride + query * s.row_stride +
                       key * s.key_stride;
  sum *= p.p_scale;
  if (s.type == kF32) static_cast<float*>(s.data)[at] = sum;
  else static_cast<unsigned short*>(s.data)[at] = s.type == kBF16 ? from_f32<kBF16>(sum) : from_f32<kF16>(sum);
}

// The sums of a tile to memory, those of all its queries or of all its keys where these share elements. `scratch`: a
// row of floats for each warp.
__device__ __forceinline__ void store_sums(const BackwardParams& p, const Walk& walk, int key_tile,
                                           float (&sums)[kBlockKeys / 2], u32 scratch) {
  const BiasSums& s = p.bias_sums;
  const int query = walk.row_tile * kBlockRows + int(consumer() * kStrip + warp_row() + thread_row());
  const int key = key_tile * kBlockKeys + int(thread_column());
  if (s.of_keys && s.of_rows) {
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i)
      store_sum(p, walk, query + (i & 2 ? 8 : 0), key + i / 4 * 8 + (i & 1), sums[i]);
    return;
  }
  if (!s.of_keys) {  // of a row, in the first two
#pragma unroll
    for (int i = 4; i < kBlockKeys / 2; ++i) sums[i % 4] += sums[i];
    sums[0] = quad_sum(sums[0] + sums[1]);
    sums[1] = quad_sum(sums[2] + sums[3]);
    if (s.of_rows) {
      if (threadIdx.x % 4 == 0) {
        store_sum(p, walk, query, 0, sums[0]);
        store_sum(p, walk, query + 8, 0, sums[1]);
      }
      return;
    }
  }
  // Of all rows of a warp, then of the warps.
  const int count = s.of_keys ? kBlockKeys : 1;
  const u32 warp = consumer() * 4 + threadIdx.x % 128 / 32;
#pragma unroll
  for (int i = 0; i < kBlockKeys / 2; i += 4)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!s.of_keys && i + j > 0) continue;
      float sum = s.of_keys ? sums[i + j] + sums[i + j + 2] : sums[0] + sums[1];
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2) sum += __shfl_xor_sync(0xffffffff, sum, lanes);
      if (threadIdx.x % 32 < (s.of_keys ? 4 : 1))
        store_shared(scratch + 4 * (warp * kBlockKeys + i / 4 * 8 + int(thread_column()) + j), __float_as_int(sum));
    }
  named_barrier_sync(1, 128 * kConsumers);
  const int mine = int(threadIdx.x) - 128;
  if (mine < count) {
    float sum = 0;
    for (int i = 0; i < 4 * kConsumers; ++i) sum += __int_as_float(load_shared(scratch + 4 * (i * kBlockKeys + mine)));
    store_sum(p, walk, 0, s.of_keys ? key_tile * kBlockKeys + mine : 0, sum);
  }
  named_barrier_sync(1, 128 * kConsumers);
}

__device__ __forceinline__ void consume(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  RowBuffer rows(smem, 0);
  KeyBuffers keys(smem, 0);
  LoadedRows here;
  bool filled = false;
  for (Walk walk(p); walk.more();) {
    float sums[kBlockKeys / 2] = {};
#pragma unroll 1
    for (; walk.key_tile < walk.key_end; ++walk.key_tile) {
      walk.for_each_score_tile([&](int batch, int head, int row, const Lengths& n) {
        if (here.change(batch, head, row)) {
          if (filled) rows.release(leader);
          rows.wait_full();
          filled = true;
        }
        row += int(consumer()) * kStrip;
        keys.wait_full();
        float X[kBlockKeys / 2];
        float Y[kBlockKeys / 2];
        const u32 strip = rows.address() + consumer() * kStrip * kPanelRowBytes;
        wgmma_fence();
        issue_product<ElementQ, kHeadDim>(X, uniform_descriptor(strip, 0), uniform_descriptor(keys.address(), 0));
        issue_product<ElementO, kValueDim>(Y, uniform_descriptor(strip + kSums.dout, 0),
                                           uniform_descriptor(keys.address() + kSums.v, 0));
        Kept<kBlockKeys> kept;
        if (kDropout)
          kept = kept_scores<kBlockKeys>(p, smem + kSums.dropout_key, batch * p.hq + head, row + warp_row(),
                                         walk.key_tile * kBlockKeys);
        wgmma_wait<0>();
        register_fence(X);
        register_fence(Y);
        add_gradients(p, sums, X, Y, batch, head, row, walk.key_tile * kBlockKeys, n,
                      keys.address() + kSums.bias + consumer() * kSums.strip_bias_bytes, kept);
        keys.release_loaded(leader);
      });
      if (!p.bias_sums.of_keys && walk.key_tile + 1 < walk.key_end) continue;  // one sum for all key tiles
      store_sums(p, walk, walk.key_tile, sums, smem + kSums.scratch);
#pragma unroll
      for (int i = 0; i < kBlockKeys / 2; ++i) sums[i] = 0;
    }
  }
}

extern __shared__ __align__(1024) unsigned char raw[];

extern "C" __global__ void __launch_bounds__(128 * (kConsumers + 1), 1)
    fulgur_bias_gradient(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  if (threadIdx.x == 0) {
    RowBuffer::init(smem, 1, 4 * kConsumers);
    KeyBuffers::init(smem, 1, 4 * kConsumers);
    fence_mbarrier_init();
    if (kDropout) store_dropout_key(p, smem + kSums.dropout_key);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    registers_drop<40>();
    if (threadIdx.x < 32) produce(p, smem);
  } else {
    registers_raise<232>();
    consume(p, smem);
  }
}

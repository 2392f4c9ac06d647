// The gradient of a dense bias: dbias = dS, with P = exp(S - LSE) and dS = P o (dO V^T - D) computed again, and summed
// where scores share an element of the bias. prepare.cu has computed LSE and D of each row.
//
// A CTA computes tiles of dbias of 128 queries x 64 keys, whose sums stay in registers: two consumer warpgroups have 64
// queries each, and one producer warp loads Q, dO, K, V and the bias by TMA. The order of each sum depends only on
// sizes, so that the same inputs give the same bits.
#include "attention/bias_tile.cuh"
#include "backward/bias_sums.cuh"
#include "sm90/common/load_rows.cuh"
#include "sm90/common/ring.cuh"
#include "sm90/backward/layout.cuh"

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

// Which rows of Q and dO are in shared memory.
struct LoadedRows {
  int batch = -1, head = -1, row = -1;

  // Sets the rows that are loaded next. Returns whether they differ from the current ones.
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
  for (TileIterator it(p); it.more();) {
#pragma unroll 1
    for (; it.key_tile < it.key_end; ++it.key_tile) {
      it.for_each_score_tile([&](int batch, int head, int row, const Lengths& n) {
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
          const int key = it.key_tile * kBlockKeys;
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

// X = A B^T for a strip of 64 rows in a tile of kBlockRows, and keys, summed over dims.
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

struct Consumers {
  static __device__ __forceinline__ u32 strip() { return consumer(); }
  static __device__ __forceinline__ int thread() { return int(threadIdx.x) - 128; }
  __device__ __forceinline__ void operator()() const { named_barrier_sync(1, 128 * kConsumers); }
};

__device__ __forceinline__ void consume(const BackwardParams& p, u32 smem) {
  const u32 leader = threadIdx.x % 32 == 0;
  RowBuffer rows(smem, 0);
  KeyBuffers keys(smem, 0);
  LoadedRows here;
  bool filled = false;
  for (TileIterator it(p); it.more();) {
    float sums[kBlockKeys / 2] = {};
#pragma unroll 1
    for (; it.key_tile < it.key_end; ++it.key_tile) {
      it.for_each_score_tile([&](int batch, int head, int row, const Lengths& n) {
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
          kept = kept_scores<kBlockKeys>(p, smem + kSums.dropout_key, dropout_head(p, batch, head), row + warp_row(),
                                         it.key_tile * kBlockKeys);
        wgmma_wait<0>();
        register_fence(X);
        register_fence(Y);
        const u32 bias = keys.address() + kSums.bias + consumer() * kSums.strip_bias_bytes;
        add_gradients(p, sums, X, Y, batch, head, row, it.key_tile * kBlockKeys, n, kept,
                      [=](const ScoreContext&, int column, float(&of_keys)[8]) {
                        load_bias_of_strip(bias, column, of_keys);
                      });
        keys.release_loaded(leader);
      });
      if (!p.bias_sums.of_keys && it.key_tile + 1 < it.key_end) continue;  // the next key tile adds to the same sum
      store_sums<4 * kConsumers>(p, it, it.key_tile, sums, smem + kSums.scratch, Consumers{});
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

// Attention backward of wide heads, d or dv above 256, for every GPU since Ampere, by mma.sync, ldmatrix and cp.async:
// dQ = scale dS K, dK = scale dS^T Q or dV = P^T dO, each by a launch of its own (kGradient), which computes P and dS
// again. A CTA has 64 rows of dQ, or of 64 keys dK or dV, in registers, and the same rows or keys of the tensors that
// are multiplied with those that it streams in shared memory. Registers do not hold dK and dV of enough keys at a time,
// nor would additions to dQ for so few keys be fast. So every sum has a fixed order. docs/kernels/portable.md derives
// this.
#include "portable/wide_backward/output.cuh"
#include "portable/backward/weights.cuh"

extern __shared__ __align__(1024) unsigned char raw[];

// P^T, or dS^T from S and dP, of 16 keys of a warp in a step.
__device__ __forceinline__ void weights_of_step(const BackwardParams& p, const Own& own, const TileWalk& tiles,
                                                u32 smem, u32 statistics, int key, int row, TileScores& S,
                                                TileScores& dP, TileWords& words) {
  const bool masked = tiles.is_masked(p, own.n);
  statistics += 4 * row;
  TileWeights<kWarpRows> tile;
  weights_of_tile<kWarpRows>(p, smem + kLayout.dropout_key, own.n, own.batch, tiles.head(), masked, statistics,
                             tiles.row() + row, tiles.key() + key, S, words, tile);
  if constexpr (!kOfV) {
#pragma unroll
    for (int i = 0; i < kWarpRows / 2; ++i) {
      float delta[2];
      load_shared_pair(statistics + 4 * (kBlockRows + thread_column()) + i / 4 * 32, delta[0], delta[1]);
      if (kDropout) {
        const u32 keeps = tile.kept.pair(i / 2) >> i % 2 * 16 & 1;
        dP[i] = __fmaf_rn(keeps ? dP[i] : 0, p.keep_scale, delta[i & 1]);
      } else {
        dP[i] += delta[i & 1];
      }
      dP[i] *= S[i];
      if (kHasScoreSlope) dP[i] *= tile.slopes[i];
    }
    if (masked) hide_rows(dP, tile.visible);
    pack_words<ElementDs>(dP, words);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    fulgur_wide_gradient(const __grid_constant__ BackwardParams p) {
  const u32 smem = u32(__cvta_generic_to_shared(raw));
  const Own own = own_of_cta(p);
  if (own.first() >= (kOfQ ? own.n.sq : key_rows(p, own.batch))) return;
  if (kDropout && threadIdx.x == 0) store_dropout_key(p, smem + kLayout.dropout_key);
  const Part part = part_of_warp();
  ChunkRing ring(p, own, smem);
  Gradient G = {};
  u32 statistics = smem + kLayout.statistics;
#pragma unroll 1
  for (TileWalk tiles(p, own); tiles.more(); tiles.advance()) {
    TileWords words;
    const int key = part.key + 16 * part.role;
    {
      WarpScores X = {};
#pragma unroll 1
      for (int number = 0; number < kScoreChunks; ++number) {
        const u32 chunk = ring.next();
        ring.start();
        multiply_scores(X, part, smem, chunk, number);
      }
      TileScores S;
      TileScores dP;
      exchange(X, part, smem + kLayout.exchanged, S, dP);
      weights_of_step(p, own, tiles, smem, statistics, key, part.row, S, dP, words);
    }
    store_weights(words, smem + kLayout.weights, key, part.row);
    GradientWeights W;
#pragma unroll
    for (int number = 0; number < kGradientChunks; ++number) {
      const u32 chunk = ring.next();
      ring.start();
      if (number == 0) load_weights(W, smem + kLayout.weights);
#pragma unroll
      for (int i = 0; i < kChunkPanels; ++i) {
        if (kChunkPanels * number + i >= kGradientPanels) continue;
        using Type = Conditional<kOfV, ElementO, ElementQ>;
        add_gradient<Type>(G[kChunkPanels * number + i], W, chunk + i * kStreamedPanelBytes);
      }
    }
    if (!kOfQ) {
      const u32 first = smem + kLayout.statistics;
      statistics = statistics == first ? first + 8 * kBlockRows : first;
    }
  }
  if constexpr (kOfQ) {
    store_gradient<ElementQ>(p, own, G, p.dq, own.n.q_start, own.n.sq - own.first(), p.d, p.scale);
  } else if constexpr (kSplits) {
    store_partial(p, own, G, kOfV ? p.partial_dv : p.partial_dk);
  } else if constexpr (kOfV) {
    store_gradient<ElementDv>(p, own, G, p.dv_grad, own.n.k_start, key_rows(p, own.batch) - own.first(), p.dv,
                              p.dv_scale);
  } else {
    store_gradient<ElementDk>(p, own, G, p.dk, own.n.k_start, key_rows(p, own.batch) - own.first(), p.d, p.scale);
  }
}

// FlashAttention-2 backward (Alg. 2) of bf16 and f16 on tiles or by dot products. S^T, dP^T and
// dQ^T have a query row in each lane, dV and dK the head dim. A group of row tiles shares the sums
// of dV and dK, whose tiles are loaded and stored once for all its rows.
#if defined(FULGUR_CPU_TILE_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_TILE_BACKWARD_INL_H_
#undef FULGUR_CPU_TILE_BACKWARD_INL_H_
#else
#define FULGUR_CPU_TILE_BACKWARD_INL_H_
#endif

#include "cpu/kernels/bf16/forward-inl.h"
#include "cpu/kernels/simd/backward-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

constexpr int64_t kGroup = 4;  // row tiles of a group, each a step of the sums over rows

template <int kParts>
struct TileBackwardScratch {
  int64_t ldk, ldv;            // columns of dK and dV: d and dv in blocks
  uint16_t *K, *V;             // kTiles x rows of A, summed over d or dv
  uint16_t* Kt;                // kTiles x rows of A, summed over keys
  float *dK, *dV;              // [kTiles * kBc][ldk or ldv]
  uint16_t *Q, *dO;            // kGroup x columns of B, summed over d or dv
  uint16_t *Q_rows, *dO_rows;  // B, summed over the rows of the group
  float *P, *Pz, *dS;          // [kBc][kTileBr]; Pz = Z o P, the dropped P (the same without)
  float* slope;                // the same
  uint16_t *P_keys, *dS_keys;  // A, summed over the rows of the group
  uint16_t* dS_rows;           // [kBc / 32][kParts][16][kTileBr][2]: B, summed over keys
  float *rows, *key;           // [kTileRows][ldk or ldv], [ldk]
  float *bias, *dBias;         // [kBc][kTileBr]; dBias: dS before the slope (the same without)

  TileBackwardScratch(const Problem& p, Arena& arena)
      : ldk(blocks_of(p.d) * kTileRows), ldv(blocks_of(p.dv) * kTileRows) {
    const int64_t d = kParts * steps_of(p.d) * kTileDepth;
    const int64_t dv = kParts * steps_of(p.dv) * kTileDepth;
    const int64_t keys = kTiles * kBc, group_rows = kGroup * kTileBr;
    K = arena.take_halves(keys * d);
    V = arena.take_halves(keys * dv);
    Kt = arena.take_halves(kParts * keys * ldk);
    dK = arena.take(keys * ldk);
    dV = arena.take(keys * ldv);
    Q = arena.take_halves(group_rows * d);
    dO = arena.take_halves(group_rows * dv);
    Q_rows = arena.take_halves(kParts * group_rows * ldk);
    dO_rows = arena.take_halves(kParts * group_rows * ldv);
    P = arena.take(kBc * kTileBr);
    dS = arena.take(kBc * kTileBr);
    Pz = p.dropout_p > 0 ? arena.take(kBc * kTileBr) : P;
    slope = has_score_slope(p) ? arena.take(kBc * kTileBr) : nullptr;
    P_keys = arena.take_halves(kParts * kBc * group_rows);
    dS_keys = arena.take_halves(kParts * kBc * group_rows);
    dS_rows = arena.take_halves(kParts * kBc * kTileBr);
    rows = arena.take(kTileRows * std::max(ldk, ldv));
    key = arena.take(ldk);
    bias = take_bias_tile(p, arena);
    const bool before_slope = p.has(Arg::kDbias) && has_score_slope(p);
    dBias = before_slope ? arena.take(kBc * kTileBr) : dS;
  }
};

template <int kParts>
int64_t tile_backward_scratch(const Problem& p) {
  Arena arena(nullptr);
  TileBackwardScratch<kParts>(p, arena);
  return arena.used();
}

/// The floats of a dQ accumulator: dQ^T [ldk][kTileBr] of each row tile.
inline int64_t tile_dq_floats(const Problem& p, int64_t rows) {
  return round_up(rows, kTileBr) * blocks_of(p.d) * kTileRows;
}

/// A row tile of a group, with LSE and D of its rows.
struct GroupRowTile {
  RowTile row_tile;
  KeyTiles tiles;  // the tiles that it has yet to visit
  int64_t row;     // its first row
  bool finite;     // whether Q and dO are
  bool moderate;   // whether Q, dO, LSE and D are, so that P of a key that a bias hides is 0
  HWY_ALIGN float lse2[kTileBr], D[kTileBr];
};

/// Rounds and stores P and dS of keys jj and jj + 1 of a row tile, the `step`th of its group: as
/// rows of A, and dS also as a row of B.
template <int kParts>
HWY_INLINE void store_gradients(int64_t jj, int64_t step, const V32 (&p)[2][2],
                                const V32 (&ds)[2][2], const TileBackwardScratch<kParts>& s) {
  FULGUR_UNROLL for (int64_t i = 0; i < 2; ++i) {
    const int64_t at = ((jj + i) / kTileRows * kGroup + step) * kParts * kTileSize +
                       (jj + i) % kTileRows * kTileDepth;
    store_row_of_a<kParts>(p[i][0], p[i][1], kTileSize, s.P_keys + at);
    store_row_of_a<kParts>(ds[i][0], ds[i][1], kTileSize, s.dS_keys + at);
  }
  const int64_t row = jj / kTileDepth * kParts * kTileDepth + jj % kTileDepth;
  FULGUR_UNROLL for (int64_t v = 0; v < 2; ++v) {
    store_pair_of_b<kParts>(ds[0][v], ds[1][v], kTileDepth * kTileBr,
                            s.dS_rows + row * kTileBr + 2 * v * kLanes);
  }
}

/// P = exp(S - LSE) (line 11), dS = P o (dP - D) (line 14), where S is the product times `factor`.
HWY_INLINE void plain_gradient(V32 product, V32 factor, V32 lse, V32 dP, V32 D, V32* p, V32* ds) {
  // P is at most 1, as in probabilities() of simd/backward-inl.h.
  *p = exp2_short(at_most(hn::Zero(F32()), hn::MulSub(product, factor, lse)));
  *ds = hn::Mul(*p, hn::Sub(dP, D));
}

/// The scores plus `factor` times a bias of rows and keys in memory, for full_gradients(); see
/// NoBias and KeyBias.
struct TileBias {
  const float* tile;  // [kBc][kTileBr]
  float factor;

  HWY_INLINE V32 add(V32 score, int64_t jj, int64_t v) const {
    const F32 f;
    const V32 bias = hn::Load(f, tile + jj * kTileBr + v * kLanes);
    return hn::MulAdd(bias, hn::Set(f, factor), score);
  }
};

/// P and dS of a tile of which every row sees all keys, or all but those that its bias hides. dP is
/// in s.dS, and dS replaces it there if kKept. n is even.
template <bool kKept, int kParts, class Bias>
HWY_INLINE void full_gradients(const GroupRowTile& t, int64_t n, int64_t step, float factor,
                               const TileBackwardScratch<kParts>& s, Bias bias) {
  const F32 f;
  const V32 c = hn::Set(f, factor);
  V32 lse[2], D[2];
  FULGUR_UNROLL for (int v = 0; v < 2; ++v) {
    lse[v] = hn::Load(f, t.lse2 + v * kLanes);
    D[v] = hn::Load(f, t.D + v * kLanes);
  }
  for (int64_t jj = 0; jj < n; jj += 2) {
    V32 p[2][2], ds[2][2];
    FULGUR_UNROLL for (int i = 0; i < 2; ++i) {
      FULGUR_UNROLL for (int v = 0; v < 2; ++v) {
        const int64_t at = (jj + i) * kTileBr + v * kLanes;
        const V32 score = bias.add(hn::Load(f, s.P + at), jj + i, v);
        plain_gradient(score, c, lse[v], hn::Load(f, s.dS + at), D[v], &p[i][v], &ds[i][v]);
        if constexpr (kKept) hn::Store(ds[i][v], f, s.dS + at);
      }
    }
    store_gradients(jj, step, p, ds, s);
  }
}

/// Rounds and stores P and dS of a tile from f32.
template <int kParts>
HWY_INLINE void round_gradients(int64_t n, int64_t step, const TileBackwardScratch<kParts>& s) {
  const F32 f;
  for (int64_t jj = 0; jj < n; jj += 2) {
    V32 p[2][2], ds[2][2];
    FULGUR_UNROLL for (int i = 0; i < 2; ++i) {
      FULGUR_UNROLL for (int v = 0; v < 2; ++v) {
        const int64_t at = (jj + i) * kTileBr + v * kLanes;
        p[i][v] = hn::Load(f, s.Pz + at);
        ds[i][v] = hn::Load(f, s.dS + at);
      }
    }
    store_gradients(jj, step, p, ds, s);
  }
}

/// P and dS of a tile of which some row does not see all keys. The bits of a row do not depend on
/// the other rows of its row tile.
template <int kParts>
HWY_INLINE void plain_masked_gradients(const GroupRowTile& t, const KeyTile& tile, float factor,
                                       const TileBackwardScratch<kParts>& s) {
  const F32 f;
  const Visible visible(t.row_tile.mask, 2, tile);
  for (int64_t v = 0; v < 2; ++v) {
    const V32 lse = hn::Load(f, t.lse2 + v * kLanes), D = hn::Load(f, t.D + v * kLanes);
    for (int64_t jj = 0; jj < tile.n; ++jj) {
      const int64_t at = jj * kTileBr + v * kLanes;
      V32 p, ds;
      plain_gradient(hn::Load(f, s.P + at), hn::Set(f, factor), lse, hn::Load(f, s.dS + at), D, &p,
                     &ds);
      const auto seen = visible.mask(v, jj);
      hn::Store(hn::IfThenElseZero(seen, p), f, s.P + at);
      hn::Store(hn::IfThenElseZero(seen, ds), f, s.dS + at);
    }
  }
}

/// P and dS of a tile in f32, masked, with all score rules and dropout.
template <int kParts>
HWY_INLINE void masked_gradients(const Task& task, const KeyTile& tile, bool plain,
                                 const TileBackwardScratch<kParts>& s, GroupRowTile* t) {
  const Problem& p = task.problem;
  const auto add_to_bias = [&] {
    if (p.has(Arg::kDbias)) add_bias_gradient(task.given.dbias, t->row_tile, tile, s.dBias);
  };
  if (plain) {
    plain_masked_gradients(*t, tile, query_factor(p), s);
    return add_to_bias();
  }
  const int64_t n = tile.n, width = kTileBr;
  scale_scores(n, width, query_factor(p), s.P);
  score_rule(p, tile, s.P, width, s.slope, &t->row_tile);
  probabilities(t->row_tile, tile, s.P, t->lse2);
  if (p.dropout_p > 0) {
    std::copy_n(s.P, n * width, s.Pz);
    drop(task.given.dropout, static_cast<float>(1 / (1 - p.dropout_p)), t->row_tile, tile, width,
         s.Pz, s.dS);
  }
  score_gradient(t->row_tile, tile, s.P, t->D, s.slope, s.dS, s.dBias);
  add_to_bias();
}

/// dV += P^T dO, dK += dS^T Q, dQ += dS K where an operand has inf or NaN: only keys that a row
/// sees are multiplied.
template <int kParts>
HWY_NOINLINE void add_visible_gradients(const Task& task, const BackwardArgs& args,
                                        const GroupRowTile& t, const KeyTile& tile,
                                        const TileBackwardScratch<kParts>& s, int64_t first_key,
                                        float* HWY_RESTRICT dqt) {
  const Problem& p = task.problem;
  for (int64_t r = 0; r < t.row_tile.count; ++r) {
    for (int64_t jj = 0; jj < tile.n; ++jj) {
      const int64_t j = tile.j + jj;
      if (!t.row_tile.mask.sees(r, j)) continue;
      const int64_t at = jj * kTileBr + r, key = j - first_key;
      if (p.wants_dk_dv()) {
        load_queries(task, args.dout, p.dout, p.dv, t.row + r, 1, 1, s.rows, s.ldv);
        add_row(s.Pz[at], s.rows, s.ldv, s.dV + key * s.ldv);
        load_queries(task, args.q, p.q, p.d, t.row + r, 1, 1, s.rows, s.ldk);
        add_row(s.dS[at], s.rows, s.ldk, s.dK + key * s.ldk);
      }
      if (!p.wants_dq()) continue;
      load_keys(task, args.k, p.k, p.d, j, 1, s.key, s.ldk);
      for (int64_t c = 0; c < p.d; ++c) dqt[c * kTileBr + r] += s.dS[at] * s.key[c];
    }
  }
}

/// Packs Q and dO, and loads LSE and D, of a row tile, the `step`th of its group.
template <int kParts>
HWY_INLINE void load_row_tile(const Task& task, const BackwardArgs& args, int64_t step,
                              const float* D, const TileBackwardScratch<kParts>& s,
                              GroupRowTile* t) {
  const Problem& p = task.problem;
  const int64_t row = t->row, count = t->row_tile.count;
  const auto q = query_rows(task, args.q, p.q, p.d, row, count);
  const auto dout = query_rows(task, args.dout, p.dout, p.dv, row, count);
  const int64_t k_steps = kParts * steps_of(p.d), v_steps = kParts * steps_of(p.dv);
  Census census;
  pack_columns<kParts>(q, kTileBr, s.Q + step * kTileBr * k_steps * kTileDepth, &census);
  pack_columns<kParts>(dout, kTileBr, s.dO + step * kTileBr * v_steps * kTileDepth, &census);
  pack_pairs<kParts>(q, step, kGroup, s.Q_rows, &census, [] {});
  pack_pairs<kParts>(dout, step, kGroup, s.dO_rows, &census, [] {});
  t->finite = census.finite();
  t->moderate = census.moderate();
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (int64_t r = 0; r < kTileBr; ++r) {
    const float lse =
        r < count ? static_cast<const float*>(args.lse.data)[row_offset(task, p.lse, row + r)]
                  : kInf;
    // exp2(S + inf) would be inf where a row saw nothing; its P is 0. Any NaN becomes one that
    // rounds to NaN.
    t->lse2[r] = std::isinf(lse)   ? kInf
                 : std::isnan(lse) ? std::numeric_limits<float>::quiet_NaN()
                                   : lse * kLog2e;
    t->D[r] = r < count ? D[row + r] : 0;
    t->moderate &= t->lse2[r] > -kModerate && std::abs(t->D[r]) < kModerate;
  }
}

template <class Products, int kParts>
void tile_backward(const Task& task, const BackwardArgs& args, int64_t key_begin, int64_t key_end,
                   const float* D, float* dq, float* scratch) {
  const typename Products::Session session;
  Products products;
  const Problem& p = task.problem;
  Arena arena(scratch);
  const TileBackwardScratch<kParts> s(p, arena);
  const int64_t k_steps = kParts * steps_of(p.d), v_steps = kParts * steps_of(p.dv);
  const int64_t k_blocks = blocks_of(p.d), v_blocks = blocks_of(p.dv);
  const int64_t keys = key_end - key_begin;
  const bool plain = only_scales(p) && p.dropout_p == 0;
  const auto in_group = [](const uint16_t* data, int64_t step) {
    return Operand{data + step * kParts * kTileSize, 64, kGroup * kParts * kTileSize, kTileSize};
  };

  Census census, values, unused;
  pack_rows<kParts>(key_rows(task, args.k, p.k, p.d, key_begin, keys), round_up(keys, kTileDepth),
                    s.K, &census);
  pack_rows<kParts>(key_rows(task, args.v, p.v, p.dv, key_begin, keys), round_up(keys, kTileDepth),
                    s.V, &values);
  for (int64_t key = 0; key < keys; key += kBc) {
    const int64_t n = std::min(kBc, keys - key);
    pack_transposed<kParts>(key_rows(task, args.k, p.k, p.d, key_begin + key, n), n, 0, steps_of(n),
                            s.Kt + kParts * key * s.ldk, &unused);
  }
  // See ForwardSchedule::adds_bias().
  const bool may_add =
      plain && query_factor(p) < kMaxFactor && census.moderate() && values.moderate();
  std::fill_n(s.dK, round_up(keys, kTileDepth) * s.ldk, 0.0f);
  std::fill_n(s.dV, round_up(keys, kTileDepth) * s.ldv, 0.0f);

  for (int64_t row = 0; row < task.rows(); row += kGroup * kTileBr) {
    GroupRowTile row_tiles[kGroup];
    const int64_t count = std::min(kGroup, (task.rows() - row + kTileBr - 1) / kTileBr);
    bool done = true;
    for (int64_t i = 0; i < count; ++i) {
      GroupRowTile& t = row_tiles[i];
      t.row = row + i * kTileBr;
      make_row_tile(task, t.row, std::min(task.rows(), t.row + kTileBr), &t.row_tile);
      t.row_tile.vectors = kTileBr / kLanes;  // rows after the last see no key
      t.tiles = t.row_tile.mask.tiles({key_begin, key_end});
      done &= t.tiles.done();
    }
    if (done) continue;
    for (int64_t i = 0; i < count; ++i) load_row_tile(task, args, i, D, s, &row_tiles[i]);
    for (int64_t key = 0; key < keys; key += kBc) {
      const int64_t n = std::min(kBc, keys - key), padded = round_up(n, kTileDepth);
      const int64_t key_steps = kParts * steps_of(n), key_blocks = blocks_of(padded);
      const uint16_t *K = s.K + key * k_steps * kTileDepth, *V = s.V + key * v_steps * kTileDepth;
      const uint16_t* Kt = s.Kt + kParts * key * s.ldk;
      int64_t begin = 0;  // the first row tile whose P and dS wait for their products with dO and Q
      const auto add_group = [&](int64_t end) {
        if (begin < end && p.wants_dk_dv()) {
          const int64_t rows = (end - 1 - begin) * kTileBr + row_tiles[end - 1].row_tile.count;
          products.multiply({true,
                             key_blocks,
                             v_blocks,
                             kParts * (end - begin),
                             in_group(s.P_keys, begin),
                             in_group(s.dO_rows, begin),
                             s.dV + key * s.ldv,
                             s.ldv,
                             {n, p.dv, rows}});
          products.multiply({true,
                             key_blocks,
                             k_blocks,
                             kParts * (end - begin),
                             in_group(s.dS_keys, begin),
                             in_group(s.Q_rows, begin),
                             s.dK + key * s.ldk,
                             s.ldk,
                             {n, p.d, rows}});
        }
        begin = end + 1;
      };
      for (int64_t i = 0; i < count; ++i) {
        GroupRowTile& t = row_tiles[i];
        KeyTile tile = t.tiles.tile();
        if (tile.j != key_begin + key) {
          add_group(i);
          continue;
        }
        t.tiles.next();
        tile.partial |= t.row_tile.count < kTileBr;
        const bool adds = may_add && t.moderate && !tile.partial && n == kBc;
        if (p.has(Arg::kBias) && !load_bias(task, tile, false, s.bias, &t.row_tile)) {
          add_group(i);
          continue;
        }
        // dbias of this tile, and the bias of the next.
        constexpr int64_t kPrefetches = 3;
        RowPrefetch dbias =
            bias_prefetch(task.given.dbias.data, task.given.dbias.at, t.row_tile.dbias_row,
                          t.row_tile.count, tile.j, n, kPrefetches);
        RowPrefetch bias = bias_prefetch(task.given.bias.data, p.bias, t.row_tile.bias_row,
                                         t.row_tile.bias_count(), tile.j + kBc,
                                         std::min(kBc, key_end - tile.j - kBc), kPrefetches);
        const auto prefetch = [&]() HWY_ATTR {
          dbias.next();
          bias.next();
        };
        prefetch();
        float* const dqt = dq + (row / kTileBr + i) * s.ldk * kTileBr;
        products.multiply({false,
                           key_blocks,
                           2,
                           k_steps,
                           Operand::packed(K, k_steps),
                           Operand::packed(s.Q + i * kTileBr * k_steps * kTileDepth, k_steps),
                           s.P,
                           kTileBr,
                           {n, t.row_tile.count, p.d}});
        prefetch();
        products.multiply({false,
                           key_blocks,
                           2,
                           v_steps,
                           Operand::packed(V, v_steps),
                           Operand::packed(s.dO + i * kTileBr * v_steps * kTileDepth, v_steps),
                           s.dS,
                           kTileBr,
                           {n, t.row_tile.count, p.dv}});
        prefetch();
        products.flush();
        const auto bias_factor = static_cast<float>(1 / p.scale);
        const bool in_tensor = adds && t.row_tile.bias_rows != nullptr;
        const bool of_keys = adds && t.row_tile.bias != nullptr && t.row_tile.bias_step == 0;
        if (plain && !in_tensor && !of_keys) {
          add_bias(p, tile, bias_factor, s.P, kTileBr, &t.row_tile);
        }
        const auto full = [&](const auto& bias) HWY_ATTR {
          if (!p.has(Arg::kDbias)) return full_gradients<false>(t, n, i, query_factor(p), s, bias);
          full_gradients<true>(t, n, i, query_factor(p), s, bias);
          add_bias_gradient(task.given.dbias, t.row_tile, tile, s.dBias);
        };
        if (in_tensor) {
          load_numbers(p.bias.dtype, {task.given.bias.data, p.bias, t.row_tile, tile.j},
                       kTileBr / kLanes, s.bias);
          full(TileBias{s.bias, bias_factor});
        } else if (of_keys) {
          full(KeyBias{t.row_tile.bias, bias_factor});
        } else if (plain && !t.row_tile.mask.hides(tile) && n == padded) {
          full(NoBias());
        } else {
          masked_gradients(task, tile, plain, s, &t);
          if (t.row_tile.mask.hides(tile) && !(t.finite && census.finite())) {
            add_visible_gradients(task, args, t, tile, s, key_begin, dqt);
            add_group(i);
            continue;
          }
          std::fill(s.Pz + n * kTileBr, s.Pz + padded * kTileBr, 0.0f);
          std::fill(s.dS + n * kTileBr, s.dS + padded * kTileBr, 0.0f);
          round_gradients(padded, i, s);
        }
        if (!p.wants_dq()) continue;
        products.multiply({true,
                           k_blocks,
                           2,
                           key_steps,
                           Operand::packed(Kt, key_steps),
                           {s.dS_rows, kTileBr * 4, kTileDepth, kTileRows * kTileBr * 2},
                           dqt,
                           kTileBr,
                           {p.d, t.row_tile.count, n}});
      }
      add_group(count);
      products.flush();
    }
  }

  store_key_gradients(task, args, key_begin, keys, s);
}

inline void tile_backward_dq(const Task& task, const BackwardArgs& args, int64_t row_begin,
                             int64_t row_end, float* const* dq, int64_t parts) {
  const F32 f;
  const Problem& p = task.problem;
  const int64_t ld = blocks_of(p.d) * kTileRows, size = ld * kTileBr;
  const V32 scale = hn::Set(f, static_cast<float>(p.scale));
  HWY_ALIGN float sum[kMaxDim * kTileBr];
  for (int64_t row = row_begin; row < row_end; row += kTileBr) {
    const int64_t at = row / kTileBr * size;
    for (int64_t c = 0; c < size; c += kLanes) {
      V32 total = hn::Zero(f);
      for (int64_t i = 0; i < parts; ++i) total = hn::Add(total, hn::Load(f, dq[i] + at + c));
      hn::Store(total, f, sum + c);
    }
    RowWalk walk(task, row);
    for (int64_t lane = 0; lane < std::min(kTileBr, row_end - row); lane += kLanes) {
      const int64_t count = std::min(kLanes, row_end - row - lane);
      uint16_t* to[kLanes];
      for (int64_t i = 0; i < count; ++i, walk.next()) {
        to[i] = static_cast<uint16_t*>(args.dq.data) + walk.offset(p.dq);
      }
      store_sums(args.dq.dtype, sum + lane, p.d, kTileBr, scale, count, to);
    }
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif

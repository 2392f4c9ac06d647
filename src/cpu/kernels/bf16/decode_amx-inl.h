// Decoding (decode-inl.h) of bf16 on tiles, for kv heads with enough rows: S^T = K Q^T, with tiles
// of K loaded from the tensor if its rows have one stride, and O += P V with pairs of rows of V,
// which costs less than transposing V for so few rows.
#if defined(FULGUR_CPU_TILE_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_TILE_DECODE_INL_H_
#undef FULGUR_CPU_TILE_DECODE_INL_H_
#else
#define FULGUR_CPU_TILE_DECODE_INL_H_
#endif

#include <vector>

#include "cpu/kernels/bf16/forward-inl.h"
#include "cpu/kernels/simd/decode-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The minimum and maximum rows of a kv head. Fewer rows are as fast on vectors, and for more rows
/// it pays to transpose V.
constexpr int64_t kMinTileDecodeRows = 8;
constexpr int64_t kMaxTileDecodeRows = kTileBr;

/// The number of heads, of so many rows each, that share a vector of the softmax.
constexpr int64_t heads_of_vector(int64_t rows) {
  return std::max<int64_t>(1, kTileRows / std::max<int64_t>(1, rows));
}

/// The kv heads of a task that share vectors, from its head `index` on, and their operands.
struct TileDecodeHeads {
  Task first;
  int64_t index, count;
  DecodeRows rows;
  uint16_t* Q;  // columns of B, summed over d, head after head

  TileDecodeHeads(const Task& task, int64_t index, int64_t heads, int64_t each, Arena& arena)
      : first(task.kv_head_after(index)),
        index(index),
        count(std::min(heads_of_vector(each), heads - index)),
        rows(task.problem, count * each, arena),
        Q(arena.take_halves(count * q_size(task.problem, each))) {}

  static int64_t q_size(const Problem& p, int64_t rows) {
    return blocks_of(rows) * steps_of(p.d) * kTileSize;
  }

  void start(const ForwardArgs& args) {
    const Problem& p = first.problem;
    const int64_t each = first.rows();
    rows.start(first);
    for (int64_t j = 0; j < count; ++j) {
      Census unused;
      pack_columns<kPartsOfBF16>(query_rows(first.kv_head_after(j), args.q, p.q, p.d, 0, each),
                                 each, Q + j * q_size(p, each), &unused);
    }
  }
};

/// The operands of a head and a tile of keys.
struct TileDecodeScratch {
  uint16_t* K;  // rows of A, summed over d, if tiles cannot be loaded from the tensor
  uint16_t* V;  // B, summed over keys
  uint16_t* P;  // rows of A, summed over keys

  TileDecodeScratch(const Problem& p, int64_t rows, Arena& arena)
      : K(arena.take_halves(kBc * steps_of(p.d) * kTileDepth)),
        V(arena.take_halves(kBc * blocks_of(p.dv) * kTileRows)),
        P(arena.take_halves(kBc * blocks_of(rows) * kTileRows)) {}
};

/// A tile of keys of K or V.
struct TileKeys {
  const char* at[kBc];  // rows of the first head
  int64_t n;            // 0 after the last tile
  int64_t head;         // bytes from a row to that of the next head
  int64_t stride = 0;   // bytes from a row to the next; 0 if that varies
  int64_t columns;

  TileKeys(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
           const KeyTiles& tiles)
      : n(tiles.done() ? 0 : tiles.tile().n), head(layout.head * size_of(t.dtype)), columns(dim) {
    if (n == 0) return;
    key_addresses(task, t, layout, tiles.tile().j, n, at);
    if (n > 1) stride = at[1] - at[0];
    for (int64_t i = 1; i < n; ++i) {
      if (at[i] - at[i - 1] != stride) stride = 0;
    }
  }

  const uint16_t* row(int64_t i, int64_t j) const {
    return reinterpret_cast<const uint16_t*>(at[j] + i * head);
  }
  /// Rows of head i from key j on.
  auto rows(int64_t i, int64_t j) const {
    return Rows{[this, i, j](int64_t r) { return row(i, j + r); }, n - j, columns};
  }
};

/// Prefetches the next tile of K and of V while the current one is computed, some lines with each
/// part of the work and in the order of memory. All lines at once would delay other reads.
class TilePrefetch {
 public:
  TilePrefetch(const TileKeys& K, const TileKeys& V, int64_t heads)
      : keys_(&K), V_(&V), heads_(heads), left_(K.n) {
    if (left_ > 0) go_to_key();
  }

  // Inlined, because GCC 12 drops calls of functions that only prefetch.
  HWY_INLINE void prefetch(int64_t lines) {
    for (owed_ += lines; owed_ >= row_lines_ && left_ > 0; owed_ -= row_lines_) {
      for (int64_t i = 0; i < row_lines_; ++i) __builtin_prefetch(row_ + 64 * i, 0, kToL2);
      next_row();
    }
  }

 private:
  HWY_INLINE void go_to_key() {
    row_ = reinterpret_cast<const char*>(keys_->row(0, keys_->n - left_));
    row_lines_ = (2 * keys_->columns + 63) / 64;
  }
  HWY_INLINE void next_row() {
    row_ += keys_->head;
    if (++head_ < heads_) return;
    head_ = 0;
    if (--left_ == 0) {
      if (keys_ == V_) return;
      keys_ = V_;
      left_ = V_->n;
    }
    go_to_key();
  }

  const TileKeys *keys_, *V_;
  int64_t heads_, left_, head_ = 0;  // left_: keys of *keys_ that are left
  const char* row_ = nullptr;
  int64_t row_lines_ = 1, owed_ = 0;  // lines of a row; lines still to be prefetched
};

/// A call of decode() on tiles.
template <class Products>
class TileDecode {
 public:
  TileDecode(const Task& first, const ForwardArgs& args, int64_t heads, float* scratch)
      : first_(first),
        p_(first.problem),
        args_(args),
        rows_(first.rows()),
        arena_(scratch),
        s_(p_, rows_, arena_) {
    heads_.reserve(heads);
    for (int64_t i = 0; i < heads; i += heads_of_vector(rows_)) {
      heads_.emplace_back(first, i, heads, rows_, arena_).start(args);
    }
  }

  void run(int64_t key_begin, int64_t key_end) {
    KeyTiles tiles = heads_[0].rows.row_tiles[0].mask.tiles({key_begin, key_end});  // of every head
    const int64_t heads = heads_.back().index + heads_.back().count;
    const auto keys = [&](const ConstTensor& t, const Layout& layout, int64_t dim) {
      return TileKeys(first_, t, layout, dim, tiles);
    };
    TileKeys K = keys(args_.k, p_.k, p_.d), V = keys(args_.v, p_.v, p_.dv);
    while (!tiles.done()) {
      const KeyTile tile = tiles.tile();
      tiles.next();
      const TileKeys next_K = keys(args_.k, p_.k, p_.d), next_V = keys(args_.v, p_.v, p_.dv);
      TilePrefetch next(next_K, next_V, heads);
      session_.shape(kTileRows, std::min(rows_, kTileRows));
      for (const TileDecodeHeads& some : heads_) add_scores(K, some, next);
      products_.flush();
      session_.shape(std::min(rows_, kTileRows), kTileRows);
      for (TileDecodeHeads& some : heads_) add_values(V, tile, some, next);
      products_.flush();
      K = next_K;
      V = next_V;
    }
  }

  void finish(float* states) const {
    for (const TileDecodeHeads& some : heads_) states = some.rows.finish(p_.dv, states);
  }

 private:
  /// S^T = K Q^T, each head in its own columns.
  void add_scores(const TileKeys& K, const TileDecodeHeads& some, TilePrefetch& next) {
    const int64_t steps = steps_of(p_.d), width = some.rows.width;
    for (int64_t j = 0; j < some.count; ++j) {
      const int64_t i = some.index + j;
      Operand A{K.row(i, 0), K.stride, kTileRows * K.stride / 2, kTileDepth};
      if (K.stride == 0 || K.n % kTileRows != 0 || p_.d % kTileDepth != 0) {
        Census unused;
        pack_rows<kPartsOfBF16>(K.rows(i, 0), K.n, s_.K, &unused);
        A = Operand::packed(s_.K, steps);
      }
      for (int64_t b = 0; b < blocks_of(K.n); b += 2) {
        next.prefetch(lines_);
        products_.multiply({false,
                            std::min<int64_t>(2, blocks_of(K.n) - b),
                            blocks_of(rows_),
                            steps,
                            {A.at(b, 0), A.stride, A.block, A.step},
                            Operand::packed(some.Q + j * TileDecodeHeads::q_size(p_, rows_), steps),
                            some.rows.S + b * kTileRows * width + j * rows_,
                            width,
                            {std::min(2 * kTileRows, K.n - b * kTileRows), rows_, p_.d}});
      }
    }
  }

  /// Computes P, and O = diag(alpha) O + P V.
  void add_values(const TileKeys& V, const KeyTile& tile, TileDecodeHeads& some,
                  TilePrefetch& next) {
    DecodeRows& rows = some.rows;
    const int64_t steps = steps_of(tile.n), ldo = blocks_of(p_.dv) * kTileRows;
    scale_scores(tile.n, rows.width, query_factor(p_), rows.S);
    next.prefetch(some.count * lines_);
    rows.probabilities(some.first, tile);
    scale_rows(rows.alpha, rows.O, ldo, rows.count);
    pack_probabilities(rows, steps);
    for (int64_t j = 0; j < some.count; ++j) {
      Census values;
      for (int64_t s = 0; s < steps; ++s) {
        pack_pairs<kPartsOfBF16>(V.rows(some.index + j, s * kTileDepth), s, steps, s_.V, &values,
                                 [&]() HWY_ATTR { next.prefetch(2); });
      }
      // Tiles take denormal numbers for 0, and multiply an inf or NaN of V by the P = 0 of rows
      // that do not see the key.
      if (values.denormal() || (tile.partial && !values.finite())) {
        add_visible_values(some.first, args_, tile, rows, j, j + 1);
        continue;
      }
      next.prefetch(lines_);
      products_.multiply({true,
                          blocks_of(rows_),
                          blocks_of(p_.dv),
                          steps,
                          Operand::packed(s_.P + j * rows_ * kTileDepth, steps),
                          Operand::packed(s_.V, steps),
                          rows.O + j * rows_ * ldo,
                          ldo,
                          {rows_, p_.dv, tile.n}});
    }
  }

  /// Packs P [keys][width] as rows of A.
  HWY_INLINE void pack_probabilities(const DecodeRows& rows, int64_t steps) const {
    uint16_t* to = s_.P;
    for (int64_t b = 0; b < blocks_of(rows.count); ++b) {
      for (int64_t s = 0; s < steps; ++s, to += kTileSize) {
        const float* P = rows.S + s * kTileDepth * rows.width + b * kTileRows;
        __m512i pairs[16];
        FULGUR_UNROLL for (int i = 0; i < 16; ++i, P += 2 * rows.width) {
          pairs[i] = pair_halves(round_up_half(_mm512_load_ps(P)),
                                 round_up_half(_mm512_load_ps(P + rows.width)));
        }
        transpose_16(pairs);
        store_tile(pairs, to);
      }
    }
  }

  const Task& first_;
  const Problem& p_;
  const ForwardArgs& args_;
  const int64_t rows_;  // rows of a head
  Arena arena_;
  const TileDecodeScratch s_;
  typename Products::Session session_;
  Products products_;
  const int64_t lines_ = (p_.d + p_.dv) / 4;  // an eighth of the lines of a head and a tile of keys
  std::vector<TileDecodeHeads> heads_;
};

inline int64_t tile_decode_scratch(const Problem& p, int64_t heads, int64_t rows) {
  Arena arena(nullptr);
  TileDecodeScratch(p, rows, arena);
  for (int64_t i = 0; i < heads; i += heads_of_vector(rows)) {
    const int64_t count = std::min(heads_of_vector(rows), heads - i);
    DecodeRows(p, count * rows, arena);
    arena.take_halves(count * TileDecodeHeads::q_size(p, rows));
  }
  return std::max(arena.used(), decode_scratch(p, heads, rows));
}

template <class Products>
void tile_decode(const Task& first, const ForwardArgs& args, int64_t heads, int64_t key_begin,
                 int64_t key_end, float* states, float* scratch) {
  if (first.rows() < kMinTileDecodeRows || first.problem.has(Arg::kBias)) {  // vectors add a bias
    return decode(first, args, heads, key_begin, key_end, states, scratch);
  }
  TileDecode<Products> task(first, args, heads, scratch);
  task.run(key_begin, key_end);
  task.finish(states);
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif

// The schedule of both forward passes of bf16 and f16: forward-inl.h, and biased_forward-inl.h for
// a dense bias of queries and keys. A block of query rows is up to 32 row tiles of 32 rows. The
// keys come in chunks of 8 tiles: K and V of a chunk are packed once for all row tiles, and one row
// tile after the other walks over the tiles of the chunk, so that its O stays in the L1 cache.
// While P of a tile is computed from its scores, the products for the scores of the next tile are
// made, and P V of the tiles before.
#if defined(FULGUR_CPU_FORWARD_SCHEDULE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_FORWARD_SCHEDULE_INL_H_
#undef FULGUR_CPU_FORWARD_SCHEDULE_INL_H_
#else
#define FULGUR_CPU_FORWARD_SCHEDULE_INL_H_
#endif

#include <utility>

#include "cpu/kernels/bf16/pack-inl.h"
#include "cpu/kernels/simd/score-inl.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

constexpr int64_t kTileBr = 2 * kTileRows;
constexpr int64_t kBlockRowTiles = 32;   // row tiles of a block
constexpr int64_t kAmxPackingRows = 64;  // see Kernels::packing_rows

constexpr int64_t kChunk = 8;  // key tiles of a chunk
constexpr int64_t kTileSteps = kBc / kTileDepth, kChunkSteps = kChunk * kTileSteps;

/// The maximum number of key tiles in a group. P of the tiles of a group is kept and multiplied by
/// V together, some blocks of columns of V with each tile of the next group, so that each sum of O
/// is loaded and stored once a group.
constexpr int64_t group_of(int64_t dv) { return std::min(kChunk, (blocks_of(dv) + 1) / 2); }

/// The row block and a chunk of the keys in fast memory. Each pass lays out S, P, O and the
/// operands of products in its own way.
template <int kParts>
struct TileForwardScratch {
  uint16_t* Q[kBlockRowTiles];  // an operand, summed over d
  float* O[kBlockRowTiles];     // [kTileBr x dv in tiles]
  float* m[kBlockRowTiles];     // [kTileBr]
  float* l[kBlockRowTiles];     // [kTileBr x row_sums]
  uint16_t* K[kChunk];          // an operand, summed over d
  uint16_t* V;                  // an operand, summed over the keys of the chunk
  float* S[2];                  // [kTileBr x kBc], of a key tile and the next
  uint16_t* P[2];               // an operand, summed over keys: of a group and the one before
  float* P_wide;                // [kTileBr x kBc]: P in f32, before dropout or for vectors
  float* bias[2];               // [kTileBr x kBc], of a key tile and the next
  float* V_wide;                // [kBc][dv in tiles]: V in f32, for vectors

  TileForwardScratch(const Problem& p, int64_t row_sums, Arena& arena) {
    const int64_t d = kParts * steps_of(p.d) * kTileDepth, dv = blocks_of(p.dv) * kTileRows;
    for (int64_t i = 0; i < kBlockRowTiles; ++i) {
      Q[i] = arena.take_halves(kTileBr * d);
      O[i] = arena.take(dv * kTileBr);
      m[i] = arena.take(kTileBr);
      l[i] = arena.take(kTileBr * row_sums);
    }
    for (uint16_t*& tile : K) tile = arena.take_halves(kBc * d);
    V = arena.take_halves(kParts * kChunk * kBc * dv);
    for (float*& tile : S) tile = arena.take(kBc * kTileBr);
    for (uint16_t*& packed : P) {
      packed = arena.take_halves(kParts * group_of(p.dv) * kBc * kTileBr);
    }
    P_wide = arena.take(kBc * kTileBr);
    V_wide = arena.take(kBc * dv);
    for (float*& tile : bias) tile = take_bias_tile(p, arena);
  }
};

/// Floats of the scratch of a pass that has `row_sums` sums of P for each row.
template <int kParts>
int64_t tile_scratch(const Problem& p, int64_t row_sums) {
  Arena arena(nullptr);
  TileForwardScratch<kParts>(p, row_sums, arena);
  return arena.used();
}

/// The addresses of the keys of some tiles in K or V.
struct KeyAddresses {
  const char* at[kTiles * kBc];

  KeyAddresses(const Task& task, const ConstTensor& t, const Layout& layout, int64_t j, int64_t n) {
    key_addresses(task, t, layout, j, n, at);
  }
};

/// Keys [j, j + n) of K or V of a task.
inline auto key_rows(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
                     int64_t j, int64_t n) {
  return Rows{[keys = KeyAddresses(task, t, layout, j, n)](int64_t i) {
                return reinterpret_cast<const uint16_t*>(keys.at[i]);
              },
              n, dim};
}

/// The addresses of the rows of a row tile in q or dout.
struct RowAddresses {
  const uint16_t* at[kTileBr];

  RowAddresses(const Task& task, const ConstTensor& t, const Layout& layout, int64_t row,
               int64_t n) {
    RowWalk walk(task, row);
    for (int64_t i = 0; i < n; ++i, walk.next()) {
      at[i] = static_cast<const uint16_t*>(t.data) + walk.offset(layout);
    }
  }
};

/// Rows [row, row + n) of q or dout of a task.
inline auto query_rows(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
                       int64_t row, int64_t n) {
  return Rows{[rows = RowAddresses(task, t, layout, row, n)](int64_t i) { return rows.at[i]; }, n,
              dim};
}

/// S = factor S: the score rules expect scaled scores, and Q is not scaled, which would round it.
HWY_INLINE void scale_scores(int64_t n, int64_t width, float factor, float* HWY_RESTRICT S) {
  const F32 f;
  for (int64_t i = 0; i < n * width; i += kLanes) {
    hn::Store(hn::Mul(hn::Load(f, S + i), hn::Set(f, factor)), f, S + i);
  }
}

/// Whether scores are masked products times the scale, with or without a bias. The scale is applied
/// in the exponent of P then, and a bias over the scale can be added to the products.
inline bool plain_scores(const Problem& p) { return only_scales(p) && query_factor(p) > 0; }

/// Scores below kModerate in size are far from those of keys that a bias hides, and from overflow.
/// Operands of moderate size (Census) have such scores with a factor of the softmax below
/// kMaxFactor.
constexpr float kModerate = 0x1p100f, kMaxFactor = 0x1p10f;

/// A row keeps its maximum until a sum of P over a key tile exceeds kMaxSum, so that no tile has to
/// be searched for the maxima of its rows.
constexpr float kMaxSum = 256;

/// One call of a forward pass. The pass derives from this class and knows how S and O lie in
/// memory:
///
///     kRowSums                               the number of sums of P that each row has
///     pack_queries(rows, width, to, census)  packs Q of a row tile
///     pack_keys(tile, place)                 packs K and V of a key tile
///     find_bias(visit)                       finds the bias; false if it hides the whole tile
///     can_add_bias(visit)                    whether the bias can be added to the products
///     scores(visit, S)                       the product of Q and K
///     values(end, packed)                    the product of P and V for the blocks before `end`
///     probabilities(visit, S, before, now)   computes P from S while products are made
///     O_floats(i)                            the size of O of row tile i
///
/// `Bias` is what the pass keeps about the bias of a visit.
template <class Pass, class Bias, class Products, int kParts>
class ForwardSchedule {
 public:
  /// Visits all keys with all row tiles.
  void run() {
    constexpr int64_t kKeys = kChunk * kBc;
    for (int64_t j = next(); j != KeyTiles::kEnd; j = next()) {
      chunk_ = j / kKeys * kKeys;
      std::fill_n(packed_, kChunk, false);
      walk(chunk_ + kKeys);
    }
  }

 protected:
  /// A visit of row tile i to a key tile, which has a place in the chunk.
  struct Visit {
    int64_t i, place;
    KeyTile tile;
    Bias bias{};
  };
  /// P of row tile i and of a group of key tiles, which are steps [begin, end) of the chunk. P is
  /// still to be multiplied by V for the blocks of columns from `block` on; `add` adds to O, which
  /// is overwritten otherwise.
  struct Packed {
    uint16_t* P = nullptr;
    int64_t i = 0, begin = 0, end = 0;
    bool add = false;
    int64_t block = 0;
  };

  /// Packs Q of the row tiles of rows [row_begin, row_end).
  HWY_INLINE ForwardSchedule(const Task& task, const ForwardArgs& args, int64_t row_begin,
                             int64_t row_end, float* scratch)
      : task_(task),
        p_(task.problem),
        args_(args),
        plain_(plain_scores(p_)),
        factor_(plain_ ? query_factor(p_) : 1),
        bias_factor_(static_cast<float>(plain_ ? 1 / p_.scale : kLog2e)),
        arena_(scratch),
        s_(p_, Pass::kRowSums, arena_) {
    for (int64_t row = row_begin; row < row_end; row += kTileBr, ++count_) {
      RowTile& row_tile = row_tiles_[count_];
      make_row_tile(task, row, std::min(row_end, row + kTileBr), &row_tile);
      tiles_[count_] = row_tile.mask.tiles({0, task.s.sk});
      Census census;
      Pass::pack_queries(query_rows(task, args.q, p_.q, p_.d, row, row_tile.count),
                         row_tile.width(), s_.Q[count_], &census);
      moderate_[count_] = census.moderate();
      std::fill_n(s_.m[count_], row_tile.width(), -std::numeric_limits<float>::infinity());
      std::fill_n(s_.l[count_], row_tile.width() * Pass::kRowSums, 0.0f);
      fresh_[count_] = true;
      steady_[count_] = false;
      begun_[count_] = false;
    }
  }

  /// Whether the bias of a visit is added while the exponentials are computed, without a pass over
  /// the scores before. The bias may hide keys then: no score and no maximum is so large that P of
  /// a hidden key would not be 0.
  bool adds_bias(const Visit& at) const {
    return pass().can_add_bias(at) && p_.dropout_p == 0 && factor_ < kMaxFactor &&
           !at.tile.partial && at.tile.n == kBc && steady_[at.i] && moderate_[at.i] &&
           keys_[at.place].moderate() && values_[at.place].finite() &&
           !values_[at.place].denormal();
  }

  /// Makes all products of P and V that wait, because the caller changes O itself.
  HWY_NOINLINE void add_now(Packed* before, Packed* now) {
    const int64_t blocks = blocks_of(p_.dv);
    products_.multiply(pass().values(blocks, before));
    products_.multiply(pass().values(blocks, now));
    products_.flush();
    begun_[now->i] |= now->begin < now->end;
    begin_sums(now->i);
    *now = {now->P, now->i, now->end, now->end, true};
  }

  /// Sets O of row tile i to 0 if nothing has been written to it.
  void begin_sums(int64_t i) {
    if (begun_[i]) return;
    begun_[i] = true;
    std::fill_n(s_.O[i], pass().O_floats(i), 0.0f);
  }

  const Task& task_;
  const Problem& p_;
  const ForwardArgs& args_;
  const bool plain_;    // see plain_scores()
  const float factor_;  // of the products in the exponent of P
  // The factor of a bias that is added to the products, or to the scores if not plain_.
  const float bias_factor_;
  Arena arena_;
  TileForwardScratch<kParts> s_;
  const typename Products::Session session_;
  Products products_;
  RowTile row_tiles_[kBlockRowTiles];
  KeyTiles tiles_[kBlockRowTiles];        // the tiles that each row tile has yet to visit
  bool fresh_[kBlockRowTiles];            // whether some row of the row tile has seen no key yet
  bool steady_[kBlockRowTiles];           // whether each row has a maximum of moderate size
  bool moderate_[kBlockRowTiles];         // whether Q is of moderate size
  bool begun_[kBlockRowTiles];            // whether O has been written
  int64_t count_ = 0;                     // row tiles
  int64_t spare_bias_ = 0;                // the index in s_.bias that no visit uses
  int64_t chunk_ = 0;                     // the first key of the chunk
  bool packed_[kChunk];                   // whether each tile of the chunk has been packed
  Census keys_[kChunk], values_[kChunk];  // of K and V of each tile of the chunk

 private:
  Pass& pass() { return static_cast<Pass&>(*this); }
  const Pass& pass() const { return static_cast<const Pass&>(*this); }

  /// The first key tile that a row tile has yet to visit.
  int64_t next() const {
    int64_t j = KeyTiles::kEnd;
    for (int64_t i = 0; i < count_; ++i) j = std::min(j, tiles_[i].tile().j);
    return j;
  }

  /// The next visit of row tile i, or of the row tiles after it, to a tile before key `end`; its
  /// row tile is count_ where there is none.
  Visit visit(int64_t i, int64_t end) {
    for (; i < count_; ++i) {
      for (; tiles_[i].tile().j < end; tiles_[i].next()) {
        Visit at{i, 0, tiles_[i].tile()};
        if (p_.has(Arg::kBias) && !pass().find_bias(&at)) continue;
        at.place = place(at.tile);
        return at;
      }
    }
    return {i, 0, KeyTile()};
  }

  /// The place of a key tile in the chunk. The first row tile that visits the tile packs it.
  int64_t place(const KeyTile& tile) {
    const int64_t at = (tile.j - chunk_) / kBc;
    if (packed_[at]) return at;
    packed_[at] = true;
    keys_[at] = values_[at] = Census();
    pass().pack_keys(tile, at);
    return at;
  }

  /// Visits the tiles before key `end` with all row tiles.
  void walk(int64_t end) {
    const int64_t blocks = blocks_of(p_.dv), max_group = group_of(p_.dv);
    const int64_t tile_blocks = 2 * ((blocks + 2 * max_group - 1) / (2 * max_group));
    float *S = s_.S[0], *S_next = s_.S[1];
    uint16_t *P = s_.P[0], *P_before = s_.P[1];
    Packed before, now;
    int64_t grouped = 0;  // tiles of the group so far
    const Flushing on(true);
    Visit at = visit(0, end);
    if (at.i == count_) return;
    products_.multiply(pass().scores(at, S));
    products_.flush();
    while (at.i < count_) {
      tiles_[at.i].next();
      const Visit later = visit(at.i, end);
      if (grouped == 0) {
        const int64_t step = at.place * kTileSteps;
        now = {P, at.i, step, step, begun_[at.i]};
      }
      ++grouped;
      // A group is one operand, so its tiles lie next to each other in the chunk.
      const bool last = grouped == max_group || later.i != at.i || later.place != at.place + 1;
      const Product next = later.i < count_ ? pass().scores(later, S_next) : Product();
      const Product add =
          pass().values(last ? blocks : std::min(blocks, grouped * tile_blocks), &before);
      products_.defer(next);
      products_.defer(add);
      pass().probabilities(at, S, &before, &now);
      if (add.rows == 0) products_.flush();  // stores the scores, which later products do otherwise
      if (last) {
        before = now;
        begun_[at.i] |= now.begin < now.end;
        std::swap(P, P_before);
        grouped = 0;
      }
      std::swap(S, S_next);
      at = later;
    }
    products_.multiply(pass().values(blocks, &before));
    products_.flush();
  }
};

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif

// The mask hook of the CPU's kernels: which keys each row of a row tile sees, which tiles of keys
// need the mask, and the scores of hidden keys, -inf. call/mask.h has the intervals of keys.
#if defined(FULGUR_CPU_MASK_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_MASK_INL_H_
#undef FULGUR_CPU_MASK_INL_H_
#else
#define FULGUR_CPU_MASK_INL_H_
#endif

#include <bit>

#include "call/mask.h"
#include "cpu/kernels/simd/kernels.h"
#include "cpu/kernels/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

constexpr int64_t kBr = 3 * kLanes;

/// The keys that each row of a row tile, one in each lane, sees: those of [begin, end) that, from
/// key `tree` on, have a bit in the row's words, and that the bias of the current tile does not
/// hide.
class RowTileMask {
 public:
  RowTileMask() = default;
  /// A mask of rows that see nothing until set_row(). `words` has the tree mask of each query of
  /// the sequence, or is null.
  RowTileMask(const Problem& p, const Sequence& s, const uint64_t* words)
      : mask_(&p.mask),
        s_(s),
        words_(words),
        any_{INT64_MAX, 0},
        all_{0, INT64_MAX},
        tree_(words == nullptr ? INT64_MAX : s.sk - s.sq) {}

  /// Sets the row of a lane to query i.
  void set_row(int64_t lane, int64_t i) {
    KeyRange keys = visible_keys(*mask_, s_, i);
    int64_t gap = keys.end;  // the first of these keys that the row does not see
    if (words_ != nullptr) {
      const uint64_t word = words_[i];
      tree_word_[0][lane] = static_cast<int32_t>(word);
      tree_word_[1][lane] = static_cast<int32_t>(word >> 32);
      gap = std::clamp(tree_ + std::countr_one(word), keys.begin, keys.end);
      keys.end = std::clamp(tree_ + 64 - std::countl_zero(word), keys.begin, keys.end);
    }
    begin_[lane] = keys.begin;
    end_[lane] = keys.end;
    all_ = {std::max(all_.begin, keys.begin), std::min(all_.end, gap)};
    if (!keys.empty()) any_ = {std::min(any_.begin, keys.begin), std::max(any_.end, keys.end)};
  }

  /// Hides the keys of the current tile, from key j on, whose bias is -inf. `bias` is [n][step], or
  /// [n] for all rows if the step is 0, or null.
  void hide(const float* bias, int64_t j, int64_t step) {
    bias_ = bias;
    tile_ = j;
    step_ = step;
  }
  /// Whether a bias hides keys.
  bool hides() const { return bias_ != nullptr; }
  /// Whether some row does not see some key of a tile.
  bool hides(const KeyTile& tile) const { return tile.partial || hides(); }

  bool sees(int64_t lane, int64_t j) const {
    if (j < begin_[lane] || j >= end_[lane]) return false;
    if (hides() && bias_[step_ == 0 ? j - tile_ : (j - tile_) * step_ + lane] == kHidden)
      return false;
    return j < tree_ || (tree_word_[(j - tree_) / 32][lane] >> (j - tree_) % 32 & 1) != 0;
  }
  /// A bit for each key of a tile that a row sees, without what a bias hides.
  uint64_t keys_of(int64_t lane, const KeyTile& tile) const {
    static_assert(kBc == 64);
    const auto below = [](int64_t n) { return n >= 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1; };
    const auto of_tile = [&](int64_t j) { return std::clamp<int64_t>(j - tile.j, 0, tile.n); };
    const uint64_t keys = below(of_tile(end_[lane])) & ~below(of_tile(begin_[lane]));
    const int64_t tree = tree_ - tile.j;
    if (tree >= kBc) return keys;
    const auto word = uint64_t{static_cast<uint32_t>(tree_word_[1][lane])} << 32 |
                      static_cast<uint32_t>(tree_word_[0][lane]);
    if (tree >= 0) return keys & (word << tree | below(tree));
    return tree > -64 ? keys & word >> -tree : 0;
  }
  /// The end of the keys that some row sees.
  int64_t end() const { return any_.end; }
  /// The tiles of `keys` in which some row sees a key.
  KeyTiles tiles(KeyRange keys) const { return {keys, any_, all_, kBc}; }

 private:
  friend struct Visible;

  const Mask* mask_ = nullptr;
  Sequence s_{};
  const uint64_t* words_ = nullptr;
  KeyRange any_, all_;  // keys that some row sees; keys that every row sees
  int64_t begin_[kBr] = {}, end_[kBr] = {};
  int64_t tree_ = INT64_MAX;                  // the first key that has a bit
  HWY_ALIGN int32_t tree_word_[2][kBr] = {};  // bits of 32 keys from tree_ on, and of 32 more
  const float* bias_ = nullptr;
  int64_t tile_ = 0, step_ = 0;
  static constexpr float kHidden = -std::numeric_limits<float>::infinity();
};

/// The keys of a tile that each row sees, as masks of vectors.
struct Visible {
  HWY_ALIGN int32_t begin[kBr], end[kBr];  // in keys relative to the tile
  const RowTileMask& rows;
  int64_t tree;  // keys from this one on have bits

  /// The keys that the rows of so many vectors see.
  Visible(const RowTileMask& rows, int64_t vectors, const KeyTile& tile)
      : rows(rows), tree(rows.tree_ - tile.j) {
    const auto [j, n, partial] = tile;
    for (int64_t lane = 0; lane < vectors * kLanes; ++lane) {
      begin[lane] = static_cast<int32_t>(std::clamp<int64_t>(rows.begin_[lane] - j, 0, n));
      end[lane] = static_cast<int32_t>(std::clamp<int64_t>(rows.end_[lane] - j, 0, n));
    }
  }
  /// Lanes of vector v that see key jj.
  HWY_INLINE hn::Mask<F32> mask(int64_t v, int64_t jj) const {
    const I32 i;
    const F32 f;
    const auto key = hn::Set(i, static_cast<int32_t>(jj));
    const auto from = hn::Load(i, begin + v * kLanes), to = hn::Load(i, end + v * kLanes);
    auto inside = hn::RebindMask(f, hn::AndNot(hn::Lt(key, from), hn::Lt(key, to)));
    if (rows.hides()) {
      const V32 bias = rows.step_ == 0 ? hn::Set(f, rows.bias_[jj])
                                       : hn::Load(f, rows.bias_ + jj * rows.step_ + v * kLanes);
      inside = hn::AndNot(hn::Eq(bias, hn::Set(f, RowTileMask::kHidden)), inside);
    }
    if (jj < tree) return inside;
    const int64_t bit = jj - tree;
    const auto words = hn::Load(i, rows.tree_word_[bit / 32] + v * kLanes);
    const auto shown = hn::TestBit(words, hn::Set(i, static_cast<int32_t>(1u << bit % 32)));
    return hn::And(inside, hn::RebindMask(f, shown));
  }
};

/// Sets the scores S [n][ld] of keys that the mask hides to -inf. add_bias() has done so for the
/// keys that a bias hides.
HWY_INLINE void hide_scores(const RowTileMask& rows, int64_t vectors, const KeyTile& tile,
                            float* HWY_RESTRICT S, int64_t ld) {
  if (!tile.partial) return;
  const F32 f;
  const Visible visible(rows, vectors, tile);
  const V32 masked = hn::Set(f, -std::numeric_limits<float>::infinity());
  for (int64_t jj = 0; jj < tile.n; ++jj) {
    for (int64_t v = 0; v < vectors; ++v) {
      float* at = S + jj * ld + v * kLanes;
      hn::Store(hn::IfThenElse(visible.mask(v, jj), hn::Load(f, at), masked), f, at);
    }
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

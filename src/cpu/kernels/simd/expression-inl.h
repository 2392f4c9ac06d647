// The expressions of a call on the CPU (expression/stages.h). Nodes that depend on the row alone,
// or on the key alone, are computed once for each; the others a few keys of a tile at a time, one
// operation after the other.
#if defined(FULGUR_CPU_EXPRESSION_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_EXPRESSION_INL_H_
#undef FULGUR_CPU_EXPRESSION_INL_H_
#else
#define FULGUR_CPU_EXPRESSION_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>

#include <bit>
#include <cmath>
#include <vector>

#include "call/lengths.h"
#include "cpu/kernels/simd/row_tile-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// The expressions of one task, on one thread. Does nothing in calls without expressions.
class TaskExpressions {
 public:
  TaskExpressions(const Task& task, float* scratch) : task_(task), given_(task.given.expressions) {
    if (given_ == nullptr) return;
    const expression::StagedGraph& g = given_->graph;
    const ExpressionLayout layout(g, kBr);
    auto* const words = reinterpret_cast<int32_t*>(scratch) + given_->scratch;
    uniform_ = words + layout.uniform;
    rows_ = words + layout.rows;
    columns_ = words + layout.columns;
    mixed_ = words + layout.mixed;
    where_ = words + layout.where;
    derivatives_ = reinterpret_cast<float*>(words + layout.derivatives);
    values_.resize(g.call.graph.nodes.size());
    const Problem& p = task.problem;
    place_ = place_of(p, task.b, task.kv * p.group(), task.s);
    g.evaluate(g.uniform, given_->tensors, place_, values_);
    for (size_t i = 0; i < g.uniform.size(); ++i) uniform_[i] = bits(g.uniform[i]);
  }

  bool given() const { return given_ != nullptr; }
  bool masks() const { return given() && call().mask >= 0; }
  bool changes_scores() const { return given() && call().score >= 0; }

  /// Computes the nodes of the rows of row tile `number`.
  void set_rows(const RowTile& row_tile, int64_t row_begin, int64_t number) {
    if (!given()) return;
    const expression::StagedGraph& g = given_->graph;
    int32_t* const rows = rows_of(number);
    RowWalk row(task_, row_begin);
    expression::Place at = place_;
    for (int64_t lane = 0; lane < row_tile.width(); ++lane) {
      if (lane < row_tile.count) {
        at.q = row.query;
        at.h = row.head;
        g.evaluate(g.rows, given_->tensors, at, values_);
        row.next();
      }
      for (size_t i = 0; i < g.rows.size(); ++i) rows[i * kBr + lane] = bits(g.rows[i]);
    }
    if (!masks()) return;
    row_hulls_.clear();
    for (size_t i = 0; i < g.rows.size(); ++i) {
      row_hulls_.push_back(
          expression::hull_of(node(g.rows[i]).type(), std::span(rows + i * kBr, row_tile.count)));
    }
    hulls().begin(row_hulls_, &hulls_[number]);
    for (Known& one : known_[number]) one.j = -1;
  }

  /// Skips the tiles that the mask hides completely.
  void skip_hidden(int64_t number, KeyTiles* tiles) {
    if (!masks()) return;
    for (; !tiles->done(); tiles->next()) {
      const int64_t j = tiles->tile().j;
      const Tile is = hulls().tile(j / kBc, &hulls_[number]);
      if (is == Tile::kEmpty) continue;
      known_[number][0] = known_[number][1];
      known_[number][1] = {j, is};
      return;
    }
  }

  /// Computes the nodes of the keys of tile `number`; those of kTiles tiles are kept.
  void set_columns(int64_t j, int64_t n, int64_t number) {
    if (!given()) return;
    const expression::StagedGraph& g = given_->graph;
    if (masks()) {
      tile_columns_[number] = hulls().keys(j / kBc);
      return;
    }
    int32_t* const columns = columns_ + number * static_cast<int64_t>(g.columns.size()) * kBc;
    tile_columns_[number] = columns;
    expression::Place at = place_;
    for (int64_t jj = 0; jj < n; ++jj) {
      at.k = j + jj;
      g.evaluate(g.columns, given_->tensors, at, values_);
      for (size_t i = 0; i < g.columns.size(); ++i) columns[i * kBc + jj] = bits(g.columns[i]);
    }
  }

  /// Applies the mask to a tile: `bias` [kBc][width] takes the row tile's bias, with -inf for the
  /// keys that the mask hides. Returns whether some row sees some key.
  HWY_NOINLINE bool mask(const KeyTile& tile, int64_t number, int64_t columns, float* bias,
                         RowTile* row_tile) {
    const Tile is = state(number, tile.j);
    if (is != Tile::kPartial) return is == Tile::kFull;
    at(number, columns, *row_tile);
    const F32 f;
    const I32 i;
    const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
    auto every = hn::Set(i, -1), any = hn::Zero(i);
    for (int64_t jj = 0; jj < tile.n; jj += kExpressionKeys) {
      const int64_t n = std::min(kExpressionKeys, tile.n - jj);
      run(given_->graph.mask_nodes, jj, n, nullptr);
      const Operand shown = operand(call().mask, jj);
      for (int64_t key = 0; key < n; ++key) {
        for (int64_t v = 0; v < vectors_; ++v) {
          float* const to = bias + (jj + key) * width_ + v * kLanes;
          const auto seen = load(shown, key, v);
          const V32 before = row_tile->bias == nullptr ? hn::Zero(f) : hn::Load(f, to);
          hn::Store(hn::IfThenElse(hn::RebindMask(f, hn::Ne(seen, hn::Zero(i))), before, none), f,
                    to);
          every = hn::And(every, seen);
          any = hn::Or(any, seen);
        }
      }
    }
    if (hn::AllTrue(i, hn::Eq(any, hn::Zero(i)))) return false;
    if (hn::AllTrue(i, hn::Ne(every, hn::Zero(i)))) return true;
    row_tile->bias = bias;
    row_tile->mask.hide(bias, tile.j, width_);
    return true;
  }

  /// Changes the scores S [n][ld] of a tile, which are in log2 units. `slope`, if not null, takes
  /// the derivative, times its previous value if `sloped`. Scores of -inf hide their keys, by
  /// `bias` as above. Keeps the values that add_gradients() needs.
  HWY_NOINLINE void change_scores(const KeyTile& tile, int64_t number, int64_t columns,
                                  float* HWY_RESTRICT S, int64_t ld, float* HWY_RESTRICT slope,
                                  bool sloped, float* bias, RowTile* row_tile) {
    at(number, columns, *row_tile);
    const F32 f;
    const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
    const expression::StagedGraph& g = given_->graph;
    const V32 unit = hn::Set(f, g.subtracted ? -kLog2e : kLog2e);
    V32 min_score = hn::Zero(f);
    for (int64_t jj = 0; jj < tile.n; jj += kExpressionKeys) {
      const int64_t n = std::min(kExpressionKeys, tile.n - jj);
      run(g.score_nodes, jj, n, S + jj * ld, ld);
      const Operand change = operand(g.added >= 0 ? g.added : call().score, jj);
      for (int64_t key = 0; key < n; ++key) {
        for (int64_t v = 0; v < vectors_; ++v) {
          float* const to = S + (jj + key) * ld + v * kLanes;
          const V32 x = hn::BitCast(f, load(change, key, v));
          const V32 y = g.added >= 0 ? hn::MulAdd(x, unit, hn::Load(f, to)) : hn::Mul(x, unit);
          min_score = at_most(y, min_score);
          hn::Store(y, f, to);
        }
      }
      if (slope != nullptr) store_slope(jj, n, sloped, slope + jj * ld, ld);
      if (task_.tensor_sums != nullptr) keep_gradients(jj, n);
    }
    if (!hn::AllTrue(f, hn::Ne(min_score, none))) hide_infinite(tile, S, ld, bias, row_tile);
  }

  /// Adds the gradients of tensors from dS [n][width], the gradients of a tile's changed scores.
  void add_gradients(const RowTile& row_tile, const KeyTile& tile, const float* HWY_RESTRICT dS) {
    if (task_.tensor_sums == nullptr) return;
    const int64_t size = kBc * kBr;
    for (size_t s = 0; s < call().scatters.size(); ++s) {
      const int tensor = node(call().scatters[s].gather).tensor;
      double* const sums = task_.tensor_sums + given_->sums[tensor];
      for (int64_t jj = 0; jj < tile.n; ++jj) {
        for (int64_t lane = 0; lane < row_tile.count; ++lane) {
          const int64_t entry = jj * row_tile.width() + lane;
          const float ds = dS[entry];
          if (ds == 0) continue;  // a hidden key adds nothing, even if its derivative is NaN
          sums[where_[s * size + entry]] +=
              static_cast<double>(ds) * derivatives_[s * size + entry];
        }
      }
    }
  }

 private:
  /// The address of the values of a node, from a key on.
  struct Operand {
    const int32_t* at;
    int64_t key;  ///< the stride from a key to the next
    bool one;     ///< whether all rows share a value
  };

  const expression::CallGraph& call() const { return given_->graph.call; }
  const expression::Node& node(int n) const { return call().graph.nodes[n]; }
  int32_t bits(int n) const { return expression::bits_of(node(n).type(), values_[n]); }
  int32_t* rows_of(int64_t number) const {
    return rows_ + number * static_cast<int64_t>(given_->graph.rows.size()) * kBr;
  }
  const expression::MaskHulls& hulls() const { return given_->hulls[task_.b]; }
  /// The mask of a key tile and the rows of a row tile: of the tile that skip_hidden() found last.
  Tile state(int64_t number, int64_t j) {
    for (const Known& one : known_[number]) {
      if (one.j == j) return one.is;
    }
    return hulls().tile(j / kBc, &hulls_[number]);
  }
  int32_t* mixed_of(int n) const { return mixed_ + given_->graph.slots[n] * kExpressionKeys * kBr; }

  void at(int64_t number, int64_t columns, const RowTile& row_tile) {
    its_rows_ = rows_of(number);
    its_columns_ = tile_columns_[columns];
    vectors_ = row_tile.vectors;
    width_ = row_tile.width();
  }

  Operand operand(int n, int64_t jj) const {
    const int slot = given_->graph.slots[n];
    switch (given_->graph.stages[n]) {
      case expression::Stage::kUniform:
        return {uniform_ + slot, 0, true};
      case expression::Stage::kRow:
        return {its_rows_ + slot * kBr, 0, false};
      case expression::Stage::kColumn:
        return {its_columns_ + slot * kBc + jj, 1, true};
      case expression::Stage::kMixed:
        break;
    }
    return {mixed_of(n), width_, false};
  }

  static HWY_INLINE hn::Vec<I32> load(const Operand& x, int64_t key, int64_t v) {
    const I32 i;
    const int32_t* const from = x.at + key * x.key;
    return x.one ? hn::Set(i, *from) : hn::Load(i, from + v * kLanes);
  }

  /// Sets out = of(key, vector) for n keys.
  template <class F>
  HWY_INLINE void each(int64_t n, int32_t* HWY_RESTRICT out, const F& of) const {
    const I32 i;
    for (int64_t key = 0; key < n; ++key) {
      for (int64_t v = 0; v < vectors_; ++v) {
        hn::Store(of(key, v), i, out + key * width_ + v * kLanes);
      }
    }
  }

  /// Computes the nodes for n keys from jj on; scores lie at S [n][ld].
  void run(std::span<const int> nodes, int64_t jj, int64_t n, const float* S, int64_t ld = 0) {
    for (const int m : nodes) compute(m, jj, n, S, ld);
  }

  HWY_NOINLINE void compute(int m, int64_t jj, int64_t n, const float* S, int64_t ld) {
    using expression::Op;
    const F32 f;
    const I32 i;
    const expression::Node& node = this->node(m);
    int32_t* const out = mixed_of(m);
    if (node.op() == Op::kSymbol) {  // the score
      const V32 ln2 = hn::Set(f, kLn2);
      for (int64_t key = 0; key < n; ++key) {
        for (int64_t v = 0; v < vectors_; ++v) {
          const V32 s = hn::Mul(hn::Load(f, S + key * ld + v * kLanes), ln2);
          hn::Store(hn::BitCast(i, s), i, out + key * width_ + v * kLanes);
        }
      }
      return;
    }
    if (node.op() == Op::kGather) return gather(node, jj, n, out);
    Operand in[3] = {operand(node.operands[0], jj), {}, {}};
    for (int x = 1; x < node.count; ++x) in[x] = operand(node.operands[x], jj);
    const bool floats = call().graph.operand_type(node) == expression::Type::kFloat;
    const auto ints = [&](const auto& of) HWY_ATTR {
      each(n, out, [&](int64_t key, int64_t v) HWY_ATTR {
        return of(load(in[0], key, v), load(in[1], key, v));
      });
    };
    const auto number = [&](const auto& of) HWY_ATTR {
      each(n, out, [&](int64_t key, int64_t v) HWY_ATTR {
        return hn::BitCast(
            i, of(hn::BitCast(f, load(in[0], key, v)), hn::BitCast(f, load(in[1], key, v))));
      });
    };
    const auto one = [&](const auto& of) HWY_ATTR {
      each(n, out, [&](int64_t key, int64_t v) HWY_ATTR {
        return hn::BitCast(i, of(hn::BitCast(f, load(in[0], key, v))));
      });
    };
    const auto one_int = [&](const auto& of) HWY_ATTR {
      each(n, out, [&](int64_t key, int64_t v) HWY_ATTR { return of(load(in[0], key, v)); });
    };
    const auto from_mask = [&](auto mask)
                               HWY_ATTR { return hn::VecFromMask(i, hn::RebindMask(i, mask)); };
    /// Operations that Highway's vectors lack, lane by lane.
    const auto by_lanes = [&](auto&& of) HWY_ATTR {
      each(n, out, [&](int64_t key, int64_t v) HWY_ATTR {
        HWY_ALIGN int32_t a[kLanes], c[kLanes];
        hn::Store(load(in[0], key, v), i, a);
        hn::Store(node.count > 1 ? load(in[1], key, v) : hn::Zero(i), i, c);
        for (int64_t l = 0; l < kLanes; ++l) {
          a[l] = std::bit_cast<int32_t>(of(std::bit_cast<float>(a[l]), std::bit_cast<float>(c[l])));
        }
        return hn::Load(i, a);
      });
    };
#define FULGUR_BOTH(op, name)                                                      \
  case Op::op:                                                                     \
    return floats ? number([](auto x, auto y) HWY_ATTR { return hn::name(x, y); }) \
                  : ints([](auto x, auto y) HWY_ATTR { return hn::name(x, y); });
#define FULGUR_COMPARE(op, name)                                                               \
  case Op::op:                                                                                 \
    return floats ? number([&](auto x, auto y)                                                 \
                               HWY_ATTR { return hn::BitCast(f, from_mask(hn::name(x, y))); }) \
                  : ints([&](auto x, auto y) HWY_ATTR { return from_mask(hn::name(x, y)); });
#define FULGUR_INTS(op, name) \
  case Op::op:                \
    return ints([](auto x, auto y) HWY_ATTR { return hn::name(x, y); });
    switch (node.op()) {
      FULGUR_BOTH(kAdd, Add)
      FULGUR_BOTH(kSub, Sub)
      FULGUR_BOTH(kMul, Mul)
      FULGUR_COMPARE(kEqual, Eq)
      FULGUR_COMPARE(kNotEqual, Ne)
      FULGUR_COMPARE(kLess, Lt)
      case Op::kLessEqual:
        return floats ? number([&](auto x, auto y)
                                   HWY_ATTR { return hn::BitCast(f, from_mask(hn::Le(x, y))); })
                      : ints([&](auto x, auto y)
                                 HWY_ATTR { return hn::Not(from_mask(hn::Lt(y, x))); });
        FULGUR_INTS(kAnd, And)
        FULGUR_INTS(kOr, Or)
        FULGUR_INTS(kXor, Xor)
      case Op::kMin:  // a NaN stays one
        return floats ? number([](auto x, auto y) HWY_ATTR {
          return hn::IfThenElse(hn::Or(hn::IsNaN(x), hn::Lt(x, y)), x, y);
        })
                      : ints([](auto x, auto y) HWY_ATTR { return hn::Min(x, y); });
      case Op::kMax:
        return floats ? number([](auto x, auto y) HWY_ATTR {
          return hn::IfThenElse(hn::Or(hn::IsNaN(x), hn::Lt(y, x)), x, y);
        })
                      : ints([](auto x, auto y) HWY_ATTR { return hn::Max(x, y); });
      case Op::kDiv:
        return number([](auto x, auto y) HWY_ATTR { return hn::Div(x, y); });
      case Op::kShiftLeft:
        return ints([&](auto x, auto y)
                        HWY_ATTR { return hn::Shl(x, hn::And(y, hn::Set(i, 31))); });
      case Op::kShiftRight:
        return ints([&](auto x, auto y)
                        HWY_ATTR { return hn::Shr(x, hn::And(y, hn::Set(i, 31))); });
      case Op::kFloorDiv:
      case Op::kMod:
        return divide(in, n, out, node.op() == Op::kMod);
      case Op::kNot:
        return one_int([](auto x) HWY_ATTR { return hn::Not(x); });
      case Op::kNeg:
        return floats ? one([](auto x) HWY_ATTR { return hn::Neg(x); })
                      : one_int([](auto x) HWY_ATTR { return hn::Neg(x); });
      case Op::kAbs:
        return floats ? one([](auto x) HWY_ATTR { return hn::Abs(x); })
                      : one_int([](auto x) HWY_ATTR { return hn::Abs(x); });
      case Op::kFloor:
        return one([](auto x) HWY_ATTR { return hn::Floor(x); });
      case Op::kExp:
        return one([&](auto x) HWY_ATTR { return exponential(x); });
      case Op::kLog:
        return one([&](auto x) HWY_ATTR { return logarithm(x); });
      case Op::kTanh:
        return one([&](auto x) HWY_ATTR { return hn::Tanh(f, x); });
      case Op::kSqrt:
        return one([](auto x) HWY_ATTR { return hn::Sqrt(x); });
      case Op::kRsqrt:
        return one([&](auto x) HWY_ATTR { return hn::Div(hn::Set(f, 1.0f), hn::Sqrt(x)); });
      case Op::kSigmoid:
        return one([&](auto x) HWY_ATTR {
          const V32 unit = hn::Set(f, 1.0f);
          return hn::Div(unit, hn::Add(unit, exponential(hn::Neg(x))));
        });
      case Op::kToFloat:
        return one_int([&](auto x) HWY_ATTR { return hn::BitCast(i, hn::ConvertTo(f, x)); });
      case Op::kToInt:
        return by_lanes([](float x, float) {
          const double one_value = x;
          const double whole =
              expression::compute(Op::kToInt, expression::Type::kFloat, &one_value);
          return std::bit_cast<float>(static_cast<int32_t>(whole));
        });
      case Op::kSelect:
        return each(n, out, [&](int64_t key, int64_t v) HWY_ATTR {
          return hn::IfThenElse(hn::Ne(load(in[0], key, v), hn::Zero(i)), load(in[1], key, v),
                                load(in[2], key, v));
        });
      case Op::kExp2:
        return by_lanes([](float x, float) { return std::exp2(x); });
      case Op::kPow:
        return by_lanes([](float x, float y) { return std::pow(x, y); });
      case Op::kSin:
        return by_lanes([](float x, float) { return std::sin(x); });
      case Op::kCos:
        return by_lanes([](float x, float) { return std::cos(x); });
      case Op::kErf:
        return by_lanes([](float x, float) { return std::erf(x); });
      case Op::kLiteral:
      case Op::kSymbol:
      case Op::kGather:
      case Op::kCount:
        break;
    }
#undef FULGUR_BOTH
#undef FULGUR_COMPARE
#undef FULGUR_INTS
  }

  /// floor(x / y), or what is left over, of integers by a literal. Quotients of f64 are exact but
  /// for their last bits, and so are their floors here.
  HWY_NOINLINE void divide(const Operand (&in)[3], int64_t n, int32_t* HWY_RESTRICT out,
                           bool rest) const {
    const int32_t by = *in[1].at;
    for (int64_t key = 0; key < n; ++key) {
      const int32_t* const from = in[0].at + key * in[0].key;
      int32_t* const to = out + key * width_;
      for (int64_t lane = 0; lane < width_; ++lane) {
        const int32_t x = in[0].one ? *from : from[lane];
        const auto quotient =
            static_cast<int32_t>(std::floor(static_cast<double>(x) / static_cast<double>(by)));
        to[lane] = rest ? x - quotient * by : quotient;
      }
    }
  }

  /// Loads elements of a tensor.
  HWY_NOINLINE void gather(const expression::Node& node, int64_t jj, int64_t n, int32_t* out) {
    const ConstTensor& t = given_->tensors[node.tensor];
    HWY_ALIGN int64_t places[kBr];
    const int64_t size = size_of(t.dtype);
    const auto* const data = static_cast<const char*>(t.data);
    const bool empty = t.numel() == 0;
    for (int64_t key = 0; key < n; ++key) {
      int32_t* const to = out + key * width_;
      if (empty) {
        std::fill_n(to, width_, 0);
        continue;
      }
      find(node, jj, key, t.strides.data(), places);
      switch (t.dtype) {
        case DType::kF32:
        case DType::kI32:
        case DType::kI64:  // the low half
          for (int64_t l = 0; l < width_; ++l) std::memcpy(to + l, data + places[l] * size, 4);
          break;
        case DType::kBool:
          for (int64_t l = 0; l < width_; ++l) to[l] = -static_cast<int32_t>(data[places[l]] != 0);
          break;
        default:
          for (int64_t l = 0; l < width_; ++l) {
            to[l] = std::bit_cast<int32_t>(
                static_cast<float>(load_element(t.data, t.dtype, places[l])));
          }
      }
    }
  }

  /// The offsets of the elements that a gather reads for a key, one for each row.
  HWY_INLINE void find(const expression::Node& node, int64_t jj, int64_t key,
                       const int64_t* strides, int64_t* HWY_RESTRICT places) const {
    const ConstTensor& t = given_->tensors[node.tensor];
    std::fill_n(places, width_, int64_t{0});
    for (int x = 0; x < node.count; ++x) {
      const Operand index = operand(node.operands[x], jj);
      const int32_t* const from = index.at + key * index.key;
      const auto last = static_cast<int32_t>(std::min<int64_t>(t.shape[x] - 1, INT32_MAX));
      const int64_t stride = strides[x];
      if (index.one) {
        const int64_t add = std::clamp<int32_t>(*from, 0, last) * stride;
        for (int64_t l = 0; l < width_; ++l) places[l] += add;
      } else {
        for (int64_t l = 0; l < width_; ++l) {
          places[l] += std::min(std::max(from[l], 0), last) * stride;
        }
      }
    }
  }

  void store_slope(int64_t jj, int64_t n, bool sloped, float* HWY_RESTRICT slope,
                   int64_t ld) const {
    const F32 f;
    const Operand by_score = operand(call().by_score, jj);
    for (int64_t key = 0; key < n; ++key) {
      for (int64_t v = 0; v < vectors_; ++v) {
        float* const to = slope + key * ld + v * kLanes;
        const V32 x = hn::BitCast(f, load(by_score, key, v));
        hn::Store(sloped ? hn::Mul(x, hn::Load(f, to)) : x, f, to);
      }
    }
  }

  void keep_gradients(int64_t jj, int64_t n) {
    const I32 i;
    const int64_t size = kBc * kBr;
    HWY_ALIGN int64_t places[kBr];
    for (size_t s = 0; s < call().scatters.size(); ++s) {
      const auto& [gather, derivative] = call().scatters[s];
      const ConstTensor& t = given_->tensors[node(gather).tensor];
      // Sums lie side by side in the shape of the tensor.
      int64_t strides[ConstTensor::kMaxRank], numel = 1;
      for (int x = t.rank - 1; x >= 0; --x) {
        strides[x] = numel;
        numel *= t.shape[x];
      }
      const Operand by_element = operand(derivative, jj);
      for (int64_t key = 0; key < n; ++key) {
        const int64_t first = s * size + (jj + key) * width_;
        if (numel > 0) find(node(gather), jj, key, strides, places);
        for (int64_t l = 0; l < width_; ++l) {
          where_[first + l] = numel > 0 ? static_cast<int32_t>(places[l]) : 0;
        }
        for (int64_t v = 0; v < vectors_; ++v) {
          hn::Store(load(by_element, key, v), i,
                    reinterpret_cast<int32_t*>(derivatives_) + first + v * kLanes);
        }
      }
    }
  }

  /// Hides the keys whose scores are -inf.
  HWY_NOINLINE void hide_infinite(const KeyTile& tile, const float* S, int64_t ld, float* bias,
                                  RowTile* row_tile) const {
    const F32 f;
    const V32 none = hn::Set(f, -std::numeric_limits<float>::infinity());
    for (int64_t jj = 0; jj < tile.n; ++jj) {
      for (int64_t v = 0; v < vectors_; ++v) {
        float* const to = bias + jj * width_ + v * kLanes;
        const V32 before = row_tile->bias == nullptr ? hn::Zero(f) : hn::Load(f, to);
        const auto hidden = hn::Eq(hn::Load(f, S + jj * ld + v * kLanes), none);
        hn::Store(hn::IfThenElse(hidden, none, before), f, to);
      }
    }
    row_tile->bias = bias;
    row_tile->mask.hide(bias, tile.j, width_);
  }

  /// e^x; 0 or inf if it leaves the range of f32.
  static HWY_INLINE V32 exponential(V32 x) {
    const F32 f;
    const V32 y = hn::Exp(f, hn::Min(hn::Set(f, 104.0f), x));
    return hn::IfThenElse(hn::IsNaN(x), x, y);
  }
  /// The logarithm: -inf for 0, NaN for negative numbers.
  static HWY_INLINE V32 logarithm(V32 x) {
    const F32 f;
    const V32 inf = hn::Set(f, std::numeric_limits<float>::infinity());
    const V32 y = hn::IfThenElse(hn::Eq(x, hn::Zero(f)), hn::Neg(inf), hn::Log(f, x));
    const V32 at_top = hn::IfThenElse(hn::Eq(x, inf), inf, y);
    const V32 nan = hn::Set(f, std::numeric_limits<float>::quiet_NaN());
    return hn::IfThenElse(hn::Or(hn::Lt(x, hn::Zero(f)), hn::IsNaN(x)), nan, at_top);
  }

  const Task& task_;
  const GivenExpressions* given_;
  int32_t *uniform_ = nullptr, *rows_ = nullptr, *columns_ = nullptr, *mixed_ = nullptr;
  int32_t* where_ = nullptr;
  float* derivatives_ = nullptr;
  const int32_t *its_rows_ = nullptr, *its_columns_ = nullptr;
  int64_t vectors_ = 0, width_ = 0;
  expression::Place place_;
  std::vector<double> values_;
  const int32_t* tile_columns_[kTiles] = {};
  /// The key tile of each row tile that skip_hidden() found last.
  struct Known {
    int64_t j;
    Tile is;
  };
  Known known_[kRowTiles][2];
  std::vector<expression::Hull> row_hulls_, hulls_[kRowTiles];
};

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

#include "expression/hulls.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/convert.h"

namespace fulgur::expression {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr int64_t kMaxBox = 16;  // elements of a tensor that are looked at for a tile

Hull of_type(Type type) {
  if (type == Type::kFloat) return {};
  if (type == Type::kBool) return {0, 1, false};
  return {INT32_MIN, INT32_MAX, false};
}

Hull certain(bool value) { return {value ? 1.0 : 0.0, value ? 1.0 : 0.0, false}; }
constexpr Hull kEither{0, 1, false};

/// Integers that do not wrap.
Hull integers(double low, double high) {
  if (low < INT32_MIN || high > INT32_MAX) return of_type(Type::kInt);
  return {low, high, false};
}

/// Floats, with the rounding of an operation; a sum or a product of infinities may be a NaN.
Hull floats(double low, double high, bool may_be_nan, double error = 0x1p-22) {
  if (std::isnan(low) || std::isnan(high) || std::isinf(low) || std::isinf(high)) return {};
  return {low - std::fabs(low) * error - 0x1p-126, high + std::fabs(high) * error + 0x1p-126,
          may_be_nan};
}

Hull numbers(Type type, double low, double high, bool may_be_nan) {
  return type == Type::kInt ? integers(low, high) : floats(low, high, may_be_nan);
}

Hull join(const Hull& x, const Hull& y) {
  return {std::min(x.low, y.low), std::max(x.high, y.high), x.may_be_nan || y.may_be_nan,
          x.hashes | y.hashes};
}

uint64_t hash_bit(double value) {
  const auto word = static_cast<uint32_t>(static_cast<int32_t>(value));
  return uint64_t{1} << ((word * 0x9e3779b1u) >> 26);
}

Hull equal(const Hull& x, const Hull& y, bool ints) {
  if (x.high < y.low || y.high < x.low) return certain(false);
  if (x.known() && y.known()) return certain(true);
  if (ints && (x.hashes & y.hashes) == 0) return certain(false);
  return kEither;
}

Hull negated(const Hull& x) { return {1 - x.high, 1 - x.low, false}; }

Hull multiplied(Type type, const Hull& x, const Hull& y) {
  const double products[] = {x.low * y.low, x.low * y.high, x.high * y.low, x.high * y.high};
  const auto [low, high] = std::ranges::minmax(products);
  return numbers(type, low, high, x.may_be_nan || y.may_be_nan);
}

}  // namespace

Hull hull_of(Type type, std::span<const int32_t> values) {
  Hull hull{kInf, -kInf, false, 0};
  for (const int32_t bits : values) {
    if (type == Type::kFloat) {
      const auto value = static_cast<double>(std::bit_cast<float>(bits));
      if (std::isnan(value)) return {};
      hull.low = std::min(hull.low, value);
      hull.high = std::max(hull.high, value);
      continue;
    }
    const double value = type == Type::kBool ? (bits != 0 ? 1 : 0) : bits;
    hull.low = std::min(hull.low, value);
    hull.high = std::max(hull.high, value);
    hull.hashes |= hash_bit(value);
  }
  if (type == Type::kFloat) hull.hashes = ~uint64_t{0};
  return hull;
}

MaskHulls::MaskHulls(const StagedGraph& graph, std::span<const ConstTensor> tensors,
                     const Place& place, int64_t Bc)
    : graph_(graph), tensors_(tensors.begin(), tensors.end()) {
  const std::vector<Node>& nodes = graph.call.graph.nodes;
  std::vector<double> values(nodes.size());
  graph.evaluate(graph.uniform, tensors, place, values);
  for (const int n : graph.uniform) {
    const int32_t bits = bits_of(nodes[n].type(), values[n]);
    uniform_.push_back(hull_of(nodes[n].type(), std::span(&bits, 1)));
  }
  const size_t count = graph.columns.size();
  tile_words_ = static_cast<int64_t>(count) * Bc;
  keys_.resize(static_cast<size_t>((place.sk + Bc - 1) / Bc * tile_words_));
  Place at = place;
  for (int64_t begin = 0; begin < place.sk; begin += Bc) {
    const int64_t n = std::min(Bc, place.sk - begin);
    int32_t* const keys = keys_.data() + begin / Bc * tile_words_;
    for (int64_t j = 0; j < n; ++j) {
      at.k = begin + j;
      graph.evaluate(graph.columns, tensors, at, values);
      for (size_t c = 0; c < count; ++c) {
        keys[c * Bc + j] = bits_of(nodes[graph.columns[c]].type(), values[graph.columns[c]]);
      }
    }
    for (size_t c = 0; c < count; ++c) {
      columns_.push_back(hull_of(nodes[graph.columns[c]].type(), std::span(&keys[c * Bc], n)));
    }
  }
}

void MaskHulls::begin(std::span<const Hull> rows, std::vector<Hull>* to) const {
  std::vector<Hull>& nodes = *to;
  nodes.resize(graph_.call.graph.nodes.size());
  for (size_t i = 0; i < uniform_.size(); ++i) nodes[graph_.uniform[i]] = uniform_[i];
  for (size_t i = 0; i < rows.size(); ++i) nodes[graph_.rows[i]] = rows[i];
}

Tile MaskHulls::tile(int64_t tile, std::vector<Hull>* of) const {
  const std::vector<Node>& all = graph_.call.graph.nodes;
  std::vector<Hull>& nodes = *of;
  const size_t count = graph_.columns.size();
  for (size_t i = 0; i < count; ++i) nodes[graph_.columns[i]] = columns_[tile * count + i];
  for (const int n : graph_.mask_nodes) nodes[n] = mixed(all[n], nodes);
  const Hull& mask = nodes[graph_.call.mask];
  return mask.high == 0 ? Tile::kEmpty : mask.low == 1 ? Tile::kFull : Tile::kPartial;
}

Hull MaskHulls::gathered(const Node& node, std::span<const Hull> nodes) const {
  const ConstTensor& t = tensors_[node.tensor];
  int64_t low[ConstTensor::kMaxRank], size[ConstTensor::kMaxRank], box = 1;
  for (int i = 0; i < node.count; ++i) {
    const Hull& index = nodes[node.operands[i]];
    const auto last = static_cast<double>(t.shape[i] - 1);
    if (last < 0) return {0, 0, false};
    low[i] = static_cast<int64_t>(std::clamp(index.low, 0.0, last));
    size[i] = static_cast<int64_t>(std::clamp(index.high, 0.0, last)) - low[i] + 1;
    if (size[i] > kMaxBox) return of_type(node.type());
    box *= size[i];
  }
  if (box > kMaxBox) return of_type(node.type());
  int32_t values[kMaxBox];
  for (int64_t n = 0; n < box; ++n) {
    int64_t at = 0, rest = n;
    for (int i = 0; i < node.count; ++i) {
      at += (low[i] + rest % size[i]) * t.strides[i];
      rest /= size[i];
    }
    const double value = load_element(t.data, t.dtype, at);
    values[n] = bits_of(node.type(), node.type() == Type::kInt ? wrapped(value) : value);
  }
  return hull_of(node.type(), std::span(values, box));
}

Hull MaskHulls::mixed(const Node& node, std::span<const Hull> nodes) const {
  const Hull unknown = of_type(node.type());
  if (node.op() == Op::kGather) return gathered(node, nodes);
  if (node.count == 0) return unknown;
  const Type type = graph_.call.graph.operand_type(node);
  const bool logic = type == Type::kBool;
  const Hull x = nodes[node.operands[0]], y = nodes[node.operands[node.count > 1 ? 1 : 0]];
  const bool may_be_nan = x.may_be_nan || y.may_be_nan;
  switch (node.op()) {
    case Op::kAdd:
      return numbers(type, x.low + y.low, x.high + y.high, may_be_nan);
    case Op::kSub:
      return numbers(type, x.low - y.high, x.high - y.low, may_be_nan);
    case Op::kMul:
      return multiplied(type, x, y);
    case Op::kFloorDiv:
      return {std::floor(x.low / y.low), std::floor(x.high / y.low), false};
    case Op::kMod: {
      const double n = y.low, turn = std::floor(x.low / n);
      if (turn != std::floor(x.high / n)) return {0, n - 1, false};
      return {x.low - turn * n, x.high - turn * n, false};
    }
    case Op::kMin:
      return {std::min(x.low, y.low), std::min(x.high, y.high), may_be_nan};
    case Op::kMax:
      return {std::max(x.low, y.low), std::max(x.high, y.high), may_be_nan};
    case Op::kNeg:
      return numbers(type, -x.high, -x.low, may_be_nan);
    case Op::kAbs: {
      const double least =
          x.low <= 0 && x.high >= 0 ? 0 : std::min(std::fabs(x.low), std::fabs(x.high));
      return numbers(type, least, std::max(std::fabs(x.low), std::fabs(x.high)), may_be_nan);
    }
    case Op::kShiftRight:
      if (!y.known()) return unknown;
      return {std::floor(std::ldexp(x.low, -(static_cast<int>(y.low) & 31))),
              std::floor(std::ldexp(x.high, -(static_cast<int>(y.low) & 31))), false};
    case Op::kAnd:
      if (logic) return {std::min(x.low, y.low), std::min(x.high, y.high), false};
      // What one of both has no bits for, the result has none for.
      if (x.low >= 0 && y.low >= 0) return {0, std::min(x.high, y.high), false};
      if (x.low >= 0) return {0, x.high, false};
      return y.low >= 0 ? Hull{0, y.high, false} : unknown;
    case Op::kOr:
      return logic ? Hull{std::max(x.low, y.low), std::max(x.high, y.high), false} : unknown;
    case Op::kXor:
      return logic && x.known() && y.known() ? certain(x.low != y.low) : unknown;
    case Op::kEqual:
      return equal(x, y, type == Type::kInt);
    case Op::kNotEqual:
      return may_be_nan ? kEither : negated(equal(x, y, type == Type::kInt));
    case Op::kLess:
      if (x.low >= y.high) return certain(false);
      return x.high < y.low && !may_be_nan ? certain(true) : kEither;
    case Op::kLessEqual:
      if (x.low > y.high) return certain(false);
      return x.high <= y.low && !may_be_nan ? certain(true) : kEither;
    case Op::kNot:
      return negated(x);
    case Op::kFloor:
      return {std::floor(x.low), std::floor(x.high), may_be_nan};
    case Op::kToFloat:
      return floats(x.low, x.high, false);
    case Op::kToInt:
      if (may_be_nan || x.low < INT32_MIN || x.high > INT32_MAX) return unknown;
      return {std::trunc(x.low), std::trunc(x.high), false};
    case Op::kSelect: {
      const Hull& otherwise = nodes[node.operands[2]];
      return x.low == 1 ? y : x.high == 0 ? otherwise : join(y, otherwise);
    }
    default:
      return unknown;
  }
}

void hide(const StagedGraph& graph, std::span<const ConstTensor> tensors, const Place& place,
          TileMap* map) {
  const MaskHulls hulls(graph, tensors, place, map->Bc);
  const std::vector<Node>& nodes = graph.call.graph.nodes;
  std::vector<double> values(nodes.size());
  graph.evaluate(graph.uniform, tensors, place, values);
  const size_t count = graph.rows.size();
  std::vector<int32_t> rows(count * static_cast<size_t>(map->Br));
  std::vector<Hull> of_rows(count), memory;
  for (int64_t r = 0; r < map->rows; ++r) {
    const int64_t n = std::min(map->Br, place.sq - r * map->Br);
    Place at = place;
    for (int64_t i = 0; i < n; ++i) {
      at.q = r * map->Br + i;
      graph.evaluate(graph.rows, tensors, at, values);
      for (size_t x = 0; x < count; ++x) {
        rows[x * map->Br + i] = bits_of(nodes[graph.rows[x]].type(), values[graph.rows[x]]);
      }
    }
    for (size_t x = 0; x < count; ++x) {
      of_rows[x] = hull_of(nodes[graph.rows[x]].type(), std::span(&rows[x * map->Br], n));
    }
    hulls.begin(of_rows, &memory);
    for (int64_t c = 0; c < map->cols; ++c) {
      Tile& tile = map->tiles[r * map->cols + c];
      if (tile == Tile::kEmpty) continue;
      const Tile is = hulls.tile(c, &memory);
      if (is != Tile::kFull) tile = is;
    }
  }
}

}  // namespace fulgur::expression

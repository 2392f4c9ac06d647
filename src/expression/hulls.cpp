#include "expression/hulls.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "base/convert.h"

namespace fulgur::expression {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

static_assert(static_cast<int>(Type::kBool) == kernels::kBoolHull);
static_assert(static_cast<int>(Type::kInt) == kernels::kIntHull);
static_assert(static_cast<int>(Type::kFloat) == kernels::kFloatHull);

using kernels::HullType;

Hull applied(Hull (*operation)(HullType, const Hull&), HullType type, const Hull* const* x) {
  return operation(type, *x[0]);
}
Hull applied(Hull (*operation)(HullType, const Hull&, const Hull&), HullType type,
             const Hull* const* x) {
  return operation(type, *x[0], *x[1]);
}
Hull applied(Hull (*operation)(HullType, const Hull&, const Hull&, const Hull&), HullType type,
             const Hull* const* x) {
  return operation(type, *x[0], *x[1], *x[2]);
}

HullType hull_type(Type type) { return static_cast<HullType>(type); }

}  // namespace

const char* hull_operation(Op op) {
  switch (op) {
#define FULGUR_CASE(op, function) \
  case Op::op:                    \
    return #function;
    FULGUR_HULL_OPERATIONS(FULGUR_CASE)
#undef FULGUR_CASE
    default:
      return nullptr;
  }
}

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
    hull.hashes |= kernels::hash_of(static_cast<int>(value));
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
  kernels::HullRange ranges[ConstTensor::kMaxRank];
  int64_t box = 1;
  for (int i = 0; i < node.count; ++i) {
    const auto last = static_cast<double>(t.shape[i] - 1);
    if (last < 0) return {0, 0, false};
    ranges[i] = kernels::hull_range(nodes[node.operands[i]], last);
    box = std::min<int64_t>(box * ranges[i].count, kernels::kMaxHullBox + 1);
  }
  if (box > kernels::kMaxHullBox) return kernels::hull_of_type(hull_type(node.type()));
  int32_t values[kernels::kMaxHullBox];
  for (int64_t n = 0; n < box; ++n) {
    int64_t at = 0, rest = n;
    for (int i = 0; i < node.count; ++i) {
      at += (ranges[i].first + rest % ranges[i].count) * t.strides[i];
      rest /= ranges[i].count;
    }
    const double value = load_element(t.data, t.dtype, at);
    values[n] = bits_of(node.type(), node.type() == Type::kInt ? wrapped(value) : value);
  }
  return hull_of(node.type(), std::span(values, box));
}

Hull MaskHulls::mixed(const Node& node, std::span<const Hull> nodes) const {
  if (node.op() == Op::kGather) return gathered(node, nodes);
  if (node.count == 0) return kernels::hull_of_type(hull_type(node.type()));
  const HullType type = hull_type(graph_.call.graph.operand_type(node));
  const Hull* operands[kMaxOperands];
  for (int i = 0; i < node.count; ++i) operands[i] = &nodes[node.operands[i]];
  switch (node.op()) {
#define FULGUR_CASE(op, function) \
  case Op::op:                    \
    return applied(kernels::function, type, operands);
    FULGUR_HULL_OPERATIONS(FULGUR_CASE)
#undef FULGUR_CASE
    default:
      return kernels::hull_of_type(hull_type(node.type()));
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

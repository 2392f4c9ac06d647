#include "cuda/common/expression.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "expression/hulls.h"
#include "expression/stages.h"

namespace fulgur::cuda {
namespace {

using expression::CallGraph, expression::Expressions, expression::Graph, expression::Node,
    expression::Op, expression::Stage, expression::StagedGraph, expression::Symbol,
    expression::Type;

static_assert(expression::kMaxTensors == kernels::kMaxExpressionTensors);
static_assert(ConstTensor::kMaxRank == kernels::kMaxExpressionRank);
static_assert(static_cast<int>(DType::kF64) == kernels::kF64);
static_assert(static_cast<int>(DType::kI32) == kernels::kI32);
static_assert(static_cast<int>(DType::kI64) == kernels::kI64);

const char* type_text(Type type) {
  return type == Type::kBool ? "bool" : type == Type::kInt ? "int" : "float";
}

const char* hull_type_text(Type type) {
  return type == Type::kBool ? "kBoolHull" : type == Type::kInt ? "kIntHull" : "kFloatHull";
}

/// How a kernel gets a literal: as itself, as the reciprocal of a divisor of floats, or as a
/// divisor of integers, which has the words of a kernels::Reciprocal and its own.
enum Form { kItself, kFactor, kDivisor };

/// The words of literals. Equal literals have the same words.
struct Words {
  std::vector<int> words;
  std::map<std::pair<Form, std::vector<int>>, int> places;

  /// The index of the words of a literal; -1 if there are too many words. That is never so of
  /// divisors: a user's expressions have few literals, and derivatives add no divisors.
  int take(Form form, const std::vector<int>& bits) {
    const auto [at, is_new] = places.try_emplace({form, bits}, -1);
    if (is_new && words.size() + bits.size() <= kernels::kMaxExpressionWords) {
      at->second = static_cast<int>(words.size());
      words.insert(words.end(), bits.begin(), bits.end());
    }
    return at->second;
  }
};

/// Prints the functions of kernel_config.h that compute nodes of a graph.
class Printer {
 public:
  Printer(const Graph& graph, std::span<const Expressions::TensorLayout> layouts, Words& words)
      : graph_(graph), layouts_(layouts), words_(words) {
    for (const Node& of : graph.nodes) {
      if (divides(of)) take(of.operands[1], kDivisor);
    }
  }

  /// A function that computes the value of a root from the place and, with `of_score`, the score.
  std::string function(const char* name, int root, bool of_score) {
    return fmt::format(
        "template <class Place>\n__device__ __forceinline__ {} {}(const Place& at{}) {{\n{}}}\n",
        type_text(graph_.nodes[root].type()), name, of_score ? ", float score" : "",
        statements({root}) + fmt::format("  return t{};\n", root));
  }

  /// For each gradient of a tensor: functions that compute the addend of a score and the element to
  /// which it is added, and whether that element depends on the row (1) and on the key (2).
  std::string gradients(const std::vector<CallGraph::Scatter>& scatters) {
    const std::vector<int> decide = places_of_nodes();
    std::string addends, elements, tensors, places;
    int count = 0;
    for (const auto& [gather, derivative] : scatters) {
      const Node& of = node(gather);
      const auto indices = std::span(of.operands).first(of.count);
      const auto shape = std::span(layouts_[of.tensor].shape).first(of.count);
      if (std::ranges::find(shape, 0) != shape.end()) continue;
      addends += fmt::format("  if constexpr (gradient == {}) {{\n{}  return t{};\n  }}\n", count,
                             statements({derivative}), derivative);
      std::string list;
      int decides = 0;
      for (const int index : indices) {
        list += fmt::format(", t{}", index);
        decides |= decide[index];
      }
      elements +=
          fmt::format("  if constexpr (gradient == {}) {{\n{}  return at.element({}{});\n  }}\n",
                      count, statements({indices.begin(), indices.end()}), of.tensor, list);
      tensors += fmt::format("{}, ", of.tensor);
      places += fmt::format("{}, ", decides);
      ++count;
    }
    constexpr const char* kFunction =
        "template <int gradient, class Place>\n__device__ __forceinline__ {} {}(const Place& at, "
        "float "
        "score) {{\n{}}}\n";
    return fmt::format("enum : int {{ kTensorGradients = {} }};\n", count) +
           fmt::format("__device__ constexpr int kGradientTensor[] = {{{}-1}};\n", tensors) +
           fmt::format("__device__ constexpr int kGradientPlaces[] = {{{}-1}};\n", places) +
           fmt::format(kFunction, "float", "expression_gradient", addends) +
           fmt::format(kFunction, "int", "expression_element", elements);
  }

  /// Functions that classify tiles of a mask: the values of its row nodes and key nodes
  /// (kernels/maps/node_hulls.cuh), and the hull of the mask in a tile, from the hulls of these.
  MaskHullsText hulls(const StagedGraph& staged) {
    MaskHullsText to;
    std::vector<bool> needed(graph_.nodes.size());
    std::vector<int> one_sided[2], uniform;  // one_sided: row nodes and key nodes
    needed[staged.call.mask] = true;
    for (int n = staged.call.mask; n >= 0; --n) {
      if (!needed[n]) continue;
      const Stage stage = staged.stages[n];
      if (stage == Stage::kUniform && !is_divisor(n)) uniform.push_back(n);
      if (stage == Stage::kRow) one_sided[0].push_back(n);
      if (stage == Stage::kColumn) one_sided[1].push_back(n);
      if (stage != Stage::kMixed) continue;
      for (int i = 0; i < node(n).count; ++i) needed[node(n).operands[i]] = true;
    }
    constexpr const char* kNames[] = {"row", "key"};
    std::string side_hulls[2];
    for (const int i : {0, 1}) {
      std::string values;
      for (size_t at = 0; at < one_sided[i].size(); ++at) {
        const int n = one_sided[i][at];
        values += fmt::format("  values[{}] = node_value(t{});\n", at, n);
        side_hulls[i] += fmt::format("  const Hull h{} = node_hull({}, {}s[{}]);\n", n,
                                     hull_type_text(node(n).type()), kNames[i], at);
      }
      to.text += fmt::format("enum : int {{ k{}Nodes = {} }};\n", i == 0 ? "Row" : "Key",
                             one_sided[i].size());
      to.text += fmt::format(
          "template <class Place>\n__device__ __forceinline__ void expression_{}s(const Place& at, "
          "int* values) {{\n{}{}}}\n",
          kNames[i], one_sided[i].empty() ? "" : statements(one_sided[i]), values);
    }
    std::string body = uniform.empty() ? "" : statements(uniform);
    for (const int n : uniform) body += fmt::format("  const Hull h{} = hull_of(t{});\n", n, n);
    body += side_hulls[0] + side_hulls[1];
    for (int n = 0; n <= staged.call.mask; ++n) {
      if (!needed[n] || staged.stages[n] != Stage::kMixed) continue;
      body += fmt::format("  const Hull h{} = {};\n", n, hull(n));
    }
    to.text += fmt::format(
        "template <class Place, class Hulls>\n__device__ __forceinline__ Hull "
        "expression_hull(const Place& at, const Hulls& rows, const Hulls& keys) {{\n{}  return "
        "h{};\n}}\n",
        body, staged.call.mask);
    to.row_nodes = static_cast<int>(one_sided[0].size());
    to.key_nodes = static_cast<int>(one_sided[1].size());
    for (int n = staged.call.mask; n >= 0;
         --n) {  // from here on: every node that the mask depends on
      for (int i = 0; needed[n] && i < node(n).count; ++i) needed[node(n).operands[i]] = true;
      if (!needed[n] || node(n).op() != Op::kSymbol) continue;
      const Symbol symbol = node(n).content.symbol;
      to.of_heads |= symbol == Symbol::kH;
      to.of_kv_heads |= symbol == Symbol::kHk;
      to.of_batch |= symbol == Symbol::kB || symbol == Symbol::kQ0;
    }
    return to;
  }

 private:
  /// The hull of a node by the hulls of its operands.
  std::string hull(int n) {
    const Node& of = node(n);
    std::string operands;
    for (int i = 0; i < of.count; ++i) {
      operands += is_divisor(of.operands[i])
                      ? fmt::format(", hull_of(at.integer({}))", take(of.operands[i], kDivisor) + 2)
                      : fmt::format(", h{}", of.operands[i]);
    }
    if (of.op() == Op::kGather) {
      const Expressions::TensorLayout& t = layouts_[of.tensor];
      const auto shape = std::span(t.shape).first(of.count);
      if (std::ranges::find(shape, 0) != shape.end())
        return of.type() == Type::kFloat ? "hull_of(0.f)" : "hull_of(0)";
      return fmt::format("hull_gather<{}>({}, at.arguments.tensors[{}]{})",
                         static_cast<int>(t.dtype), hull_type_text(of.type()), of.tensor, operands);
    }
    if (const char* function = expression::hull_operation(of.op()); function != nullptr)
      return fmt::format("{}({}{})", function, hull_type_text(graph_.operand_type(of)), operands);
    return fmt::format("hull_of_type({})", hull_type_text(of.type()));
  }

  /// The statements that compute the values of roots.
  std::string statements(const std::vector<int>& roots) {
    uses_.assign(graph_.nodes.size(), 0);
    for (const int root : roots) ++uses_[root];
    const int last = std::ranges::max(roots);
    for (int n = last; n >= 0; --n) {
      for (int i = 0; uses_[n] > 0 && i < graph_.nodes[n].count; ++i) {
        ++uses_[graph_.nodes[n].operands[i]];
      }
    }
    std::string body;
    for (int n = 0; n <= last; ++n) {
      if (uses_[n] == 0 || is_fused(n) || is_divisor(n)) continue;
      body += fmt::format("  const {} t{} = {};\n", type_text(graph_.nodes[n].type()), n, value(n));
    }
    return body;
  }

  /// Whether each node depends on the row (1) and on the key (2).
  std::vector<int> places_of_nodes() const {
    std::vector<int> places;
    for (const Node& of : graph_.nodes) {
      const Symbol symbol = of.content.symbol;
      int decide = 0;
      if (of.op() == Op::kSymbol) {
        const bool both = symbol == Symbol::kDelta || symbol == Symbol::kScore;
        decide = both ? 3 : symbol == Symbol::kQ ? 1 : symbol == Symbol::kK ? 2 : 0;
      }
      for (int i = 0; i < of.count; ++i) decide |= places[of.operands[i]];
      places.push_back(decide);
    }
    return places;
  }

  const Node& node(int n) const { return graph_.nodes[n]; }
  bool is_float(int n) const { return node(n).type() == Type::kFloat; }
  static bool divides(const Node& node) {
    return node.op() == Op::kFloorDiv || node.op() == Op::kMod;
  }

  /// Whether a literal is used only as a divisor of integers.
  bool is_divisor(int n) const {
    if (node(n).op() != Op::kLiteral || node(n).type() != Type::kInt) return false;
    return std::ranges::all_of(graph_.nodes, [&](const Node& other) {
      const bool used = std::ranges::count(std::span(other.operands).first(other.count), n) > 0;
      return !used || (divides(other) && other.operands[0] != n);
    });
  }
  /// Whether a product of floats is fused with the only sum that uses it.
  bool is_fused(int n) const {
    if (node(n).op() != Op::kMul || !is_float(n) || uses_[n] != 1) return false;
    return std::ranges::any_of(graph_.nodes, [&](const Node& sum) {
      const size_t at = &sum - graph_.nodes.data();
      return (sum.op() == Op::kAdd || sum.op() == Op::kSub) && uses_[at] > 0 &&
             product_of(sum) == n;
    });
  }
  /// The product with which a sum is fused; -1: none.
  int product_of(const Node& sum) const {
    for (int i = 0; i < 2; ++i) {
      const int n = sum.operands[i];
      if (node(n).op() == Op::kMul && is_float(n) && uses_[n] == 1) return n;
    }
    return -1;
  }

  std::vector<int> words_of(int n, Form form) const {
    const double value = node(n).content.value;
    if (form == kDivisor) {
      const kernels::Reciprocal r = kernels::reciprocal_of(static_cast<int>(value));
      return {static_cast<int>(r.factor), r.shift, static_cast<int>(value)};
    }
    if (!is_float(n)) return {static_cast<int>(value)};
    return {std::bit_cast<int>(static_cast<float>(form == kFactor ? 1 / value : value))};
  }

  int take(int n, Form form) { return words_.take(form, words_of(n, form)); }

  std::string literal(int n, Form form = kItself) {
    const double value = node(n).content.value;
    if (node(n).type() == Type::kBool) return value != 0 ? "true" : "false";
    const bool fixed = value == 0 || std::fabs(value) == 1 || !std::isfinite(value);
    const int at = fixed ? -1 : take(n, form);
    const auto word = static_cast<unsigned>(words_of(n, form)[0]);
    if (is_float(n)) {
      return at >= 0 ? fmt::format("at.number({})", at)
                     : fmt::format("__uint_as_float({:#x}u)", word);
    }
    return at >= 0 ? fmt::format("at.integer({})", at) : fmt::format("int({}u)", word);
  }

  std::string quotient(const Node& of, const std::string& x, const std::string& y) {
    const bool by_literal = node(of.operands[1]).op() == Op::kLiteral;
    if (!by_literal || !std::isnormal(static_cast<float>(1 / node(of.operands[1]).content.value))) {
      return fmt::format("__fdiv_rn({}, {})", x, y);
    }
    return fmt::format("__fmul_rn({}, {})", x, literal(of.operands[1], kFactor));
  }

  std::string gather(const Node& of) const {
    const Expressions::TensorLayout& t = layouts_[of.tensor];
    std::string indices;
    double reach = 1;
    for (int i = 0; i < of.count; ++i) {
      if (t.shape[i] == 0) return of.type() == Type::kBool ? "false" : "0";
      indices += fmt::format(", t{}", of.operands[i]);
      reach += static_cast<double>(t.shape[i]) * std::fabs(static_cast<double>(t.strides[i]));
    }
    const bool wide = reach > std::numeric_limits<int>::max();
    return fmt::format("at.template gather<{}, {}>({}{})", static_cast<int>(t.dtype),
                       wide ? "long long" : "int", of.tensor, indices);
  }

  std::string sum(const Node& of, const std::string& x, const std::string& y) const {
    const bool minus = of.op() == Op::kSub;
    const int product = product_of(of);
    if (product < 0) return fmt::format("__fadd_rn({}, {}{})", x, minus ? "-" : "", y);
    const bool left = product == of.operands[0];
    const auto& [a, b, c, d] = node(product).operands;
    return fmt::format("__fmaf_rn({}t{}, t{}, {}{})", minus && !left ? "-" : "", a, b,
                       minus && left ? "-" : "", left ? y : x);
  }

  bool is_symbol(int n, Symbol symbol) const {
    return node(n).op() == Op::kSymbol && node(n).content.symbol == symbol;
  }
  /// The distance of a key and a query as text that computes a float without an integer before it;
  /// empty for other nodes.
  std::string float_distance(int n) const {
    const Node& of = node(n);
    if (is_symbol(n, Symbol::kDelta)) return "at.delta";
    const auto is_difference = [&](Symbol x, Symbol y) {
      return of.op() == Op::kSub && is_symbol(of.operands[0], x) && is_symbol(of.operands[1], y);
    };
    if (is_difference(Symbol::kK, Symbol::kQ)) return "at.apart";
    if (is_difference(Symbol::kQ, Symbol::kK)) return "-at.apart";
    if (of.op() != Op::kAbs && of.op() != Op::kNeg) return {};
    const std::string inner = float_distance(of.operands[0]);
    if (inner.empty()) return {};
    return fmt::format("{}({})", of.op() == Op::kAbs ? "fabsf" : "-", inner);
  }

  std::string value(int n) {
    const Node& of = node(n);
    const auto operand = [&](int i) { return fmt::format("t{}", of.operands[i]); };
    const std::string x = of.count > 0 ? operand(0) : "", y = of.count > 1 ? operand(1) : "";
    const bool floats = of.count > 0 && graph_.operand_type(of) == Type::kFloat;
    const bool bools = of.count > 0 && graph_.operand_type(of) == Type::kBool;
    const auto wrapping = [&](const char* op) {
      return fmt::format("int(unsigned({}) {} unsigned({}))", x, op, y);
    };
    const auto infix = [&](const char* op) { return fmt::format("{} {} {}", x, op, y); };
    const auto call = [&](const char* name) { return fmt::format("at.{}({})", name, x); };
    switch (of.op()) {
      case Op::kLiteral:
        return literal(n);
      case Op::kSymbol:
        if (is_score(of)) return "score";
        if (of.content.symbol == Symbol::kDelta) return "at.k - at.q - (at.sk - at.sq)";
        return fmt::format("at.{}", name_of(of.content.symbol));
      case Op::kGather:
        return gather(of);
      case Op::kAdd:
        return floats ? sum(of, x, y) : wrapping("+");
      case Op::kSub:
        return floats ? sum(of, x, y) : wrapping("-");
      case Op::kMul:
        return floats ? fmt::format("__fmul_rn({}, {})", x, y) : wrapping("*");
      case Op::kDiv:
        return quotient(of, x, y);
      case Op::kFloorDiv:
        return fmt::format("at.floor_div({}, {})", x, take(of.operands[1], kDivisor));
      case Op::kMod:
        return fmt::format("at.mod({}, {})", x, take(of.operands[1], kDivisor));
      case Op::kMin:
        return floats ? fmt::format("at.minimum({}, {})", x, y) : fmt::format("min({}, {})", x, y);
      case Op::kMax:
        return floats ? fmt::format("at.maximum({}, {})", x, y) : fmt::format("max({}, {})", x, y);
      case Op::kPow:
        return fmt::format("at.pow({}, {})", x, y);
      case Op::kShiftLeft:
        return fmt::format("int(unsigned({}) << ({} & 31))", x, y);
      case Op::kShiftRight:
        return fmt::format("{} >> ({} & 31)", x, y);
      case Op::kAnd:
        return infix(bools ? "&&" : "&");
      case Op::kOr:
        return infix(bools ? "||" : "|");
      case Op::kXor:
        return infix(bools ? "!=" : "^");
      case Op::kEqual:
        return infix("==");
      case Op::kNotEqual:
        return infix("!=");
      case Op::kLess:
        return infix("<");
      case Op::kLessEqual:
        return infix("<=");
      case Op::kNot:
        return "!" + x;
      case Op::kNeg:
        return floats ? "-" + x : fmt::format("int(0u - unsigned({}))", x);
      case Op::kAbs:
        return floats ? fmt::format("fabsf({})", x)
                      : fmt::format("{} < 0 ? int(0u - unsigned({})) : {}", x, x, x);
      case Op::kFloor:
        return fmt::format("floorf({})", x);
      case Op::kToFloat: {
        const std::string distance = float_distance(of.operands[0]);
        return distance.empty() ? fmt::format("float({})", x) : distance;
      }
      case Op::kToInt:
        return call("to_int");
      case Op::kSelect:
        return fmt::format("{} ? {} : {}", x, y, operand(2));
      case Op::kExp:
      case Op::kExp2:
      case Op::kLog:
      case Op::kTanh:
      case Op::kSqrt:
      case Op::kRsqrt:
      case Op::kSigmoid:
      case Op::kSin:
      case Op::kCos:
      case Op::kErf:
        return call(name_of(of.op()));
      case Op::kCount:
        break;
    }
    return {};
  }

  const Graph& graph_;
  std::span<const Expressions::TensorLayout> layouts_;
  Words& words_;
  std::vector<int> uses_;  ///< how often the function that is printed uses each node
};

}  // namespace

DeviceExpressions::DeviceExpressions(const Problem& p)
    : expressions_(p.expressions), origin_(p.origin) {
  if (!expressions_.given()) return;
  const CallGraph call = expressions_.graph(p.pass == Pass::kBackward);
  Words words;
  Printer printer(call.graph, expressions_.layouts(), words);
  text_ = "#define FULGUR_EXPRESSIONS\n";
  if (call.score >= 0) text_ += printer.function("expression_score", call.score, true);
  if (call.mask >= 0) text_ += printer.function("expression_mask", call.mask, false);
  if (call.by_score >= 0) {
    const Node& slope = call.graph.nodes[call.by_score];
    has_slope_ = slope.op() != Op::kLiteral || slope.content.value != 1;
    if (has_slope_) text_ += printer.function("expression_slope", call.by_score, true);
    if (!call.scatters.empty()) text_ += printer.gradients(call.scatters);
  }
  if (call.mask >= 0) {
    const StagedGraph staged(call);
    mask_hulls_ = Printer(staged.call.graph, expressions_.layouts(), words).hulls(staged);
    mask_hulls_.text =
        "#define FULGUR_EXPRESSIONS\n#include \"attention/hulls.cuh\"\n" + mask_hulls_.text;
  }
  words_ = std::move(words.words);
}

kernels::ExpressionArguments DeviceExpressions::arguments(
    std::span<const TensorBinding> tensors) const {
  kernels::ExpressionArguments arguments{};
  std::ranges::copy(words_, arguments.words);
  kernels::ExpressionTensor* to = arguments.tensors;
  for (const TensorBinding& binding : expressions_.bound(tensors)) {
    const ConstTensor& t = binding.tensor;
    to->data = t.data;
    for (int i = 0; i < t.rank; ++i) {
      to->stride[i] = t.strides[i];
      to->last[i] = static_cast<int>(std::min<int64_t>(t.shape[i] - 1, INT32_MAX));
    }
    ++to;
  }
  arguments.batch = static_cast<int>(origin_.batch);
  arguments.head = static_cast<int>(origin_.head);
  arguments.queries = static_cast<int>(origin_.queries);
  arguments.keys = static_cast<int>(origin_.keys);
  return arguments;
}

}  // namespace fulgur::cuda

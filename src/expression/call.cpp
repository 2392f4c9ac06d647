#include "expression/call.h"

#include <algorithm>

#include "base/check.h"
#include "expression/derivative.h"

namespace fulgur::expression {
namespace {

constexpr const char* kDims[] = {"", "(n)", "(n, n)", "(n, n, n)", "(n, n, n, n)"};

void check_binding(const TensorSymbol& symbol, const TensorBinding& binding, const Caller& caller) {
  const char* const name = binding.name.c_str();
  const ConstTensor& t = binding.tensor;
  if (t.dtype != symbol.dtype() || t.rank != symbol.rank()) {
    fail(name, "got {}, want {} of rank {} as the expression has it", t.describe(),
         fulgur::name_of(symbol.dtype()), symbol.rank());
  }
  check_sizes(name, t, kDims[t.rank], t.rank);
  check_device(name, t, caller.device);
  const Tensor& grad = binding.grad;
  if (!grad.given()) return;
  const std::string of_grad = "gradient of " + binding.name;
  const char* const its = of_grad.c_str();
  if (!caller.backward) fail(its, "given in the forward pass");
  if (!is_float(t.dtype)) {
    fail(its, "given, but the elements of the tensor are {}", fulgur::name_of(t.dtype));
  }
  if (grad.rank != t.rank || grad.shape != t.shape) {
    fail(its, "got {}, want the shape {} of the tensor", grad.describe(), list(t, t.shape));
  }
  check_sizes(its, grad, kDims[t.rank], t.rank);
  check_no_overlap(its, grad);
  if (grad.numel() > INT32_MAX) fail(its, "got {} elements, want less than 2^31", grad.numel());
  if (grad.dtype != DType::kF32) check_dtype(its, grad, t.dtype, "that of the tensor, or f32");
  check_device(its, grad, caller.device);
}

const TensorBinding& find(std::span<const TensorBinding> bindings, const std::string& name) {
  const auto at = std::ranges::find(bindings, name, &TensorBinding::name);
  if (at == bindings.end() || !at->tensor.given()) {
    fail(name.c_str(), "not given, want the tensor that an expression indexes");
  }
  return *at;
}

}  // namespace

Expressions::Expressions(const Options& options, std::span<const TensorBinding> bindings,
                         const Caller& caller) {
  if (options.score_mod.given() || options.mask_mod.given()) {
    Parts parts;
    Expr score = options.score_mod;
    if (score.given()) {
      if (type_of(score) == Type::kBool) fail("score_mod", "got a bool, want a number");
      const Expr as_float[] = {score};
      score = operation("to_float", as_float);
    }
    if (options.mask_mod.given() && type_of(options.mask_mod) != Type::kBool) {
      fail("mask_mod", "got a value of type {}, want bool", name_of(type_of(options.mask_mod)));
    }
    const auto [rest, mask] = split_mask(score);
    parts.score = rest;
    parts.mask = !options.mask_mod.given() ? mask
                 : mask.given()            ? options.mask_mod && mask
                                           : options.mask_mod;
    // `score` alone changes nothing, and `true` hides nothing.
    if (parts.score.given() &&
        parts.score.term()->content == Expr::symbol("score").term()->content) {
      parts.score = {};
    }
    if (parts.mask.given() && is_literal(parts.mask, 1)) parts.mask = {};
    if (options.mask_mod.given()) {
      const Graph own = make_graph(std::span(&options.mask_mod, 1));
      if (std::ranges::any_of(own.nodes, is_score)) {
        fail("mask_mod", "depends on the score, want places and tensors alone");
      }
    }
    const Expr roots[] = {parts.score, parts.mask};
    parts.graph = checked_graph(roots);
    for (const TensorSymbol& symbol : parts.graph.tensors) {
      const TensorBinding& binding = find(bindings, symbol.name());
      check_binding(symbol, binding, caller);
      parts.tensors.emplace_back(binding.tensor);
      parts.gradients.emplace_back(binding.grad);
    }
    if (!parts.graph.nodes.empty()) parts_ = std::make_shared<const Parts>(std::move(parts));
  }
  for (const TensorBinding& binding : bindings) {
    const auto& used = given() ? parts_->graph.tensors : std::vector<TensorSymbol>();
    if (std::ranges::find(used, binding.name, &TensorSymbol::name) == used.end()) {
      fail(binding.name.c_str(), "given, but no expression indexes a tensor of that name");
    }
    if (std::ranges::count(bindings, binding.name, &TensorBinding::name) > 1) {
      fail(binding.name.c_str(), "given twice");
    }
  }
}

Expressions Expressions::of(const Expr& score, const TensorBinding& tensor) const {
  Parts parts;
  parts.score = changes_scores() ? with_score(parts_->score, score) : score;
  if (masks()) parts.mask = with_score(parts_->mask, score);
  const Expr roots[] = {parts.score, parts.mask};
  parts.graph = checked_graph(roots);
  for (const TensorSymbol& symbol : parts.graph.tensors) {
    if (symbol.name() == tensor.name) {
      parts.tensors.emplace_back(tensor.tensor);
      parts.gradients.emplace_back(tensor.grad);
      continue;
    }
    const auto& mine = parts_->graph.tensors;
    const auto at = std::ranges::find(mine, symbol) - mine.begin();
    parts.tensors.push_back(parts_->tensors[at]);
    parts.gradients.push_back(parts_->gradients[at]);
  }
  Expressions result;
  result.parts_ = std::make_shared<const Parts>(std::move(parts));
  return result;
}

bool Expressions::wants_gradients() const {
  return given() &&
         std::ranges::any_of(parts_->gradients, [](const auto& g) { return g.rank > 0; });
}

CallGraph Expressions::graph(bool backward) const {
  CallGraph call;
  if (!given()) return call;
  std::vector<Expr> roots = {parts_->score, parts_->mask};
  std::vector<GatherDerivative> wanted;
  if (backward && changes_scores()) {
    const Derivatives d = derivatives(parts_->score);
    roots.push_back(d.by_score);
    const auto& tensors = parts_->graph.tensors;
    for (const GatherDerivative& one : d.by_gathers) {
      const auto at = std::ranges::find(tensors, *one.gather.term()->tensor);
      if (parts_->gradients[at - tensors.begin()].rank == 0) continue;
      wanted.push_back(one);
      roots.push_back(one.gather);
      roots.push_back(one.derivative);
    }
  }
  call.graph = make_graph(roots);
  const auto& nodes = call.graph.roots;
  call.score = nodes[0];
  call.mask = nodes[1];
  if (nodes.size() > 2) call.by_score = nodes[2];
  for (size_t i = 0; i < wanted.size(); ++i) {
    call.scatters.push_back({nodes[3 + 2 * i], nodes[4 + 2 * i]});
  }
  return call;
}

std::span<const Expressions::TensorLayout> Expressions::layouts() const {
  if (!given()) return {};
  return parts_->tensors;
}

std::span<const Expressions::TensorLayout> Expressions::gradient_layouts() const {
  if (!given()) return {};
  return parts_->gradients;
}

std::vector<TensorBinding> Expressions::bound(std::span<const TensorBinding> bindings) const {
  std::vector<TensorBinding> in_order;
  if (!given()) return in_order;
  for (const TensorSymbol& symbol : parts_->graph.tensors) {
    in_order.push_back(find(bindings, symbol.name()));
  }
  return in_order;
}

bool Expressions::operator==(const Expressions& other) const {
  if (parts_ == other.parts_) return true;
  return given() && other.given() && parts_->graph == other.parts_->graph &&
         parts_->tensors == other.parts_->tensors && parts_->gradients == other.parts_->gradients;
}

size_t Expressions::hash() const {
  if (!given()) return 0;
  size_t hash = 1;
  const auto add = [&](size_t x) { hash = (hash ^ x) * 0x9e3779b97f4a7c15u, hash ^= hash >> 29; };
  for (const Node& node : parts_->graph.nodes) {
    add(static_cast<size_t>(node.op()));
    add(std::hash<double>()(node.content.value));
    for (const int operand : node.operands) add(operand);
  }
  for (const auto& t : parts_->tensors) {
    for (const int64_t size : t.shape) add(size);
  }
  return hash;
}

}  // namespace fulgur::expression

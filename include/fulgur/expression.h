#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "fulgur/export.h"
#include "fulgur/tensor.h"

namespace fulgur {

namespace expression {
struct Term;
}

/// A formula over one score and its place: what Options::score_mod makes of scores, and what
/// Options::mask_mod shows. Values are bools, integers of 32 bits, which wrap, and floats; bools
/// become integers and integers floats where an operation wants them. A handle to an immutable
/// term; making one that has no meaning throws Error(kInvalidArgument).
class FULGUR_API Expr {
 public:
  Expr() = default;  ///< not given
  /// A literal: bool, 32-bit integer, float.
  template <class T>
  requires std::is_arithmetic_v<T> Expr(T value)  // NOLINT(google-explicit-constructor)
      : Expr(std::is_same_v<T, bool> ? boolean(static_cast<bool>(value))
             : std::is_integral_v<T> ? integer(static_cast<int64_t>(value))
                                     : number(static_cast<double>(value))) {}
  explicit Expr(std::shared_ptr<const expression::Term> term) : term_(std::move(term)) {}

  /// The score so far, scaled and in natural units, or where it is: `score`, `b` (sequence), `h` (q
  /// head), `hk` (kv head), `q`, `k` (query and key of the sequence), `sq`, `sk` (its lengths),
  /// `q0` (the sequence's first row of packed queries, else 0), `delta` = k - q - (sk - sq).
  static Expr symbol(std::string_view name);
  /// An operation by the name that it has in text: "+", "tanh", "select".
  static Expr apply(std::string_view operation, std::span<const Expr> operands);
  static Expr apply(std::string_view operation, std::initializer_list<Expr> operands) {
    return apply(operation, std::span(operands.begin(), operands.size()));
  }

  bool given() const { return term_ != nullptr; }
  /// As parse() reads it.
  std::string text() const;
  const std::shared_ptr<const expression::Term>& term() const { return term_; }

#define FULGUR_BINARY(symbol) \
  friend Expr operator symbol(const Expr& x, const Expr& y) { return apply(#symbol, {x, y}); }
  FULGUR_BINARY(+)
  FULGUR_BINARY(-)
  FULGUR_BINARY(*)
  FULGUR_BINARY(/)  ///< of floats, also where both are integers
  FULGUR_BINARY(%)  ///< the remainder of floor_div
  FULGUR_BINARY(<<)
  FULGUR_BINARY(>>)
  FULGUR_BINARY(&)
  FULGUR_BINARY(|)
  FULGUR_BINARY(^)
  FULGUR_BINARY(&&)
  FULGUR_BINARY(||)
  FULGUR_BINARY(==)
  FULGUR_BINARY(!=)
  FULGUR_BINARY(<)
  FULGUR_BINARY(<=)
  FULGUR_BINARY(>)
  FULGUR_BINARY(>=)
#undef FULGUR_BINARY
  friend Expr operator-(const Expr& x) { return apply("-", {x}); }
  friend Expr operator!(const Expr& x) { return apply("!", {x}); }

#define FULGUR_UNARY(name) \
  friend Expr name(const Expr& x) { return apply(#name, {x}); }
  FULGUR_UNARY(abs)
  FULGUR_UNARY(floor)
  FULGUR_UNARY(exp)
  FULGUR_UNARY(exp2)
  FULGUR_UNARY(log)
  FULGUR_UNARY(tanh)
  FULGUR_UNARY(sqrt)
  FULGUR_UNARY(rsqrt)
  FULGUR_UNARY(sigmoid)
  FULGUR_UNARY(silu)
  FULGUR_UNARY(sin)
  FULGUR_UNARY(cos)
  FULGUR_UNARY(erf)
  FULGUR_UNARY(to_float)
  FULGUR_UNARY(to_int)  ///< towards 0
#undef FULGUR_UNARY
#define FULGUR_FUNCTION(name) \
  friend Expr name(const Expr& x, const Expr& y) { return apply(#name, {x, y}); }
  FULGUR_FUNCTION(min)
  FULGUR_FUNCTION(max)
  FULGUR_FUNCTION(pow)
  FULGUR_FUNCTION(floor_div)  ///< of integers, by a positive literal
  FULGUR_FUNCTION(bit)        ///< whether bit y of the integer x is 1
#undef FULGUR_FUNCTION
  friend Expr select(const Expr& condition, const Expr& x, const Expr& otherwise) {
    return apply("select", {condition, x, otherwise});
  }
  friend Expr clamp(const Expr& x, const Expr& low, const Expr& high) {
    return apply("clamp", {x, low, high});
  }
  /// The bucket of a relative position as T5 has it, in both directions; integer literals.
  friend Expr t5_bucket(const Expr& delta, const Expr& buckets, const Expr& max_distance) {
    return apply("t5_bucket", {delta, buckets, max_distance});
  }

 private:
  static Expr boolean(bool value);
  static Expr integer(int64_t value);
  static Expr number(double value);

  std::shared_ptr<const expression::Term> term_;
};

/// A tensor that expressions index: its name, [a-z_][a-z0-9_]*, which calls give its data by, its
/// dtype and its rank, at most 4. Any integers are its indices; those outside of it are clamped.
class FULGUR_API TensorSymbol {
 public:
  TensorSymbol(std::string name, DType dtype, int rank);

  template <class... Index>
  Expr operator()(const Index&... indices) const {
    return at({Expr(indices)...});
  }
  Expr at(std::span<const Expr> indices) const;
  Expr at(std::initializer_list<Expr> indices) const {
    return at(std::span(indices.begin(), indices.size()));
  }

  const std::string& name() const { return name_; }
  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  bool operator==(const TensorSymbol&) const = default;

 private:
  std::string name_;
  DType dtype_;
  int rank_;
};

/// Reads an expression, e.g. "score + table[h, t5_bucket(delta, 32, 128)]" or
/// "doc[b, q] == doc[b, k] && delta > -1024". `tensors`: those that it may index.
FULGUR_API Expr parse_expression(std::string_view text, std::span<const TensorSymbol> tensors);
inline Expr parse_expression(std::string_view text,
                             std::initializer_list<TensorSymbol> tensors = {}) {
  return parse_expression(text, std::span(tensors.begin(), tensors.size()));
}

/// A tensor of a call's expressions, by its name there.
struct TensorBinding {
  std::string name;
  ConstTensor tensor{};
  /// Backward: takes the gradient, in the shape of `tensor`; f32 or its dtype, which is one of
  /// floats. Optional.
  Tensor grad{};
};

/// Which blocks of queries and keys are seen, as lists (CSR): of each block of queries the blocks
/// of keys. In the host's memory, i32 or i64.
struct BlockLists {
  /// (row blocks + 1), (heads, row blocks + 1) or (batch, heads, row blocks + 1): a list is the
  /// numbers of `indices` from one offset to the next.
  ConstTensor offsets{};
  ConstTensor indices{};  ///< (count): ascending in each list
};

/// blocks <- whether each block is on its list, a tensor for a mask_mod to index: `blocks[b, h, q
/// // 128, k // 128]`. It is bool, in the host's memory, and has the shape of the offsets, but
/// blocks of queries and blocks of keys in the place of their last dimension. Throws
/// Error(kInvalidArgument) for lists that are not ascending or name blocks that there are not.
FULGUR_API void expand_blocks(const BlockLists& lists, const Tensor& blocks);

/// What expressions are made of.
namespace symbols {
inline const Expr score = Expr::symbol("score"), b = Expr::symbol("b"), h = Expr::symbol("h"),
                  hk = Expr::symbol("hk"), q = Expr::symbol("q"), k = Expr::symbol("k"),
                  sq = Expr::symbol("sq"), sk = Expr::symbol("sk"), q0 = Expr::symbol("q0"),
                  delta = Expr::symbol("delta");
}  // namespace symbols

}  // namespace fulgur

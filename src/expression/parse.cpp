/// Expressions of text, by recursive descent: the operators of C, with those of bits before the
/// compares, and "//".
#include <algorithm>
#include <cctype>
#include <charconv>
#include <map>
#include <string>

#include "base/check.h"
#include "expression/graph.h"

namespace fulgur {
namespace {

constexpr int kMaxNesting = 64;
constexpr size_t kMaxText = 65536;

/// Binary operators by how tightly they hold, loosely first. A longer one is tried before its
/// beginning.
constexpr std::initializer_list<const char*> kLevels[] = {
    {"||"},       {"&&"},     {"==", "!=", "<=", ">=", "<", ">"},
    {"|"},        {"^"},      {"&"},
    {"<<", ">>"}, {"+", "-"}, {"//", "*", "/", "%"}};

class Parser {
 public:
  Parser(std::string_view text, std::span<const TensorSymbol> tensors)
      : text_(text), tensors_(tensors) {
    if (text.size() > kMaxText) {
      fail("expression", "got a text of {} bytes, want at most {}", text.size(), kMaxText);
    }
  }

  Expr parse() {
    while (binding()) {
    }
    const Expr all = level(0);
    space();
    if (at_ < text_.size()) error("an operator or the end");
    return all;
  }

 private:
  [[noreturn]] void error(std::string_view want) const {
    const std::string_view rest = text_.substr(at_, 20);
    fail("expression", "at character {}, got {}, want {}", at_ + 1,
         rest.empty() ? "the end" : fmt::format("\"{}\"", rest), want);
  }

  void space() {
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
  }

  bool take(std::string_view token) {
    space();
    if (!text_.substr(at_).starts_with(token)) return false;
    at_ += token.size();
    return true;
  }

  void want(std::string_view token) {
    if (!take(token)) error(fmt::format("\"{}\"", token));
  }

  std::string_view name() {
    space();
    const size_t begin = at_;
    const auto is = [&](auto test) {
      return at_ < text_.size() && test(static_cast<unsigned char>(text_[at_]));
    };
    const auto letter = [](int c) { return std::isalpha(c) != 0 || c == '_'; };
    if (!is(letter)) return {};
    while (is([&](int c) { return letter(c) || std::isdigit(c) != 0; })) ++at_;
    return text_.substr(begin, at_ - begin);
  }

  /// "t1 = ...; "
  bool binding() {
    const size_t begin = at_;
    const std::string_view its = name();
    if (its.empty() || !take("=") || take("=")) {
      at_ = begin;
      return false;
    }
    const Expr value = level(0);
    want(";");
    if (!names_.try_emplace(std::string(its), value).second) {
      fail("expression", "the name \"{}\" is given twice", its);
    }
    return true;
  }

  /// An operator of a level, where one is next that is not the beginning of a longer one.
  const char* next_operator(size_t of) {
    space();
    const std::string_view rest = text_.substr(at_);
    std::string_view longest;
    for (const auto& all : kLevels) {
      for (const std::string_view one : all) {
        if (rest.starts_with(one) && one.size() > longest.size()) longest = one;
      }
    }
    for (const char* one : kLevels[of]) {
      if (longest == one) return one;
    }
    return nullptr;
  }

  Expr level(size_t of) {
    if (of == std::size(kLevels)) return unary();
    Expr left = level(of + 1);
    for (const char* op = next_operator(of); op != nullptr; op = next_operator(of)) {
      at_ += std::string_view(op).size();
      left = Expr::apply(op, {left, level(of + 1)});
      if (of == 2 && next_operator(of) != nullptr) error("one compare, or parentheses");
    }
    return left;
  }

  Expr unary() {
    if (++nesting_ > kMaxNesting) {
      fail("expression", "is nested more than {} deep", kMaxNesting);
    }
    Expr result;
    if (take("-")) {
      result = Expr::apply("-", {unary()});
    } else if (!text_.substr(at_).starts_with("!=") && take("!")) {
      result = Expr::apply("!", {unary()});
    } else {
      result = primary();
    }
    --nesting_;
    return result;
  }

  Expr primary() {
    if (take("(")) {
      const Expr inner = level(0);
      want(")");
      return inner;
    }
    const char next = at_ < text_.size() ? text_[at_] : '\0';
    if (std::isdigit(static_cast<unsigned char>(next)) != 0 || next == '.') return number();
    const size_t begin = at_;
    const std::string_view its = name();
    if (its.empty()) error("a number, a name or \"(\"");
    if (take("(")) return Expr::apply(its, operands(")"));
    if (take("[")) return gather(its, begin);
    if (const auto bound = names_.find(its); bound != names_.end()) return bound->second;
    if (its == "true" || its == "false") return its == "true";
    if (its == "inf") return std::numeric_limits<double>::infinity();
    if (its == "nan") return std::numeric_limits<double>::quiet_NaN();
    if (find(its) != nullptr) fail("expression", "{}: got no indices of the tensor", its);
    return Expr::symbol(its);
  }

  Expr number() {
    const char *begin = text_.data() + at_, *end = text_.data() + text_.size();
    const char* stop =
        std::find_if_not(begin, end, [](unsigned char c) { return std::isdigit(c) != 0; });
    const bool whole = stop == end || (*stop != '.' && *stop != 'e' && *stop != 'E');
    if (whole) {
      int64_t value = 0;
      if (std::from_chars(begin, end, value).ec != std::errc()) error("an integer of 32 bits");
      at_ += stop - begin;
      return value;
    }
    double value = 0;
    const auto [after, failed] = std::from_chars(begin, end, value);
    if (failed != std::errc()) error("a number");
    at_ += after - begin;
    return value;
  }

  std::vector<Expr> operands(std::string_view end) {
    std::vector<Expr> all;
    if (take(end)) return all;
    do all.push_back(level(0));
    while (take(","));
    want(end);
    return all;
  }

  const TensorSymbol* find(std::string_view its) const {
    const auto at =
        std::ranges::find_if(tensors_, [&](const TensorSymbol& t) { return t.name() == its; });
    return at == tensors_.end() ? nullptr : &*at;
  }

  Expr gather(std::string_view its, size_t begin) {
    const TensorSymbol* const tensor = find(its);
    if (tensor == nullptr) {
      at_ = begin;
      error("a tensor that is declared");
    }
    return tensor->at(operands("]"));
  }

  std::string_view text_;
  std::span<const TensorSymbol> tensors_;
  size_t at_ = 0;
  int nesting_ = 0;
  std::map<std::string, Expr, std::less<>> names_;
};

}  // namespace

Expr parse_expression(std::string_view text, std::span<const TensorSymbol> tensors) {
  return Parser(text, tensors).parse();
}

}  // namespace fulgur

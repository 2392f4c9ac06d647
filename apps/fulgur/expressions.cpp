#include "expressions.h"

#include <fmt/format.h>

#include <string_view>
#include <utility>

#include "io/npy.h"

namespace fulgur::app {

std::pair<std::string, std::string> name_and_path(const std::string& option,
                                                  const std::string& text) {
  const size_t at = text.find('=');
  if (at == std::string::npos || at == 0 || at + 1 == text.size()) {
    throw CLI::ValidationError(option, fmt::format("got '{}', want NAME=F.npy", text));
  }
  return {text.substr(0, at), text.substr(at + 1)};
}

void ExpressionFlags::add_to(CLI::App& command) {
  command
      .add_option("--score-mod", score_mod_,
                  "What scores become, e.g. 'score + table[h, t5_bucket(delta, 32, 128)]'")
      ->type_name("TEXT");
  command
      .add_option("--mask-mod", mask_mod_,
                  "Which keys a query sees, e.g. 'doc[b, q] == doc[b, k] && delta > -1024'")
      ->type_name("TEXT");
  command
      .add_option("--tensor", files_,
                  "A tensor that they index, by its name there; may be given several times")
      ->type_name("NAME=F.npy")
      ->allow_extra_args(false);
}

void ExpressionFlags::read() {
  for (const std::string& file : files_) {
    const auto [name, path] = name_and_path("--tensor", file);
    const std::string where = fmt::format("--tensor {}", file);
    if (!arrays_.emplace(name, io::read_npy(path, where)).second) {
      io::fail(where, "names {} a second time", name);
    }
  }
}

std::vector<TensorBinding> ExpressionFlags::bindings() const {
  std::vector<TensorBinding> all;
  for (const auto& [name, array] : arrays_) all.push_back({name, array.tensor(), {}});
  return all;
}

void ExpressionFlags::set(Options* options) const {
  std::vector<TensorSymbol> symbols;
  for (const auto& [name, array] : arrays_) {
    symbols.emplace_back(name, array.dtype(), static_cast<int>(array.shape().size()));
  }
  const auto parse = [&](const char* flag, const std::string& text, Expr* to) {
    if (text.empty()) return;
    try {
      *to = parse_expression(text, symbols);
    } catch (const Error& error) {
      constexpr std::string_view kOf = "expression: ";
      const std::string_view words = error.what();
      io::fail(flag, "{}", words.starts_with(kOf) ? words.substr(kOf.size()) : words);
    }
  };
  parse("--score-mod", score_mod_, &options->score_mod);
  parse("--mask-mod", mask_mod_, &options->mask_mod);
}

}  // namespace fulgur::app

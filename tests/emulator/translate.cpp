#include "translate.h"

#include <cctype>
#include <regex>

namespace emulator {
namespace {

/// The operands of an asm statement whose parenthesis is in front of `at`, which moves after them:
/// colons are commas.
std::string separated(const std::string& text, size_t& at) {
  std::string out;
  bool quoted = false, behind_comma = false;
  for (int depth = 1; depth > 0; ++at) {
    char x = text[at];
    if (quoted) {
      quoted = x != '"' || text[at - 1] == '\\';
    } else {
      quoted = x == '"';
      depth += (x == '(') - (x == ')');
      if (x == ':' && depth == 1) {
        x = behind_comma ? ' ' : ',';
        behind_comma = true;
      } else if (!std::isspace(static_cast<unsigned char>(x)) && x != '\\') {
        behind_comma = false;
      }
    }
    out += x;
  }
  return out;
}

}  // namespace

std::string translated(const std::string& text) {
  static const std::regex kAsm(R"(\basm\s*(?:volatile\s*)?\()");
  std::string out;
  size_t end = 0;
  std::smatch match;
  while (
      std::regex_search(text.begin() + static_cast<std::ptrdiff_t>(end), text.end(), match, kAsm)) {
    out += match.prefix().str() + "emulator::execute(";
    end = static_cast<size_t>(match[0].second - text.begin());
    out += separated(text, end);
  }
  out += text.substr(end);

  struct Rule {
    std::regex what;
    const char* become;
  };
  static const Rule kRules[] = {
      {std::regex(R"re(("[+=][rhlfdq]")\s*\()re"), "$1, emulator::variable("},
      {std::regex(R"re(("[rhlfdnq]")\s*\()re"), "$1, emulator::value("},
      {std::regex(R"(__grid_constant__ (\w+) )"), "$1& "},
      {std::regex(R"(extern __shared__ [^;]*?(\w+)\[\];)"),
       "#define $1 emulator::dynamic_shared()"},
      {std::regex(R"(__shared__ (\w+) (\w+)((?:\[\w+\])+);)"),
       "$1 (&$2)$3 = emulator::shared_variable<$1$3, __LINE__>();"},
  };
  for (const Rule& rule : kRules) out = std::regex_replace(out, rule.what, rule.become);
  return out;
}

}  // namespace emulator

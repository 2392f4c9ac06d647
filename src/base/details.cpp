#include "fulgur/details.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/check.h"

namespace fulgur {
namespace {

std::string quoted(std::string_view text) {
  std::string s = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      s += '\\';
      s += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      s += fmt::format("\\u{:04x}", static_cast<int>(c));
    } else {
      s += c;
    }
  }
  return s + '"';
}

struct Json {
  std::string operator()(bool value) const { return value ? "true" : "false"; }
  std::string operator()(int64_t value) const { return fmt::format("{}", value); }
  // Whole numbers get a decimal point, so that a reader takes them for floating-point numbers.
  std::string operator()(double value) const {
    return std::isfinite(value) ? fmt::format("{:#}", value) : "null";
  }
  std::string operator()(const std::string& value) const { return quoted(value); }
  std::string operator()(const Details::Texts& values) const {
    std::string s;
    for (const std::string& value : values) s += (s.empty() ? "" : ", ") + quoted(value);
    return "[" + s + "]";
  }
  std::string operator()(const Details& details) const { return details.json(); }
};

}  // namespace

void Details::add_all(const Details& other) {
  entries_.insert(entries_.end(), other.entries_.begin(), other.entries_.end());
}

const Details::Entry* Details::find(std::string_view path) const {
  const size_t dot = path.find('.');
  const auto found = std::ranges::find(entries_, path.substr(0, dot), &Entry::name);
  if (found == entries_.end()) return nullptr;
  if (dot == std::string_view::npos) return &*found;
  const auto* const inside = std::get_if<Details>(&found->value);
  return inside == nullptr ? nullptr : inside->find(path.substr(dot + 1));
}

void Details::fail_get(std::string_view path, bool found) {
  fail("path", "got \"{}\", want {}", path,
       found ? "the type of the value there" : "a value that is there");
}

std::string Details::json() const {
  std::string s;
  for (const Entry& entry : entries_) {
    if (!s.empty()) s += ", ";
    s += quoted(entry.name) + ": " + std::visit(Json{}, entry.value);
  }
  return "{" + s + "}";
}

}  // namespace fulgur

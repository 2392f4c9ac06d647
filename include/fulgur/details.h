#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "fulgur/export.h"

namespace fulgur {

/// What a plan decided, as data: named values in a fixed order. A value is a truth value, a whole
/// number, a number, a text, a list of texts, or Details again.
class FULGUR_API Details {
 public:
  struct Entry;
  using Texts = std::vector<std::string>;

  /// Appends a value under a name that is not yet there.
  template <class T>
  void add(std::string name, T&& value);
  /// Appends all entries of `other`.
  void add_all(const Details& other);

  const std::vector<Entry>& entries() const { return entries_; }
  /// Whether there is such a value. "prefix.kernel" is the `kernel` of the Details at `prefix`.
  bool has(std::string_view path) const { return find(path) != nullptr; }
  /// The value there. T: bool, int64_t, double, std::string, Texts or Details. Throws
  /// Error(kInvalidArgument) where there is none, or one of another type.
  template <class T>
  const T& get(std::string_view path) const;

  /// One JSON object in a line.
  std::string json() const;

 private:
  const Entry* find(std::string_view path) const;
  [[noreturn]] static void fail_get(std::string_view path, bool found);

  std::vector<Entry> entries_;
};

struct Details::Entry {
  std::string name;
  std::variant<bool, int64_t, double, std::string, Texts, Details> value;
};

template <class T>
void Details::add(std::string name, T&& value) {
  using Type = std::remove_cvref_t<T>;
  if constexpr (std::integral<Type> && !std::same_as<Type, bool>) {
    entries_.push_back({std::move(name), static_cast<int64_t>(value)});
  } else if constexpr (std::convertible_to<T, std::string>) {
    entries_.push_back({std::move(name), std::string(std::forward<T>(value))});
  } else {
    entries_.push_back({std::move(name), std::forward<T>(value)});
  }
}

template <class T>
const T& Details::get(std::string_view path) const {
  const Entry* const entry = find(path);
  const T* const value = entry == nullptr ? nullptr : std::get_if<T>(&entry->value);
  if (value == nullptr) fail_get(path, entry != nullptr);
  return *value;
}

}  // namespace fulgur

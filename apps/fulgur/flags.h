#pragma once

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "fulgur/attention.h"

namespace fulgur::app {

/// The number that all of a text is; none beyond what T holds.
template <class T>
std::optional<T> number_of(const std::string& text) {
  const char* const end = text.data() + text.size();
  T number{};
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  return error == std::errc{} && rest == end ? std::optional(number) : std::nullopt;
}

/// The whole number that option `name` is given, none below `least`. CLI11's own conversion takes
/// one beyond 64 bits for the last that fits, and -1 as an unsigned number for 2^64 - 1. Throws
/// CLI::ValidationError.
template <class T>
T whole_number(const std::string& name, const std::string& text, T least) {
  const std::optional<T> number = number_of<T>(text);
  if (number && *number >= least) return *number;
  throw CLI::ValidationError(name, fmt::format("got '{}', want a whole number from {} to {}", text,
                                               least, std::numeric_limits<T>::max()));
}

/// Adds an option that takes one.
template <class T>
CLI::Option* add_whole(CLI::App& command, const std::string& name, T& value,
                       const std::string& help, T least = std::numeric_limits<T>::min()) {
  const auto take = [name, &value, least](const std::string& text) {
    value = whole_number(name, text, least);
  };
  return command.add_option_function<std::string>(name, take, help)->type_name("N");
}

/// Adds an option that takes any number.
template <class T>
CLI::Option* add_real(CLI::App& command, const std::string& name, T& value,
                      const std::string& help) {
  const auto take = [name, &value](const std::string& text) {
    const std::optional<double> number = number_of<double>(text);
    if (!number) {
      throw CLI::ValidationError(name,
                                 fmt::format("got '{}', want a number in the range of f64", text));
    }
    value = *number;
  };
  return command.add_option_function<std::string>(name, take, help);
}

/// The options of fulgur::Options that are plain numbers, as attend and explain take them.
class OptionFlags {
 public:
  void add_to(CLI::App& command);
  /// Throws CLI::ValidationError for a malformed --window.
  Options options() const;
  /// Those of fulgur::Run.
  Run run() const { return {.dropout_seed = seed_}; }

 private:
  bool causal_ = false;
  std::string window_;
  int64_t chunk_ = 0;
  std::optional<double> scale_;
  double softcap_ = 0;
  double dropout_ = 0;
  uint64_t seed_ = 0;
  bool top_left_ = false, deterministic_ = false, invariant_ = false, fast_codes_ = false;
  int64_t max_workspace_ = 0;
  std::string algorithm_;
  int threads_ = 0;
};

/// The sizes of a call, as explain and tune take them.
class ShapeFlags {
 public:
  int64_t batch = 1, sq = 1024, sk = kDefault, hq = 8, hk = kDefault, d = 64, dv = kDefault;

  void add_to(CLI::App& command);
  /// With sk, hk and dv in place of their defaults.
  ShapeFlags complete() const;

 private:
  static constexpr int64_t kDefault = -1;  // sq, hq, d
};

/// Adds --dtype, a choice of f32, bf16, f16 and `more`.
CLI::Option* add_dtype(CLI::App& command, std::string& name, const std::string& help,
                       const std::vector<std::string>& more = {});
/// The dtype of tensors of numbers or codes with that name_of().
DType dtype_called(const std::string& name);

/// Adds --device, cpu or cuda.
CLI::Option* add_device(CLI::App& command, std::string& name, const std::string& help);
/// "cpu" or "cuda". Throws Error(kUnavailable), on behalf of `user`, if the engine of that name
/// cannot be used.
Device device_called(const std::string& name, const std::string& user);
/// The name of the engine that is made for a device.
std::string engine_of(Device device);
/// What engines() says of it.
std::string description_of(Device device);

}  // namespace fulgur::app

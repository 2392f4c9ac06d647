#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>

#include "fulgur/attention.h"

namespace fulgur::app {

/// The options of fulgur::Options that are plain numbers, as attend and explain take them.
class OptionFlags {
 public:
  void add_to(CLI::App& command);
  /// Throws CLI::ValidationError for a malformed --window.
  Options options() const;

 private:
  bool causal_ = false;
  std::string window_;
  std::optional<double> scale_;
  double softcap_ = 0;
  Dropout dropout_;
  bool deterministic_ = false, invariant_ = false;
  int threads_ = 0;
};

/// Adds --dtype, a choice of f32, bf16 and f16.
CLI::Option* add_dtype(CLI::App& command, std::string& name, const std::string& help);
/// "f32", "bf16" or "f16".
DType dtype_called(const std::string& name);

}  // namespace fulgur::app

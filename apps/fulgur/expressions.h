#pragma once

#include <CLI/CLI.hpp>
#include <map>
#include <string>
#include <vector>

#include "fulgur/attention.h"
#include "io/array.h"

namespace fulgur::app {

/// Expressions of a call and the tensors that they index, as attend and explain take them.
class ExpressionFlags {
 public:
  void add_to(CLI::App& command);
  /// Reads the tensors, by their names in expressions. Throws Error(kInvalidArgument).
  void read();
  bool given() const { return !score_mod_.empty() || !mask_mod_.empty(); }
  const std::map<std::string, io::Array>& tensors() const { return arrays_; }
  /// The tensors for a call on the CPU.
  std::vector<TensorBinding> bindings() const;
  /// Sets the expressions. Throws Error(kInvalidArgument) by the names of the flags.
  void set(Options* options) const;

 private:
  std::string score_mod_, mask_mod_;
  std::vector<std::string> files_;  // NAME=F.npy
  std::map<std::string, io::Array> arrays_;
};

/// What is before the first '=' of a text and what is after it, as `option` wants it. Throws
/// CLI::ValidationError.
std::pair<std::string, std::string> name_and_path(const std::string& option,
                                                  const std::string& text);

}  // namespace fulgur::app

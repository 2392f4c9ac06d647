#pragma once

#include <span>
#include <string>
#include <vector>

#include "call/problem.h"
#include "kernels/host_device/expression.h"

namespace fulgur::cuda {

/// The expressions of a call as device text, and the arguments that its kernels take for them. The
/// text has the nodes of their graphs and nothing that a user wrote: literals, divisors, shapes and
/// strides are arguments, so that others compile nothing.
class DeviceExpressions {
 public:
  DeviceExpressions() = default;
  explicit DeviceExpressions(const Problem& problem);

  bool changes_scores() const { return expressions_.changes_scores(); }
  bool masks() const { return expressions_.masks(); }
  /// Whether the derivative of a changed score by the score before is not 1 everywhere.
  bool has_slope() const { return has_slope_; }
  /// Functions of kernel_config.h; empty where there are none.
  const std::string& text() const { return text_; }

  /// What kernels are told in a call with these tensors.
  kernels::ExpressionArguments arguments(std::span<const TensorBinding> tensors) const;

 private:
  expression::Expressions expressions_;
  bool has_slope_ = false;
  std::string text_;
  std::vector<int> words_;
};

}  // namespace fulgur::cuda

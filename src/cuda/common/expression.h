#pragma once

#include <span>
#include <string>
#include <vector>

#include "call/problem.h"
#include "kernels/host_device/expression.h"

namespace fulgur::cuda {

/// What classifies the tiles of a mask (kernels/maps/tile_map.cu), as device text.
struct MaskHullsText {
  std::string text;
  int row_panels = 0, key_panels = 0;  ///< what only rows and only keys decide
  bool of_heads = false, of_kv_heads = false, of_batch = false;  ///< what else the mask depends on
};

/// The expressions of a call as device text, and the arguments that its kernels take for them. The
/// text has the nodes of their graphs and nothing that a user wrote: literals, divisors, shapes and
/// strides are arguments, so that others compile nothing.
class DeviceExpressions {
 public:
  DeviceExpressions() = default;
  explicit DeviceExpressions(const Problem& problem);

  bool given() const { return expressions_.given(); }
  bool changes_scores() const { return expressions_.changes_scores(); }
  bool masks() const { return expressions_.masks(); }
  /// Whether the derivative of a changed score by the score before is not 1 everywhere.
  bool has_slope() const { return has_slope_; }
  /// Functions of kernel_config.h; empty where there are none.
  const std::string& text() const { return text_; }

  /// Of mask_mod.
  const MaskHullsText& mask_hulls() const { return mask_hulls_; }

  /// What kernels are told in a call with these tensors. Those of a call without expressions take
  /// none.
  kernels::ExpressionArguments arguments(std::span<const TensorBinding> tensors) const;

 private:
  expression::Expressions expressions_;
  Origin origin_;
  bool has_slope_ = false;
  std::string text_;
  MaskHullsText mask_hulls_;
  std::vector<int> words_;
};

}  // namespace fulgur::cuda

#pragma once

#include <span>
#include <string>
#include <vector>

#include "call/problem.h"
#include "kernels/host_device/expression.h"

namespace fulgur::cuda {

/// Device text that classifies the tiles of mask_mod (kernels/maps/node_hulls.cuh).
struct MaskHullsText {
  std::string text;
  int row_nodes = 0, key_nodes = 0;
  bool of_heads = false, of_kv_heads = false,
       of_batch = false;  ///< whether the mask depends on them
};

/// The expressions of a call as device text, and the arguments that its kernels take for them. The
/// text depends on the nodes of their graphs only. Literals, divisors, shapes and strides are
/// arguments, so that expressions that differ in these share a compiled kernel.
class DeviceExpressions {
 public:
  DeviceExpressions() = default;
  explicit DeviceExpressions(const Problem& problem);

  bool given() const { return expressions_.given(); }
  bool changes_scores() const { return expressions_.changes_scores(); }
  bool masks() const { return expressions_.masks(); }
  /// Whether the derivative of score_mod by the score is not 1 everywhere.
  bool has_slope() const { return has_slope_; }
  /// The functions of kernel_config.h; empty without expressions.
  const std::string& text() const { return text_; }

  /// The text that classifies the tiles of mask_mod.
  const MaskHullsText& mask_hulls() const { return mask_hulls_; }

  /// The arguments of kernels in a call with these tensors. Kernels without expressions have none.
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

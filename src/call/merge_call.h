#pragma once

#include <span>
#include <vector>

#include "base/check.h"
#include "fulgur/merge.h"

namespace fulgur {

/// A call of merge, whose arguments are checked once for every device.
struct MergeCall {
  /// The tensors of a partial result, and where their rows lie.
  struct Part {
    ConstTensor out, lse;
    Layout out_rows, lse_rows;
  };
  std::vector<Part> from;
  Merged to;
  Layout out_rows, lse_rows;                        ///< of `to`
  int64_t batch = 0, rows = 0, heads = 0, dim = 0;  ///< rows of each of the batch; packed: batch 1
};

/// Throws Error(kInvalidArgument).
MergeCall checked_merge(std::span<const Partial> parts, const Merged& result);

}  // namespace fulgur

// The workspace of a composite plan: that of its attention, and after it the memory of its steps.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/workspace.h"

namespace fulgur {

/// Offsets of the memory of the steps: the rotated queries, and the memory of one step.
struct StepPlaces {
  int64_t rotated, step, end;

  StepPlaces(int64_t rotated_bytes, int64_t step_bytes, int64_t begin) {
    Arena arena(begin);
    rotated = arena.take(rotated_bytes);
    step = arena.take(step_bytes);
    end = arena.end();
  }
  /// The need of the plan, from that of its attention.
  WorkspaceNeed need(WorkspaceNeed attention) const {
    attention.bytes = end;
    attention.alignment = std::max(attention.alignment, kWorkspaceAlignment);
    return attention;
  }
  /// The limit of the attention's workspace, from that of the whole call. Of places that begin at
  /// 0.
  int64_t left_of(int64_t max_workspace) const {
    return std::max<int64_t>(max_workspace - end - kWorkspaceAlignment, 1);
  }
};

}  // namespace fulgur

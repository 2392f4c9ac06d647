/// Where composite plans keep what their steps need, in the workspace of the attention.
#pragma once

#include <algorithm>
#include <cstdint>

#include "engine/workspace.h"

namespace fulgur {

/// Offsets in a workspace, after that of the attention: rotated queries, and memory of a step.
struct StepPlaces {
  int64_t rotated, step, end;

  StepPlaces(int64_t rotated_bytes, int64_t step_bytes, int64_t begin) {
    Arena arena(begin);
    rotated = arena.take(rotated_bytes);
    step = arena.take(step_bytes);
    end = arena.end();
  }
  /// What a plan needs whose attention needs so much.
  WorkspaceNeed need(WorkspaceNeed attention) const {
    attention.bytes = end;
    attention.alignment = std::max(attention.alignment, kWorkspaceAlignment);
    return attention;
  }
  /// The bound of the attention's workspace where that of the whole call has one. `*this` begins
  /// at 0.
  int64_t left_of(int64_t max_workspace) const {
    return std::max<int64_t>(max_workspace - end - kWorkspaceAlignment, 1);
  }
};

}  // namespace fulgur

#pragma once

#include <cstdint>
#include <vector>

#include "cuda/decode/decode_plan.h"

namespace fulgur::cuda::decode {

/// Q blocks of equal length: `count` blocks of rows, each with `chunks` chunks of keys.
struct QBlocks {
  int64_t count;
  int chunks;
};

int64_t count_of(const std::vector<QBlocks>& q_blocks);

/// CTAs that read equally many chunks each.
struct Ctas {
  double count, chunks;
};

/// How a schedule divides q blocks among CTAs.
struct Division {
  std::vector<Ctas> ctas;
  int tiles = 1;        ///< maximum of work tiles of a CTA
  int splits = 1;       ///< maximum of splits of a q block
  bool slices = false;  ///< CTAs have slices of the q blocks laid end to end
  bool whole() const { return splits == 1; }
};

/// The division by the schedule of a plan, computed by the formulas that the CTAs themselves use.
/// `q_blocks` are in the order of their lengths, the longest first.
Division divide(const std::vector<QBlocks>& q_blocks, const DecodePlan& plan,
                const Problem& problem);

}  // namespace fulgur::cuda::decode

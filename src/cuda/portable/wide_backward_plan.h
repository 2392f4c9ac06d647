#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/common/planned_family.h"
#include "cuda/passes/backward.h"
#include "kernels/portable/wide_backward/layout.h"

namespace fulgur::cuda::portable {

using kernels::WideGradient;

/// The constants of kernel_config.h of portable/wide_backward/gradient.cu.
struct WideBackwardKey : AnyBackwardKey {
  WideGradient gradient = WideGradient::kOfQ;
  int warps = 0;
  int chunk_panels = 0;          ///< panels of 64 columns of a buffer of the ring
  int stages = 0;                ///< buffers of the ring
  bool whole_columns = false;    ///< d = head_dim and dv = value_dim: no columns are padded
  bool stores_matrices = false;  ///< P and dS are stored by stmatrix
  bool splits_heads = false;     ///< several CTAs share the q heads of a key block

  template <class F>
  void for_each_field(const F& f) const {
    AnyBackwardKey::for_each_field(f);
    f("kGradient", gradient);
    f("kWarps", warps);
    f("kChunkPanels", chunk_panels);
    f("kStages", stages);
    f("kWholeColumns", whole_columns);
    f("kStoresMatrices", stores_matrices);
    f("kSplits", splits_heads);
  }
  bool operator==(const WideBackwardKey& o) const {
    return kernel_config(*this) == kernel_config(o);
  }

  int threads() const { return 32 * warps; }
  kernels::WideBackwardLayout layout() const {
    return kernels::wide_backward_layout(
        {gradient, head_dim, value_dim, block_rows, block_keys, chunk_panels, stages});
  }
};

/// Every decision about a backward pass by portable/wide_backward/gradient.cu. As a key it is that
/// of dK: Bc keys of a CTA, Br rows of a step.
struct WideBackwardPlan : WideBackwardKey, AnyBackwardPlan {
  /// Buffers of the kernels of dQ, dK and dV.
  struct Ring {
    int chunk_panels = 0, stages = 0;
    bool operator==(const Ring&) const = default;
  };
  std::array<Ring, 3> rings{};
  /// The CTAs of dK and dV: a key block each; and those of dQ: Bc rows each.
  kernels::BlockSchedule key_blocks{}, row_blocks{};
  bool operator==(const WideBackwardPlan&) const = default;

  TileId tile() const { return {"portable_backward_wide", block_rows, block_keys}; }
  /// The key of the kernel of a gradient.
  WideBackwardKey key_of(WideGradient of) const;
  const kernels::BlockSchedule& blocks_of(WideGradient of) const {
    return of == WideGradient::kOfQ ? row_blocks : key_blocks;
  }
  int64_t ctas_of(WideGradient of) const {
    return int64_t{blocks_of(of).blocks} * blocks_of(of).batch_heads;
  }
  /// The gradients that the call requests.
  std::vector<WideGradient> gradients() const;
};

/// Offsets in the workspace, in bytes.
struct WideBackwardWorkspace : AnyBackwardWorkspace {
  int64_t tensor_sums = 0;  ///< sums for the gradients of tensors of expressions
};
WideBackwardWorkspace workspace_of(const Problem& problem, const WideBackwardPlan& plan);

/// Why portable/wide_backward/gradient.cu does not compute a problem, and what it computes; empty
/// if it computes it.
std::string wide_backward_rejects(const Problem& problem);

/// A plan for every tile that fits. Adds the reasons of other tiles to `rejected`.
std::vector<Fitting<WideBackwardPlan>> wide_backward_candidates(const Problem& problem,
                                                                const Card& card,
                                                                std::vector<std::string>* rejected);

/// The plan in sentences and as data.
Explanation describe(const WideBackwardPlan& plan);

}  // namespace fulgur::cuda::portable

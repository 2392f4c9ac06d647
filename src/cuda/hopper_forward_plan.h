#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "kernels/shared/work.h"
#include "problem.h"

namespace fulgur::cuda {

/// What planning must know of a device of compute capability 9.0. The default is an H100 or H200.
struct HopperTarget {
  int multiprocessors = 132;
  int shared_bytes = 232448;  ///< at most, of a block
  bool operator==(const HopperTarget&) const = default;
};

/// Every decision about a forward pass by sm90/forward.cu. What plan.h fixes at compile time first,
/// with its names (kHeadDim is head_dim); then how it is launched.
struct HopperForwardPlan {
  DType dtype = DType::kBF16;
  int head_dim = 0, value_dim = 0;  ///< d, dv rounded up to 16
  int consumers = 0;                ///< warpgroups of 64 rows each
  int block_keys = 0;               ///< Bc
  int q_stages = 0, k_stages = 0, v_stages = 0;
  int producer_registers = 0, consumer_registers = 0;
  bool has_left = false, has_right = false;
  bool transforms_scores = false, softcap = false, alibi = false;
  bool packed = false, seqused_k = false, has_lse = false;
  bool split_tail = false;
  enum class Store : uint8_t { kTiles, kRows, kElements };
  Store store = Store::kTiles;  ///< how O leaves

  /// Why q, k and v are copied to where TMA can address them; empty where they are not.
  std::string copies_q, copies_k, copies_v;
  int shared_bytes = 0;
  kernels::Work work{};    ///< how rows, heads and keys are cut into items
  int grid = 0;            ///< thread blocks
  double measured_us = 0;  ///< what the tile was chosen by; 0: chosen by the cost model
  bool operator==(const HopperForwardPlan&) const = default;

  bool copies() const { return !(copies_q + copies_k + copies_v).empty(); }
  int block_rows() const { return 64 * consumers; }  ///< Br
  int threads() const { return 128 * (consumers + 1); }
  /// Floats that parts of split blocks leave for the last one.
  int64_t partial_floats() const;
  /// Counters that are zero between launches: two of the scheduler, and the tickets.
  int counters() const;
};

/// The mask as the kernel sees it: the bounds that the plan has, 0 where it has none.
kernels::Band band_of(const HopperForwardPlan& plan, const Mask& mask);

/// scale * log2(e), as the kernel computes with it.
float scale_log2(const Problem& problem);

/// Why sm90/forward.cu does not compute a forward problem, and what it does compute; empty when it
/// does.
std::string hopper_forward_rejects(const Problem& problem);

/// A tile Br x Bc of a forward pass, and how long the pass took on a device.
struct MeasuredTile {
  int consumers = 0, block_keys = 0;
  double microseconds = 0;
  bool operator==(const MeasuredTile&) const = default;
};

/// Decides: derives the stages of each tile Br x Bc from the shared memory and takes the one that a
/// cost model predicts to be fastest, or that was, where all of them were `measured`. `rejected`
/// takes the others and why.
HopperForwardPlan make_hopper_forward_plan(const Problem& problem, const HopperTarget& target,
                                           std::span<const MeasuredTile> measured,
                                           std::vector<std::string>* rejected);

/// A plan for every tile that fits: those that may be measured.
std::vector<HopperForwardPlan> hopper_forward_candidates(const Problem& problem,
                                                         const HopperTarget& target);

/// The class of a problem: problems whose best tile is taken to be the same. It names all that the
/// choice of the tile depends on: dtype, d and dv as computed, what happens to scores, where
/// lengths come from, heads a group; and the longest sq and sk, batch * hq, and the mask's bounds
/// where they bind, rounded up to three significant binary digits (1 to 8, 10, 12, 14, 16, 20,
/// ...), so that four classes cover an octave. Strides, LSE and the value of scale are left out.
std::string shape_class(const Problem& problem);

/// A plan for each text of plan.h that calls like `problem` can lead to: with its dims, dtype,
/// heads a group and options, any lengths and batch, and no tuning.
std::vector<HopperForwardPlan> reachable_forward_plans(const Problem& problem,
                                                       const HopperTarget& target);

/// The text of plan.h.
std::string plan_header(const HopperForwardPlan& plan);

/// The plan in sentences.
std::vector<std::string> describe(const HopperForwardPlan& plan);

}  // namespace fulgur::cuda

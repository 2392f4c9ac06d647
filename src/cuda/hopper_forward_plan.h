#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/family.h"
#include "cuda/hopper_plan.h"
#include "kernels/shared/work.h"
#include "problem.h"

namespace fulgur::cuda {

/// What plan.h fixes at compile time, with its names (kHeadDim is head_dim).
struct HopperForwardKey : HopperAnyForwardKey {
  int consumers = 0;   ///< warpgroups of 64 rows each
  int block_keys = 0;  ///< Bc
  int q_stages = 0, k_stages = 0, v_stages = 0;
  int producer_registers = 0, consumer_registers = 0;
  bool dropout = false;
  int box_keys = 0;  ///< keys that TMA loads at a time: of one page
  bool split_tail = false;
  enum class Store : uint8_t { kTiles, kRows, kElements };
  Store store = Store::kTiles;  ///< how O leaves
  bool operator==(const HopperForwardKey&) const = default;

  /// Whether rows of q may belong to no sequence.
  bool has_padding() const { return packed || seqused_q; }
};

/// How it is launched.
struct HopperForwardLaunch {
  int shared_bytes = 0;
  kernels::Work work{};  ///< how rows, heads and keys are cut into items
  int grid = 0;          ///< thread blocks
  bool operator==(const HopperForwardLaunch&) const = default;
};

/// Every decision about a forward pass by sm90/forward.cu.
struct HopperForwardPlan : HopperForwardKey, HopperForwardLaunch {
  /// Why q, k and v are copied to where TMA can address them; empty where they are not.
  std::string copies_q, copies_k, copies_v;
  bool operator==(const HopperForwardPlan&) const = default;

  TileId tile() const { return {"sm90_forward", block_rows(), block_keys}; }
  bool copies() const { return !(copies_q + copies_k + copies_v).empty(); }
  int block_rows() const { return 64 * consumers; }  ///< Br
  int threads() const { return 128 * (consumers + 1); }
  /// Floats that parts of split blocks leave for the last one.
  int64_t partial_floats() const;
  /// Counters that are zero between launches: two of the scheduler, and the tickets.
  int counters() const;
};

/// Where things begin in the workspace, in bytes: behind the counters and tickets and what parts of
/// split blocks leave. All 0 where nothing is launched.
struct HopperForwardWorkspace {
  std::array<int64_t, 3> copies{};  ///< of q, k and v
  int64_t numbers = 0, end = 0;     ///< numbers of the host
};
HopperForwardWorkspace workspace_of(const Problem& problem, const HopperForwardPlan& plan);

/// Why sm90/forward.cu does not compute a forward problem, and what it does compute; empty when it
/// does.
std::string hopper_forward_rejects(const Problem& problem);

/// A plan with one of the tiles.
struct HopperForwardTile {
  HopperForwardPlan plan;
  double cycles = 0;       ///< predicted
  std::string tuned_only;  ///< why the cost model may not take it; empty when it may
};

/// A plan for every tile that fits, with the stages that the shared memory has room for. `rejected`
/// takes the others and why.
std::vector<HopperForwardTile> hopper_forward_tiles(const Problem& problem, const Target& target,
                                                    std::vector<std::string>* rejected);

/// The text of plan.h.
std::string plan_header(const HopperForwardKey& key);

/// The plan in sentences.
std::vector<std::string> describe(const HopperForwardPlan& plan);

}  // namespace fulgur::cuda

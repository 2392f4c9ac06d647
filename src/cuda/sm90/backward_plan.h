#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/family.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/planned_family.h"
#include "kernels/sm90/backward/layout.h"
#include "kernels/sm90/backward/work.h"

namespace fulgur::cuda {

/// Registers a thread that setmaxnreg gives to the producer, those that own keys, and that of dQ.
struct BackwardRegisters {
  int producer, consumer, sums;
};

/// What kernel_config.h fixes at compile time.
struct HopperBackwardKey : HopperKey {
  int block_rows = 0;  ///< Br of a step
  int consumers = 2;   ///< warpgroups that compute dK and dV; 1: of a short call
  int block_keys = 0;  ///< Bc: 64 for each of them, or 64 that both share
  int k_stages = 0, q_stages = 0, o_stages = 0, ds_stages = 0, sums_stages = 0;
  bool sums = false;  ///< dQ is summed up in f32 with dK and dV; otherwise it is computed from dS
  bool ordered = false;  ///< blocks of keys add to the sums in turns: the same bits in every run
  int row_tiles = 0, row_stages = 0;
  bool dropout = false, has_dlse = false;
  bool elements = false;  ///< gradients are stored by elements

  template <class F>
  void for_each_field(const F& f) const {
    HopperKey::for_each_field(f);
    f("kConsumers", consumers);
    f("kBlockRows", block_rows);
    f("kBlockKeys", block_keys);
    f("kKStages", k_stages);
    f("kQStages", q_stages);
    f("kOStages", o_stages);
    f("kDsStages", ds_stages);
    f("kSumsStages", sums_stages);
    f("kSums", sums);
    f("kOrdered", ordered);
    f("kHalfP", half_p());
    f("kRowTiles", row_tiles);
    f("kRowStages", row_stages);
    f("kProducerRegisters", registers().producer);
    f("kConsumerRegisters", registers().consumer);
    f("kSumsRegisters", registers().sums);
    f("kPackedK", packed);
    f("kDropout", dropout);
    f("kHasDlse", has_dlse);
    f("kElements", elements);
  }
  bool operator==(const HopperBackwardKey& o) const {
    return kernel_config(*this) == kernel_config(o);
  }

  BackwardRegisters registers() const;
  kernels::ScoreTile score_tile() const { return {block_rows, block_keys}; }
  int rows_of_block() const;  ///< of sm90/backward/rows.cu
  bool wide() const { return block_keys < 64 * consumers; }
  bool half_p() const;     ///< P of bf16 inputs is f16 where dS is computed from it
  double p_log2() const;   ///< the kernels by keys have 2^p_log2 of P
  int tile_bytes() const;  ///< of dS
};

/// One launch of both kernels.
struct BackwardWave {
  kernels::Wave wave;
  kernels::Blocks key_blocks, row_blocks;
  bool operator==(const BackwardWave&) const = default;
};

/// How it is launched.
struct HopperBackwardLaunch {
  int keys_shared_bytes = 0, rows_shared_bytes = 0;
  kernels::ScoreTiles score_tiles{};
  std::vector<BackwardWave> waves;
  int statistics_rows = 0;  ///< of a head
  int64_t ds_bytes = 0;     ///< of the largest wave
  /// Pairs that share a head of k and v, so that more CTAs have work: each has an equal
  /// part of the group's q heads, and with sums one of the row tiles.
  int parts = 1, pair_heads = 1, row_parts = 1;
  bool carries = false;  ///< waves cut sequences of q: sums of dK and dV pass from one to the next
  /// The last blocks of keys, whose rows are taken in two parts; the first pair that has any.
  int cut_blocks = 0, first_cut_pair = 0;
  int grid = 0;  ///< CTAs, at most
  bool operator==(const HopperBackwardLaunch&) const = default;
};

/// Every decision about a backward pass by sm90/backward_*.cu.
struct HopperBackwardPlan : HopperBackwardKey, HopperBackwardLaunch {
  /// Why tensors are copied to where TMA can address them; empty where they are not.
  std::string copies_q, copies_k, copies_v, copies_dout;
  bool dsinks = false;  ///< the gradient of the sinks is wanted
  bool operator==(const HopperBackwardPlan&) const = default;

  TileId tile() const {
    return {ordered ? "sm90_backward_turns"
            : sums  ? "sm90_backward_sums"
                    : "sm90_backward",
            block_rows, block_keys};
  }
  /// Whether a mask hides what products touch.
  bool repairs() const { return has_left || has_right; }
  /// By a kernel of its own: the one that rounds dQ does it otherwise.
  bool repairs_apart() const { return repairs() && !sums; }
  int threads() const { return 128 * (consumers + 1 + sums); }  ///< of the kernel by keys
  /// Floats of the sums of dQ.
  int64_t sums_floats(int64_t hq) const;
  /// Units of dQ at which blocks of keys take turns.
  int64_t turns(int64_t hq) const { return ordered ? sums_floats(hq) / kernels::kUnitFloats : 0; }
  bool joins() const { return parts > 1; }  ///< dK and dV of parts are added up after all waves
  bool copies() const { return !(copies_q + copies_k + copies_v + copies_dout).empty(); }
};

/// Where things begin in the workspace, in bytes, after the counters. All 0 where nothing is
/// launched.
struct HopperBackwardWorkspace {
  int64_t shift = 0, delta = 0;        ///< statistics of rows
  int64_t dq_sums = 0, turns = 0;      ///< of the plan's `sums`
  int64_t zeros = 0, ds = 0;           ///< of the other plans
  int64_t carry_dk = 0, carry_dv = 0;  ///< sums between waves or parts of rows, or to be joined
  int64_t first_parts = 0;             ///< how many of them are there
  std::array<int64_t, 4> copies{};     ///< of q, k, v and dout
  int64_t numbers = 0, end = 0;        ///< numbers of the host
};
HopperBackwardWorkspace workspace_of(const Problem& problem, const HopperBackwardPlan& plan);

/// Why sm90/backward_*.cu do not compute a backward problem, and what they do compute; empty when
/// they do.
std::string backward_rejects(const Problem& problem);

/// A plan with one of the tiles.
using HopperBackwardTile = Fitting<HopperBackwardPlan>;

/// A plan for every tile that fits, with the stages that the shared memory has room for, and with
/// the fastest waves that max_workspace has room for; where it has for none, with those that want
/// the least. `rejected` takes the others and why.
std::vector<HopperBackwardTile> backward_candidates(const Problem& problem, const Card& card,
                                                    std::vector<std::string>* rejected);

/// The most bytes of dS that a call may have in its workspace: 256 MB, or what its tensors take;
/// but a block of rows of one head of k and v has room, however long its keys are.
int64_t max_ds_bytes(const Problem& problem);

/// The plan in sentences and as data.
Explanation describe(const HopperBackwardPlan& plan);

}  // namespace fulgur::cuda

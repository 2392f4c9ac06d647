#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/family.h"
#include "cuda/passes/backward.h"
#include "kernels/sm90/backward/layout.h"

namespace fulgur::cuda::sm90 {

/// Registers per thread after setmaxnreg: of the producer, of warpgroups that compute dK and dV,
/// and of the warpgroup that computes dQ.
struct BackwardRegisters {
  int producer, consumer, dq;
};

/// The constants of kernel_config.h.
struct BackwardKey : AnyBackwardKey {
  /// Warpgroups that compute dK and dV: two, each for 64 of the Bc keys, or one for dK and one for
  /// dV of 64 keys (wide); one in short calls.
  int consumers = 2;
  int bias_terms = 0;  ///< of products that add the bias; 0: they do not
  int k_stages = 0, q_stages = 0, o_stages = 0, ds_stages = 0, dq_stages = 0;
  int row_tiles = 0, row_stages = 0;  ///< of the kernel by rows

  template <class F>
  void for_each_field(const F& f) const {
    AnyBackwardKey::for_each_field(f);
    f("kConsumers", consumers);
    f("kBiasTerms", bias_terms);
    f("kKStages", k_stages);
    f("kQStages", q_stages);
    f("kOStages", o_stages);
    f("kDsStages", ds_stages);
    f("kDqStages", dq_stages);
    f("kHalfP", half_p());
    f("kRowTiles", row_tiles);
    f("kRowStages", row_stages);
    f("kProducerRegisters", registers().producer);
    f("kConsumerRegisters", registers().consumer);
    f("kDqRegisters", registers().dq);
  }
  bool operator==(const BackwardKey& o) const { return kernel_config(*this) == kernel_config(o); }

  BackwardRegisters registers() const;
  kernels::ScoreTile score_tile() const { return {block_rows, block_keys}; }
  int rows_of_block() const;  ///< rows of a row block of the kernel by rows
  /// Whether dK and dV of a key block are computed by a warpgroup each.
  bool wide() const { return block_keys < 64 * consumers; }
  bool half_p() const;     ///< whether dS is computed from P as f16, though inputs are bf16
  double p_log2() const;   ///< the kernels by keys compute 2^p_log2 P
  int tile_bytes() const;  ///< of dS of a score tile
};

/// The kernel by keys and, with stored dS, the kernel by rows after it: one launch of each.
struct BackwardWave {
  kernels::Wave wave;
  kernels::BlockSchedule key_blocks, row_blocks;
  bool operator==(const BackwardWave&) const = default;
};

/// How the kernels are launched.
struct BackwardLaunch {
  int keys_shared_bytes = 0, rows_shared_bytes = 0;
  kernels::ScoreTiles score_tiles{};
  std::vector<BackwardWave> waves;
  int64_t ds_bytes = 0;  ///< bytes of dS of the largest wave
  /// Whether waves split the rows of a sequence, so that each wave adds to the partial dK and dV of
  /// the previous one.
  bool splits_rows = false;
  /// The number of key blocks that are cut into two work tiles: the last ones, of heads from
  /// first_cut_head (batch * heads + head) on.
  int cut_blocks = 0, first_cut_head = 0;
  int grid = 0;  ///< maximum of CTAs
  bool operator==(const BackwardLaunch&) const = default;
};

/// Every decision about a backward pass by the kernels of sm90/backward/.
struct BackwardPlan : BackwardKey, BackwardLaunch, AnyBackwardPlan {
  bool operator==(const BackwardPlan&) const = default;

  TileId tile() const;
  /// Whether a separate kernel repairs gradients; otherwise the kernel that rounds dQ does.
  bool has_repair_kernel() const { return repairs() && !accumulates_dq(); }
  int threads() const {
    return 128 * (consumers + 1 + accumulates_dq());
  }  ///< of the kernel by keys
  int64_t dq_semaphores(int64_t hq) const;
  int64_t dq_additions(int64_t hq) const;
};

/// Offsets in the workspace, in bytes.
struct BackwardWorkspace : AnyBackwardWorkspace {
  int64_t dq_additions = 0;   ///< if dQ is accumulated
  int64_t zeros = 0, ds = 0;  ///< if dS is stored
  int64_t first_parts = 0;  ///< counter of warps that have stored partial dK and dV of first parts
};
BackwardWorkspace workspace_of(const Problem& problem, const BackwardPlan& plan);

/// The fields that the layouts of shared memory depend on.
kernels::BackwardTile tile_of(const BackwardKey& key);

/// The plan in sentences and as data.
Explanation describe(const BackwardPlan& plan);

}  // namespace fulgur::cuda::sm90

#pragma once

#include <vector>

#include "cuda/common/family.h"
#include "cuda/sm90/backward_plan.h"

namespace fulgur::cuda::sm90 {

inline constexpr double kBackwardLaunchCycles = 10000;
inline constexpr int64_t kFewKeyBlocks = 4;  ///< per SM

/// The memory bandwidth that the backward kernels reach.
double backward_bytes_per_cycle(const Card& card);

/// Whether rows of Q, K, V and dO are one panel each.
bool has_one_panel(const BackwardKey& key);

/// The tiles and blocks of a problem in a plan.
struct BackwardWork {
  BackwardWork(const Problem& problem, const BackwardPlan& plan);

  kernels::ScoreTile tile;
  kernels::Band band;
  kernels::Lengths lengths;           ///< of the longest sequence
  int row_tiles = 0, key_blocks = 0;  ///< of a sequence
  int heads = 0;                      ///< of a sequence: the splits of its kv heads
  int row_block_tiles = 0;            ///< row tiles of a row block

  kernels::RowTiles row_tiles_of(int key_block) const {
    return kernels::row_tiles(band, lengths, tile.rows, key_block * tile.keys, tile.keys);
  }
  int64_t score_tiles_between(const kernels::ScoreTiles& store, int begin, int end) const;
};

/// Decides the order of key blocks and predicts their cycles.
class BackwardCost {
 public:
  BackwardCost(const Problem& problem, const BackwardPlan& plan, const BackwardWork& work,
               const Card& card);

  /// The order of key blocks of `batch_heads` heads. With a right bound they have different
  /// lengths, which decide when the next blocks begin and which rows they read at the same time.
  kernels::BlockSchedule key_schedule(int batch_heads) const;
  /// The order of `blocks` blocks of each of `batch_heads` heads, in sections of so many heads that
  /// each SM has one block, and SMs read the same rows of Q, or keys, at the same time. The few SMs
  /// that are left begin with the next section.
  kernels::BlockSchedule schedule(int blocks, int batch_heads, kernels::BlockOrder order) const;

  /// Whether the rows of `batch_heads` heads fit L2: Q, dO and dq_accum.
  bool in_l2(int batch_heads) const;

  /// The key blocks of a head with the rows of one wave: the cycles of the longest one, the sum of
  /// all cycles, and of all scores.
  struct RowRange {
    double longest = 0, all = 0, scores = 0;
  };
  RowRange row_range(int first_tile, int tiles) const;

  /// Cycles of waves of `wave_heads` heads, one after the other. A wave takes at least as long as
  /// its longest block, and as all of its blocks on all SMs. `compact`: a head has all packed
  /// sequences.
  double waves(const std::vector<RowRange>& ranges, int wave_heads, int batch_heads,
               bool compact) const;
  /// Cycles of one launch by keys of all heads, without and with the last blocks cut.
  double one_launch(int batch_heads) const;
  double one_launch_cut(int batch_heads) const;
  /// Cycles to clear, add in order, read and round dq_accum, without the launch by keys.
  double dq_accum_cycles() const;

 private:
  double step_cycles() const;
  double semaphore_factor() const;
  double block_cycles(int begin, int end) const;
  double first_semaphore_cycles() const;
  double addition_cycles() const;
  double list_cycles(int batch_heads) const;

  const Problem& p_;
  const BackwardPlan& plan_;
  const BackwardWork& work_;
  int sms_;
  double bytes_per_cycle_, l2_bytes_;
};

}  // namespace fulgur::cuda::sm90

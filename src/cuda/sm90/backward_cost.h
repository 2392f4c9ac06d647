#pragma once

#include <vector>

#include "cuda/common/family.h"
#include "cuda/sm90/backward_plan.h"

namespace fulgur::cuda::sm90 {

inline constexpr double kBackwardLaunchCycles = 10000;
inline constexpr int64_t kFewKeyBlocks = 4;  ///< an SM

/// The bytes that memory gives the backward kernels in a cycle.
double backward_bytes_per_cycle(const Card& card);

/// Whether rows of Q, K, V and dO are one panel each.
bool has_one_panel(const BackwardKey& key);

/// A problem in tiles of a plan.
struct BackwardWork {
  BackwardWork(const Problem& problem, const BackwardPlan& plan);

  kernels::ScoreTile tile;
  kernels::Band band;
  kernels::Lengths lengths;           ///< of the longest sequence
  int row_tiles = 0, key_blocks = 0;  ///< of a sequence
  int heads = 0;                      ///< of a sequence: splits of its kv heads
  int row_block_tiles = 0;            ///< row tiles of a row block

  kernels::RowTiles row_tiles_of(int key_block) const {
    return kernels::row_tiles(band, lengths, tile.rows, key_block * tile.keys, tile.keys);
  }
  int64_t score_tiles_between(const kernels::ScoreTiles& store, int begin, int end) const;
};

/// In which order CTAs take blocks, and how many cycles they take.
class BackwardCost {
 public:
  BackwardCost(const Problem& problem, const BackwardPlan& plan, const BackwardWork& work,
               const Card& card);

  /// Key blocks of `batch_heads` heads. Under a right bound they have different lengths, which
  /// decide when the next ones begin, and rows in common.
  kernels::BlockSchedule key_schedule(int batch_heads) const;
  /// `blocks` blocks of `batch_heads` heads: the SMs share the rows of Q, or the keys, of a section
  /// with a block each; few SMs are left over, and begin with the next section.
  kernels::BlockSchedule schedule(int blocks, int batch_heads, kernels::BlockOrder order) const;

  /// Whether L2 holds the rows of so many heads: Q, dO and dq_accum.
  bool in_l2(int batch_heads) const;

  /// The key blocks of a head with the rows of one wave: cycles of the longest and of all together,
  /// and their scores.
  struct RowRange {
    double longest = 0, all = 0, scores = 0;
  };
  RowRange row_range(int first_tile, int tiles) const;

  /// Waves of `wave_heads` heads after each other: one lasts as long as its longest block, and as
  /// all of them take together. `compact`: a head has all packed sequences.
  double waves(const std::vector<RowRange>& ranges, int wave_heads, int batch_heads,
               bool compact) const;
  /// One launch by keys of all heads, without and with the last blocks cut.
  double one_launch(int batch_heads) const;
  double one_launch_cut(int batch_heads) const;
  /// Filling, ordering, reading and rounding dq_accum, besides the launch by keys.
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

#include "cuda/sm90/backward_waves.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "cuda/sm90/backward_cost.h"

namespace fulgur::cuda::sm90 {
namespace {

using kernels::BlockSchedule;
using kernels::Wave;

/// Cycles of the launch of the kernel by rows, beyond that of the kernel that rounds dQ.
constexpr double kRowsCycles = 5000;

/// How a call is divided into waves.
struct WaveShape {
  int heads = 1;      ///< per wave: splits of kv heads, times sequences unless compact
  int row_waves = 1;  ///< waves into which the rows of a sequence are split
  double cycles = 0;  ///< predicted
};

/// Divides a call whose splits are set into waves whose dS fits max_ds_bytes().
class WavePlanner {
 public:
  WavePlanner(const Problem& problem, BackwardPlan& plan, const Card& card)
      : p_(problem),
        plan_(plan),
        work_(problem, plan),
        cost_(problem, plan, work_, card),
        sms_(card.sms) {}

  double divide(int64_t max_workspace) {
    return plan_.stores_ds() ? waves(max_workspace) : one_wave(max_workspace);
  }

 private:
  /// A single wave of plans that do not store dS.
  double one_wave(int64_t max_workspace) {
    const int heads = static_cast<int>(p_.batch * work_.heads);
    set_waves({heads, 1, 0});
    plan_.ds_bytes = 0;
    double products = cost_.one_launch(heads);
    if (may_cut(heads) && cost_.one_launch_cut(heads) < products) {
      cut_last_blocks(heads);
      if (max_workspace == 0 || workspace_of(p_, plan_).end <= max_workspace) {
        products = cost_.one_launch_cut(heads);
      } else {
        plan_.cut_blocks = plan_.first_cut_head = 0;
      }
    }
    return products + cost_.dq_accum_cycles();
  }

  double waves(int64_t max_workspace) {
    plan_.score_tiles.pitch = pitch();
    // dS of packed sequences is contiguous if all rows of a head fit; otherwise each sequence has
    // as much memory as the longest.
    const int64_t packed_tiles = packed_row_tiles() * pitch();
    const auto others = [&](bool splits_rows) {  // bytes of the workspace without dS
      plan_.splits_rows = splits_rows;
      plan_.ds_bytes = 0;
      return workspace_of(p_, plan_).end;
    };
    const auto available = [&](bool splits_rows) {
      const int64_t limit = max_ds_bytes(p_);
      return max_workspace == 0 ? limit : std::min(limit, max_workspace - others(splits_rows));
    };
    compact_ = p_.packed && bytes_of(packed_tiles) <= available(false);
    plan_.score_tiles.compact = compact_;
    const int heads = static_cast<int>(compact_ ? work_.heads : p_.batch * work_.heads);
    constexpr int kManyRowWaves = 64;
    WaveShape best, smallest;
    int64_t min_bytes = std::numeric_limits<int64_t>::max();
    for (int row_waves = 1;; row_waves *= 2) {
      const int64_t bytes = bytes_of(compact_ ? packed_tiles : max_tiles(row_waves));
      const bool splits_rows = tiles_of_wave(row_waves) < work_.row_tiles;
      WaveShape shape{1, row_waves, 0};
      if (const int64_t fit = available(splits_rows) / std::max<int64_t>(bytes, 1); fit >= 1) {
        const auto ranges = row_ranges(row_waves);
        for (int limit = static_cast<int>(std::clamp<int64_t>(heads, 1, fit)); limit > 0;
             limit = shape.heads - 1) {
          shape.heads = even_wave(limit);
          shape.cycles = cost_.waves(ranges, shape.heads, heads, compact_);
          if (best.cycles == 0 || shape.cycles < best.cycles) best = shape;
        }
      } else if (others(splits_rows) + bytes < min_bytes) {
        min_bytes = others(splits_rows) + bytes;
        smallest = shape;
      }
      // More launches only if nothing else fits.
      if (compact_ || tiles_of_wave(row_waves) <= work_.row_block_tiles ||
          (row_waves >= kManyRowWaves && best.cycles > 0)) {
        break;
      }
    }
    if (best.cycles == 0) {
      best = smallest;
      best.cycles = cost_.waves(row_ranges(best.row_waves), best.heads, heads, compact_);
    }
    set_waves(best);
    return best.cycles + kRowsCycles;
  }

  /// Whether the last blocks may be cut so that all CTAs end at the same time: if key blocks have
  /// the same length, apart from what a bool mask hides, and their last round does not fill all
  /// SMs. CTAs then read different rows at the same time, so that L2 has to hold all rows of a
  /// section.
  bool may_cut(int heads) const {
    const bool bounded = plan_.has_left || plan_.has_right;
    const bool equal = !p_.packed && (plan_.mask_bits ? !bounded : !plan_.repairs());
    const int64_t blocks = int64_t{work_.key_blocks} * heads;
    return equal && plan_.dq_method == DqMethod::kAtomic && plan_.splits == 1 &&
           work_.row_tiles > 0 && blocks >= 2 * sms_ && blocks % sms_ != 0 &&
           cost_.in_l2(cost_.key_schedule(heads).section_heads);
  }

  /// Cuts one block less than there are SMs. Each SM but one begins with a first part, and each but
  /// one ends with a second part, whose length makes all SMs end at the same time.
  void cut_last_blocks(int heads) {
    const BlockSchedule blocks = cost_.key_schedule(heads);
    plan_.cut_blocks = sms_ - 1;
    plan_.first_cut_head =
        blocks.section_heads *
        section_of(blocks, blocks.blocks * blocks.batch_heads - plan_.cut_blocks);
  }

  /// Row tiles of a wave, which has whole row blocks.
  int tiles_of_wave(int row_waves) const {
    return ceil_div(ceil_div(std::max(work_.row_tiles, 1), row_waves), work_.row_block_tiles) *
           work_.row_block_tiles;
  }
  std::vector<BackwardCost::RowRange> row_ranges(int row_waves) const {
    const int tiles = tiles_of_wave(row_waves);
    std::vector<BackwardCost::RowRange> ranges;
    for (int first = 0; first < std::max(work_.row_tiles, 1); first += tiles) {
      ranges.push_back(cost_.row_range(first, tiles));
    }
    return ranges;
  }

  /// Bytes of dS for `tiles` score tiles of each q head.
  int64_t bytes_of(int64_t tiles) const { return tiles * plan_.tile_bytes() * plan_.split_heads; }

  /// Row tiles of all packed sequences of a head.
  int64_t packed_row_tiles() const {
    return (p_.total_q / kernels::kStatisticsRows + p_.batch + 1) *
           (kernels::kStatisticsRows / work_.tile.rows);
  }

  /// Score tiles for which each row tile has memory; 0 if their number follows from the right bound
  /// alone. Sequences with fewer rows may see more keys, so that this needs equal numbers of rows.
  int pitch() const {
    if (plan_.has_right && !plan_.has_left && !p_.packed && !p_.has(Arg::kSeqUsedQ)) return 0;
    if (!plan_.has_left || !plan_.has_right) return work_.key_blocks;
    const int64_t keys = int64_t{work_.band.left} + work_.band.right + work_.tile.rows;
    return static_cast<int>(
        std::min<int64_t>(work_.key_blocks, (keys + work_.tile.keys - 2) / work_.tile.keys + 1));
  }

  /// The maximum of score tiles of a q head of a sequence over waves of rows.
  int64_t max_tiles(int row_waves) const {
    const int tiles = tiles_of_wave(row_waves);
    int64_t max = 0;
    for (int first = 0; first < work_.row_tiles; first += tiles) {
      max = std::max(max, work_.score_tiles_between({pitch(), 0, false}, first,
                                                    std::min(first + tiles, work_.row_tiles)));
    }
    return max;
  }

  /// The heads of a wave, at most `limit`: whole sequences, or heads of one sequence. There are as
  /// few waves as possible, of about the same size.
  int even_wave(int limit) const {
    const auto even = [](int64_t all, int64_t max_size) {
      return ceil_div(all, std::max(ceil_div(all, max_size), 1));
    };
    return compact_ || limit < work_.heads ? even(work_.heads, limit)
                                           : work_.heads * even(p_.batch, limit / work_.heads);
  }

  void set_waves(const WaveShape& shape) {
    const int tiles = tiles_of_wave(shape.row_waves);
    const int batch = static_cast<int>(p_.batch);
    const int heads = compact_ ? shape.heads : std::min(shape.heads, work_.heads);
    const int batches = compact_ ? batch : std::max(shape.heads / work_.heads, 1);
    plan_.waves.clear();
    for (int b = 0; b < batch; b += batches) {
      for (int h = 0; h < work_.heads; h += heads) {
        for (int first = 0; first < std::max(work_.row_tiles, 1); first += tiles) {
          const Wave wave = {
              h, std::min(heads, work_.heads - h), b, std::min(batches, batch - b), first, tiles};
          plan_.waves.push_back({wave, cost_.key_schedule(wave.heads * wave.batches), {}});
        }
      }
    }
    const int64_t head_tiles = !plan_.stores_ds() ? 0
                               : compact_         ? packed_row_tiles() * pitch()
                                                  : max_tiles(shape.row_waves);
    plan_.score_tiles.head_tiles = static_cast<int>(head_tiles);
    plan_.ds_bytes = bytes_of(head_tiles) * heads * (compact_ ? 1 : batches);
    plan_.splits_rows = tiles < work_.row_tiles;
    set_row_blocks();
  }

  /// Sets the rows of row blocks: larger ones read K less often, but every SM should have one. The
  /// results of a row do not depend on its block.
  void set_row_blocks() {
    const auto row_blocks = [&](const Wave& wave) {
      const int last = std::min(wave.first_tile + wave.tiles, work_.row_tiles);
      const int64_t rows = int64_t{std::max(last - wave.first_tile, 0)} * work_.tile.rows;
      return cost_.schedule(
          ceil_div(rows, plan_.rows_of_block()), wave.heads * wave.batches * plan_.split_heads,
          plan_.has_left && !plan_.has_right ? kernels::kAscending : kernels::kDescending);
    };
    const auto too_few = [&] {
      if (plan_.waves.empty()) return false;
      const BlockSchedule blocks = row_blocks(plan_.waves.at(0).wave);
      return int64_t{blocks.blocks} * blocks.batch_heads < sms_;
    };
    while (plan_.row_tiles > 1 && too_few()) plan_.row_tiles /= 2;
    for (BackwardWave& wave : plan_.waves) wave.row_blocks = row_blocks(wave.wave);
  }

  const Problem& p_;
  BackwardPlan& plan_;
  BackwardWork work_;
  BackwardCost cost_;
  int sms_;
  bool compact_ = false;
};

/// A way to split a kv head: by q heads of its group, and by rows.
struct Splits {
  int heads = 1, rows = 1;
};

/// All splits that may be faster.
std::vector<Splits> splits_of(const Problem& p, const BackwardPlan& plan, const Card& card) {
  std::vector<Splits> all = {{1, 1}};
  // The order of sums over splits, and with it their last bits, would depend on the batch.
  if (p.invariant || !plan.key_gradients || p.sq == 0 || p.sk == 0) return all;
  constexpr int kMaxRowSplits = 64;
  const auto enough = static_cast<double>(kFewKeyBlocks * card.sms);
  const double blocks = static_cast<double>(p.batch * p.hk) * ceil_div(p.sk, plan.block_keys);
  const bool ordered = plan.dq_method == DqMethod::kOrdered;
  const bool together = ordered && !plan.has_left;
  for (int heads = 1; heads <= p.group(); ++heads) {
    if (p.group() % heads != 0) continue;
    // Splits of fewer q heads have fewer rows, so that L2 holds them, which ordered additions need.
    if (heads > 1 && (blocks < enough || together)) all.push_back({heads, 1});
    for (int rows = 2; rows <= kMaxRowSplits; rows += rows < 4 ? 1 : rows) {
      const bool from_diagonals = together && plan.has_right;
      const bool worth = rows * plan.block_rows <= p.sq && blocks * heads * rows <= enough;
      if (!plan.accumulates_dq() || p.packed || from_diagonals || !worth) break;
      all.push_back({heads, rows});
    }
  }
  return all;
}

/// Cycles of the kernel that adds the partial dK and dV of all splits.
double reduce_cycles(const BackwardPlan& plan, const Problem& p, const Card& card) {
  // Memory traffic per element, measured: nearly twice the bytes that are written and read.
  constexpr double kReduceBytes = 14;
  const auto elements = static_cast<double>(p.batch * p.hk * plan.splits * p.sk * (p.d + p.dv));
  return kBackwardLaunchCycles + kReduceBytes * elements / backward_bytes_per_cycle(card);
}

}  // namespace

int64_t max_ds_bytes(const Problem& p) {
  return std::max(int64_t{256} << 20, static_cast<int64_t>(bytes(p)));
}

double plan_waves(BackwardPlan& plan, const Problem& p, const Card& card, int64_t max_workspace) {
  BackwardPlan best;
  double min_cycles = 0;
  int64_t min_bytes = -1;  // the smallest workspace, if no plan fits
  for (const Splits& splits : splits_of(p, plan, card)) {
    BackwardPlan divided = plan;
    divided.splits = splits.heads * splits.rows;
    divided.split_heads = static_cast<int>(p.group()) / splits.heads;
    divided.row_splits = splits.rows;
    double cycles = WavePlanner(p, divided, card).divide(max_workspace);
    if (divided.reduces()) cycles += reduce_cycles(divided, p, card);
    const int64_t bytes = workspace_of(p, divided).end;
    const bool fits = max_workspace == 0 || bytes <= max_workspace;
    const bool better = min_cycles == 0 || (fits ? min_bytes >= 0 || cycles < min_cycles
                                                 : min_bytes >= 0 && bytes < min_bytes);
    if (!better) continue;
    best = std::move(divided);
    min_cycles = cycles;
    min_bytes = fits ? -1 : bytes;
  }
  plan = std::move(best);
  return min_cycles;
}

}  // namespace fulgur::cuda::sm90

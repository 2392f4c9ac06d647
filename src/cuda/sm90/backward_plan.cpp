#include "cuda/sm90/backward_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "cuda/common/host_metadata.h"
#include "cuda/device/launch_memory.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/tensor_map.h"

namespace fulgur::cuda {
namespace {

using kernels::BlockOrder;
using kernels::Blocks;
using kernels::kAlternating;
using kernels::kFirstBlockFirst;
using kernels::kLastBlockFirst;
using kernels::ScoreTile;
using kernels::Wave;

constexpr int kRowsConsumers = 2;  ///< warpgroups of the kernel by rows
constexpr int kMaxBuffers = 6;
constexpr double kBackwardShare = 0.8958;   // of what the memory gives
constexpr double kL2Share = 0.64;           // of L2 that stays there with what passes through it
constexpr double kAddBytesPerCycle = 1800;  // that L2 adds to the sums of dQ
constexpr double kLaunchCycles = 10000;
constexpr double kRowsCycles = 5000;  // that the kernel by rows takes longer than that which rounds
constexpr double kCarry = 15000;      // cycles of a block whose sums come from memory, or go there
constexpr double kCut = 5000;  // cycles of a block cut in two, whose sums go and come with others
constexpr int64_t kFewBlocks = 4;  // of keys, an SM

kernels::BackwardTile tile_of(const HopperBackwardKey& key) {
  return {key.head_dim,   key.value_dim, key.consumers,  key.block_rows,
          key.block_keys, key.k_stages,  key.q_stages,   key.o_stages,
          key.ds_stages,  key.row_tiles, key.row_stages, key.sums_stages};
}

/// How dQ is computed: from sums in no order, sums to which blocks of keys add in turns, or dS that
/// is stored.
enum class Way { kSums, kTurns, kStored };

/// A way to compute the backward pass: one that is tried for every problem.
struct Form {
  Way way;
  int consumers;
};
constexpr Form kForms[] = {{Way::kSums, 2}, {Way::kTurns, 2}, {Way::kStored, 2}, {Way::kSums, 1}};

/// How a call is divided into waves.
struct Division {
  int pairs = 1;      ///< heads of k and v, times sequences unless packed
  int row_waves = 1;  ///< that a sequence is cut into
  double cycles = 0;  ///< predicted
};

/// Lengths that a wave is planned for.
kernels::Lengths planned_lengths(const Problem& p) {
  return {0, 0, static_cast<int>(p.sq), static_cast<int>(p.sk)};
}

/// What the problem fixes.
HopperBackwardPlan common_plan(const Problem& p) {
  HopperBackwardPlan plan;
  static_cast<HopperKey&>(plan) = hopper_key(p);
  plan.dropout = p.dropout_p > 0;
  plan.has_dlse = p.has(Arg::kDlse);
  plan.dsinks = p.has(Arg::kDsinks);
  const BackwardMaps maps = backward_maps(p);
  plan.copies_q = not_addressable(maps.q);
  plan.copies_k = not_addressable(maps.k);
  plan.copies_v = not_addressable(maps.v);
  plan.copies_dout = not_addressable(maps.dout);
  plan.elements = p.d % 8 != 0 || p.dv % 8 != 0;
  for (const TensorMapShape& shape : {maps.dq, maps.dk, maps.dv, maps.out, maps.dout}) {
    plan.elements = plan.elements || !not_addressable(shape).empty();
  }
  return plan;
}

/// Whether rows of Q, K, V and dO are a panel each.
bool is_narrow(const HopperBackwardPlan& plan) {
  return std::max(plan.head_dim, plan.value_dim) <= 64;
}

/// Whether dK and dV of 64 keys need a warpgroup each: the registers of one do not hold both, the
/// derivative of softcap, and what dropout leaves of P.
bool needs_wide(const HopperBackwardPlan& plan) {
  if (plan.softcap && plan.dropout) return std::max(plan.head_dim, plan.value_dim) > 96;
  return plan.head_dim > (plan.softcap || plan.dropout ? 128 : 192) || plan.value_dim > 128;
}

/// The most d and dv for which a warpgroup holds dK and dV where another sums up dQ, with the
/// same.
int max_sums_dim(const HopperBackwardPlan& plan) {
  return plan.softcap ? 64 : plan.dropout ? 96 : 128;
}

/// Whether each SM has one block of so many keys at most.
bool one_round(const Problem& p, int block_keys, int sms) {
  return p.batch * p.hk * ceil_div(p.sk, block_keys) <= sms;
}

/// Whether one warpgroup with 64 keys a CTA is worth trying instead of two with 128: twice as many
/// SMs have work, each for half of the time, but dQ is added up twice as often. It was measured up
/// to so many rows, and loses where keys meet several q heads.
bool is_short(const Problem& p, int sms) {
  constexpr int64_t kMaxRows = 1024;
  return p.sq <= kMaxRows && p.group() == 1 && one_round(p, 64, sms);
}

/// Rows of a step: where rows are panels 128, for less waits, but 64 where a call is so short that
/// the first wait counts more.
int step_rows(const HopperBackwardPlan& plan, const Problem& p, int sms) {
  constexpr int64_t kFewRows = 256;
  const bool unordered = plan.sums && !plan.ordered;
  const bool few = unordered && p.sq <= kFewRows && one_round(p, plan.block_keys, sms);
  return is_narrow(plan) && !plan.softcap && !plan.dropout && !few ? 128 : 64;
}

/// Fills the shared memory with buffers. False when it does not hold two of each.
bool derive_stages(HopperBackwardPlan& plan, int shared_bytes) {
  // A second buffer of K, in which the next block's comes while the last steps of this one go on.
  // Above d 64 it has the room of a second buffer of dS, which is worth more in turns alone: they
  // hold up the warpgroup that takes dS.
  const bool instead_of_ds = !is_narrow(plan) && plan.sums && !plan.ordered;
  plan.k_stages = is_narrow(plan) || instead_of_ds ? 2 : 1;
  plan.ds_stages = instead_of_ds ? 1 : 2;
  // In turns a warp holds a buffer until its addition has arrived, longer than a step of 64 rows.
  plan.sums_stages = !plan.sums ? 0 : plan.ordered && plan.block_rows == 64 ? 3 : 2;
  // As many as registers hold of dQ, and the producer of the places of tiles.
  plan.row_tiles = plan.head_dim > 128 ? 1 : plan.head_dim > 64 || plan.block_rows == 64 ? 2 : 4;
  const auto keys_bytes = [&](int q_stages, int o_stages) {
    plan.q_stages = q_stages;
    plan.o_stages = o_stages;
    return plan.keys_shared_bytes = plan.wide() ? kernels::keys_wide_layout(tile_of(plan)).bytes
                                                : kernels::keys_layout(tile_of(plan)).bytes;
  };
  // A buffer of Q is held for two steps, one of dO for one.
  int q_stages = 2, o_stages = 2;
  if (keys_bytes(q_stages, o_stages) > shared_bytes) return false;
  for (bool grown = true; grown;) {
    grown = false;
    if (q_stages <= o_stages && q_stages < kMaxBuffers &&
        keys_bytes(q_stages + 1, o_stages) <= shared_bytes) {
      ++q_stages;
      grown = true;
    } else if (o_stages < kMaxBuffers && keys_bytes(q_stages, o_stages + 1) <= shared_bytes) {
      ++o_stages;
      grown = true;
    }
  }
  keys_bytes(q_stages, o_stages);
  return true;
}

/// The same for the kernel by rows.
bool derive_row_stages(HopperBackwardPlan& plan, int shared_bytes) {
  for (plan.row_stages = kMaxBuffers; plan.row_stages >= 2; --plan.row_stages) {
    plan.rows_shared_bytes = kernels::rows_layout(tile_of(plan)).bytes;
    if (plan.rows_shared_bytes <= shared_bytes) return true;
  }
  return false;
}

/// Divides a call into waves whose dS fits max_ds_bytes().
class Divider {
 public:
  Divider(const Problem& problem, const HopperBackwardPlan& plan, const Card& card)
      : p_(problem),
        plan_(plan),
        each_(plan.score_tile()),
        band_(band_of(plan, problem.mask)),
        lengths_(planned_lengths(problem)),
        sms_(card.sms),
        bytes_per_cycle_(kBackwardShare * card.bytes_per_cycle),
        l2_bytes_(kL2Share * static_cast<double>(card.l2_bytes)),
        row_tiles_(ceil_div(p_.sq, each_.rows)),
        key_blocks_(std::max(ceil_div(p_.sk, each_.keys), 1)),
        heads_(static_cast<int>(p_.hk * plan.parts)),
        unit_tiles_(plan.rows_of_block() / each_.rows) {}

  /// Sets the plan's waves, the fastest whose workspace takes at most `max_workspace` bytes (0: any
  /// number), or the smallest where none does. Returns the predicted cycles.
  double divide(HopperBackwardPlan& plan, int64_t max_workspace) {
    if (plan.sums) return one_wave(plan, max_workspace);
    plan.score_tiles.pitch = pitch();
    // Packed sequences lie after each other, if all rows of a head fit: else each has as much room
    // as the longest.
    const int64_t rows_of_head = (p_.total_q / kernels::kStatisticsRows + p_.batch + 1) *
                                 (kernels::kStatisticsRows / each_.rows);
    const int64_t packed_tiles = rows_of_head * pitch();
    // Bytes of all but dS, and those that dS may have with them.
    const auto others = [&](bool carries) {
      plan.carries = carries;
      plan.ds_bytes = 0;
      return workspace_of(p_, plan).end;
    };
    const auto room = [&](bool carries) {
      const int64_t most = max_ds_bytes(p_);
      return max_workspace == 0 ? most : std::min(most, max_workspace - others(carries));
    };
    compact_ = p_.packed && bytes_of(packed_tiles) <= room(false);
    plan.score_tiles.compact = compact_;
    const int pairs = static_cast<int>(compact_ ? heads_ : p_.batch * heads_);
    constexpr int kManyRowWaves = 64;
    Division best, smallest;
    int64_t min_bytes = std::numeric_limits<int64_t>::max();
    for (int row_waves = 1;; row_waves *= 2) {
      const int64_t bytes = bytes_of(compact_ ? packed_tiles : max_tiles(row_waves));
      const bool carries = rows_of_wave(row_waves) < row_tiles_;
      Division division{1, row_waves, 0};
      if (const int64_t fit = room(carries) / std::max<int64_t>(bytes, 1); fit >= 1) {
        const std::vector<RowRun> runs = runs_of(row_waves);
        for (int most = static_cast<int>(std::clamp<int64_t>(pairs, 1, fit)); most > 0;
             most = division.pairs - 1) {
          division.pairs = rectangle(most);
          division.cycles = predict(runs, division.pairs, pairs);
          if (best.cycles == 0 || division.cycles < best.cycles) best = division;
        }
      } else if (others(carries) + bytes < min_bytes) {
        min_bytes = others(carries) + bytes;
        smallest = division;
      }
      // More launches than that only where nothing else fits.
      if (compact_ || rows_of_wave(row_waves) <= unit_tiles_ ||
          (row_waves >= kManyRowWaves && best.cycles > 0)) {
        break;
      }
    }
    if (best.cycles == 0) {
      best = smallest;
      best.cycles = predict(runs_of(best.row_waves), best.pairs, pairs);
    }
    set_waves(plan, best);
    return best.cycles + kRowsCycles;
  }

 private:
  /// Sums of dQ need no room for dS. They are set to 0, where no turn begins them, read, and
  /// rounded to what is written.
  double one_wave(HopperBackwardPlan& plan, int64_t max_workspace) {
    const Division all{static_cast<int>(p_.batch * heads_), 1, 0};
    set_waves(plan, all);
    plan.ds_bytes = 0;
    const bool few = !p_.packed && int64_t{key_blocks_} * all.pairs <= kFewBlocks * sms_;
    double products = few ? kLaunchCycles + std::max(end_of_all(all.pairs), cycles_of_adding())
                          : predict(runs_of(1), all.pairs, all.pairs);
    if (may_cut(all.pairs) && cycles_of_cut(all.pairs) < products) {
      cut_last(plan, all.pairs);
      if (max_workspace == 0 || workspace_of(p_, plan).end <= max_workspace) {
        products = cycles_of_cut(all.pairs);
      } else {
        plan.cut_blocks = plan.first_cut_pair = 0;
      }
    }
    const auto floats = static_cast<double>(p_.hq * plan.statistics_rows * plan.head_dim);
    const double rate = (sizeof(float) * floats <= l2_bytes_ ? 2 : 1) * bytes_per_cycle_;
    return products + first_turns() + (plan.ordered ? 6.0 : 11.0) * floats / rate;
  }

  /// Whether blocks of keys have the same length and come in rounds, of which the last one is
  /// incomplete, so that all end together where the last blocks are cut. They are then at all rows
  /// of a bunch at once, which L2 has to hold.
  bool may_cut(int pairs) const {
    const bool equal = !plan_.has_left && !plan_.has_right && !p_.packed;
    const int64_t blocks = int64_t{key_blocks_} * pairs;
    return equal && !plan_.ordered && plan_.parts == 1 && row_tiles_ > 0 && blocks >= 2 * sms_ &&
           blocks % sms_ != 0 && in_l2(key_blocks_of(pairs).bunch);
  }

  /// Each SM but one begins with a first part, and each but one ends with a second
  /// part, of the length that it then lacks.
  void cut_last(HopperBackwardPlan& plan, int pairs) const {
    const Blocks blocks = key_blocks_of(pairs);
    plan.cut_blocks = sms_ - 1;
    plan.first_cut_pair =
        blocks.bunch * bunch_of(blocks, blocks.blocks * blocks.pairs - plan.cut_blocks);
  }
  double cycles_of_cut(int pairs) const {
    const double whole = block_cycles(0, row_tiles_);
    const double all = int64_t{key_blocks_} * pairs * whole + (sms_ - 1) * kCut;
    return kLaunchCycles + all / sms_ + plan_.pair_heads * step_cycles();
  }

  /// Cycles until the last of the blocks that start at once has had its first turn: blocks of a
  /// pair that have the same length begin at the same row, and follow each other a step apart.
  /// Others wait about a step, too.
  double first_turns() const {
    const Blocks blocks = key_blocks_of(static_cast<int>(p_.batch * heads_));
    const bool same = plan_.has_left || !plan_.has_right;
    if (!plan_.ordered) return 0;
    const int together = same && blocks.order == kFirstBlockFirst
                             ? std::min(blocks.blocks, ceil_div(sms_, blocks.bunch))
                             : 1;
    return std::max(together - 1, 1) * step_cycles();
  }

  /// Cycles in which L2 adds what all blocks of keys have of dQ.
  double cycles_of_adding() const {
    int64_t tiles = 0;
    for (int block = 0; block < key_blocks_; ++block) {
      const kernels::RowTiles seen = row_tiles_of(block);
      tiles += seen.end - seen.begin;
    }
    const double floats = static_cast<double>(tiles * p_.batch * p_.hq * each_.rows * p_.d);
    return sizeof(float) * floats / kAddBytesPerCycle;
  }

  int rows_of_wave(int row_waves) const {  // tiles, whole blocks of rows
    return ceil_div(ceil_div(std::max(row_tiles_, 1), row_waves), unit_tiles_) * unit_tiles_;
  }
  int64_t bytes_of(int64_t tiles) const { return tiles * plan_.tile_bytes() * plan_.pair_heads; }

  /// Room for key tiles with a row tile: 0 where the right bound alone decides. Fewer rows may
  /// see more tiles, so that only where all sequences have the same it counts them.
  int pitch() const {
    if (plan_.has_right && !plan_.has_left && !p_.packed && !p_.has(Arg::kSeqUsedQ)) return 0;
    if (!plan_.has_left || !plan_.has_right) return key_blocks_;
    const int64_t keys = int64_t{band_.left} + band_.right + each_.rows;
    return static_cast<int>(
        std::min<int64_t>(key_blocks_, (keys + each_.keys - 2) / each_.keys + 1));
  }

  int64_t tiles_between(int begin, int end) const {
    const kernels::ScoreTiles store{pitch(), 0, false};
    return kernels::tiles_before(store, band_, lengths_, each_, end) -
           kernels::tiles_before(store, band_, lengths_, each_, begin);
  }

  /// Of dS of a q head of a sequence, in the wave of rows that has the most.
  int64_t max_tiles(int row_waves) const {
    const int rows = rows_of_wave(row_waves);
    int64_t most = 0;
    for (int first = 0; first < row_tiles_; first += rows) {
      most = std::max(most, tiles_between(first, std::min(first + rows, row_tiles_)));
    }
    return most;
  }

  /// Whole sequences, or heads of one, or of all: waves of `pairs` pairs at most, as few as that
  /// takes, and of about the same size.
  int rectangle(int pairs) const {
    const auto even = [](int64_t all, int64_t most) {
      return ceil_div(all, std::max(ceil_div(all, most), 1));
    };
    return compact_ || pairs < heads_ ? even(heads_, pairs)
                                      : heads_ * even(p_.batch, pairs / heads_);
  }

  /// Blocks of keys of a pair with a run of rows: cycles of the longest, and of all together.
  struct RowRun {
    double longest = 0, all = 0, scores = 0;
  };

  /// Cycles of a block of keys with row tiles [begin, end).
  double block_cycles(int begin, int end) const {
    const bool stored = !plan_.sums && !plan_.wide();
    const double ends = plan_.consumers == 1 ? 1100
                        : plan_.k_stages > 1 ? 2700
                        : stored             ? 6000
                                             : 4000;
    return ends + std::max(end - begin, 0) * plan_.pair_heads * step_cycles();
  }
  double step_cycles() const {
    constexpr double kUtilization = 0.85, kFlopsPerCycle = 4096;
    const double alone = plan_.consumers == 1 ? 1.25 : 1;  // nothing hides its arithmetic
    return alone * turns() * 4.0 * (p_.d + p_.dv) * each_.rows * each_.keys / kFlopsPerCycle /
           kUtilization;
  }
  kernels::RowTiles row_tiles_of(int block) const {
    return kernels::row_tiles(band_, lengths_, each_.rows, block * each_.keys, each_.keys);
  }

  std::vector<RowRun> runs_of(int row_waves) const {
    const int rows = rows_of_wave(row_waves);
    std::vector<RowRun> runs;
    for (int first = 0; first < std::max(row_tiles_, 1); first += rows) {
      RowRun& run = runs.emplace_back();
      for (int block = 0; block < key_blocks_; ++block) {
        const kernels::RowTiles seen = row_tiles_of(block);
        const int begin = std::max(seen.begin, first), end = std::min(seen.end, first + rows);
        if (begin >= end && first > 0) continue;
        const bool carries = seen.begin < first || seen.end > first + rows;
        const double cycles = block_cycles(begin, end) + (carries ? kCarry : 0);
        run.longest = std::max(run.longest, cycles);
        run.all += cycles;
        run.scores += static_cast<double>(std::max(end - begin, 0) * plan_.pair_heads) *
                      each_.rows * each_.keys;
      }
    }
    return runs;
  }

  /// Cycles until the last block of keys has ended, where SMs take them in their order,
  /// each one as soon as it is free.
  double end_of_all(int pairs) const {
    const int tiles = std::max(ceil_div(row_tiles_, plan_.row_parts), 1);
    std::vector<double> cycles;  // of a block, by parts of rows
    for (int part = 0; part < plan_.row_parts; ++part) {
      for (int block = 0; block < key_blocks_; ++block) {
        const kernels::RowTiles seen = row_tiles_of(block);
        cycles.push_back(block_cycles(std::max(seen.begin, part * tiles),
                                      std::min(seen.end, (part + 1) * tiles)));
      }
    }
    const Blocks blocks = key_blocks_of(pairs);
    std::vector<double> free(static_cast<size_t>(sms_), 0.0);  // the next one first
    double end = 0;
    for (int number = 0; number < blocks.blocks * pairs; ++number) {
      const kernels::BlockOfPair at = block_of(blocks, number);
      std::ranges::pop_heap(free, std::greater());
      free.back() +=
          cycles[static_cast<size_t>(at.pair % plan_.row_parts * key_blocks_ + at.block)];
      end = std::max(end, free.back());
      std::ranges::push_heap(free, std::greater());
    }
    return end;
  }

  /// What turns cost: what they are waited for. Under a right bound alone it is less where more
  /// blocks share a bunch than there are SMs, and more where L2 does not hold the rows
  /// of a bunch, so that blocks have to stay side by side.
  double turns() const {
    if (!plan_.ordered) return 1;
    const bool narrow = is_narrow(plan_);
    const Blocks blocks = key_blocks_of(static_cast<int>(p_.batch * heads_));
    if (blocks.order == kAlternating) {
      constexpr double kShared = 1.5;
      const bool shared = blocks.bunch * blocks.blocks >= kShared * sms_;
      return narrow ? (shared ? 1.0 : 1.1) : 1.08;
    }
    const bool in_line = plan_.has_right && !plan_.has_left && blocks.order == kFirstBlockFirst;
    if (narrow || in_line) return narrow ? 1.0 : 1.25;
    // While a block walks down several q heads, it falls after those with it, and their rows
    // leave L2: the more rounds of blocks a bunch has, the more of them.
    const int rounds = ceil_div(blocks.bunch * blocks.blocks, sms_);
    return 1.04 + (plan_.pair_heads > 1 ? 0.1 * (rounds - 1) : 0);
  }

  /// Waves of so many pairs take turns: one lasts as long as its longest block, and as all of them
  /// take together.
  double predict(const std::vector<RowRun>& runs, int of_wave, int pairs) const {
    // dS is written and read, 2 bytes a score; products hide about half of it.
    constexpr double kDsBytes = 0.45 * 4;
    // Of packed sequences the longest stands for as many as the rows of all would make.
    const double sequences = !p_.packed ? 1
                                        : static_cast<double>(p_.total_k) /
                                              static_cast<double>(std::max<int64_t>(p_.sk, 1)) /
                                              (compact_ ? 1.0 : static_cast<double>(p_.batch));
    // A wave of fewer heads than a sequence has ends with the sequence.
    const int together = std::max(compact_ || of_wave >= heads_ ? pairs : heads_, 1);
    double cycles = 0;
    for (const RowRun& run : runs) {
      const auto wave = [&](int count) {
        if (count == 0) return 0.0;
        const double blocks = run.all * count * sequences / sms_;
        // Equal blocks come in rounds; unequal ones fill the gaps.
        const double rounds = std::ceil(blocks / std::max(run.longest, 1.0)) * run.longest;
        const bool equal = !plan_.has_left && !plan_.has_right;
        // Under a right bound the longest are the first.
        const bool shortest_first =
            plan_.has_right && key_blocks_of(count).order == kLastBlockFirst;
        const double last = (shortest_first ? 0.75 : 0.1) * run.longest;
        return kLaunchCycles + (equal ? rounds : std::max(run.longest, blocks + last));
      };
      const int whole = together / std::max(of_wave, 1), rest = together % std::max(of_wave, 1);
      cycles += static_cast<double>(pairs / together) * (whole * wave(of_wave) + wave(rest));
      if (!plan_.sums) cycles += kDsBytes * run.scores * pairs * sequences / bytes_per_cycle_;
    }
    return cycles;
  }

  /// The SMs share the rows of Q, or the keys, of a bunch of pairs: a block each, and
  /// few are left over, so that the bunch after begins with them.
  Blocks blocks_of(int blocks, int pairs, BlockOrder order) const {
    const int bunch = sms_ / std::max(blocks, 1);
    return with_bunch({blocks, pairs, 1, 1, order}, std::min(bunch, pairs));
  }

  /// Blocks of keys: under a right bound they have different lengths, which decide when the next
  /// ones begin, and rows in common.
  Blocks key_blocks_of(int pairs) const {
    const bool left_alone = plan_.has_left && !plan_.has_right;
    Blocks all = blocks_of(key_blocks_, pairs, left_alone ? kLastBlockFirst : kFirstBlockFirst);
    if (!plan_.sums) return all;
    if (!plan_.has_right || plan_.has_left) {
      // Blocks of the same length that take turns follow each other: more pairs share them, so that
      // fewer wait for one.
      constexpr int kMinPairs = 4;
      const bool same = plan_.ordered && !left_alone;
      return same && all.bunch < kMinPairs ? with_bunch(all, std::min(kMinPairs, pairs)) : all;
    }
    // Parts of rows have blocks of about the same length, but for those that see few of them.
    if (plan_.row_parts > 1) return with_bunch(all, pairs);
    if (p_.packed || (pairs <= 1 && in_l2(1))) {
      if (plan_.ordered) all.order = kLastBlockFirst;
      return all;
    }
    // Not in L2: the first round of blocks stays in line, the second one fills in after it.
    if (!in_l2(all.bunch)) {
      return plan_.ordered ? with_bunch(all, std::min(2 * all.bunch, pairs)) : all;
    }
    // As many bunches the one way as the other, so that long blocks come when short ones have
    // ended.
    all.order = kAlternating;
    int bunch = std::min(all.bunch, pairs / 2);
    if (plan_.ordered) {  // the more pairs share a bunch, the more time there is for turns
      constexpr int kMaxPairs = 8;
      while (bunch < std::min(kMaxPairs, pairs / 2) && in_l2(bunch + 1)) ++bunch;
    }
    all = with_bunch(all, bunch);
    all.bunches -= all.bunches % 2;
    return all;
  }

  static Blocks with_bunch(Blocks all, int bunch) {
    all.bunch = std::max(bunch, 1);
    all.bunches = std::max(all.pairs / all.bunch, 1);
    return all;
  }

  /// Whether L2 holds the rows of so many pairs: Q, dO and the sums of dQ.
  bool in_l2(int pairs) const {
    const double row_bytes = 2.0 * (p_.d + p_.dv) + 4.0 * p_.d;
    return static_cast<double>(pairs * plan_.pair_heads) * static_cast<double>(p_.sq) * row_bytes <=
           l2_bytes_;
  }

  void set_waves(HopperBackwardPlan& plan, const Division& d) {
    const int rows = rows_of_wave(d.row_waves);
    const int batch = static_cast<int>(p_.batch);
    const int heads = compact_ ? d.pairs : std::min(d.pairs, heads_);
    const int batches = compact_ ? batch : std::max(d.pairs / heads_, 1);
    int64_t most = 0;
    plan.waves.clear();
    for (int b = 0; b < batch; b += batches) {
      for (int h = 0; h < heads_; h += heads) {
        for (int first = 0; first < std::max(row_tiles_, 1); first += rows) {
          const Wave wave = {
              h, std::min(heads, heads_ - h), b, std::min(batches, batch - b), first, rows};
          plan.waves.push_back({wave, key_blocks_of(wave.heads * wave.batches), {}});
        }
      }
    }
    const int64_t rows_of_head = (p_.total_q / kernels::kStatisticsRows + p_.batch + 1) *
                                 (kernels::kStatisticsRows / each_.rows);
    most = plan.sums ? 0 : compact_ ? rows_of_head * pitch() : max_tiles(d.row_waves);
    plan.score_tiles.unit = static_cast<int>(most);
    plan.ds_bytes = bytes_of(most) * heads * (compact_ ? 1 : batches);
    plan.carries = rows < row_tiles_;
    share_rows(plan);
  }

  /// Large blocks of rows read K less often, but all SMs should have one; how many
  /// there are depends on the batch, which an invariant call's kernel must not.
  void share_rows(HopperBackwardPlan& plan) const {
    const auto row_blocks = [&](const Wave& wave) {
      const int last = std::min(wave.first_tile + wave.tiles, row_tiles_);
      const int count =
          ceil_div(int64_t{std::max(last - wave.first_tile, 0)} * each_.rows, plan.rows_of_block());
      return blocks_of(count, wave.heads * wave.batches * plan_.pair_heads,
                       plan_.has_left && !plan_.has_right ? kFirstBlockFirst : kLastBlockFirst);
    };
    const auto too_few = [&] {
      if (p_.invariant || plan.waves.empty()) return false;
      const Blocks blocks = row_blocks(plan.waves.at(0).wave);
      return int64_t{blocks.blocks} * blocks.pairs < sms_;
    };
    while (plan.row_tiles > 1 && too_few()) plan.row_tiles /= 2;
    for (BackwardWave& wave : plan.waves) wave.row_blocks = row_blocks(wave.wave);
  }

  const Problem& p_;
  const HopperBackwardPlan& plan_;
  ScoreTile each_;
  kernels::Band band_;
  kernels::Lengths lengths_;
  int sms_;
  double bytes_per_cycle_, l2_bytes_;
  int row_tiles_, key_blocks_, heads_, unit_tiles_;
  bool compact_ = false;
};

/// Every way to divide heads of k and v that may be worth it: into parts of q heads, and of rows.
std::vector<std::pair<int, int>> parts_of(const Problem& p, const HopperBackwardPlan& plan,
                                          const Card& card) {
  std::vector<std::pair<int, int>> all = {{1, 1}};
  // The order of a sum over parts, and with it its last bits, would depend on the batch.
  if (p.invariant || p.sq == 0 || p.sk == 0) return all;
  constexpr int kMaxRowParts = 64;
  const auto enough = static_cast<double>(kFewBlocks * card.sms);
  const double blocks = static_cast<double>(p.batch * p.hk) * ceil_div(p.sk, plan.block_keys);
  const bool in_turns = plan.ordered && !plan.has_left;
  const bool from_diagonals = in_turns && plan.has_right;
  for (int heads = 1; heads <= p.group(); ++heads) {
    if (p.group() % heads != 0) continue;
    // Fewer heads of a pair are also rows that L2 holds, which turns want.
    if (heads > 1 && (blocks < enough || in_turns)) all.emplace_back(heads, 1);
    for (int rows = 2; rows <= kMaxRowParts; rows += rows < 4 ? 1 : rows) {
      const bool worth = rows * plan.block_rows <= p.sq && blocks * heads * rows <= enough;
      if (!plan.sums || p.packed || from_diagonals || !worth) break;
      all.emplace_back(heads, rows);
    }
  }
  return all;
}

/// Divides a call, its heads of k and v whole or in parts: the fastest way that `max_workspace` has
/// room for, or the one that wants the least. Returns the predicted cycles.
double divide(HopperBackwardPlan& plan, const Problem& p, const Card& card, int64_t max_workspace) {
  // Of memory, an element of a sum: it takes nearly twice as long as a write and a read would.
  constexpr double kJoinBytes = 14;
  HopperBackwardPlan best;
  double min_cycles = 0;
  int64_t min_bytes = -1;  // of a plan that does not fit
  for (const auto& [head_parts, row_parts] : parts_of(p, plan, card)) {
    HopperBackwardPlan divided = plan;
    divided.parts = head_parts * row_parts;
    divided.pair_heads = static_cast<int>(p.group()) / head_parts;
    divided.row_parts = row_parts;
    double cycles = Divider(p, divided, card).divide(divided, max_workspace);
    if (divided.joins()) {
      const double sums = static_cast<double>(p.batch * p.hk * divided.parts * p.sk * (p.d + p.dv));
      cycles += kLaunchCycles + kJoinBytes * sums / (kBackwardShare * card.bytes_per_cycle);
    }
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

}  // namespace

BackwardRegisters HopperBackwardKey::registers() const {
  if (consumers == 1) return {24, 240, 152};
  return sums ? BackwardRegisters{24, 208, 72} : BackwardRegisters{24, 240, 24};
}

int HopperBackwardKey::rows_of_block() const {
  return kRowsConsumers * row_tiles * kernels::kPieceRows;
}

int64_t HopperBackwardPlan::sums_floats(int64_t hq) const {
  return sums ? hq * statistics_rows * kernels::panels_of_columns(head_dim) * 64 : 0;
}

HopperBackwardWorkspace workspace_of(const Problem& p, const HopperBackwardPlan& plan) {
  if (p.nothing_to_do() && !plan.dsinks) return {};
  HopperBackwardWorkspace at;
  Arena arena(LaunchMemory::kZeroed);
  const int64_t statistics = p.hq * plan.statistics_rows * int64_t{sizeof(float)};
  at.shift = arena.take(statistics);
  at.delta = arena.take(statistics);
  at.dq_sums = arena.take(plan.sums_floats(p.hq) * int64_t{sizeof(float)});
  at.turns = arena.take(plan.turns(p.hq) * int64_t{sizeof(int)});
  at.zeros = arena.take(plan.sums ? 0 : kernels::kPieceBytes);
  at.ds = arena.take(plan.ds_bytes);
  const bool waits = plan.carries || plan.joins() || plan.cut_blocks > 0;
  const int64_t pairs = p.batch * p.hk * plan.parts - plan.first_cut_pair;
  const int64_t blocks = waits ? pairs * ceil_div(p.sk, plan.block_keys) : 0;
  const int64_t sums = blocks * plan.block_keys * int64_t{sizeof(float)};
  at.carry_dk = arena.take(sums * plan.head_dim);
  at.carry_dv = arena.take(sums * plan.value_dim);
  at.first_parts = arena.take(plan.cut_blocks > 0 ? int64_t{sizeof(int)} : 0);
  const BackwardMaps maps = backward_maps(p);
  const auto copy = [&](const TensorMapShape& shape, const std::string& why) {
    return arena.take(why.empty() ? 0 : copied_bytes(shape));
  };
  at.copies = {copy(maps.q, plan.copies_q), copy(maps.k, plan.copies_k),
               copy(maps.v, plan.copies_v), copy(maps.dout, plan.copies_dout)};
  at.numbers = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

bool HopperBackwardKey::half_p() const { return wide() && dtype == DType::kBF16; }

double HopperBackwardKey::p_log2() const {
  // As f16, P from 2^-26 on is a normal number, and up to 15 finite: a caller's LSE may be less
  // than that of the scores.
  return half_p() ? 12 : 0;
}

int HopperBackwardKey::tile_bytes() const {
  return block_rows / kernels::kPieceRows * (block_keys / kernels::kPieceKeys) *
         kernels::kPieceBytes;
}

std::string backward_rejects(const Problem& p) {
  if (p.dtype != DType::kBF16 && p.dtype != DType::kF16) return "computes bf16 and f16";
  if (p.d > kMaxDim || p.dv > kMaxDim) {
    return fmt::format("computes d and dv up to {}, got {} and {}", kMaxDim, p.d, p.dv);
  }
  if (std::max(p.sq, p.sk) >= kMaxRows) {
    return fmt::format("computes sequences of less than 2^29 rows, got {} of q and {} of k", p.sq,
                       p.sk);
  }
  const BackwardMaps maps = backward_maps(p);
  for (const auto& [name, shape] : {std::pair{"q", &maps.q}, std::pair{"k", &maps.k},
                                    std::pair{"v", &maps.v}, std::pair{"dout", &maps.dout}}) {
    if (const std::string why = map_unsupported(*shape); !why.empty()) {
      return fmt::format("{} {}", name, why);
    }
  }
  // The kernels number blocks and the rows of statistics with ints.
  constexpr double kMax = std::numeric_limits<int>::max();
  const int64_t blocks = (std::max(p.sq, p.sk) + 63) / 64 + 1;
  // Doubles, as with no rows of q there may be any number of its heads.
  const double batch = static_cast<double>(p.batch), heads = batch * static_cast<double>(p.hq);
  if (heads * static_cast<double>(blocks) > kMax ||
      batch * static_cast<double>((p.sq + 127) / 128 * 128) > kMax) {
    return fmt::format("computes up to 2^31 blocks of rows, got {:.0f} heads of {}", heads, blocks);
  }
  return {};
}

int64_t max_ds_bytes(const Problem& p) {
  return std::max(int64_t{256} << 20, static_cast<int64_t>(bytes(p)));
}

std::vector<HopperBackwardTile> backward_candidates(const Problem& p, const Card& card,
                                                    std::vector<std::string>* rejected) {
  std::vector<HopperBackwardTile> tiles;
  for (const auto [way, consumers] : kForms) {
    HopperBackwardTile tile{common_plan(p), 0};
    HopperBackwardPlan& plan = tile.plan;
    const bool sums = way != Way::kStored;
    plan.sums = sums;
    plan.ordered = way == Way::kTurns;
    plan.consumers = consumers;
    plan.block_keys = needs_wide(plan) ? 64 : 64 * consumers;
    plan.block_rows = step_rows(plan, p, card.sms);
    const bool said = plan.ordered || consumers == 1;  // of the first form
    if (consumers == 1 && !is_short(p, card.sms)) continue;
    if (const int most = max_sums_dim(plan); sums && std::max(p.d, p.dv) > most) {
      if (said) continue;
      rejected->push_back(fmt::format("dQ as sums: computes d and dv up to {}{}, got {} and {}",
                                      most,
                                      plan.softcap   ? " with softcap"
                                      : plan.dropout ? " with dropout"
                                                     : "",
                                      p.d, p.dv));
      continue;
    }
    if (sums && p.invariant) {
      if (said) continue;
      rejected->push_back(
          "dQ as sums: whether they fit into the workspace depends on the batch, which an "
          "`invariant` call must not");
      continue;
    }
    if (way == Way::kSums && p.deterministic) {
      if (said) continue;
      rejected->push_back("dQ as sums in no order: the last bits would differ from run to run");
      continue;
    }
    if (!derive_stages(plan, card.shared_bytes)) continue;
    const int64_t rows = kernels::kStatisticsRows;
    plan.statistics_rows = static_cast<int>(p.packed ? (p.total_q / rows + p.batch + 1) * rows
                                                     : p.batch * ceil_div(p.sq, rows) * rows);
    plan.grid = card.sms;
    HopperBackwardPlan roomy = plan;
    tile.cycles = divide(plan, p, card, p.max_workspace);
    if (!derive_row_stages(plan, card.shared_bytes)) continue;
    const double cycles = p.max_workspace > 0 ? divide(roomy, p, card, 0) : tile.cycles;
    if (p.max_workspace > 0 && roomy.waves.size() < plan.waves.size()) {
      rejected->push_back(fmt::format(
          "{} waves instead of {}: {:.3g} of the predicted time, but {} bytes of workspace, "
          "max_workspace is {}",
          roomy.waves.size(), plan.waves.size(), cycles / tile.cycles, workspace_of(p, roomy).end,
          p.max_workspace));
    }
    tiles.push_back(std::move(tile));
  }
  return tiles;
}

Explanation describe(const HopperBackwardPlan& plan) {
  Explanation e;
  e.Br = plan.block_rows;
  e.Bc = plan.block_keys;
  const auto say = [&](std::string sentence) { e.decisions.push_back(std::move(sentence)); };
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("q_stages", plan.q_stages);
  e.details.add("dout_stages", plan.o_stages);
  e.details.add("ds_stages", plan.ds_stages);
  e.details.add("shared_bytes", plan.keys_shared_bytes);
  e.details.add("ctas", plan.grid);
  e.details.add("dq", plan.ordered ? "ordered" : plan.sums ? "atomic" : "stored");
  e.details.add("deterministic", plan.ordered || !plan.sums);
  e.details.add("waves", plan.waves.size());
  e.details.add("ds_bytes", plan.ds_bytes);
  e.details.add("splits", plan.parts);
  e.details.add("cut_k_blocks", plan.cut_blocks);
  e.details.add("carries_dk_dv", plan.carries);
  say(fmt::format(
      "Hopper: blocks of {} keys for dK and dV, {}; steps of {} rows; d {} and dv {} as "
      "computed",
      plan.block_keys, plan.wide() ? "one warpgroup for each of the two" : "64 keys a warpgroup",
      plan.block_rows, plan.head_dim, plan.value_dim));
  say(fmt::format("{} buffers of Q, {} of dO, {} of dS: {} bytes of shared memory", plan.q_stages,
                  plan.o_stages, plan.ds_stages, plan.keys_shared_bytes));
  if (plan.sums) {
    say(fmt::format("dQ as sums in f32, by a warpgroup with those of dK and dV: {}",
                    plan.ordered ? "blocks of keys add in turns, deterministic"
                                 : "in no fixed order, not deterministic"));
  } else if (!plan.waves.empty()) {
    say(fmt::format(
        "dQ by a kernel of its own, blocks of {} rows, from dS in memory: deterministic",
        plan.rows_of_block()));
    const Wave& wave = plan.waves.at(0).wave;
    say(fmt::format("{} waves of {} {} of {} sequences{}: {} bytes of dS", plan.waves.size(),
                    wave.heads, plan.joins() ? "parts of groups" : "kv heads", wave.batches,
                    plan.carries ? fmt::format(", {} rows each, dK and dV carried on in f32",
                                               wave.tiles * plan.block_rows)
                                 : "",
                    plan.ds_bytes));
  }
  if (plan.joins()) {
    say(fmt::format(
        "blocks of keys meet {} q heads of their group{}: dK and dV of the {} parts are added up "
        "by a kernel of their own",
        plan.pair_heads,
        plan.row_parts > 1 ? fmt::format(" and one of {} runs of rows", plan.row_parts) : "",
        plan.parts));
  }
  if (plan.cut_blocks > 0) {
    say(fmt::format(
        "the rows of the last {} blocks of keys are cut: a part of each comes before all other "
        "blocks and the rest after them, so that SMs end together",
        plan.cut_blocks));
  }
  describe_copies({{"q", plan.copies_q},
                   {"k", plan.copies_k},
                   {"v", plan.copies_v},
                   {"dout", plan.copies_dout}},
                  e);
  if (plan.dsinks) {
    say("dsinks by a kernel of its own, a CTA a head, in f64: deterministic");
  }
  if (plan.elements) {
    e.details.add("stores_elements", true);
    say("gradients are stored by elements: rows are no multiples of 16 bytes");
  }
  return e;
}

}  // namespace fulgur::cuda

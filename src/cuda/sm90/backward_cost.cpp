#include "cuda/sm90/backward_cost.h"

#include <algorithm>
#include <cmath>
#include <functional>

namespace fulgur::cuda::sm90 {
namespace {

using kernels::BlockOrder;
using kernels::BlockSchedule;
using kernels::kAlternating;
using kernels::kAscending;
using kernels::kDescending;

constexpr double kMemoryFraction = 0.8958;  // of the memory bandwidth
constexpr double kL2Fraction = 0.64;  // of L2 that keeps its lines while other data stream through
constexpr double kAddBytesPerCycle = 1800;  // of additions to dq_accum in L2
constexpr double kPartialCycles = 15000;    // of a block that loads or stores partial dK and dV
constexpr double kCutCycles =
    5000;  // of a block cut in two, whose partial results overlap with other work
constexpr int kMinOrderedHeads = 4, kMaxOrderedHeads = 8;  // per section

BlockSchedule with_section(BlockSchedule all, int heads) {
  all.section_heads = std::max(heads, 1);
  all.sections = std::max(all.batch_heads / all.section_heads, 1);
  return all;
}

}  // namespace

double backward_bytes_per_cycle(const Card& card) { return kMemoryFraction * card.bytes_per_cycle; }

bool has_one_panel(const BackwardKey& key) { return std::max(key.head_dim, key.value_dim) <= 64; }

BackwardWork::BackwardWork(const Problem& p, const BackwardPlan& plan)
    : tile(plan.score_tile()),
      band(band_of(plan, p)),
      lengths{0, 0, static_cast<int>(p.sq), static_cast<int>(p.sk)},
      row_tiles(ceil_div(p.sq, tile.rows)),
      key_blocks(std::max(ceil_div(p.sk, tile.keys), 1)),
      heads(static_cast<int>(p.hk * plan.splits)),
      row_block_tiles(plan.rows_of_block() / tile.rows) {}

int64_t BackwardWork::score_tiles_between(const kernels::ScoreTiles& store, int begin,
                                          int end) const {
  return kernels::tiles_before(store, band, lengths, tile, end) -
         kernels::tiles_before(store, band, lengths, tile, begin);
}

BackwardCost::BackwardCost(const Problem& p, const BackwardPlan& plan, const BackwardWork& work,
                           const Card& card)
    : p_(p),
      plan_(plan),
      work_(work),
      sms_(card.sms),
      bytes_per_cycle_(backward_bytes_per_cycle(card)),
      l2_bytes_(kL2Fraction * static_cast<double>(card.l2_bytes)) {}

BlockSchedule BackwardCost::schedule(int blocks, int batch_heads, BlockOrder order) const {
  const int heads = sms_ / std::max(blocks, 1);
  return with_section({blocks, batch_heads, 1, 1, order}, std::min(heads, batch_heads));
}

BlockSchedule BackwardCost::key_schedule(int batch_heads) const {
  const bool ordered = plan_.dq_method == DqMethod::kOrdered;
  const bool left_alone = plan_.has_left && !plan_.has_right;
  BlockSchedule all =
      schedule(work_.key_blocks, batch_heads, left_alone ? kDescending : kAscending);
  if (!plan_.accumulates_dq()) return all;
  if (!plan_.has_right || plan_.has_left) {
    // With ordered additions, blocks of the same length wait for each other. With more heads in a
    // section fewer blocks wait for one.
    const bool same = ordered && !left_alone;
    return same && all.section_heads < kMinOrderedHeads
               ? with_section(all, std::min(kMinOrderedHeads, batch_heads))
               : all;
  }
  // Splits of rows have blocks of about the same length, except those that see few rows. If all
  // blocks run at the same time, they start one after another while the previous kernel ends, and
  // the longest ones should start first.
  const bool one_round = int64_t{work_.key_blocks} * batch_heads <= sms_;
  if (plan_.row_splits > 1 || (one_round && !ordered && !p_.packed)) {
    return with_section(all, batch_heads);
  }
  if (p_.packed || (batch_heads <= 1 && in_l2(1))) {
    if (ordered) all.order = kDescending;
    return all;
  }
  // If L2 does not hold the rows of a section, its blocks have to iterate over rows in step.
  if (!in_l2(all.section_heads)) {
    return ordered ? with_section(all, std::min(2 * all.section_heads, batch_heads)) : all;
  }
  // Sections alternate between ascending and descending order, so that long blocks begin when short
  // ones have ended. The number of sections is even.
  all.order = kAlternating;
  int heads = std::min(all.section_heads, batch_heads / 2);
  if (ordered) {  // with more heads in a section there is more time for each addition
    while (heads < std::min(kMaxOrderedHeads, batch_heads / 2) && in_l2(heads + 1)) ++heads;
  }
  all = with_section(all, heads);
  all.sections -= all.sections % 2;
  return all;
}

bool BackwardCost::in_l2(int batch_heads) const {
  const double row_bytes = 2.0 * (p_.d + p_.dv) + 4.0 * p_.d;
  return static_cast<double>(batch_heads * plan_.split_heads) * static_cast<double>(p_.sq) *
             row_bytes <=
         l2_bytes_;
}

/// Cycles of a key block with row tiles [begin, end).
double BackwardCost::block_cycles(int begin, int end) const {
  const bool stored = plan_.stores_ds() && !plan_.wide();
  const double ends = plan_.consumers == 1 ? 1100
                      : plan_.k_stages > 1 ? 2700
                      : stored             ? 6000
                                           : 4000;
  return ends + std::max(end - begin, 0) * plan_.split_heads * step_cycles();
}

double BackwardCost::step_cycles() const {
  constexpr double kUtilization = 0.85, kFlopsPerCycle = 4096;
  const double alone =
      plan_.consumers == 1 ? 1.25 : 1;  // no other warpgroup overlaps its softmax with products
  const double products = plan_.key_gradients ? 4.0 : 2.0;
  // With a bool mask each score needs a load of a byte and a comparison, or a selection by a bit.
  constexpr double kOfBytes = 1.3, kOfBits = 1.08;
  const bool is_bool = plan_.bias == 1 + kernels::kBool;
  const double masked = plan_.mask_bits ? kOfBits : is_bool ? kOfBytes : 1;
  return alone * masked * semaphore_factor() * products * (p_.d + p_.dv) * work_.tile.rows *
         work_.tile.keys / kFlopsPerCycle / kUtilization;
}

/// The factor by which semaphores prolong steps. With a right bound alone it is smaller if a
/// section has more blocks than there are SMs, and larger if L2 does not hold the rows of a
/// section, so that blocks have to iterate in step.
double BackwardCost::semaphore_factor() const {
  if (plan_.dq_method != DqMethod::kOrdered) return 1;
  const bool one_panel = has_one_panel(plan_);
  const BlockSchedule blocks = key_schedule(static_cast<int>(p_.batch * work_.heads));
  if (blocks.order == kAlternating) {
    constexpr double kShared = 1.5;
    const bool shared = blocks.section_heads * blocks.blocks >= kShared * sms_;
    return one_panel ? (shared ? 1.0 : 1.1) : 1.08;
  }
  const bool in_step = plan_.has_right && !plan_.has_left && blocks.order == kAscending;
  if (one_panel || in_step) return one_panel ? 1.0 : 1.25;
  // A block that iterates over several q heads falls behind the other blocks, so that rows leave L2
  // before it reads them: the more rounds of blocks a section has, the more.
  const int rounds = ceil_div(blocks.section_heads * blocks.blocks, sms_);
  return 1.04 + (plan_.split_heads > 1 ? 0.1 * (rounds - 1) : 0);
}

/// Cycles until all blocks that start at the same time have made their first ordered addition.
/// Blocks of a head with the same length begin at the same row, so each waits one step longer than
/// the previous one. Other blocks wait for about one step.
double BackwardCost::first_semaphore_cycles() const {
  if (plan_.dq_method != DqMethod::kOrdered) return 0;
  const BlockSchedule blocks = key_schedule(static_cast<int>(p_.batch * work_.heads));
  const bool same = plan_.has_left || !plan_.has_right;
  const int together = same && blocks.order == kAscending
                           ? std::min(blocks.blocks, ceil_div(sms_, blocks.section_heads))
                           : 1;
  return std::max(together - 1, 1) * step_cycles();
}

/// Cycles to add dQ of all key blocks in L2.
double BackwardCost::addition_cycles() const {
  if (!plan_.accumulates_dq()) return 0;
  int64_t tiles = 0;
  for (int block = 0; block < work_.key_blocks; ++block) {
    const kernels::RowTiles seen = work_.row_tiles_of(block);
    tiles += seen.end - seen.begin;
  }
  const double floats = static_cast<double>(tiles * p_.batch * p_.hq * work_.tile.rows * p_.d);
  return sizeof(float) * floats / kAddBytesPerCycle;
}

/// Cycles until the last key block has ended, if each SM computes the next one as soon as it is
/// free.
double BackwardCost::list_cycles(int batch_heads) const {
  const int tiles = std::max(ceil_div(work_.row_tiles, plan_.row_splits), 1);
  std::vector<double> cycles;  // of a block of each split of rows
  for (int split = 0; split < plan_.row_splits; ++split) {
    for (int block = 0; block < work_.key_blocks; ++block) {
      const kernels::RowTiles seen = work_.row_tiles_of(block);
      cycles.push_back(block_cycles(std::max(seen.begin, split * tiles),
                                    std::min(seen.end, (split + 1) * tiles)));
    }
  }
  const BlockSchedule blocks = key_schedule(batch_heads);
  std::vector<double> free(static_cast<size_t>(sms_),
                           0.0);  // when each SM is free: a heap, the earliest first
  double end = 0;
  for (int number = 0; number < blocks.blocks * batch_heads; ++number) {
    const kernels::BlockOfHead at = block_of(blocks, number);
    std::ranges::pop_heap(free, std::greater());
    free.back() +=
        cycles[static_cast<size_t>(at.batch_head % plan_.row_splits * work_.key_blocks + at.block)];
    end = std::max(end, free.back());
    std::ranges::push_heap(free, std::greater());
  }
  return end;
}

BackwardCost::RowRange BackwardCost::row_range(int first_tile, int tiles) const {
  RowRange range;
  for (int block = 0; block < work_.key_blocks; ++block) {
    const kernels::RowTiles seen = work_.row_tiles_of(block);
    const int begin = std::max(seen.begin, first_tile);
    const int end = std::min(seen.end, first_tile + tiles);
    if (begin >= end && first_tile > 0) continue;
    const bool partial = seen.begin < first_tile || seen.end > first_tile + tiles;
    const double cycles = block_cycles(begin, end) + (partial ? kPartialCycles : 0);
    range.longest = std::max(range.longest, cycles);
    range.all += cycles;
    range.scores += static_cast<double>(std::max(end - begin, 0) * plan_.split_heads) *
                    work_.tile.rows * work_.tile.keys;
  }
  return range;
}

double BackwardCost::waves(const std::vector<RowRange>& ranges, int wave_heads, int batch_heads,
                           bool compact) const {
  // dS is written and read, 2 bytes per score; about half of it overlaps with products.
  constexpr double kDsBytes = 0.45 * 4;
  // Packed sequences count as so many of the longest one as have all rows.
  const double sequences = !p_.packed ? 1
                                      : static_cast<double>(p_.total_k) /
                                            static_cast<double>(std::max<int64_t>(p_.sk, 1)) /
                                            (compact ? 1.0 : static_cast<double>(p_.batch));
  // A wave of fewer heads than a sequence has does not continue with the next sequence.
  const int together =
      std::max(compact || wave_heads >= work_.heads ? batch_heads : work_.heads, 1);
  double cycles = 0;
  for (const RowRange& range : ranges) {
    const auto wave = [&](int heads) {
      if (heads == 0) return 0.0;
      const double blocks = range.all * heads * sequences / sms_;
      // Equal blocks run in rounds; unequal blocks fill the gaps.
      const double rounds = std::ceil(blocks / std::max(range.longest, 1.0)) * range.longest;
      const bool equal = !plan_.has_left && !plan_.has_right;
      // With a right bound the longest blocks are first in ascending order.
      const bool shortest_first = plan_.has_right && key_schedule(heads).order == kDescending;
      const double last = (shortest_first ? 0.75 : 0.1) * range.longest;
      return kBackwardLaunchCycles + (equal ? rounds : std::max(range.longest, blocks + last));
    };
    const int whole = together / std::max(wave_heads, 1), rest = together % std::max(wave_heads, 1);
    cycles += static_cast<double>(batch_heads / together) * (whole * wave(wave_heads) + wave(rest));
    if (plan_.stores_ds()) {
      cycles += kDsBytes * range.scores * batch_heads * sequences / bytes_per_cycle_;
    }
  }
  return cycles;
}

double BackwardCost::one_launch(int batch_heads) const {
  const bool few = !p_.packed && int64_t{work_.key_blocks} * batch_heads <= kFewKeyBlocks * sms_;
  if (few) return kBackwardLaunchCycles + std::max(list_cycles(batch_heads), addition_cycles());
  return waves({row_range(0, std::max(work_.row_tiles, 1))}, batch_heads, batch_heads, false);
}

double BackwardCost::one_launch_cut(int batch_heads) const {
  const double whole = block_cycles(0, work_.row_tiles);
  const double all = int64_t{work_.key_blocks} * batch_heads * whole + (sms_ - 1) * kCutCycles;
  return kBackwardLaunchCycles + all / sms_ + plan_.split_heads * step_cycles();
}

double BackwardCost::dq_accum_cycles() const {
  if (!plan_.accumulates_dq()) return 0;
  // Bytes of memory traffic per element: it is cleared unless the first addition is a store, then
  // read, and written rounded.
  const double bytes = plan_.dq_method == DqMethod::kOrdered ? 6.0 : 11.0;
  const auto floats = static_cast<double>(p_.hq * plan_.statistics_rows * plan_.head_dim);
  const double rate = (sizeof(float) * floats <= l2_bytes_ ? 2 : 1) * bytes_per_cycle_;
  return first_semaphore_cycles() + bytes * floats / rate;
}

}  // namespace fulgur::cuda::sm90

#include "cuda/decode/cost.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cuda/decode/division.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

// Measured on an H100 (notes/decode_cost.md) in cycles of 1755 MHz, except kDecodeShare and those
// of codes, which were measured on an H200. Rates are in bytes or flops per cycle. Of two numbers
// the first one is the warp path's and the second one the warpgroup path's.

// Reading.
constexpr double kDecodeShare = 0.917;  ///< of the bandwidth of memory, with all SMs
constexpr double kIdleLoss = 0.14;      ///< of that share, where kIdleSms SMs or more have no CTA
constexpr double kIdleSms = 21;
constexpr double kSlicesLoss = 0.02;      ///< of it, where CTAs read different heads and sequences
constexpr double kCodeSlicesLoss = 0.15;  ///< of the time, where such CTAs convert codes
constexpr double kSmBytes = 41;           ///< that one SM reads
constexpr double kProductFlops = 3420;    ///< of one SM, by wgmma
constexpr double kWideFlops = 2800;       ///< likewise, of wide heads
constexpr double kWarpProducts = 0.5;  ///< of the rate of mma.sync, where loads wait for products
constexpr double kSmCodes = 18;        ///< that one SM converts, for wgmma
constexpr double kSmCodesAbove128 = 9.3;    ///< likewise, of heads of more than 128 columns
constexpr double kKeyOfCodes = 9.5;         ///< besides, for each key of others
constexpr double kShortConversion = 0.8;    ///< of that time, where codes are only converted
constexpr double kManyRows = 1.3;           ///< of that time, with tiles of 128 rows
constexpr double kSmCodesInRegisters = 17;  ///< likewise, and multiplies, in registers
constexpr double kKeyInRegisters = 5;       ///< besides, for each key
// A work tile.
constexpr double kStart[] = {0, 3400};        ///< before the first one, beyond any launch's
constexpr double kNextTile[] = {1350, 1520};  ///< between two of them
constexpr double kRowOfO[] = {890, 180};  ///< of 128 columns that warp groups exchange, for a warp
constexpr double kPageIds = 570;  ///< until the first ids are there, where an SM has one CTA
// A schedule.
constexpr double kFindSlice = 390;       ///< until a CTA knows its slice
constexpr double kFindLongest = 430;     ///< until it knows the longest q block, for round robin
constexpr double kRankSequences = 2900;  ///< until Dynamic has ranked all sequences by length
constexpr double kRankSequence = 39;     ///< of that, for each sequence
// Splits.
constexpr double kStorePartial = 1200;  ///< a partial result
constexpr double kPartialBytes = 15.6;  ///< of a partial result that a CTA stores
constexpr double kTicket = 1700;        ///< until the last CTA at a q block knows that it is
constexpr double kLoads = 1560;         ///< of the partial results that a warp loads at once
constexpr double kCombineBytes = 57;    ///< of partial results that a CTA loads
constexpr double kCombineLaunch = 740;  ///< of combine.cu
constexpr double kCombineWave = 2440;   ///< of kWaveWarps warps of combine.cu on each SM
constexpr double kWaveWarps = 8;
// The kinds of lengths that a call may have, by how often a plan expects them.
constexpr double kAlikeWeight = 0.6, kSpreadWeight = 0.2, kOneLongWeight = 0.2;

// As in kernels/decode/combine.cuh.
constexpr int kMaxSplitsAtOnce = 64, kMaxSplitRows = 512;  ///< that one CTA combines
int splits_per_group(int splits) { return splits <= 24 ? 4 : splits <= 80 ? 8 : 16; }

class DecodeCost {
 public:
  DecodeCost(const DecodePlan& plan, const Problem& p) : plan_(plan), p_(p) {
    const int64_t rows = rows_of_kv_head(p);
    rows_ = p.of_groups ? ceil_div(rows, p.batch) : rows;
    blocks_ = std::max(ceil_div(rows_, plan.q_block_rows()), 1);
    rows_ = std::min<int64_t>(rows_, plan.block_rows());
    key_bytes_ = plan.heads * static_cast<double>(p.key_bytes()) / static_cast<double>(p.hk);
    // V that has the strides of wider rows of K lies in these.
    if (plan.is_wide_by_warpgroups() && may_have_v_in_k(p, plan) && p.dv < p.d)
      key_bytes_ = static_cast<double>(bytes_of(p.dtypes.k, p.d));
  }

  double cycles(const std::vector<QBlocks>& q_blocks) const {
    const Division division = divide(q_blocks, plan_, p_);
    double cycles = start() + schedule() + reading(division) + (division.tiles - 1) * next_tile();
    if (!division.whole()) cycles += storing_partials(division);
    if (plan_.has_combine_kernel() && plan_.max_splits > 1)
      cycles += combining_by_kernel(division.splits, count_of(q_blocks));
    else if (!division.whole())
      cycles += combining(division);
    return cycles;
  }

  /// The q blocks of a call whose sequences all have sk keys.
  std::vector<QBlocks> alike() const { return {{p_.batch * p_.hk * blocks_, chunks(p_.sk)}}; }
  /// The q blocks of a call in which one sequence has sk keys, and all others have few.
  std::vector<QBlocks> one_long() const {
    const int64_t few = std::min(p_.sk, std::max<int64_t>(p_.sk / 64, 100));
    return {{p_.hk * blocks_, chunks(p_.sk)}, {(p_.batch - 1) * p_.hk * blocks_, chunks(few)}};
  }

  /// The q blocks of a call whose lengths are spread evenly from a quarter of sk to sk.
  std::vector<QBlocks> spread() const {
    std::vector<QBlocks> q_blocks;
    for (int i = 4; i > 0; --i) {
      const int64_t sequences = p_.batch * (5 - i) / 4 - p_.batch * (4 - i) / 4;
      q_blocks.push_back({sequences * p_.hk * blocks_, chunks(p_.sk * i / 4)});
    }
    std::erase_if(q_blocks, [](const QBlocks& q) { return q.count == 0; });
    q_blocks[0].chunks = chunks(p_.sk);
    return q_blocks;
  }

  /// Cycles for a key of a kv head, which all of its q blocks see: those of memory when all SMs
  /// read, and those of the products on one SM.
  double memory_cycles() const { return key_bytes_ / (kDecodeShare * plan_.card.bytes_per_cycle); }
  double product_cycles() const {
    // On Hopper memory binds on the warp path.
    const bool hidden = plan_.has_wgmma() && !plan_.warpgroup_path();
    if (hidden) return 0;
    const double flops = plan_.is_wide_by_warpgroups() ? kWideFlops
                         : plan_.warpgroup_path()
                             ? kProductFlops
                             : kWarpProducts * mma_rate(plan_.dtypes.q, plan_.card);
    const double columns = plan_.head_dim + plan_.value_dim;
    const double of_block = 2.0 * plan_.block_rows() * columns / flops;
    if (plan_.converts_in_registers())
      return blocks_ * (kKeyInRegisters + columns / kSmCodesInRegisters);
    return blocks_ * (plan_.convert_warps > 0 ? std::max(of_block, converting()) : of_block);
  }

 private:
  /// Cycles that warps of one SM take to convert a key.
  double converting() const {
    const double columns = plan_.head_dim + plan_.value_dim;
    const bool above_128 = std::max(plan_.head_dim, plan_.value_dim) > 128;
    const double cycles = above_128 ? columns / kSmCodesAbove128 : kKeyOfCodes + columns / kSmCodes;
    return cycles * (plan_.converts_long() ? 1 : kShortConversion) *
           (plan_.block_rows() > 64 ? kManyRows : 1);
  }
  int path() const { return plan_.warpgroup_path() ? 1 : 0; }
  int chunks(int64_t keys) const { return ceil_div(keys, kernels::chunk_keys(plan_.block_keys)); }
  /// Warps of a CTA that compute.
  int warps() const { return plan_.warp_groups * plan_.warps_per_group * plan_.column_groups; }
  double columns() const { return plan_.value_dim / 128.0; }
  double partial_bytes() const {
    return sizeof(float) * static_cast<double>(rows_) *
           kernels::partial_row_floats(plan_.value_dim);
  }

  /// Warp groups combine O through shared memory.
  double exchange() const {
    return plan_.is_wide() ? 0 : kRowOfO[path()] * plan_.tile_rows * columns() / warps();
  }
  double start() const {
    return kStart[path()] + exchange() + (plan_.page > 0 && plan_.residents == 1 ? kPageIds : 0);
  }
  double next_tile() const { return kNextTile[path()] + exchange(); }

  double schedule() const {
    switch (plan_.schedule) {
      case DecodeSchedule::kSplitToFill:
        return 0;
      case DecodeSchedule::kStreamKOrRoundRobin:
        return kFindSlice + kFindLongest;
      case DecodeSchedule::kDynamic:
        return kRankSequences + kRankSequence * static_cast<double>(p_.batch);
      case DecodeSchedule::kStreamK:
      case DecodeSchedule::kInvariantSplits:
        break;
    }
    return kFindSlice;
  }

  /// All CTAs read at the same rate. CTAs with more chunks go on when the others have ended, and
  /// may then read faster.
  double reading(const Division& division) const {
    const double chunk_keys = kernels::chunk_keys(plan_.block_keys);
    double cycles = 0, ctas = 0;
    for (size_t i = 0; i < division.ctas.size(); ++i) {
      ctas += division.ctas[i].count;
      const double next = i + 1 < division.ctas.size() ? division.ctas[i + 1].chunks : 0;
      const double sms = std::min(ctas * plan_.row_blocks / plan_.residents, 1.0 * plan_.card.sms);
      const double idle = std::min(1.0, (plan_.card.sms - sms) / kIdleSms);
      const double memory = ctas * memory_cycles() / blocks_ / (1 - kIdleLoss * idle) *
                            (division.slices ? 1 + kSlicesLoss : 1);
      const double sm =
          plan_.residents * std::max(key_bytes_ / kSmBytes, product_cycles() / blocks_);
      // Rows of codes and scales of one head are no whole sectors of memory. Those of the other
      // heads are still in L2 where CTAs read heads of the same sequences at the same time.
      const bool of_codes = plan_.warpgroup_path() && plan_.has_codes();
      const double loss = division.slices && of_codes ? kCodeSlicesLoss : 0;
      cycles += chunk_keys * (division.ctas[i].chunks - next) * std::max(memory, sm) * (1 + loss);
    }
    return cycles;
  }

  /// A CTA stores a partial result of the q block in which its slice begins, and one of the q block
  /// in which it ends.
  double storing_partials(const Division& division) const {
    const bool two = division.tiles > 1 && plan_.schedule != DecodeSchedule::kDynamic;
    return (two ? 2 : 1) * (kStorePartial + partial_bytes() / kPartialBytes);
  }

  double combining(const Division& division) const {
    const int splits = division.splits;
    if (plan_.schedule == DecodeSchedule::kDynamic && plan_.warpgroup_path() &&
        splits > kernels::kFewSplits) {
      // All CTAs combine them at the end.
      return kTicket + ceil_div(splits, 4) * kLoads + splits * partial_bytes() / 16 / kCombineBytes;
    }
    if (splits <= kMaxSplitsAtOnce && splits * rows_ <= kMaxSplitRows)
      return combining_by_cta(splits);
    const int each = splits_per_group(splits);
    return combining_by_cta(each) + combining_by_cta(ceil_div(splits, each));
  }

  /// Cycles of the combining by the CTA that finishes a q block last, or a group of its splits.
  double combining_by_cta(int splits) const {
    // The rows and splits that a warp loads at a time.
    int rows = plan_.heads > 1 ? 1 : plan_.warps_per_group, splits_at_once = rows == 1 ? 20 : 8;
    if (plan_.is_wide()) rows = 2;
    if (plan_.warpgroup_path()) {
      rows = splits <= 2 ? 8 : 4;
      splits_at_once = splits <= 2 ? 2 : 4;
    }
    const double times = std::ceil(columns()) * ceil_div(ceil_div(rows_, rows), warps()) *
                         ceil_div(splits, splits_at_once);
    return kTicket + times * kLoads + splits * partial_bytes() / kCombineBytes;
  }

  double combining_by_kernel(int splits, int64_t q_blocks) const {
    const int eights = plan_.combine_eights;
    const double warps = static_cast<double>(q_blocks * plan_.row_blocks) * ceil_div(rows_, 16) *
                         ceil_div(plan_.value_dim / 8, eights);
    return kCombineLaunch + ceil_div(splits * eights, 16) * kLoads +
           kCombineWave * warps / (kWaveWarps * plan_.card.sms);
  }

  const DecodePlan& plan_;
  const Problem& p_;
  int64_t rows_;  ///< of a q block
  int blocks_;    ///< of rows of a kv head
  double key_bytes_;
};

}  // namespace

double decode_cycles(const DecodePlan& plan, const Problem& p) {
  const DecodeCost cost(plan, p);
  return cost.cycles(cost.alike());
}

double expected_decode_cycles(const DecodePlan& plan, const Problem& p) {
  const DecodeCost cost(plan, p);
  const double alike = cost.cycles(cost.alike());
  if (p.alike() || p.batch <= 1) return alike;
  return kAlikeWeight * alike + kSpreadWeight * cost.cycles(cost.spread()) +
         kOneLongWeight * cost.cycles(cost.one_long());
}

bool memory_binds(const DecodePlan& plan, const Problem& p) {
  const DecodeCost cost(plan, p);
  return cost.memory_cycles() >= plan.row_blocks * cost.product_cycles() / plan.card.sms;
}

}  // namespace fulgur::cuda::decode

#include "cuda/decode/cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

// Measured on an H100 (notes/decode_cost.md) in cycles of 1755 MHz, but for kDecodeShare, which an
// H200 gave. Bytes are of a cycle, and where there are two numbers the second one is the warpgroup
// path's.

// Reading.
constexpr double kDecodeShare = 0.917;  // of what the memory gives, by all SMs
constexpr double kIdleLoss = 0.14;      // of it, where kIdleSms SMs or more have no CTA
constexpr double kIdleSms = 21;
constexpr double kSlicesLoss = 0.02;    // of it, where each CTA reads other heads and sequences
constexpr double kSmBytes = 41;         // that one SM reads
constexpr double kProductFlops = 3420;  // of one SM, by wgmma
constexpr double kWarpProducts = 0.5;   // of the rate of mma.sync, where loads wait for products
// A work tile.
constexpr double kStart[] = {0, 3400};        // of the first one, beyond what any launch takes
constexpr double kNextTile[] = {1350, 1520};  // between one and the next
constexpr double kRowOfO[] = {890, 180};  // that warps exchange: each of its rows, of 128 columns
constexpr double kPageIds = 570;          // until the first are there, if no other CTA reads
// A schedule.
constexpr double kFindSlice = 390;       // of a CTA, in all q blocks
constexpr double kFindLongest = 430;     // q block, for round robin
constexpr double kRankSequences = 2900;  // by length, for the dynamic scheduler
constexpr double kRankSequence = 39;     // each
// Splits.
constexpr double kLeavePartial = 1200;  // to store what a CTA has of a q block
constexpr double kPartialBytes = 15.6;  // of that
constexpr double kTicket = 1700;        // until the last CTA at a q block knows that it is
constexpr double kLoads = 1560;       // until a warp has the partial results that it loads at once
constexpr double kCombineBytes = 57;  // of partial results that a CTA reads
constexpr double kCombineLaunch = 740;  // of combine.cu
constexpr double kCombineWave = 2440;   // of kWaveWarps of its warps on each SM
constexpr double kWaveWarps = 8;
// Lengths that a call may have: how often a plan expects each kind.
constexpr double kAlikeWeight = 0.6, kSpreadWeight = 0.2, kOneLongWeight = 0.2;

// What the schedules and combines of src/kernels/decode/ say of themselves.
constexpr int kMaxSplitsAtOnce = 64, kMaxSplitRows = 512;  // that one CTA combines at once

int splits_per_group(int splits) { return splits <= 24 ? 4 : splits <= 80 ? 8 : 16; }

/// The least chunks of a q block that Dynamic lets CTAs request.
int dynamic_min_chunks(const DecodePlan& plan) {
  constexpr int kAnswerTiles = 3;
  const int tiles = plan.warp_groups * (std::max(plan.k_stages, kAnswerTiles) + 1);
  return ceil_div((tiles - 1) * plan.block_keys, kernels::chunk_keys(plan.block_keys)) + 1;
}

/// The least chunks of a split by SplitToFill, of a q block of so many.
int fill_min_chunks(const DecodePlan& plan, int chunks) {
  if (!plan.has_combine_kernel()) return 1;
  return std::max(ceil_div(chunks, kernels::kMaxSplits),
                  plan.block_rows() == 128 && chunks > 16 ? 2 : 1);
}

/// Equal q blocks: a kv head's rows with the keys of a sequence.
struct QBlocks {
  int64_t count;
  int chunks;  ///< of keys
};

/// CTAs that have equally many chunks to read.
struct Ctas {
  double count, chunks;
};

/// How a schedule divides q blocks among CTAs.
struct Division {
  std::vector<Ctas> ctas;
  int tiles = 1;        ///< work tiles of a CTA, at most
  int splits = 1;       ///< of a q block, at most
  bool slices = false;  ///< CTAs have slices of the q blocks laid end to end
  bool whole() const { return splits == 1; }
};

int64_t all_q_blocks(const std::vector<QBlocks>& q_blocks) {
  int64_t all = 0;
  for (const QBlocks& q : q_blocks) all += q.count;
  return all;
}

int longest_of(const std::vector<QBlocks>& q_blocks) { return q_blocks[0].chunks; }

/// Chunks with those that count for the ends of q blocks.
int64_t sliced_chunks(const std::vector<QBlocks>& q_blocks) {
  int64_t all = 0;
  for (const QBlocks& q : q_blocks) all += q.count * (q.chunks + kernels::kTileOverhead);
  return all;
}

/// At how many of intervals of `length`, side by side, another interval of `window` is at most,
/// which may begin at any multiple of what both are multiples of.
int64_t touched(int64_t window, int64_t length, bool aligned) {
  const int64_t step = aligned ? std::gcd(window, length) : 1;
  return (window + length - step + length - 1) / length;
}

Division stream_k(const std::vector<QBlocks>& q_blocks, int grid) {
  const int64_t all = sliced_chunks(q_blocks);
  const int64_t count = std::min<int64_t>(all, grid);
  const int64_t slice = std::max<int64_t>(all / std::max<int64_t>(count, 1), 1);
  const bool aligned = count > 0 && all % count == 0 && q_blocks.size() == 1;
  const int64_t longest = q_blocks.front().chunks + kernels::kTileOverhead;
  const int64_t shortest = q_blocks.back().chunks + kernels::kTileOverhead;
  Division division;
  division.slices = true;
  int64_t chunks = 0;
  for (const QBlocks& q : q_blocks) chunks += q.count * q.chunks;
  division.ctas = {
      {static_cast<double>(count),
       static_cast<double>(chunks) / static_cast<double>(std::max<int64_t>(count, 1))}};
  division.tiles = static_cast<int>(touched(slice, shortest, aligned));
  division.splits = static_cast<int>(std::min(touched(longest, slice, aligned), count));
  return division;
}

Division round_robin(const std::vector<QBlocks>& q_blocks, int grid) {
  const int64_t count = all_q_blocks(q_blocks);
  const int longest = longest_of(q_blocks);
  if (!kernels::round_robin_is_even(static_cast<int>(count), longest + kernels::kTileOverhead,
                                    static_cast<int>(sliced_chunks(q_blocks)), grid)) {
    return stream_k(q_blocks, grid);
  }
  const int rounds = ceil_div(count, grid);
  const double last = static_cast<double>(count - int64_t{rounds - 1} * grid);
  Division division;
  division.tiles = rounds;
  division.ctas = {{last, 1.0 * rounds * longest}, {grid - last, (rounds - 1.0) * longest}};
  return division;
}

/// Each work tile goes to the CTA that has the least, the longest first.
class LongestFirst {
 public:
  explicit LongestFirst(int grid) : loads_{{1.0 * grid, 0, 0}} {}

  void add(int64_t tiles, double chunks) {
    auto left = static_cast<double>(tiles);
    while (left > 0) {
      const auto next = std::ranges::min_element(
          loads_, {}, [](const Load& l) { return l.chunks + l.tiles * kernels::kTileOverhead; });
      const double taken = std::min(left, next->ctas);
      const Load more{taken, next->chunks + chunks, next->tiles + 1};
      next->ctas -= taken;
      if (next->ctas == 0) loads_.erase(next);
      loads_.push_back(more);
      left -= taken;
    }
  }

  /// Tiles that go to the CTAs by number: the first ones are those with the most.
  void follow(int64_t tiles, double chunks) {
    std::ranges::sort(loads_, std::ranges::greater{}, &Load::chunks);
    double ctas = 0;
    for (const Load& load : loads_) ctas += load.ctas;
    auto left = static_cast<double>(tiles);
    const double rounds = std::floor(left / ctas);
    left -= rounds * ctas;
    std::vector<Load> loads;
    for (Load load : loads_) {
      load.chunks += rounds * chunks;
      load.tiles += static_cast<int>(rounds);
      const double more = std::min(left, load.ctas);
      left -= more;
      if (more > 0) loads.push_back({more, load.chunks + chunks, load.tiles + 1});
      load.ctas -= more;
      if (load.ctas > 0) loads.push_back(load);
    }
    loads_ = loads;
  }

  Division division(int splits) const {
    Division division;
    division.splits = splits;
    for (const Load& load : loads_) {
      division.ctas.push_back({load.ctas, load.chunks});
      division.tiles = std::max(division.tiles, load.tiles);
    }
    std::ranges::sort(division.ctas, std::ranges::greater{}, &Ctas::chunks);
    return division;
  }

 private:
  struct Load {
    double ctas, chunks;
    int tiles;
  };
  std::vector<Load> loads_;
};

Division dynamic(const std::vector<QBlocks>& q_blocks, const DecodePlan& plan, const Problem& p) {
  const int min_chunks = dynamic_min_chunks(plan);
  const int max_chunks = kernels::dynamic_max_chunks(static_cast<int>(sliced_chunks(q_blocks)),
                                                     plan.grid, 2 * min_chunks);
  LongestFirst ctas(plan.grid);
  int splits = 1;
  for (const QBlocks& q : q_blocks) {
    int64_t last = 0;  // q blocks of a last round
    if (kernels::dynamic_splits(longest_of(q_blocks), max_chunks) == 1 && q_blocks.size() == 1)
      last = p.hk * kernels::last_round_sequences(static_cast<int>(q.count / p.hk),
                                                  static_cast<int>(p.hk), plan.grid);
    const auto add = [&](int64_t count, int splits_of_each) {
      if (count == 0) return;
      ctas.add(count * splits_of_each, 1.0 * q.chunks / splits_of_each);
      splits = std::max(splits, splits_of_each);
    };
    if (q.chunks < min_chunks) {
      ctas.follow(q.count, q.chunks);
      continue;
    }
    add(q.count - last, kernels::dynamic_splits(q.chunks, max_chunks));
    if (last > 0)
      add(last, kernels::last_round_splits(q.chunks, max_chunks, 2 * min_chunks,
                                           static_cast<int>(last), plan.grid));
  }
  return ctas.division(splits);
}

Division split_to_fill(const std::vector<QBlocks>& q_blocks, const DecodePlan& plan) {
  int64_t chunks = 0;
  for (const QBlocks& q : q_blocks) chunks += q.count * q.chunks;
  const auto all = static_cast<int>(chunks);
  const auto splits_of = [&](const QBlocks& q, int max_chunks) {
    return kernels::fill_splits(q.chunks, std::max(max_chunks, fill_min_chunks(plan, q.chunks)));
  };
  const auto fits = [&](int max_chunks) {
    int64_t count = 0;
    for (const QBlocks& q : q_blocks) count += q.count * splits_of(q, max_chunks).count;
    return count <= plan.grid;
  };
  int max_chunks = kernels::fill_max_chunks(all, kernels::divisor(plan.grid));
  if (!fits(max_chunks)) {
    const auto spare = static_cast<int>(plan.grid - all_q_blocks(q_blocks));
    max_chunks = kernels::fill_max_chunks(all, kernels::divisor(spare));
  }
  Division division;
  for (const QBlocks& q : q_blocks) {
    const kernels::Splits splits = splits_of(q, max_chunks);
    const double each = std::min(splits.chunks, q.chunks);
    division.ctas.push_back({static_cast<double>(q.count * (splits.count - 1)), each});
    division.ctas.push_back({static_cast<double>(q.count), q.chunks - (splits.count - 1) * each});
    division.splits = std::max(division.splits, splits.count);
  }
  std::ranges::sort(division.ctas, std::ranges::greater{}, &Ctas::chunks);
  return division;
}

Division invariant_splits(const std::vector<QBlocks>& q_blocks, const DecodePlan& plan) {
  Division division = stream_k(q_blocks, plan.grid);
  division.splits = plan.max_splits;
  return division;
}

Division divide(const std::vector<QBlocks>& q_blocks, const DecodePlan& plan, const Problem& p) {
  switch (plan.schedule) {
    case DecodeSchedule::kStreamKOrRoundRobin:
      return round_robin(q_blocks, plan.grid);
    case DecodeSchedule::kDynamic:
      return dynamic(q_blocks, plan, p);
    case DecodeSchedule::kSplitToFill:
      return split_to_fill(q_blocks, plan);
    case DecodeSchedule::kInvariantSplits:
      return invariant_splits(q_blocks, plan);
    case DecodeSchedule::kStreamK:
      break;
  }
  return stream_k(q_blocks, plan.grid);
}

class DecodeCost {
 public:
  DecodeCost(const DecodePlan& plan, const Problem& p) : plan_(plan), p_(p) {
    const int64_t rows = rows_of_kv_head(p);
    rows_ = p.of_groups ? ceil_div(rows, p.batch) : rows;
    blocks_ = std::max(ceil_div(rows_, plan.block_rows()), 1);
    rows_ = std::min<int64_t>(rows_, plan.block_rows());
    key_bytes_ = plan.heads * static_cast<double>(p.key_bytes()) / static_cast<double>(p.hk);
  }

  double cycles(const std::vector<QBlocks>& q_blocks) const {
    const Division division = divide(q_blocks, plan_, p_);
    double cycles = start() + schedule() + reading(division) + (division.tiles - 1) * next_tile();
    if (!division.whole()) cycles += leaving(division);
    if (plan_.has_combine_kernel() && plan_.max_splits > 1)
      cycles += by_kernel(division.splits, all_q_blocks(q_blocks));
    else if (!division.whole())
      cycles += combining(division);
    return cycles;
  }

  /// The q blocks where all sequences have sk keys.
  std::vector<QBlocks> alike() const { return {{p_.batch * p_.hk * blocks_, chunks(p_.sk)}}; }
  /// Where one has, and the others have few.
  std::vector<QBlocks> one_long() const {
    const int64_t few = std::min(p_.sk, std::max<int64_t>(p_.sk / 64, 100));
    return {{p_.hk * blocks_, chunks(p_.sk)}, {(p_.batch - 1) * p_.hk * blocks_, chunks(few)}};
  }

  /// Where they have from a quarter of that on.
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

  /// Cycles of a key of a kv head, which all of its q blocks see: of memory with all SMs, and of
  /// the products of one SM.
  double memory_cycles() const { return key_bytes_ / (kDecodeShare * plan_.card.bytes_per_cycle); }
  double product_cycles() const {
    // Where Hopper takes the warp path, memory binds.
    const bool hidden = plan_.has_wgmma() && !plan_.warpgroup_path();
    if (hidden) return 0;
    const double flops =
        plan_.warpgroup_path() ? kProductFlops : kWarpProducts * plan_.card.mma_rate;
    return 2.0 * blocks_ * plan_.block_rows() * (plan_.head_dim + plan_.value_dim) / flops;
  }

 private:
  int path() const { return plan_.warpgroup_path() ? 1 : 0; }
  int chunks(int64_t keys) const { return ceil_div(keys, kernels::chunk_keys(plan_.block_keys)); }
  /// Warps that compute, of a CTA.
  int warps() const { return plan_.warp_groups * plan_.warps_per_group; }
  double columns() const { return plan_.value_dim / 128.0; }
  double partial_bytes() const {
    return sizeof(float) * static_cast<double>(rows_) *
           kernels::partial_row_floats(plan_.value_dim);
  }

  /// Warp groups of the warp path combine O through shared memory.
  double exchange() const { return kRowOfO[path()] * plan_.tile_rows * columns() / warps(); }
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

  /// All CTAs read at the same rate; those that have more go on when the others have ended, when
  /// each of them may read faster.
  double reading(const Division& division) const {
    const double of_chunk = kernels::chunk_keys(plan_.block_keys);
    double cycles = 0, ctas = 0;
    for (size_t i = 0; i < division.ctas.size(); ++i) {
      ctas += division.ctas[i].count;
      const double next = i + 1 < division.ctas.size() ? division.ctas[i + 1].chunks : 0;
      const double sms = std::min(ctas / plan_.residents, 1.0 * plan_.card.sms);
      const double idle = std::min(1.0, (plan_.card.sms - sms) / kIdleSms);
      const double memory = ctas * memory_cycles() / blocks_ / (1 - kIdleLoss * idle) *
                            (division.slices ? 1 + kSlicesLoss : 1);
      const double sm =
          plan_.residents * std::max(key_bytes_ / kSmBytes, product_cycles() / blocks_);
      cycles += of_chunk * (division.ctas[i].chunks - next) * std::max(memory, sm);
    }
    return cycles;
  }

  /// A CTA leaves a partial result of the q block in which it begins, and one of that in which it
  /// ends.
  double leaving(const Division& division) const {
    const bool two = division.tiles > 1 && plan_.schedule != DecodeSchedule::kDynamic;
    return (two ? 2 : 1) * (kLeavePartial + partial_bytes() / kPartialBytes);
  }

  double combining(const Division& division) const {
    const int splits = division.splits;
    if (plan_.schedule == DecodeSchedule::kDynamic && plan_.warpgroup_path() &&
        splits > kernels::kFewSplits) {
      // By all CTAs at the end.
      return kTicket + ceil_div(splits, 4) * kLoads + splits * partial_bytes() / 16 / kCombineBytes;
    }
    if (splits <= kMaxSplitsAtOnce && splits * rows_ <= kMaxSplitRows) return by_cta(splits);
    const int each = splits_per_group(splits);
    return by_cta(each) + by_cta(ceil_div(splits, each));
  }

  /// The last CTA at a q block, or at a group of its splits.
  double by_cta(int splits) const {
    // What a warp loads at a time.
    int rows = plan_.heads > 1 ? 1 : plan_.warps_per_group, of_splits = rows == 1 ? 20 : 8;
    if (plan_.warpgroup_path()) {
      rows = splits <= 2 ? 8 : 4;
      of_splits = splits <= 2 ? 2 : 4;
    }
    const double times = std::ceil(columns()) * ceil_div(ceil_div(rows_, rows), warps()) *
                         ceil_div(splits, of_splits);
    return kTicket + times * kLoads + splits * partial_bytes() / kCombineBytes;
  }

  double by_kernel(int splits, int64_t q_blocks) const {
    const int eights = plan_.combine_eights;
    const double warps =
        static_cast<double>(q_blocks) * ceil_div(rows_, 16) * ceil_div(plan_.value_dim / 8, eights);
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
  return cost.memory_cycles() >= cost.product_cycles() / plan.card.sms;
}

}  // namespace fulgur::cuda::decode

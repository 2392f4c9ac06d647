#include "cuda/decode/division.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda::decode {
namespace {

/// The minimum of chunks in a q block that CTAs request from Dynamic (Dynamic::kMinChunks).
int dynamic_min_chunks(const DecodePlan& plan) {
  constexpr int kAnswerTiles = 3;
  const int ahead = plan.k_stages + plan.code_stages;
  const int tiles = plan.warp_groups * (std::max(ahead, kAnswerTiles) + 1);
  return ceil_div((tiles - 1) * plan.block_keys, kernels::chunk_keys(plan.block_keys)) + 1;
}

/// The minimum of chunks in a split by SplitToFill, of a q block that has `chunks`
/// (SplitToFill::min_split).
int fill_min_chunks(const DecodePlan& plan, int chunks) {
  if (!plan.has_combine_kernel()) return 1;
  return std::max(ceil_div(chunks, kernels::kMaxSplits),
                  plan.block_rows() == 128 && chunks > 16 ? 2 : 1);
}

int longest_of(const std::vector<QBlocks>& q_blocks) { return q_blocks[0].chunks; }

/// The chunks of all q blocks, with those that count for their ends.
int64_t sliced_chunks(const std::vector<QBlocks>& q_blocks) {
  int64_t all = 0;
  for (const QBlocks& q : q_blocks) all += q.count * (q.chunks + kernels::kTileOverhead);
  return all;
}

/// How many intervals of `length`, laid side by side, an interval of `window` touches at most.
/// `aligned`: it begins at a multiple of the greatest common divisor of both, else anywhere.
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
  const int64_t count = count_of(q_blocks);
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

/// Gives each work tile to the CTA that has the least work. Tiles are added longest first.
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

  /// Deals tiles out to the CTAs in turn, those with the most work first, which is the worst case.
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
    const auto spare = static_cast<int>(plan.grid - count_of(q_blocks));
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

}  // namespace

int64_t count_of(const std::vector<QBlocks>& q_blocks) {
  int64_t all = 0;
  for (const QBlocks& q : q_blocks) all += q.count;
  return all;
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

}  // namespace fulgur::cuda::decode

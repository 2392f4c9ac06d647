#include "cuda/sm90/forward_cost.h"

#include <algorithm>
#include <cmath>

#include "kernels/host_device/key_walk.h"

namespace fulgur::cuda::sm90 {
namespace {

// Measured on an H200.
constexpr double kTensorFlops = 4096;  // of the tensor cores per cycle
constexpr double kSoftmaxScores =
    11.2;                              // scores per cycle of all warpgroups, with busy tensor cores
constexpr double kCodesScores = 13.2;  // the same with P of e4m3
constexpr double kSoftmaxAlone = 7;    // the same, one warpgroup
constexpr double kTransformScores = 5;     // the same with softcap, ALiBi or dropout
constexpr double kTransformOfThree = 5.6;  // the same by three warpgroups, no dropout, no map
constexpr double kBytesScores = 6.5;       // the same with a bool mask of bytes
constexpr double kRegisterScores = 6.9;    // the same with a bias in registers
constexpr double kBitsFactor = 1.13;       // of the time of a plain call, with a bool mask of bits
constexpr double kCopyBytes = 43;          // from L2 per cycle
constexpr double kReadFraction = 0.8687;   // of the memory bandwidth
constexpr double kProductTurn =
    22;  // between key tiles of a warpgroup, if products are the bottleneck
constexpr double kSoftmaxTurn = 46;       // the same if softmax is the bottleneck
constexpr double kCodesTurn = 112;        // the same with P of e4m3
constexpr double kChainCycles = 220;      // barriers and waits of a warpgroup, per key tile
constexpr double kEndCycles = 1800;       // load of Q, store of O
constexpr double kHiddenEndCycles = 700;  // the same if the next Q is loaded already
constexpr double kPartBytes = 16;         // of partial results, written or read per cycle
constexpr double kSplitLoop = 1.03;       // factor of whole blocks of a kernel that can split
constexpr double kShorterBlock = 0.8;     // of the time of a block, of one with two strips of three
constexpr double kAlike =
    0.8;  // minimum ratio of the shortest to the longest block, if blocks run in waves

struct KeyTile {
  double steady;  // cycles between two key tiles
  double ends;    // first S and softmax of a block, when warpgroups wait for the same units
};

KeyTile key_tile_cycles(const ForwardPlan& plan) {
  const double scores = 64.0 * plan.block_keys;  // per key tile of a warpgroup
  // Products of 8 bits are as fast as those of half as many columns of 16 bits.
  const int64_t dim_bytes =
      plan.head_dim * size_of(plan.dtypes.k) + plan.value_dim * size_of(plan.dtypes.v);
  const double dims = static_cast<double>(dim_bytes) / 2;
  const double product = 2 * scores * dims / kTensorFlops;
  const bool is_bool = plan.bias == 1 + kernels::kBool && !plan.score_mod && !plan.mask_mod;
  const bool of_bytes = is_bool && !plan.mask_bits;
  const bool in_registers = plan.bias_in_registers();
  const bool asks_mask = plan.mask_mod && plan.bias == 0 && !plan.score_mod;  // in few tiles
  const bool hides = plan.scores_hide() && !is_bool && !in_registers && !asks_mask;
  const bool slow = plan.transforms_scores || plan.dropout || hides;
  const bool codes = plan.centers_v() && !slow;
  const bool three = plan.consumers == 3 && !plan.dropout && !plan.maps_tiles;
  const double slow_rate = three ? kTransformOfThree : kTransformScores;
  const double rate = slow           ? slow_rate
                      : in_registers ? kRegisterScores
                      : of_bytes     ? kBytesScores
                      : codes        ? kCodesScores
                                     : kSoftmaxScores;
  const double turn = codes ? kCodesTurn : kSoftmaxTurn;
  // A warpgroup that is alone on an SM waits for no other.
  const bool waits = plan.consumers > 1 || plan.shares;
  const double alone = slow       ? slow_rate
                       : of_bytes ? kBytesScores
                       : waits    ? kSoftmaxAlone
                                  : kSoftmaxScores;
  const double copy = plan.block_keys * static_cast<double>(dim_bytes) / kCopyBytes;
  const double products = plan.consumers * (product + kProductTurn);
  const double softmax = plan.consumers * (scores / rate + turn);
  // If softmax is the bottleneck, that of the other warpgroups continues during the wait.
  const int waiting = softmax > products ? 1 : plan.consumers;
  const double factor = plan.mask_bits ? kBitsFactor : 1;
  return {factor * std::max({products, softmax, copy, product + scores / alone + kChainCycles}),
          waiting * (product / 2 + scores / rate)};
}

/// Cycles of work of `all` cycles, scheduled longest first: each SM computes the next item as soon
/// as it is free, so that SMs wait at the end for half of the shortest item on average.
double longest_first(double longest, double shortest, double all, int sms) {
  return std::max(longest, all / sms + 0.5 * shortest);
}

/// Keys of the longest sequence. If others may be shorter, without those of a last, incomplete
/// chunk: shorter sequences see whole chunks.
int keys_of_longest(const Problem& p) {
  const bool whole = chunk_binds(p) && !p.alike() && p.sk > p.mask.chunk;
  return static_cast<int>(whole ? p.sk - p.sk % p.mask.chunk : p.sk);
}

}  // namespace

BlockCost block_cost(const ForwardPlan& plan, const Problem& p) {
  const KeyTile key_tile = key_tile_cycles(plan);
  const double end = key_tile.ends + (plan.q_stages > 1 ? kHiddenEndCycles : kEndCycles);
  const kernels::Lengths longest{0, 0, static_cast<int>(p.sq), keys_of_longest(p)};
  const kernels::Band band = band_of(plan, p);
  BlockCost cost;
  cost.leave_split = 4.0 * plan.consumers * kernels::partial_floats(plan.value_dim) / kPartBytes;
  cost.split_loop = plan.bias_in_p() ? 1 : kSplitLoop;
  cost.end = end;
  cost.key_tile = key_tile.steady;
  kernels::Work head{};  // one head alone
  head.row_blocks = head.q_tiles = plan.work.row_blocks;
  head.heads = head.section_heads = 1;
  for (int number = 0; number < head.q_tiles; ++number) {
    const kernels::QTile tile = kernels::q_tile_of(head, 1, /*splits=*/false, band, number);
    const kernels::KeyTiles keys =
        kernels::key_tiles_of(head, band, longest, plan.consumers, plan.block_keys,
                              /*splits=*/false, tile, plan.block_heads(p));
    const int count = keys.end - keys.begin;
    cost.key_tiles.push_back(count);
    const double cycles = end + key_tile.steady * count;
    cost.mean += cycles / plan.work.row_blocks;
    cost.longest = std::max(cost.longest, cycles);
    cost.shortest = number == 0 ? cycles : std::min(cost.shortest, cycles);
  }
  return cost;
}

double reading_cycles(const Problem& p, const Card& card) {
  const double keys = static_cast<double>(p.batch) * static_cast<double>(p.sk);
  return keys * static_cast<double>(p.key_bytes()) / (kReadFraction * card.bytes_per_cycle);
}

double predicted_cycles_of_splits(const BlockCost& cost, int heads, int cut, int splits, int sms) {
  const int blocks = static_cast<int>(cost.key_tiles.size());
  double all = 0, longest = 0;
  for (int block = 0; block < blocks; ++block) {
    const int count = cost.key_tiles[block], splits_here = block < cut ? splits : 1;
    const double leave = splits_here > 1 ? cost.leave_split : 0;
    all += heads * (splits_here * (cost.end + 2 * leave) + count * cost.key_tile);
    const int max_tiles = (count + splits_here - 1) / splits_here;
    longest = std::max(longest, cost.end + max_tiles * cost.key_tile + (splits_here + 1) * leave);
  }
  const int q_tiles = heads * (blocks + cut * (splits - 1));
  if (q_tiles <= sms) return cost.split_loop * longest;
  return cost.split_loop * longest_first(longest, cost.shortest, all, sms);
}

double predicted_cycles_of_shorter(const BlockCost& cost, int heads, int whole, int shorter,
                                   int sms) {
  const int waves = ceil_div(heads * whole, sms);
  const int free_sms = waves * sms - heads * whole;  // of the last wave of whole blocks
  const int shorter_waves = ceil_div(std::max(heads * shorter - free_sms, 0), sms);
  return cost.mean * (waves + kShorterBlock * shorter_waves);
}

bool alike(const BlockCost& cost) { return cost.shortest >= kAlike * cost.longest; }

double predicted_cycles(const BlockCost& cost, int blocks, int first_split, int splits, int sms) {
  if (!alike(cost)) return longest_first(cost.longest, cost.shortest, blocks * cost.mean, sms);
  const int split = blocks - first_split;
  const double waves = std::ceil(static_cast<double>(first_split) / sms);
  const double split_waves = std::ceil(static_cast<double>(split) * splits / sms);
  const double of_split = cost.mean / splits + (splits > 1 ? (splits + 1) * cost.leave_split : 0);
  return waves * cost.mean * (splits > 1 ? cost.split_loop : 1) + split_waves * of_split +
         (cost.longest - cost.mean) / (waves > 0 ? 1 : splits);
}

}  // namespace fulgur::cuda::sm90

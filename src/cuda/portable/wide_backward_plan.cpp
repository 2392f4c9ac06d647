#include "cuda/portable/wide_backward_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/common/host_metadata.h"
#include "cuda/device/launch_memory.h"
#include "cuda/portable/expression_gradients.h"
#include "cuda/portable/rates.h"

namespace fulgur::cuda::portable {
namespace {

/// Tiles: keys of a CTA of dK and dV, and rows of one of dQ; rows or keys of a step; warps.
struct WideTile {
  int own, streamed, warps;
};
constexpr WideTile kWideTiles[] = {{64, 64, 8}, {64, 32, 8}, {32, 64, 8}, {32, 32, 4}};

constexpr int kChunkPanels[] = {4, 2};
constexpr int kMaxRingStages = 4;
constexpr int kFewWideBlocks = 2;          // per SM
constexpr double kWideL2Bytes = 24;        // per clock and SM
constexpr double kChunkCycles = 120;       // of each chunk
constexpr double kWideBlockCycles = 6000;  // loads of own rows, stores of gradients
constexpr double kWideReduceCycles = 6000, kWideReduceBytes = 10;  // as in backward_cost.cpp

int panels(int dim) { return ceil_div(dim, 64); }

/// Chunks of a step of a gradient, as in portable/wide_backward/ring.cuh.
int chunks_of(const WideBackwardKey& key) {
  const int head = panels(key.head_dim), value = panels(key.value_dim),
            of_role = key.chunk_panels / 2;
  if (key.gradient == WideGradient::kOfV)
    return ceil_div(ceil_div(head, 2), of_role) + ceil_div(value, key.chunk_panels);
  return ceil_div(std::max(head, value), of_role) + ceil_div(head, key.chunk_panels);
}

/// Columns that a step of a gradient multiplies for each score.
int columns_of(const WideBackwardKey& key) {
  if (key.gradient == WideGradient::kOfV) return key.head_dim + key.value_dim;
  return 2 * key.head_dim + key.value_dim;
}

/// The order of blocks: the heads of a section begin and end together, so that L2 holds their rows.
/// Those that see most come first.
kernels::BlockSchedule schedule(int64_t rows, int64_t batch_heads, const WideBackwardPlan& plan,
                                bool descends, int sms) {
  kernels::BlockSchedule blocks{};
  blocks.blocks = ceil_div(rows, plan.block_keys);
  blocks.batch_heads = static_cast<int>(batch_heads);
  blocks.order = descends ? kernels::kDescending : kernels::kAscending;
  blocks.section_heads =
      std::clamp(ceil_div(sms, std::max(blocks.blocks, 1)), 1, std::max(blocks.batch_heads, 1));
  blocks.sections = std::max(blocks.batch_heads / blocks.section_heads, 1);
  return blocks;
}

void set_blocks(WideBackwardPlan& plan, const Problem& p, int sms) {
  plan.key_blocks = schedule(p.sk, p.batch * p.hk * plan.splits, plan, false, sms);
  plan.row_blocks = schedule(p.sq, p.batch * p.hq, plan, plan.has_right, sms);
}

/// Predicts the cycles of a CTA in a step of a gradient: products, and bytes of shared memory and
/// of L2.
double step_cycles(const WideBackwardKey& key, const Card& card) {
  const double rows = key.block_rows, keys = key.block_keys;
  const double streamed = key.gradient == WideGradient::kOfQ ? keys : rows;
  const double own = key.gradient == WideGradient::kOfQ ? rows : keys;
  const double columns = columns_of(key);
  const double gradient = key.gradient == WideGradient::kOfV ? key.value_dim : key.head_dim;
  const double products = 2 * rows * keys * columns / mma_rate(key.dtypes.q, card);
  // Of a step of 16 columns of S or dP each warp of a role reads 32 keys and its rows; of 16 rows
  // of the gradient's second operand each warp reads a quarter of the columns.
  const double role_warps = key.warps / 2.0;
  const double warp_rows = rows * keys / (32 * role_warps);
  const double shared = (2 * role_warps * (32 + warp_rows) * (columns - gradient) +
                         2 * key.warps / 4.0 * streamed * gradient + 8 * own * streamed) /
                        kSharedBytes;
  const double l2 = 2 * streamed * columns / kWideL2Bytes;
  const double longest = std::max({products, shared, l2});
  return longest + kNotHidden * (products + shared + l2 - longest) + kChunkCycles * chunks_of(key);
}

/// The predicted cycles by which tiles are compared.
double predict(const WideBackwardPlan& plan, const Problem& p, const Card& card) {
  const kernels::Lengths longest{0, 0, static_cast<int>(p.sq), static_cast<int>(p.sk)};
  const kernels::Band band = band_of(plan, p);
  double all = 0;
  for (const WideGradient gradient : plan.gradients()) {
    const WideBackwardKey key = plan.key_of(gradient);
    const double step = step_cycles(key, card);
    double cycles = 0, longest_block = 0;
    for (int i = 0; i < plan.blocks_of(gradient).blocks; ++i) {
      double steps = 0;
      if (gradient == WideGradient::kOfQ) {
        const int row = i * key.block_rows;
        const int last = std::min<int>(row + key.block_rows, longest.sq) - 1;
        const kernels::KeyTiles seen = kernels::key_tiles(band, longest, key.block_keys, row, last);
        steps = seen.end - seen.begin;
      } else {
        const kernels::RowTiles seen =
            kernels::row_tiles(band, longest, key.block_rows, i * key.block_keys, key.block_keys);
        steps = static_cast<double>(seen.end - seen.begin) * plan.split_heads;
      }
      cycles += kWideBlockCycles + step * steps;
      longest_block = std::max(longest_block, kWideBlockCycles + step * steps);
    }
    const double busy = cycles * plan.blocks_of(gradient).batch_heads / card.sms;
    all += std::max(longest_block, busy + longest_block / 4);
  }
  if (!plan.reduces()) return all;
  const auto elements = static_cast<double>(p.batch * p.hk * plan.splits * p.sk * (p.d + p.dv));
  return all + kWideReduceCycles + kWideReduceBytes * elements / card.bytes_per_cycle;
}

/// Divides the q heads of a group among several CTAs if there are few kv heads and keys, as in
/// backward_plan.cpp. Returns the predicted cycles.
double divide_heads(WideBackwardPlan& plan, const Problem& p, const Card& card) {
  set_blocks(plan, p, card.sms);
  double cycles = predict(plan, p, card);
  const bool few = plan.ctas_of(WideGradient::kOfK) < int64_t{kFewWideBlocks} * card.sms;
  if (p.invariant || !plan.key_gradients || !few) return cycles;
  const int group = static_cast<int>(p.group());
  for (int splits = 2; splits <= group; ++splits) {
    if (group % splits != 0) continue;
    WideBackwardPlan divided = plan;
    divided.splits = splits;
    divided.split_heads = group / splits;
    divided.splits_heads = true;
    set_blocks(divided, p, card.sms);
    const double predicted = predict(divided, p, card);
    if (predicted >= cycles || !p.has_room(workspace_of(p, divided).end)) continue;
    plan = divided;
    cycles = predicted;
  }
  return cycles;
}

/// Sets the buffers of each gradient: as many as fit, of large chunks if two of these do. Returns
/// false, and the bytes of what does not fit, if not even two small ones do.
bool derive_rings(WideBackwardPlan& plan, int shared_bytes, int* wanted) {
  const auto fits = [&](WideGradient gradient) {
    for (const int panels : kChunkPanels) {
      for (int stages = kMaxRingStages; stages >= 2; --stages) {
        plan.rings[static_cast<size_t>(gradient)] = {panels, stages};
        const WideBackwardKey key = plan.key_of(gradient);
        *wanted = key.layout().bytes;
        if (stages - 1 <= chunks_of(key) && *wanted <= shared_bytes) return true;
      }
    }
    return false;
  };
  return std::ranges::all_of(plan.gradients(), fits);
}

}  // namespace

std::vector<WideGradient> WideBackwardPlan::gradients() const {
  std::vector<WideGradient> all;
  if (dq_method != DqMethod::kNone) all.push_back(WideGradient::kOfQ);
  if (key_gradients) all.insert(all.end(), {WideGradient::kOfK, WideGradient::kOfV});
  return all;
}

WideBackwardKey WideBackwardPlan::key_of(WideGradient of) const {
  WideBackwardKey key = *this;
  key.gradient = of;
  key.chunk_panels = rings[static_cast<size_t>(of)].chunk_panels;
  key.stages = rings[static_cast<size_t>(of)].stages;
  key.has_dlse = false;  // only the kernel that prepares rows depends on it
  if (of != WideGradient::kOfQ) return key;
  std::swap(key.block_rows, key.block_keys);
  key.splits_heads = key.f32_key_gradients = false;
  return key;
}

WideBackwardWorkspace workspace_of(const Problem& p, const WideBackwardPlan& plan) {
  if (p.nothing_to_do() && !plan.dsinks && !plan.dbias && !plan.dtensors) return {};
  Arena arena(LaunchMemory::kZeroed);
  const int64_t keys = int64_t{plan.key_blocks.blocks} * plan.block_keys;
  const int64_t partial_keys = plan.reduces() ? p.batch * p.hk * plan.splits * keys : 0;
  WideBackwardWorkspace at{backward_workspace(p, plan, plan, 0, partial_keys, arena)};
  at.tensor_sums = arena.take(ExpressionGradients::bytes(p));
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

std::string wide_backward_rejects(const Problem& p) {
  std::string why = dtypes_rejected(p.dtypes);
  return why.empty() ? backward_sizes_rejected(p, kMaxWideDims) : why;
}

std::vector<Fitting<WideBackwardPlan>> wide_backward_candidates(
    const Problem& p, const Card& card, std::vector<std::string>* rejected) {
  std::vector<Fitting<WideBackwardPlan>> tiles;
  WideBackwardPlan any;
  set_problem(p, any, any);
  any.copies_bias.clear();  // kernels read its elements from memory directly
  any.dq_method = p.wants_dq() ? DqMethod::kByRows : DqMethod::kNone;
  any.maps_tiles = any.mask_mod;
  any.dq_by_fours = any.early_starts = false;
  any.stores_matrices = features_of(card.target).has_stmatrix;
  any.whole_columns = any.head_dim == p.d && any.value_dim == p.dv;
  for (const WideTile& tile : kWideTiles) {
    // Row blocks and key blocks read one map.
    if (any.maps_tiles && tile.own != tile.streamed) continue;
    Fitting<WideBackwardPlan> t{any, 0, {}};
    t.plan.block_rows = tile.streamed;
    t.plan.block_keys = tile.own;
    t.plan.warps = tile.warps;
    int wanted = 0;
    if (!derive_rings(t.plan, card.shared_bytes, &wanted)) {
      rejected->push_back(fmt::format("tile {}: its {} bytes of shared memory do not fit {}",
                                      t.plan.tile().text(), wanted, card.shared_bytes));
      continue;
    }
    t.cycles = divide_heads(t.plan, p, card);
    tiles.push_back(std::move(t));
  }
  return tiles;
}

Explanation describe(const WideBackwardPlan& plan) {
  Explanation e;
  e.Br = plan.block_rows;
  e.Bc = plan.block_keys;
  describe_tile(plan.tile(), plan, e.details);
  const WideGradient first =
      plan.dq_method == DqMethod::kNone ? WideGradient::kOfK : WideGradient::kOfQ;
  const WideBackwardKey key = plan.key_of(first);
  e.details.add("warps", plan.warps);
  e.details.add("stages", key.stages);
  e.details.add("shared_bytes", key.layout().bytes);
  e.details.add("ctas", plan.ctas_of(first));
  e.details.add("dq", plan.dq_method == DqMethod::kNone ? "none" : "by_rows");
  e.details.add("deterministic", true);
  e.decisions.push_back(fmt::format(
      "mma.sync: dQ, dK and dV by a kernel each, which computes P and dS again, of {0} rows or {0} "
      "keys in steps of {1}; d {2} and dv {3} as computed: deterministic",
      plan.block_keys, plan.block_rows, plan.head_dim, plan.value_dim));
  e.decisions.push_back(fmt::format("{} warps; {} buffers of {} bytes: {} bytes of shared memory",
                                    plan.warps, key.stages, key.layout().chunk_bytes,
                                    key.layout().bytes));
  describe_backward(plan, plan, e);
  return e;
}

}  // namespace fulgur::cuda::portable

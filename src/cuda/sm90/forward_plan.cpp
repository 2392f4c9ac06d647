#include "cuda/sm90/forward_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_map.h"
#include "cuda/device/launch_memory.h"
#include "cuda/passes/forward.h"
#include "kernels/sm90/forward/layout.h"

namespace fulgur::cuda::sm90 {

using kernels::Work;

int64_t ForwardPlan::partial_floats() const {
  if (!split_tail) return 0;
  return int64_t{kernels::split_blocks(work)} * work.splits * consumers *
         kernels::partial_floats(value_dim);
}

int ForwardPlan::counters() const {
  return kernels::kSchedulerCounters + kernels::split_blocks(work) * consumers;
}

ForwardWorkspace workspace_of(const Problem& p, const ForwardPlan& plan) {
  const ForwardShapes maps = forward_shapes(p, plan.box_keys);
  if (maps.o.empty()) return {};
  ForwardWorkspace at;
  at.zeroed = LaunchMemory::kZeroed;
  Arena arena(at.zeroed);
  at.partial = arena.take(plan.partial_floats() * int64_t{sizeof(float)});
  at.copies = {arena.take(copied_bytes(maps.q, plan.copies_q, plan.dtypes.q)),
               arena.take(copied_bytes(maps.k, plan.copies_k, plan.dtypes.k)),
               arena.take(copied_bytes(maps.v, plan.copies_v, plan.dtypes.v)),
               arena.take(copied_bytes(maps.bias, plan.copies_bias))};
  if (plan.centers_v()) {
    const CenteredValues v = centered_values(p, plan);
    const int64_t tiles = p.packed_k ? p.hk * v.head_tiles : p.batch * v.batch_tiles;
    const int64_t rows = int64_t{plan.grid} * plan.block_rows();
    at.image = arena.take(tiles * plan.block_keys * plan.value_dim);
    at.means = arena.take(p.batch * p.hk * v.segments * plan.value_dim * int64_t{sizeof(float)});
    if (plan.mean_products) {
      at.mean_steps = arena.take(p.batch * p.hk * kernels::mean_steps_of_segments(v.segments) *
                                 int64_t{kernels::mean_step_bytes(plan.value_dim)});
    }
    const int left = v.segments > 1 ? v.segments : 0;
    at.sums = arena.take(rows * left * int64_t{sizeof(RowSum)});
  }
  at.map = arena.take(TileMap::bytes(p, plan, plan.map_tiles()));
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

CenteredValues centered_values(const Problem& p, const ForwardPlan& plan) {
  CenteredValues v{};
  v.head_tiles = p.packed_k ? static_cast<int>(p.total_k / plan.block_keys + p.batch)
                            : ceil_div(p.sk, plan.block_keys);
  v.batch_tiles = p.packed_k ? 0 : static_cast<int>(p.hk * v.head_tiles);
  v.segments = std::max(ceil_div(p.sk, kernels::segment_keys(plan.block_keys)), 1);
  return v;
}

Explanation describe(const ForwardPlan& plan) {
  const Work& work = plan.work;
  Explanation e;
  // Br of the explanation is a strip: each is computed by one warpgroup, and blocks begin at any
  // strip.
  e.Br = plan.block_rows() / plan.consumers;
  e.Bc = plan.block_keys;
  const auto say = [&](std::string sentence) { e.decisions.push_back(std::move(sentence)); };
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("warpgroups", plan.consumers);
  e.details.add("q_stages", plan.q_stages);
  e.details.add("k_stages", plan.k_stages);
  e.details.add("v_stages", plan.v_stages);
  e.details.add("shared_bytes", plan.shared_bytes);
  e.details.add("ctas", plan.grid);
  e.details.add("q_blocks", kernels::blocks_of(work));
  if (plan.shares_blocks) e.details.add("shares_blocks", true);
  e.details.add("splits", work.splits);
  e.details.add("split_q_blocks", kernels::split_blocks(work));
  say(fmt::format(
      "Hopper: {} warpgroups of 64 rows (Br {}), Bc {} keys, d {} and dv {} as computed",
      plan.consumers, plan.block_rows(), plan.block_keys, plan.head_dim, plan.value_dim));
  say(fmt::format("{} buffers of Q, {} of K, {} of V: {} bytes of shared memory", plan.q_stages,
                  plan.k_stages, plan.v_stages, plan.shared_bytes));
  say(fmt::format("{} CTAs take {} blocks of rows{}{}, in sections of {} {} and a last one of {}",
                  plan.grid, kernels::blocks_of(work),
                  plan.shares_blocks ? ", which the heads of a group share" : "",
                  plan.has_left || plan.has_right ? ", longest first" : "", work.section_heads,
                  plan.shares_blocks ? "kv heads" : "heads", work.heads - work.bulk_heads));
  if (plan.split_tail) {
    say(fmt::format("{} blocks, {}, are cut into {} splits of their keys",
                    kernels::split_blocks(work), work.first_split > 0 ? "the last" : "the first",
                    work.splits));
  }
  describe_copies({{"q", plan.copies_q},
                   {"k", plan.copies_k},
                   {"v", plan.copies_v},
                   {"bias", plan.copies_bias}},
                  e);
  describe_map(plan, e);
  if (plan.centers_v()) {
    e.details.add("centers_v", true);
    say("P V is multiplied in e4m3: V is centred and laid out for it first");
  }
  if (plan.page > 0) {
    e.details.add("box_keys", plan.box_keys);
    say(fmt::format("keys lie in pages of {}, which {} names, and come in boxes of {}", plan.page,
                    plan.page_lists ? "page_indptr" : "page_table", plan.box_keys));
  }
  if (plan.store == ForwardPlan::Store::kElements) {
    e.details.add("stores_elements", true);
    say("O is stored by elements: its rows are no multiples of 16 bytes");
  }
  return e;
}

}  // namespace fulgur::cuda::sm90

#include "cuda/sm90/backward_plan.h"

#include <fmt/format.h>

#include <string>

#include "cuda/common/host_metadata.h"
#include "cuda/common/tensor_map.h"
#include "cuda/device/launch_memory.h"

namespace fulgur::cuda::sm90 {
namespace {

constexpr int kRowsConsumers = 2;  ///< warpgroups of the kernel by rows

std::string name_of(DqMethod method) {
  switch (method) {
    case DqMethod::kAtomic:
      return "atomic";
    case DqMethod::kOrdered:
      return "ordered";
    case DqMethod::kNone:
      return "none";
    case DqMethod::kStored:
      return "stored";
    case DqMethod::kByRows:
      break;
  }
  return "by_rows";
}

void describe_dq(const BackwardPlan& plan, Explanation& e) {
  const bool deterministic = plan.dq_method != DqMethod::kAtomic;
  e.details.add("dq", name_of(plan.dq_method));
  e.details.add("deterministic", deterministic);
  e.details.add("waves", plan.waves.size());
  e.details.add("ds_bytes", plan.ds_bytes);
  e.details.add("waves_split_rows", plan.splits_rows);
  if (plan.accumulates_dq()) {
    e.decisions.push_back(
        fmt::format("dQ accumulated in f32 by a warpgroup of its own, additions {}{}",
                    deterministic ? "ordered by semaphores: deterministic"
                                  : "atomic, in no fixed order: not deterministic",
                    plan.rounds_dq ? "; the CTA that completes 64 rows rounds them" : ""));
    return;
  }
  if (plan.waves.empty() || !plan.stores_ds()) return;
  const kernels::Wave& wave = plan.waves.at(0).wave;
  e.details.add("wave_heads", wave.heads);
  e.details.add("wave_sequences", wave.batches);
  e.decisions.push_back(fmt::format(
      "dQ by a kernel of its own from dS in memory, row blocks of {} rows: deterministic",
      plan.rows_of_block()));
  e.decisions.push_back(fmt::format(
      "{} waves of {} {} of {} sequences{}: {} bytes of dS", plan.waves.size(), wave.heads,
      plan.reduces() ? "splits of kv heads" : "kv heads", wave.batches,
      plan.splits_rows
          ? fmt::format(
                ", {} rows each{}", wave.tiles * plan.block_rows,
                plan.key_gradients ? ", partial dK and dV kept in f32 from wave to wave" : "")
          : "",
      plan.ds_bytes));
}

void describe_cuts(const BackwardPlan& plan, Explanation& e) {
  e.details.add("cut_k_blocks", plan.cut_blocks);
  if (plan.cut_blocks > 0) {
    e.decisions.push_back(fmt::format(
        "the last {} key blocks are two work tiles each, of which the first is taken before all "
        "other blocks and the second after them, so that SMs end together",
        plan.cut_blocks));
  }
}

}  // namespace

BackwardRegisters BackwardKey::registers() const {
  if (consumers == 1) return {24, 240, 152};
  return accumulates_dq() ? BackwardRegisters{24, 208, 72} : BackwardRegisters{24, 240, 24};
}

int BackwardKey::rows_of_block() const { return kRowsConsumers * row_tiles * kernels::kDsTileRows; }

bool BackwardKey::half_p() const { return wide() && dtypes.out == DType::kBF16; }

double BackwardKey::p_log2() const {
  // 2^12 P is a normal f16 for P >= 2^-26, and finite up to P = 15: P exceeds 1 if a caller passes
  // an LSE that is smaller than that of the scores.
  return half_p() ? 12 : 0;
}

int BackwardKey::tile_bytes() const {
  return block_rows / kernels::kDsTileRows * (block_keys / kernels::kDsTileKeys) *
         kernels::kDsTileBytes;
}

kernels::BackwardTile tile_of(const BackwardKey& key) {
  return {operands_of(key), key.head_dim,   key.value_dim,   key.consumers,
          key.block_rows,   key.block_keys, key.k_stages,    key.q_stages,
          key.o_stages,     key.ds_stages,  key.row_tiles,   key.row_stages,
          key.dq_stages,    key.mask_bits,  key.bias_tile(), key.bias_rows};
}

TileId BackwardPlan::tile() const {
  return {fmt::format("sm90_backward_{}{}", name_of(dq_method), mask_bits ? "_bits" : ""),
          block_rows, block_keys};
}

int64_t BackwardPlan::dq_semaphores(int64_t hq) const {
  return dq_method == DqMethod::kOrdered
             ? dq_accum_floats(hq * statistics_rows) / kernels::kDqTileFloats
             : 0;
}

int64_t BackwardPlan::dq_additions(int64_t hq) const {
  return rounds_dq ? hq * statistics_rows / 64 : 0;
}

BackwardWorkspace workspace_of(const Problem& p, const BackwardPlan& plan) {
  if (p.nothing_to_do() && !plan.dsinks && !plan.dbias) return {};
  const bool has_partials =
      plan.key_gradients && (plan.splits_rows || plan.reduces() || plan.cut_blocks > 0);
  const int64_t heads = p.batch * p.hk * plan.splits - plan.first_cut_head;
  const int64_t blocks = has_partials ? heads * ceil_div(p.sk, plan.block_keys) : 0;
  Arena arena(LaunchMemory::kZeroed);
  BackwardWorkspace at{
      backward_workspace(p, plan, plan, plan.dq_semaphores(p.hq), blocks * plan.block_keys, arena)};
  at.dq_additions = arena.take(plan.dq_additions(p.hq) * int64_t{sizeof(int)});
  at.zeros = arena.take(plan.stores_ds() ? kernels::kDsTileBytes : 0);
  at.ds = arena.take(plan.ds_bytes);
  at.first_parts = arena.take(plan.cut_blocks > 0 ? int64_t{sizeof(int)} : 0);
  at.metadata = arena.take(host_metadata_bytes(p));
  at.end = arena.end();
  return at;
}

Explanation describe(const BackwardPlan& plan) {
  Explanation e;
  e.Br = plan.block_rows;
  e.Bc = plan.block_keys;
  describe_tile(plan.tile(), plan, e.details);
  e.details.add("key_warpgroups", plan.consumers);
  e.details.add("wide", plan.wide());
  e.details.add("q_stages", plan.q_stages);
  e.details.add("dout_stages", plan.o_stages);
  e.details.add("ds_stages", plan.ds_stages);
  e.details.add("shared_bytes", plan.keys_shared_bytes);
  e.details.add("ctas", plan.grid);
  e.decisions.push_back(fmt::format(
      "Hopper: key blocks of {} keys for dK and dV, {}; steps of {} rows; head dims padded to {} "
      "and {}",
      plan.block_keys, plan.wide() ? "one warpgroup for each of the two" : "64 keys a warpgroup",
      plan.block_rows, plan.head_dim, plan.value_dim));
  e.decisions.push_back(fmt::format("{} stages of Q, {} of dO, {} of dS: {} bytes of shared memory",
                                    plan.q_stages, plan.o_stages, plan.ds_stages,
                                    plan.keys_shared_bytes));
  describe_dq(plan, e);
  describe_cuts(plan, e);
  describe_backward(plan, plan, e);
  return e;
}

}  // namespace fulgur::cuda::sm90

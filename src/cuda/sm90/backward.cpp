#include "cuda/sm90/backward.h"

#include <algorithm>
#include <utility>

#include "cuda/common/launch.h"
#include "cuda/common/tensor_map.h"
#include "kernels/host_device/work_tiles.h"

namespace fulgur::cuda::sm90 {
namespace {

/// The tensor maps of the inputs.
constexpr TensorMapBlob BackwardParams::*kMaps[] = {
    &BackwardParams::q_map, &BackwardParams::k_map, &BackwardParams::v_map,
    &BackwardParams::dout_map, &BackwardParams::bias_map};

constexpr int kRowsThreads = 384, kReduceColumns = 32;
constexpr int kMaxGridY = 65535;
constexpr int kBiasGradientRows = 128, kBiasGradientThreads = 384;

// The key of a kernel has only the fields that its text depends on, so that plans that differ in
// other fields share the kernel. Some kernels depend on d only by the number of lanes or panels of
// a row.

KernelUse use(const char* source, const BackwardKey& key, const char* entry, int shared) {
  return {{source, kernel_config(key)}, entry, shared};
}

KernelUse keys_kernel(const BackwardPlan& plan) {
  BackwardKey key = plan;
  key.row_tiles = key.row_stages = 0;
  key.has_dlse = false;
  return use(plan.wide() ? "sm90/backward/keys_wide.cu" : "sm90/backward/keys.cu", key,
             "fulgur_backward_keys", plan.keys_shared_bytes);
}

KernelUse rows_kernel(const BackwardPlan& plan) {
  BackwardKey key = plan;
  key.value_dim = key.k_stages = key.q_stages = key.o_stages = key.ds_stages = key.dq_stages = 0;
  key.transforms_scores = key.softcap = key.alibi = key.dropout = key.has_dlse = false;
  key.bias_rows = key.f32_key_gradients = false;
  key.bias_terms = 0;
  key.key_gradients = true;
  return use("sm90/backward/rows.cu", key, "fulgur_backward_rows", plan.rows_shared_bytes);
}

/// The kernel of the bias gradient. Its tiles have 128 queries and 64 keys, whatever tiles the
/// kernel by keys has.
BiasGradientKernel bias_gradient_kernel(const BackwardPlan& plan) {
  if (!plan.dbias) return {};
  BackwardKey key;
  static_cast<KernelKey&>(key) = plan;
  key.maps_tiles = false;
  key.consumers = kBiasGradientRows / 64;
  key.block_rows = kBiasGradientRows;
  key.block_keys = kBiasGradientKeys;
  key.dropout = plan.dropout;
  const int shared_bytes = kernels::bias_gradient_layout(tile_of(key)).bytes;
  return {use("sm90/backward/bias_gradient.cu", key, "fulgur_bias_gradient", shared_bytes),
          kBiasGradientRows, kBiasGradientThreads, 1};
}

KernelUse reduce_kernel(const BackwardPlan& plan) {
  BackwardKey key;
  static_cast<AnyBackwardKey&>(key) = reduce_key(plan);
  key.consumers = plan.consumers;
  return use("sm90/backward/reduce.cu", key, "fulgur_backward_reduce", 0);
}

/// Whether round.cu rounds dQ.
bool has_round_kernel(const BackwardPlan& plan) { return plan.accumulates_dq() && !plan.rounds_dq; }

}  // namespace

std::vector<KernelUse> backward_kernels(const BackwardPlan& plan) {
  std::vector<KernelUse> kernels = {keys_kernel(plan)};
  if (plan.stores_ds()) kernels.push_back(rows_kernel(plan));
  if (plan.reduces()) kernels.push_back(reduce_kernel(plan));
  if (plan.has_repair_kernel()) kernels.push_back(repair_kernel(plan));
  add_backward_kernels(plan, plan, has_round_kernel(plan), bias_gradient_kernel(plan), kernels);
  return kernels;
}

BackwardExecutable::BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan,
                                       Explanation explanation)
    : BackwardPassExecutable(problem, gpu, std::move(explanation), plan, plan,
                             workspace_of(problem, plan), plan.bias_tile() != 0 ? 5 : 4,
                             plan.p_log2(), has_round_kernel(plan), bias_gradient_kernel(plan)),
      plan_(plan),
      at_(workspace_of(problem, plan)) {
  if (at_.end == 0) return;
  params_.score_tiles = plan_.score_tiles;
  params_.cut_blocks = plan_.cut_blocks;
  params_.first_partial = plan_.first_cut_head;
  const CurrentContext current(gpu.context());
  for (size_t i = 0; i < inputs_.size(); ++i) encode(inputs_[i].shape, &(params_.*kMaps[i]));
  keys_ = gpu.kernel(keys_kernel(plan_)).function;
  if (plan_.stores_ds()) rows_ = gpu.kernel(rows_kernel(plan_)).function;
  if (plan_.reduces()) reduce_ = gpu.kernel(reduce_kernel(plan_)).function;
  if (plan_.has_repair_kernel()) repair_ = gpu.kernel(repair_kernel(plan_)).function;
}

BackwardParams BackwardExecutable::params(const BackwardArgs& args, const Run& run,
                                          char* workspace) const {
  BackwardParams p = arguments(args, run, workspace);
  p.dq_additions = reinterpret_cast<int*>(workspace + at_.dq_additions);
  p.zeros = reinterpret_cast<unsigned char*>(workspace + at_.zeros);
  p.ds = reinterpret_cast<unsigned char*>(workspace + at_.ds);
  p.first_parts = reinterpret_cast<int*>(workspace + at_.first_parts);
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const TensorShape& shape = inputs_[i].shape;
    // Empty tensors are never read, but their tensor maps must be valid: they point to the
    // workspace.
    place(shape, shape.empty() ? workspace : inputs_[i].data(args, workspace), &(p.*kMaps[i]));
  }
  return p;
}

void BackwardExecutable::launch(const BackwardArgs& args, const Run& run, char* workspace) const {
  const auto stream = static_cast<CUstream>(run.stream);
  BackwardParams p = params(args, run, workspace);
  // The first kernel sets semaphores by the order of key blocks. It starts after all earlier work
  // of the stream, so that all kernels see the inputs; the other kernels start early.
  if (!plan_.waves.empty()) p.key_blocks = plan_.waves.front().key_blocks;
  launch_map(stream, workspace, p);
  row_kernels_.launch_first(stream, p);
  for (const BackwardWave& wave : plan_.waves) {
    p.wave = wave.wave;
    p.key_blocks = wave.key_blocks;
    p.row_blocks = wave.row_blocks;
    const auto grid = [&](const kernels::BlockSchedule& blocks) {
      return static_cast<int>(
          std::min<int64_t>(plan_.grid, int64_t{blocks.blocks} * blocks.batch_heads));
    };
    if (grid(p.key_blocks) > 0) {
      cuda::launch(stream, keys_, &p, {grid(p.key_blocks)}, plan_.threads(),
                   plan_.keys_shared_bytes, "launching the backward kernel by keys", Start::kEarly);
    }
    if (plan_.stores_ds() && grid(p.row_blocks) > 0) {
      cuda::launch(stream, rows_, &p, {grid(p.row_blocks)}, kRowsThreads, plan_.rows_shared_bytes,
                   "launching the backward kernel by rows", Start::kEarly);
    }
  }
  if (plan_.reduces()) {
    const auto chunks = [](int dim) { return ceil_div(dim, kReduceColumns); };
    const int blocks = p.key_blocks.blocks * (chunks(plan_.head_dim) + chunks(plan_.value_dim));
    const int batch_heads = std::min(p.batch * (p.hq / p.group), kMaxGridY);
    cuda::launch(stream, reduce_, &p, {blocks, batch_heads}, 2 * plan_.block_keys, 0,
                 "launching the kernel that reduces dK and dV", Start::kEarly);
  }
  row_kernels_.launch_last(stream, p);
  launch_bias_gradient(stream, p);
  if (plan_.has_repair_kernel()) {
    cuda::launch(stream, repair_, &p, {gpu_.sms()}, kRepairThreads, 0,
                 "launching the kernel that repairs gradients", Start::kEarly);
  }
}

}  // namespace fulgur::cuda::sm90

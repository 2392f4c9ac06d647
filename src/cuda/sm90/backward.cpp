#include "cuda/sm90/backward.h"

#include <algorithm>

#include "cuda/common/launch.h"
#include "kernels/host_device/work_tiles.h"

namespace fulgur::cuda::sm90 {
namespace {

constexpr int kRowsThreads = 384, kRepairThreads = 256, kReduceColumns = 32;
constexpr int kMaxGridY = 65535;
constexpr int kBiasGradientRows = 128, kBiasGradientThreads = 384;

// The key of each kernel has only the fields that its text depends on, so that plans that differ in
// others share the kernel. Some kernels see only how many lanes or panels the columns of a row
// take.

constexpr int kWarpColumns = 32;

int round_up(int dims, int columns) { return ceil_div(dims, columns) * columns; }

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
  key.bias_rows = false;
  return use("sm90/backward/rows.cu", key, "fulgur_backward_rows", plan.rows_shared_bytes);
}

KernelUse repair_kernel(const BackwardPlan& plan) {
  BackwardKey key;
  static_cast<KernelKey&>(key) = plan;
  key.head_dim = round_up(plan.head_dim, kWarpColumns);
  key.value_dim = round_up(plan.value_dim, kWarpColumns);
  key.dropout = plan.dropout;
  return use("sm90/backward/repair.cu", key, "fulgur_backward_repair", 0);
}

/// Its tiles are 128 queries and 64 keys, whatever those of the kernel by keys are.
KernelUse bias_gradient_kernel(const BackwardPlan& plan) {
  BackwardKey key;
  static_cast<KernelKey&>(key) = plan;
  key.consumers = kBiasGradientRows / 64;
  key.block_rows = kBiasGradientRows;
  key.block_keys = kBiasGradientKeys;
  key.dropout = plan.dropout;
  const int shared_bytes = kernels::bias_gradient_layout(tile_of(key)).bytes;
  return use("sm90/backward/bias_gradient.cu", key, "fulgur_bias_gradient", shared_bytes);
}

KernelUse reduce_kernel(const BackwardPlan& plan) {
  BackwardKey key;
  key.dtypes = plan.dtypes;
  key.head_dim = plan.head_dim;
  key.value_dim = plan.value_dim;
  key.consumers = plan.consumers;
  key.block_keys = plan.block_keys;
  key.has_right = plan.repairs();  // either bound has the same text
  key.packed = plan.packed;
  key.elements = plan.elements;
  return use("sm90/backward/reduce.cu", key, "fulgur_backward_reduce", 0);
}

/// Whether round.cu rounds dQ.
bool has_round_kernel(const BackwardPlan& plan) { return plan.accumulates_dq() && !plan.rounds_dq; }

}  // namespace

std::vector<KernelUse> backward_kernels(const BackwardPlan& plan) {
  std::vector<KernelUse> kernels = {keys_kernel(plan), prepare_kernel(plan)};
  if (has_round_kernel(plan)) kernels.push_back(round_kernel(plan));
  if (!plan.accumulates_dq()) kernels.push_back(rows_kernel(plan));
  if (plan.dsinks) kernels.push_back(sinks_kernel(plan));
  if (plan.dbias) kernels.push_back(bias_gradient_kernel(plan));
  if (plan.reduces()) kernels.push_back(reduce_kernel(plan));
  if (plan.has_repair_kernel()) kernels.push_back(repair_kernel(plan));
  if (plan.copies()) kernels.push_back(copy_kernel());
  return kernels;
}

BackwardExecutable::BackwardExecutable(const Problem& problem, Gpu& gpu, const BackwardPlan& plan,
                                       Reasons reasons)
    : gpu_(gpu),
      plan_(plan),
      reasons_(std::move(reasons)),
      metadata_(problem, gpu),
      expressions_(problem),
      workspace_(workspace_of(problem, plan)) {
  if (workspace_.end == 0) return;
  set_params(problem);
  set_inputs(problem);
  row_kernels_ = RowKernels(problem, plan_, plan_, has_round_kernel(plan_), gpu_);
  keys_ = gpu_.kernel(keys_kernel(plan_)).function;
  if (!plan_.accumulates_dq()) rows_ = gpu_.kernel(rows_kernel(plan_)).function;
  if (plan_.dbias) bias_gradient_ = gpu_.kernel(bias_gradient_kernel(plan_)).function;
  if (plan_.reduces()) reduce_ = gpu_.kernel(reduce_kernel(plan_)).function;
  if (plan_.has_repair_kernel()) repair_ = gpu_.kernel(repair_kernel(plan_)).function;
  if (plan_.copies()) copy_ = gpu_.kernel(copy_kernel()).function;
}

void BackwardExecutable::set_params(const Problem& p) {
  BackwardParams& to = params_;
  to = backward_params(p, plan_, plan_, plan_.p_log2());
  to.score_tiles = plan_.score_tiles;
  to.splits = plan_.splits;
  to.split_heads = plan_.split_heads;
  to.row_splits = plan_.row_splits;
  to.row_split_tiles = std::max(ceil_div(ceil_div(p.sq, plan_.block_rows), plan_.row_splits), 1);
  to.cut_blocks = plan_.cut_blocks;
  to.first_partial = plan_.first_cut_head;
  if (plan_.dbias) to.bias_sums = bias_sums(p);
}

void BackwardExecutable::set_inputs(const Problem& p) {
  const BackwardShapes maps = backward_shapes(p);
  const auto input = [&](const char* name, ConstTensor BackwardArgs::*argument,
                         const TensorShape& shape, bool copied, int64_t offset,
                         TensorMapBlob BackwardParams::*map) {
    Input in{name, argument, copied ? cuda::copied(shape) : shape, copied, offset, {}, map};
    if (copied) in.copy = copy_params(shape, in.shape);
    return in;
  };
  const auto& [q, k, v, dout, bias] = workspace_.copies;
  inputs_ = {
      input("q", &BackwardArgs::q, maps.q, !plan_.copies_q.empty(), q, &BackwardParams::q_map),
      input("k", &BackwardArgs::k, maps.k, !plan_.copies_k.empty(), k, &BackwardParams::k_map),
      input("v", &BackwardArgs::v, maps.v, !plan_.copies_v.empty(), v, &BackwardParams::v_map),
      input("dout", &BackwardArgs::dout, maps.dout, !plan_.copies_dout.empty(), dout,
            &BackwardParams::dout_map)};
  if (plan_.bias != 0) {
    inputs_.push_back(input("bias", &BackwardArgs::bias, maps.bias, !plan_.copies_bias.empty(),
                            bias, &BackwardParams::bias_map));
  }
}

BackwardParams BackwardExecutable::params(const BackwardArgs& args, const Run& run,
                                          char* workspace) const {
  BackwardParams p = params_;
  set_backward_tensors(p, args, run);
  p.expression = expressions_.arguments(args.tensors);
  if (plan_.dbias)
    set_bias_sums(args.dbias, params_.sk, gpu_.sms(), kBiasGradientRows, p.bias_sums);
  p.counters = reinterpret_cast<int*>(workspace);
  p.not_finite = p.counters + kernels::kSchedulerCounters;
  p.shift = reinterpret_cast<float*>(workspace + workspace_.shift);
  p.delta = reinterpret_cast<float*>(workspace + workspace_.delta);
  p.dq_accum = reinterpret_cast<float*>(workspace + workspace_.dq_accum);
  p.dq_semaphore = reinterpret_cast<int*>(workspace + workspace_.dq_semaphore);
  p.dq_additions = reinterpret_cast<int*>(workspace + workspace_.dq_additions);
  p.zeros = reinterpret_cast<unsigned char*>(workspace + workspace_.zeros);
  p.ds = reinterpret_cast<unsigned char*>(workspace + workspace_.ds);
  p.partial_dk = reinterpret_cast<float*>(workspace + workspace_.partial_dk);
  p.partial_dv = reinterpret_cast<float*>(workspace + workspace_.partial_dv);
  p.first_parts = reinterpret_cast<int*>(workspace + workspace_.first_parts);
  for (const Input& in : inputs_) {
    const ConstTensor& tensor = args.*in.argument;
    void* from =
        in.copied ? workspace + in.offset : aligned_data(in.name, tensor, in.shape.empty());
    // Empty tensors are never read, but their maps must be valid: they describe the workspace.
    encode(in.shape, in.shape.empty() ? workspace : from, &(p.*in.map));
  }
  return p;
}

void BackwardExecutable::run(const Call& call, const Run& run) const {
  const BackwardArgs& args = *std::get<const BackwardArgs*>(call);
  metadata_.check(args);
  if (workspace_.end == 0) return;
  const CurrentContext current(gpu_.context());
  const auto stream = static_cast<CUstream>(run.stream);
  const LaunchMemory::Lease lease = gpu_.launch_memory().of(run, workspace());
  char* const workspace = lease.data;
  void* const metadata = workspace + workspace_.metadata;
  BackwardParams p = params(metadata_.moved(args, metadata), run, workspace);
  metadata_.store(args, stream, metadata);
  for (const Input& in : inputs_) {
    if (!in.copied) continue;
    ForwardCopyParams copy = in.copy;
    copy.from = (args.*in.argument).data;
    copy.to = workspace + in.offset;
    launch(stream, copy_, &copy, {kCopyBlocks * gpu_.sms()}, kCopyThreads, 0,
           "launching the kernel that copies rows");
  }
  // The first kernel sets semaphores by the order of key blocks. It starts after everything that is
  // on the stream, so that all kernels see the inputs; each other one starts early.
  if (!plan_.waves.empty()) p.key_blocks = plan_.waves.front().key_blocks;
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
      launch(stream, keys_, &p, {grid(p.key_blocks)}, plan_.threads(), plan_.keys_shared_bytes,
             "launching the backward kernel by keys", Start::kEarly);
    }
    if (!plan_.accumulates_dq() && grid(p.row_blocks) > 0) {
      launch(stream, rows_, &p, {grid(p.row_blocks)}, kRowsThreads, plan_.rows_shared_bytes,
             "launching the backward kernel by rows", Start::kEarly);
    }
  }
  if (plan_.reduces()) {
    const auto chunks = [](int dim) { return ceil_div(dim, kReduceColumns); };
    const int blocks = p.key_blocks.blocks * (chunks(plan_.head_dim) + chunks(plan_.value_dim));
    const int batch_heads = std::min(p.batch * (p.hq / p.group), kMaxGridY);
    launch(stream, reduce_, &p, {blocks, batch_heads}, 2 * plan_.block_keys, 0,
           "launching the kernel that reduces dK and dV", Start::kEarly);
  }
  row_kernels_.launch_last(stream, p);
  if (plan_.dbias) {
    const auto grid = std::min<int64_t>(gpu_.sms(), p.bias_sums.work_tiles);
    if (grid > 0) {
      launch(stream, bias_gradient_, &p, {static_cast<int>(grid)}, kBiasGradientThreads,
             bias_gradient_kernel(plan_).shared_bytes, "launching the kernel of dbias");
    }
  }
  if (plan_.has_repair_kernel()) {
    launch(stream, repair_, &p, {gpu_.sms()}, kRepairThreads, 0,
           "launching the kernel that repairs gradients", Start::kEarly);
  }
}

Explanation BackwardExecutable::explain() const {
  Explanation e = with_reasons(describe(plan_), reasons_);
  metadata_.describe(e);
  return e;
}

WorkspaceNeed BackwardExecutable::workspace() const {
  if (workspace_.end == 0) return {};
  return {workspace_.end, kWorkspaceAlignment, LaunchMemory::kZeroed};
}

}  // namespace fulgur::cuda::sm90

#include "cuda/passes/backward.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "cuda/device/launch_memory.h"

namespace fulgur::cuda {
namespace {

constexpr int kPrepareThreads = 256, kSinksThreads = 1024, kPanelThreads = 128;
constexpr int kMaxGridY = 65535;
constexpr int kPanelColumns = 64, kWarpColumns = 32;

int round_up(int dims, int columns) { return ceil_div(dims, columns) * columns; }

/// A key with only those fields that follow from the target.
AnyBackwardKey of_target(const AnyBackwardKey& key) {
  AnyBackwardKey other;
  other.dq_by_fours = key.dq_by_fours;
  other.early_starts = key.early_starts;
  return other;
}

KernelUse use(const char* source, const AnyBackwardKey& key, const char* entry) {
  return {{source, kernel_config(key)}, entry, 0};
}

int statistics_rows(const Problem& p) {
  const int64_t rows = kernels::kStatisticsRows;
  return static_cast<int>(p.packed ? (p.total_q / rows + p.batch + 1) * rows
                                   : p.batch * ceil_div(p.sq, rows) * rows);
}

/// Sets the addresses of a run's tensors.
void set_backward_tensors(BackwardParams& p, const BackwardArgs& args, const Run& run) {
  const auto data = [](const ConstTensor& t) { return const_cast<void*>(t.data); };
  p.q.data = data(args.q);
  p.k.data = data(args.k);
  p.v.data = data(args.v);
  p.out.data = data(args.out);
  p.dout.data = data(args.dout);
  p.dq.data = data(args.dq);
  p.dk.data = data(args.dk);
  p.dv_grad.data = data(args.dv);
  p.lse.data = static_cast<const float*>(args.lse.data);
  p.dlse.data = static_cast<const float*>(args.dlse.data);
  p.sinks = sinks_of(args.sinks);
  p.dsinks = args.dsinks.data;
  p.dsinks_type = static_cast<kernels::Element>(args.dsinks.dtype);
  set_tensors(p, args);
  set_random_numbers(p, run);
}

/// Sets the fields of a BiasSums that depend on a run, for tiles of `tile_rows` rows. A run's dbias
/// may have more rows and keys than the longest sequence, and so more tiles. Where an element is
/// not a sum over several scores, a work tile has several tiles of keys, which reuse Q and dO, but
/// only so many that all SMs have work.
void set_bias_sums(const Tensor& dbias, int64_t sk, int sms, int tile_rows, BiasSums& sums) {
  constexpr int kWorkTilesOfSm = 4;
  sums.data = dbias.data;
  sums.rows = static_cast<int>(dbias.shape[2]);
  sums.keys = static_cast<int>(dbias.shape[3]);
  sums.row_tiles = sums.of_rows ? ceil_div(sums.rows, tile_rows) : 1;
  sums.key_tiles = std::max(ceil_div(sums.of_keys ? sums.keys : sk, kBiasGradientKeys), 1);
  const int64_t batches = sums.of_batch ? dbias.shape[0] : 1;
  const int64_t blocks = batches * sums.heads * sums.row_tiles;
  int64_t chunks = sums.key_tiles;
  if (!sums.of_keys)
    chunks = 1;
  else if (sums.of_batch && sums.of_heads && sums.of_rows)
    chunks = std::clamp<int64_t>(kWorkTilesOfSm * sms / std::max<int64_t>(blocks, 1), 1, chunks);
  sums.chunk_tiles = ceil_div(sums.key_tiles, static_cast<int>(chunks));
  sums.key_chunks = ceil_div(sums.key_tiles, sums.chunk_tiles);
  sums.work_tiles = dbias.numel() == 0 ? 0 : blocks * sums.key_chunks;
}

}  // namespace

int64_t AnyBackwardKey::dq_accum_floats(int64_t rows) const {
  return accumulates_dq() ? rows * kernels::dq_panels_of(head_dim) * kPanelColumns : 0;
}

AnyBackwardKey reduce_key(const AnyBackwardKey& key) {
  AnyBackwardKey of_parts;
  of_parts.dtypes = key.dtypes;
  of_parts.head_dim = key.head_dim;
  of_parts.value_dim = key.value_dim;
  of_parts.block_keys = key.block_keys;
  of_parts.has_right = key.repairs();  // a left bound has the same device text
  of_parts.packed = key.packed;
  of_parts.f32_key_gradients = key.f32_key_gradients;
  of_parts.elements = key.elements;
  return of_parts;
}

AnyForwardKey map_key(const AnyBackwardKey& of) {
  AnyForwardKey key;
  static_cast<KernelKey&>(key) = of;
  key.packed_k = of.packed;
  return key;
}

std::string backward_rejects(const Problem& p) {
  std::string why = dtypes_rejected(p.dtypes);
  return why.empty() ? backward_sizes_rejected(p) : why;
}

std::string backward_sizes_rejected(const Problem& p, const HeadDims& max) {
  if (std::string why = sizes_rejected(p, max); !why.empty()) return why;
  const BackwardShapes maps = backward_shapes(p);
  for (const auto& [name, shape] : {std::pair{"q", &maps.q}, std::pair{"k", &maps.k},
                                    std::pair{"v", &maps.v}, std::pair{"dout", &maps.dout}}) {
    if (const std::string why = rows_unsupported(*shape); !why.empty()) {
      return fmt::format("{} {}", name, why);
    }
  }
  // The kernels count blocks and the rows of statistics with ints.
  constexpr double kMax = std::numeric_limits<int>::max();
  const int64_t blocks = (std::max(p.sq, p.sk) + 63) / 64 + 1;
  // Products of doubles cannot overflow: q may have any number of heads if it has no rows.
  const double batch = static_cast<double>(p.batch), heads = batch * static_cast<double>(p.hq);
  if (heads * static_cast<double>(blocks) > kMax ||
      batch * static_cast<double>((p.sq + 127) / 128 * 128) > kMax) {
    return fmt::format("computes up to 2^31 blocks of rows, got {:.0f} heads of {}", heads, blocks);
  }
  return {};
}

void set_problem(const Problem& p, AnyBackwardKey& key, AnyBackwardPlan& plan) {
  static_cast<KernelKey&>(key) = kernel_key(p);
  key.dropout = p.dropout_p > 0;
  key.key_gradients = p.wants_dk_dv();
  key.has_dlse = p.has(Arg::kDlse);
  key.f32_key_gradients = p.f32_key_gradients;
  plan.dsinks = p.has(Arg::kDsinks);
  plan.dbias = p.has(Arg::kDbias);
  plan.dtensors = p.expressions.wants_gradients();
  plan.statistics_rows = statistics_rows(p);
  plan.split_heads = static_cast<int>(p.group());
  const BackwardShapes maps = backward_shapes(p);
  plan.copies_q = not_addressable(maps.q);
  plan.copies_k = not_addressable(maps.k);
  plan.copies_v = not_addressable(maps.v);
  plan.copies_dout = not_addressable(maps.dout);
  plan.copies_bias = not_addressable(maps.bias);
  const int64_t row_bytes[] = {p.d * size_of(p.dtypes.q), p.d * size_of(p.dtypes.k),
                               p.dv * size_of(p.dtypes.v)};
  key.elements =
      std::ranges::any_of(row_bytes, [](int64_t bytes) { return bytes % kCopyAlignment != 0; });
  for (const TensorShape& shape : {maps.dq, maps.dk, maps.dv, maps.out, maps.dout}) {
    key.elements = key.elements || !not_addressable(shape).empty();
  }
}

void describe_backward(const AnyBackwardKey& key, const AnyBackwardPlan& plan, Explanation& to) {
  to.details.add("splits", plan.splits);
  to.details.add("split_q_heads", plan.split_heads);
  to.details.add("row_splits", plan.row_splits);
  if (key.dq_method == DqMethod::kNone || !key.key_gradients) {
    to.decisions.emplace_back(key.key_gradients ? "dK and dV alone, as dq is not wanted"
                                                : "dQ alone, as dk and dv are not wanted");
  }
  if (plan.reduces()) {
    to.decisions.push_back(fmt::format(
        "{} splits of each kv head, of {} q heads{}: a kernel adds their partial dK and dV",
        plan.splits, plan.split_heads,
        plan.row_splits > 1 ? fmt::format(" and one of {} ranges of rows", plan.row_splits) : ""));
  }
  describe_copies({{"q", plan.copies_q},
                   {"k", plan.copies_k},
                   {"v", plan.copies_v},
                   {"dout", plan.copies_dout},
                   {"bias", plan.copies_bias}},
                  to);
  describe_map(key, to);
  to.details.add("dsinks", plan.dsinks);
  to.details.add("dbias", plan.dbias);
  if (plan.dbias) {
    to.decisions.emplace_back(
        "dbias by a kernel of its own, which computes S and dP again and adds in a fixed order");
  }
  if (plan.dsinks) {
    to.decisions.emplace_back("dsinks by a kernel of its own, a CTA a head, in f64: deterministic");
  }
  if (key.elements) {
    to.details.add("stores_elements", true);
    to.decisions.emplace_back(
        "gradients are stored by elements: rows are no multiples of 16 bytes");
  }
}

KernelUse prepare_kernel(const AnyBackwardKey& of) {
  AnyBackwardKey key = of_target(of);
  key.dtypes = of.dtypes;
  // A row of dO is read by 8, 16 or 32 lanes, 8 columns each; above 256 twice.
  key.value_dim =
      static_cast<int>(std::bit_ceil(static_cast<unsigned>(std::max(of.value_dim, 64))));
  key.dq_method = of.dq_method;
  key.rounds_dq = of.rounds_dq;
  const bool ordered = of.dq_method == DqMethod::kOrdered;
  key.maps_tiles = of.maps_tiles && ordered;
  if (of.accumulates_dq()) key.head_dim = round_up(of.head_dim, kPanelColumns);
  if (ordered) key.dq_parts = of.dq_parts;
  if (ordered || of.makes_map) {  // the kernel needs to know which tiles are seen
    key.block_rows = of.block_rows;
    key.block_keys = of.block_keys;
    key.has_left = of.has_left;
    key.has_right = of.has_right;
    key.has_chunk = of.has_chunk;
    key.top_left = of.top_left;
    key.part = of.part;
    key.seqused_k = of.seqused_k;
  }
  key.packed = of.packed;
  if (of.packed) {
    key.key_gradients = of.key_gradients;
    key.f32_key_gradients = of.f32_key_gradients;
  }
  key.seqused_q = of.seqused_q;
  key.has_dlse = of.has_dlse;
  key.elements = of.elements;
  if (of.makes_map) {
    key.makes_map = key.maps_tiles = key.mask_mod = true;
    key.expressions = prepared_map_text(of, map_tiles(of));
  }
  return use("backward/prepare.cu", key, "fulgur_backward_prepare");
}

KernelUse round_kernel(const AnyBackwardKey& of) {
  AnyBackwardKey key = of_target(of);
  if (of.repairs()) {
    static_cast<KernelKey&>(key) = of;
    key.dropout = of.dropout;
    key.key_gradients = of.key_gradients;
    key.f32_key_gradients = of.f32_key_gradients;
  }
  if (of.dq_method == DqMethod::kNone) key.dq_method = of.dq_method;
  key.dtypes = of.dtypes;
  key.head_dim = round_up(of.head_dim, kPanelColumns);
  key.value_dim = round_up(of.value_dim, kWarpColumns);
  key.packed = of.packed;
  key.seqused_q = of.seqused_q;
  key.elements = of.elements;
  return use("backward/round.cu", key, "fulgur_backward_round");
}

KernelUse sinks_kernel(const AnyBackwardKey& of) {
  AnyBackwardKey key = of_target(of);
  key.packed = of.packed;
  key.seqused_q = of.seqused_q;
  return use("backward/sinks.cu", key, "fulgur_backward_sinks");
}

KernelUse repair_kernel(const AnyBackwardKey& of) {
  AnyBackwardKey key = of_target(of);
  static_cast<KernelKey&>(key) = of;
  key.head_dim = round_up(of.head_dim, kWarpColumns);
  key.value_dim = round_up(of.value_dim, kWarpColumns);
  key.dropout = of.dropout;
  key.key_gradients = of.key_gradients;
  key.f32_key_gradients = of.f32_key_gradients;
  if (of.dq_method == DqMethod::kNone) key.dq_method = of.dq_method;
  return use("backward/repair.cu", key, "fulgur_backward_repair");
}

AnyBackwardWorkspace backward_workspace(const Problem& p, const AnyBackwardKey& key,
                                        const AnyBackwardPlan& plan, int64_t dq_semaphores,
                                        int64_t partial_keys, Arena& arena) {
  AnyBackwardWorkspace at;
  const int64_t rows = p.hq * plan.statistics_rows;
  at.zeroed = LaunchMemory::kZeroed;
  at.shift = arena.take(rows * int64_t{sizeof(float)});
  at.delta = arena.take(rows * int64_t{sizeof(float)});
  at.dq_accum = arena.take(key.dq_accum_floats(rows) * int64_t{sizeof(float)});
  at.dq_semaphore = arena.take(dq_semaphores * int64_t{sizeof(int)});
  at.partial_dk = arena.take(partial_keys * key.head_dim * int64_t{sizeof(float)});
  at.partial_dv = arena.take(partial_keys * key.value_dim * int64_t{sizeof(float)});
  const BackwardShapes shapes = backward_shapes(p);
  at.copies = {arena.take(copied_bytes(shapes.q, plan.copies_q)),
               arena.take(copied_bytes(shapes.k, plan.copies_k)),
               arena.take(copied_bytes(shapes.v, plan.copies_v)),
               arena.take(copied_bytes(shapes.dout, plan.copies_dout)),
               arena.take(copied_bytes(shapes.bias, plan.copies_bias))};
  at.map = arena.take(TileMap::bytes(p, key, map_tiles(key)));
  return at;
}

BackwardParams backward_params(const Problem& p, const AnyBackwardKey& key,
                               const AnyBackwardPlan& plan, double p_log2) {
  BackwardParams to{};
  static_cast<CallParams&>(to) = call_params(p, band_of(key, p));
  to.q = strided(p.q);
  to.k = strided(p.k);
  to.v = strided(p.v);
  to.out = strided(p.out);
  to.dout = strided(p.dout);
  to.dq = strided(p.dq);
  to.dk = strided(p.dk);
  to.dv_grad = strided(p.dv_grad);
  to.lse = {nullptr, p.lse.batch, p.lse.head};
  to.dlse = {nullptr, p.dlse.batch, p.dlse.head};
  const double p_scale = std::exp2(-p_log2);
  to.p_log2 = static_cast<float>(p_log2);
  to.scale = static_cast<float>(p.scale * p_scale);
  to.dv_scale = static_cast<float>(p_scale / (1 - p.dropout_p));
  to.p_scale = static_cast<float>(p_scale);
  to.batch = static_cast<int>(p.batch);
  to.statistics_rows = plan.statistics_rows;
  to.splits = plan.splits;
  to.split_heads = plan.split_heads;
  to.row_splits = plan.row_splits;
  to.row_split_tiles = std::max(ceil_div(ceil_div(p.sq, key.block_rows), plan.row_splits), 1);
  return to;
}

BiasSums bias_sums(const Problem& p) {
  const Problem::Bias& b = p.dbias;
  BiasSums sums{};
  sums.type = static_cast<kernels::Element>(b.dtype);
  sums.batch_stride = b.batch;
  sums.head_stride = b.head;
  sums.row_stride = b.row;
  sums.key_stride = b.key;
  sums.of_batch = b.batch != 0;
  sums.of_heads = b.head != 0;
  sums.of_rows = b.row != 0;
  sums.of_keys = b.key != 0;
  sums.heads = sums.of_heads ? static_cast<int>(p.hq) : 1;
  return sums;
}

void add_backward_kernels(const AnyBackwardKey& key, const AnyBackwardPlan& plan, bool rounds,
                          const BiasGradientKernel& bias_gradient,
                          std::vector<KernelUse>& kernels) {
  kernels.push_back(prepare_kernel(key));
  if (rounds) kernels.push_back(round_kernel(key));
  if (plan.dsinks) kernels.push_back(sinks_kernel(key));
  if (plan.dbias) kernels.push_back(bias_gradient.use);
  if (plan.copies()) kernels.push_back(copy_kernel());
  add_map_kernels(map_key(key), map_tiles(key), kernels);
}

RowKernels::RowKernels(const Problem& p, const AnyBackwardKey& key, const AnyBackwardPlan& plan,
                       bool rounds, Gpu& gpu)
    : row_chunks_(std::max(ceil_div(p.sq, kPanelColumns), 1)),
      batch_heads_(static_cast<int>(std::clamp<int64_t>(p.batch * p.hq, 1, kMaxGridY))),
      round_threads_(kPanelThreads * kernels::dq_panels_of(key.head_dim)),
      start_(key.early_starts ? Start::kEarly : Start::kAfterAll),
      makes_map_(key.makes_map),
      maps_rows_(map_tiles(key).by_rows_too) {
  prepare_ = gpu.kernel(prepare_kernel(key)).function;
  if (plan.dsinks) sinks_ = gpu.kernel(sinks_kernel(key)).function;
  if (rounds) round_ = gpu.kernel(round_kernel(key)).function;
}

void RowKernels::launch_first(CUstream stream, const BackwardParams& params) const {
  int maps = 0;  // rows of the grid whose CTAs make the map
  if (makes_map_) {
    const kernels::MapShape& shape = params.expression.map_shape;
    maps = ceil_div(kernels::fused_map_ctas(shape, /*by_keys=*/true, maps_rows_), row_chunks_);
  }
  launch(stream, prepare_, &params, {row_chunks_, maps + std::min(batch_heads_, kMaxGridY - maps)},
         kPrepareThreads, 0, "launching the kernel that prepares rows");
  if (sinks_ == nullptr) return;
  launch(stream, sinks_, &params, {params.hq}, kSinksThreads, 0, "launching the kernel of dsinks",
         start_);
}

void RowKernels::launch_last(CUstream stream, const BackwardParams& params) const {
  if (round_ == nullptr) return;
  launch(stream, round_, &params, {row_chunks_, batch_heads_}, round_threads_, 0,
         "launching the kernel that rounds dQ", start_);
}

BackwardPassExecutable::BackwardPassExecutable(const Problem& p, Gpu& gpu, Explanation explanation,
                                               const AnyBackwardKey& key,
                                               const AnyBackwardPlan& plan,
                                               const AnyBackwardWorkspace& workspace, int inputs,
                                               double p_log2, bool rounds,
                                               const BiasGradientKernel& bias_gradient)
    : AttentionExecutable(p, gpu, std::move(explanation), workspace, workspace.end > 0),
      at_(workspace),
      bias_gradient_(bias_gradient) {
  if (workspace.end == 0) return;
  params_ = backward_params(p, key, plan, p_log2);
  row_kernels_ = RowKernels(p, key, plan, rounds, gpu);
  map_ = TileMap(p, map_key(key), map_tiles(key), gpu);
  if (plan.dbias) {
    params_.bias_sums = bias_sums(p);
    bias_gradient_kernel_ = gpu.kernel(bias_gradient_.use).function;
  }
  struct Tensor {
    const char* name;
    ConstTensor BackwardArgs::*argument;
    TensorShape shape;
    const std::string& why_copied;
  };
  const BackwardShapes shapes = backward_shapes(p);
  const Tensor tensors[] = {{"q", &BackwardArgs::q, shapes.q, plan.copies_q},
                            {"k", &BackwardArgs::k, shapes.k, plan.copies_k},
                            {"v", &BackwardArgs::v, shapes.v, plan.copies_v},
                            {"dout", &BackwardArgs::dout, shapes.dout, plan.copies_dout},
                            {"bias", &BackwardArgs::bias, shapes.bias, plan.copies_bias}};
  for (int i = 0; i < inputs; ++i) {
    const auto& [name, argument, shape, why] = tensors[i];
    add_input(name, argument, shape, {why, workspace.copies[i]});
  }
}

BackwardParams BackwardPassExecutable::arguments(const BackwardArgs& args, const Run& run,
                                                 char* workspace) const {
  BackwardParams p = params_;
  set_backward_tensors(p, args, run);
  if (expressions_.given()) p.expression = expressions_.arguments(args.tensors);
  if (bias_gradient_kernel_ != nullptr)
    set_bias_sums(args.dbias, p.sk, gpu_.sms(), bias_gradient_.tile_rows, p.bias_sums);
  p.counters = reinterpret_cast<int*>(workspace);
  p.not_finite = p.counters + kernels::kSchedulerCounters;
  p.shift = reinterpret_cast<float*>(workspace + at_.shift);
  p.delta = reinterpret_cast<float*>(workspace + at_.delta);
  p.dq_accum = reinterpret_cast<float*>(workspace + at_.dq_accum);
  p.dq_semaphore = reinterpret_cast<int*>(workspace + at_.dq_semaphore);
  p.partial_dk = reinterpret_cast<float*>(workspace + at_.partial_dk);
  p.partial_dv = reinterpret_cast<float*>(workspace + at_.partial_dv);
  return p;
}

void BackwardPassExecutable::launch_map(CUstream stream, char* workspace,
                                        BackwardParams& params) const {
  AttentionParams call{};
  static_cast<CallParams&>(call) = params;
  call.expression = params.expression;
  map_.launch(stream, workspace + at_.map, call, params.expression);
}

void BackwardPassExecutable::launch_bias_gradient(CUstream stream,
                                                  const BackwardParams& params) const {
  if (bias_gradient_kernel_ == nullptr) return;
  const auto& [use, tile_rows, threads, sm_blocks] = bias_gradient_;
  const auto grid = std::min<int64_t>(sm_blocks * gpu_.sms(), params.bias_sums.work_tiles);
  if (grid == 0) return;
  cuda::launch(stream, bias_gradient_kernel_, &params, {static_cast<int>(grid)}, threads,
               use.shared_bytes, "launching the kernel of dbias");
}

}  // namespace fulgur::cuda

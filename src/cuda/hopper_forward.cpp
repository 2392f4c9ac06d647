#include "cuda/hopper_forward.h"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <numbers>

#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

constexpr int kPaddingThreads = 256;

const KernelRequest kPaddingRequest{"forward_padding.cu", "", "sm_90a"};

template <class T>
const T* device_data(const char* name, const Tensor& t) {
  if (t.given() && t.data == nullptr && t.numel() > 0) fail(name, "data is null");
  return static_cast<const T*>(t.data);
}

/// A run's data, where the copy engine can address it.
void* copy_data(const char* name, const Tensor& t, const TensorMapShape& shape) {
  if (!shape.empty() && reinterpret_cast<uintptr_t>(t.data) % kCopyAlignment != 0) {
    fail(name, "data {} is not aligned to the {} bytes that the cuda engine needs", t.data,
         kCopyAlignment);
  }
  return t.data;
}

}  // namespace

KernelRequest kernel_request(const HopperForwardPlan& plan) {
  return {"sm90/forward.cu", plan_header(plan), "sm_90a"};
}

std::vector<KernelRequest> forward_kernels(const Problem& problem, const HopperTarget& target) {
  std::vector<KernelRequest> requests;
  for (const HopperForwardPlan& plan : reachable_forward_plans(problem, target)) {
    requests.push_back(kernel_request(plan));
  }
  if (problem.packed) requests.push_back(kPaddingRequest);
  return requests;
}

HopperForward::HopperForward(const Problem& problem, Gpu& gpu, const HopperForwardPlan& plan,
                             std::vector<std::string> rejected)
    : gpu_(gpu),
      plan_(plan),
      rejected_(std::move(rejected)),
      maps_(forward_maps(problem, plan.block_keys)),
      stream_(static_cast<CUstream>(problem.stream)) {
  set_params(problem);  // may throw: nothing is held yet
  if (plan_.items > 0) {
    kernel_ = gpu_.kernel(kernel_request(plan_), "fulgur_forward", plan_.shared_bytes);
  }
  if (plan_.packed) padding_kernel_ = gpu_.kernel(kPaddingRequest, "fulgur_forward_padding", 0);
  workspace_ =
      gpu_.take_workspace(stream_, Gpu::kZeroed + plan_.partial_floats() * int64_t{sizeof(float)});
  params_.counters = reinterpret_cast<int*>(workspace_.data);
  params_.tickets = params_.counters + 2;
  params_.partial = reinterpret_cast<float*>(workspace_.data + Gpu::kZeroed);
}

HopperForward::~HopperForward() { gpu_.give_back(workspace_); }

void HopperForward::set_params(const Problem& p) {
  if (plan_.counters() * int64_t{sizeof(int)} > Gpu::kZeroed) {
    throw Error(Status::kInternal,
                fmt::format("{} counters do not fit the workspace", plan_.counters()));
  }
  constexpr double kLog2e = std::numbers::log2e;
  params_.o_batch_stride = p.out.batch;
  params_.o_row_stride = p.out.row;
  params_.o_head_stride = p.out.head;
  params_.lse_batch_stride = p.lse.batch;
  params_.lse_head_stride = p.lse.head;
  params_.cu_seqlens_q = device_data<int>("cu_seqlens_q", p.cu_seqlens_q);
  params_.cu_seqlens_k = device_data<int>("cu_seqlens_k", p.cu_seqlens_k);
  params_.seqused_k = device_data<int>("seqused_k", p.seqused_k);
  params_.alibi_slopes = device_data<float>("alibi_slopes", p.alibi_slopes);
  params_.alibi_batch_stride =
      p.alibi_slopes.rank == 2 ? static_cast<int>(p.alibi_slopes.strides[0]) : 0;
  params_.sq = static_cast<int>(p.sq);
  params_.sk = static_cast<int>(p.sk);
  params_.dv = static_cast<int>(p.dv);
  params_.hq = static_cast<int>(p.hq);
  params_.group = static_cast<int>(p.group());
  params_.window_left = plan_.has_left ? static_cast<int>(p.mask.left) : 0;
  params_.window_right = plan_.has_right ? static_cast<int>(p.mask.right) : 0;
  params_.scale_log2 = static_cast<float>(p.scale * kLog2e);
  if (plan_.softcap) {
    params_.softcap_scale = static_cast<float>(2 * kLog2e * p.scale / p.softcap);
    params_.softcap_log2 = static_cast<float>(p.softcap * kLog2e);
  }
  params_.row_tiles = plan_.row_tiles;
  params_.heads = plan_.heads;
  params_.section_heads = plan_.section_heads;
  params_.items = plan_.items;
  params_.first_split_tile = plan_.first_split_tile;
  params_.split_parts = plan_.split_parts;

  padding_.o_row_stride = p.out.row;
  padding_.o_head_stride = p.out.head;
  padding_.lse_head_stride = p.lse.head;
  padding_.cu_seqlens_q = params_.cu_seqlens_q;
  padding_.batch = static_cast<int>(p.batch);
  padding_.total_q = static_cast<int>(p.total_q);
  padding_.hq = params_.hq;
  padding_.dv = params_.dv;
}

void HopperForward::set_pointers(const ForwardArgs& args) {
  // An empty q or out launches nothing; empty k and v are never read, but their maps must be valid.
  const auto set = [&](const char* name, const Tensor& t, const TensorMapShape& shape, Tensor* last,
                       TensorMapBlob* map) {
    void* data = copy_data(name, t, shape);
    if (last->given() && last->data == data) return;
    encode(shape, data, args.out.data, map);
    *last = t;
  };
  void* out = copy_data("out", args.out, maps_.o);
  if (params_.o != out) {
    if (maps_.k.empty() || maps_.v.empty()) k_ = v_ = {};  // their maps lie around out
    encode(maps_.o, out, out, &params_.o_map);
    params_.o = out;
    padding_.o = static_cast<unsigned short*>(out);
  }
  set("q", args.q, maps_.q, &q_, &params_.q_map);
  set("k", args.k, maps_.k, &k_, &params_.k_map);
  set("v", args.v, maps_.v, &v_, &params_.v_map);
  params_.lse = padding_.lse = static_cast<float*>(args.lse.data);
}

void HopperForward::run(const ForwardArgs& args) {
  if (maps_.o.empty()) return;
  const CurrentContext current(gpu_.context());
  set_pointers(args);
  const Driver& api = driver();
  if (plan_.items > 0) {
    std::array<void*, 1> arguments = {&params_};
    check(api.cuLaunchKernel(kernel_, plan_.grid, 1, 1, plan_.threads(), 1, 1, plan_.shared_bytes,
                             stream_, arguments.data(), nullptr),
          "launching the forward kernel");
  }
  if (plan_.packed) {
    std::array<void*, 1> arguments = {&padding_};
    check(api.cuLaunchKernel(padding_kernel_, gpu_.multiprocessors(), 1, 1, kPaddingThreads, 1, 1,
                             0, stream_, arguments.data(), nullptr),
          "launching the kernel of padding rows");
  }
}

void HopperForward::run(const BackwardArgs&) {
  throw Error(Status::kInternal, "a forward plan was run on tensors of the backward pass");
}

Explanation HopperForward::explain() const {
  return {describe(plan_), rejected_, plan_.block_rows(), plan_.block_keys, workspace_.bytes};
}

}  // namespace fulgur::cuda

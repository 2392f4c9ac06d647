#include "cuda/hopper_forward.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numbers>

#include "fulgur/error.h"
#include "kernels/shared/softcap.h"

namespace fulgur::cuda {
namespace {

constexpr int kThreads = 256;   // of a block of the kernels beside
constexpr int kCopyBlocks = 8;  // a multiprocessor

const KernelRequest kPaddingRequest{"forward_padding.cu", "", "sm_90a"};
const KernelRequest kCopyRequest{"forward_copy.cu", "", "sm_90a"};

template <class T>
const T* device_data(const char* name, const Tensor& t) {
  if (t.given() && t.data == nullptr && t.numel() > 0) fail(name, "data is null");
  return static_cast<const T*>(t.data);
}

/// A run's data, where it is aligned as the plan was told.
void* aligned_data(const char* name, const Tensor& t, const TensorMapShape& shape) {
  if (!shape.empty() && reinterpret_cast<uintptr_t>(t.data) % kCopyAlignment != 0) {
    fail(name, "data {} is not aligned to {} bytes, as that of the tensor was that was planned for",
         t.data, kCopyAlignment);
  }
  return t.data;
}

}  // namespace

KernelRequest kernel_request(const HopperForwardPlan& plan) {
  return {"sm90/forward.cu", plan_header(plan), "sm_90a"};
}

std::vector<KernelRequest> forward_kernels(const Problem& problem, const HopperTarget& target) {
  std::vector<KernelRequest> requests;
  bool copies = false;
  for (const HopperForwardPlan& plan : reachable_forward_plans(problem, target)) {
    requests.push_back(kernel_request(plan));
    copies = copies || plan.copies();
  }
  if (problem.packed) requests.push_back(kPaddingRequest);
  if (copies) requests.push_back(kCopyRequest);
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
  if (plan_.work.items > 0) {
    kernel_ = gpu_.kernel(kernel_request(plan_), "fulgur_forward", plan_.shared_bytes);
  }
  if (plan_.packed) padding_kernel_ = gpu_.kernel(kPaddingRequest, "fulgur_forward_padding", 0);
  if (plan_.copies()) copy_kernel_ = gpu_.kernel(kCopyRequest, "fulgur_forward_copy", 0);
  set_inputs();
  int64_t bytes = Gpu::kZeroed + plan_.partial_floats() * int64_t{sizeof(float)};
  for (const Input& input : inputs_) bytes += input.copied ? copied_bytes(input.shape) : 0;
  workspace_ = gpu_.take_workspace(stream_, bytes);
  params_.counters = reinterpret_cast<int*>(workspace_.data);
  params_.tickets = params_.counters + kernels::kSchedulerCounters;
  params_.partial = reinterpret_cast<float*>(workspace_.data + Gpu::kZeroed);
  char* copies = reinterpret_cast<char*>(params_.partial + plan_.partial_floats());
  for (Input& input : inputs_) {
    if (!input.copied) continue;
    input.copy.to = copies;
    copies += copied_bytes(input.shape);
  }
}

HopperForward::~HopperForward() { gpu_.give_back(workspace_); }

void HopperForward::set_params(const Problem& p) {
  if (plan_.counters() * int64_t{sizeof(int)} > Gpu::kZeroed) {
    throw Error(Status::kInternal,
                fmt::format("{} counters do not fit the workspace", plan_.counters()));
  }
  constexpr double kLog2e = std::numbers::log2e;
  params_.o = {nullptr, p.out.batch, p.out.row, p.out.head};
  params_.lse_batch_stride = p.lse.batch;
  params_.lse_head_stride = p.lse.head;
  params_.cu_seqlens_q = device_data<int>("cu_seqlens_q", p.cu_seqlens_q);
  params_.cu_seqlens_k = device_data<int>("cu_seqlens_k", p.cu_seqlens_k);
  params_.seqused_k = device_data<int>("seqused_k", p.seqused_k);
  params_.alibi_slopes = device_data<float>("alibi_slopes", p.alibi_slopes);
  params_.alibi_batch_stride = p.alibi_slopes.rank == 2 ? p.alibi_slopes.strides[0] : 0;
  params_.total_q = static_cast<int>(p.total_q);
  params_.total_k = static_cast<int>(p.total_k);
  params_.sq = static_cast<int>(p.sq);
  params_.sk = static_cast<int>(p.sk);
  params_.d = static_cast<int>(p.d);
  params_.dv = static_cast<int>(p.dv);
  params_.hq = static_cast<int>(p.hq);
  params_.group = static_cast<int>(p.group());
  const kernels::Band band = band_of(plan_, p.mask);
  params_.window_left = band.left;
  params_.window_right = band.right;
  params_.scale_log2 = scale_log2(p);
  if (plan_.softcap) {
    // Where a cap is too small or too large for the quotient, tanh is a step, or the identity.
    constexpr double kMost = std::numeric_limits<float>::max();
    const double scale = 2 * kLog2e * p.scale / p.softcap;
    params_.softcap_scale = static_cast<float>(std::clamp(scale, -kMost, kMost));
    params_.softcap_small = static_cast<float>(p.scale * kLog2e * kernels::kTanhSquare);
    params_.softcap_log2 = static_cast<float>(std::min(p.softcap * kLog2e, kMost / 2));
  }
  params_.work = plan_.work;

  padding_.o_row_stride = p.out.row;
  padding_.o_head_stride = p.out.head;
  padding_.lse_head_stride = p.lse.head;
  padding_.cu_seqlens_q = params_.cu_seqlens_q;
  padding_.batch = static_cast<int>(p.batch);
  padding_.total_q = static_cast<int>(p.total_q);
  padding_.hq = params_.hq;
  padding_.dv = params_.dv;
}

void HopperForward::set_inputs() {
  const auto input = [](const char* name, const TensorMapShape& shape, bool copied,
                        TensorMapBlob* map, StridedTensor* tensor) {
    const Layout& from = shape.strides;
    Input in{name, copied ? fulgur::cuda::copied(shape) : shape, copied, {}, map, tensor};
    const Layout& to = in.shape.strides;
    *tensor = {nullptr, to.batch, to.row, to.head};
    in.copy = {nullptr,     from.batch,  from.row,   from.head,   nullptr,
               to.head / 8, shape.batch, shape.rows, shape.heads, shape.dim};
    return in;
  };
  inputs_ = {input("q", maps_.q, !plan_.copies_q.empty(), &params_.q_map, &params_.q),
             input("k", maps_.k, !plan_.copies_k.empty(), &params_.k_map, &params_.k),
             input("v", maps_.v, !plan_.copies_v.empty(), &params_.v_map, &params_.v)};
}

void HopperForward::set_pointers(const ForwardArgs& args) {
  const bool tiles = plan_.store == HopperForwardPlan::Store::kTiles;
  const bool elements = plan_.store == HopperForwardPlan::Store::kElements;
  void* out = elements ? args.out.data : aligned_data("out", args.out, maps_.o);
  const std::array<const Tensor*, 3> tensors = {&args.q, &args.k, &args.v};
  std::array<void*, 3> data;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    Input& in = inputs_[i];
    in.copy.from = static_cast<const unsigned short*>(tensors[i]->data);
    data[i] = in.copied ? in.copy.to : aligned_data(in.name, *tensors[i], in.shape);
    // An empty q or out launches nothing; empty k and v are never read, but their maps must be
    // valid: they lie around out.
    if (in.shape.empty())
      data[i] = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(out) / kCopyAlignment *
                                        kCopyAlignment);
  }
  if (params_.o.data != out) {
    if (tiles) encode(maps_.o, out, &params_.o_map);
    params_.o.data = padding_.o = static_cast<unsigned short*>(out);
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    Input& in = inputs_[i];
    if (in.tensor->data == data[i]) continue;
    encode(in.shape, data[i], in.map);
    in.tensor->data = static_cast<unsigned short*>(data[i]);
  }
  params_.lse = padding_.lse = static_cast<float*>(args.lse.data);
}

void HopperForward::launch(CUfunction kernel, void* params, int grid, int threads, int shared_bytes,
                           const char* what) {
  check(driver().cuLaunchKernel(kernel, grid, 1, 1, threads, 1, 1, shared_bytes, stream_, &params,
                                nullptr),
        what);
}

void HopperForward::run(const ForwardArgs& args) {
  if (maps_.o.empty()) return;
  const CurrentContext current(gpu_.context());
  set_pointers(args);
  for (Input& in : inputs_) {
    if (in.copied) {
      launch(copy_kernel_, &in.copy, kCopyBlocks * gpu_.multiprocessors(), kThreads, 0,
             "launching the kernel that copies rows");
    }
  }
  if (plan_.work.items > 0) {
    launch(kernel_, &params_, plan_.grid, plan_.threads(), plan_.shared_bytes,
           "launching the forward kernel");
  }
  if (plan_.packed) {
    launch(padding_kernel_, &padding_, gpu_.multiprocessors(), kThreads, 0,
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

#include "cuda/host_lengths.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "cuda/launch.h"
#include "kernels/store_numbers_params.h"
#include "sequences.h"

namespace fulgur::cuda {

const KernelUse kStoreKernel{{"store_numbers.cu", "", "sm_90a"}, "fulgur_store_numbers", 0};

namespace {

constexpr int kStoreThreads = 256;

/// Those of the lengths of a call that lie on the host. `Args` may be const.
template <class Args, class Take>
void for_each(const Problem::HostLengths& host, Args& args, const Take& take) {
  if (host.cu_seqlens_q) take(args.cu_seqlens_q);
  if (host.cu_seqlens_k) take(args.cu_seqlens_k);
  if (host.seqused_k) take(args.seqused_k);
  if constexpr (std::is_same_v<std::remove_const_t<Args>, ForwardArgs>) {
    if (host.leftpad_k) take(args.leftpad_k);
  }
}

}  // namespace

HostLengths::HostLengths(const Problem& problem, Gpu& gpu) : problem_(problem) {
  const Problem::HostLengths& host = problem.host;
  count_ = (host.cu_seqlens_q + host.cu_seqlens_k) * (problem.batch + 1) +
           (host.seqused_k + host.leftpad_k) * problem.batch;
  if (count_ > 0) kernel_ = gpu.kernel(kStoreKernel).function;
}

template <class Args>
void HostLengths::check(const Args& args) const {
  if (count_ > 0) const Sequences checked(problem_, args);
}

template <class Args>
Args HostLengths::moved(Args args, void* to) const {
  auto* at = static_cast<int*>(to);
  for_each(problem_.host, args, [&](ConstTensor& lengths) {
    lengths.data = at;
    lengths.device = problem_.device;
    at += lengths.numel();
  });
  return args;
}

template <class Args>
void HostLengths::store(const Args& args, CUstream stream, void* to) const {
  std::vector<int> numbers;
  for_each(problem_.host, args, [&](const ConstTensor& lengths) {
    const auto* values = static_cast<const int*>(lengths.data);
    numbers.insert(numbers.end(), values, values + lengths.numel());
  });
  const auto count = static_cast<int64_t>(numbers.size());
  for (int64_t at = 0; at < count; at += kStoredNumbers) {
    StoreNumbersParams params{};
    params.to = static_cast<int*>(to) + at;
    params.count = static_cast<int>(std::min<int64_t>(count - at, kStoredNumbers));
    std::copy_n(numbers.data() + at, params.count, params.numbers);
    launch(stream, kernel_, &params, {(params.count - 1) / kStoreThreads + 1}, kStoreThreads, 0,
           "launching the kernel that stores lengths");
  }
}

void HostLengths::describe(std::vector<std::string>& decisions) const {
  if (count_ == 0) return;
  const Problem::HostLengths& host = problem_.host;
  std::vector<const char*> names;
  if (host.cu_seqlens_q) names.push_back("cu_seqlens_q");
  if (host.cu_seqlens_k) names.push_back("cu_seqlens_k");
  if (host.seqused_k) names.push_back("seqused_k");
  if (host.leftpad_k) names.push_back("leftpad_k");
  const int64_t launches = (count_ - 1) / kStoredNumbers + 1;
  decisions.push_back(fmt::format("{} on the host: each run puts {} numbers on the device by {} {}",
                                  fmt::join(names, ", "), count_, launches,
                                  launches == 1 ? "launch" : "launches"));
}

template void HostLengths::check(const ForwardArgs&) const;
template void HostLengths::check(const BackwardArgs&) const;
template ForwardArgs HostLengths::moved(ForwardArgs, void*) const;
template BackwardArgs HostLengths::moved(BackwardArgs, void*) const;
template void HostLengths::store(const ForwardArgs&, CUstream, void*) const;
template void HostLengths::store(const BackwardArgs&, CUstream, void*) const;

}  // namespace fulgur::cuda

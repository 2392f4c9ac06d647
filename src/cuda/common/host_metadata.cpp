#include "cuda/common/host_metadata.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <type_traits>

#include "base/convert.h"
#include "call/check_tensors.h"
#include "call/lengths.h"
#include "cuda/common/call_kernel.h"
#include "cuda/common/launch.h"
#include "kernels/common/upload_metadata_params.h"

namespace fulgur::cuda {

namespace {

constexpr int kStoreThreads = 256;

/// Visits the tensors of a call that lie on the host. `Args` may be const.
template <class Args, class Take>
void for_each(const Problem& problem, Args& args, const Take& take) {
  const auto visit = [&](const TensorRule& rule, auto& t) {
    if constexpr (std::is_same_v<std::remove_cvref_t<decltype(t)>, ConstTensor>) {
      if (problem.on_host.has(rule.arg)) take(t);
    }
  };
  for_each_tensor(visit, args);
}

/// Calls take(name, count) for the metadata of a problem that lies on the host.
template <class Take>
void for_each_name(const Problem& problem, const Take& take) {
  const auto visit = [&](const TensorRule& rule, const auto&) {
    if (problem.on_host.has(rule.arg)) take(rule.name, count_of(rule, problem));
  };
  const ForwardArgs none;
  for_each_tensor(visit, none);
}

/// Appends the numbers of a vector, or of the rows of a matrix, of any strides. Numbers of 16 bits
/// are converted to f32.
void append(const ConstTensor& t, std::vector<std::byte>& bytes) {
  const int64_t element = size_of(t.dtype), rows = t.rank == 2 ? t.shape[0] : 1;
  const int64_t columns = t.shape[t.rank - 1];
  for (int64_t i = 0; i < rows; ++i) {
    const auto* row = static_cast<const std::byte*>(t.data) + i * t.strides[0] * element;
    if (element == sizeof(int)) {
      bytes.insert(bytes.end(), row, row + columns * element);
      continue;
    }
    for (int64_t j = 0; j < columns; ++j) {
      const auto x = static_cast<float>(load_element(row, t.dtype, j));
      const auto* from = reinterpret_cast<const std::byte*>(&x);
      bytes.insert(bytes.end(), from, from + sizeof(x));
    }
  }
}

}  // namespace

int64_t host_metadata_bytes(const Problem& problem) {
  int64_t numbers = 0;
  for_each_name(problem, [&](const char*, int64_t count) { numbers += count; });
  return numbers * int64_t{sizeof(int)};
}

HostMetadata::HostMetadata(const Problem& problem, Gpu& gpu) : problem_(problem) {
  for_each_name(problem, [&](const char* name, int64_t count) {
    names_.push_back(name);
    count_ += count;
  });
  if (count_ > 0) kernel_ = gpu.kernel(use_of(CallKernel::kUpload)).function;
}

HostMetadata::HostMetadata(const AppendCall& call, Gpu& gpu, CUstream stream) : problem_(call.p) {
  for_each(problem_, call.args, [&](const ConstTensor& t) { count_ += t.numel(); });
  if (count_ > 0) kernel_ = loaded(CallKernel::kUpload, gpu, stream);
}

template <class Args>
void HostMetadata::check(const Args& args) const {
  if (count_ > 0) const Sequences checked(problem_, args);
}

template <class Args>
Args HostMetadata::moved(Args args, void* to) const {
  auto* at = static_cast<int*>(to);
  for_each(problem_, args, [&](ConstTensor& numbers) {
    const auto shape = std::span(numbers.shape).first(static_cast<size_t>(numbers.rank));
    const DType dtype = size_of(numbers.dtype) == sizeof(int) ? numbers.dtype : DType::kF32;
    numbers = ConstTensor::contiguous(at, dtype, shape, problem_.device);
    at += numbers.numel();
  });
  return args;
}

template <class Args>
void HostMetadata::store(const Args& args, CUstream stream, void* to) const {
  std::vector<std::byte> bytes;
  bytes.reserve(static_cast<size_t>(this->bytes()));
  for_each(problem_, args, [&](const ConstTensor& numbers) { append(numbers, bytes); });
  for (int64_t at = 0; at < count_; at += kStoredNumbers) {
    UploadMetadataParams params{};
    params.to = static_cast<int*>(to) + at;
    params.count = static_cast<int>(std::min<int64_t>(count_ - at, kStoredNumbers));
    std::memcpy(params.numbers, bytes.data() + at * sizeof(int), params.count * sizeof(int));
    launch(stream, kernel_, &params, {(params.count - 1) / kStoreThreads + 1}, kStoreThreads, 0,
           "launching the kernel that stores numbers");
  }
}

void HostMetadata::describe(Explanation& plan) const {
  if (count_ == 0) return;
  const int64_t launches = (count_ - 1) / kStoredNumbers + 1;
  plan.details.add("host_metadata", Details::Texts(names_.begin(), names_.end()));
  plan.details.add("uploaded_numbers", count_);
  plan.details.add("upload_launches", launches);
  plan.decisions.push_back(fmt::format(
      "{} on the host: each run puts {} numbers on the device by {} {}", fmt::join(names_, ", "),
      count_, launches, launches == 1 ? "launch" : "launches"));
}

template void HostMetadata::check(const ForwardArgs&) const;
template void HostMetadata::check(const BackwardArgs&) const;
template void HostMetadata::check(const ScoresArgs&) const;
template ForwardArgs HostMetadata::moved(ForwardArgs, void*) const;
template BackwardArgs HostMetadata::moved(BackwardArgs, void*) const;
template ScoresArgs HostMetadata::moved(ScoresArgs, void*) const;
template AppendArgs HostMetadata::moved(AppendArgs, void*) const;
template void HostMetadata::store(const ForwardArgs&, CUstream, void*) const;
template void HostMetadata::store(const BackwardArgs&, CUstream, void*) const;
template void HostMetadata::store(const ScoresArgs&, CUstream, void*) const;
template void HostMetadata::store(const AppendArgs&, CUstream, void*) const;

}  // namespace fulgur::cuda

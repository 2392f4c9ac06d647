/// Calls on the fake GPU that more than one file of tests makes: appending ones, those whose
/// lengths lie on the host, and merges.
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <vector>

#include "../plans/forward_call.h"
#include "fulgur/append.h"
#include "fulgur/merge.h"
#include "kernels/common/append_params.h"
#include "kernels/common/upload_metadata_params.h"

namespace fulgur::test {

/// A call over pages of 16 keys that appends new rows, as many as there are queries.
struct AppendingCall {
  ForwardCall call;

  explicit AppendingCall(const ForwardShape& shape, int64_t fresh = 0) : call(forward_call(shape)) {
    ForwardArgs& args = call.args;
    std::uintptr_t at = 0x7e0000000000;
    const auto tensor = [&](DType type, std::initializer_list<int64_t> sizes) {
      return Tensor::contiguous(reinterpret_cast<void*>(at += 0x100000000), type, sizes,
                                {DeviceType::kCuda, 0});
    };
    const int64_t batch = shape.batch, pages = (shape.sk + 15) / 16;
    if (fresh == 0) fresh = shape.sq;
    args.cache.page_table = tensor(DType::kI32, {batch, pages});
    args.append = {.k_cache = tensor(shape.dtype, {batch * pages, 16, shape.hk, shape.d}),
                   .v_cache = tensor(shape.dtype, {batch * pages, 16, shape.hk, shape.d}),
                   .k_new = tensor(shape.dtype, {batch, fresh, shape.hk, shape.d}),
                   .v_new = tensor(shape.dtype, {batch, fresh, shape.hk, shape.d}),
                   .cache_seqlens = tensor(DType::kI32, {batch}),
                   .rotary = {.cos = tensor(shape.dtype, {16 * pages, 32}),
                              .sin = tensor(shape.dtype, {16 * pages, 32})}};
    args.k = args.v = {};
    args.q.data = tensor(shape.dtype, {1}).data;
    for (Tensor* t : {&args.out, &args.lse}) t->data = tensor(shape.dtype, {1}).data;
  }
  AppendingCall(const AppendingCall&) = delete;
};

/// A causal call over pages of 16 keys, and with prefixes of one group of all sequences.
inline ForwardCall call_over_pages(int64_t batch, int64_t sq, int64_t sk, bool prefixes) {
  ForwardCall call = forward_call(
      {.batch = batch, .sq = sq, .sk = sk, .hq = 32, .hk = 8, .mask = causal(), .seqused = true});
  ForwardArgs& args = call.args;
  const auto tensor = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(nullptr, dtype, shape, {DeviceType::kCuda, 0});
  };
  const int64_t pages = (sk + 15) / 16;
  args.k = args.v = tensor(DType::kBF16, {batch * pages, 16, 8, 128});
  args.cache.page_table = tensor(DType::kI32, {batch, pages});
  if (prefixes) args.shared_prefix.prefix_groups = tensor(DType::kI32, {2});
  if (prefixes) args.shared_prefix.prefix_lens = tensor(DType::kI32, {1});
  return call;
}

/// A packed call of `batch` sequences of 200 rows, with its lengths on the host.
struct CallWithHostLengths {
  static constexpr int kRows = 200;
  std::vector<int32_t> cu_seqlens, used;
  ForwardCall call;

  explicit CallWithHostLengths(int batch)
      : cu_seqlens(static_cast<size_t>(batch) + 1),
        used(static_cast<size_t>(batch), 2),
        call(forward_call({.batch = batch,
                           .sq = kRows,
                           .sk = kRows,
                           .hq = 2,
                           .hk = 2,
                           .d = 64,
                           .packed = true,
                           .seqused_q = true,
                           .seqused = true})) {
    for (int b = 0; b <= batch; ++b) cu_seqlens[static_cast<size_t>(b)] = kRows * b;
    call.args.lengths.cu_seqlens_q = call.args.lengths.cu_seqlens_k =
        ConstTensor::of<const int32_t>(std::span(cu_seqlens), {batch + 1});
    call.args.lengths.seqused_q = call.args.lengths.seqused_k =
        ConstTensor::of<const int32_t>(std::span(used), {batch});
    call.options.max_seqlen_q = call.options.max_seqlen_k = 0;
  }
  std::vector<int32_t> numbers() const {
    std::vector<int32_t> all = cu_seqlens;
    all.insert(all.end(), cu_seqlens.begin(), cu_seqlens.end());
    for (int i = 0; i < 2; ++i) all.insert(all.end(), used.begin(), used.end());
    return all;
  }
};

/// A cache of 20 pages of 16 rows and packed new rows of 3 sequences, on the "device".
inline AppendArgs append_args(DType dtype) {
  constexpr Device kDevice{DeviceType::kCuda, 0};
  std::uintptr_t at = 0x7f0000000000;
  const auto tensor = [&](DType type, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(reinterpret_cast<void*>(at += 0x100000000), type, shape, kDevice);
  };
  return {.rows = {.k_cache = tensor(dtype, {20, 16, 2, 64}),
                   .v_cache = tensor(dtype, {20, 16, 2, 128}),
                   .k_new = tensor(dtype, {50, 2, 64}),
                   .v_new = tensor(dtype, {50, 2, 128}),
                   .cu_seqlens_k_new = tensor(DType::kI32, {4}),
                   .cache_seqlens = tensor(DType::kI32, {3}),
                   .rotary = {.cos = tensor(DType::kF32, {1000, 16}),
                              .sin = tensor(DType::kF32, {1000, 16})}},
          .cache = {.page_table = tensor(DType::kI32, {3, 7})},
          .q = tensor(dtype, {60, 8, 64}),
          .q_out = tensor(dtype, {60, 8, 64}),
          .cu_seqlens_q = tensor(DType::kI32, {4})};
}

/// The same with its lengths in arrays of the host.
struct AppendOfHostLengths {
  std::vector<int32_t> cu_new = {0, 20, 20, 50}, old = {5, 9, 0}, first = {7, 0, 3};
  std::vector<int32_t> cu_q = {0, 30, 40, 60};
  AppendArgs args;

  explicit AppendOfHostLengths(DType dtype) : args(append_args(dtype)) {
    args.rows.cu_seqlens_k_new = ConstTensor::of<const int32_t>(std::span(cu_new), {4});
    args.rows.cache_seqlens = ConstTensor::of<const int32_t>(std::span(old), {3});
    args.rows.rotary.rotary_seqlens = ConstTensor::of<const int32_t>(std::span(first), {3});
    args.cu_seqlens_q = ConstTensor::of<const int32_t>(std::span(cu_q), {4});
  }
};

inline std::vector<int> stored(const UploadMetadataParams& store) {
  return {store.numbers, store.numbers + store.count};
}

/// What merge takes: parts of (2, 5, 3, dim), the second one in f32.
struct MergeCallOnGpu {
  std::vector<Partial> parts;
  Merged result;

  MergeCallOnGpu(int count, int64_t dim) {
    constexpr Device kDevice{DeviceType::kCuda, 0};
    std::uintptr_t at = 0x7f0000000000;
    const auto tensor = [&](DType type, std::initializer_list<int64_t> shape) {
      return Tensor::contiguous(reinterpret_cast<void*>(at += 0x100000), type, shape, kDevice);
    };
    for (int i = 0; i < count; ++i) {
      parts.push_back({tensor(i == 1 ? DType::kF32 : DType::kBF16, {2, 5, 3, dim}),
                       tensor(DType::kF32, {2, 3, 5})});
    }
    result = {tensor(DType::kF16, {2, 5, 3, dim}), tensor(DType::kF32, {2, 3, 5})};
  }
};

}  // namespace fulgur::test

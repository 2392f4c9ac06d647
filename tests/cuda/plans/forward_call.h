/// Forward calls on cuda tensors, by the few numbers that tests vary.
#pragma once

#include <optional>

#include "call/make_problem.h"
#include "call/problem.h"
#include "fulgur/attention.h"

namespace fulgur::test {

struct ForwardShape {
  DType dtype = DType::kBF16;  ///< of e4m3, out is bf16
  int64_t batch = 2, sq = 1024, sk = 1024, hq = 8, hk = 2, d = 128;
  std::optional<int64_t> dv{};
  Mask mask{};
  std::optional<double> scale{};
  double softcap = 0;
  bool alibi = false, packed = false, seqused_q = false, seqused = false, lse = true;
  bool invariant = false, sinks = false;
  double dropout = 0;
  std::optional<DType> bias{};   ///< of each head
  bool bias_of_columns = false;  ///< its queries lie side by side, and not its keys
  int64_t max_workspace = 0;
  bool fast_codes = false;
  std::uintptr_t base = 0;  ///< where the data of every tensor is said to be
};

struct ForwardCall {
  ForwardArgs args;
  Options options;
  Run run;
};

/// Tensors without data: contiguous (batch, seqlen, heads, dim), or packed with sq and sk the
/// longest of `batch` sequences as long as that.
inline ForwardCall forward_call(const ForwardShape& s) {
  constexpr Device kDevice{DeviceType::kCuda, 0};
  const int64_t dv = s.dv.value_or(s.d);
  void* const data = reinterpret_cast<void*>(s.base);
  const auto rows_of = [&](DType dtype, int64_t length, int64_t heads, int64_t dim) {
    if (s.packed) {
      return Tensor::contiguous(data, dtype, {s.batch * length, heads, dim}, kDevice);
    }
    return Tensor::contiguous(data, dtype, {s.batch, length, heads, dim}, kDevice);
  };
  const auto rows = [&](int64_t length, int64_t heads, int64_t dim) {
    return rows_of(s.dtype, length, heads, dim);
  };
  const DType out = s.dtype == DType::kE4M3 ? DType::kBF16 : s.dtype;
  static int anything = 0;  // lengths and slopes, which count as memory of a device, are not read
  const auto vector = [&](DType dtype, int64_t size) {
    return Tensor::contiguous(&anything, dtype, {size}, kDevice);
  };
  ForwardCall call;
  call.args = {.q = rows(s.sq, s.hq, s.d),
               .k = rows(s.sk, s.hk, s.d),
               .v = rows(s.sk, s.hk, dv),
               .out = rows_of(out, s.sq, s.hq, dv)};
  if (s.lse && s.packed) {
    call.args.lse = Tensor::contiguous(data, DType::kF32, {s.hq, s.batch * s.sq}, kDevice);
  } else if (s.lse) {
    call.args.lse = Tensor::contiguous(data, DType::kF32, {s.batch, s.hq, s.sq}, kDevice);
  }
  call.options.mask = s.mask;
  call.options.scale = s.scale;
  call.options.softcap = s.softcap;
  call.options.invariant = s.invariant;
  call.options.fast_codes = s.fast_codes;
  call.options.dropout_p = s.dropout;
  call.options.max_workspace = s.max_workspace;
  if (s.alibi) call.args.alibi_slopes = vector(DType::kF32, s.hq);
  if (s.bias) {
    call.args.bias = Tensor::contiguous(data, *s.bias, {1, s.hq, s.sq, s.sk}, kDevice);
    if (s.bias_of_columns) {
      call.args.bias.strides[2] = 1;
      call.args.bias.strides[3] = s.sq;
    }
  }
  if (s.sinks) call.args.sinks = vector(DType::kF32, s.hq);
  if (s.seqused_q) call.args.lengths.seqused_q = vector(DType::kI32, s.batch);
  if (s.seqused) call.args.lengths.seqused_k = vector(DType::kI32, s.batch);
  if (s.packed) {
    call.args.lengths.cu_seqlens_q = call.args.lengths.cu_seqlens_k =
        vector(DType::kI32, s.batch + 1);
    call.options.max_seqlen_q = s.sq;
    call.options.max_seqlen_k = s.sk;
  }
  return call;
}

inline Problem forward_problem(const ForwardShape& shape) {
  const ForwardCall call = forward_call(shape);
  return make_problem(call.args, call.options);
}

}  // namespace fulgur::test

#include "base/quantize.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "base/formats.h"
#include "call/make_problem.h"
#include "fulgur/append.h"
#include "fulgur/codes/hadamard.h"
#include "fulgur/error.h"
#include "plan/engines.h"

namespace fulgur {
namespace {

constexpr const char* kDims = "(batch, seqlen, heads, dim) or (total, heads, dim)";

/// Checks numbers.
void check_numbers(const ConstTensor& x, bool written) {
  if (x.rank != 3 && x.rank != 4) fail("x", "got {}, want {}", x.describe(), kDims);
  check_tensor("x", x, kDims, x.rank, written);
  if (!is_float(x.dtype)) fail("x", "got {}, want f32, bf16, f16 or f64", name_of(x.dtype));
}

/// Checks codes and their scales, which `written` ones may not share, and numbers of their shape.
CodeTensor checked(const ConstTensor& x, bool x_written, const ConstTensor& codes,
                   const ConstTensor& scale, const ConstTensor& zero, bool scales_written,
                   const ConstTensor& mean, bool mean_written) {
  check_numbers(x, x_written);
  if (!is_low_bit(codes.dtype)) {
    fail("codes", "got {}, want a low-bit format", name_of(codes.dtype));
  }
  check_shape("codes", codes, "the shape of x",
              std::span(x.shape).first(static_cast<size_t>(x.rank)), !x_written);
  const bool packed = x.rank == 3;
  const Coded of{"codes", codes, packed ? 1 : x.shape[0], x.shape[packed ? 1 : 2]};
  const Scaling scaling{{scale.data, checked_scales("scale", scale, of)},
                        {zero.data, checked_zero_points("zero_point", zero, "scale", scale, of)}};
  check_means("mean", mean, of);
  if (mean_written && mean.given() && mean.shape[0] != of.batch) {
    fail("mean", "got one for {} sequences, want {} to write", mean.shape[0], of.batch);
  }
  const std::array names{"x", "codes", "scale", "zero_point", "mean"};
  const std::array tensors{&x, &codes, &scale, &zero, &mean};
  const std::array written{x_written, !x_written, scales_written, scales_written, mean_written};
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!tensors[i]->given()) continue;
    check_device(names[i], *tensors[i], x.device, "x");
    check_data(names[i], *tensors[i]);
    if (!written[i]) continue;
    check_no_overlap(names[i], *tensors[i]);
    for (size_t j = 0; j < tensors.size(); ++j) {
      if (i == j || !tensors[j]->given() || !share_memory(*tensors[i], *tensors[j])) continue;
      fail(names[i], "shares its memory with {}; an output needs its own", names[j]);
    }
  }
  // const_cast: tensors that are only read are never written through these pointers.
  return {*format_of(codes.dtype),
          const_cast<void*>(codes.data),
          rows_layout(codes),
          x.shape[x.rank - 1],
          scaling,
          const_cast<void*>(scale.data),
          const_cast<void*>(zero.data),
          Means(mean)};
}

struct Counts {
  int64_t batch, rows, heads;
  explicit Counts(const ConstTensor& x)
      : batch(x.rank == 4 ? x.shape[0] : 1),
        rows(x.shape[x.rank - 3]),
        heads(x.shape[x.rank - 2]) {}
};

}  // namespace

void quantize(const QuantizeArgs& args, const Options& options, const Run& run) {
  const int threads = checked_threads(options);
  const CodeTensor to = checked(args.x, false, args.codes, args.scale, args.zero_point,
                                !args.static_scale, args.mean, !args.static_mean);
  const auto is_written = [](const Tensor& t, bool fixed) { return !fixed && t.numel() > 0; };
  const bool scales = is_written(args.scale, args.static_scale),
             means = is_written(args.mean, args.static_mean);
  Counts n(args.x);
  if (args.x.numel() == 0) {  // scales and means of no rows are 0, also those of no sequences
    if (!scales && !means) return;
    n.batch = std::max<int64_t>(n.batch, 1);
    n.rows = 0;
  }
  engine_on(args.x.device, "", "x")
      .quantize(
          {args.x, to, args.static_scale, means ? args.mean : Tensor{}, n.batch, n.rows, n.heads},
          threads, run);
}

void dequantize(const DequantizeArgs& args, const Options& options, const Run& run) {
  const int threads = checked_threads(options);
  const CodeTensor from =
      checked(args.x, true, args.codes, args.scale, args.zero_point, false, args.mean, false);
  if (args.x.numel() == 0) return;
  const Counts n(args.x);
  engine_on(args.x.device, "", "x")
      .dequantize({from, args.x, n.batch, n.rows, n.heads}, threads, run);
}

void hadamard(const HadamardArgs& args, const Options& options, const Run& run) {
  const int threads = checked_threads(options);
  const ConstTensor& x = args.x;
  const Tensor& y = args.y;
  check_numbers(x, false);
  if (y.dtype != x.dtype && y.dtype != DType::kF32) {
    fail("y", "got {}, want f32 or {} as x", name_of(y.dtype), name_of(x.dtype));
  }
  check_shape("y", y, "the shape of x", std::span(x.shape).first(static_cast<size_t>(x.rank)),
              true);
  check_device("y", y, x.device, "x");
  check_data("x", x);
  check_data("y", y);
  check_no_overlap("y", y);
  if (share_memory(y, x)) fail("y", "shares its memory with x; an output needs its own");
  if (x.numel() == 0) return;
  const Counts n(x);
  engine_on(x.device, "", "x")
      .hadamard({x, y, args.inverse, n.batch, n.rows, n.heads, x.shape[x.rank - 1]}, threads, run);
}

bool has_scales(DType format) { return is_low_bit(format) && format_of(format)->scaled; }

DType format_named(const char* name) {
  const FormatRow* const format = find_format(name);
  if (format != nullptr) return format->dtype;
  std::string all;
  for (const FormatRow& row : formats()) all += (all.empty() ? "" : ", ") + std::string(row.name);
  fail("format", "got \"{}\", want one of {}", name, all);
}

}  // namespace fulgur

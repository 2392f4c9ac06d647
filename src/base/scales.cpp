#include "base/scales.h"

#include "base/check.h"
#include "base/formats.h"

namespace fulgur {
namespace {

constexpr int64_t kGroupColumns = 16;  // a group has a multiple of them, unless it is the row

Scales checked(const char* name, const ConstTensor& t, const Coded& of) {
  const ConstTensor& codes = of.codes;
  if (t.dtype != DType::kF32 && t.dtype != DType::kF16) {
    fail(name, "got {}, want f32 or f16", name_of(t.dtype));
  }
  check_device(name, t, codes.device, of.name);
  const auto stride = [&](int i) { return t.shape[i] > 1 ? t.strides[i] : 0; };
  const auto wrong_shape = [&] {
    fail(name,
         "got shape {}, want (1), ({} or 1, {} or 1) of sequences and kv heads, or the shape {} of "
         "{} but for the last, the number of groups of columns",
         list(t, t.shape), of.batch, of.heads, list(codes, codes.shape), of.name);
  };
  Scales s{.dtype = t.dtype, .groups = 1};
  if (t.rank == 1 || t.rank == 2) {
    check_sizes(name, t, "(1) or (batch or 1, hk or 1)", t.rank);
    const auto fits = [&](int i, int64_t want) { return t.shape[i] == 1 || t.shape[i] == want; };
    if (!(t.rank == 1 ? fits(0, 1) : fits(0, of.batch) && fits(1, of.heads))) wrong_shape();
    if (t.rank == 2) {
      s.batch = stride(0);
      s.head = stride(1);
    }
    return s;
  }
  if (t.rank != codes.rank) wrong_shape();
  check_sizes(name, t, "the rows of codes, groups of columns", codes.rank);
  for (int i = 0; i < t.rank - 1; ++i) {
    if (t.shape[i] != codes.shape[i]) wrong_shape();
  }
  const int64_t columns = codes.shape[codes.rank - 1];
  s.of_rows = true;
  s.groups = t.shape[t.rank - 1];
  if (s.groups < 1 || columns % s.groups != 0 ||
      (s.groups > 1 && columns / s.groups % kGroupColumns != 0)) {
    fail(name, "got {} groups of the {} columns of {}, want 1, or groups of a multiple of {}",
         s.groups, columns, of.name, kGroupColumns);
  }
  s.batch = t.rank == 4 ? stride(0) : 0;
  s.row = stride(t.rank - 3);
  s.head = stride(t.rank - 2);
  s.group = stride(t.rank - 1);
  return s;
}

}  // namespace

Scales checked_scales(const char* name, const ConstTensor& t, const Coded& of) {
  if (!t.given()) return {};
  const FormatRow* const format = format_of(of.codes.dtype);
  if (format == nullptr) {
    fail(name, "given with {} of {}, want it with codes of a low-bit format", of.name,
         name_of(of.codes.dtype));
  }
  if (format->scaled) fail(name, "given with {}, whose blocks have scales", format->name);
  return checked(name, t, of);
}

void check_means(const char* name, const ConstTensor& t, const Coded& of) {
  if (!t.given()) return;
  const ConstTensor& codes = of.codes;
  if (format_of(codes.dtype) == nullptr) {
    fail(name, "given with {} of {}, want it with codes of a low-bit format", of.name,
         name_of(codes.dtype));
  }
  check_dtype(name, t, DType::kF32, "means are f32");
  check_device(name, t, codes.device, of.name);
  constexpr const char* kDims = "(batch or 1, heads, dim)";
  const int64_t batch = t.rank == 3 && t.shape[0] == 1 ? 1 : of.batch;
  check_shape(name, t, kDims, {batch, of.heads, codes.shape[codes.rank - 1]}, false);
}

Scales checked_zero_points(const char* name, const ConstTensor& t, const char* scale_name,
                           const ConstTensor& scale, const Coded& of) {
  if (!t.given()) return {};
  const FormatRow* const format = format_of(of.codes.dtype);
  if (format == nullptr || !format->integers) {
    fail(name, "given with {} of {}, want it with int8 or int4", of.name, name_of(of.codes.dtype));
  }
  if (!scale.given()) fail(name, "given without {}", scale_name);
  if (t.rank != scale.rank || t.shape != scale.shape) {
    fail(name, "got shape {}, want {} of {}", list(t, t.shape), list(scale, scale.shape),
         scale_name);
  }
  return checked(name, t, of);
}

}  // namespace fulgur

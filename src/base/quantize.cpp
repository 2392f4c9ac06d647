#include "base/quantize.h"

#include <cstddef>
#include <limits>
#include <vector>

#include "base/parallel.h"
#include "base/rotary.h"
#include "kernels/host_device/heads.h"

namespace fulgur {
namespace {

/// A scale, rounded to the dtype of its tensor.
float rounded(float x, DType dtype) {
  return dtype == DType::kF16 ? f32_from_f16(f16_from_f32(in_f16(x))) : x;
}

/// Row n of (batch, rows, heads) rows.
CodeTensor::Row row_of(int64_t n, int64_t rows, int64_t heads) {
  const int64_t b = n / heads / rows;
  return {b, b, n / heads % rows, n % heads};
}

void load(const ConstTensor& x, const Layout& at, const CodeTensor::Row& r, int64_t columns,
          float* to) {
  const int64_t first = at.offset(r.entry, r.row, r.h) * size_of(x.dtype);
  load_row(static_cast<const std::byte*>(x.data) + first, x.dtype, columns, to);
}

/// Which scale of those by sequence and kv head a row has.
size_t set_of(const Scales& at, const CodeTensor::Row& r, int64_t heads) {
  return static_cast<size_t>((at.batch == 0 ? 0 : r.b) * heads + (at.head == 0 ? 0 : r.h));
}

/// Computes the means of the columns of each head of a sequence, over the finite numbers.
void write_means(const QuantizeCall& c, int threads) {
  constexpr int64_t kSlices = kernels::kMeanSlices;
  const Layout from = rows_layout(c.x);
  const int64_t columns = c.to.columns;
  parallel_for(c.batch * c.heads, threads, [&](int64_t n) {
    const int64_t b = n / c.heads, h = n % c.heads;
    std::vector<double> sums(static_cast<size_t>(kSlices * columns));
    std::vector<int64_t> counts(static_cast<size_t>(columns));
    std::vector<float> x(static_cast<size_t>(columns));
    for (int64_t row = 0; row < c.rows; ++row) {
      load(c.x, from, {b, b, row, h}, columns, x.data());
      double* const sum = &sums[static_cast<size_t>(row % kSlices * columns)];
      for (int64_t i = 0; i < columns; ++i) {
        if (!std::isfinite(x[i])) continue;
        sum[i] += x[i];
        ++counts[i];
      }
    }
    auto* const to =
        static_cast<float*>(c.mean.data) + b * c.mean.strides[0] + h * c.mean.strides[1];
    for (int64_t i = 0; i < columns; ++i) {
      double sum = 0;
      for (int64_t slice = 0; slice < kSlices; ++slice) sum += sums[slice * columns + i];
      to[i] = counts[i] == 0 ? 0 : static_cast<float>(sum / static_cast<double>(counts[i]));
    }
  });
}

}  // namespace

void CodeTensor::take_means(const Row& r, float* x) const {
  const float* const mean = means.of(r.b, r.h);
  for (int64_t i = 0; mean != nullptr && i < columns; ++i) x[i] -= mean[i];
}

ScaleOfCodes CodeTensor::fit(const Extremes& e) const {
  const float low = format.lowest, high = format.largest;
  const DType dtype = scaling.scale.at.dtype;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  if (e.nan && format.integers) return {nan, 0};
  if (e.min > e.max) return {0, 0};
  if (!scaling.zero_point.given()) return {rounded(std::fabs(e.largest) / high, dtype), 0};
  // If all numbers are equal, the scale is their magnitude.
  const float range = e.max / (high - low) - e.min / (high - low);
  const float scale = rounded(range == 0 ? std::fabs(e.max) : range, dtype);
  if (scale == 0) return {0, 0};
  return {scale, rounded(low - e.min / scale, scaling.zero_point.at.dtype)};
}

void CodeTensor::store(const ScaleOfCodes& x, const Row& r, int64_t group) const {
  const auto put = [&](void* data, const ScaleTensor& t, float value) {
    if (!t.given()) return;
    store_element(data, t.at.dtype, t.at.offset(r.b, r.h, r.entry, r.row, r.h, group), value);
  };
  put(scale, scaling.scale, x.scale);
  put(zero_point, scaling.zero_point, x.zero_point);
}

ScaleOfCodes CodeTensor::load(const Row& r, int64_t group) const {
  const auto of = [&](const ScaleTensor& t, float none) {
    return t.given() ? t.of(r.b, r.h, r.entry, r.row, r.h, group) : none;
  };
  return {of(scaling.scale, 1), of(scaling.zero_point, 0)};
}

void CodeTensor::put(const Row& r, float* x, bool fixed) const {
  const int64_t first = at.offset(r.entry, r.row, r.h);
  auto* to = static_cast<std::byte*>(codes) + bytes_of(format.dtype, first);
  const int64_t groups = scaling.given() ? scaling.scale.at.groups : 1, n = columns / groups;
  for (int64_t g = 0; g < groups; ++g, x += n, to += bytes_of(format.dtype, n)) {
    if (scaling.given()) {
      const bool fits = scaling.scale.at.of_rows && !fixed;
      const ScaleOfCodes by = fits ? fit(Extremes(x, n)) : load(r, g);
      if (fits) store(by, r, g);
      for (int64_t i = 0; i < n; ++i) {
        x[i] = (by.scale == 0 ? 0 : x[i] / by.scale) + by.zero_point;
      }
    }
    format.pack(x, n, to);
  }
}

void quantize(const QuantizeCall& c, int threads) {
  if (c.mean.given()) write_means(c, threads);
  const Layout from = rows_layout(c.x);
  const int64_t rows = c.batch * c.rows * c.heads;
  const auto with_row = [&](int64_t n, const auto& use) {
    const CodeTensor::Row r = row_of(n, c.rows, c.heads);
    std::vector<float> x(static_cast<size_t>(c.to.columns));
    load(c.x, from, r, c.to.columns, x.data());
    c.to.take_means(r, x.data());
    use(r, x.data());
  };
  const Scales& at = c.to.scaling.scale.at;
  const bool in_sets = c.to.scaling.given() && !at.of_rows && !c.fixed;
  if (in_sets) {
    std::vector<Extremes> of_rows(static_cast<size_t>(rows)),
        sets(static_cast<size_t>(c.batch * c.heads));
    parallel_for(rows, threads, [&](int64_t n) {
      with_row(n, [&](const CodeTensor::Row&, const float* x) {
        of_rows[static_cast<size_t>(n)] = Extremes(x, c.to.columns);
      });
    });
    for (int64_t n = 0; n < rows; ++n) {
      const CodeTensor::Row r = row_of(n, c.rows, c.heads);
      sets[set_of(at, r, c.heads)].add(of_rows[static_cast<size_t>(n)]);
    }
    for (int64_t n = 0; n < c.batch * c.heads; ++n) {
      const CodeTensor::Row r{n / c.heads, n / c.heads, 0, n % c.heads};
      c.to.store(c.to.fit(sets[set_of(at, r, c.heads)]), r, 0);
    }
  }
  parallel_for(rows, threads, [&](int64_t n) {
    with_row(n, [&](const CodeTensor::Row& r, float* x) { c.to.put(r, x, c.fixed || in_sets); });
  });
}

void dequantize(const DequantizeCall& c, int threads) {
  const CodeTensor& from = c.from;
  const Layout to = rows_layout(c.x);
  const int64_t groups = from.scaling.given() ? from.scaling.scale.at.groups : 1;
  parallel_for(c.batch * c.rows * c.heads, threads, [&](int64_t n) {
    const CodeTensor::Row r = row_of(n, c.rows, c.heads);
    std::vector<float> numbers(static_cast<size_t>(from.columns));
    from.format.unpack(static_cast<const std::byte*>(from.codes) +
                           bytes_of(from.format.dtype, from.at.offset(r.entry, r.row, r.h)),
                       from.columns, numbers.data());
    for (int64_t i = 0; from.scaling.given() && i < from.columns; ++i) {
      const ScaleOfCodes by = from.load(r, i / (from.columns / groups));
      numbers[static_cast<size_t>(i)] =
          (numbers[static_cast<size_t>(i)] - by.zero_point) * by.scale;
    }
    if (const float* const mean = from.means.of(r.b, r.h)) {
      for (int64_t i = 0; i < from.columns; ++i) numbers[static_cast<size_t>(i)] += mean[i];
    }
    auto* const row =
        static_cast<std::byte*>(c.x.data) + to.offset(r.entry, r.row, r.h) * size_of(c.x.dtype);
    if (c.x.dtype == DType::kF64) {
      for (int64_t i = 0; i < from.columns; ++i) store_element(row, c.x.dtype, i, numbers[i]);
    } else {
      store_row(row, c.x.dtype, from.columns, numbers.data());
    }
  });
}

}  // namespace fulgur

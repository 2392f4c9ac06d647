#include "base/hadamard.h"

#include <cstddef>
#include <vector>

#include "base/parallel.h"
#include "base/rotary.h"
#include "kernels/host_device/heads.h"

namespace fulgur {
namespace {

/// The n columns from x on.
void rotate(float* x, int n, bool inverse) {
  const auto flip = [&] {
    for (int i = 0; i < n; ++i)
      x[i] = kernels::hadamard_flips(static_cast<unsigned>(i)) ? -x[i] : x[i];
  };
  if (!inverse) flip();
  for (int step = 1; step < n; step *= 2) {
    for (int i = 0; i < n; ++i) {
      if ((i & step) != 0) continue;
      const float a = x[i], b = x[i + step];
      x[i] = a + b;
      x[i + step] = a - b;
    }
  }
  if (inverse) flip();
  const float scale = kernels::hadamard_scale(n);
  for (int i = 0; i < n; ++i) x[i] *= scale;
}

}  // namespace

void hadamard(float* x, int64_t columns, bool inverse) {
  const int n = kernels::hadamard_columns(static_cast<int>(columns));
  for (int64_t first = 0; first < columns; first += n) rotate(x + first, n, inverse);
}

void hadamard(const HadamardCall& c, int threads) {
  const Layout from = rows_layout(c.x), to = rows_layout(c.y);
  parallel_for(c.batch * c.rows * c.heads, threads, [&](int64_t row) {
    const int64_t b = row / c.heads / c.rows, r = row / c.heads % c.rows, h = row % c.heads;
    std::vector<float> x(static_cast<size_t>(c.columns));
    load_row(static_cast<const std::byte*>(c.x.data) + from.offset(b, r, h) * size_of(c.x.dtype),
             c.x.dtype, c.columns, x.data());
    hadamard(x.data(), c.columns, c.inverse);
    auto* const y = static_cast<std::byte*>(c.y.data) + to.offset(b, r, h) * size_of(c.y.dtype);
    if (c.y.dtype == DType::kF64) {
      for (int64_t i = 0; i < c.columns; ++i)
        store_element(y, c.y.dtype, i, x[static_cast<size_t>(i)]);
    } else {
      store_row(y, c.y.dtype, c.columns, x.data());
    }
  });
}

}  // namespace fulgur

// The attention call is non-local means: the same as its definition, computed pair by pair.
#include <algorithm>
#include <cstdio>

#include "nonlocal_means.h"

namespace {

/// |f_i - f_j|^2 of the patches around two pixels.
double patch_distance(const Picture& p, int64_t xi, int64_t yi, int64_t xj, int64_t yj) {
  const auto value = [&](int64_t x, int64_t y, int64_t c) {
    return static_cast<double>(
        p.at(std::clamp<int64_t>(x, 0, p.width - 1), std::clamp<int64_t>(y, 0, p.height - 1))[c]);
  };
  const double width = static_cast<double>(kWidth);
  double sum = 0, weights = 0;
  for (int64_t dy = -kRadius; dy <= kRadius; ++dy) {
    for (int64_t dx = -kRadius; dx <= kRadius; ++dx) {
      const double weight =
          std::exp(static_cast<double>(-(dx * dx + dy * dy)) / (2 * width * width));
      weights += weight;
      for (int64_t c = 0; c < 3; ++c) {
        const double e = value(xi + dx, yi + dy, c) - value(xj + dx, yj + dy, c);
        sum += weight * e * e;
      }
    }
  }
  return sum / weights;
}

}  // namespace

int main() {
  constexpr float kSigma = 0.1f;
  const Picture clean = draw_scene(24), noisy = add_noise(clean, kSigma);
  Cost cost;
  const Picture got = nonlocal_means(noisy, kSigma, &cost);

  const double h2 = kStrength * 6 * 0.01;
  double worst = 0;
  for (int64_t i = 0; i < 24 * 24; ++i) {
    double sum[3] = {0, 0, 0}, weights = 0;
    for (int64_t j = 0; j < 24 * 24; ++j) {
      const double distance = patch_distance(noisy, i % 24, i / 24, j % 24, j / 24);
      const double weight = i == j ? std::exp(-1 / kStrength) : std::exp(-distance / h2);
      weights += weight;
      for (int64_t c = 0; c < 3; ++c) sum[c] += weight * static_cast<double>(noisy.rgb[3 * j + c]);
    }
    for (int64_t c = 0; c < 3; ++c) {
      const double e = sum[c] / weights - static_cast<double>(got.rgb[3 * i + c]);
      worst = std::max(worst, std::isnan(e) ? INFINITY : std::abs(e));
    }
  }
  const bool right = worst < 1e-3 && psnr(got, clean) > psnr(noisy, clean);
  std::printf("largest difference %.2g, PSNR %.2f dB -> %.2f dB: %s\n", worst, psnr(noisy, clean),
              psnr(got, clean), right ? "ok" : "WRONG");
  return right ? 0 : 1;
}

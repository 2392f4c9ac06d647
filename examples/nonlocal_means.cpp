// Non-local means as one attention call. With f_i the weighted values of the patch around pixel i,
//
//   w_ij = exp(-|f_i - f_j|^2 / h^2),    result_i = sum_j w_ij pixel_j / sum_j w_ij.
//
// |f_i|^2 is the same for all j and cancels, so with one more dimension
//
//   q_i = (f_i, 1),    k_j = (f_j, -|f_j|^2 / 2),    v_j = pixel_j,    scale = 2 / h^2
//
// the weights are softmax(scale q_i . k_j), and the result is attention. The usual programs look
// for similar patches in a small neighborhood only, because N x N weights do not fit in memory.
#include "nonlocal_means.h"

#include <fulgur/fulgur.h>

#include <algorithm>
#include <chrono>
#include <numeric>

namespace {

constexpr int64_t kSide = 2 * kRadius + 1;
constexpr int64_t kFeatures = 3 * kSide * kSide;
constexpr int64_t kDim = kFeatures + 1;

/// Square roots of the weights of a patch's pixels, row-major.
std::vector<float> patch_weights() {
  std::vector<float> weights;
  float sum = 0;
  for (int64_t dy = -kRadius; dy <= kRadius; ++dy) {
    for (int64_t dx = -kRadius; dx <= kRadius; ++dx) {
      weights.push_back(std::exp(static_cast<float>(-(dx * dx + dy * dy)) / (2 * kWidth * kWidth)));
      sum += weights.back();
    }
  }
  for (float& weight : weights) weight = std::sqrt(weight / sum);
  return weights;
}

/// f of every pixel, (pixels, kDim), and a last dimension of 0. Pixels beyond the edge repeat it;
/// values are centered, which leaves the differences and makes the scores smaller.
std::vector<float> patches(const Picture& picture) {
  const std::vector<float> weights = patch_weights();
  const int64_t right = picture.width - 1, bottom = picture.height - 1;
  std::vector<float> features(static_cast<size_t>(picture.width * picture.height * kDim));
  float* f = features.data();
  for (int64_t y = 0; y <= bottom; ++y) {
    for (int64_t x = 0; x <= right; ++x, ++f) {
      for (int64_t n = 0; n < kSide * kSide; ++n, f += 3) {
        const float* pixel = picture.at(std::clamp<int64_t>(x + n % kSide - kRadius, 0, right),
                                        std::clamp<int64_t>(y + n / kSide - kRadius, 0, bottom));
        for (int64_t c = 0; c < 3; ++c) f[c] = weights[n] * (pixel[c] - 0.5f);
      }
    }
  }
  return features;
}

}  // namespace

Picture nonlocal_means(const Picture& noisy, float sigma, Cost* cost) {
  const int64_t N = noisy.width * noisy.height;
  std::vector<float> q = patches(noisy), k = q, lse(static_cast<size_t>(N));
  for (int64_t i = 0; i < N; ++i) {
    float* f = &k[i * kDim];
    f[kFeatures] = -std::inner_product(f, f + kFeatures, f, 0.0f) / 2;
    q[i * kDim + kFeatures] = 1;
  }
  const double h2 = kStrength * 6 * sigma * sigma;  // 3 channels, 2 sigma^2 each

  Picture result(noisy.width, noisy.height);
  using fulgur::DType, fulgur::Tensor;
  const fulgur::ForwardArgs args{
      .q = Tensor::contiguous(q.data(), DType::kF32, {1, N, 1, kDim}),
      .k = Tensor::contiguous(k.data(), DType::kF32, {1, N, 1, kDim}),
      .v = fulgur::ConstTensor::contiguous(noisy.rgb.data(), DType::kF32, {1, N, 1, 3}),
      .out = Tensor::contiguous(result.rgb.data(), DType::kF32, {1, N, 1, 3}),
      .lse = Tensor::contiguous(lse.data(), DType::kF32, {1, 1, N})};
  const auto start = std::chrono::steady_clock::now();
  const fulgur::Plan plan = fulgur::plan(args, {.scale = 2 / h2});
  plan.run(args);
  cost->seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  cost->flops = plan.flops();

  // A pixel is too much like itself: its weight 1 becomes that of a pixel which differs by noise
  // alone, exp(-1 / kStrength). The share of the pixel itself in the mean follows from LSE.
  const double excess = 1 - std::exp(-1 / kStrength);
  for (int64_t i = 0; i < N; ++i) {
    const double score = 2 / h2 * static_cast<double>(-k[i * kDim + kFeatures]);
    const double own = excess * std::exp(score - static_cast<double>(lse[i]));
    for (int64_t c = 3 * i; c < 3 * i + 3; ++c) {
      const double rest =
          static_cast<double>(result.rgb[c]) - own * static_cast<double>(noisy.rgb[c]);
      result.rgb[c] = static_cast<float>(rest / (1 - own));
    }
  }
  return result;
}

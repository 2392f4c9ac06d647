#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

/// An RGB picture: values from 0 to 1, row-major (height, width, 3).
struct Picture {
  int64_t width = 0, height = 0;
  std::vector<float> rgb;

  Picture(int64_t w, int64_t h) : width(w), height(h), rgb(static_cast<size_t>(3 * w * h)) {}
  float* at(int64_t x, int64_t y) { return &rgb[static_cast<size_t>(3 * (y * width + x))]; }
  const float* at(int64_t x, int64_t y) const {
    return &rgb[static_cast<size_t>(3 * (y * width + x))];
  }
};

/// A drawn scene of n x n pixels with what denoising finds hard: gradients, sharp edges, textures
/// and letters. The same bits in every run.
Picture draw_scene(int64_t n);

/// Adds Gaussian noise of standard deviation sigma, the same in every run.
Picture add_noise(const Picture& picture, float sigma);

/// Peak signal-to-noise ratio in dB; the peak is 1.
double psnr(const Picture& a, const Picture& b);

/// Writes pictures of one size side by side as an 8-bit PNG. Throws std::runtime_error.
void write_png(const std::string& path, const std::vector<const Picture*>& pictures);

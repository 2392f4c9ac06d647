// Denoises a drawn picture by exact non-local means: one attention call over all its pixels.
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>

#include "nonlocal_means.h"

namespace {

constexpr float kSigma = 0.1f;  // of the noise; the brightest value is 1
constexpr int kMin = 16, kMax = 1024;

/// Denoises a scene of n x n pixels and writes the pictures; false if it has become no better.
bool run(const std::filesystem::path& folder, int n) {
  const Picture clean = draw_scene(n), noisy = add_noise(clean, kSigma);
  Cost cost;
  const Picture denoised = nonlocal_means(noisy, kSigma, &cost);
  const auto path = folder / ("denoise_" + std::to_string(n) + ".png");
  write_png(path, {&noisy, &denoised, &clean});

  const double before = psnr(noisy, clean), after = psnr(denoised, clean);
  const double N = static_cast<double>(n) * n;
  std::printf(
      "%d x %d pixels: PSNR %.2f dB -> %.2f dB in %.2f s, %.0f GFLOP/s; the score matrix\n"
      "that was never built: %.0f x %.0f, %.3g GiB\n  noisy, denoised, clean: %s\n",
      n, n, before, after, cost.seconds, cost.flops / cost.seconds * 1e-9, N, N,
      N * N * 4 / (1 << 30), path.c_str());
  return after > before;
}

/// The number of pixels a side, or 0 if the text is not one.
int parse_size(const char* text) {
  int n = 0;
  const char* end = text + std::strlen(text);
  const auto [rest, error] = std::from_chars(text, end, n);
  return error == std::errc{} && rest == end && n >= kMin && n <= kMax ? n : 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::fprintf(stderr,
                 "usage: denoise FOLDER [SIZE...]\n"
                 "Writes FOLDER/denoise_SIZE.png: a picture of SIZE x SIZE pixels with noise,\n"
                 "denoised, and clean, side by side. Sizes: 128 and 256 by default.\n");
    return 2;
  }
  std::vector<int> sizes;
  for (int i = 2; i < argc; ++i) {
    sizes.push_back(parse_size(argv[i]));
    if (sizes.back() == 0) {
      std::fprintf(stderr, "denoise: size: got '%s', want %d to %d\n", argv[i], kMin, kMax);
      return 2;
    }
  }
  if (sizes.empty()) sizes = {128, 256};
  try {
    bool better = true;
    for (const int n : sizes) better &= run(argv[1], n);
    return better ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "denoise: %s\n", error.what());
    return 1;
  }
}

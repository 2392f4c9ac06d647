#include "picture.h"

#include <png.h>

#include <algorithm>
#include <cstdio>
#include <initializer_list>
#include <numbers>
#include <stdexcept>

namespace {

constexpr float kPi = std::numbers::pi_v<float>;

struct Color {
  float r, g, b;
};

Color mix(Color a, Color b, float t) {
  t = std::clamp(t, 0.0f, 1.0f);
  return {a.r + t * (b.r - a.r), a.g + t * (b.g - a.g), a.b + t * (b.b - a.b)};
}

float fraction(float x) { return x - std::floor(x); }

struct Point {
  float x, y;
};

/// Whether the point is inside the polygon (an odd number of edges to its right).
bool inside(std::initializer_list<Point> polygon, Point p) {
  bool odd = false;
  const Point* a = polygon.end() - 1;
  for (const Point& b : polygon) {
    if ((a->y > p.y) != (b.y > p.y) && p.x < a->x + (b.x - a->x) * (p.y - a->y) / (b.y - a->y)) {
      odd = !odd;
    }
    a = &b;
  }
  return odd;
}

/// Whether (x, y) in units of a 6 x 8 cell is ink of the word on the sign.
bool ink(float x, float y) {
  static constexpr const char* kGlyphs[][7] = {
      {"#####", "#....", "#....", "####.", "#....", "#....", "#...."},  // F
      {"#...#", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."},  // U
      {"#....", "#....", "#....", "#....", "#....", "#....", "#####"},  // L
      {".###.", "#...#", "#....", "#.###", "#...#", "#...#", ".###."},  // G
      {"#...#", "#...#", "#...#", "#...#", "#...#", "#...#", ".###."},  // U
      {"####.", "#...#", "#...#", "####.", "#.#..", "#..#.", "#...#"},  // R
  };
  const int column = static_cast<int>(std::floor(x)), row = static_cast<int>(std::floor(y));
  if (column < 0 || column >= 36 || row < 0 || row >= 7 || column % 6 == 5) return false;
  return kGlyphs[column / 6][row][column % 6] == '#';
}

Color sky(float x, float y) {
  Color c = mix({0.07f, 0.09f, 0.26f}, {0.93f, 0.52f, 0.36f}, std::pow(y / 0.62f, 1.6f));
  const float moon = std::hypot(x - 0.78f, y - 0.17f);
  c = mix(c, {0.80f, 0.80f, 0.95f}, 0.45f * std::exp(-12 * moon));
  if (moon < 0.085f) {
    const float shade = std::hypot(x - 0.75f, y - 0.14f) / 0.14f;
    c = mix({0.98f, 0.97f, 0.90f}, {0.72f, 0.72f, 0.78f}, shade);
  }
  return c;
}

Color brick(float x, float y) {
  const float row = std::floor(y / 0.035f);
  const float u = fraction(x / 0.08f + 0.5f * row), v = fraction(y / 0.035f);
  if (u < 0.10f || v < 0.20f) return {0.72f, 0.68f, 0.62f};
  return mix({0.66f, 0.27f, 0.20f}, {0.52f, 0.19f, 0.15f}, u);
}

Color water(float x, float y) {
  const float depth = (y - 0.62f) / 0.38f;
  const float wave = std::sin(2 * kPi * (26 * std::sqrt(depth + 0.05f) + 0.8f * std::sin(9 * x)));
  return mix(mix({0.86f, 0.50f, 0.40f}, {0.08f, 0.16f, 0.34f}, 0.3f + depth), {0.55f, 0.62f, 0.78f},
             0.25f + 0.25f * wave);
}

/// The color at (x, y) of the unit square, y downwards; later shapes lie over earlier ones.
Color scene(float x, float y) {
  Color c = y < 0.62f ? sky(x, y) : water(x, y);
  const float ridge = 0.50f - 0.09f * std::sin(5.5f * x + 0.6f) - 0.035f * std::sin(17 * x);
  if (y > ridge && y < 0.62f) {
    c = mix({0.20f, 0.17f, 0.34f}, {0.42f, 0.30f, 0.42f}, (y - ridge) / 0.2f);
  }
  if (inside({{0.44f, 0.02f},
              {0.58f, 0.02f},
              {0.51f, 0.20f},
              {0.60f, 0.20f},
              {0.41f, 0.50f},
              {0.46f, 0.27f},
              {0.37f, 0.27f}},
             {x, y})) {
    c = mix({1.0f, 0.98f, 0.75f}, {1.0f, 0.80f, 0.20f}, y / 0.5f);
  }
  // A house: brick wall, striped roof, a window with crossbars.
  if (x > 0.05f && x < 0.37f && y > 0.45f && y < 0.86f) c = brick(x - 0.05f, y - 0.45f);
  if (inside({{0.01f, 0.45f}, {0.21f, 0.26f}, {0.41f, 0.45f}}, {x, y})) {
    c = fraction((x + y) / 0.03f) < 0.5f ? Color{0.24f, 0.33f, 0.36f} : Color{0.32f, 0.45f, 0.46f};
  }
  if (x > 0.13f && x < 0.29f && y > 0.55f && y < 0.73f) {
    const bool bar = std::abs(x - 0.21f) < 0.008f || std::abs(y - 0.64f) < 0.008f || x < 0.14f ||
                     x > 0.28f || y < 0.56f || y > 0.72f;
    c = bar ? Color{0.93f, 0.91f, 0.86f}
            : mix({1.0f, 0.85f, 0.45f}, {0.95f, 0.6f, 0.25f}, (y - 0.55f) / 0.18f);
  }
  // A checkered floor in front and the sign.
  if (y > 0.86f) {
    const bool light = (static_cast<int>(std::floor(x / 0.0625f)) +
                        static_cast<int>(std::floor((y - 0.86f) / 0.07f))) %
                           2 ==
                       0;
    c = light ? Color{0.85f, 0.83f, 0.78f} : Color{0.22f, 0.23f, 0.26f};
  }
  if (x > 0.47f && x < 0.96f && y > 0.66f && y < 0.82f) {
    c = {0.95f, 0.94f, 0.88f};
    if (x < 0.48f || x > 0.95f || y < 0.67f || y > 0.81f) c = {0.35f, 0.22f, 0.14f};
    if (ink((x - 0.505f) / 0.012f, (y - 0.698f) / 0.012f)) c = {0.10f, 0.12f, 0.30f};
  }
  return c;
}

/// Uniform in (0, 1): SplitMix64 (Steele, Lea, Flood 2014) of a counter.
double uniform(uint64_t counter) {
  uint64_t z = (counter + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return (static_cast<double>((z ^ (z >> 31)) >> 11) + 0.5) * 0x1p-53;
}

}  // namespace

Picture draw_scene(int64_t n) {
  constexpr int kSamples = 4;  // per pixel and side, against jagged edges
  Picture picture(n, n);
  for (int64_t y = 0; y < n; ++y) {
    for (int64_t x = 0; x < n; ++x) {
      float* pixel = picture.at(x, y);
      for (int s = 0; s < kSamples * kSamples; ++s) {
        const float u =
            static_cast<float>(x) + (static_cast<float>(s % kSamples) + 0.5f) / kSamples;
        const float v =
            static_cast<float>(y) + (static_cast<float>(s / kSamples) + 0.5f) / kSamples;
        const Color c = scene(u / static_cast<float>(n), v / static_cast<float>(n));
        pixel[0] += c.r / (kSamples * kSamples);
        pixel[1] += c.g / (kSamples * kSamples);
        pixel[2] += c.b / (kSamples * kSamples);
      }
    }
  }
  return picture;
}

Picture add_noise(const Picture& picture, float sigma) {
  Picture noisy = picture;
  for (size_t i = 0; i < noisy.rgb.size(); ++i) {  // Box and Muller, 1958
    const double radius = std::sqrt(-2 * std::log(uniform(2 * i)));
    noisy.rgb[i] +=
        sigma * static_cast<float>(radius * std::cos(2 * std::numbers::pi * uniform(2 * i + 1)));
  }
  return noisy;
}

double psnr(const Picture& a, const Picture& b) {
  double sum = 0;
  for (size_t i = 0; i < a.rgb.size(); ++i) {
    const double e = static_cast<double>(a.rgb[i]) - static_cast<double>(b.rgb[i]);
    sum += e * e;
  }
  return -10 * std::log10(sum / static_cast<double>(a.rgb.size()));
}

void write_png(const std::string& path, const std::vector<const Picture*>& pictures) {
  constexpr int64_t kGap = 4;  // white pixels between pictures
  const int64_t w = pictures[0]->width, h = pictures[0]->height;
  const auto count = static_cast<int64_t>(pictures.size());
  const int64_t row = 3 * (count * (w + kGap) - kGap);
  std::vector<uint8_t> bytes(static_cast<size_t>(row * h), 255);
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t y = 0; y < h; ++y) {
      std::transform(pictures[i]->at(0, y), pictures[i]->at(0, y) + 3 * w,
                     &bytes[static_cast<size_t>(y * row + 3 * i * (w + kGap))], [](float value) {
                       return static_cast<uint8_t>(std::clamp(value, 0.0f, 1.0f) * 255 + 0.5f);
                     });
    }
  }
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = static_cast<png_uint_32>(row / 3);
  image.height = static_cast<png_uint_32>(h);
  image.format = PNG_FORMAT_RGB;
  if (!png_image_write_to_file(&image, path.c_str(), 0, bytes.data(), 0, nullptr)) {
    std::remove(path.c_str());
    throw std::runtime_error(path + ": " + image.message);
  }
}

#include "svg.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <iterator>

namespace fulgur::app {
namespace {

constexpr int64_t kMaxCells = 256;
constexpr double kSide = 512;  // pixels of the longer side of the map
constexpr double kLeft = 80, kTop = 84, kRight = 220, kBottom = 24;
constexpr double kMinWidth = 480;  // room for the title
constexpr std::array<const char*, 3> kColours = {"#eceff3", "#f2a33c", "#2b6ca3"};
constexpr std::array<const char*, 3> kNames = {"empty: skipped", "partial: masked",
                                               "full: no mask"};

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '<') {
      out += "&lt;";
    } else if (c == '&') {
      out += "&amp;";
    } else {
      out += c;
    }
  }
  return out;
}

Tile merged(const TileMap& map, int64_t r0, int64_t r1, int64_t c0, int64_t c1) {
  const Tile first = map.tiles[r0 * map.cols + c0];
  for (int64_t r = r0; r < r1; ++r) {
    for (int64_t c = c0; c < c1; ++c) {
      if (map.tiles[r * map.cols + c] != first) return Tile::kPartial;
    }
  }
  return first;
}

}  // namespace

std::string tile_map_svg(const TileMap& map, int64_t sq, int64_t sk, const std::string& title) {
  std::string svg;
  const auto put = [&]<class... Args>(fmt::format_string<Args...> text, Args&&... args) {
    fmt::format_to(std::back_inserter(svg), text, std::forward<Args>(args)...);
  };
  const int64_t rows = std::min(map.rows, kMaxCells), cols = std::min(map.cols, kMaxCells);
  const double longest = static_cast<double>(std::max<int64_t>({1, sq, sk}));
  // A side far shorter than the other still gets a visible strip.
  const double width = std::max(16.0, kSide * static_cast<double>(sk) / longest);
  const double height = std::max(16.0, kSide * static_cast<double>(sq) / longest);
  const double full_width = std::max(kMinWidth, kLeft + width + kRight);
  const double full_height = std::max(260.0, kTop + height + kBottom);
  put("<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0:.0f}\" height=\"{1:.0f}\" "
      "viewBox=\"0 0 {0:.0f} {1:.0f}\" font-family=\"sans-serif\" font-size=\"13\">\n"
      "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
      "<text x=\"{2:.0f}\" y=\"24\" font-size=\"15\">{3}</text>\n",
      full_width, full_height, kLeft, escaped(title));

  // Tile edges are multiples of Br and Bc; the last tile of a side is cut at its end.
  const auto x_of = [&](int64_t c) {
    return kLeft + width * static_cast<double>(std::min(sk, c * map.cols / cols * map.Bc)) /
                       static_cast<double>(sk);
  };
  const auto y_of = [&](int64_t r) {
    return kTop + height * static_cast<double>(std::min(sq, r * map.rows / rows * map.Br)) /
                      static_cast<double>(sq);
  };
  const bool lines = rows <= 64 && cols <= 64;
  put("<g shape-rendering=\"crispEdges\"{}>\n", lines ? " stroke=\"white\"" : "");
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols;) {
      const auto cell = [&](int64_t at) {
        return merged(map, r * map.rows / rows, (r + 1) * map.rows / rows, at * map.cols / cols,
                      (at + 1) * map.cols / cols);
      };
      const Tile tile = cell(c);
      int64_t end = c + 1;
      // Without lines between them, cells alike are one rectangle.
      while (!lines && end < cols && cell(end) == tile) ++end;
      put("<rect x=\"{:.2f}\" y=\"{:.2f}\" width=\"{:.2f}\" height=\"{:.2f}\" fill=\"{}\"/>\n",
          x_of(c), y_of(r), x_of(end) - x_of(c), y_of(r + 1) - y_of(r),
          kColours[static_cast<size_t>(tile)]);
      c = end;
    }
  }
  put("</g>\n<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#555\"/>\n",
      kLeft, kTop, width, height);

  put("<text x=\"{:.0f}\" y=\"{:.0f}\">keys (sk = {}, Bc = {}) \u2192</text>\n", kLeft, kTop - 26,
      sk, map.Bc);
  put("<text x=\"{0:.0f}\" y=\"{1:.0f}\" transform=\"rotate(-90 {0:.0f} {1:.0f})\" "
      "text-anchor=\"end\">\u2190 queries (sq = {2}, Br = {3})</text>\n",
      kLeft - 50, kTop, sq, map.Br);
  for (const double part : {0.0, 0.5, 1.0}) {
    if (part == 0.5 && std::min(width, height) < 48) continue;  // the numbers would collide
    put("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"middle\" fill=\"#555\">{:.0f}</text>\n",
        kLeft + part * width, kTop - 8, part * static_cast<double>(sk));
    put("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"end\" fill=\"#555\">{:.0f}</text>\n",
        kLeft - 6, kTop + part * height + 4, part * static_cast<double>(sq));
  }

  const double total = static_cast<double>(std::max<size_t>(1, map.tiles.size()));
  for (size_t i = 0; i < kNames.size(); ++i) {
    const double x = full_width - kRight + 24, y = kTop + 24 * static_cast<double>(i);
    const auto count = std::count(map.tiles.begin(), map.tiles.end(), static_cast<Tile>(i));
    put("<rect x=\"{:.0f}\" y=\"{:.0f}\" width=\"14\" height=\"14\" fill=\"{}\" "
        "stroke=\"#555\"/>\n<text x=\"{:.0f}\" y=\"{:.0f}\">{} ({:.1f}%)</text>\n",
        x, y, kColours[i], x + 22, y + 12, kNames[i], 100 * static_cast<double>(count) / total);
  }
  svg += "</svg>\n";
  return svg;
}

}  // namespace fulgur::app

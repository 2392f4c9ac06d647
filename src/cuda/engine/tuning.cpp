#include "cuda/engine/tuning.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdio>

#include "cuda/engine/shape_class.h"
#include "cuda/jit/compile.h"
#include "cuda/jit/sha256.h"
#include "fulgur/error.h"
#include "fulgur/version.h"

namespace fulgur::cuda {
namespace {

std::string file_name(const std::string& key) { return Sha256().add(key).hex() + ".tuning"; }

std::atomic<uint64_t> kept = 0;

/// The content of a file: one line per tile.
std::string text_of(const std::vector<MeasuredTile>& tiles) {
  std::string text;
  for (const MeasuredTile& tile : tiles) {
    text += fmt::format("{} {} {} {}\n", tile.tile.family, tile.tile.Br, tile.tile.Bc,
                        tile.microseconds);
  }
  return text;
}

/// The tiles of such a text; none if it is any other text.
std::vector<MeasuredTile> tiles_of(const std::string& text) {
  std::vector<MeasuredTile> tiles;
  const char *at = text.data(), *const end = at + text.size();
  const auto number = [&](auto& value, char after) {
    const auto [rest, error] = std::from_chars(at, end, value);
    if (error != std::errc{} || rest == end || *rest != after) return false;
    at = rest + 1;
    return true;
  };
  while (at != end) {
    MeasuredTile tile;
    const char* const word = std::find_if(at, end, [](char c) { return c == ' ' || c == '\n'; });
    if (word == at || word == end || *word != ' ') return {};
    tile.tile.family.assign(at, word);
    at = word + 1;
    if (!number(tile.tile.Br, ' ') || !number(tile.tile.Bc, ' ') ||
        !number(tile.microseconds, '\n') || !std::isfinite(tile.microseconds) ||
        tile.microseconds <= 0) {
      return {};
    }
    tiles.push_back(tile);
  }
  return tiles;
}

}  // namespace

std::string tuning_key(Gpu& gpu, const Problem& problem) {
  return fmt::format(
      "device {}, {} SMs, {} bytes of shared memory\nfulgur {}, kernels {} for {}\n{}\n",
      gpu.name(), gpu.sms(), gpu.shared_bytes(), FULGUR_VERSION, kernels_identity(),
      gpu.target().name(), shape_class(problem));
}

uint64_t Tunings::generation() { return kept; }

Tunings& Tunings::here() {
  static auto& tunings =
      *new Tunings(CacheFolder::standard());  // never destroyed, as plans may outlive statics
  return tunings;
}

std::filesystem::path Tunings::path(const std::string& key) const {
  return folder_.path() / file_name(key);
}

std::vector<MeasuredTile> Tunings::read(const std::string& key) const {
  std::string why;
  const std::optional<std::string> content = folder_.load(file_name(key), &why);
  std::vector<MeasuredTile> tiles;
  if (content) {
    if (content->starts_with(key)) tiles = tiles_of(content->substr(key.size()));
    if (tiles.empty()) why = path(key).string() + " holds something else";
  }
  if (!why.empty()) {
    fmt::print(stderr,
               "fulgur: tiles are chosen as if they had not been tuned: {} (`fulgur tune` measures "
               "anew, FULGUR_CACHE_DIR names another folder)\n",
               why);
  }
  return tiles;
}

std::vector<MeasuredTile> Tunings::find(const std::string& key) {
  const std::scoped_lock lock(mutex_);
  const auto found = known_.find(key);
  if (found != known_.end()) return found->second;
  return known_[key] = read(key);
}

void Tunings::keep(const std::string& key, std::vector<MeasuredTile> tiles) {
  std::string why = folder_.unusable();
  if (why.empty()) why = folder_.store(file_name(key), key + text_of(tiles));
  if (!why.empty()) throw Error(Status::kUnavailable, why);
  const std::scoped_lock lock(mutex_);
  known_[key] = std::move(tiles);
  ++kept;
}

}  // namespace fulgur::cuda

#include "cuda/common/tile_map.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/common/expression.h"
#include "cuda/common/launch.h"
#include "engine/workspace.h"
#include "kernels/host_device/strips.h"

namespace fulgur::cuda {
namespace {

constexpr int kThreads = 128, kWarps = kThreads / 32;  // of a CTA

constexpr const char* kHulls = "fulgur_panel_hulls";
constexpr const char* kMap = "fulgur_tile_map";
constexpr const char* kMapAtOnce = "fulgur_map_at_once";
constexpr int kAtOnceThreads = 256;
// Each CTA has the hulls of all keys of a sequence, or of all rows: rows and keys, of a kernel that
// the forward kernel waits for, and of one that works on rows meanwhile.
constexpr int kMaxRowsAtOnce = 4096, kMaxPreparedRows = 16384;
constexpr const char* kMapOfRows = "fulgur_map_of_rows";

constexpr const char* kPack = "fulgur_pack_mask";
constexpr int kPackedCells = 8;                          // that a CTA of it packs
constexpr double kPackedShare = 0.6;                     // of what the memory gives
constexpr double kPackCycles = 3000, kMapCycles = 3000;  // of launches
constexpr double kMaxMaskScores = 0x1p35;  // of the largest mask: ints count its words

/// What kernel_config.h fixes of maps/tile_map.cu and maps/mask_bits.cu: the mask and the
/// lengths.
struct MapKey : AnyForwardKey {
  MapTiles tiles;

  template <class F>
  void for_each_field(const F& f) const {
    AnyForwardKey::for_each_field(f);
    f("kBlockStrips", tiles.block_strips);
    f("kBlockRows", tiles.block_rows);
    f("kBlockKeys", tiles.block_keys);
    f("kMapByKeys", tiles.by_keys);
    f("kMapOfRows", tiles.of_rows_too);
    f("kEarlyStarts", tiles.early_starts);
  }
};

KernelRequest request(const AnyForwardKey& of, const MapTiles& tiles) {
  MapKey key;
  key.has_left = of.has_left;
  key.has_right = of.has_right;
  key.has_chunk = of.has_chunk;
  key.top_left = of.top_left;
  key.part = of.part;
  key.tree = of.tree;
  key.mask_mod = of.mask_mod;
  key.packed = of.packed;
  key.packed_k = of.packed_k;
  key.seqused_q = of.seqused_q;
  key.seqused_k = of.seqused_k;
  key.page = of.page;
  key.page_lists = of.page_lists;
  key.batch_idx = of.batch_idx;
  key.leftpad = of.leftpad;
  key.few_queries = of.few_queries;
  key.expressions = of.mask_hulls;
  key.tiles = tiles;
  if (!of.mask_bits) return {"maps/tile_map.cu", kernel_config(key)};
  key.bias_rows = of.bias_rows;
  pack_mask(key);
  return {"maps/mask_bits.cu", kernel_config(key)};
}

/// The kernel before that of the map.
const char* first_entry(const KernelKey& key) { return key.mask_bits ? kPack : kHulls; }

/// How many masks are packed, and of what: those of all tiles, also where no key is.
kernels::MaskShape mask_shape(const Problem& p, const MapTiles& tiles) {
  const auto extent = [](int64_t stride, int64_t size) {
    return static_cast<int>(stride == 0 ? std::min<int64_t>(size, 1) : size);
  };
  kernels::MaskShape shape{extent(p.bias.batch, p.batch), extent(p.bias.head, p.hq), 0, 0};
  const int keys = ceil_div(p.sk, tiles.block_keys);
  const auto words = [](int columns) { return ceil_div(columns, kernels::kMaskWordColumns); };
  if (tiles.by_keys) {
    shape.lines = keys * words(tiles.block_keys);
    shape.cells = p.bias.row == 0 ? 1 : ceil_div(p.sq, tiles.block_rows) * words(tiles.block_rows);
  } else {
    shape.lines = p.bias.row == 0 ? 1 : kernels::strips_of(static_cast<int>(p.sq));
    shape.cells = keys * words(tiles.block_keys);
  }
  return shape;
}

/// Words of a line, of a head and of all.
struct MaskWords {
  int64_t line, head, all;
};
MaskWords words_of(const kernels::MaskShape& shape) {
  const int64_t line = int64_t{shape.cells} * kernels::kMaskThreads, head = line * shape.lines;
  return {line, head, head * shape.heads * shape.batches};
}

/// The bits of a mask without their addresses.
kernels::MaskBits bits_of(const kernels::MaskShape& shape) {
  const MaskWords words = words_of(shape);
  kernels::MaskBits bits{};
  bits.batch = shape.batches > 1 ? words.head * shape.heads : 0;
  bits.head = shape.heads > 1 ? words.head : 0;
  bits.strip = shape.lines > 1 ? words.line : 0;
  return bits;
}

/// With the states of warps.
int64_t mask_bytes(const kernels::MaskShape& shape) {
  return words_of(shape).all / kernels::kMaskThreads * (kernels::kMaskThreads + 1) *
         int64_t{sizeof(kernels::u32)};
}

/// What of a map differs, and what is the same.
kernels::MapShape shape_of(const Problem& p, const MapTiles& tiles) {
  const MaskHullsText mask = DeviceExpressions(p).mask_hulls();
  kernels::MapShape shape{};
  const bool of_bits = !p.expressions.masks();
  const bool of_batch =
      mask.of_batch || (of_bits && p.bias.batch != 0) || !p.alike() || has_cache(p);
  shape.batches = static_cast<int>(of_batch ? p.batch : std::min<int64_t>(p.batch, 1));
  const bool of_heads = mask.of_heads || (of_bits && p.bias.head != 0);
  const int64_t heads = of_heads ? p.hq : mask.of_kv_heads ? p.hk : 1;
  shape.heads = static_cast<int>(std::max<int64_t>(heads, 1));
  shape.heads_of_map = static_cast<int>(p.hq) / shape.heads;
  shape.row_blocks = tiles.block_strips > 0
                         ? kernels::blocks_of(static_cast<int>(p.sq), tiles.block_strips)
                         : ceil_div(p.sq, tiles.block_rows);
  shape.key_tiles = ceil_div(p.sk, tiles.block_keys);
  return shape;
}

/// Of rows, and of keys.
struct HullCounts {
  int64_t rows, keys;
};
HullCounts hulls_of(const Problem& p, const kernels::MapShape& shape) {
  const MaskHullsText mask = DeviceExpressions(p).mask_hulls();
  const auto batches = int64_t{shape.batches};
  return {batches * shape.heads * shape.row_blocks * mask.row_panels,
          batches * shape.key_tiles * mask.key_panels};
}

/// What comes after bits begins at a multiple of 16 bytes.
int64_t round_up(int64_t bytes) { return (bytes + 15) / 16 * 16; }

/// A map without its address.
kernels::SeenWords map_of(const kernels::MapShape& shape, bool by_keys) {
  kernels::SeenWords map{};
  map.heads_of_map = shape.heads_of_map;
  map.block = kernels::block_words(by_keys ? shape.row_blocks : shape.key_tiles);
  const int64_t words = int64_t{map.block} * (by_keys ? shape.key_tiles : shape.row_blocks);
  map.head = shape.heads > 1 ? words : 0;
  map.batch = shape.batches > 1 ? words * shape.heads : 0;
  return map;
}

int64_t words_of(const kernels::MapShape& shape, bool by_keys) {
  const int64_t maps = int64_t{shape.batches} * shape.heads;
  return by_keys ? maps * shape.key_tiles * kernels::block_words(shape.row_blocks)
                 : maps * shape.row_blocks * kernels::block_words(shape.key_tiles);
}

/// Of the map the other way round, where kernels want it.
int64_t words_of_rows(const kernels::MapShape& shape, const MapTiles& tiles) {
  return tiles.of_rows_too ? words_of(shape, !tiles.by_keys) : 0;
}

/// Whether a map of up to so many rows and keys is made at once, each CTA with the hulls that it
/// needs.
bool is_made_at_once(const Problem& p, const MapTiles& tiles, int64_t most) {
  if (!p.expressions.masks() || p.invariant || std::max(p.sq, p.sk) > most) return false;
  const kernels::MapShape shape = shape_of(p, tiles);
  const MaskHullsText mask = DeviceExpressions(p).mask_hulls();
  return std::max(shape.row_blocks, shape.key_tiles) <= kernels::kMaxOwnTiles &&
         std::min(shape.row_blocks, shape.key_tiles) > 0 &&
         std::max(mask.row_panels, mask.key_panels) <= kernels::kMaxOwnPanels;
}

}  // namespace

bool maps_at_once(const Problem& p, const MapTiles& tiles) {
  return is_made_at_once(p, tiles, kMaxRowsAtOnce);
}

bool prepares_map(const Problem& p, const MapTiles& tiles) {
  return is_made_at_once(p, tiles, kMaxPreparedRows);
}

std::string prepared_map_text(const KernelKey& key, const MapTiles& tiles) {
  const std::string constants =
      fmt::format("kBlockStrips = 0, kMapByKeys = 1, kMapOfRows = {}", int{tiles.of_rows_too});
  return fmt::format("#define FULGUR_MAKES_MAP\nenum : int {{ {} }};\n", constants) +
         key.mask_hulls;
}

bool packs_mask(const Problem& p) {
  // A word of 32 scores may be half empty, and lines and tiles at the ends may be, too.
  constexpr int kRows = 128, kKeys = 256;
  const auto extent = [](int64_t stride, int64_t size) {
    return stride == 0 ? 1.0 : static_cast<double>(size);
  };
  const double scores = extent(p.bias.batch, p.batch) * extent(p.bias.head, p.hq) *
                        extent(p.bias.row, p.sq + kRows) * static_cast<double>(p.sk + kKeys);
  return scores <= kMaxMaskScores && p.has(Arg::kBias) && p.bias.dtype == DType::kBool &&
         !p.invariant && !p.expressions.given() && p.dtypes.q != DType::kE4M3 && !transforms(p) &&
         !p.packed && !has_cache(p);
}

void pack_mask(KernelKey& key) {
  key.mask_bits = key.maps_tiles = true;
  key.expressions = "#define FULGUR_MASK_BITS\n";
}

double packing_cycles(const Problem& p, const KernelKey& key, const Card& card) {
  if (!key.mask_bits) return 0;
  const auto extent = [](int64_t stride, int64_t size) {
    return stride == 0 ? 1.0 : static_cast<double>(size);
  };
  const double bytes = extent(p.bias.batch, p.batch) * extent(p.bias.head, p.hq) *
                       extent(p.bias.row, p.sq) * static_cast<double>(p.sk);
  return kPackCycles + kMapCycles + bytes / (kPackedShare * card.bytes_per_cycle);
}

void describe_map(const KernelKey& key, Explanation& to) {
  if (!key.maps_tiles) return;
  to.details.add("maps_tiles", true);
  if (key.mask_bits) {
    to.details.add("packs_mask", true);
    to.decisions.emplace_back(
        "the bool mask is packed to bits in each run, and a map made of which tiles it hides, "
        "which "
        "are skipped, and which it shows whole");
    return;
  }
  to.decisions.emplace_back(
      "a map says which tiles mask_mod hides, which are skipped, and which it shows whole: made in "
      "each run, by the intervals in which values lie");
}

void add_map_kernels(const AnyForwardKey& key, const MapTiles& tiles,
                     std::vector<KernelUse>& kernels) {
  if (!key.maps_tiles || tiles.prepared) return;
  if (tiles.at_once) return kernels.push_back({request(key, tiles), kMapAtOnce, 0});
  for (const char* entry : {first_entry(key), kMap})
    kernels.push_back({request(key, tiles), entry, 0});
  if (tiles.of_rows_too) kernels.push_back({request(key, tiles), kMapOfRows, 0});
}

int64_t TileMap::bytes(const Problem& p, const KernelKey& key, const MapTiles& tiles) {
  if (!key.maps_tiles) return 0;
  const kernels::MapShape shape = shape_of(p, tiles);
  const HullCounts hulls = tiles.prepared || tiles.at_once ? HullCounts{} : hulls_of(p, shape);
  return (hulls.rows + hulls.keys) * int64_t{sizeof(kernels::PanelHull)} +
         (key.mask_bits ? round_up(mask_bytes(mask_shape(p, tiles))) : 0) +
         (words_of(shape, tiles.by_keys) + words_of_rows(shape, tiles)) *
             int64_t{sizeof(kernels::u64)};
}

TileMap::TileMap(const Problem& p, const AnyForwardKey& key, const MapTiles& tiles, Gpu& gpu) {
  if (!key.maps_tiles) return;
  shape_ = shape_of(p, tiles);
  by_keys_ = tiles.by_keys;
  words_ = words_of(shape_, tiles.by_keys);
  words_of_rows_ = words_of_rows(shape_, tiles);
  map_ = map_of(shape_, tiles.by_keys);
  map_of_rows_ = map_of(shape_, !tiles.by_keys);
  if (tiles.prepared) return;
  at_once_ = tiles.at_once;
  if (at_once_) {
    map_kernel_ = gpu.kernel({request(key, tiles), kMapAtOnce, 0}).function;
    return;
  }
  if (tiles.early_starts) map_starts_ = Start::kEarly;
  (key.mask_bits ? pack_kernel_ : hulls_kernel_) =
      gpu.kernel({request(key, tiles), first_entry(key), 0}).function;
  if (key.mask_bits) mask_ = mask_shape(p, tiles);
  map_kernel_ = gpu.kernel({request(key, tiles), kMap, 0}).function;
  if (tiles.of_rows_too) rows_kernel_ = gpu.kernel({request(key, tiles), kMapOfRows, 0}).function;
  const HullCounts hulls = hulls_of(p, shape_);
  row_hulls_ = hulls.rows;
  hulls_ = hulls.rows + hulls.keys;
}

char* TileMap::pack(CUstream stream, char* memory, TileMapParams& params,
                    kernels::ExpressionArguments& tell) const {
  params.mask = mask_;
  kernels::MaskBits& bits = params.expression.bits;
  bits = bits_of(mask_);
  bits.words = reinterpret_cast<kernels::u32*>(memory);
  bits.states = bits.words + words_of(mask_).all;
  tell.bits = bits;
  const int64_t lines = int64_t{mask_.batches} * mask_.heads * mask_.lines;
  cuda::launch(stream, pack_kernel_, &params,
               Grid{static_cast<int>(lines * ceil_div(mask_.cells, kPackedCells))}, kThreads, 0,
               "launching the kernel that packs a bool mask");
  return memory + round_up(mask_bytes(mask_));
}

void TileMap::launch(CUstream stream, char* memory, const AttentionParams& call,
                     kernels::ExpressionArguments& tell) const {
  if (words_ == 0) return;
  tell.map = map_;
  if (!is_made()) {
    auto* const words = reinterpret_cast<kernels::u64*>(memory);
    tell.map_shape = shape_;
    tell.map.words = words;
    tell.map_of_rows = map_of_rows_;
    tell.map_of_rows.words = words + words_;
    return;
  }
  TileMapParams params{};
  static_cast<AttentionParams&>(params) = call;
  params.shape = shape_;
  if (pack_kernel_ != nullptr) memory = pack(stream, memory, params, tell);
  params.row_hulls = reinterpret_cast<kernels::PanelHull*>(memory);
  params.key_hulls = params.row_hulls + row_hulls_;
  params.words = reinterpret_cast<kernels::u64*>(params.row_hulls + hulls_);
  params.words_of_rows = params.words + words_;
  if (at_once_) {
    cuda::launch(stream, map_kernel_, &params, Grid{kernels::ctas_of_map(shape_, by_keys_, false)},
                 kAtOnceThreads, 0, "launching the kernel of the map of tiles");
    tell.map.words = params.words;
    return;
  }
  const int64_t maps = int64_t{shape_.batches} * shape_.heads;
  const int64_t blocks = maps * shape_.row_blocks + int64_t{shape_.batches} * shape_.key_tiles;
  if (hulls_kernel_ != nullptr && hulls_ > 0) {
    cuda::launch(stream, hulls_kernel_, &params, Grid{ceil_div(blocks, kWarps)}, kThreads, 0,
                 "launching the kernel of the intervals of mask_mod");
  }
  const int64_t mapped = maps * (by_keys_ ? shape_.key_tiles : shape_.row_blocks);
  cuda::launch(stream, map_kernel_, &params, Grid{static_cast<int>(mapped)}, kThreads, 0,
               "launching the kernel of the map of tiles", map_starts_);
  tell.map.words = params.words;
  if (rows_kernel_ == nullptr) return;
  const int64_t turned = maps * kernels::map_words(shape_.row_blocks);
  cuda::launch(stream, rows_kernel_, &params, Grid{static_cast<int>(turned)}, kThreads, 0,
               "launching the kernel of the map of rows", map_starts_);
  tell.map_of_rows = map_of_rows_;
  tell.map_of_rows.words = params.words_of_rows;
}

}  // namespace fulgur::cuda

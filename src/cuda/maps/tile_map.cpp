#include "cuda/maps/tile_map.h"

#include <fmt/format.h>

#include "cuda/maps/mask_bits.h"

namespace fulgur::cuda {
namespace {

/// What decides how many CTAs the kernels of a map have.
struct MapSizes {
  kernels::MapShape shape;
  kernels::MaskShape mask;
  HullCounts hulls;
  bool by_keys;

  int64_t maps() const { return int64_t{shape.batches} * shape.heads; }
};

/// A kernel of kernels/maps/.
struct MapKernel {
  const char* entry;
  const char* launching;  ///< for its error
  int threads;            ///< of a CTA
  bool waits;             ///< it may start while the kernel before it runs, for which it waits
  int64_t (*ctas)(const MapSizes&);  ///< 0: there is nothing to compute
};

constexpr MapKernel kHulls = {
    "fulgur_node_hulls", "launching the kernel of the intervals of mask_mod", 128, false,
    [](const MapSizes& of) {
      if (of.hulls.rows + of.hulls.keys == 0) return int64_t{0};
      const int64_t warps =
          of.maps() * of.shape.row_blocks + int64_t{of.shape.batches} * of.shape.key_tiles;
      return int64_t{ceil_div(warps, 128 / 32)};
    }};
constexpr MapKernel kPack = {"fulgur_pack_mask", "launching the kernel that packs a bool mask",
                             kernels::kMaskThreads, false,
                             [](const MapSizes& of) { return packing_ctas(of.mask); }};
constexpr MapKernel kMap = {"fulgur_tile_map", "launching the kernel of the map of tiles", 128,
                            true, [](const MapSizes& of) {
                              return of.maps() *
                                     (of.by_keys ? of.shape.key_tiles : of.shape.row_blocks);
                            }};
constexpr MapKernel kMapOfRows = {
    "fulgur_map_of_rows", "launching the kernel of the map of rows", 128, true,
    [](const MapSizes& of) { return of.maps() * kernels::map_words(of.shape.row_blocks); }};
constexpr MapKernel kFused = {
    "fulgur_fused_map", "launching the kernel of the map of tiles", 256, false,
    [](const MapSizes& of) {
      return int64_t{kernels::fused_map_ctas(of.shape, of.by_keys, /*of_both=*/false)};
    }};

/// The kernels of a map in the order of their launches.
std::vector<const MapKernel*> map_kernels(const KernelKey& key, const MapTiles& tiles) {
  if (!key.maps_tiles || tiles.method == MapMethod::kPrepare) return {};
  if (tiles.method == MapMethod::kFused) return {&kFused};
  std::vector<const MapKernel*> kernels = {key.mask_bits ? &kPack : &kHulls, &kMap};
  if (tiles.by_rows_too) kernels.push_back(&kMapOfRows);
  return kernels;
}

/// What kernel_config.h fixes of these kernels: the mask, the lengths and the tiles.
struct MapKey : AnyForwardKey {
  MapTiles tiles;

  template <class F>
  void for_each_field(const F& f) const {
    AnyForwardKey::for_each_field(f);
    f("kBlockStrips", tiles.block_strips);
    f("kBlockRows", tiles.block_rows);
    f("kBlockKeys", tiles.block_keys);
    f("kMapByKeys", tiles.by_keys);
    f("kMapOfRows", tiles.by_rows_too);
    f("kEarlyStarts", tiles.early_starts);
  }
};

KernelUse use_of(const MapKernel& kernel, const AnyForwardKey& of, const MapTiles& tiles) {
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
  if (!of.mask_bits) return {{"maps/tile_map.cu", kernel_config(key)}, kernel.entry, 0};
  key.bias_rows = of.bias_rows;
  use_mask_bits(key);
  return {{"maps/mask_bits.cu", kernel_config(key)}, kernel.entry, 0};
}

}  // namespace

void describe_map(const KernelKey& key, Explanation& to) {
  if (!key.maps_tiles) return;
  to.details.add("maps_tiles", true);
  if (key.mask_bits) {
    to.details.add("packs_mask", true);
    to.decisions.emplace_back(
        "the bool mask is packed to bits in each run, and a map made of which tiles it hides, "
        "which are skipped, and which it shows whole");
    return;
  }
  to.decisions.emplace_back(
      "a map says which tiles mask_mod hides, which are skipped, and which it shows whole: made in "
      "each run, by the intervals in which values lie");
}

void add_map_kernels(const AnyForwardKey& key, const MapTiles& tiles,
                     std::vector<KernelUse>& kernels) {
  for (const MapKernel* kernel : map_kernels(key, tiles))
    kernels.push_back(use_of(*kernel, key, tiles));
}

std::string prepared_map_text(const KernelKey& key, const MapTiles& tiles) {
  const std::string constants =
      fmt::format("kBlockStrips = 0, kMapByKeys = 1, kMapOfRows = {}", int{tiles.by_rows_too});
  return fmt::format("#define FULGUR_MAKES_MAP\nenum : int {{ {} }};\n", constants) +
         key.mask_hulls;
}

TileMap::Parts TileMap::parts(const Problem& p, const KernelKey& key, const MapTiles& tiles) {
  const kernels::MapShape shape = map_shape(p, tiles);
  Parts parts;
  if (key.mask_bits) parts.mask_bytes = cuda::mask_bytes(mask_shape(p, tiles));
  if (tiles.method == MapMethod::kSeparate) parts.hulls = hull_counts(p, shape);
  parts.words = words_of_maps(shape, tiles.by_keys);
  if (tiles.by_rows_too) parts.words_of_rows = words_of_maps(shape, !tiles.by_keys);
  return parts;
}

int64_t TileMap::bytes(const Problem& p, const KernelKey& key, const MapTiles& tiles) {
  if (!key.maps_tiles) return 0;
  const Parts of = parts(p, key, tiles);
  return of.mask_bytes + (of.hulls.rows + of.hulls.keys) * int64_t{sizeof(kernels::NodeHull)} +
         (of.words + of.words_of_rows) * int64_t{sizeof(kernels::u64)};
}

TileMap::TileMap(const Problem& p, const AnyForwardKey& key, const MapTiles& tiles, Gpu& gpu) {
  if (!key.maps_tiles) return;
  shape_ = map_shape(p, tiles);
  if (key.mask_bits) mask_ = mask_shape(p, tiles);
  map_ = seen_words(shape_, tiles.by_keys);
  map_of_rows_ = seen_words(shape_, !tiles.by_keys);
  parts_ = parts(p, key, tiles);
  const MapSizes sizes = {shape_, mask_, parts_.hulls, tiles.by_keys};
  for (const MapKernel* kernel : map_kernels(key, tiles)) {
    const CUfunction function = gpu.kernel(use_of(*kernel, key, tiles)).function;
    const auto ctas = static_cast<int>(kernel->ctas(sizes));
    if (parts_.words == 0 || ctas == 0) continue;
    const bool early = kernel->waits && tiles.early_starts;
    launches_.push_back({function, ctas, kernel->threads, early ? Start::kEarly : Start::kAfterAll,
                         kernel->launching});
  }
}

void TileMap::launch(CUstream stream, char* memory, const AttentionParams& call,
                     kernels::ExpressionArguments& arguments) const {
  // Kernels divide by the heads of a map and sort the blocks of rows even where it has no words.
  arguments.map_shape = shape_;
  arguments.map = map_;
  arguments.map_of_rows = map_of_rows_;
  if (parts_.words == 0) return;
  TileMapParams params{};
  static_cast<AttentionParams&>(params) = call;
  params.shape = shape_;
  params.mask = mask_;
  if (parts_.mask_bytes > 0) arguments.bits = params.expression.bits = mask_bits(mask_, memory);
  params.row_hulls = reinterpret_cast<kernels::NodeHull*>(memory + parts_.mask_bytes);
  params.key_hulls = params.row_hulls + parts_.hulls.rows;
  params.words = reinterpret_cast<kernels::u64*>(params.key_hulls + parts_.hulls.keys);
  params.words_of_rows = params.words + parts_.words;
  for (const Launch& l : launches_) {
    cuda::launch(stream, l.kernel, &params, Grid{l.ctas}, l.threads, 0, l.what, l.start);
  }
  arguments.map.words = params.words;
  if (parts_.words_of_rows > 0) arguments.map_of_rows.words = params.words_of_rows;
}

}  // namespace fulgur::cuda

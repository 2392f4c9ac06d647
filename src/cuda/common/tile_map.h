#pragma once

#include <vector>

#include "call/problem.h"
#include "cuda/common/card.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/device/gpu.h"
#include "kernels/host_device/tile_map.h"

namespace fulgur::cuda {

/// Whether a bool mask may be packed to bits, whose map of tiles kernels then walk over: each bit
/// is read for many scores, and hidden tiles are skipped. Not with `invariant`: which tiles are
/// made would depend on how many heads and sequences share a mask. Nor where scores are more than
/// scaled, nor of packed sequences, which leave kernels no registers for words of the mask.
bool packs_mask(const Problem& problem);
/// Makes a key that of kernels that take it so.
void pack_mask(KernelKey& key);
/// SM cycles until a mask is packed and mapped.
double packing_cycles(const Problem& problem, const KernelKey& key, const Card& card);

/// The tiles of scores of a plan that maps them, and whether a CTA walks over the rows of some keys
/// or over the keys of some rows.
struct MapTiles {
  int block_strips = 0, block_rows = 0;  ///< rows: of strips, or else so many
  int block_keys = 0;
  bool by_keys = false;
  bool of_rows_too = false;   ///< of a map by keys also the other way round
  bool early_starts = false;  ///< a kernel may start while the one before runs
  bool at_once = false;       ///< one kernel makes it: maps_at_once()
  bool prepared = false;      ///< the kernel that prepares rows does: prepares_map()
};

/// Whether one kernel had better make the map of mask_mod than two, one after the other.
bool maps_at_once(const Problem& problem, const MapTiles& tiles);
/// Whether the kernel that prepares rows for a backward call had better make the map of mask_mod,
/// too, than one before it.
bool prepares_map(const Problem& problem, const MapTiles& tiles);
/// What its kernel_config.h has of that.
std::string prepared_map_text(const KernelKey& key, const MapTiles& tiles);

/// Says that a plan has a map, and of how many tiles.
void describe_map(const KernelKey& key, Explanation& to);

/// Adds the kernels that make a map, of plans that have one.
void add_map_kernels(const AnyForwardKey& key, const MapTiles& tiles,
                     std::vector<KernelUse>& kernels);

/// The map of the tiles that mask_mod hides (kernels/maps/tile_map.cu), or a bool mask, which
/// is packed to bits for it (kernels/maps/mask_bits.cu): made in each run.
class TileMap {
 public:
  /// Of the workspace; 0 without a map.
  static int64_t bytes(const Problem& problem, const KernelKey& key, const MapTiles& tiles);

  TileMap() = default;
  /// Without a map it has none.
  TileMap(const Problem& problem, const AnyForwardKey& key, const MapTiles& tiles, Gpu& gpu);

  /// Whether launch() launches kernels.
  bool is_made() const { return words_ > 0 && map_kernel_ != nullptr; }
  /// Makes the map of a call in `memory`, and tells the call of it; without a map nothing.
  void launch(CUstream stream, char* memory, const AttentionParams& call,
              kernels::ExpressionArguments& tell) const;

 private:
  /// Packs a bool mask in `memory`, and tells the call of its bits. Returns the memory after them.
  char* pack(CUstream stream, char* memory, TileMapParams& params,
             kernels::ExpressionArguments& tell) const;

  CUfunction hulls_kernel_ = nullptr, pack_kernel_ = nullptr, map_kernel_ = nullptr;
  CUfunction rows_kernel_ = nullptr;
  Start map_starts_ = Start::kAfterAll;
  kernels::MapShape shape_{};
  kernels::MaskShape mask_{};
  bool by_keys_ = false, at_once_ = false;
  kernels::SeenWords map_{}, map_of_rows_{};  ///< without addresses
  int64_t row_hulls_ = 0, hulls_ = 0, words_ = 0, words_of_rows_ = 0;
};

}  // namespace fulgur::cuda

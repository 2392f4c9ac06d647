#pragma once

#include <array>
#include <string>
#include <vector>

#include "call/problem.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/launch.h"
#include "cuda/device/gpu.h"
#include "cuda/maps/map_shape.h"

namespace fulgur::cuda {

/// Says in an explanation that a plan has a map.
void describe_map(const KernelKey& key, Explanation& to);

/// Adds the kernels that make a map, of plans that have one.
void add_map_kernels(const AnyForwardKey& key, const MapTiles& tiles,
                     std::vector<KernelUse>& kernels);

/// The text of kernel_config.h with which the kernel that prepares rows makes a map.
std::string prepared_map_text(const KernelKey& key, const MapTiles& tiles);

/// The map of tiles of a call (kernels/host_device/tile_map.h), which is made in each run.
class TileMap {
 public:
  /// Bytes of the workspace; 0 of plans without a map.
  static int64_t bytes(const Problem& problem, const KernelKey& key, const MapTiles& tiles);

  TileMap() = default;
  /// Loads the kernels of a plan; none of plans without a map.
  TileMap(const Problem& problem, const AnyForwardKey& key, const MapTiles& tiles, Gpu& gpu);

  /// Whether launch() launches kernels.
  bool launches() const { return !launches_.empty(); }
  /// Launches the kernels that make the map of a call in `memory`, and sets the arguments with
  /// which kernels read it, or with MapMethod::kPrepare make it. Does nothing without a map.
  void launch(CUstream stream, char* memory, const AttentionParams& call,
              kernels::ExpressionArguments& arguments) const;

 private:
  struct Launch {
    CUfunction kernel;
    int ctas, threads;
    Start start;
    const char* what;  ///< for its error
  };

  /// What lies in the workspace, in this order.
  struct Parts {
    int64_t mask_bytes = 0;
    HullCounts hulls;
    int64_t words = 0, words_of_rows = 0;
  };
  static Parts parts(const Problem& problem, const KernelKey& key, const MapTiles& tiles);

  std::vector<Launch> launches_;
  kernels::MapShape shape_{};
  kernels::MaskShape mask_{};
  kernels::SeenWords map_{}, map_of_rows_{};  ///< without addresses
  Parts parts_;
};

}  // namespace fulgur::cuda

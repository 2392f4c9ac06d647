/// Which tiles of scores a mask expression hides whole, and which it shows whole, without a look at
/// each score: by the intervals in which the values of its nodes lie.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "expression/stages.h"
#include "fulgur/attention.h"

namespace fulgur::expression {

/// In which values lie. Of integers also which 6-bit hashes they have, by which sets that overlap
/// but have no value in common are told apart.
struct Hull {
  double low = -std::numeric_limits<double>::infinity();
  double high = std::numeric_limits<double>::infinity();
  bool may_be_nan = true;
  uint64_t hashes = ~uint64_t{0};

  bool known() const { return low == high && !may_be_nan; }
};

/// Of some values of a type, as bits_of() makes them; at least one.
Hull hull_of(Type type, std::span<const int32_t> values);

/// The mask of a call in one sequence.
class MaskHulls {
 public:
  /// `place`: of the sequence. Tiles have Bc keys.
  MaskHulls(const StagedGraph& graph, std::span<const ConstTensor> tensors, const Place& place,
            int64_t Bc);

  /// Of all rows' nodes, [rows.size()], one after the other in the order of StagedGraph::rows, the
  /// hulls; what the mask is in a tile of these rows and of keys from tile * Bc on. `nodes` is
  /// memory.
  Tile tile(std::span<const Hull> rows, int64_t tile, std::vector<Hull>& nodes) const;

 private:
  Hull mixed(const Node& node, std::span<const Hull> nodes) const;
  Hull gathered(const Node& node, std::span<const Hull> nodes) const;

  const StagedGraph& graph_;
  std::vector<ConstTensor> tensors_;
  std::vector<Hull> uniform_;
  std::vector<Hull> columns_;  ///< [tiles][columns]
};

/// Makes what a mask hides of the tiles of a sequence and head, `place`, empty, and what it shows
/// in part partial.
void hide(const StagedGraph& graph, std::span<const ConstTensor> tensors, const Place& place,
          TileMap* map);

}  // namespace fulgur::expression

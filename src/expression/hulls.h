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

  /// Begins `nodes`, the hulls of all nodes, for rows whose nodes, in the order of
  /// StagedGraph::rows, have these.
  void begin(std::span<const Hull> rows, std::vector<Hull>* nodes) const;
  /// What the mask is in a tile of these rows and of keys from tile * Bc on.
  Tile tile(int64_t tile, std::vector<Hull>* nodes) const;
  /// The values of what keys decide in such a tile, [columns][Bc].
  const int32_t* keys(int64_t tile) const { return keys_.data() + tile * tile_words_; }

 private:
  Hull mixed(const Node& node, std::span<const Hull> nodes) const;
  Hull gathered(const Node& node, std::span<const Hull> nodes) const;

  const StagedGraph& graph_;
  std::vector<ConstTensor> tensors_;
  std::vector<Hull> uniform_;
  std::vector<Hull> columns_;  ///< [tiles][columns]
  std::vector<int32_t> keys_;  ///< [tiles][columns][Bc]
  int64_t tile_words_ = 0;     ///< of keys_
};

/// Makes what a mask hides of the tiles of a sequence and head, `place`, empty, and what it shows
/// in part partial.
void hide(const StagedGraph& graph, std::span<const ConstTensor> tensors, const Place& place,
          TileMap* map);

}  // namespace fulgur::expression

/// Which tiles of scores a mask expression hides whole, and which it shows whole, without a look at
/// each score: by the intervals in which the values of its nodes lie.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "expression/stages.h"
#include "fulgur/attention.h"
#include "kernels/host_device/hull.h"

namespace fulgur::expression {

using kernels::Hull;

/// The operations that make a hull of hulls, and the functions of kernels/host_device/hull.h that
/// do; of the values of others nothing is known but their type.
#define FULGUR_HULL_OPERATIONS(of)                                                                \
  of(kAdd, hull_add) of(kSub, hull_sub) of(kMul, hull_mul) of(kFloorDiv, hull_floor_div)          \
      of(kMod, hull_mod) of(kMin, hull_min) of(kMax, hull_max) of(kShiftRight, hull_shift_right)  \
          of(kAnd, hull_and) of(kOr, hull_or) of(kXor, hull_xor) of(kEqual, hull_equal)           \
              of(kNotEqual, hull_not_equal) of(kLess, hull_less) of(kLessEqual, hull_less_equal)  \
                  of(kNot, hull_not) of(kNeg, hull_neg) of(kAbs, hull_abs) of(kFloor, hull_floor) \
                      of(kToFloat, hull_to_float) of(kToInt, hull_to_int) of(kSelect, hull_select)

/// The function of an operation; null: there is none.
const char* hull_operation(Op op);

/// The hull of one or more values of a type, which are given as by bits_of().
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

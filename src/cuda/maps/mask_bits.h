#pragma once

#include <cstdint>

#include "call/problem.h"
#include "cuda/common/card.h"
#include "cuda/common/kernel_key.h"
#include "cuda/maps/map_shape.h"

namespace fulgur::cuda {

// A bool mask that is packed to bits in each run (kernels/maps/mask_bits.cu). Each bit is read for
// the scores of many heads, and the map of tiles that the bits give lets kernels skip hidden tiles.

/// Whether a bool mask may be packed. Not with `invariant`: which tiles are computed would depend
/// on how many heads and sequences share a mask. Nor where scores are more than scaled, nor of
/// packed sequences: their kernels have no registers left for words of the mask.
bool packs_mask(const Problem& problem);

/// Makes a key that of a kernel that reads the bits of a mask.
void use_mask_bits(KernelKey& key);

/// SM cycles to pack a mask and to make its map; 0 of a key without mask bits.
double packing_cycles(const Problem& problem, const KernelKey& key, const Card& card);

/// The masks of a call, which have bits for whole tiles, also for keys that do not exist.
kernels::MaskShape mask_shape(const Problem& problem, const MapTiles& tiles);

/// Bytes of the bits of masks and of the states of warps, a multiple of 16.
int64_t mask_bytes(const kernels::MaskShape& shape);

/// The bits of masks that lie in `memory`.
kernels::MaskBits mask_bits(const kernels::MaskShape& shape, char* memory);

/// CTAs of the kernel that packs masks.
int64_t packing_ctas(const kernels::MaskShape& shape);

}  // namespace fulgur::cuda

// A fused map of tiles (maps/fused_map.cuh) by the first CTAs of the kernel that prepares rows (kMakesMap), so that no
// kernel of its own delays those that read it.
#pragma once
#include "backward/layout.cuh"
#include "host_device/tile_map.h"

#ifdef FULGUR_MAKES_MAP
#include "maps/fused_map.cuh"

// Called by CTAs with blockIdx.y < rows_that_map().
__device__ __forceinline__ void make_map(const BackwardParams& p) {
  const ExpressionArguments& of = p.expression;
  make_fused_map(p, of.map_shape, const_cast<u64*>(of.map.words), const_cast<u64*>(of.map_of_rows.words),
                 int(blockIdx.y * gridDim.x + blockIdx.x));
}
__device__ __forceinline__ unsigned rows_that_map(const BackwardParams& p) {
  return count_of(fused_map_ctas(p.expression.map_shape, /*by_keys=*/true, kMapOfRows != 0), int(gridDim.x));
}

#else

__device__ __forceinline__ void make_map(const BackwardParams&) {}
__device__ __forceinline__ unsigned rows_that_map(const BackwardParams&) { return 0; }

#endif

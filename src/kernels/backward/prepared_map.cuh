// The map of tiles (host_device/tile_map.h) made by CTAs of the kernel that prepares rows, FULGUR_MAKES_MAP, before its
// other CTAs.
#pragma once
#include "backward/layout.cuh"
#include "host_device/tile_map.h"

#ifdef FULGUR_MAKES_MAP
#include "attention/panel_hulls.cuh"

// By the CTAs of the first rows of the grid, which are so many.
__device__ __forceinline__ void make_map(const BackwardParams& p) {
  make_maps(p, p.expression.map_shape, p.expression.map, p.expression.map_of_rows,
            int(blockIdx.y * gridDim.x + blockIdx.x));
}
__device__ __forceinline__ unsigned rows_that_map(const BackwardParams& p) {
  return count_of(ctas_of_map(p.expression.map_shape, /*by_keys=*/true, kMapOfRows != 0), int(gridDim.x));
}

#else

__device__ __forceinline__ void make_map(const BackwardParams&) {}
__device__ __forceinline__ unsigned rows_that_map(const BackwardParams&) { return 0; }

#endif

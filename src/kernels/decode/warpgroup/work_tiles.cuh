// The beginning of a CTA of the warpgroup paths, and the end of a work tile.
#pragma once
#include "decode/combine.cuh"
#include "decode/fragments.cuh"
#include "sm90/ptx/tma.cuh"

// Fetches the tensor maps, by the first thread that loads.
__device__ __forceinline__ void prefetch_maps(const DecodeParams& p) {
  if (kBoxKeys == 0 || threadIdx.x != 32 * kComputeWarps) return;
  tma_prefetch_map(&p.k_map);
  tma_prefetch_map(&p.v_map);
}

// Stores what the warps of a work tile have computed: O, or a partial result.
template <int count>
__device__ __forceinline__ void store_work_tile(const DecodeParams& p, const WorkTile& tile, Rows& rows,
                                                float (&O)[count]) {
  if constexpr (Schedule::kFragments)
    store_fragments(p, tile, rows, O);
  else if constexpr (kWarpGroups > 1)
    combine_warp_groups(p, tile, WarpResult{rows, O});
  else
    store_warp_group(p, tile, rows, O);
}

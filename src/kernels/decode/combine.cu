// Combines the splits of all q blocks of a call (Schedule::kCombineKernel), in the order of their keys, to O and LSE.
// decode/decode_warpgroup.cu and decode/decode_codes.cu leave the partial results. A warp takes some rows of a q block,
// or some of its columns.
#include "decode/combine.cuh"
#include "decode/fragments.cuh"

extern "C" __global__ void __launch_bounds__(32 * kCombineWarps)
    fulgur_decode_combine(const __grid_constant__ PlanParams p) {
  WorkTile tile = {};
  tile.batch = blockIdx.x / p.hk;
  tile.head = blockIdx.x % p.hk;
  if (kRowBlocks > 1) {
    tile.block = tile.batch / p.batch;
    tile.batch %= p.batch;
  }
  const int splits = Schedule::find_splits(p, tile);
  const int warp = blockIdx.y * kCombineWarps + threadIdx.x / 32;
  if constexpr (Schedule::kFragments) {
    constexpr int kRowWarps = (kValueDim / 8 + kCombineEights - 1) / kCombineEights;  // warps that share 16 rows
    const int warp_in_group = warp / kRowWarps;
    if (warp_in_group * kWarpRows < rows_of_tile(p, tile).count)
      combine_fragments(p, tile, splits, warp_in_group, warp % kRowWarps * kCombineEights);
  } else if (splits > 1) {
    combine_rows<1, 16>(p, tile, {0, 1, splits}, true, warp, gridDim.y * kCombineWarps);
  }
}

// Puts the splits together that sm90/decode/decode.cu leaves of q blocks (kSplitting): O and LSE, in the order of the
// keys. A thread block takes some rows of a q block, or some of its columns.
#include "sm90/decode/output.cuh"

extern "C" __global__ void __launch_bounds__(32 * kCombineWarps)
    fulgur_decode_combine(const __grid_constant__ PlanParams p) {
  WorkTile item = {};
  item.batch = blockIdx.x / p.hk;
  item.head = blockIdx.x % p.hk;
  const int unit = blockIdx.y * kCombineWarps + threadIdx.x / 32;
  if (kSplitting == kSplitToFill) {
    const FillingBlock line = filling_block_of(filling_blocks_of_lane(p), item.batch);
    item.sequence = line.sequence;
    item.first_slice = line.first + item.head;
    constexpr int kUnits = (kValueDim / 8 + kCombineEights - 1) / kCombineEights;
    const int warp_of_group = unit / kUnits;
    if (warp_of_group * kWarpRows < rows_of_tile(p, item).count)
      combine_fragments(p, item, line.pieces.count, warp_of_group, unit % kUnits * kCombineEights);
    return;
  }
  item.sequence = sequence_of(p, item.batch);
  const Lengths& n = item.sequence.n;
  if (n.sq == 0) return;
  const Chunks of_q_block = chunks_of(keys_of_q_block(p, n, 0), kKeysPerChunk);
  const int pieces = splits_of_q_block(n, of_q_block).count;
  if (pieces > 1) combine_rows<1, 16>(p, item, {0, 1, pieces}, true, unit, gridDim.y * kCombineWarps);
}

// Puts the pieces together that sm90/decode/decode.cu leaves of lines (kPieces): O and LSE, in the order of the keys. A thread
// block takes some rows of a line, or some of its columns.
#include "sm90/decode/output.cuh"

extern "C" __global__ void __launch_bounds__(32 * kMergeWarps)
    fulgur_decode_merge(const __grid_constant__ PlanParams p) {
  DecodeItem item = {};
  item.batch = blockIdx.x / p.hk;
  item.head = blockIdx.x % p.hk;
  const int unit = blockIdx.y * kMergeWarps + threadIdx.x / 32;
  if (kPieces == kFillingPieces) {
    const FillingLine line = filling_line_of(filling_lines_of_lane(p), item.batch);
    item.sequence = line.sequence;
    item.first_share = line.first + item.head;
    constexpr int kUnits = (kValueDim / 8 + kMergeEights - 1) / kMergeEights;
    const int team_warp = unit / kUnits;
    if (team_warp * kWarpRows < rows_of_item(p, item).count)
      merge_pieces(p, item, line.pieces.count, team_warp, unit % kUnits * kMergeEights);
    return;
  }
  item.sequence = sequence_of(p, item.batch);
  const Lengths& n = item.sequence.n;
  if (n.sq == 0) return;
  const Units of_line = units_of(keys_of_block(p, n, 0), kShareUnitKeys);
  const int pieces = pieces_of_line(n, of_line).count;
  if (pieces > 1) merge_rows<1, 16>(p, item, {0, 1, pieces}, true, unit, gridDim.y * kMergeWarps);
}

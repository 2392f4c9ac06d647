// Puts the pieces together that sm90/decode.cu leaves of lines (kPieces): O and LSE, in the order of the keys. A thread
// block takes some rows of a line.
#include "sm90/decode_output.cuh"

extern "C" __global__ void __launch_bounds__(32 * kMergeWarps)
    fulgur_decode_merge(const __grid_constant__ DecodeParams p) {
  DecodeItem item = {};
  item.batch = blockIdx.x / p.hk;
  item.head = blockIdx.x % p.hk;
  item.sequence = sequence_of(p, item.batch);
  const Lengths& n = item.sequence.n;
  if (n.sq == 0) return;
  const Units of_line = units_of(keys_of_block(p, n, 0), kShareUnitKeys);
  const int least = least_units(p);
  const int pieces = pieces_of_line(n, of_line, least).count;
  if (pieces == 1) return;
  if (kPieces == kFillingPieces) {
    const auto of_sequence = [&](const Lengths& lengths) { return line_pieces(p, lengths, least); };
    item.first_share = p.hk * sum_of_sequences(p, item.batch, of_sequence) + item.head * pieces;
  }
  merge_rows<1, 16>(p, item, {0, 1, pieces}, true, blockIdx.y * kMergeWarps + threadIdx.x / 32,
                    gridDim.y * kMergeWarps);
}

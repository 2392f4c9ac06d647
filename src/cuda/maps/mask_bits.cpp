#include "cuda/maps/mask_bits.h"

#include <algorithm>

#include "kernels/host_device/strips.h"

namespace fulgur::cuda {
namespace {

constexpr int kCtaCells = 8;                             // that a CTA packs
constexpr double kPackBandwidth = 0.6;                   // of the memory's
constexpr double kPackCycles = 3000, kMapCycles = 3000;  // of the launches
constexpr double kMaxMaskScores = 0x1p35;  // of the largest mask, whose words an int can count

/// The size of a dimension of a mask; 1 of one that is broadcast.
double extent(int64_t stride, int64_t size) {
  return stride == 0 ? 1.0 : static_cast<double>(size);
}

/// Words of a line, of a mask and of all masks.
struct MaskWords {
  int64_t line, mask, all;
};
MaskWords words_of(const kernels::MaskShape& shape) {
  const int64_t line = int64_t{shape.cells} * kernels::kMaskThreads, mask = line * shape.lines;
  return {line, mask, mask * shape.heads * shape.batches};
}

}  // namespace

bool packs_mask(const Problem& p) {
  // Words of 32 scores, lines and tiles may be filled in part at the ends of rows and keys.
  constexpr int kRows = 128, kKeys = 256;
  const double scores = extent(p.bias.batch, p.batch) * extent(p.bias.head, p.hq) *
                        extent(p.bias.row, p.sq + kRows) * static_cast<double>(p.sk + kKeys);
  return scores <= kMaxMaskScores && p.has(Arg::kBias) && p.bias.dtype == DType::kBool &&
         !p.invariant && !p.expressions.given() && p.dtypes.q != DType::kE4M3 && !transforms(p) &&
         !p.packed && !has_cache(p);
}

void use_mask_bits(KernelKey& key) {
  key.mask_bits = key.maps_tiles = true;
  key.expressions = "#define FULGUR_MASK_BITS\n";
}

double packing_cycles(const Problem& p, const KernelKey& key, const Card& card) {
  if (!key.mask_bits) return 0;
  const double bytes = extent(p.bias.batch, p.batch) * extent(p.bias.head, p.hq) *
                       extent(p.bias.row, p.sq) * static_cast<double>(p.sk);
  return kPackCycles + kMapCycles + bytes / (kPackBandwidth * card.bytes_per_cycle);
}

kernels::MaskShape mask_shape(const Problem& p, const MapTiles& tiles) {
  const auto masks = [](int64_t stride, int64_t size) {
    return static_cast<int>(stride == 0 ? std::min<int64_t>(size, 1) : size);
  };
  kernels::MaskShape shape{masks(p.bias.batch, p.batch), masks(p.bias.head, p.hq), 0, 0};
  const int key_cells = ceil_div(p.sk, tiles.block_keys) * kernels::mask_words(tiles.block_keys);
  if (tiles.by_keys) {
    shape.lines = key_cells;
    shape.cells = p.bias.row == 0
                      ? 1
                      : ceil_div(p.sq, tiles.block_rows) * kernels::mask_words(tiles.block_rows);
  } else {
    shape.lines = p.bias.row == 0 ? 1 : kernels::strips_of(static_cast<int>(p.sq));
    shape.cells = key_cells;
  }
  return shape;
}

int64_t mask_bytes(const kernels::MaskShape& shape) {
  const int64_t words = words_of(shape).all, states = words / kernels::kMaskThreads;
  return ((words + states) * int64_t{sizeof(kernels::u32)} + 15) / 16 * 16;
}

kernels::MaskBits mask_bits(const kernels::MaskShape& shape, char* memory) {
  const MaskWords words = words_of(shape);
  kernels::MaskBits bits{};
  bits.words = reinterpret_cast<kernels::u32*>(memory);
  bits.states = bits.words + words.all;
  bits.batch = shape.batches > 1 ? words.mask * shape.heads : 0;
  bits.head = shape.heads > 1 ? words.mask : 0;
  bits.strip = shape.lines > 1 ? words.line : 0;
  return bits;
}

int64_t packing_ctas(const kernels::MaskShape& shape) {
  return int64_t{shape.batches} * shape.heads * shape.lines * ceil_div(shape.cells, kCtaCells);
}

}  // namespace fulgur::cuda

// Arguments of the expressions of a call, the same for the host and the device. They are the last arguments of a
// kernel, and kernels without expressions do not have them.
//
// With expressions kernel_config.h, which comes before this in device text, has FULGUR_EXPRESSIONS and the functions
// that device/expression.cuh calls, which cuda/common/expression.cpp prints.
#pragma once
#include "host_device/element.h"

namespace fulgur::kernels {

constexpr int kMaxExpressionTensors = 8, kMaxExpressionRank = 4, kMaxExpressionWords = 128;

// Sums for the gradient of a tensor, row-major, as integers in units of 2^-n, where n depends on the largest addend.
struct ExpressionSums {
  long long* sums;
  int* largest;            // bits of the largest |addend|
  unsigned char* spoiled;  // 1: some addend is not finite
};

// A tensor that expressions index.
struct ExpressionTensor {
  const void* data;
  long long stride[kMaxExpressionRank];  // elements
  int last[kMaxExpressionRank];          // the last index of each dimension
  ExpressionSums sums;                   // if a gradient is requested
};

// The words of a map of tiles (host_device/tile_map.h). A word is of 32 tiles of a block: its low half has a bit for
// each tile that is seen, its high half one for each partial tile. A block of more words than a warp reads at once has
// one more word before them, its span [begin, end) (in the low and high half), outside of which no tile is seen.
enum : int { kWordsAtOnce = 32 };
struct SeenWords {
  const u64* words;       // [batches][heads][blocks][span, tiles / 32]
  long long batch, head;  // words from a sequence or a q head to the next; 0 where all have the same map
  int heads_of_map;       // q heads that share a map
  int block;              // words of a block, with its span

  FULGUR_SHARED bool has_spans() const { return block > kWordsAtOnce; }
};

// The maps of a call.
struct MapShape {
  int batches, heads;         // 1 where all have the same map
  int heads_of_map;           // q heads that share a map
  int row_blocks, key_tiles;  // of a map
};

// A bool mask as bits (maps/mask_bits.cu). For 64 columns of its accumulators each thread of a warpgroup has a word.
// Accumulators are a strip of 64 rows x 64 keys, or, in kernels by keys, 64 keys x a strip of rows. A bit is 1 where a
// key is seen and where the row does not exist, and 0 where the key does not exist.
enum : int { kMaskWordColumns = 64, kMaskThreads = 128 };
FULGUR_SHARED int mask_words(int columns) { return (columns + kMaskWordColumns - 1) / kMaskWordColumns; }
struct MaskBits {
  u32* words;                    // [batches][heads][strips, or 64 keys][tiles][words of a tile][kMaskThreads]
  u32* states;                   // for the words of all threads a byte of MaskStates of each warp
  long long batch, head, strip;  // words to the next one; 0 where all have the same
};
// Whether some key that exists is shown to, or hidden from, some row that exists.
enum MaskStates : int { kShowsSome = 1, kHidesSome = 2 };

// Empty in device text without expressions and without a mask of bits (FULGUR_MASK_BITS).
struct ExpressionArguments {
#if !defined(__CUDACC__) || defined(FULGUR_EXPRESSIONS) || defined(FULGUR_MASK_BITS)
  ExpressionTensor tensors[kMaxExpressionTensors];
  int words[kMaxExpressionWords];  // bits of literals
  int log_scores;                  // at most 2^log_scores scores enter a sum
  bool finds_largest;              // addends are not added: only the largest is found
  SeenWords map;                   // kMapsTiles
  MapShape map_shape;              // of both
  SeenWords map_of_rows;           // the map by rows, where kernels read a map by keys and this one
  int batch, head, queries, keys;  // kPart: the first sequence and head of the whole call, and the lengths there
  MaskBits bits;                   // kMaskBits
#endif
};

// A divisor d of integers, for which x / d = x * factor >> shift if x >= 0.
struct Reciprocal {
  u32 factor;
  int shift;
};

FULGUR_SHARED Reciprocal reciprocal_of(int divisor) {
  int log = 0;
  while ((1ull << log) < u64(divisor)) ++log;
  return {u32((1ull << (31 + log)) / u64(divisor) + 1), 31 + log};
}

// The quotient of any x, rounded down.
FULGUR_SHARED int floor_quotient(int x, const Reciprocal& by) {
  const int sign = x >> 31;
  return int(u64(u32(x ^ sign)) * by.factor >> by.shift) ^ sign;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

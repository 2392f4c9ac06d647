// Chunks and steps: how products read the codes of a tile. A chunk is 16 bytes of a row, which a lane hands to
// ldmatrix. A step is what a warp reads of each row before it multiplies: one chunk of codes, or two chunks of 16-bit
// elements. A lane converts a step to words of two f16, which are fragments of whole products: 16 columns of K each, or
// 16 rows of V^T.
//
// Scales divide the columns into groups. A step has columns of one group; of blocks, whose chunks do not end where
// blocks do, a step may have columns of two, and is then multiplied once for each.
#pragma once
#include "device/mma_sync.cuh"
#include "decode/codes/rows.cuh"

// The steps of K or V.
template <int tensor>
struct CodeSteps {
  using Chunks = CodeChunks<tensor>;
  using CodesOf = typename Chunks::CodesOf;
  enum : int {
    kChunks = CodesOf::kCodesPerHalf == 1 ? 2 : 1,  // of a step
    kWords = kChunks * CodesOf::kCodesPerHalf,      // of f16, of a lane and eight keys
    kProducts = kWords / 2,                         // of a step
    kCount = Chunks::kCount / kChunks,
    kGroups = max_of(scale_count(tensor), 1),
    kGroupColumns = Chunks::kColumns / kGroups,
    kMaxGroups = Chunks::kIsBlocks && kGroups > 1 ? 2 : 1,  // of a step
  };
  static_assert(Chunks::kCount % kChunks == 0);

  // The first and the last group of a step.
  static __device__ constexpr int first_group(int step) {
    return Chunks::kIsBlocks ? first_block(Chunks::kType, step) : step * 8 * kWords / kGroupColumns;
  }
  static __device__ constexpr int last_group(int step) {
    return Chunks::kIsBlocks ? last_block(Chunks::kType, Chunks::kColumns, step) : first_group(step);
  }
  // Whether a step is the first, or the last, with columns of a group.
  static __device__ constexpr bool begins(int step, int group) {
    return group <= last_group(step) && (step == 0 || last_group(step - 1) < group);
  }
  static __device__ constexpr bool ends(int step, int group) {
    return group <= last_group(step) && (step + 1 == kCount || first_group(step + 1) > group);
  }
  // The number of the first product of a step and a group, in the order of Q's columns (query_column).
  static __device__ constexpr int first_product(int step, int group) {
    const int pass = Chunks::kIsBlocks
                         ? passes_before_chunk(Chunks::kType, Chunks::kColumns, step) + group - first_group(step)
                         : step;
    return pass * kProducts;
  }
};

enum : int {
  kKeyMatrices = kBlockKeys / 8,        // matrices of eight keys that ldmatrix reads of a tile
  kRowTiles = kHeadRows <= 8 ? 1 : 2,   // products of eight rows of Q each, which cover the rows of a warp
  kScores = kBlockKeys / 4,             // scores of a thread in a product's eight rows, and its elements of O
  kOutputs = CodeChunks<kOfV>::kCount * CodesOfV::kCodesPerHalf * 2,
};

static_assert(kBlockKeys % 32 == 0);

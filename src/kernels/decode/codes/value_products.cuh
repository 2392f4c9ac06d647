// O^T += V^T P^T over codes of V. Columns of V are the rows of a product (A), and eight rows of P are its columns (B).
#pragma once
#include "decode/codes/scales.cuh"
#include "decode/codes/softmax.cuh"

// P times the scales of a group of V's columns, as fragments: P^T is S^T with keys in the other dimension.
__device__ __forceinline__ void scale_probabilities(u32 (&scaled_p)[kRowTiles][kScores / 2],
                                                    const float (&P)[kRowTiles][kScores], int group,
                                                    const ScalesOfKey<kOfV>* key_scales) {
#pragma unroll
  for (int matrix = 0; matrix < kKeyMatrices; ++matrix) {
    const float scale = kVScales > 0 ? key_scales[matrix][group] : 1;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const float* const pair = P[i] + 2 * matrix;
      scaled_p[i][matrix] = transposed_matrix(kVScales > 0 ? ElementP::pack(pair[0] * scale, pair[1] * scale)
                                                           : ElementP::pack(pair[0], pair[1]));
    }
  }
}

// The zero points of V as f16, of this thread's keys of a tile: two of each eight.
class ZeroPoints {
 public:
  // Loads those of a group of columns. Groups are constants and come in order.
  __device__ __forceinline__ void load(u32 scales, int group) {
    if (group % kWordGroups != 0) return;
#pragma unroll
    for (int i = 0; i < 2 * kMatrices; ++i) {
      const int key = i / 2 * 8 + int(thread_column()) + i % 2;
      if constexpr (kWordGroups == 2)
        words_[i] = load_shared(scale_place<kZeroOfV>(scales, key, group));
      else
        words_[i] = Half::pack(load_scale<kZeroOfV>(scales, key, group), 0);
    }
  }
  // The zero points of two keys, as a word of a fragment.
  __device__ __forceinline__ u32 pair(int matrix, int group) const {
    return __byte_perm(words_[2 * matrix], words_[2 * matrix + 1], group % kWordGroups == 0 ? 0x5410 : 0x7632);
  }

 private:
  enum : int {
    kMatrices = kVZeroPoint ? int(kKeyMatrices) : 1,
    kWordGroups = scale_type(kZeroOfV) == kF16 && kVScales % 2 == 0 ? 2 : 1,  // whose zero points a word has
  };
  u32 words_[2 * kMatrices];
};

// Adds to the correction of a group (SoftmaxRows::offsets): P with scales times the bias of the codes, and times their
// zero points.
__device__ __forceinline__ void multiply_offsets(float (&offsets)[kRowTiles][4],
                                                 const u32 (&scaled_p)[kRowTiles][kScores / 2],
                                                 const ZeroPoints& zero_points, int group) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int matrix = 0; matrix < kKeyMatrices; matrix += 2) {
      const u32 bias = Half::pack(CodesOfV::kBias, CodesOfV::kBias);
      u32 a[4] = {bias, bias, bias, bias};
      if constexpr (kVZeroPoint) {
        a[1] = zero_points.pair(matrix, group);
        a[3] = zero_points.pair(matrix + 1, group);
      }
      multiply_16_8_16<ElementV::kType>(offsets[i], a, scaled_p[i][matrix], scaled_p[i][matrix + 1]);
    }
  }
}

// How many pairs of bytes come before the first block in the first 16 bytes of a row of V (BlockRows::begin).
__device__ __forceinline__ int pairs_before_values(u32 v, u32 scales) {
  return BlockRows<kOfV>::kPiece == kMiddle ? (scales - v) / 2 : 0;
}

// O^T += V^T P^T of the tile at `v`. O has its columns in the order of output_column.
__device__ __forceinline__ void multiply_values(float (&O)[kRowTiles][kOutputs], SoftmaxRows& rows,
                                                const float (&P)[kRowTiles][kScores], u32 v, u32 scales) {
  using Steps = CodeSteps<kOfV>;
  enum : int { kStepOutputs = 2 * Steps::kWords };
  const u32 lane = threadIdx.x % 32;
  const int pairs_before = pairs_before_values(v, scales);
  ScalesOfKey<kOfV> key_scales[kVScales > 0 ? kKeyMatrices : 1];
  u32 scaled_p[Steps::kMaxGroups][kRowTiles][kScores / 2];
  ZeroPoints zero_points;
#pragma unroll
  for (int matrix = 0; kVScales > 0 && matrix < kKeyMatrices; ++matrix)
    key_scales[matrix] = {scales, 8 * matrix + int(thread_row())};
#pragma unroll
  for (int step = 0; step < Steps::kCount; ++step) {
    const int first_group = Steps::first_group(step), groups = Steps::last_group(step) - first_group + 1;
    // A step of two groups has a result for each, and a lane selects the one of its columns at the end. A mask before
    // the product would make NaN of 0 times an infinite scale.
    float results[Steps::kMaxGroups][kRowTiles][kStepOutputs];
#pragma unroll
    for (int i = 0; i < Steps::kMaxGroups; ++i) {
      const int group = first_group + i;
      if (i >= groups) continue;
      if (Steps::begins(step, group)) {
        scale_probabilities(scaled_p[group % Steps::kMaxGroups], P, group, key_scales);
        if constexpr (kVZeroPoint) zero_points.load(scales, group);
        if constexpr (kOffsets > 0)
          multiply_offsets(rows.offsets[group], scaled_p[group % Steps::kMaxGroups], zero_points, group);
      }
#pragma unroll
      for (int j = 0; j < kRowTiles * kStepOutputs; ++j)
        results[i][j / kStepOutputs][j % kStepOutputs] =
            O[j / kStepOutputs][kStepOutputs * step + j % kStepOutputs];
    }
#pragma unroll
    for (int key = 0; key < kBlockKeys; key += 32) {
      u32 x[4][Steps::kWords];
#pragma unroll
      for (int i = 0; i < Steps::kChunks; ++i) {
        u32 loaded[4];
        load_shared_matrices_transposed(Steps::Chunks::place(v, key + lane, step * Steps::kChunks + i), loaded);
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          u32 numbers[CodesOfV::kCodesPerHalf];
          CodesOfV::numbers(loaded[matrix], numbers);
#pragma unroll
          for (int j = 0; j < CodesOfV::kCodesPerHalf; ++j) x[matrix][i * CodesOfV::kCodesPerHalf + j] = numbers[j];
        }
      }
#pragma unroll
      for (int matrix = 0; matrix < 4; matrix += 2)
#pragma unroll
        for (int word = 0; word < Steps::kWords; word += 2) {
          const u32 a[4] = {x[matrix][word], x[matrix][word + 1], x[matrix + 1][word], x[matrix + 1][word + 1]};
#pragma unroll
          for (int i = 0; i < Steps::kMaxGroups; ++i)
#pragma unroll
            for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
              if (i >= groups) continue;
              const u32* const b = scaled_p[(first_group + i) % Steps::kMaxGroups][row_tile] + key / 8 + matrix;
              multiply_16_8_16<ElementV::kType>(results[i][row_tile] + 2 * word, a, b[0], b[1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles * kStepOutputs; ++i) {
      const int row_tile = i / kStepOutputs, element = i % kStepOutputs;
      float& o = O[row_tile][kStepOutputs * step + element];
      o = results[0][row_tile][element];
      if (groups > 1 && int(thread_row()) > first_group + pairs_before) o = results[groups - 1][row_tile][element];
    }
  }
}

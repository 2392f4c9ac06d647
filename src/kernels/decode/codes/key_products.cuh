// S^T = K Q^T over codes of K. Keys are the rows of a product (A), and eight rows of Q are its columns (B).
#pragma once
#include "decode/codes/queries.cuh"
#include "decode/codes/scales.cuh"
#include "decode/codes/steps.cuh"

// The fragments of Q of a warp, for products of 16 columns. One ldmatrix loads those of 16 rows, or of eight rows for
// two products.
class QueryFragments {
 public:
  // `q`: where Q of the warp lies.
  __device__ __forceinline__ explicit QueryFragments(u32 q) : q_(q) {}

  // Loads the fragments of a product. Products are constants and come in order, from an even one or the `first` on.
  __device__ __forceinline__ void load(int product, bool first = false) {
    const u32 lane = threadIdx.x % 32;
    const u32 begin =
        q_ + (kRowTiles == 2 ? swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2) : swizzled(lane % 8, lane / 8));
    const int chunk = kRowTiles == 2 ? product % 4 * 2 : product % 4 / 2 * 4;
    if (kRowTiles == 2 || first || product % 2 == 0)
      load_shared_matrices((begin ^ 16 * chunk) + product / 4 * kQPanelBytes, words_);
  }
  // The two words of eight rows.
  __device__ __forceinline__ const u32* rows(int product, int row_tile) const {
    return words_ + 2 * (kRowTiles == 2 ? row_tile : product % 2);
  }

 private:
  u32 q_;
  u32 words_[4];
};

// What the products of a work tile have in common: fragments of Q, factors of its rows, and products with the bias of
// integer codes.
class KeyProducts {
 public:
  // `q`: where Q of the warp lies. It is there if the work tile has keys.
  __device__ __forceinline__ KeyProducts(const DecodeParams& p, const WorkTile& tile, int warp_in_group, u32 q)
      : queries_(q) {
    const bool of_sequence = kCodesK && kKScales == 0;
    const float sequence_scale = of_sequence ? nan_unless_finite(scale_of_sequence(p.k_scale, tile)) : 1;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = warp_in_group * kRowsOfWarp + i / 2 * 8 + int(thread_column()) + i % 2;
      float factor = sequence_scale * CodesOfK::scale(0);
      if (kCodesK && tile.has_keys()) factor *= reinterpret_cast<const float*>(raw + kLayout.q_factors)[row];
      factor_[i / 2][i % 2] = factor;
    }
#pragma unroll
    for (int group = 0; kKeepsBias && group < kGroups; ++group) {
      float products[kRowTiles][4];
      bias_products(queries_, group, products);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) bias_[group][i / 2][i % 2] = products[i / 2][i % 2];
    }
  }

  // S of the tile at `k`.
  __device__ __forceinline__ void multiply(float (&S)[kRowTiles][kScores], u32 k, u32 scales) {
    const u32 lane = threadIdx.x % 32;
    // With one group S is the sum itself. Else each group has a sum, which its scale multiplies once it is complete.
    float group_sums[Steps::kMaxGroups][kGroups > 1 ? kRowTiles : 1][kGroups > 1 ? kScores : 1];
    const auto sums = [&](int group, int row_tile) -> float* {
      if constexpr (kGroups > 1) return group_sums[group % Steps::kMaxGroups][row_tile];
      return S[row_tile];
    };
    ScalesOfKey<kOfK> key_scales[kKScales > 0 ? kKeyMatrices : 1];
    ScalesOfKey<kZeroOfK> zero_points[kKZeroPoint ? kKeyMatrices : 1];
#pragma unroll
    for (int matrix = 0; matrix < kKeyMatrices; ++matrix) {
      if (kKScales > 0) key_scales[matrix] = {scales, 8 * matrix + int(thread_row())};
      if (kKZeroPoint) zero_points[matrix] = {scales, 8 * matrix + int(thread_row())};
    }
#pragma unroll
    for (int step = 0; step < Steps::kCount; ++step) {
      const int first_group = Steps::first_group(step), groups = Steps::last_group(step) - first_group + 1;
      u32 b[Steps::kMaxGroups][Steps::kProducts][kRowTiles][2];
#pragma unroll
      for (int i = 0; i < Steps::kMaxGroups; ++i) {
        if (i >= groups) continue;
        const int group = first_group + i;
        if (Steps::begins(step, group)) begin_group(group, zero_points, sums);
        load_queries(b[i], step, group);
      }
#pragma unroll
      for (int key = 0; key < kBlockKeys; key += 32) {
        u32 x[4][Steps::kWords];
#pragma unroll
        for (int i = 0; i < Steps::kChunks; ++i) {
          u32 loaded[4];
          load_shared_matrices(Steps::Chunks::place(k, key + lane, step * Steps::kChunks + i), loaded);
#pragma unroll
          for (int matrix = 0; matrix < 4; ++matrix) {
            u32 numbers[CodesOfK::kCodesPerHalf];
            CodesOfK::numbers(loaded[matrix], numbers);
#pragma unroll
            for (int j = 0; j < CodesOfK::kCodesPerHalf; ++j) x[matrix][i * CodesOfK::kCodesPerHalf + j] = numbers[j];
          }
        }
#pragma unroll
        for (int word = 0; word < Steps::kWords; word += 2)
#pragma unroll
          for (int matrix = 0; matrix < 4; matrix += 2) {
            const u32 a[4] = {x[matrix][word], x[matrix + 1][word], x[matrix][word + 1], x[matrix + 1][word + 1]};
#pragma unroll
            for (int i = 0; i < Steps::kMaxGroups; ++i)
#pragma unroll
              for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
                if (i >= groups) continue;
                const u32* const q = b[i][word / 2][row_tile];
                multiply_16_8_16<CodesOfK::Number::kType>(sums(first_group + i, row_tile) + (key / 8 + matrix) * 2, a,
                                                          q[0], q[1]);
              }
          }
      }
#pragma unroll
      for (int i = 0; i < Steps::kMaxGroups; ++i) {
        const int group = first_group + i;
        if (kKScales == 0 || i >= groups || !Steps::ends(step, group)) continue;
        add_group(S, group, key_scales, sums);
      }
    }
    if constexpr (kCodesK) {
#pragma unroll
      for (int i = 0; i < kRowTiles * kScores; ++i) S[i / kScores][i % kScores] *= factor_[i / kScores][i % 2];
    }
  }

 private:
  using Steps = CodeSteps<kOfK>;
  enum : int {
    kGroups = Steps::kGroups,
    // Products of Q and the bias stay in registers of a work tile, unless O needs these.
    kKeepsBias = CodesOfK::kBias > 0 && kRowTiles * kValueDim <= 256,
  };

  // The products of Q with -kBias in place of codes, over the columns of a group.
  static __device__ __forceinline__ void bias_products(QueryFragments queries, int group,
                                                       float (&products)[kRowTiles][4]) {
    constexpr u32 a[4] = {CodesOfK::minus_bias(0), CodesOfK::minus_bias(0), CodesOfK::minus_bias(1),
                          CodesOfK::minus_bias(1)};
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) products[i / 4][i % 4] = 0;
    bool first = true;
#pragma unroll
    for (int step = 0; step < Steps::kCount; ++step) {
      if (group < Steps::first_group(step) || group > Steps::last_group(step)) continue;
#pragma unroll
      for (int j = 0; j < Steps::kProducts; ++j) {
        const int product = Steps::first_product(step, group) + j;
        queries.load(product, first);
        first = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const u32* const b = queries.rows(product, i);
          multiply_16_8_16<kF16>(products[i], a, b[0], b[1]);
        }
      }
    }
  }

  // The sums of a group begin with the sum of Q times -kBias, which corrects the bias of the codes, and times the zero
  // point of the key.
  template <class ZeroPoints, class Sums>
  __device__ __forceinline__ void begin_group(int group, const ZeroPoints& zero_points, const Sums& sums) {
    float bias[kRowTiles][4] = {};
    if constexpr (CodesOfK::kBias > 0 && !kKeepsBias) bias_products(queries_, group, bias);
#pragma unroll
    for (int i = 0; kKeepsBias && i < 2 * kRowTiles; ++i) bias[i / 2][i % 2] = bias_[group][i / 2][i % 2];
#pragma unroll
    for (int i = 0; i < kRowTiles * kScores; ++i) {
      const float row_bias = bias[i / kScores][i % 2];
      float& sum = sums(group, i / kScores)[i % kScores];
      sum = row_bias;
      constexpr float kPerBias = 1.0f / max_of(CodesOfK::kBias, 1);
      if (kKZeroPoint) sum = __fmaf_rn(zero_points[i % kScores / 2][group], row_bias * kPerBias, row_bias);
    }
  }

  // The fragments of Q for the products of a step and a group.
  __device__ __forceinline__ void load_queries(u32 (&b)[Steps::kProducts][kRowTiles][2], int step, int group) {
#pragma unroll
    for (int j = 0; j < Steps::kProducts; ++j) {
      const int product = Steps::first_product(step, group) + j;
      queries_.load(product);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) b[j][i / 2][i % 2] = queries_.rows(product, i / 2)[i % 2];
    }
  }

  // S += the scales of a group times its sums, which are complete.
  template <class KeyScales, class Sums>
  static __device__ __forceinline__ void add_group(float (&S)[kRowTiles][kScores], int group,
                                                   const KeyScales& key_scales, const Sums& sums) {
#pragma unroll
    for (int matrix = 0; matrix < kKeyMatrices; ++matrix) {
      const float scale = key_scales[matrix][group];
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) {
        float& s = S[i / 2][2 * matrix + i % 2];
        const float sum = sums(group, i / 2)[2 * matrix + i % 2];
        s = group == 0 ? sum * scale : __fmaf_rn(sum, scale, s);
      }
    }
  }

  QueryFragments queries_;
  float factor_[kRowTiles][2];
  float bias_[kKeepsBias ? kGroups : 1][kKeepsBias ? kRowTiles : 1][2];
};

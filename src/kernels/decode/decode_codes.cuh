// K and V of codes (kCodesK, kCodesV): products of a warp whose rows are keys, or columns of V, and whose columns are
// rows of Q, as fragments of Transposed (attention/fragment.cuh). Codes become f16 in registers: 16 bytes of a row that
// ldmatrix hands out are fragments of as many products as half a word has codes, if the columns of Q, and later those
// of O, are in the order that gives. What scales K multiplies scores. What scales V multiplies P, or O where all keys
// have the same. docs/kernels/decode.md derives this.
#pragma once
#include "decode/output.cuh"
#include "decode/scores.cuh"

// Rows of K or V in 16 bytes each.
template <int tensor>
struct CodeChunks {
  static constexpr Element kType = tensor == kOfK ? StoredK::kType : StoredV::kType;
  using CodesOf = Codes<kType>;
  enum : int {
    kColumns = tensor == kOfK ? kHeadDim : kValueDim,
    kBlocks = is_block(kType),
    kRowBytes = tensor == kOfK ? kKRowBytes : kVRowBytes,  // of panels
    kOfPanel = kRowBytes / 16,
    kPitch = kHeads > 1 ? int(RowsOfHeads<tensor>::kPitch) : int(BlockRows<tensor>::kStride),
    kChunks = kBlocks ? chunks_of_blocks(kType, kColumns) : kColumns / (8 * CodesOf::kOfHalf),
  };
  // Where a chunk of a key of the tile at `rows` lies.
  static __device__ __forceinline__ u32 place(u32 rows, u32 key, int chunk) {
    if constexpr (kBlocks || kHeads > 1) return rows + key * kPitch + 16 * chunk;
    // Rows begin at multiples of their bytes.
    return ((rows + chunk_place<kRowBytes>(key, 0)) ^ 16 * (chunk % kOfPanel)) +
           chunk / kOfPanel * (kBlockKeys * kRowBytes);
  }
};

// What products take of K or V at once, a step: chunks whose numbers are whole products of 16 columns of K, or rows.
template <int tensor>
struct Steps {
  using Chunks = CodeChunks<tensor>;
  enum : int {
    kOfHalf = Chunks::CodesOf::kOfHalf,
    kChunks = kOfHalf == 1 ? 2 : 1,
    kNumbers = kChunks * kOfHalf,  // of a lane's words
    kCount = Chunks::kChunks / kChunks,
    kGroups = max_of(scale_count(tensor), 1),
    kOfGroup = Chunks::kColumns / kGroups,
    kMixed = Chunks::kBlocks && kGroups > 1 ? 2 : 1,  // groups of columns that a step may have
  };
  static_assert(Chunks::kChunks % kChunks == 0);

  // The groups of a step, and how many products come before that of a step and a group.
  static __device__ constexpr int first(int step) {
    return Chunks::kBlocks ? first_block(Chunks::kType, step) : step * 8 * kNumbers / kOfGroup;
  }
  static __device__ constexpr int last(int step) {
    return Chunks::kBlocks ? last_block(Chunks::kType, Chunks::kColumns, step) : first(step);
  }
  static __device__ constexpr int product(int step, int group) {
    return Chunks::kBlocks ? products_before_chunk(Chunks::kType, Chunks::kColumns, step) + group - first(step) : step;
  }
  static __device__ constexpr bool begins(int step, int group) {
    return group <= last(step) && (step == 0 || last(step - 1) < group);
  }
  static __device__ constexpr bool ends(int step, int group) {
    return group <= last(step) && (step + 1 == kCount || first(step + 1) > group);
  }
};

enum : int {
  kRowTiles = kHeadRows <= 8 ? 1 : 2,  // of eight rows of Q, that a warp has
  kScores = kBlockKeys / 4,            // that a thread has of eight rows, and elements of O
  kOutputs = CodeChunks<kOfV>::kChunks * CodesOfV::kOfHalf * 2,
};

static_assert(!kCodesQ || (kCodesK && kCodesV));
static_assert(kBlockKeys % 32 == 0 && (kWarpGroups > 1 || kHeads > 1));

// A thread's rows of Q, two of each eight.
struct TransposedRows {
  KeyRange seen_by_all;
  ThreadRows of[kRowTiles];

  __device__ __forceinline__ TransposedRows(const DecodeParams& p, const WorkTile& tile, int warp_of_group)
      : seen_by_all(keys_seen_by_all(p, tile)) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
      of[i] = rows_of_thread(p, tile, kRowsOfWarp * warp_of_group + 8 * i + int(thread_column()), 1);
  }

  // Whether some row does not see all keys of a tile.
  __device__ __forceinline__ bool cuts(int key_tile) const {
    return is_partial(seen_by_all, key_tile * kBlockKeys, (key_tile + 1) * kBlockKeys);
  }
};

// ---- Scales ----

__device__ __forceinline__ float descale_of(const CodeScales& t, const WorkTile& tile) {
  if (t.data == nullptr) return 1;
  const int head = tile.head * kHeads + head_of_warp();
  return scale_at(t, tile.batch * t.batch + head * t.head);
}

// By how much a key's scales may move the maximum of a row: products of P and scales are f16. One that is no number
// leaves other columns what they are.
__device__ __forceinline__ float weight_of_key(u32 scales, int key) {
  const ScalesOfKey<kOfV> v(scales, key);
  float largest = 0;
#pragma unroll
  for (int group = 0; group < kVScales; ++group) {
    const float scale = fabsf(v[group]);
    largest = fmaxf(largest, kVScales == 1 || scale < infinity() ? scale : 0);
  }
  return fminf(fmaxf(largest, 0x1p-90f), 0x1p104f);
}

// The largest of a tile.
__device__ __forceinline__ float weight_of_tile(u32 scales) {
  if (kVScales == 0) return 1;
  u32 largest = 0;
#pragma unroll
  for (int key = threadIdx.x % 32; key < kBlockKeys; key += 32)
    largest = max(largest, __float_as_uint(weight_of_key(scales, key)));
  return __uint_as_float(__reduce_max_sync(0xffffffff, largest));
}

// ---- Softmax ----

enum : int { kOffsets = CodesOfV::kBias > 0 || kVZeroPoint ? int(Steps<kOfV>::kGroups) : 0 };

// The state of a thread's rows, as attention/softmax.cuh has it: of products of P and scales.
struct SoftmaxRows {
  Rows of[kRowTiles];
  // What columns of V lack, of each group: sums of P times what their codes have too much, as products of eight equal
  // rows, and of eight more that have their zero points, if there are any.
  float offsets[kOffsets > 0 ? kOffsets : 1][kRowTiles][4];
};

__device__ __forceinline__ float max_of_columns(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, step));
  return x;
}
__device__ __forceinline__ float sum_of_columns(float x) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffff, x, step);
  return x;
}

// P = exp2(c * S + shift), of each row with a shift of its own, and its sums, of this thread's columns.
template <bool exact>
__device__ __forceinline__ void exponentials(float (&P)[kScores], const float (&S)[kScores], float c,
                                             const float (&shift)[2], float (&sum)[2]) {
  float before[2];  // short sums
#pragma unroll
  for (int i = 0; i < kScores; ++i) {
    const float at = shift[i % 2];
    P[i] = exp2_fast(exact ? __fadd_rn(__fmul_rn(S[i], c), at) : __fmaf_rn(S[i], c, at));
    float& to = i / 2 % 2 == 0 ? sum[i % 2] : before[i % 2];
    to = i < 4 ? P[i] : to + P[i];
  }
  sum[0] += before[0];
  sum[1] += before[1];
}

// As softmax_step, of products of P and the scales of V: the maximum is that of scores with exponents of the scales of
// their keys, and no new one is computed until the sum of some row of the warp, times the largest scale of the tile,
// has outgrown kSumLimit.
__device__ __forceinline__ void softmax_step(float (&P)[kRowTiles][kScores], const float (&S)[kRowTiles][kScores],
                                             float (&O)[kRowTiles][kOutputs], SoftmaxRows& rows, float c, u32 scales) {
  const float weight = weight_of_tile(scales);
  float sum[kRowTiles][2];
  bool settled = true;
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    exponentials<false>(P[i], S[i], c, rows.of[i].shift, sum[i]);
    settled = settled && (sum[i][0] + sum[i][1]) * weight <= float(kSumLimit);
  }
  if (__any_sync(0xffffffff, !settled)) {
    float exponent[kVScales > 0 ? kScores / 2 : 1];
#pragma unroll
    for (int i = 0; kVScales > 0 && i < kScores / 2; ++i)
      exponent[i] = float(__float_as_int(weight_of_key(scales, 8 * i + int(thread_row()))) >> 23) - 127;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      float shift[2];
#pragma unroll
      for (int row = 0; row < 2; ++row) {
        float largest = -infinity();
#pragma unroll
        for (int j = row; j < kScores; j += 2)
          largest = fmaxf(largest, kVScales > 0 ? __fadd_rn(__fmul_rn(S[i][j], c), exponent[j / 2]) : S[i][j]);
        largest = max_of_columns(largest);
        float& at = rows.of[i].shift[row];
        const float old = at;
        at = fminf(old, -(kVScales > 0 ? largest : __fmul_rn(largest, c)));
        const float factor = at == infinity() ? 1 : exp2_fast(at - old);
#pragma unroll
        for (int j = row; j < kOutputs; j += 2) O[i][j] *= factor;
#pragma unroll
        for (int j = row; j < 4 * kOffsets; j += 2) rows.offsets[j / 4][i][j % 4] *= factor;
        rows.of[i].sum[row] *= factor;
        shift[row] = at == infinity() ? 0 : at;
      }
      exponentials<true>(P[i], S[i], c, shift, sum[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) rows.of[i / 2].sum[i % 2] += sum[i / 2][i % 2];
}

// ---- Products ----

// Q of the warp's rows in steps of 16 columns, as B of products: words of each eight rows.
class QueryFragments {
 public:
  __device__ __forceinline__ explicit QueryFragments(u32 q) : q_(q) {}
  // Of step `step`, a constant that grows by one from an even number on, or `first`.
  __device__ __forceinline__ void load(int step, bool first = false) {
    const u32 lane = threadIdx.x % 32;
    const u32 begin =
        q_ + (kRowTiles == 2 ? swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2) : swizzled(lane % 8, lane / 8));
    const int chunk = kRowTiles == 2 ? step % 4 * 2 : step % 4 / 2 * 4;
    if (kRowTiles == 2 || first || step % 2 == 0)
      load_shared_matrices((begin ^ 16 * chunk) + step / 4 * kQPanelBytes, words_);
  }
  __device__ __forceinline__ const u32* rows(int step, int eight) const {
    return words_ + 2 * (kRowTiles == 2 ? eight : step % 2);
  }

 private:
  u32 q_;
  u32 words_[4];
};

// What a work tile has for S^T = K Q^T of the warp's rows, whose Q lies at `q`.
class KeyProducts {
 public:
  // Once Q is there, if the work tile `has_keys`.
  __device__ __forceinline__ KeyProducts(const DecodeParams& p, const WorkTile& tile, int warp_of_group, u32 q)
      : queries_(q) {
    const float of_head = kCodesK && kKScales == 0 ? descale_of(p.k_scale, tile) : 1;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = warp_of_group * kRowsOfWarp + i / 2 * 8 + int(thread_column()) + i % 2;
      float of_row = of_head * CodesOfK::scale(0);
      if (kCodesK && tile.has_keys()) of_row *= reinterpret_cast<const float*>(raw + kLayout.q_factors)[row];
      factor_[i / 2][i % 2] = of_row;
    }
#pragma unroll
    for (int group = 0; kBiases && group < kGroups; ++group) {
      float of_rows[kRowTiles][4];
      bias_products(queries_, group, of_rows);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i) bias_[group][i / 2][i % 2] = of_rows[i / 2][i % 2];
    }
  }

  // Of the codes at `k`.
  __device__ __forceinline__ void multiply(float (&S)[kRowTiles][kScores], u32 k, u32 scales) {
    const u32 lane = threadIdx.x % 32;
    float of_group[Step::kMixed][kGroups > 1 ? kRowTiles : 1][kGroups > 1 ? kScores : 1];
    ScalesOfKey<kOfK> of_key[kKScales > 0 ? kBlockKeys / 8 : 1];
    ScalesOfKey<kZeroOfK> zero_points[kKZeroPoint ? kBlockKeys / 8 : 1];
    const auto sums = [&](int group, int i) -> float* {
      if constexpr (kGroups > 1) return of_group[group % Step::kMixed][i];
      return S[i];
    };
#pragma unroll
    for (int eight = 0; eight < kBlockKeys / 8; ++eight) {
      if (kKScales > 0) of_key[eight] = {scales, 8 * eight + int(thread_row())};
      if (kKZeroPoint) zero_points[eight] = {scales, 8 * eight + int(thread_row())};
    }
#pragma unroll
    for (int step = 0; step < Step::kCount; ++step) {
      const int first = Step::first(step), groups = Step::last(step) - first + 1;
      u32 b[Step::kMixed][Step::kNumbers / 2][kRowTiles][2];
#pragma unroll
      for (int of_step = 0; of_step < Step::kMixed; ++of_step) {
        const int group = first + of_step;
        if (of_step >= groups) continue;
        if (Step::begins(step, group)) {
          float bias[kRowTiles][4] = {};
          if constexpr (CodesOfK::kBias > 0 && !kBiases) bias_products(queries_, group, bias);
#pragma unroll
          for (int i = 0; kBiases && i < 2 * kRowTiles; ++i) bias[i / 2][i % 2] = bias_[group][i / 2][i % 2];
#pragma unroll
          for (int i = 0; i < kRowTiles * kScores; ++i) {
            const float of_row = bias[i / kScores][i % 2];  // the sum of Q, times -kBias
            float& sum = sums(group, i / kScores)[i % kScores];
            sum = of_row;
            constexpr float kPerBias = 1.0f / max_of(CodesOfK::kBias, 1);
            if (kKZeroPoint) sum = __fmaf_rn(zero_points[i % kScores / 2][group], of_row * kPerBias, of_row);
          }
        }
#pragma unroll
        for (int j = 0; j < Step::kNumbers / 2; ++j) {
          const int of_query = Step::product(step, group) * (Step::kNumbers / 2) + j;
          queries_.load(of_query);
#pragma unroll
          for (int i = 0; i < 2 * kRowTiles; ++i) b[of_step][j][i / 2][i % 2] = queries_.rows(of_query, i / 2)[i % 2];
        }
      }
#pragma unroll
      for (int keys = 0; keys < kBlockKeys; keys += 32) {
        u32 x[4][Step::kNumbers];
#pragma unroll
        for (int i = 0; i < Step::kChunks; ++i) {
          u32 words[4];
          load_shared_matrices(Step::Chunks::place(k, keys + lane, step * Step::kChunks + i), words);
#pragma unroll
          for (int eight = 0; eight < 4; ++eight) {
            u32 numbers[CodesOfK::kOfHalf];
            CodesOfK::numbers(words[eight], numbers);
#pragma unroll
            for (int j = 0; j < CodesOfK::kOfHalf; ++j) x[eight][i * CodesOfK::kOfHalf + j] = numbers[j];
          }
        }
#pragma unroll
        for (int number = 0; number < Step::kNumbers; number += 2)
#pragma unroll
          for (int pair = 0; pair < 4; pair += 2) {
            const u32 a[4] = {x[pair][number], x[pair + 1][number], x[pair][number + 1], x[pair + 1][number + 1]};
#pragma unroll
            for (int of_step = 0; of_step < Step::kMixed; ++of_step)
#pragma unroll
              for (int i = 0; i < kRowTiles; ++i) {
                if (of_step >= groups) continue;
                const u32* const of_rows = b[of_step][number / 2][i];
                multiply_16_8_16<CodesOfK::Number::kType>(sums(first + of_step, i) + (keys / 8 + pair) * 2, a,
                                                          of_rows[0], of_rows[1]);
              }
          }
      }
#pragma unroll
      for (int of_step = 0; of_step < Step::kMixed; ++of_step) {
        const int group = first + of_step;
        if (kKScales == 0 || of_step >= groups || !Step::ends(step, group)) continue;
#pragma unroll
        for (int eight = 0; eight < kBlockKeys / 8; ++eight) {
          const float scale = of_key[eight][group];
#pragma unroll
          for (int i = 0; i < 2 * kRowTiles; ++i) {
            float& s = S[i / 2][2 * eight + i % 2];
            const float t = sums(group, i / 2)[2 * eight + i % 2];
            s = group == 0 ? t * scale : __fmaf_rn(t, scale, s);
          }
        }
      }
    }
    if constexpr (kCodesK) {
#pragma unroll
      for (int i = 0; i < kRowTiles * kScores; ++i) S[i / kScores][i % kScores] *= factor_[i / kScores][i % 2];
    }
  }

 private:
  using Step = Steps<kOfK>;
  enum : int {
    kGroups = Step::kGroups,
    kOfGroup = Step::kOfGroup,
    // Products of Q and biases, in registers where these are not full of O.
    kBiases = CodesOfK::kBias > 0 && kRowTiles * kValueDim <= 256,
  };

  // Those of the `group`-th columns of the rows, with -kBias in place of codes.
  static __device__ __forceinline__ void bias_products(QueryFragments queries, int group, float (&to)[kRowTiles][4]) {
    constexpr u32 a[4] = {CodesOfK::minus_bias(0), CodesOfK::minus_bias(0), CodesOfK::minus_bias(1),
                          CodesOfK::minus_bias(1)};
#pragma unroll
    for (int i = 0; i < 4 * kRowTiles; ++i) to[i / 4][i % 4] = 0;
    bool first = true;
#pragma unroll
    for (int step = 0; step < Step::kCount; ++step) {
      if (group < Step::first(step) || group > Step::last(step)) continue;
#pragma unroll
      for (int j = 0; j < Step::kNumbers / 2; ++j) {
        const int of_query = Step::product(step, group) * (Step::kNumbers / 2) + j;
        queries.load(of_query, first);
        first = false;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const u32* const b = queries.rows(of_query, i);
          multiply_16_8_16<kF16>(to[i], a, b[0], b[1]);
        }
      }
    }
  }

  QueryFragments queries_;
  float factor_[kRowTiles][2];
  float bias_[kBiases ? kGroups : 1][kBiases ? kRowTiles : 1][2];
};

// P as B of products, times the scales of the `group`-th columns of V.
__device__ __forceinline__ void weigh(u32 (&weighed)[kRowTiles][kScores / 2], const float (&P)[kRowTiles][kScores],
                                      int group, const ScalesOfKey<kOfV>* of_key) {
#pragma unroll
  for (int eight = 0; eight < kBlockKeys / 8; ++eight) {
    const float scale = kVScales > 0 ? of_key[eight][group] : 1;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const float* const pair = P[i] + 2 * eight;
      weighed[i][eight] = transposed_matrix(kVScales > 0 ? ElementP::pack(pair[0] * scale, pair[1] * scale)
                                                         : ElementP::pack(pair[0], pair[1]));
    }
  }
}

// The zero points of V as f16, of this thread's keys of a tile, two of each eight.
class ZeroPoints {
 public:
  // Those of the `group`-th columns: a constant, which grows.
  __device__ __forceinline__ void load(u32 scales, int group) {
    if (group % kOfWord != 0) return;
#pragma unroll
    for (int i = 0; i < 2 * kEights; ++i) {
      const int key = i / 2 * 8 + int(thread_column()) + i % 2;
      if constexpr (kOfWord == 2)
        words_[i] = load_shared(scale_place<kZeroOfV>(scales, key, group));
      else
        words_[i] = Half::pack(load_scale<kZeroOfV>(scales, key, group), 0);
    }
  }
  __device__ __forceinline__ u32 of_eight(int eight, int group) const {
    return __byte_perm(words_[2 * eight], words_[2 * eight + 1], group % kOfWord == 0 ? 0x5410 : 0x7632);
  }

 private:
  enum : int {
    kEights = kVZeroPoint ? kBlockKeys / 8 : 1,
    kOfWord = scale_type(kZeroOfV) == kF16 && kVScales % 2 == 0 ? 2 : 1,  // groups
  };
  u32 words_[2 * kEights];
};

// Adds what codes of the `group`-th columns have too much and their zero points, times the same P as theirs.
__device__ __forceinline__ void multiply_offsets(float (&to)[kRowTiles][4],
                                                 const u32 (&weighed)[kRowTiles][kScores / 2],
                                                 const ZeroPoints& zero_points, int group) {
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int eight = 0; eight < kBlockKeys / 8; eight += 2) {
      const u32 bias = Half::pack(CodesOfV::kBias, CodesOfV::kBias);
      u32 a[4] = {bias, bias, bias, bias};
      if constexpr (kVZeroPoint) {
        a[1] = zero_points.of_eight(eight, group);
        a[3] = zero_points.of_eight(eight + 1, group);
      }
      multiply_16_8_16<ElementV::kType>(to[i], a, weighed[i][eight], weighed[i][eight + 1]);
    }
  }
}

// How many pairs of bytes rows of V begin with that are not theirs, where they are blocks.
__device__ __forceinline__ int pairs_before_values(u32 v, u32 scales) {
  return BlockRows<kOfV>::kPiece == kMiddle ? (scales - v) / 2 : 0;
}

// O^T += V^T P^T of the codes at `v`, of columns in the order that output_column says.
__device__ __forceinline__ void multiply_values(float (&O)[kRowTiles][kOutputs], SoftmaxRows& rows,
                                                const float (&P)[kRowTiles][kScores], u32 v, u32 scales) {
  using Step = Steps<kOfV>;
  enum : int { kOfStep = 2 * Step::kNumbers };
  const u32 lane = threadIdx.x % 32;
  const int pairs_before = pairs_before_values(v, scales);
  ScalesOfKey<kOfV> of_key[kVScales > 0 ? kBlockKeys / 8 : 1];
  u32 weighed[Step::kMixed][kRowTiles][kScores / 2];
  ZeroPoints zero_points;
#pragma unroll
  for (int eight = 0; kVScales > 0 && eight < kBlockKeys / 8; ++eight)
    of_key[eight] = {scales, 8 * eight + int(thread_row())};
#pragma unroll
  for (int step = 0; step < Step::kCount; ++step) {
    const int first = Step::first(step), groups = Step::last(step) - first + 1;
    // Of columns of two groups, which of two results they have is known in the end: 0 times infinity is NaN.
    float of_step[Step::kMixed][kRowTiles][kOfStep];
#pragma unroll
    for (int at = 0; at < Step::kMixed; ++at) {
      const int group = first + at;
      if (at >= groups) continue;
      if (Step::begins(step, group)) {
        weigh(weighed[group % Step::kMixed], P, group, of_key);
        if constexpr (kVZeroPoint) zero_points.load(scales, group);
        if constexpr (kOffsets > 0)
          multiply_offsets(rows.offsets[group], weighed[group % Step::kMixed], zero_points, group);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles * kOfStep; ++i)
        of_step[at][i / kOfStep][i % kOfStep] = O[i / kOfStep][kOfStep * step + i % kOfStep];
    }
#pragma unroll
    for (int keys = 0; keys < kBlockKeys; keys += 32) {
      u32 x[4][Step::kNumbers];
#pragma unroll
      for (int i = 0; i < Step::kChunks; ++i) {
        u32 words[4];
        load_shared_matrices_transposed(Step::Chunks::place(v, keys + lane, step * Step::kChunks + i), words);
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
          u32 numbers[CodesOfV::kOfHalf];
          CodesOfV::numbers(words[eight], numbers);
#pragma unroll
          for (int j = 0; j < CodesOfV::kOfHalf; ++j) x[eight][i * CodesOfV::kOfHalf + j] = numbers[j];
        }
      }
#pragma unroll
      for (int pair = 0; pair < 4; pair += 2)
#pragma unroll
        for (int number = 0; number < Step::kNumbers; number += 2) {
          const u32 a[4] = {x[pair][number], x[pair][number + 1], x[pair + 1][number], x[pair + 1][number + 1]};
#pragma unroll
          for (int at = 0; at < Step::kMixed; ++at)
#pragma unroll
            for (int i = 0; i < kRowTiles; ++i) {
              if (at >= groups) continue;
              const u32* const b = weighed[(first + at) % Step::kMixed][i] + keys / 8 + pair;
              multiply_16_8_16<ElementV::kType>(of_step[at][i] + 2 * number, a, b[0], b[1]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < kRowTiles * kOfStep; ++i) {
      const int row = i / kOfStep, of_row = i % kOfStep;
      float& o = O[row][kOfStep * step + of_row];
      o = of_step[0][row][of_row];
      if (groups > 1 && int(thread_row()) > first + pairs_before) o = of_step[groups - 1][row][of_row];
    }
  }
}

// ---- The end of a work tile ----

// The column of V that a thread has as its `i`-th of O; -1: none, but the scale of a block, or what is before the first
// or behind the last. Rows of blocks begin with so many pairs of bytes that are not theirs.
__device__ __forceinline__ int output_column(int i, int pairs_before) {
  constexpr int kOfHalf = CodesOfV::kOfHalf;
  const int chunk = i / 2 / kOfHalf, number = i / 2 % kOfHalf, row = int(thread_row());
  if constexpr (is_block(StoredV::kType)) {
    constexpr int kPairs = block_bytes(StoredV::kType) / 2;
    const int first = first_block(StoredV::kType, chunk);
    const int of_row = 8 * chunk + row - pairs_before, block = first + (of_row >= kPairs * (first + 1));
    const int pair = of_row - kPairs * block - 1;
    return pair < 0 || block * kBlockColumns >= kValueDim ? -1
                                                          : block * kBlockColumns + CodesOfV::column_of(pair, number);
  }
  return chunk * 8 * kOfHalf + CodesOfV::column_of(row, number);
}
// Whether that may be one of kExchangeColumns columns from `first` on.
__device__ constexpr bool may_be_column(int i, int first) {
  const int chunk = i / 2 / CodesOfV::kOfHalf;
  if (!is_block(StoredV::kType)) return i >= first / 4 && i < first / 4 + kExchangeColumns / 4;
  return first_block(StoredV::kType, chunk) * kBlockColumns < first + kExchangeColumns &&
         (last_block(StoredV::kType, kValueDim, chunk) + 1) * kBlockColumns > first;
}

struct TransposedResult {
  const SoftmaxRows& rows;
  const float (&O)[kRowTiles][kOutputs];
  int pairs_before;  // as output_column has it

  static __device__ __forceinline__ int row(int i) { return i / 2 * 8 + int(thread_column()) + i % 2; }
  static __device__ __forceinline__ int place(int i) {
    return kHeads == 1 ? row(i) : row_of_warps(head_of_warp() * kRowsOfWarp + row(i));
  }
  static __device__ __forceinline__ bool has_row(int i) {
    return row(i) < kHeadRows && (kHeads == 1 || place(i) < kTileRows);
  }

  __device__ __forceinline__ void put_stats(float2* stats, int first_row) const {
    if (threadIdx.x % 32 >= 4) return;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i)
      if (has_row(i)) stats[first_row + place(i)] = {rows.of[i / 2].shift[i % 2], rows.of[i / 2].sum[i % 2]};
  }
  __device__ __forceinline__ void put_columns(float* columns, int first_row, int first) const {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      if (!has_row(i)) continue;
      float* const to = columns + (first_row + place(i)) * kExchangeStride - first;
#pragma unroll
      for (int j = 0; j < kOutputs; j += 2) {
        if (!may_be_column(j, first)) continue;
        const int column = output_column(j, pairs_before);
        if (!is_block(StoredV::kType) || (column >= first && column < first + kExchangeColumns))
          to[column] = O[i / 2][j + i % 2];
      }
    }
  }
};

// O in numbers of V, and sums of rows. A row without keys stays 0.
__device__ __forceinline__ void finish(const DecodeParams& p, const WorkTile& tile, float (&O)[kRowTiles][kOutputs],
                                       SoftmaxRows& rows, int pairs_before) {
  using Step = Steps<kOfV>;
  const float of_head = kCodesV && kVScales == 0 ? descale_of(p.v_scale, tile) : 1;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles; ++i) {
    float& sum = rows.of[i / 2].sum[i % 2];
    sum = sum_of_columns(sum);
#pragma unroll
    for (int j = i % 2; j < kOutputs; j += 2) {
      float& o = O[i / 2][j];
      if (kOffsets > 0) {
        const int step = j / (2 * Step::kNumbers), first = Step::first(step), last = Step::last(step);
        const auto offset_of = [&](int group) {
          const float* const of_rows = rows.offsets[group][i / 2] + i % 2;
          return kVZeroPoint ? of_rows[0] + of_rows[2] : of_rows[0];
        };
        float offset = offset_of(first);
        if (last > first && int(thread_row()) > first + pairs_before) offset = offset_of(last);
        o = __fmaf_rn(o, CodesOfV::scale(j / 2 % CodesOfV::kOfHalf), -offset);
      }
      if (kCodesV && kVScales == 0 && sum != 0) o *= of_head;
    }
  }
}

// ---- NaN and infinity at hidden keys ----

// As hides_non_finite and add_non_finite (decode/scores.cuh), of codes and of what scales them.
struct CodedValues {
  u32 v, scales;

  // The word of codes that a column of a key has.
  __device__ __forceinline__ u32 word_place(int key, int column) const {
    constexpr int kColumns = 8 * CodesOfV::kOfHalf;
    return CodeChunks<kOfV>::place(v, key, column / kColumns) + CodesOfV::place(column % kColumns).word * 4;
  }
  // The codes that a column has, in the lower half of a word or the upper one.
  __device__ __forceinline__ u32 codes(int key, int column) const {
    if constexpr (!is_block(StoredV::kType)) return load_shared(word_place(key, column));
    const CodesOfV::Place at = CodesOfV::place(column % kBlockColumns);
    return load_shared_u16(scale_place<kOfV>(scales, key, column / kBlockColumns) + 2 + 4 * at.word + 2 * at.half)
           << 16 * at.half;
  }
  // The `i`-th of the scales and zero points of V.
  enum : int { kNumbers = kVScales * (1 + kVZeroPoint) };
  __device__ __forceinline__ float scale(int i, int key) const {
    return i < kVScales ? load_scale<kOfV>(scales, key, i) : load_scale<kZeroOfV>(scales, key, i - kVScales);
  }
  static __device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity(); }

  __device__ __forceinline__ bool is_finite_key(int key, int lane) const {
    bool finite = true;
    // Heads whose rows have 16 bytes in common clear theirs together.
    if constexpr (kHeads > 1 && kVPiece == kMiddle) {
      using Rows = RowsOfHeads<kOfV>;
      const u32 first = scales + key * Rows::kPitch - head_of_warp() * Rows::kBytes;
      for (int i = lane; i < kHeads * kNumbers; i += 32)
        finite = finite && is_finite(half_to_float(static_cast<unsigned short>(load_shared_u16(
                               first + i / kNumbers * Rows::kBytes + i % kNumbers * block_bytes(StoredV::kType)))));
      return finite;
    }
    for (int i = lane; i < kNumbers; i += 32) finite = finite && is_finite(scale(i, key));
    if constexpr (is_block(StoredV::kType)) return finite;
    for (int column = lane * 2 * CodesOfV::kOfHalf; column < kValueDim; column += 64 * CodesOfV::kOfHalf)
      finite = finite && CodesOfV::is_finite(load_shared(word_place(key, column)));
    return finite;
  }

  // What a column of a key adds to O: 0, or what is not finite.
  __device__ __forceinline__ float addend(int key, int column) const {
    constexpr int kOfHalf = CodesOfV::kOfHalf;
    u32 x[kOfHalf];
    CodesOfV::numbers(codes(key, column), x);
    const CodesOfV::Place at = CodesOfV::place(column % (8 * kOfHalf));
    u32 pair = 0;
#pragma unroll
    for (int j = 0; j < kOfHalf; ++j)
      if (at.number == j) pair = x[j];
    float number = at.half == 1 ? CodesOfV::Number::high(pair) : CodesOfV::Number::low(pair);
    number = number * CodesOfV::scale(at.number) - CodesOfV::kBias;
    if (kVScales > 0) {
      const int group = column / (kValueDim / max_of(kVScales, 1));
      if (kVZeroPoint) number -= load_scale<kZeroOfV>(scales, key, group);
      number *= load_scale<kOfV>(scales, key, group);
    }
    return is_finite(number) ? 0 : number;
  }

  __device__ __forceinline__ void clear(int key, int lane) const {
    for (int i = lane; i < kNumbers; i += 32) {
      if (is_finite(scale(i, key))) continue;
      if (i < kVScales)
        clear_scale<kOfV>(scales, key, i);
      else
        clear_scale<kZeroOfV>(scales, key, i - kVScales);
    }
    if constexpr (is_block(StoredV::kType)) return;
    for (int column = lane * 2 * CodesOfV::kOfHalf; column < kValueDim; column += 64 * CodesOfV::kOfHalf) {
      const u32 at = word_place(key, column);
      store_shared(at, int(CodesOfV::finite(load_shared(at))));
    }
  }
};

// Boxes bring what memory has after the last of the `keys` of a tile, where P is 0, but 0 times NaN is NaN: V of
// floats and of blocks, whose scales may be NaN, is cleared there.
template <class Sync>
__device__ __forceinline__ void clear_tail(u32 v, int keys, Sync sync) {
  using Chunks = CodeChunks<kOfV>;
  constexpr bool kNoNan = StoredV::kType == kInt8 || StoredV::kType == kInt4;
  if (kBoxKeys == 0 || kNoNan || keys >= kBlockKeys) return;
  if constexpr (kHeads > 1) {
    constexpr int kPairs = RowsOfHeads<kOfV>::kBytes / 2;  // of this warp's head
    for (int at = threadIdx.x % 32; at < (kBlockKeys - keys) * kPairs; at += 32)
      store_shared_u16(v + (keys + at / kPairs) * Chunks::kPitch + 2 * (at % kPairs), 0);
    fence_async_proxy();
    return sync();
  }
  constexpr int kStride = Chunks::kBlocks ? int(BlockRows<kOfV>::kStride) : int(Chunks::kRowBytes);
  constexpr int kBytes = kStride * kBlockKeys;
  for (int panel = 0; panel < kLayout.v_bytes; panel += kBytes)
    for (int at = keys * kStride + 16 * int(threadIdx.x % kWarpGroupThreads); at < kBytes; at += 16 * kWarpGroupThreads)
      store_shared_zero16(v + panel + at);
  fence_async_proxy();
  sync();
}

template <class Sync>
__device__ __forceinline__ void add_hidden_non_finite(const DecodeParams& p, float (&O)[kRowTiles][kOutputs],
                                                      const TransposedRows& rows,
                                                      const HiddenScores<Transposed> (&hidden)[kRowTiles], int key_tile,
                                                      const CodedValues& values, const SavedWorkTiles& saved,
                                                      Sync sync) {
  const int first = key_tile * kBlockKeys;
  const int keys = min(int(kBlockKeys), saved.keys() - first);
  const int lane = threadIdx.x % 32, thread = kHeads > 1 ? lane : int(threadIdx.x % kWarpGroupThreads);
  sync();
#pragma unroll 1
  for (int key = 0; key < keys; ++key) {
    if (first + key >= rows.seen_by_all.begin && first + key < rows.seen_by_all.end) continue;
    if (__all_sync(0xffffffff, values.is_finite_key(key, lane))) continue;
    bool seen[2 * kRowTiles];
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) seen[i] = sees(p, rows.of[i / 2], hidden[i / 2], i % 2, key_tile, key);
#pragma unroll
    for (int j = 0; j < kOutputs; j += 2) {
      int at = key, pairs_before = pairs_before_values(values.v, values.scales);
      asm volatile("" : "+r"(at), "+r"(pairs_before));  // places of all columns would take registers
      const int column = output_column(j, pairs_before);
      if (column < 0) continue;
      const float addend = values.addend(at, column);
#pragma unroll
      for (int i = 0; i < 2 * kRowTiles; ++i)
        if (seen[i]) O[i / 2][j + i % 2] += addend;
    }
    sync();
    if (thread < 32) values.clear(key, lane);
    if (kBoxKeys > 0) fence_async_proxy();
    sync();
  }
}

// Codes as operands of wgmma in registers: numbers of K are rows of keys, numbers of V^T rows of columns. Where a key
// has several scales, or zero points, numbers are multiplied with these, relative to the power of 2 of the key's
// largest scale.
#pragma once
#include "decode/codes/queries.cuh"
#include "decode/codes/scales.cuh"
#include "sm90/ptx/descriptor.cuh"

enum : int {
  kEights = kTileRows / 8,
  kScores = kTileRows / 2,   // of a thread: two keys of all these rows
  kStrips = kValueDim / 64,  // of 64 columns of V
};

// Chunks of a key's codes: eight pairs of bytes. Those of blocks do not begin at multiples of 16 bytes, so that lanes
// load the words that ldmatrix would hand out.
template <int tensor>
struct KeyChunks {
  static constexpr Element kType = stored_type(tensor);
  using Chunks = CodeChunks<tensor>;
  enum : int {
    kColumns = 8 * Codes<kType>::kCodesPerHalf,
    kCount = columns_of(tensor) / kColumns,
    kOfBlock = max_of(kBlockColumns / kColumns, 1),
  };
  static_assert(BlockRows<tensor>::kPiece != 2);
  // Where a chunk begins in a row of blocks.
  static __device__ __forceinline__ constexpr int in_row(int chunk) {
    return chunk / kOfBlock * block_bytes(kType) + 2 + chunk % kOfBlock * 16;
  }
  // Loads two pairs of each of the thread's two keys, of a chunk and of the next one.
  static __device__ __forceinline__ void load(u32 rows, int chunk, u32 (&words)[4]) {
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16;
    if constexpr (Chunks::kIsBlocks) {
      const u32 row = rows + (first + thread_row()) * Chunks::kPitch + 2 * thread_column();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Rows begin at multiples of 4 bytes, and so do the codes of every other block.
        const int begin = in_row(chunk + i / 2);
        const u32 at = row + i % 2 * 8 * Chunks::kPitch + begin;
        words[i] = begin % 4 == 0 ? u32(load_shared(at)) : two_pairs(at, at + 2);
      }
    } else {
      const u32 row = rows + chunk_place<Chunks::kRowBytes>(first + lane % 16, 0) ^ lane / 16 * 16;
      load_shared_matrices((row ^ 16 * (chunk % Chunks::kPanelChunks)) +
                               chunk / Chunks::kPanelChunks * (kBlockKeys * Chunks::kRowBytes),
                           words);
    }
  }
  // Loads the thread's pair of a chunk, of two successive keys in each 8 of 32 keys from `key` on.
  static __device__ __forceinline__ void load_transposed(u32 rows, int key, int chunk, u32 (&words)[4]) {
    if constexpr (Chunks::kIsBlocks) {
      const u32 at = rows + (key + thread_column()) * Chunks::kPitch + in_row(chunk) + 2 * thread_row();
#pragma unroll
      for (int i = 0; i < 4; ++i)
        words[i] = two_pairs(at + 8 * i * Chunks::kPitch, at + (8 * i + 1) * Chunks::kPitch);
    } else {
      load_shared_matrices_transposed(Chunks::place(rows, key + int(threadIdx.x % 32), chunk), words);
    }
  }

 private:
  static __device__ __forceinline__ u32 two_pairs(u32 lower, u32 upper) {
    return __byte_perm(load_shared_u16(lower), load_shared_u16(upper), 0x5410);
  }
};

// What numbers of a tensor take besides their conversion.
template <int tensor>
struct NumbersOf {
  using CodesOf = Codes<stored_type(tensor)>;
  enum : int {
    kGroups = max_of(scale_count(tensor), 1),
    kZero = is_of_k(tensor) ? kZeroOfK : kZeroOfV,
    kScaled = scale_count(tensor) > 1,
    // By a number that is not the scale's.
    kShifted = scale_count(kZero) > 0 || (!is_of_k(tensor) && CodesOf::kBias > 0),
    kZeroPoints = scale_count(kZero) > 0,
    kPlain = !kScaled && !kShifted,  // x as Codes::numbers makes it
    kIntegers = CodesOf::kIntegers,
    kGroupColumns = columns_of(tensor) / kGroups,
  };
  // What x is to be multiplied with, unless it is plain.
  static constexpr float kFactor = kPlain ? 1 : kIntegers ? 0x1p10f : 2;
};

// Two f16 each: a scale, and what is added: the bias, or a zero point times the scale.
struct Affine {
  u32 scale, offset;
};

// -bias 2^-10, which makes code 2^-10 of an integer code plus its bias.
template <int tensor>
__device__ __forceinline__ u32 minus_bias() {
  constexpr float kMinusBias = NumbersOf<tensor>::CodesOf::kBias * -0x1p-10f;
  return Half::pack(kMinusBias, kMinusBias);
}

// x[j] of a word, two keys or a key of two columns.
template <int tensor>
__device__ __forceinline__ void convert_word(u32 word, u32 (&x)[Codes<stored_type(tensor)>::kCodesPerHalf],
                                             const Affine& with, u32 scale_of_upper) {
  using Of = NumbersOf<tensor>;
  using CodesOf = typename Of::CodesOf;
  CodesOf::numbers(word, x);
#pragma unroll
  for (int j = 0; j < CodesOf::kCodesPerHalf; ++j) {
    const bool upper = CodesOf::bits_below(j) > 0;
    if constexpr (!Of::kIntegers) {
      if (Of::kScaled) x[j] = Half::multiply(x[j], with.scale);
    } else if constexpr (Of::kShifted) {
      const u32 factor = upper ? 0x64006400 : 0x74007400;  // 2^10 or 2^14
      if constexpr (Of::kZeroPoints) {
        // The code is exact, and the number is rounded once.
        x[j] = Half::fma(x[j], factor, minus_bias<tensor>());
        x[j] = Of::kScaled ? Half::fma(x[j], with.scale, with.offset) : Half::add(x[j], with.offset);
      } else {
        x[j] = Half::fma(x[j], factor, with.offset);
        if (Of::kScaled) x[j] = Half::multiply(x[j], with.scale);
      }
    } else if constexpr (Of::kScaled) {
      x[j] = Half::fma(x[j], upper ? scale_of_upper : with.scale, with.offset);
    }
  }
}
// The scale of numbers in the upper half of a byte, which come times 16.
template <int tensor>
__device__ __forceinline__ u32 scale_of_upper(const Affine& with) {
  return Half::multiply(with.scale, 0x2c002c00);  // 1/16
}

// The power of 2 of a scale.
__device__ __forceinline__ float power_of(float scale) {
  return __int_as_float(__float_as_int(within_exponents_of_p(scale)) & 0x7f800000);
}

// Loads the scales of a key. Returns the power of 2 of the largest one that is finite.
template <int tensor>
__device__ __forceinline__ float load_scales(u32 scales, int key, float (&x)[NumbersOf<tensor>::kGroups]) {
  const ScalesOfKey<tensor> of_key(scales, key);
  float largest = 0;
#pragma unroll
  for (int group = 0; group < NumbersOf<tensor>::kGroups; ++group) {
    x[group] = of_key[group];
    const float scale = fabsf(x[group]);
    largest = fmaxf(largest, scale < infinity() ? scale : 0);
  }
  return power_of(largest);
}

// A key's scale in a group relative to `power`, as f16.
template <int tensor>
__device__ __forceinline__ float relative_scale(float scale, float power) {
  const float inverse = __int_as_float((254 << 23) - __float_as_int(power));
  constexpr bool kIntegers = NumbersOf<tensor>::kIntegers;
  return scale * inverse * (!kIntegers ? 0.5f : NumbersOf<tensor>::kShifted ? 1.0f : 0x1p14f);
}
// What a zero point adds to a code 2^-10 times a scale, which is 1 where numbers are not multiplied with scales.
__device__ __forceinline__ float offset_of(float zero_point, float scale) { return zero_point * scale * -0x1p-10f; }

// K of a thread's two keys.
class KeyNumbers {
 public:
  using Of = NumbersOf<kOfK>;
  // `key`: the first one; the other one is 8 keys on.
  __device__ __forceinline__ KeyNumbers(u32 scales, int key) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (Of::kScaled) {
        float of_key[Of::kGroups];
        factor[i] = load_scales<kOfK>(scales, key + 8 * i, of_key);
#pragma unroll
        for (int group = 0; group < Of::kGroups; ++group) {
          const float scale = relative_scale<kOfK>(of_key[group], factor[i]);
          affine[i][group].scale = Half::pack(scale, scale);
        }
      } else {
        factor[i] = scale_count(kOfK) == 1 ? load_scale<kOfK>(scales, key + 8 * i, 0) : 1;
      }
      if constexpr (Of::kZeroPoints) {
        const ScalesOfKey<kZeroOfK> zero_points(scales, key + 8 * i);
#pragma unroll
        for (int group = 0; group < Of::kGroups; ++group) {
          const float scale = Of::kScaled ? Half::low(affine[i][group].scale) : 1;
          const float offset = offset_of(zero_points[group], scale);
          affine[i][group].offset = Half::pack(offset, offset);
        }
      }
    }
  }
  __device__ __forceinline__ Affine get(int i, int group) const {
    Affine with = affine[i][group];
    if (Of::kScaled && !Of::kShifted && Of::kIntegers)
      with.offset = Half::multiply(with.scale, Of::CodesOf::minus_bias(0));
    return with;
  }

  float factor[2];
  Affine affine[2][Of::kGroups];
};

// The largest even divisor of a number up to a limit.
__device__ constexpr int even_divisor(int of, int limit) {
  return of % limit == 0 ? limit : even_divisor(of, limit - 2);
}

// Issues S = K Q^T of 16 keys a warp. `q`: descriptor of the rows of Q.
__device__ __forceinline__ void multiply_keys(float (&S)[kScores], u32 k, u32 q, const KeyNumbers& keys) {
  using Chunks = KeyChunks<kOfK>;
  using Of = NumbersOf<kOfK>;
  enum : int {
    kHalf = CodesOfK::kCodesPerHalf,
    kProducts = kHalf / 2,  // of a chunk
    kAtOnce = even_divisor(Chunks::kCount, 8 / kProducts),  // chunks whose numbers are in registers together
  };
#pragma unroll
  for (int first = 0; first < Chunks::kCount; first += kAtOnce) {
    u32 a[kAtOnce * kProducts][4];
#pragma unroll
    for (int i = 0; i < kAtOnce; i += 2) {
      u32 loaded[4];
      const int chunk = first + i;
      Chunks::load(k, chunk, loaded);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int group = (chunk + j) * Chunks::kColumns / Of::kGroupColumns;
        u32 x[2][kHalf];
#pragma unroll
        for (int key = 0; key < 2; ++key) {
          Affine with = {};
          u32 upper = 0;
          if (!Of::kPlain) with = keys.get(key, group);
          if (Of::kScaled && !Of::kShifted && bits_of(StoredK::kType) == 4) upper = scale_of_upper<kOfK>(with);
          convert_word<kOfK>(loaded[2 * j + key], x[key], with, upper);
        }
#pragma unroll
        for (int product = 0; product < kProducts; ++product) {
          u32* const to = a[(i + j) * kProducts + product];
          to[0] = x[0][2 * product];
          to[1] = x[1][2 * product];
          to[2] = x[0][2 * product + 1];
          to[3] = x[1][2 * product + 1];
        }
      }
    }
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < kAtOnce * kProducts; ++i) {
      const int product = first * kProducts + i;
      Wgmma<kTileRows, kF16>::multiply<kAlongK>(
          S, a[i], q + (product / 4 * kQPanelBytes + product % 4 * 32 >> 4), product != 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kAtOnce * kProducts; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(a[i][j])::"memory");
  }
#pragma unroll
  for (int i = 0; i < kScores; ++i) asm volatile("" : "+f"(S[i])::"memory");
}

// The scales of V of a tile, as f16 in the order of keys: [group][key], relative to the power of 2 of each key, then
// the offsets in the same order. A warp makes those of its 16 keys.
class ValueScales {
 public:
  using Of = NumbersOf<kOfV>;
  enum : int { kGroupBytes = 2 * kBlockKeys, kHasOffsets = Of::kZeroPoints };

  // Returns the powers of 2 of the thread's two keys.
  static __device__ __forceinline__ void make(u32 to, u32 scales, float (&powers)[2]) {
    if constexpr (!Of::kScaled && !Of::kZeroPoints) return;
    const int lane = threadIdx.x % 32, key = threadIdx.x % 128 / 32 * 16 + lane % 16;
    float of_key[Of::kGroups], power = 1;
    if constexpr (Of::kScaled) {
      power = load_scales<kOfV>(scales, key, of_key);
      powers[0] = __shfl_sync(0xffffffff, power, thread_row());
      powers[1] = __shfl_sync(0xffffffff, power, thread_row() + 8);
    }
    ScalesOfKey<kZeroOfV> zero_points;
    if constexpr (Of::kZeroPoints) zero_points = ScalesOfKey<kZeroOfV>(scales, key);
#pragma unroll
    for (int first = 0; first < Of::kGroups; first += 2) {
      const int second = min_of(first + 1, Of::kGroups - 1);
      if (second == first && lane >= 16) continue;
      const u32 at = to + (first + lane / 16) * kGroupBytes + 2 * key;
      float scale = 1;
      if constexpr (Of::kScaled) {
        const u32 relative = Half::pack(relative_scale<kOfV>(lane < 16 ? of_key[first] : of_key[second], power), 0);
        store_shared_u16(at, relative);
        scale = Half::low(relative);
      }
      if constexpr (Of::kZeroPoints) {
        const float zero_point = lane < 16 ? zero_points[first] : zero_points[second];
        store_shared_u16(at + Of::kGroups * kGroupBytes, Half::pack(offset_of(zero_point, scale), 0));
      }
    }
  }
  // Those of the thread's keys in 8 keys from `key` on.
  static __device__ __forceinline__ Affine get(u32 from, int group, int key) {
    Affine with = {};
    const u32 at = from + group * kGroupBytes + 2 * key + 2 * thread_column();
    if constexpr (Of::kScaled) with.scale = load_shared(at);
    if constexpr (Of::kZeroPoints)
      with.offset = load_shared(at + Of::kGroups * kGroupBytes);
    else if constexpr (Of::kShifted)
      with.offset = minus_bias<kOfV>();
    else if constexpr (Of::kIntegers)
      with.offset = Half::multiply(with.scale, Of::CodesOf::minus_bias(0));
    return with;
  }
};

// Where V has the 16 columns of a warp of each strip.
struct StripColumns {
  enum : int {
    kHalf = CodesOfV::kCodesPerHalf,
    kPairs = kHalf / 2,                       // of numbers of a chunk, each of which is a warp's part of a strip
    kShares = kPairs > kStrips ? int(kPairs) : 1,  // warps that share a chunk
    kChunks = max_of(kStrips / kPairs, 1),    // of a warp
  };
  static __device__ __forceinline__ int warp() { return threadIdx.x % 128 / 32; }
  static __device__ __forceinline__ int chunk(int i) { return 4 / kShares * i + warp() / kShares; }
  static __device__ __forceinline__ int pair(int strip) { return kShares > 1 ? warp() % kShares : strip % kPairs; }
  // The column of a thread's first or second row of a strip.
  static __device__ __forceinline__ int column(int strip, int i) {
    const int in_chunk = kShares > 1 ? 0 : strip / kPairs;
    return chunk(in_chunk) * 8 * kHalf + CodesOfV::column_of(thread_row(), 2 * pair(strip) + i);
  }
};

// Numbers of V as operands, of kValueKeys keys at a time: 32 registers or less, but with more than 256 columns.
enum : int { kValueKeys = kStrips <= 2 ? 64 : 32 };
using ValueOperands = u32[kStrips][kValueKeys / 16][4];

__device__ __forceinline__ void complete_values(ValueOperands& a, float (&O)[kStrips][kScores]) {
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
    for (int i = 0; i < kValueKeys / 4; ++i) asm volatile("" : "+r"(a[strip][i / 4][i % 4])::"memory");
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
#pragma unroll
    for (int i = 0; i < kScores; ++i) asm volatile("" : "+f"(O[strip][i])::"memory");
}

// O += P V of the tile at `v`, with P^T of 64 keys at descriptor `p`.
__device__ __forceinline__ void multiply_values(float (&O)[kStrips][kScores], u32 v, u32 p, u32 scales) {
  using Chunks = KeyChunks<kOfV>;
  using Of = NumbersOf<kOfV>;
  using Columns = StripColumns;
  enum : int { kHalf = Columns::kHalf };
  constexpr int kKeysAtOnce = kValueKeys;
  ValueOperands a;
#pragma unroll
  for (int first = 0; first < kBlockKeys; first += kKeysAtOnce) {
#pragma unroll
    for (int key = 0; key < kKeysAtOnce; key += 32)
#pragma unroll
      for (int i = 0; i < Columns::kChunks; ++i) {
        const int chunk = Columns::chunk(i);
        u32 loaded[4];
        Chunks::load_transposed(v, first + key, chunk, loaded);
        const int group = chunk * Chunks::kColumns / Of::kGroupColumns;
#pragma unroll
        for (int matrix = 0; matrix < 4; ++matrix) {
          Affine with = {};
          u32 upper = 0;
          if (!Of::kPlain) with = ValueScales::get(scales, group, first + key + 8 * matrix);
          if (Of::kScaled && !Of::kShifted && bits_of(StoredV::kType) == 4) upper = scale_of_upper<kOfV>(with);
          u32 x[kHalf];
          const u32 word = Columns::kShares > 1 ? loaded[matrix] >> 8 * (Columns::warp() % 2) : loaded[matrix];
          convert_word<kOfV>(word, x, with, upper);
#pragma unroll
          for (int pair = 0; pair < (Columns::kShares > 1 ? 1 : Columns::kPairs); ++pair) {
            u32* const to = a[i * (Columns::kShares > 1 ? 1 : Columns::kPairs) + pair][key / 16 + matrix / 2];
            to[matrix % 2 * 2] = x[2 * pair];
            to[matrix % 2 * 2 + 1] = x[2 * pair + 1];
          }
        }
      }
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kKeysAtOnce / 16; ++step)
#pragma unroll
      for (int strip = 0; strip < kStrips; ++strip)
        Wgmma<kTileRows, kF16>::multiply<kAcrossK>(O[strip], a[strip][step],
                                                          p + ((first / 16 + step) * 16 * kPanelRowBytes >> 4), 1);
    wgmma_commit();
    wgmma_wait<0>();
    complete_values(a, O);
  }
}

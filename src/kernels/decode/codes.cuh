// K and V of codes (kCodesK, kCodesV) on the warp path. Codes become f16 in registers: 16 bytes of a row that ldmatrix
// hands out are fragments of as many products as half a word has codes, if the columns of Q, and later those of O, are
// in the order that gives. What scales K multiplies scores, what scales V multiplies P, or O where all keys have the
// same. docs/kernels/decode.md derives this.
#pragma once
#include "decode/output.cuh"
#include "decode/scores.cuh"

enum : int {
  kQPanelBytes = kBlockRows * kPanelRowBytes,
  kThreadRows = kTileRows <= 8 ? 1 : 2,  // of a thread's two rows, those that may be some of the work tile
};

static_assert(!kCodesK || (ElementQ::kType == kF16 && kBlockKeys % 32 == 0));
static_assert(!kCodesV || (ElementV::kType == kF16 && kBlockKeys % 32 == 0 && kWarpGroups > 1));

// ---- Q ----

// Where a column of Q lies among those of 16 bytes of codes: a lane's word has the columns of two halves of it, and
// products take two columns of each lane at a time.
__device__ __forceinline__ int query_column(int column) {
  constexpr int kOfHalf = CodesOfK::kOfHalf, kColumns = 8 * kOfHalf;
  const int in_word = column % (2 * kOfHalf);
  return column / kColumns * kColumns + in_word % kOfHalf * 8 + column % kColumns / (2 * kOfHalf) * 2 +
         in_word / kOfHalf;
}

// Makes the Q of a block of rows, which is there as memory has it, one of f16 in that order, and bf16 as large as f16
// may be: rows are divided by powers of 2. By all threads, between barriers.
__device__ __forceinline__ void prepare_queries() {
  enum : int { kOfLane = (kHeadDim + 31) / 32, kWarps = kComputeThreads / 32 };
  const int lane = threadIdx.x % 32;
  const u32 q = u32(__cvta_generic_to_shared(raw)) + kLayout.q;
  const auto place = [&](int row, int column) {
    return q + column / 64 * kBlockRows * 128 + swizzled(row, column % 64 / 8) + column % 8 * 2;
  };
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < kBlockRows; row += kWarps) {
    u32 x[kOfLane];
    u32 largest = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      x[i] = lane + 32 * i < kHeadDim ? load_shared_u16(place(row, lane + 32 * i)) : 0;
      largest = max(largest, x[i] & 0x7fff);
    }
    float factor = 1;
    if (StoredQ::kType == kBF16) {
#pragma unroll
      for (int step = 1; step < 32; step *= 2) largest = max(largest, __shfl_xor_sync(0xffffffff, largest, step));
      const int exponent = min(max(int(largest >> 7), 15), 254);  // the largest becomes 2^14 and more
      factor = __int_as_float((exponent - 14) << 23);
      const float inverse = __int_as_float((268 - exponent) << 23);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i)
        x[i] = Half::pack(StoredQ::to_float(static_cast<unsigned short>(x[i])) * inverse, 0) & 0xffff;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (lane + 32 * i < kHeadDim) store_shared_u16(place(row, query_column(lane + 32 * i)), x[i]);
    if (lane == 0) reinterpret_cast<float*>(raw + kLayout.q_factors)[row] = factor;
  }
}

// ---- Scales ----

// The numbers of keys 2q and 2q + 1 of the `eight`-th eight keys of a tile.
template <int tensor>
__device__ __forceinline__ float2 scales_of_pair(u32 scales, int eight, int group) {
  const u32 at = scale_place<tensor>(scales, 8 * eight + int(thread_column()), group);
  float2 x;
  if (scale_count(tensor) == 1)
    load_shared_pair(at, x.x, x.y);
  else
    x = {__int_as_float(load_shared(at)), __int_as_float(load_shared(at + 4 * scale_count(tensor)))};
  return x;
}

__device__ __forceinline__ float descale_of(const CodeScales& t, const WorkTile& tile) {
  if (t.data == nullptr) return 1;
  const long long at = tile.batch * t.batch + tile.head * t.head;
  return t.type == kF32 ? static_cast<const float*>(t.data)[at]
                        : half_to_float(static_cast<const unsigned short*>(t.data)[at]);
}

// What the thread's two rows have in common over a work tile: by how much products of Q and codes are off, and O.
class WorkTileScales {
 public:
  __device__ __forceinline__ WorkTileScales(const DecodeParams& p, const WorkTile& tile, int warp_of_group) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) exponent_[i][0] = exponent_[i][1] = 1;
#pragma unroll
    for (int i = 0; i < 2 && kCodesK; ++i) {
      const int row = warp_of_group * kWarpRows + int(thread_row()) + 8 * i;
      q_[i] = tile.has_keys() ? reinterpret_cast<const float*>(raw + kLayout.q_factors)[row] : 1;
      if (kKScales == 0) q_[i] *= descale_of(p.k_scale, tile);
    }
  }

  // Products of columns that share scales, the `group`-th ones, become what they add to scores.
  __device__ __forceinline__ void add(float (&S)[kBlockKeys / 2], const float* products, int group, u32 scales) const {
#pragma unroll
    for (int eight = 0; eight < kBlockKeys / 8; ++eight) {
      const float2 k = kKScales > 0 ? scales_of_pair<kOfK>(scales, eight, group) : float2{1, 1};
#pragma unroll
      for (int i = 0; i < 2 * kThreadRows; ++i) {
        const float scale = kKScales > 0 ? q_[i / 2] * (i % 2 ? k.y : k.x) : q_[i / 2];
        const int at = 4 * eight + i;
        S[at] = group == 0 ? products[at] * scale : __fmaf_rn(products[at], scale, S[at]);
      }
    }
  }

  // P with the scales of the `group`-th columns of V, which it is multiplied with, relative to a power of 2 of each row
  // of O there, lest f16 have no numbers for them.
  __device__ __forceinline__ void weigh(u32 (&weighed)[kBlockKeys / 4], float (&O)[kValueDim / 2],
                                        const u32 (&P)[kBlockKeys / 4], int group, u32 scales) {
    const int (&exponent)[2] = exponent_[group];
    const float unit[2] = {__int_as_float((254 - exponent[0]) << 23), __int_as_float((254 - exponent[1]) << 23)};
    u32 large = 0;  // in the highest bit of a half: that a product is 2^14 or more, or none
#pragma unroll
    for (int eight = 0; eight < kBlockKeys / 8; ++eight) {
      const float2 v = scales_of_pair<kOfV>(scales, eight, group);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        u32& x = weighed[2 * eight + i];
        x = P[2 * eight + i];  // of a row that is none of the work tile
        if (i >= kThreadRows) continue;
        x = Half::multiply(x, Half::pack(v.x * unit[i], v.y * unit[i]));
        large |= (x & 0x7fff7fff) + 0x0c000c00;
      }
    }
    if (__any_sync(0xffffffff, (large & 0x80008000) != 0)) weigh_anew(weighed, O, P, group, scales);
  }

  // O in numbers of V. A row without keys stays 0.
  __device__ __forceinline__ void finish(const DecodeParams& p, const WorkTile& tile, float (&O)[kValueDim / 2],
                                         const Rows& rows) const {
    const float of_head = kVScales > 0 ? 1 : descale_of(p.v_scale, tile);
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) {
      const float factor = kVScales > 0 ? __int_as_float(exponent_[i / kOfGroup][i / 2 % 2] << 23) : of_head;
      if (rows.sum[i / 2 % 2] != 0) O[i] *= factor;
    }
  }

 private:
  enum : int { kGroups = max_of(kVScales, 1), kOfGroup = kValueDim / 2 / kGroups };

  // The same by exact products, whose largest ones say what the powers of 2 are from now on.
  __device__ __forceinline__ void weigh_anew(u32 (&weighed)[kBlockKeys / 4], float (&O)[kValueDim / 2],
                                             const u32 (&P)[kBlockKeys / 4], int group, u32 scales) {
    float x[kBlockKeys / 2];
    float largest[2] = {0, 0};
#pragma unroll
    for (int eight = 0; eight < kBlockKeys / 8; ++eight) {
      const float2 v = scales_of_pair<kOfV>(scales, eight, group);
#pragma unroll
      for (int i = 0; i < kThreadRows; ++i) {
        float* const pair = x + 4 * eight + 2 * i;
        pair[0] = Half::low(P[2 * eight + i]) * v.x;
        pair[1] = Half::high(P[2 * eight + i]) * v.y;
        largest[i] = fmaxf(largest[i], fmaxf(fabsf(pair[0]), fabsf(pair[1])));
      }
    }
    int (&exponent)[2] = exponent_[group];
    float unit[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int of_tile = min(int(__float_as_uint(quad_max(largest[i])) >> 23), 253);
      const int next = max(exponent[i], of_tile);
      const float factor = __int_as_float(max(127 + exponent[i] - next, 0) << 23);
#pragma unroll
      for (int j = 0; j < kOfGroup; ++j)
        if (j / 2 % 2 == i) O[group * kOfGroup + j] *= factor;
      exponent[i] = next;
      unit[i] = __int_as_float((254 - next) << 23);
    }
#pragma unroll
    for (int i = 0; i < kBlockKeys / 4; ++i)
      weighed[i] = i % 2 < kThreadRows ? Half::pack(x[2 * i] * unit[i % 2], x[2 * i + 1] * unit[i % 2]) : P[i];
  }

  float q_[2];
  int exponent_[kGroups][2];  // of these powers of 2, as f32 has them
};

// ---- Products ----

// Numbers of codes less the zero points of their keys, of f16 both.
template <int count>
__device__ __forceinline__ void subtract(u32 (&x)[count], float zero_point0, float zero_point1) {
  const u32 less = Half::pack(-zero_point0, -zero_point1);
#pragma unroll
  for (int i = 0; i < count; ++i) x[i] = Half::add(x[i], less);
}

// S = Q K^T of the warp's rows, whose Q lies at `q`, and the codes at `k`.
template <class CodesOfK>
__device__ __forceinline__ void multiply_codes(float (&S)[kBlockKeys / 2], u32 q, u32 k, u32 scales,
                                               const WorkTileScales& of_work_tile) {
  constexpr int kOfHalf = CodesOfK::kOfHalf, kColumns = 8 * kOfHalf, kSteps = kOfHalf / 2;
  constexpr int kGroups = max_of(kKScales, 1), kOfPanel = kKRowBytes / 16;
  const u32 lane = threadIdx.x % 32;
  float of_group[kGroups > 1 ? kBlockKeys / 2 : 1];
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    float* const T = kGroups > 1 && group > 0 ? of_group : S;
#pragma unroll
    for (int i = 0; i < kBlockKeys / 2; ++i) T[i] = 0;
#pragma unroll
    for (int chunk = group * (kHeadDim / kColumns / kGroups); chunk < (group + 1) * (kHeadDim / kColumns / kGroups);
         ++chunk) {
      u32 a[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int column = chunk * kColumns + 16 * step;
        load_shared_matrices(q + column / 64 * kQPanelBytes + swizzled(lane % 16, column % 64 / 8 + lane / 16),
                             a[step]);
      }
#pragma unroll
      for (int keys = 0; keys < kBlockKeys; keys += 32) {
        u32 words[4];
        load_shared_matrices(k + chunk / kOfPanel * (kBlockKeys * kKRowBytes) +
                                 chunk_place<kKRowBytes>(keys + lane, chunk % kOfPanel),
                             words);
#pragma unroll
        for (int eight = 0; eight < 4; ++eight) {
          u32 b[kOfHalf];
          CodesOfK::numbers(words[eight], b);
          if constexpr (kKZeroPoint) {
            const int key = keys + 8 * eight + int(thread_row());
            const float zero_point = __int_as_float(load_shared(scale_place<kZeroOfK>(scales, key, group)));
            subtract(b, zero_point, zero_point);
          }
#pragma unroll
          for (int step = 0; step < kSteps; ++step)
            multiply_16_8_16<kF16>(T + keys / 2 + 4 * eight, a[step], b[2 * step], b[2 * step + 1]);
        }
      }
    }
    of_work_tile.add(S, T, group, scales);
  }
}

// O += P V of the codes at `v`, of columns in the order that o_column (decode/output.cuh) says.
template <class CodesOfV>
__device__ __forceinline__ void multiply_value_codes(float (&O)[kValueDim / 2], const u32 (&P)[kBlockKeys / 4], u32 v,
                                                     u32 scales, WorkTileScales& of_work_tile) {
  constexpr int kOfHalf = CodesOfV::kOfHalf, kChunks = kValueDim / (8 * kOfHalf);
  constexpr int kGroups = max_of(kVScales, 1), kOfPanel = kVRowBytes / 16;
  const u32 lane = threadIdx.x % 32;
#pragma unroll
  for (int group = 0; group < kGroups; ++group) {
    u32 weighed[kBlockKeys / 4];
    if constexpr (kVScales > 0) of_work_tile.weigh(weighed, O, P, group, scales);
    const u32* const a = kVScales > 0 ? weighed : P;
#pragma unroll
    for (int chunk = group * (kChunks / kGroups); chunk < (group + 1) * (kChunks / kGroups); ++chunk)
#pragma unroll
      for (int keys = 0; keys < kBlockKeys; keys += 32) {
        u32 words[4];
        load_shared_matrices_transposed(v + chunk / kOfPanel * (kBlockKeys * kVRowBytes) +
                                            chunk_place<kVRowBytes>(keys + lane, chunk % kOfPanel),
                                        words);
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
          u32 b[2][kOfHalf];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            CodesOfV::numbers(words[half + i], b[i]);
            if constexpr (kVZeroPoint) {
              const float2 zero_points = scales_of_pair<kZeroOfV>(scales, keys / 8 + half + i, group);
              subtract(b[i], zero_points.x, zero_points.y);
            }
          }
#pragma unroll
          for (int j = 0; j < kOfHalf; ++j)
            multiply_16_8_16<kF16>(O + 4 * (chunk * kOfHalf + j), a + keys / 4 + 2 * half, b[0][j], b[1][j]);
        }
      }
  }
}

// ---- NaN and infinity at hidden keys ----

// As hides_non_finite and add_non_finite (decode/scores.cuh), of codes and of what scales them.
struct CodedValues {
  u32 v, scales;

  // The word of codes that a column of a key has.
  static __device__ __forceinline__ u32 word_place(int key, int column) {
    constexpr int kColumns = 8 * CodesOfV::kOfHalf, kOfPanel = kVRowBytes / 16;
    const int chunk = column / kColumns;
    return chunk / kOfPanel * (kBlockKeys * kVRowBytes) + chunk_place<kVRowBytes>(key, chunk % kOfPanel) +
           column % kColumns / (2 * CodesOfV::kOfHalf) * 4;
  }
  // The `i`-th of the scales and zero points of V.
  enum : int { kNumbers = kVScales * (1 + kVZeroPoint) };
  __device__ __forceinline__ u32 scale_at(int i, int key) const {
    return i < kVScales ? scale_place<kOfV>(scales, key, i) : scale_place<kZeroOfV>(scales, key, i - kVScales);
  }
  static __device__ __forceinline__ bool is_finite(int x) { return (x & 0x7f800000) != 0x7f800000; }

  __device__ __forceinline__ bool is_finite_key(int key, int lane) const {
    bool finite = true;
    for (int i = lane; i < kNumbers; i += 32) finite = finite && is_finite(load_shared(scale_at(i, key)));
    for (int column = lane * 2 * CodesOfV::kOfHalf; column < kValueDim; column += 64 * CodesOfV::kOfHalf)
      finite = finite && CodesOfV::is_finite(load_shared(v + word_place(key, column)));
    return finite;
  }

  // What a column of a key adds to O: 0, or what is not finite.
  __device__ __forceinline__ float addend(int key, int column) const {
    constexpr int kOfHalf = CodesOfV::kOfHalf;
    u32 x[kOfHalf];
    CodesOfV::numbers(load_shared(v + word_place(key, column)), x);
    const int in_word = column % (2 * kOfHalf);
    u32 pair = 0;
#pragma unroll
    for (int j = 0; j < kOfHalf; ++j)
      if (in_word % kOfHalf == j) pair = x[j];
    float number = in_word >= kOfHalf ? Half::high(pair) : Half::low(pair);
    if (kVScales > 0) {
      const int group = column / (kValueDim / max_of(kVScales, 1));
      if (kVZeroPoint) number -= __int_as_float(load_shared(scale_at(kVScales + group, key)));
      number *= __int_as_float(load_shared(scale_at(group, key)));
    }
    return is_finite(__float_as_int(number)) ? 0 : number;
  }

  __device__ __forceinline__ void clear(int key, int lane) const {
    for (int i = lane; i < kNumbers; i += 32)
      if (!is_finite(load_shared(scale_at(i, key)))) store_shared(scale_at(i, key), 0);
    for (int column = lane * 2 * CodesOfV::kOfHalf; column < kValueDim; column += 64 * CodesOfV::kOfHalf) {
      const u32 at = v + word_place(key, column);
      store_shared(at, int(CodesOfV::finite(load_shared(at))));
    }
  }
};

template <class Sync>
__device__ __forceinline__ void add_hidden_non_finite_codes(const DecodeParams& p, float (&O)[kValueDim / 2],
                                                            const TileMask& mask, const HiddenScores& hidden,
                                                            int key_tile, const CodedValues& values,
                                                            const SavedWorkTiles& saved, Sync sync) {
  const int first = key_tile * kBlockKeys;
  const int keys = min(int(kBlockKeys), saved.keys() - first);
  const int lane = threadIdx.x % 32, thread = threadIdx.x % kWarpGroupThreads;
  sync();
#pragma unroll 1
  for (int key = 0; key < keys; ++key) {
    if (first + key >= mask.seen_by_all.begin && first + key < mask.seen_by_all.end) continue;
    if (__all_sync(0xffffffff, values.is_finite_key(key, lane))) continue;
    const bool seen[2] = {sees(p, mask.rows, hidden, 0, key_tile, key), sees(p, mask.rows, hidden, 1, key_tile, key)};
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i)
      if (seen[i / 2 % 2]) O[i] += values.addend(key, o_column(i));
    sync();
    if (thread < 32) values.clear(key, lane);
    sync();
  }
}

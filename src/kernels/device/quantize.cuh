// Quantizes rows, bit for bit as the CPU does (docs/contract.md, base/quantize.cpp), by a warp for each head of a row;
// and dequantizes them.
#pragma once
#include "device/append.cuh"
#include "device/math.cuh"
#include "host_device/heads.h"

enum : int { kLaneElements = kMaxHadamardColumns / 32 };

// Multiplies n columns by H by a warp, whose lanes have every 32nd column in x. Each sum is rounded as on the CPU.
__device__ __forceinline__ void hadamard_lanes(float (&x)[kLaneElements], int n) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    if (step >= n) break;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (32 * i >= n) break;
      const float other = __shfl_xor_sync(0xffffffff, x[i], step);
      x[i] = lane & step ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
    }
  }
#pragma unroll
  for (int step = 1; step < kLaneElements; step *= 2) {
    if (32 * step >= n) break;
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      if (i & step) continue;
      const float a = x[i], b = x[i | step];
      x[i] = __fadd_rn(a, b);
      x[i | step] = __fsub_rn(a, b);
    }
  }
}

// Multiplies a row in shared memory by H D / sqrt(n). Each lane has written every 32nd column.
__device__ __forceinline__ void hadamard_row(float* row, int dim, int lane) {
  const int columns = hadamard_columns(dim);
  const float scale = hadamard_scale(columns);
  __syncwarp();
  for (int first = 0; first < dim; first += columns) {
    float x[kLaneElements] = {};
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const int column = lane + 32 * i;
      if (column >= columns) break;
      x[i] = hadamard_flips(column) ? -row[first + column] : row[first + column];
    }
    hadamard_lanes(x, columns);
#pragma unroll
    for (int i = 0; i < kLaneElements; ++i) {
      const int column = lane + 32 * i;
      if (column >= columns) break;
      row[first + column] = __fmul_rn(x[i], scale);
    }
  }
  __syncwarp();
}

// The numbers of a row of `rows`: rotated to its position and, if requested, by H, minus the means of columns.
template <Element kType>
class AppendedNumbers {
 public:
  using T = typename InMemory<kType>::Type;

  __device__ __forceinline__ AppendedNumbers(const AppendParams& p, const AppendRows& rows, const AppendToken& token,
                                             long long position, int head)
      : p_(p), pairs_(rows.pairs), position_(position),
        from_(static_cast<const T*>(rows.from) + token.b * rows.from_batch + token.row * rows.from_row +
              head * rows.from_head),
        mean_(rows.mean == nullptr ? nullptr : rows.mean + token.b * rows.mean_batch + head * rows.mean_head) {}

  // Multiplies all columns by H, to shared memory of this warp. `rounded`: they are rounded before, as queries are.
  __device__ __forceinline__ void rotate(float* row, int dim, bool rounded, int lane) {
    __syncwarp();  // no lane reads the previous row any more
    for (int i = lane; i < dim; i += 32) row[i] = rounded ? to_f32<kType>(from_f32<kType>(placed(i))) : placed(i);
    hadamard_row(row, dim, lane);
    rotated_ = row;
  }

  __device__ __forceinline__ float operator[](int column) const {
    const float x = rotated_ == nullptr ? placed(column) : rotated_[column];
    return mean_ == nullptr ? x : __fsub_rn(x, mean_[column]);
  }

 private:
  // Products and sums are rounded separately, as on the CPU.
  __device__ __forceinline__ float placed(int column) const {
    if (column >= 2 * pairs_) return to_f32<kType>(from_[column]);
    const int pair = p_.interleaved ? column / 2 : column % pairs_;
    const int low = p_.interleaved ? 2 * pair : pair, high = p_.interleaved ? low + 1 : pair + pairs_;
    const float u = to_f32<kType>(from_[low]), v = to_f32<kType>(from_[high]);
    const float cos = angle(p_.cos, position_ * p_.cos_row + pair), sin = angle(p_.sin, position_ * p_.sin_row + pair);
    return column == low ? __fsub_rn(__fmul_rn(u, cos), __fmul_rn(v, sin))
                         : __fadd_rn(__fmul_rn(u, sin), __fmul_rn(v, cos));
  }

  __device__ __forceinline__ float angle(const void* angles, long long at) const {
    return p_.f32_angles ? static_cast<const float*>(angles)[at] : to_f32<kType>(static_cast<const T*>(angles)[at]);
  }

  const AppendParams& p_;
  int pairs_;
  long long position_;
  const T* from_;
  const float* mean_;
  const float* rotated_ = nullptr;
};

__device__ __forceinline__ bool is_nan(float x) { return x != x; }
__device__ __forceinline__ float nan_f32() { return __int_as_float(0x7fc00000); }

// The maximum magnitude of finite numbers, their minimum and their maximum.
struct Extremes {
  float magnitude = 0, min = 3.402823466e+38f, max = -3.402823466e+38f;
  bool nan = false;

  __device__ __forceinline__ void add(float x) {
    nan = nan || is_nan(x);
    if (!(fabsf(x) < infinity())) return;
    magnitude = fmaxf(magnitude, fabsf(x));
    min = fminf(min, x);
    max = fmaxf(max, x);
  }
  // Stores them as four floats.
  __device__ __forceinline__ void store(float* to) const {
    *reinterpret_cast<float4*>(to) = {magnitude, min, max, nan ? 1.0f : 0.0f};
  }
  __device__ __forceinline__ void add_stored(const float* from) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    nan = nan || x.w != 0;
    magnitude = fmaxf(magnitude, x.x);
    min = fminf(min, x.y);
    max = fmaxf(max, x.z);
  }
  // Reduces over all lanes of a warp.
  __device__ __forceinline__ void join_lanes() {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      magnitude = fmaxf(magnitude, __shfl_xor_sync(0xffffffff, magnitude, step));
      min = fminf(min, __shfl_xor_sync(0xffffffff, min, step));
      max = fmaxf(max, __shfl_xor_sync(0xffffffff, max, step));
    }
    nan = __any_sync(0xffffffff, nan);
  }
};

// The properties of a format, from the table of base/formats.h.
struct CodeFormat {
  float lowest, largest;
  bool integers, four_bits;
};

__device__ __forceinline__ CodeFormat code_format(int format) {
  if (format == kE4M3) return {-448, 448, false, false};
  if (format == kE5M2) return {-57344, 57344, false, false};
  if (format == kInt8) return {-128, 127, true, false};
  return {-8, 7, true, true};
}

// Converts f32 to a code of a float of 8 bits; `largest` is the code of the maximum.
template <int fraction, int largest>
__device__ __forceinline__ u32 float8_code(float x, u32 sign) {
  constexpr int kBias = (1 << (6 - fraction)) - 1;
  if (is_nan(x)) return sign | 0x7f;
  const float magnitude = fabsf(x);
  const int exponent = min(max(int(__float_as_uint(magnitude) >> 23) - 127, 1 - kBias), 127);
  const float units = rintf(__fmul_rn(magnitude, __uint_as_float(u32(127 + fraction - exponent) << 23)));
  const int base = (exponent + kBias - 1) << fraction;
  if (units >= 256 || base > largest) return sign | largest;
  return sign | min(u32(largest), u32(base) + u32(units));
}

__device__ __forceinline__ u32 code_of(int format, float x, u32 sign) {
  if (format == kE4M3) return float8_code<3, 0x7e>(x, sign);
  if (format == kE5M2) return float8_code<2, 0x7b>(x, sign);
  const CodeFormat of = code_format(format);
  return is_nan(x) ? 0 : u32(int(fminf(fmaxf(rintf(x), of.lowest), of.largest))) & (of.four_bits ? 15 : 255);
}

__device__ __forceinline__ unsigned short scale_bits_f16(float x) {
  return is_nan(x) ? 0x7e00 : from_f32<kF16>(fminf(fmaxf(x, -65504.0f), 65504.0f));
}
// Rounds a number to the dtype of a tensor of scales.
__device__ __forceinline__ float rounded_scale(const AppendScales& t, float x) {
  return t.f32 ? x : half_to_float(scale_bits_f16(x));
}

// The scale and the zero point of a group of columns.
struct GroupScale {
  float scale, zero_point;
};

__device__ __forceinline__ GroupScale fitted_scale(const AppendCodes& c, const Extremes& e) {
  const CodeFormat format = code_format(c.format);
  if (e.nan && format.integers) return {nan_f32(), 0};
  if (e.min > e.max) return {0, 0};
  if (c.zero_point.data == nullptr) return {rounded_scale(c.scale, __fdiv_rn(e.magnitude, format.largest)), 0};
  const float steps = format.largest - format.lowest;
  const float range = __fsub_rn(__fdiv_rn(e.max, steps), __fdiv_rn(e.min, steps));
  const float scale = rounded_scale(c.scale, range == 0 ? fabsf(e.max) : range);
  if (scale == 0) return {0, 0};
  return {scale, rounded_scale(c.zero_point, __fsub_rn(format.lowest, __fdiv_rn(e.min, scale)))};
}

__device__ __forceinline__ float read_scale(const AppendScales& t, long long at, float none) {
  if (t.data == nullptr) return none;
  return t.f32 ? static_cast<const float*>(t.data)[at]
               : half_to_float(static_cast<const unsigned short*>(t.data)[at]);
}
__device__ __forceinline__ void write_scale(const AppendScales& t, long long at, float x) {
  if (t.data == nullptr) return;
  if (t.f32)
    static_cast<float*>(t.data)[at] = x;
  else
    static_cast<unsigned short*>(t.data)[at] = scale_bits_f16(x);
}

// The index of the scale of a group of columns: of a row, or of a sequence.
__device__ __forceinline__ long long scale_place(const AppendCodes& c, const AppendScales& t, int sequence,
                                                 long long entry, long long row, int head, int group) {
  return (c.of_rows ? entry * t.batch + row * t.row : sequence * t.batch) + head * t.head + group * t.group;
}
__device__ __forceinline__ GroupScale read_scales(const AppendCodes& c, int sequence, long long entry, long long row,
                                                  int head, int group) {
  return {read_scale(c.scale, scale_place(c, c.scale, sequence, entry, row, head, group), 1),
          read_scale(c.zero_point, scale_place(c, c.zero_point, sequence, entry, row, head, group), 0)};
}

// ---- ggml's blocks of 32 numbers (base/formats.h), of which a lane has one ----

struct BlockFormat {
  int bits;
  bool has_low;  // code 0 is the minimum of the block
  __device__ __forceinline__ int header() const { return has_low ? 4 : 2; }
  __device__ __forceinline__ int codes() const { return header() + (bits == 5 ? 4 : 0); }
  __device__ __forceinline__ int bytes() const { return codes() + (bits == 8 ? 32 : 16); }
};
__device__ __forceinline__ bool is_block(int format) { return format >= kQ8_0; }
__device__ __forceinline__ BlockFormat block_format(int format) {
  return {format == kQ8_0 ? 8 : format == kQ5_0 || format == kQ5_1 ? 5 : 4, format == kQ4_1 || format == kQ5_1};
}

// The numbers of iq4_nl.
__device__ constexpr signed char kNumbersOfIQ4NL[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                                        1,    13,   25,  38,  53,  69,  89,  113};

// Packs a block of the lanes' numbers, by a warp.
__device__ __forceinline__ void pack_block(int format, float x, unsigned char* block, int lane) {
  const BlockFormat of = block_format(format);
  Extremes e;
  e.add(x);
  e.join_lanes();
  // The first of equal numbers counts, since zeros have signs.
  const auto first = [&](bool is) {
    const u32 lanes = __ballot_sync(0xffffffff, is);
    const float found = __shfl_sync(0xffffffff, x, max(31 - __clz(lanes & -lanes), 0));
    return lanes == 0 ? 0.0f : found;
  };
  const float largest = first(e.magnitude > 0 && fabsf(x) == e.magnitude);
  const float low = first(x == e.min), high = first(x == e.max);
  const int half = of.bits == 8 ? 0 : 1 << (of.bits - 1);
  const float max_code = of.bits == 8 ? 127 : float((1 << of.bits) - 1);
  float scale = format == kIQ4NL   ? __fdiv_rn(largest, -127)
                : of.has_low       ? __fdiv_rn(__fsub_rn(high, low), max_code)
                : format == kQ8_0  ? __fdiv_rn(e.magnitude, 127)
                                   : __fdiv_rn(largest, float(-half));
  scale = e.nan ? nan_f32() : fminf(fmaxf(scale, -65504.0f), 65504.0f);
  const float inverse = __fdiv_rn(1, scale);
  const bool any = fabsf(inverse) < infinity();  // else all codes are the code of 0
  int code;
  if (format == kIQ4NL) {
    const float moved = any ? __fmul_rn(x, inverse) : 0;
    code = 0;
    for (int i = 1; i < 16; ++i)
      if (fabsf(__fsub_rn(moved, kNumbersOfIQ4NL[i])) < fabsf(__fsub_rn(moved, kNumbersOfIQ4NL[code]))) code = i;
    code = moved < -127 ? 0 : moved > 113 ? 15 : code;
  } else if (of.has_low) {
    const float moved = any ? rintf(__fmul_rn(__fsub_rn(x, low), inverse)) : 0;
    code = int(fminf(fmaxf(moved, 0), max_code));
  } else {
    const float moved = any ? rintf(__fmul_rn(x, inverse)) : 0;
    const float from = half == 0 ? -max_code : float(-half), to = half == 0 ? max_code : float(half - 1);
    code = half + int(fminf(fmaxf(moved, from), to));
  }
  const u32 header = scale_bits_f16(scale) | u32(scale_bits_f16(low)) << 16;
  if (lane < of.header()) block[lane] = static_cast<unsigned char>(header >> 8 * lane);
  const u32 highest = __ballot_sync(0xffffffff, code >> 4 & 1);
  if (of.bits == 5 && lane < 4) block[of.header() + lane] = static_cast<unsigned char>(highest >> 8 * lane);
  const int upper = __shfl_down_sync(0xffffffff, code, 16);
  if (of.bits == 8)
    block[of.codes() + lane] = static_cast<unsigned char>(code);
  else if (lane < 16)
    block[of.codes() + lane] = static_cast<unsigned char>((code & 15) | (upper & 15) << 4);
}

// The i-th number of a block.
__device__ __forceinline__ float block_number(int format, const unsigned char* block, int i) {
  const BlockFormat of = block_format(format);
  const auto half_at = [&](int at) {
    return half_to_float(static_cast<unsigned short>(block[at] | block[at + 1] << 8));
  };
  float code;
  if (of.bits == 8) {
    code = float(static_cast<signed char>(block[of.codes() + i]));
  } else {
    const int lower = block[of.codes() + i % 16] >> (i / 16 * 4) & 15;
    const int raw = lower | (of.bits == 5 ? (block[of.header() + i / 8] >> (i % 8) & 1) << 4 : 0);
    code = format == kIQ4NL ? float(kNumbersOfIQ4NL[raw]) : float(raw - (of.has_low ? 0 : 1 << (of.bits - 1)));
  }
  return __fadd_rn(__fmul_rn(half_at(0), code), of.has_low ? half_at(2) : 0);
}

// Bytes of the codes of a number of elements.
__device__ __forceinline__ long long codes_before(int format, long long numbers) {
  if (is_block(format)) return numbers / 32 * block_format(format).bytes();
  return format == kInt4 ? numbers / 2 : numbers;
}

// The i-th number of a format without blocks, before its scale.
__device__ __forceinline__ float code_number(int format, const unsigned char* codes, long long i) {
  if (format == kE4M3) {  // not every GPU has an instruction for it
    const u32 magnitude = codes[i] & 0x7f, sign = u32(codes[i] & 0x80) << 24;
    const u32 number = __float_as_uint(__fmul_rn(__uint_as_float(magnitude << 20), 0x1p120f));
    return magnitude == 0x7f ? nan_f32() : __uint_as_float(sign | number);
  }
  if (format == kE5M2) return half_to_float(static_cast<unsigned short>(codes[i] << 8));
  if (format == kInt8) return float(static_cast<signed char>(codes[i]));
  const int code = codes[i / 2] >> (i % 2 * 4) & 15;
  return float((code ^ 8) - 8);
}

// Quantizes a head of a row to its place, or only multiplies it by H, by a warp. `row`: shared memory for a row that is
// multiplied by H.
template <Element kType>
__device__ __forceinline__ void quantize_head(const AppendParams& p, const AppendRows& rows, const AppendToken& token,
                                              const AppendPlace& to, int head, int lane, float* row) {
  const AppendCodes& c = rows.codes;
  AppendedNumbers<kType> numbers(p, rows, token, to.position, head);
  if (rows.hadamard) numbers.rotate(row, rows.dim, c.format == 0, lane);
  const long long first = to.entry * rows.to_batch + to.row * rows.to_row + head * rows.to_head;
  if (c.format == 0) {
    auto* const y = static_cast<typename InMemory<kType>::Type*>(rows.to) + first;
    for (int i = lane; i < rows.dim; i += 32) y[i] = from_f32<kType>(numbers[i]);
    return;
  }
  unsigned char* const codes = static_cast<unsigned char*>(rows.to) + codes_before(c.format, first);
  if (is_block(c.format)) {
    for (int column = 0; column < rows.dim; column += 32)
      pack_block(c.format, numbers[column + lane], codes + codes_before(c.format, column), lane);
    return;
  }
  const bool four_bits = code_format(c.format).four_bits;
  const int columns = rows.dim / max_of(c.groups, 1);
#pragma unroll 1
  for (int group = 0; group < max_of(c.groups, 1); ++group) {
    const int begin = group * columns;
    GroupScale by = {1, 0};
    if (c.groups > 0 && c.fits) {
      Extremes extremes;
      for (int i = lane; i < columns; i += 32) extremes.add(numbers[begin + i]);
      extremes.join_lanes();
      by = fitted_scale(c, extremes);
      if (lane == 0) {
        write_scale(c.scale, scale_place(c, c.scale, token.b, to.entry, to.row, head, group), by.scale);
        write_scale(c.zero_point, scale_place(c, c.zero_point, token.b, to.entry, to.row, head, group), by.zero_point);
      }
    } else if (c.groups > 0) {
      by = read_scales(c, token.b, to.entry, to.row, head, group);
    }
    const auto code = [&](int i) {
      const float x = numbers[begin + i];
      float scaled = x;
      if (c.groups > 0) scaled = __fadd_rn(by.scale == 0 ? 0 : __fdiv_rn(x, by.scale), by.zero_point);
      // On the CPU a NaN has the sign of the operand that it comes from.
      const float signed_x = !is_nan(scaled) ? scaled : is_nan(x) ? x : is_nan(by.scale) ? by.scale : -1.0f;
      return code_of(c.format, scaled, __float_as_uint(signed_x) >> 24 & 0x80);
    };
    if (four_bits) {
      for (int i = 2 * lane; i < columns; i += 64)
        codes[(begin + i) / 2] = static_cast<unsigned char>(code(i) | code(i + 1) << 4);
    } else {
      for (int i = lane; i < columns; i += 32) codes[begin + i] = static_cast<unsigned char>(code(i));
    }
  }
}

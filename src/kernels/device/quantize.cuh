// Codes of the rows that append takes, bit for bit those of quantize() (docs/contract.md, base/quantize.cpp): by a warp
// for each head of a row.
#pragma once
#include "device/append.cuh"
#include "device/math.cuh"

// The numbers of a row of `rows`, rotated where its columns are.
template <Element kType>
class AppendedNumbers {
 public:
  using T = typename InMemory<kType>::Type;

  __device__ __forceinline__ AppendedNumbers(const AppendParams& p, const AppendRows& rows, const AppendToken& token,
                                             long long position, int head)
      : p_(p), pairs_(rows.pairs), position_(position),
        from_(static_cast<const T*>(rows.from) + token.b * rows.from_batch + token.row * rows.from_row +
              head * rows.from_head) {}

  // Products and sums are rounded one by one, as the CPU rounds them.
  __device__ __forceinline__ float operator[](int column) const {
    if (column >= 2 * pairs_) return to_f32<kType>(from_[column]);
    const int pair = p_.interleaved ? column / 2 : column % pairs_;
    const int low = p_.interleaved ? 2 * pair : pair, high = p_.interleaved ? low + 1 : pair + pairs_;
    const float u = to_f32<kType>(from_[low]), v = to_f32<kType>(from_[high]);
    const float cos = angle(p_.cos, position_ * p_.cos_row + pair), sin = angle(p_.sin, position_ * p_.sin_row + pair);
    return column == low ? __fsub_rn(__fmul_rn(u, cos), __fmul_rn(v, sin))
                         : __fadd_rn(__fmul_rn(u, sin), __fmul_rn(v, cos));
  }

 private:
  __device__ __forceinline__ float angle(const void* angles, long long at) const {
    return p_.f32_angles ? static_cast<const float*>(angles)[at] : to_f32<kType>(static_cast<const T*>(angles)[at]);
  }

  const AppendParams& p_;
  int pairs_;
  long long position_;
  const T* from_;
};

__device__ __forceinline__ bool is_nan(float x) { return x != x; }
__device__ __forceinline__ float nan_f32() { return __int_as_float(0x7fc00000); }

// The largest magnitude of finite numbers, and the least and the largest of them.
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
  // Those of all lanes of a warp.
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

// What codes of a format are, from the table of base/formats.h.
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

// A number of f32 as the code of a float of 8 bits, of which `largest` is the largest number's.
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
// As a tensor of scales keeps a number.
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

// A head of a row becomes codes at its place, by a warp.
template <Element kType>
__device__ __forceinline__ void quantize_head(const AppendParams& p, const AppendRows& rows, const AppendToken& token,
                                              const AppendPlace& to, int head, int lane) {
  const AppendCodes& c = rows.codes;
  const AppendedNumbers<kType> numbers(p, rows, token, to.position, head);
  const bool four_bits = code_format(c.format).four_bits;
  const int columns = rows.dim / max_of(c.groups, 1);
  const long long first = to.entry * rows.to_batch + to.row * rows.to_row + head * rows.to_head;
  unsigned char* const codes = static_cast<unsigned char*>(rows.to) + (four_bits ? first / 2 : first);
  const long long row = c.of_rows ? to.row : 0;
  const long long entry = c.of_rows ? to.entry : token.b;
  const auto place = [&](const AppendScales& t, int group) {
    return entry * t.batch + row * t.row + head * t.head + group * t.group;
  };
#pragma unroll 1
  for (int group = 0; group < max_of(c.groups, 1); ++group) {
    const int begin = group * columns;
    GroupScale by = {1, 0};
    if (c.groups > 0 && c.of_rows) {
      Extremes extremes;
      for (int i = lane; i < columns; i += 32) extremes.add(numbers[begin + i]);
      extremes.join_lanes();
      by = fitted_scale(c, extremes);
      if (lane == 0) {
        write_scale(c.scale, place(c.scale, group), by.scale);
        write_scale(c.zero_point, place(c.zero_point, group), by.zero_point);
      }
    } else if (c.groups > 0) {
      by = {read_scale(c.scale, place(c.scale, 0), 1), read_scale(c.zero_point, place(c.zero_point, 0), 0)};
    }
    const auto code = [&](int i) {
      const float x = numbers[begin + i];
      float scaled = x;
      if (c.groups > 0) scaled = __fadd_rn(by.scale == 0 ? 0 : __fdiv_rn(x, by.scale), by.zero_point);
      // The CPU's NaN has the sign of the NaN that it comes from.
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

// Codes of low-bit formats (base/formats.h) as vectors of floats, and rows of any dtype.
#if defined(FULGUR_CPU_FORMATS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_FORMATS_INL_H_
#undef FULGUR_CPU_FORMATS_INL_H_
#else
#define FULGUR_CPU_FORMATS_INL_H_
#endif

#include "base/formats.h"
#include "base/scales.h"
#include "cpu/kernels/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

using U8 = hn::Rebind<uint8_t, F32>;
using I8 = hn::Rebind<int8_t, F32>;

/// Loads kLanes bytes as integers.
HWY_INLINE hn::Vec<I32> load_bytes(const uint8_t* at) {
  return hn::PromoteTo(I32(), hn::LoadU(U8(), at));
}
HWY_INLINE hn::Vec<I32> load_signed_bytes(const uint8_t* at) {
  return hn::PromoteTo(I32(), hn::LoadU(I8(), reinterpret_cast<const int8_t*>(at)));
}

/// Bits c, c + 1, ... of `bits`, kLanes of them, each in the lowest bit of a lane.
HWY_INLINE hn::Vec<I32> spread_bits(uint32_t bits, int c) {
  const U32 u;
  const auto shifted = hn::Shr(hn::Set(u, bits >> c), hn::Iota(u, 0));
  return hn::BitCast(I32(), hn::And(shifted, hn::Set(u, 1)));
}

/// f16 of the upper byte of each of kLanes words as floats, `factor` times.
HWY_INLINE V32 from_f16_bits(hn::Vec<U16> bits, float factor) {
  const F32 f;
  return hn::Mul(hn::PromoteTo(f, hn::BitCast(F16(), bits)), hn::Set(f, factor));
}

/// Whether a format's 16 numbers, without the scale, fit a vector, where codes are looked up.
template <DType kDType>
constexpr bool kHasLevels = kLanes == 16 && (kDType == DType::kQ4_0 || kDType == DType::kIQ4_NL);
template <DType kDType>
HWY_INLINE V32 levels() {
  if constexpr (kDType == DType::kQ4_0) {
    return hn::Sub(hn::Iota(F32(), 0), hn::Set(F32(), Format<kDType>::kHalf));
  } else {
    return hn::ConvertTo(F32(),
                         hn::PromoteTo(I32(), hn::LoadU(I8(), Format<kDType>::kNumbers.data())));
  }
}
/// The numbers of codes c to c + 15 of a block, looked up in such a vector; c is 0 or 16.
template <DType kDType>
HWY_INLINE V32 look_up(V32 numbers, const uint8_t* block, int64_t c) {
  const F32 f;
  const I32 i;
  const auto bytes = load_bytes(block + Format<kDType>::kCodes);
  const auto code = c == 0 ? hn::And(bytes, hn::Set(i, 15)) : hn::ShiftRight<4>(bytes);
  return hn::TableLookupLanes(numbers, hn::IndicesFromVec(f, code));
}

/// Codes c to c + kLanes - 1 of a block; of a format without scales in its blocks, those of an
/// array. c is a multiple of kLanes.
template <DType kDType>
HWY_INLINE V32 load_codes(const uint8_t* block, int64_t c) {
  using Row = Format<kDType>;
  const F32 f;
  const I32 i;
  if constexpr (kHasLevels<kDType>) {
    return look_up<kDType>(levels<kDType>(), block, c);
  } else if constexpr (kDType == DType::kInt8) {
    return hn::ConvertTo(f, load_signed_bytes(block + c));
  } else if constexpr (kDType == DType::kInt4) {
    uint64_t word = 0;
    std::memcpy(&word, block + c / 2, kLanes / 2);
    const U32 u;
    const auto lane = hn::Iota(u, 0);
    const auto words =
        hn::IfThenElse(hn::Lt(lane, hn::Set(u, 8)), hn::Set(u, static_cast<uint32_t>(word)),
                       hn::Set(u, static_cast<uint32_t>(word >> 32)));
    const auto shift = hn::ShiftLeft<2>(hn::And(lane, hn::Set(u, 7)));
    const auto code = hn::And(hn::BitCast(i, hn::Shr(words, shift)), hn::Set(i, 15));
    const auto sign = hn::Set(i, 8);
    return hn::ConvertTo(f, hn::Sub(hn::Xor(code, sign), sign));
  } else if constexpr ((kDType == DType::kE4M3 || kDType == DType::kE5M2) && kHardwareF16) {
    const U16 u;
    const auto bits = hn::PromoteTo(u, hn::LoadU(U8(), block + c));
    if constexpr (kDType == DType::kE5M2) return from_f16_bits(hn::ShiftLeft<8>(bits), 1);
    const auto magnitude = hn::And(bits, hn::Set(u, 0x7f));
    const auto sign = hn::And(hn::ShiftLeft<8>(bits), hn::Set(u, 0x8000));
    const auto nan = hn::IfThenElseZero(hn::Eq(magnitude, hn::Set(u, 0x7f)), hn::Set(u, 0x7c00));
    return from_f16_bits(hn::Or(hn::Or(sign, hn::ShiftLeft<7>(magnitude)), nan), 256);
  } else if constexpr (kDType == DType::kQ8_0) {
    return hn::ConvertTo(f, load_signed_bytes(block + Row::kCodes + c));
  } else if constexpr (kDType == DType::kE4M3 || kDType == DType::kE5M2 ||
                       kDType == DType::kIQ4_NL) {
    HWY_ALIGN float lanes[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
      lanes[lane] = Row::code(block, static_cast<int>(c) + lane);
    }
    return hn::Load(f, lanes);
  } else {
    auto code = load_bytes(block + Row::kCodes + c % 16);
    code = c < 16 ? hn::And(code, hn::Set(i, 15)) : hn::ShiftRight<4>(code);
    if constexpr (Row::kBits == 5) {
      uint32_t high;
      std::memcpy(&high, block + Row::kHigh, sizeof high);
      code = hn::Or(code, hn::ShiftLeft<4>(spread_bits(high, static_cast<int>(c))));
    }
    if constexpr (kDType == DType::kQ4_0 || kDType == DType::kQ5_0) {
      code = hn::Sub(code, hn::Set(i, Row::kHalf));
    }
    return hn::ConvertTo(f, code);
  }
}

/// f16 at `at`, in every lane.
HWY_INLINE V32 broadcast_f16(const uint8_t* at) {
  uint16_t bits;
  std::memcpy(&bits, at, sizeof bits);
  if constexpr (!kHardwareF16) return hn::Set(F32(), f32_from_f16(bits));
  return hn::PromoteTo(F32(), hn::BitCast(F16(), hn::Set(U16(), bits)));
}

/// The scale of a block's codes, and the number that is added to the scaled codes.
template <DType kDType>
struct BlockScale {
  V32 scale, low;

  explicit BlockScale(const uint8_t* block)
      : scale(broadcast_f16(block)), low(kHasLow ? broadcast_f16(block + 2) : hn::Zero(F32())) {}
  HWY_INLINE V32 apply(V32 code) const {
    return kHasLow ? hn::MulAdd(code, scale, low) : hn::Mul(code, scale);
  }

 private:
  static constexpr bool kHasLow = Format<kDType>::kHigh == 4;
};

/// Writes the numbers of a row of codes to `to`, and zeros in columns [cols, ld). Makes `poison`
/// NaN if some number is not finite.
template <DType kDType>
HWY_INLINE void load_code_row(const uint8_t* row, int64_t cols, float* HWY_RESTRICT to, int64_t ld,
                              V32& poison) {
  using Row = Format<kDType>;
  const F32 f;
  const auto put = [&](int64_t c, V32 x) HWY_ATTR {
    poison = hn::MulAdd(x, hn::Zero(f), poison);
    hn::Store(x, f, to + c);
  };
  int64_t c = 0;
  if constexpr (Row::kScaled) {
    for (; c < cols; c += Row::kBlock, row += Row::kBytes) {
      const BlockScale<kDType> scale(row);
      FULGUR_UNROLL for (int64_t i = 0; i < Row::kBlock; i += kLanes) {
        put(c + i, scale.apply(load_codes<kDType>(row, i)));
      }
    }
  } else {
    for (; c + kLanes <= cols; c += kLanes) put(c, load_codes<kDType>(row, c));
    if (c < cols) {
      uint8_t tail[kLanes] = {};
      std::memcpy(tail, row + c / Row::kBlock, (cols - c) / Row::kBlock);
      put(c, load_codes<kDType>(tail, 0));
      c += kLanes;
    }
  }
  for (; c < ld; c += kLanes) hn::Store(hn::Zero(f), f, to + c);
}

/// Whether rows of a dtype are blocks of codes with a scale.
constexpr bool has_block_scales(DType dtype) {
  return dtype == DType::kQ8_0 || dtype == DType::kQ4_0;
}

/// Codes c to c + kLanes - 1 of a row of blocks, and the scale of their block.
template <DType kDType>
HWY_INLINE V32 load_block_codes(const char* row, int64_t c) {
  using Row = Format<kDType>;
  const auto* const block = reinterpret_cast<const uint8_t*>(row) + c / Row::kBlock * Row::kBytes;
  return load_codes<kDType>(block, c % Row::kBlock);
}
template <DType kDType>
HWY_INLINE V32 block_scale(const char* row, int64_t c) {
  using Row = Format<kDType>;
  return broadcast_f16(reinterpret_cast<const uint8_t*>(row) + c / Row::kBlock * Row::kBytes);
}

/// Numbers c to c + kLanes - 1 of a row of elements or codes, c a multiple of kLanes.
template <DType kDType>
HWY_INLINE V32 load_numbers(const char* row, int64_t c) {
  if constexpr (is_low_bit(kDType)) {
    using Row = Format<kDType>;
    const auto* const codes = reinterpret_cast<const uint8_t*>(row);
    if constexpr (kHasLevels<kDType>) {
      const uint8_t* const block = codes + c / Row::kBlock * Row::kBytes;
      const V32 numbers = hn::Mul(levels<kDType>(), broadcast_f16(block));
      return look_up<kDType>(numbers, block, c % Row::kBlock);
    } else if constexpr (Row::kScaled) {
      const uint8_t* const block = codes + c / Row::kBlock * Row::kBytes;
      return BlockScale<kDType>(block).apply(load_codes<kDType>(block, c % Row::kBlock));
    } else {
      return load_codes<kDType>(codes, c);
    }
  } else {
    return load_wide<kDType>(row + c * (kDType == DType::kF32 ? 4 : 2));
  }
}

/// The first n < kLanes of these numbers, and zeros after them. Rows of blocks with scales have no
/// such remainder.
template <DType kDType>
HWY_INLINE V32 load_last_numbers(const char* row, int64_t c, int64_t n) {
  if constexpr (!is_low_bit(kDType)) {
    return load_tail<kDType>(row + c * (kDType == DType::kF32 ? 4 : 2), n);
  } else if constexpr (!Format<kDType>::kScaled) {
    alignas(64) uint8_t tail[kLanes] = {};
    std::memcpy(tail, row + c / Format<kDType>::kBlock, n / Format<kDType>::kBlock);
    return load_codes<kDType>(tail, 0);
  } else {
    return load_numbers<kDType>(row, c);
  }
}

template <DType kDType>
HWY_INLINE bool load_code_rows(const void* src, int64_t stride, int64_t rows, int64_t cols,
                               float* HWY_RESTRICT dst, int64_t ld) {
  using Row = Format<kDType>;
  V32 poison = hn::Zero(F32());
  for (int64_t r = 0; r < rows; ++r) {
    load_code_row<kDType>(
        static_cast<const uint8_t*>(src) + r * (stride / Row::kBlock * Row::kBytes), cols,
        dst + r * ld, ld, poison);
  }
  return hn::AllFalse(F32(), hn::IsNaN(poison));
}

/// Widens `rows` x `cols` elements with row stride `stride` (in elements) to dst[rows][ld], the
/// columns after `cols` zero. Returns whether all of them are finite.
HWY_NOINLINE inline bool load_rows(DType dtype, const void* src, int64_t stride, int64_t rows,
                                   int64_t cols, float* HWY_RESTRICT dst, int64_t ld) {
  switch (dtype) {
    case DType::kF16:
      return load_rows_of<DType::kF16>(src, stride, rows, cols, dst, ld);
    case DType::kBF16:
      return load_rows_of<DType::kBF16>(src, stride, rows, cols, dst, ld);
#define FULGUR_LOAD(name) \
  case DType::k##name:    \
    return load_code_rows<DType::k##name>(src, stride, rows, cols, dst, ld);
      FULGUR_FORMATS(FULGUR_LOAD)
#undef FULGUR_LOAD
    default:
      return load_rows_of<DType::kF32>(src, stride, rows, cols, dst, ld);
  }
}

/// The scales, or zero points, of rows of codes from `row` on of a head: [rows][groups of columns].
struct RowScales {
  const ScaleTensor& t;
  int64_t first, row_step;

  RowScales(const ScaleTensor& tensor, int64_t b, int64_t kv, int64_t entry, int64_t row,
            int64_t head)
      : t(tensor),
        first(t.given() ? t.at.offset(b, kv, entry, row, head, 0) : 0),
        row_step(t.at.of_rows ? t.at.row : 0) {}
  HWY_INLINE V32 of(int64_t row, int64_t group) const {
    if (!t.given()) return hn::Zero(F32());
    return hn::Set(F32(), t[first + row * row_step + group * t.at.group]);
  }
};

template <DType kDType>
HWY_INLINE bool load_scaled_rows_of(const void* src, int64_t stride, int64_t rows, int64_t cols,
                                    const RowScales& scales, const RowScales& zeros,
                                    float* HWY_RESTRICT dst, int64_t ld) {
  const F32 f;
  const int64_t groups = scales.t.at.groups, columns = cols / groups;
  V32 poison = hn::Zero(f);
  for (int64_t r = 0; r < rows; ++r, dst += ld) {
    const char* const row = static_cast<const char*>(src) + bytes_of(kDType, r * stride);
    int64_t c = 0;
    for (int64_t g = 0; g < groups; ++g) {
      const V32 scale = scales.of(r, g), zero = zeros.of(r, g);
      const auto number = [&](V32 code) HWY_ATTR {
        const V32 x = hn::Mul(hn::Sub(code, zero), scale);
        poison = hn::MulAdd(x, hn::Zero(f), poison);
        return x;
      };
      const int64_t end = (g + 1) * columns;
      for (; c + kLanes <= end; c += kLanes)
        hn::Store(number(load_numbers<kDType>(row, c)), f, dst + c);
      if (c < end) {  // of the only group
        const V32 x = number(load_last_numbers<kDType>(row, c, end - c));
        hn::Store(hn::IfThenElseZero(hn::FirstN(f, end - c), x), f, dst + c);
        c += kLanes;
      }
    }
    for (; c < ld; c += kLanes) hn::Store(hn::Zero(f), f, dst + c);
  }
  return hn::AllFalse(f, hn::IsNaN(poison));
}

/// load_rows() for codes with scales in a tensor of their own: (code - zero point) * scale.
HWY_NOINLINE inline bool load_scaled_rows(DType dtype, const void* src, int64_t stride,
                                          int64_t rows, int64_t cols, const RowScales& scales,
                                          const RowScales& zeros, float* HWY_RESTRICT dst,
                                          int64_t ld) {
  switch (dtype) {
    case DType::kE4M3:
      return load_scaled_rows_of<DType::kE4M3>(src, stride, rows, cols, scales, zeros, dst, ld);
    case DType::kE5M2:
      return load_scaled_rows_of<DType::kE5M2>(src, stride, rows, cols, scales, zeros, dst, ld);
    case DType::kInt4:
      return load_scaled_rows_of<DType::kInt4>(src, stride, rows, cols, scales, zeros, dst, ld);
    default:
      return load_scaled_rows_of<DType::kInt8>(src, stride, rows, cols, scales, zeros, dst, ld);
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

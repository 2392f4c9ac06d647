// Vectors of floats: their width, exp2, and conversions between memory of any dtype and f32.
#if defined(FULGUR_CPU_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_VECTOR_INL_H_
#undef FULGUR_CPU_VECTOR_INL_H_
#else
#define FULGUR_CPU_VECTOR_INL_H_
#endif

#include <hwy/highway.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "base/convert.h"
#include "fulgur/tensor.h"

#ifndef FULGUR_UNROLL
#define FULGUR_UNROLL HWY_UNROLL(16)
#endif

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using I32 = hn::RebindToSigned<F32>;
using U32 = hn::RebindToUnsigned<F32>;
using U16 = hn::Rebind<uint16_t, F32>;
using F16 = hn::Rebind<hwy::float16_t, F32>;
using V32 = hn::Vec<F32>;

/// The floats of a vector. Padded rows and row tiles are multiples of it.
constexpr int64_t kLanes = HWY_MAX_BYTES / sizeof(float);
/// Vector registers of the target.
constexpr int kRegisters = HWY_MAX_BYTES == 64 || HWY_ARCH_ARM_A64 ? 32 : 16;

/// Whether the target converts f16 in hardware, as F16C does; if not, scalar code does.
constexpr bool kHardwareF16 = HWY_MAX_BYTES >= 32 || HWY_ARCH_ARM_A64;

constexpr int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

/// The maximum, and the minimum, of `bound` and x, or x if it is NaN. For NaN, x86's instructions
/// return the second operand, ARM's the operand that is a number.
HWY_INLINE V32 at_least(V32 bound, V32 x) {
  if constexpr (HWY_ARCH_ARM) return hn::IfThenElse(hn::Gt(bound, x), bound, x);
  return hn::Max(bound, x);
}
HWY_INLINE V32 at_most(V32 bound, V32 x) {
  if constexpr (HWY_ARCH_ARM) return hn::IfThenElse(hn::Lt(bound, x), bound, x);
  return hn::Min(bound, x);
}

/// c[0] + c[1] r + ... + c[6] r^6.
HWY_INLINE V32 polynomial(V32 r, const float (&c)[7]) {
  const F32 f;
  V32 p = hn::Set(f, c[6]);
  FULGUR_UNROLL for (int i = 5; i >= 0; --i) p = hn::MulAdd(p, r, hn::Set(f, c[i]));
  return p;
}

#if HWY_TARGET == HWY_AVX3
/// Sets whether the CPU flushes results below 2^-126 to 0, for a scope.
class Flushing {
 public:
  explicit Flushing(bool on) : before_(_mm_getcsr()) {
    _mm_setcsr(on ? before_ | kFlush : before_ & ~kFlush);
  }
  ~Flushing() { _mm_setcsr(before_); }
  Flushing(const Flushing&) = delete;
  Flushing& operator=(const Flushing&) = delete;

 private:
  static constexpr unsigned kFlush = 0x8000;
  const unsigned before_;
};

/// 2^x for x <= 127, to 0.9 ulp; 0 for -inf and, under Flushing, for all x < -126; NaN for NaN.
/// x = n + r with 0 <= r < 1, 2^r by a relative-minimax polynomial that is exact at 0.
HWY_INLINE V32 exp2(V32 x) {
  constexpr float kPower[] = {1.0f,
                              0.6931470632553101f,
                              0.24022935330867767f,
                              0.05548383668065071f,
                              0.00968023668974638f,
                              0.0012410443741828203f,
                              0.00021845934679731727f};
  const V32 p = polynomial(V32{_mm512_reduce_ps(x.raw, 0x09)}, kPower);
  return V32{_mm512_scalef_ps(p.raw, x.raw)};
}
#else
/// Not needed here: the exp2 below makes no result below 2^-126.
struct Flushing {
  explicit Flushing(bool) {}
};

/// 2^x for x <= 127, to 0.7 ulp; exactly 0 for x <= -127 (so for -inf), NaN for NaN.
/// x = n + r with |r| <= 1/2, 2^r by a relative-minimax polynomial, 2^n by the exponent bits.
HWY_INLINE V32 exp2(V32 x) {
  const F32 f;
  x = at_least(hn::Set(f, -127.0f), x);
  // Adding 1.5 * 2^23 rounds to an integer; 127 more, and its lowest bits are the exponent of 2^n.
  const V32 shifter = hn::Set(f, 0x1.8p23f + 127.0f);
  const V32 biased = hn::Add(x, shifter);
  const V32 r = hn::Sub(x, hn::Sub(biased, shifter));
  constexpr float kPower[] = {1.0f,
                              0.6931471824645996f,
                              0.24022646248340607f,
                              0.05550328642129898f,
                              0.009618489071726799f,
                              0.0013399930903688073f,
                              0.00015345774590969086f};
  const V32 p = polynomial(r, kPower);
  // At n = -127 the exponent field is 0 and the factor is 0.
  return hn::Mul(p, hn::BitCast(f, hn::ShiftLeft<23>(hn::BitCast(I32(), biased))));
}
#endif

/// A vector of elements of `dtype` at `src`, widened.
template <DType kDType, class D = F32>
HWY_INLINE hn::Vec<D> load_wide(const void* src) {
  const D f;
  if constexpr (kDType == DType::kF32) {
    return hn::LoadU(f, static_cast<const float*>(src));
  } else {
    const hn::Rebind<uint16_t, D> u16;
    const auto* half = static_cast<const uint16_t*>(src);
    if constexpr (kDType == DType::kBF16) {
      const hn::RebindToUnsigned<D> u32;
      return hn::BitCast(f, hn::ShiftLeft<16>(hn::PromoteTo(u32, hn::LoadU(u16, half))));
    } else if constexpr (kHardwareF16) {
      const hn::Rebind<hwy::float16_t, D> f16;
      return hn::PromoteTo(f, hn::BitCast(f16, hn::LoadU(u16, half)));
    } else {
      HWY_ALIGN float lanes[hn::MaxLanes(D())];
      for (size_t i = 0; i < hn::MaxLanes(D()); ++i) lanes[i] = f32_from_f16(half[i]);
      return hn::Load(f, lanes);
    }
  }
}

/// The first n < kLanes elements as floats, zeros after them.
template <DType kDType>
HWY_INLINE V32 load_tail(const char* src, int64_t n) {
  alignas(64) char tail[kLanes * sizeof(float)] = {};
  std::memcpy(tail, src, n * (kDType == DType::kF32 ? 4 : 2));
  return load_wide<kDType>(tail);
}

/// Rounds kLanes floats to `dtype` at `dst`: to nearest, ties to even.
template <DType kDType>
HWY_INLINE void store_narrow(V32 x, void* dst) {
  const F32 f;
  const U32 u;
  if constexpr (kDType == DType::kF32) {
    hn::StoreU(x, f, static_cast<float*>(dst));
  } else if constexpr (kDType == DType::kBF16) {
    const auto bits = hn::BitCast(u, x);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(u, 1));
    const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(u, 0x7fff)));
    const auto quiet = hn::Or(bits, hn::Set(u, 0x400000));  // a NaN must not round to infinity
    const auto nan = hn::RebindMask(u, hn::IsNaN(x));
    const auto top = hn::ShiftRight<16>(hn::IfThenElse(nan, quiet, rounded));
    hn::StoreU(hn::DemoteTo(U16(), hn::BitCast(I32(), top)), U16(), static_cast<uint16_t*>(dst));
  } else if constexpr (kHardwareF16) {
    const auto half = hn::DemoteTo(F16(), x);
    hn::StoreU(hn::BitCast(U16(), half), U16(), static_cast<uint16_t*>(dst));
  } else {
    HWY_ALIGN float lanes[kLanes];
    hn::Store(x, f, lanes);
    for (int64_t i = 0; i < kLanes; ++i) {
      static_cast<uint16_t*>(dst)[i] = f16_from_f32(lanes[i]);
    }
  }
}

template <DType kDType>
HWY_INLINE bool load_rows_of(const void* src, int64_t stride, int64_t rows, int64_t cols,
                             float* HWY_RESTRICT dst, int64_t ld) {
  const F32 f;
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : 2;
  V32 poison = hn::Zero(f);  // x * 0 is NaN for inf and NaN
  for (int64_t r = 0; r < rows; ++r) {
    const char* row = static_cast<const char*>(src) + r * stride * kSize;
    float* to = dst + r * ld;
    int64_t c = 0;
    for (; c + kLanes <= cols; c += kLanes) {
      const V32 x = load_wide<kDType>(row + c * kSize);
      poison = hn::MulAdd(x, hn::Zero(f), poison);
      hn::Store(x, f, to + c);
    }
    if (c < cols) {
      alignas(64) char tail[kLanes * sizeof(float)] = {};
      std::memcpy(tail, row + c * kSize, (cols - c) * kSize);
      const V32 x = load_wide<kDType>(tail);
      poison = hn::MulAdd(x, hn::Zero(f), poison);
      hn::Store(x, f, to + c);
      c += kLanes;
    }
    for (; c < ld; c += kLanes) hn::Store(hn::Zero(f), f, to + c);
  }
  return hn::AllFalse(f, hn::IsNaN(poison));
}

template <DType kDType>
HWY_INLINE void store_row_of(const float* HWY_RESTRICT src, int64_t cols, void* dst) {
  const F32 f;
  constexpr int64_t kSize = kDType == DType::kF32 ? 4 : 2;
  auto* to = static_cast<char*>(dst);
  int64_t c = 0;
  for (; c + kLanes <= cols; c += kLanes)
    store_narrow<kDType>(hn::Load(f, src + c), to + c * kSize);
  if (c < cols) {
    alignas(64) char tail[kLanes * sizeof(float)];
    store_narrow<kDType>(hn::Load(f, src + c), tail);
    std::memcpy(to + c * kSize, tail, (cols - c) * kSize);
  }
}

/// Rounds `cols` floats to `dtype` at dst; src is padded to whole vectors.
HWY_NOINLINE inline void store_row(DType dtype, const float* HWY_RESTRICT src, int64_t cols,
                                   void* dst) {
  switch (dtype) {
    case DType::kF16:
      return store_row_of<DType::kF16>(src, cols, dst);
    case DType::kBF16:
      return store_row_of<DType::kBF16>(src, cols, dst);
    default:
      return store_row_of<DType::kF32>(src, cols, dst);
  }
}

/// Transposes squares of four lanes in each block of 128 bits, of four vectors at a time.
template <class D, class V, size_t kVectors>
HWY_INLINE void transpose_blocks(D f, V (&x)[kVectors]) {
  const hn::Repartition<double, D> pairs;
  FULGUR_UNROLL for (size_t i = 0; i < kVectors; i += 4) {
    const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(f, x[i], x[i + 1]));
    const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(f, x[i], x[i + 1]));
    const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(f, x[i + 2], x[i + 3]));
    const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(f, x[i + 2], x[i + 3]));
    x[i] = hn::BitCast(f, hn::InterleaveLower(pairs, low01, low23));
    x[i + 1] = hn::BitCast(f, hn::InterleaveUpper(pairs, low01, low23));
    x[i + 2] = hn::BitCast(f, hn::InterleaveLower(pairs, high01, high23));
    x[i + 3] = hn::BitCast(f, hn::InterleaveUpper(pairs, high01, high23));
  }
}

/// The vectors of a square that is transposed in registers.
using Square = hn::CappedTag<float, 8>;
constexpr int64_t kSquare = hn::MaxLanes(Square());

/// Lane j of vector i becomes lane i of vector j.
HWY_INLINE void transpose(hn::Vec<Square> (&x)[kSquare]) {
  const Square f;
  transpose_blocks(f, x);
  if constexpr (kSquare == 8) {
    FULGUR_UNROLL for (int i = 0; i < 4; ++i) {
      const auto first = x[i], second = x[i + 4];
      x[i] = hn::ConcatLowerLower(f, second, first);
      x[i + 4] = hn::ConcatUpperUpper(f, second, first);
    }
  }
}

/// dst[c][r] = src[r][c] * factor for a whole number of vectors of rows. Rows of src are readable
/// to the end of a whole vector.
HWY_INLINE void transpose(const float* HWY_RESTRICT src, int64_t stride, int64_t rows, int64_t cols,
                          float factor, float* HWY_RESTRICT dst, int64_t ld) {
  const Square f;
  const auto scale = hn::Set(f, factor);
  for (int64_t r = 0; r < rows; r += kSquare) {
    for (int64_t c = 0; c < cols; c += kSquare) {
      hn::Vec<Square> x[kSquare];
      FULGUR_UNROLL for (int i = 0; i < kSquare; ++i) {
        x[i] = hn::LoadU(f, src + (r + i) * stride + c);
      }
      transpose(x);
      float* const to = dst + c * ld + r;
      if (c + kSquare <= cols) {
        FULGUR_UNROLL for (int i = 0; i < kSquare; ++i) {
          hn::StoreU(hn::Mul(x[i], scale), f, to + i * ld);
        }
      } else {
        for (int64_t i = 0; i < cols - c; ++i) hn::StoreU(hn::Mul(x[i], scale), f, to + i * ld);
      }
    }
  }
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

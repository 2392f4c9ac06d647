// A probe of the rate of multiply-adds, for each instruction set.
#if defined(FULGUR_CPU_PROBES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_PROBES_INL_H_
#undef FULGUR_CPU_PROBES_INL_H_
#else
#define FULGUR_CPU_PROBES_INL_H_
#endif

#include <hwy/highway.h>

#include <cstdint>

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

/// Flops of `rounds` rounds of f32 multiply-adds, counted as 2 flops each, on chains that fill the
/// registers; sink[0] and sink[1] are their factor and addend, sink[2] keeps them alive. Eight
/// chains hide a latency of 4 cycles on 2 ports; more hide the scheduler's jitter.
inline double fma_rounds(int64_t rounds, float* sink) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<float> d;
  using V = hn::Vec<decltype(d)>;
  const V factor = hn::Set(d, sink[0]), addend = hn::Set(d, sink[1]);
  constexpr int kChains = HWY_TARGET <= HWY_AVX3 ? 24 : 12;
  // Chains must start apart, or the compiler finds them equal and runs one.
  const auto start = [&](int i) { return hn::Set(d, static_cast<float>(i)); };
  V a0 = start(0), a1 = start(1), a2 = start(2), a3 = start(3), a4 = start(4), a5 = start(5),
    a6 = start(6), a7 = start(7), a8 = start(8), a9 = start(9), a10 = start(10), a11 = start(11);
  V b0 = start(12), b1 = start(13), b2 = start(14), b3 = start(15), b4 = start(16), b5 = start(17),
    b6 = start(18), b7 = start(19), b8 = start(20), b9 = start(21), b10 = start(22),
    b11 = start(23);
  for (int64_t i = 0; i < rounds; ++i) {
    a0 = hn::MulAdd(a0, factor, addend);
    a1 = hn::MulAdd(a1, factor, addend);
    a2 = hn::MulAdd(a2, factor, addend);
    a3 = hn::MulAdd(a3, factor, addend);
    a4 = hn::MulAdd(a4, factor, addend);
    a5 = hn::MulAdd(a5, factor, addend);
    a6 = hn::MulAdd(a6, factor, addend);
    a7 = hn::MulAdd(a7, factor, addend);
    a8 = hn::MulAdd(a8, factor, addend);
    a9 = hn::MulAdd(a9, factor, addend);
    a10 = hn::MulAdd(a10, factor, addend);
    a11 = hn::MulAdd(a11, factor, addend);
    if constexpr (kChains == 24) {
      b0 = hn::MulAdd(b0, factor, addend);
      b1 = hn::MulAdd(b1, factor, addend);
      b2 = hn::MulAdd(b2, factor, addend);
      b3 = hn::MulAdd(b3, factor, addend);
      b4 = hn::MulAdd(b4, factor, addend);
      b5 = hn::MulAdd(b5, factor, addend);
      b6 = hn::MulAdd(b6, factor, addend);
      b7 = hn::MulAdd(b7, factor, addend);
      b8 = hn::MulAdd(b8, factor, addend);
      b9 = hn::MulAdd(b9, factor, addend);
      b10 = hn::MulAdd(b10, factor, addend);
      b11 = hn::MulAdd(b11, factor, addend);
    }
  }
  const V a =
      hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(hn::Add(a4, a5), hn::Add(a6, a7)));
  const V b =
      hn::Add(hn::Add(hn::Add(b0, b1), hn::Add(b2, b3)), hn::Add(hn::Add(b4, b5), hn::Add(b6, b7)));
  const V c = hn::Add(hn::Add(hn::Add(a8, a9), hn::Add(a10, a11)),
                      hn::Add(hn::Add(b8, b9), hn::Add(b10, b11)));
  sink[2] = hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(a, b), c)));
  return 2.0 * kChains * static_cast<double>(hn::Lanes(d)) * static_cast<double>(rounds);
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

#include "cpu/kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string_view>

#include "fulgur/error.h"

// Vectors of a length unknown to the compiler (SVE, RVV) cannot be held in arrays, as the blocks of
// registers are; NEON serves such machines. On x86, src/CMakeLists.txt makes SSE4 the least.
#define HWY_DISABLED_TARGETS (HWY_SVE | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV)
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels.cpp"
#include <hwy/foreach_target.h>

#include "cpu/backward-inl.h"
#include "cpu/decode-inl.h"
#include "cpu/forward-inl.h"

#ifndef FULGUR_CPU_KERNELS_OF
#define FULGUR_CPU_KERNELS_OF
namespace fulgur::cpu {
/// The table of a Highway target; null for one that this build lacks.
template <int64_t kTarget>
constexpr const Kernels& (*kTableOf)() = nullptr;
}  // namespace fulgur::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

const Kernels& table() {
  static const Kernels kTable = {
      .target = hwy::TargetName(HWY_TARGET),
      .panel_rows = kPanelRows,
      .forward_scratch = forward_scratch,
      .forward = forward,
      .decode_scratch = decode_scratch,
      .decode = decode,
      .decode_merge = decode_merge,
      .backward_scratch = backward_scratch,
      .backward_d = backward_d,
      .backward = backward,
      .backward_dq = backward_dq,
      .dq_stride = dq_stride,
  };
  return kTable;
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

template <>
constexpr const fulgur::cpu::Kernels& (*fulgur::cpu::kTableOf<HWY_TARGET>)() =
    fulgur::cpu::HWY_NAMESPACE::table;

#if HWY_ONCE
namespace fulgur::cpu {

HWY_EXPORT(table);

namespace {

/// A target that users may force.
struct Target {
  std::string_view name;
  int64_t bit;
  const Kernels& (*table)();
};
constexpr Target kTargets[] = {{"sse4", HWY_SSE4, kTableOf<HWY_SSE4>},
                               {"avx2", HWY_AVX2, kTableOf<HWY_AVX2>},
                               {"avx512", HWY_AVX3, kTableOf<HWY_AVX3>},
                               {"neon", HWY_NEON, kTableOf<HWY_NEON>}};

const Kernels& forced(std::string_view name) {
  const auto* const target = std::find_if(std::begin(kTargets), std::end(kTargets),
                                          [&](const Target& t) { return t.name == name; });
  const bool built = target != std::end(kTargets) && target->table != nullptr;
  // Highway's own choice stays as it is: other parts of the process may compute by it.
  if (built && (target->bit & hwy::SupportedTargets()) != 0) return target->table();
  throw Error(Status::kUnavailable,
              fmt::format("FULGUR_CPU_TARGET: got \"{}\", which this {} lacks; want one of sse4, "
                          "avx2, avx512, neon that it has",
                          name, built ? "machine" : "build"));
}

const Kernels& select() {
  const char* const wanted = std::getenv("FULGUR_CPU_TARGET");
  if (wanted != nullptr && *wanted != 0) return forced(wanted);
  return HWY_DYNAMIC_DISPATCH(table)();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& selected = select();
  return selected;
}

}  // namespace fulgur::cpu
#endif

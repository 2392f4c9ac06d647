#include "cpu/kernels.h"

#include <fmt/format.h>

#include <cstdlib>
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

#if HWY_ONCE
namespace fulgur::cpu {

HWY_EXPORT(table);

namespace {

/// The bit of a target's name; 0 for a name that this build lacks.
int64_t target_bit(std::string_view name) {
  constexpr std::pair<std::string_view, int64_t> kNames[] = {
      {"sse4", HWY_SSE4}, {"avx2", HWY_AVX2}, {"avx512", HWY_AVX3}, {"neon", HWY_NEON}};
  for (const auto& [known, bit] : kNames) {
    if (name == known) return bit & HWY_TARGETS;
  }
  return 0;
}

const Kernels& select() {
  if (const char* wanted = std::getenv("FULGUR_CPU_TARGET"); wanted != nullptr && *wanted != 0) {
    const int64_t bit = target_bit(wanted);
    if ((bit & hwy::SupportedTargets()) == 0) {
      throw Error(Status::kUnavailable,
                  fmt::format("FULGUR_CPU_TARGET: got \"{}\", which this {}; want one of sse4, "
                              "avx2, avx512, neon that it has",
                              wanted, bit == 0 ? "build lacks" : "machine lacks"));
    }
    hwy::SetSupportedTargetsForTest(bit);
  }
  return HWY_DYNAMIC_DISPATCH(table)();
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& selected = select();
  return selected;
}

}  // namespace fulgur::cpu
#endif

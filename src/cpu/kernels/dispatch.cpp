#include "cpu/kernels/dispatch.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

#include "base/fork_mutex.h"
#include "cpu/kernels/amx.h"
#include "fulgur/error.h"

// cmake/highway.cmake selects the targets.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/kernels/dispatch.cpp"
#include <hwy/foreach_target.h>

#include "cpu/kernels/bf16/backward-inl.h"
#include "cpu/kernels/bf16/biased_forward-inl.h"
#include "cpu/kernels/bf16/decode_amx-inl.h"
#include "cpu/kernels/bf16/decode_dot-inl.h"
#include "cpu/kernels/bf16/dot-inl.h"
#include "cpu/kernels/bf16/forward-inl.h"
#include "cpu/kernels/probes-inl.h"
#include "cpu/kernels/simd/backward-inl.h"
#include "cpu/kernels/simd/decode-inl.h"
#include "cpu/kernels/simd/forward-inl.h"

#ifndef FULGUR_CPU_KERNELS_OF
#define FULGUR_CPU_KERNELS_OF
namespace fulgur::cpu {
/// The table of kernels of a Highway target; null if this build lacks the target.
template <int64_t kTarget>
constexpr const Kernels& (*kTableOf)() = nullptr;
/// The tables of its paths of bf16 and f16: tiles and dot products; null if it has none.
template <int64_t kTarget>
constexpr const Kernels& (*kTilesOf)() = nullptr;
template <int64_t kTarget>
constexpr const Kernels& (*kF16TilesOf)() = nullptr;
template <int64_t kTarget>
constexpr const Kernels& (*kDotsOf)() = nullptr;
}  // namespace fulgur::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

// The speeds from which `explain` estimates times. They are rounded medians of the reports in
// docs/performance/cpu, for 1k to 8k rows; the speed of decoding is fitted to
// docs/kernels/cpu_decode.md. row_keys come from the reports' 128 to 512 rows, where a row of f16
// on tiles is assumed to take the time of one of bf16. There is no report of AVX2 and SSE4, which
// have half of the registers: theirs are the best times of one thread of a busy Zen 3, with 1k and
// 2k rows, and 1k rows for SSE4. NEON was not measured.
constexpr Speeds kVectorSpeeds = HWY_TARGET == HWY_SSE4   ? Speeds{{0.42, 0.44}, {0.46, 0.47}, 0.5}
                                 : HWY_TARGET == HWY_AVX2 ? Speeds{{0.73, 0.79}, {0.74, 0.75}, 0.5}
                                                          : Speeds{{0.81, 0.85}, {0.8, 0.82}, 0.6};

const Kernels& table() {
  static const Kernels kTable = {
      .target = hwy::TargetName(HWY_TARGET),
      .vectors = true,
      .Br = kBr,
      .row_tiles = kRowTiles,
      .packing_rows = kPackingRows,
      .speeds = kVectorSpeeds,
      .row_keys = 30,
      .fma_rounds = fma_rounds,
      .forward_scratch = forward_scratch,
      .forward = forward,
      .decode_rows = kDecodeRows,
      .decode_on_vectors = 0,
      .decode_scratch = decode_scratch,
      .decode = decode,
      .decode_merge = decode_merge,
      .backward_scratch = backward_scratch,
      .backward_d = backward_d,
      .backward = backward,
      .backward_dq = backward_dq,
      .dq_floats = dq_floats,
  };
  return kTable;
}

#if HWY_TARGET == HWY_AVX3
/// The kernels of a path of bf16 or f16. Vectors compute what has no products of bf16.
template <class Products, int kParts, class BiasedProducts>
Kernels kernels_on(const char* target, int64_t packing_rows, int64_t row_keys,
                   const Speeds& speeds) {
  Kernels k = table();
  k.target = target;
  k.vectors = false;
  k.Br = kTileBr;
  k.row_tiles = kBlockRowTiles;
  k.packing_rows = packing_rows;
  k.row_keys = row_keys;
  k.speeds = speeds;
  k.forward_scratch = scratch_of_bias<kParts>;
  k.forward = forward_of_bias<Products, BiasedProducts, kParts>;
  k.backward_scratch = tile_backward_scratch<kParts>;
  k.backward = tile_backward<Products, kParts>;
  k.backward_dq = tile_backward_dq;
  k.dq_floats = tile_dq_floats;
  return k;
}
const Kernels& tile_table() {
  static const Kernels kTable = [] {
    Kernels k = kernels_on<TileProducts<Amx, kPartsOfBF16>, kPartsOfBF16,
                           TileProducts<Amx, kPartsOfBF16, true>>("AMX", kAmxPackingRows, 120,
                                                                  {{4.3, 5.1}, {2.95, 3.6}, 1.0});
    k.decode_rows = kMaxTileDecodeRows;
    k.decode_on_vectors = kMinTileDecodeRows;
    k.decode_scratch = tile_decode_scratch;
    k.decode = tile_decode<TileProducts<Amx, kPartsOfBF16>>;
    return k;
  }();
  return kTable;
}
const Kernels& f16_tile_table() {
  static const Kernels kTable =
      kernels_on<TileProducts<Amx, kPartsOfF16>, kPartsOfF16, TileProducts<Amx, kPartsOfF16, true>>(
          "AMX", kAmxPackingRows, 50, {{1.75, 1.92}, {1.2, 1.55}, kVectorSpeeds.decode});
  return kTable;
}
const Kernels& dot_table() {
  static const Kernels kTable = [] {
    Kernels k = kernels_on<DotProducts<Avx512Bf16>, kPartsOfBF16, DotProducts<Avx512Bf16, true>>(
        "AVX512-BF16", kPackingRows, 20, {{1.6, 1.74}, {1.62, 1.7}, 1.0});
    k.decode = decode_by<DottedPairs<Avx512Bf16>>;
    return k;
  }();
  return kTable;
}
#endif

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

template <>
constexpr const fulgur::cpu::Kernels& (*fulgur::cpu::kTableOf<HWY_TARGET>)() =
    fulgur::cpu::HWY_NAMESPACE::table;
#if HWY_TARGET == HWY_AVX3
template <>
constexpr const fulgur::cpu::Kernels& (*fulgur::cpu::kTilesOf<HWY_TARGET>)() =
    fulgur::cpu::HWY_NAMESPACE::tile_table;
template <>
constexpr const fulgur::cpu::Kernels& (*fulgur::cpu::kF16TilesOf<HWY_TARGET>)() =
    fulgur::cpu::HWY_NAMESPACE::f16_tile_table;
template <>
constexpr const fulgur::cpu::Kernels& (*fulgur::cpu::kDotsOf<HWY_TARGET>)() =
    fulgur::cpu::HWY_NAMESPACE::dot_table;
#endif

#if HWY_ONCE
namespace fulgur::cpu {

HWY_EXPORT(table);

namespace {

/// The vectors of an instruction set, which users may force by name.
struct Target {
  std::string_view name;
  int64_t bit;
  const Kernels& (*table)();

  // Does not change Highway's global choice of a target, which other code of the process may use.
  bool here() const { return table != nullptr && (bit & hwy::SupportedTargets()) != 0; }
};
constexpr Target kTargets[] = {{"sse4", HWY_SSE4, kTableOf<HWY_SSE4>},
                               {"avx2", HWY_AVX2, kTableOf<HWY_AVX2>},
                               {"avx512", HWY_AVX3, kTableOf<HWY_AVX3>},
                               {"neon", HWY_NEON, kTableOf<HWY_NEON>}};

std::string dots_unavailable() {
#if HWY_ARCH_X86
  if (__builtin_cpu_supports("avx512bf16")) return {};
#endif
  return "this CPU has no dot products of bf16";
}

/// Intel's CPUs make dot products at half the rate of their FMA, AMD's at twice the rate
/// (docs/kernels/tiles.md).
std::string dots_slower() {
#if HWY_ARCH_X86
  if (__builtin_cpu_is("intel")) return "on Intel's CPUs they are slower than vectors";
#endif
  return {};
}

/// A path of bf16, which users may force by name.
struct Bf16Target {
  Target target;
  const Kernels& (*f16)();  // null if f16 is faster on vectors
  std::string_view path;
  std::string (*lacking)();  // why a machine that has the target lacks the path; empty if it has it
  std::string (*slower)();   // why the path is used only if it is forced; empty if it need not be

  /// Why the path is not available; empty if it is.
  std::string unavailable() const {
    return target.here() ? lacking() : "this build or machine lacks AVX-512";
  }
};
constexpr Bf16Target kBf16Targets[] = {  // the fastest first
    {{"amx", HWY_AVX3, kTilesOf<HWY_AVX3>},
     kF16TilesOf<HWY_AVX3>,
     "AMX tiles",
     [] { return amx_unavailable(); },
     [] { return std::string(); }},
    {{"avx512_bf16", HWY_AVX3, kDotsOf<HWY_AVX3>},
     nullptr,
     "AVX512-BF16 dot products",
     dots_unavailable,
     dots_slower}};

[[noreturn]] void lacks(std::string_view name, const std::string& why) {
  std::string here;
  for (const Target& target : kTargets) {
    if (target.here()) here += fmt::format("{}, ", target.name);
  }
  for (const Bf16Target& bf16 : kBf16Targets) {
    if (bf16.unavailable().empty()) here += fmt::format("{}, ", bf16.target.name);
  }
  here.resize(here.size() - std::min<size_t>(2, here.size()));
  throw Error(Status::kUnavailable,
              fmt::format("FULGUR_CPU_TARGET: got \"{}\", {}; want one of those here: {}", name,
                          why, here));
}

const Kernels& forced_vectors(std::string_view name) {
  const auto* const target = std::find_if(std::begin(kTargets), std::end(kTargets),
                                          [&](const Target& t) { return t.name == name; });
  if (target == std::end(kTargets)) lacks(name, "which is none");
  if (target->table == nullptr) lacks(name, "which this build lacks");
  if (!target->here()) lacks(name, "which this machine lacks");
  return target->table();
}

Machine select() {
  const char* const wanted = std::getenv("FULGUR_CPU_TARGET");
  const std::string_view name = wanted == nullptr ? "" : wanted;
  const bool of_bf16 = std::any_of(std::begin(kBf16Targets), std::end(kBf16Targets),
                                   [&](const Bf16Target& t) { return t.target.name == name; });
  Machine machine{name.empty() || of_bf16 ? HWY_DYNAMIC_DISPATCH(table)() : forced_vectors(name),
                  {}};
  for (const Bf16Target& bf16 : kBf16Targets) {
    if (!name.empty() && name != bf16.target.name) {
      machine.bf16.push_back(
          {bf16.path, nullptr, nullptr, fmt::format("FULGUR_CPU_TARGET is {}", name)});
      continue;
    }
    std::string why = bf16.unavailable();
    if (!name.empty() && !why.empty()) lacks(name, why);
    if (name.empty() && why.empty()) why = bf16.slower();
    machine.bf16.push_back({bf16.path, why.empty() ? &bf16.target.table() : nullptr,
                            why.empty() && bf16.f16 != nullptr ? &bf16.f16() : nullptr, why});
  }
  return machine;
}

}  // namespace

const Machine& machine() {
  static constinit MadeOnce<const Machine> made;
  return made.get(select);
}

}  // namespace fulgur::cpu
#endif

#include "cpu/kernels.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <string>
#include <string_view>

#include "cpu/amx.h"
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
#include "cpu/tile_backward-inl.h"
#include "cpu/tile_forward-inl.h"

#ifndef FULGUR_CPU_KERNELS_OF
#define FULGUR_CPU_KERNELS_OF
namespace fulgur::cpu {
/// The table of a Highway target; null for one that this build lacks.
template <int64_t kTarget>
constexpr const Kernels& (*kTableOf)() = nullptr;
/// Its tiles of bf16; null where there are none.
template <int64_t kTarget>
constexpr const Kernels& (*kTilesOf)() = nullptr;
}  // namespace fulgur::cpu
#endif

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

const Kernels& table() {
  static const Kernels kTable = {
      .target = hwy::TargetName(HWY_TARGET),
      .panel_rows = kPanelRows,
      .panels = kPanels,
      .forward_scratch = forward_scratch,
      .forward = forward,
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
/// What tiles have no part in, vectors do.
const Kernels& tile_table() {
  static const Kernels kTable = [] {
    Kernels tiles = table();
    tiles.target = "AMX";
    tiles.panel_rows = kTilePanelRows;
    tiles.panels = kTilePanels;
    tiles.forward_scratch = tile_forward_scratch;
    tiles.forward = tile_forward<Amx>;
    tiles.backward_scratch = tile_backward_scratch;
    tiles.backward = tile_backward<Amx>;
    tiles.backward_dq = tile_backward_dq;
    tiles.dq_floats = tile_dq_floats;
    return tiles;
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
#endif

#if HWY_ONCE
namespace fulgur::cpu {

HWY_EXPORT(table);

namespace {

/// What users may force.
struct Target {
  std::string_view name;
  int64_t bit;
  const Kernels& (*table)();

  // Highway's own choice stays as it is: other parts of the process may compute by it.
  bool here() const { return table != nullptr && (bit & hwy::SupportedTargets()) != 0; }
};
constexpr Target kTargets[] = {{"sse4", HWY_SSE4, kTableOf<HWY_SSE4>},
                               {"avx2", HWY_AVX2, kTableOf<HWY_AVX2>},
                               {"avx512", HWY_AVX3, kTableOf<HWY_AVX3>},
                               {"neon", HWY_NEON, kTableOf<HWY_NEON>}};
constexpr Target kTiles = {"amx", HWY_AVX3, kTilesOf<HWY_AVX3>};

/// Why there are no tiles; empty where there are.
std::string tiles_unavailable() {
  return kTiles.here() ? amx_unavailable() : "this build or machine lacks AVX-512";
}

[[noreturn]] void lacks(std::string_view name, const std::string& why) {
  std::string here;
  for (const Target& target : kTargets) {
    if (target.here()) here += fmt::format("{}, ", target.name);
  }
  if (tiles_unavailable().empty()) here += fmt::format("{}, ", kTiles.name);
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
  if (!name.empty() && name != kTiles.name) {
    return {forced_vectors(name), nullptr, fmt::format("FULGUR_CPU_TARGET is {}", name)};
  }
  const Kernels& vectors = HWY_DYNAMIC_DISPATCH(table)();
  const std::string no_tiles = tiles_unavailable();
  if (no_tiles.empty()) return {vectors, &kTiles.table(), {}};
  if (name == kTiles.name) lacks(name, no_tiles);
  return {vectors, nullptr, no_tiles};
}

}  // namespace

const Machine& machine() {
  static const Machine kMachine = select();
  return kMachine;
}

}  // namespace fulgur::cpu
#endif

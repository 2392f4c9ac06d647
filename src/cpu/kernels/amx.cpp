#include "cpu/kernels/amx.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <fmt/format.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#endif

namespace fulgur::cpu {
namespace {

#if defined(__x86_64__) && defined(__linux__)

/// Intel's manual, volume 1, 13.1 and volume 2, CPUID and XGETBV.
bool cpu_has_tiles() {
  constexpr uint32_t kTiles = (1u << 22) | (1u << 24);  // AMX-BF16, AMX-TILE
  uint32_t a, b, c, d;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & kTiles) == kTiles;
}

bool system_saves_tiles() {
  constexpr uint32_t kOsxsave = 1u << 27, kTileState = 3u << 17;
  uint32_t a, b, c, d;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kOsxsave) == 0) return false;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTileState) == kTileState;
}

std::string find_out() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // Documentation/arch/x86/xstate.rst
  if (!cpu_has_tiles()) return "this CPU has no tiles of bf16";
  if (!system_saves_tiles()) return "the system does not save tile registers";
  if (::syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    return fmt::format("the system refuses tile registers: {}", std::strerror(errno));
  }
  return {};
}

#else

std::string find_out() { return "only on x86-64 Linux"; }

#endif

}  // namespace

const std::string& amx_unavailable() {
  static const std::string kReason = find_out();
  return kReason;
}

}  // namespace fulgur::cpu

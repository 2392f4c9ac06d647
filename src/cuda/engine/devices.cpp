#include "cuda/engine/devices.h"

#include <fmt/format.h>

#include "base/fork_mutex.h"
#include "cuda/engine/architectures.h"
#include "cuda/jit/nvrtc.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

std::string has(const Gpu& gpu, int index) {
  return fmt::format("cuda:{} ({}) has compute capability {}.{}", index, gpu.name(),
                     gpu.capability() / 10, gpu.capability() % 10);
}

/// Why a device does not attend; empty when it does.
std::string does_not_attend(const Gpu& gpu, int index) {
  if (architecture_of(gpu.capability()) != nullptr) return {};
  return fmt::format("{}; want {} for attention", has(gpu, index), known_capabilities());
}

}  // namespace

Machine::Machine() {
  unavailable = driver_unavailable();
  if (!unavailable.empty()) return;
  try {
    find_devices();
  } catch (const Error& error) {
    unavailable = error.what();
  }
  if (unavailable.empty()) unavailable = nvrtc_unavailable();
}

void Machine::find_devices() {
  const int count = gpu_count();
  std::string found;
  if (count == 0) unavailable = "the driver sees no CUDA device";
  for (int index = 0; index < count; ++index) {
    const Gpu& gpu = Gpu::at(index);
    const std::string why = does_not_attend(gpu, index);
    if (!why.empty()) {
      unavailable += (unavailable.empty() ? "" : "; ") + why;
      continue;
    }
    found += fmt::format(", cuda:{} {}", index, gpu.name());
  }
  if (found.empty()) return;
  unavailable.clear();
  description += found;
}

const Machine& Machine::here() {
  static constinit MadeOnce<const Machine> made;
  return made.get([] { return Machine(); });
}

Gpu& usable_gpu(int index) {
  Gpu& gpu = Gpu::at(index);
  if (gpu.capability() < kMinCapability) {
    throw Error(Status::kUnavailable, fmt::format("{}; want {}.{} or more", has(gpu, index),
                                                  kMinCapability / 10, kMinCapability % 10));
  }
  return gpu;
}

Gpu& attending_gpu(int index) {
  Gpu& gpu = Gpu::at(index);
  if (const std::string why = does_not_attend(gpu, index); !why.empty()) {
    throw Error(Status::kUnavailable, why);
  }
  return gpu;
}

Card card_of(const Gpu& gpu) {
  return card_of(*architecture_of(gpu.capability()), gpu.sms(), gpu.shared_bytes());
}

}  // namespace fulgur::cuda

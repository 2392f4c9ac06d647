#include "cuda/engine/devices.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/fork_mutex.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/cards.h"
#include "cuda/jit/nvrtc.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

std::string has(const Gpu& gpu, int index) {
  return fmt::format("cuda:{} ({}) has compute capability {}.{}", index, gpu.name(),
                     gpu.capability() / 10, gpu.capability() % 10);
}

std::string too_old(const Gpu& gpu, int index) {
  if (gpu.capability() >= kMinCapability) return {};
  return fmt::format("{}; want {} or more", has(gpu, index), capability_text(kMinCapability));
}

/// Why attention has no kernels for a device; empty if it has. Without NVRTC no device has any.
std::string does_not_attend(Gpu& gpu, int index) {
  const std::string old = too_old(gpu, index);
  if (!old.empty() || !nvrtc_unavailable().empty()) return old.empty() ? nvrtc_unavailable() : old;
  try {
    gpu.target();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
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
}

void Machine::find_devices() {
  const int count = gpu_count();
  std::string found;
  if (count == 0) unavailable = "the driver sees no CUDA device";
  for (int index = 0; index < count; ++index) {
    Gpu& gpu = Gpu::at(index);
    const std::string why = does_not_attend(gpu, index);
    if (!why.empty()) {
      if (unavailable.find(why) != std::string::npos)
        continue;  // the reason is the same for all devices
      unavailable += (unavailable.empty() ? "" : "; ") + why;
      continue;
    }
    found += fmt::format(", cuda:{} {} ({})", index, gpu.name(), gpu.target().name());
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
  const std::string why = too_old(gpu, index);
  if (!why.empty()) throw Error(Status::kUnavailable, why);
  return gpu;
}

Gpu& attending_gpu(int index) {
  Gpu& gpu = Gpu::at(index);
  if (const std::string why = does_not_attend(gpu, index); !why.empty()) {
    throw Error(Status::kUnavailable, why);
  }
  return gpu;
}

std::span<const Family* const> families_at(int index, Algorithm algorithm) {
  const bool here = driver_unavailable().empty() && index >= 0 && index < gpu_count();
  const bool attends = here && does_not_attend(Gpu::at(index), index).empty();
  return families_of(attends ? Gpu::at(index).target() : Target{}, algorithm);
}

Card card_of(Gpu& gpu) {
  if (gpu.target() != Target{}) return card_of_device(gpu);
  return card_of(architecture_of(gpu.target()), gpu.sms(), gpu.shared_bytes());
}

std::vector<Target> targets_here() {
  std::vector<Target> targets;
  const int count = driver_unavailable().empty() ? gpu_count() : 0;
  for (int index = 0; index < count; ++index) {
    Gpu& gpu = Gpu::at(index);
    if (!does_not_attend(gpu, index).empty()) continue;
    if (std::ranges::count(targets, gpu.target()) == 0) targets.push_back(gpu.target());
  }
  if (targets.empty()) targets.push_back(forced_target().value_or(Target{}));
  return targets;
}

}  // namespace fulgur::cuda

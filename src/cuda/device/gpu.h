#pragma once

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <span>
#include <string>

#include "cuda/device/launch_memory.h"
#include "cuda/driver/driver.h"
#include "cuda/jit/compile.h"

namespace fulgur::cuda {

/// Makes a context current for a scope.
class CurrentContext {
 public:
  explicit CurrentContext(CUcontext context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_ = false;
};

/// A device and what the process keeps on it: loaded kernels and workspaces, in the primary
/// context, which it shares with the CUDA runtime and every framework. Lives to the end of the
/// process.
class Gpu {
 public:
  /// Device `index`. Throws Error(kUnavailable) when there is no such device or no driver.
  static Gpu& at(int index);

  const std::string& name() const { return name_; }
  /// Compute capability: 90 is 9.0.
  int capability() const { return capability_; }
  /// What kernels are compiled for: what FULGUR_CUDA_TARGET forces, or the best that the compiler
  /// has for the device. Found once. Throws Error: kUnavailable without NVRTC or code that the
  /// device runs; kInvalidArgument for a wrong FULGUR_CUDA_TARGET.
  const Target& target();
  int sms() const { return sms_; }
  int shared_bytes() const { return shared_bytes_; }  ///< at most, of a block
  // Of these the driver may know nothing: 0.
  int l2_bytes() const { return l2_bytes_; }
  double megahertz() const { return megahertz_; }
  double bytes_per_microsecond() const { return bytes_per_microsecond_; }  ///< of memory
  /// The primary context, made on first use: it takes time and device memory.
  CUcontext context();

  /// A kernel on this device.
  struct Kernel {
    CUfunction function = nullptr;
    std::string defect;  ///< what makes it slower than its text looks; empty when nothing does
  };
  /// The kernel of a request, compiled or found in the cache at first.
  const Kernel& kernel(const KernelUse& use);
  /// Those of several, which are compiled at once: a compiler takes a second for each.
  void load(std::span<const KernelUse> uses);

  /// Room for one of the kernels of calls without a plan, null at first.
  std::atomic<CUfunction>& call_function(int number) { return call_functions_.at(number); }

  /// Workspaces for launches, in the context.
  LaunchMemory& launch_memory() { return launch_memory_; }

 private:
  explicit Gpu(int index);

  /// Compiled once; others wait for it without holding up other kernels.
  struct Slot {
    std::mutex making;
    Kernel kernel;
  };

  CUdevice device_ = 0;
  std::string name_;
  int capability_ = 0, sms_ = 0, shared_bytes_ = 0, l2_bytes_ = 0;
  double megahertz_ = 0, bytes_per_microsecond_ = 0;
  Target target_;
  std::once_flag target_found_;
  CUcontext context_ = nullptr;
  std::once_flag context_made_;
  std::mutex mutex_;
  std::map<std::string, Slot> kernels_;
  std::array<std::atomic<CUfunction>, 26> call_functions_{};
  LaunchMemory launch_memory_;
};

/// Devices of this machine. Throws Error(kUnavailable) without a driver.
int gpu_count();

}  // namespace fulgur::cuda

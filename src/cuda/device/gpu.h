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

/// A device, with the kernels and workspaces of this process on it. They belong to the primary
/// context, which the CUDA runtime and frameworks use, too. Lives to the end of the process.
class Gpu {
 public:
  /// Device `index`. Throws Error(kUnavailable) if there is no such device or no driver.
  static Gpu& at(int index);

  const std::string& name() const { return name_; }
  /// The compute capability: 90 is 9.0.
  int capability() const { return capability_; }
  /// The target of its kernels: that of FULGUR_CUDA_TARGET, or the best one of the compiler for the
  /// device. Determined once. Throws Error: kUnavailable without NVRTC, or if it has no target that
  /// the device runs; kInvalidArgument for a wrong FULGUR_CUDA_TARGET.
  const Target& target();
  int sms() const { return sms_; }
  int shared_bytes() const { return shared_bytes_; }  ///< maximum of a CTA
  // 0 if the driver does not know them.
  int l2_bytes() const { return l2_bytes_; }
  double megahertz() const { return megahertz_; }
  double bytes_per_microsecond() const { return bytes_per_microsecond_; }  ///< of memory
  /// The primary context, made on first use: it takes time and device memory.
  CUcontext context();

  /// A loaded kernel.
  struct Kernel {
    CUfunction function = nullptr;
    std::string defect;  ///< defect_of() its compilation
  };
  /// A kernel. The first call loads it from the cache, or compiles it.
  const Kernel& kernel(const KernelUse& use);
  /// Loads several kernels, which are compiled in parallel, as each takes about a second.
  void load(std::span<const KernelUse> uses);

  /// The loaded kernel `number` of calls without a plan; null before it is loaded.
  std::atomic<CUfunction>& call_function(int number) { return call_functions_.at(number); }

  /// Workspaces for launches, allocated in the context.
  LaunchMemory& launch_memory() { return launch_memory_; }

 private:
  explicit Gpu(int index);

  /// A kernel that is loaded once. Threads that need it wait, without blocking other kernels.
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

/// The number of devices of this machine. Throws Error(kUnavailable) without a driver.
int gpu_count();

}  // namespace fulgur::cuda

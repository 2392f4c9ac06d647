#include "cuda/device/gpu.h"

#include <fmt/format.h>

#include <future>
#include <vector>

#include "fulgur/error.h"

namespace fulgur::cuda {

CurrentContext::CurrentContext(CUcontext context) {
  CUcontext current = nullptr;
  check(driver().cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == context) return;
  check(driver().cuCtxPushCurrent(context), "cuCtxPushCurrent");
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  if (pushed_) driver().cuCtxPopCurrent(&popped);
}

int gpu_count() {
  int count = 0;
  check(driver().cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

Gpu& Gpu::at(int index) {
  driver();  // throws in a child of fork(), where mutexes of a Gpu may be locked forever
  static std::mutex mutex;
  static auto& gpus =
      *new std::map<int, std::unique_ptr<Gpu>>;  // never destroyed, as plans may outlive statics
  const std::scoped_lock lock(mutex);
  std::unique_ptr<Gpu>& gpu = gpus[index];
  if (gpu == nullptr) {
    const int count = gpu_count();
    if (index < 0 || index >= count) {
      throw Error(Status::kUnavailable, fmt::format("cuda:{}: this machine has {} CUDA device{}",
                                                    index, count, count == 1 ? "" : "s"));
    }
    gpu.reset(new Gpu(index));
  }
  return *gpu;
}

Gpu::Gpu(int index) {
  const Driver& api = driver();
  check(api.cuDeviceGet(&device_, index), "cuDeviceGet");
  const auto attribute = [&](CUdevice_attribute which) {
    int value = 0;
    check(api.cuDeviceGetAttribute(&value, which, device_), "cuDeviceGetAttribute");
    return value;
  };
  char name[256] = {};
  check(api.cuDeviceGetName(name, sizeof(name) - 1, device_), "cuDeviceGetName");
  name_ = name;
  capability_ = 10 * attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
  sms_ = attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
  shared_bytes_ = attribute(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  l2_bytes_ = attribute(CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
  megahertz_ = 1e-3 * attribute(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
  constexpr double kTransfers = 2;  // per clock: on both edges
  bytes_per_microsecond_ = kTransfers * 1e-3 * attribute(CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE) *
                           attribute(CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH) / 8;
}

const Target& Gpu::target() {
  std::call_once(target_found_, [&] {
    const std::optional<Target> forced = forced_target();
    if (forced && !runs(capability_, *forced)) {
      throw Error(Status::kInvalidArgument,
                  fmt::format("FULGUR_CUDA_TARGET: got {}, which {} of compute capability {} does "
                              "not run; want machine code for {}.0 to {}, or PTX up to compute_{}",
                              forced->name(), name_, capability_text(capability_), capability_ / 10,
                              capability_text(capability_), capability_));
    }
    target_ = forced ? *forced : target_of(capability_, nvrtc_capabilities());
  });
  return target_;
}

CUcontext Gpu::context() {
  driver();  // throws in a child of fork()
  std::call_once(context_made_, [&] {
    check(driver().cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
  });
  return context_;
}

void Gpu::load(std::span<const KernelUse> uses) {
  std::vector<std::future<void>> others;
  for (const KernelUse& use : uses.subspan(1)) {
    others.push_back(std::async(std::launch::async, [this, &use] { kernel(use); }));
  }
  kernel(uses.front());
  for (std::future<void>& other : others) other.get();
}

const Gpu::Kernel& Gpu::kernel(const KernelUse& use) {
  const KernelRequest& request = use.request;
  const std::string key = fmt::format("{} {} {}\n{}", request.source, use.entry, use.shared_bytes,
                                      request.kernel_config);
  Slot* slot = nullptr;
  {
    const std::scoped_lock lock(mutex_);
    slot = &kernels_[key];
  }
  const std::scoped_lock lock(slot->making);
  Kernel& kernel = slot->kernel;
  if (kernel.function != nullptr) return kernel;
  const Cubin cubin = cached(request, target());
  const Driver& api = driver();
  const CurrentContext current(context());
  const OutsideCapture outside;
  CUmodule module = nullptr;
  if (const CUresult result = api.cuModuleLoadData(&module, cubin.image.data()); result != 0) {
    check(result, fmt::format("loading {} (compiled by NVRTC {}) into {} (driver for CUDA {})",
                              request.source, nvrtc_identity(), name_, version_text(api.version))
                      .c_str());
  }
  CUfunction function = nullptr;
  check(api.cuModuleGetFunction(&function, module, use.entry), "cuModuleGetFunction");
  check(api.cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                               use.shared_bytes),
        "cuFuncSetAttribute");
  kernel = {function, defect_of(cubin, use.few_spilled_bytes)};
  return kernel;
}

}  // namespace fulgur::cuda

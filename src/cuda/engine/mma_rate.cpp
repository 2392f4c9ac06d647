#include "cuda/engine/mma_rate.h"

#include <fmt/format.h>

#include <charconv>
#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include "cuda/common/launch.h"
#include "cuda/jit/cache_folder.h"
#include "cuda/jit/sha256.h"
#include "fulgur/error.h"
#include "kernels/common/mma_rate_params.h"

namespace fulgur::cuda {
namespace {

constexpr int kProductsOfChain = 64;
constexpr double kFlopsOfProduct = 2.0 * 16 * 16 * 8;
constexpr double kStep = 64;                      // rates of devices are multiples of it
constexpr size_t kCopyBytes = size_t{128} << 20;  // more than fits any L2 cache
constexpr int kCopies = 4;
constexpr double kCopyFraction = 0.9;  // of the memory bandwidth, which copies reach

/// A rate of a device that is measured once and stored with the compiled kernels.
struct Quantity {
  const char* name;
  const char* suffix;                       ///< of the name of its file
  double min, max;                          ///< possible values
  std::optional<double> (*measured)(Gpu&);  ///< none if it cannot be measured now, for example
                                            ///< during a capture
  bool possible(double value) const { return value >= min && value <= max; }
};

/// The text that identifies the device of a measurement.
std::string key_of(const Quantity& quantity, const Gpu& gpu) {
  return fmt::format("{} on {}, compute capability {}\n", quantity.name, gpu.name(),
                     capability_text(gpu.capability()));
}

/// Allocated device memory.
class Memory {
 public:
  explicit Memory(size_t bytes) { check(driver().cuMemAlloc(&at_, bytes), "measuring a device"); }
  ~Memory() { driver().cuMemFree(at_); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  CUdeviceptr at() const { return at_; }

 private:
  CUdeviceptr at_ = 0;
};

void copy(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
  check(driver().cuMemcpy(to, from, bytes), "measuring a device");
}

/// FLOP per clock and SM.
std::optional<double> measured_products(Gpu& gpu) try {
  const CUfunction kernel = gpu.kernel(mma_rate_kernel()).function;
  const CurrentContext current(gpu.context());
  const OutsideCapture outside;
  long long cycles = 0;
  const auto here = reinterpret_cast<CUdeviceptr>(&cycles);
  const Memory memory(sizeof cycles);
  copy(memory.at(), here, sizeof cycles);
  const MmaRateParams params{kProductsOfChain, reinterpret_cast<long long*>(memory.at())};
  launch(CU_STREAM_PER_THREAD, kernel, &params, {}, 32 * kMmaRateWarps, 0, "measuring mma.sync");
  check(driver().cuStreamSynchronize(CU_STREAM_PER_THREAD), "measuring mma.sync");
  copy(here, memory.at(), sizeof cycles);
  const double products = double{kProductsOfChain} * kMmaRateWarps * kMmaRateChains;
  return kStep * std::round(products * kFlopsOfProduct / static_cast<double>(cycles) / kStep);
} catch (const Error&) {
  return std::nullopt;
}

/// Bytes per microsecond.
std::optional<double> measured_memory(Gpu& gpu) try {
  const CurrentContext current(gpu.context());
  const OutsideCapture outside;
  const Memory from(kCopyBytes), to(kCopyBytes);
  const auto copies = [&](int count) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < count; ++i) copy(to.at(), from.at(), kCopyBytes);
    check(driver().cuStreamSynchronize(nullptr), "measuring a device");
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start);
  };
  copies(1);
  return 2.0 * kCopies * kCopyBytes / copies(kCopies).count() / kCopyFraction;
} catch (const Error&) {
  return std::nullopt;
}

std::optional<double> kept(const CacheFolder& folder, const std::string& name,
                           const std::string& key, const Quantity& quantity) {
  std::string why;  // a file that cannot be read is measured again
  const std::optional<std::string> content = folder.load(name, &why);
  if (!content || !content->starts_with(key)) return std::nullopt;
  double value = 0;
  const char* const end = content->data() + content->size();
  const auto read = std::from_chars(content->data() + key.size(), end, value);
  return read.ec == std::errc{} && quantity.possible(value) ? std::optional(value) : std::nullopt;
}

/// The rate of a device, or `otherwise` if it cannot be measured.
double known(const Quantity& quantity, Gpu& gpu, double otherwise) {
  static auto& all = *new std::map<std::string, double>;
  static std::mutex mutex;
  const std::string key = key_of(quantity, gpu);
  const std::string name = Sha256().add(key).hex() + quantity.suffix;
  const std::scoped_lock lock(mutex);
  if (const auto found = all.find(key); found != all.end()) return found->second;
  const CacheFolder folder = CacheFolder::standard();
  if (const auto value = kept(folder, name, key, quantity)) return all[key] = *value;
  const std::optional<double> value = quantity.measured(gpu);
  if (!value) return otherwise;
  if (!quantity.possible(*value)) return all[key] = otherwise;
  folder.store(name, fmt::format("{}{}\n", key, *value));
  return all[key] = *value;
}

}  // namespace

KernelUse mma_rate_kernel() { return {{"common/mma_rate.cu", ""}, "fulgur_mma_rate", 0}; }

double mma_rate(Gpu& gpu) {
  static constexpr Quantity kRate{"mma.sync", ".rate", 128, 16384, measured_products};
  return known(kRate, gpu, capability_row(gpu.capability()).mma_rate);
}

double memory_rate(Gpu& gpu) {
  static constexpr Quantity kRate{"memory", ".bandwidth", 1e3, 1e8, measured_memory};
  return known(kRate, gpu, 0);
}

}  // namespace fulgur::cuda

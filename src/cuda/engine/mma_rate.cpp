#include "cuda/engine/mma_rate.h"

#include <fmt/format.h>

#include <charconv>
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
constexpr double kStep = 64;  // of what a device may have
constexpr double kLeast = 128, kMost = 16384;

/// What a measurement holds for.
std::string key_of(const Gpu& gpu) {
  return fmt::format("mma.sync on {}, compute capability {}\n", gpu.name(),
                     capability_text(gpu.capability()));
}

bool possible(double rate) { return rate >= kLeast && rate <= kMost; }

/// Memory of a device for one number.
class Number {
 public:
  Number() { check(driver().cuMemAlloc(&at_, sizeof(long long)), "measuring mma.sync"); }
  ~Number() { driver().cuMemFree(at_); }
  Number(const Number&) = delete;
  Number& operator=(const Number&) = delete;

  long long* pointer() const { return reinterpret_cast<long long*>(at_); }
  void set(long long value) const { copy(at_, reinterpret_cast<CUdeviceptr>(&value)); }
  long long value() const {
    long long value = 0;
    copy(reinterpret_cast<CUdeviceptr>(&value), at_);
    return value;
  }

 private:
  static void copy(CUdeviceptr to, CUdeviceptr from) {
    check(driver().cuMemcpy(to, from, sizeof(long long)), "measuring mma.sync");
  }
  CUdeviceptr at_ = 0;
};

/// None where it cannot be measured now, for example because a capture forbids it.
std::optional<double> measured(Gpu& gpu) try {
  const CUfunction kernel = gpu.kernel(mma_rate_kernel()).function;
  const CurrentContext current(gpu.context());
  const OutsideCapture outside;
  const Number cycles;
  cycles.set(0);
  const MmaRateParams params{kProductsOfChain, cycles.pointer()};
  launch(CU_STREAM_PER_THREAD, kernel, &params, {}, 32 * kMmaRateWarps, 0, "measuring mma.sync");
  check(driver().cuStreamSynchronize(CU_STREAM_PER_THREAD), "measuring mma.sync");
  const double products = double{kProductsOfChain} * kMmaRateWarps * kMmaRateChains;
  const double rate = products * kFlopsOfProduct / static_cast<double>(cycles.value());
  return kStep * std::round(rate / kStep);
} catch (const Error&) {
  return std::nullopt;
}

std::optional<double> kept(const CacheFolder& folder, const std::string& name,
                           const std::string& key) {
  std::string why;  // what cannot be read is measured anew
  const std::optional<std::string> content = folder.load(name, &why);
  if (!content || !content->starts_with(key)) return std::nullopt;
  double rate = 0;
  const char* const end = content->data() + content->size();
  const auto read = std::from_chars(content->data() + key.size(), end, rate);
  return read.ec == std::errc{} && possible(rate) ? std::optional(rate) : std::nullopt;
}

}  // namespace

KernelUse mma_rate_kernel() { return {{"common/mma_rate.cu", ""}, "fulgur_mma_rate", 0}; }

double mma_rate(Gpu& gpu) {
  static auto& known = *new std::map<std::string, double>;
  static std::mutex mutex;
  const std::string key = key_of(gpu), name = Sha256().add(key).hex() + ".rate";
  const std::scoped_lock lock(mutex);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  const CacheFolder folder = CacheFolder::standard();
  const double least = capability_row(gpu.capability()).mma_rate;
  if (const auto rate = kept(folder, name, key)) return known[key] = *rate;
  const std::optional<double> rate = measured(gpu);
  if (!rate) return least;
  if (!possible(*rate)) return known[key] = least;
  folder.store(name, fmt::format("{}{}\n", key, *rate));
  return known[key] = *rate;
}

}  // namespace fulgur::cuda

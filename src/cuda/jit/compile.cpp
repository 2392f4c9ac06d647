#include "cuda/jit/compile.h"

#include <fmt/format.h>

#include <charconv>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "cuda/jit/sha256.h"
#include "cuda/jit/sources.h"

namespace fulgur::cuda {
namespace {

std::vector<std::string> options_of(const Target& target) {
  return {"--gpu-architecture=" + target.name(), "--std=c++20",
          // By default the compiler raises the stack limit of this process.
          "--modify-stack-limit=false", "--ptxas-options=-v"};
}

/// The digest of all text that a kernel is compiled from. Computed once per source.
std::string text_digest(const std::string& source) {
  static std::mutex mutex;
  static std::map<std::string, std::string> found;
  const std::lock_guard lock(mutex);
  std::string& result = found[source];
  if (result.empty()) result = digest(sources_of(kernel_sources(), source));
  return result;
}

}  // namespace

std::string defect_of(const Cubin& cubin, int few_spilled_bytes) {
  const std::string_view log = cubin.log;
  constexpr std::string_view kSpills = " bytes spill stores";
  for (size_t at = log.find(kSpills); at != log.npos; at = log.find(kSpills, at + 1)) {
    const size_t before = log.find_last_not_of("0123456789", at - 1);
    const std::string_view bytes = log.substr(before + 1, at - before - 1);
    int count = 0;
    std::from_chars(bytes.data(), bytes.data() + bytes.size(), count);
    if (count > few_spilled_bytes) return fmt::format("spills {} bytes of registers", bytes);
  }
  // ptxas reports serialized wgmma by remarks C7500 to C7599.
  if (log.find("(C75") != log.npos) return "has tensor core products that wait for each other";
  return {};
}

const std::string& kernels_identity() {
  static const std::string kIdentity = digest(kernel_sources()) + " by NVRTC " + nvrtc_identity();
  return kIdentity;
}

std::string cache_key(const KernelRequest& request, const Target& target) {
  Sha256 hash;
  const auto add = [&](const std::string& part) { hash.add(part).add(std::string_view("\0", 1)); };
  for (const std::string& part :
       {text_digest(request.source), nvrtc_identity(), request.source, request.kernel_config}) {
    add(part);
  }
  for (const std::string& option : options_of(target)) add(option);
  return hash.hex();
}

Cubin compile(const KernelRequest& request, const Target& target) {
  // The compiler can read no other text, so that the key covers all that it reads.
  return nvrtc_compile(sources_of(kernel_sources(), request.source), request.source,
                       request.kernel_config, options_of(target));
}

Cubin cached(const KernelRequest& request, const Target& target) {
  static CubinCache cache(CacheFolder::standard());
  return cache.get(cache_key(request, target), [&] { return compile(request, target); });
}

}  // namespace fulgur::cuda

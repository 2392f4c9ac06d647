#include "cuda/jit.h"

#include <vector>

#include "cuda/kernel_sources.h"
#include "cuda/sha256.h"

namespace fulgur::cuda {
namespace {

std::vector<std::string> options_of(const KernelRequest& request) {
  return {"--gpu-architecture=" + request.architecture, "--std=c++20",
          // The compiler would otherwise raise this process's stack limit.
          "--modify-stack-limit=false", "--ptxas-options=-v"};
}

const std::string& sources_digest() {
  static const std::string kDigest = digest(kernel_sources());
  return kDigest;
}

}  // namespace

std::string cache_key(const KernelRequest& request) {
  Sha256 hash;
  const auto add = [&](const std::string& part) { hash.add(part).add(std::string_view("\0", 1)); };
  for (const auto* part : {&sources_digest(), &request.source, &request.plan_header,
                           &request.architecture, &nvrtc_identity()}) {
    add(*part);
  }
  for (const std::string& option : options_of(request)) add(option);
  return hash.hex();
}

Cubin compile(const KernelRequest& request) {
  return nvrtc_compile(kernel_sources(), request.source, request.plan_header, options_of(request));
}

Cubin cached(const KernelRequest& request) {
  static CubinCache cache(CubinCache::default_folder());
  return cache.get(cache_key(request), [&] { return compile(request); });
}

}  // namespace fulgur::cuda

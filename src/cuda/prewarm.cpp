#include <map>
#include <string>
#include <vector>

#include "cuda/architectures.h"
#include "cuda/cubin_cache.h"
#include "cuda/jit.h"
#include "cuda/reachable.h"
#include "fulgur/cuda.h"
#include "fulgur/error.h"
#include "problem.h"

namespace fulgur::cuda {

Prewarmed prewarm(const ForwardArgs& args, const Options& options, const std::string& folder) {
  const Problem problem = make_problem(args, options);
  if (const std::string why = no_family_computes(problem); !why.empty()) {
    throw Error(Status::kUnsupported, "engine cuda: " + why);
  }
  CubinCache cache(folder.empty() ? CacheFolder::standard() : CacheFolder(folder));
  if (const std::string why = cache.folder().unusable(); !why.empty()) {
    throw Error(Status::kUnavailable, why);
  }
  Prewarmed result;
  std::map<std::string, std::string> defects;  // of the kernels that are in the cache, by key
  // The kernel's defect, when it is in the cache.
  const auto compiled = [&](const KernelRequest& request) {
    const std::string key = cache_key(request);
    const auto [at, added] = defects.try_emplace(key);
    if (!added) return at->second;
    if (const auto present = cache.load(key)) {
      ++result.present;
      return at->second = defect_of(*present);
    }
    at->second = defect_of(cache.get(key, [&] { return compile(request); }));
    if (!cache.load(key)) {  // the cache has said why
      throw Error(Status::kUnavailable, "cannot write to " + cache.folder().path().string());
    }
    ++result.compiled;
    return at->second;
  };
  for_reachable(problem, [&](const Candidates& candidates) {
    for (const auto& candidate : candidates) {
      const std::vector<KernelUse> kernels = candidate->kernels();
      for (const KernelUse& use : kernels) compiled(use.request);
      // A plan falls to the next tile where a kernel has a defect, unless it is invariant.
      if (problem.invariant || kernels.empty() || compiled(kernels[0].request).empty()) {
        break;
      }
    }
  });
  return result;
}

}  // namespace fulgur::cuda

#include "cuda/cubin_cache.h"
#include "cuda/hopper_forward.h"
#include "cuda/jit.h"
#include "fulgur/cuda.h"
#include "fulgur/error.h"
#include "problem.h"

namespace fulgur::cuda {

Prewarmed prewarm(const ForwardArgs& args, const Options& options, const std::string& folder) {
  const Problem problem = make_problem(args, options);
  if (const std::string why = hopper_forward_rejects(problem); !why.empty()) {
    throw Error(Status::kUnsupported, "engine cuda: " + why);
  }
  CubinCache cache(folder.empty() ? CacheFolder::standard() : CacheFolder(folder));
  if (const std::string why = cache.folder().unusable(); !why.empty())
    throw Error(Status::kInternal, why);
  Prewarmed result;
  for (const KernelRequest& request : forward_kernels(problem, HopperTarget{})) {
    const std::string key = cache_key(request);
    if (cache.load(key)) {
      ++result.present;
      continue;
    }
    cache.get(key, [&] { return compile(request); });
    if (!cache.load(key)) {  // the cache has said why
      throw Error(Status::kInternal, "cannot write to " + cache.folder().path().string());
    }
    ++result.compiled;
  }
  return result;
}

}  // namespace fulgur::cuda

#include <set>
#include <string>
#include <vector>

#include "cuda/architectures.h"
#include "cuda/call_kernel.h"
#include "cuda/cubin_cache.h"
#include "cuda/jit.h"
#include "cuda/reachable.h"
#include "fulgur/cuda.h"
#include "fulgur/error.h"
#include "problem.h"

namespace fulgur::cuda {
namespace {

Prewarmed prewarm_like(const Problem& problem, const std::string& folder) {
  if (const std::string why = no_family_computes(problem); !why.empty()) {
    throw Error(Status::kUnsupported, "engine cuda: " + why);
  }
  CubinCache cache(folder.empty() ? CacheFolder::standard() : CacheFolder(folder));
  if (const std::string why = cache.folder().unusable(); !why.empty()) {
    throw Error(Status::kUnavailable, why);
  }
  Prewarmed result;
  std::set<std::string> seen;
  const auto add = [&](const KernelRequest& request) {
    const std::string key = cache_key(request);
    if (!seen.insert(key).second) return;
    if (cache.load(key)) {
      ++result.present;
      return;
    }
    cache.get(key, [&] { return compile(request); });
    if (!cache.load(key)) {  // the cache has said why
      throw Error(Status::kUnavailable, "cannot write to " + cache.folder().path().string());
    }
    ++result.compiled;
  };
  // Every tile, not the best alone: which one that is changes with lengths in between, and where
  // the compiler finds a defect. An invariant call has the first whatever else is.
  for_reachable(problem, [&](const Candidates& candidates) {
    for (const auto& candidate : candidates) {
      for (const KernelUse& use : candidate->kernels()) add(use.request);
      if (problem.invariant) break;
    }
  });
  const bool forward = problem.pass == Pass::kForward;
  if (forward) {
    add(use_of(append_kernel(problem.dtype)).request);
    add(use_of(CallKernel::kMerge).request);
  }
  if (forward || !problem.alike() || problem.has_alibi() || problem.has_sinks)
    add(use_of(CallKernel::kStore).request);
  return result;
}

}  // namespace

Prewarmed prewarm(const ForwardArgs& args, const Options& options, const std::string& folder) {
  return prewarm_like(make_problem(args, options), folder);
}
Prewarmed prewarm(const BackwardArgs& args, const Options& options, const std::string& folder) {
  return prewarm_like(make_problem(args, options), folder);
}

}  // namespace fulgur::cuda

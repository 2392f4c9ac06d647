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
#include "prefix_parts.h"
#include "problem.h"

namespace fulgur::cuda {
namespace {

/// Tensors of one row, or of one sequence, do not say how far the next one lies: as far as in
/// contiguous ones.
Problem with_strides(Problem p) {
  const auto give = [](Layout& l, int64_t batch, int64_t rows, int64_t heads, int64_t dim) {
    if (rows == 1) l.row = heads > 1 ? heads * l.head : dim;
    if (batch == 1) l.batch = l.row;  // times any number of rows
  };
  const auto give_q = [&](Layout& l, int64_t dim) {
    give(l, p.packed ? 0 : p.batch, p.packed ? p.total_q : p.sq, p.hq, dim);
  };
  const auto give_k = [&](Layout& l, int64_t dim) {
    const bool elsewhere = p.cache.paged() || p.cache.batch_idx;
    const int64_t rows = p.cache.paged() ? p.cache.page : p.packed_k ? p.total_k : p.sk;
    give(l, p.packed_k ? 0 : elsewhere ? p.cache.entries : p.batch, rows, p.hk, dim);
  };
  for (Layout* l : {&p.q, &p.dq}) give_q(*l, p.d);
  for (Layout* l : {&p.out, &p.dout}) give_q(*l, p.dv);
  for (Layout* l : {&p.k, &p.dk}) give_k(*l, p.d);
  for (Layout* l : {&p.v, &p.dv_grad}) give_k(*l, p.dv);
  return p;
}

Prewarmed prewarm_like(const Problem& given, const std::string& folder) {
  const Problem problem = with_strides(given);
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
  std::vector<Problem> problems = {without_prefixes(problem)};
  if (problem.prefix_groups > 0 && undivided(problem).empty()) {
    problems.insert(problems.end(), {prefix_part(problem), rest_part(problem)});
    add(use_of(CallKernel::kDivide).request);
  }
  for (const Problem& p : problems) {
    for_reachable(p, [&](const Candidates& candidates) {
      for (const auto& candidate : candidates) {
        for (const KernelUse& use : candidate->kernels()) add(use.request);
        if (p.invariant) break;
      }
    });
  }
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

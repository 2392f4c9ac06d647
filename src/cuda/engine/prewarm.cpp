#include <fmt/format.h>

#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "call/append_then_attend.h"
#include "call/make_problem.h"
#include "call/prefix_split.h"
#include "call/problem.h"
#include "cuda/common/call_kernel.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/devices.h"
#include "cuda/engine/reachable.h"
#include "cuda/jit/compile.h"
#include "cuda/jit/cubin_cache.h"
#include "fulgur/cuda.h"
#include "fulgur/error.h"

namespace fulgur::cuda {
namespace {

/// Sets the strides that tensors of one row, or of one sequence, leave open to those of contiguous
/// tensors.
Problem with_strides(Problem p) {
  const auto give = [](Layout& l, int64_t batch, int64_t rows, int64_t heads, int64_t dim) {
    if (rows == 1) l.row = heads > 1 ? heads * l.head : dim;
    if (batch == 1) l.batch = l.row;  // times any number of rows is a multiple of it
  };
  const auto give_q = [&](Layout& l, int64_t dim) {
    give(l, p.packed ? 0 : p.batch, p.packed ? p.total_q : p.sq, p.hq, dim);
  };
  const auto give_k = [&](Layout& l, int64_t dim) {
    const bool elsewhere = p.cache.paged() || p.has(Arg::kCacheBatchIdx);
    const int64_t rows = p.cache.paged() ? p.cache.page : p.packed_k ? p.total_k : p.sk;
    give(l, p.packed_k ? 0 : elsewhere ? p.cache.entries : p.batch, rows, p.hk, dim);
  };
  for (Layout* l : {&p.q, &p.dq}) give_q(*l, p.d);
  for (Layout* l : {&p.out, &p.dout}) give_q(*l, p.dv);
  for (Layout* l : {&p.k, &p.dk}) give_k(*l, p.d);
  for (Layout* l : {&p.v, &p.dv_grad}) give_k(*l, p.dv);
  return p;
}

/// A kernel to compile.
struct Wanted {
  KernelRequest request;
  Target target;
};

/// Adds all kernels that calls like `problem` can need for a target, by their keys in the cache.
void add_requests(const Problem& problem, const Target& target,
                  std::map<std::string, Wanted>& requests) {
  const auto add = [&](const KernelUse& use) {
    requests.emplace(cache_key(use.request, target), Wanted{use.request, target});
  };
  const auto add_of_none = [&](CallKernel kernel) { add(use_of(kernel)); };
  const Problem::Append append{.given = problem.append.given, .rotates = problem.append.rotates};
  std::vector<Problem> problems = {without_prefixes(without_append(problem))};
  if (problem.prefix_groups > 0 && undivided(problem).empty()) {
    const Problem follows = without_append(problem);
    problems.insert(problems.end(), {prefix_part(follows), rest_part(follows)});
    add_of_none(CallKernel::kDivide);
  }
  // Every candidate, not only the best one, which changes with lengths that are not sampled, and if
  // the compiler makes a kernel with a defect. An invariant call always has the first one.
  for (const Problem& p : problems) {
    for_reachable(p, target, [&](const Candidates& candidates) {
      for (const auto& candidate : candidates) {
        for (const KernelUse& use : candidate->kernels()) add(use);
        std::string why_not;
        if (const auto fused = append.given ? candidate->fused(append, &why_not) : nullptr) {
          for (const KernelUse& use : fused->kernels()) add(use);
        }
        if (p.invariant) break;
      }
    });
  }
  const bool forward = problem.pass == Pass::kForward;
  if (forward) {
    const bool codes = is_low_bit(problem.dtypes.k) || is_low_bit(problem.dtypes.v);
    if (!is_low_bit(problem.dtypes.q)) add_of_none(append_kernel(problem.dtypes.q, codes));
    add_of_none(CallKernel::kMerge);
  }
  if (forward || !problem.alike() || problem.has(Arg::kAlibiSlopes) || problem.has(Arg::kSinks)) {
    add_of_none(CallKernel::kUpload);
  }
}

/// The targets that users name, or those of the devices of this machine.
std::vector<Target> targets_of(std::span<const std::string> names) {
  std::vector<Target> targets;
  for (const std::string& name : names)
    targets.push_back(target_called(name, "targets", nvrtc_capabilities()));
  return targets.empty() ? targets_here() : targets;
}

Prewarmed prewarm_like(const Problem& given, const std::string& folder, int threads,
                       std::span<const std::string> names) {
  const Problem problem = with_strides(given);
  const std::vector<Target> targets = targets_of(names);
  for (const Target& target : targets) {
    const std::string why =
        no_family_computes(without_append(problem), families_of(target, problem.algorithm));
    if (!why.empty()) throw Error(Status::kUnsupported, "engine cuda: " + why);
  }
  CubinCache cache(folder.empty() ? CacheFolder::standard() : CacheFolder(folder));
  if (const std::string why = cache.folder().unusable(); !why.empty()) {
    throw Error(Status::kUnavailable, why);
  }
  std::map<std::string, Wanted> requests;
  for (const Target& target : targets) add_requests(problem, target, requests);
  std::vector<std::pair<std::string, Wanted>> missing;
  for (const auto& [key, wanted] : requests) {
    if (!cache.load(key)) missing.emplace_back(key, wanted);
  }
  const auto compiled = static_cast<int>(missing.size());
  parallel_for(compiled, threads, [&](int64_t i) {
    const auto& [key, wanted] = missing[static_cast<size_t>(i)];
    cache.get(key, [&wanted = wanted] { return compile(wanted.request, wanted.target); });
    if (cache.load(key)) return;
    // The cache has printed the reason.
    throw Error(Status::kUnavailable, "cannot write to " + cache.folder().path().string());
  });
  return {compiled, static_cast<int>(requests.size()) - compiled};
}

}  // namespace

Prewarmed prewarm(const ForwardArgs& args, const Options& options, const std::string& folder,
                  std::span<const std::string> targets) {
  return prewarm_like(make_problem(args, options), folder, options.threads, targets);
}
Prewarmed prewarm(const BackwardArgs& args, const Options& options, const std::string& folder,
                  std::span<const std::string> targets) {
  return prewarm_like(make_problem(args, options), folder, options.threads, targets);
}

}  // namespace fulgur::cuda

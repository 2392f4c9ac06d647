#include "api/prepare.h"
#include "base/fork_mutex.h"
#include "base/parallel.h"
#include "call/make_problem.h"
#include "fulgur/attention.h"
#include "fulgur/cuda.h"
#include "plan/engines.h"
#include "plan/plan.h"
#include "plan/plan_cache.h"

namespace fulgur {
namespace {

constexpr size_t kMaxPlans = 1024;

/// The plan of a call: from the cache, or a new one. `run` is the run of the call that waits for
/// the plan, or null.
template <class Args>
std::shared_ptr<const Plan::Impl> plan_of_call(const Args& args, const Options& options,
                                               const Run* run) {
  static constinit MadeOnce<PlanCache> made;
  PlanCache& cache = made.get([] { return PlanCache(kMaxPlans); });
  const PlanCache::Key key{make_problem(args, options), options.engine,
                           thread_count(checked_threads(options))};
  std::shared_ptr<const Plan::Impl> plan = cache.find(key);
  if (plan == nullptr) {
    plan = make_plan(key.problem, args, options, run);
    cache.keep(key, plan);
  }
  return plan;
}

/// Computes a call: checks it, finds or makes its plan, and runs the plan.
template <class Args>
void call(const Args& args, const Options& options, const Run& run) {
  run_plan(*plan_of_call(args, options, &run), args, run);
}

}  // namespace

Plan plan(const ForwardArgs& args, const Options& options) {
  return Plan(make_plan(make_problem(args, options), args, options, nullptr));
}

Plan plan(const BackwardArgs& args, const Options& options) {
  return Plan(make_plan(make_problem(args, options), args, options, nullptr));
}

namespace {

template <class Args>
Plan planned_for(const std::string& card, const Args& args, const Options& options) {
  const Engine* const engine = &engine_for_card(card);
  return Plan(make_plan(make_problem(args, options), args, options, nullptr, {&engine, 1}));
}

}  // namespace

Plan cuda::plan_for_card(const std::string& card, const ForwardArgs& args, const Options& options) {
  return planned_for(card, args, options);
}

Plan cuda::plan_for_card(const std::string& card, const BackwardArgs& args,
                         const Options& options) {
  return planned_for(card, args, options);
}

void forward(const ForwardArgs& args, const Options& options, const Run& run) {
  call(args, options, run);
}

void backward(const BackwardArgs& args, const Options& options, const Run& run) {
  call(args, options, run);
}

void prepare(const ForwardArgs& args, const Options& options) {
  plan_of_call(args, options, nullptr);
}

void prepare(const BackwardArgs& args, const Options& options) {
  plan_of_call(args, options, nullptr);
}

std::vector<EngineInfo> engines() {
  std::vector<EngineInfo> infos;
  for (const Engine* engine : all_engines()) {
    infos.push_back({engine->name(), engine->description(), engine->unavailable()});
  }
  return infos;
}

}  // namespace fulgur

#include "fulgur/attention.h"
#include "plan.h"

namespace fulgur {
namespace {

/// The spine: validate, choose, plan.
std::shared_ptr<Plan::Impl> make_plan(Problem problem) {
  auto impl = std::make_shared<Plan::Impl>();
  impl->problem = std::move(problem);
  impl->engine = &choose_engine(impl->problem, &impl->rejected);
  impl->executable = impl->engine->plan(impl->problem);
  return impl;
}

}  // namespace

Plan plan(const ForwardArgs& args, const Options& options) {
  auto impl = make_plan(make_problem(args, options));
  impl->forward = args;
  return Plan(std::move(impl));
}

Plan plan(const BackwardArgs& args, const Options& options) {
  auto impl = make_plan(make_problem(args, options));
  impl->backward = args;
  return Plan(std::move(impl));
}

void forward(const ForwardArgs& args, const Options& options) { plan(args, options).run(args); }

void backward(const BackwardArgs& args, const Options& options) { plan(args, options).run(args); }

std::vector<EngineInfo> engines() {
  std::vector<EngineInfo> infos;
  for (const Engine* engine : all_engines()) {
    infos.push_back({engine->name(), engine->description(), engine->unavailable()});
  }
  return infos;
}

}  // namespace fulgur

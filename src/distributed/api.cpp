// The entry points of calls of groups.
#include <memory>
#include <string>
#include <utility>

#include "distributed/group/call_plans.h"
#include "distributed/pages.h"
#include "distributed/plan.h"
#include "fulgur/distributed/plan.h"

namespace fulgur {

using distributed::PagesPlan;
using distributed::RowsPlan;

void DistributedPlan::Impl::run(const ForwardArgs&, const Run&) const {
  fail("args", "got those of the forward pass, want those of the backward pass, as planned");
}

void DistributedPlan::Impl::run(const BackwardArgs&, const Run&) const {
  fail("args", "got those of the backward pass, want those of the forward pass, as planned");
}

void DistributedPlan::run(const ForwardArgs& args, const Run& run) const { impl_->run(args, run); }
void DistributedPlan::run(const BackwardArgs& args, const Run& run) const { impl_->run(args, run); }
int64_t DistributedPlan::workspace_bytes() const { return impl_->workspace_bytes(); }
std::string DistributedPlan::explain() const { return impl_->explain(); }

namespace {

/// The plan of a call: that of an earlier equal call, if all ranks have it.
template <class Args>
DistributedPlan plan_of(const Args& args, const Options& options, const Group& group,
                        const Distribution& distribution) {
  Group::Impl& impl = group.impl();
  std::string key = distributed::key_of(args, options, distribution);
  const auto known = impl.plans.find(key);
  if (known && impl.all_have(known->number)) return known->plan;
  // The group owns the plan, so the plan must not own the group.
  const Group unowned(std::shared_ptr<Group::Impl>(std::shared_ptr<void>(), &impl));
  const DistributedPlan made = plan(args, options, unowned, distribution);
  impl.plans.keep(std::move(key), {impl.agreements(), made});
  return made;
}

}  // namespace

DistributedPlan plan(const ForwardArgs& args, const Options& options, const Group& group,
                     const Distribution& distribution) {
  if (distribution.sharding == Sharding::kByPage) {
    return DistributedPlan(std::make_shared<PagesPlan>(args, options, group, distribution));
  }
  return DistributedPlan(std::make_shared<RowsPlan>(args, options, group, distribution));
}

DistributedPlan plan(const BackwardArgs& args, const Options& options, const Group& group,
                     const Distribution& distribution) {
  return DistributedPlan(std::make_shared<RowsPlan>(args, options, group, distribution));
}

void forward(const ForwardArgs& args, const Options& options, const Group& group,
             const Distribution& distribution, const Run& run) {
  plan_of(args, options, group, distribution).run(args, run);
}

void backward(const BackwardArgs& args, const Options& options, const Group& group,
              const Distribution& distribution, const Run& run) {
  plan_of(args, options, group, distribution).run(args, run);
}

}  // namespace fulgur

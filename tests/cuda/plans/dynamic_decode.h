/// Decode calls with the dynamic schedule, whether or not the cost model would take it.
#pragma once

#include <functional>

#include "../gpu/device.h"
#include "call/make_problem.h"
#include "cuda/decode/candidates.h"
#include "cuda/decode/family.h"
#include "cuda/engine/devices.h"
#include "cuda/sm90/families.h"
#include "engine_memory.h"
#include "workload.h"

namespace fulgur::test {

/// As many heads of k and v as make more q blocks of the sequences than there are CTAs.
inline int64_t enough_heads(size_t sequences) {
  return cuda::Gpu::at(0).sms() / static_cast<int64_t>(sequences) + 1;
}

/// Runs a forward pass so often by each plan that has the dynamic schedule, and calls check(run)
/// after each run.
inline void run_dynamic_plans(const ForwardTensors& tensors, const Options& options, int runs,
                              const std::function<void(int run)>& check) {
  cuda::Gpu& gpu = cuda::Gpu::at(0);
  EngineMemory memory("cuda");
  const ForwardArgs args = memory.at(tensors);
  const Problem problem = make_problem(args, memory.options(tensors, options));
  int plans = 0;
  for (const cuda::decode::DecodePlan& plan :
       cuda::decode::decode_plans(problem, cuda::card_of(gpu))) {
    if (plan.schedule != cuda::decode::DecodeSchedule::kDynamic) continue;
    ++plans;
    const auto executable =
        cuda::decode::DecodeCandidate(problem, {plan, plan.cycles, {}}).executable(gpu, {});
    for (int run = 0; run < runs && !testing::Test::HasFatalFailure(); ++run) {
      SCOPED_TRACE(testing::Message() << plan.tile().text() << " run " << run);
      memory.send();
      executable->run(&args, Run{});
      memory.bring_back();
      check(run);
    }
  }
  EXPECT_GT(plans, 0);
}

}  // namespace fulgur::test

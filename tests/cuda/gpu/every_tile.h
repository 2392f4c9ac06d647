/// Calls by every tile that computes them, whichever the cost model would take.
#pragma once

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "call/make_problem.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/choose.h"
#include "cuda/engine/cuda_engine.h"
#include "cuda/engine/devices.h"
#include "device.h"
#include "engine_memory.h"

namespace fulgur::test {

/// Runs a call with each tile of its families that was not `seen` before, on fresh outputs that
/// `prepare` may write to, and checks it. `SMs`: for how many it is planned; 0: for
/// all.
template <class Args, class Tensors>
void run_tiles(Workload& w, const Tensors& tensors, std::set<std::string>& seen,
               const std::function<void()>& prepare,
               const std::function<testing::AssertionResult()>& is_right, int sms = 0) {
  cuda::Gpu& gpu = cuda::Gpu::at(0);
  cuda::Card card = cuda::card_of(gpu);
  if (sms > 0) card.sms = sms;
  EngineMemory memory("cuda");
  const Args args = memory.at(tensors);
  const Problem problem = make_problem(args, memory.options(tensors, w.options));
  const auto families = cuda::architecture_of(gpu.target()).families;
  std::vector<std::string> rejected;
  for (const auto& candidate : cuda::all_candidates(problem, families, card, &rejected)) {
    if (!seen.insert(candidate->tile.text()).second) continue;
    w.seal();
    prepare();
    memory.send();
    candidate->executable(gpu, {})->run(&args, w.run_options);
    memory.bring_back();
    EXPECT_TRUE(w.check_memory());
    EXPECT_TRUE(is_right()) << candidate->tile.text() << " in " << w.c.name();
  }
}

/// The gradients of a workload, whose outputs of the forward pass are `e`'s, by each tile.
inline void run_backward_tiles(Workload& w, const Expected& e, int sms = 0) {
  std::set<std::string> seen;
  run_tiles<BackwardArgs>(
      w, w.backward, seen, [&] { w.run_forward(); }, [&] { return backward_is_right(w, e); }, sms);
}

}  // namespace fulgur::test

#include "cuda/sm90/forward_config.h"

namespace fulgur::cuda {

int64_t HopperForwardPlan::partial_floats() const {
  if (!split_tail) return 0;
  return int64_t{kernels::split_blocks(work)} * work.splits * consumers *
         kernels::partial_floats(value_dim);
}

int HopperForwardPlan::counters() const {
  return kernels::kSchedulerCounters + kernels::split_blocks(work) * consumers;
}

}  // namespace fulgur::cuda

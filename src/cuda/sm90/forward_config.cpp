#include "cuda/sm90/forward_config.h"

namespace fulgur::cuda::sm90 {

int64_t ForwardPlan::partial_floats() const {
  if (!split_tail) return 0;
  return int64_t{kernels::split_blocks(work)} * work.splits * consumers *
         kernels::partial_floats(value_dim);
}

int ForwardPlan::counters() const {
  return kernels::kSchedulerCounters + kernels::split_blocks(work) * consumers;
}

}  // namespace fulgur::cuda::sm90

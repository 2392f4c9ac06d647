#include "cuda/sm90/forward_config.h"

namespace fulgur::cuda {

int64_t HopperForwardPlan::partial_floats() const {
  if (!split_tail) return 0;
  return int64_t{kernels::split_blocks(work)} * work.split_parts * consumers *
         kernels::partial_floats(value_dim);
}

int HopperForwardPlan::counters() const {
  return kernels::kSchedulerCounters + kernels::split_blocks(work) * consumers;
}

std::string kernel_config(const HopperForwardKey& plan) {
  PlanHeader header(plan.dtype);
  header.add("kHeadDim", plan.head_dim);
  header.add("kValueDim", plan.value_dim);
  header.add("kConsumers", plan.consumers);
  header.add("kBlockKeys", plan.block_keys);
  header.add("kQStages", plan.q_stages);
  header.add("kKStages", plan.k_stages);
  header.add("kVStages", plan.v_stages);
  header.add("kProducerRegisters", plan.producer_registers);
  header.add("kConsumerRegisters", plan.consumer_registers);
  header.add("kHasLeft", plan.has_left);
  header.add("kHasRight", plan.has_right);
  header.add("kHasChunk", plan.has_chunk);
  header.add("kScoreMode", plan.transforms_scores);
  header.add("kSoftcap", plan.softcap);
  header.add("kAlibi", plan.alibi);
  header.add("kHasSinks", plan.has_sinks);
  header.add("kPacked", plan.packed);
  header.add("kPackedK", plan.packed_k);
  header.add("kPage", plan.page);
  header.add("kPageLists", plan.page_lists);
  header.add("kBoxKeys", plan.box_keys);
  header.add("kSeqUsedQ", plan.seqused_q);
  header.add("kSeqUsedK", plan.seqused_k);
  header.add("kDropout", plan.dropout);
  header.add("kHasLse", plan.has_lse);
  header.add("kFewQueries", plan.few_queries);
  header.add("kSplitTail", plan.split_tail);
  header.add("kUpload", static_cast<int>(plan.store));
  return header.text();
}

}  // namespace fulgur::cuda

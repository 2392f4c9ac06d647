/// Decode calls with the dynamic schedule, on whatever card.
#pragma once

#include <string>

#include "device.h"
#include "engine_memory.h"
#include "workload.h"

namespace fulgur::test {

/// As many heads of k and v as make more q blocks of the sequences than there are CTAs.
inline int64_t enough_heads(size_t sequences) {
  return cuda::Gpu::at(0).sms() / static_cast<int64_t>(sequences) + 1;
}

/// Whether the plan of the workload's forward pass has the dynamic schedule.
inline bool is_dynamic(const Workload& w) {
  EngineMemory memory("cuda");
  const ForwardTensors there = memory.at(w.forward);
  const Details details = plan(there, memory.options(w.forward, w.options)).details();
  return details.get<std::string>("schedule") == "dynamic";
}

}  // namespace fulgur::test

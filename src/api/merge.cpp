#include "fulgur/merge.h"

#include "call/merge_call.h"
#include "plan/engines.h"

namespace fulgur {

void merge(std::span<const Partial> parts, const Merged& result, const Run& run) {
  const MergeCall call = checked_merge(parts, result);
  if (result.out.numel() == 0) return;
  engine_on(result.out.device, "", "out").merge(call, 0, run);
}

}  // namespace fulgur

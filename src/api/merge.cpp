#include "fulgur/merge.h"

#include "call/merge_call.h"
#include "cpu/merge.h"
#include "cuda/engine/merge.h"

namespace fulgur {

void merge(std::span<const Partial> parts, const Merged& result, const Run& run) {
  const MergeCall call = checked_merge(parts, result);
  if (result.out.numel() == 0) return;
  if (result.out.device.type == DeviceType::kCpu) {
    cpu::merge(call, 0);
  } else {
    cuda::merge(call, run);
  }
}

}  // namespace fulgur

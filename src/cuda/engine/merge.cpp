#include "cuda/engine/merge.h"

#include <fmt/format.h>

#include <algorithm>

#include "cuda/common/call_kernel.h"
#include "cuda/engine/devices.h"
#include "fulgur/error.h"
#include "kernels/common/merge_params.h"

namespace fulgur::cuda {
namespace {

int count_for_merge(int64_t count, const char* of_what) {
  return counted("out", count, of_what, "merge");
}

/// Whether a lane may access kMergeWidth elements of a tensor by one instruction.
bool takes_wide(const ConstTensor& out, const Layout& rows) {
  return rows_aligned(rows, out.dtype) && out.shape[out.rank - 1] % kMergeWidth == 0;
}

MergeTensors tensors_of(void* out, const Layout& rows, void* lse, const Layout& lse_rows) {
  return {out,       static_cast<float*>(lse), rows.batch,   rows.row,
          rows.head, lse_rows.batch,           lse_rows.head};
}

/// The tensors of a part, which are not const because the result may be one of the parts.
MergeTensors tensors_of(const MergeCall::Part& part) {
  return tensors_of(const_cast<void*>(part.out.data), part.out_rows,
                    const_cast<void*>(part.lse.data), part.lse_rows);
}

void check_parts(const MergeCall& call) {
  refuse_f64("out", call.to.out, "merge");
  refuse_f64("lse", call.to.lse, "merge");
  if (call.from.size() > kMergeParts) {
    throw Error(Status::kUnsupported,
                fmt::format("parts: got {}, merge on cuda takes at most {}; merge some of them "
                            "first",
                            call.from.size(), kMergeParts));
  }
  for (size_t i = 0; i < call.from.size(); ++i) {
    refuse_f64(fmt::format("parts[{}].out", i).c_str(), call.from[i].out, "merge");
    refuse_f64(fmt::format("parts[{}].lse", i).c_str(), call.from[i].lse, "merge");
  }
}

MergeParams params_of(const MergeCall& call) {
  MergeParams p{};
  p.to = tensors_of(call.to.out.data, call.out_rows, call.to.lse.data, call.lse_rows);
  p.type = static_cast<int>(call.to.out.dtype);
  p.wide = takes_wide(call.to.out, call.out_rows);
  p.parts = static_cast<int>(call.from.size());
  for (int i = 0; i < p.parts; ++i) {
    const MergeCall::Part& part = call.from[i];
    p.from[i] = tensors_of(part);
    p.types[i] = static_cast<unsigned char>(part.out.dtype);
    p.wide = p.wide && takes_wide(part.out, part.out_rows);
  }
  p.tokens = count_for_merge(call.batch * call.rows, "rows");
  p.rows = count_for_merge(call.rows, "rows");
  p.heads = count_for_merge(call.heads, "heads");
  p.dim = count_for_merge(call.dim, "columns");
  p.lanes_log2 = std::max(lanes_log2((call.dim - 1) / (p.wide ? kMergeWidth : 1) + 1),
                          lanes_log2(kMergeLanes));
  return p;
}

}  // namespace

void merge(const MergeCall& call, const Run& run) {
  check_parts(call);
  const MergeParams params = params_of(call);
  Gpu& gpu = usable_gpu(call.to.out.device.index);
  launch(CallKernel::kMerge, gpu, static_cast<CUstream>(run.stream), &params, params.tokens,
         params.heads, params.lanes_log2);
}

}  // namespace fulgur::cuda

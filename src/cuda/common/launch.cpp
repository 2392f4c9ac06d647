#include "cuda/common/launch.h"

#include <algorithm>

namespace fulgur::cuda {

KernelUse padding_kernel() { return {{"common/padding.cu", ""}, "fulgur_forward_padding", 0}; }

void launch(CUstream stream, CUfunction kernel, const void* params, Grid grid, int threads,
            int shared_bytes, const char* what, Start start) {
  const auto size = [](int count) { return static_cast<unsigned>(count); };
  CUlaunchAttribute early{CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, {}};
  early.value.programmaticStreamSerializationAllowed = 1;
  const bool is_early = start == Start::kEarly && driver().version >= kVersionOfEarlyStarts;
  const CUlaunchConfig config{size(grid.x),       size(grid.y), 1,      size(threads), 1, 1,
                              size(shared_bytes), stream,       &early, is_early};
  void* values[] = {const_cast<void*>(params)};
  check(driver().cuLaunchKernelEx(&config, kernel, values, nullptr), what);
}

ForwardPaddingParams padding_params(const Problem& p) {
  ForwardPaddingParams params{};
  params.o_batch_stride = p.out.batch;
  params.o_row_stride = p.out.row;
  params.o_head_stride = p.out.head;
  params.lse_batch_stride = p.lse.batch;
  params.lse_head_stride = p.lse.head;
  params.batch = static_cast<int>(p.batch);
  params.sq = static_cast<int>(p.sq);
  params.total_q = static_cast<int>(p.total_q);
  params.hq = static_cast<int>(p.hq);
  params.dv = static_cast<int>(p.dv);
  params.element_bytes = static_cast<int>(size_of(p.dtypes.out));
  return params;
}

void launch_padding(CUstream stream, CUfunction kernel, const ForwardPaddingParams& params,
                    int sms) {
  constexpr int kThreads = 256, kBlocks = 8, kMaxSequences = 65535;  // kBlocks: CTAs per SM
  // Few rows follow the last packed sequence, but many may follow the used rows of each sequence.
  Grid grid{sms, 1};
  if (params.seqused_q != nullptr) {
    grid.y = std::clamp(params.batch, 1, kMaxSequences);
    grid.x = (kBlocks * sms + grid.y - 1) / grid.y;
  }
  launch(stream, kernel, &params, grid, kThreads, 0, "launching the kernel of padding rows");
}

}  // namespace fulgur::cuda

#include "cuda/launch.h"

#include <algorithm>

#include "check.h"

namespace fulgur::cuda {

const KernelUse kCopyKernel{{"forward_copy.cu", "", "sm_90a"}, "fulgur_forward_copy", 0};
const KernelUse kPaddingKernel{{"forward_padding.cu", "", "sm_90a"}, "fulgur_forward_padding", 0};

void launch(CUstream stream, CUfunction kernel, const void* params, Grid grid, int threads,
            int shared_bytes, const char* what) {
  void* values[] = {const_cast<void*>(params)};
  check(driver().cuLaunchKernel(kernel, grid.x, grid.y, 1, threads, 1, 1, shared_bytes, stream,
                                values, nullptr),
        what);
}

ForwardCopyParams copy_params(const TensorMapShape& from, const TensorMapShape& to) {
  const Layout& strides = from.strides;
  return {nullptr,    strides.batch, strides.row, strides.head, nullptr, to.strides.head / 8,
          from.batch, from.rows,     from.heads,  from.dim};
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
  return params;
}

void launch_padding(CUstream stream, CUfunction kernel, const ForwardPaddingParams& params,
                    int multiprocessors) {
  constexpr int kThreads = 256, kBlocks = 8, kMostSequences = 65535;  // blocks a multiprocessor
  // Behind the last packed sequence there are few rows, behind used ones as many as in them.
  Grid grid{multiprocessors, 1};
  if (params.seqused_q != nullptr) {
    grid.y = std::clamp(params.batch, 1, kMostSequences);
    grid.x = (kBlocks * multiprocessors + grid.y - 1) / grid.y;
  }
  launch(stream, kernel, &params, grid, kThreads, 0, "launching the kernel of padding rows");
}

void* aligned_data(const char* name, const ConstTensor& t, bool empty) {
  if (!empty && reinterpret_cast<uintptr_t>(t.data) % kCopyAlignment != 0) {
    fail(name, "data {} is not aligned to {} bytes, as that of the tensor was that was planned for",
         t.data, kCopyAlignment);
  }
  return const_cast<void*>(t.data);  // a map does not say what it is for
}

}  // namespace fulgur::cuda

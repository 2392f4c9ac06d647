#include "cuda/launch.h"

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
  return {nullptr,
          p.out.row,
          p.out.head,
          nullptr,
          p.lse.head,
          nullptr,
          static_cast<int>(p.batch),
          static_cast<int>(p.total_q),
          static_cast<int>(p.hq),
          static_cast<int>(p.dv)};
}

void* aligned_data(const char* name, const ConstTensor& t, bool empty) {
  if (!empty && reinterpret_cast<uintptr_t>(t.data) % kCopyAlignment != 0) {
    fail(name, "data {} is not aligned to {} bytes, as that of the tensor was that was planned for",
         t.data, kCopyAlignment);
  }
  return const_cast<void*>(t.data);  // a map does not say what it is for
}

}  // namespace fulgur::cuda

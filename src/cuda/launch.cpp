#include "cuda/launch.h"

#include "check.h"

namespace fulgur::cuda {

const KernelUse kCopyKernel{{"forward_copy.cu", "", "sm_90a"}, "fulgur_forward_copy", 0};

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

void* aligned_data(const char* name, const ConstTensor& t, const TensorMapShape& shape) {
  if (!shape.empty() && reinterpret_cast<uintptr_t>(t.data) % kCopyAlignment != 0) {
    fail(name, "data {} is not aligned to {} bytes, as that of the tensor was that was planned for",
         t.data, kCopyAlignment);
  }
  return const_cast<void*>(t.data);  // a map does not say what it is for
}

}  // namespace fulgur::cuda

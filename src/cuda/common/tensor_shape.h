#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "call/problem.h"
#include "cuda/jit/compile.h"
#include "engine/workspace.h"
#include "kernels/common/copy_rows_params.h"

namespace fulgur::cuda {

/// A tensor without its address, as kernels copy it to shared memory: of rank 4, with dimensions
/// {dim, rows, heads, batch}, innermost first. TMA copies boxes of the columns of a panel (128
/// bytes, swizzled) and box_rows rows. A packed tensor has batch 1; in a paged tensor the batch are
/// pages, and rows the keys of a page.
struct TensorShape {
  DType dtype = DType::kBF16;
  int64_t dim = 0, rows = 0, heads = 0, batch = 0;
  Layout strides;  ///< in elements
  int box_rows = 0;
  int64_t column_stride = 1;  ///< in elements; copies need 1
  int box_bytes = 128;        ///< of a row of a box
  bool swizzled = true;       ///< as the tensor cores read rows of 128, 64 or 32 bytes
  bool operator==(const TensorShape&) const = default;

  /// Whether it has no elements, so that no copy is ever issued.
  bool empty() const { return dim * rows * heads * batch == 0; }
};

/// The dimensions other than columns.
struct Dimension {
  const char* name;
  int64_t extent, stride;
};
std::array<Dimension, 3> outer_dimensions(const TensorShape& shape);

/// TMA and cp.async copy multiples of 16 bytes at addresses that are multiples of 16.
inline constexpr int64_t kCopyAlignment = 16;

/// The tensors of a forward pass. `bias`: has size 1 where it is broadcast; empty without a bias.
struct ForwardShapes {
  TensorShape q, k, v, o, bias;
};
ForwardShapes forward_shapes(const Problem& problem, int box_keys);

/// The tensors of a backward pass. q, k, v, dout and the bias are copied to shared memory; only the
/// layout of the others matters.
struct BackwardShapes {
  TensorShape q, k, v, dout, out, dq, dk, dv, bias;
};
BackwardShapes backward_shapes(const Problem& problem);

/// Why kernels cannot count the rows of a tensor of this shape; empty if they can.
std::string rows_unsupported(const TensorShape& shape);

/// Why copies of 16 bytes cannot address a tensor of this shape; empty if they can.
std::string not_addressable(const TensorShape& shape);

/// The shape of a copy with contiguous rows of multiples of 16 bytes and elements of `dtype`.
TensorShape copied(const TensorShape& shape, DType dtype);
inline TensorShape copied(const TensorShape& shape) { return copied(shape, shape.dtype); }
/// Bytes of that copy; 0 without a reason (`why`) to make it.
int64_t copied_bytes(const TensorShape& shape, const std::string& why, DType dtype);
inline int64_t copied_bytes(const TensorShape& shape, const std::string& why) {
  return copied_bytes(shape, why, shape.dtype);
}

/// The data of a run's tensor. Throws Error(kInvalidArgument) unless it is aligned as the plan
/// expects, or empty.
void* aligned_data(const char* name, const ConstTensor& tensor, bool empty);

/// The kernel that copies a tensor to rows of multiples of 16 bytes.
KernelUse copy_kernel();
/// The kernel that copies a tensor of e4m3 or e5m2 to f16.
KernelUse widen_kernel(DType from);
inline constexpr int kCopyThreads = 256, kCopyBlocks = 8;  // CTAs per SM
/// The arguments of both copy kernels, without addresses.
ForwardCopyParams copy_params(const TensorShape& from, const TensorShape& to);

}  // namespace fulgur::cuda

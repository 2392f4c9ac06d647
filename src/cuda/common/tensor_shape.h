#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "call/problem.h"
#include "cuda/jit/compile.h"
#include "engine/workspace.h"
#include "kernels/common/copy_rows_params.h"

namespace fulgur::cuda {

/// A tensor without its address, as kernels copy it to shared memory: rank 4, dims {dim, rows,
/// heads, batch} innermost first. TMA copies boxes of the columns of a panel (128 bytes, swizzled)
/// and box_rows rows. A packed tensor has batch 1; one of pages has their keys for rows and
/// themselves for its batch.
struct TensorShape {
  DType dtype = DType::kBF16;
  int64_t dim = 0, rows = 0, heads = 0, batch = 0;
  Layout strides;  ///< in elements
  int box_rows = 0;
  int64_t column_stride = 1;  ///< in elements; copies want 1
  int box_bytes = 128;        ///< of a row that a box has
  bool swizzled = true;       ///< 16 bytes of rows of 128, 64 or 32, as the tensor cores read them
  bool operator==(const TensorShape&) const = default;

  /// No element: no copy will ever be issued.
  bool empty() const { return dim * rows * heads * batch == 0; }
};

/// The dimensions around its rows.
struct Dimension {
  const char* name;
  int64_t extent, stride;
};
std::array<Dimension, 3> outer_dimensions(const TensorShape& shape);

/// TMA and cp.async copy 16 bytes, at multiples of 16.
inline constexpr int64_t kCopyAlignment = 16;

/// The tensors of a forward pass. `bias`: of sizes of 1 where all have the same; empty without one.
struct ForwardShapes {
  TensorShape q, k, v, o, bias;
};
ForwardShapes forward_shapes(const Problem& problem, int box_keys);

/// The tensors of a backward pass: q, k, v, dout and the bias are copied to shared memory; of the
/// others only the layout counts.
struct BackwardShapes {
  TensorShape q, k, v, dout, out, dq, dk, dv, bias;
};
BackwardShapes backward_shapes(const Problem& problem);

/// Why the kernels do not count the rows of a tensor of this shape; empty when they do.
std::string rows_unsupported(const TensorShape& shape);

/// Why copies of 16 bytes cannot address a tensor of this shape; empty when they can.
std::string not_addressable(const TensorShape& shape);

/// The same tensor in contiguous rows, each a multiple of 16 bytes; of elements of `dtype`.
TensorShape copied(const TensorShape& shape, DType dtype);
inline TensorShape copied(const TensorShape& shape) { return copied(shape, shape.dtype); }
/// Bytes of that, if there is a reason to copy it.
int64_t copied_bytes(const TensorShape& shape, const std::string& why, DType dtype);
inline int64_t copied_bytes(const TensorShape& shape, const std::string& why) {
  return copied_bytes(shape, why, shape.dtype);
}

/// A run's data, where it is aligned as the plan was told; an empty tensor's may be anything.
/// Throws Error(kInvalidArgument).
void* aligned_data(const char* name, const ConstTensor& tensor, bool empty);

/// Copies a tensor that is not addressable to rows of multiples of 16 bytes.
KernelUse copy_kernel();
/// The same of a tensor of e4m3 or e5m2 into f16.
KernelUse widen_kernel(DType from);
inline constexpr int kCopyThreads = 256, kCopyBlocks = 8;  // blocks an SM
/// Its arguments, without addresses.
ForwardCopyParams copy_params(const TensorShape& from, const TensorShape& to);

}  // namespace fulgur::cuda

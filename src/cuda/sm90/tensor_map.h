#pragma once

#include <cstdint>

#include "call/problem.h"
#include "cuda/jit/compile.h"
#include "engine/workspace.h"
#include "kernels/common/copy_rows_params.h"
#include "kernels/sm90/common/tensor_map.h"

namespace fulgur::cuda::sm90 {

/// What a tensor map says of a tensor besides its address: rank 4, dims {dim, rows, heads, batch}
/// innermost first, boxes of the columns of a panel (128 bytes, swizzled) and box_rows rows. A
/// packed tensor has batch 1; one of pages has their keys for rows and themselves for its batch.
struct TensorMapShape {
  DType dtype = DType::kBF16;
  int64_t dim = 0, rows = 0, heads = 0, batch = 0;
  Layout strides;  ///< in elements
  int box_rows = 0;
  int64_t column_stride = 1;  ///< in elements; TMA wants 1
  bool operator==(const TensorMapShape&) const = default;

  /// No element: no copy will ever be issued.
  bool empty() const { return dim * rows * heads * batch == 0; }
};

/// TMA counts strides and addresses in units of 16 bytes.
inline constexpr int64_t kCopyAlignment = 16;

/// The maps of a forward pass. `bias`: of sizes of 1 where all have the same; empty without one.
struct ForwardMaps {
  TensorMapShape q, k, v, o, bias;
};
ForwardMaps forward_maps(const Problem& problem, int box_keys);

/// The tensors of a backward pass: maps of q, k, v, dout and the bias; of the others only the
/// layout counts.
struct BackwardMaps {
  TensorMapShape q, k, v, dout, out, dq, dk, dv, bias;
};
BackwardMaps backward_maps(const Problem& problem);

/// Why the kernels do not count the rows of a tensor of this shape; empty when they do.
std::string map_unsupported(const TensorMapShape& shape);

/// Why TMA cannot address a tensor of this shape; empty when it can.
std::string not_addressable(const TensorMapShape& shape);

/// The same tensor in contiguous rows, each a multiple of 16 bytes.
TensorMapShape copied(const TensorMapShape& shape);
/// Bytes of that.
int64_t copied_bytes(const TensorMapShape& shape);

/// What L2 reads of memory at once, of what it lacks: rows of few columns between those of other
/// heads come faster without their neighbours, where memory binds (docs/kernels/decode.md).
enum class Promotion { k128Bytes, k256Bytes };

/// Encodes the map of a tensor at `data`, which is a multiple of kCopyAlignment. The map of an
/// empty tensor shows nothing, around any address of the device.
void encode(const TensorMapShape& shape, void* data, TensorMapBlob* map,
            Promotion promotion = Promotion::k256Bytes);

/// A run's data, where it is aligned as the plan was told; an empty tensor's may be anything.
/// Throws Error(kInvalidArgument).
void* aligned_data(const char* name, const ConstTensor& tensor, bool empty);

/// Copies a tensor that TMA cannot address to rows of multiples of 16 bytes.
KernelUse copy_kernel();
inline constexpr int kCopyThreads = 256, kCopyBlocks = 8;  // blocks an SM
/// Its arguments, without addresses.
ForwardCopyParams copy_params(const TensorMapShape& from, const TensorMapShape& to);

}  // namespace fulgur::cuda::sm90

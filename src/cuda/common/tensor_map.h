#pragma once

#include "cuda/common/tensor_shape.h"
#include "kernels/host_device/tensor_map.h"

namespace fulgur::cuda {

/// How many bytes L2 fetches from memory on a miss. In memory-bound kernels short rows that lie
/// between rows of other heads load faster without their neighbours (docs/kernels/decode.md).
enum class Promotion { k128Bytes, k256Bytes };

/// Encodes the tensor map of a tensor, whose address place() sets. The device's context is current.
void encode(const TensorShape& shape, TensorMapBlob* map,
            Promotion promotion = Promotion::k256Bytes);

/// Sets the address of the tensor of a map, a multiple of kCopyAlignment. Each run does so, as it
/// takes a fifth of the time of encode(). An empty tensor may have any address of the device.
void place(const TensorShape& shape, void* data, TensorMapBlob* map);

}  // namespace fulgur::cuda

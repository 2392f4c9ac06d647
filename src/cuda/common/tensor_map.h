#pragma once

#include "cuda/common/tensor_shape.h"
#include "kernels/host_device/tensor_map.h"

namespace fulgur::cuda {

/// What L2 reads of memory at once, of what it lacks: rows of few columns between those of other
/// heads come faster without their neighbours, where memory binds (docs/kernels/decode.md).
enum class Promotion { k128Bytes, k256Bytes };

/// Encodes the map of a tensor whose address place() says, in the context of its device.
void encode(const TensorShape& shape, TensorMapBlob* map,
            Promotion promotion = Promotion::k256Bytes);

/// Says where the tensor of a map lies: at a multiple of kCopyAlignment. It takes a fifth of the
/// time of encode(), and is what a run does. The map of an empty tensor shows nothing, around any
/// address of the device.
void place(const TensorShape& shape, void* data, TensorMapBlob* map);

}  // namespace fulgur::cuda

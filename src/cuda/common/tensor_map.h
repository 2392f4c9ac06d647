#pragma once

#include "cuda/common/tensor_shape.h"
#include "kernels/host_device/tensor_map.h"

namespace fulgur::cuda {

/// What L2 reads of memory at once, of what it lacks: rows of few columns between those of other
/// heads come faster without their neighbours, where memory binds (docs/kernels/decode.md).
enum class Promotion { k128Bytes, k256Bytes };

/// Encodes the map of a tensor at `data`, which is a multiple of kCopyAlignment. The map of an
/// empty tensor shows nothing, around any address of the device.
void encode(const TensorShape& shape, void* data, TensorMapBlob* map,
            Promotion promotion = Promotion::k256Bytes);

}  // namespace fulgur::cuda

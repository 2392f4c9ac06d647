// The types of elements in memory, numbered as fulgur::DType, and their tiles in shared memory.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

// kBool, integers and kF64 are for masks and expressions only.
enum Element : int {
  kF16, kBF16, kF32, kF64, kI32, kI64, kBool,
  kE4M3 = 8, kE5M2, kInt8, kInt4,
  kQ8_0, kQ4_0, kQ4_1, kQ5_0, kQ5_1, kIQ4NL,  // blocks; all but the first two are for append and quantize only
};

FULGUR_SHARED bool is_code(Element type) { return type >= kE4M3; }
FULGUR_SHARED int bits_of(Element type) {
  return type == kF32 ? 32 : type == kInt4 || type == kQ4_0 ? 4 : is_code(type) ? 8 : 16;
}
FULGUR_SHARED int bytes_of(Element type) { return bits_of(type) / 8; }

// Whether codes lie in blocks of 32 with a scale of f16 before them. Below: the bytes of such a row.
FULGUR_SHARED bool is_block(Element type) { return type == kQ8_0 || type == kQ4_0; }
constexpr int kBlockColumns = 32;
FULGUR_SHARED int row_of_blocks(Element type, int dim) {
  return dim / kBlockColumns * (2 + kBlockColumns * bits_of(type) / 8);
}

// The element types of a kernel's operands. A gradient has the type of its tensor.
struct Operands {
  Element q, k, v, o;
};

// Tiles are panels: rows of 128 bytes, swizzled. A step of a product along k has 32 bytes of a row.
constexpr int kPanelRowBytes = 128, kStepBytes = 32, kPanelSteps = kPanelRowBytes / kStepBytes;

FULGUR_SHARED int panel_columns(Element type) { return kPanelRowBytes * 8 / bits_of(type); }
FULGUR_SHARED int panels_of(Element type, int dim) { return (dim + panel_columns(type) - 1) / panel_columns(type); }
FULGUR_SHARED int k_step(Element type) { return kStepBytes * 8 / bits_of(type); }

// Columns of 16 bytes.
FULGUR_SHARED int chunk_columns(Element type) { return 128 / bits_of(type); }

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

// The types of elements in memory, by the numbers of fulgur::DType, and the tiles that they make in shared memory.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

enum Element : int { kF16, kBF16, kF32, kBool = 6, kE4M3 = 8 };  // kBool: of a mask alone

FULGUR_SHARED int bytes_of(Element type) { return type == kF32 ? 4 : type == kE4M3 ? 1 : 2; }

// The types of a kernel's operands. A gradient has that of its tensor.
struct Operands {
  Element q, k, v, o;
};

// Tiles are panels: rows of 128 bytes, swizzled. Along k a product takes 32 bytes of a row at once.
constexpr int kPanelRowBytes = 128, kStepBytes = 32, kPanelSteps = kPanelRowBytes / kStepBytes;

FULGUR_SHARED int panel_columns(Element type) { return kPanelRowBytes / bytes_of(type); }
FULGUR_SHARED int panels_of(Element type, int dim) { return (dim + panel_columns(type) - 1) / panel_columns(type); }
FULGUR_SHARED int k_step(Element type) { return kStepBytes / bytes_of(type); }

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

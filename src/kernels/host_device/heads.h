// Kernels that compute rows separately, in which a CTA computes a token and a group of lanes a head of it; and the
// Hadamard transform of columns (fulgur/codes/hadamard.h), the same for the host and the device.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

constexpr int kHeadThreads = 256;  // maximum of a CTA

enum : int { kMaxHadamardColumns = 512 };

// The mean of a column is the sum of this many slices (every kMeanSlices-th row), added in order, so that it is the
// same on every device.
constexpr int kMeanSlices = 64;

// The size of the blocks of columns that H multiplies.
FULGUR_SHARED int hadamard_columns(int dim) { return min_of(dim & -dim, kMaxHadamardColumns); }

// Whether D has -1 at a column of a block.
FULGUR_SHARED bool hadamard_flips(unsigned column) {
  unsigned hash = column * 0x9e3779b9u;
  hash = (hash ^ hash >> 15) * 0x85ebca6bu;
  return hash >> 31;
}

// 1 / sqrt(n) for a power of two.
FULGUR_SHARED float hadamard_scale(int n) {
  float scale = 1;
  for (; n >= 4; n /= 4) scale /= 2;
  return n == 2 ? scale * 0x1.6a09e6p-1f : scale;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

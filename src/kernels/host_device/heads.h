// Rows that are computed one by one. Kernels share them out so that a CTA takes a token, a group of lanes a head of it;
// and the Hadamard transform of their columns (fulgur/codes/hadamard.h) is the same for the host and the device.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

constexpr int kHeadThreads = 256;  // of a CTA at most

enum : int { kMostHadamardColumns = 512 };

// Sums of every so manieth row, which are added up in order: the mean of a column is the same on every device.
constexpr int kMeanSlices = 64;

// Columns that are turned together.
FULGUR_SHARED int hadamard_columns(int dim) { return min_of(dim & -dim, kMostHadamardColumns); }

// Whether D has a -1 for a column of these.
FULGUR_SHARED bool hadamard_flips(unsigned column) {
  unsigned hash = column * 0x9e3779b9u;
  hash = (hash ^ hash >> 15) * 0x85ebca6bu;
  return hash >> 31;
}

// 1 / sqrt(n) of a power of two.
FULGUR_SHARED float hadamard_scale(int n) {
  float scale = 1;
  for (; n >= 4; n /= 4) scale /= 2;
  return n == 2 ? scale * 0x1.6a09e6p-1f : scale;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

// The types of elements in memory, by the numbers of fulgur::DType.
#pragma once

namespace fulgur::kernels {

enum Element : int { kF16, kBF16, kF32 };

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

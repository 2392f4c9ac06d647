// For text that both the host's and the device's compiler read: plain constexpr C++ in the namespace fulgur::kernels,
// so that formulas of both sides are written once.
#pragma once

#ifdef __CUDACC__
#define FULGUR_SHARED __device__ __forceinline__ constexpr
#else
#define FULGUR_SHARED inline constexpr
#endif

namespace fulgur::kernels {

using u32 = unsigned int;
using u64 = unsigned long long;

FULGUR_SHARED int min_of(int a, int b) { return a < b ? a : b; }
FULGUR_SHARED int max_of(int a, int b) { return a > b ? a : b; }

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

// How kernels share out rows that are computed one by one: a CTA takes a token, a group of lanes a head of it.
#pragma once

namespace fulgur::kernels {

constexpr int kHeadThreads = 256;  // of a CTA at most

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

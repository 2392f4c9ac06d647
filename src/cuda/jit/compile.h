#pragma once

#include <string>

#include "cuda/jit/cubin_cache.h"
#include "cuda/jit/nvrtc.h"
#include "cuda/jit/target.h"

namespace fulgur::cuda {

/// The source and the constants of a kernel.
struct KernelRequest {
  std::string source;         ///< its file below src/kernels: "sm90/forward/forward.cu"
  std::string kernel_config;  ///< the text of kernel_config.h
  bool operator==(const KernelRequest&) const = default;
};

/// A kernel of a plan: its request, and what a launch needs.
struct KernelUse {
  KernelRequest request;
  const char* entry = nullptr;
  int shared_bytes = 0;
  int few_spilled_bytes = 144;  ///< spilled bytes that are no defect
};

/// Up to so many spilled bytes per thread a kernel is faster than one of another tile: with 68 a
/// portable backward pass of d 256 was 1.3 to 1.8 times as fast as the next tile without spills.
/// The maximum of all backward kernels for 8.0 to 10.0 is 136 (notes/backward.md).
inline constexpr int kFewSpilledBytes = 144;
/// The same for decode kernels that spill outside of their loops over keys: those that read several
/// heads together, where q4_0 of 64 columns takes 98 us with 144 to 308 bytes, 105 us with tiles of
/// fewer keys, and 123 us with fewer warps and no spills (notes/decode.md), those whose warps
/// convert codes, those of heads above 256 columns, and those of f32 above d 128.
inline constexpr int kSpilledBytesOutsideOfLoops = 384;

/// The defect of a kernel by the compiler's log: more spilled registers than `few_spilled_bytes`,
/// or serialized products of the tensor cores. Empty if there is none, and for PTX, whose registers
/// the driver allocates.
std::string defect_of(const Cubin& cubin, int few_spilled_bytes = kFewSpilledBytes);

/// A text that identifies the sources and the compiler of all kernels. Throws the errors of
/// nvrtc_identity.
const std::string& kernels_identity();

/// The key of a request in a cache. It depends on the text that is compiled, its constants,
/// options, compiler and target, but on no path. Throws the errors of nvrtc_identity and
/// sources_of.
std::string cache_key(const KernelRequest& request, const Target& target);

/// Compiles without a cache. Throws the errors of nvrtc_compile and sources_of.
Cubin compile(const KernelRequest& request, const Target& target);

/// Loads from the cache in the default folder, or compiles.
Cubin cached(const KernelRequest& request, const Target& target);

}  // namespace fulgur::cuda

#pragma once

#include <string>

#include "cuda/jit/cubin_cache.h"
#include "cuda/jit/nvrtc.h"
#include "cuda/jit/target.h"

namespace fulgur::cuda {

/// One kernel to compile, for the target of the device that runs it.
struct KernelRequest {
  std::string source;         ///< its file below src/kernels: "sm90/forward/forward.cu"
  std::string kernel_config;  ///< the text of kernel_config.h
  bool operator==(const KernelRequest&) const = default;
};

/// A kernel of a plan: what it is compiled from, and what launching it takes.
struct KernelUse {
  KernelRequest request;
  const char* entry = nullptr;
  int shared_bytes = 0;
  int few_spilled_bytes = 144;  ///< kFewSpilledBytes, or what else it may spill
};

/// Spilled bytes of a thread that cost less than another tile would: with 68 a portable backward
/// pass of d 256 was 1.3 to 1.8 times as fast as the next tile with none. The most of all backward
/// kernels for 8.0 to 10.0 is 136 (notes/backward.md).
inline constexpr int kFewSpilledBytes = 144;
/// The same of decode kernels of several heads, nearly all outside of their loops over keys:
/// q4_0 of 64 columns takes 98 us with 144 to 308 bytes, 105 us with tiles of fewer keys, and 123
/// us with fewer warps and none (notes/decode.md).
inline constexpr int kFewSpilledBytesOfHeads = 384;

/// What the compiler said that makes a kernel slower than its text looks: more than a few registers
/// that spill to memory, products of the tensor cores that wait for each other. Empty when it said
/// nothing such, and of PTX, whose registers the driver gives out.
std::string defect_of(const Cubin& cubin, int few_spilled_bytes = kFewSpilledBytes);

/// The sources and the compiler of every kernel. Throws as nvrtc_identity does.
const std::string& kernels_identity();

/// The key of a request in a cache: the text that its kernel reads, plan, options, compiler and
/// target, no path. Throws as nvrtc_identity and sources_of do.
std::string cache_key(const KernelRequest& request, const Target& target);

/// Compiles, past any cache. Throws as nvrtc_compile and sources_of do.
Cubin compile(const KernelRequest& request, const Target& target);

/// From the cache of the default folder, compiled when it is not there.
Cubin cached(const KernelRequest& request, const Target& target);

}  // namespace fulgur::cuda

#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "fulgur/attention.h"
#include "fulgur/export.h"

namespace fulgur::cuda {

// Device memory for programs that have no CUDA of their own. All throw Error: kUnavailable without
// a driver or such a device, kOutOfMemory, kInvalidArgument.

/// `bytes` (>= 0) of uninitialized memory of a device, aligned to 256; null for 0.
FULGUR_API void* allocate(int64_t bytes, int device = 0);
/// Frees what `allocate` returned on that device, when its work is done.
FULGUR_API void deallocate(void* data, int device = 0);
/// Copies `bytes` between host and device, either way, or within the device; waits for the copy.
/// Work on the default stream comes first.
FULGUR_API void copy(void* to, const void* from, int64_t bytes, int device = 0);
/// Waits for all work of a device. Throws Error(kInternal) for an error of earlier work.
FULGUR_API void synchronize(int device = 0);

/// What prewarm() did.
struct Prewarmed {
  int compiled = 0;  ///< kernels added to the cache
  int present = 0;   ///< kernels that were there
};

/// Compiles ahead every kernel that calls like this one, with other lengths and batches, can need,
/// tuned tiles apart (tune() compiles them). Fills `folder` (empty: the default cache, see
/// FULGUR_CACHE_DIR). `targets` are what to compile for, as NVRTC names it: "sm_90a" (H100, H200);
/// without any, what the devices of this machine take, or sm_90a where there are none. Needs NVRTC
/// but no GPU; the tensors need no data. With the kernels of a forward pass come those of merge()
/// and of append() for its dtype, and of the parts where it has shared prefixes. Options::threads
/// of them are compiled at a time. Throws Error: kInvalidArgument for a target that NVRTC does not
/// know, kUnsupported where the kernels for one do not compute the call, kUnavailable without NVRTC
/// and where the folder cannot be used.
FULGUR_API Prewarmed prewarm(const ForwardArgs& args, const Options& options,
                             const std::string& folder = {},
                             std::span<const std::string> targets = {});
FULGUR_API Prewarmed prewarm(const BackwardArgs& args, const Options& options,
                             const std::string& folder = {},
                             std::span<const std::string> targets = {});

/// A plan of a call for one card by its name, such as "a100", "h200", "3090" or "rtx-pro-6000",
/// which need not be here: what a device of that kind would get, what it is expected to take and
/// what binds, in Plan::explain() and details(). Needs neither a driver nor NVRTC. Its run() throws
/// Error(kUnsupported). Throws Error as plan() does; kInvalidArgument for an unknown name.
FULGUR_API Plan plan_for_card(const std::string& card, const ForwardArgs& args,
                              const Options& options = {});
FULGUR_API Plan plan_for_card(const std::string& card, const BackwardArgs& args,
                              const Options& options = {});

/// How long a call took with a tile Br x Bc of the score matrix.
struct TileTime {
  std::string family;  ///< of kernels: "sm90_forward", "sm90_backward_atomic"
  int64_t Br = 0, Bc = 0;
  double microseconds = 0;  ///< median
  bool predicted = false;   ///< the cost model's choice
};

/// What tune() measured.
struct Tuned {
  std::vector<TileTime> tiles;  ///< every one that fits, the fastest first
  std::string shape_class;      ///< the calls that take it from now on
  std::string device;           ///< where
  std::string path;             ///< the file that says so
};

/// Measures every tile that can compute this call, on its tensors (those that a call writes take
/// the result), and keeps the times in the default cache folder. From then on, plans of the same
/// class of shapes take the fastest tile: in this process, and in those to come with the same model
/// of device, fulgur and NVRTC; but not with Options::invariant. Takes a few seconds, best on an
/// idle device. Throws Error: as plan() and Plan::run() do; kInvalidArgument for an invariant or
/// empty call, and where `run` brings a workspace or Options::max_workspace bounds it, as each tile
/// needs another; kUnavailable when the folder cannot be used.
FULGUR_API Tuned tune(const ForwardArgs& args, const Options& options = {}, const Run& run = {});
FULGUR_API Tuned tune(const BackwardArgs& args, const Options& options = {}, const Run& run = {});

}  // namespace fulgur::cuda

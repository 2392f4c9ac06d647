#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/attention.h"

namespace fulgur::bench {

/// One shape to be timed.
struct Case {
  std::string pass = "forward";  ///< "forward", "backward" or "decode" (forward, 1 query)
  DType dtype = DType::kF32;
  int64_t batch = 1, sq = 1024, sk = 1024, hq = 1, hk = 1, d = 64;
  bool causal = false;
  int threads = 1;  ///< on the CPU
  Device device{};
  int64_t page = 0;  ///< keys of a page, which are handed out at random; 0 = contiguous keys

  /// "forward/f32/n:1024/d:64/full/threads:1"
  std::string name() const;
};

/// Shapes for the CPU. "standard" is the whole table: forward and backward, f32 and bf16, d 64 and
/// 128, N 1k to 8k, 1 and all threads, causal beside full at 8k, decode over 16k keys with groups
/// of 4 and 8. "quick" is a part of it for a first look. `threads` is the number meant by "all".
std::vector<Case> cpu_grid(const std::string& name, int threads);

/// Decode on the CPU over pages, beside the same over contiguous keys.
std::vector<Case> cache_grid(int threads);

/// Shapes for a GPU, bf16. "standard": forward and backward, d 64, 128 and 256, N 1k to 16k, full
/// and causal, always 16k rows of 2048 elements, and decode of 1 and 16 sequences with groups of 4
/// and 8. "quick": 4k and one decode.
std::vector<Case> cuda_grid(const std::string& name, Device device);

/// The tensors of a case, filled with normal-like random numbers, and its plan. Throws Error as
/// plan() does, before it has taken memory.
class Workload {
 public:
  explicit Workload(const Case& c);
  /// Computes; on a GPU it only launches.
  void run() const;
  /// Waits until the runs are done.
  void wait() const;
  double flops() const { return plan_.flops(); }
  double bytes() const { return plan_.bytes(); }

 private:
  /// The tensor with memory of its own.
  Tensor filled(Tensor tensor);
  /// The forward pass over pages.
  void make_pages(const Case& c);

  Device device_;
  bool backward_;
  std::vector<std::shared_ptr<void>> memory_;
  ForwardArgs forward_;
  BackwardArgs backward_args_;
  Plan plan_;
};

}  // namespace fulgur::bench

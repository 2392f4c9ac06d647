#pragma once

#include <cstdint>
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
  int threads = 1;

  /// "forward/f32/n:1024/d:64/full/threads:1"
  std::string name() const;
};

/// "standard" is the whole table: forward and backward, f32 and bf16, d 64 and 128, N 1k to 8k, 1
/// and all threads, causal beside full at 8k, decode over 16k keys with groups of 4 and 8. "quick"
/// is a part of it for a first look. `threads` is the number meant by "all".
std::vector<Case> grid(const std::string& name, int threads);

/// The tensors of a case, filled with normal-like random numbers, and its plan.
class Workload {
 public:
  explicit Workload(const Case& c);
  void run() const;
  double flops() const { return plan_.flops(); }
  double bytes() const { return plan_.bytes(); }

 private:
  Tensor random(std::initializer_list<int64_t> shape, DType dtype);

  bool backward_;
  std::vector<std::vector<uint16_t>> memory_;  // 16-bit units, of any dtype
  ForwardArgs forward_;
  BackwardArgs backward_args_;
  Plan plan_;
};

}  // namespace fulgur::bench

#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fulgur/attention.h"

namespace fulgur::bench {

/// One shape to be timed.
struct Case {
  std::string pass = "forward";  ///< "forward", "backward" or "decode" (forward, few queries)
  DType dtype = DType::kF32;
  int64_t batch = 1, sq = 1024, sk = 1024, hq = 1, hk = 1, d = 64;
  bool causal = false;
  int threads = 1;  ///< on the CPU
  Device device{};
  int64_t page = 0;         ///< keys of a page, which are handed out at random; 0 = contiguous keys
  bool uneven = false;      ///< the first sequence has sk keys, the others an eighth of them
  int64_t prefix = 0;       ///< so many first keys, whole pages, are the same for all sequences
  std::string algorithm{};  ///< as Options says

  /// Parts, joined by "/": "forward/f32/n:1024/d:64/full/threads:1".
  std::string name() const;
  /// The keys of sequence b.
  int64_t keys(int64_t b) const { return uneven && b > 0 ? sk / 8 : sk; }
  /// What a forward pass has to read and write: K and V of the keys that exist, shared ones once,
  /// q and out.
  double bytes() const;
};

/// Shapes for the CPU. "standard" is the whole table: forward and backward, f32, bf16 and f16, d 64
/// and 128, N 1k to 8k, 1 and all threads; of f32 and bf16 causal with full at 8k, decode over
/// 16k keys with groups of 4 and 8, forward of N 128 to 512 with 1 to 16 heads. "quick" is a part
/// of it for a first look. `threads` is the number meant by "all".
std::vector<Case> cpu_grid(const std::string& name, int threads);

/// Decode on the CPU over pages, with the same over contiguous keys.
std::vector<Case> cache_grid(int threads);

/// Shapes for a GPU, bf16. "standard": forward and backward, d 64, 128 and 256, N 1k to 16k, full
/// and causal, always 16k rows of 2048 elements, and decode of 1 and 16 sequences with groups of 4
/// and 8. "quick": 4k and one decode.
std::vector<Case> cuda_grid(const std::string& name, Device device);

/// The tables of the papers on FlashAttention, "fa1", "fa2" or "fa3", with the algorithms that each
/// compares: bf16, N 512 to 16k, d 64 and 128, full and causal, always 16k rows of 2048 elements,
/// forward and backward.
std::vector<Case> paper_grid(const std::string& paper, Device device);

/// Decode of bf16 by what a server varies: sequences and their keys, heads and dims, contiguous
/// keys and pages, and for the first heads query tokens (causal), uneven lengths and shared
/// prefixes of three quarters of the keys, too. On the CPU also f32, bf16 and f16 by the rows of 4
/// kv heads: groups of 1 to 16, 1 and 4 tokens, 1 and 16 sequences, 4k to 64k contiguous keys.
std::vector<Case> decode_grid(int threads, Device device);

/// The cases whose names have one of these parts of each kind, which is the text up to ":". Throws
/// Error(kInvalidArgument) where no case has a part, or all.
std::vector<Case> only(const std::vector<Case>& cases, const std::vector<std::string>& parts);

/// The tensors of a case, filled with normal-like random numbers, and its plan. Throws Error as
/// plan() does, before it has taken memory, and kOutOfMemory; on the CPU a quarter of the memory
/// stays free.
class Workload {
 public:
  explicit Workload(const Case& c);
  /// Computes; on a GPU it only launches.
  void run() const;
  /// Waits until the runs are done.
  void wait() const;
  Details details() const { return plan_.details(); }
  double flops() const { return plan_.flops(); }
  /// The tensors; those of the backward pass only where that is timed.
  const ForwardArgs& forward() const { return forward_; }
  const BackwardArgs& backward() const { return backward_args_; }
  /// What a call takes of memory besides its inputs: outputs and workspace.
  int64_t extra_bytes() const { return extra_bytes_; }
  /// What planning took.
  double plan_seconds() const { return plan_seconds_; }

 private:
  /// The tensor with memory of its own.
  Tensor filled(Tensor tensor);
  /// The tensor with these values, if it is given.
  ConstTensor filled(ConstTensor tensor, const std::vector<int32_t>& values);
  void* take(int64_t bytes);
  Run run_with(const WorkspaceNeed& need) const;
  void copy(void* to, const void* from, int64_t bytes) const;

  Device device_;
  bool backward_;
  std::vector<std::shared_ptr<void>> memory_;
  ForwardArgs forward_;
  BackwardArgs backward_args_;
  Plan plan_;
  double plan_seconds_ = 0;
  int64_t extra_bytes_ = 0;
  WorkspaceNeed need_;  ///< of its runs; of none on the CPU, where the engine has its own
};

}  // namespace fulgur::bench

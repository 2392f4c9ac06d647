#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "engine.h"
#include "problem.h"

namespace fulgur::cpu {

enum class Schedule : uint8_t {
  kPanels,    ///< forward: a task is a block of rows over all its keys
  kDecode,    ///< forward of few rows: a task is a part of the keys, merged afterwards
  kBackward,  ///< a task is every `splits`-th group of key tiles, over all rows
};

/// Every decision of the CPU engine about a problem.
struct CpuPlan {
  Schedule schedule = Schedule::kPanels;
  int64_t Br = 0;          ///< rows of a block
  int64_t Bc = kBc;        ///< keys of a tile
  int64_t split_keys = 0;  ///< kDecode: keys of a task
  int64_t heads = 1;       ///< kDecode: kv heads of a task
  int64_t splits = 1;      ///< kBackward: tasks of a kv head
  int threads = 1;
  int64_t scratch = 0;    ///< floats of a thread
  int64_t shared = 0;     ///< floats of states (kDecode), of D and dQ accumulators (kBackward)
  int64_t dq_offset = 0;  ///< kBackward: where the accumulators start, on a cache line
  bool operator==(const CpuPlan&) const = default;

  int64_t workspace_bytes() const { return 4 * (threads * scratch + shared); }
};

/// Decides. `rejected` takes the alternatives and why not.
CpuPlan make_plan(const Problem& problem, int threads, const Kernels& kernels,
                  std::vector<std::string>* rejected);

/// The plan in sentences.
std::vector<std::string> describe(const CpuPlan& plan, const Problem& problem);

}  // namespace fulgur::cpu

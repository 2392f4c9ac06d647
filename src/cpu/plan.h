#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "call/mask.h"
#include "call/problem.h"
#include "cpu/kernels/dispatch.h"
#include "engine/engine.h"

namespace fulgur::cpu {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Every decision of the CPU engine about a problem. A sequence of few rows is decoded: a task is a
/// part of its keys, and the results of the parts are merged afterwards (split-KV). For any other
/// sequence, a task of the forward pass is a block of rows over all their keys, and a task of the
/// backward pass is every `splits`-th group of key tiles, over all rows.
struct CpuPlan {
  int threads = 1;
  int64_t Br = 0;            ///< rows of a row tile: a tile of S is a row tile and Bc keys
  int64_t Bc = kBc;          ///< keys of a tile
  int64_t block_rows = 0;    ///< forward: rows of a block, a multiple of those of a row tile
  int64_t decode_rows = 0;   ///< forward: sequences of at most so many rows a kv head are decoded
  int64_t decode_heads = 1;  ///< kv heads of a decode task
  int64_t min_part = 0;      ///< the minimum keys of a decode task
  int64_t parts = 0;         ///< the decode tasks to aim for; 0: each task has min_part keys
  int64_t splits = 1;        ///< backward: tasks of a kv head
  int64_t scratch = 0;       ///< floats of the scratch of a thread
  int64_t expressions = 0;   ///< the offset in the scratch of the values of expressions
  int64_t shared = 0;        ///< floats that threads share: decode states, or D and dQ accumulators
  int64_t dq_offset = 0;     ///< backward: the offset of the dQ accumulators, on a cache line
  int64_t dbias_offset = 0;  ///< backward: the offset of the sums of dbias
  int64_t dbias_sums = 0;    ///< the number of these sums; 0: they are made in dbias itself
  Problem::Bias dbias;       ///< the strides of the sums, there or in dbias
  bool operator==(const CpuPlan&) const = default;

  bool decodes(const Task& task) const { return task.rows() <= decode_rows; }
  /// The keys of each part of a sequence of `keys` keys that is decoded; the last part may have
  /// fewer. `all_keys` is the sum of the keys of all decode tasks if no sequence is cut into parts.
  int64_t part_keys(int64_t keys, int64_t all_keys) const;
  int64_t workspace_bytes() const { return 4 * (threads * scratch + shared); }
};

/// The keys that some row of a sequence to decode sees, from the beginning of a tile on.
KeyRange decoded_keys(const Mask& mask, const Sequence& s);

/// The kernels for a problem. Adds the machine's other kernels to `rejected`, with the reasons.
const Kernels& choose_kernels(const Problem& problem, std::vector<std::string>* rejected);

/// Plans a problem. Adds the alternatives to `rejected`, with the reasons. `expressions` are those
/// of the call, or null.
CpuPlan make_plan(const Problem& problem, int threads, const Kernels& kernels,
                  std::vector<std::string>* rejected,
                  const expression::StagedGraph* expressions = nullptr);

/// Describes the plan in sentences and as data.
Explanation describe(const CpuPlan& plan, const Kernels& kernels, const Problem& problem);

}  // namespace fulgur::cpu

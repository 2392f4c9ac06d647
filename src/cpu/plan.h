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
/// part of its keys, and the parts are merged afterwards. Of any other sequence, a task of the
/// forward pass is a block of rows over all their keys; a task of the backward pass is every
/// `splits`-th group of key tiles, over all rows.
struct CpuPlan {
  int threads = 1;
  int64_t Br = 0;            ///< rows of a panel: a tile is a panel and Bc keys
  int64_t Bc = kBc;          ///< keys of a tile
  int64_t block_rows = 0;    ///< forward: rows of a block, a number of panels
  int64_t decode_rows = 0;   ///< forward: the most rows a kv head of a sequence that is decoded
  int64_t decode_heads = 1;  ///< kv heads of a task of a sequence that is decoded
  int64_t min_part = 0;      ///< the fewest keys of such a task
  int64_t parts = 0;         ///< so many such tasks are wanted; 0: all have min_part keys
  int64_t splits = 1;        ///< backward: tasks of a kv head
  int64_t scratch = 0;       ///< floats of a thread
  int64_t expressions = 0;   ///< where among them the values of expressions lie
  int64_t shared = 0;        ///< floats of decoded states, or of D and dQ accumulators
  int64_t dq_offset = 0;     ///< backward: where the accumulators start, on a cache line
  int64_t dbias_offset = 0;  ///< backward: where sums of the gradient of the bias start
  int64_t dbias_sums = 0;    ///< so many floats; 0: dbias itself takes them
  Problem::Bias dbias;       ///< where the sums lie, there or in dbias
  bool operator==(const CpuPlan&) const = default;

  bool decodes(const Task& task) const { return task.rows() <= decode_rows; }
  /// Keys of the parts of a sequence that is decoded and has `keys` keys, where all tasks of one
  /// part a sequence would have `all_keys`; the last part may have fewer.
  int64_t part_keys(int64_t keys, int64_t all_keys) const;
  int64_t workspace_bytes() const { return 4 * (threads * scratch + shared); }
};

/// The keys that some row of a sequence to decode sees, from the begin of a tile on.
KeyRange decoded_keys(const Mask& mask, const Sequence& s);

/// The kernels for a problem. `rejected` takes the others of the machine and why not.
const Kernels& choose_kernels(const Problem& problem, std::vector<std::string>* rejected);

/// Decides. `rejected` takes the alternatives and why not.
/// `expressions`: the call's; null without.
CpuPlan make_plan(const Problem& problem, int threads, const Kernels& kernels,
                  std::vector<std::string>* rejected,
                  const expression::StagedGraph* expressions = nullptr);

/// The plan in sentences and as data.
Explanation describe(const CpuPlan& plan, const Kernels& kernels, const Problem& problem);

}  // namespace fulgur::cpu

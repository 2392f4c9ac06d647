#pragma once

#include <cstdint>
#include <vector>

#include "base/convert.h"
#include "call/kv_locator.h"
#include "call/lengths.h"
#include "call/tree.h"
#include "expression/hulls.h"
#include "expression/stages.h"
#include "fulgur/attention.h"
#include "kernels/host_device/dropout.h"

namespace fulgur::cpu {

constexpr int64_t kBc = 64;       ///< keys of a tile
constexpr int64_t kRowTiles = 8;  ///< row tiles that share a widened key tile
constexpr int64_t kTiles = 4;     ///< key tiles that share a transposed row tile (backward)

/// Where dbias is summed: in dbias itself, or in floats.
struct BiasSums {
  void* data = nullptr;  ///< null: dbias is not wanted
  Problem::Bias at;      ///< if of 16 bits, each element has only one summand
};

constexpr int64_t kExpressionKeys =
    16;  ///< keys that an operation of an expression computes at once

/// The layout of a thread's memory for the values of expressions, in words of 32 bits.
struct ExpressionLayout {
  int64_t uniform = 0, rows, columns, mixed, where, derivatives, words;

  ExpressionLayout(const expression::StagedGraph& g, int64_t Br) {
    const auto count = [](const auto& list) { return static_cast<int64_t>(list.size()); };
    const auto aligned = [](int64_t n) { return (n + 15) / 16 * 16; };
    const int64_t tiles = count(g.call.scatters) * kBc * Br;
    rows = aligned(count(g.uniform));
    columns = rows + aligned(kRowTiles * count(g.rows) * Br);
    mixed = columns + aligned(kTiles * count(g.columns) * kBc);
    where = mixed + aligned(count(g.mixed) * kExpressionKeys * Br);
    derivatives = where + aligned(tiles);
    words = derivatives + aligned(tiles);
  }
};

/// The expressions of a call.
struct GivenExpressions {
  const expression::StagedGraph& graph;
  std::vector<ConstTensor> tensors;               ///< in the order of the graph
  std::vector<expression::MaskHulls> hulls = {};  ///< of each sequence; empty without a mask
  std::vector<int64_t> sums = {};  ///< the offset of each tensor's gradient in Task::tensor_sums
  int64_t scratch = 0;             ///< the offset of the values in the scratch of a thread
};

/// The arguments of a call that all its tasks use, apart from the tensors of rows.
struct Given {
  const float* slopes;  ///< of ALiBi, or null
  ConstTensor sinks;
  ConstTensor tree_mask, bias;
  kernels::DropoutMask dropout;
  OperandScaling scaling;
  BiasSums dbias{};
  const GivenExpressions* expressions = nullptr;  ///< may be null

  /// The sink of q head h, in a call with sinks.
  double sink(int64_t h) const { return load_element(sinks.data, sinks.dtype, h); }
};

/// The kv head that a task works on. The rows of its q heads are flattened: row r is query r % sq
/// of head kv * group + r / sq, so that short queries of grouped heads still fill the vectors.
struct Task {
  const Problem& problem;
  const Given& given;
  Sequence s;
  KvSpan keys;
  int64_t b, kv;
  double* tensor_sums = nullptr;  ///< takes the gradients of expressions' tensors; may be null

  int64_t rows() const { return problem.group() * s.sq; }
  int64_t head(int64_t r) const { return kv * problem.group() + r / s.sq; }
  int64_t query(int64_t r) const { return r % s.sq; }
  /// The task of the i-th kv head after this one.
  Task kv_head_after(int64_t i) const { return {problem, given, s, keys, b, kv + i}; }
  /// Slope of q head h, 0 without ALiBi.
  float slope(int64_t h) const {
    return given.slopes == nullptr
               ? 0
               : given.slopes[b * problem.slopes_batch + h * problem.slopes_head];
  }
};

/// The elements from the row of a key to that of the next. Where pages are single rows, this
/// assumes that a sequence has consecutive pages.
inline int64_t key_stride(const Problem& p, const Layout& layout) {
  return p.cache.page == 1 ? layout.batch : layout.row;
}

/// How fast a path computes long sequences, as fractions of the peak rate of f32 multiply-adds on
/// the vectors of its instruction set.
struct Speeds {
  struct OfDims {
    double narrow, wide;  ///< head dims up to 64, and above
  };
  OfDims forward, backward;
  double decode;  ///< of many rows with keys in the CPU's caches
};

/// The kernels of one path. Scratch is aligned to 64 bytes and belongs to one thread.
struct Kernels {
  const char* target;    ///< the vectors of an instruction set, or a path of bf16
  bool vectors;          ///< whether f32 vectors make all products
  int64_t Br;            ///< rows of a full row tile
  int64_t row_tiles;     ///< the maximum number of row tiles of a block of rows
  int64_t packing_rows;  ///< packing the keys of a block takes as long as computing so many rows

  Speeds speeds;
  int64_t row_keys;  ///< the cost of a row apart from its keys is that of so many keys
  double (*fma_rounds)(int64_t rounds, float* sink);  ///< probes the vectors: probes-inl.h

  int64_t (*forward_scratch)(const Problem&);  ///< floats
  /// O and LSE of rows [row_begin, row_end), at most `row_tiles` row tiles.
  void (*forward)(const Task&, const ForwardArgs&, int64_t row_begin, int64_t row_end,
                  float* scratch);

  int64_t decode_rows;        ///< sequences of at most so many rows a kv head may be decoded
  int64_t decode_on_vectors;  ///< with fewer rows a kv head, decode() uses f32 vectors
  int64_t (*decode_scratch)(const Problem&, int64_t heads,
                            int64_t rows);  ///< floats; `rows` is the maximum of a kv head
  /// All rows of `heads` kv heads, from the task's on, over keys [key_begin, key_end): per row the
  /// unnormalized O, the maximum m (log2 units) and the sum l, as states [heads][rows][dv + 2].
  void (*decode)(const Task&, const ForwardArgs&, int64_t heads, int64_t key_begin, int64_t key_end,
                 float* states, float* scratch);
  /// O and LSE of all rows of a kv head from the states of `splits` parts of its keys, which lie
  /// split_stride floats apart.
  void (*decode_merge)(const Task&, const ForwardArgs&, const float* states, int64_t splits,
                       int64_t split_stride);

  int64_t (*backward_scratch)(const Problem&);  ///< floats
  /// D = rowsum(dO o O) - dLSE of rows [row_begin, row_end) of a kv head.
  void (*backward_d)(const Task&, const BackwardArgs&, int64_t row_begin, int64_t row_end,
                     float* D);
  /// dK and dV of keys [key_begin, key_end), at most kTiles tiles, and their part of dQ added to
  /// the accumulator dq.
  void (*backward)(const Task&, const BackwardArgs&, int64_t key_begin, int64_t key_end,
                   const float* D, float* dq, float* scratch);
  /// dQ of rows [row_begin, row_end): the sum of `parts` accumulators.
  void (*backward_dq)(const Task&, const BackwardArgs&, int64_t row_begin, int64_t row_end,
                      float* const* dq, int64_t parts);
  int64_t (*dq_floats)(const Problem&, int64_t rows);  ///< of a dQ accumulator, a multiple of 16
};

}  // namespace fulgur::cpu

#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "fulgur/attention.h"
#include "fulgur/export.h"
#include "fulgur/tensor.h"

namespace fulgur {

/// How far scores are computed, in the order of Options.
enum class ScoreStage : uint8_t {
  kScaled,   ///< scale * q k^T
  kSoftcap,  ///< and softcap
  /// and ALiBi, score_mod, the dense bias and the masks: -inf where the query does not see the key
  kMasked,
  kProbabilities,  ///< and the softmax with the head's sink; a row that sees no key is all 0
};

/// Tensors of scores(): q, k and what shapes their scores, as in ForwardArgs. Scores of queries and
/// keys that do not exist (VarLen) are -inf and their probabilities 0.
struct ScoresArgs {
  ConstTensor q{}, k{};
  /// f32, f64 where q is; of the shape of scores_shape(): (batch, hq, rows, sk), any strides whose
  /// last is 1. Packed sequences and caches have the sq and the sk of the longest one. Queries and
  /// keys count from the first one of their sequence that exists.
  Tensor scores{};
  /// i64 (rows), or in host memory: which queries of each sequence, 0 to sq - 1, in any order; not
  /// given: all of them.
  ConstTensor rows{};
  ConstTensor alibi_slopes{}, sinks{}, tree_mask{}, bias{};
  std::vector<TensorBinding> tensors{};
  VarLen lengths{};
  KvCache cache{};
  ScoreStage stage = ScoreStage::kProbabilities;
};

/// Writes the scores or the probabilities of attention, which forward() never keeps: to look at
/// them, to align words, for interfaces that return them. It computes a row at a time, on the CPU
/// in double precision by the engine "reference", on a GPU in f32, and needs no memory of the size
/// of its result; it is no fast path. Of `options` it takes the masks, scale, softcap, score_mod,
/// max_seqlen_q, max_seqlen_k, threads and engine; the dropout of probabilities comes later. Of
/// `run` it takes the stream and the workspace. Throws Error: kInvalidArgument, and kUnsupported
/// for f64 or expressions on a GPU.
FULGUR_API void scores(const ScoresArgs& args, const Options& options = {}, const Run& run = {});

/// The shape that ScoresArgs::scores must have, which is not looked at.
FULGUR_API std::array<int64_t, 4> scores_shape(const ScoresArgs& args, const Options& options = {});

}  // namespace fulgur

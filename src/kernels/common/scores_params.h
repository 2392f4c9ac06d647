// Arguments of common/scores.cu, the same for the host and the device.
//
// kernel_config.h holds the constants of a forward kernel that sm90/forward/params.h lists from kElementQ to kSeqUsedK,
// with kScoreMode 1, and
//   kBatchIdx       1: cache_batch_idx names the row of the batch
//   kLeftPad        1: leftpad_k says which key is the first
#pragma once
#include "host_device/attention_params.h"

// Threads of a CTA, and the maximum of queries that the host lists for a launch.
constexpr int kScoreThreads = 128, kListedQueries = 256;

// As fulgur::ScoreStage.
enum ScoreStage : int { kScaledScores, kCappedScores, kMaskedScores, kProbabilities };

struct ScoresParams : CallParams {
  float* scores;  // [b, hq, queries, sk]
  long long scores_batch, scores_head, scores_row;  // strides in elements
  ScoreStage stage;

  int batch, queries;             // queries: requested ones of each sequence
  const long long* query_device;  // [queries]: the requested queries; null: they are listed, or all are
  bool lists;
  int listed[kListedQueries];

  KeyPages pages;                       // kPage; without pages its entries are sequences
  const int* cache_batch_idx;           // [b], kBatchIdx
  const int* leftpad_k;                 // [b], kLeftPad
  Sinks sinks;                          // kHasSinks
  const unsigned long long* tree_mask;  // [b, sq], packed [total_q], kTree: bit j is that of key sk - sq + j
  [[no_unique_address]] fulgur::kernels::ExpressionArguments expression;
};

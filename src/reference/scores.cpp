/// A row of S or of P at a time, for callers that want to see it.
#include "reference/algorithms.h"
#include "reference/score.h"
#include "reference/sink.h"

namespace fulgur::reference {

Rule rule_until(ScoreStage stage, const Rule& rule) {
  if (stage >= ScoreStage::kMasked) return rule;
  return {.scale = rule.scale, .softcap = stage == ScoreStage::kSoftcap ? rule.softcap : 0};
}

void score_row(const Head& h, ScoreStage stage, int64_t i, double* row) {
  for (int64_t j = 0; j < h.sk; ++j) row[j] = score(h, i, j).S;
  if (stage == ScoreStage::kProbabilities) softmax_row(h.sk, row, h.rule.sink, row);
}

}  // namespace fulgur::reference

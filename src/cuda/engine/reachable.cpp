#include "cuda/engine/reachable.h"

#include <vector>

#include "cuda/engine/choose.h"

namespace fulgur::cuda {
namespace {

/// Calls visit(problem) for problems like `p` with a sample of lengths and batches.
void for_lengths(Problem p, const std::function<void(const Problem&)>& visit) {
  std::vector<int64_t> rows = {1, 2, 16, 64, 128, 192, 300, 500, 800, 1024, 2048, 4096, 16384};
  std::vector<int64_t> keys = {1, 100, 1024, 8192, 65536};
  // A window or a chunk binds only longer sequences.
  std::vector<int64_t>& after = p.mask.top_left ? keys : rows;
  std::vector<int64_t>& before = p.mask.top_left ? rows : keys;
  if (p.mask.right >= 0) after.insert(after.end(), {p.mask.right + 1, p.mask.right + 2});
  if (p.mask.left >= 0) before.push_back(p.mask.left + 2);
  if (p.mask.chunk > 0) keys.insert(keys.end(), {p.mask.chunk, p.mask.chunk + 1});
  for (const int64_t batch : {1, 4, 16, 32, 64, 256, 1024}) {
    p.batch = batch;
    for (const int64_t sq : rows) {
      for (const int64_t sk : keys) {
        p.sq = sq;
        p.sk = sk;
        visit(p);
      }
    }
  }
}

}  // namespace

void for_reachable(const Problem& problem, const Target& target,
                   const std::function<void(const Candidates&)>& visit) {
  const Architecture& architecture = architecture_of(target);
  const auto families = families_of(target, problem.algorithm);
  for (Card card : architecture.cards) {
    if (!runs(card.capability, target)) continue;
    card.target = target;
    for_lengths(problem, [&](const Problem& p) {
      if (!no_family_computes(p, families).empty()) return;  // for example too many rows or heads
      Reasons reasons;
      visit(ranked(p, families, card, {}, &reasons));
    });
    for (const Family* family : families) visit(family->reachable(problem, card));
  }
}

}  // namespace fulgur::cuda

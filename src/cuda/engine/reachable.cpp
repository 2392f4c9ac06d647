#include "cuda/engine/reachable.h"

#include <algorithm>
#include <set>

#include "cuda/engine/architectures.h"
#include "cuda/engine/choose.h"
#include "kernels/host_device/stream_k.h"

namespace fulgur::cuda {
namespace {

/// Calls visit(problem) for problems like `p` with lengths and batches of every kind on a card.
void for_lengths(Problem p, const Card& card, const std::function<void(const Problem&)>& visit) {
  std::vector<int64_t> rows = {1, 2, 16, 64, 128, 192, 300, 500, 800, 1024, 2048, 4096, 16384};
  std::vector<int64_t> keys = {1, 100, 1024, 8192, 65536};
  // The most rows of a kv head that each tile of the decode kernel is for.
  for (const int64_t most : {4, 8, 16, 32, 64, 128})
    rows.push_back(std::max<int64_t>(most / p.group(), 1));
  // A window, or a chunk, bounds only what is longer.
  if (p.mask.right >= 0) rows.insert(rows.end(), {p.mask.right + 1, p.mask.right + 2});
  if (p.mask.left >= 0) keys.push_back(p.mask.left + 2);
  if (p.mask.chunk > 0) keys.insert(keys.end(), {p.mask.chunk, p.mask.chunk + 1});
  std::set<int64_t> batches = {1, 4, 16, 32, 64, 256, 1024};
  // The most lines, of a kv head of a sequence, for each way in which the decode kernel cuts them.
  const int64_t blocks = card.sms;
  for (const int64_t lines : {blocks / 9, blocks / 8, blocks / 5, blocks / 2,
                              (16 * blocks - 1) / 17, blocks, (32 * blocks - 1) / 17})
    batches.insert(std::max<int64_t>(lines / p.hk, 1));
  for (const int64_t batch : batches) {
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

void for_reachable(const Problem& problem, const std::function<void(const Candidates&)>& visit) {
  for (const Architecture& architecture : architectures()) {
    for (const Card& card : architecture.cards) {
      for_lengths(problem, card, [&](const Problem& p) {
        if (!no_family_computes(p).empty()) return;  // too long, or too many heads
        Reasons reasons;
        visit(ranked(p, architecture.families, card, {}, &reasons));
      });
    }
  }
}

}  // namespace fulgur::cuda

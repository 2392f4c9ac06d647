#include "call/prefix_split.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace fulgur {
namespace {

/// The maximum number of rows of a kv head. With more rows, products bind and not reads of K and V,
/// and the fastest GPU kernel for them cannot begin after a prefix.
constexpr int64_t kMaxRows = 128;
constexpr int64_t kMaxNumber = std::numeric_limits<int>::max();

bool packs(const Problem& p) {
  return p.packed || p.sq == 1 || p.batch == 1 || p.q.batch == p.sq * p.q.row;
}

}  // namespace

int64_t ids_of(const Problem& p) {
  const bool table = p.cache.pages == Problem::Cache::Pages::kTable;
  return table ? (p.batch - 1) * p.cache.table_stride + p.cache.ids : p.cache.ids;
}

Layout part_out(const Problem& p) {
  const int64_t head = (p.dv + 7) / 8 * 8;
  return {0, p.hq * head, head, true};
}

Layout part_lse(const Problem& p) { return {p.packed ? 0 : p.sq, 1, p.total_q, true}; }

Problem without_prefixes(Problem p) {
  p.prefix_groups = 0;
  for (const Arg a : {Arg::kPrefixGroups, Arg::kPrefixLens}) {
    p.given.set(a, false);
    p.on_host.set(a, false);
  }
  return p;
}

Problem prefix_part(Problem p) {
  const bool alone = !p.packed && p.sq == 1;
  p.q = {0, alone ? p.q.batch : p.q.row, p.q.head, p.q.aligned};
  p.out = part_out(p);
  p.lse = part_lse(p);
  p.lse.batch = 0;
  p.given.set(Arg::kLse, true);
  // Rows of a table are lists that begin at the table's stride.
  p.cache.ids = ids_of(p);
  p.cache.pages = Problem::Cache::Pages::kLists;
  p.cache.table_stride = 0;
  p.batch = std::exchange(p.prefix_groups, 0);
  p.of_groups = true;
  p.packed = true;
  p.sq = p.total_q;
  p.mask = full();
  p.given.set(Arg::kSinks, false);
  p.given.set(Arg::kTreeMask, false);
  p.on_host = {};
  p.max_workspace = 0;
  return p;
}

Problem rest_part(Problem p) {
  if (!p.has(Arg::kLse)) p.lse = part_lse(p);
  p.given.set(Arg::kLse, true);
  p = without_prefixes(p);
  p.given.set(Arg::kLeftpadK, true);
  p.on_host = {};
  p.max_workspace = 0;
  return p;
}

std::string undivided(const Problem& p) {
  if (p.total_q == 0) return "there are no queries";
  if (p.invariant) return "`invariant`: the bits of a sequence would depend on its group";
  if (p.mask.left >= 0 || p.mask.chunk > 0) return "the mask hides keys of a prefix";
  if (p.mask.top_left)
    return "the mask is aligned top-left, and a part does not know its first key";
  if (p.has(Arg::kAlibiSlopes))
    return "ALiBi biases by the distance of a key, which a part does not know";
  if (p.expressions.given()) return "expressions count keys that a part does not";
  if (p.has(Arg::kBias)) return "a bias has numbers for keys that a part does not count";
  if (p.dropout_p > 0) return "dropout draws for each sequence";
  for (const Scales* scales : {&p.q_descale, &p.k_descale, &p.v_descale}) {
    if (scales->groups > 0 && !scales->of_rows) return "a part does not know a sequence's descales";
  }
  if (p.has(Arg::kLeftpadK)) return "leftpad_k has sequences begin at other keys";
  if (p.has(Arg::kSeqUsedQ)) return "seqused_q leaves gaps between the rows of q";
  if (!packs(p)) return "the sequences of q do not lie one after the other";
  const bool table = p.cache.pages == Problem::Cache::Pages::kTable;
  if (p.cache.id_stride != 1) return "the ids of a row of page_table do not lie side by side";
  if (table && p.batch > 1 && p.cache.table_stride < p.cache.ids) {
    return "the rows of page_table do not lie one after the other";
  }
  if (std::max({p.total_q, ids_of(p), p.sk, p.batch, p.prefix_groups}) >= kMaxNumber) {
    return "rows, keys or ids are too many for int32";
  }
  if (const int64_t rows = p.sq * p.group(); rows > kMaxRows) {
    return fmt::format("{} rows of a kv head in a sequence, and reading keys binds up to {}", rows,
                       kMaxRows);
  }
  return {};
}

}  // namespace fulgur

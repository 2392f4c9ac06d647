#include "cpu/plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>

#include "base/parallel.h"

namespace fulgur::cpu {
namespace {

constexpr int64_t kMinPartKeys = 4 * kBc;  // merging smaller parts costs more than it gains
constexpr int64_t kInvariantPartKeys = 1024;
constexpr double kMaxBf16Scale = 0x1p64;  // paths of bf16 take products below 2^-126 for 0
constexpr int64_t kMaxDecodeHeads = 16;   // a tile of so many heads still fits the L2 cache
constexpr int64_t kStreamedBytes = 4096;  // the hardware's prefetching keeps up with such runs

/// The maximum number of sequences that have a query: any number of packed sequences may be empty.
int64_t sequences_with_rows(const Problem& p) { return std::min(p.batch, p.total_q); }

/// Plans to decode sequences of at most `rows` rows a kv head.
void plan_decode(const Problem& p, const Kernels& k, int64_t rows, CpuPlan& plan) {
  // Heads of a key that are contiguous are read together, in the order of memory. Keys that the
  // bias hides from one of them change how V of all is added, and with it the rounding.
  const bool apart = p.invariant && p.has(Arg::kBias) && p.bias.head != 0;
  if (!apart && std::abs(p.k.head) < std::abs(key_stride(p, p.k))) {
    plan.decode_heads = p.hk;
    while (plan.decode_heads > kMaxDecodeHeads && plan.decode_heads % 2 == 0) {
      plan.decode_heads /= 2;
    }
  }
  if (p.invariant) {
    plan.min_part = kInvariantPartKeys;
  } else {
    // Several tasks a thread, so that a slow one does not keep the others waiting.
    plan.min_part = kMinPartKeys;
    plan.parts = 8 * plan.threads;
  }
  plan.scratch = std::max(plan.scratch, k.decode_scratch(p, plan.decode_heads, rows));
  // The lengths are known when the plan runs; no sequence to decode has more keys than the longest,
  // but for chunks, of which that may have seen the first key alone.
  Sequence longest_decoded = whole_sequence(p);
  longest_decoded.sq = std::min(p.sq, rows / p.group());
  const KeyRange longest = decoded_keys(window_around(p.mask), longest_decoded);
  const int64_t max_keys =
      std::clamp<int64_t>(longest.end - longest.begin + kBc, 1, std::max<int64_t>(p.sk, 1));
  const int64_t runs = p.hk / plan.decode_heads, sequences = sequences_with_rows(p);
  const int64_t keys =
      runs * (sequences > p.total_keys / max_keys ? p.total_keys : sequences * max_keys);
  int64_t parts = keys / plan.min_part;
  if (plan.parts > 0) parts = std::min(parts, plan.parts);
  parts += sequences * runs;  // the last part of each may be shorter
  plan.shared = parts * plan.decode_heads * rows * (p.dv + 2);
}

/// The time until the last thread ends with blocks of so many rows, in rows times keys. Threads
/// take the longest blocks first, and each block packs its keys.
double time_of_blocks(const Problem& p, const Kernels& k, int threads, int64_t block_rows) {
  const Sequence whole = whole_sequence(p);
  const int64_t rows = p.group() * p.sq;
  std::vector<double> blocks;
  for (int64_t row = 0; row < rows; row += block_rows) {
    const int64_t end = std::min(rows, row + block_rows);
    const auto keys_of = [&](int64_t r) {
      return static_cast<double>(visible_keys(p.mask, whole, r % p.sq).end);
    };
    const double last = keys_of(end - 1), mean = (keys_of(row) + last) / 2;
    blocks.push_back(static_cast<double>(end - row) * mean +
                     static_cast<double>(k.packing_rows) * last);
  }
  std::sort(blocks.begin(), blocks.end(), std::greater<>());
  std::vector<double> busy(threads, 0.0);  // a heap: the thread that ends first is at its top
  for (const double block : blocks) {
    for (int64_t head = 0; head < p.batch * p.hk; ++head) {
      std::pop_heap(busy.begin(), busy.end(), std::greater<>());
      busy.back() += block;
      std::push_heap(busy.begin(), busy.end(), std::greater<>());
    }
  }
  return *std::max_element(busy.begin(), busy.end());
}

/// Plans to compute blocks of rows.
void plan_blocks(const Problem& p, const Kernels& k, std::vector<std::string>* rejected,
                 CpuPlan& plan) {
  // Long rows in half as many row tiles, so that a block's Q and O stay in the L2 cache.
  const int64_t max_rows = (p.d + p.dv <= 256 ? k.row_tiles : k.row_tiles / 2) * k.Br;
  // Fewer row tiles a block where blocks would be too few to share out evenly; one thread shares
  // nothing out. Where lengths are known only when the plan runs, four blocks a thread will do.
  const int64_t heads = sequences_with_rows(p) * p.hk, rows = p.group() * p.sq;
  const auto few = [&](int64_t block_rows, int64_t tasks) {
    // In double, because the number of packed sequences, most of them empty, may be huge.
    return plan.threads > 1 &&
           static_cast<double>(heads) * static_cast<double>(ceil_div(rows, block_rows)) <
               static_cast<double>(tasks * plan.threads);
  };
  plan.block_rows = max_rows;
  if (!p.alike()) {
    while (plan.block_rows > k.Br && few(plan.block_rows, 4)) plan.block_rows /= 2;
  } else if (few(max_rows, 4)) {
    double min_time = time_of_blocks(p, k, plan.threads, max_rows);
    for (int64_t r = max_rows / 2; r >= k.Br && few(2 * r, 8); r /= 2) {
      const double time = time_of_blocks(p, k, plan.threads, r);
      if (time >= min_time) continue;
      min_time = time;
      plan.block_rows = r;
    }
  }
  if (plan.block_rows < max_rows) {
    rejected->push_back(
        fmt::format("blocks of {} rows: too few to keep {} threads busy", max_rows, plan.threads));
  }
  plan.scratch = std::max(plan.scratch, k.forward_scratch(p));
}

void plan_forward(const Problem& p, const Kernels& k, std::vector<std::string>* rejected,
                  CpuPlan& plan) {
  // A part of a longer sequence is computed as the whole sequence is, so that it has the same bits.
  const bool too_long = p.invariant && p.group() * p.origin.queries > k.decode_rows;
  plan.decode_rows = p.expressions.given() || too_long ? 0 : k.decode_rows;
  // Packed sequences, and those of seqused_q, may be shorter than the longest.
  const int64_t rows = p.group() * p.sq;
  const int64_t min_rows = p.packed || p.has(Arg::kSeqUsedQ) ? p.group() : rows;
  const bool decode = min_rows <= plan.decode_rows, blocks = rows > plan.decode_rows;
  if (decode) plan_decode(p, k, std::min(rows, plan.decode_rows), plan);
  if (blocks) plan_blocks(p, k, rejected, plan);
  if (!blocks) {
    rejected->push_back(fmt::format("row tiles: {} rows a kv head leave vectors empty", rows));
  }
  if (!decode) {
    rejected->push_back(p.expressions.given()
                            ? "decode split over keys: it computes no expressions"
                            : fmt::format("decode split over keys: {} rows a kv head, more than {}",
                                          too_long ? p.group() * p.origin.queries : min_rows,
                                          k.decode_rows));
  }
}

/// Plans where dbias is summed: in dbias itself, or in floats if it is of 16 bits and its elements
/// are sums of several parts.
void plan_bias_gradient(const Problem& p, CpuPlan& plan) {
  plan.dbias = p.dbias;
  const auto sums = [](int64_t stride, int64_t size) { return stride == 0 && size > 1; };
  if (p.dbias.dtype == DType::kF32 || !(sums(p.dbias.batch, p.batch) || sums(p.dbias.head, p.hq) ||
                                        sums(p.dbias.row, p.sq) || sums(p.dbias.key, p.sk))) {
    return;
  }
  plan.dbias_offset = plan.shared;
  int64_t floats = 1;
  const auto dense = [&](int64_t stride, int64_t size) {
    return stride == 0 ? 0 : std::exchange(floats, floats * size);
  };
  const int64_t key = dense(p.dbias.key, p.sk), row = dense(p.dbias.row, p.sq);
  const int64_t head = dense(p.dbias.head, p.hq), batch = dense(p.dbias.batch, p.batch);
  plan.dbias = {DType::kF32, batch, head, row, key};
  plan.dbias_sums = floats;
  plan.shared += floats;
}

void plan_backward(const Problem& p, const Kernels& k, CpuPlan& plan) {
  // Sequences and heads that add to the same elements of dbias are not computed at the same time.
  const bool wants_dbias = p.has(Arg::kDbias);
  const int64_t batch = wants_dbias && p.dbias.batch == 0 ? 1 : p.batch;
  const int64_t kv_heads = wants_dbias && p.dbias.head == 0 ? 1 : p.hk;
  // More sequences than threads need no splits, and their number might overflow in a product.
  const int64_t heads = std::max<int64_t>(1, std::min<int64_t>(batch, plan.threads) * kv_heads);
  // Each split needs a dQ accumulator of the whole sequence, so there are only as many splits as
  // keep all threads busy.
  const bool sums_keys = wants_dbias && p.dbias.key == 0;
  if (!p.invariant && !sums_keys && heads < plan.threads) {
    plan.splits = std::min<int64_t>(ceil_div(plan.threads, heads),
                                    std::max<int64_t>(1, ceil_div(p.sk, kTiles * kBc)));
  }
  const int64_t rows = p.group() * p.sq;
  const int64_t accumulators = plan.splits > 1 ? heads * plan.splits : plan.threads;
  plan.scratch = k.backward_scratch(p);
  plan.dq_offset = ceil_div(p.total_q * p.hq, 16) * 16;
  plan.shared = plan.dq_offset + (p.wants_dq() ? accumulators * k.dq_floats(p, rows) : 0);
  if (wants_dbias) plan_bias_gradient(p, plan);
}

/// A sentence on how a tile of K lies in pages, and what that costs.
std::string describe_pages(const CpuPlan& plan, const Problem& p) {
  const int64_t rows = std::min(p.cache.page, kBc), row = bytes_of(p.dtypes.k, p.d);
  const int64_t heads = p.k.head == p.d ? plan.decode_heads : 1;
  std::string s =
      fmt::format("pages: a tile of K lies at {} places or more, {} rows of {} bytes each",
                  ceil_div(kBc, p.cache.page), rows, heads * row);
  if (rows > 1 && p.total_k > 0) {
    s += fmt::format(", {} bytes apart", bytes_of(p.dtypes.k, p.k.row));
  }
  if (rows * heads * row < kStreamedBytes) {
    s += "; so short ones are read more slowly than contiguous keys";
  }
  return s;
}

/// The dtypes of q, k and v: "f16", "bf16, q8_0".
std::string names_of(const OperandTypes& dtypes) {
  std::string names = name_of(dtypes.q);
  if (dtypes.k != dtypes.q) names += fmt::format(", {}", name_of(dtypes.k));
  if (dtypes.v != dtypes.q && dtypes.v != dtypes.k) names += fmt::format(", {}", name_of(dtypes.v));
  return names;
}

}  // namespace

int64_t CpuPlan::part_keys(int64_t keys, int64_t all_keys) const {
  const int64_t max_keys = parts == 0 ? min_part : std::max(min_part, ceil_div(all_keys, parts));
  const int64_t count = std::max<int64_t>(1, ceil_div(keys, max_keys));
  return ceil_div(ceil_div(keys, count), kBc) * kBc;  // equal parts, rounded up to tiles
}

KeyRange decoded_keys(const Mask& mask, const Sequence& s) {
  const KeyRange keys = visible_keys(mask, s, 0, s.sq);
  return {keys.begin / kBc * kBc, keys.end};
}

const Kernels& choose_kernels(const Problem& p, std::vector<std::string>* rejected) {
  const Machine& m = machine();
  const bool bf16 = p.dtypes.in({DType::kBF16});
  const auto kernels_of = [&](const Bf16Path& path) { return bf16 ? path.bf16 : path.f16; };
  const Bf16Path* chosen = nullptr;
  for (const Bf16Path& path : m.bf16) {
    std::string why;
    if (!bf16 && !p.dtypes.in({DType::kF16})) {
      why = fmt::format("they multiply bf16, not {}", names_of(p.dtypes));
    } else if (path.bf16 == nullptr) {
      why = path.unavailable;
    } else if (kernels_of(path) == nullptr) {
      why = "a product of f16 is three of theirs, slower than vectors";
    } else if (p.expressions.given()) {
      why = "they compute no expressions";
    } else if (std::fabs(p.scale) > kMaxBf16Scale) {
      why = fmt::format("they take products for 0 that a scale of {} makes count", p.scale);
    } else if (chosen != nullptr) {
      why = fmt::format("{} multiply bf16 faster", chosen->name);
    } else {
      chosen = &path;
      continue;
    }
    rejected->push_back(fmt::format("{}: {}", path.name, why));
  }
  if (chosen == nullptr) return m.vectors;
  rejected->push_back(fmt::format("{} vectors: {} multiply {} faster", m.vectors.target,
                                  chosen->name, name_of(p.dtypes.q)));
  return *kernels_of(*chosen);
}

CpuPlan make_plan(const Problem& p, int threads, const Kernels& k,
                  std::vector<std::string>* rejected, const expression::StagedGraph* expressions) {
  CpuPlan plan;
  plan.threads = thread_count(threads);
  // A tile holds at most all queries of a head, with those of the other heads of its group.
  plan.Br = std::clamp<int64_t>(p.sq, 1, k.Br);
  const int64_t written = p.total_q + (p.pass == Pass::kBackward ? p.total_k : 0);
  if (written == 0) return plan;  // other sizes may be too large to multiply
  if (p.pass == Pass::kForward) {
    plan_forward(p, k, rejected, plan);
  } else {
    plan_backward(p, k, plan);
  }
  if (expressions != nullptr) {
    plan.expressions = ceil_div(plan.scratch, 16) * 16;
    plan.scratch = plan.expressions + ExpressionLayout(*expressions, k.Br).words;
  }
  return plan;
}

Explanation describe(const CpuPlan& plan, const Kernels& k, const Problem& p) {
  Explanation e;
  e.Br = plan.Br;
  e.Bc = plan.Bc;
  const auto say = [&](std::string sentence) { e.decisions.push_back(std::move(sentence)); };
  e.details.add("kernel", k.target);
  e.details.add("Br", plan.Br);
  e.details.add("Bc", plan.Bc);
  e.details.add("threads", plan.threads);
  say(fmt::format("{}: tiles of Br {} rows of a head (q heads of a kv head packed), Bc {} keys",
                  k.target, plan.Br, plan.Bc));
  if (!k.vectors) {
    const bool denormal = p.dtypes.v == DType::kBF16 && p.pass == Pass::kForward;
    Details::Texts by_vectors = {"not_finite"};
    if (denormal) by_vectors.emplace_back("denormal_v");
    e.details.add("tiles_by_vectors", std::move(by_vectors));
    say(fmt::format("vectors compute key tiles {}with what is not finite with a mask",
                    denormal ? "with denormal numbers in v, and those " : ""));
  }
  if (p.pass == Pass::kBackward) {
    e.details.add("splits", plan.splits);
    say(fmt::format("key tiles outside, row tiles inside: {} tiles a pass", kTiles));
    say(fmt::format(
        "{} threads take {} parts of the keys of a kv head; dQ is added up in fixed order",
        plan.threads, plan.splits));
    return e;
  }
  if (plan.min_part > 0) {
    e.details.add("decode_rows", plan.decode_rows);
    e.details.add("min_split_keys", plan.min_part);
    e.details.add("splits", plan.parts);
    say(fmt::format(
        "decode, of at most {} rows a kv head{}: keys in {}, merged by LSE", plan.decode_rows,
        k.decode_on_vectors > 0 ? fmt::format(", of fewer than {} on vectors", k.decode_on_vectors)
                                : "",
        plan.parts == 0
            ? fmt::format("parts of {} whatever batch and threads are", plan.min_part)
            : fmt::format("about {} parts in all, of at least {}", plan.parts, plan.min_part)));
  }
  if (plan.block_rows > 0) {
    e.details.add("block_rows", plan.block_rows);
    say(fmt::format("blocks of {} rows over all their keys", plan.block_rows));
  }
  if (p.cache.paged()) {
    say(describe_pages(plan, p));
  }
  say(fmt::format("{} threads take tasks, longest first", plan.threads));
  return e;
}

}  // namespace fulgur::cpu

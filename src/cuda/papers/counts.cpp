#include "cuda/papers/counts.h"

#include <algorithm>

#include "cuda/common/kernel_key.h"
#include "cuda/papers/plain_call.h"
#include "kernels/host_device/mask.h"
#include "kernels/host_device/strips.h"

namespace fulgur::cuda::papers {
namespace {

constexpr int64_t kFloat = 4;  ///< bytes of an f32
constexpr int64_t kQuad = 4;   ///< threads that share a row of a fragment

int64_t tiles_of(int64_t size, int64_t tile) { return (size + tile - 1) / tile; }
int64_t whole(int64_t size, int64_t tile) { return tiles_of(size, tile) * tile; }

struct Counts {
  int64_t read = 0, written = 0;
  int64_t products = 0, exponentials = 0;
  int64_t rescales = 0;    ///< of rows, including O
  bool by_scores = false;  ///< whether rescales, and some exponentials, depend on the scores
  bool counts_bytes = true;

  Counts& operator+=(const Counts& o) {
    read += o.read;
    written += o.written;
    products += o.products;
    exponentials += o.exponentials;
    rescales += o.rescales;
    return *this;
  }
};

/// A call with the tiles of its plan.
struct Tiled {
  const Problem& p;
  int64_t Br, Bc, d, dv;  ///< d and dv as computed, rounded up
  kernels::Band band;

  kernels::Lengths lengths() const {
    return {0, 0, static_cast<int>(p.sq), static_cast<int>(p.sk)};
  }
  int64_t heads() const { return p.batch * p.hq; }
  int64_t element() const { return size_of(p.dtypes.q); }
  int64_t rows() const { return heads() * p.sq; }
};

/// C [m, n] = A [m, depth] B [depth, n] of each q head, by tiles of 128 rows.
Counts product_of(const Tiled& t, int64_t m, int64_t n, int64_t depth, int64_t columns) {
  constexpr int64_t kRows = 128, kDepth = 64;
  Counts c;
  c.read = t.heads() * t.element() * depth * (m * tiles_of(n, columns) + n * tiles_of(m, kRows));
  c.products = t.heads() * whole(m, kRows) * whole(n, columns) * whole(depth, kDepth);
  return c;
}

/// Algorithms 0 and 3 of the paper of 2022.
Counts standard(const Tiled& t) {
  const Problem& p = t.p;
  const auto columns = [](int64_t dim) { return dim <= 64 ? 64 : 128; };
  const int64_t scores = t.rows() * p.sk, chunks = t.rows() * whole(p.sk, 8);
  Counts c = product_of(t, p.sq, p.sk, p.d, 128);
  c.written = scores * kFloat;
  // The softmax reads S for the maximum, the sum and P.
  c.read += 3 * chunks * kFloat;
  c.written += chunks * t.element();
  c.exponentials = scores + t.rows() * whole(p.sk, 256);  // by whole warps
  if (p.pass == Pass::kForward) {
    c.written += t.rows() * kFloat;
    c += product_of(t, p.sq, p.dv, p.sk, columns(t.dv));
    c.written += t.rows() * p.dv * t.element();
    return c;
  }
  c += product_of(t, p.sk, p.dv, p.sq, columns(t.dv));
  c += product_of(t, p.sq, p.sk, p.dv, 128);
  c.read += 4 * chunks * t.element();  // P and dP, once for D and once for dS
  c.written += (scores + chunks) * t.element();
  c += product_of(t, p.sq, p.d, p.sk, columns(t.d));
  c += product_of(t, p.sk, p.d, p.sq, columns(t.d));
  c.written += (t.rows() * p.d + p.batch * p.hk * p.sk * (p.d + p.dv)) * t.element();
  return c;
}

/// Algorithm 2 of the paper of 2022: O, l and m make a round trip for each key block.
Counts flash1(const Tiled& t, int64_t ctas) {
  const Problem& p = t.p;
  const int64_t row_tiles = tiles_of(p.sq, t.Br), slices = std::max<int64_t>(ctas / t.heads(), 1);
  const int64_t slice = tiles_of(row_tiles, slices);
  int64_t visits = 0, rows = 0, keys = 0;  // tiles, and their existing rows of Q, and of K and V
  for (int64_t key = 0; key < p.sk; key += t.Bc) {
    const kernels::RowTiles seeing = kernels::row_tiles(
        t.band, t.lengths(), static_cast<int>(t.Br), static_cast<int>(key), static_cast<int>(t.Bc));
    for (int64_t first = 0; first < row_tiles; first += slice) {
      const int64_t begin = std::max<int64_t>(first, seeing.begin);
      const int64_t end = std::min({first + slice, row_tiles, int64_t{seeing.end}});
      if (begin >= end) continue;
      visits += end - begin;
      rows += std::min(end * t.Br, p.sq) - begin * t.Br;
      keys += std::min(t.Bc, p.sk - key);
    }
  }
  const int64_t state = t.Br * (t.dv + 2) * kFloat, state_read = t.Br * (t.dv + 2 * kQuad) * kFloat;
  Counts c;
  c.read = t.heads() *
           ((rows * p.d + keys * (p.d + p.dv)) * t.element() + (visits + row_tiles) * state_read);
  c.written = t.heads() * (visits + row_tiles) * state +
              t.rows() * (p.dv * t.element() + (p.has(Arg::kLse) ? kFloat : 0));
  c.products = t.heads() * visits * t.Br * t.Bc * (t.d + t.dv);
  c.rescales = t.heads() * visits * t.Br;
  c.exponentials = t.heads() * visits * t.Br * t.Bc + kQuad * c.rescales;
  return c;
}

/// Algorithm 1 of FlashAttention-2: O, l and m stay in registers. K and V of a block are loaded
/// once for all of its strips, which may be of `block_heads` heads of a group. A strip computes the
/// tiles that it sees or, with `of_block`, those that its block sees.
Counts flash2(const Tiled& t, int block_heads, bool of_block) {
  const Problem& p = t.p;
  const int rows = static_cast<int>(p.sq),
            block_strips = static_cast<int>(t.Br / kernels::kStripRows);
  const int strips = kernels::strips_of(rows) * block_heads;
  const auto first_row = [&](int strip) { return strip / block_heads * kernels::kStripRows; };
  const auto tiles_seen = [&](int first_strip, int last_strip) {
    return kernels::key_tiles(t.band, t.lengths(), static_cast<int>(t.Bc), first_row(first_strip),
                              std::min(first_row(last_strip) + kernels::kStripRows, rows) - 1);
  };
  int64_t keys = 0, scores = 0;  // of the heads of a block
  for (int block = 0; block < kernels::blocks_of(rows, block_strips, block_heads); ++block) {
    const int first = kernels::first_strip(rows, block_strips, block, block_heads);
    const int end =
        std::min(kernels::first_strip(rows, block_strips, block + 1, block_heads), strips);
    const kernels::KeyTiles seen = tiles_seen(first, end - 1);
    if (seen.end > seen.begin) keys += std::min(seen.end * t.Bc, p.sk) - seen.begin * t.Bc;
    for (int strip = first; strip < end; ++strip) {
      const kernels::KeyTiles of_strip = of_block ? seen : tiles_seen(strip, strip);
      scores += (of_strip.end - of_strip.begin) * kernels::kStripRows * t.Bc;
    }
  }
  const int64_t groups = t.heads() / block_heads;
  Counts c;
  c.read = (t.rows() * p.d + groups * keys * (p.d + p.dv)) * t.element();
  c.written = t.rows() * (p.dv * t.element() + (p.has(Arg::kLse) ? kFloat : 0));
  c.products = groups * scores * (t.d + t.dv);
  c.exponentials = groups * scores;
  c.by_scores = true;
  return c;
}

/// Algorithm 4 of 2022 and 2 of FlashAttention-2: each key block reads Q, dO and their statistics,
/// and adds to dQ. Before that, D is computed and dQ cleared; after it, dQ is rounded.
Counts flash_backward(const Tiled& t) {
  const Problem& p = t.p;
  int64_t visits = 0, rows = 0;
  for (int64_t key = 0; key < p.sk; key += t.Bc) {
    const kernels::RowTiles seeing = kernels::row_tiles(
        t.band, t.lengths(), static_cast<int>(t.Br), static_cast<int>(key), static_cast<int>(t.Bc));
    if (seeing.begin >= seeing.end) continue;
    visits += seeing.end - seeing.begin;
    rows += std::min(seeing.end * t.Br, p.sq) - seeing.begin * t.Br;
  }
  const int64_t round_threads = 128 * tiles_of(t.d, 64);
  const int64_t sums = t.heads() * whole(p.sq, 64);  // rows of dQ in f32 and of statistics
  const int64_t kv = p.batch * p.hk * p.sk * (p.d + p.dv);
  const bool hides = t.band.has_left || t.band.has_right || t.band.chunk > 0;
  Counts c;
  c.read = (2 * t.rows() * p.dv + kv + t.heads() * rows * (p.d + p.dv)) * t.element() +
           (t.rows() + t.heads() * visits * t.Br * 2 + sums * t.d) * kFloat;
  if (hides)
    c.read += sums / 64 * round_threads * kFloat;  // the flag whether a hidden NaN was found
  c.written = (2 * sums + sums * whole(t.d, 64) + t.heads() * visits * t.Br * t.d) * kFloat +
              (t.rows() * p.d + kv) * t.element();
  c.products = t.heads() * visits * t.Br * t.Bc * (3 * t.d + 2 * t.dv);
  c.exponentials = t.heads() * visits * t.Br * t.Bc;
  return c;
}

Counts counts_of(const Tiled& t, const std::string& kernel, const Explanation& plan) {
  const bool forward = t.p.pass == Pass::kForward;
  if (t.p.algorithm == Algorithm::kStandard) return standard(t);
  if (!forward) {
    Counts c = flash_backward(t);
    c.counts_bytes = t.p.algorithm != Algorithm::kFa3;
    return c;
  }
  if (t.p.algorithm == Algorithm::kFa1) return flash1(t, plan.details.get<int64_t>("ctas"));
  const bool shares_blocks = plan.details.has("shares_blocks");
  return flash2(t, shares_blocks ? static_cast<int>(t.p.group()) : 1, kernel == "portable_wide");
}

}  // namespace

void add_counts(const Problem& p, const Candidate& candidate, Reasons* reasons) {
  const std::string& kernel = candidate.tile.family;
  const bool of_a_paper = kernel == "standard" || kernel.starts_with("fa1") ||
                          kernel.starts_with("portable_") || kernel.starts_with("sm90_");
  if (p.algorithm == Algorithm::kAny || p.pass == Pass::kScores || !of_a_paper ||
      kernel.find("decode") != kernel.npos || p.batch * p.hq == 0 || p.sq * p.sk == 0 ||
      !plain_call_rejects(p, 256).empty()) {
    return;
  }
  const Explanation plan = candidate.explain();
  const auto dim = [&](const char* name) { return plan.details.get<int64_t>(name); };
  const KernelKey key = kernel_key(p);
  const Counts c = counts_of(
      {p, candidate.tile.Br, candidate.tile.Bc, dim("head_dim"), dim("value_dim"), band_of(key, p)},
      kernel, plan);
  Details counts;
  if (c.counts_bytes) {
    counts.add("bytes_read", c.read);
    counts.add("bytes_written", c.written);
  }
  counts.add("products", c.products);
  counts.add("exponentials", c.exponentials);
  if (!c.by_scores) counts.add("rescales", c.rescales);
  reasons->details.add("counts", std::move(counts));
}

}  // namespace fulgur::cuda::papers

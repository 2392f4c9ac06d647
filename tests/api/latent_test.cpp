// Values that are the first columns of the keys, as in absorbed multi-head latent attention: with
// keys in rows and in caches, and values of the same strides that lie elsewhere.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cached.h"
#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

class Latent : public EveryEngine {
 protected:
  void expect_right(Workload& w) {
    w.seal();
    w.options.engine = engine();
    if (!computes([&] { w.run_forward(); })) return;
    EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
    EXPECT_TRUE(w.check_memory());
  }
};

// Few rows of one kv head, blocks of 64 rows that are full and that are not, lengths that end in
// tiles, and no keys.
std::vector<Case> cases() {
  const auto of = [](DType dtype, int64_t batch, int64_t sq, int64_t sk, int64_t hq, int64_t d,
                     int64_t dv) {
    return Case{.dtype = dtype, .batch = batch, .sq = sq, .sk = sk, .hq = hq, .d = d, .dv = dv};
  };
  std::vector<Case> all = {
      of(DType::kBF16, 1, 1, 64, 16, 576, 512),  of(DType::kBF16, 2, 1, 333, 16, 576, 512),
      of(DType::kBF16, 3, 2, 200, 70, 576, 512), of(DType::kF16, 2, 1, 700, 128, 576, 512),
      of(DType::kBF16, 1, 3, 130, 16, 512, 512), of(DType::kF16, 2, 1, 65, 8, 320, 256),
      of(DType::kBF16, 2, 2, 150, 4, 304, 200),  of(DType::kBF16, 2, 1, 0, 16, 576, 512)};
  for (Case& c : all) c.sinks = c.hq == 70;
  const auto also = [&](size_t i, Mask mask, bool seqused) {
    Case c = all[i];
    c.mask = mask;
    c.seqused = seqused;
    all.push_back(c);
  };
  also(1, full(), true);
  also(2, causal(), true);
  also(4, causal(), false);
  also(2, window(50, 0), false);
  return all;
}

Tensor first_columns(Tensor t, int64_t columns) {
  t.shape[t.rank - 1] = columns;
  return t;
}

TEST_P(Latent, ValuesAreColumnsOfKeys) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    Workload w(c, c.seed());
    w.forward.v = first_columns(w.forward.k, c.dv);
    expect_right(w);
  }
}

TEST_P(Latent, ValuesOfTheSameStridesElsewhere) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    Workload w(c, c.seed());
    const std::vector<double> values = read(w.forward.v);
    Storage elsewhere(c.dtype, c.batch * c.sk * c.d);
    w.forward.v = elsewhere.view(0, std::array{c.batch, c.sk, c.hk, c.dv},
                                 std::array{c.sk * c.d, c.d, c.d, int64_t{1}});
    write(w.forward.v, values);
    elsewhere.seal();
    expect_right(w);
    EXPECT_TRUE(elsewhere.all_unchanged());
  }
}

TEST_P(Latent, InCaches) {
  for (const Case& c : cases()) {
    if (c.sk == 0 || c.hq == 128) continue;
    for (const auto& [page, shared] : {std::pair{8, true}, {64, true}, {256, false}}) {
      SCOPED_TRACE(c.name() + " page " + std::to_string(page) + (shared ? " shared" : ""));
      Workload w(c, c.seed());
      if (shared) w.forward.v = first_columns(w.forward.k, c.dv);
      w.seal();
      w.options.engine = engine();
      Cached cached(w, {.page = page}, c.seed());
      if (shared) cached.forward.v = first_columns(cached.forward.k, c.dv);
      if (!computes([&] { cached.run_forward(); })) continue;
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
      EXPECT_TRUE(cached.check_memory());
    }
  }
}

// NaN and infinity in keys, which are values, too, reach the queries that see them, and no other.
TEST_P(Latent, PoisonInHiddenKeys) {
  for (const double poison :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    Case c{.dtype = DType::kBF16,
           .batch = 2,
           .sq = 4,
           .sk = 100,
           .hq = 16,
           .d = 576,
           .dv = 512,
           .mask = causal()};
    Workload w(c, 3);
    w.forward.v = first_columns(w.forward.k, c.dv);
    std::vector<double> keys = read(w.forward.k);
    for (int64_t b = 0; b < c.batch; ++b)
      for (int64_t i = 0; i < c.d; i += 3)
        keys[static_cast<size_t>((b * c.sk + c.sk - 2) * c.d + i)] = poison;
    write(w.forward.k, keys);
    expect_right(w);
  }
}

// Scores that rise or fall by much from one tile of 64 keys to the next, so that the shift of the
// softmax moves in each tile or in none, over an even and an odd number of tiles.
TEST_P(Latent, ScoresOfDifferentTilesDiffer) {
  for (const auto& [sk, step, apart] : {std::tuple{int64_t{320}, 1.0, false},
                                        {int64_t{384}, 1.0, true},
                                        {int64_t{320}, -1.0, false}}) {
    Case c{.dtype = DType::kBF16, .sq = 1, .sk = sk, .hq = 70, .d = 576, .dv = 512};
    SCOPED_TRACE(c.name() + (step > 0 ? " rising" : " falling"));
    Workload w(c, c.seed());
    std::vector<double> keys = read(w.forward.k), queries = read(w.forward.q);
    for (int64_t i = 0; i < sk; ++i)  // 36 more or less from tile to tile
      keys[static_cast<size_t>(i * c.d)] = 4 + step * static_cast<double>(i / 64);
    for (int64_t h = 0; h < c.hq; ++h) queries[static_cast<size_t>(h * c.d)] = 36 * 24;
    write(w.forward.k, keys);
    write(w.forward.q, queries);
    if (!apart) w.forward.v = first_columns(w.forward.k, c.dv);
    expect_right(w);
  }
}

FULGUR_EVERY_ENGINE(Latent);

}  // namespace
}  // namespace fulgur::test

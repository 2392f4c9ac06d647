// Which keys a query sees, and what a tile needs, against the definition of the mask.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "call/mask.h"
#include "cpu/kernels/dispatch.h"
#include "engines.h"
#include "fulgur/attention.h"
#include "storage.h"

namespace fulgur::test {
namespace {

// mask.h, word for word.
bool sees(const Mask& mask, const Sequence& s, int64_t i, int64_t j) {
  const int64_t diagonal = mask.top_left ? i : i + s.sk - s.sq;
  if (mask.left >= 0 && j < diagonal - mask.left) return false;
  if (mask.right >= 0 && j > diagonal + mask.right) return false;
  const auto chunk_of = [&](int64_t key) {
    return std::floor(static_cast<double>(key) / static_cast<double>(mask.chunk));
  };
  return mask.chunk == 0 || chunk_of(j) == chunk_of(diagonal);
}

Tile tile_of(const Mask& mask, const Sequence& s, int64_t i0, int64_t i1, int64_t j0, int64_t j1) {
  int64_t visible = 0;
  for (int64_t i = i0; i < i1; ++i) {
    for (int64_t j = j0; j < j1; ++j) visible += sees(mask, s, i, j);
  }
  if (visible == 0) return Tile::kEmpty;
  return visible == (i1 - i0) * (j1 - j0) ? Tile::kFull : Tile::kPartial;
}

const std::vector<Mask>& masks() {
  static const std::vector<Mask> kMasks = [] {
    std::vector<Mask> all;
    for (const int64_t left : {-1, 0, 1, 3, 7, 100}) {
      for (const int64_t right : {-1, 0, 1, 4, 9, 100}) all.push_back(window(left, right));
    }
    for (const Mask& band : {full(), causal(), window(2, -1), window(3, 4), window(9, 100)}) {
      for (const int64_t chunk : {1, 2, 3, 5, 8, 16, 40}) all.push_back(chunked(chunk, band));
    }
    for (size_t i = 0, count = all.size(); i < count; ++i) all.push_back(top_left(all[i]));
    return all;
  }();
  return kMasks;
}

std::vector<Sequence> sequences() {
  std::vector<Sequence> all;
  for (const int64_t sq : {1, 2, 7, 16, 23}) {
    for (const int64_t sk : {0, 1, 2, 7, 16, 31}) all.push_back({0, 0, sq, sk});
  }
  return all;
}

TEST(Tiles, VisibleKeysAreThoseOfTheMask) {
  for (const Mask& mask : masks()) {
    for (const Sequence& s : sequences()) {
      double count = 0;
      for (int64_t i = 0; i < s.sq; ++i) {
        const KeyRange keys = visible_keys(mask, s, i);
        for (int64_t j = 0; j < s.sk; ++j) {
          ASSERT_EQ(j >= keys.begin && j < keys.end, sees(mask, s, i, j));
          count += sees(mask, s, i, j);
        }
      }
      ASSERT_EQ(visible_scores(mask, s), count);
    }
  }
}

// The largest numbers there are do not overflow.
TEST(Tiles, HugeChunksAreThoseOfTheSequence) {
  for (const Sequence& s : sequences()) {
    for (int64_t i = 0; i < s.sq; ++i) {
      for (const Mask& band : {full(), causal(), window(INT64_MAX, INT64_MAX)}) {
        const KeyRange keys = visible_keys(chunked(INT64_MAX, band), s, i);
        const KeyRange want = visible_keys(chunked(s.sq + s.sk, band), s, i);
        ASSERT_EQ(keys.begin, want.begin);
        ASSERT_EQ(keys.end, want.end);
      }
    }
  }
}

// No key that a mask shows is hidden by the window around it, and this has no chunks.
TEST(Tiles, WindowAroundAMask) {
  for (const Mask& mask : masks()) {
    const Mask around = window_around(mask);
    ASSERT_EQ(around.chunk, 0);
    if (mask.chunk == 0) {
      ASSERT_EQ(around, mask);
    }
    for (const Sequence& s : sequences()) {
      for (int64_t i = 0; i < s.sq; ++i) {
        const KeyRange keys = visible_keys(mask, s, i), wide = visible_keys(around, s, i);
        if (keys.empty()) continue;
        ASSERT_LE(wide.begin, keys.begin);
        ASSERT_GE(wide.end, keys.end);
        if (mask.chunk > 0) {
          ASSERT_LE(wide.end - wide.begin, 2 * mask.chunk - 1);
        }
      }
    }
  }
}

TEST(Tiles, ClassifyAgreesWithEveryScore) {
  for (const Mask& mask : masks()) {
    for (const Sequence& s : sequences()) {
      for (const int64_t Br : {1, 4, 8}) {
        for (const int64_t Bc : {1, 3, 8}) {
          const TileMap map = tile_map(mask, s, Br, Bc);
          ASSERT_EQ(map.rows, (s.sq + Br - 1) / Br);
          ASSERT_EQ(map.cols, (s.sk + Bc - 1) / Bc);
          ASSERT_EQ(map.tiles.size(), static_cast<size_t>(map.rows * map.cols));
          for (int64_t r = 0; r < map.rows; ++r) {
            for (int64_t c = 0; c < map.cols; ++c) {
              ASSERT_EQ(map.tiles[static_cast<size_t>(r * map.cols + c)],
                        tile_of(mask, s, r * Br, std::min(s.sq, (r + 1) * Br), c * Bc,
                                std::min(s.sk, (c + 1) * Bc)))
                  << "mask " << mask.left << ", " << mask.right << ", " << mask.chunk << ", "
                  << mask.top_left << " sq " << s.sq << " sk " << s.sk << " tile " << r << ", " << c
                  << " of " << Br << " x " << Bc;
            }
          }
        }
      }
    }
  }
}

TEST(Tiles, KeyRangeOfRowsCoversEachRow) {
  for (const Mask& mask : masks()) {
    for (const Sequence& s : sequences()) {
      const KeyRange keys = visible_keys(mask, s, 0, s.sq);
      for (int64_t i = 0; i < s.sq; ++i) {
        for (int64_t j = 0; j < s.sk; ++j) {
          if (sees(mask, s, i, j)) {
            ASSERT_TRUE(j >= keys.begin && j < keys.end);
          }
        }
      }
    }
  }
}

// A walk over some of the keys: the tiles that hold a visible score, and whether all of it is.
TEST(Tiles, WalkVisitsWhatIsVisible) {
  for (const Mask& mask : masks()) {
    for (const Sequence& s : sequences()) {
      const int64_t Bc = 4;
      for (int64_t i0 = 0; i0 < s.sq; i0 += 8) {
        const int64_t i1 = std::min(s.sq, i0 + 8);
        KeyRange any{INT64_MAX, 0}, all{0, INT64_MAX};
        for (int64_t i = i0; i < i1; ++i) {
          const KeyRange keys = visible_keys(mask, s, i);
          all = {std::max(all.begin, keys.begin), std::min(all.end, keys.end)};
          if (!keys.empty()) {
            any = {std::min(any.begin, keys.begin), std::max(any.end, keys.end)};
          }
        }
        for (const KeyRange keys : {KeyRange{0, s.sk}, {4, std::min<int64_t>(s.sk, 12)}}) {
          KeyTiles walk(keys, any, all, Bc);
          for (int64_t j = keys.begin; j < keys.end; j += Bc) {
            const int64_t end = std::min(keys.end, j + Bc);
            const Tile tile = tile_of(mask, s, i0, i1, j, end);
            if (tile == Tile::kEmpty) continue;
            ASSERT_EQ(walk.tile().j, j);
            ASSERT_EQ(walk.tile().n, end - j);
            ASSERT_EQ(walk.tile().partial, tile == Tile::kPartial);
            walk.next();
          }
          ASSERT_TRUE(walk.done());
        }
      }
    }
  }
}

class PlanNumbers : public EveryEngine {};

TEST_P(PlanNumbers, TilesOfEachSequence) {
  Dense q(DType::kF32, {30, 1, 16}), k(DType::kF32, {50, 1, 16}), out(DType::kF32, {30, 1, 16});
  Dense cu_q(DType::kI32, {4}), cu_k(DType::kI32, {4});
  write(cu_q, std::vector{0.0, 10.0, 10.0, 30.0});
  write(cu_k, std::vector{0.0, 20.0, 30.0, 50.0});
  Options options{.mask = causal()};
  options.engine = engine();
  const Plan p = plan(ForwardArgs{.q = q,
                                  .k = k,
                                  .v = k,
                                  .out = out,
                                  .lengths = {.cu_seqlens_q = cu_q, .cu_seqlens_k = cu_k}},
                      options);
  EXPECT_EQ(p.engine(), engine());
  const int64_t sq[] = {10, 0, 20}, sk[] = {20, 10, 20};
  for (int64_t b = 0; b < 3; ++b) {
    const TileMap map = p.tiles(b);
    const Sequence s{0, 0, sq[b], sk[b]};
    ASSERT_GT(map.Br, 0);
    ASSERT_GT(map.Bc, 0);
    EXPECT_EQ(map.tiles, tile_map(causal(), s, map.Br, map.Bc).tiles);
  }
  EXPECT_EQ(status_of([&] { p.tiles(3); }), Status::kInvalidArgument);
  EXPECT_EQ(status_of([&] { p.tiles(-1); }), Status::kInvalidArgument);
}

// The CPU engine masks a row tile at a time; few queries do not fill one, whatever their
// heads.
TEST(CpuTiles, AreRowTiles) {
  const int64_t full = cpu::machine().vectors.Br;  // of f32
  struct {
    int64_t sq, hq, Br;
  } const cases[] = {{300, 2, full}, {300, 8, full}, {17, 2, std::min<int64_t>(17, full)},
                     {5, 8, 5},      {5, 2, 5},      {1, 8, 1}};
  for (const auto& [sq, hq, Br] : cases) {
    for (const bool backward : {false, true}) {
      const auto q = Tensor::contiguous(nullptr, DType::kF32, {1, sq, hq, 16}),
                 k = Tensor::contiguous(nullptr, DType::kF32, {1, 300, 2, 16}),
                 lse = Tensor::contiguous(nullptr, DType::kF32, {1, hq, sq});
      const Options options{.mask = causal(), .engine = "cpu"};
      const Plan p = backward ? plan(BackwardArgs{q, q, k, k, q, lse, q, k, k}, options)
                              : plan(ForwardArgs{q, k, k, q, lse}, options);
      const TileMap map = p.tiles();
      EXPECT_EQ(map.Br, Br) << sq << " queries of " << hq << " heads";
      EXPECT_EQ(map.Bc, cpu::kBc);
      EXPECT_EQ(p.details().get<int64_t>("Br"), Br);
    }
  }
}

// What a bool mask hides, by its values; those of another head and sequence are others.
TEST(MaskTiles, AreThoseOfTheMask) {
  constexpr int64_t sq = 300, sk = 420, hq = 2, batch = 2;
  const auto shown = [](int64_t b, int64_t h, int64_t i, int64_t j) {
    return (i / 70 + j / 90 + h) % 2 == 0 || (b == 1 && i == 299);
  };
  std::vector<unsigned char> values;
  for (int64_t at = 0; at < batch * hq * sq * sk; ++at)
    values.push_back(shown(at / (hq * sq * sk), at / (sq * sk) % hq, at / sk % sq, at % sk) ? 7
                                                                                            : 0);
  const auto q = Tensor::contiguous(nullptr, DType::kF32, {batch, sq, hq, 16}),
             k = Tensor::contiguous(nullptr, DType::kF32, {batch, sk, hq, 16}),
             lse = Tensor::contiguous(nullptr, DType::kF32, {batch, hq, sq});
  ForwardArgs args{q, k, k, q, lse};
  args.bias = Tensor::contiguous(nullptr, DType::kBool, {batch, hq, sq, sk});
  const Plan p = plan(args, {.mask = causal(), .engine = "cpu"});
  std::vector<TensorBinding> given = {
      {"bias", Tensor::contiguous(values.data(), DType::kBool, {batch, hq, sq, sk}), {}}};
  double hidden = 0;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < hq; ++h) {
      const TileMap band = p.tiles(b), map = p.tiles(b, given, h);
      for (int64_t n = 0; n < map.rows * map.cols; ++n) {
        const int64_t i0 = n / map.cols * map.Br, j0 = n % map.cols * map.Bc;
        bool any = false, all = true;
        for (int64_t i = i0; i < std::min(sq, i0 + map.Br); ++i) {
          for (int64_t j = j0; j < std::min(sk, j0 + map.Bc); ++j) {
            any = any || shown(b, h, i, j);
            all = all && shown(b, h, i, j);
          }
        }
        const Tile want = !any ? Tile::kEmpty : all ? Tile::kFull : Tile::kPartial;
        EXPECT_EQ(map.tiles[n], band.tiles[n] == Tile::kEmpty ? Tile::kEmpty
                                : want == Tile::kFull         ? band.tiles[n]
                                                              : want);
        if (h == 0) hidden += map.tiles[n] == Tile::kEmpty;
      }
    }
  }
  const std::string text = p.explain(given);
  EXPECT_NE(text.find(fmt::format("\ntiles     of q head 0: {:.0f} hidden, ", hidden)), text.npos)
      << text;
  EXPECT_EQ(p.explain({}), p.explain());
  given[0].tensor.shape[0] = 1;
  const std::string wrong = message_of([&] { p.explain(given); });
  EXPECT_TRUE(wrong.starts_with("bias: got ") && wrong.ends_with(" as planned")) << wrong;
  given[0].tensor.data = nullptr;
  EXPECT_EQ(message_of([&] { p.tiles(0, given); }), "bias: data is null");
}

TEST_P(PlanNumbers, FlopsAndBytes) {
  Dense q(DType::kF32, {2, 8, 4, 16}), k(DType::kF32, {2, 8, 2, 16}), v(DType::kF32, {2, 8, 2, 24}),
      out(DType::kF32, {2, 8, 4, 24}), lse(DType::kF32, {2, 4, 8});
  Dense dk(DType::kF32, {2, 8, 2, 16}), dv(DType::kF32, {2, 8, 2, 24}),
      dq(DType::kF32, {2, 8, 4, 16}), dout(DType::kF32, {2, 8, 4, 24});
  Options options{.mask = causal()};
  options.engine = engine();
  const double scores = 2 * 4 * (8 * 9 / 2);
  const Plan f = plan(ForwardArgs{q, k, v, out, lse}, options);
  EXPECT_EQ(f.flops(), scores * 2 * (16 + 24));
  const double tensors = 4.0 * (2 * 8 * (4 * 16 + 2 * 16 + 2 * 24 + 4 * 24));
  EXPECT_EQ(f.bytes(), tensors + 4 * 2 * 4 * 8);
  const Plan b = plan(BackwardArgs{dout, q, k, v, out, lse, dq, dk, dv}, options);
  EXPECT_EQ(b.flops(), scores * (6 * 16 + 4 * 24));
  EXPECT_EQ(b.bytes(), 2 * tensors + 4 * 2 * 4 * 8);
}

TEST_P(PlanNumbers, DetailsSayWhatIsComputed) {
  Dense q(DType::kF32, {1, 8, 1, 16}), k(DType::kF32, {1, 8, 1, 16}),
      out(DType::kF32, {1, 8, 1, 16});
  Options options{.mask = causal()};
  options.engine = engine();
  const Plan p = plan(ForwardArgs{q, k, k, out, {}}, options);
  const Details details = p.details();
  EXPECT_EQ(details.get<std::string>("engine"), engine());
  EXPECT_EQ(details.get<std::string>("call.pass"), "forward");
  EXPECT_EQ(details.get<std::string>("call.dtype"), "f32");
  EXPECT_EQ(details.get<int64_t>("call.sq"), 8);
  EXPECT_EQ(details.get<int64_t>("call.right"), 0);
  EXPECT_FALSE(details.has("call.left"));
  EXPECT_EQ(details.get<double>("flops"), p.flops());
  EXPECT_EQ(details.get<double>("bytes"), p.bytes());
  EXPECT_EQ(details.get<int64_t>("workspace_bytes"), p.workspace().bytes);
  EXPECT_TRUE(details.has("rejected"));
  EXPECT_THROW(details.get<double>("engine"), Error);
  EXPECT_THROW(details.get<double>("call.none"), Error);
}

FULGUR_CPU_MEMORY_ENGINES(PlanNumbers);

TEST(Details, AreJson) {
  Details inner, details;
  inner.add("x", 0.5);
  inner.add("whole", 3.0);
  details.add("yes", true);
  details.add("count", 7);
  details.add("text", "a \"b\"\\\n");
  details.add("list", Details::Texts{"p", "q"});
  details.add("inner", inner);
  EXPECT_EQ(details.json(),
            R"({"yes": true, "count": 7, "text": "a \"b\"\\\u000a", "list": ["p", "q"], )"
            R"("inner": {"x": 0.5, "whole": 3.0}})");
  EXPECT_EQ(details.get<double>("inner.x"), 0.5);
}

TEST(ChooseEngine, ByDtypeAndDevice) {
  Dense f32(DType::kF32, {1, 8, 1, 16}), out(DType::kF32, {1, 8, 1, 16});
  Dense f64(DType::kF64, {1, 8, 1, 16}), out64(DType::kF64, {1, 8, 1, 16});
  EXPECT_EQ(plan(ForwardArgs{f32, f32, f32, out, {}}).engine(), "cpu");
  EXPECT_EQ(plan(ForwardArgs{f64, f64, f64, out64, {}}).engine(), "reference");
}

}  // namespace
}  // namespace fulgur::test

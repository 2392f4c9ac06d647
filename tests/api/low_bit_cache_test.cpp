// Attention of 16-bit queries over caches of codes, against attention over the numbers that an
// independent decoder finds in them, in double precision: formats, scales, zero points, pages,
// groups of heads, masks.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "coded.h"
#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"
#include "seed.h"

namespace fulgur::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

/// P and what scales it or is subtracted from codes are f16 on their way to products.
constexpr double kProducts = 0x1p-10;

/// A call of 16-bit queries over a cache, and the same call of f32 as the oracle knows it.
class CachedCall {
 public:
  struct Keys {
    DType format;  ///< or that of q
    ScaleKind kind = ScaleKind::kNone;
    bool zero_point = false;
    DType scale = DType::kF32;
    int64_t group = 32;
  };

  CachedCall(const Case& c, DType dtype, uint64_t seed) : w(c, seed), random_(seed), dtype_(dtype) {
    call = w.forward;
    add(call.q, rounded_to(dtype, w.forward.q));
    write(w.forward.q, read(call.q));
    add(call.out, Buffer(dtype, {c.batch, c.sq, c.hq, c.dv}));
  }

  void set_k(const Keys& keys) {
    set(w.forward.k, keys, call.k, call.k_descale, call.k_zero_point);
  }
  void set_v(const Keys& keys) {
    set(w.forward.v, keys, call.v, call.v_descale, call.v_zero_point);
  }

  /// Keys and their scales go to pages, which are shuffled.
  void page(int64_t page) {
    const int64_t pages = (w.c.sk + page - 1) / page, all = w.c.batch * pages + 2;
    std::vector<int32_t> order(static_cast<size_t>(all));
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<std::vector<int32_t>> ids(static_cast<size_t>(w.c.batch));
    Buffer table(DType::kI32, {w.c.batch, pages});
    int64_t n = 0;
    for (auto& of : ids) {
      for (int64_t i = 0; i < pages; ++i, order.pop_back()) {
        of.push_back(order.back());
        store(table.t.data, DType::kI32, n++, order.back());
      }
    }
    add(call.page_table, std::move(table));
    for (Tensor* t : {&call.k, &call.v, &call.k_descale, &call.v_descale, &call.k_zero_point,
                      &call.v_zero_point}) {
      if (!t->given() || t->rank < 4) continue;
      const auto of = std::find_if(buffers_.begin(), buffers_.end(),
                                   [&](const Buffer& b) { return b.t.data == t->data; });
      add(*t, in_pages(*of, page, all, ids));
    }
  }

  void run(const std::string& engine) {
    EngineMemory memory(engine);
    for (Buffer& b : buffers_) memory.keep(std::as_writable_bytes(std::span(b.bytes)));
    Options options = w.options;
    options.engine = engine;
    forward(memory.at(call), options, w.run_options);
    memory.bring_back();
  }

  /// `lse_bound` where numbers of K are rounded.
  testing::AssertionResult is_right(const Expected& e) const {
    const double rounding = zero_point_of_k_ ? kProducts : tolerance(dtype_);
    const double score = zero_point_of_k_ ? e.unit.lse : 0;
    auto r =
        within("out", call.out, e.reference.out, {}, 2, kProducts * (1 + 4 * score) * e.unit.out);
    return r ? within("lse", call.lse, e.reference.lse, {}, 0, rounding * e.unit.lse) : r;
  }

  Workload w;
  ForwardTensors call;

 private:
  void add(Tensor& to, Buffer buffer) {
    buffers_.push_back(std::move(buffer));
    to = buffers_.back().t;
  }
  static Buffer rounded_to(DType dtype, const Tensor& t) {
    Buffer b(dtype, std::vector<int64_t>(t.shape.begin(), t.shape.begin() + t.rank));
    write(b.t, read(t));
    return b;
  }
  void set(const Tensor& numbers, const Keys& keys, Tensor& codes, Tensor& scale, Tensor& zero) {
    std::vector<double> x = read(numbers);
    for (double& one : x)
      one = std::isnan(one) ? 2.5 : keys.kind == ScaleKind::kNone ? one : 3 * one + 0.5;
    write(numbers, x);
    if (keys.format == dtype_) {
      add(codes, rounded_to(dtype_, numbers));
      write(numbers, read(codes));
      return;
    }
    Coded coded =
        Coded::of(numbers, keys.format, keys.kind, keys.zero_point, keys.scale, keys.group);
    write(numbers, coded.numbers());
    if (&codes == &call.k) zero_point_of_k_ = keys.zero_point;
    add(codes, std::move(coded.codes));
    if (coded.scale.t.given()) add(scale, std::move(coded.scale));
    if (coded.zero_point.t.given()) add(zero, std::move(coded.zero_point));
  }

  std::mt19937_64 random_;
  DType dtype_;
  std::deque<Buffer> buffers_;
  bool zero_point_of_k_ = false;
};

class LowBitCaches : public EveryEngine {
 protected:
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[random_() % all.size()];
  }

  CachedCall::Keys keys_of(DType format) {
    using K = ScaleKind;
    CachedCall::Keys keys{.format = format};
    if (format < DType::kE4M3 || scaled_inside(format)) return keys;
    keys.kind =
        one_of({K::kNone, K::kTensor, K::kHeads, K::kSequencesAndHeads, K::kRows, K::kGroups});
    keys.zero_point = keys.kind != K::kNone && has_zero_point(format) && random_() % 2 == 0;
    keys.scale = one_of({DType::kF32, DType::kF16});
    keys.group = one_of<int64_t>({32, 64});
    return keys;
  }

  Case drawn() {
    Case c;
    c.batch = one_of<int64_t>({1, 2, 3});
    c.sq = one_of<int64_t>({1, 1, 1, 2, 5, 9});
    c.sk = one_of<int64_t>({7, 64, 150, 300});
    c.hk = one_of<int64_t>({1, 2});
    c.hq = c.hk * one_of<int64_t>({1, 3, 4, 8});
    c.d = one_of<int64_t>({64, 128, 192, 256});
    c.dv = one_of<int64_t>({64, 128, 192});
    c.mask = one_of({full(), causal(), window(20, 3), chunked(16, causal())});
    c.softcap = one_of({0.0, 0.0, 5.0});
    c.alibi = one_of({Alibi::kNone, Alibi::kNone, Alibi::kHeads});
    c.sinks = random_() % 3 == 0;
    return c;
  }

  std::mt19937_64 random_{test_seed()};
};

TEST_P(LowBitCaches, AreAttendedAsTheirNumbers) {
  const char* const draws = std::getenv("FULGUR_TEST_DRAWS");
  const int count = draws == nullptr ? 12 : std::atoi(draws);
  for (int draw = 0; draw < count; ++draw) {
    Case c = drawn();
    const int64_t page = one_of<int64_t>({0, 0, 1, 5, 16, 64, 256});
    c.seqused = page > 0 || random_() % 2 == 0;
    const DType dtype = one_of({DType::kBF16, DType::kF16});
    const auto format = [&] {
      return random_() % 8 == 0 ? dtype
                                : one_of({DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt4});
    };
    const CachedCall::Keys k = keys_of(format()), v = keys_of(format());
    SCOPED_TRACE(testing::Message()
                 << "seed " << test_seed() << " draw " << draw << " " << c.name() << " page "
                 << page << " " << name_of(dtype) << " over " << name_of(k.format) << " "
                 << static_cast<int>(k.kind) << k.zero_point << " " << name_of(v.format) << " "
                 << static_cast<int>(v.kind) << v.zero_point);
    CachedCall call(c, dtype, random_());
    call.set_k(k);
    call.set_v(v);
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (page > 0) call.page(page);
    if (!computes([&] { call.run(engine()); })) continue;
    ASSERT_TRUE(call.is_right(e));
    ASSERT_TRUE(call.w.check_memory());
  }
}

// Codes that are no numbers, and scales that are none, spoil the rows that see them and no others.
TEST_P(LowBitCaches, WhatIsNoNumberStaysAtItsKeys) {
  for (const DType format : {DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt4}) {
    for (const double scale : {1.0, 0.0, 1e-42, -2.0, 1e30, double{kInf}, double{kNan}}) {
      const bool code = scale == 1;  // a code instead
      if (code && format >= DType::kInt8) continue;
      SCOPED_TRACE(testing::Message() << name_of(format) << " scale " << scale);
      Case c;
      c.sq = 5;
      c.sk = 70;
      c.hq = 4;
      c.mask = causal();
      CachedCall call(c, DType::kF16, 1);
      call.set_k({.format = DType::kInt8, .kind = ScaleKind::kHeads});
      call.set_v({.format = format, .kind = ScaleKind::kRows});
      // Of the last key but one, which the last two queries alone see.
      const int64_t key = c.sk - 2;
      std::vector<double> v = read(call.w.forward.v);
      if (code) {
        static_cast<uint8_t*>(call.call.v.data)[key * c.dv + 3] = 0x7f;
        v[static_cast<size_t>(key * c.dv + 3)] = kNan;
      } else {
        const double before = load(call.call.v_descale.data, DType::kF32, key);
        store(call.call.v_descale.data, DType::kF32, key, scale);
        for (int64_t i = 0; i < c.dv; ++i) {
          double& x = v[static_cast<size_t>(key * c.dv + i)];
          x = x / before * load(call.call.v_descale.data, DType::kF32, key);
        }
      }
      write(call.w.forward.v, v);
      call.w.seal();
      const Expected e = expect_forward(call.w);
      if (!computes([&] { call.run(engine()); })) return;
      const std::vector<double> got = read(call.call.out);
      double size = 1;
      for (const double x : v) size = std::isfinite(x) ? std::max(size, std::fabs(x)) : size;
      for (size_t i = 0; i < got.size(); ++i) {
        const double want = e.reference.out[i];
        const bool sees = static_cast<int64_t>(i) / c.dv / c.hq >= c.sq - 2;
        if (std::isfinite(want) && std::fabs(want) < 65504) {
          ASSERT_NEAR(got[i], want, kProducts * (sees ? size : 8)) << i;
        } else {
          ASSERT_FALSE(std::isfinite(got[i])) << i << " want " << want;
        }
      }
    }
  }
}

// Scales of V of any size, from key to key: what is small beside the largest one may be off by
// that one's rounding.
TEST_P(LowBitCaches, ScalesMayDifferByMuch) {
  for (const double size : {1e-30, 1.0, 1e25}) {
    Case c;
    c.sk = 200;
    c.hq = 8;
    c.hk = 2;
    CachedCall call(c, DType::kBF16, 5);
    call.set_k({.format = DType::kInt8, .kind = ScaleKind::kRows});
    call.set_v({.format = DType::kInt8, .kind = ScaleKind::kRows});
    std::vector<double> v = read(call.w.forward.v);
    for (int64_t n = 0; n < c.sk * c.hk; ++n) {
      const double factor = std::ldexp(size, static_cast<int>(random_() % 12));
      const double before = load(call.call.v_descale.data, DType::kF32, n);
      store(call.call.v_descale.data, DType::kF32, n, before * factor);
      const double now = load(call.call.v_descale.data, DType::kF32, n);
      for (int64_t i = 0; i < c.dv; ++i) v[static_cast<size_t>(n * c.dv + i)] *= now / before;
    }
    write(call.w.forward.v, v);
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (!computes([&] { call.run(engine()); })) return;
    ASSERT_TRUE(call.is_right(e)) << size;
  }
}

FULGUR_EVERY_ENGINE(LowBitCaches);

}  // namespace
}  // namespace fulgur::test

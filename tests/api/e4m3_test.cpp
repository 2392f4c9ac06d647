// Attention over codes of e4m3 in q and of e4m3 or e5m2 in k and v, with descales of every kind
// that GPUs take: the case list on every engine, against attention over the numbers that the codes
// stand for in double precision.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <limits>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "engine_memory.h"
#include "engines.h"
#include "fulgur/error.h"
#include "oracle.h"
#include "seed.h"

namespace fulgur::test {
namespace {

// The tensor cores of a GPU add products of e4m3 with 13 bits.
constexpr double kProducts = 0x1p-9;

/// The call of a workload with codes for its q, k and v. The workload gets their numbers: a code
/// has 4 bits, a descale as many, so that bf16 and f16 have each of their products.
class CodedCall {
 public:
  CodedCall(Workload& w, uint64_t seed, bool descaled = true)
      : tensors(w.forward), w_(w), random_(seed), descaled_(descaled) {
    const int64_t group = w.c.hq / w.c.hk;
    code(w.forward.q, group, &Rows::q_begin, &tensors.q, &tensors.q_descale);
    code(w.forward.k, 1, &Rows::k_begin, &tensors.k, &tensors.k_descale);
    code(w.forward.v, 1, &Rows::k_begin, &tensors.v, &tensors.v_descale);
    if (w.c.sinks) {  // with codes they are f32
      const std::array shape{w.c.hq}, strides{int64_t{1}};
      tensors.sinks = storages_.emplace_back(DType::kF32, w.c.hq).view(0, shape, strides);
      write(tensors.sinks, read(w.forward.sinks));
    }
    for (Storage& s : storages_) s.seal();
    w.seal();
  }

  testing::AssertionResult check_memory() const {
    for (const Storage& s : storages_) {
      if (auto result = s.all_unchanged(); !result) return result << " (codes)";
    }
    return w_.check_memory();
  }

  const Workload& workload() const { return w_; }

  ForwardTensors tensors;

 private:
  /// Not given, of the tensor, or of sequences and kv heads, any of which may share one.
  Tensor descale() {
    const uint64_t kind = descaled_ ? random_() % 6 : 0;
    if (kind == 0) return {};
    const auto batch = static_cast<int64_t>(w_.sequences.size());
    const std::array shape{kind % 2 == 0 ? batch : 1, kind >= 4 ? w_.c.hk : 1};
    const auto gap = static_cast<int64_t>(random_() % 3);
    const std::array strides{shape[1] * (1 + gap) + gap, 1 + gap};
    const size_t rank = kind == 1 ? 1 : 2;
    const DType dtype = random_() % 2 == 0 ? DType::kF32 : DType::kF16;
    Storage& storage = storages_.emplace_back(dtype, shape[0] * strides[0]);
    const Tensor t = storage.view(0, std::span(shape).first(rank), std::span(strides).last(rank));
    std::vector<double> values(static_cast<size_t>(t.numel()));
    for (double& x : values) {
      const auto mantissa = static_cast<double>(8 + random_() % 8);
      const int exponent = -5 - static_cast<int>(random_() % 6);
      x = std::ldexp(random_() % 8 == 0 ? -mantissa : mantissa, exponent);
    }
    write(t, values);
    return t;
  }

  /// `group`: heads of `numbers` that share a kv head.
  void code(const Tensor& numbers, int64_t group, int64_t Rows::*begin, Tensor* codes,
            Tensor* descale) {
    const bool of_q = codes == &tensors.q;
    const DType format = of_q || random_() % 3 != 0 ? DType::kE4M3 : DType::kE5M2;
    *descale = this->descale();
    const auto rank = static_cast<size_t>(numbers.rank);
    int64_t span = 1;
    for (size_t i = 0; i < rank; ++i) {
      span += std::max<int64_t>(numbers.shape[i] - 1, 0) * numbers.strides[i];
    }
    *codes =
        storages_.emplace_back(format, span)
            .view(0, std::span(numbers.shape).first(rank), std::span(numbers.strides).first(rank));
    const auto factors = descale->given() ? read(*descale) : std::vector<double>{1};
    const auto [rows, heads, dim] =
        std::array{numbers.shape[rank - 3], numbers.shape[rank - 2], numbers.shape[rank - 1]};
    std::vector<double> x = read(numbers), coded(x.size());
    for (size_t n = 0; n < x.size(); ++n) {
      const auto row = static_cast<int64_t>(n) / dim / heads;
      const int64_t kv = static_cast<int64_t>(n) / dim % heads / group;
      const int64_t b = rank == 3 ? sequence_of(row, begin) : row / rows;
      int64_t which = 0;
      if (descale->rank == 2) {
        which =
            (descale->shape[0] > 1 ? b * descale->shape[1] : 0) + (descale->shape[1] > 1 ? kv : 0);
      }
      const double factor = factors[static_cast<size_t>(which)];
      coded[n] = rounded(x[n] / factor, format);
      x[n] = coded[n] * factor;
    }
    write(*codes, coded);
    write(numbers, x);
  }

  /// The sequence of a packed row; of rows around all, the first or the last.
  int64_t sequence_of(int64_t row, int64_t Rows::*begin) const {
    size_t b = 0;
    while (b + 1 < w_.sequences.size() && w_.sequences[b + 1].*begin <= row) ++b;
    return static_cast<int64_t>(b);
  }

  Workload& w_;
  std::mt19937_64 random_;
  bool descaled_;
  std::deque<Storage> storages_;
};

testing::AssertionResult is_right(const Workload& w, const Expected& e, const std::string& engine) {
  const double t = tolerance(w.c.dtype) + (engine == "cuda" ? kProducts : 0);
  const auto& want = e.reference;
  if (auto r = within("out", w.forward.out, want.out, e.naive.out, 2, t * e.unit.out); !r) return r;
  return within("lse", w.forward.lse, want.lse, {}, 0, t * e.unit.lse);
}

class Codes : public testing::TestWithParam<std::tuple<Case, EngineInfo>> {
 protected:
  /// False where the engine does not compute such a call.
  bool computes(const CodedCall& call) {
    const Workload& w = call.workload();
    try {
      compute(call.tensors, w.options, w.run_options);
      return true;
    } catch (const Error& error) {
      const auto& [c, engine] = GetParam();
      const bool dropped_tree = c.tree != Tree::kNone && c.dropout > 0;
      const bool hopper = engine.description.find("sm_90a") != std::string::npos;
      const bool dropped = c.dropout > 0 && !hopper;  // by Hopper's forward kernel alone
      const bool lacks =
          engine.name == "cuda" && (std::max(c.d, c.dv) > 256 || dropped_tree || dropped);
      EXPECT_TRUE(lacks && error.status() == Status::kUnsupported) << error.what();
      EXPECT_TRUE(w.nothing_written());
      why_refused = error.what();
      return false;
    }
  }

  std::string why_refused;
};

// P V in e4m3, too: P, and V less its mean, are each off by what that rounds, half of one in 8 at
// most, where a row has few keys; errors of many keep each other small.
class FastCodes : public Codes {};

TEST_P(FastCodes, AreAttendedAsTheirNumbers) {
  const auto& [c, engine] = GetParam();
  if (!engine.unavailable.empty()) GTEST_SKIP() << engine.name << ": " << engine.unavailable;
  const uint64_t seed = test_seed() ^ c.seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Workload w(c, seed);
  w.options.engine = engine.name;
  w.options.fast_codes = true;
  CodedCall call(w, seed);
  const Expected e = expect_forward(w);
  if (!computes(call)) GTEST_SKIP() << why_refused;
  const double t = tolerance(c.dtype) + kProducts;
  EXPECT_TRUE(
      within("out", w.forward.out, e.reference.out, e.naive.out, 2, (t + 0x1p-3) * e.unit.out));
  EXPECT_TRUE(within("lse", w.forward.lse, e.reference.lse, {}, 0, t * e.unit.lse));
  const std::vector<double> out = read(w.forward.out);
  double squares = 0;
  for (size_t n = 0; n < out.size(); ++n) {
    if (std::isfinite(out[n])) squares += std::pow(out[n] - e.reference.out[n], 2);
  }
  const double n = std::max<double>(static_cast<double>(out.size()), 1);
  EXPECT_LE(std::sqrt(squares / n), 0x1p-6 * e.unit.out);
  EXPECT_TRUE(call.check_memory());
}

TEST_P(Codes, AreAttendedAsTheirNumbers) {
  const auto& [c, engine] = GetParam();
  if (!engine.unavailable.empty()) GTEST_SKIP() << engine.name << ": " << engine.unavailable;
  const uint64_t seed = test_seed() ^ c.seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Workload w(c, seed);
  w.options.engine = engine.name;
  w.options.invariant = seed % 2 == 0;  // few rows are then the forward kernel's, too
  CodedCall call(w, seed);
  const Expected e = expect_forward(w);
  if (!computes(call)) GTEST_SKIP() << why_refused;
  EXPECT_TRUE(is_right(w, e, engine.name));
  EXPECT_TRUE(call.check_memory());
}

std::string name(const testing::TestParamInfo<Codes::ParamType>& info) {
  const auto& [c, engine] = info.param;
  return engine.name + "_" + c.name();
}

/// Out has the dtype of the case.
std::vector<Case> coded(std::vector<Case> cases) {
  std::erase_if(cases, [](const Case& c) { return size_of(c.dtype) != 2; });
  return cases;
}

auto on(std::vector<Case> cases, std::vector<EngineInfo> engines) {
  return testing::Combine(testing::ValuesIn(coded(std::move(cases))), testing::ValuesIn(engines));
}

std::vector<EngineInfo> gpus() {
  std::vector<EngineInfo> engines = engines_here();
  std::erase_if(engines, [](const EngineInfo& e) { return e.name != "cuda"; });
  return engines;
}

INSTANTIATE_TEST_SUITE_P(Small, Codes, on(small_cases(), engines_here()), name);
INSTANTIATE_TEST_SUITE_P(Large, Codes, on(large_cases(), engines_here()), name);
INSTANTIATE_TEST_SUITE_P(Small, FastCodes, on(small_cases(), gpus()), name);
INSTANTIATE_TEST_SUITE_P(Large, FastCodes, on(large_cases(), gpus()), name);

class CodedCalls : public EveryEngine {
 protected:
  CodedCalls() {
    c_.dtype = DType::kBF16;
    c_.batch = 2;
    c_.sq = 70;
    c_.sk = 150;
    c_.hq = 4;
    c_.hk = 2;
    c_.mask = causal();
  }

  Case c_;
};

// NaN at keys that are hidden from some rows reaches none of these, though they share a product
// with rows that see the keys.
TEST_P(CodedCalls, HiddenNanReachesNoRow) {
  Workload w(c_, 1);
  w.options.engine = engine();
  CodedCall call(w, 1);
  const Tensor& v = call.tensors.v;
  const int64_t last =
      (c_.sk - 1) * v.strides[1] + v.strides[2];  // of kv head 1, row 0 of q's hides it
  store(v.data, v.dtype, last, std::nan(""));
  if (!computes([&] { compute(call.tensors, w.options); })) return;
  const std::vector<double> out = read(w.forward.out);
  for (size_t n = 0; n < out.size(); ++n) {
    const int64_t head = static_cast<int64_t>(n) / c_.dv % c_.hq;
    const int64_t row = static_cast<int64_t>(n) / c_.dv / c_.hq % c_.sq;
    const bool sees = n < out.size() / 2 && head >= 2 && row == c_.sq - 1 && n % 64 == 0;
    ASSERT_EQ(std::isnan(out[n]), sees) << n;
  }
}

// Descales of 0, negative and denormal ones, infinities and NaN give what the numbers give.
TEST_P(CodedCalls, DescalesMayBeAnything) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const std::array shape{int64_t{1}}, strides{int64_t{1}};
  Storage storage(DType::kF32, 1);
  const Tensor descale = storage.view(0, shape, strides);
  // Hopper's forward kernel computes the first, its decode kernel the second.
  const auto check = [&](int64_t sq, double x, Tensor ForwardTensors::*of, double softcap) {
    SCOPED_TRACE(testing::Message() << sq << " queries " << x << " softcap " << softcap << " of v "
                                    << (of == &ForwardTensors::v_descale));
    c_.sq = sq;
    c_.softcap = softcap;
    Workload w(c_, 3);
    CodedCall call(w, 3, /*descaled=*/false);
    write(descale, std::array{x});
    call.tensors.*of = descale;
    w.options.engine = "reference";
    compute(call.tensors, w.options);
    const std::vector<double> want = read(w.forward.out);
    w.options.engine = engine();
    if (!computes([&] { compute(call.tensors, w.options); })) return;
    const std::vector<double> got = read(w.forward.out);
    for (size_t n = 0; n < want.size(); ++n) {
      if (std::isfinite(want[n])) {
        // Softcap leaves the signs of scores alone then, and a GPU's sum of 13 bits may have the
        // other sign near 0: what a key of a row's adds.
        const bool signs = softcap > 0 && x == 1e30 && of != &ForwardTensors::v_descale;
        const double size = of == &ForwardTensors::v_descale ? std::fabs(x) : signs ? 5 : 1;
        ASSERT_NEAR(got[n], want[n], 2e-2 * size + 1e-44) << n;
      } else {
        ASSERT_FALSE(std::isfinite(got[n])) << n << " got " << got[n] << " want " << want[n];
      }
    }
  };
  for (const int64_t sq : {70, 9}) {
    for (const double x : {0.0, -0.5, 1e-42, 1e-30, 1e30, kInf, std::nan("")}) {
      for (Tensor ForwardTensors::*of :
           {&ForwardTensors::q_descale, &ForwardTensors::k_descale, &ForwardTensors::v_descale}) {
        for (const double softcap : {0.0, 4.0}) check(sq, x, of, softcap);
      }
    }
  }
}

// They are read when a plan runs.
TEST_P(CodedCalls, DescalesMayChangeFromRunToRun) {
  c_.mask = full();
  Workload w(c_, 4);
  CodedCall call(w, 4, /*descaled=*/false);
  const std::array shape{c_.batch, c_.hk}, strides{c_.hk, int64_t{1}};
  Storage storage(DType::kF32, c_.batch * c_.hk);
  call.tensors.v_descale = storage.view(0, shape, strides);
  write(call.tensors.v_descale, std::array{1.0, 1.0, 1.0, 1.0});
  EngineMemory memory(engine());
  const ForwardTensors there = memory.at(call.tensors);
  w.options.engine = engine();
  std::optional<Plan> plan;
  if (!computes([&] { plan.emplace(fulgur::plan(there, w.options)); })) return;
  plan->run(there);
  memory.bring_back();
  const std::vector<double> want = read(w.forward.out);
  constexpr std::array factors{2.0, -1.0, 0.5, 0.0};
  write(call.tensors.v_descale, factors);
  memory.send();
  plan->run(there);
  memory.bring_back();
  const std::vector<double> got = read(w.forward.out);
  for (size_t n = 0; n < got.size(); ++n) {
    const size_t kv = n / 64 % 4 / 2, b = n / (got.size() / 2);
    ASSERT_EQ(got[n], want[n] * factors[2 * b + kv]) << n;
  }
}

// The tensor cores lose n / 2^16 of what n products of e4m3 add up to, unless V is centred: with a
// mean that drifts along the keys, of which a row sees some, that takes a mean for each segment.
TEST_P(CodedCalls, ManyKeysOfADriftingMeanAddUp) {
  c_.batch = 1;
  c_.hq = 2;
  c_.hk = 1;
  c_.sq = 16;
  struct Shape {
    int64_t d, keys;
    Mask mask;
    bool splits;
  };
  // Means are added one by one, by products, and by as many products as a buffer holds steps of.
  for (const auto& [d, keys, mask, splits] :
       {Shape{64, 9300, window(6000, 0), true}, Shape{96, 6500, causal(), true},
        Shape{256, 18500, full(), false}}) {
    SCOPED_TRACE(testing::Message() << "d " << d);
    c_.d = c_.dv = d;
    c_.sk = keys;
    c_.mask = mask;
    c_.hq = d == 256 ? 1 : 2;
    for (const bool fast : {false, true}) {
      if (!fast && d > 64) continue;
      Workload w(c_, 5);
      std::vector<double> v = read(w.forward.v);
      for (size_t n = 0; n < v.size(); ++n) {
        v[n] += 4 - 4 * static_cast<double>(n) / static_cast<double>(v.size());
      }
      write(w.forward.v, v);
      w.options.engine = engine();
      w.options.fast_codes = fast;
      w.options.invariant = !splits;
      CodedCall call(w, 5);
      const Expected e = expect_forward(w);
      if (!computes([&] { compute(call.tensors, w.options); })) return;
      const std::vector<double> out = read(w.forward.out);
      double squares = 0, sum = 0;
      for (size_t n = 0; n < out.size(); ++n) {
        squares += std::pow(out[n] - e.reference.out[n], 2);
        sum += std::fabs(e.reference.out[n]);
      }
      const auto n = static_cast<double>(out.size());
      EXPECT_LE(std::sqrt(squares / n), 0.005 * sum / n) << "fast " << fast;
    }
  }
}

// With wide heads the softmax of a tile runs during P V of the tile before: with
// even and odd numbers of tiles, and with a maximum that rises from tile to tile.
TEST_P(CodedCalls, TilesOfWideHeadsFollowEachOther) {
  c_.batch = 1;
  c_.hq = c_.hk = 1;
  c_.sq = 20;
  c_.d = c_.dv = 256;
  c_.mask = full();
  for (const int64_t keys : {190, 280, 480}) {
    for (const bool grows : {false, true}) {
      SCOPED_TRACE(testing::Message() << keys << " keys, growing " << grows);
      c_.sk = keys;
      Workload w(c_, 6);
      if (grows) {  // from right to left, as tiles are taken
        std::vector<double> k = read(w.forward.k);
        for (size_t n = 0; n < k.size(); ++n) {
          k[n] *= 4 - 3 * static_cast<double>(n) / static_cast<double>(k.size());
        }
        write(w.forward.k, k);
      }
      w.options.engine = engine();
      w.options.fast_codes = true;
      CodedCall call(w, 6, /*descaled=*/false);
      const Expected e = expect_forward(w);
      if (!computes([&] { compute(call.tensors, w.options); })) return;
      const double t = tolerance(c_.dtype) + kProducts;
      EXPECT_TRUE(
          within("out", w.forward.out, e.reference.out, e.naive.out, 2, (t + 0x1p-3) * e.unit.out));
      EXPECT_TRUE(within("lse", w.forward.lse, e.reference.lse, {}, 0, t * e.unit.lse));
    }
  }
}

FULGUR_EVERY_ENGINE(CodedCalls);

}  // namespace
}  // namespace fulgur::test

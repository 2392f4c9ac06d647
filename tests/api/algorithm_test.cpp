// The papers' algorithms by name: each engine that has one follows the contract, and the others say
// which they have.
#include <gtest/gtest.h>

#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

class Algorithms : public EveryEngine {
 protected:
  /// Whether the engine has an algorithm. Only GPUs of one kind have the last one.
  bool has(const std::string& name) const {
    if (engine() == "cpu") return name == "fa2";
    return name != "fa3" || engine() == "cuda";
  }

  void follow_the_contract(const Case& c, std::initializer_list<const char*> algorithms = {
                                              "standard", "fa1", "fa2", "fa3"});

  /// A workload of a case, or nothing where the engine does not have the algorithm and says so.
  bool runs(Workload& w, const std::string& name) {
    w.options.engine = engine();
    w.options.algorithm = name;
    const std::string why = message_of([&] { w.run(); });
    if (why.empty()) return true;
    EXPECT_TRUE(!has(name) || name == "fa3") << why;
    EXPECT_NE(why.find("computes by the algorithm"), std::string::npos) << why;
    EXPECT_TRUE(w.nothing_written());
    return false;
  }
};

/// A case by some algorithms.
void Algorithms::follow_the_contract(const Case& c, std::initializer_list<const char*> algorithms) {
  SCOPED_TRACE(c.name());
  Workload w(c, c.seed());
  const Expected e = expect(w);
  for (const char* const name : algorithms) {
    SCOPED_TRACE(name);
    w.seal();
    if (!runs(w, name)) continue;
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
    EXPECT_TRUE(w.check_memory());
  }
}

TEST_P(Algorithms, OfGroups) {
  follow_the_contract({.dtype = DType::kBF16, .batch = 2, .sq = 200, .sk = 300, .hq = 4, .hk = 2});
}
TEST_P(Algorithms, OfCausalCalls) {
  follow_the_contract({.dtype = DType::kF16,
                       .sq = 257,
                       .sk = 257,
                       .hq = 2,
                       .hk = 1,
                       .d = 128,
                       .dv = 64,
                       .mask = causal(),
                       .dlse = true});
}
TEST_P(Algorithms, OfWindows) {
  follow_the_contract({.dtype = DType::kBF16,
                       .sq = 70,
                       .sk = 333,
                       .hq = 2,
                       .hk = 2,
                       .d = 40,
                       .dv = 72,
                       .mask = window(90, 7)});
}
TEST_P(Algorithms, OfWideHeads) {
  follow_the_contract(
      {.dtype = DType::kF16, .sq = 150, .sk = 40, .d = 256, .dv = 200, .mask = causal()});
}
TEST_P(Algorithms, OfChunks) {
  follow_the_contract(
      {.dtype = DType::kBF16, .sq = 1, .sk = 500, .hq = 3, .hk = 1, .mask = chunked(128)});
}

// Fewer rows or keys than a tile has, or none.
TEST_P(Algorithms, OfNearlyNothing) {
  for (const auto& [sq, sk] :
       {std::pair{1, 1}, std::pair{3, 0}, std::pair{0, 3}, std::pair{65, 2}}) {
    follow_the_contract({.dtype = DType::kF16, .batch = 2, .sq = sq, .sk = sk, .hq = 2, .hk = 1},
                        {"standard", "fa1"});
  }
}

// Bits of every algorithm are those of its own order.
TEST_P(Algorithms, SameBitsRunToRun) {
  const Case c{
      .dtype = DType::kBF16, .batch = 2, .sq = 190, .sk = 310, .hq = 4, .hk = 2, .mask = causal()};
  for (const char* const name : {"standard", "fa1"}) {
    SCOPED_TRACE(name);
    Workload w(c, c.seed());
    if (!runs(w, name)) continue;
    const auto out = bits(w.forward.out), dq = bits(w.backward.dq), dk = bits(w.backward.dk);
    w.run();
    EXPECT_EQ(bits(w.forward.out), out);
    EXPECT_EQ(bits(w.backward.dq), dq);
    EXPECT_EQ(bits(w.backward.dk), dk);
  }
}

TEST_P(Algorithms, AreSaidByPlans) {
  const Device device{engine() == "cuda" ? DeviceType::kCuda : DeviceType::kCpu, 0};
  const Tensor x = Tensor::contiguous(nullptr, DType::kBF16, {1, 64, 1, 64}, device);
  const Plan planned = plan(ForwardArgs{x, x, x, x}, {.engine = engine(), .algorithm = "fa2"});
  EXPECT_EQ(planned.details().get<std::string>("call.algorithm"), "fa2");
}

TEST_P(Algorithms, UnknownNamesAreRefused) {
  Workload w({}, 1);
  w.options.engine = engine();
  w.options.algorithm = "fa4";
  EXPECT_EQ(message_of([&] { forward(w.forward, w.options); }),
            "algorithm: got \"fa4\", want one of standard, fa1, fa2, fa3");
}

// What the papers' older algorithms do not compute on a GPU is refused by name; the others compute
// all of it.
TEST_P(Algorithms, CallsOfOtherKinds) {
  const std::vector<std::pair<Case, std::string>> calls = {
      {{.layout = Layout::kPacked}, "computes without cu_seqlens_q"},
      {{.softcap = 5}, "computes without softcap"},
      {{.dropout = 0.1}, "computes without dropout"},
      {{.sinks = true}, "computes without sinks"},
      {{.alibi = Alibi::kHeads}, "computes without alibi_slopes"},
      {{.d = 60}, "computes d and dv that are multiples of 8 up to 256, got 60 and 64"}};
  for (auto [c, refusal] : calls) {
    c.dtype = DType::kBF16;
    SCOPED_TRACE(c.name());
    Workload w(c, c.seed());
    w.options.engine = engine();
    w.options.algorithm = engine() == "cpu" ? "fa2" : "standard";
    const std::string message = message_of([&] { w.run_forward(); });
    if (engine() == "cuda") {
      EXPECT_TRUE(message.ends_with("engine cuda: " + refusal)) << message;
      EXPECT_TRUE(w.nothing_written());
    } else {
      EXPECT_EQ(message, "");
      EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, Algorithms, testing::ValuesIn(engines_here()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace fulgur::test

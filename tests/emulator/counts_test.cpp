// What the papers' algorithms do on a GPU, counted where their kernels run in the emulator: it is
// what the reference counts of the same algorithm with blocks of the same sizes.
#include "counts.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "engine_memory.h"
#include "fulgur/attention.h"
#include "reference/algorithms.h"
#include "reference/blocks.h"
#include "workload.h"

namespace fulgur::test {
namespace {

using emulator::Counts;
using reference::Traffic;

constexpr int64_t kRows = 256, kDim = 64, kHeads = 2;
constexpr uint64_t kHalf = 2, kFloat = 4;             ///< bytes of an element
constexpr uint64_t kMatrix = kHeads * kRows * kDim;   ///< elements of q, k, v or out
constexpr uint64_t kScores = kHeads * kRows * kRows;  ///< of S
constexpr uint64_t kStatistics = kHeads * kRows;      ///< of LSE, l or m
constexpr uint64_t kQuad = 4;                         ///< threads that share a row

/// What the driver of this process counts.
Counts now() {
  void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  void* const counts = driver == nullptr ? nullptr : dlsym(driver, "emulator_counts");
  if (counts == nullptr) throw std::runtime_error("the driver is not the emulator's");
  return *static_cast<const Counts*>(counts);
}

/// What both passes of a call do, what their plans say of it, and their blocks.
struct Counted {
  struct Pass {
    Counts counts;
    Details plan;
    int64_t Br, Bc;
  };
  Pass forward, backward;
};

/// A call of two heads.
Case two_heads(const Mask& mask) {
  return {.dtype = DType::kBF16,
          .batch = 1,
          .sq = kRows,
          .sk = kRows,
          .hq = kHeads,
          .hk = kHeads,
          .d = kDim,
          .dv = kDim,
          .mask = mask};
}

Counted counted(const char* algorithm, const Case& c) {
  Workload w(c, 1);
  w.options.engine = "cuda";
  w.options.algorithm = algorithm;
  w.run();  // allocates
  EngineMemory memory("cuda");
  const auto pass = [&](const Details& plan, const auto& run) {
    const Counts before = now();
    run();
    const Counts after = now();
    return Counted::Pass{
        {after.read - before.read, after.written - before.written, after.products - before.products,
         after.exponentials - before.exponentials},
        plan,
        plan.get<int64_t>("Br"),
        plan.get<int64_t>("Bc")};
  };
  return {pass(plan(memory.at(w.forward), w.options).details(), [&] { w.run_forward(); }),
          pass(plan(memory.at(w.backward), w.options).details(), [&] { w.run_backward(); })};
}

/// What the reference counts of both heads, with blocks of the outer and the inner loop as large.
template <class Run>
Traffic traffic(int64_t outer, int64_t inner, const Mask& mask, const Run& run) {
  static const std::vector<double> zeros(kRows * kDim);
  reference::Head h{};
  h.sq = h.sk = kRows;
  h.d = h.dv = kDim;
  h.q = h.k = h.v = zeros.data();
  h.rule.band = {mask.left, mask.right};
  const int64_t M = 4 * kDim * outer;
  const reference::BlockSizes blocks(M, h);
  EXPECT_EQ(blocks.outer, outer);
  EXPECT_EQ(blocks.inner, inner);
  Traffic of_head;
  run(h, M, &of_head);
  return {kHeads * of_head.loaded, kHeads * of_head.stored, kHeads * of_head.products,
          kHeads * of_head.exponentials, kHeads * of_head.rescales};
}

Traffic flash1(const Counted::Pass& pass, const Mask& mask) {
  return traffic(pass.Bc, pass.Br, mask,
                 [](const auto& h, int64_t M, Traffic* t) { reference::flash1_forward(h, M, t); });
}
Traffic flash2(const Counted::Pass& pass, const Mask& mask) {
  return traffic(pass.Br, pass.Bc, mask,
                 [](const auto& h, int64_t M, Traffic* t) { reference::flash2_forward(h, M, t); });
}
Traffic flash2_backward(const Counted::Pass& pass) {
  return traffic(pass.Bc, pass.Br, {}, [](const auto& h, int64_t M, Traffic* t) {
    const std::vector<double> dout(kRows * kDim);
    const reference::Forward out{std::vector<double>(kRows * kDim), std::vector<double>(kRows)};
    reference::flash2_backward(h, out, {dout.data()}, M, t);
  });
}

/// Multiply-adds of all scores in the products S and O, or S, dP, dQ, dK and dV.
constexpr uint64_t kForwardProducts = kScores * 2 * kDim, kBackwardProducts = kScores * 5 * kDim;

// S and P make a round trip to memory each. Tiles of 128 rows and columns load what they multiply,
// and the softmax reads a row three times: for its maximum, its sum and P.
TEST(Counts, Standard) {
  const Counted got = counted("standard", two_heads({}));
  const Traffic want = traffic(
      128, 64, {}, [](const auto& h, int64_t, Traffic* t) { reference::standard_forward(h, t); });
  const Counts& c = got.forward.counts;
  constexpr uint64_t kTiles = kRows / 128;  // that load the same rows
  EXPECT_EQ(c.read, kTiles * 2 * kMatrix * kHalf + 3 * kScores * kFloat + kScores * kHalf +
                        kTiles * kMatrix * kHalf);
  EXPECT_EQ(want.loaded, 2 * kMatrix + kScores + kScores + kMatrix);
  EXPECT_EQ(c.written, kScores * (kFloat + kHalf) + kMatrix * kHalf + kStatistics * kFloat);
  EXPECT_EQ(want.stored, 2 * kScores + kMatrix + kStatistics);
  EXPECT_EQ(c.products, want.products);
  EXPECT_EQ(c.exponentials, 2 * want.exponentials);            // for the sum and for P
  EXPECT_EQ(got.backward.counts.products, kBackwardProducts);  // S again, too
}

// O, l and m make a round trip for each block of keys, and every score rescales its row. The paper
// computes blocks that a mask hides, too, and this kernel leaves them out, as the release does.
TEST(Counts, FlashAttention) {
  for (const Mask& mask : {Mask{}, causal()}) {
    const Counted got = counted("fa1", two_heads(mask));
    const Traffic want = flash1(got.forward, mask);
    const Counts& c = got.forward.counts;
    EXPECT_EQ(want.loaded, 2 * kMatrix + want.rescales * (2 * kDim + 2));
    EXPECT_EQ(want.stored, (kStatistics + want.rescales) * (kDim + 2));
    // Rows of all key blocks together: of 2 x 4 blocks 6 are seen.
    const uint64_t rows = mask == causal() ? want.rescales * 6 / 8 : want.rescales;
    // Here once more at the end, where O leaves in 16 bits. A quad of threads reads l and m.
    EXPECT_EQ(c.read, 2 * kMatrix * kHalf + rows * kDim * kHalf +
                          (rows + kStatistics) * (kDim + 2 * kQuad) * kFloat);
    EXPECT_EQ(c.written,
              (kStatistics + rows) * (kDim + 2) * kFloat + kMatrix * kHalf + kStatistics * kFloat);
    EXPECT_EQ(c.products * want.rescales, want.products * rows);
    EXPECT_EQ(c.exponentials, c.products / (2 * kDim) + kQuad * rows);
  }
}

// O, l and m stay: what is loaded and stored is what the reference says, to the byte. Rows are
// rescaled only where scores have grown by much, and their exponentials computed again.
TEST(Counts, FlashAttention2) {
  for (const Mask& mask : {Mask{}, causal()}) {
    const Counted got = counted("fa2", two_heads(mask));
    const Traffic want = flash2(got.forward, mask);
    const Counts& c = got.forward.counts;
    EXPECT_EQ(c.read, want.loaded * kHalf);
    EXPECT_EQ(want.stored, kMatrix + kStatistics);
    EXPECT_EQ(c.written, kMatrix * kHalf + kStatistics * kFloat);
    EXPECT_EQ(c.products, want.products);
    EXPECT_GE(c.exponentials, want.exponentials);
    EXPECT_LT(c.exponentials, want.exponentials * 3 / 2 + kQuad * want.rescales);
  }
}

// The backward pass of both: for each block of keys Q, dO and their statistics come, and dQ is
// added to in f32, which the reference loads and stores. Before it D is computed and dQ cleared;
// after it dQ is rounded.
TEST(Counts, Backward) {
  for (const char* const name : {"fa1", "fa2"}) {
    const Counted got = counted(name, two_heads({}));
    const Traffic want = flash2_backward(got.backward);
    const Counts& c = got.backward.counts;
    const uint64_t rows = kRows / got.backward.Bc * kStatistics;  // in all key blocks together
    EXPECT_EQ(want.loaded, 4 * kMatrix + rows * (3 * kDim + 2));
    EXPECT_EQ(want.stored, kMatrix + kStatistics + rows * kDim + 2 * kMatrix);
    EXPECT_EQ(c.read, (4 * kMatrix + rows * 2 * kDim) * kHalf +
                          (kStatistics + rows * 2 + kMatrix) * kFloat);
    EXPECT_EQ(c.written, (2 * kStatistics + kMatrix + rows * kDim) * kFloat + 3 * kMatrix * kHalf);
    EXPECT_EQ(c.products, kBackwardProducts);
    EXPECT_EQ(c.products, want.products);
    EXPECT_EQ(c.exponentials, want.exponentials);
  }
}

// FlashAttention-3 moves and computes what FlashAttention-2 does, but for the scheduler's counters.
TEST(Counts, FlashAttention3) {
  for (const Mask& mask : {Mask{}, causal()}) {
    const Counted got = counted("fa3", two_heads(mask));
    const Counts& c = got.forward.counts;
    const bool full = mask == Mask{};
    if (full) {
      const uint64_t row_blocks = kRows / got.forward.Br;
      EXPECT_NEAR(double(c.read), double((1 + 2 * row_blocks) * kMatrix * kHalf), 256);
      EXPECT_EQ(c.products, kForwardProducts);
      EXPECT_EQ(got.backward.counts.products, kBackwardProducts);
    }
    EXPECT_NEAR(double(c.written), double(kMatrix * kHalf + kStatistics * kFloat), 256);
    EXPECT_GE(c.exponentials, c.products / (2 * kDim));
    EXPECT_LE(c.products, kForwardProducts * (full ? 4 : 3) / 4);
  }
}

/// Expects that a pass does what its plan says; of FlashAttention-3 but for the counters of its
/// scheduler.
void expect_planned(const Counted::Pass& pass, const std::string& algorithm) {
  const Counts& c = pass.counts;
  const auto planned = [&](const char* name) {
    return static_cast<uint64_t>(pass.plan.get<int64_t>(std::string("counts.") + name));
  };
  EXPECT_EQ(c.products, planned("products"));
  if (pass.plan.has("counts.bytes_read")) {
    const double counters = algorithm == "fa3" ? 256 : 0;
    EXPECT_NEAR(double(c.read), double(planned("bytes_read")), counters);
    EXPECT_NEAR(double(c.written), double(planned("bytes_written")), counters);
  }
  if (pass.plan.has("counts.rescales")) {
    EXPECT_EQ(c.exponentials, planned("exponentials"));
  } else {
    EXPECT_GE(c.exponentials, planned("exponentials"));
  }
}

// What `fulgur explain --algorithm` and `fulgur bench --reproduce` print is what is counted: rows
// and keys that fill no tiles, groups of heads, other dims of V.
TEST(Counts, ArePlanned) {
  Case odd = two_heads(causal());
  odd.sq = 200;
  odd.sk = 328;
  odd.batch = 2;
  odd.hq = 4;
  for (const char* const algorithm : {"standard", "fa1", "fa2", "fa3"}) {
    for (const Case& c : {two_heads(causal()), odd}) {
      const Counted got = counted(algorithm, c);
      for (const Counted::Pass* pass : {&got.forward, &got.backward}) {
        SCOPED_TRACE(fmt::format("{} {} {}", algorithm, c.name(),
                                 pass == &got.forward ? "forward" : "backward"));
        expect_planned(*pass, algorithm);
      }
    }
  }
}

}  // namespace
}  // namespace fulgur::test

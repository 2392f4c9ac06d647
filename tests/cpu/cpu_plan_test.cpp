// The blocks of rows that the CPU engine shares out to threads, for kernels of any machine.
#include <gtest/gtest.h>

#include "../cuda/plans/forward_call.h"
#include "cpu/plan.h"

namespace fulgur::test {
namespace {

constexpr int64_t kBr = 32, kMaxRows = 32 * kBr;

/// Rows of a block where packing its keys takes as long as 64 rows.
int64_t block_rows(const ForwardShape& shape, int threads) {
  cpu::Kernels kernels = {};
  kernels.Br = kBr;
  kernels.row_tiles = kMaxRows / kBr;
  kernels.packing_rows = 64;
  kernels.forward_scratch = [](const Problem&) { return int64_t{1}; };
  std::vector<std::string> rejected;
  return cpu::make_plan(forward_problem(shape), threads, kernels, &rejected).block_rows;
}
ForwardShape of(int64_t n, int64_t heads) {
  return {.batch = 1, .sq = n, .sk = n, .hq = heads, .hk = heads, .d = 64};
}

// Blocks as large as can be, whose keys are packed once for all of their rows, unless threads would
// end apart.
TEST(CpuPlan, BlocksKeepThreadsBusy) {
  EXPECT_EQ(block_rows(of(1024, 2), 2), kMaxRows);
  EXPECT_EQ(block_rows(of(2048, 2), 2), kMaxRows);
  EXPECT_EQ(block_rows(of(1024, 3), 2), kMaxRows / 2);  // of three blocks one thread had two
  EXPECT_EQ(block_rows(of(1024, 1), 2), kMaxRows / 2);
  EXPECT_EQ(block_rows(of(1024, 1), 4), kMaxRows / 4);
  EXPECT_EQ(block_rows(of(128, 1), 64), kBr);
  EXPECT_EQ(block_rows(of(1024, 3), 1), kMaxRows);
  EXPECT_EQ(block_rows(of(8192, 1), 2), kMaxRows);  // four blocks a thread
}

// Under a causal mask later blocks are longer: of one head's two the second has more than half.
TEST(CpuPlan, CausalBlocksKeepThreadsBusy) {
  ForwardShape shape = of(2048, 2);
  shape.mask = causal();
  EXPECT_EQ(block_rows(shape, 2), kMaxRows);
  shape = of(2048, 1);
  shape.mask = causal();
  EXPECT_LT(block_rows(shape, 2), kMaxRows);
}

// Where lengths are not known yet, four blocks a thread.
TEST(CpuPlan, BlocksOfUnknownLengthsAreMany) {
  ForwardShape shape = of(1024, 2);
  shape.seqused = true;
  EXPECT_EQ(block_rows(shape, 2), kMaxRows / 4);
  EXPECT_EQ(block_rows(shape, 1), kMaxRows);
}

// What products of bf16 would compute otherwise falls to vectors.
TEST(CpuPlan, SaysWhatFallsToVectors) {
  const auto by_vectors = [](bool vectors, DType dtype, Pass pass) {
    cpu::Kernels kernels = {};
    kernels.target = "AMX";
    kernels.vectors = vectors;
    Problem p = forward_problem(of(64, 1));
    p.dtypes = OperandTypes::all(dtype);
    p.pass = pass;
    const Details details = cpu::describe({}, kernels, p).details;
    if (!details.has("tiles_by_vectors")) return Details::Texts();
    return details.get<Details::Texts>("tiles_by_vectors");
  };
  const Details::Texts not_finite = {"not_finite"};
  EXPECT_EQ(by_vectors(true, DType::kBF16, Pass::kForward), Details::Texts());
  EXPECT_EQ(by_vectors(false, DType::kBF16, Pass::kForward),
            (Details::Texts{"not_finite", "denormal_v"}));
  EXPECT_EQ(by_vectors(false, DType::kF16, Pass::kForward), not_finite);
  EXPECT_EQ(by_vectors(false, DType::kBF16, Pass::kBackward), not_finite);
}

}  // namespace
}  // namespace fulgur::test

// Calls after a prewarming one compile nothing, whatever their lengths and batches are.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <filesystem>
#include <random>
#include <set>
#include <span>

#include "calls.h"
#include "cuda/jit/cache_folder.h"
#include "fulgur/cuda.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

/// A process of its own, whose cache folder has what it compiled itself.
class Prewarmed : public OnFakeGpu {
 protected:
  static void SetUpTestSuite() {
    std::error_code none;
    std::filesystem::remove_all(cuda::CacheFolder::standard().path(), none);
  }
  static std::ptrdiff_t kernels() {
    const auto files = std::filesystem::directory_iterator(cuda::CacheFolder::standard().path());
    return std::count_if(begin(files), end(files),
                         [](const auto& entry) { return entry.path().extension() == ".cubin"; });
  }
};

// Lengths and batches of every kind, also where the mask binds in long calls only.
TEST_F(Prewarmed, ForwardPlansCompileNothing) {
  std::mt19937_64 random(1);
  for (const Mask& mask : {causal(), window(100, 20)}) {
    // Made for a call of one row, whose strides say nothing of calls with more.
    const ForwardShape shape{.batch = 1, .sq = 1, .sk = 1, .d = 72, .mask = mask};
    const ForwardCall call = forward_call(shape);
    const cuda::Prewarmed first = cuda::prewarm(call.args, call.options);
    EXPECT_GT(first.compiled + first.present, 0);
    const auto before = kernels();
    for (int round = 0; round < 100; ++round) {
      const auto length = [&] { return 1 + static_cast<int64_t>(random() % (1 << random() % 16)); };
      ForwardShape other = shape;
      other.batch = 1 + static_cast<int64_t>(random() % (round % 10 == 0 ? 60 : 5));
      other.sq = length();
      other.sk = length();
      const ForwardCall later = forward_call(other);
      state_->launches.clear();
      fulgur::forward(placed(later.args, kBase), later.options);
      EXPECT_FALSE(state_->launches.empty());
      ASSERT_EQ(kernels(), before) << other.batch << " x " << other.sq << " x " << other.sk;
    }
  }
}

// Codes of k and v are converted for calls of many rows.
TEST_F(Prewarmed, ForwardPlansOverCodesCompileNothing) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    const auto call_of = [&](int64_t batch, int64_t sq, int64_t sk) {
      ForwardCall call = forward_call({.dtype = dtype, .batch = batch, .sq = sq, .sk = sk});
      call.args.k.dtype = call.args.v.dtype = DType::kInt8;
      return call;
    };
    const ForwardCall call = call_of(1, 1, 1);
    EXPECT_GT(cuda::prewarm(call.args, call.options).compiled, 0);
    const auto before = kernels();
    std::set<size_t> launches;
    for (const int64_t batch : {1, 3, 64}) {
      for (const auto& [sq, sk] :
           {std::pair{1, 16}, {1, 9000}, {64, 9000}, {700, 700}, {3000, 9000}}) {
        const ForwardCall later = call_of(batch, sq, sk);
        state_->launches.clear();
        fulgur::forward(placed(later.args, kBase), later.options);
        launches.insert(state_->launches.size());
        ASSERT_EQ(kernels(), before) << batch << " x " << sq << " x " << sk;
      }
    }
    EXPECT_TRUE(launches.contains(2)) << "none was converted";
  }
}

// Grouped heads, and the parts of calls that share prefixes, too.
TEST_F(Prewarmed, CallsOverPagesCompileNothing) {
  for (const bool prefixes : {false, true}) {
    const ForwardCall call = call_over_pages(1, 1, 512, prefixes);
    EXPECT_GT(cuda::prewarm(call.args, call.options).compiled, 0);
    const auto before = kernels();
    std::set<size_t> launches;
    for (const int64_t batch : {1, 2, 3, 5, 8, 12, 16, 24, 32, 64, 200}) {
      for (const auto& [sq, sk] :
           {std::pair{1, 16}, {1, 9000}, {4, 9000}, {16, 4000}, {700, 700}}) {
        const ForwardCall later = call_over_pages(batch, sq, sk, prefixes);
        ForwardArgs args = placed(later.args, kBase);
        for (ConstTensor* t : {&args.cache.page_table, &args.shared_prefix.prefix_groups,
                               &args.shared_prefix.prefix_lens}) {
          if (t->given()) t->data = args.k.data;
        }
        state_->launches.clear();
        fulgur::forward(args, later.options);
        launches.insert(state_->launches.size());
        EXPECT_EQ(kernels(), before) << batch << " x " << sq << " x " << sk << prefixes;
      }
    }
    EXPECT_EQ(*launches.rbegin() > 3, prefixes);  // divided, two passes, merged
  }
}

// Wherever lengths and slopes lie.
TEST_F(Prewarmed, NumbersOfTheHostCompileNothing) {
  const ForwardCall there =
      forward_call({.hq = 2, .hk = 2, .d = 64, .packed = true, .seqused_q = true, .seqused = true});
  cuda::prewarm(there.args, there.options);
  const auto before = kernels();
  const CallWithHostLengths here(7);
  fulgur::forward(placed(here.call.args, kBase), here.call.options);
  EXPECT_FALSE(state_->launches.empty());
  EXPECT_EQ(kernels(), before);
}

TEST_F(Prewarmed, SlopesAndSinksOfTheHostCompileNothing) {
  for (const bool alibi : {false, true}) {
    const ForwardCall call =
        forward_call({.hq = 2, .hk = 2, .d = 64, .alibi = alibi, .sinks = !alibi});
    cuda::prewarm(call.args, call.options);
    const auto before = kernels();
    std::vector<float> numbers(2);
    ForwardArgs args = placed(call.args, kBase);
    (alibi ? args.alibi_slopes : args.sinks) =
        ConstTensor::of<const float>(std::span(numbers), {2});
    state_->launches.clear();
    fulgur::forward(args, call.options);
    EXPECT_EQ(state_->launches.size(), 2u);
    EXPECT_EQ(kernels(), before);
  }
}

// Odd dims are copied, and their gradients stored by elements; the mask binds in long calls only,
// and then what it hides is repaired.
TEST_F(Prewarmed, BackwardPlansCompileNothing) {
  for (const bool deterministic : {false, true}) {
    const ForwardShape shape{.batch = 1, .sq = 1, .sk = 1, .d = 12, .mask = window(-1, 30)};
    const BackwardCall call = backward_call(shape, {.deterministic = deterministic});
    const cuda::Prewarmed first = cuda::prewarm(call.args, call.options);
    EXPECT_GT(first.compiled + first.present, 4);
    const auto before = kernels();
    for (const int64_t batch : {1, 3, 300}) {
      for (const auto& [sq, sk] : {std::pair{1, 1}, {16, 900}, {40, 7}, {5000, 5000}}) {
        ForwardShape other = shape;
        other.batch = batch;
        other.sq = sq;
        other.sk = sk;
        const BackwardCall later = backward_call(other, {.deterministic = deterministic});
        state_->launches.clear();
        fulgur::backward(placed(later.args, kBase), later.options);
        EXPECT_FALSE(state_->launches.empty());
        EXPECT_EQ(kernels(), before) << batch << " " << sq << " " << sk;
      }
    }
    const cuda::Prewarmed again = cuda::prewarm(call.args, call.options);
    EXPECT_EQ(again.compiled, 0);
    EXPECT_EQ(again.present, first.compiled + first.present);
  }
}

// Appended by the kernel that attends or before it.
TEST_F(Prewarmed, CallsThatAppendCompileNothing) {
  const AppendingCall one({.batch = 1, .sq = 1, .sk = 512, .mask = causal()});
  EXPECT_GT(cuda::prewarm(one.call.args, one.call.options).compiled, 0);
  const auto before = kernels();
  std::set<std::string> first;
  for (const int64_t batch : {1, 3, 64}) {
    for (const auto& [sq, sk] : {std::pair{1, 16}, {1, 9000}, {4, 9000}, {16, 4000}, {700, 700}}) {
      const AppendingCall later({.batch = batch, .sq = sq, .sk = sk, .mask = causal()});
      state_->launches.clear();
      fulgur::forward(later.call.args, later.call.options);
      first.insert(state_->launches.at(0).kernel);
      EXPECT_EQ(kernels(), before) << batch << " x " << sq << " x " << sk;
    }
  }
  EXPECT_EQ(first, (std::set<std::string>{"fulgur_append", "fulgur_decode"}));
}

// Named targets take the place of what the device would have.
TEST_F(Prewarmed, ForTargets) {
  const ForwardCall call = forward_call({.d = 40});
  const std::string folder = fmt::format("{}_targets", getenv("FULGUR_CACHE_DIR"));
  std::filesystem::remove_all(folder);
  const auto prewarm = [&](std::vector<std::string> targets) {
    return cuda::prewarm(call.args, call.options, folder, targets);
  };
  const cuda::Prewarmed first = prewarm({"sm_90a"});
  EXPECT_GT(first.compiled, 0);
  EXPECT_EQ(prewarm({}).compiled, 0);                   // what the device takes
  EXPECT_GT(prewarm({"sm_90a", "sm_80"}).compiled, 0);  // the portable kernels
  EXPECT_EQ(prewarm({"sm_80"}).compiled, 0);
  EXPECT_TRUE(message_of([&] { prewarm({"sm_81"}); }).starts_with("targets: got \"sm_81\", want"));
}

TEST_F(Prewarmed, AppendAndMergeCompileNothing) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const ForwardCall call = forward_call({.dtype = dtype, .d = 64});
    cuda::prewarm(call.args, call.options);
    const auto before = kernels();
    append(append_args(dtype));
    append(AppendOfHostLengths(dtype).args);
    const MergeCallOnGpu parts(3, 64);
    merge(parts.parts, parts.result);
    EXPECT_EQ(kernels(), before);
  }
}

}  // namespace
}  // namespace fulgur::test

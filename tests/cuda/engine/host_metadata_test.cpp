// Lengths, slopes and sinks in host memory, which go to the device ahead of the kernels.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <span>

#include "calls.h"
#include "cuda/device/launch_memory.h"
#include "kernels/backward/params.h"
#include "kernels/common/padding_params.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

TEST_F(OnFakeGpu, LengthsOfTheHostGoAheadOfTheKernels) {
  for (const int batch : {1, 249, 250, 1000}) {
    SCOPED_TRACE(batch);
    CallWithHostLengths c(batch);
    const Plan plan = fulgur::plan(c.call.args, c.call.options);
    const auto count = static_cast<size_t>(4 * batch + 2), stores = (count - 1) / 1000 + 1;
    const Details details = plan.details();
    EXPECT_EQ(details.get<Details::Texts>("host_metadata"),
              (Details::Texts{"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"}));
    EXPECT_EQ(details.get<int64_t>("uploaded_numbers"), static_cast<int64_t>(count));
    EXPECT_EQ(details.get<int64_t>("upload_launches"), static_cast<int64_t>(stores));
    state_->launches.clear();
    const auto numbers = c.numbers();
    plan.run(placed(c.call.args, kBase));
    std::fill(c.cu_seqlens.begin(), c.cu_seqlens.end(), -1);
    ASSERT_EQ(state_->launches.size(), stores + 2);
    const auto p = params<ForwardParams>(stores);
    std::vector<int32_t> launched;
    for (size_t i = 0; i < stores; ++i) {
      const auto store = params<UploadMetadataParams>(i);
      EXPECT_STREQ(state_->launches[i].kernel, "fulgur_upload_metadata");
      EXPECT_EQ(store.to, p.cu_seqlens_q + launched.size());
      EXPECT_GE(state_->launches[i].grid * state_->launches[i].block,
                static_cast<unsigned>(store.count));
      launched.insert(launched.end(), store.numbers, store.numbers + store.count);
    }
    EXPECT_EQ(launched, numbers);
    EXPECT_EQ(p.cu_seqlens_k, p.cu_seqlens_q + batch + 1);
    EXPECT_EQ(p.seqused_q, p.cu_seqlens_k + batch + 1);
    EXPECT_EQ(p.seqused_k, p.seqused_q + batch);
    const auto padding = params<ForwardPaddingParams>(stores + 1);
    EXPECT_EQ(padding.cu_seqlens_q, p.cu_seqlens_q);
    EXPECT_EQ(padding.seqused_q, p.seqused_q);
  }
}

TEST_F(OnFakeGpu, LengthsOfTheHostStayInsideOfTheWorkspace) {
  CallWithHostLengths c(5);
  const Plan plan = fulgur::plan(c.call.args, c.call.options);
  const int64_t bytes = plan.workspace().bytes;
  plan.run(placed(c.call.args, kBase), {.workspace = {reinterpret_cast<void*>(kBase), bytes}});
  const auto store = params<UploadMetadataParams>(0);
  const auto begin = reinterpret_cast<std::uintptr_t>(store.to);
  EXPECT_GE(begin, kBase + cuda::LaunchMemory::kZeroed);
  EXPECT_EQ(begin % 4, 0u);
  EXPECT_EQ(store.count, 22);
  EXPECT_LE(begin + 22 * 4, kBase + static_cast<std::uintptr_t>(bytes));
}

/// The numbers that a launch stores, as floats.
std::vector<float> stored_floats(const UploadMetadataParams& store) {
  std::vector<float> floats(static_cast<size_t>(store.count));
  std::memcpy(floats.data(), store.numbers, floats.size() * sizeof(float));
  return floats;
}

// Whatever the strides of slopes are on the host.
TEST_F(OnFakeGpu, SlopesAndSinksOfTheHostGoSideBySide) {
  constexpr int64_t kBatch = 3, kHq = 8;
  for (const int64_t sq : {1, 1000}) {
    for (const int64_t stride : {8, 13, 0, -9}) {
      SCOPED_TRACE(fmt::format("{} rows, stride {}", sq, stride));
      std::vector<float> memory(64), sinks(kHq);
      std::iota(memory.begin(), memory.end(), 0.5f);
      std::iota(sinks.begin(), sinks.end(), -3.0f);
      ForwardCall call =
          forward_call({.batch = kBatch, .sq = sq, .hq = kHq, .alibi = true, .sinks = true});
      ForwardArgs args = placed(call.args, kBase);
      float* const first = memory.data() + (stride < 0 ? 2 * -stride : 0);
      args.alibi_slopes = ConstTensor::contiguous(first, DType::kF32, {kBatch, kHq});
      args.alibi_slopes.strides[0] = stride;
      args.sinks = ConstTensor::of<const float>(std::span(sinks), {kHq});
      std::vector<float> numbers;
      for (int64_t b = 0; b < kBatch; ++b) {
        numbers.insert(numbers.end(), first + b * stride, first + b * stride + kHq);
      }
      numbers.insert(numbers.end(), sinks.begin(), sinks.end());
      const Plan plan = fulgur::plan(args, call.options);
      const Details details = plan.details();
      EXPECT_EQ(details.get<Details::Texts>("host_metadata"),
                (Details::Texts{"alibi_slopes", "sinks"}));
      EXPECT_EQ(details.get<int64_t>("uploaded_numbers"), 32);
      EXPECT_EQ(details.get<int64_t>("upload_launches"), 1);
      state_->launches.clear();
      plan.run(args);
      std::fill(memory.begin(), memory.end(), -1.0f);
      std::fill(sinks.begin(), sinks.end(), -1.0f);
      ASSERT_EQ(state_->launches.size(), 2u);
      const auto store = params<UploadMetadataParams>(0);
      EXPECT_EQ(stored_floats(store), numbers);
      const auto expect = [&](const auto& p) {
        EXPECT_EQ(static_cast<const void*>(p.alibi_slopes), store.to);
        EXPECT_EQ(p.alibi_batch_stride, kHq);
        EXPECT_EQ(p.sinks.data, p.alibi_slopes + kBatch * kHq);
      };
      if (sq == 1) {
        expect(params<DecodeParams>(1));
      } else {
        expect(params<ForwardParams>(1));
      }
    }
  }
}

TEST_F(OnFakeGpu, SlopesAndSinksOfTheHostGoToTheGradients) {
  std::vector<float> slopes = {1, 2, 3, 4, 5, 6, 7, 8}, sinks = {8, 7, 6, 5, 4, 3, 2, 1};
  const BackwardCall call =
      backward_call({.hk = 8, .alibi = true, .sinks = true}, {.dsinks = true});
  BackwardArgs args = placed(call.args, kBase);
  args.alibi_slopes = ConstTensor::of<const float>(std::span(slopes), {8});
  args.sinks = ConstTensor::of<const float>(std::span(sinks), {8});
  const Plan plan = fulgur::plan(args, call.options);
  const int64_t bytes = plan.workspace().bytes;
  plan.run(args, {.workspace = {reinterpret_cast<void*>(2 * kBase), bytes}});
  ASSERT_EQ(state_->launches.size(), 5u);
  const auto store = params<UploadMetadataParams>(0);
  EXPECT_EQ(stored_floats(store),
            (std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8, 8, 7, 6, 5, 4, 3, 2, 1}));
  const auto begin = reinterpret_cast<std::uintptr_t>(store.to);
  EXPECT_GE(begin, 2 * kBase + cuda::LaunchMemory::kZeroed);
  EXPECT_LE(begin + 16 * 4, 2 * kBase + static_cast<std::uintptr_t>(bytes));
  for (size_t i = 1; i < 5; ++i) {
    const auto p = params<BackwardParams>(i);
    EXPECT_EQ(static_cast<const void*>(p.alibi_slopes), store.to);
    EXPECT_EQ(p.alibi_batch_stride, 0);
    EXPECT_EQ(p.sinks.data, p.alibi_slopes + 8);
    EXPECT_EQ(p.dsinks, args.dsinks.data);
  }
}

// The kernel of dsinks reads the sinks, rows or not.
TEST_F(OnFakeGpu, SinksOfTheHostBesideNoRows) {
  std::vector<float> slopes(16), sinks(8, 0.5f);
  const BackwardCall call =
      backward_call({.sq = 0, .sk = 0, .alibi = true, .sinks = true}, {.dsinks = true});
  BackwardArgs args = placed(call.args, kBase);
  args.alibi_slopes = ConstTensor::of<const float>(std::span(slopes), {2, 8});
  args.sinks = ConstTensor::of<const float>(std::span(sinks), {8});
  plan(args, call.options).run(args);
  ASSERT_FALSE(state_->launches.empty());
  const auto store = params<UploadMetadataParams>(0);
  EXPECT_EQ(stored_floats(store), sinks);
  for (size_t i = 1; i < state_->launches.size(); ++i) {
    EXPECT_EQ(params<BackwardParams>(i).sinks.data, store.to);
  }
  state_->launches.clear();
  args.dsinks = {};
  plan(args, call.options).run(args);
  EXPECT_TRUE(state_->launches.empty());
}

// Sinks of 16 bits become f32 on their way.
TEST_F(OnFakeGpu, SinksOfTheHostInTheDtypeOfQ) {
  const std::vector<uint16_t> sinks = {0x3f80, 0xc000, 0xff80, 0x3e00};  // 1, -2, -inf, 0.125
  const ForwardCall call = forward_call({.hq = 4, .hk = 4, .sinks = true});
  ForwardArgs args = placed(call.args, kBase);
  args.sinks = ConstTensor::contiguous(sinks.data(), DType::kBF16, std::array<int64_t, 1>{4});
  plan(args, call.options).run(args);
  ASSERT_FALSE(state_->launches.empty());
  const auto store = params<UploadMetadataParams>(0);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(stored_floats(store), (std::vector<float>{1, -2, -infinity, 0.125f}));
  const auto p = params<ForwardParams>(1);
  EXPECT_EQ(p.sinks.data, store.to);
  EXPECT_EQ(p.sinks.type, kernels::kF32);
}

TEST_F(OnFakeGpu, WrongPlacesOfSlopesAndSinks) {
  const BackwardCall call = backward_call({.alibi = true, .sinks = true}, {.dsinks = true});
  const auto said = [&](auto BackwardArgs::*tensor, Device device) {
    BackwardArgs args = call.args;
    (args.*tensor).device = device;
    return message_of([&] { fulgur::plan(args, call.options); });
  };
  const Device other{DeviceType::kCuda, 1};
  EXPECT_EQ(said(&BackwardArgs::alibi_slopes, other),
            "alibi_slopes: on cuda:1, want cuda:0 as q, or cpu");
  EXPECT_EQ(said(&BackwardArgs::sinks, other), "sinks: on cuda:1, want cuda:0 as q, or cpu");
  EXPECT_EQ(said(&BackwardArgs::dsinks, {}), "dsinks: on cpu, want cuda:0 as q");
  // A plan is for slopes in one place.
  const BackwardArgs args = placed(call.args, kBase);
  const Plan plan = fulgur::plan(args, call.options);
  BackwardArgs elsewhere = args;
  elsewhere.alibi_slopes.device = {};
  EXPECT_EQ(message_of([&] { plan.run(elsewhere); }),
            "alibi_slopes: got f32 (8) strides (1) on cpu, want f32 (8) strides (1) on cuda:0 as "
            "planned");
  EXPECT_TRUE(state_->launches.empty());
}

TEST_F(OnFakeGpu, WrongLengthsOfTheHostLaunchNothing) {
  CallWithHostLengths c(5);
  const Plan plan = fulgur::plan(c.call.args, c.call.options);
  const ForwardArgs args = placed(c.call.args, kBase);
  ForwardArgs misaligned = args;
  misaligned.q.data = static_cast<const char*>(args.q.data) + 8;
  EXPECT_EQ(status_of([&] { plan.run(misaligned); }), Status::kInvalidArgument);
  c.used[3] = 201;
  EXPECT_EQ(message_of([&] { plan.run(args); }), "seqused_q: got 201 at 3, want 0 to 200");
  c.cu_seqlens[2] = 1;
  EXPECT_EQ(message_of([&] { plan.run(args); }),
            "cu_seqlens_q: decreases at 2: 1 after 200, want non-decreasing");
  EXPECT_TRUE(state_->launches.empty());
  c.cu_seqlens[2] = 400;
  // A plan is for lengths in one place.
  ForwardArgs elsewhere = args;
  elsewhere.lengths.seqused_k.device = args.q.device;
  EXPECT_EQ(message_of([&] { plan.run(elsewhere); }),
            "seqused_k: got i32 (5) strides (1) on cuda:0, want i32 (5) strides (1) on cpu as "
            "planned");
  elsewhere.lengths.seqused_k.device.index = 1;
  EXPECT_EQ(message_of([&] { fulgur::plan(elsewhere, c.call.options); }),
            "seqused_k: on cuda:1, want cuda:0 as q, or cpu");
}

TEST_F(OnFakeGpu, CapturedLengthsOfTheHostHaveTheMemoryOfTheirGraph) {
  CallWithHostLengths c(5);
  const ForwardArgs args = placed(c.call.args, kBase);
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  const Plan plan = fulgur::plan(args, c.call.options);
  plan.run(args, run);
  const FakeState before = *state_;
  const int* const of_stream = params<UploadMetadataParams>(0).to;
  state_->capturing = run.stream;
  for (int i = 0; i < 3; ++i) {
    c.used[0] = i;
    plan.run(args, run);
    const auto store = params<UploadMetadataParams>(state_->launches.size() - 3);
    EXPECT_NE(store.to, of_stream);
    EXPECT_EQ(store.numbers[12], i);
  }
  state_->capturing = nullptr;
  state_->destroy_graph();
  EXPECT_EQ(state_->unsafe_in_capture, before.unsafe_in_capture);
}

TEST_F(OnFakeGpu, CapturedSlopesOfTheHostAreThoseOfTheirCapture) {
  std::vector<float> slopes(8);
  const ForwardCall call = forward_call({.alibi = true});
  ForwardArgs args = placed(call.args, kBase);
  args.alibi_slopes = ConstTensor::of<const float>(std::span(slopes), {8});
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  const Plan plan = fulgur::plan(args, call.options);
  plan.run(args, run);
  const int* const of_stream = params<UploadMetadataParams>(0).to;
  state_->capturing = run.stream;
  for (int i = 0; i < 3; ++i) {
    slopes[7] = static_cast<float>(i);
    plan.run(args, run);
    const auto store = params<UploadMetadataParams>(state_->launches.size() - 2);
    EXPECT_NE(store.to, of_stream);
    EXPECT_EQ(stored_floats(store)[7], static_cast<float>(i));
  }
  state_->capturing = nullptr;
  state_->destroy_graph();
  EXPECT_EQ(state_->unsafe_in_capture, 0);
}

}  // namespace
}  // namespace fulgur::test

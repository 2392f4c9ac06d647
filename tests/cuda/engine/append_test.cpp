// What append launches, alone and in a forward call.
#include <gtest/gtest.h>

#include <string>

#include "calls.h"
#include "cuda/device/gpu.h"
#include "cuda/device/launch_memory.h"
#include "on_fake_gpu.h"
#include "rejected.h"

namespace fulgur::test {
namespace {

void expect_rows(const AppendRows& rows, const ConstTensor& from, const ConstTensor& to,
                 int pairs) {
  const int row = from.rank - 3;
  EXPECT_EQ(rows.from, from.data);
  EXPECT_EQ(rows.from_batch, row == 0 ? 0 : from.strides[0]);
  EXPECT_EQ(rows.from_row, from.strides[row]);
  EXPECT_EQ(rows.from_head, from.strides[row + 1]);
  EXPECT_EQ(rows.to, to.data);
  EXPECT_EQ(rows.to_batch, to.rank == 3 ? 0 : to.strides[0]);
  EXPECT_EQ(rows.to_row, to.strides[to.rank - 3]);
  EXPECT_EQ(rows.to_head, to.strides[to.rank - 2]);
  EXPECT_EQ(rows.heads, from.shape[row + 1]);
  EXPECT_EQ(rows.dim, from.shape[row + 2]);
  EXPECT_EQ(rows.pairs, pairs);
}

TEST_F(OnFakeGpu, AppendLaunchesOnce) {
  const AppendArgs args = append_args(DType::kBF16);
  void* const stream = reinterpret_cast<void*>(0x1230);
  append(args, {.mask = causal(), .engine = "cuda"}, {.stream = stream});
  ASSERT_EQ(state_->launches.size(), 1u);
  const FakeLaunch& launch = state_->launches[0];
  EXPECT_STREQ(launch.kernel, "fulgur_append");
  EXPECT_EQ(launch.stream, stream);
  EXPECT_EQ(launch.grid, 110u);   // tokens and queries
  EXPECT_EQ(launch.block, 128u);  // 8 heads of 16 lanes
  EXPECT_EQ(launch.grid_y, 1u);
  const auto p = params<AppendParams>(0);
  expect_rows(p.k, args.rows.k_new, args.rows.k_cache, 16);
  expect_rows(p.v, args.rows.v_new, args.rows.v_cache, 0);
  expect_rows(p.q, args.q, args.q_out, 16);
  EXPECT_EQ(p.tokens.count, 50);
  EXPECT_EQ(p.tokens.cu_seqlens, args.rows.cu_seqlens_k_new.data);
  EXPECT_EQ(p.queries.count, 60);
  EXPECT_EQ(p.queries.cu_seqlens, args.cu_seqlens_q.data);
  EXPECT_EQ(p.batch, 3);
  EXPECT_EQ(p.cache_seqlens, args.rows.cache_seqlens.data);
  EXPECT_EQ(p.first_positions, args.rows.cache_seqlens.data);
  EXPECT_EQ(p.page_table, args.cache.page_table.data);
  EXPECT_EQ(p.page_indptr, nullptr);
  EXPECT_EQ(p.cache_batch_idx, nullptr);
  EXPECT_EQ(p.table_stride, 7);
  EXPECT_EQ(p.ids, 7);
  EXPECT_EQ(p.capacity, 7 * 16);
  EXPECT_EQ(p.entries, 20);
  EXPECT_EQ(p.page, 16u);
  EXPECT_EQ(p.cos, args.rows.rotary.cos.data);
  EXPECT_EQ(p.sin, args.rows.rotary.sin.data);
  EXPECT_EQ(p.cos_row, 16);
  EXPECT_EQ(p.sin_row, 16);
  EXPECT_EQ(p.positions, 1000);
  EXPECT_EQ(p.f32_angles, 1);
  EXPECT_EQ(p.interleaved, 0);
  EXPECT_EQ(p.advance, 1);
  EXPECT_EQ(p.wide, 1);
  EXPECT_EQ(1 << p.lanes_log2, 16);  // 128 columns, 8 a lane
}

TEST_F(OnFakeGpu, AppendToRowsOfTheBatch) {
  AppendArgs args = append_args(DType::kF16);
  const auto batched = [](auto t, std::initializer_list<int64_t> shape) {
    return decltype(t)::contiguous(t.data, t.dtype, shape, t.device);
  };
  args.rows.cu_seqlens_k_new = args.cu_seqlens_q = args.cache.page_table = {};
  args.rows.k_new = batched(args.rows.k_new, {3, 2, 2, 64});
  args.rows.v_new = batched(args.rows.v_new, {3, 2, 2, 128});
  args.q = batched(args.q, {3, 5, 8, 64});
  args.q_out = batched(args.q_out, {3, 5, 8, 64});
  args.cache.cache_batch_idx = args.rows.cache_seqlens;
  args.rows.rotary.rotary_seqlens = batched(args.rows.cache_seqlens, {3});
  args.rows.rotary.rotary_seqlens.data = reinterpret_cast<void*>(kBase);
  args.rows.rotary.interleaved = true;
  append(args);
  const auto p = params<AppendParams>(0);
  expect_rows(p.k, args.rows.k_new, args.rows.k_cache, 16);
  expect_rows(p.q, args.q, args.q_out, 16);
  EXPECT_EQ(p.tokens.count, 6);
  EXPECT_EQ(p.tokens.each, 2);
  EXPECT_EQ(p.tokens.cu_seqlens, nullptr);
  EXPECT_EQ(p.queries.count, 15);
  EXPECT_EQ(p.queries.each, 5);
  EXPECT_EQ(p.page_table, nullptr);
  EXPECT_EQ(p.cache_batch_idx, args.cache.cache_batch_idx.data);
  EXPECT_EQ(p.first_positions, args.rows.rotary.rotary_seqlens.data);
  EXPECT_EQ(p.capacity, 16);
  EXPECT_EQ(p.entries, 20);
  EXPECT_EQ(p.interleaved, 1);
  EXPECT_EQ(p.advance, 0);
}

// What does not lie at multiples of 16 bytes is moved element by element.
TEST_F(OnFakeGpu, AppendMovesSixteenBytesWhereItCan) {
  const auto wide = [&](auto change) {
    AppendArgs args = append_args(DType::kBF16);
    change(args);
    append(args);
    return params<AppendParams>(state_->launches.size() - 1).wide;
  };
  const auto moved = [](auto* data, int bytes) {
    return reinterpret_cast<decltype(data)>(reinterpret_cast<std::uintptr_t>(data) + bytes);
  };
  EXPECT_EQ(wide([](AppendArgs&) {}), 1);
  EXPECT_EQ(wide([](AppendArgs& a) {
              a.q_out = {};
              a.rows.rotary.cos = a.rows.rotary.sin = a.q = a.cu_seqlens_q = {};
            }),
            1);
  EXPECT_EQ(wide([](AppendArgs& a) { a.rows.k_cache.strides[0] += 4; }), 0);
  EXPECT_EQ(wide([](AppendArgs& a) { a.rows.v_new.strides[1] += 2; }), 0);
  EXPECT_EQ(wide([](AppendArgs& a) { a.rows.rotary.cos.strides[0] += 2; }), 0);
  EXPECT_EQ(
      wide([](AppendArgs& a) { a.rows.rotary.sin.shape[1] = a.rows.rotary.cos.shape[1] = 12; }), 0);
  EXPECT_EQ(wide([](AppendArgs& a) { a.rows.v_cache.shape[3] = a.rows.v_new.shape[2] = 100; }), 0);
  EXPECT_EQ(wide([&](AppendArgs& a) { a.q.data = moved(a.q.data, 8); }), 0);
  EXPECT_EQ(wide([&](AppendArgs& a) { a.rows.v_cache.data = moved(a.rows.v_cache.data, 2); }), 0);
  EXPECT_EQ(wide([&](AppendArgs& a) { a.rows.rotary.sin.data = moved(a.rows.rotary.sin.data, 4); }),
            0);
}

// Few new rows go to the cache by the kernel that attends them, and queries to the workspace.
TEST_F(OnFakeGpu, FewRowsAreAppendedWhereTheyAreRead) {
  const AppendingCall c({.batch = 3, .sq = 1, .sk = 500, .mask = causal()});
  const Plan plan = fulgur::plan(c.call.args, c.call.options);
  const Details details = plan.details();
  EXPECT_EQ(details.get<std::string>("append"), "by_attention_kernel");
  EXPECT_EQ(details.get<int64_t>("call.append_tokens"), 3);
  EXPECT_EQ(details.get<int64_t>("call.sk"), 512);  // of whole pages
  auto* const mine = reinterpret_cast<char*>(2 * kBase);
  const WorkspaceNeed need = plan.workspace();
  plan.run(c.call.args, {.workspace = {mine, need.bytes}});
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_decode");
  const auto p = params<DecodeAppendParams>(0);
  EXPECT_EQ(static_cast<const void*>(p.k.data), c.call.args.append.k_cache.data);
  EXPECT_EQ(static_cast<const void*>(p.v.data), c.call.args.append.v_cache.data);
  EXPECT_EQ(p.pages.table, c.call.args.cache.page_table.data);
  const Tensor turned = Tensor::contiguous(p.q.data, DType::kBF16, {3, 1, 8, 128});
  EXPECT_EQ(p.append.k.from, c.call.args.append.k_new.data);
  EXPECT_EQ(p.append.k.to, c.call.args.append.k_cache.data);
  EXPECT_EQ(p.append.k.pairs, 32);
  EXPECT_EQ(p.append.v.from, c.call.args.append.v_new.data);
  EXPECT_EQ(p.append.v.to, c.call.args.append.v_cache.data);
  EXPECT_EQ(p.append.v.pairs, 0);
  EXPECT_EQ(p.append.q.from, c.call.args.q.data);
  EXPECT_EQ(p.append.q.to, turned.data);
  EXPECT_EQ(p.append.cache_seqlens, c.call.args.append.cache_seqlens.data);
  EXPECT_EQ(p.append.tokens.each, 1);
  EXPECT_EQ(p.append.lengths, nullptr);
  EXPECT_EQ(p.append.advance, 1);
  expect_apart({{turned.data, turned.numel() * 2}}, mine + need.zeroed_bytes,
               need.bytes - need.zeroed_bytes);
  EXPECT_EQ(p.q.head, 128);
}

// Elsewhere they go there first, and lengths are added up on the way.
TEST_F(OnFakeGpu, ManyRowsAreAppendedFirst) {
  struct Why {
    ForwardShape shape;
    int64_t fresh;
    std::string kernel, family;
  };
  for (const Why& w :
       {Why{{.batch = 3, .sq = 1024, .mask = causal()}, 0, "fulgur_forward", "sm90_forward"},
        Why{{.batch = 64, .sq = 1, .sk = 8192}, 300, "fulgur_decode", "sm90_decode"}}) {
    state_->launches.clear();
    const AppendingCall c(w.shape, w.fresh);
    const Plan plan = fulgur::plan(c.call.args, c.call.options);
    const Details details = plan.details();
    EXPECT_EQ(details.get<std::string>("append"), "before_attention");
    EXPECT_EQ(details.get<std::string>("kernel"), w.family);
    EXPECT_TRUE(rejects(details, "append by the kernel that attends: "));
    auto* const mine = reinterpret_cast<char*>(2 * kBase);
    const WorkspaceNeed need = plan.workspace();
    plan.run(c.call.args, {.workspace = {mine, need.bytes}});
    ASSERT_EQ(state_->launches.size(), 2u);
    EXPECT_STREQ(state_->launches[0].kernel, "fulgur_append");
    EXPECT_EQ(state_->launches[1].kernel, w.kernel);
    const auto p = params<AppendParams>(0);
    EXPECT_EQ(p.q.from, c.call.args.q.data);
    expect_apart({{p.q.to, c.call.args.q.numel() * 2}, {p.lengths, w.shape.batch * 4}},
                 mine + need.zeroed_bytes, need.bytes - need.zeroed_bytes);
    if (w.kernel == "fulgur_decode") {
      EXPECT_EQ(params<DecodeParams>(1).q.data, p.q.to);
      EXPECT_EQ(params<DecodeParams>(1).seqused_k, p.lengths);
    } else {
      EXPECT_EQ(params<ForwardParams>(1).seqused_k, p.lengths);
    }
  }
}

TEST_F(OnFakeGpu, AppendOfNothingLaunchesNothing) {
  AppendArgs args = append_args(DType::kBF16);
  args.rows.k_new.shape[0] = args.rows.v_new.shape[0] = args.q.shape[0] = args.q_out.shape[0] = 0;
  append(args);
  EXPECT_TRUE(state_->launches.empty());
}

// The two kernels of append must be loaded before a capture: otherwise the call fails and captures
// nothing.
TEST_F(OnFakeGpu, CapturedAppendsOfHostLengthsHaveTheMemoryOfTheirGraph) {
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  append(append_args(DType::kF16), {}, run);
  AppendOfHostLengths c(DType::kF16);
  state_->launches.clear();
  state_->capturing = run.stream;
  EXPECT_EQ(message_of([&] { append(c.args, {}, run); }),
            "stream: is being captured, and this is the first launch of fulgur_upload_metadata on "
            "the device, which loads it; make such a call before the capture");
  EXPECT_TRUE(state_->launches.empty());
  state_->capturing = nullptr;
  append(c.args, {}, run);
  const FakeState before = *state_;
  const int* const of_stream = params<UploadMetadataParams>(0).to;
  state_->capturing = run.stream;
  for (int i = 0; i < 3; ++i) {
    c.old[0] = i;
    append(c.args, {}, run);
    const auto store = params<UploadMetadataParams>(state_->launches.size() - 2);
    EXPECT_NE(store.to, of_stream);
    EXPECT_EQ(store.numbers[4], i);
  }
  state_->capturing = nullptr;
  state_->destroy_graph();
  EXPECT_EQ(state_->loaded, before.loaded);
  EXPECT_EQ(state_->unsafe_in_capture, before.unsafe_in_capture);
}

// Lengths of the host go ahead of both kernels; what is wrong about them is said before.
TEST_F(OnFakeGpu, RowsOfHostLengthsAreAppendedFirst) {
  AppendingCall c({.batch = 3, .sq = 1, .sk = 500, .mask = causal()});
  std::vector<int32_t> old = {5, 0, 511};
  c.call.args.append.cache_seqlens = ConstTensor::of<const int32_t>(std::span(old), {3});
  fulgur::forward(c.call.args, c.call.options);
  ASSERT_EQ(state_->launches.size(), 3u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_upload_metadata");
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_append");
  EXPECT_STREQ(state_->launches[2].kernel, "fulgur_decode");
  EXPECT_EQ(params<AppendParams>(1).cache_seqlens, params<UploadMetadataParams>(0).to);
  EXPECT_EQ(params<DecodeParams>(2).seqused_k, params<AppendParams>(1).lengths);
  EXPECT_EQ(fulgur::plan(c.call.args, c.call.options).details().get<std::string>("append"),
            "before_attention");
  old[2] = 512;
  state_->launches.clear();
  EXPECT_EQ(message_of([&] { fulgur::forward(c.call.args, c.call.options); }),
            "cache_seqlens: got 512 at 2, with 1 new rows 513, want at most the 512 of its cache");
  EXPECT_TRUE(state_->launches.empty());
}

TEST_F(OnFakeGpu, AppendStoresLengthsOfTheHost) {
  AppendOfHostLengths c(DType::kBF16);
  void* const stream = reinterpret_cast<void*>(0x1230);
  append(c.args, {}, {.stream = stream});
  for (auto* const lengths : {&c.cu_new, &c.old, &c.first, &c.cu_q}) lengths->assign(3, -1);
  ASSERT_EQ(state_->launches.size(), 2u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_upload_metadata");
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_append");
  for (const FakeLaunch& launch : state_->launches) EXPECT_EQ(launch.stream, stream);
  const auto store = params<UploadMetadataParams>(0);
  EXPECT_EQ(stored(store), (std::vector{0, 20, 20, 50, 5, 9, 0, 7, 0, 3, 0, 30, 40, 60}));
  // After what every launch leaves zero.
  const auto lease = cuda::Gpu::at(0).launch_memory().take(static_cast<cuda::CUstream>(stream), 1);
  EXPECT_GE(reinterpret_cast<char*>(store.to), lease.data + cuda::LaunchMemory::kZeroed);
  const auto p = params<AppendParams>(1);
  EXPECT_EQ(p.tokens.cu_seqlens, store.to);
  EXPECT_EQ(p.cache_seqlens, store.to + 4);
  EXPECT_EQ(p.first_positions, store.to + 7);
  EXPECT_EQ(p.queries.cu_seqlens, store.to + 10);
  EXPECT_EQ(p.page_table, c.args.cache.page_table.data);
  expect_rows(p.k, c.args.rows.k_new, c.args.rows.k_cache, 16);
}

// Each of them may lie on the device, where it is not looked at.
TEST_F(OnFakeGpu, AppendStoresSomeLengthsOfTheHost) {
  AppendOfHostLengths c(DType::kBF16);
  const AppendArgs there = append_args(DType::kBF16);
  c.args.rows.cu_seqlens_k_new = there.rows.cu_seqlens_k_new;
  c.args.cu_seqlens_q = there.cu_seqlens_q;
  c.args.rows.rotary.rotary_seqlens = {};
  append(c.args);
  const auto store = params<UploadMetadataParams>(0);
  EXPECT_EQ(stored(store), (std::vector{5, 9, 0}));
  const auto p = params<AppendParams>(1);
  EXPECT_EQ(p.cache_seqlens, store.to);
  EXPECT_EQ(p.first_positions, store.to);
  EXPECT_EQ(p.tokens.cu_seqlens, there.rows.cu_seqlens_k_new.data);
  EXPECT_EQ(p.queries.cu_seqlens, there.cu_seqlens_q.data);
  c.old[1] = 113;
  EXPECT_EQ(message_of([&] { append(c.args); }),
            "cache_seqlens: got 113 at 1, with 0 new rows 113, want at most the 112 of its cache");
  EXPECT_EQ(state_->launches.size(), 2u);
}

TEST_F(OnFakeGpu, WrongLengthsOfTheHostAppendNothing) {
  const auto said = [](auto change) {
    AppendOfHostLengths c(DType::kBF16);
    change(c);
    return message_of([&] { append(c.args); });
  };
  using Call = AppendOfHostLengths;
  EXPECT_EQ(said([](Call& c) { c.cu_q[0] = -1; }), "cu_seqlens_q: starts with -1, want >= 0");
  EXPECT_EQ(said([](Call& c) { c.cu_q[3] = 61; }),
            "cu_seqlens_q: ends with 61, want at most 60 (rows of q)");
  EXPECT_EQ(said([](Call& c) { c.cu_new[2] = 19; }),
            "cu_seqlens_k_new: decreases at 2: 19 after 20, want non-decreasing");
  EXPECT_EQ(said([](Call& c) { c.cu_new[3] = 51; }),
            "cu_seqlens_k_new: ends with 51, want at most 50 (rows of k_new)");
  EXPECT_EQ(said([](Call& c) { c.old[2] = -1; }), "cache_seqlens: got -1 at 2, want >= 0");
  EXPECT_EQ(said([](Call& c) { c.old[2] = 83; }),
            "cache_seqlens: got 83 at 2, with 30 new rows 113, want at most the 112 of its cache");
  EXPECT_EQ(said([](Call& c) { c.first[0] = -1; }), "rotary_seqlens: got -1 at 0, want >= 0");
  EXPECT_EQ(said([](Call& c) { c.first[0] = 981; }),
            "cos: got 1000 positions, want 1001 for sequence 0, which has 20 from 981 on");
  EXPECT_EQ(said([](Call& c) {
              c.args.rows.cache_seqlens.device = {DeviceType::kCuda, 1};
            }),
            "cache_seqlens: on cuda:1, want cuda:0 as k_cache, or cpu");
  EXPECT_EQ(said([](Call& c) { c.args.cache.page_table.device = {}; }),
            "page_table: on cpu, want cuda:0 as k_cache");
  EXPECT_TRUE(state_->launches.empty());
}

// Calls without a plan load their kernel once, allocate nothing, and cannot begin in a capture.
TEST_F(OnFakeGpu, CallsWithoutAPlanOnlyLaunch) {
  const fulgur::Run run{.stream = reinterpret_cast<void*>(0x1230)};
  const AppendArgs args = append_args(DType::kF32);  // no other test of this process
  const AppendOfHostLengths here(DType::kF32);
  const auto call = [&] { append(args, {}, run); };
  append(AppendOfHostLengths(DType::kF16).args);  // the kernel that stores lengths is there
  state_->launches.clear();
  state_->capturing = run.stream;
  for (const AppendArgs& first : {args, here.args}) {
    EXPECT_EQ(message_of([&] { append(first, {}, run); }),
              "stream: is being captured, and this is the first launch of fulgur_append on the "
              "device, which loads it; make such a call before the capture");
  }
  EXPECT_EQ(status_of(call), Status::kInvalidArgument);
  EXPECT_TRUE(state_->launches.empty());
  state_->capturing = nullptr;
  call();
  const MergeCallOnGpu parts(2, 64);
  merge(parts.parts, parts.result, run);
  const FakeState before = *state_;
  state_->capturing = run.stream;
  for (int i = 0; i < 3; ++i) {
    call();
    merge(parts.parts, parts.result, run);
  }
  state_->capturing = nullptr;
  EXPECT_EQ(state_->launches.size(), before.launches.size() + 6);
  EXPECT_EQ(state_->loaded, before.loaded);
  EXPECT_EQ(state_->allocated, before.allocated);
  EXPECT_EQ(state_->unsafe_in_capture, before.unsafe_in_capture);
}

TEST_F(OnFakeGpu, SizesThatCallsWithoutAPlanDoNotTake) {
  AppendArgs args = append_args(DType::kBF16);
  args.rows.k_new = ConstTensor::contiguous(args.rows.k_new.data, DType::kBF16, {1 << 30, 2, 64},
                                            args.rows.k_new.device);
  args.rows.k_new.strides[0] = 0;
  args.rows.v_new = ConstTensor::contiguous(args.rows.v_new.data, DType::kBF16, {1 << 30, 2, 128},
                                            args.rows.v_new.device);
  args.rows.v_new.strides[0] = 0;
  const auto call = [&] { append(args); };
  EXPECT_EQ(status_of(call), Status::kUnsupported);
  EXPECT_EQ(message_of(call),
            "k_new: got 1073741824 rows, append on cuda takes at most 1073741823");
  EXPECT_TRUE(state_->launches.empty());
}

}  // namespace
}  // namespace fulgur::test

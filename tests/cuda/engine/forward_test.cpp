// What the forward pass launches.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "kernels/backward/params.h"
#include "kernels/common/copy_rows_params.h"
#include "kernels/common/padding_params.h"
#include "kernels/host_device/tile_map.h"
#include "on_fake_gpu.h"
#include "rejected.h"

namespace fulgur::test {
namespace {

void expect_map(const TensorMapBlob& blob, const ConstTensor& t, unsigned box_rows, int type) {
  const FakeMap map = FakeMap::of(&blob);
  EXPECT_EQ(map.address, t.data);
  const std::array<unsigned long long, 4> dims = {
      static_cast<unsigned long long>(t.shape[3]), static_cast<unsigned long long>(t.shape[1]),
      static_cast<unsigned long long>(t.shape[2]), static_cast<unsigned long long>(t.shape[0])};
  for (int i = 0; i < 4; ++i) EXPECT_EQ(map.dims[i], dims[i]) << i;
  EXPECT_EQ(map.byte_strides[0], 2ull * t.strides[1]);
  EXPECT_EQ(map.byte_strides[1], 2ull * t.strides[2]);
  EXPECT_EQ(map.byte_strides[2], 2ull * t.strides[0]);
  EXPECT_EQ(map.box[0], 64u);
  EXPECT_EQ(map.box[1], box_rows);
  EXPECT_EQ(map.box[2], 1u);
  EXPECT_EQ(map.box[3], 1u);
  EXPECT_EQ(map.type, type);
  EXPECT_EQ(map.swizzle, 3);
}

TEST_F(OnFakeGpu, LaunchesWhatTheProblemSays) {
  ForwardCall call =
      forward_call({.sq = 1000, .sk = 900, .dv = 64, .mask = chunked(400, window(300, 5))});
  call.run.stream = reinterpret_cast<void*>(0x1230);
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase);
  plan.run(args, call.run);
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_EQ(state_->launches[0].stream, call.run.stream);
  const auto p = params<ForwardParams>(0);
  const TileMap tiles = [&] { return plan.tiles(); }();
  expect_map(p.q_map, args.q, 64, 9);
  expect_map(p.k_map, args.k, static_cast<unsigned>(tiles.Bc), 9);
  expect_map(p.v_map, args.v, static_cast<unsigned>(tiles.Bc), 9);
  expect_map(p.o_map, args.out, 16, 9);
  const auto expect_strided = [](const StridedTensor& t, const ConstTensor& want) {
    EXPECT_EQ(t.data, want.data);
    EXPECT_EQ(t.batch, want.strides[0]);
    EXPECT_EQ(t.row, want.strides[1]);
    EXPECT_EQ(t.head, want.strides[2]);
  };
  expect_strided(p.q, args.q);
  expect_strided(p.k, args.k);
  expect_strided(p.v, args.v);
  expect_strided(p.o, args.out);
  EXPECT_EQ(p.lse, args.lse.data);
  EXPECT_EQ(p.lse_batch_stride, 8 * 1000);
  EXPECT_EQ(p.lse_head_stride, 1000);
  EXPECT_EQ(p.sq, 1000);
  EXPECT_EQ(p.sk, 900);
  EXPECT_EQ(p.d, 128);
  EXPECT_EQ(p.dv, 64);
  EXPECT_EQ(p.hq, 8);
  EXPECT_EQ(p.group, 4);
  EXPECT_EQ(p.window_left, 300);
  EXPECT_EQ(p.window_right, 5);
  EXPECT_EQ(p.chunk, 400);
  EXPECT_NEAR(p.scale_log2, 1.4426950408889634 / std::sqrt(128.0), 1e-7);
  EXPECT_EQ(p.work.heads, 4);  // of K and V, whose q heads share blocks
  EXPECT_EQ(tiles.Br, 64);
  const int block_strips = state_->launches[0].block / 128 - 1;  // one for each warpgroup but one
  EXPECT_EQ(p.work.row_blocks, (4 * 16 + block_strips - 1) / block_strips);
  EXPECT_EQ(p.work.q_tiles, 4 * p.work.row_blocks);
  ASSERT_NE(p.counters, nullptr);
  for (int i = 0; i < 1024; ++i) ASSERT_EQ(p.counters[i], 0);  // the fake's memory is the host's
}

TEST_F(OnFakeGpu, PackedLaunchesThePaddingToo) {
  ForwardCall call = forward_call({.packed = true, .seqused_q = true, .seqused = true});
  const int used[4] = {};  // never read
  call.args.lengths.seqused_q.data = used;
  call.args.lengths.seqused_k.data = used + 2;
  const Plan plan = fulgur::plan(call.args, call.options);
  const ForwardArgs args = placed(call.args, kBase);
  plan.run(args);
  ASSERT_EQ(state_->launches.size(), 2u);
  const auto p = params<ForwardParams>(0);
  EXPECT_EQ(FakeMap::of(&p.k_map).dims[1], 2048ull);
  EXPECT_EQ(FakeMap::of(&p.k_map).dims[3], 1ull);
  EXPECT_EQ(p.cu_seqlens_q, call.args.lengths.cu_seqlens_q.data);
  EXPECT_EQ(p.cu_seqlens_k, call.args.lengths.cu_seqlens_k.data);
  EXPECT_EQ(p.seqused_q, call.args.lengths.seqused_q.data);
  EXPECT_EQ(p.seqused_k, call.args.lengths.seqused_k.data);
  EXPECT_EQ(p.o.batch, 0);
  EXPECT_EQ(p.lse_batch_stride, 0);
  const auto padding = params<ForwardPaddingParams>(1);
  EXPECT_EQ(padding.o, args.out.data);
  EXPECT_EQ(padding.lse, args.lse.data);
  EXPECT_EQ(padding.batch, 2);
  EXPECT_EQ(padding.total_q, 2048);
  EXPECT_EQ(padding.cu_seqlens_q, p.cu_seqlens_q);
  EXPECT_EQ(padding.seqused_q, p.seqused_q);
  EXPECT_EQ(status_of([&] { plan.tiles(); }), Status::kUnsupported);  // lengths are on the device
}

// With seqused_q, prefill and decoding also launch the padding, in as many CTAs as fill the device.
TEST_F(OnFakeGpu, UsedQueriesLaunchThePaddingToo) {
  for (const int64_t sq : {1, 1024}) {
    SCOPED_TRACE(sq);
    for (const auto& [batch, x] : {std::pair{2, 528u}, {100, 11u}, {5000, 1u}}) {
      const ForwardCall call =
          forward_call({.batch = batch, .sq = sq, .hq = 4, .hk = 4, .d = 64, .seqused_q = true});
      const ForwardArgs args = placed(call.args, kBase);
      state_->launches.clear();
      fulgur::plan(args, call.options).run(args);
      ASSERT_EQ(state_->launches.size(), 2u);
      const auto padding = params<ForwardPaddingParams>(1);
      EXPECT_EQ(state_->launches[1].grid, x);
      EXPECT_EQ(state_->launches[1].grid_y, static_cast<unsigned>(batch));
      EXPECT_EQ(padding.o, args.out.data);
      EXPECT_EQ(padding.o_batch_stride, sq * 4 * 64);
      EXPECT_EQ(padding.lse_batch_stride, sq * 4);
      EXPECT_EQ(padding.cu_seqlens_q, nullptr);
      EXPECT_EQ(padding.seqused_q, args.lengths.seqused_q.data);
      EXPECT_EQ(padding.sq, sq);
      if (sq == 1) {
        EXPECT_EQ(params<DecodeParams>(0).seqused_q, args.lengths.seqused_q.data);
      }
    }
  }
}

TEST_F(OnFakeGpu, EmptyProblems) {
  for (const ForwardShape& shape : {ForwardShape{.batch = 0}, ForwardShape{.sq = 0}}) {
    const ForwardCall call = forward_call(shape);
    fulgur::forward(placed(call.args, kBase), call.options);
    EXPECT_TRUE(state_->launches.empty());
  }
  const ForwardCall no_keys = forward_call({.sk = 0});
  ForwardArgs args = placed(no_keys.args, kBase);
  args.k.data = args.v.data = nullptr;
  const Plan plan = fulgur::plan(no_keys.args, no_keys.options);
  plan.run(args);
  ASSERT_EQ(state_->launches.size(), 1u);
  EXPECT_EQ(k_map(0).address, args.out.data);
  args.out.data = reinterpret_cast<void*>(kBase);
  plan.run(args);
  EXPECT_EQ(k_map(1).address, args.out.data);
}

// Odd rows and odd addresses: q, k and v are copied on the device in every run.
TEST_F(OnFakeGpu, WhatTheCopyEngineCannotAddressIsCopied) {
  for (const ForwardShape& shape : {ForwardShape{.d = 17}, ForwardShape{.base = kBase + 8}}) {
    state_->launches.clear();
    const ForwardCall call = forward_call(shape);
    const Plan plan = fulgur::plan(call.args, call.options);
    EXPECT_GE(plan.workspace().bytes, 2 * 1024 * (8 + 2 + 2) * 24 * 2);
    const ForwardArgs args = placed(call.args, kBase + (shape.base != 0 ? 8 : 0));
    for (int run = 0; run < 2; ++run) {
      plan.run(args);
      ASSERT_EQ(state_->launches.size(), 4u * (run + 1));
      const auto p = params<ForwardParams>(4 * run + 3);
      const std::array<const ConstTensor*, 3> inputs = {&args.q, &args.k, &args.v};
      const std::array tensors = {&p.q, &p.k, &p.v};
      const std::array maps = {&p.q_map, &p.k_map, &p.v_map};
      const int64_t row = (call.args.q.shape[3] + 7) / 8 * 8;
      for (size_t i = 0; i < inputs.size(); ++i) {
        const auto copy = params<ForwardCopyParams>(4 * run + i);
        const ConstTensor& t = *inputs[i];
        EXPECT_EQ(copy.from, t.data);
        EXPECT_EQ(copy.batch_stride, t.strides[0]);
        EXPECT_EQ(copy.row_stride, t.strides[1]);
        EXPECT_EQ(copy.head_stride, t.strides[2]);
        EXPECT_EQ(copy.rows, t.shape[1]);
        EXPECT_EQ(copy.heads, t.shape[2]);
        EXPECT_EQ(copy.dim, t.shape[3]);
        EXPECT_EQ(copy.chunks * 8, row);
        EXPECT_EQ(tensors[i]->data, copy.to);
        EXPECT_EQ(tensors[i]->row, t.shape[2] * row);
        const FakeMap map = FakeMap::of(maps[i]);
        EXPECT_EQ(map.address, copy.to);
        EXPECT_EQ(map.dims[0], static_cast<unsigned long long>(t.shape[3]));
        EXPECT_EQ(map.byte_strides[1], static_cast<unsigned long long>(2 * row));
      }
      EXPECT_EQ(p.o.data, args.out.data);
    }
    EXPECT_TRUE(plan.details().has("copies"));
  }
}

TEST_F(OnFakeGpu, MisalignedDataIsRefusedBeforeAnythingRuns) {
  const ForwardCall call = forward_call({});
  const Plan plan = fulgur::plan(call.args, call.options);
  for (int which = 0; which < 4; ++which) {
    ForwardArgs args = placed(call.args, kBase);
    if (which < 3) {
      const void*& data = (which == 0 ? args.q : which == 1 ? args.k : args.v).data;
      data = static_cast<const char*>(data) + 8;
    } else {
      args.out.data = static_cast<char*>(args.out.data) + 8;
    }
    EXPECT_EQ(status_of([&] { plan.run(args); }), Status::kInvalidArgument);
    EXPECT_NE(message_of([&] { plan.run(args); }).find("is not aligned to 16 bytes"),
              std::string::npos);
  }
  EXPECT_TRUE(state_->launches.empty());
}

// Kernels get the seed and the offset of dropout, or the address of rng_state, and its threshold.
TEST_F(OnFakeGpu, DropoutReachesTheKernels) {
  ForwardCall call = forward_call({.lse = false, .dropout = 0.25});
  call.args = placed(call.args, kBase);
  const auto of = [&](const fulgur::Run& run) {
    state_->launches.clear();
    fulgur::plan(call.args, call.options).run(call.args, run);
    return params<ForwardParams>(0);
  };
  const ForwardParams by_run = of({.dropout_seed = 1, .dropout_offset = ~uint64_t{0}});
  EXPECT_EQ(by_run.rng_state, nullptr);
  EXPECT_EQ(by_run.dropout_seed, 1u);
  EXPECT_EQ(by_run.dropout_offset, ~0ull);
  EXPECT_EQ(by_run.dropout_threshold, 0x40000000u);
  EXPECT_FLOAT_EQ(by_run.keep_scale, 1 / 0.75f);
  call.args.rng_state =
      Tensor::contiguous(reinterpret_cast<void*>(kBase), DType::kI64, {2}, {DeviceType::kCuda, 0});
  const void* const state = of({}).rng_state;
  EXPECT_EQ(state, call.args.rng_state.data);

  BackwardCall gradient = backward_call({.mask = causal(), .dropout = 0.25});
  gradient.args = placed(gradient.args, kBase);
  gradient.args.rng_state = call.args.rng_state;
  state_->launches.clear();
  fulgur::plan(gradient.args, gradient.options).run(gradient.args);
  ASSERT_GE(state_->launches.size(), 4u);
  for (size_t i = 0; i < state_->launches.size(); ++i) {
    const auto p = params<BackwardParams>(i);
    EXPECT_EQ(static_cast<const void*>(p.rng_state), call.args.rng_state.data);
    EXPECT_EQ(p.dropout_threshold, 0x40000000u);
    EXPECT_FLOAT_EQ(p.keep_scale, 1 / 0.75f);
  }
}

TEST_F(OnFakeGpu, SinksGoToTheirKernels) {
  const ForwardCall forward = forward_call({.sinks = true});
  const ForwardArgs there = placed(forward.args, kBase);
  plan(forward.args, forward.options).run(there);
  EXPECT_EQ(params<ForwardParams>(0).sinks.data, there.sinks.data);
  const ForwardCall decode = forward_call({.sq = 1, .seqused = true, .sinks = true});
  const ForwardArgs few = placed(decode.args, kBase);
  plan(decode.args, decode.options).run(few);
  ASSERT_STREQ(state_->launches[1].kernel, "fulgur_decode");
  EXPECT_EQ(params<DecodeParams>(1).sinks.data, few.sinks.data);

  const BackwardCall call = backward_call({.hk = 8, .sinks = true}, {.dsinks = true});
  const BackwardArgs args = placed(call.args, kBase);
  plan(call.args, call.options).run(args);
  ASSERT_EQ(state_->launches.size(), 6u);
  EXPECT_STREQ(state_->launches[2].kernel, "fulgur_backward_prepare");
  EXPECT_STREQ(state_->launches[3].kernel, "fulgur_backward_sinks");
  EXPECT_EQ(state_->launches[3].grid, 8u);  // heads
  EXPECT_EQ(params<BackwardParams>(3).sinks.data, args.sinks.data);
  EXPECT_EQ(params<BackwardParams>(3).dsinks, args.dsinks.data);
}

TEST_F(OnFakeGpu, PlansTellDecisionsAndRejections) {
  const ForwardCall call = forward_call({.sq = 16384, .sk = 16384, .mask = causal()});
  const Plan plan = fulgur::plan(call.args, call.options);
  const Details details = plan.details();
  EXPECT_EQ(details.get<std::string>("engine"), "cuda");
  EXPECT_EQ(details.get<std::string>("kernel"), "sm90_forward");
  EXPECT_EQ(details.get<std::string>("tile_from"), "cost_model");
  EXPECT_EQ(details.get<int64_t>("Bc"), plan.tiles().Bc);
  EXPECT_GT(details.get<int64_t>("ctas"), 0);
  EXPECT_TRUE(rejects(details, "engine cpu: "));
  EXPECT_TRUE(rejects(details, "tile sm90_forward "));
  const std::string text = plan.explain();
  for (const char* name : {"cuda", "Fake GPU", "16384", "causal"}) {
    EXPECT_NE(text.find(name), std::string::npos) << name << "\n" << text;
  }
}

// V in f16 first; the kernel takes codes of q and k, and descales from where they lie.
TEST_F(OnFakeGpu, CodesOfVAreWidenedFirst) {
  ForwardCall call = forward_call({.dtype = DType::kE4M3, .sk = 900});
  call.args.k.dtype = DType::kE5M2;
  static const float scales[64] = {};
  const Device device = call.args.q.device;
  call.args.descales.q_descale =
      Tensor::contiguous(const_cast<float*>(scales), DType::kF32, {1}, device);
  call.args.descales.v_descale =
      Tensor::contiguous(const_cast<float*>(scales) + 8, DType::kF16, {2, 2}, device);
  const Plan plan = fulgur::plan(call.args, call.options);
  EXPECT_EQ(plan.details().get<std::string>("copies.v"), "its codes are multiplied as f16");
  EXPECT_GE(plan.workspace().bytes, 2 * 900 * 2 * 128 * 2);
  const ForwardArgs args = placed(call.args, kBase);
  plan.run(args, call.run);
  ASSERT_EQ(state_->launches.size(), 2u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_forward_widen");
  const auto widened = params<ForwardCopyParams>(0);
  EXPECT_EQ(widened.from, args.v.data);
  EXPECT_EQ(widened.chunks, 128 / 8);
  EXPECT_EQ(widened.row_stride, 2 * 128);
  const auto p = params<ForwardParams>(1);
  const FakeMap q = FakeMap::of(&p.q_map), k = FakeMap::of(&p.k_map), v = FakeMap::of(&p.v_map);
  EXPECT_EQ(q.type, 0);  // bytes
  EXPECT_EQ(q.box[0], 128u);
  EXPECT_EQ(q.byte_strides[0], 8ull * 128);
  EXPECT_EQ(k.type, 0);
  EXPECT_EQ(k.address, args.k.data);
  EXPECT_EQ(v.type, 6);  // f16
  EXPECT_EQ(v.address, widened.to);
  EXPECT_EQ(v.box[0], 64u);
  EXPECT_EQ(v.byte_strides[0], 2ull * 2 * 128);
  EXPECT_EQ(p.q_descale.data, scales);
  EXPECT_EQ(p.q_descale.batch, 0);
  EXPECT_EQ(p.k_descale.data, nullptr);
  EXPECT_EQ(p.v_descale.data, scales + 8);
  EXPECT_EQ(p.v_descale.type, kernels::kF16);
  EXPECT_EQ(p.v_descale.batch, 2);
  EXPECT_EQ(p.v_descale.head, 1);
}

// V of fast_codes is centred from where it lies, whatever its strides: TMA does not read it.
TEST_F(OnFakeGpu, FastCodesOfVAreCentredFirst) {
  ForwardCall call = forward_call({.dtype = DType::kE4M3, .sk = 7000, .fast_codes = true});
  const Plan plan = fulgur::plan(call.args, call.options);
  EXPECT_TRUE(plan.details().get<bool>("centers_v"));
  EXPECT_FALSE(plan.details().has("copies"));
  const ForwardArgs args = placed(call.args, kBase);
  plan.run(args, call.run);
  ASSERT_EQ(state_->launches.size(), 2u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_forward_values");
  EXPECT_EQ(state_->launches[0].block, 384u);  // a warp for 128 keys of a segment
  const auto p = params<ForwardParams>(1);
  EXPECT_EQ(p.v.data, args.v.data);
  EXPECT_EQ(p.values.segments, 5);  // of 1536 keys
  const int64_t Bc = plan.details().get<int64_t>("Bc");
  EXPECT_EQ(p.values.head_tiles, (7000 + Bc - 1) / Bc);
  EXPECT_EQ(p.values.batch_tiles, 2 * p.values.head_tiles);

  ForwardCall few = forward_call({.dtype = DType::kE4M3, .sk = 130, .fast_codes = true});
  state_->launches.clear();
  fulgur::plan(few.args, few.options).run(placed(few.args, kBase), few.run);
  ASSERT_EQ(state_->launches.size(), 2u);
  EXPECT_EQ(state_->launches[0].block, 64u);

  call.options.dropout_p =
      0.5;  // the share of a segment in the softmax is not that of what it keeps
  EXPECT_FALSE(fulgur::plan(call.args, call.options).details().has("centers_v"));
  call.options.dropout_p = 0;
  call.options.mask_mod = parse_expression("q // 100 == k // 100");  // a map skips tiles
  EXPECT_FALSE(fulgur::plan(call.args, call.options).details().has("centers_v"));
}

// The hulls of row nodes and key nodes, then the map, then the kernel that reads it.
TEST_F(OnFakeGpu, MasksByExpressionsAreMappedFirst) {
  ForwardCall call = forward_call({.sq = 1000, .sk = 5000, .hq = 8, .hk = 2});
  const auto run = [&](const char* mask) {
    call.options.mask_mod = parse_expression(mask);
    state_->launches.clear();
    fulgur::plan(call.args, call.options).run(placed(call.args, kBase), call.run);
    ASSERT_EQ(state_->launches.size(), 3u);
    EXPECT_STREQ(state_->launches[0].kernel, "fulgur_node_hulls");
    EXPECT_STREQ(state_->launches[1].kernel, "fulgur_tile_map");
    EXPECT_STREQ(state_->launches[2].kernel, "fulgur_forward");
  };
  run("q // 100 == k // 100");
  const auto map = params<TileMapParams>(1);
  const kernels::SeenWords read = params<ForwardParams>(2).expression.map;
  EXPECT_EQ(read.words, map.words);
  EXPECT_EQ(map.shape.batches, 1);
  EXPECT_EQ(map.shape.heads, 1);
  EXPECT_EQ(map.shape.heads_of_map, 8);
  EXPECT_EQ(read.batch, 0);
  EXPECT_EQ(read.head, 0);
  EXPECT_EQ(read.block, (map.shape.key_tiles + 31) / 32);
  run("q + b >= k - h");  // maps of sequences and heads
  const auto all = params<TileMapParams>(1);
  const kernels::SeenWords of_all = params<ForwardParams>(2).expression.map;
  EXPECT_EQ(all.shape.batches, 2);
  EXPECT_EQ(all.shape.heads, 8);
  EXPECT_EQ(all.shape.heads_of_map, 1);
  EXPECT_EQ(of_all.head, int64_t{of_all.block} * all.shape.row_blocks);
  EXPECT_EQ(of_all.batch, 8 * of_all.head);
  run("q + hk >= k");
  EXPECT_EQ(params<TileMapParams>(1).shape.heads, 2);
  EXPECT_EQ(params<TileMapParams>(1).shape.heads_of_map, 4);
}

// One kernel makes the map of tiles of a short call; each of its CTAs computes four blocks of rows.
TEST_F(OnFakeGpu, MapsOfShortCallsAreFused) {
  ForwardCall call = forward_call({.sq = 1000, .sk = 3000, .hq = 8, .hk = 2, .d = 64});
  call.options.mask_mod = parse_expression("q + b >= k");
  const Plan plan = fulgur::plan(call.args, call.options);
  state_->launches.clear();
  plan.run(placed(call.args, kBase), call.run);
  ASSERT_EQ(state_->launches.size(), 2u);
  EXPECT_STREQ(state_->launches[0].kernel, "fulgur_fused_map");
  EXPECT_STREQ(state_->launches[1].kernel, "fulgur_forward");
  const auto map = params<TileMapParams>(0);
  EXPECT_EQ(map.shape.batches, 2);
  EXPECT_EQ(map.shape.row_blocks, 1000 / plan.details().get<int64_t>("Br") + 1);
  EXPECT_EQ(state_->launches[0].grid, 2u * ((map.shape.row_blocks + 3) / 4));
  EXPECT_EQ(params<ForwardParams>(1).expression.map.words, map.words);
}

TEST_F(OnFakeGpu, CodesThatItDoesNotTakeAreNamed) {
  const auto expect_refused = [](const ForwardCall& call, const std::string& why) {
    const auto plan = [&] { fulgur::plan(call.args, call.options); };
    EXPECT_EQ(status_of(plan), Status::kUnsupported);
    const std::string message = message_of(plan);
    EXPECT_NE(message.find("engine cuda: "), std::string::npos) << message;
    EXPECT_NE(message.find(why), std::string::npos) << message;
  };
  const ForwardCall codes = forward_call({.dtype = DType::kE4M3, .seqused = true});
  const auto with = [&](auto change) {
    ForwardCall call = codes;
    change(call.args);
    return call;
  };
  expect_refused(with([](ForwardArgs& a) { a.v.dtype = DType::kBF16; }),
                 "takes a q of e4m3 with k and v of codes, got v of bf16");
  // With a q of 16 bits decode kernels take k and v of some formats.
  const auto cached = [&](DType k, DType v) {
    return with([&](ForwardArgs& a) {
      a.q.dtype = a.out.dtype = DType::kBF16;
      a.k.dtype = k, a.v.dtype = v;
    });
  };
  expect_refused(cached(DType::kQ4_1, DType::kInt8),
                 "takes no low-bit k (q4_1) but e4m3, e5m2, int8, int4, q8_0 and q4_0");
  expect_refused(cached(DType::kF16, DType::kInt8),
                 "computes k and v of codes or of the dtype of q, got k of f16");
  expect_refused(with([](ForwardArgs& a) { a.out.dtype = DType::kF32; }),
                 "writes bf16 and f16 for e4m3, got an out of f32");
  expect_refused(with([](ForwardArgs& a) {
                   a.descales.q_descale = a.q;
                   a.descales.q_descale.dtype = DType::kF32;
                   a.descales.q_descale.shape[3] = 2;
                 }),
                 "takes a q_descale of the tensor or of sequences and kv heads, not one of rows; "
                 "takes a q_descale of one group of columns, got 2");
  ForwardCall dropped = with([](ForwardArgs& a) { a.q.dtype = DType::kE5M2; });
  dropped.options.dropout_p = 0.5;
  expect_refused(dropped, "multiplies codes of a q of e4m3, got e5m2; computes without dropout");
  ForwardCall many = codes;
  many.options.invariant = true;
  EXPECT_EQ(status_of([&] { fulgur::plan(many.args, many.options); }), Status::kOk);
}

// The decode kernels compute what products of codes do not: pages, tree masks, descales of rows,
// other formats, and the few rows of decoding.
TEST_F(OnFakeGpu, QueriesOfCodesAreDecoded) {
  const auto kernel = [](const ForwardCall& call) {
    return fulgur::plan(call.args, call.options).details().get<std::string>("kernel");
  };
  const ForwardCall codes = forward_call({.dtype = DType::kE4M3, .seqused = true});
  EXPECT_EQ(kernel(codes), "sm90_forward");
  const auto with = [&](auto change) {
    ForwardCall call = codes;
    change(call.args);
    return call;
  };
  EXPECT_EQ(kernel(with([](ForwardArgs& a) { a.q.dtype = DType::kE5M2; })), "sm90_decode");
  EXPECT_EQ(kernel(with([](ForwardArgs& a) { a.v.dtype = DType::kInt8; })), "sm90_decode");
  for (const auto& [scale, rows] : {std::pair{&Descales::q_descale, &ForwardArgs::q},
                                    std::pair{&Descales::k_descale, &ForwardArgs::k}}) {
    EXPECT_EQ(kernel(with([&](ForwardArgs& a) {
                a.descales.*scale = a.*rows;
                (a.descales.*scale).dtype = DType::kF32;
                (a.descales.*scale).shape[3] = 1;
              })),
              "sm90_decode");
  }
  const Device device = codes.args.q.device;
  EXPECT_EQ(kernel(with([&](ForwardArgs& a) {
              a.k.shape[0] = a.v.shape[0] = 8;
              a.cache.page_table = Tensor::contiguous(nullptr, DType::kI32, {2, 2}, device);
            })),
            "sm90_decode");
  ForwardCall tree = forward_call({.dtype = DType::kE4M3, .sq = 8});
  tree.args.tree_mask = Tensor::contiguous(nullptr, DType::kI64, {2, 8}, device);
  EXPECT_EQ(kernel(tree), "sm90_decode");
  EXPECT_EQ(kernel(forward_call({.dtype = DType::kE4M3, .sq = 1})), "sm90_decode");
}

TEST_F(OnFakeGpu, UnsupportedIsSaidBeforePlanning) {
  const auto message = [](const ForwardShape& shape) {
    const ForwardCall call = forward_call(shape);
    EXPECT_EQ(status_of([&] { plan(call.args, call.options); }), Status::kUnsupported);
    return message_of([&] { plan(call.args, call.options); });
  };
  EXPECT_NE(
      message({.dtype = DType::kF64, .lse = false}).find("engine cuda: computes bf16, f16 and f32"),
      std::string::npos);
  EXPECT_NE(message({.d = 512, .invariant = true})
                .find("computes d and dv above 256 without `invariant`"),
            std::string::npos);
  const std::string f32 = message({.dtype = DType::kF32, .d = 512});  // whose dtype is computed
  EXPECT_NE(f32.find("engine cuda: computes d and dv up to 256"), std::string::npos) << f32;
  const BackwardCall wide = backward_call({.dtype = DType::kF32, .d = 512});
  EXPECT_NE(message_of([&] {
              plan(wide.args, wide.options);
            }).find("engine cuda: computes d and dv up to 256"),
            std::string::npos);
  ForwardCall call = forward_call({});
  call.args.q.device.index = call.args.k.device.index = call.args.v.device.index = 3;
  call.args.out.device.index = call.args.lse.device.index = 3;
  EXPECT_NE(message_of([&] { plan(call.args, call.options); }).find("cuda:3"), std::string::npos);
}

}  // namespace
}  // namespace fulgur::test

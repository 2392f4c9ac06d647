// Wrong inputs that are no single argument of a call; and odd ones that are not wrong.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <span>

#include "api/c_struct.h"
#include "call.h"
#include "engines.h"
#include "fulgur/merge.h"

namespace fulgur::test {
namespace {

fulgur_forward_args c_args(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                           const DLTensor* out) {
  auto args = c_struct<fulgur_forward_args>();
  args.q = q;
  args.k = k;
  args.v = v;
  args.out = out;
  return args;
}

TEST(BadInputs, TensorsOnADeviceThatIsMissing) {
  Workload w({.sq = 8, .sk = 8, .d = 16, .dv = 16}, 1);
  Call call(w);
  for (Tensor* t : {&call.q, &call.k, &call.v, &call.out, &call.lse})
    t->device = {DeviceType::kCuda, 0};
  call.options.engine = "cpu";
  const auto run = [&] { forward(call.forward(), call.options); };
  EXPECT_EQ(status_of(run), Status::kUnsupported);
  EXPECT_NE(message_of(run).find("cuda:0"), std::string::npos) << message_of(run);
  EXPECT_TRUE(w.nothing_written());
}

TEST(BadInputs, PlanRunWithOtherTensors) {
  Workload w({.batch = 2, .sq = 8, .sk = 10, .hq = 4, .hk = 2, .d = 16, .dv = 24}, 1);
  const Plan forward_plan = plan(w.forward, w.options);
  const Plan backward_plan = plan(w.backward, w.options);
  const std::vector<std::pair<const char*, std::function<void(Call&)>>> changes = {
      {"q: got f32 \\(1, 8, 4, 16\\).*want f32 \\(2, 8, 4, 16\\)",
       [](Call& c) { c.q.shape[0] = 1; }},
      {"k: got f16 .*want f32", [](Call& c) { c.k.dtype = DType::kF16; }},
      {"v: got .*strides \\(480, 48, 0, 1\\).*want .*strides \\(480, 48, 24, 1\\)",
       [](Call& c) { c.v.strides[2] = 0; }},
      {"out: got .*cuda:0.*want .*cpu", [](Call& c) { c.out = on_cuda(c.out); }},
      {"lse: got no tensor.*want f32 \\(2, 4, 8\\)", [](Call& c) { c.lse = {}; }},
      {"k: data is null", [](Call& c) { c.k.data = nullptr; }},
  };
  for (const auto& [message, change] : changes) {
    Call call(w);
    change(call);
    for (const std::string& got : {message_of([&] { forward_plan.run(call.forward()); }),
                                   message_of([&] { backward_plan.run(call.backward()); })}) {
      EXPECT_TRUE(starts_like(got, message));
    }
  }
  EXPECT_EQ(status_of([&] { forward_plan.run(w.backward); }), Status::kInvalidArgument);
  EXPECT_EQ(status_of([&] { backward_plan.run(w.forward); }), Status::kInvalidArgument);
  EXPECT_TRUE(w.nothing_written());
}

TEST(BadInputs, TensorWithoutOrWithTooManyDimensions) {
  float x = 0;
  const std::vector<int64_t> none, five(5, 1);
  EXPECT_EQ(message_of([&] { Tensor::contiguous(&x, DType::kF32, none); }),
            "shape: got 0 dimensions, want 1 to 4");
  EXPECT_EQ(message_of([&] { Tensor::contiguous(&x, DType::kF32, five); }),
            "shape: got 5 dimensions, want 1 to 4");
}

TEST(BadInputs, DlpackThatFulgurLacks) {
  float x[16] = {};
  int64_t shape[] = {1, 1, 1, 1, 16};
  DLTensor good{};
  good.data = x;
  good.device = {kDLCPU, 0};
  good.ndim = 4;
  good.dtype = {kDLFloat, 32, 1};
  good.shape = shape + 1;
  const std::vector<std::pair<const char*, std::function<void(DLTensor&)>>> changes = {
      {"q: dtype .*code 1.*64 bits.*want",
       [](DLTensor& t) {
         t.dtype = {kDLUInt, 64, 1};
       }},
      {"q: dtype .*8 bits.*want", [](DLTensor& t) { t.dtype.bits = 8; }},
      {"q: dtype .*4 lanes.*want", [](DLTensor& t) { t.dtype.lanes = 4; }},
      {"q: .*device.* 7, want", [](DLTensor& t) { t.device.device_type = kDLVulkan; }},
      {"q: got 5 dimensions, want", [&](DLTensor& t) { t.ndim = 5, t.shape = shape; }},
      {"q: got 0 dimensions, want", [](DLTensor& t) { t.ndim = 0; }},
      {"q: got -1 dimensions, want", [](DLTensor& t) { t.ndim = -1; }},
      {"q: shape is null", [](DLTensor& t) { t.shape = nullptr; }},
  };
  for (const auto& [message, change] : changes) {
    DLTensor bad = good;
    change(bad);
    const fulgur_forward_args args = c_args(&bad, &good, &good, &good);
    EXPECT_EQ(fulgur_forward(&args, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
    EXPECT_TRUE(starts_like(fulgur_last_error(), message));
  }
}

// A caller that was compiled against another version of the library has structs of another size.
TEST(BadInputs, StructsOfAnotherVersion) {
  Workload w({.sq = 8, .sk = 8}, 1);
  const Dl q(w.forward.q), k(w.forward.k), v(w.forward.v), out(w.forward.out);
  auto args = c_args(q, k, v, out);
  struct Newer {
    fulgur_options known;
    int64_t unknown;
  } newer;
  std::memset(&newer, 0xff, sizeof(newer));
  ASSERT_EQ(fulgur_options_init(&newer.known, sizeof(newer)), FULGUR_OK);
  EXPECT_EQ(newer.known.struct_size, sizeof(newer));
  EXPECT_EQ(newer.unknown, 0);
  EXPECT_EQ(fulgur_forward(&args, &newer.known, nullptr), FULGUR_OK);
  w.seal();
  newer.unknown = 1;
  EXPECT_EQ(fulgur_forward(&args, &newer.known, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(
      starts_like(fulgur_last_error(), "options: struct_size is .* newer than the library"));
  EXPECT_TRUE(w.nothing_written());

  // No version has structs as short as this: a size that is wrong, such as that of a pointer.
  w.seal();
  fulgur_options options;
  ASSERT_EQ(fulgur_options_init(&options, sizeof(options)), FULGUR_OK);
  for (const size_t size : {size_t{0}, size_t{3}, sizeof(void*), sizeof(options) - 1}) {
    options.struct_size = size;
    EXPECT_EQ(fulgur_forward(&args, &options, nullptr), FULGUR_INVALID_ARGUMENT);
    EXPECT_TRUE(starts_like(fulgur_last_error(), "options: struct_size is [0-9]+, want"));
    EXPECT_EQ(fulgur_options_init(&options, size), FULGUR_INVALID_ARGUMENT);
    EXPECT_TRUE(starts_like(fulgur_last_error(), "struct_size: got [0-9]+, want"));
  }
  // Too short, and half of the last pointer.
  for (const size_t size : {sizeof(void*), sizeof(args) - 4}) {
    args.struct_size = size;
    EXPECT_EQ(fulgur_forward(&args, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
    EXPECT_TRUE(starts_like(fulgur_last_error(), "args: struct_size is [0-9]+, want"));
  }
  args.struct_size = sizeof(args);
  auto run = c_struct<fulgur_run>();
  run.struct_size = 0;
  EXPECT_EQ(fulgur_forward(&args, nullptr, &run), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "run: struct_size is 0, want"));
  EXPECT_EQ(fulgur_options_init(nullptr, sizeof(options)), FULGUR_INVALID_ARGUMENT);
  EXPECT_EQ(fulgur_forward(nullptr, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(w.nothing_written());
}

// A struct that has grown since its first version, read and written by a newer library.
TEST(GoodInput, StructsOfOlderCallers) {
  struct Grown {
    size_t struct_size;
    int64_t first;
    int64_t later;
  };
  constexpr size_t kFirst = offsetof(Grown, later);
  const Grown defaults{sizeof(Grown), 1, 2};
  const Grown old{kFirst, 10, 77};  // 77 is not the caller's
  const Grown read = read_struct("x", &old, kFirst, defaults);
  EXPECT_EQ(read.first, 10);
  EXPECT_EQ(read.later, 2);
  const Grown present{sizeof(Grown), 10, 20};
  EXPECT_EQ(read_struct("x", &present, kFirst, defaults).later, 20);
  Grown written{0, 0, 77};
  write_struct(&written, kFirst, defaults);
  EXPECT_EQ(written.struct_size, kFirst);
  EXPECT_EQ(written.first, 1);
  EXPECT_EQ(written.later, 77);
}

// A newer caller's struct for an answer: what this library does not know of is answered by 0.
TEST(GoodInput, AnswerForANewerCaller) {
  Workload w({.sq = 8, .sk = 8}, 1);
  const Dl q(w.forward.q), k(w.forward.k), v(w.forward.v), out(w.forward.out);
  const fulgur_forward_args args = c_args(q, k, v, out);
  fulgur_plan* plan = nullptr;
  ASSERT_EQ(fulgur_plan_forward(&args, nullptr, &plan), FULGUR_OK);
  struct Newer {
    fulgur_workspace_need known;
    int64_t unknown;
  } newer;
  std::memset(&newer, 0xff, sizeof(newer));  // not set up but for its size
  newer.known.struct_size = sizeof(newer);
  EXPECT_EQ(fulgur_plan_workspace(plan, &newer.known), FULGUR_OK) << fulgur_last_error();
  EXPECT_EQ(newer.known.struct_size, sizeof(newer));
  EXPECT_GE(newer.known.bytes, 0);
  EXPECT_EQ(newer.unknown, 0);
  newer.known.struct_size = sizeof(fulgur_workspace_need) - 1;
  EXPECT_EQ(fulgur_plan_workspace(plan, &newer.known), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "need: struct_size is 31, want"));
  EXPECT_EQ(fulgur_plan_workspace(plan, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_EQ(fulgur_plan_workspace(nullptr, &newer.known), FULGUR_INVALID_ARGUMENT);
  fulgur_plan_free(plan);
}

// What a failed allocation gives, null and a size, is no workspace.
TEST(BadInputs, WorkspaceOfNull) {
  Workload w({.sq = 8, .sk = 8}, 1);
  const Plan p = plan(w.forward, w.options);
  for (const int64_t bytes : {int64_t{1} << 20, int64_t{-1}}) {
    const fulgur::Run run{.workspace = {nullptr, bytes}};
    EXPECT_TRUE(starts_like(message_of([&] { p.run(w.forward, run); }), "workspace: data is null"));
    EXPECT_TRUE(starts_like(message_of([&] { forward(w.forward, w.options, run); }),
                            "workspace: data is null"));
  }
  EXPECT_TRUE(w.nothing_written());
}

// Plans through the C API: made, run on other data, explained, freed.
TEST(GoodInput, PlansOfTheCApi) {
  Workload w({.sq = 20, .sk = 30}, 1);
  w.run();
  const auto out = bits(w.forward.out), dq = bits(w.backward.dq);
  w.seal();
  const Call call(w);
  const Dl q(call.q), k(call.k), v(call.v), o(call.out), lse(call.lse), dout(call.dout),
      tdq(call.dq), tdk(call.dk), tdv(call.dv);
  auto args = c_args(q, k, v, o);
  args.lse = lse;
  auto gradient = c_struct<fulgur_backward_args>();
  gradient.dout = dout;
  gradient.q = q;
  gradient.k = k;
  gradient.v = v;
  gradient.out = o;
  gradient.lse = lse;
  gradient.dq = tdq;
  gradient.dk = tdk;
  gradient.dv = tdv;
  fulgur_plan *plan = nullptr, *backward = nullptr;
  ASSERT_EQ(fulgur_plan_forward(&args, nullptr, &plan), FULGUR_OK);
  ASSERT_EQ(fulgur_plan_backward(&gradient, nullptr, &backward), FULGUR_OK);
  EXPECT_EQ(fulgur_plan_run_forward(plan, &args, nullptr), FULGUR_OK);

  auto need = c_struct<fulgur_workspace_need>();
  ASSERT_EQ(fulgur_plan_workspace(backward, &need), FULGUR_OK);
  ASSERT_GT(need.bytes, 0);
  std::vector<std::max_align_t> memory(
      static_cast<size_t>(need.bytes + need.alignment) / sizeof(std::max_align_t) + 1);
  void* aligned = memory.data();
  size_t room = memory.size() * sizeof(std::max_align_t);
  ASSERT_NE(std::align(static_cast<size_t>(need.alignment), static_cast<size_t>(need.bytes),
                       aligned, room),
            nullptr);
  auto run = c_struct<fulgur_run>();
  run.workspace = aligned;
  run.workspace_bytes = need.bytes;
  EXPECT_EQ(fulgur_plan_run_backward(backward, &gradient, &run), FULGUR_OK);
  EXPECT_EQ(bits(w.forward.out), out);
  EXPECT_EQ(bits(w.backward.dq), dq);
  run.workspace_bytes = need.bytes - 1;
  EXPECT_EQ(fulgur_plan_run_backward(backward, &gradient, &run), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "workspace: got .* bytes, want"));
  EXPECT_EQ(fulgur_plan_run_forward(backward, &args, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_EQ(fulgur_plan_run_forward(nullptr, &args, nullptr), FULGUR_INVALID_ARGUMENT);

  size_t length = 0;
  ASSERT_EQ(fulgur_plan_explain(plan, nullptr, 0, &length), FULGUR_OK);
  std::string text(length + 1, 'x');
  ASSERT_EQ(fulgur_plan_explain(plan, text.data(), text.size(), nullptr), FULGUR_OK);
  EXPECT_EQ(std::strlen(text.c_str()), length);
  EXPECT_TRUE(text.starts_with("forward attention, f32 on cpu"));
  char few[8];
  ASSERT_EQ(fulgur_plan_explain(plan, few, sizeof(few), nullptr), FULGUR_OK);
  EXPECT_STREQ(few, "forward");
  ASSERT_EQ(fulgur_engines(text.data(), text.size(), nullptr), FULGUR_OK);
  EXPECT_TRUE(text.starts_with("cuda\t"));
  fulgur_plan_free(plan);
  fulgur_plan_free(backward);
  fulgur_plan_free(nullptr);
}

TEST(BadInputs, Merge) {
  Dense a(DType::kF32, {2, 5, 3, 7}), b(DType::kF32, {2, 5, 3, 7}), out(DType::kF32, {2, 5, 3, 7});
  Dense la(DType::kF32, {2, 3, 5}), lb(DType::kF32, {2, 3, 5}), lse(DType::kF32, {2, 3, 5});
  using Parts = std::vector<Partial>;
  struct {
    const char* message;
    std::function<void(Parts&, Merged&)> change;
  } const wrong[] = {
      {"parts: got none, want .*", [](Parts& p, Merged&) { p.clear(); }},
      {"parts\\[0\\].out: .*", [](Parts& p, Merged&) { p[0].out = {}; }},
      {"parts\\[1\\].lse: .*", [](Parts& p, Merged&) { p[1].lse = {}; }},
      {"parts\\[1\\].out: .*4.*5.*", [](Parts& p, Merged&) { p[1].out.shape[1] = 4; }},
      {"parts\\[1\\].lse: .*\\(2, 3, 4\\).*", [](Parts& p, Merged&) { p[1].lse.shape[2] = 4; }},
      {"parts\\[0\\].out: .*3.*",
       [](Parts& p, Merged&) {
         p[0].out = ConstTensor::contiguous(p[0].out.data, DType::kF32, {10, 3, 7});
       }},
      {"parts\\[0\\].out: .*i32.*", [](Parts& p, Merged&) { p[0].out.dtype = DType::kI32; }},
      {"parts\\[0\\].lse: .*bf16.*f32.*", [](Parts& p, Merged&) { p[0].lse.dtype = DType::kBF16; }},
      {"parts\\[1\\].out: .*null.*", [](Parts& p, Merged&) { p[1].out.data = nullptr; }},
      {"parts\\[1\\].lse: .*null.*", [](Parts& p, Merged&) { p[1].lse.data = nullptr; }},
      {"parts\\[0\\].out: .*stride.*", [](Parts& p, Merged&) { p[0].out.strides[3] = 2; }},
      {"out: .*", [](Parts&, Merged& r) { r.out = {}; }},
      {"out: .*i32.*", [](Parts&, Merged& r) { r.out.dtype = DType::kI32; }},
      {"out: .*null.*", [](Parts&, Merged& r) { r.out.data = nullptr; }},
      {"out: .*overlap.*", [](Parts&, Merged& r) { r.out.strides[0] = 0; }},
      {"lse: .*\\(2, 5, 3\\).*",
       [](Parts&, Merged& r) {
         r.lse = resized(r.lse, {2, 5, 3});
       }},
      {"lse: .*f16.*", [](Parts&, Merged& r) { r.lse.dtype = DType::kF16; }},
      {"lse: .*null.*", [](Parts&, Merged& r) { r.lse.data = nullptr; }},
      {"out: .*parts\\[1\\].out.*memory.*",
       [](Parts& p, Merged& r) {
         r.out.data = const_cast<float*>(static_cast<const float*>(p[1].out.data)) + 1;
       }},
      {"lse: .*parts\\[0\\].lse.*memory.*",
       [](Parts& p, Merged& r) {
         r.lse.data = const_cast<float*>(static_cast<const float*>(p[0].lse.data)) - 5;
       }},
      {"lse: .* out.*memory.*", [](Parts&, Merged& r) { r.lse.data = r.out.data; }},
  };
  for (const auto& [message, change] : wrong) {
    Parts parts{{a, la}, {b, lb}};
    Merged result{out, lse};
    change(parts, result);
    EXPECT_TRUE(starts_like(message_of([&] { merge(parts, result); }), message));
    for (Dense* t : {&out, &lse}) EXPECT_TRUE(t->storage().all_unchanged()) << message;

    const Dl outs[] = {Dl(parts.empty() ? ConstTensor{} : parts[0].out),
                       Dl(parts.empty() ? ConstTensor{} : parts[1].out)};
    const Dl lses[] = {Dl(parts.empty() ? ConstTensor{} : parts[0].lse),
                       Dl(parts.empty() ? ConstTensor{} : parts[1].lse)};
    const DLTensor *part_outs[] = {outs[0], outs[1]}, *part_lses[] = {lses[0], lses[1]};
    EXPECT_EQ(
        fulgur_merge(part_outs, part_lses, parts.size(), Dl(result.out), Dl(result.lse), nullptr),
        FULGUR_INVALID_ARGUMENT)
        << message;
    EXPECT_TRUE(starts_like(fulgur_last_error(), message)) << "(C API)";
  }
  EXPECT_EQ(fulgur_merge(nullptr, nullptr, 2, Dl(out), Dl(lse), nullptr), FULGUR_INVALID_ARGUMENT);
}

TEST(BadInputs, MergeOnAnotherDevice) {
  Dense a(DType::kF32, {2, 5, 3, 7}), out(DType::kF32, {2, 5, 3, 7}), la(DType::kF32, {2, 3, 5});
  Dense lse(DType::kF32, {2, 3, 5});
  struct {
    const char* message;
    Partial part;
    Merged result;
  } const wrong[] = {{"parts\\[0\\].out: on cuda:0, want cpu as out", {on_cuda(a), la}, {out, {}}},
                     {"parts\\[0\\].lse: on cuda:0, want cpu as out", {a, on_cuda(la)}, {out, {}}},
                     {"parts\\[0\\].out: on cpu, want cuda:0 as out", {a, la}, {on_cuda(out), {}}},
                     {"lse: on cuda:0, want cpu as out", {a, la}, {out, on_cuda(lse)}}};
  for (const auto& [message, part, result] : wrong) {
    const auto call = [&, &part = part, &result = result] { merge(std::vector{part}, result); };
    EXPECT_EQ(status_of(call), Status::kInvalidArgument);
    EXPECT_TRUE(starts_like(message_of(call), message));
    EXPECT_TRUE(out.storage().all_unchanged());
  }
}

// What the CPU alone takes, on a machine with a GPU or without one.
TEST(BadInputs, MergeOnCuda) {
  const auto on_gpu = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(reinterpret_cast<void*>(0x100000), dtype, shape,
                              {DeviceType::kCuda, 0});
  };
  const auto message = [&](size_t parts, DType part, DType part_lse, DType result, DType lse) {
    Tensor out = on_gpu(result, {2, 5, 3, 7}), to_lse = on_gpu(lse, {2, 3, 5});
    out.data = reinterpret_cast<void*>(0x200000);
    to_lse.data = reinterpret_cast<void*>(0x300000);
    const Partial each{on_gpu(part, {2, 5, 3, 7}), on_gpu(part_lse, {2, 3, 5})};
    const auto call = [&] { merge(std::vector<Partial>(parts, each), {out, to_lse}); };
    EXPECT_EQ(status_of(call), Status::kUnsupported);
    return message_of(call);
  };
  const DType f32 = DType::kF32, f64 = DType::kF64;
  EXPECT_EQ(message(2, f64, f32, f32, f32),
            "parts[0].out: got f64, merge on cuda takes none of it");
  EXPECT_EQ(message(2, f32, f64, f32, f32),
            "parts[0].lse: got f64, merge on cuda takes none of it");
  EXPECT_EQ(message(2, f32, f32, f64, f32), "out: got f64, merge on cuda takes none of it");
  EXPECT_EQ(message(2, f32, f32, f32, f64), "lse: got f64, merge on cuda takes none of it");
  EXPECT_EQ(message(65, f32, f32, f32, f32),
            "parts: got 65, merge on cuda takes at most 64; merge some of them first");
}

// Strides of dimensions of size one, and data of empty tensors, mean nothing.
TEST(GoodInput, StridesThatAddressNothing) {
  Workload w({.batch = 1, .sq = 1, .sk = 9, .hq = 1, .hk = 1, .d = 1, .dv = 1}, 1);
  w.options.deterministic = true;
  w.run();
  const auto out = bits(w.forward.out), dk = bits(w.backward.dk);
  w.seal();
  for (const int64_t stride : {int64_t{0}, int64_t{-5}, INT64_MAX, INT64_MIN}) {
    for (Tensor* t : {&w.forward.q, &w.forward.k, &w.forward.v, &w.forward.out, &w.backward.dout,
                      &w.backward.q, &w.backward.k, &w.backward.v, &w.backward.out, &w.backward.dq,
                      &w.backward.dk, &w.backward.dv}) {
      for (int i = 0; i < 4; ++i) {
        if (t->shape[i] == 1) t->strides[i] = stride;
      }
    }
    EXPECT_EQ(message_of([&] { w.run(); }), "");
    EXPECT_EQ(bits(w.forward.out), out);
    EXPECT_EQ(bits(w.backward.dk), dk);
  }
}

TEST(GoodInput, EmptyTensorsNeedNoData) {
  for (const auto& [batch, sq, sk] : {std::tuple{0, 8, 8}, {2, 0, 0}, {2, 0, 8}, {2, 8, 0}}) {
    Workload w({.batch = batch, .sq = sq, .sk = sk, .hq = 2, .hk = 2, .d = 8, .dv = 8}, 1);
    Call call(w);
    for (Tensor* t : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.dout, &call.dq,
                      &call.dk, &call.dv}) {
      if (t->numel() == 0) t->data = nullptr;
    }
    EXPECT_EQ(message_of([&] { forward(call.forward(), call.options); }), "");
    EXPECT_EQ(message_of([&] { backward(call.backward(), call.options); }), "");
    for (const Tensor& t : {call.out, call.dq, call.dk, call.dv}) {
      for (const double x : read(t)) EXPECT_EQ(x, 0);
    }
  }
}

// A longest length beyond all rows bounds nothing: the plan is that of all rows.
TEST(GoodInput, LongestLengthsBeyondTheRows) {
  const std::vector<int32_t> ends = {0, 2, 5};
  const ConstTensor cu = ConstTensor::of(std::span(ends), {3});
  const auto rows = [](int64_t heads) {
    return Tensor::contiguous(nullptr, DType::kF32, {5, heads, 8});
  };
  const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {6, 5});
  const ForwardArgs f{.q = rows(6),
                      .k = rows(2),
                      .v = rows(2),
                      .out = rows(6),
                      .lse = lse,
                      .lengths = {.cu_seqlens_q = cu, .cu_seqlens_k = cu}};
  const BackwardArgs b{.dout = rows(6),
                       .q = rows(6),
                       .k = rows(2),
                       .v = rows(2),
                       .out = rows(6),
                       .lse = lse,
                       .dq = rows(6),
                       .dk = rows(2),
                       .dv = rows(2),
                       .lengths = {.cu_seqlens_q = cu, .cu_seqlens_k = cu}};
  const Options wild{.max_seqlen_q = INT64_MAX - 1, .max_seqlen_k = INT64_MAX};
  const Options all{.max_seqlen_q = 5, .max_seqlen_k = 5};
  EXPECT_EQ(plan(f, wild).explain(), plan(f, all).explain());
  EXPECT_EQ(plan(b, wild).explain(), plan(b, all).explain());
  EXPECT_EQ(plan(b, wild).workspace(), plan(b, all).workspace());
}

// Sizes beyond all memory are fine where another size is 0: nothing to do, and done at once.
TEST(GoodInput, HugeSizesOfEmptyTensors) {
  constexpr int64_t kMax = int64_t{1} << 62;
  for (const auto& [batch, s] : {std::pair{kMax, int64_t{0}}, {int64_t{0}, kMax}}) {
    auto rows = [&, batch = batch, s = s](int64_t heads) {
      return Tensor::contiguous(nullptr, DType::kF32, {batch, s, heads, 8});
    };
    const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {batch, 4, s});
    const Options options{.mask = window(5, 3)};
    const ForwardArgs f{rows(4), rows(2), rows(2), rows(4), lse};
    const BackwardArgs b{rows(4), rows(4), rows(2), rows(2), rows(4),
                         lse,     rows(4), rows(2), rows(2)};
    EXPECT_EQ(message_of([&] { forward(f, options); }), "");
    EXPECT_EQ(message_of([&] { backward(b, options); }), "");
    EXPECT_EQ(plan(f, options).flops(), 0);
    EXPECT_FALSE(plan(b, options).explain().empty());
  }
}

}  // namespace
}  // namespace fulgur::test

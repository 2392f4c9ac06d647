// Captured launches: what they need of the plan, of the memory and of the streams with them.
#include <algorithm>
#include <cstring>
#include <deque>
#include <optional>

#include "appended.h"
#include "coded.h"
#include "device.h"
#include "engine_memory.h"
#include "fulgur/distributed/plan.h"
#include "shared.h"

namespace fulgur::test {
namespace {

using Graphs = OnGpu;

// Runs that share the keys of tiles out, and runs with more tiles than SMs.
DeviceCall few_tiles(uint64_t seed) { return {1, 1, 9000, 8, 128, seed}; }
DeviceCall many_tiles(uint64_t seed) { return {2, 777, 777, 20, 128, seed}; }

TEST_F(Graphs, ReplayWhatWasCaptured) {
  const Stream stream;
  const DeviceCall call(2, 777, 777, 5, 128);
  for (const Mask& mask : {full(), causal()}) {
    const Plan plan = fulgur::plan(call.args(), {.mask = mask});
    const auto result = call.result_of(plan);
    const Graph graph(stream, [&] { plan.run(call.args(), stream.run()); });
    for (int i = 0; i < 3; ++i) {
      call.poison(stream.get());
      graph.launch(stream);
      stream.synchronize();
      EXPECT_EQ(call.result(), result);
    }
  }
}

// The plan is gone and another stream is never idle.
TEST_F(Graphs, ReplayBesideOtherCalls) {
  const Stream stream, other;
  for (const auto& shape : {few_tiles, many_tiles}) {
    const DeviceCall call = shape(1), between = shape(2);
    std::optional<Plan> plan = fulgur::plan(call.args());
    const Plan plan_between = fulgur::plan(between.args());
    EXPECT_TRUE(shape != few_tiles || splits(*plan));
    const auto result = call.result_of(*plan), result_between = between.result_of(plan_between);
    const Graph graph(stream, [&] { plan->run(call.args(), stream.run()); });
    plan.reset();
    between.poison(other.get());
    for (int i = 0; i < 300; ++i) {
      for (int n = 0; n < 3; ++n) plan_between.run(between.args(), other.run());
      call.poison(stream.get());
      graph.launch(stream);
      stream.synchronize();
      ASSERT_EQ(call.result(), result) << "replay " << i;
    }
    other.synchronize();
    EXPECT_EQ(between.result(), result_between);
  }
}

// Launches of one graph have their memory in common.
TEST_F(Graphs, ReplayLayers) {
  const Stream stream;
  const DeviceCall few(1, 1, 9000, 8, 128), less(1, 1, 3000, 8, 128), more(1, 4, 9000, 8, 256);
  std::vector<std::pair<const DeviceCall*, Plan>> layers;
  std::vector<std::vector<std::byte>> results;
  for (const DeviceCall* const call : {&few, &less, &more}) {
    layers.emplace_back(call, fulgur::plan(call->args()));
    EXPECT_TRUE(splits(layers.back().second));
    results.push_back(call->result_of(layers.back().second));
  }
  const Graph graph(stream, [&] {
    for (int turn = 0; turn < 3; ++turn) {
      for (const auto& [call, plan] : layers) plan.run(call->args(), stream.run());
    }
  });
  for (int i = 0; i < 100; ++i) {
    for (const auto& [call, plan] : layers) call->poison(stream.get());
    graph.launch(stream);
    stream.synchronize();
    for (size_t layer = 0; layer < layers.size(); ++layer)
      ASSERT_EQ(layers[layer].first->result(), results[layer]) << "replay " << i;
  }
}

// A graph and runs of its plan on another stream.
TEST_F(Graphs, ReplayBesideRunsOfTheirPlan) {
  const Stream stream, other;
  const DeviceCall call = few_tiles(3), between = few_tiles(4);
  const Plan plan = fulgur::plan(call.args());
  const auto result = call.result_of(plan), result_between = between.result_of(plan);
  const Graph graph(stream, [&] { plan.run(call.args(), stream.run()); });
  for (int i = 0; i < 100; ++i) {
    call.poison(stream.get());
    between.poison(other.get());
    plan.run(between.args(), other.run());
    graph.launch(stream);
    plan.run(between.args(), other.run());
    stream.synchronize();
    other.synchronize();
    ASSERT_EQ(call.result(), result) << "replay " << i;
    ASSERT_EQ(between.result(), result_between) << "with replay " << i;
  }
}

TEST_F(Graphs, CallWithoutAPlanAfterAFirstOne) {
  const Stream stream;
  const DeviceCall call(1, 500, 600, 3, 64);
  forward(call.args(), {}, stream.run());
  stream.synchronize();
  const auto result = call.result();
  const Graph graph(stream, [&] { forward(call.args(), {}, stream.run()); });
  for (int i = 0; i < 3; ++i) {
    call.poison(stream.get());
    graph.launch(stream);
    stream.synchronize();
    EXPECT_EQ(call.result(), result);
  }
}

// It writes nothing and leaves the capture as it was.
TEST_F(Graphs, FirstCallIsRefused) {
  const Stream stream;
  const DeviceCall unseen(1, 333, 451, 3, 72), planned(1, 400, 500, 3, 64);
  const Plan plan = fulgur::plan(planned.args());
  const auto result = planned.result_of(plan), untouched = unseen.result();
  Status status{};
  std::string message;
  const Graph graph(stream, [&] {
    const auto call = [&] { forward(unseen.args(), {}, stream.run()); };
    status = status_of(call);
    message = message_of(call);
    plan.run(planned.args(), stream.run());
  });
  EXPECT_EQ(status, Status::kInvalidArgument);
  EXPECT_NE(message.find("stream"), std::string::npos) << message;
  EXPECT_NE(message.find("is being captured"), std::string::npos) << message;
  planned.poison(stream.get());
  graph.launch(stream);
  stream.synchronize();
  EXPECT_EQ(planned.result(), result);
  EXPECT_EQ(unseen.result(), untouched);
  EXPECT_EQ(status_of([&] { forward(unseen.args(), {}, stream.run()); }), Status::kOk);
  stream.synchronize();
  EXPECT_NE(unseen.result(), untouched);
}

// The host takes part in each step of a group's call. The capture goes on; the group does not, as
// its ranks would wait.
TEST_F(Graphs, CallsOfGroupsAreRefused) {
  const Stream stream;
  const DeviceCall call(1, 300, 300, 3, 64);
  const Plan plan = fulgur::plan(call.args());
  const auto result = call.result_of(plan);
  const Group group = Group::from_env();
  const DistributedPlan of_group = fulgur::plan(call.args(), {}, group, {});
  of_group.run(call.args(), stream.run());
  stream.synchronize();
  EXPECT_EQ(call.result(), result);
  std::string message;
  const Graph graph(stream, [&] {
    message = message_of([&] { of_group.run(call.args(), stream.run()); });
    plan.run(call.args(), stream.run());
  });
  EXPECT_EQ(message, "stream: is being captured, want calls of groups outside of graphs");
  EXPECT_NE(group.dead(), "");
  call.poison(stream.get());
  graph.launch(stream);
  stream.synchronize();
  EXPECT_EQ(call.result(), result);
}

// The bytes of a contiguous tensor from one place to another, on either device.
void copy_bytes(const Tensor& to, const Tensor& from) {
  cuda::copy(to.data, from.data, to.numel() * size_of(to.dtype));
}

// Replays read the lengths, slopes and sinks that are on the device by then.
TEST_F(Graphs, LengthsSlopesAndSinksChangeBetweenReplays) {
  const std::vector<Rows> lengths[] = {{{0, 0, 300, 400}, {0, 0, 100, 50}, {0, 0, 0, 100}},
                                       {{0, 0, 100, 50}, {0, 0, 300, 400}, {0, 0, 0, 100}},
                                       {{0, 0, 133, 183}, {0, 0, 133, 183}, {0, 0, 134, 184}},
                                       {{0, 0, 0, 0}, {0, 0, 100, 150}, {0, 0, 300, 400}},
                                       {{0, 0, 300, 400}, {0, 0, 100, 50}, {0, 0, 0, 100}}};
  const Stream stream;
  for (const Mask& mask : {causal(), full()}) {
    for (const bool seqused : {false, true}) {
      const Case c{.dtype = DType::kBF16,
                   .sq = 300,
                   .sk = 400,
                   .hq = 4,
                   .hk = 2,
                   .mask = mask,
                   .layout = Layout::kPacked,
                   .alibi = Alibi::kHeads,
                   .seqused_q = seqused,
                   .seqused = seqused,
                   .sinks = true};
      Workload planned(c, 1, lengths[0]);
      EngineMemory memory("cuda");
      const ForwardTensors there = memory.at(planned.forward);
      const Plan plan = fulgur::plan(there, memory.options(planned.forward, planned.options));
      const Graph graph(stream, [&] { plan.run(there, stream.run()); });
      for (size_t n = 0; n < std::size(lengths); ++n) {
        SCOPED_TRACE("lengths " + std::to_string(n));
        Workload w(c, 10 + n, lengths[n]);
        const auto i = static_cast<double>(n);
        write(w.forward.alibi_slopes, std::vector{0.5, 0.1 * i, 0.0, 0.01});
        for (const auto& [to, from] :
             {std::pair{there.q, w.forward.q}, std::pair{there.k, w.forward.k},
              std::pair{there.v, w.forward.v}, std::pair{there.out, w.forward.out},
              std::pair{there.lse, w.forward.lse},
              std::pair{there.alibi_slopes, w.forward.alibi_slopes},
              std::pair{there.sinks, w.forward.sinks},
              std::pair{there.cu_seqlens_q, w.forward.cu_seqlens_q},
              std::pair{there.cu_seqlens_k, w.forward.cu_seqlens_k}}) {
          copy_bytes(to, from);
        }
        if (seqused) copy_bytes(there.seqused_q, w.forward.seqused_q);
        if (seqused) copy_bytes(there.seqused_k, w.forward.seqused_k);
        cuda::synchronize();
        graph.launch(stream);
        stream.synchronize();
        copy_bytes(w.forward.out, there.out);
        copy_bytes(w.forward.lse, there.lse);
        EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
      }
    }
  }
}

// Lengths that lie on the host stay as they were captured.
TEST_F(Graphs, NumbersOfTheHostStay) {
  const Stream stream;
  Workload w({.dtype = DType::kBF16,
              .sq = 300,
              .sk = 400,
              .hq = 4,
              .hk = 2,
              .mask = causal(),
              .layout = Layout::kPacked,
              .alibi = Alibi::kHeads,
              .seqused_q = true,
              .seqused = true,
              .sinks = true},
             1);
  EngineMemory memory("cuda");
  ForwardTensors tensors = memory.at(w.forward);
  std::deque<std::vector<int32_t>> arrays;
  for (const auto& [to, from] : {std::pair{&tensors.cu_seqlens_q, w.forward.cu_seqlens_q},
                                 std::pair{&tensors.cu_seqlens_k, w.forward.cu_seqlens_k},
                                 std::pair{&tensors.seqused_q, w.forward.seqused_q},
                                 std::pair{&tensors.seqused_k, w.forward.seqused_k},
                                 std::pair{&tensors.alibi_slopes, w.forward.alibi_slopes},
                                 std::pair{&tensors.sinks, w.forward.sinks}}) {
    auto& array = arrays.emplace_back(from.numel());
    std::memcpy(array.data(), from.data, array.size() * sizeof(int32_t));
    *to = from;
    to->data = array.data();
  }
  const Plan plan = fulgur::plan(tensors, w.options);
  const Graph graph(stream, [&] { plan.run(tensors, stream.run()); });
  for (auto& array : arrays) std::fill(array.begin(), array.end(), -7777);
  for (int replay = 0; replay < 3; ++replay) {
    w.seal();
    memory.send();
    graph.launch(stream);
    stream.synchronize();
    memory.bring_back();
    EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
  }
}

// The host's lengths of append stay, too, whatever other launches on their stream store.
TEST_F(Graphs, LengthsOfTheHostStayInAppends) {
  const Stream stream;
  const AppendCase c{.c = {.dtype = DType::kBF16,
                           .batch = 4,
                           .sq = 3,
                           .sk = 40,
                           .hq = 4,
                           .hk = 2,
                           .d = 64,
                           .mask = causal(),
                           .layout = Layout::kPacked},
                     .shape = {},
                     .rotary_dim = 32,
                     .positions = true,
                     .aligned = true};
  Appended a(c, 1);
  const Options options{.mask = c.c.mask};
  EngineMemory memory("cuda");
  AppendTensors tensors = memory.at(a.args);
  std::deque<std::vector<int32_t>> arrays;
  for (const auto& [to, from] : {std::pair{&tensors.cu_seqlens_k_new, a.args.cu_seqlens_k_new},
                                 std::pair{&tensors.cache_seqlens, a.args.cache_seqlens},
                                 std::pair{&tensors.rotary_seqlens, a.args.rotary_seqlens},
                                 std::pair{&tensors.cu_seqlens_q, a.args.cu_seqlens_q}}) {
    auto& array = arrays.emplace_back(from.numel());
    std::memcpy(array.data(), from.data, array.size() * sizeof(int32_t));
    *to = from;
    to->data = array.data();
  }
  append(tensors, options, stream.run());  // loads the kernels
  const Graph graph(stream, [&] { append(tensors, options, stream.run()); });
  for (auto& array : arrays) std::fill(array.begin(), array.end(), 0);
  for (int replay = 0; replay < 3; ++replay) {
    append(tensors, options, stream.run());
    stream.synchronize();
    memory.send();
    graph.launch(stream);
    stream.synchronize();
  }
  memory.bring_back();
  a.w.options.mask = c.c.mask;
  EXPECT_TRUE(a.check());
}

// New rows go where lengths on the device say when a graph is replayed, and are attended with as
// many keys: by the kernel that attends, and, of many queries, before it.
TEST_F(Graphs, LengthsOfNewRowsChangeBetweenReplays) {
  const Stream stream;
  for (const int64_t sq : {1, 4, 200}) {
    SCOPED_TRACE(sq);
    const AppendCase c{.c = {.dtype = DType::kBF16,
                             .batch = 3,
                             .sq = sq,
                             .sk = 300,
                             .hq = 4,
                             .hk = 2,
                             .d = 64,
                             .dv = 64,
                             .mask = causal()},
                       .shape = {},
                       .rotary_dim = 32,
                       .aligned = true};
    Appended replayed(c, 1), called(c, 1);
    EngineMemory memories[2]{EngineMemory("cuda"), EngineMemory("cuda")};
    std::vector<ForwardArgs> args;
    for (const auto& [a, memory] :
         {std::pair{&replayed, &memories[0]}, std::pair{&called, &memories[1]}}) {
      const AppendTensors rows = memory->at(a->rows());
      args.push_back(appending(memory->at(a->attention()), rows));
    }
    const Options options{.mask = c.c.mask};
    forward(args[0], options, stream.run());  // compiles
    stream.synchronize();  // its rows are written before send() writes the caches
    const Graph graph(stream, [&] { forward(args[0], options, stream.run()); });
    for (int turn = 0; turn < 4; ++turn) {
      const std::vector<double> old = {100.0 - turn, 0.0 + 90 * turn, 17.0 * turn};
      for (Appended* a : {&replayed, &called}) write(a->args.cache_seqlens, old);
      for (const EngineMemory& memory : memories) memory.send();
      graph.launch(stream);
      forward(args[1], options, stream.run());
      stream.synchronize();
      for (EngineMemory& memory : memories) memory.bring_back();
      EXPECT_EQ(bits(replayed.args.k_cache), bits(called.args.k_cache));
      EXPECT_EQ(bits(replayed.args.v_cache), bits(called.args.v_cache));
      EXPECT_EQ(bits(replayed.w.forward.out), bits(called.w.forward.out));
      EXPECT_EQ(bits(replayed.w.forward.lse), bits(called.w.forward.lse));
    }
  }
}

// Pages, rows of the batch and lengths of a cache are those on the device by then: by few rows, by
// many that the decode kernel takes, and by more than that.
TEST_F(Graphs, CachesChangeBetweenReplays) {
  using Index = CacheShape::Index;
  const Stream stream;
  for (const int64_t sq : {1, 20, 150}) {
    for (const CacheShape& shape : {CacheShape{.index = Index::kTable, .page = 16},
                                    CacheShape{.index = Index::kLists, .page = 3, .leftpad = true},
                                    CacheShape{.index = Index::kBatch, .page = 0}}) {
      const Case c{.dtype = DType::kBF16,
                   .batch = 3,
                   .sq = sq,
                   .sk = 400,
                   .hq = 4,
                   .hk = 2,
                   .mask = causal(),
                   .seqused = true};
      SCOPED_TRACE(c.name() + " " + shape.name());
      Workload w(c, 1);
      Cached cached(w, shape, 2);
      EngineMemory memory("cuda");
      const ForwardTensors there = memory.at(cached.forward);
      const Plan plan = fulgur::plan(there, w.options);
      const Graph graph(stream, [&] { plan.run(there, stream.run()); });
      for (const int64_t fewer : {0, 1, 150, 300}) {
        SCOPED_TRACE(fewer);
        std::vector<double> used = read(cached.forward.seqused_k);
        for (size_t b = 0; b < used.size(); ++b) {
          const int64_t gone = std::min(fewer, w.sequences[b].sk);
          w.sequences[b].sk -= gone;
          used[b] -= static_cast<double>(gone);
        }
        write(cached.forward.seqused_k, used);
        cached.move();
        w.seal();
        memory.send();
        cuda::synchronize();
        graph.launch(stream);
        stream.synchronize();
        memory.bring_back();
        EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
      }
    }
  }
}

// Caches of codes, of rotated keys less their means, take new rows in graphs, too: what these are,
// where they go, and the means change between replays.
TEST_F(Graphs, CodesAreAppendedAndAttended) {
  constexpr int64_t kBatch = 2, kRows = 200, kNew = 3, kHeads = 2, kDim = 64;
  struct CodedCall {
    std::deque<Buffer> buffers;
    AppendTensors rows;
    ForwardTensors attention;

    Tensor add(DType dtype, std::vector<int64_t> shape) {
      return buffers.emplace_back(dtype, std::move(shape)).t;
    }
    CodedCall() {
      const DType bf16 = DType::kBF16, f32 = DType::kF32;
      rows.k_cache = add(DType::kInt8, {kBatch, kRows, kHeads, kDim});
      rows.v_cache = add(DType::kE4M3, {kBatch, kRows, kHeads, kDim});
      rows.k_cache_descale = add(f32, {kBatch, kRows, kHeads, 1});
      rows.v_cache_descale = add(f32, {kBatch, kRows, kHeads, 1});
      rows.k_cache_mean = add(f32, {kBatch, kHeads, kDim});
      rows.k_new = add(bf16, {kBatch, kNew, kHeads, kDim});
      rows.v_new = add(bf16, {kBatch, kNew, kHeads, kDim});
      rows.cos = add(f32, {kRows, 16});
      rows.sin = add(f32, {kRows, 16});
      rows.cache_seqlens = add(DType::kI32, {kBatch});
      attention.q = add(bf16, {kBatch, kNew, 2 * kHeads, kDim});
      attention.out = add(bf16, {kBatch, kNew, 2 * kHeads, kDim});
      attention.lse = add(f32, {kBatch, 2 * kHeads, kNew});
    }
  };
  const Stream stream;
  CodedCall replayed, called;
  EngineMemory memories[2]{EngineMemory("cuda"), EngineMemory("cuda")};
  std::vector<ForwardArgs> args;
  for (const auto& [c, memory] :
       {std::pair{&replayed, &memories[0]}, std::pair{&called, &memories[1]}}) {
    for (Buffer& b : c->buffers) memory->keep(std::as_writable_bytes(std::span(b.bytes)));
    const AppendTensors rows = memory->at(c->rows);
    args.push_back(appending(memory->at(c->attention), rows));
  }
  const Options options{.mask = causal(), .hadamard = true};
  forward(args[0], options, stream.run());  // compiles
  stream.synchronize();
  const Graph graph(stream, [&] { forward(args[0], options, stream.run()); });
  std::vector<uint8_t> before;
  for (int turn = 0; turn < 4; ++turn) {
    for (CodedCall* c : {&replayed, &called}) {
      std::mt19937_64 random(turn);
      for (const Tensor& t : {c->rows.k_new, c->rows.v_new, c->rows.k_cache_mean, c->attention.q,
                              c->rows.cos, c->rows.sin}) {
        randomize(t, random);
      }
      write(c->rows.cache_seqlens, std::vector<double>{5.0 * turn, 190.0 - 60 * turn});
    }
    for (const EngineMemory& memory : memories) memory.send();
    graph.launch(stream);
    forward(args[1], options, stream.run());
    stream.synchronize();
    for (EngineMemory& memory : memories) memory.bring_back();
    for (size_t i = 0; i < replayed.buffers.size(); ++i)
      EXPECT_EQ(replayed.buffers[i].bytes, called.buffers[i].bytes) << i;
    EXPECT_NE(called.buffers[0].bytes, before);
    before = called.buffers[0].bytes;
  }
}

// Replays read the words of a tree mask that are on the device by then.
TEST_F(Graphs, TreeMasksChangeBetweenReplays) {
  const Stream stream;
  Workload w({.dtype = DType::kBF16,
              .batch = 2,
              .sq = 9,
              .sk = 200,
              .hq = 4,
              .hk = 2,
              .tree = Tree::kAncestors},
             1);
  EngineMemory memory("cuda");
  const ForwardTensors there = memory.at(w.forward);
  const Plan plan = fulgur::plan(there, w.options);
  const Graph graph(stream, [&] { plan.run(there, stream.run()); });
  auto* const words = static_cast<uint64_t*>(w.forward.tree_mask.data);
  for (uint64_t turn = 0; turn < 3; ++turn) {
    SCOPED_TRACE(turn);
    for (int64_t i = 0; i < w.forward.tree_mask.numel(); ++i) words[i] = words[i] * 5 + turn;
    copy_bytes(there.tree_mask, w.forward.tree_mask);
    cuda::synchronize();
    graph.launch(stream);
    stream.synchronize();
    copy_bytes(w.forward.out, there.out);
    copy_bytes(w.forward.lse, there.lse);
    EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
  }
}

// Replays read the tensors of expressions that are on the device by then; their values decide which
// tiles are skipped.
TEST_F(Graphs, TensorsOfExpressionsChangeBetweenReplays) {
  using namespace symbols;  // NOLINT(google-build-using-namespace)
  constexpr int64_t kTokens = 700;
  const TensorSymbol doc("doc", DType::kI32, 2);
  const Dense ids(DType::kI32, {2, kTokens});
  std::vector<double> of(2 * kTokens);
  const auto begin_documents = [&](int64_t turn) {
    for (int64_t i = 0; i < 2 * kTokens; ++i)
      of[i] = static_cast<double>(turn == 2 ? i * 7 % 5 : (i % kTokens + 50 * turn) / 150);
    write(ids.tensor(), of);
  };
  begin_documents(0);
  for (const bool deterministic : {false, true}) {
    const Stream stream;
    Workload w({.dtype = DType::kBF16,
                .batch = 2,
                .sq = kTokens,
                .sk = kTokens,
                .hq = 4,
                .hk = 2,
                .d = 64,
                .dv = 64},
               1);
    w.options.deterministic = deterministic;
    w.options.mask_mod = doc(b, q) == doc(b, k);
    w.mask_value = [&](const ScorePlace& p) {
      return of[p.b * kTokens + p.q] == of[p.b * kTokens + p.k];
    };
    w.forward.tensors = w.backward.tensors = {{"doc", ids.tensor()}};
    EngineMemory memory("cuda");
    const ForwardTensors forward = memory.at(w.forward);
    const BackwardTensors backward = memory.at(w.backward);
    const Plan forward_plan = fulgur::plan(forward, w.options);
    const Plan backward_plan = fulgur::plan(backward, w.options);
    const Graph graph(stream, [&] {
      forward_plan.run(forward, stream.run());
      backward_plan.run(backward, stream.run());
    });
    for (int64_t turn = 0; turn < 4; ++turn) {
      SCOPED_TRACE(turn);
      begin_documents(turn);
      w.seal();
      memory.send();
      cuda::synchronize();
      graph.launch(stream);
      stream.synchronize();
      memory.bring_back();
      const Expected e = expect(w);
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(backward_is_right(w, e));
    }
  }
}

// The same for groups of sequences that share prefixes: each replay divides them by its own
// lengths.
TEST_F(Graphs, SharedPrefixesChangeBetweenReplays) {
  const Stream stream;
  Workload w({.dtype = DType::kBF16,
              .batch = 4,
              .sq = 2,
              .sk = 150,
              .hq = 4,
              .hk = 2,
              .mask = causal(),
              .sinks = true},
             1);
  const CacheShape shape{CacheShape::Order::kNhd, CacheShape::Index::kTable, 16};
  Shared shared(w, shape, {0, 4, 4}, {147, 0});
  const Expected e = expect_forward(w);
  EngineMemory memory("cuda");
  const ForwardTensors there = memory.at(shared.forward);
  const Plan plan = fulgur::plan(there, w.options);
  EXPECT_TRUE(plan.details().has("prefix"));
  const Graph graph(stream, [&] { plan.run(there, stream.run()); });
  struct Division {
    std::vector<double> groups, lens;
  };
  for (const Division& division : {Division{{0, 4, 4}, {147, 0}}, Division{{0, 1, 4}, {10, 130}},
                                   Division{{0, 4, 4}, {0, 0}}, Division{{0, 2, 4}, {60, 140}}}) {
    write(shared.forward.prefix_groups, division.groups);
    write(shared.forward.prefix_lens, division.lens);
    copy_bytes(there.prefix_groups, shared.forward.prefix_groups);
    copy_bytes(there.prefix_lens, shared.forward.prefix_lens);
    cuda::synchronize();
    graph.launch(stream);
    stream.synchronize();
    copy_bytes(w.forward.out, there.out);
    copy_bytes(w.forward.lse, there.lse);
    EXPECT_TRUE(forward_is_right(w, e));
  }
}

// Replays read the seed and offset that are on the device by then, forward and backward.
TEST_F(Graphs, RandomNumbersChangeBetweenReplays) {
  const Stream stream;
  Workload w({.dtype = DType::kBF16,
              .batch = 2,
              .sq = 150,
              .sk = 200,
              .hq = 4,
              .hk = 2,
              .mask = causal(),
              .dropout = 0.25},
             1);
  Dense state(DType::kI64, {2});
  w.forward.rng_state = w.backward.rng_state = state;
  EngineMemory memory("cuda");
  const ForwardTensors forward = memory.at(w.forward);
  const BackwardTensors backward = memory.at(w.backward);
  const Plan forward_plan = plan(forward, w.options), backward_plan = plan(backward, w.options);
  const Graph graph(stream, [&] {
    forward_plan.run(forward, stream.run());
    backward_plan.run(backward, stream.run());
  });
  for (const auto& [seed, offset] :
       {std::pair<uint64_t, uint64_t>{1, 0}, {1, 1}, {UINT64_MAX, uint64_t{1} << 63}, {1, 0}}) {
    SCOPED_TRACE("seed " + std::to_string(seed) + ", offset " + std::to_string(offset));
    const uint64_t numbers[] = {seed, offset};
    std::memcpy(state.tensor().data, numbers, sizeof numbers);
    w.seal();
    memory.send();
    cuda::synchronize();
    graph.launch(stream);
    stream.synchronize();
    memory.bring_back();
    w.run_options = {.dropout_seed = seed, .dropout_offset = offset};  // what the reference knows
    const Expected e = expect(w);
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

}  // namespace
}  // namespace fulgur::test

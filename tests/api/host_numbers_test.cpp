// Lengths, slopes and sinks in the host's memory, on every engine: with tensors on a device, too.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <deque>
#include <type_traits>

#include "appended.h"
#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

using Bits = std::vector<std::byte>;

/// Which numbers lie on the host.
enum Which : unsigned {
  kCuQ = 1,
  kCuK = 2,
  kUsed = 4,
  kLeftpad = 8,
  kSlopes = 16,
  kSinks = 32,
  kPositions = 64,
  kAll = 127
};

constexpr int64_t kGap = 3;  // between the slopes of two sequences

/// A call in an engine's memory, some of whose numbers lie in arrays of the host.
template <class Tensors>
class HostCall {
 public:
  HostCall(const std::string& engine, const Tensors& t, unsigned which = kAll)
      : memory_(engine), there_(memory_.at(t)) {
    if (which & kCuQ) copy(t.cu_seqlens_q, there_.cu_seqlens_q);
    if constexpr (std::is_same_v<Tensors, AppendTensors>) {
      if (which & kCuK) copy(t.cu_seqlens_k_new, there_.cu_seqlens_k_new);
      if (which & kUsed) copy(t.cache_seqlens, there_.cache_seqlens);
      if (which & kPositions) copy(t.rotary_seqlens, there_.rotary_seqlens);
    } else {
      if (which & kCuK) copy(t.cu_seqlens_k, there_.cu_seqlens_k);
      if (which & kUsed) copy(t.seqused_q, there_.seqused_q);
      if (which & kUsed) copy(t.seqused_k, there_.seqused_k);
      if constexpr (std::is_same_v<Tensors, ForwardTensors>) {
        if (which & kLeftpad) copy(t.leftpad_k, there_.leftpad_k);
      }
      if (which & kSlopes) copy(t.alibi_slopes, there_.alibi_slopes);
      if (which & kSinks) copy(t.sinks, there_.sinks);
    }
  }
  const Tensors& tensors() const { return there_; }
  /// Runs, and changes the arrays as soon as the run has returned.
  void run(const Plan& plan, const Run& run) {
    plan.run(there_, run);
    finish();
  }
  /// The same of a call without a plan.
  void append(const Options& options) {
    fulgur::append(there_, options);
    finish();
  }
  /// The message of a run that fails, which must not write.
  std::string refused(const Plan& plan) {
    return message_of_failing([&] { plan.run(there_); });
  }
  std::string refused(const Options& options) {
    return message_of_failing([&] { fulgur::append(there_, options); });
  }
  int32_t* array(size_t i) { return arrays_.at(i).data(); }

 private:
  void finish() {
    for (auto& array : arrays_) std::fill(array.begin(), array.end(), -7777);
    memory_.bring_back();
  }
  template <class Call>
  std::string message_of_failing(Call call) {
    const std::string message = message_of(call);
    memory_.bring_back();
    return message;
  }
  void copy(const Tensor& from, Tensor& to) {
    if (!from.given()) return;
    const Bits values = bits(from);
    const int64_t row = from.shape[from.rank - 1], rows = from.numel() / row;
    auto& array = arrays_.emplace_back(from.numel() + (rows - 1) * kGap, -7777);
    for (int64_t i = 0; i < rows; ++i) {
      std::memcpy(array.data() + i * (row + kGap), values.data() + i * row * 4, row * 4);
    }
    to = from;
    to.data = array.data();
    if (to.rank == 2) to.strides[0] = row + kGap;
  }

  EngineMemory memory_;
  Tensors there_;
  std::deque<std::vector<int32_t>> arrays_;
};

class HostMetadata : public EveryEngine {
 protected:
  /// A workload for this engine, which gives the same bits in every run.
  void prepare(Workload& w) const {
    w.options.engine = engine();
    w.options.deterministic = true;
  }
  void prepare(Appended& a) const {
    prepare(a.w);
    a.w.options.mask = a.given.c.mask;
  }
  /// Whether both passes give the same bits when these numbers of the call, and no others, are on
  /// the host.
  void expect_the_bits_with(Workload& w, const std::vector<unsigned>& all) const;
};

std::vector<Bits> forward_bits(const Workload& w) {
  return {bits(w.forward.out), bits(w.forward.lse)};
}
std::vector<Bits> backward_bits(const Workload& w) {
  std::vector<Bits> all = {bits(w.backward.dq), bits(w.backward.dk), bits(w.backward.dv)};
  if (w.backward.dsinks.given()) all.push_back(bits(w.backward.dsinks));
  return all;
}

void HostMetadata::expect_the_bits_with(Workload& w, const std::vector<unsigned>& all) const {
  const auto forward = forward_bits(w), backward = backward_bits(w);
  const Options longest = EngineMemory(engine()).options(w.forward, w.options);
  for (const unsigned which : all) {
    SCOPED_TRACE(which);
    w.seal();
    HostCall<ForwardTensors> call(engine(), w.forward, which);
    call.run(plan(call.tensors(), longest), {});
    EXPECT_EQ(forward_bits(w), forward);
    HostCall<BackwardTensors> gradient(engine(), w.backward, which);
    gradient.run(plan(gradient.tensors(), longest), {});
    EXPECT_EQ(backward_bits(w), backward);
    EXPECT_TRUE(w.check_memory());
  }
}

// Prefill and decoding, packed and not.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const bool seqused : {false, true}) {
    for (const Mask& mask : {full(), causal()}) {
      all.push_back({.dtype = DType::kBF16,
                     .sq = 150,
                     .sk = 170,
                     .hq = 2,
                     .hk = 1,
                     .mask = mask,
                     .layout = Layout::kPacked,
                     .seqused_q = seqused,
                     .seqused = seqused});
    }
  }
  for (const int64_t sq : {2, 100}) {
    all.push_back({.dtype = DType::kBF16,
                   .batch = 3,
                   .sq = sq,
                   .sk = 200,
                   .hq = 2,
                   .hk = 1,
                   .mask = causal(),
                   .seqused_q = sq > 2,
                   .seqused = true});
  }
  return all;
}

TEST_P(HostMetadata, GiveTheBitsOfLengthsBesideTheTensors) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    prepare(w);
    if (!runs(w)) continue;
    std::vector<unsigned> all;
    for (unsigned which = 1; which <= (kCuQ | kCuK | kUsed); ++which) {
      if ((which & kUsed && !c.seqused) || (which & (kCuQ | kCuK) && !c.packed())) continue;
      all.push_back(which);
    }
    expect_the_bits_with(w, all);
  }
}

// One slope of a head, and one of each head of each sequence, whose rows lie apart.
TEST_P(HostMetadata, GiveTheBitsOfSlopesAndSinksBesideTheTensors) {
  for (const Alibi alibi : {Alibi::kHeads, Alibi::kBatchHeads}) {
    for (const bool packed : {false, true}) {
      for (const int64_t sq : {2, 100}) {
        const Case c{.dtype = DType::kBF16,
                     .batch = 3,
                     .sq = sq,
                     .sk = 130,
                     .hq = 2,
                     .hk = 1,
                     .mask = causal(),
                     .layout = packed ? Layout::kPacked : Layout::kBshd,
                     .alibi = alibi,
                     .seqused = packed,
                     .sinks = true};
        SCOPED_TRACE(c.name());
        Workload w(c, 1);
        prepare(w);
        if (!runs(w)) continue;
        expect_the_bits_with(w, {kSlopes, kSinks, kSlopes | kSinks, kAll});
      }
    }
  }
}

// With the caller's workspace. The longest sequences are found from the lengths on the host.
TEST_P(HostMetadata, AreReadForTheLongest) {
  Workload w(cases()[3], 1);
  prepare(w);
  if (!runs(w)) return;
  const auto forward = forward_bits(w);
  w.seal();
  HostCall<ForwardTensors> call(engine(), w.forward);
  const Plan plan = fulgur::plan(call.tensors(), w.options);
  EXPECT_GT(plan.flops(), 0);
  Dense workspace(DType::kI32, {plan.workspace().bytes / 4 + 65});
  std::memset(workspace.storage().bytes().data(), 0, workspace.storage().bytes().size());
  EngineMemory memory(engine());
  const Tensor there = memory.at(workspace.tensor());
  const auto begin = reinterpret_cast<uintptr_t>(there.data);
  const auto alignment = static_cast<uintptr_t>(plan.workspace().alignment);
  void* const aligned = reinterpret_cast<void*>((begin + alignment - 1) / alignment * alignment);
  call.run(plan, {.workspace = {aligned, plan.workspace().bytes}});
  EXPECT_EQ(forward_bits(w), forward);
}

TEST_P(HostMetadata, OfCaches) {
  using Index = CacheShape::Index;
  for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
    for (const bool leftpad : {false, true}) {
      const CacheShape shape{.index = index, .page = 16, .leftpad = leftpad};
      SCOPED_TRACE(shape.name());
      Workload w({.dtype = DType::kBF16,
                  .batch = 3,
                  .sq = 3,
                  .sk = 150,
                  .hq = 8,
                  .hk = 2,
                  .mask = causal(),
                  .seqused = true},
                 1);
      prepare(w);
      Cached cached(w, shape, 2);
      if (!computes([&] { cached.run_forward(); })) continue;
      const auto right = forward_bits(w);
      for (const unsigned which : {kUsed, kLeftpad, kAll}) {
        if (which == kLeftpad && !leftpad) continue;
        w.seal();
        HostCall<ForwardTensors> call(engine(), cached.forward, which);
        call.run(plan(call.tensors(), w.options), {});
        EXPECT_EQ(forward_bits(w), right) << which;
      }
    }
  }
}

// More of them than one launch takes.
TEST_P(HostMetadata, OfManySequences) {
  std::vector<Rows> lengths;
  for (int64_t b = 0; b < 400; ++b) lengths.push_back({0, 0, b % 3, b % 5});
  Workload w({.dtype = DType::kBF16,
              .sq = 2,
              .sk = 4,
              .layout = Layout::kPacked,
              .seqused_q = true,
              .seqused = true},
             1, lengths);
  prepare(w);
  if (!runs(w)) return;
  const auto forward = forward_bits(w), backward = backward_bits(w);
  w.seal();
  HostCall<ForwardTensors> call(engine(), w.forward);
  call.run(plan(call.tensors(), w.options), {});
  EXPECT_EQ(forward_bits(w), forward);
  EXPECT_TRUE(forward_is_right(w, expect_forward(w)));
  HostCall<BackwardTensors> gradient(engine(), w.backward);
  gradient.run(plan(gradient.tensors(), w.options), {});
  EXPECT_EQ(backward_bits(w), backward);
}

// Each is named as on the CPU, and nothing is written.
TEST_P(HostMetadata, AreCheckedInEveryRun) {
  Workload w({.dtype = DType::kBF16,
              .sq = 50,
              .sk = 60,
              .hq = 2,
              .hk = 1,
              .layout = Layout::kPacked,
              .seqused_q = true,
              .seqused = true},
             1, {{0, 0, 50, 60}, {0, 0, 0, 10}, {0, 0, 20, 60}});
  prepare(w);
  if (!runs(w)) return;
  const struct {
    size_t array, at;
    int32_t value;
    const char* message;
  } wrong[] = {
      {0, 0, -1, "cu_seqlens_q: starts with -1, want >= 0"},
      {0, 2, 10, "cu_seqlens_q: decreases at 2: 10 after 50, want non-decreasing"},
      {0, 3, 5000, "cu_seqlens_q: ends with 5000, want at most "},
      {1, 0, -1, "cu_seqlens_k: starts with -1, want >= 0"},
      {1, 1, 0, "cu_seqlens_k: has a sequence of "},
      {2, 0, -7, "seqused_q: got -7 at 0, want 0 to 50"},
      {2, 2, 21, "seqused_q: got 21 at 2, want 0 to 20"},
      {3, 1, -1, "seqused_k: got -1 at 1, want 0 to "},
      {3, 2, 5000, "seqused_k: got 5000 at 2, want 0 to "},
  };
  w.seal();
  for (const auto& [array, at, value, message] : wrong) {
    HostCall<ForwardTensors> call(engine(), w.forward);
    HostCall<BackwardTensors> gradient(engine(), w.backward);
    const Plan plan = fulgur::plan(call.tensors(), w.options);
    const Plan plan_backward = fulgur::plan(gradient.tensors(), w.options);
    call.array(array)[at] = gradient.array(array)[at] = value;
    const std::string got = call.refused(plan);
    EXPECT_EQ(got.find(message), 0u) << got;
    EXPECT_EQ(gradient.refused(plan_backward), got);
    EXPECT_TRUE(w.nothing_written());
  }
}

// Even and ragged new rows, with queries and without, in every kind of cache.
std::vector<AppendCase> append_cases() {
  using Index = CacheShape::Index;
  std::vector<AppendCase> all;
  for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
    for (const auto layout : {Layout::kBshd, Layout::kPacked}) {
      for (const int64_t rotary_dim : {0, 16}) {
        all.push_back({.c = {.dtype = DType::kBF16,
                             .batch = layout == Layout::kPacked ? 4 : 3,
                             .sq = 3,
                             .sk = 20,
                             .hq = 2,
                             .hk = 1,
                             .d = 16,
                             .mask = causal(),
                             .layout = layout},
                       .shape = {.index = index, .page = index == Index::kBatch ? 0 : 8},
                       .rotary_dim = rotary_dim,
                       .positions = index != Index::kLists});
      }
    }
  }
  return all;
}

std::vector<Bits> appended_bits(const AppendTensors& t) {
  return {bits(t.k_cache), bits(t.v_cache), bits(t.q_out)};
}

TEST_P(HostMetadata, OfAppend) {
  for (const AppendCase& c : append_cases()) {
    SCOPED_TRACE(c.name());
    Appended expected(c, 1);
    prepare(expected);
    if (!computes([&] { expected.run(); })) continue;
    const auto want = appended_bits(expected.args);
    for (const unsigned which : {+kCuQ, +kCuK, +kUsed, +kPositions, kCuK | kUsed, +kAll}) {
      SCOPED_TRACE(which);
      Appended a(c, 1);
      prepare(a);
      HostCall<AppendTensors> call(engine(), a.args, which);
      call.append(a.w.options);
      EXPECT_EQ(appended_bits(a.args), want);
      EXPECT_TRUE(a.check());
    }
  }
}

// More of them than one launch takes.
TEST_P(HostMetadata, OfAnAppendToManySequences) {
  AppendCase c = append_cases()[1];
  c.c.batch = 600;
  c.c.sk = 5;
  Appended a(c, 1);
  prepare(a);
  HostCall<AppendTensors> call(engine(), a.args);
  if (!computes([&] { call.append(a.w.options); })) return;
  EXPECT_TRUE(a.check());
}

TEST_P(HostMetadata, AreCheckedInEveryAppend) {
  const AppendCase c = append_cases()[3];
  const struct {
    size_t array, at;
    int32_t value;
    const char* message;
  } wrong[] = {
      {0, 0, -1, "cu_seqlens_q: starts with -1, want >= 0"},
      {0, 4, 5000, "cu_seqlens_q: ends with 5000, want at most "},
      {1, 1, 5000, "cu_seqlens_k_new: decreases at 2: "},
      {1, 4, 5000, "cu_seqlens_k_new: ends with 5000, want at most "},
      {2, 1, -1, "cache_seqlens: got -1 at 1, want >= 0"},
      {2, 2, 5000, "cache_seqlens: got 5000 at 2, with "},
      {3, 1, -1, "rotary_seqlens: got -1 at 1, want >= 0"},
      {3, 0, 5000, "cos: got "},
  };
  for (const auto& [array, at, value, message] : wrong) {
    Appended a(c, 1);
    prepare(a);
    HostCall<AppendTensors> call(engine(), a.args);
    call.array(array)[at] = value;
    const std::string got = call.refused(a.w.options);
    EXPECT_EQ(got.find(message), 0u) << got;
    EXPECT_TRUE(a.nothing_written());
  }
}

FULGUR_EVERY_ENGINE(HostMetadata);

}  // namespace
}  // namespace fulgur::test

// Shared prefixes: the same as without them, and read through the pages of a group's first sequence
// alone. The keys of the others' prefixes are poison, which the reference, that knows of no groups,
// does not see.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <functional>
#include <limits>
#include <optional>
#include <random>
#include <string>

#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"
#include "rejected.h"
#include "shared.h"

namespace fulgur::test {
namespace {

using Order = CacheShape::Order;
using Index = CacheShape::Index;

class SharedPrefix : public EveryEngine {};

/// Whether prefixes are read once for all sequences of a group.
bool shares(const Details& plan) { return plan.has("prefix"); }

// Queries and keys of seven sequences: of one group of three, of one alone, and of three that begin
// with fewer keys. Their lengths are all different.
std::vector<Rows> ragged(int64_t sq) {
  std::vector<Rows> all;
  for (int64_t b = 0; b < 7; ++b) all.push_back({0, 0, b == 5 ? 0 : 1 + b % sq, 320 + 37 * b});
  return all;
}

struct Setting {
  Case c;
  std::vector<int64_t> groups{0, 3, 4, 4, 7}, lens{307, 300, 9, 131};
  std::vector<Rows> lengths{};
};

// Rows to decode, alone and with others of their group, and more; all that a rest may have.
std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const Case one{.dtype = dtype,
                   .batch = 7,
                   .sq = 1,
                   .sk = 320,
                   .hq = 8,
                   .hk = 2,
                   .d = 64,
                   .dv = 64,
                   .mask = causal(),
                   .sinks = dtype == DType::kF16};
    all.push_back({one});
    Case few = one;
    few.sq = 4;
    few.hk = 8;
    few.d = 80;
    few.dv = 40;
    few.softcap = dtype == DType::kF32 ? 5 : 0;
    all.push_back({few});
    Case packed = few;
    packed.hk = 2;
    packed.layout = Layout::kPacked;
    packed.sinks = true;
    all.push_back({.c = packed, .lengths = ragged(4)});
    Case tree = one;
    tree.sq = 9;
    tree.mask = full();
    tree.tree = dtype == DType::kBF16 ? Tree::kAncestors : Tree::kRandom;
    all.push_back({tree});
  }
  return all;
}

TEST_P(SharedPrefix, FollowsTheDefinition) {
  const CacheShape shapes[] = {{Order::kNhd, Index::kTable, 16},
                               {Order::kHnd, Index::kLists, 64},
                               {Order::kInterleaved, Index::kTable, 64},
                               {Order::kNhd, Index::kLists, 3},
                               {Order::kNhd, Index::kTable, 1}};
  const std::vector<Setting> all = settings();
  for (size_t i = 0; i < all.size(); ++i) {
    const CacheShape& shape = shapes[i % std::size(shapes)];
    SCOPED_TRACE(all[i].c.name() + " " + shape.name());
    Workload w(all[i].c, 31, all[i].lengths);
    w.options.engine = engine();
    Shared shared(w, shape, all[i].groups, all[i].lens);
    const Expected e = expect_forward(w);
    Details plan;
    if (!computes([&] { plan = shared.details(w.options); })) continue;
    EXPECT_EQ(shares(plan), engine() != "reference") << plan.json();
    if (shares(plan)) shared.poison();
    w.seal();
    compute(shared.forward, w.options);
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(w.check_memory());
  }
}

// One group of all sequences, and rows to decode: bf16, so that every engine shares.
Case one_group(int64_t batch = 4) {
  return {.dtype = DType::kBF16,
          .batch = batch,
          .sq = 2,
          .sk = 150,
          .hq = 4,
          .hk = 2,
          .mask = causal(),
          .sinks = true};
}

TEST_P(SharedPrefix, GroupsAndLengthsChangeBetweenRunsOfAPlan) {
  Workload w(one_group(), 32);
  w.options.engine = engine();
  Shared shared(w, {Order::kNhd, Index::kTable, 16}, {0, 4, 4}, {147, 0});
  const Expected e = expect_forward(w);
  EngineMemory memory(engine());
  const ForwardTensors there = memory.at(shared.forward);
  std::optional<Plan> plan;
  if (!computes([&] { plan.emplace(fulgur::plan(there, w.options)); })) return;
  // With the plan's own memory, and with that of the caller.
  const WorkspaceNeed need = plan->workspace();
  Dense room(DType::kI64, {(need.bytes + 2 * need.alignment) / 8});
  write(room, std::vector<double>(static_cast<size_t>(room.tensor().numel())));
  fulgur::Run own = w.run_options;
  const auto at = reinterpret_cast<uintptr_t>(memory.at(room).data);
  const auto alignment = static_cast<uintptr_t>(need.alignment);
  own.workspace = {reinterpret_cast<void*>((at + alignment - 1) / alignment * alignment),
                   need.bytes};
  struct Division {
    std::vector<double> groups, lens;
  };
  for (const Division& division : {Division{{0, 4, 4}, {147, 0}}, Division{{0, 1, 4}, {10, 130}},
                                   Division{{0, 0, 4}, {150, 147}}, Division{{0, 4, 4}, {0, 0}},
                                   Division{{0, 2, 4}, {60, 128}}}) {
    SCOPED_TRACE(division.groups[1]);
    write(shared.forward.prefix_groups, division.groups);
    write(shared.forward.prefix_lens, division.lens);
    for (const bool of_caller : {false, true}) {
      w.seal();
      memory.send();
      plan->run(there, of_caller ? own : w.run_options);
      memory.bring_back();
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(w.check_memory());
    }
  }
}

// With tensors on a GPU: each number may lie on the host, where those that are wrong are named.
TEST_P(SharedPrefix, NumbersMayLieOnTheHost) {
  if (device_of(engine()).type == DeviceType::kCpu) GTEST_SKIP() << "of tensors on a GPU";
  const Setting setting = settings()[2];  // packed
  Workload w(setting.c, 36, setting.lengths);
  w.options.engine = engine();
  Shared shared(w, {Order::kNhd, Index::kTable, 16}, setting.groups, setting.lens);
  const Expected e = expect_forward(w);
  shared.poison();
  w.seal();
  Tensor ForwardTensors::*const kNumbers[] = {
      &ForwardTensors::prefix_groups, &ForwardTensors::prefix_lens, &ForwardTensors::seqused_k,
      &ForwardTensors::cu_seqlens_q, &ForwardTensors::sinks};
  for (unsigned on_host = 1; on_host < 32; on_host += 3) {
    SCOPED_TRACE(on_host);
    EngineMemory memory(engine());
    ForwardTensors there = memory.at(shared.forward);
    for (size_t i = 0; i < 5; ++i) {
      if ((on_host >> i & 1) != 0) there.*kNumbers[i] = shared.forward.*kNumbers[i];
    }
    const Options options = memory.options(shared.forward, w.options);
    if (!computes([&] { forward(there, options); })) return;
    memory.bring_back();
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(w.check_memory());
    if ((on_host & 2) == 0) continue;
    const std::vector<double> lens = read(shared.forward.prefix_lens);
    write(shared.forward.prefix_lens, std::vector<double>{1, -1, 1, 1});
    EXPECT_EQ(message_of([&] { forward(there, options); }).find("prefix_lens: got -1 at 1, want "),
              0u);
    write(shared.forward.prefix_lens, lens);
  }
}

// On a device the lengths of prefixes are not checked: whatever they are, only the outputs are
// written, and the next run is right.
TEST_P(SharedPrefix, NumbersOnTheDeviceMayBeAnything) {
  if (device_of(engine()).type == DeviceType::kCpu) GTEST_SKIP() << "of tensors on a GPU";
  for (const Setting& setting : {settings()[0], settings()[2]}) {
    for (const Index index : {Index::kTable, Index::kLists}) {
      SCOPED_TRACE(setting.c.name());
      Workload w(setting.c, 37, setting.lengths);
      w.options.engine = engine();
      Shared shared(w, {Order::kNhd, index, 16}, setting.groups, setting.lens);
      const Expected e = expect_forward(w);
      EngineMemory memory(engine());
      const ForwardTensors there = memory.at(shared.forward);
      const Options options = memory.options(shared.forward, w.options);
      std::mt19937_64 random(38);
      const std::vector<double> kValues = {INT_MIN, -1, 0, 1, 3, 5, 7, 8, 400, INT_MAX};
      for (const Tensor& t :
           {shared.forward.prefix_groups, shared.forward.prefix_lens, shared.forward.seqused_k}) {
        for (int i = 0; i < 3; ++i) {
          const std::vector<double> right = read(t);
          std::vector<double> wrong = right;
          for (double& x : wrong) x = kValues[random() % kValues.size()];
          write(t, wrong);
          w.seal();
          memory.send();
          if (!computes([&] { forward(there, options); })) return;
          memory.bring_back();
          EXPECT_TRUE(w.check_memory());
          write(t, right);
          w.seal();
          memory.send();
          forward(there, options);
          memory.bring_back();
          EXPECT_TRUE(forward_is_right(w, e));
        }
      }
    }
  }
}

// An infinite sink takes all of the weight, one of -inf none.
TEST_P(SharedPrefix, SinksMayBeInfinite) {
  Workload w(one_group(), 33);
  w.options.engine = engine();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  write(w.forward.sinks, std::vector<double>{kInfinity, -kInfinity, 0, 3});
  Shared shared(w, {Order::kNhd, Index::kTable, 16}, {0, 4}, {140});
  const Expected e = expect_forward(w);
  w.seal();
  if (!computes([&] { compute(shared.forward, w.options); })) return;
  EXPECT_TRUE(forward_is_right(w, e));
}

// Where prefixes are not read once, plans say why, and the bits are those without them.
TEST_P(SharedPrefix, SaysWhereItIsOfNoUse) {
  if (engine() == "reference") return;  // it never does
  const Dense leftpad(DType::kI32, {4}), used(DType::kI32, {4}), slopes(DType::kF32, {4});
  write(leftpad, std::vector<double>{1, 0, 2, 0});
  write(used, std::vector<double>{1, 2, 0, 2});
  write(slopes, std::vector<double>{1, 0.5, 0.25, 0.125});
  const Dense bias(DType::kF32, {1, 4, 1, 1000});  // of more keys than there are
  std::vector<double> numbers(4000);
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<double>(i % 7);
  write(bias, numbers);
  struct Change {
    const char* why;
    std::function<void(Options&, ForwardTensors&)> change;
    Case c = one_group();
  };
  Case rows = one_group(), padded = one_group();
  rows.sq = 65;
  padded.layout = Layout::kPadded;
  const Change changes[] = {
      {"`invariant`", [](Options& o, ForwardTensors&) { o.invariant = true; }},
      {"the mask hides", [](Options& o, ForwardTensors&) { o.mask = window(400, 0); }},
      {"the mask hides", [](Options& o, ForwardTensors&) { o.mask = chunked(64); }},
      {"aligned top-left", [](Options& o, ForwardTensors&) { o.mask = top_left(causal()); }},
      {"ALiBi", [&](Options&, ForwardTensors& t) { t.alibi_slopes = slopes; }},
      {"a bias",
       [&](Options& o, ForwardTensors& t) {
         t.bias = bias;
         o.max_seqlen_k = 1000;
       }},
      {"dropout", [](Options& o, ForwardTensors&) { o.dropout_p = 0.1; }},
      {"leftpad_k", [&](Options&, ForwardTensors& t) { t.leftpad_k = leftpad; }},
      {"seqused_q", [&](Options&, ForwardTensors& t) { t.seqused_q = used; }},
      {"the rows of page_table", [](Options&, ForwardTensors& t) { t.page_table.strides[0] = 0; }},
      {"the ids of a row", [](Options&, ForwardTensors& t) { t.page_table.strides[1] = 0; }},
      {"at most", [](Options&, ForwardTensors& t) { t.page_table.shape[1] = 10; }},
      {"130 rows of a kv head", [](Options&, ForwardTensors&) {}, rows},
      {"the sequences of q", [](Options&, ForwardTensors&) {}, padded},
  };
  for (const Change& change : changes) {
    SCOPED_TRACE(change.why);
    Workload w(change.c, 34);
    w.options.engine = engine();
    Shared shared(w, {Order::kNhd, Index::kTable, 16}, {0, 4}, {80});
    change.change(w.options, shared.forward);
    Details plan;
    if (!computes([&] { plan = shared.details(w.options); })) continue;
    EXPECT_FALSE(shares(plan)) << plan.json();
    EXPECT_TRUE(rejects(plan, "shared prefixes read once: ", change.why)) << plan.json();
    w.seal();
    compute(shared.forward, w.options);
    const auto out = bits(w.forward.out), lse = bits(w.forward.lse);
    shared.forward.prefix_groups = shared.forward.prefix_lens = {};
    w.seal();
    compute(shared.forward, w.options);
    EXPECT_EQ(bits(w.forward.out), out);
    EXPECT_EQ(bits(w.forward.lse), lse);
  }
}

// The bound decides: what it has no room for is not divided.
TEST_P(SharedPrefix, NeedsRoom) {
  Workload w(one_group(), 35);
  w.options.engine = engine();
  Shared shared(w, {Order::kNhd, Index::kTable, 16}, {0, 4}, {140});
  const Expected e = expect_forward(w);
  EngineMemory memory(engine());
  const ForwardTensors there = memory.at(shared.forward);
  std::optional<Plan> plan;
  if (!computes([&] { plan.emplace(fulgur::plan(there, w.options)); })) return;
  const int64_t wants = plan->workspace().bytes;
  if (!shares(plan->details())) return;
  for (const int64_t bound : {wants, wants - 1}) {
    w.options.max_workspace = bound;
    const Details details = shared.details(w.options);
    EXPECT_EQ(shares(details), bound == wants) << details.json();
    EXPECT_EQ(rejects(details, "shared prefixes read once: ", std::to_string(wants)), bound < wants)
        << details.json();
    w.seal();
    compute(shared.forward, w.options);
    EXPECT_TRUE(forward_is_right(w, e));
  }
}

FULGUR_EVERY_ENGINE(SharedPrefix);

}  // namespace
}  // namespace fulgur::test

// Attention over caches: bit for bit as over contiguous keys, whatever the layout is, who the
// neighbours are and what the rest of the cache holds. attention_test runs the case list over them.
#include <gtest/gtest.h>

#include <algorithm>
#include <climits>
#include <limits>
#include <optional>

#include "cached.h"
#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

using Order = CacheShape::Order;
using Index = CacheShape::Index;

class Cache : public EveryEngine {};

struct Bits {
  std::vector<std::byte> out, lse;
  bool operator==(const Bits&) const = default;
};

Bits bits_of(const ForwardTensors& t) { return {bits(t.out), bits(t.lse)}; }

// The bits of a sequence: its rows of out, and of lse.
Bits bits_of(const Workload& w, size_t b) {
  const Rows& s = w.sequences[b];
  Tensor out = w.forward.out, lse = w.forward.lse;
  const auto row = static_cast<int64_t>(b);
  const int dim = w.c.packed() ? 0 : 1;
  const int64_t at = w.c.packed() ? s.q_begin * out.strides[0] : row * out.strides[0];
  out.data = static_cast<std::byte*>(out.data) + at * size_of(out.dtype);
  out.shape[dim] = s.sq;
  const int64_t lse_at = w.c.packed() ? s.q_begin : row * lse.strides[0];
  lse.data = static_cast<std::byte*>(lse.data) + lse_at * size_of(lse.dtype);
  lse.shape[lse.rank - 1] = s.sq;
  if (!w.c.packed()) out.shape[0] = lse.shape[0] = 1;
  return {bits(out), bits(lse)};
}

// A batch to decode with one of more rows than decoding takes.
std::vector<Case> serving_cases() {
  std::vector<Case> all;
  for (const DType dtype : {DType::kBF16, DType::kF32, DType::kF16}) {
    for (const int64_t sq : {1, 40}) {
      for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
        all.push_back({.dtype = dtype,
                       .batch = 4,
                       .sq = sq,
                       .sk = 700,
                       .hq = 8,
                       .hk = 2,
                       .d = 40,
                       .dv = 24,
                       .mask = causal(),
                       .layout = layout,
                       .seqused_q = dtype == DType::kF16,
                       .seqused = true,
                       .sinks = dtype != DType::kF16});
      }
    }
  }
  // Wide heads whose scores take registers, which decides how many keys the GPU takes at a time.
  for (const double softcap : {0, 5}) {
    all.push_back({.dtype = DType::kBF16,
                   .batch = 2,
                   .sq = 2,
                   .sk = 150,
                   .hq = 4,
                   .hk = 2,
                   .d = 256,
                   .dv = 200,
                   .mask = window(100, 0),
                   .softcap = softcap,
                   .seqused = true});
  }
  // Rows that are not aligned to 16 bytes, so that no kernel loads 16 bytes at a time.
  all.push_back({.dtype = DType::kBF16,
                 .batch = 3,
                 .sq = 3,
                 .sk = 150,
                 .hq = 4,
                 .hk = 2,
                 .d = 20,
                 .dv = 37,
                 .mask = causal(),
                 .seqused = true});
  return all;
}

// The serving cases that take different paths: decoded or not, packed or not, odd sizes.
std::vector<Case> some_serving_cases() {
  const std::vector<Case> all = serving_cases();
  return {all[0], all[3], all[5], all.back()};
}

// The cases take turns: each has a part of the layouts, and all together have them all.
TEST_P(Cache, EveryLayoutGivesTheSameBits) {
  const std::vector<CacheShape> shapes = cache_shapes();
  const std::vector<Case> cases = serving_cases();
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(cases[i].name());
    Workload w(cases[i], 1);
    w.options.engine = engine();
    w.options.invariant = true;
    if (!computes([&] { run_contiguous(w, 5); })) continue;
    const Bits want = bits_of(w.forward);
    for (size_t at = i; at < shapes.size(); at += cases.size()) {
      SCOPED_TRACE(shapes[at].name());
      w.seal();
      Cached cached(w, shapes[at], 2);
      if (!computes([&] { cached.run_forward(); })) break;
      ASSERT_EQ(bits_of(w.forward), want);
    }
  }
}

// More rows than decoding takes, in chunks of a longer context: on GPUs another kernel's.
TEST_P(Cache, PrefillFollowsTheDefinition) {
  for (const bool packed : {false, true}) {
    const Case c{.dtype = packed ? DType::kF16 : DType::kBF16,
                 .batch = 3,
                 .sq = 150,
                 .sk = 300,
                 .hq = 4,
                 .hk = 2,
                 .d = packed ? 128 : 64,
                 .dv = 64,
                 .mask = packed ? window(90, 0) : causal(),
                 .layout = packed ? Layout::kPacked : Layout::kBshd,
                 .seqused_q = !packed,
                 .seqused = true,
                 .sinks = packed};
    Workload w(c, 11);
    w.options.engine = engine();
    const Expected e = expect_forward(w);
    for (const CacheShape shape :
         {CacheShape{Order::kNhd, Index::kTable, 16}, CacheShape{Order::kHnd, Index::kLists, 64},
          CacheShape{Order::kInterleaved, Index::kTable, 256},
          CacheShape{Order::kNhd, Index::kTable, 3},
          CacheShape{Order::kNhd, Index::kLists, 24, true}}) {
      SCOPED_TRACE(c.name() + " " + shape.name());
      w.seal();
      Cached cached(w, shape, 12);
      if (!computes([&] { cached.run_forward(); })) break;
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(w.check_memory());
      EXPECT_TRUE(cached.check_memory());
    }
  }
}

// Rows of a kv head, (query, head of its group), from a few to more than a block holds.
TEST_P(Cache, AnyRowsOfAKvHeadFollowTheDefinition) {
  struct Shape {
    int64_t sq, group, d;
    Mask mask;
  };
  for (const Shape& shape :
       {Shape{9, 3, 80, causal()}, Shape{13, 4, 128, causal()}, Shape{23, 5, 128, window(400, 7)},
        Shape{27, 3, 256, Mask{}}, Shape{20, 5, 256, causal()}, Shape{40, 7, 64, causal()},
        Shape{6, 4, 128, chunked(250, causal())}, Shape{17, 2, 64, chunked(300)},
        Shape{6, 4, 128, top_left(window(-1, 200))}}) {
    const Case c = {.dtype = DType::kBF16,
                    .batch = 3,
                    .sq = shape.sq,
                    .sk = 700,
                    .hq = 2 * shape.group,
                    .hk = 2,
                    .d = shape.d,
                    .dv = shape.d,
                    .mask = shape.mask,
                    .seqused = true};
    Workload w(c, 21);
    w.options.engine = engine();
    const Expected e = expect_forward(w);
    for (const CacheShape at :
         {CacheShape{Order::kNhd, Index::kTable, 16}, CacheShape{Order::kNhd, Index::kLists, 24},
          CacheShape{Order::kHnd, Index::kTable, 8}, CacheShape{Order::kHnd, Index::kBatch, 0}}) {
      SCOPED_TRACE(c.name() + " " + at.name());
      w.seal();
      Cached cached(w, at, 22);
      if (!computes([&] { cached.run_forward(); })) break;
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(w.check_memory());
      EXPECT_TRUE(cached.check_memory());
    }
  }
}

TEST_P(Cache, TablesAndLengthsChangeBetweenRunsOfAPlan) {
  for (const Case& c : some_serving_cases()) {
    for (const CacheShape shape : {CacheShape{Order::kNhd, Index::kTable, 16},
                                   CacheShape{Order::kHnd, Index::kLists, 3, true},
                                   CacheShape{Order::kNhd, Index::kBatch, 0, true}}) {
      SCOPED_TRACE(c.name() + " " + shape.name());
      Workload w(c, 3);
      w.options.engine = engine();
      w.options.invariant = true;
      Cached cached(w, shape, 4);
      EngineMemory memory(engine());
      const ForwardTensors there = memory.at(cached.forward);
      std::optional<Plan> plan;
      if (!computes([&] {
            plan.emplace(fulgur::plan(there, memory.options(cached.forward, w.options)));
          })) {
        break;
      }
      const auto run = [&] {
        w.seal();
        memory.send();
        plan->run(there, w.run_options);
        memory.bring_back();
      };
      run();
      const Bits want = bits_of(w.forward);
      const auto before = cached.entries;
      cached.move();
      ASSERT_NE(cached.entries, before);
      run();
      EXPECT_EQ(bits_of(w.forward), want);

      // The longest sequence loses its last key: as a call of its own says.
      std::vector<double> used = read(cached.forward.seqused_k);
      --used[0];
      write(cached.forward.seqused_k, used);
      run();
      const Bits shorter = bits_of(w.forward);
      EXPECT_NE(shorter, want);
      w.seal();
      compute(cached.forward, w.options, w.run_options);
      EXPECT_EQ(bits_of(w.forward), shorter);
    }
  }
}

// Numbers on a device, which are not checked: an invalid one has the effect of some valid one. A
// call with `right` gives the same as one with `wild`.
struct Number {
  Tensor ForwardTensors::*tensor;
  int64_t at;
  double value;
};
struct WildNumber {
  Number wild, right;
};

// Wild numbers of a cache whose sequences have at most `room` rows, and whose entry `zeros` has
// zeros.
std::vector<WildNumber> wild_numbers(const Cached& cached, double room, double zeros) {
  const ForwardTensors& t = cached.forward;
  std::vector<WildNumber> all;
  const auto add = [&](Tensor ForwardTensors::*tensor, int64_t at, double right,
                       std::initializer_list<double> wild) {
    for (const double value : wild) all.push_back({{tensor, at, value}, {tensor, at, right}});
  };
  add(&ForwardTensors::seqused_k, 0, room, {room + 1, INT_MAX});
  add(&ForwardTensors::seqused_k, 1, 0, {-1, INT_MIN});
  if (t.leftpad_k.given()) {
    add(&ForwardTensors::leftpad_k, 0, 0, {-1, INT_MIN});
    add(&ForwardTensors::leftpad_k, 0, read(t.seqused_k)[0], {100000, INT_MAX});
  }
  const auto entries = static_cast<double>(t.k.shape[0]);
  if (t.cache_batch_idx.given()) {
    for (const double row : {-1.0, entries, double{INT_MAX}, double{INT_MIN}}) {
      all.push_back(
          {{&ForwardTensors::cache_batch_idx, 1, row}, {&ForwardTensors::seqused_k, 1, 0}});
    }
    return all;
  }
  const bool lists = t.page_indptr.given();
  const auto first = lists ? static_cast<int64_t>(read(t.page_indptr)[1]) : t.page_table.shape[1];
  for (const int64_t page : {1, 3}) {
    add(&ForwardTensors::page_table, first + page, zeros, {-1, entries, INT_MAX, INT_MIN});
  }
  if (!lists) return all;
  const auto ids = static_cast<double>(t.page_table.shape[0]);
  add(&ForwardTensors::page_indptr, 0, 0, {-3, INT_MIN});
  add(&ForwardTensors::page_indptr, 1, 0, {-1, INT_MIN});
  add(&ForwardTensors::page_indptr, 1, ids, {ids + 1, INT_MAX});
  add(&ForwardTensors::page_indptr, 3, ids, {ids + 1, INT_MAX});
  return all;
}

// An entry of a cache that no sequence has, neither the first nor the last; it becomes zeros.
int64_t entry_of_zeros(const Cached& cached) {
  int64_t free = 1;
  const auto taken = [&](const std::vector<int64_t>& entries) {
    return std::count(entries.begin(), entries.end(), free) > 0;
  };
  while (std::any_of(cached.entries.begin(), cached.entries.end(), taken)) ++free;
  EXPECT_LT(free, cached.forward.k.shape[0] - 1);
  for (Tensor t : {cached.forward.k, cached.forward.v}) {
    t.data = static_cast<std::byte*>(t.data) + free * t.strides[0] * size_of(t.dtype);
    t.shape[0] = 1;
    write(t, std::vector<double>(static_cast<size_t>(t.numel())));
  }
  return free;
}

// By few rows, by many that the decode kernel takes, and by more than that.
TEST_P(Cache, NumbersOnADeviceThatAreWrong) {
  if (device_of(engine()).type == DeviceType::kCpu) GTEST_SKIP() << "the host checks its numbers";
  for (const int64_t sq : {1, 20, 150}) {
    for (const CacheShape shape : {CacheShape{Order::kNhd, Index::kTable, 16},
                                   CacheShape{Order::kHnd, Index::kTable, 3, true},
                                   CacheShape{Order::kNhd, Index::kLists, 16},
                                   CacheShape{Order::kNhd, Index::kBatch, 0, true}}) {
      const Case c{.dtype = DType::kBF16,
                   .batch = 3,
                   .sq = sq,
                   .sk = 200,
                   .hq = 2,
                   .hk = 1,
                   .mask = sq == 20 ? window(150, 3) : causal(),
                   .seqused = true};
      SCOPED_TRACE(c.name() + " " + shape.name());
      Workload w(c, 23);
      w.options.engine = engine();
      // Tables have room for more keys than the longest sequence that is planned for.
      if (shape.index == Index::kTable) w.options.max_seqlen_k = 190;
      const Cached cached(w, shape, 24);
      const auto zeros = static_cast<double>(entry_of_zeros(cached));
      const double room = shape.index == Index::kTable   ? 190
                          : shape.index == Index::kLists ? read(cached.forward.page_indptr)[1] * 16
                                                         : cached.forward.k.shape[1];
      EngineMemory memory(engine());
      const ForwardTensors there = memory.at(cached.forward);
      std::optional<Plan> plan;
      if (!computes([&] { plan.emplace(fulgur::plan(there, w.options)); })) continue;
      const auto with = [&](const Number& number) {
        const Tensor& t = cached.forward.*number.tensor;
        const std::vector<double> before = read(t);
        std::vector<double> now = before;
        now[static_cast<size_t>(number.at)] = number.value;
        write(t, now);
        w.seal();
        memory.send();
        plan->run(there);
        memory.bring_back();
        write(t, before);
        EXPECT_TRUE(w.check_memory());
        return bits_of(w.forward);
      };
      for (const auto& [wild, right] : wild_numbers(cached, room, zeros)) {
        EXPECT_EQ(with(wild), with(right)) << "got " << wild.value << " at " << wild.at;
      }
    }
  }
}

// Sequence b of a cached call, as a call of its own on the same cache.
ForwardTensors alone(const Workload& w, const ForwardTensors& all, size_t b, Dense* cu_q) {
  const auto row = static_cast<int64_t>(b);
  const auto from = [](Tensor t, int64_t offset, int dim, int64_t count) {
    t.data = static_cast<std::byte*>(t.data) + offset * size_of(t.dtype);
    t.shape[dim] = count;
    return t;
  };
  const Rows& s = w.sequences[b];
  ForwardTensors one = all;
  if (w.c.packed()) {
    write(cu_q->tensor(), std::vector<double>{0, static_cast<double>(s.sq)});
    one.cu_seqlens_q = *cu_q;
    for (Tensor* t : {&one.q, &one.out}) *t = from(*t, s.q_begin * t->strides[0], 0, s.sq);
    one.lse = from(one.lse, s.q_begin, 1, s.sq);
  } else {
    for (Tensor* t : {&one.q, &one.out, &one.lse}) *t = from(*t, row * t->strides[0], 0, 1);
  }
  for (Tensor* t : {&one.seqused_k, &one.cache_batch_idx, &one.leftpad_k}) {
    if (t->given()) *t = from(*t, row, 0, 1);
  }
  if (one.page_indptr.given()) {
    const std::vector<double> indptr = read(one.page_indptr);
    const auto begin = static_cast<int64_t>(indptr[b]), end = static_cast<int64_t>(indptr[b + 1]);
    one.page_table = from(one.page_table, begin, 0, end - begin);
    one.page_indptr = {};
    one.page_table.rank = 2;
    one.page_table.shape = {1, end - begin};
    one.page_table.strides = {end - begin, 1};
  } else if (one.page_table.given()) {
    one.page_table = from(one.page_table, row * one.page_table.strides[0], 0, 1);
  }
  return one;
}

// What other sequences are and hold, NaN even, does not reach a sequence's bits.
TEST_P(Cache, InvariantToNeighbours) {
  for (const Case& c : some_serving_cases()) {
    for (const CacheShape shape : {CacheShape{Order::kNhd, Index::kTable, 1, true},
                                   CacheShape{Order::kInterleaved, Index::kLists, 17},
                                   CacheShape{Order::kHnd, Index::kBatch, 0}}) {
      SCOPED_TRACE(c.name() + " " + shape.name());
      Workload w(c, 5);
      w.options.engine = engine();
      w.options.invariant = true;
      Cached cached(w, shape, 6);
      if (!computes([&] { cached.run_forward(); })) break;
      std::vector<Bits> all;
      for (size_t b = 0; b < w.sequences.size(); ++b) all.push_back(bits_of(w, b));
      for (size_t b = 0; b < w.sequences.size(); ++b) {
        SCOPED_TRACE(b);
        cached.move();
        for (size_t other = 0; other < w.sequences.size(); ++other) {
          if (other == b) continue;
          for (const int64_t entry : cached.entries[other]) {
            for (Tensor t : {cached.forward.k, cached.forward.v}) {
              t.data = static_cast<std::byte*>(t.data) + entry * t.strides[0] * size_of(t.dtype);
              t.shape[0] = 1;
              write(t, std::vector<double>(static_cast<size_t>(t.numel()),
                                           std::numeric_limits<double>::quiet_NaN()));
            }
          }
        }
        w.seal();
        Dense cu(DType::kI32, {2});
        compute(alone(w, cached.forward, b, &cu), w.options, w.run_options);
        EXPECT_EQ(bits_of(w, b), all[b]);
      }
    }
  }
}

// Engines share out the keys of long sequences, by what is their own where calls are `invariant`.
TEST_P(Cache, LongSequencesInAnyBatch) {
  for (const int64_t sq : {1, 9}) {
    const Case c{.dtype = DType::kBF16,
                 .batch = 3,
                 .sq = sq,
                 .sk = 2600,
                 .hq = 8,
                 .hk = 2,
                 .dv = 80,
                 .mask = sq == 1 ? window(1800, 0) : causal(),
                 .layout = sq == 1 ? Layout::kBshd : Layout::kPacked,
                 .seqused = true,
                 .sinks = sq > 1};
    Workload w(c, 13);
    w.options.engine = engine();
    w.options.invariant = true;
    const Expected e = expect_forward(w);
    for (const CacheShape shape : {CacheShape{Order::kNhd, Index::kTable, 16, true},
                                   CacheShape{Order::kHnd, Index::kBatch, 0}}) {
      SCOPED_TRACE(c.name() + " " + shape.name());
      w.seal();
      Cached cached(w, shape, 14);
      if (!computes([&] { cached.run_forward(); })) break;
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(w.check_memory());
      std::vector<Bits> all;
      for (size_t b = 0; b < w.sequences.size(); ++b) all.push_back(bits_of(w, b));
      for (size_t b = 0; b < w.sequences.size(); ++b) {
        SCOPED_TRACE(b);
        w.seal();
        Dense cu(DType::kI32, {2});
        compute(alone(w, cached.forward, b, &cu), w.options, w.run_options);
        EXPECT_EQ(bits_of(w, b), all[b]);
      }
    }
  }
}

// As many q blocks as an H200 has SMs, or more where there are fewer: of equal lengths they may be
// taken whole, of others not.
TEST_P(Cache, ManyQBlocks) {
  for (const auto& [sq, unequal] :
       {std::pair{1, false}, std::pair{1, true}, std::pair{12, false}, std::pair{12, true}}) {
    const Case c{.dtype = DType::kBF16,
                 .batch = 66,
                 .sq = sq,
                 .sk = 150,
                 .hq = 8,
                 .hk = 2,
                 .mask = causal(),
                 .seqused = unequal};
    Workload w(c, 21);
    w.options.engine = engine();
    const Expected e = expect_forward(w);
    for (const CacheShape shape :
         {CacheShape{Order::kNhd, Index::kTable, 16}, CacheShape{Order::kHnd, Index::kBatch, 0}}) {
      SCOPED_TRACE(c.name() + " " + shape.name());
      w.seal();
      Cached cached(w, shape, 22);
      if (!computes([&] { cached.run_forward(); })) break;
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(w.check_memory());
    }
  }
}

// Sequences that begin alike may have pages, and rows of the batch, in common.
TEST_P(Cache, SequencesMayShareKeys) {
  const int64_t page = 16, used = 70;
  Workload w({.dtype = DType::kBF16, .batch = 3, .sq = 2, .sk = used, .hq = 2, .hk = 2}, 7);
  w.options.engine = engine();
  w.options.invariant = true;
  const auto first = [&](const Tensor& t) {
    const std::vector<double> all = read(t);
    return std::vector<double>(all.begin(), all.begin() + static_cast<int64_t>(all.size()) / 3);
  };
  for (const Tensor& t : {w.forward.k, w.forward.v}) {
    std::vector<double> same;
    for (int b = 0; b < 3; ++b) {
      const std::vector<double> one = first(t);
      same.insert(same.end(), one.begin(), one.end());
    }
    write(t, same);
  }
  w.seal();
  if (!computes([&] { run_contiguous(w, 15); })) return;
  const Bits want = bits_of(w.forward);
  for (const Index index : {Index::kTable, Index::kBatch}) {
    Cached cached(w, {Order::kNhd, index, page}, 8);
    Tensor& ids =
        index == Index::kBatch ? cached.forward.cache_batch_idx : cached.forward.page_table;
    const std::vector<double> all = read(ids);
    const auto row = static_cast<int64_t>(all.size()) / 3;
    std::vector<double> shared;
    for (int b = 0; b < 3; ++b) shared.insert(shared.end(), all.begin(), all.begin() + row);
    write(ids, shared);
    w.seal();
    if (!computes([&] { cached.run_forward(); })) return;
    EXPECT_EQ(bits_of(w.forward), want);
  }
  // One row of ids serves all sequences.
  Cached cached(w, {Order::kNhd, Index::kTable, page}, 9);
  cached.forward.page_table.strides[0] = 0;
  w.seal();
  cached.run_forward();
  EXPECT_EQ(bits_of(w.forward), want);
}

// Packed queries with a cache whose rows are those of the batch.
TEST_P(Cache, PackedQueriesTakeAContiguousCache) {
  Workload w({.dtype = DType::kBF16,
              .sq = 30,
              .sk = 50,
              .hq = 4,
              .hk = 2,
              .mask = causal(),
              .layout = Layout::kPacked},
             10);
  w.options.engine = engine();
  const Expected e = expect(w);
  Cached cached(w, {Order::kNhd, Index::kBatch, 0}, 11);
  const int64_t batch = 4, rows = cached.forward.k.shape[1];
  const Dense k(DType::kBF16, {batch, rows, 2, 64}), v(DType::kBF16, {batch, rows, 2, 64});
  for (int64_t b = 0; b < batch; ++b) {
    const auto one = [&](Tensor t, int64_t at) {
      t.data = static_cast<std::byte*>(t.data) + at * t.strides[0] * size_of(t.dtype);
      t.shape[0] = 1;
      return t;
    };
    const int64_t entry = cached.entries[static_cast<size_t>(b)][0];
    write(one(k, b), read(one(cached.forward.k, entry)));
    write(one(v, b), read(one(cached.forward.v, entry)));
  }
  cached.forward.k = k;
  cached.forward.v = v;
  cached.forward.cache_batch_idx = {};
  if (!computes([&] { cached.run_forward(); })) return;
  EXPECT_TRUE(forward_is_right(w, e));
}

// Without a sequence all rows of packed queries are padding.
TEST_P(Cache, PackedQueriesOfNoSequence) {
  const Dense q(DType::kBF16, {5, 4, 64}), starts(DType::kI32, {1});
  const Dense out(DType::kBF16, {5, 4, 64}), lse(DType::kF32, {4, 5});
  const Dense pages(DType::kBF16, {3, 16, 2, 64});
  write(starts, std::vector<double>{0});
  const auto none = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(nullptr, dtype, shape);
  };
  const Tensor rows = none(DType::kBF16, {0, 16, 2, 64}), numbers = none(DType::kI32, {0});
  ForwardTensors contiguous;
  contiguous.q = q;
  contiguous.out = out;
  contiguous.lse = lse;
  contiguous.cu_seqlens_q = starts;
  ForwardTensors paged = contiguous, of_batch = contiguous;
  contiguous.k = contiguous.v = rows;
  of_batch.k = of_batch.v = paged.k = paged.v = pages;
  of_batch.cache_batch_idx = numbers;
  paged.page_table = none(DType::kI32, {0, 2});
  paged.seqused_k = numbers;
  for (const ForwardTensors& t : {contiguous, paged, of_batch}) {
    for (const bool invariant : {false, true}) {
      write(out, std::vector<double>(5 * 4 * 64, 7));
      write(lse, std::vector<double>(4 * 5, 7));
      compute(t, {.invariant = invariant, .engine = engine()});
      EXPECT_EQ(read(out), std::vector<double>(5 * 4 * 64));
      EXPECT_EQ(read(lse), std::vector<double>(4 * 5, -std::numeric_limits<double>::infinity()));
    }
  }
}

// Left padding without a cache: keys that do not exist before the first.
TEST_P(Cache, LeftPaddingNeedsNoCache) {
  for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
    Workload w({.dtype = DType::kBF16,
                .batch = 4,
                .sq = 20,
                .sk = 90,
                .hq = 2,
                .hk = 1,
                .mask = window(40, 3),
                .layout = layout,
                .alibi = Alibi::kHeads},
               12);
    w.options.engine = engine();
    const Dense leftpad(DType::kI32, {4});
    std::vector<double> pads;
    for (Rows& s : w.sequences) {
      const int64_t pad = std::min<int64_t>(s.sk, 7 * static_cast<int64_t>(pads.size()));
      pads.push_back(static_cast<double>(pad));
      s.k_begin += pad;
      s.sk -= pad;
    }
    write(leftpad, pads);
    const Expected e = expect(w);
    w.forward.leftpad_k = leftpad;
    if (!computes([&] { w.run_forward(); })) return;
    EXPECT_TRUE(forward_is_right(w, e));
  }
}

TEST_P(Cache, PlansSayWhatACacheIs) {
  Workload w({.batch = 2, .sq = 1, .sk = 100, .hq = 4, .hk = 2}, 13);
  w.options.engine = engine();
  const auto call_of = [&](const CacheShape& shape) {
    Cached cached(w, shape, 14);
    EngineMemory memory(engine());
    Details call;
    computes([&] {
      call = plan(memory.at(cached.forward), w.options).details().get<Details>("call");
      EXPECT_EQ(call.has("page"), shape.page > 0);
      if (shape.page > 0) {
        EXPECT_EQ(call.get<int64_t>("page"), shape.page);
        EXPECT_EQ(call.get<int64_t>("pages"), cached.forward.k.shape[0]);
      }
    });
    return call;
  };
  const auto has = [](const Details& call, const char* tensor) {
    const auto& tensors = call.get<Details::Texts>("optional_tensors");
    return std::ranges::find(tensors, tensor) != tensors.end();
  };
  const Details paged = call_of({Order::kNhd, Index::kTable, 16, true});
  if (paged.entries().empty()) return;
  EXPECT_TRUE(has(paged, "page_table") && has(paged, "leftpad_k")) << paged.json();
  EXPECT_FALSE(has(paged, "page_indptr")) << paged.json();
  const Details lists = call_of({Order::kHnd, Index::kLists, 3});
  EXPECT_TRUE(has(lists, "page_table") && has(lists, "page_indptr")) << lists.json();
  const Details batch = call_of({Order::kNhd, Index::kBatch, 0});
  EXPECT_TRUE(has(batch, "cache_batch_idx")) << batch.json();
}

FULGUR_EVERY_ENGINE(Cache);

}  // namespace
}  // namespace fulgur::test

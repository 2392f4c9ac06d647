// AppendThenAttend to caches of K and V: new rows, and queries, as a model in double precision
// turns them, nothing else of a cache touched, and attention on what was stored.
#include "fulgur/append.h"

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <limits>

#include "appended.h"
#include "call.h"
#include "call_append.h"
#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

using Order = CacheShape::Order;
using Index = CacheShape::Index;

// Every page size, index and order of a cache with ragged and with even rows; what else there is
// takes turns, in cycles of different lengths.
std::vector<AppendCase> append_cases() {
  const DType dtypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
  const Order orders[] = {Order::kNhd, Order::kHnd, Order::kInterleaved};
  const Mask masks[] = {causal(), full(), window(4, -1), window(-1, 2), chunked(3)};
  const int64_t rotary[] = {24, 0, 10, 2, 24, 16, 24};
  std::vector<AppendCase> all;
  for (int64_t page = 0; page <= 17; ++page) {
    for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
      for (const Layout layout : {Layout::kPacked, Layout::kBshd, Layout::kPadded}) {
        if ((page == 0) != (index == Index::kBatch)) continue;
        const size_t n = all.size();
        AppendCase a{.c = {.dtype = dtypes[n % 4],
                           .batch = 3,
                           .sq = static_cast<int64_t>(n / 3 % 6),
                           .sk = 29,
                           .hq = 4,
                           .hk = 2,
                           .d = 24,
                           .dv = 20,
                           .mask = masks[n % 5],
                           .layout = layout},
                     .shape = {orders[n / 3 % 3], index, page, n / 9 % 2 == 0},
                     .rotary_dim = rotary[n % 7],
                     .interleaved = n / 4 % 2 == 0,
                     .f32_angles = n / 7 % 2 == 0,
                     .positions = n / 8 % 2 == 0,
                     .in_place = n / 5 % 2 == 0};
        if (layout == Layout::kPacked) a.c.batch = 4;
        all.push_back(a);
      }
    }
  }
  // Rows of the batch in every order, dtype and way to turn.
  for (size_t n = 0; n < 24; ++n) {
    AppendCase a = all[n];
    a.shape.index = Index::kBatch;
    a.shape.page = 0;
    a.c.d = a.rotary_dim + 1 + static_cast<int64_t>(n % 3);
    all.push_back(a);
  }
  // Rows that can be moved 16 bytes at a time, in pages and in rows of the batch.
  const int64_t turned[] = {32, 0, 64, 16, 48};
  for (size_t n = 0; n < 60; ++n) {
    AppendCase a = all[n];
    a.aligned = true;
    a.rotary_dim = turned[n % 5];
    a.c.d = n % 2 == 0 ? 64 : 72;
    a.c.dv = n % 3 == 0 ? 264 : 40;
    if (a.c.layout == Layout::kPadded) a.c.layout = Layout::kBhsd;
    all.push_back(a);
  }
  return all;
}

class Append : public EveryEngine {
 protected:
  // A call and what follows it, on an engine.
  void on(const std::string& engine, Appended& a) {
    a.w.options.mask = a.given.c.mask;
    a.w.options.engine = engine;
  }
};

std::vector<std::byte> outputs(const Workload& w) {
  std::vector<std::byte> all = bits(w.forward.out);
  const std::vector<std::byte> lse = bits(w.forward.lse);
  all.insert(all.end(), lse.begin(), lse.end());
  return all;
}

TEST_P(Append, WritesWhatAttentionReads) {
  for (const AppendCase& c : append_cases()) {
    SCOPED_TRACE(c.name());
    Appended a(c, 1);
    on(engine(), a);
    if (!computes([&] { a.run(); })) continue;
    ASSERT_TRUE(a.check());
    // The bits attended are the bits stored: those of contiguous keys.
    if (a.w.total_q == 0) continue;
    a.w.options.invariant = true;
    if (!computes([&] { run_contiguous(a.w, 2); })) continue;
    const std::vector<std::byte> want = outputs(a.w);
    a.w.seal();
    if (!computes([&] { a.cached.run_forward(); })) continue;
    ASSERT_EQ(outputs(a.w), want);
  }
}

std::vector<std::byte> appended_bits(const AppendTensors& t) {
  std::vector<std::byte> all;
  for (const Tensor& each : {t.k_cache, t.v_cache, t.q_out}) {
    const std::vector<std::byte> more = bits(each);
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

// From C, on one thread, and on any device.
TEST_P(Append, GivesTheSameBitsAsOnTheCpu) {
  for (const AppendCase& c : append_cases()) {
    SCOPED_TRACE(c.name());
    Appended want(c, 2);
    on("cpu", want);
    want.w.options.threads = 1;
    want.run();
    Appended got(c, 2), from_c(c, 2);
    on(engine(), got);
    if (!computes([&] { got.run(); })) continue;
    ASSERT_EQ(appended_bits(got.args), appended_bits(want.args));
    on(engine(), from_c);
    EngineMemory memory(engine());
    ASSERT_EQ(append_c(memory.at(from_c.args), from_c.w.options), FULGUR_OK) << fulgur_last_error();
    memory.bring_back();
    ASSERT_EQ(appended_bits(from_c.args), appended_bits(want.args));
    for (Appended* each : {&got, &from_c}) ASSERT_TRUE(each->check());
  }
}

// One call that appends and attends gives the bits of both calls, and leaves q as it is.
class OneCall : public Append {
 protected:
  void gives_the_bits_of_two(const AppendCase& c, const std::function<void(Workload&)>& change) {
    SCOPED_TRACE(c.name());
    Appended two(c, 3), one(c, 3);
    for (Appended* each : {&two, &one}) {
      change(each->w);
      on(engine(), *each);
    }
    if (!computes([&] { one.run_with_attention(); })) return;
    two.run();
    ASSERT_EQ(bits(one.args.k_cache), bits(two.args.k_cache));
    ASSERT_EQ(bits(one.args.v_cache), bits(two.args.v_cache));
    ASSERT_TRUE(two.check());
    two.cached.run_forward();
    ASSERT_EQ(outputs(one.w), outputs(two.w));
    const Details plan = details(one);
    fused_ += plan.get<std::string>("append") == "by_attention_kernel";
    decoded_ += engine() == "cuda" && plan.get<std::string>("kernel").ends_with("_decode");
    ASSERT_TRUE(one.check_rows());
    if (two.w.total_q == 0) return;
    ASSERT_TRUE(forward_is_right(two.w, expect_forward(two.w)));
  }

  int fused_ = 0;    ///< calls of which one kernel did both
  int decoded_ = 0;  ///< by the kernel of few rows

 private:
  Details details(const Appended& a) const {
    EngineMemory memory(engine());
    const ForwardArgs args = appending(memory.at(a.attention()), memory.at(a.rows()));
    return plan(args, memory.options(a.attention(), a.w.options)).details();
  }
};

TEST_P(OneCall, AppendsAndAttends) {
  for (const AppendCase& c : append_cases()) gives_the_bits_of_two(c, [](Workload&) {});
}

// A bias counts the keys that the call appends.
TEST_P(OneCall, WithABias) {
  for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
    AppendCase a{.c = {.dtype = DType::kBF16,
                       .batch = layout == Layout::kPacked ? 4 : 3,
                       .sq = 5,
                       .sk = 100,
                       .hq = 4,
                       .hk = 2,
                       .layout = layout},
                 .shape = {Order::kNhd, Index::kTable, 16},
                 .rotary_dim = 32};
    a.c.bias = Bias::kAll;
    gives_the_bits_of_two(a, [](Workload& w) { w.options.max_seqlen_k = w.c.sk; });
  }
}

// Calls of few rows, which the decode kernel computes on GPUs, with various masks and caches.
TEST_P(OneCall, OfFewRows) {
  const Mask masks[] = {causal(), full(), window(20, 0), chunked(40, causal())};
  const CacheShape shapes[] = {{Order::kNhd, Index::kTable, 16},
                               {Order::kHnd, Index::kLists, 64},
                               {Order::kNhd, Index::kBatch, 0},
                               {Order::kInterleaved, Index::kTable, 3},
                               {Order::kNhd, Index::kTable, 8, true}};
  const int64_t rotary[] = {64, 0, 32, 16};
  size_t n = 0;
  for (const int64_t sq : {1, 3, 9, 16}) {
    for (const CacheShape& shape : shapes) {
      for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
        AppendCase a{.c = {.dtype = n % 3 == 0 ? DType::kF16 : DType::kBF16,
                           .batch = n % 4 == 0 ? 1 : 3,
                           .sq = sq,
                           .sk = n % 5 == 0 ? 300 : 90,
                           .hq = 8,
                           .hk = 2,
                           .d = n % 5 == 2 ? 128 : 64,
                           .dv = n % 6 == 0 ? 128 : 64,
                           .mask = masks[n / 2 % 4],
                           .layout = layout,
                           .seqused_q = n % 7 == 0,
                           .sinks = n % 8 == 0},
                     .shape = shape,
                     .rotary_dim = rotary[n / 3 % 4],
                     .interleaved = n / 4 % 2 == 0,
                     .f32_angles = n / 2 % 2 == 0,
                     .positions = n / 8 % 2 == 0,
                     .aligned = n % 9 != 0};
        if (layout == Layout::kPacked) a.c.batch = 4;
        const bool invariant = n / 5 % 3 == 0;
        gives_the_bits_of_two(a, [&](Workload& w) { w.options.invariant = invariant; });
        if (testing::Test::HasFatalFailure()) return;
        ++n;
      }
    }
  }
  // A third at least: on the few SMs of the emulator many calls have the dynamic schedule, which
  // does not append. Of the portable kernels the one of many rows takes calls with so few keys,
  // where SMs are many.
  EXPECT_GE(3 * fused_, decoded_);
}

// A call that fails writes nothing, also if only its attention is rejected.
TEST_P(OneCall, WritesNothingWhereItFails) {
  AppendCase c = append_cases()[0];
  c.shape = {Order::kNhd, Index::kTable, 4, true};
  c.c.layout = Layout::kBshd;
  c.c.sq = 2;
  Appended a(c, 4);
  on(engine(), a);
  store(a.cached.forward.leftpad_k.data, DType::kI32, 1, 1000);
  const std::vector<std::byte> k = bits(a.args.k_cache), v = bits(a.args.v_cache);
  if (engine() == "cuda") return;  // lengths on a device are not checked
  EXPECT_TRUE(message_of([&] { a.run_with_attention(); }).starts_with("leftpad_k: got 1000 at 1"));
  EXPECT_EQ(bits(a.args.k_cache), k);
  EXPECT_EQ(bits(a.args.v_cache), v);
  EXPECT_TRUE(a.w.nothing_written());
}

FULGUR_EVERY_ENGINE(OneCall);

// A cache whose rows are those of the batch takes rows as they are: NaN, -0 and infinities too.
TEST_P(Append, RowsKeepTheirBits) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kF64}) {
    const Dense k(dtype, {2, 8, 3, 5}), v(dtype, {2, 8, 3, 7});
    const Dense k_new(dtype, {2, 2, 3, 5}), v_new(dtype, {2, 2, 3, 7}), old(DType::kI32, {2});
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const double infinity = std::numeric_limits<double>::infinity();
    for (const Dense* t : {&k_new, &v_new}) {
      std::vector<double> values;
      for (int64_t n = 0; n < t->tensor().numel(); ++n)
        values.push_back(std::array{nan, -0.0, infinity, 1e-7, -3.0}[n % 5]);
      write(*t, values);
    }
    // A NaN of another kind.
    std::byte* const first = static_cast<std::byte*>(v_new.tensor().data);
    first[0] = std::byte{0x5a};
    write(old, std::vector<double>{3, 6});
    const auto call = [&] {
      compute(
          AppendTensors{
              .k_cache = k, .v_cache = v, .k_new = k_new, .v_new = v_new, .cache_seqlens = old},
          {.engine = engine()});
    };
    if (!computes(call)) continue;
    const auto rows = [](Tensor t, int64_t b, int64_t begin, int64_t count) {
      t.data = static_cast<std::byte*>(t.data) +
               (b * t.strides[0] + begin * t.strides[1]) * size_of(t.dtype);
      t.shape[0] = 1;
      t.shape[1] = count;
      return bits(t);
    };
    EXPECT_EQ(rows(k, 0, 3, 2), rows(k_new, 0, 0, 2));
    EXPECT_EQ(rows(v, 0, 3, 2), rows(v_new, 0, 0, 2));
    EXPECT_EQ(rows(k, 1, 6, 2), rows(k_new, 1, 0, 2));
    EXPECT_EQ(rows(v, 1, 6, 2), rows(v_new, 1, 0, 2));
    const std::vector<std::byte> poison = rows(Dense(dtype, {1, 8, 3, 7}), 0, 0, 3);
    EXPECT_EQ(rows(v, 0, 0, 3), poison);
    EXPECT_EQ(rows(v, 0, 5, 3), poison);
    EXPECT_EQ(rows(v, 1, 0, 3), poison);
    EXPECT_EQ(rows(v, 1, 3, 3), poison);
  }
}

// A prompt at once gives the bits of its tokens one by one.
TEST_P(Append, InAnyChunks) {
  const int64_t tokens = 11, page = 4;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Dense k_new(dtype, {1, tokens, 2, 16}), v_new(dtype, {1, tokens, 2, 16});
    const Dense q(dtype, {1, tokens, 4, 16}), cos(DType::kF32, {20, 4}), sin(DType::kF32, {20, 4});
    std::mt19937_64 random(3);
    for (const Dense* t : {&k_new, &v_new, &q, &cos, &sin}) randomize(*t, random);
    const Dense table(DType::kI32, {1, 4}), old(DType::kI32, {1});
    write(table, std::vector<double>{2, 0, 3, 1});
    const auto appended = [&](int64_t chunk) {
      const Dense k(dtype, {4, page, 2, 16}), v(dtype, {4, page, 2, 16});
      const Dense turned(dtype, {1, tokens, 4, 16});
      for (int64_t begin = 0; begin < tokens; begin += chunk) {
        const auto part = [&](Tensor t) {
          t.data = static_cast<std::byte*>(t.data) + begin * t.strides[1] * size_of(t.dtype);
          t.shape[1] = std::min(chunk, tokens - begin);
          return t;
        };
        write(old, std::vector<double>{static_cast<double>(begin)});
        compute(AppendTensors{.k_cache = k,
                              .v_cache = v,
                              .k_new = part(k_new),
                              .v_new = part(v_new),
                              .cache_seqlens = old,
                              .page_table = table,
                              .cos = cos,
                              .sin = sin,
                              .q = part(q),
                              .q_out = part(turned)},
                {.mask = causal(), .engine = engine()});
      }
      return std::array{bits(k), bits(v), bits(turned)};
    };
    const auto whole = appended(tokens);
    for (const int64_t chunk : {1, 2, 3, 5}) EXPECT_EQ(appended(chunk), whole) << chunk;
  }
}

// Nothing to write: nothing is looked at but shapes, however large the sizes with a 0 are.
TEST_P(Append, MayBeEmpty) {
  const Dense k(DType::kF32, {2, 4, 1, 8}), old(DType::kI32, {2});
  const Dense v(DType::kF32, {2, 4, 1, 8});
  write(old, std::vector<double>{4, 0});
  const Tensor none = Tensor::contiguous(nullptr, DType::kF32, {2, 0, 1, 8});
  compute(
      AppendTensors{.k_cache = k, .v_cache = v, .k_new = none, .v_new = none, .cache_seqlens = old},
      {.engine = engine()});
  // The row of a sequence without new ones is not looked at.
  const Dense rows(DType::kI32, {2});
  compute(AppendTensors{.k_cache = k,
                        .v_cache = v,
                        .k_new = none,
                        .v_new = none,
                        .cache_seqlens = old,
                        .cache_batch_idx = rows},
          {.engine = engine()});
  const Tensor huge = Tensor::contiguous(nullptr, DType::kF32, {0, int64_t{1} << 60, 1, 8});
  const Tensor cache = Tensor::contiguous(nullptr, DType::kF32, {0, 4, 1, 8});
  const Tensor nobody = Tensor::contiguous(nullptr, DType::kI32, {0});
  compute(AppendTensors{.k_cache = cache,
                        .v_cache = cache,
                        .k_new = huge,
                        .v_new = huge,
                        .cache_seqlens = nobody},
          {.engine = engine()});
  EXPECT_EQ(bits(k), bits(Dense(DType::kF32, {2, 4, 1, 8})));
}

FULGUR_EVERY_ENGINE(Append);

}  // namespace
}  // namespace fulgur::test

// Every wrong argument of a call that appends and attends, through the C++ and the C API, at once
// and by a plan: one error that names it, what it got and what it wants, and nothing written.
#include <gtest/gtest.h>

#include <functional>

#include "appended.h"
#include "call.h"
#include "call_append.h"
#include "engines.h"

namespace fulgur::test {
namespace {

using Index = CacheShape::Index;

struct Wrong {
  const char* what;
  Index index;
  std::function<void(ForwardTensors&, AppendTensors&, const Appended&)> change;
  const char* message;  // what the message starts like (a regular expression)
  bool packed = false;
};

void PrintTo(const Wrong& wrong, std::ostream* os) { *os << wrong.what; }

using F = ForwardTensors;
using A = AppendTensors;
using Made = const Appended&;

// The base is that of bad_append_test: 2 sequences, q (2, 8, 4, 16), 4 new rows of each.
const std::vector<Wrong>& wrongs() {
  const Index table = Index::kTable, batch = Index::kBatch;
  static const std::vector<Wrong> kWrongs = {
      // Said twice.
      {"k", table, [](F& f, A&, Made a) { f.k = a.args.k_cache; },
       "k: given with append, want k_cache of it alone"},
      {"v", table, [](F& f, A&, Made a) { f.v = a.args.v_cache; },
       "v: given with append, want v_cache of it alone"},
      {"seqused_k", table, [](F& f, A& r, Made) { f.seqused_k = r.cache_seqlens; },
       "seqused_k: given with append, want none: sequences have cache_seqlens"},
      {"cu_seqlens_k", table, [](F& f, A& r, Made) { f.cu_seqlens_k = r.cu_seqlens_k_new; },
       "cu_seqlens_k: given with append, want none", true},
      // What append alone would say.
      {"no_k_cache", table, [](F&, A& r, Made) { r.k_cache = {}; },
       "k_cache: (not given|got null)"},
      {"no_k_new", table, [](F&, A& r, Made) { r.k_new = {}; }, "k_new: (not given|got null)"},
      {"no_seqlens", table, [](F&, A& r, Made) { r.cache_seqlens = {}; }, "cache_seqlens: got n"},
      {"seqlens_negative", table,
       [](F&, A& r, Made) { store(r.cache_seqlens.data, DType::kI32, 1, -1); },
       "cache_seqlens: got -1 at 1, want >= 0"},
      {"beyond_the_table", table,
       [](F&, A& r, Made) { store(r.cache_seqlens.data, DType::kI32, 0, 21); },
       "cache_seqlens: got 21 at 0, with 4 new rows 25, want at most the 24 of its cache"},
      {"few_positions", table, [](F&, A& r, Made) { r.cos.shape[0] = r.sin.shape[0] = 12; },
       "cos: got 12 positions, want"},
      {"two_tokens_of_a_row", batch,
       [](F&, A& r, Made) {
         const double row = load(r.cache_batch_idx.data, DType::kI32, 0);
         store(r.cache_batch_idx.data, DType::kI32, 1, row);
         store(r.cache_seqlens.data, DType::kI32, 1, 10);
       },
       "cache_batch_idx: row .* would take a new row of sequence 0 and one of sequence 1"},
      // What attention alone would say.
      {"no_out", table, [](F& f, A&, Made) { f.out = {}; }, "out: (not given|got null)"},
      {"leftpad", table, [](F& f, A&, Made) { store(f.leftpad_k.data, DType::kI32, 0, 16); },
       "leftpad_k: got 16 at 0, want 0 to 15"},
      {"page_of_old_keys", table,
       [](F&, A& r, Made) { store(r.page_table.data, DType::kI32, 1, 99); }, "page_table: got 99"},
      // Both together.
      {"q_of_f16", table, [](F& f, A&, Made) { f.q = as(f.q, DType::kF16); },
       "q: got f16, want f32 \\(the dtype of k_cache\\)"},
      {"q_on_cuda", table, [](F& f, A&, Made) { f.q = on_cuda(f.q); },
       "q: on cuda:0, want cpu as k_cache"},
      {"q_of_another_batch", table, [](F& f, A&, Made) { f.q.shape[0] = 1; },
       "q: got shape \\(1, 8, 4, 16\\), want \\(2, 8, 4, 16\\)"},
      {"unturned_q_of_another_batch", table,
       [](F& f, A& r, Made) {
         r.cos = r.sin = {};
         f.q.shape[0] = 1;
       },
       "q: got 1 sequences, want 2, as cache_seqlens has"},
      {"q_of_another_dim", table,
       [](F& f, A& r, Made) {
         r.cos = r.sin = {};
         f.q = resized(f.q, {2, 8, 8, 8});
       },
       "q: got head dim 8, want 16, that of k_cache"},
      {"q_of_3_heads", table, [](F& f, A&, Made) { f.q.shape[2] = f.out.shape[2] = 3; },
       "q: got 3 heads, want a multiple of the 2 heads of k"},
      {"no_q", table, [](F& f, A&, Made) { f.q = {}; }, "q: (not given|got null)"},
      {"out_is_new", table, [](F& f, A& r, Made) { r.k_new.data = f.out.data; },
       "out: shares its memory with k_new"},
      {"out_is_cache", table, [](F& f, A& r, Made) { f.out.data = r.v_cache.data; },
       "out: shares its memory with v_cache"},
      {"cache_is_q", table, [](F& f, A& r, Made) { f.q.data = r.k_cache.data; },
       "k_cache: shares its memory with q"},
      {"cache_is_new", table, [](F&, A& r, Made) { r.v_new.data = r.v_cache.data; },
       "v_cache: shares its memory with v_new"},
      {"lse_is_seqlens", table, [](F& f, A& r, Made) { r.cache_seqlens.data = f.lse.data; },
       "lse: shares its memory with cache_seqlens|cache_seqlens: got"},
      {"cache_null", table, [](F&, A& r, Made) { r.k_cache.data = nullptr; },
       "k_cache: data is null"},
      {"new_null", table, [](F&, A& r, Made) { r.v_new.data = nullptr; }, "v_new: data is null"},
      {"seqlens_null", table, [](F&, A& r, Made) { r.cache_seqlens.data = nullptr; },
       "cache_seqlens: data is null"},
  };
  return kWrongs;
}

AppendCase base(Index index, bool packed) {
  AppendCase a{.c = {.batch = 2, .sq = 8, .sk = 10, .hq = 4, .hk = 2, .d = 16, .dv = 24},
               .shape = {CacheShape::Order::kNhd, index, 4, true},
               .rotary_dim = 12};
  if (packed) a.c.layout = Layout::kPacked;
  return a;
}

void call(const ForwardTensors& f, const AppendTensors& r, const Options& options) {
  forward(appending(f, r), options);
}

fulgur_status call_from_c(const ForwardTensors& f, const AppendTensors& r, const Workload& w) {
  Call call(w);
  static_cast<ForwardTensors&>(call) = f;
  call.page_table = r.page_table;
  call.page_indptr = r.page_indptr;
  call.cache_batch_idx = r.cache_batch_idx;
  return call_c(call, false, CAppend(r).rows());
}

class BadOneCall : public testing::TestWithParam<Wrong> {};

TEST_P(BadOneCall, IsNamedAndNothingIsWritten) {
  const Wrong& wrong = GetParam();
  Appended a(base(wrong.index, wrong.packed), 1);
  a.w.options.mask = causal();
  ForwardTensors attention = a.attention();
  AppendTensors rows = a.rows();
  std::vector<std::pair<Tensor, std::vector<double>>> before;
  for (const Tensor& t :
       {rows.cache_seqlens, rows.page_table, rows.cache_batch_idx, attention.leftpad_k}) {
    before.emplace_back(t, read(t));
  }
  wrong.change(attention, rows, a);
  std::string message;
  try {
    call(attention, rows, a.w.options);
  } catch (const Error& error) {
    message = error.what();
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
  }
  EXPECT_TRUE(starts_like(message, wrong.message));
  EXPECT_EQ(call_from_c(attention, rows, a.w), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), wrong.message)) << "(C API)";
  for (const auto& [t, values] : before) write(t, values);
  EXPECT_TRUE(a.nothing_written());
}

INSTANTIATE_TEST_SUITE_P(, BadOneCall, testing::ValuesIn(wrongs()),
                         [](const auto& info) { return std::string(info.param.what); });

// The base itself is right, from C, too.
TEST(BadOneCalls, AreBadByTheirChangeAlone) {
  for (const bool packed : {false, true}) {
    for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
      Appended a(base(index, packed), 1), from_c(base(index, packed), 1);
      for (Appended* each : {&a, &from_c}) each->w.options.mask = causal();
      call(a.attention(), a.rows(), a.w.options);
      EXPECT_FALSE(a.nothing_written());
      ASSERT_EQ(call_from_c(from_c.attention(), from_c.rows(), from_c.w), FULGUR_OK)
          << fulgur_last_error();
      EXPECT_EQ(bits(from_c.w.forward.out), bits(a.w.forward.out));
      EXPECT_EQ(bits(from_c.args.k_cache), bits(a.args.k_cache));
      EXPECT_TRUE(a.check_rows());
    }
  }
}

// Runs of a plan bring rows of the shapes planned for.
TEST(BadOneCalls, RunsOfPlans) {
  Appended a(base(Index::kTable, false), 1), want(base(Index::kTable, false), 1);
  for (Appended* each : {&a, &want}) each->w.options.mask = causal();
  call(want.attention(), want.rows(), want.w.options);
  ForwardArgs args = appending(a.attention(), a.rows());
  const Plan plan = fulgur::plan(args, a.w.options);
  EXPECT_EQ(plan.details().get<std::string>("append"), "before_attention");
  EXPECT_EQ(plan.details().get<int64_t>("call.append_tokens"), 8);
  args.append = {};
  EXPECT_TRUE(starts_like(message_of([&] { plan.run(args); }), "k_cache: got .* as planned"));
  args.append = a.rows().new_rows();
  args.append.k_new.shape[1] = 3;
  EXPECT_TRUE(starts_like(message_of([&] { plan.run(args); }), "k_new: got .* as planned"));
  EXPECT_TRUE(a.nothing_written());
  args.append = a.rows().new_rows();
  const std::vector<std::byte> q = bits(a.w.forward.q);
  std::vector<std::byte> memory(static_cast<size_t>(plan.workspace().bytes + 256));
  const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
  plan.run(args, {.workspace = {memory.data() + (256 - at % 256), plan.workspace().bytes}});
  EXPECT_EQ(bits(a.w.forward.out), bits(want.w.forward.out));
  EXPECT_EQ(bits(a.w.forward.q), q);
  EXPECT_TRUE(a.check_rows());
}

// Lengths that a plan knows are those with the new rows.
TEST(BadOneCalls, PlansKnowTheKeys) {
  Appended a(base(Index::kTable, false), 1);
  const ForwardArgs args = appending(a.attention(), a.rows());
  EXPECT_EQ(fulgur::plan(args, a.w.options).flops(), 2 * (16 + 24) * 4 * (2 * 8 * 10));
}

TEST(BadOneCalls, StructsOfTheCApi) {
  Appended a(base(Index::kTable, false), 1);
  auto rows = c_struct<fulgur_new_rows>();
  Call call(a.w);
  static_cast<ForwardTensors&>(call) = a.attention();
  EXPECT_EQ(call_c(call, false), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "k: got null, want a tensor"));
  EXPECT_EQ(call_c(call, false, &rows), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "k_cache: got null, want a tensor"));
  rows.struct_size = 8;
  EXPECT_EQ(call_c(call, false, &rows), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "append: struct_size is 8"));
}

}  // namespace
}  // namespace fulgur::test

// Every wrong argument of append, through the C++ and the C API: one error that names it, what it
// got and what it wants, and nothing written.
#include <gtest/gtest.h>

#include <functional>

#include "appended.h"
#include "call.h"
#include "call_append.h"
#include "engines.h"

namespace fulgur::test {
namespace {

using Index = CacheShape::Index;

constexpr int64_t kHuge = int64_t{1} << 59;

struct WrongAppend {
  const char* what;
  Index index;
  std::function<void(AppendTensors&, Options&)> change;
  const char* message;  // what the message starts like (a regular expression)
  bool packed = false;
};

void PrintTo(const WrongAppend& wrong, std::ostream* os) { *os << wrong.what; }

void set(const Tensor& t, int64_t at, double value) { store(t.data, DType::kI32, at, value); }

// A change to the tensors alone.
template <class Change>
std::function<void(AppendTensors&, Options&)> to(Change change) {
  return [change](AppendTensors& a, Options&) { change(a); };
}

using A = AppendTensors;

// The base: 10 keys of 2 sequences, the first after 5 that do not exist; the last 4 of each are
// new. q (2, 8, 4, 16), k_new (2, 4, 2, 16), v_new (2, 4, 2, 24), cache_seqlens (11, 6), cos and
// sin (n, 6) with a row for every position.
//   pages   k_cache (10, 4, 2, 16), v_cache (10, 4, 2, 24), page_table (2, 6) with 9 ids from row
//           to row; or page_table (9) with page_indptr (0, 4, 9)
//   batch   k_cache (5, 20, 2, 16), v_cache (5, 20, 2, 24), cache_batch_idx (2)
// Packed: queries and ragged new rows of 4 sequences, the third of which has none.
const std::vector<WrongAppend>& wrongs() {
  const Index table = Index::kTable, lists = Index::kLists, batch = Index::kBatch;
  static const std::vector<WrongAppend> kWrongs = {
      // The caches.
      {"no_k_cache", table, to([](A& a) { a.k_cache = {}; }), "k_cache: (not given|got null)"},
      {"no_v_cache", table, to([](A& a) { a.v_cache = {}; }), "v_cache: (not given|got null)"},
      {"cache_of_rank_3", table, to([](A& a) {
         a.k_cache = resized(a.k_cache, {40, 2, 16});
       }),
       "k_cache: got 3 dim.*want 4 \\(pages, page, heads, dim\\)"},
      {"cache_of_i32", table, to([](A& a) { a.k_cache = as(a.k_cache, DType::kI32); }),
       "k_cache: got i32, want f32, bf16, f16 or f64"},
      {"v_cache_of_f16", table, to([](A& a) { a.v_cache = as(a.v_cache, DType::kF16); }),
       "v_cache: got f16, want f32 \\(the dtype of k_cache\\)"},
      {"v_cache_on_cuda", table, to([](A& a) { a.v_cache = on_cuda(a.v_cache); }),
       "v_cache: on cuda:0, want cpu as k_cache"},
      {"no_heads", table, to([](A& a) { a.k_cache.shape[2] = 0; }),
       "k_cache: got 0 heads, want at least 1"},
      {"no_dim", table, to([](A& a) { a.k_cache.shape[3] = 0; }),
       "k_cache: got head dim 0, want 1 to 512"},
      {"wide_values", table, to([](A& a) {
         a.v_cache = resized(a.v_cache, {10, 4, 2, 513});
       }),
       "v_cache: got head dim 513, want 1 to 512"},
      {"v_cache_of_fewer_pages", table, to([](A& a) { a.v_cache.shape[0] = 9; }),
       "v_cache: got shape \\(9, 4, 2, 24\\), want \\(10, 4, 2, 24\\)"},
      {"pages_of_no_rows", table, to([](A& a) { a.k_cache.shape[1] = 0; }),
       "k_cache: got pages of 0 keys, want at least 1"},
      {"cache_of_another_batch", batch, to([](A& a) { a.cache_batch_idx = {}; }),
       "k_cache: got shape \\(5, 20, 2, 16\\), want \\(2, 20, 2, 16\\)"},
      {"cache_over_itself", table, to([](A& a) { a.k_cache.strides[0] = 0; }),
       "k_cache: elements overlap"},
      {"values_over_themselves", table, to([](A& a) { a.v_cache.strides[1] = 2; }),
       "v_cache: elements overlap"},
      {"last_stride", table, to([](A& a) { a.v_cache.strides[3] = 2; }),
       "v_cache: last stride is 2, want 1"},
      {"caches_null", table, to([](A& a) { a.k_cache.data = nullptr; }), "k_cache: data is null"},
      {"caches_misaligned", table,
       to([](A& a) { a.v_cache.data = static_cast<char*>(a.v_cache.data) + 1; }),
       "v_cache: data .* is not aligned"},
      {"caches_share", table, to([](A& a) { a.v_cache.data = a.k_cache.data; }),
       "k_cache: shares its memory with v_cache"},
      {"cache_is_new", table, to([](A& a) { a.k_new.data = a.k_cache.data; }),
       "k_cache: shares its memory with k_new"},
      {"cache_is_cos", table, to([](A& a) { a.cos.data = a.v_cache.data; }),
       "v_cache: shares its memory with cos"},
      {"cache_is_q", table, to([](A& a) { a.q.data = a.k_cache.data; }),
       "k_cache: shares its memory with q"},
      {"cache_is_seqlens", table, to([](A& a) { a.cache_seqlens.data = a.k_cache.data; }),
       "k_cache: shares its memory with cache_seqlens"},
      {"cache_is_table", table, to([](A& a) { a.page_table.data = a.v_cache.data; }),
       "v_cache: shares its memory with page_table"},
      // Lengths.
      {"no_seqlens", table, to([](A& a) { a.cache_seqlens = {}; }), "cache_seqlens: got n"},
      {"seqlens_of_i64", table,
       to([](A& a) { a.cache_seqlens = as(a.cache_seqlens, DType::kI64); }),
       "cache_seqlens: got i64, want i32"},
      {"seqlens_of_rank_2", table, to([](A& a) {
         a.cache_seqlens = resized(a.cache_seqlens, {1, 2});
       }),
       "cache_seqlens: got i32 \\(1, 2\\), want i32 \\(batch\\)"},
      {"seqlens_of_another_batch", table, to([](A& a) { a.cache_seqlens.shape[0] = 1; }),
       "page_table: got shape \\(2, 6\\), want \\(1, 6\\)"},
      {"seqlens_on_cuda", table, to([](A& a) { a.cache_seqlens = on_cuda(a.cache_seqlens); }),
       "cache_seqlens: on cuda:0, want cpu as k_cache"},
      {"seqlens_null", table, to([](A& a) { a.cache_seqlens.data = nullptr; }),
       "cache_seqlens: data is null"},
      {"seqlens_negative", table, to([](A& a) { set(a.cache_seqlens, 1, -1); }),
       "cache_seqlens: got -1 at 1, want >= 0"},
      {"beyond_the_table", table, to([](A& a) { set(a.cache_seqlens, 0, 21); }),
       "cache_seqlens: got 21 at 0, with 4 new rows 25, want at most the 24 of its cache"},
      {"beyond_the_list", lists, to([](A& a) { set(a.cache_seqlens, 0, 13); }),
       "cache_seqlens: got 13 at 0, with 4 new rows 17, want at most the 16 of its cache"},
      {"beyond_the_rows", batch, to([](A& a) { set(a.cache_seqlens, 1, INT32_MAX); }),
       "cache_seqlens: got 2147483647 at 1, with 4 new rows 2147483651, want at most the 20"},
      {"beyond_without_new_rows", table, to([](A& a) { set(a.cache_seqlens, 2, 1000); }),
       "cache_seqlens: got 1000 at 2, with 0 new rows 1000, want at most", true},
      // New rows.
      {"no_k_new", table, to([](A& a) { a.k_new = {}; }), "k_new: (not given|got null)"},
      {"no_v_new", table, to([](A& a) { a.v_new = {}; }), "v_new: (not given|got null)"},
      {"new_of_rank_3", table, to([](A& a) {
         a.k_new = resized(a.k_new, {8, 2, 16});
       }),
       "k_new: got 3 dim.*want 4 \\(batch, seqlen, heads, dim\\)"},
      {"packed_new_of_rank_4", table, to([](A& a) {
         a.k_new = resized(a.k_new, {1, 4, 2, 16});
       }),
       "k_new: got 4 dim.*want 3 \\(total, heads, dim\\)", true},
      {"new_of_another_batch", table, to([](A& a) { a.k_new.shape[0] = 1; }),
       "k_new: got shape \\(1, 4, 2, 16\\), want \\(2, 4, 2, 16\\)"},
      {"new_of_other_heads", table, to([](A& a) { a.k_new.shape[2] = 1; }),
       "k_new: got shape \\(2, 4, 1, 16\\), want \\(2, 4, 2, 16\\)"},
      {"new_of_another_dim", table, to([](A& a) { a.v_new.shape[3] = 16; }),
       "v_new: got shape \\(2, 4, 2, 16\\), want \\(2, 4, 2, 24\\)"},
      {"fewer_new_values", table, to([](A& a) { a.v_new.shape[1] = 3; }),
       "v_new: got shape \\(2, 3, 2, 24\\), want \\(2, 4, 2, 24\\)"},
      {"new_of_f16", table, to([](A& a) { a.k_new = as(a.k_new, DType::kF16); }),
       "k_new: got f16, want f32 \\(the dtype of k_cache\\)"},
      {"new_on_cuda", table, to([](A& a) { a.v_new = on_cuda(a.v_new); }),
       "v_new: on cuda:0, want cpu as k_cache"},
      {"new_null", table, to([](A& a) { a.v_new.data = nullptr; }), "v_new: data is null"},
      {"new_too_long", table, to([](A& a) { a.k_new.shape[1] = kHuge; }),
       "k_new: shape .* is of more than 2\\^47 bytes"},
      {"cu_of_i64", table,
       to([](A& a) { a.cu_seqlens_k_new = as(a.cu_seqlens_k_new, DType::kI64); }),
       "cu_seqlens_k_new: got i64, want i32", true},
      {"cu_of_another_batch", table, to([](A& a) { a.cu_seqlens_k_new.shape[0] = 4; }),
       "cu_seqlens_k_new: got shape \\(4\\), want \\(5\\)", true},
      {"cu_null", table, to([](A& a) { a.cu_seqlens_k_new.data = nullptr; }),
       "cu_seqlens_k_new: data is null", true},
      {"cu_starting_early", table, to([](A& a) { set(a.cu_seqlens_k_new, 0, -1); }),
       "cu_seqlens_k_new: starts with -1, want >= 0", true},
      {"cu_decreasing", table, to([](A& a) { set(a.cu_seqlens_k_new, 1, 100); }),
       "cu_seqlens_k_new: decreases at 2", true},
      {"cu_beyond_the_rows", table, to([](A& a) { set(a.cu_seqlens_k_new, 4, 1000); }),
       "cu_seqlens_k_new: ends with 1000, want at most .* \\(rows of k_new\\)", true},
      // Tables.
      {"two_indices", table, to([](A& a) { a.cache_batch_idx = a.cache_seqlens; }),
       "cache_batch_idx: given with page_table, want one of both"},
      {"lists_without_ids", lists, to([](A& a) { a.page_table = {}; }),
       "page_table: not given, want the ids"},
      {"table_of_i64", table, to([](A& a) { a.page_table = as(a.page_table, DType::kI64); }),
       "page_table: got i64, want i32"},
      {"table_on_cuda", table, to([](A& a) { a.page_table = on_cuda(a.page_table); }),
       "page_table: on cuda:0, want cpu as k_cache"},
      {"table_null", table, to([](A& a) { a.page_table.data = nullptr; }),
       "page_table: data is null"},
      {"id_negative", table, to([](A& a) { set(a.page_table, 9 + 1, -1); }),
       "page_table: got -1 as page 1 of sequence 1, want one of the 10 pages of k_cache"},
      {"id_too_large", table, to([](A& a) { set(a.page_table, 3, 10); }),
       "page_table: got 10 as page 3 of sequence 0, want one of the 10 pages of k_cache"},
      {"page_of_two_sequences", table, to([](A& a) {
         set(a.page_table, 2, 7);
         set(a.page_table, 9 + 2, 7);
         set(a.cache_seqlens, 0, 8);
         set(a.cache_seqlens, 1, 6);
       }),
       "page_table: row 0 of page 7 would take a new row of sequence 0 and one of sequence 1"},
      {"page_twice_in_a_sequence", table, to([](A& a) {
         set(a.cache_seqlens, 0, 14);
         a.k_new = resized(a.k_new, {2, 6, 2, 16});
         a.v_new = resized(a.v_new, {2, 6, 2, 24});
         set(a.page_table, 3, 4);
         set(a.page_table, 4, 4);
         set(a.page_table, 9 + 1, 6);
         set(a.page_table, 9 + 2, 5);
       }),
       "page_table: row 2 of page 4 would take a new row of sequence 0 and one of sequence 0"},
      {"indptr_on_cuda", lists, to([](A& a) { a.page_indptr = on_cuda(a.page_indptr); }),
       "page_indptr: on cuda:0, want cpu as k_cache"},
      {"indptr_decreasing", lists, to([](A& a) { set(a.page_indptr, 1, 12); }),
       "page_indptr: decreases at 2: 11 after 12"},
      {"index_on_cuda", batch, to([](A& a) { a.cache_batch_idx = on_cuda(a.cache_batch_idx); }),
       "cache_batch_idx: on cuda:0, want cpu as k_cache"},
      {"index_too_large", batch, to([](A& a) { set(a.cache_batch_idx, 1, 5); }),
       "cache_batch_idx: got 5 at 1, want one of the 5 rows of k_cache"},
      {"index_twice", batch, to([](A& a) {
         set(a.cache_batch_idx, 0, 3);
         set(a.cache_batch_idx, 1, 3);
         set(a.cache_seqlens, 0, 9);
       }),
       "cache_batch_idx: row 9 of entry 3 would take a new row of sequence 0 and one of sequence "
       "1"},
      // Angles.
      {"cos_alone", table, to([](A& a) { a.sin = {}; }), "sin: not given"},
      {"sin_alone", table, to([](A& a) { a.cos = {}; }), "cos: not given"},
      {"cos_of_rank_1", table, to([](A& a) { a.cos.rank = 1; }),
       "cos: got 1 dim.*want 2 \\(positions, rotary_dim / 2\\)"},
      {"sin_of_fewer_positions", table, to([](A& a) { a.sin.shape[0] = 3; }),
       "sin: got shape \\(3, 6\\), want"},
      {"cos_of_f16", table, to([](A& a) { a.cos = as(a.cos, DType::kF16); }),
       "cos: got f16, want f32 as k_cache, or f32"},
      {"sin_of_f16", table, to([](A& a) { a.sin = as(a.sin, DType::kF16); }),
       "sin: got f16, want f32 \\(the dtype of cos\\)"},
      {"cos_on_cuda", table, to([](A& a) { a.cos = on_cuda(a.cos); }),
       "cos: on cuda:0, want cpu as k_cache"},
      {"sin_null", table, to([](A& a) { a.sin.data = nullptr; }), "sin: data is null"},
      {"cos_strided", table, to([](A& a) { a.cos.strides[1] = 2; }), "cos: last stride is 2"},
      {"rotary_dim_too_large", table, to([](A& a) {
         a.cos = resized(a.cos, {8, 9});
         a.sin = resized(a.sin, {8, 9});
       }),
       "cos: got 9 columns, a rotary_dim of 18, want 2 to the head dim 16"},
      {"rotary_dim_of_nothing", table, to([](A& a) { a.cos.shape[1] = a.sin.shape[1] = 0; }),
       "cos: got 0 columns"},
      {"few_positions", table, to([](A& a) { a.cos.shape[0] = a.sin.shape[0] = 18; }),
       "cos: got 18 positions, want 19 for sequence 0, which has 8 from 11 on"},
      {"few_positions_for_new_rows", table, to([](A& a) {
         a.q = a.q_out = {};
         a.cos.shape[0] = a.sin.shape[0] = 14;
       }),
       "cos: got 14 positions, want 15 for sequence 0, which has 4 from 11 on"},
      {"positions_without_cos", table, to([](A& a) {
         a.cos = a.sin = a.q = a.q_out = {};
         a.rotary_seqlens = a.cache_seqlens;
       }),
       "rotary_seqlens: given without cos and sin"},
      {"positions_of_another_batch", table,
       to([](A& a) { a.rotary_seqlens = resized(a.cache_seqlens, {1}); }),
       "rotary_seqlens: got shape \\(1\\), want \\(2\\)"},
      // Queries.
      {"q_without_cos", table, to([](A& a) { a.cos = a.sin = {}; }),
       "q: given without cos and sin"},
      {"q_alone", table, to([](A& a) { a.q_out = {}; }), "q_out: not given"},
      {"q_out_alone", table, to([](A& a) { a.q = {}; }), "q: not given, want what goes to q_out"},
      {"cu_of_no_q", table, to([](A& a) {
         a.q = a.q_out = {};
         a.cu_seqlens_q = a.cache_seqlens;
       }),
       "cu_seqlens_q: given without q"},
      {"q_of_another_batch", table, to([](A& a) { a.q.shape[0] = 1; }),
       "q: got shape \\(1, 8, 4, 16\\), want \\(2, 8, 4, 16\\)"},
      {"q_of_another_dim", table, to([](A& a) { a.q.shape[3] = 8; }),
       "q: got shape \\(2, 8, 4, 8\\), want \\(2, 8, 4, 16\\)"},
      {"q_of_no_heads", table, to([](A& a) {
         a.q.shape = {2, kHuge, 0, 16};
         a.q_out = a.q;
       }),
       "q: got 0 heads, want at least 1"},
      {"q_of_f16", table, to([](A& a) { a.q = as(a.q, DType::kF16); }),
       "q: got f16, want f32 \\(the dtype of k_cache\\)"},
      {"q_out_of_f16", table, to([](A& a) { a.q_out = as(a.q_out, DType::kF16); }),
       "q_out: got f16, want f32 \\(the dtype of k_cache\\)"},
      {"q_out_of_other_rows", table, to([](A& a) { a.q_out.shape[1] = 7; }),
       "q_out: got shape \\(2, 7, 4, 16\\), want \\(2, 8, 4, 16\\)"},
      {"q_out_over_itself", table, to([](A& a) { a.q_out.strides[0] = 0; }),
       "q_out: elements overlap"},
      {"q_out_across_q", table, to([](A& a) { a.q_out.data = static_cast<float*>(a.q.data) + 16; }),
       "q_out: shares its memory with q"},
      {"q_out_is_new", table, to([](A& a) { a.k_new.data = a.q_out.data; }),
       "q_out: shares its memory with k_new"},
      {"cu_q_of_another_batch", table, to([](A& a) { a.cu_seqlens_q.shape[0] = 3; }),
       "cu_seqlens_q: got shape \\(3\\), want \\(5\\)", true},
      {"cu_q_beyond_the_rows", table, to([](A& a) { set(a.cu_seqlens_q, 4, 1000); }),
       "cu_seqlens_q: ends with 1000, want at most .* \\(rows of q\\)", true},
      {"cu_q_is_written", table, to([](A& a) { a.cu_seqlens_q.data = a.q_out.data; }),
       "q_out: shares its memory with cu_seqlens_q", true},
      // Options.
      {"engine", table, [](A&, Options& o) { o.engine = "cuda"; },
       "engine: got \"cuda\", want cpu or reference: k_cache is on cpu"},
      {"unknown_engine", table, [](A&, Options& o) { o.engine = "gpu"; },
       "engine: got \"gpu\", want cpu or reference: k_cache is on cpu"},
      {"mask", table, [](A&, Options& o) { o.mask.left = -2; }, "window_left: got -2, want -1"},
      {"chunk", table, [](A&, Options& o) { o.mask.chunk = -2; }, "chunk: got -2, want 0"},
      {"batch_of_the_largest_number", Index::kBatch,
       [](A& a, Options&) {
         for (Tensor* cache : {&a.k_cache, &a.v_cache}) {
           cache->shape[0] = INT64_MAX;
           cache->shape[1] = 0;
         }
         a.cache_seqlens.shape[0] = INT64_MAX;
       },
       "cu_seqlens_k_new: got .*want \\(9223372036854775807\\)", true},
      {"top_left", table, [](A&, Options& o) { o.mask.top_left = true; },
       "top_left: given with queries to rotate, want a mask aligned bottom-right"},
      {"threads", table, [](A&, Options& o) { o.threads = 1025; },
       "threads: got 1025, want >= 0 .* and <= 1024"},
  };
  return kWrongs;
}

AppendCase base(Index index, bool packed, bool positions = false) {
  AppendCase a{.c = {.batch = 2, .sq = 8, .sk = 10, .hq = 4, .hk = 2, .d = 16, .dv = 24},
               .shape = {CacheShape::Order::kNhd, index, 4, true},
               .rotary_dim = 12,
               .positions = positions};
  if (packed) a.c.layout = Layout::kPacked;
  return a;
}

class BadAppend : public testing::TestWithParam<WrongAppend> {};

TEST_P(BadAppend, IsNamedAndNothingIsWritten) {
  const WrongAppend& wrong = GetParam();
  Appended a(base(wrong.index, wrong.packed), 1);
  a.w.options.mask = causal();
  // Lengths and tables are changed in place: what they were comes back before memory is looked at.
  std::vector<std::pair<Tensor, std::vector<double>>> before;
  for (const Tensor& t : {a.args.cache_seqlens, a.args.cu_seqlens_k_new, a.args.page_table,
                          a.args.page_indptr, a.args.cache_batch_idx, a.args.cu_seqlens_q}) {
    before.emplace_back(t, read(t));
  }
  wrong.change(a.args, a.w.options);
  std::string message;
  try {
    append(a.args, a.w.options);
  } catch (const Error& error) {
    message = error.what();
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
  }
  EXPECT_TRUE(starts_like(message, wrong.message));
  EXPECT_EQ(append_c(a.args, a.w.options), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), wrong.message)) << "(C API)";
  for (const auto& [t, values] : before) write(t, values);
  EXPECT_TRUE(a.nothing_written());
}

INSTANTIATE_TEST_SUITE_P(, BadAppend, testing::ValuesIn(wrongs()),
                         [](const auto& info) { return std::string(info.param.what); });

// The base itself is right: the errors come from the change alone.
TEST(BadAppends, AreBadByTheirChangeAlone) {
  for (const bool packed : {false, true}) {
    for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
      Appended a(base(index, packed), 1);
      a.w.options.mask = causal();
      a.run();
      EXPECT_FALSE(a.nothing_written());
      EXPECT_TRUE(a.check());
    }
  }
}

// On a machine with a GPU or without one.
TEST(BadAppends, OnCuda) {
  AppendCase c = base(Index::kTable, false);
  c.c.dtype = DType::kF64;
  Appended a(c, 1);
  for (Tensor* t :
       {&a.args.k_cache, &a.args.v_cache, &a.args.k_new, &a.args.v_new, &a.args.cache_seqlens,
        &a.args.page_table, &a.args.cos, &a.args.sin, &a.args.q, &a.args.q_out}) {
    *t = on_cuda(*t);
  }
  const auto call = [&] { append(a.args, a.w.options); };
  EXPECT_EQ(message_of(call), "k_cache: got f64, append on cuda takes none of it");
  EXPECT_EQ(status_of(call), Status::kUnsupported);
  for (const char* name : {"cpu", "reference", "gpu"}) {
    a.w.options.engine = name;
    EXPECT_EQ(message_of(call),
              "engine: got \"" + std::string(name) + "\", want cuda: k_cache is on cuda:0");
    EXPECT_EQ(status_of(call), Status::kInvalidArgument);
  }
}

// No call could say how long such a sequence is: the last of its keys is the 2^31st.
TEST(BadAppends, MoreKeysThanALengthHolds) {
  const Dense k(DType::kF32, {2, 1024, 1, 1}), v(DType::kF32, {2, 1024, 1, 1});
  const Dense k_new(DType::kF32, {1, 2, 1, 1}), v_new(DType::kF32, {1, 2, 1, 1});
  const Dense old(DType::kI32, {1}), table(DType::kI32, {1, (1 << 21) + 1});
  const Dense q(DType::kF32, {1, 1, 1, 1}), out(DType::kF32, {1, 1, 1, 1});
  std::vector<double> ids((1 << 21) + 1);
  ids[(1 << 21) - 1] = 1;  // the page of the last keys that a length can count
  write(table, ids);
  write(k_new, std::vector<double>{1, 2});
  const AppendArgs rows{
      .rows = {.k_cache = k, .v_cache = v, .k_new = k_new, .v_new = v_new, .cache_seqlens = old},
      .cache = {.page_table = table}};
  const ForwardArgs args{.q = q, .out = out, .cache = rows.cache, .append = rows.rows};
  const std::vector<std::byte> before = bits(k);
  write(old, std::vector<double>{INT32_MAX - 1});
  for (const std::string& message :
       {message_of([&] { append(rows); }), message_of([&] { forward(args); })}) {
    EXPECT_EQ(message,
              "cache_seqlens: got 2147483646 at 0, with 2 new rows 2147483648, want at most "
              "2147483647, as lengths are i32");
  }
  EXPECT_EQ(bits(k), before);
  write(old, std::vector<double>{INT32_MAX - 2});
  append(rows);
  EXPECT_EQ(load(k.tensor().data, DType::kF32, 1024 + 1022), 2);
}

TEST(BadAppends, NegativePositions) {
  Appended a(base(Index::kTable, false, true), 1);
  set(a.args.rotary_seqlens, 1, -3);
  EXPECT_TRUE(starts_like(message_of([&] { a.run(); }), "rotary_seqlens: got -3 at 1, want >= 0"));
}

// Under a mask without bounds all queries stand where the first does: fewer positions suffice.
TEST(BadAppends, PositionsAreThoseThatTurn) {
  Appended a(base(Index::kTable, false), 1);
  a.args.cos.shape[0] = a.args.sin.shape[0] = 15;
  a.run();
  EXPECT_TRUE(a.check());
}

TEST(BadAppends, StructsOfTheCApi) {
  EXPECT_EQ(fulgur_append(nullptr, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "args: got null"));
  auto args = c_struct<fulgur_append_args>();
  EXPECT_EQ(fulgur_append(&args, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "rows: got null, want a struct"));
  const auto rows = c_struct<fulgur_new_rows>();
  args.rows = &rows;
  EXPECT_EQ(fulgur_append(&args, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "k_cache: got null, want a tensor"));
  args.struct_size = 8;
  EXPECT_EQ(fulgur_append(&args, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), "args: struct_size is 8"));
}

}  // namespace
}  // namespace fulgur::test

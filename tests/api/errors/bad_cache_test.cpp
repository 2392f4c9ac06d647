// Every wrong argument of a cache, through the C++ and the C API: one error that names it, what it
// got and what it wants, and nothing written.
#include <gtest/gtest.h>

#include <functional>

#include "cached.h"
#include "call.h"
#include "engines.h"

namespace fulgur::test {
namespace {

using Index = CacheShape::Index;

constexpr int64_t kHuge = int64_t{1} << 43;

struct Wrong {
  const char* what;
  Index index;
  std::function<void(Call&)> change;
  const char* message;  // what the message starts like (a regular expression)
  bool packed = false;
};

void PrintTo(const Wrong& wrong, std::ostream* os) { *os << wrong.what; }

void set(const Tensor& t, int64_t at, double value) { store(t.data, DType::kI32, at, value); }

// The base: q (2, 8, 4, 16), and of each sequence 10 keys, of the first after 5 that do not exist.
//   pages   k (10, 4, 2, 16), v (10, 4, 2, 24), seqused_k (15, 10), page_table (2, 6) with 9 ids
//           from row to row; or page_table (9) with page_indptr (0, 4, 9)
//   batch   k (5, 20, 2, 16), v (5, 20, 2, 24), cache_batch_idx (2)
// Packed: 15 queries of 4 sequences.
const std::vector<Wrong>& wrongs() {
  const Index table = Index::kTable, lists = Index::kLists, batch = Index::kBatch;
  static const std::vector<Wrong> kWrongs = {
      // What is given together.
      {"no_lengths", table, [](Call& c) { c.seqused_k = {}; }, "seqused_k: not given.*page_table"},
      {"packed_keys", table, [](Call& c) { c.cu_seqlens_k = c.seqused_k; },
       "cu_seqlens_k: given with page_table, want seqused_k"},
      {"packed_keys_of_packed_queries", table, [](Call& c) { c.cu_seqlens_k = c.cu_seqlens_q; },
       "cu_seqlens_k: given with page_table, want seqused_k", true},
      {"two_indices", table, [](Call& c) { c.cache_batch_idx = c.seqused_k; },
       "cache_batch_idx: given with page_table, want one of both"},
      {"lists_without_ids", lists, [](Call& c) { c.page_table = {}; },
       "page_table: not given, want the ids"},
      {"packed_keys_by_index", batch, [](Call& c) { c.cu_seqlens_k = c.seqused_k; },
       "cu_seqlens_k: given with cache_batch_idx, want seqused_k"},
      {"longest_of_no_pages", batch, [](Call& c) { c.options.max_seqlen_k = 20; },
       "max_seqlen_k: given without cu_seqlens_k or page_table"},
      // K and V.
      {"k_of_rank_3", table,
       [](Call& c) {
         c.k = resized(c.k, {40, 2, 16});
       },
       "k: got 3 dim.*want 4 \\(pages, page, heads, dim\\)"},
      {"packed_k_of_rank_3", table,
       [](Call& c) {
         c.k = resized(c.k, {40, 2, 16});
       },
       "k: got 3 dim.*want 4 \\(pages, page, heads, dim\\)", true},
      {"pages_of_no_keys", table, [](Call& c) { c.k.shape[1] = 0; },
       "k: got pages of 0 keys, want at least 1"},
      {"v_of_fewer_pages", table, [](Call& c) { c.v.shape[0] = 9; },
       "v: got shape \\(9, 4, 2, 24\\), want \\(10, 4, 2, 24\\)"},
      {"v_of_other_pages", table, [](Call& c) { c.v.shape[1] = 2; },
       "v: got shape \\(10, 2, 2, 24\\), want \\(10, 4, 2, 24\\)"},
      {"v_of_other_heads", table, [](Call& c) { c.v.shape[2] = 1; },
       "v: got shape \\(10, 4, 1, 24\\), want \\(10, 4, 2, 24\\)"},
      {"v_of_fewer_rows", batch, [](Call& c) { c.v.shape[0] = 4; },
       "v: got shape \\(4, 20, 2, 24\\), want \\(5, 20, 2, 24\\)"},
      {"strides_of_k", table, [](Call& c) { c.k.strides[0] = INT64_MAX / 4; },
       "k: shape .* is of more than 2\\^47 bytes"},
      {"last_stride_of_v", table, [](Call& c) { c.v.strides[3] = 2; },
       "v: last stride is 2, want 1"},
      // The table.
      {"table_of_i64", table, [](Call& c) { c.page_table.dtype = DType::kI64; },
       "page_table: got i64, want i32"},
      {"table_of_rank_1", table, [](Call& c) { c.page_table.rank = 1; },
       "page_table: got 1 dim.*want 2 \\(batch, max_pages\\)"},
      {"table_of_another_batch", table, [](Call& c) { c.page_table.shape[0] = 3; },
       "page_table: got shape \\(3, 6\\), want \\(2, 6\\)"},
      {"table_of_huge_strides", table, [](Call& c) { c.page_table.strides[1] = INT64_MAX / 4; },
       "page_table: .*more than 2\\^47 bytes"},
      {"table_of_wide_ids", table, [](Call& c) { c.page_table.strides[1] = int64_t{1} << 31; },
       "page_table: last stride is 2147483648, want one between -2\\^31 and 2\\^31"},
      {"table_on_cuda", table, [](Call& c) { c.page_table = on_cuda(c.page_table); },
       "page_table: on cuda:0, want cpu"},
      {"table_null", table, [](Call& c) { c.page_table.data = nullptr; },
       "page_table: data is null"},
      {"table_is_out", table, [](Call& c) { c.page_table.data = c.out.data; },
       "out: .*memory.* page_table"},
      {"table_too_large", table, [](Call& c) { c.page_table.shape[1] = kHuge; },
       "page_table: got i32 \\(2, 8796093022208\\), want sequences of at most 2\\^47"},
      {"id_negative", table, [](Call& c) { set(c.page_table, 1, -1); },
       "page_table: got -1 as page 1 of sequence 0, want one of the 10 pages of k"},
      {"id_too_large", table, [](Call& c) { set(c.page_table, 9 + 2, 10); },
       "page_table: got 10 as page 2 of sequence 1, want one of the 10 pages of k"},
      {"id_of_packed", table, [](Call& c) { set(c.page_table, 2, INT32_MAX); },
       "page_table: got 2147483647 as page 2 of sequence 0, want", true},
      {"used_negative", table, [](Call& c) { set(c.seqused_k, 1, -1); },
       "seqused_k: got -1 at 1, want 0 to 24"},
      {"used_beyond_the_table", table, [](Call& c) { set(c.seqused_k, 0, 25); },
       "seqused_k: got 25 at 0, want 0 to 24"},
      {"used_beyond_the_longest", table, [](Call& c) { c.options.max_seqlen_k = 12; },
       "seqused_k: got 15 at 0, want 0 to 12"},
      {"longest_negative", table, [](Call& c) { c.options.max_seqlen_k = -1; },
       "max_seqlen_k: got -1, want >= 0"},
      // Lists.
      {"ids_of_rank_2", lists,
       [](Call& c) {
         c.page_table = resized(c.page_table, {1, 9});
       },
       "page_table: got 2 dim.*want 1 \\(ids\\)"},
      {"indptr_of_i64", lists, [](Call& c) { c.page_indptr.dtype = DType::kI64; },
       "page_indptr: got i64, want i32"},
      {"indptr_of_another_batch", lists, [](Call& c) { c.page_indptr.shape[0] = 2; },
       "page_indptr: got shape \\(2\\), want \\(3\\)"},
      {"indptr_on_cuda", lists, [](Call& c) { c.page_indptr = on_cuda(c.page_indptr); },
       "page_indptr: on cuda:0, want cpu"},
      {"indptr_null", lists, [](Call& c) { c.page_indptr.data = nullptr; },
       "page_indptr: data is null"},
      {"indptr_starting_early", lists, [](Call& c) { set(c.page_indptr, 0, -1); },
       "page_indptr: starts with -1, want >= 0"},
      {"indptr_decreasing", lists, [](Call& c) { set(c.page_indptr, 1, 12); },
       "page_indptr: decreases at 2: 11 after 12"},
      {"indptr_beyond_the_ids", lists, [](Call& c) { set(c.page_indptr, 2, 12); },
       "page_indptr: ends with 12, want at most 11 \\(ids of page_table\\)"},
      {"used_beyond_the_list", lists, [](Call& c) { set(c.seqused_k, 0, 17); },
       "seqused_k: got 17 at 0, want 0 to 16"},
      {"id_of_a_list", lists, [](Call& c) { set(c.page_table, 6, -7); },
       "page_table: got -7 as page 0 of sequence 1, want one of the 10 pages of k"},
      // Rows of the batch.
      {"index_of_i64", batch, [](Call& c) { c.cache_batch_idx.dtype = DType::kI64; },
       "cache_batch_idx: got i64, want i32"},
      {"index_of_another_batch", batch, [](Call& c) { c.cache_batch_idx.shape[0] = 5; },
       "cache_batch_idx: got shape \\(5\\), want \\(2\\)"},
      {"index_on_cuda", batch, [](Call& c) { c.cache_batch_idx = on_cuda(c.cache_batch_idx); },
       "cache_batch_idx: on cuda:0, want cpu"},
      {"index_null", batch, [](Call& c) { c.cache_batch_idx.data = nullptr; },
       "cache_batch_idx: data is null"},
      {"index_negative", batch, [](Call& c) { set(c.cache_batch_idx, 0, -1); },
       "cache_batch_idx: got -1 at 0, want one of the 5 rows of k"},
      {"index_too_large", batch, [](Call& c) { set(c.cache_batch_idx, 1, 5); },
       "cache_batch_idx: got 5 at 1, want one of the 5 rows of k"},
      {"used_beyond_the_rows", batch, [](Call& c) { set(c.seqused_k, 0, 21); },
       "seqused_k: got 21 at 0, want 0 to 20"},
      {"no_index", batch, [](Call& c) { c.cache_batch_idx = {}; },
       "k: got shape \\(5, 20, 2, 16\\), want \\(2, 20, 2, 16\\)"},
      // Left padding.
      {"leftpad_negative", table, [](Call& c) { set(c.leftpad_k, 1, -1); },
       "leftpad_k: got -1 at 1, want 0 to 10"},
      {"leftpad_beyond_the_keys", table, [](Call& c) { set(c.leftpad_k, 0, 16); },
       "leftpad_k: got 16 at 0, want 0 to 15"},
      {"leftpad_beyond_the_rows", batch,
       [](Call& c) {
         c.seqused_k = {};
         set(c.leftpad_k, 0, 21);
       },
       "leftpad_k: got 21 at 0, want 0 to 20"},
      {"leftpad_of_f32", batch, [](Call& c) { c.leftpad_k.dtype = DType::kF32; },
       "leftpad_k: got f32, want i32"},
      {"leftpad_of_another_batch", lists, [](Call& c) { c.leftpad_k.shape[0] = 1; },
       "leftpad_k: got shape \\(1\\), want \\(2\\)"},
      {"leftpad_on_cuda", table, [](Call& c) { c.leftpad_k = on_cuda(c.leftpad_k); },
       "leftpad_k: on cuda:0, want cpu"},
      {"leftpad_null", table, [](Call& c) { c.leftpad_k.data = nullptr; },
       "leftpad_k: data is null"},
      // Shared prefixes.
      {"groups_alone", table, [](Call& c) { c.prefix_lens = {}; },
       "prefix_lens: not given, want it with prefix_groups"},
      {"prefixes_alone", table, [](Call& c) { c.prefix_groups = {}; },
       "prefix_groups: not given, want it with prefix_lens"},
      {"prefixes_without_pages", batch,
       [](Call& c) {
         c.prefix_groups = c.seqused_k;
         c.prefix_lens = c.leftpad_k;
       },
       "prefix_groups: given without page_table"},
      {"groups_of_none", table, [](Call& c) { c.prefix_groups.shape[0] = 1; },
       "prefix_groups: got i32 \\(1\\), want i32 \\(groups \\+ 1\\) of at least one group"},
      {"groups_of_rank_2", table,
       [](Call& c) {
         c.prefix_groups = resized(c.prefix_groups, {1, 2});
       },
       "prefix_groups: got i32 \\(1, 2\\), want i32 \\(groups \\+ 1\\)"},
      {"groups_of_i64", table, [](Call& c) { c.prefix_groups.dtype = DType::kI64; },
       "prefix_groups: got i64, want i32"},
      {"groups_on_cuda", table, [](Call& c) { c.prefix_groups = on_cuda(c.prefix_groups); },
       "prefix_groups: on cuda:0, want cpu"},
      {"groups_null", lists, [](Call& c) { c.prefix_groups.data = nullptr; },
       "prefix_groups: data is null"},
      {"groups_are_out", table, [](Call& c) { c.prefix_groups.data = c.out.data; },
       "out: .*memory.* prefix_groups"},
      {"groups_starting_late", table, [](Call& c) { set(c.prefix_groups, 0, 1); },
       "prefix_groups: starts with 1, want 0"},
      {"groups_of_part", table, [](Call& c) { set(c.prefix_groups, 1, 1); },
       "prefix_groups: ends with 1, want 2, the batch"},
      {"groups_of_more", lists, [](Call& c) { set(c.prefix_groups, 1, 3); },
       "prefix_groups: ends with 3, want at most 2 \\(sequences\\)"},
      {"groups_of_part_of_packed", table, [](Call& c) { set(c.prefix_groups, 1, 3); },
       "prefix_groups: ends with 3, want 4, the batch", true},
      {"lens_of_other_groups", table, [](Call& c) { c.prefix_lens.shape[0] = 2; },
       "prefix_lens: got shape \\(2\\), want \\(1\\)"},
      {"lens_of_f32", table, [](Call& c) { c.prefix_lens.dtype = DType::kF32; },
       "prefix_lens: got f32, want i32"},
      {"lens_null", table, [](Call& c) { c.prefix_lens.data = nullptr; },
       "prefix_lens: data is null"},
      {"len_negative", lists, [](Call& c) { set(c.prefix_lens, 0, -1); },
       "prefix_lens: got -1 at 0, want 0 to"},
      {"len_beyond_the_keys", table, [](Call& c) { set(c.prefix_lens, 0, 25); },
       "prefix_lens: got 25 at 0, want 0 to 24"},
      {"len_of_the_queries_own", table, [](Call& c) { set(c.prefix_lens, 0, 3); },
       "prefix_lens: got 3 at 0, want 0 to 2, the keys of sequence 0 before its queries' own"},
  };
  return kWrongs;
}

Case base(bool packed) {
  Case c{.batch = 2, .sq = 8, .sk = 10, .hq = 4, .hk = 2, .d = 16, .dv = 24};
  if (packed) c.layout = Layout::kPacked;
  return c;
}

// One group of all sequences.
struct Prefixes {
  Dense groups{DType::kI32, {2}}, lens{DType::kI32, {1}};

  explicit Prefixes(const Workload& w) {
    write(groups, std::vector<double>{0, static_cast<double>(w.sequences.size())});
    write(lens, std::vector<double>{w.c.packed() ? 0.0 : 2.0});
  }
};

// A call on a cache.
Call call_on(const Workload& w, const Cached& cached, const Prefixes& prefixes) {
  Call call(w);
  call.k = cached.forward.k;
  call.v = cached.forward.v;
  call.cu_seqlens_k = {};
  call.seqused_k = cached.forward.seqused_k;
  call.page_table = cached.forward.page_table;
  call.page_indptr = cached.forward.page_indptr;
  call.cache_batch_idx = cached.forward.cache_batch_idx;
  call.leftpad_k = cached.forward.leftpad_k;
  if (call.page_table.given()) {
    call.prefix_groups = prefixes.groups;
    call.prefix_lens = prefixes.lens;
  }
  return call;
}

class BadCache : public testing::TestWithParam<Wrong> {};

TEST_P(BadCache, IsNamedAndNothingIsWritten) {
  const Wrong& wrong = GetParam();
  const Workload w(base(wrong.packed), 1);
  const Cached cached(w, {CacheShape::Order::kNhd, wrong.index, 4, true}, 2);
  const Prefixes prefixes(w);
  Call call = call_on(w, cached, prefixes);
  wrong.change(call);
  std::string message;
  try {
    forward(call.forward(), call.options, call.run);
  } catch (const Error& error) {
    message = error.what();
    EXPECT_EQ(error.status(), Status::kInvalidArgument);
  }
  EXPECT_TRUE(starts_like(message, wrong.message));
  EXPECT_TRUE(w.nothing_written());

  EXPECT_EQ(call_c(call, false), FULGUR_INVALID_ARGUMENT);
  EXPECT_TRUE(starts_like(fulgur_last_error(), wrong.message)) << "(C API)";
  EXPECT_TRUE(w.nothing_written());
}

INSTANTIATE_TEST_SUITE_P(, BadCache, testing::ValuesIn(wrongs()),
                         [](const auto& info) { return std::string(info.param.what); });

// The base itself is right: the errors come from the change alone. So does the C API give what C++
// gives.
TEST(BadCaches, AreBadByTheirChangeAlone) {
  for (const bool packed : {false, true}) {
    for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
      Workload w(base(packed), 1);
      const Cached cached(w, {CacheShape::Order::kNhd, index, 4, true}, 2);
      const Prefixes prefixes(w);
      Call call = call_on(w, cached, prefixes);
      forward(call.forward(), call.options, call.run);
      const auto out = bits(w.forward.out);
      w.seal();
      EXPECT_EQ(call_c(call, false), FULGUR_OK) << fulgur_last_error();
      EXPECT_EQ(bits(w.forward.out), out);
    }
  }
}

// A struct in a struct has a size of its own, and half a pointer is none.
TEST(BadCaches, SizesOfStructsInStructs) {
  Workload w(base(false), 1);
  const Dl q(w.forward.q), k(w.forward.k), v(w.forward.v), out(w.forward.out);
  auto args = c_struct<fulgur_forward_args>();
  auto cache = c_struct<fulgur_kv_cache>();
  args.q = q;
  args.k = k;
  args.v = v;
  args.out = out;
  args.cache = &cache;
  w.seal();
  for (const size_t size : {sizeof(cache) - 8, sizeof(cache) + 3}) {
    cache.struct_size = size;
    EXPECT_EQ(fulgur_forward(&args, nullptr, nullptr), FULGUR_INVALID_ARGUMENT);
    EXPECT_TRUE(starts_like(fulgur_last_error(), "cache: struct_size is .*multiple of 8"));
  }
  EXPECT_TRUE(w.nothing_written());
  cache.struct_size = sizeof(cache);
  EXPECT_EQ(fulgur_forward(&args, nullptr, nullptr), FULGUR_OK) << fulgur_last_error();
}

// Tables are read when a plan runs, not when it is made.
TEST(BadCaches, PlansNeedNoTables) {
  for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
    const Workload w(base(false), 1);
    const Cached cached(w, {CacheShape::Order::kNhd, index, 4, true}, 2);
    const Prefixes prefixes(w);
    Call call = call_on(w, cached, prefixes);
    Call empty = call;
    for (Tensor* t :
         {&empty.k, &empty.v, &empty.page_table, &empty.page_indptr, &empty.cache_batch_idx,
          &empty.seqused_k, &empty.leftpad_k, &empty.prefix_groups, &empty.prefix_lens}) {
      t->data = nullptr;
    }
    const Plan made = plan(empty.forward(), call.options);
    made.run(call.forward());
    EXPECT_THROW(made.run(empty.forward()), Error);
    EXPECT_THROW((void)made.flops(), Error);  // of lengths that were not there
  }
}

}  // namespace
}  // namespace fulgur::test

// Caches whose pages lie on several ranks.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>

#include "distributed_on_gpus.h"
#include "on_gpu.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

/// The pages of a tensor of keys that lie on a rank, and their table.
struct Pages {
  static constexpr int64_t kSize = 16;
  Bytes memory;
  std::vector<int32_t> ids;
  Tensor tensor, table;

  Pages(const Tensor& keys, int ranks, int rank) {
    const int64_t batch = keys.shape[0], all = (keys.shape[1] + kSize - 1) / kSize;
    const int64_t pages = (all - rank + ranks - 1) / ranks, count = batch * pages;
    memory.resize((count * kSize + 1) * keys.shape[2] * keys.shape[3] * size_of(keys.dtype));
    tensor =
        Tensor::contiguous(memory.data(), keys.dtype, {count, kSize, keys.shape[2], keys.shape[3]});
    for (int64_t n = 0; n < count; ++n) {  // the last page of all comes first
      ids.push_back(static_cast<int32_t>(count - 1 - n));
      const int64_t first = (n % pages * ranks + rank) * kSize;
      for (int64_t row = 0; row < std::min(kSize, keys.shape[1] - first); ++row) {
        for (int64_t h = 0; h < keys.shape[2]; ++h) {
          const int64_t from =
              n / pages * keys.strides[0] + (first + row) * keys.strides[1] + h * keys.strides[2];
          const int64_t to = ((count - 1 - n) * kSize + row) * keys.shape[2] + h;
          std::memcpy(memory.data() + to * keys.shape[3] * size_of(keys.dtype),
                      static_cast<std::byte*>(keys.data) + from * size_of(keys.dtype),
                      keys.shape[3] * size_of(keys.dtype));
        }
      }
    }
    ids.push_back(0);
    table = Tensor::contiguous(ids.data(), DType::kI32, {batch, pages});
  }
};

/// Decode calls over a distributed cache; on GPUs with 16-bit floats only.
std::vector<Case> decoding_cases() {
  const Case base{.dtype = DType::kBF16,
                  .batch = 3,
                  .sq = 1,
                  .sk = 300,
                  .hq = 8,
                  .hk = 2,
                  .mask = causal(),
                  .seqused = true,
                  .sinks = true};
  std::vector<Case> all(4, base);
  const auto change = [](Case& c, DType dtype, int64_t batch, int64_t sq, int64_t sk, int64_t h) {
    c.dtype = dtype;
    c.batch = batch;
    c.sq = sq;
    c.sk = sk;
    c.hq = c.hk = h;
    c.sinks = false;
  };
  change(all[1], DType::kF16, 2, 3, 150, 3);
  all[1].d = all[1].dv = 16;
  all[1].mask = chunked(60, causal());
  all[1].softcap = 5;
  all[1].alibi = Alibi::kHeads;
  change(all[2], DType::kF32, 2, 4, 200, 4);
  all[2].d = 32;
  all[2].dv = 48;
  all[2].mask = window(90, 0);
  all[2].alibi = Alibi::kBatchHeads;
  change(all[3], DType::kF64, 1, 2, 70, 2);
  all[3].hk = 1;
  all[3].mask = top_left(causal());
  return all;
}

/// All ranks compute a call twice, over pages that they share out, into the workload's outputs.
void compute_by_pages(int ranks, Workload& w, int gpus = 0) {
  w.seal();
  const int port = free_port();
  Processes processes(ranks, [&](int rank) {
    const Group group = Group::connect(rank, ranks, "127.0.0.1", port, 60);
    ForwardTensors f = w.forward;
    Pages k(f.k, ranks, rank), v(f.v, ranks, rank);
    f.k = k.tensor;
    f.v = v.tensor;
    f.page_table = k.table;
    OnGpu gpu(gpus == 0 ? Device{} : Device{DeviceType::kCuda, rank % gpus});
    for (Tensor* t : {&f.q, &f.k, &f.v, &f.out, &f.lse, &f.alibi_slopes, &f.sinks, &f.page_table}) {
      gpu.place(*t);
    }
    const auto compute = [&] {
      forward(f, w.options, group, {.sharding = Sharding::kByPage});
      gpu.bring_back();
      Bytes all = bits(w.forward.out);
      const Bytes lse = bits(w.forward.lse);
      all.insert(all.end(), lse.begin(), lse.end());
      return all;
    };
    const Bytes first = compute();
    return compute() == first ? first : bytes_of("error: other bits in the second run");
  });
  const Bytes first = processes.result(0);
  const Tensor &out = w.forward.out, &lse = w.forward.lse;
  const size_t size = bits(out).size();
  ASSERT_EQ(first.size(), size + bits(lse).size())
      << std::string(reinterpret_cast<const char*>(first.data()), first.size());
  for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(processes.result(rank) == first, true);
  const auto store = [](const Tensor& t, const std::byte* from) {
    std::vector<int64_t> rows(t.shape[0]);
    std::iota(rows.begin(), rows.end(), 0);
    const int64_t element = size_of(t.dtype);
    Taken taken = take(t, 0, rows);
    std::memcpy(taken.memory.data(), from, t.numel() * element);
    each_pair(t, taken.tensor, 0, rows,
              [&](std::byte* x, std::byte* y) { std::memcpy(x, y, element); });
  };
  store(out, first.data());
  store(lse, first.data() + size);
}

TEST(DistributedPages, ResultsOfAllRanksAreMerged) {
  for (const Case& c : decoding_cases()) {
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    w.options.threads = 1;
    const Expected e = expect(w);
    for (const int ranks : {1, 2, 3, 5}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by_pages(ranks, w));
      EXPECT_TRUE(forward_is_right(w, e));
    }
  }
}

TEST(DistributedPages, Errors) {
  Workload w({.dtype = DType::kF32,
              .sq = 2,
              .sk = 70,
              .hq = 2,
              .hk = 2,
              .d = 16,
              .dv = 16,
              .seqused = true},
             1);
  const Group alone = Group::from_env();
  const Pages k(w.forward.k, 1, 0), v(w.forward.v, 1, 0);
  ForwardArgs args = w.forward;
  args.k = k.tensor;
  args.v = v.tensor;
  args.cache.page_table = k.table;
  const auto says = [&](ForwardArgs changed, Options options = {}, Distribution d = {}) {
    return message_of([&] { forward(changed, options, alone, d); });
  };
  const Distribution pages{.sharding = Sharding::kByPage};
  EXPECT_EQ(says(args, {}, pages), "");
  EXPECT_EQ(says(args), "rank 0: page_table: given, want rows by page with it");
  EXPECT_EQ(says(w.forward, {}, pages), "rank 0: page_table: not given, want it with rows by page");
  EXPECT_EQ(says(args, {}, {Sharding::kByPage, 2}),
            "rank 0: head_ranks: got 2, want 1 with rows by page");
  EXPECT_EQ(says(args, {.dropout_p = 0.5}, pages),
            "rank 0: dropout_p: given with rows by page, which take none");
  EXPECT_EQ(says(args, {.max_workspace = 8}, pages).substr(0, 41),
            "rank 0: max_workspace: got 8 bytes, want ");
  int32_t many = 10000;
  ForwardArgs longer = args;
  longer.lengths.seqused_k = ConstTensor::contiguous(&many, DType::kI32, {1});
  EXPECT_EQ(says(longer, {}, pages),
            "rank 0: seqused_k: got 10000 at 0, of which 10000 lie here, want at most the 80 of "
            "page_table");
  EXPECT_EQ(message_of([&] { backward(w.backward, {}, alone, pages); }),
            "rank 0: sharding: got by_page, want rows of sequences: caches have no gradients");
  EXPECT_EQ(message_of([] { rows_of(Sharding::kByPage, int64_t{64}, 2, 0); }),
            "sharding: got by_page, which shares out pages of caches, want one of rows");
}

// Caches whose pages lie on all of them.
TEST_F(DistributedOnGpus, Pages) {
  for (const Case& c : decoding_cases()) {
    if (size_of(c.dtype) != 2) continue;
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    const Expected e = expect(w);
    for (const int ranks : {2, 3}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by_pages(ranks, w, count_));
      EXPECT_TRUE(forward_is_right(w, e));
    }
  }
}

}  // namespace
}  // namespace fulgur::test

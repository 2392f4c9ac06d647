// append on a GPU: lengths, ids and positions that nobody has checked, graphs, and large tensors.
#include "fulgur/append.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <set>

#include "arena.h"
#include "cached.h"
#include "device.h"
#include "tensors.h"

namespace fulgur::test {
namespace {

using AppendOnGpu = OnGpu;
using Index = CacheShape::Index;
using Values = std::vector<double>;

constexpr double kMax = std::numeric_limits<int32_t>::max();
constexpr double kMin = std::numeric_limits<int32_t>::min();
constexpr int64_t kEntries = 24, kIds = 6, kPage = 8, kRows = kIds * kPage, kPositions = 120;

/// What a call reads besides numbers.
struct Places {
  Values old{5, 0, 9, 30}, first{0, 7, 100, 3};
  Values cu_new{0, 3, 3, 8, 9}, cu_q{0, 2, 5, 5, 9};  // of 12 and of 11 rows
  Values ids, indptr{0, 6, 12, 18, 24}, rows{3, 20, 0, 11};
  Places() {
    for (int64_t i = 0; i < kEntries; ++i)
      ids.push_back(static_cast<double>((5 * i + 2) % kEntries));
  }
};

std::vector<Places> wild_places() {
  std::vector<Places> all;
  const auto add = [&](Values Places::*which, Values values) {
    Places p;
    (p.*which).assign(values.begin(), values.begin() + static_cast<int64_t>((p.*which).size()));
    all.push_back(p);
  };
  add(&Places::old, {46, 47, 48, 49});  // the last of 48 rows, and after it
  add(&Places::old, {40, 44, 45, 47});
  add(&Places::first, {117, 118, 119, 120});
  add(&Places::first, {119, -1, 120, 0});
  add(&Places::indptr, {0, 0, 1, 24, 25});
  add(&Places::indptr, {20, 23, 24, 22, 30});
  add(&Places::rows, {23, 24, -1, 0});
  std::mt19937_64 random(1);
  for (Values Places::*which : {&Places::old, &Places::first, &Places::cu_new, &Places::cu_q,
                                &Places::ids, &Places::indptr, &Places::rows}) {
    add(which, Values(kEntries, kMax));
    add(which, Values(kEntries, kMin));
    add(which, Values(kEntries, -1));
    for (int n = 0; n < 3; ++n) {
      Values values;
      for (int64_t i = 0; i < kEntries; ++i) {
        values.push_back(n == 0 ? static_cast<double>(static_cast<int32_t>(random()))
                                : static_cast<double>(random() % 200) - 60);
      }
      add(which, values);
    }
  }
  Places any;
  for (Values Places::*which : {&Places::old, &Places::first, &Places::cu_new, &Places::cu_q,
                                &Places::ids, &Places::indptr, &Places::rows}) {
    for (double& x : any.*which) x = static_cast<double>(random() % 60) - 10;
  }
  all.push_back(any);
  return all;
}

class Call {
 public:
  Call(Index index, int64_t d, int64_t dv)
      : arena_(16, int64_t{1} << 20), index_(index), d_(d), dv_(dv) {
    std::mt19937_64 random(2);
    const int64_t rows = index == Index::kBatch ? kRows : kPage;
    t_.k_cache = arena_.place(DType::kBF16, {kEntries, rows, 2, d}, true);
    t_.v_cache = arena_.place(DType::kBF16, {kEntries, rows, 2, dv}, true);
    t_.q_out = arena_.place(DType::kBF16, {11, 4, d}, true);
    out_ = arena_.place(DType::kBF16, {11, 4, dv}, true);
    lse_ = arena_.place(DType::kF32, {4, 11}, true);
    const auto input = [&](DType dtype, std::initializer_list<int64_t> shape) {
      const Tensor t = arena_.place(dtype, shape, false);
      if (dtype != DType::kI32) randomize(arena_.host(t), random);
      return t;
    };
    t_.k_new = input(DType::kBF16, {12, 2, d});
    t_.v_new = input(DType::kBF16, {12, 2, dv});
    t_.q = input(DType::kBF16, {11, 4, d});
    t_.cos = input(DType::kF32, {kPositions, 8});
    t_.sin = input(DType::kF32, {kPositions, 8});
    t_.cache_seqlens = input(DType::kI32, {4});
    t_.rotary_seqlens = input(DType::kI32, {4});
    t_.cu_seqlens_k_new = input(DType::kI32, {5});
    t_.cu_seqlens_q = input(DType::kI32, {5});
    if (index == Index::kTable) t_.page_table = input(DType::kI32, {4, kIds});
    if (index == Index::kLists) t_.page_table = input(DType::kI32, {kEntries});
    if (index == Index::kLists) t_.page_indptr = input(DType::kI32, {5});
    if (index == Index::kBatch) t_.cache_batch_idx = input(DType::kI32, {4});
  }

  void run(const Run& run = {}) const { append(t_, {.mask = causal()}, run); }

  /// Appends and attends, whether one kernel does both or two.
  void run_with_attention(const Mask& mask, const Run& run = {}) const {
    const ForwardTensors attention{
        .q = t_.q, .out = out_, .lse = lse_, .cu_seqlens_q = t_.cu_seqlens_q};
    const ForwardArgs args = appending(attention, t_);
    forward(args, {.mask = mask, .max_seqlen_q = 11}, run);
  }

  /// The bytes of the caches, among those of all outputs.
  std::vector<std::byte> caches(std::vector<std::byte> outputs) const {
    outputs.resize(static_cast<size_t>((t_.k_cache.numel() + t_.v_cache.numel()) * 2));
    return outputs;
  }

  /// What the outputs hold after a call; nothing else has changed.
  std::vector<std::byte> on_gpu(const Places& p) {
    return on_gpu(p, [&] { run(); });
  }
  template <class Launch>
  std::vector<std::byte> on_gpu(const Places& p, Launch launch) {
    arena_.reset();
    put(t_.cache_seqlens, p.old);
    put(t_.rotary_seqlens, p.first);
    put(t_.cu_seqlens_k_new, p.cu_new);
    put(t_.cu_seqlens_q, p.cu_q);
    put(t_.page_table, p.ids);
    put(t_.page_indptr, p.indptr);
    put(t_.cache_batch_idx, p.rows);
    arena_.send();
    launch();
    EXPECT_EQ(message_of([] { cuda::synchronize(); }), "");
    return arena_.outputs();
  }

  /// What they hold where each token that has a place is appended on the CPU, alone, those of the
  /// first or of the last sequence first. False where two of them have one place.
  bool on_cpu(const Places& p, std::vector<std::byte>* outputs, bool last_first = false) {
    std::set<std::pair<int64_t, int64_t>> taken;
    bool apart = true;
    const auto each = [&](const Values& cu, auto body) {
      for (int64_t turn = 0; turn < 4; ++turn) {
        const int64_t b = last_first ? 3 - turn : turn;
        for (auto n = static_cast<int64_t>(cu[b]); n < static_cast<int64_t>(cu[b + 1]); ++n) {
          const int64_t i = n - static_cast<int64_t>(cu[b]);
          const auto position = static_cast<int64_t>(p.first[b]) + i;
          if (p.first[b] >= 0 && position < kPositions) body(b, i, n, position);
        }
      }
    };
    each(p.cu_new, [&](int64_t b, int64_t i, int64_t n, int64_t position) {
      const auto row = static_cast<int64_t>(p.old[b]) + i;
      if (p.old[b] < 0 || row >= kRows) return;
      const int64_t entry = entry_of(p, b, row), at = index_ == Index::kBatch ? row : row % kPage;
      if (entry < 0 || entry >= kEntries) return;
      apart &= taken.insert({entry, at}).second;
      one(n, entry, at, position, 0, 0);
    });
    each(p.cu_q,
         [&](int64_t, int64_t, int64_t n, int64_t position) { one(0, 0, 0, position, n, 1); });
    *outputs = arena_.pictured();
    return apart;
  }

 private:
  void put(const Tensor& t, const Values& values) {
    if (t.given()) write(arena_.host(t), values);
  }

  int64_t entry_of(const Places& p, int64_t b, int64_t row) const {
    if (index_ == Index::kBatch) return static_cast<int64_t>(p.rows[b]);
    if (index_ == Index::kTable) return static_cast<int64_t>(p.ids[b * kIds + row / kPage]);
    const int64_t id = static_cast<int64_t>(p.indptr[b]) + row / kPage;
    const bool listed = p.indptr[b] >= 0 && id < p.indptr[b + 1] && id < kEntries;
    return listed ? static_cast<int64_t>(p.ids[id]) : -1;
  }

  /// New row n to a row of an entry, or, where `queries` is 1, query nq to its position.
  void one(int64_t n, int64_t entry, int64_t row, int64_t position, int64_t nq, int64_t queries) {
    const auto at = [&](const Tensor& t, int64_t index, std::initializer_list<int64_t> shape) {
      Tensor part = arena_.host(t);
      part.data = static_cast<uint16_t*>(part.data) + index * part.strides[0];
      return Tensor::contiguous(part.data, part.dtype, shape);
    };
    const int64_t rows = t_.k_cache.shape[1], fresh = 1 - queries;
    const Dense old(DType::kI32, {1}), first(DType::kI32, {1});
    write(old, {{static_cast<double>(row)}});
    write(first, {{static_cast<double>(position)}});
    append({.rows = {.k_cache = at(t_.k_cache, entry, {1, rows, 2, d_}),
                     .v_cache = at(t_.v_cache, entry, {1, rows, 2, dv_}),
                     .k_new = at(t_.k_new, n, {1, fresh, 2, d_}),
                     .v_new = at(t_.v_new, n, {1, fresh, 2, dv_}),
                     .cache_seqlens = old,
                     .rotary = {.cos = arena_.host(t_.cos),
                                .sin = arena_.host(t_.sin),
                                .rotary_seqlens = first}},
            .q = at(t_.q, nq, {1, queries, 4, d_}),
            .q_out = at(t_.q_out, nq, {1, queries, 4, d_})},
           {.mask = causal()});
  }

  Arena arena_;
  Index index_;
  int64_t d_, dv_;
  AppendTensors t_;
  Tensor out_, lse_;
};

TEST_F(AppendOnGpu, WhatHasNoPlaceIsNotWritten) {
  for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
    for (const auto& [d, dv] : {std::pair{64, 32}, {30, 17}}) {  // by 16 bytes, and by elements
      Call call(index, d, dv);
      const Places right;
      std::vector<std::byte> want;
      const auto got = call.on_gpu(right);
      ASSERT_TRUE(call.on_cpu(right, &want));
      ASSERT_EQ(got, want);
      const std::vector<Places> all = wild_places();
      for (size_t n = 0; n < all.size(); ++n) {
        SCOPED_TRACE("index " + std::to_string(static_cast<int>(index)) + ", d " +
                     std::to_string(d) + ", places " + std::to_string(n));
        const std::vector<std::byte> now = call.on_gpu(all[n]);
        const bool whose = all[n].cu_new == right.cu_new && all[n].cu_q == right.cu_q;
        if (whose && call.on_cpu(all[n], &want)) {
          ASSERT_EQ(now, want);
        }
        ASSERT_EQ(call.on_gpu(right), got);
      }
    }
  }
}

// Rows that tokens of two sequences would take have elements of either. All others are as ever.
TEST_F(AppendOnGpu, PlacesOfTwoTokens) {
  for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
    for (const int64_t d : {64, 30}) {
      SCOPED_TRACE("index " + std::to_string(static_cast<int>(index)) + ", d " + std::to_string(d));
      Call call(index, d, d);
      Places p;
      p.old[2] = p.old[0] + 1;
      p.rows[2] = p.rows[0];
      std::copy_n(p.ids.begin(), kIds, p.ids.begin() + 2 * kIds);
      std::vector<std::byte> first, last;
      const auto got = call.on_gpu(p);
      ASSERT_FALSE(call.on_cpu(p, &first));
      ASSERT_EQ(call.on_gpu(p).size(), got.size());  // the picture is as it was before
      ASSERT_FALSE(call.on_cpu(p, &last, true));
      ASSERT_NE(first, last);
      for (size_t i = 0; i < got.size(); i += 2) {
        const auto is = [&](const std::vector<std::byte>& want) {
          return std::equal(&got[i], &got[i] + 2, &want[i]);
        };
        ASSERT_TRUE(is(first) || is(last)) << "element " << i / 2;
      }
    }
  }
}

// Rows without a place in the cache are not written by calls that also attend, and not read: by the
// kernel that attends where a mask hides no key after the queries, else before it.
TEST_F(AppendOnGpu, WhatHasNoPlaceIsNotWrittenByCallsThatAttend) {
  for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
    for (const Mask& mask : {causal(), window(3, 0)}) {
      Call call(index, 64, 32);
      const Places right;
      std::vector<std::byte> want;
      const auto run = [&](const Places& p) {
        return call.on_gpu(p, [&] { call.run_with_attention(mask); });
      };
      const auto got = run(right);
      ASSERT_TRUE(call.on_cpu(right, &want));
      ASSERT_EQ(call.caches(got), call.caches(want));
      const std::vector<Places> all = wild_places();
      for (size_t n = 0; n < all.size(); ++n) {
        SCOPED_TRACE("index " + std::to_string(static_cast<int>(index)) + ", places " +
                     std::to_string(n));
        const std::vector<std::byte> now = run(all[n]);
        const bool whose = all[n].cu_new == right.cu_new && all[n].cu_q == right.cu_q;
        if (whose && call.on_cpu(all[n], &want)) {
          ASSERT_EQ(call.caches(now), call.caches(want));
        }
        ASSERT_EQ(run(right), got);
      }
    }
  }
}

// Lengths, pages and positions are those on the device when a graph is replayed.
TEST_F(AppendOnGpu, PlacesChangeBetweenReplays) {
  const Stream stream;
  for (const Index index : {Index::kTable, Index::kLists, Index::kBatch}) {
    Call call(index, 64, 32);
    call.on_gpu(Places());  // loads the kernel
    const Graph graph(stream, [&] { call.run(stream.run()); });
    std::mt19937_64 random(5);
    for (int n = 0; n < 5; ++n) {
      Places p;
      std::shuffle(p.ids.begin(), p.ids.end(), random);
      for (double& x : p.old) x = static_cast<double>(random() % 40);
      for (double& x : p.first) x = static_cast<double>(random() % 100);
      for (double& x : p.rows) x += n;
      p.cu_new = {0, 1.0 * n, 4, 4, 11};
      p.cu_q = {0, 0, 4, 5.0 + n, 11};
      std::vector<std::byte> want;
      const auto got = call.on_gpu(p, [&] {
        graph.launch(stream);
        stream.synchronize();
      });
      ASSERT_TRUE(call.on_cpu(p, &want));
      ASSERT_EQ(got, want);
    }
  }
}

// Pages whose elements lie beyond the 2^31st.
TEST_F(AppendOnGpu, PagesBeyond2To31Elements) {
  constexpr int64_t kPages = (int64_t{1} << 31) / (16 * 2 * 64) + 3;
  struct Free {
    void operator()(void* data) const { cuda::deallocate(data); }
  };
  std::unique_ptr<void, Free> k_memory, v_memory;
  const int64_t page_bytes = 16 * 2 * 64 * 2, bytes = kPages * page_bytes;
  try {
    k_memory.reset(cuda::allocate(bytes));
    v_memory.reset(cuda::allocate(bytes));
  } catch (const Error& error) {
    if (error.status() != Status::kOutOfMemory) throw;
    GTEST_SKIP() << error.what();
  }
  const auto cache = [&](void* memory) {
    fill(memory, bytes, 0x3c);
    return Tensor::contiguous(memory, DType::kBF16, {kPages, 16, 2, 64}, {DeviceType::kCuda, 0});
  };
  const Tensor k = cache(k_memory.get()), v = cache(v_memory.get());
  const DeviceTensor k_new(DType::kBF16, {1, 1, 2, 64}, 1), v_new(DType::kBF16, {1, 1, 2, 64}, 2);
  const DeviceTensor old(DType::kI32, {1}, 3), table(DType::kI32, {1, 1}, 4);
  const auto set = [](const Tensor& t, int32_t value) {
    cuda::copy(t.data, &value, sizeof(value));
  };
  set(old, 15);
  set(table, static_cast<int32_t>(kPages - 1));
  append(
      {.rows = {.k_cache = k, .v_cache = v, .k_new = k_new, .v_new = v_new, .cache_seqlens = old},
       .cache = {.page_table = table}});
  cuda::synchronize();
  const int64_t row = 2 * 64 * 2;
  for (const auto& [to, from] : {std::pair{&k, &k_new}, {&v, &v_new}}) {
    std::vector<std::byte> last(static_cast<size_t>(page_bytes)),
        want(last.size(), std::byte{0x3c});
    cuda::copy(last.data(), static_cast<std::byte*>(to->data) + bytes - page_bytes, page_bytes);
    const std::vector<std::byte> fresh = from->bits();
    std::copy(fresh.begin(), fresh.end(), want.end() - row);
    EXPECT_EQ(last, want);
    // Where a row of 2^31 elements less would be.
    const int64_t wrapped = bytes - row - (int64_t{1} << 32);
    std::vector<std::byte> other(static_cast<size_t>(row)), filled(other.size(), std::byte{0x3c});
    cuda::copy(other.data(), static_cast<std::byte*>(to->data) + wrapped, row);
    EXPECT_EQ(other, filled);
  }
}

}  // namespace
}  // namespace fulgur::test

#include "cached.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "engine_memory.h"

namespace fulgur::test {
namespace {

constexpr int64_t kFree = 3;   // entries of the cache that belong to no sequence
constexpr int64_t kExtra = 2;  // ids of a sequence after those that it needs
constexpr int64_t kGap = 5;    // rows of an entry of the batch that no sequence reaches

}  // namespace

std::string CacheShape::name() const {
  const char* const orders[] = {"nhd", "hnd", "interleaved"};
  const char* const indices[] = {"table", "lists", "batch"};
  std::string s = orders[static_cast<int>(order)];
  s += std::string("_") + indices[static_cast<int>(index)];
  if (index != Index::kBatch) s += "_page" + std::to_string(page);
  if (id_stride != 1) s += "_ids" + std::to_string(id_stride);
  return s + (leftpad ? "_leftpad" : "");
}

std::vector<CacheShape> cache_shapes() {
  using Order = CacheShape::Order;
  using Index = CacheShape::Index;
  std::vector<CacheShape> all;
  for (const bool leftpad : {false, true}) {
    for (const Order order : {Order::kNhd, Order::kHnd, Order::kInterleaved}) {
      for (const Index index : {Index::kTable, Index::kLists}) {
        for (const int64_t page : {1, 3, 16, 17, 64, 256}) {
          all.push_back({order, index, page, leftpad});
        }
      }
      all.push_back({order, Index::kBatch, 0, leftpad});
    }
    for (const Index index : {Index::kTable, Index::kLists}) {
      for (const int64_t page : {3, 64}) {
        for (const int64_t id_stride : {3, -2})
          all.push_back({Order::kNhd, index, page, leftpad, id_stride});
      }
    }
  }
  return all;
}

Cached::Cached(const Workload& w, const CacheShape& shape, uint64_t seed)
    : shape(shape),
      forward(w.forward),
      w_(w),
      random_(seed),
      k_(read(w.forward.k)),
      v_(read(w.forward.v)) {
  make_storage();
  forward.cu_seqlens_k = {};
  std::vector<int64_t> used, leftpad;
  for (size_t b = 0; b < w.sequences.size(); ++b) {
    leftpad.push_back(padding(b));
    used.push_back(padding(b) + w.sequences[b].sk);
  }
  forward.seqused_k = vector(used);
  if (shape.leftpad) forward.leftpad_k = vector(leftpad);
  fill();
}

void Cached::move() { fill(); }

void Cached::run_forward() { compute(forward, w_.options, w_.run_options); }

testing::AssertionResult Cached::check_memory() const {
  for (const Storage& s : storages_) {
    if (auto result = s.all_unchanged(); !result) return result << " (cache)";
  }
  return testing::AssertionSuccess();
}

// The keys in front of a sequence's first: none, some of a page, more than a page.
int64_t Cached::padding(size_t b) const {
  const int64_t paddings[] = {5, 0, 2 * shape.page + 1};
  return shape.leftpad ? paddings[b % 3] : 0;
}

int64_t Cached::entries_of(size_t b) const {
  if (shape.index == CacheShape::Index::kBatch) return 1;
  return (padding(b) + w_.sequences[b].sk + shape.page - 1) / shape.page;
}

void Cached::make_storage() {
  const Case& c = w_.c;
  const bool batch = shape.index == CacheShape::Index::kBatch;
  rows_ = shape.page;
  count_ = kFree;
  for (size_t b = 0; b < w_.sequences.size(); ++b) {
    count_ += entries_of(b);
    if (batch) rows_ = std::max(rows_, padding(b) + w_.sequences[b].sk + kGap);
  }
  const bool both = shape.order == CacheShape::Order::kInterleaved;
  const int64_t dims[] = {both ? std::max(c.d, c.dv) : c.d, both ? std::max(c.d, c.dv) : c.dv};
  const auto view = [&](int64_t dim, int64_t room, int64_t offset) {
    const bool hnd = shape.order == CacheShape::Order::kHnd;
    const std::array sizes{count_, rows_, c.hk, dim};
    const int64_t entry = rows_ * c.hk * room * (both ? 2 : 1);
    const std::array strides{entry, hnd ? room : c.hk * room, hnd ? rows_ * room : room,
                             int64_t{1}};
    return storages_.back().view(offset, sizes, strides);
  };
  const int64_t elements = count_ * rows_ * c.hk;
  storages_.emplace_back(c.dtype, elements * dims[0] * (both ? 2 : 1));
  forward.k = view(c.d, dims[0], 0);
  if (!both) storages_.emplace_back(c.dtype, elements * dims[1]);
  forward.v = view(c.dv, dims[1], both ? rows_ * c.hk * dims[0] : 0);

  const auto sequences = static_cast<int64_t>(w_.sequences.size());
  const auto index = [&](std::initializer_list<int64_t> sizes, int64_t row, int64_t step) {
    const int64_t ids = std::data(sizes)[sizes.size() - 1], length = std::abs(step);
    const std::vector<int64_t> strides =
        sizes.size() == 2 ? std::vector<int64_t>{row * length, step} : std::vector<int64_t>{step};
    storages_.emplace_back(DType::kI32, (sizes.size() == 2 ? sequences * row : ids) * length);
    return storages_.back().view(step < 0 ? (ids - 1) * length : 0,
                                 std::span(sizes.begin(), sizes.size()), strides);
  };
  int64_t most = 0, all = kExtra;
  std::vector<int64_t> indptr{all};
  for (size_t b = 0; b < w_.sequences.size(); ++b) {
    most = std::max(most, entries_of(b));
    all += entries_of(b) + static_cast<int64_t>(b) % 2 * kExtra;
    indptr.push_back(all);
  }
  if (batch) {
    forward.cache_batch_idx = index({sequences}, 0, 1);
  } else if (shape.index == CacheShape::Index::kTable) {
    forward.page_table = index({sequences, most + kExtra}, most + kExtra + 3, shape.id_stride);
  } else {
    forward.page_table = index({all}, 0, shape.id_stride);
    forward.page_indptr = vector(indptr);
  }
}

Tensor Cached::vector(const std::vector<int64_t>& values) {
  const std::array shape{static_cast<int64_t>(values.size())}, strides{int64_t{1}};
  const Tensor t = storages_.emplace_back(DType::kI32, shape[0]).view(0, shape, strides);
  write(t, std::vector<double>(values.begin(), values.end()));
  return t;
}

void Cached::fill() {
  std::vector<int64_t> free(static_cast<size_t>(count_));
  std::iota(free.begin(), free.end(), 0);
  for (size_t i = free.size() - 1; i > 0; --i) std::swap(free[i], free[random_() % (i + 1)]);
  entries.clear();
  for (size_t b = 0; b < w_.sequences.size(); ++b) {
    const auto end = free.end() - entries_of(b);
    entries.emplace_back(end, free.end());
    free.erase(end, free.end());
  }
  Storage::around(forward.k.data)->poison();
  Storage::around(forward.v.data)->poison();
  write_keys(forward.k, k_, w_.c.d);
  write_keys(forward.v, v_, w_.c.dv);
  write_index();
  for (Storage& s : storages_) s.seal();
}

void Cached::write_keys(const Tensor& to, const std::vector<double>& from, int64_t dim) {
  for (size_t b = 0; b < w_.sequences.size(); ++b) {
    for (int64_t j = 0; j < w_.sequences[b].sk; ++j) {
      const int64_t row = padding(b) + j;
      const int64_t at = entries[b][static_cast<size_t>(row / rows_)] * to.strides[0] +
                         row % rows_ * to.strides[1];
      for (int64_t h = 0; h < w_.c.hk; ++h) {
        const int64_t source = ((w_.sequences[b].k_begin + j) * w_.c.hk + h) * dim;
        for (int64_t c = 0; c < dim; ++c) {
          store(to.data, to.dtype, at + h * to.strides[2] + c,
                from[static_cast<size_t>(source + c)]);
        }
      }
    }
  }
}

// Writes the ids of pages that hold keys; the other ids are poison.
void Cached::write_index() {
  const auto put = [](const Tensor& t, int64_t at, int64_t id) {
    store(t.data, DType::kI32, at, static_cast<double>(id));
  };
  if (shape.index == CacheShape::Index::kBatch) {
    for (size_t b = 0; b < entries.size(); ++b) {
      if (w_.sequences[b].sk > 0)
        put(forward.cache_batch_idx, static_cast<int64_t>(b), entries[b][0]);
    }
    return;
  }
  Storage::around(forward.page_table.data)->poison();
  for (size_t b = 0; b < entries.size(); ++b) {
    const auto row = static_cast<int64_t>(b);
    const int64_t first =
        forward.page_indptr.given()
            ? static_cast<int64_t>(load(forward.page_indptr.data, DType::kI32, row)) *
                  shape.id_stride
            : row * forward.page_table.strides[0];
    if (w_.sequences[b].sk == 0) continue;
    for (int64_t i = padding(b) / shape.page; i < entries_of(b); ++i) {
      put(forward.page_table, first + i * shape.id_stride, entries[b][static_cast<size_t>(i)]);
    }
  }
}

void run_contiguous(Workload& w, uint64_t seed) {
  // The decode kernel's, whose bits they are, have up to 64 rows of a kv head.
  const bool decoded = w.c.sq * w.c.hq <= 64 * w.c.hk;
  if (w.options.engine != "cuda" || decoded) return w.run_forward();
  Cached(w, {.index = CacheShape::Index::kBatch, .page = 0}, seed).run_forward();
}

}  // namespace fulgur::test

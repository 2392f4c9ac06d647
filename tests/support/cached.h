/// The keys of a workload in a cache: pages or rows handed out at random, poison around them.
#pragma once

#include <deque>
#include <random>
#include <string>
#include <vector>

#include "workload.h"

namespace fulgur::test {

/// How a cache lies in memory, and how a call finds its sequences there.
struct CacheShape {
  enum class Order {
    kNhd,          ///< (pages, page, heads, dim), K and V apart
    kHnd,          ///< (pages, heads, page, dim) in memory
    kInterleaved,  ///< (pages, 2, page, heads, dim): K and V of a page side by side
  };
  enum class Index { kTable, kLists, kBatch };  ///< page_table, page_indptr, cache_batch_idx

  Order order = Order::kNhd;
  Index index = Index::kTable;
  int64_t page = 16;
  bool leftpad = false;
  int64_t id_stride = 1;  ///< of page_table, from an id to the next

  std::string name() const;
};

/// Every order and index with every page size, with and without left padding.
std::vector<CacheShape> cache_shapes();

class Cached {
 public:
  /// A cache of the keys that exist in `w`, which computes the expected results.
  Cached(const Workload& w, const CacheShape& shape, uint64_t seed);
  Cached(const Cached&) = delete;
  Cached& operator=(const Cached&) = delete;

  /// Moves every sequence to other pages or rows, and what is left of the old ones is poison.
  void move();
  /// Plans and runs, writing the outputs of the workload.
  void run_forward();
  /// The cache, its tables and its lengths are as they were made.
  testing::AssertionResult check_memory() const;

  CacheShape shape;
  ForwardTensors forward;
  /// The entries of the cache that hold each sequence: pages, or one row of the batch.
  std::vector<std::vector<int64_t>> entries;

 private:
  int64_t padding(size_t b) const;
  int64_t entries_of(size_t b) const;
  void make_storage();
  Tensor vector(const std::vector<int64_t>& values);
  void fill();
  void write_keys(const Tensor& to, const std::vector<double>& from, int64_t dim);
  void write_index();

  const Workload& w_;
  std::mt19937_64 random_;
  int64_t rows_ = 0, count_ = 0;  // of an entry; entries
  std::vector<double> k_, v_;     // rows of all keys, as the workload's
  std::deque<Storage> storages_;
};

/// Computes what invariant calls over caches of the same keys give bit for bit: from contiguous
/// keys, but on GPUs, where another kernel does that of many rows, these from a contiguous cache.
void run_contiguous(Workload& w, uint64_t seed);

}  // namespace fulgur::test

/// New rows of K and V, and queries, for the caches of `Cached`: what append is tested on.
#pragma once

#include <cstdint>
#include <deque>
#include <random>
#include <string>
#include <vector>

#include "cached.h"

namespace fulgur::test {

struct AppendCase {
  Case c;  ///< the attention that follows; packed: new rows are ragged
  CacheShape shape;
  int64_t rotary_dim = 0;
  bool interleaved = false;
  bool f32_angles = false;  ///< cos and sin, else in the dtype of the case
  bool positions = false;   ///< rotary_seqlens
  bool in_place = false;    ///< q_out is q
  bool aligned = false;     ///< new rows and angles lie at multiples of 16 bytes, else at odd ones

  std::string name() const;
};

/// For GoogleTest.
inline void PrintTo(const AppendCase& a, std::ostream* os) { *os << a.name(); }

/// The keys of a workload, the last of which are still to come: a call that brings them.
class Appended {
 public:
  Appended(const AppendCase& given, uint64_t seed);
  Appended(const Appended&) = delete;
  Appended& operator=(const Appended&) = delete;

  /// In the memory of the engine that the options name.
  void run();
  /// The same call with the attention that follows, which writes the outputs of the workload.
  void run_with_attention();
  /// What it says of attention, and of rows.
  ForwardTensors attention() const;
  AppendTensors rows() const;

  /// The new rows and the queries are as a model in double precision says, and nothing else of the
  /// caches and the outputs has changed. What is stored becomes the keys of the workload, and its
  /// queries those that are rotated.
  testing::AssertionResult check();
  /// The same after a call with attention, whose queries are not changed.
  testing::AssertionResult check_rows();
  /// Nothing at all has changed.
  testing::AssertionResult nothing_written() const;

  AppendCase given;
  Workload w;
  Cached cached;
  AppendTensors args;
  std::vector<int64_t> old, fresh;  ///< of each sequence: cache_seqlens, and new rows

 private:
  Storage& storage(DType dtype, int64_t elements);
  Tensor ints(const std::vector<int64_t>& values);
  Tensor rows(int64_t heads, int64_t dim);
  void make_angles(int64_t positions);
  int64_t first_position(size_t b) const;
  /// The columns of one row of `x`, turned to a position (-1: not turned), are those of `got`.
  testing::AssertionResult right(const std::vector<double>& x, const std::vector<double>& got,
                                 int64_t position) const;
  /// Calls body(NewRow, Row) for every new row and head.
  template <class Body>
  void for_each_new(const Tensor& cache, Body body) const;
  /// Checks the new rows of a cache. They get back what they held, which are the `keys` of the
  /// workload, and those become what was stored.
  testing::AssertionResult check_new(const Tensor& cache, const Tensor& brought, bool turned,
                                     std::vector<double>& keys) const;
  testing::AssertionResult check_keys(std::vector<double>& k, std::vector<double>& v);
  testing::AssertionResult check_queries();
  /// What is stored becomes the keys of the workload.
  void keep(const std::vector<double>& k, const std::vector<double>& v);

  std::mt19937_64 random_;
  std::deque<Storage> storages_;
  std::vector<double> q_;  // before it turned
};

}  // namespace fulgur::test

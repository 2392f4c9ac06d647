#pragma once

#include <algorithm>
#include <cstdint>

#include "call/kv_cache.h"
#include "call/lengths.h"

namespace fulgur {

/// Where the keys of a sequence lie in K and V: in rows of one entry of the batch, or of pages.
struct KvSpan {
  int64_t begin = 0;               ///< the row of its first key
  int64_t entry = 0;               ///< of the batch
  const int32_t* pages = nullptr;  ///< row r is row r % page of pages[r / page]; null without pages
  int64_t page = 0;
};

/// A walk over keys [j, j + n) of a sequence in runs, whose rows lie at one stride: the rows [row,
/// row + count) of an entry of the batch, or of a page.
class KvRuns {
 public:
  KvRuns(const KvSpan& keys, int64_t j, int64_t n) : page_(keys.page), left_(n) {
    row = keys.begin + j;
    count = n;
    entry = keys.entry;
    if (keys.pages == nullptr || n == 0) return;
    id_ = keys.pages + row / page_;
    row %= page_;
    go_to_page();
  }
  bool done() const { return left_ == 0; }
  void next() {
    left_ -= count;
    if (left_ == 0) return;
    ++id_;
    row = 0;
    go_to_page();
  }

  int64_t entry, row, count;

 private:
  void go_to_page() {
    entry = *id_;
    count = std::min(left_, page_ - row);
  }

  const int32_t* id_ = nullptr;
  int64_t page_, left_;
};

/// The keys of the sequences of one call whose tables are in the host's memory, where they stay.
class KvLocator {
 public:
  /// Checks the entries of the tables that the keys of the sequences need. Throws
  /// Error(kInvalidArgument). `Args`: ForwardArgs, BackwardArgs.
  template <class Args>
  KvLocator(const Problem& problem, const Sequences& sequences, const Args& args)
      : KvLocator(problem, sequences, cache_of(args)) {}

  /// Nothing is checked yet. `k`: what the call names the cache of K.
  KvLocator(const Problem& problem, const KvCache& tensors, const char* k);

  /// Checks the entries of the tables that the keys of sequence b need, which is `s`.
  void check(int64_t b, const Sequence& s) const;
  /// Of sequence b, which is `s`.
  KvSpan of(int64_t b, const Sequence& s) const;

 private:
  KvLocator(const Problem& problem, const Sequences& sequences, const KvCache& tensors);

  /// The first page id of sequence b.
  const int32_t* pages(int64_t b) const;
  void check_pages(int64_t b, const Sequence& s) const;

  const Problem* p_;
  const char* k_;
  const int32_t *batch_idx_ = nullptr, *table_ = nullptr, *indptr_ = nullptr;
};

}  // namespace fulgur

#pragma once

#include <algorithm>
#include <cstdint>

#include "call/kv_cache.h"
#include "call/lengths.h"

namespace fulgur {

/// The ids of the pages of a sequence, as a page table has them.
struct PageIds {
  const int32_t* first = nullptr;  ///< null without pages
  int64_t stride = 1;              ///< from an id to the next
  int32_t operator[](int64_t i) const { return first[i * stride]; }
};

/// Where the keys of a sequence lie in K and V: in rows of one entry of the batch, or of pages.
struct KvSpan {
  int64_t begin = 0;  ///< the row of its first key
  int64_t entry = 0;  ///< of the batch
  PageIds pages{};    ///< row r is row r % page of pages[r / page]
  int64_t page = 0;
};

/// A walk over keys [j, j + n) of a sequence in runs, whose rows lie at one stride: the rows [row,
/// row + count) of an entry of the batch, or of a page.
class KvRuns {
 public:
  KvRuns(const KvSpan& keys, int64_t j, int64_t n)
      : pages_(keys.pages), page_(keys.page), left_(n) {
    row = keys.begin + j;
    count = n;
    entry = keys.entry;
    if (pages_.first == nullptr || n == 0) return;
    at_ = row / page_;
    row %= page_;
    go_to_page();
  }
  bool done() const { return left_ == 0; }
  void next() {
    left_ -= count;
    if (left_ == 0) return;
    ++at_;
    row = 0;
    go_to_page();
  }

  int64_t entry, row, count;

 private:
  void go_to_page() {
    entry = pages_[at_];
    count = std::min(left_, page_ - row);
  }

  PageIds pages_;
  int64_t page_, left_;
  int64_t at_ = 0;  // the index of the page in pages_
};

/// Finds the keys of the sequences of one call by its tables, which lie in host memory and must
/// outlive this.
class KvLocator {
 public:
  /// Checks the entries of the tables that the keys of the sequences need. Throws
  /// Error(kInvalidArgument). `Args`: ForwardArgs, BackwardArgs.
  template <class Args>
  KvLocator(const Problem& problem, const Sequences& sequences, const Args& args)
      : KvLocator(problem, sequences, cache_of(args)) {}

  /// Does not check the tables: see check(). `k` is the name of the cache of K in errors.
  KvLocator(const Problem& problem, const KvCache& tensors, const char* k);

  /// Checks the entries of the tables that the keys of sequence b, `s`, need.
  void check(int64_t b, const Sequence& s) const;
  /// The keys of sequence b, `s`.
  KvSpan of(int64_t b, const Sequence& s) const;

 private:
  KvLocator(const Problem& problem, const Sequences& sequences, const KvCache& tensors);

  PageIds pages(int64_t b) const;
  void check_pages(int64_t b, const Sequence& s) const;

  const Problem* p_;
  const char* k_;
  const int32_t *batch_idx_ = nullptr, *table_ = nullptr, *indptr_ = nullptr;
};

}  // namespace fulgur

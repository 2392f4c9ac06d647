#pragma once

#include <array>
#include <cstdint>

#include "base/check.h"
#include "call/kv_cache.h"
#include "call/problem.h"
#include "expression/evaluate.h"

namespace fulgur {

/// One sequence: its first row in q (0 unless packed), its first key among the rows that k has for
/// it (among all where k is packed), and its lengths. Of a part of a longer sequence also how far
/// diagonals lie after those of a whole one, and its first key in the longer one.
struct Sequence {
  int64_t q_begin = 0, k_begin = 0, sq = 0, sk = 0;
  int64_t shift = 0, first_key = 0;
  bool operator==(const Sequence&) const = default;
};

/// The sequences of one call whose lengths are in the host's memory, where they stay. Lengths on a
/// device are taken to be as long as planned for: then the others are checked, but none is known.
class Sequences {
 public:
  /// Checks the lengths against the problem: not negative, non-decreasing, within the tensors, no
  /// longer than what was planned for. Throws Error(kInvalidArgument). `Args`: ForwardArgs,
  /// BackwardArgs.
  template <class Args>
  Sequences(const Problem& problem, const Args& args)
      : Sequences(problem, args.lengths.cu_seqlens_q, args.lengths.cu_seqlens_k,
                  args.lengths.seqused_q, args.lengths.seqused_k, cache_of(args)) {}

  Sequences(const Problem& problem, const ConstTensor& cu_q, const ConstTensor& cu_k,
            const ConstTensor& used_q, const ConstTensor& used_k, const KvCache& cache);

  int64_t size() const { return p_->batch; }
  Sequence operator[](int64_t b) const;
  /// First row and count of the packed rows before the first sequence and after the last one, or of
  /// no rows.
  std::array<Sequence, 2> padding() const;
  /// The rows of sequence b that tensors have room for, seqused or not.
  int64_t room_q(int64_t b) const;
  int64_t room_k(int64_t b) const;

 private:
  const Problem* p_;
  const int32_t *cu_q_ = nullptr, *cu_k_ = nullptr, *used_q_ = nullptr, *used_k_ = nullptr;
  const int32_t *indptr_ = nullptr, *leftpad_ = nullptr;
};

/// The longest sequence of a problem; where all are alike, any of them.
Sequence whole_sequence(const Problem& problem);

/// Where the scores of q head h of sequence b are, for expressions; query and key aside.
expression::Place place_of(const Problem& problem, int64_t b, int64_t h, const Sequence& s);

/// Whether the host can read the lengths of a call, if it has any.
template <class Args>
bool lengths_on_host(const Args& args) {
  const KvCache cache = cache_of(args);
  for (const ConstTensor* t :
       {&args.lengths.cu_seqlens_q, &args.lengths.cu_seqlens_k, &args.lengths.seqused_q,
        &args.lengths.seqused_k, &cache.page_indptr, &cache.leftpad_k}) {
    if (t->given() && (!on_host(*t) || t->data == nullptr)) return false;
  }
  return true;
}

/// The longest of the cu_seqlens, checked, in host memory: that of a plan without max_seqlen. They
/// divide `total` things: "rows of q".
int64_t longest_sequence(const char* name, const ConstTensor& cu_seqlens, const char* things,
                         int64_t total);

}  // namespace fulgur

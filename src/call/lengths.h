#pragma once

#include <array>
#include <cstdint>

#include "base/check.h"
#include "call/kv_cache.h"
#include "call/problem.h"
#include "expression/evaluate.h"

namespace fulgur {

/// One sequence: its first row in q (0 unless packed), its first key among the rows that k has for
/// it (among all where k is packed), and its lengths. If it is a part of a longer sequence, `shift`
/// moves its diagonals to those of the longer one, where its keys begin at `first_key`.
struct Sequence {
  int64_t q_begin = 0, k_begin = 0, sq = 0, sk = 0;
  int64_t shift = 0, first_key = 0;
  bool operator==(const Sequence&) const = default;
};

/// The sequences of one call, whose lengths lie in host memory and must outlive this. Lengths on a
/// device count as the longest that were planned for.
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
  /// The packed rows before the first sequence, and those after the last one: first row and count.
  std::array<Sequence, 2> padding() const;
  /// The rows of sequence b that the tensors have, whether seqused_q or seqused_k counts them or
  /// not.
  int64_t room_q(int64_t b) const;
  int64_t room_k(int64_t b) const;

 private:
  const Problem* p_;
  const int32_t *cu_q_ = nullptr, *cu_k_ = nullptr, *used_q_ = nullptr, *used_k_ = nullptr;
  const int32_t *indptr_ = nullptr, *leftpad_ = nullptr;
};

/// The longest sequence that a problem allows.
Sequence whole_sequence(const Problem& problem);

/// What expressions know about the scores of q head h of sequence b, but for query and key.
expression::Place place_of(const Problem& problem, int64_t b, int64_t h, const Sequence& s);

/// Whether the host can read all lengths that a call has.
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

/// Checks cu_seqlens in host memory, and returns the length of the longest sequence. They divide
/// `total` rows, which errors call `things`: "rows of q".
int64_t longest_sequence(const char* name, const ConstTensor& cu_seqlens, const char* things,
                         int64_t total);

}  // namespace fulgur

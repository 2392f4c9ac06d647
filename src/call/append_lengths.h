#pragma once

#include <cstdint>

#include "call/append_call.h"
#include "call/lengths.h"

namespace fulgur {

/// The rows of all sequences, one sequence after the other. Packed rows whose lengths lie on a
/// device are not counted.
class Tokens {
 public:
  /// Rows packed by `cu_seqlens`, or `rows` rows of each sequence where that is not given.
  Tokens(int64_t batch, const ConstTensor& cu_seqlens, int64_t rows);

  int64_t all() const { return begin(batch_) - begin(0); }
  int64_t of(int64_t b) const { return begin(b + 1) - begin(b); }

  struct Token {
    int64_t b, i;  ///< row i of sequence b
    int64_t row;   ///< the same row in the tensor, for Layout::offset
  };
  Token operator[](int64_t t) const;

 private:
  int64_t begin(int64_t b) const { return cu_ != nullptr ? cu_[b] : b * each_; }

  int64_t batch_, each_;
  const int32_t* cu_ = nullptr;
};

/// The lengths of a call of append that lie in host memory, and must outlive this.
class AppendLengths {
 public:
  /// Checks that the lengths divide the rows, that the new rows fit after the old ones, and that
  /// there are rotary angles for their positions. Throws Error(kInvalidArgument).
  explicit AppendLengths(const AppendCall& call);

  const Tokens& tokens() const { return tokens_; }
  const Tokens& queries() const { return queries_; }
  /// The new rows of sequence b as keys, which follow its old ones.
  Sequence new_keys(int64_t b) const { return {.k_begin = old_[b], .sk = tokens_.of(b)}; }
  /// The position of the first new token of sequence b.
  int64_t first_position(int64_t b) const { return first_[b]; }

 private:
  void check_room(const AppendCall& call, const Sequences& sequences) const;
  void check_positions(const AppendCall& call) const;

  Tokens tokens_, queries_;
  const int32_t *old_, *first_;  ///< cache_seqlens, first positions; null on a device
};

}  // namespace fulgur

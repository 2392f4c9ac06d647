#include "call/append_lengths.h"

#include <algorithm>
#include <limits>

namespace fulgur {
namespace {

constexpr int64_t kMaxKeys = std::numeric_limits<int32_t>::max();  // seqused_k is int32

/// The values of a vector that the host can read, or null.
const int32_t* readable(const ConstTensor& t) {
  return t.given() && on_host(t) ? static_cast<const int32_t*>(t.data) : nullptr;
}

}  // namespace

Tokens::Tokens(int64_t batch, const ConstTensor& cu_seqlens, int64_t rows)
    : batch_(batch), each_(cu_seqlens.given() ? 0 : rows), cu_(readable(cu_seqlens)) {}

Tokens::Token Tokens::operator[](int64_t t) const {
  if (cu_ == nullptr) return {t / each_, t % each_, t % each_};
  const int64_t row = cu_[0] + t, b = std::upper_bound(cu_, cu_ + batch_ + 1, row) - cu_ - 1;
  return {b, row - cu_[b], row};
}

AppendLengths::AppendLengths(const AppendCall& c)
    : tokens_(c.p.batch, c.args.rows.cu_seqlens_k_new, c.args.rows.k_new.shape[1]),
      queries_(c.p.batch, c.args.cu_seqlens_q, c.p.sq),
      old_(readable(c.args.rows.cache_seqlens)),
      first_(readable(first_positions(c.args))) {
  const Sequences sequences(c.p, c.args.cu_seqlens_q, {}, {}, {}, c.tables);
  if (readable(c.args.rows.cu_seqlens_k_new) != nullptr) {
    longest_sequence("cu_seqlens_k_new", c.args.rows.cu_seqlens_k_new, "rows of k_new", c.tokens);
  }
  if (old_ != nullptr) check_room(c, sequences);
  if (first_ != nullptr && c.pairs > 0) check_positions(c);
}

void AppendLengths::check_room(const AppendCall& c, const Sequences& sequences) const {
  for (int64_t b = 0; b < c.p.batch; ++b) {
    const Sequence s = new_keys(b);
    const int64_t room = sequences.room_k(b);
    if (s.k_begin < 0) fail("cache_seqlens", "got {} at {}, want >= 0", s.k_begin, b);
    if (s.k_begin + s.sk > room) {
      fail("cache_seqlens", "got {} at {}, with {} new rows {}, want at most the {} of its cache",
           s.k_begin, b, s.sk, s.k_begin + s.sk, room);
    }
    if (s.k_begin + s.sk > kMaxKeys) {
      fail("cache_seqlens",
           "got {} at {}, with {} new rows {}, want at most {}, as lengths are i32", s.k_begin, b,
           s.sk, s.k_begin + s.sk, kMaxKeys);
    }
  }
}

void AppendLengths::check_positions(const AppendCall& c) const {
  for (int64_t b = 0; b < c.p.batch; ++b) {
    const int64_t first = first_position(b);
    if (first < 0) fail("rotary_seqlens", "got {} at {}, want >= 0", first, b);
    const int64_t rotated = c.advance ? queries_.of(b) : std::min<int64_t>(queries_.of(b), 1);
    const int64_t rows = std::max(tokens_.of(b), rotated);
    if (rows > 0 && first + rows > c.args.rows.rotary.cos.shape[0]) {
      fail("cos", "got {} positions, want {} for sequence {}, which has {} from {} on",
           c.args.rows.rotary.cos.shape[0], first + rows, b, rows, first);
    }
  }
}

}  // namespace fulgur

#include "cpu/append.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <vector>

#include "key_rows.h"
#include "parallel.h"
#include "rotary.h"
#include "sequences.h"

namespace fulgur::cpu {
namespace {

/// The rows of all sequences one behind the other: where those of each begin.
class Tokens {
 public:
  /// Packed by `cu_seqlens`, or `rows` in each of the sequences.
  Tokens(int64_t batch, const int32_t* cu_seqlens, int64_t rows)
      : begin_(static_cast<size_t>(batch) + 1), packed_(cu_seqlens != nullptr) {
    for (size_t b = 0; b < begin_.size(); ++b)
      begin_[b] = packed_ ? cu_seqlens[b] : static_cast<int64_t>(b) * rows;
  }
  int64_t all() const { return begin_.back(); }
  int64_t of(int64_t b) const { return begin_[b + 1] - begin_[b]; }

  struct Token {
    int64_t b, i;  ///< row i of sequence b
    int64_t row;   ///< of the tensor: for Layout::offset
  };
  Token operator[](int64_t t) const {
    const int64_t b = std::upper_bound(begin_.begin(), begin_.end(), t) - begin_.begin() - 1;
    const int64_t i = t - begin_[b];
    return {b, i, packed_ ? t : i};
  }

 private:
  std::vector<int64_t> begin_;
  bool packed_;
};

const int32_t* ints(const ConstTensor& t) { return static_cast<const int32_t*>(t.data); }

Tokens new_tokens(const AppendCall& c) {
  const ConstTensor& cu = c.args.cu_seqlens_k_new;
  if (c.packed_new) longest_sequence("cu_seqlens_k_new", cu, "rows of k_new", c.tokens);
  return {c.p.batch, c.packed_new ? ints(cu) : nullptr, c.args.k_new.shape[1]};
}

/// New rows as keys of a sequence: those behind the ones that it has.
Sequence new_keys(const AppendCall& c, const Tokens& tokens, int64_t b) {
  return {.k_begin = ints(c.args.cache_seqlens)[b], .sk = tokens.of(b)};
}

/// Checks that the new rows fit behind the old ones, in places that there are.
void check_room(const AppendCall& c, const Sequences& sequences, const Tokens& tokens,
                const KeyPlaces& places) {
  for (int64_t b = 0; b < c.p.batch; ++b) {
    const Sequence s = new_keys(c, tokens, b);
    const int64_t room = sequences.room_k(b);
    if (s.k_begin < 0) fail("cache_seqlens", "got {} at {}, want >= 0", s.k_begin, b);
    if (s.k_begin + s.sk > room) {
      fail("cache_seqlens", "got {} at {}, with {} new rows {}, want at most the {} of its cache",
           s.k_begin, b, s.sk, s.k_begin + s.sk, room);
    }
    places.check(b, s);
  }
}

/// Checks that no row of the cache takes two new rows.
void check_places_differ(const AppendCall& c, const Tokens& tokens, const KeyPlaces& places) {
  if (!c.p.cache.paged() && !c.p.cache.batch_idx) return;
  struct Rows {
    int64_t entry, row, count, b;
    bool operator<(const Rows& o) const { return entry != o.entry ? entry < o.entry : row < o.row; }
  };
  std::vector<Rows> all;
  for (int64_t b = 0; b < c.p.batch; ++b) {
    const Sequence s = new_keys(c, tokens, b);
    if (s.sk == 0) continue;
    for (KeyRuns runs(places.of(b, s), 0, s.sk); !runs.done(); runs.next())
      all.push_back({runs.entry, runs.row, runs.count, b});
  }
  std::sort(all.begin(), all.end());
  for (size_t i = 1; i < all.size(); ++i) {
    const Rows &one = all[i - 1], &next = all[i];
    if (one.entry != next.entry || one.row + one.count <= next.row) continue;
    const bool paged = c.p.cache.paged();
    fail(paged ? "page_table" : "cache_batch_idx",
         "row {} of {} {} would take a new row of sequence {} and one of sequence {}, want one",
         next.row, paged ? "page" : "entry", next.entry, std::min(one.b, next.b),
         std::max(one.b, next.b));
  }
}

/// The position of the first new token of sequence b.
int64_t first_position(const AppendCall& c, int64_t b) { return ints(c.first_positions())[b]; }

/// Checks that cos and sin have a row for every position.
void check_positions(const AppendCall& c, const Tokens& tokens, const Tokens& queries) {
  if (c.pairs == 0) return;
  for (int64_t b = 0; b < c.p.batch; ++b) {
    const int64_t first = first_position(c, b);
    if (first < 0) fail("rotary_seqlens", "got {} at {}, want >= 0", first, b);
    const int64_t turned = c.advance ? queries.of(b) : std::min<int64_t>(queries.of(b), 1);
    const int64_t rows = std::max(tokens.of(b), turned);
    if (rows > 0 && first + rows > c.args.cos.shape[0]) {
      fail("cos", "got {} positions, want {} for sequence {}, which has {} from {} on",
           c.args.cos.shape[0], first + rows, b, rows, first);
    }
  }
}

/// The cos and sin of a position.
template <class T>
struct Angles {
  std::array<T, AppendCall::kMostDim / 2> cos, sin;

  Angles(const AppendCall& c, int64_t position) {
    const auto load = [&](const ConstTensor& t, T* to) {
      const int64_t at = position * t.strides[0] * size_of(t.dtype);
      load_row(static_cast<const std::byte*>(t.data) + at, t.dtype, c.pairs, to);
    };
    load(c.args.cos, cos.data());
    load(c.args.sin, sin.data());
  }
};

/// The heads of a token: of `dim` columns from one tensor to another.
struct HeadRows {
  const std::byte* from;
  std::byte* to;
  int64_t from_head, to_head;  ///< strides in bytes
  int64_t heads, dim;

  HeadRows(const ConstTensor& t, const Layout& at, int64_t b, int64_t row, const Tensor& written,
           const Layout& to_at, int64_t to_b, int64_t to_row, int64_t heads, int64_t dim)
      : from(static_cast<const std::byte*>(t.data) + at.offset(b, row, 0) * size_of(t.dtype)),
        to(static_cast<std::byte*>(written.data) +
           to_at.offset(to_b, to_row, 0) * size_of(t.dtype)),
        from_head(at.head * size_of(t.dtype)),
        to_head(to_at.head * size_of(t.dtype)),
        heads(heads),
        dim(dim) {}
};

void copy_rows(const HeadRows& rows, int64_t element) {
  for (int64_t h = 0; h < rows.heads; ++h) {
    std::memcpy(rows.to + h * rows.to_head, rows.from + h * rows.from_head,
                static_cast<size_t>(rows.dim * element));
  }
}

template <class T>
void turn_rows(const AppendCall& c, const HeadRows& rows, int64_t position) {
  const Angles<T> angles(c, position);
  const int64_t turned = 2 * c.pairs, element = size_of(c.p.dtype);
  std::array<T, AppendCall::kMostDim> x, y;
  for (int64_t h = 0; h < rows.heads; ++h) {
    const std::byte* const from = rows.from + h * rows.from_head;
    std::byte* const to = rows.to + h * rows.to_head;
    load_row(from, c.p.dtype, turned, x.data());
    turn_row(x.data(), angles.cos.data(), angles.sin.data(), c.pairs, c.args.interleaved, y.data());
    store_row(to, c.p.dtype, turned, y.data());
    if (from == to) continue;
    std::memcpy(to + turned * element, from + turned * element,
                static_cast<size_t>((rows.dim - turned) * element));
  }
}

/// Writes all rows. T is what angles are multiplied in.
template <class T>
void write_rows(const AppendCall& c, const Tokens& tokens, const Tokens& queries,
                const KeyPlaces& places, int threads) {
  const AppendArgs& a = c.args;
  parallel_for(tokens.all() + queries.all(), threads, [&](int64_t n) {
    if (n >= tokens.all()) {
      const Tokens::Token t = queries[n - tokens.all()];
      const HeadRows q(a.q, c.p.q, t.b, t.row, a.q_out, c.q_out, t.b, t.row, c.hq, c.p.d);
      turn_rows<T>(c, q, first_position(c, t.b) + (c.advance ? t.i : 0));
      return;
    }
    const Tokens::Token t = tokens[n];
    const KeyRuns place(places.of(t.b, new_keys(c, tokens, t.b)), t.i, 1);
    const HeadRows k(a.k_new, c.k_new, t.b, t.row, a.k_cache, c.p.k, place.entry, place.row, c.p.hk,
                     c.p.d);
    const HeadRows v(a.v_new, c.v_new, t.b, t.row, a.v_cache, c.p.v, place.entry, place.row, c.p.hk,
                     c.p.dv);
    if (c.pairs > 0) {
      turn_rows<T>(c, k, first_position(c, t.b) + t.i);
    } else {
      copy_rows(k, size_of(c.p.dtype));
    }
    copy_rows(v, size_of(c.p.dtype));
  });
}

}  // namespace

void append(const AppendCall& c, int threads) {
  const AppendArgs& args = c.args;
  const Sequences sequences(c.p, args.cu_seqlens_q, {}, {}, c.tables);
  const Tokens tokens = new_tokens(c);
  const Tokens queries(c.p.batch, c.p.packed ? ints(args.cu_seqlens_q) : nullptr, c.p.sq);
  const KeyPlaces places(c.p, c.tables, AppendCall::kLike);
  check_room(c, sequences, tokens, places);
  check_places_differ(c, tokens, places);
  check_positions(c, tokens, queries);
  if (c.p.dtype == DType::kF64) {
    write_rows<double>(c, tokens, queries, places, threads);
  } else {
    write_rows<float>(c, tokens, queries, places, threads);
  }
}

}  // namespace fulgur::cpu

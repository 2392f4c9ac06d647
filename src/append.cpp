#include "fulgur/append.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "cache.h"
#include "check.h"
#include "key_rows.h"
#include "parallel.h"
#include "problem.h"
#include "rotary.h"
#include "sequences.h"

namespace fulgur {
namespace {

constexpr int64_t kMostDim = 512;
constexpr const char* kLike = "k_cache";  // whose dtype, device and heads the others have

/// A call whose shapes are checked.
struct AppendCall {
  const AppendArgs& args;
  Problem p{};  ///< of the caches as k and v, and of the rows of q
  CacheTensors tables{};
  bool packed_new = false;
  int64_t tokens = 0;  ///< rows of k_new, those behind the last sequence included
  int64_t hq = 0;
  int64_t pairs = 0;     ///< of columns that turn
  bool advance = false;  ///< each query has a position of its own
  Layout k_new{}, v_new{}, q_out{};
};

void check_float(const char* name, const ConstTensor& t) {
  if (is_integer(t.dtype)) fail(name, "got {}, want f32, bf16, f16 or f64", name_of(t.dtype));
}

int64_t checked_dim(const char* name, int64_t dim) {
  if (dim < 1 || dim > kMostDim) fail(name, "got head dim {}, want 1 to {}", dim, kMostDim);
  return dim;
}

void check_caches(AppendCall& c) {
  const ConstTensor k = c.args.k_cache, v = c.args.v_cache, seqlens = c.args.cache_seqlens;
  Problem& p = c.p;
  const bool paged = c.tables.page_table.given();
  const char* const dims = paged ? "(pages, page, heads, dim)" : "(batch, seqlen, heads, dim)";
  check_tensor("k_cache", k, dims, 4, true);
  check_tensor("v_cache", v, dims, 4, true);
  check_float("k_cache", k);
  check_dtype("v_cache", v, k.dtype, "the dtype of k_cache");
  check_device("v_cache", v, k.device, kLike);
  p.dtype = k.dtype;
  p.device = k.device;
  p.hk = k.shape[2];
  if (p.hk < 1) fail("k_cache", "got {} heads, want at least 1", p.hk);
  p.d = checked_dim("k_cache", k.shape[3]);
  p.dv = checked_dim("v_cache", v.shape[3]);
  if (seqlens.rank != 1) fail("cache_seqlens", "got {}, want i32 (batch)", seqlens.describe());
  p.batch = seqlens.shape[0];
  check_lengths("cache_seqlens", seqlens, p.batch, "(batch)", p.device, kLike);
  check_cache_given(c.tables, {}, seqlens);
  check_cache(c.tables, k, v, 0, p, {"k_cache", "v_cache", kLike});
  p.k = rows_layout(k);
  p.v = rows_layout(v);
}

/// A tensor of `heads` whose rows are packed, or those of the batch; its first dimensions are as
/// `rows` has them.
void check_rows(const char* name, const ConstTensor& t, const AppendCall& c, bool packed,
                const ConstTensor& rows, int64_t heads, int64_t dim, bool written) {
  if (packed) {
    check_shape(name, t, "(total, heads, dim)", {rows.shape[0], heads, dim}, written);
  } else {
    check_shape(name, t, "(batch, seqlen, heads, dim)", {c.p.batch, rows.shape[1], heads, dim},
                written);
  }
  check_dtype(name, t, c.p.dtype, "the dtype of k_cache");
  check_device(name, t, c.p.device, kLike);
}

void check_new(AppendCall& c) {
  const AppendArgs& a = c.args;
  c.packed_new = a.cu_seqlens_k_new.given();
  check_rows("k_new", a.k_new, c, c.packed_new, a.k_new, c.p.hk, c.p.d, false);
  check_rows("v_new", a.v_new, c, c.packed_new, a.k_new, c.p.hk, c.p.dv, false);
  c.tokens = c.packed_new ? a.k_new.shape[0] : c.p.batch * a.k_new.shape[1];
  if (c.packed_new) {
    check_lengths("cu_seqlens_k_new", a.cu_seqlens_k_new, c.p.batch + 1, "(batch + 1)", c.p.device,
                  kLike);
  }
  c.k_new = rows_layout(a.k_new);
  c.v_new = rows_layout(a.v_new);
}

void check_rotary(AppendCall& c) {
  const AppendArgs& a = c.args;
  const ConstTensor &cos = a.cos, &sin = a.sin;
  if (!cos.given() && !sin.given()) {
    if (a.rotary_seqlens.given()) fail("rotary_seqlens", "given without cos and sin");
    if (a.q.given()) fail("q", "given without cos and sin, want what turns it");
    return;
  }
  check_tensor("cos", cos, "(positions, rotary_dim / 2)", 2, false);
  check_shape("sin", sin, "the shape of cos", {cos.shape[0], cos.shape[1]}, false);
  if (cos.dtype != c.p.dtype && cos.dtype != DType::kF32) {
    fail("cos", "got {}, want {} as k_cache, or f32", name_of(cos.dtype), name_of(c.p.dtype));
  }
  check_dtype("sin", sin, cos.dtype, "the dtype of cos");
  check_device("cos", cos, c.p.device, kLike);
  check_device("sin", sin, c.p.device, kLike);
  c.pairs = cos.shape[1];
  if (c.pairs < 1 || c.pairs > c.p.d / 2) {
    fail("cos", "got {} columns, a rotary_dim of {}, want 2 to the head dim {}", c.pairs,
         2 * c.pairs, c.p.d);
  }
  if (a.rotary_seqlens.given()) {
    check_lengths("rotary_seqlens", a.rotary_seqlens, c.p.batch, "(batch)", c.p.device, kLike);
  }
}

void check_queries(AppendCall& c) {
  const AppendArgs& a = c.args;
  Problem& p = c.p;
  if (!a.q.given()) {
    if (a.q_out.given()) fail("q", "not given, want what goes to q_out");
    if (a.cu_seqlens_q.given()) fail("cu_seqlens_q", "given without q");
    return;
  }
  p.packed = a.cu_seqlens_q.given();
  c.hq = a.q.shape[p.packed ? 1 : 2];
  check_rows("q", a.q, c, p.packed, a.q, c.hq, p.d, false);
  if (c.hq < 1) fail("q", "got {} heads, want at least 1", c.hq);
  check_rows("q_out", a.q_out, c, p.packed, a.q, c.hq, p.d, true);
  if (p.packed) {
    check_lengths("cu_seqlens_q", a.cu_seqlens_q, p.batch + 1, "(batch + 1)", p.device, kLike);
  }
  p.total_q = p.packed ? a.q.shape[0] : p.batch * a.q.shape[1];
  p.sq = p.packed ? p.total_q : a.q.shape[1];
  p.q = rows_layout(a.q);
  c.q_out = rows_layout(a.q_out);
}

AppendCall checked_call(const AppendArgs& args, const Options& options) {
  AppendCall c{.args = args, .tables = {args.page_table, args.page_indptr, args.cache_batch_idx}};
  check_caches(c);
  check_new(c);
  check_rotary(c);
  check_queries(c);
  const Mask mask = checked_mask(options);
  c.advance = mask.left >= 0 || mask.right >= 0;
  return c;
}

/// Checks that all data is there and that what is written lies apart from all else. Queries may be
/// turned in place: each row is read before it is written.
void check_append_pointers(const AppendArgs& a) {
  struct Named {
    const char* name;
    ConstTensor tensor;
    bool written = false;
  };
  constexpr size_t kQOut = 2, kQ = 14;
  const std::array<Named, 15> all{{{"k_cache", a.k_cache, true},
                                   {"v_cache", a.v_cache, true},
                                   {"q_out", a.q_out, true},
                                   {"k_new", a.k_new},
                                   {"v_new", a.v_new},
                                   {"cu_seqlens_k_new", a.cu_seqlens_k_new},
                                   {"cache_seqlens", a.cache_seqlens},
                                   {"page_table", a.page_table},
                                   {"page_indptr", a.page_indptr},
                                   {"cache_batch_idx", a.cache_batch_idx},
                                   {"cos", a.cos},
                                   {"sin", a.sin},
                                   {"rotary_seqlens", a.rotary_seqlens},
                                   {"cu_seqlens_q", a.cu_seqlens_q},
                                   {"q", a.q}}};
  for (const Named& t : all) check_data(t.name, t.tensor);
  const bool in_place = a.q_out.data == a.q.data && a.q_out.strides == a.q.strides;
  for (const Named& t : all) {
    if (!t.written) continue;
    for (const Named& other : all) {
      const bool turned = in_place && &t == &all[kQOut] && &other == &all[kQ];
      if (&t == &other || turned || !share_memory(t.tensor, other.tensor)) continue;
      fail(t.name, "shares its memory with {}; what is written needs its own", other.name);
    }
  }
}

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
int64_t first_position(const AppendCall& c, int64_t b) {
  const ConstTensor& t = c.args.rotary_seqlens;
  return ints(t.given() ? t : c.args.cache_seqlens)[b];
}

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
  std::array<T, kMostDim / 2> cos, sin;

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
  std::array<T, kMostDim> x, y;
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

/// An engine that is named for the attention that follows must be one of this device.
void check_engine(const std::string& name) {
  if (name.empty() || name == "cpu" || name == "reference") return;
  fail("engine", "got \"{}\", want cpu or reference: append works on the CPU alone", name);
}

}  // namespace

void append(const AppendArgs& args, const Options& options, const Run&) {
  const AppendCall c = checked_call(args, options);
  check_engine(options.engine);
  const int threads = checked_threads(options);
  if (c.p.device.type != DeviceType::kCpu) {
    throw Error(Status::kUnsupported,
                fmt::format("k_cache: on {}, append works on cpu", name_of(c.p.device)));
  }
  check_append_pointers(args);
  const Sequences sequences(c.p, args.cu_seqlens_q, {}, {}, c.tables);
  const Tokens tokens = new_tokens(c);
  const Tokens queries(c.p.batch, c.p.packed ? ints(args.cu_seqlens_q) : nullptr, c.p.sq);
  const KeyPlaces places(c.p, c.tables, kLike);
  check_room(c, sequences, tokens, places);
  check_places_differ(c, tokens, places);
  check_positions(c, tokens, queries);
  if (c.p.dtype == DType::kF64) {
    write_rows<double>(c, tokens, queries, places, threads);
  } else {
    write_rows<float>(c, tokens, queries, places, threads);
  }
}

}  // namespace fulgur

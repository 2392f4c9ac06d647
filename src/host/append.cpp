#include "host/append.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <optional>
#include <vector>

#include "base/hadamard.h"
#include "base/parallel.h"
#include "base/quantize.h"
#include "base/rotary.h"
#include "call/append_lengths.h"
#include "call/kv_locator.h"

namespace fulgur::host {
namespace {

/// Checks that no row of the cache takes two new rows.
void check_places_differ(const AppendCall& c, const AppendLengths& lengths,
                         const KvLocator& places) {
  if (!c.p.cache.paged() && !c.p.has(Arg::kCacheBatchIdx)) return;
  struct Rows {
    int64_t entry, row, count, b;
    bool operator<(const Rows& o) const { return entry != o.entry ? entry < o.entry : row < o.row; }
  };
  std::vector<Rows> all;
  for (int64_t b = 0; b < c.p.batch; ++b) {
    const Sequence s = lengths.new_keys(b);
    if (s.sk == 0) continue;
    for (KvRuns runs(places.of(b, s), 0, s.sk); !runs.done(); runs.next())
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

/// The cos and sin of a position.
template <class T>
struct Angles {
  std::array<T, AppendCall::kMaxDim / 2> cos, sin;

  Angles(const AppendCall& c, int64_t position) {
    const auto load = [&](const ConstTensor& t, T* to) {
      const int64_t at = position * t.strides[0] * size_of(t.dtype);
      load_row(static_cast<const std::byte*>(t.data) + at, t.dtype, c.pairs, to);
    };
    load(c.args.rows.rotary.cos, cos.data());
    load(c.args.rows.rotary.sin, sin.data());
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
           bytes_of(written.dtype, to_at.offset(to_b, to_row, 0))),
        from_head(at.head * size_of(t.dtype)),
        to_head(bytes_of(written.dtype, to_at.head)),
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
void rotate_rows(const AppendCall& c, const HeadRows& rows, int64_t position) {
  const Angles<T> angles(c, position);
  const int64_t rotated = 2 * c.pairs, element = size_of(c.rows);
  std::array<T, AppendCall::kMaxDim> x, y;
  for (int64_t h = 0; h < rows.heads; ++h) {
    const std::byte* const from = rows.from + h * rows.from_head;
    std::byte* const to = rows.to + h * rows.to_head;
    load_row(from, c.rows, rotated, x.data());
    rotate_row(x.data(), angles.cos.data(), angles.sin.data(), c.pairs,
               c.args.rows.rotary.interleaved, y.data());
    store_row(to, c.rows, rotated, y.data());
    if (from == to) continue;
    std::memcpy(to + rotated * element, from + rotated * element,
                static_cast<size_t>((rows.dim - rotated) * element));
  }
}

/// Rows that are there are rotated by hadamard().
template <class T>
void rotate_by_hadamard(const AppendCall& c, const HeadRows& rows) {
  std::array<T, AppendCall::kMaxDim> x;
  std::array<float, AppendCall::kMaxDim> numbers;
  for (int64_t h = 0; h < rows.heads; ++h) {
    std::byte* const row = rows.to + h * rows.to_head;
    load_row(row, c.rows, rows.dim, x.data());
    std::copy_n(x.begin(), rows.dim, numbers.begin());
    hadamard(numbers.data(), rows.dim, false);
    std::copy_n(numbers.begin(), rows.dim, x.begin());
    store_row(row, c.rows, rows.dim, x.data());
  }
}

/// A cache of codes; none where it holds the rows as they are.
std::optional<CodeTensor> codes_of(const Tensor& cache, const Layout& at, const Tensor& scale,
                                   const Scales& scales, const Tensor& zero_point,
                                   const Scales& zero_points, const ConstTensor& mean) {
  const FormatRow* const format = format_of(cache.dtype);
  if (format == nullptr) return {};
  return CodeTensor{*format,
                    cache.data,
                    at,
                    cache.shape[3],
                    {{scale.data, scales}, {zero_point.data, zero_points}},
                    scale.data,
                    zero_point.data,
                    Means(mean)};
}

/// Codes of the heads of a token, of keys that are rotated to a position, if there is one.
/// `rotates`: and by hadamard().
template <class T>
void quantize_rows(const AppendCall& c, const HeadRows& rows, std::optional<int64_t> position,
                   bool rotates, const CodeTensor& to, CodeTensor::Row row) {
  std::array<T, AppendCall::kMaxDim> x, y;
  std::array<float, AppendCall::kMaxDim> numbers;
  std::optional<Angles<T>> angles;
  if (position) angles.emplace(c, *position);
  for (row.h = 0; row.h < rows.heads; ++row.h) {
    load_row(rows.from + row.h * rows.from_head, c.rows, rows.dim, x.data());
    if (position) {
      rotate_row(x.data(), angles->cos.data(), angles->sin.data(), c.pairs,
                 c.args.rows.rotary.interleaved, y.data());
      std::copy_n(y.begin(), 2 * c.pairs, x.begin());
    }
    std::copy_n(x.begin(), rows.dim, numbers.begin());
    if (rotates) hadamard(numbers.data(), rows.dim, false);
    to.take_means(row, numbers.data());
    to.put(row, numbers.data(), false);
  }
}

/// Writes all rows. T is what angles are multiplied in.
template <class T>
void write_rows(const AppendCall& c, const AppendLengths& lengths, const KvLocator& places,
                int threads) {
  const AppendArgs& a = c.args;
  const Tokens &tokens = lengths.tokens(), &queries = lengths.queries();
  const NewRows& r = a.rows;
  const auto k_codes = codes_of(r.k_cache, c.p.k, r.k_cache_descale, c.p.k_descale,
                                r.k_cache_zero_point, c.p.k_zero_point, r.k_cache_mean);
  const auto v_codes = codes_of(r.v_cache, c.p.v, r.v_cache_descale, c.p.v_descale,
                                r.v_cache_zero_point, c.p.v_zero_point, {});
  parallel_for(tokens.all() + queries.all(), threads, [&](int64_t n) {
    if (n >= tokens.all()) {
      const Tokens::Token t = queries[n - tokens.all()];
      const HeadRows q(a.q, c.p.q, t.b, t.row, a.q_out, c.q_out, t.b, t.row, c.hq, c.p.d);
      if (c.pairs > 0) {
        rotate_rows<T>(c, q, lengths.first_position(t.b) + (c.advance ? t.i : 0));
      } else {
        copy_rows(q, size_of(c.rows));
      }
      if (c.hadamard_q) rotate_by_hadamard<T>(c, q);
      return;
    }
    const Tokens::Token t = tokens[n];
    const KvRuns place(places.of(t.b, lengths.new_keys(t.b)), t.i, 1);
    const HeadRows k(a.rows.k_new, c.k_new, t.b, t.row, a.rows.k_cache, c.p.k, place.entry,
                     place.row, c.p.hk, c.p.d);
    const HeadRows v(a.rows.v_new, c.v_new, t.b, t.row, a.rows.v_cache, c.p.v, place.entry,
                     place.row, c.p.hk, c.p.dv);
    const CodeTensor::Row row{t.b, place.entry, place.row, 0};
    const int64_t position = c.pairs > 0 ? lengths.first_position(t.b) + t.i : 0;
    if (k_codes) {
      quantize_rows<T>(c, k, c.pairs > 0 ? std::optional(position) : std::nullopt, c.hadamard,
                       *k_codes, row);
    } else if (c.pairs > 0) {
      rotate_rows<T>(c, k, position);
    } else {
      copy_rows(k, size_of(c.rows));
    }
    if (v_codes) {
      quantize_rows<T>(c, v, std::nullopt, false, *v_codes, row);
    } else {
      copy_rows(v, size_of(c.rows));
    }
  });
}

}  // namespace

void append(const AppendCall& c, int threads) {
  const AppendLengths lengths(c);
  const KvLocator places(c.p, c.tables, AppendCall::kLike);
  for (int64_t b = 0; b < c.p.batch; ++b) places.check(b, lengths.new_keys(b));
  check_places_differ(c, lengths, places);
  if (c.rows == DType::kF64) {
    write_rows<double>(c, lengths, places, threads);
  } else {
    write_rows<float>(c, lengths, places, threads);
  }
}

}  // namespace fulgur::host

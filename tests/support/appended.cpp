#include "appended.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "engine_memory.h"

namespace fulgur::test {
namespace {

constexpr int64_t kBefore = 1;  // packed rows before the first sequence
constexpr int64_t kTail = 2;    // and after the last one

// One row of a tensor: row r of entry b, or of a packed tensor, as doubles.
struct Row {
  std::byte* data;
  DType dtype;
  int64_t dim;

  Row(const Tensor& t, int64_t b, int64_t r, int64_t h) : dtype(t.dtype), dim(t.shape[t.rank - 1]) {
    const int64_t at = t.rank == 4 ? b * t.strides[0] + r * t.strides[1] + h * t.strides[2]
                                   : r * t.strides[0] + h * t.strides[1];
    data = static_cast<std::byte*>(t.data) + at * size_of(t.dtype);
  }
  std::vector<double> read() const {
    std::vector<double> values;
    for (int64_t c = 0; c < dim; ++c) values.push_back(load(data, dtype, c));
    return values;
  }
  void write(const double* values) const {
    for (int64_t c = 0; c < dim; ++c) store(data, dtype, c, values[c]);
  }
};

// A row that a call brings.
struct NewRow {
  size_t b;
  int64_t i, row;  // new row i of sequence b, and where that is in k_new
  int64_t h;
  int64_t at;  // its first element among those of all keys of the workload
};

}  // namespace

std::string AppendCase::name() const {
  std::string s = c.name() + "_" + shape.name() + "_rotary" + std::to_string(rotary_dim);
  if (interleaved) s += "_interleaved";
  if (f32_angles) s += "_f32angles";
  if (positions) s += "_positions";
  if (in_place) s += "_inplace";
  return s + (aligned ? "_aligned" : "");
}

Appended::Appended(const AppendCase& a, uint64_t seed)
    : given(a), w(a.c, seed), cached(w, a.shape, seed + 1), random_(seed + 2) {
  const std::vector<double> pads = given.shape.leftpad ? read(cached.forward.leftpad_k)
                                                       : std::vector<double>(w.sequences.size());
  int64_t total = kBefore, longest = 0;
  std::vector<int64_t> cu{kBefore}, positions;
  for (size_t b = 0; b < w.sequences.size(); ++b) {
    const int64_t keys = w.sequences[b].sk;
    fresh.push_back(w.c.packed() ? static_cast<int64_t>(random_() % (keys + 1)) : (w.c.sk + 2) / 3);
    old.push_back(static_cast<int64_t>(pads[b]) + keys - fresh[b]);
    cu.push_back(total += fresh[b]);
    positions.push_back(static_cast<int64_t>(random_() % 40));
    longest = std::max({longest, old[b] + keys + w.c.sq, positions[b] + keys + w.c.sq});
  }
  args.k_cache = cached.forward.k;
  args.v_cache = cached.forward.v;
  args.page_table = cached.forward.page_table;
  args.page_indptr = cached.forward.page_indptr;
  args.cache_batch_idx = cached.forward.cache_batch_idx;
  args.k_new = rows(w.c.hk, w.c.d);
  args.v_new = rows(w.c.hk, w.c.dv);
  args.cache_seqlens = ints(old);
  if (w.c.packed()) args.cu_seqlens_k_new = ints(cu);
  if (given.rotary_dim > 0) {
    make_angles(longest);
    args.interleaved = given.interleaved;
    if (given.positions) args.rotary_seqlens = ints(positions);
    args.q = w.forward.q;
    args.cu_seqlens_q = w.forward.cu_seqlens_q;
    args.q_out = args.q;
    if (!given.in_place) {
      storage(w.c.dtype, args.q.numel());
      const auto rank = static_cast<size_t>(args.q.rank);
      const Tensor like =
          Tensor::contiguous(nullptr, w.c.dtype, std::span(args.q.shape).first(rank));
      args.q_out = storages_.back().view(0, std::span(like.shape).first(rank),
                                         std::span(like.strides).first(rank));
    }
    q_ = read(args.q);
  }
  for (Storage& s : storages_) s.seal();
}

Storage& Appended::storage(DType dtype, int64_t elements) {
  return storages_.emplace_back(dtype, elements);
}

Tensor Appended::ints(const std::vector<int64_t>& values) {
  const std::array shape{static_cast<int64_t>(values.size())}, strides{int64_t{1}};
  const Tensor t = storage(DType::kI32, shape[0]).view(0, shape, strides);
  write(t, std::vector<double>(values.begin(), values.end()));
  return t;
}

// New rows, with gaps between heads and between rows.
Tensor Appended::rows(int64_t heads, int64_t dim) {
  const int64_t head = dim + (given.aligned ? 8 : 3), row = heads * head + (given.aligned ? 16 : 5);
  int64_t all = kBefore + kTail;
  for (const int64_t n : fresh) all += n;
  const std::array packed{all, heads, dim}, packed_strides{row, head, int64_t{1}};
  const std::array batch{w.c.batch, fresh.empty() ? 0 : fresh[0], heads, dim};
  const std::array batch_strides{batch[1] * row, row, head, int64_t{1}};
  Storage& s = storage(w.c.dtype, all * row);
  const Tensor t =
      w.c.packed() ? s.view(0, packed, packed_strides) : s.view(0, batch, batch_strides);
  randomize(t, random_);
  return t;
}

void Appended::make_angles(int64_t positions) {
  const DType dtype = given.f32_angles ? DType::kF32 : w.c.dtype;
  const int64_t pairs = given.rotary_dim / 2, gap = given.aligned ? 8 : 3;
  const std::array shape{positions, pairs}, strides{pairs + gap, int64_t{1}};
  std::vector<double> cos, sin;
  for (int64_t n = 0; n < positions; ++n) {
    for (int64_t i = 0; i < pairs; ++i) {
      const double angle = static_cast<double>(n) *
                           std::pow(10000.0, -static_cast<double>(i) / static_cast<double>(pairs));
      cos.push_back(std::cos(angle));
      sin.push_back(std::sin(angle));
    }
  }
  args.cos = storage(dtype, positions * strides[0]).view(0, shape, strides);
  args.sin = storage(dtype, positions * strides[0]).view(0, shape, strides);
  write(args.cos, cos);
  write(args.sin, sin);
}

int64_t Appended::first_position(size_t b) const {
  if (!given.positions) return old[b];
  return static_cast<int64_t>(load(args.rotary_seqlens.data, DType::kI32, static_cast<int64_t>(b)));
}

void Appended::run() { compute(args, w.options, w.run_options); }

void Appended::run_with_attention() { compute(attention(), rows(), w.options, w.run_options); }

ForwardTensors Appended::attention() const {
  ForwardTensors t = cached.forward;
  for (Tensor* said : {&t.k, &t.v, &t.page_table, &t.page_indptr, &t.cache_batch_idx, &t.seqused_k})
    *said = {};
  return t;
}

AppendTensors Appended::rows() const {
  AppendTensors t = args;
  t.q = t.q_out = t.cu_seqlens_q = {};
  return t;
}

testing::AssertionResult Appended::right(const std::vector<double>& x,
                                         const std::vector<double>& got, int64_t position) const {
  const DType dtype = w.c.dtype;
  const int64_t turned = position < 0 ? 0 : given.rotary_dim, pairs = turned / 2;
  std::vector<double> want = x, error(x.size(), 0);
  for (int64_t i = 0; i < pairs; ++i) {
    const int64_t a = given.interleaved ? 2 * i : i, b = given.interleaved ? a + 1 : a + pairs;
    const double cos = load(args.cos.data, args.cos.dtype, position * args.cos.strides[0] + i);
    const double sin = load(args.sin.data, args.sin.dtype, position * args.sin.strides[0] + i);
    want[a] = x[a] * cos - x[b] * sin;
    want[b] = x[a] * sin + x[b] * cos;
    // Two products and their sum, each off by half a unit of what it is computed in.
    const double unit = dtype == DType::kF64 ? 0x1p-51 : 0x1p-23;
    error[a] = unit * (std::fabs(x[a] * cos) + std::fabs(x[b] * sin));
    error[b] = unit * (std::fabs(x[a] * sin) + std::fabs(x[b] * cos));
  }
  for (size_t c = 0; c < x.size(); ++c) {
    // Rounded once: no further than a number that close to the exact one rounds.
    const double low = rounded(want[c] - error[c], dtype),
                 high = rounded(want[c] + error[c], dtype);
    if (got[c] >= low && got[c] <= high) continue;
    return testing::AssertionFailure() << "column " << c << " at position " << position << ": got "
                                       << got[c] << ", want " << low << " to " << high;
  }
  return testing::AssertionSuccess();
}

template <class Body>
void Appended::for_each_new(const Tensor& cache, Body body) const {
  const int64_t page = cache.shape[1];
  int64_t first = kBefore;
  for (size_t b = 0; b < fresh.size(); ++b) {
    const Rows& s = w.sequences[b];
    for (int64_t i = 0; i < fresh[b]; ++i) {
      const int64_t at = old[b] + i, key = s.k_begin + s.sk - fresh[b] + i;
      const int64_t entry = cached.entries[b][static_cast<size_t>(at / page)];
      for (int64_t h = 0; h < w.c.hk; ++h) {
        body(NewRow{b, i, w.c.packed() ? first + i : i, h, (key * w.c.hk + h) * cache.shape[3]},
             Row(cache, entry, at % page, h));
      }
    }
    first += fresh[b];
  }
}

testing::AssertionResult Appended::check_new(const Tensor& cache, const Tensor& brought,
                                             bool turned, std::vector<double>& keys) const {
  testing::AssertionResult result = testing::AssertionSuccess();
  for_each_new(cache, [&](const NewRow& row, const Row& to) {
    const std::vector<double> x = Row(brought, static_cast<int64_t>(row.b), row.row, row.h).read();
    const std::vector<double> got = to.read();
    if (result) {
      result = right(x, got, turned ? first_position(row.b) + row.i : -1);
      if (!result) result << " (sequence " << row.b << ", new row " << row.i << ", head " << row.h;
    }
    to.write(keys.data() + row.at);  // what was there, for the picture of the cache
    std::copy(got.begin(), got.end(), keys.begin() + row.at);
  });
  return result;
}

testing::AssertionResult Appended::check_queries() {
  const bool advance = w.options.mask != full();
  std::vector<double> turned = read(args.q_out);
  const int64_t width = w.c.d;
  std::vector<bool> written(turned.size() / static_cast<size_t>(width), false);
  for (size_t b = 0; b < w.sequences.size(); ++b) {
    for (int64_t i = 0; i < w.sequences[b].sq; ++i) {
      for (int64_t h = 0; h < w.c.hq; ++h) {
        const int64_t row = (w.sequences[b].q_begin + i) * w.c.hq + h;
        const auto cut = [&](const std::vector<double>& v) {
          return std::vector<double>(v.begin() + row * width, v.begin() + (row + 1) * width);
        };
        const int64_t position = first_position(b) + (advance ? i : 0);
        if (auto result = right(cut(q_), cut(turned), position); !result)
          return result << " (query " << i << " of sequence " << b << ", head " << h << ")";
        written[static_cast<size_t>(row)] = true;
      }
    }
  }
  // Rows of no sequence are not written, neither here nor there.
  for (size_t row = 0; row < written.size(); ++row) {
    for (int64_t c = 0; c < width && !written[row]; ++c) {
      const double was = q_[row * static_cast<size_t>(width) + static_cast<size_t>(c)];
      double& now = turned[row * static_cast<size_t>(width) + static_cast<size_t>(c)];
      if (given.in_place ? now != was && !std::isnan(was) : !std::isnan(now))
        return testing::AssertionFailure() << "row " << row << " of q_out was written";
      now = was;
    }
  }
  if (given.in_place) write(w.forward.q, q_);
  if (auto result = w.nothing_written(); !result) return result;
  write(w.forward.q, turned);
  return testing::AssertionSuccess();
}

testing::AssertionResult Appended::check() {
  const bool turned = given.rotary_dim > 0;
  std::vector<double> k, v;
  if (auto result = check_keys(k, v); !result) return result;
  for (const Storage& s : storages_) {
    const bool output = turned && Storage::around(args.q_out.data) == &s;
    if (auto result = s.all_unchanged(); !output && !result) return result << " (inputs)";
  }
  if (turned) {
    if (auto result = check_queries(); !result) return result;
  }
  keep(k, v);
  return testing::AssertionSuccess();
}

testing::AssertionResult Appended::check_rows() {
  std::vector<double> k, v;
  if (auto result = check_keys(k, v); !result) return result;
  for (const Storage& s : storages_) {
    if (auto result = s.all_unchanged(); !result) return result << " (inputs)";
  }
  if (auto result = w.check_memory(); !result) return result;
  keep(k, v);
  return testing::AssertionSuccess();
}

testing::AssertionResult Appended::check_keys(std::vector<double>& k, std::vector<double>& v) {
  k = read(w.forward.k);
  v = read(w.forward.v);
  const bool turned = given.rotary_dim > 0;
  if (auto result = check_new(args.k_cache, args.k_new, turned, k); !result)
    return result << " (K)";
  if (auto result = check_new(args.v_cache, args.v_new, false, v); !result) return result << " (V)";
  return cached.check_memory();
}

void Appended::keep(const std::vector<double>& k, const std::vector<double>& v) {
  write(w.forward.k, k);
  write(w.forward.v, v);
  w.seal();
  for_each_new(args.k_cache, [&](const NewRow& row, const Row& to) { to.write(&k[row.at]); });
  for_each_new(args.v_cache, [&](const NewRow& row, const Row& to) { to.write(&v[row.at]); });
}

testing::AssertionResult Appended::nothing_written() const {
  if (auto result = cached.check_memory(); !result) return result;
  for (const Storage& s : storages_) {
    if (auto result = s.all_unchanged(); !result) return result;
  }
  return w.nothing_written();
}

}  // namespace fulgur::test

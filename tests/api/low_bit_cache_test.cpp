// Attention of 16-bit queries, and of queries of codes, over caches of codes, against attention
// over the numbers that an independent decoder finds in them, in double precision: formats, scales,
// zero points, pages, groups of heads, masks.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <limits>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "coded.h"
#include "engine_memory.h"
#include "engines.h"
#include "oracle.h"
#include "seed.h"

namespace fulgur::test {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

bool is_codes(DType dtype) { return dtype >= DType::kE4M3; }

/// P and what scales it or is subtracted from codes are f16 on their way to products.
constexpr double kProducts = 0x1p-10;

/// A call of 16-bit queries over a cache, and the same call of f32 as the oracle knows it.
class CachedCall {
 public:
  struct Keys {
    DType format;  ///< or that of q
    ScaleKind kind = ScaleKind::kNone;
    bool zero_point = false;
    DType scale = DType::kF32;
    int64_t group = 32;

    friend std::ostream& operator<<(std::ostream& out, const Keys& keys) {
      return out << name_of(keys.format) << " " << static_cast<int>(keys.kind) << keys.zero_point;
    }
  };

  CachedCall(const Case& c, DType dtype, uint64_t seed) : w(c, seed), random_(seed), dtype_(dtype) {
    call = w.forward;
    add(call.q, rounded_to(dtype, w.forward.q));
    write(w.forward.q, read(call.q));
    add(call.out, rounded_to(dtype, w.forward.out));
  }

  /// Codes for q, which an engine multiplies with those of k or as numbers. `kind`: factors as k
  /// has them, of the kv head that a head of q has.
  void set_q(DType format, ScaleKind kind, DType scale) {
    const Tensor& q = w.forward.q;
    const std::vector<int64_t> shape(q.shape.begin(), q.shape.begin() + q.rank);
    const auto all = static_cast<int64_t>(w.sequences.size());
    std::vector<int64_t> scales = shape;
    scales.back() = 1;
    if (kind == ScaleKind::kTensor) scales = {1};
    if (kind == ScaleKind::kHeads) scales = {1, w.c.hk};
    if (kind == ScaleKind::kSequencesAndHeads) scales = {all, w.c.hk};
    Buffer codes(format, shape), factors(scale, scales);
    for (int64_t i = 0; i < factors.t.numel(); ++i) {
      store(factors.t.data, scale, i, std::ldexp(static_cast<double>(8 + random_() % 8), -8));
    }
    std::vector<double> x = read(q);
    for (int64_t n = 0; n < static_cast<int64_t>(x.size()); ++n) {
      const int64_t head = n / w.c.d, row = head / w.c.hq, kv = head % w.c.hq * w.c.hk / w.c.hq;
      const int64_t b = kind == ScaleKind::kSequencesAndHeads ? sequence_of_query(row) : 0;
      const int64_t i = kind == ScaleKind::kTensor ? 0
                        : scales.size() == 2       ? b * w.c.hk + kv
                                                   : head;
      const double factor = kind == ScaleKind::kNone ? 1 : load(factors.t.data, scale, i);
      double& one = x[static_cast<size_t>(n)];
      store(codes.t.data, format, n, one / factor);
      one = load(codes.t.data, format, n) * factor;
    }
    write(q, x);
    add(call.q, std::move(codes));
    if (kind != ScaleKind::kNone) add(call.q_descale, std::move(factors));
  }
  void set_k(const Keys& keys) {
    set(w.forward.k, keys, call.k, call.k_descale, call.k_zero_point);
  }
  void set_v(const Keys& keys) {
    set(w.forward.v, keys, call.v, call.v_descale, call.v_zero_point);
  }

  /// The numbers of k are codes and means, of each sequence or of all, rotated back.
  void add_means(bool of_sequences) {
    const auto all = static_cast<int64_t>(w.sequences.size());
    Buffer mean(DType::kF32, {of_sequences ? all : 1, w.c.hk, w.c.d});
    randomize(mean.t, random_, 3);
    std::vector<double> x = read(w.forward.k);
    const std::vector<double> means = read(mean.t);
    const int64_t of_head = w.c.hk * w.c.d;
    for (int64_t i = 0; i < static_cast<int64_t>(x.size()); ++i) {
      const int64_t b = of_sequences ? sequence_of_key(i / of_head) : 0;
      x[static_cast<size_t>(i)] += means[static_cast<size_t>(b * of_head + i % of_head)];
    }
    write(w.forward.k, x);
    add(call.k_mean, std::move(mean));
  }
  /// Likewise, of codes of rotated keys.
  void rotate_k() {
    write(w.forward.k, by_definition(read(w.forward.k), w.c.d, true));
    w.options.hadamard = true;
  }

  /// How a cache names the entries of sequences: pages, or rows of the batch.
  enum class Index { kTable, kLists, kBatch };

  void page(int64_t page) { cache(Index::kTable, page); }
  /// Keys and their scales go to entries of `rows` keys, which are shuffled, after up to `pad` rows
  /// of no keys. kBatch: an entry has all keys of a sequence.
  void cache(Index index, int64_t rows, int64_t pad = 0) {
    const auto batch = static_cast<int64_t>(w.sequences.size());
    if (index == Index::kBatch) rows = w.c.sk + pad;
    const int64_t each = (w.c.sk + pad + rows - 1) / rows, all = batch * each + 2;
    std::vector<int32_t> order(static_cast<size_t>(all)), listed;
    for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int32_t>(i);
    std::shuffle(order.begin(), order.end(), random_);
    std::vector<std::vector<int32_t>> ids(w.sequences.size());
    std::vector<double> pads, lengths, firsts{0};
    for (size_t b = 0; b < ids.size(); ++b) {
      pads.push_back(static_cast<double>(pad == 0 ? 0 : random_() % static_cast<uint64_t>(pad)));
      lengths.push_back(pads.back() + static_cast<double>(w.sequences[b].sk));
      const int64_t count =
          index == Index::kLists ? (static_cast<int64_t>(lengths.back()) + rows - 1) / rows : each;
      for (int64_t i = 0; i < count; ++i, order.pop_back()) ids[b].push_back(order.back());
      listed.insert(listed.end(), ids[b].begin(), ids[b].end());
      firsts.push_back(static_cast<double>(listed.size()));
    }
    const auto ints = [&](Tensor& to, const std::vector<int64_t>& shape, const auto& values) {
      Buffer b(DType::kI32, shape);
      write(b.t, std::vector<double>(values.begin(), values.end()));
      add(to, std::move(b));
    };
    const auto count = static_cast<int64_t>(listed.size());
    if (index == Index::kBatch) ints(call.cache_batch_idx, {batch}, listed);
    if (index == Index::kTable) ints(call.page_table, {batch, each}, listed);
    if (index == Index::kLists) {
      ints(call.page_table, {count}, listed);
      ints(call.page_indptr, {batch + 1}, firsts);
    }
    if (pad > 0) ints(call.leftpad_k, {batch}, pads);
    ints(call.seqused_k, {batch}, lengths);
    call.cu_seqlens_k = {};
    const int keys_rank = call.k.rank;
    for (Tensor* t : {&call.k, &call.v, &call.k_descale, &call.v_descale, &call.k_zero_point,
                      &call.v_zero_point}) {
      if (!t->given() || t->rank < keys_rank) continue;
      const auto of = std::find_if(buffers_.begin(), buffers_.end(),
                                   [&](const Buffer& b) { return b.t.data == t->data; });
      add(*t, in_entries(*of, rows, all, ids, pads));
    }
  }

  /// The first keys of packed sequences are those of none.
  void pad_packed_keys() {
    Buffer pads(DType::kI32, {static_cast<int64_t>(w.sequences.size())});
    for (size_t b = 0; b < w.sequences.size(); ++b) {
      Rows& s = w.sequences[b];
      const auto pad = static_cast<int64_t>(random_() % static_cast<uint64_t>(s.sk + 1));
      store(pads.t.data, DType::kI32, static_cast<int64_t>(b), static_cast<double>(pad));
      s.k_begin += pad;
      s.sk -= pad;
    }
    add(call.leftpad_k, std::move(pads));
  }

  void run(const std::string& engine) {
    EngineMemory memory(engine);
    for (Buffer& b : buffers_) memory.keep(std::as_writable_bytes(std::span(b.bytes)));
    run(call, engine, memory);
  }
  /// What sequence b gives alone, all of whose memory but its own is `fill`.
  void run_alone(size_t b, uint8_t fill, const std::string& engine) {
    const Rows& s = w.sequences[b];
    ForwardTensors one = call;
    const auto of_sequence = [&](Tensor& t) {
      if (!t.given() || t.shape[0] != w.c.batch) return;
      const int64_t row = t.strides[0];
      t.data = static_cast<std::byte*>(t.data) + bytes_of(t.dtype, static_cast<int64_t>(b) * row);
      t.shape[0] = 1;
    };
    for (Tensor* t :
         {&one.q, &one.q_descale, &one.out, &one.lse, &one.seqused_k, &one.page_table}) {
      of_sequence(*t);
    }
    for (Tensor* t :
         {&one.k, &one.v, &one.k_descale, &one.v_descale, &one.k_zero_point, &one.v_zero_point}) {
      if (t->rank < 4 || !one.page_table.given()) of_sequence(*t);
    }
    one.seqused_q = {};
    one.q.shape[1] = one.out.shape[1] = one.lse.shape[2] = s.sq;
    if (one.q_descale.rank == 4) one.q_descale.shape[1] = s.sq;

    const std::deque<Buffer> before = buffers_;
    for (Tensor* t : {&call.k, &call.v, &call.k_descale, &call.v_descale, &call.k_zero_point,
                      &call.v_zero_point}) {
      if (t->rank == 4) keep_rows_alone(*t, b, s.sk, fill);
    }
    EngineMemory memory(engine);
    for (Buffer& buffer : buffers_) memory.keep(std::as_writable_bytes(std::span(buffer.bytes)));
    run(one, engine, memory);
    for (size_t i = 0; i < before.size(); ++i) {
      if (buffers_[i].t.data == call.out.data) continue;
      std::copy(before[i].bytes.begin(), before[i].bytes.end(), buffers_[i].bytes.begin());
    }
  }

  /// Out and LSE of a sequence.
  std::vector<double> results_of(size_t b) const {
    const std::vector<double> out = read(call.out), lse = read(call.lse);
    const Rows& s = w.sequences[b];
    const int64_t of_query = w.c.hq * w.c.dv, at = static_cast<int64_t>(b) * w.c.sq * of_query;
    std::vector<double> all(out.begin() + at, out.begin() + at + s.sq * of_query);
    for (int64_t h = 0; h < w.c.hq; ++h) {
      const int64_t row = (static_cast<int64_t>(b) * w.c.hq + h) * w.c.sq;
      all.insert(all.end(), lse.begin() + row, lse.begin() + row + s.sq);
    }
    return all;
  }

  /// LSE is off by what rounding of q, of numbers of k or of partial sums makes of scores.
  testing::AssertionResult is_right(const Expected& e) {
    if (converts_) return is_right_as_of_its_dtype();
    double lse = (rounds_k_ ? kProducts : tolerance(dtype_)) * e.unit.lse;
    // GPUs multiply integers as numbers from 0 on, and tensor cores cut partial sums.
    lse += 0x1p-22 * range_of_k_ * longest(w.forward.q);
    double score = rounds_k_ ? e.unit.lse : 0;
    if (w.options.hadamard || call.k_mean.given()) {
      // Scores are products of a row of q, which is rounded once it is rotated, and one of k.
      const double size = longest(w.forward.q) * longest(w.forward.k) / std::sqrt(w.c.d);
      const double rounded = dtype_ == DType::kBF16 ? 0x1p-9 : 0x1p-12;
      lse += (w.options.hadamard ? rounded : 1e-5) * size;
      if (w.options.hadamard) score += size;
    }
    if (is_codes(call.q.dtype)) {  // products of codes are added with 13 bits
      lse += 0x1p-9 * e.unit.lse;
      score += e.unit.lse;
    }
    auto r =
        within("out", call.out, e.reference.out, {}, 2, kProducts * (1 + 4 * score) * e.unit.out);
    return r ? within("lse", call.lse, e.reference.lse, {}, 0, lse) : r;
  }

  /// Whether the plan of the last run converts codes to the dtype of q first.
  bool converts() const { return converts_; }

  Workload w;
  ForwardTensors call;
  bool lengths_on_host = false;

 private:
  void run(const ForwardTensors& tensors, const std::string& engine, EngineMemory& memory) {
    Options options = w.options;
    options.engine = engine;
    ForwardTensors there = memory.at(tensors);
    if (lengths_on_host) there.cu_seqlens_q = tensors.cu_seqlens_q;
    const Plan planned = plan(there, memory.options(tensors, options));
    converts_ = planned.details().has("converted");
    planned.run(there, w.run_options);
    memory.bring_back();
  }
  /// Converted codes are as right as a cache of the dtype of q is.
  testing::AssertionResult is_right_as_of_its_dtype() {
    const ForwardTensors before = w.forward;
    const Buffer k = rounded_to(dtype_, w.forward.k), v = rounded_to(dtype_, w.forward.v);
    w.forward.k = k.t, w.forward.v = v.t, w.forward.out = call.out;
    w.c.dtype = dtype_;
    const testing::AssertionResult result = forward_is_right(w, expect_forward(w));
    w.c.dtype = DType::kF32;
    w.forward = before;
    return result;
  }
  /// Rows of keys in entries of a cache, after `pads` of no keys.
  Buffer in_entries(const Buffer& from, int64_t rows, int64_t entries,
                    const std::vector<std::vector<int32_t>>& ids,
                    const std::vector<double>& pads) const {
    const Tensor& t = from.t;
    Buffer to(t.dtype, {entries, rows, t.shape[t.rank - 2], t.shape[t.rank - 1]});
    const auto row = static_cast<int64_t>(to.bytes.size()) / (entries * rows);
    std::fill(to.bytes.begin(), to.bytes.end(), uint8_t{0x7f});  // NaN, or large
    for (size_t b = 0; b < ids.size(); ++b) {
      const Rows& s = w.sequences[b];
      const bool packed = w.c.layout == Layout::kPacked;
      const int64_t first = packed ? s.k_begin : static_cast<int64_t>(b) * w.c.sk;
      for (int64_t j = 0; j < s.sk; ++j) {
        const int64_t key = static_cast<int64_t>(pads[b]) + j;
        const int64_t at = ids[b][static_cast<size_t>(key / rows)] * rows + key % rows;
        std::copy_n(from.bytes.begin() + row * (first + j), row, to.bytes.begin() + row * at);
      }
    }
    return to;
  }
  static double largest(const Tensor& t) {
    double most = 0;
    for (const double x : read(t)) most = std::max(most, std::fabs(x));
    return most;
  }
  /// The length of the longest row of a head.
  static double longest(const Tensor& t) {
    const std::vector<double> x = read(t);
    const auto dim = static_cast<size_t>(t.shape[t.rank - 1]);
    double most = 0;
    for (size_t row = 0; row < x.size(); row += dim) {
      double squares = 0;
      for (size_t i = row; i < row + dim; ++i) squares += x[i] * x[i];
      if (squares > most) most = squares;  // no NaN, of rows that do not exist
    }
    return std::sqrt(most);
  }
  int64_t sequence_of_query(int64_t row) const {
    return sequence_of(row, w.c.sq, &Rows::q_begin, &Rows::sq);
  }
  int64_t sequence_of_key(int64_t row) const {
    return sequence_of(row, w.c.sk, &Rows::k_begin, &Rows::sk);
  }
  int64_t sequence_of(int64_t row, int64_t rows_each, int64_t Rows::*begin,
                      int64_t Rows::*count) const {
    if (w.c.layout != Layout::kPacked) return row / rows_each;
    for (size_t b = 0; b < w.sequences.size(); ++b) {
      const int64_t first = w.sequences[b].*begin;
      if (row >= first && row < first + w.sequences[b].*count) return static_cast<int64_t>(b);
    }
    return 0;  // of no sequence
  }
  /// All rows of a tensor but the first keys of a sequence are `fill`.
  void keep_rows_alone(const Tensor& t, size_t b, int64_t keys, uint8_t fill) {
    const bool paged = call.page_table.given();
    const int64_t row = bytes_of(t.dtype, t.strides[1]), of_entry = t.shape[1];
    std::vector<bool> own(static_cast<size_t>(t.shape[0] * of_entry));
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t ids = call.page_table.shape[1], n = static_cast<int64_t>(b);
      const int64_t entry = paged ? static_cast<int64_t>(load(call.page_table.data, DType::kI32,
                                                              n * ids + j / of_entry))
                                  : n;
      own[static_cast<size_t>(entry * of_entry + (paged ? j % of_entry : j))] = true;
    }
    for (size_t i = 0; i < own.size(); ++i) {
      if (own[i]) continue;
      std::fill_n(static_cast<uint8_t*>(t.data) + static_cast<int64_t>(i) * row, row, fill);
    }
  }

  void add(Tensor& to, Buffer buffer) {
    buffers_.push_back(std::move(buffer));
    to = buffers_.back().t;
  }
  static Buffer rounded_to(DType dtype, const Tensor& t) {
    Buffer b(dtype, std::vector<int64_t>(t.shape.begin(), t.shape.begin() + t.rank));
    write(b.t, read(t));
    return b;
  }
  void set(const Tensor& numbers, const Keys& keys, Tensor& codes, Tensor& scale, Tensor& zero) {
    std::vector<double> x = read(numbers);
    for (double& one : x)
      one = std::isnan(one) ? 2.5 : keys.kind == ScaleKind::kNone ? one : 3 * one + 0.5;
    write(numbers, x);
    if (keys.format == dtype_) {
      add(codes, rounded_to(dtype_, numbers));
      write(numbers, read(codes));
      return;
    }
    Coded coded =
        Coded::of(numbers, keys.format, keys.kind, keys.zero_point, keys.scale, keys.group);
    write(numbers, coded.numbers());
    if (&codes == &call.k) {
      rounds_k_ = keys.zero_point || keys.kind == ScaleKind::kRows ||
                  keys.kind == ScaleKind::kGroups || scaled_inside(keys.format);
      const bool whole = keys.format != DType::kE4M3 && keys.format != DType::kE5M2;
      const bool unscaled = keys.kind == ScaleKind::kNone && !scaled_inside(keys.format);
      if (whole)
        range_of_k_ = unscaled ? keys.format == DType::kInt8 ? 128 : 8 : 2 * largest(numbers);
    }
    add(codes, std::move(coded.codes));
    if (coded.scale.t.given()) add(scale, std::move(coded.scale));
    if (coded.zero_point.t.given()) add(zero, std::move(coded.zero_point));
  }

  std::mt19937_64 random_;
  DType dtype_;
  std::deque<Buffer> buffers_;
  bool converts_ = false;
  bool rounds_k_ = false;  ///< its numbers may become f16, of zero points or scales of rows
  double range_of_k_ = 0;  ///< of its numbers, as many as its format has of integers
};

class LowBitCaches : public EveryEngine {
 protected:
  template <class T>
  T one_of(std::initializer_list<T> all) {
    return all.begin()[random_() % all.size()];
  }

  CachedCall::Keys keys_of(DType format) {
    using K = ScaleKind;
    CachedCall::Keys keys{.format = format};
    if (format < DType::kE4M3 || scaled_inside(format)) return keys;
    keys.kind =
        one_of({K::kNone, K::kTensor, K::kHeads, K::kSequencesAndHeads, K::kRows, K::kGroups});
    keys.zero_point = keys.kind != K::kNone && has_zero_point(format) && random_() % 2 == 0;
    keys.scale = one_of({DType::kF32, DType::kF16});
    keys.group = one_of<int64_t>({32, 64});
    return keys;
  }

  /// Gives one call in three, over codes of k and v alone, codes for q, too.
  void maybe_code_queries(CachedCall& call) {
    if (!is_codes(call.call.k.dtype) || !is_codes(call.call.v.dtype)) return;
    if (random_() % 3 != 0) return;
    using K = ScaleKind;
    call.set_q(one_of({DType::kE4M3, DType::kE4M3, DType::kE5M2}),
               one_of({K::kNone, K::kTensor, K::kHeads, K::kSequencesAndHeads, K::kRows}),
               one_of({DType::kF32, DType::kF16}));
  }

  Case drawn() {
    Case c;
    c.batch = one_of<int64_t>({1, 2, 3});
    c.sq = one_of<int64_t>({1, 1, 2, 5, 9, 17, 37});
    c.sk = one_of<int64_t>({7, 64, 150, 300});
    c.hk = one_of<int64_t>({1, 2, 4, 8});
    c.hq = c.hk * one_of<int64_t>({1, 3, 4, 8});
    c.d = one_of<int64_t>({64, 128, 128, 192, 256});
    c.dv = one_of<int64_t>({64, 128, 128, 192});
    c.mask = one_of({full(), causal(), window(20, 3), chunked(16, causal())});
    c.softcap = one_of({0.0, 0.0, 5.0});
    c.alibi = one_of({Alibi::kNone, Alibi::kNone, Alibi::kHeads});
    c.sinks = random_() % 3 == 0;
    return c;
  }

  // How many calls a test draws, unless the environment says.
  static int draws(int usual) {
    const char* const text = std::getenv("FULGUR_TEST_DRAWS");
    return text == nullptr ? usual : std::atoi(text);
  }

  // A call over K and V of codes, in pages or not (0), is right and writes its results alone.
  void is_attended(const Case& c, DType dtype, int64_t page, const CachedCall::Keys& k,
                   const CachedCall::Keys& v) {
    SCOPED_TRACE(testing::Message() << "seed " << test_seed() << " " << c.name() << " page " << page
                                    << " " << name_of(dtype) << " over " << k << " " << v);
    CachedCall call(c, dtype, random_());
    call.set_k(k);
    call.set_v(v);
    maybe_code_queries(call);
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (page > 0) call.page(page);
    if (!computes([&] { call.run(engine()); })) return;
    EXPECT_TRUE(call.is_right(e));
    EXPECT_TRUE(call.w.check_memory());
  }

  std::mt19937_64 random_{test_seed()};
};

TEST_P(LowBitCaches, AreAttendedAsTheirNumbers) {
  const int count = draws(12);
  for (int draw = 0; draw < count; ++draw) {
    Case c = drawn();
    const int64_t page = one_of<int64_t>({0, 0, 1, 5, 16, 64, 256});
    c.seqused = page > 0 || random_() % 2 == 0;
    const DType dtype = one_of({DType::kBF16, DType::kF16});
    const auto format = [&] {
      return random_() % 8 == 0 ? dtype
                                : one_of({DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt4,
                                          DType::kQ8_0, DType::kQ4_0});
    };
    const CachedCall::Keys k = keys_of(format()), v = keys_of(format());
    is_attended(c, dtype, page, k, v);
    if (HasFailure()) return;
  }
}

// K of blocks and V of rows of 128 bytes, or the other way round: their buffers want different
// multiples.
TEST_P(LowBitCaches, BlocksBesideWholeRows) {
  for (const DType blocks : {DType::kQ8_0, DType::kQ4_0}) {
    for (const bool of_k : {true, false}) {
      SCOPED_TRACE(testing::Message() << name_of(blocks) << (of_k ? " of k" : " of v"));
      Case c;
      c.batch = 1;
      c.sq = of_k ? 1 : 3;
      c.sk = 150;
      c.hk = 2;
      c.hq = 16;
      c.d = c.dv = 128;
      c.mask = causal();
      CachedCall call(c, DType::kF16, random_());
      call.set_k({.format = of_k ? blocks : DType::kInt8});
      call.set_v({.format = of_k ? DType::kInt8 : blocks});
      call.w.seal();
      const Expected e = expect_forward(call.w);
      if (!computes([&] { call.run(engine()); })) continue;
      EXPECT_TRUE(call.is_right(e));
    }
  }
}

// Every format with every kind of scales, page and group of heads, or as many of them as an engine
// has time for.
TEST_P(LowBitCaches, OfEveryFormatScaleAndPage) {
  struct Form {
    DType format;
    ScaleKind kind;
    bool zero_point;
    int64_t page, group;
  };
  std::vector<Form> all;
  using K = ScaleKind;
  for (const DType format : kFormats) {
    for (const K kind :
         {K::kNone, K::kTensor, K::kHeads, K::kSequencesAndHeads, K::kRows, K::kGroups}) {
      if (kind != K::kNone && scaled_inside(format)) continue;
      for (const bool zero : {false, true}) {
        if (zero && (kind == K::kNone || !has_zero_point(format))) continue;
        for (const int64_t page : {0, 1, 16, 64})
          for (const int64_t group : {1, 4, 8}) all.push_back({format, kind, zero, page, group});
      }
    }
  }
  std::shuffle(all.begin(), all.end(), random_);
  const auto few = static_cast<size_t>(draws(12));
  if (engine() == "cuda") all.resize(std::min(all.size(), few));
  for (const Form& form : all) {
    Case c;
    c.batch = 2;
    c.sq = 3;
    c.sk = 70;
    c.hk = 2;
    c.hq = c.hk * form.group;
    c.mask = causal();
    c.seqused = true;
    SCOPED_TRACE(testing::Message() << "seed " << test_seed() << " " << name_of(form.format) << " "
                                    << static_cast<int>(form.kind) << form.zero_point << " page "
                                    << form.page << " group " << form.group);
    CachedCall call(c, DType::kBF16, random_());
    for (const bool k : {true, false}) {
      const CachedCall::Keys keys{form.format, form.kind, form.zero_point};
      k ? call.set_k(keys) : call.set_v(keys);
    }
    maybe_code_queries(call);
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (form.page > 0) call.page(form.page);
    if (!computes([&] { call.run(engine()); })) continue;
    ASSERT_TRUE(call.is_right(e));
  }
}

// Calls of so many keys that a thread block of the emulator's GPU reads several heads at a time.
TEST_P(LowBitCaches, SeveralHeadsTogether) {
  struct Form {
    CachedCall::Keys keys;
    int64_t d, hk, group, sq, page;
  };
  using K = ScaleKind;
  constexpr DType kHalf = DType::kF16;
  const Form forms[] = {
      {{.format = DType::kQ8_0}, 128, 8, 4, 1, 0},
      {{.format = DType::kQ8_0}, 64, 4, 3, 4, 16},
      {{.format = DType::kQ4_0}, 128, 4, 8, 2, 64},
      {{.format = DType::kQ4_0}, 256, 4, 1, 5, 0},
      {{DType::kInt4, K::kGroups, false, kHalf, 32}, 128, 8, 1, 3, 64},
      {{DType::kInt4, K::kGroups, true, kHalf, 32}, 128, 4, 4, 1, 0},
      {{DType::kInt4, K::kRows, false, kHalf}, 64, 8, 8, 1, 0},
      {{DType::kInt4, K::kGroups, true, DType::kF32, 32}, 64, 4, 4, 2, 64},
  };
  const char* const draws = std::getenv("FULGUR_TEST_DRAWS");
  size_t count = engine() == "cuda" && draws == nullptr ? 4 : std::size(forms);
  for (size_t first = random_() % std::size(forms); count > 0; --count, ++first) {
    const Form& form = forms[first % std::size(forms)];
    Case c;
    c.batch = 3;
    c.sq = form.sq;
    c.sk = 1400;
    c.hk = form.hk;
    c.hq = form.hk * form.group;
    c.d = c.dv = form.d;
    c.mask = one_of({causal(), window(300, 0)});
    c.seqused = true;
    c.sinks = random_() % 3 == 0;
    is_attended(c, DType::kBF16, form.page, form.keys, form.keys);
    if (HasFailure()) return;
  }
}

// More rows of a kv head than warps take together.
TEST_P(LowBitCaches, ManyRowsOfAHead) {
  const int count = draws(6);
  for (int draw = 0; draw < count; ++draw) {
    Case c;
    c.batch = one_of<int64_t>({1, 3});
    c.sq = one_of<int64_t>({5, 8, 16});
    c.sk = one_of<int64_t>({70, 400, 700});
    c.hk = one_of<int64_t>({1, 2});
    c.hq = c.hk * one_of<int64_t>({4, 8});
    c.d = one_of<int64_t>({64, 128, 160, 192, 256});
    c.dv = draw % 3 == 0 ? one_of<int64_t>({64, 128}) : c.d;
    c.mask = one_of({full(), causal(), window(20, 3)});
    c.softcap = one_of({0.0, 0.0, 5.0});
    c.sinks = random_() % 3 == 0;
    c.seqused = true;
    const int64_t page = one_of<int64_t>({0, 5, 8, 16, 64});
    const auto keys = [&] {
      return keys_of(one_of({DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt4, DType::kInt4,
                             DType::kQ8_0, DType::kQ4_0}));
    };
    const CachedCall::Keys k = keys(), v = random_() % 2 == 0 ? k : keys();
    is_attended(c, DType::kBF16, page, k, v);
    if (HasFailure()) return;
  }
}

// Large scores, so that the maximum of a row moves again and again, by keys anywhere in a tile.
TEST_P(LowBitCaches, ManyRowsOfLargeScores) {
  const int count = draws(3);
  for (int draw = 0; draw < count; ++draw) {
    Case c;
    c.sq = 16;
    c.sk = 700;
    c.hk = 2;
    c.hq = c.hk * one_of<int64_t>({4, 8});
    c.d = c.dv = one_of<int64_t>({64, 128});
    c.mask = causal();
    c.seqused = true;
    const CachedCall::Keys keys = keys_of(one_of({DType::kE4M3, DType::kInt8, DType::kInt4}));
    SCOPED_TRACE(testing::Message() << "seed " << test_seed() << " " << c.name() << " " << keys);
    CachedCall call(c, DType::kBF16, random_());
    call.set_k(keys);
    call.set_v(keys);
    call.w.options.scale = one_of({0.5, 2.0});
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (!computes([&] { call.run(engine()); })) continue;
    EXPECT_TRUE(call.is_right(e));
    if (HasFailure()) return;
  }
}

// Zero points are rounded, not sums of zero points and what codes are stored with: all columns of a
// key have that error.
TEST_P(LowBitCaches, ZeroPointsAreRoundedAlone) {
  for (const DType format : {DType::kInt4, DType::kInt8}) {
    for (const int64_t rows : {20, 40}) {
      SCOPED_TRACE(testing::Message() << name_of(format) << " " << rows << " rows");
      Case c;
      c.sq = rows / 4;
      c.sk = 1;
      c.hk = 8;
      c.hq = 4 * c.hk;
      c.d = c.dv = 128;
      CachedCall call(c, DType::kF16, random_());
      for (const Tensor& q : {call.w.forward.q, call.call.q})
        write(q, std::vector<double>(static_cast<size_t>(q.numel()), 1.0 / 16));
      const ScaleKind kind = rows == 20 ? ScaleKind::kHeads : ScaleKind::kGroups;
      call.set_k({.format = format, .kind = kind, .zero_point = true});
      call.set_v({.format = format, .kind = kind, .zero_point = true});
      call.w.seal();
      const Expected e = expect_forward(call.w);
      if (!computes([&] { call.run(engine()); })) return;
      EXPECT_TRUE(call.is_right(e));
    }
  }
}

// Three scales of a key, which no two lanes share evenly.
TEST_P(LowBitCaches, OddNumbersOfGroups) {
  for (const bool zero_point : {false, true}) {
    for (const int64_t queries : {1, 5, 10}) {
      Case c;
      c.sq = queries;
      c.sk = 70;
      c.hk = 1;
      c.hq = 4;
      c.d = c.dv = 192;
      const CachedCall::Keys keys{.format = DType::kInt8,
                                  .kind = ScaleKind::kGroups,
                                  .zero_point = zero_point,
                                  .group = 64};
      is_attended(c, DType::kBF16, 0, keys, keys);
    }
  }
}

// Calls of many rows of a kv head, whose codes are converted to the dtype of q first, and calls of
// f32, whose codes always are: with every option of calls, from every kind of cache.
TEST_P(LowBitCaches, OfPrompts) {
  using Index = CachedCall::Index;
  const int count = draws(10);
  for (int draw = 0; draw < count; ++draw) {
    const DType dtype = draw % 3 == 0 ? DType::kF32 : DType::kBF16;
    Case c;
    c.batch = one_of<int64_t>({1, 2, 3});
    c.sq = dtype == DType::kF32 ? one_of<int64_t>({1, 17, 70}) : 300;
    c.sk = one_of<int64_t>({70, 150, 300});
    c.hk = one_of<int64_t>({1, 2, 3});
    c.hq = c.hk * one_of<int64_t>({1, 4});
    c.d = one_of<int64_t>({32, 64, 96, 128});
    c.dv = one_of<int64_t>({32, 64, 128, 160});
    c.mask = one_of({full(), causal(), window(20, 3), chunked(32, causal())});
    c.softcap = one_of({0.0, 0.0, 5.0});
    c.alibi = one_of({Alibi::kNone, Alibi::kNone, Alibi::kHeads});
    c.bias = one_of({Bias::kNone, Bias::kNone, Bias::kAll, Bias::kKeys});
    c.sinks = random_() % 3 == 0;
    c.layout = one_of({Layout::kBshd, Layout::kPacked});
    c.seqused = c.layout == Layout::kBshd;
    c.seqused_q = c.seqused && random_() % 2 == 0;
    c.dropout = dtype == DType::kF32 && random_() % 3 == 0 ? 0.25 : 0;
    const auto keys = [&] {
      return keys_of(one_of({dtype, DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt8,
                             DType::kInt4, DType::kQ8_0, DType::kQ4_0}));
    };
    CachedCall::Keys k = keys(), v = keys();
    if (!is_codes(k.format) && !is_codes(v.format)) k = {DType::kInt8, ScaleKind::kRows};
    k.group = v.group = 32;
    const bool cached = random_() % 3 != 0, biased = c.bias != Bias::kNone;
    const bool padded = !cached && c.layout == Layout::kPacked && random_() % 2 == 0;
    Index index = one_of({Index::kTable, Index::kBatch, Index::kLists});
    int64_t page = one_of<int64_t>({1, 5, 16, 64}), pad = one_of<int64_t>({0, 9});
    if (biased) {  // which has as many keys as the cache
      page = 5, pad = 0;
      if (index == Index::kLists) index = Index::kTable;
    }
    SCOPED_TRACE(testing::Message()
                 << "seed " << test_seed() << " draw " << draw << " " << c.name() << " "
                 << name_of(dtype) << " over " << k << " " << v << " cache " << cached
                 << static_cast<int>(index) << " page " << page << " pad " << pad << padded);
    CachedCall call(c, dtype, random_());
    call.set_k(k);
    call.set_v(v);
    if (random_() % 3 == 0) {
      call.w.options.mask_mod = parse_expression("sk - sq + q - k < 40");
      call.w.mask_value = [](const ScorePlace& p) { return p.q + p.sk - p.sq - p.k < 40; };
    }
    if (padded) call.pad_packed_keys();
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (cached) call.cache(index, page, pad);
    call.lengths_on_host = random_() % 2 == 0;
    if (!computes([&] { call.run(engine()); })) continue;
    ASSERT_TRUE(engine() != "cuda" || dtype != DType::kF32 || call.converts());
    ASSERT_TRUE(call.is_right(e));
    ASSERT_TRUE(call.w.check_memory());
  }
}

// Codes of rotated keys, and of keys less their means, give out and LSE of the keys themselves.
TEST_P(LowBitCaches, OfRotatedKeysLessTheirMeans) {
  const int count = draws(12);
  for (int draw = 0; draw < count; ++draw) {
    const bool rotates = draw % 3 != 0, means = draw % 3 != 1, of_sequences = random_() % 2 == 0;
    Case c;
    c.batch = 3;
    c.sq = one_of<int64_t>({1, 5});
    c.sk = one_of<int64_t>({40, 150});
    c.hk = one_of<int64_t>({1, 2, 4, 8});
    c.hq = c.hk * one_of<int64_t>({1, 4});
    c.d = one_of<int64_t>({64, 96, 128});
    c.mask = one_of({full(), causal(), window(20, 3)});
    c.alibi = one_of({Alibi::kNone, Alibi::kHeads});
    c.softcap = means && c.alibi != Alibi::kNone ? 0 : one_of({0.0, 5.0});
    c.sinks = random_() % 2 == 0;
    const bool packed = random_() % 2 == 0;
    const int64_t page = packed ? 0 : one_of<int64_t>({0, 5, 16});
    c.layout = packed ? Layout::kPacked : Layout::kBshd;
    c.seqused = true;
    const DType dtype = one_of({DType::kBF16, DType::kF16});
    CachedCall::Keys keys{.format =
                              one_of({DType::kE4M3, DType::kInt8, DType::kInt4, DType::kQ8_0})};
    if (!scaled_inside(keys.format))
      keys.kind = one_of({ScaleKind::kHeads, ScaleKind::kRows, ScaleKind::kGroups});
    SCOPED_TRACE(testing::Message()
                 << "seed " << test_seed() << " draw " << draw << " " << c.name() << " page "
                 << page << " " << name_of(dtype) << " over " << name_of(keys.format) << " "
                 << static_cast<int>(keys.kind) << " rotates " << rotates << " means " << means
                 << " of sequences " << of_sequences);
    CachedCall call(c, dtype, random_());
    call.set_k(keys);
    call.set_v({.format = DType::kInt8, .kind = ScaleKind::kRows});
    if (means) call.add_means(of_sequences);
    if (rotates) call.rotate_k();
    call.lengths_on_host = random_() % 2 == 0;
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (page > 0) call.page(page);
    if (!computes([&] { call.run(engine()); })) continue;
    ASSERT_TRUE(call.is_right(e));
    ASSERT_TRUE(call.w.check_memory());
  }
}

// With `invariant` a sequence gives the same bits alone and in any batch, whatever other rows of
// the caches hold, however long other sequences are, and however its keys are split.
TEST_P(LowBitCaches, InvariantToTheBatch) {
  const int count = draws(6);
  for (int draw = 0; draw < count; ++draw) {
    Case c;
    c.batch = 3;
    c.sq = one_of<int64_t>({1, 5, 9});
    c.sk = draw % 3 == 0 ? 2600 : one_of<int64_t>({70, 300});
    c.hk = draw % 3 == 0 ? 1 : one_of<int64_t>({1, 2});
    c.hq = c.hk * one_of<int64_t>({1, 4, 8});
    c.d = one_of<int64_t>({64, 128});
    c.dv = one_of<int64_t>({64, 128});
    c.mask = one_of({full(), causal(), window(1000, 0)});
    c.seqused = c.seqused_q = true;
    const int64_t page = one_of<int64_t>({0, 5, 16});
    const DType dtype = one_of({DType::kBF16, DType::kF16});
    const auto format = [&] {
      return one_of(
          {DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt4, DType::kQ8_0, DType::kQ4_0});
    };
    const CachedCall::Keys k = keys_of(format()), v = keys_of(format());
    SCOPED_TRACE(testing::Message()
                 << "seed " << test_seed() << " draw " << draw << " " << c.name() << " page "
                 << page << " " << name_of(dtype) << " over " << k << " " << v);
    CachedCall call(c, dtype, random_());
    call.set_k(k);
    call.set_v(v);
    maybe_code_queries(call);
    call.w.options.invariant = true;
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (page > 0) call.page(page);
    if (!computes([&] { call.run(engine()); })) continue;
    ASSERT_TRUE(call.is_right(e));
    std::vector<std::vector<double>> together;
    for (size_t b = 0; b < call.w.sequences.size(); ++b) together.push_back(call.results_of(b));
    for (size_t b = 0; b < together.size(); ++b) {
      if (call.w.sequences[b].sq == 0) continue;
      call.run_alone(b, one_of<uint8_t>({0x7f, 0xff, 0}), engine());
      ASSERT_EQ(call.results_of(b), together[b]) << "sequence " << b;
      call.w.options.threads = 1 + static_cast<int>(random_() % 3);
    }
  }
}

// Rows of blocks begin at multiples of 16, 8 or 4 bytes, or in the middle of a word, each or all of
// a kv head.
TEST_P(LowBitCaches, RowsOfBlocksMayBeginAnywhere) {
  const int count = draws(12);
  for (int draw = 0; draw < count; ++draw) {
    const DType k = one_of({DType::kQ8_0, DType::kQ4_0}), v = one_of({DType::kQ8_0, DType::kQ4_0});
    Case c;
    c.batch = 2;
    c.sq = one_of<int64_t>({1, 5});
    c.sk = one_of<int64_t>({40, 150});
    c.hk = one_of<int64_t>({1, 2, 3, 4, 8});
    c.hq = c.hk * one_of<int64_t>({1, 4, 8});
    c.d = one_of<int64_t>({32, 64, 96, 96, 128, 160, 256});
    c.dv = one_of<int64_t>({32, 64, 96, 96, 128, 224, 256});
    c.mask = causal();
    c.seqused = true;
    const int64_t page = one_of<int64_t>({0, 5, 16});
    SCOPED_TRACE(testing::Message() << "seed " << test_seed() << " draw " << draw << " " << c.name()
                                    << " page " << page << " " << name_of(k) << " " << name_of(v));
    CachedCall call(c, DType::kF16, random_());
    call.set_k({.format = k});
    call.set_v({.format = v});
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (page > 0) call.page(page);
    if (!computes([&] { call.run(engine()); })) continue;
    ASSERT_TRUE(call.is_right(e));
    ASSERT_TRUE(call.w.check_memory());
  }
}

// Codes that are no numbers, and scales that are none, spoil the rows that see them and no others.
TEST_P(LowBitCaches, WhatIsNoNumberStaysAtItsKeys) {
  for (const DType format :
       {DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt4, DType::kQ8_0, DType::kQ4_0}) {
    for (const double scale : {1.0, 0.0, 1e-42, -2.0, 1e30, double{kInf}, double{kNan}}) {
      const bool code = scale == 1;  // a code instead
      if (code && format >= DType::kInt8) continue;
      SCOPED_TRACE(testing::Message() << name_of(format) << " scale " << scale);
      Case c;
      c.sq = 5;
      c.sk = 70;
      c.hq = 4;
      c.mask = causal();
      CachedCall call(c, DType::kF16, 1);
      call.set_k({.format = DType::kInt8, .kind = ScaleKind::kHeads});
      const bool inside = scaled_inside(format);
      call.set_v({.format = format, .kind = inside ? ScaleKind::kNone : ScaleKind::kRows});
      // A code or scale of the last key but one, which only the last two queries see.
      const int64_t key = c.sk - 2;
      std::vector<double> v = read(call.w.forward.v);
      if (code) {
        static_cast<uint8_t*>(call.call.v.data)[key * c.dv + 3] = 0x7f;
        v[static_cast<size_t>(key * c.dv + 3)] = kNan;
      } else {
        // Formats with blocks: the scale of the key's second block, in units of 16 bits.
        const int64_t row = inside ? bytes_of(format, c.dv) / 2 : 1;
        const int64_t at = key * row + (inside ? row / (c.dv / 32) : 0);
        void* const scales = inside ? call.call.v.data : call.call.v_descale.data;
        const DType type = inside ? DType::kF16 : DType::kF32;
        const double before = load(scales, type, at);
        store(scales, type, at, scale);
        for (int64_t i = inside ? 32 : 0; i < (inside ? 64 : c.dv); ++i) {
          double& x = v[static_cast<size_t>(key * c.dv + i)];
          x = x / before * load(scales, type, at);
        }
      }
      write(call.w.forward.v, v);
      call.w.seal();
      const Expected e = expect_forward(call.w);
      if (!computes([&] { call.run(engine()); })) return;
      const std::vector<double> got = read(call.call.out);
      double size = 1;
      for (const double x : v) size = std::isfinite(x) ? std::max(size, std::fabs(x)) : size;
      for (size_t i = 0; i < got.size(); ++i) {
        const double want = e.reference.out[i];
        const bool sees = static_cast<int64_t>(i) / c.dv / c.hq >= c.sq - 2;
        if (std::isfinite(want) && std::fabs(want) < 65504) {
          ASSERT_NEAR(got[i], want, kProducts * (sees ? size : 8)) << i;
        } else {
          ASSERT_FALSE(std::isfinite(got[i])) << i << " want " << want;
        }
      }
    }
  }
}

// Scales of V of any size, from key to key: what is small compared with the largest one may be off
// by that one's rounding.
TEST_P(LowBitCaches, ScalesMayDifferByMuch) {
  for (const double size : {1e-30, 1.0, 1e25}) {
    Case c;
    c.sq = one_of<int64_t>({3, 12});
    c.sk = 200;
    c.hq = 8;
    c.hk = 2;
    CachedCall call(c, DType::kBF16, 5);
    call.set_k({.format = DType::kInt8, .kind = ScaleKind::kRows});
    call.set_v({.format = DType::kInt8, .kind = ScaleKind::kRows});
    std::vector<double> v = read(call.w.forward.v);
    for (int64_t n = 0; n < c.sk * c.hk; ++n) {
      const double factor = std::ldexp(size, static_cast<int>(random_() % 12));
      const double before = load(call.call.v_descale.data, DType::kF32, n);
      store(call.call.v_descale.data, DType::kF32, n, before * factor);
      const double now = load(call.call.v_descale.data, DType::kF32, n);
      for (int64_t i = 0; i < c.dv; ++i) v[static_cast<size_t>(n * c.dv + i)] *= now / before;
    }
    write(call.w.forward.v, v);
    call.w.seal();
    const Expected e = expect_forward(call.w);
    if (!computes([&] { call.run(engine()); })) return;
    ASSERT_TRUE(call.is_right(e)) << size;
  }
}

// ---- append ----

/// A call of append to caches of codes, all of its memory in buffers.
struct AppendedCodes {
  std::vector<Buffer> buffers;
  AppendTensors call;
  Tensor q{}, out{}, lengths{};

  Tensor add(Buffer b) {
    buffers.push_back(std::move(b));
    return buffers.back().t;
  }
  /// A copy, whose tensors lie in memory of its own.
  AppendedCodes copy() const {
    AppendedCodes c = *this;
    const auto move = [&](Tensor& t) {
      for (size_t i = 0; i < buffers.size(); ++i)
        if (t.data == buffers[i].t.data) t.data = c.buffers[i].t.data = c.buffers[i].bytes.data();
    };
    for (Tensor* t :
         {&c.call.k_cache, &c.call.v_cache, &c.call.k_new, &c.call.v_new, &c.call.cache_seqlens,
          &c.call.page_table, &c.call.cos, &c.call.sin, &c.call.k_cache_descale,
          &c.call.v_cache_descale, &c.call.k_cache_zero_point, &c.call.v_cache_zero_point,
          &c.call.k_cache_mean, &c.call.q, &c.call.q_out, &c.q, &c.out, &c.lengths})
      move(*t);
    return c;
  }
  void keep(EngineMemory& memory) {
    for (Buffer& b : buffers) memory.keep(std::as_writable_bytes(std::span(b.bytes)));
  }
};

// Codes, scales and zero points of new rows are bit for bit what the CPU makes of them, whatever
// numbers these are, and nothing else is written.
TEST_P(LowBitCaches, TakeRowsAsTheCpuDoes) {
  constexpr int64_t kBatch = 2, kPage = 4, kPages = 8, kNew = 3, kHeads = 2, kPairs = 8;
  for (int draw = 0; draw < 16; ++draw) {
    const int64_t d = one_of<int64_t>({64, 96, 128});
    const bool paged = random_() % 2 == 0, rotates = random_() % 2 == 0;
    const DType rows = one_of({DType::kBF16, DType::kF16, DType::kF32});
    const auto format = [&] {
      return random_() % 8 == 0 ? rows : kFormats[random_() % std::size(kFormats)];
    };
    AppendedCodes a;
    a.buffers.reserve(32);
    const std::vector<int64_t> cache = paged ? std::vector<int64_t>{kPages, kPage, kHeads, d}
                                             : std::vector<int64_t>{kBatch, 4 * kPage, kHeads, d};
    std::string formats;
    const auto make_cache = [&](Tensor& codes, Tensor& scale, Tensor& zero_point) {
      CachedCall::Keys keys = keys_of(format());
      // Pages belong to no sequence of their own.
      if (paged && keys.kind == ScaleKind::kSequencesAndHeads) keys.kind = ScaleKind::kHeads;
      formats += std::string(" ") + name_of(keys.format) +
                 std::to_string(static_cast<int>(keys.kind)) + (keys.zero_point ? "z" : "");
      Buffer numbers(DType::kF32, cache);
      randomize(numbers.t, random_);
      if (keys.format == rows) {
        Buffer same(rows, cache);
        write(same.t, read(numbers.t));
        codes = a.add(std::move(same));
        return;
      }
      Coded c = Coded::of(numbers.t, keys.format, keys.kind, keys.zero_point, keys.scale, 32);
      codes = a.add(std::move(c.codes));
      if (c.scale.t.given()) scale = a.add(std::move(c.scale));
      if (c.zero_point.t.given()) zero_point = a.add(std::move(c.zero_point));
    };
    make_cache(a.call.k_cache, a.call.k_cache_descale, a.call.k_cache_zero_point);
    make_cache(a.call.v_cache, a.call.v_cache_descale, a.call.v_cache_zero_point);
    if (a.call.k_cache.dtype == rows && a.call.v_cache.dtype == rows) continue;
    SCOPED_TRACE(testing::Message()
                 << "seed " << test_seed() << " draw " << draw << formats << " of " << name_of(rows)
                 << " d " << d << " paged " << paged << " rotates " << rotates);
    const auto numbers = [&](DType dtype, std::vector<int64_t> shape, bool any) {
      Buffer b(dtype, std::move(shape));
      randomize(b.t, random_, one_of({1e-3, 1.0, 30.0}));
      std::vector<double> x = read(b.t);
      if (any) {
        x[random_() % x.size()] = kInf;
        x[random_() % x.size()] = 0;
        x[random_() % x.size()] = 1e-41;
        for (int64_t i = 0; i < d; ++i) x[static_cast<size_t>(i)] = random_() % 2 == 0 ? 0.0 : -0.0;
        x[x.size() - 1 - random_() % 8] = kNan;
        write(b.t, x);
      }
      return b;
    };
    const bool any = !rotates;
    const bool hadamard = a.call.k_cache.dtype >= DType::kE4M3 && random_() % 2 == 0;
    if (a.call.k_cache.dtype >= DType::kE4M3 && random_() % 2 == 0) {
      Buffer mean(DType::kF32, {paged ? 1 : kBatch, kHeads, d});
      randomize(mean.t, random_);
      a.call.k_cache_mean = a.add(std::move(mean));
    }
    a.call.k_new = a.add(numbers(rows, {kBatch, kNew, kHeads, d}, any));
    a.call.v_new = a.add(numbers(rows, {kBatch, kNew, kHeads, d}, any));
    const auto ints = [&](std::vector<int64_t> shape, const std::vector<double>& values) {
      Buffer b(DType::kI32, std::move(shape));
      write(b.t, values);
      return a.add(std::move(b));
    };
    a.call.cache_seqlens = ints({kBatch}, {5, 2});
    if (paged) a.call.page_table = ints({kBatch, 4}, {7, 3, 1, 0, 2, 6, 4, 5});
    if (rotates) {
      const DType angles = one_of({rows, DType::kF32});
      a.call.cos = a.add(numbers(angles, {16, kPairs}, false));
      a.call.sin = a.add(numbers(angles, {16, kPairs}, false));
      a.call.interleaved = random_() % 2 == 0;
    }
    AppendedCodes want = a.copy();
    append(want.call, {.hadamard = hadamard});
    AppendedCodes got = a.copy();
    if (!computes([&] {
          EngineMemory memory(engine());
          got.keep(memory);
          append(memory.at(got.call), {.hadamard = hadamard, .engine = engine()});
          memory.bring_back();
        })) {
      continue;
    }
    ASSERT_NE(got.buffers[0].bytes, a.buffers[0].bytes);
    for (size_t i = 0; i < got.buffers.size(); ++i) {
      const DType dtype = got.buffers[i].t.dtype;
      const auto same = [&](uint8_t x, uint8_t y) {
        // The sign of a NaN that comes of infinities is the machine's.
        const bool nan = (x & 0x7f) == 0x7f && (y & 0x7f) == 0x7f;
        return x == y || ((dtype == DType::kE4M3 || dtype == DType::kE5M2) && nan);
      };
      const auto [one, other] =
          std::mismatch(got.buffers[i].bytes.begin(), got.buffers[i].bytes.end(),
                        want.buffers[i].bytes.begin(), same);
      ASSERT_TRUE(one == got.buffers[i].bytes.end())
          << "buffer " << i << " byte " << one - got.buffers[i].bytes.begin() << ": " << +*one
          << " and " << +*other;
    }
    if (any || rows == DType::kF32) continue;

    // In one call with attention what both calls give.
    const auto attend = [&](AppendedCodes& c, bool appends) {
      c.q = c.add(numbers(rows, {kBatch, 1, 4, d}, false));
      write(c.q, std::vector<double>(static_cast<size_t>(c.q.numel()), 0.25));
      c.out = c.add(Buffer(rows, {kBatch, 1, 4, d}));
      Buffer lengths(DType::kI32, {kBatch});
      write(lengths.t, std::vector<double>{5 + kNew, 2 + kNew});
      c.lengths = c.add(std::move(lengths));
      EngineMemory memory(engine());
      c.keep(memory);
      const AppendTensors rows_there = memory.at(c.call);
      ForwardTensors f{.q = memory.at(c.q), .out = memory.at(c.out)};
      Options options;
      options.engine = engine();
      options.hadamard = hadamard;
      if (appends) {
        ForwardArgs args = appending(f, rows_there);
        args.append.rotary = {};
        forward(args, options);
      } else {
        f.k = rows_there.k_cache;
        f.v = rows_there.v_cache;
        f.seqused_k = memory.at(c.lengths);
        f.page_table = rows_there.page_table;
        f.k_descale = rows_there.k_cache_descale;
        f.v_descale = rows_there.v_cache_descale;
        f.k_zero_point = rows_there.k_cache_zero_point;
        f.v_zero_point = rows_there.v_cache_zero_point;
        f.k_mean = rows_there.k_cache_mean;
        forward(f, options);
      }
      memory.bring_back();
      return read(c.out);
    };
    AppendedCodes together = a.copy(), apart = a.copy();
    together.call.cos = together.call.sin = apart.call.cos = apart.call.sin = {};
    append(apart.call, {.hadamard = hadamard});
    std::vector<double> one, two;
    if (!computes([&] { one = attend(together, true); })) continue;
    two = attend(apart, false);
    ASSERT_EQ(one, two);
  }
}

FULGUR_EVERY_ENGINE(LowBitCaches);

}  // namespace
}  // namespace fulgur::test

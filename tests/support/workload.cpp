#include "workload.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "call/mask.h"
#include "engine_memory.h"

namespace fulgur::test {
namespace {

constexpr int64_t kPackedPadding = 3;        // rows after the last packed sequence
constexpr Rows kPackedBegin = {2, 1, 0, 0};  // of the first one, where a case gives no lengths

// Packed sequences: the longest, one without queries, one without keys, a short one.
std::vector<Rows> packed_lengths(const Case& c) {
  return {{0, 0, c.sq, c.sk},
          {0, 0, 0, (c.sk + 1) / 2},
          {0, 0, (c.sq + 2) / 3, 0},
          {0, 0, (c.sq + 1) / 2, (c.sk + 2) / 3}};
}

// The number of used queries of a sequence: some, few, none or all of them.
int64_t used_queries(int64_t sq, size_t which) {
  const int64_t used[] = {sq - (sq + 1) / 3, sq / 4, 0, sq};
  return used[which];
}

void set_nan(const Tensor& t, int64_t row, int64_t rows) {
  // Row `row` of all rows, batch and sequence flattened.
  Tensor one = t;
  const int at = t.rank == 4 ? 1 : 0;
  int64_t offset =
      t.rank == 4 ? row / rows * t.strides[0] + row % rows * t.strides[1] : row * t.strides[0];
  one.shape[at] = 1;
  if (t.rank == 4) one.shape[0] = 1;
  one.data = static_cast<std::byte*>(t.data) + offset * size_of(t.dtype);
  write(one, std::vector<double>(static_cast<size_t>(one.numel()),
                                 std::numeric_limits<double>::quiet_NaN()));
}

}  // namespace

Workload::Workload(const Case& c, uint64_t seed, std::vector<Rows> lengths) : c(c) {
  make_sequences(std::move(lengths));
  if (c.layout == Layout::kQkv) {
    interleaved(false, &forward.q, &forward.k, &forward.v);
    interleaved(true, &backward.dq, &backward.dk, &backward.dv);
  } else {
    forward.q = tensor(total_q, c.sq, c.hq, c.d, false);
    forward.k = tensor(total_k, c.sk, c.hk, c.d, false);
    forward.v = tensor(total_k, c.sk, c.hk, c.dv, false);
    backward.dq = tensor(total_q, c.sq, c.hq, c.d, true);
    backward.dk = tensor(total_k, c.sk, c.hk, c.d, true);
    backward.dv = tensor(total_k, c.sk, c.hk, c.dv, true);
  }
  forward.out = tensor(total_q, c.sq, c.hq, c.dv, true);
  backward.dout = tensor(total_q, c.sq, c.hq, c.dv, false);

  const int64_t gap = c.layout == Layout::kPadded || c.layout == Layout::kPackedPadded ? 5 : 0;
  forward.lse = lse_tensor(gap, true);
  if (c.dlse) backward.dlse = lse_tensor(2 * gap, false);
  backward.q = forward.q;
  backward.k = forward.k;
  backward.v = forward.v;
  backward.out = forward.out;
  backward.lse = forward.lse;

  std::mt19937_64 random(seed);
  for (const Tensor* t : {&forward.q, &forward.k, &forward.v, &backward.dout}) {
    randomize(*t, random);
  }
  if (c.dlse) randomize(backward.dlse, random);
  make_options(seed);
  if (c.sinks) make_sinks();
  if (c.tree != Tree::kNone) make_trees(seed);
  if (c.bias != Bias::kNone) make_bias(seed);
  backward.alibi_slopes = forward.alibi_slopes;
  backward.cu_seqlens_q = forward.cu_seqlens_q;
  backward.cu_seqlens_k = forward.cu_seqlens_k;
  backward.seqused_q = forward.seqused_q;
  backward.seqused_k = forward.seqused_k;
  poison_missing_rows();
  seal();
}

void Workload::seal() {
  for (Storage& s : inputs_) s.seal();
  for (Storage& s : outputs_) s.poison();
}

void Workload::run_forward() { compute(forward, options, run_options); }
void Workload::run_backward() { compute(backward, options, run_options); }

testing::AssertionResult Workload::check_memory() const {
  for (const Storage& s : inputs_) {
    if (auto result = s.all_unchanged(); !result) return result << " (inputs)";
  }
  for (const Storage& s : outputs_) {
    if (auto result = s.padding_unchanged(); !result) return result << " (padding of outputs)";
  }
  return testing::AssertionSuccess();
}

testing::AssertionResult Workload::nothing_written() const {
  for (const auto* storages : {&inputs_, &outputs_}) {
    for (const Storage& s : *storages) {
      if (auto result = s.all_unchanged(); !result) return result;
    }
  }
  return testing::AssertionSuccess();
}

int64_t Workload::lse_index(size_t b, int64_t h, int64_t r) const {
  return c.packed() ? h * total_q + sequences[b].q_begin + r
                    : (static_cast<int64_t>(b) * c.hq + h) * c.sq + r;
}

Storage& Workload::storage(DType dtype, int64_t elements, bool output) {
  return (output ? outputs_ : inputs_).emplace_back(dtype, elements);
}

// Four dimensions (batch, max_len, heads, dim), or three (rows, heads, dim) when packed.
Tensor Workload::tensor(int64_t rows, int64_t max_len, int64_t heads, int64_t dim, bool output) {
  const bool padded = c.layout == Layout::kPadded || c.layout == Layout::kPackedPadded;
  int64_t head = dim + (padded ? 3 : 0), row = heads * head + (padded ? 5 : 0);
  if (c.packed()) {
    const std::array shape{rows, heads, dim}, strides{row, head, int64_t{1}};
    return storage(c.dtype, rows * row, output).view(0, shape, strides);
  }
  int64_t batch = max_len * row + (padded ? 7 : 0);
  if (c.layout == Layout::kBhsd) {
    row = dim;
    head = max_len * dim;
    batch = heads * head;
  }
  const std::array shape{c.batch, max_len, heads, dim}, strides{batch, row, head, int64_t{1}};
  return storage(c.dtype, c.batch * batch, output).view(0, shape, strides);
}

// (batch, heads, max_len), or (heads, rows) when packed.
Tensor Workload::lse_tensor(int64_t gap, bool output) {
  const DType dtype = c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (c.packed()) {
    const std::array shape{c.hq, total_q}, strides{total_q + gap, int64_t{1}};
    return storage(dtype, c.hq * (total_q + gap), output).view(0, shape, strides);
  }
  const std::array shape{c.batch, c.hq, c.sq};
  const std::array strides{c.hq * (c.sq + gap) + gap, c.sq + gap, int64_t{1}};
  return storage(dtype, c.batch * strides[0], output).view(0, shape, strides);
}

// (batch, seqlen, hq + 2 hk, dim) in one buffer: heads of q, then of k, then of v.
void Workload::interleaved(bool output, Tensor* q, Tensor* k, Tensor* v) {
  const int64_t heads = c.hq + 2 * c.hk;
  const std::array strides{c.sq * heads * c.d, heads * c.d, c.d, int64_t{1}};
  Storage& buffer = storage(c.dtype, c.batch * strides[0], output);
  const std::array q_shape{c.batch, c.sq, c.hq, c.d}, k_shape{c.batch, c.sq, c.hk, c.d};
  *q = buffer.view(0, q_shape, strides);
  *k = buffer.view(c.hq * c.d, k_shape, strides);
  *v = buffer.view((c.hq + c.hk) * c.d, k_shape, strides);
}

Tensor Workload::lengths(const std::vector<int64_t>& values) {
  const std::array shape{static_cast<int64_t>(values.size())}, strides{int64_t{1}};
  Tensor t = storage(DType::kI32, shape[0], false).view(0, shape, strides);
  write(t, std::vector<double>(values.begin(), values.end()));
  return t;
}

void Workload::make_sequences(const std::vector<Rows>& given) {
  sequences = !given.empty() ? given
              : c.packed()   ? packed_lengths(c)
                             : std::vector<Rows>(static_cast<size_t>(c.batch), {0, 0, c.sq, c.sk});
  const Rows first = c.packed() && given.empty() ? kPackedBegin : Rows{};
  std::vector<int64_t> cu_q{first.q_begin}, cu_k{first.k_begin}, used_q, used_k;
  for (size_t b = 0; b < sequences.size(); ++b) {
    Rows& s = sequences[b];
    s.q_begin = cu_q.back();
    s.k_begin = cu_k.back();
    cu_q.push_back(s.q_begin + s.sq);
    cu_k.push_back(s.k_begin + s.sk);
    if (c.seqused_q) s.sq = used_queries(s.sq, (b + static_cast<size_t>(c.sq)) % 4);
    if (c.seqused) s.sk = b % 3 == 0 ? s.sk - s.sk / 3 : b % 3 == 1 ? s.sk : 0;
    used_q.push_back(s.sq);
    used_k.push_back(s.sk);
  }
  total_q = cu_q.back();
  total_k = cu_k.back();
  if (c.packed()) {
    total_q += kPackedPadding;
    total_k += kPackedPadding;
    forward.cu_seqlens_q = lengths(cu_q);
    forward.cu_seqlens_k = lengths(cu_k);
  }
  if (c.seqused_q) forward.seqused_q = lengths(used_q);
  if (c.seqused) forward.seqused_k = lengths(used_k);
}

void Workload::make_options(uint64_t seed) {
  options.mask = c.mask;
  options.softcap = c.softcap;
  options.dropout_p = c.dropout;
  run_options.dropout_seed = seed;
  run_options.dropout_offset = 12345;
  if (c.alibi == Alibi::kNone) return;
  const bool batched = c.alibi == Alibi::kBatchHeads;
  const auto batch = batched ? static_cast<int64_t>(sequences.size()) : 1;
  std::vector<double> slopes;
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < c.hq; ++h) {
      slopes.push_back(0.3 / static_cast<double>((b + 1) * (h + 1)));
    }
  }
  const std::array shape{batch, c.hq}, strides{c.hq, int64_t{1}};
  const std::span dims(shape), steps(strides);
  Storage& s = storage(DType::kF32, batch * c.hq, false);
  forward.alibi_slopes = batched ? s.view(0, dims, steps) : s.view(0, dims.last(1), steps.last(1));
  write(forward.alibi_slopes, slopes);
}

// From about the LSE of the keys that a row sees to far below it; the third is none. Every other
// case has them in the dtype of q where that has 16 bits.
void Workload::make_sinks() {
  const std::array shape{c.hq}, strides{int64_t{1}};
  const bool as_q = size_of(c.dtype) == 2 && c.hq % 4 == 0;
  const DType dtype = as_q ? c.dtype : DType::kF32;
  forward.sinks = backward.sinks = storage(dtype, c.hq, false).view(0, shape, strides);
  backward.dsinks = storage(dtype, c.hq, true).view(0, shape, strides);
  const bool bounded = c.mask.left >= 0 && c.mask.right >= 0;
  int64_t seen = bounded ? std::min(c.sk, c.mask.left + c.mask.right + 1) : c.sk;
  if (c.mask.chunk > 0) seen = std::min(seen, c.mask.chunk);
  const double lse = std::log(static_cast<double>(std::max<int64_t>(seen, 1)));
  std::vector<double> sinks;
  for (int64_t h = 0; h < c.hq; ++h) {
    sinks.push_back(h % 4 == 2 ? -std::numeric_limits<double>::infinity()
                               : lse - 3 * static_cast<double>(h % 4));
  }
  write(forward.sinks, sinks);
}

// A token's word is its parent's and its own bit; the parent is any earlier token or none. Bits
// without a key, and words of padding, are random.
void Workload::make_trees(uint64_t seed) {
  const int64_t words = c.packed() ? total_q : c.batch * c.sq;
  const std::array shape{c.batch, c.packed() ? words : c.sq}, strides{c.sq, int64_t{1}};
  const std::span dims(shape), steps(strides);
  Storage& s = storage(DType::kI64, words, false);
  forward.tree_mask = c.packed() ? s.view(0, dims.last(1), steps.last(1)) : s.view(0, dims, steps);
  std::mt19937_64 random(seed + 1);
  auto* const word = static_cast<uint64_t*>(forward.tree_mask.data);
  for (int64_t i = 0; i < words; ++i) word[i] = random();
  if (c.tree == Tree::kRandom) return;
  for (const Rows& rows : sequences) {
    const uint64_t none = rows.sq == 64 ? 0 : ~uint64_t{0} << rows.sq;
    for (int64_t i = 0; i < rows.sq; ++i) {
      uint64_t& of_token = word[rows.q_begin + i];
      const auto parent = static_cast<int64_t>(random() % static_cast<uint64_t>(i + 1)) - 1;
      const uint64_t ancestors = parent < 0 ? 0 : word[rows.q_begin + parent] & ~none;
      of_token = (of_token & none) | ancestors | uint64_t{1} << i;
    }
  }
}

// The bias of packed sequences has more rows and keys than the longest of them; these are not read.
void Workload::make_bias(uint64_t seed) {
  const auto one_of = [&](std::initializer_list<Bias> kinds) {
    return std::ranges::find(kinds, c.bias) != kinds.end();
  };
  const bool bools = one_of({Bias::kKeys, Bias::kPairs});
  const bool one_batch =
      one_of({Bias::kHeads, Bias::kPairs, Bias::kShared, Bias::kRows, Bias::kOne});
  const bool one_head = bools || one_of({Bias::kBatches, Bias::kShared, Bias::kOne});
  const bool one_query = one_of({Bias::kKeys, Bias::kColumns, Bias::kOne});
  const bool one_key = one_of({Bias::kRows, Bias::kOne});
  const std::array shape{one_batch ? 1 : static_cast<int64_t>(sequences.size()),
                         one_head ? 1 : c.hq, one_query ? 1 : c.sq + (c.packed() ? 2 : 0),
                         one_key ? 1 : c.sk + (c.packed() ? 3 : 0)};
  const int64_t pairs = shape[2] * shape[3];
  std::array strides{shape[1] * pairs, pairs, shape[3], int64_t{1}};
  if (c.bias == Bias::kTransposed) {
    strides[2] = 1;
    strides[3] = shape[2];
  }
  const bool as_q = one_of({Bias::kHeads, Bias::kShared, Bias::kRows});
  const DType dtype = bools                         ? DType::kBool
                      : as_q                        ? c.dtype
                      : c.bias == Bias::kTransposed ? DType::kF16
                                                    : DType::kF32;
  forward.bias = storage(dtype, shape[0] * strides[0], false).view(0, shape, strides);
  backward.bias = forward.bias;
  std::mt19937_64 random(seed + 2);
  std::vector<double> values(static_cast<size_t>(forward.bias.numel()));
  for (size_t n = 0; n < values.size(); ++n) {
    const bool row_is_hidden = !one_query && n / static_cast<size_t>(shape[3]) % 11 == 4;
    const bool hidden = row_is_hidden || (!one_key && random() % 6 == 0);
    values[n] =
        bools    ? !hidden
        : hidden ? (n % 3 == 0 && dtype != DType::kF16 ? -3e38
                                                       : -std::numeric_limits<double>::infinity())
                 : normal(random);
  }
  write(forward.bias, values);
  if (bools) return;
  // Rows of the gradient lie apart, or its keys do.
  const DType of_gradient = seed % 2 == 0 ? DType::kF32 : dtype;
  const int64_t ld = shape[c.bias == Bias::kTransposed ? 2 : 3] + 5;
  const int64_t head = ld * shape[c.bias == Bias::kTransposed ? 3 : 2];
  std::array apart{shape[1] * head, head, ld, int64_t{1}};
  if (c.bias == Bias::kTransposed) std::swap(apart[2], apart[3]);
  backward.dbias = storage(of_gradient, shape[0] * apart[0], true).view(0, shape, apart);
}

// Rows that belong to no sequence, and keys that do not exist: reading them shows in the results.
void Workload::poison_missing_rows() {
  std::vector<bool> q_row(static_cast<size_t>(total_q)), k_row(static_cast<size_t>(total_k));
  for (const Rows& s : sequences) {
    for (int64_t i = 0; i < s.sq; ++i) q_row[static_cast<size_t>(s.q_begin + i)] = true;
    for (int64_t j = 0; j < s.sk; ++j) k_row[static_cast<size_t>(s.k_begin + j)] = true;
  }
  for (int64_t i = 0; i < total_q; ++i) {
    if (q_row[static_cast<size_t>(i)]) continue;
    set_nan(forward.q, i, c.sq);
    set_nan(backward.dout, i, c.sq);
  }
  for (int64_t j = 0; j < total_k; ++j) {
    if (k_row[static_cast<size_t>(j)]) continue;
    set_nan(forward.k, j, c.sk);
    set_nan(forward.v, j, c.sk);
  }
  if (c.dlse) poison_unused_dlse();
}

// Poisons dlse of rows whose LSE is -inf: they see no key and have no sink, or belong to no
// sequence.
void Workload::poison_unused_dlse() {
  const std::vector<double> random = read(backward.dlse);
  std::vector<double> dlse(random.size(), std::numeric_limits<double>::quiet_NaN());
  const std::vector<double> sinks = c.sinks ? read(forward.sinks) : std::vector<double>();
  for (size_t b = 0; b < sequences.size(); ++b) {
    const Rows& s = sequences[b];
    for (int64_t i = 0; i < s.sq; ++i) {
      const bool sees = !visible_keys(c.mask, {s.q_begin, s.k_begin, s.sq, s.sk}, i).empty();
      for (int64_t h = 0; h < c.hq; ++h) {
        const bool sink = c.sinks && !std::isinf(sinks[static_cast<size_t>(h)]);
        if (sees || sink) dlse[lse_index(b, h, i)] = random[lse_index(b, h, i)];
      }
    }
  }
  write(backward.dlse, dlse);
}

}  // namespace fulgur::test

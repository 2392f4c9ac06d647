// A row tile is up to three vectors of rows, one row in each lane.
#if defined(FULGUR_CPU_ROW_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_ROW_TILE_INL_H_
#undef FULGUR_CPU_ROW_TILE_INL_H_
#else
#define FULGUR_CPU_ROW_TILE_INL_H_
#endif

#include "call/dropout.h"
#include "cpu/kernels/simd/formats-inl.h"
#include "cpu/kernels/simd/gemm-inl.h"
#include "cpu/kernels/simd/kernels.h"
#include "cpu/kernels/simd/mask-inl.h"
#include "cpu/kernels/simd/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

/// Allocates pieces of a thread's scratch, aligned to 64 bytes. With a null base it only counts.
class Arena {
 public:
  explicit Arena(float* base) : base_(base) {}
  float* take(int64_t floats) {
    const int64_t at = used_;
    used_ += round_up(floats, 16);
    return base_ == nullptr ? nullptr : base_ + at;
  }
  /// Values of 16 bits.
  uint16_t* take_halves(int64_t n) { return reinterpret_cast<uint16_t*>(take((n + 1) / 2)); }
  int64_t used() const { return used_; }

 private:
  float* base_;
  int64_t used_ = 0;
};

/// Memory for the bias of a row tile and a key tile, [kBc][width]; null in calls without a bias.
inline float* take_bias_tile(const Problem& p, Arena& arena) {
  return p.has(Arg::kBias) || p.expressions.given() ? arena.take(kBc * kBr) : nullptr;
}

/// The rows of a row tile: what masks, score rules, dropout and bias need of each.
struct RowTile {
  int64_t count = 0;    ///< rows; the results of the lanes after them are not read
  int64_t vectors = 0;  ///< the vectors that have these rows
  RowTileMask mask;
  int64_t diagonal[kBr];       ///< the key aligned with each query
  HWY_ALIGN float slope[kBr];  ///< ALiBi, in log2 units
  /// The counter of dropout's random numbers: the part of each row, and the index of key 0.
  HWY_ALIGN uint32_t query[kBr], head_lo[kBr], head_hi[kBr];
  int64_t dropout_key;
  int64_t bias_row[kBr];    ///< the offset of the row's bias
  int64_t dbias_row[kBr];   ///< the offset of the row's dbias
  bool shares_bias = true;  ///< all rows have the same bias
  /// The bias of the current tile, [n][bias_step], or [n] for all rows if the step is 0. If it is
  /// null, the bias lies in the tensor at bias_rows, and is 0 if these are null, too. add_bias()
  /// then finds whether it hides keys, and loads it to bias_memory, if that is not null, if so.
  const float* bias = nullptr;
  float* bias_memory = nullptr;
  int64_t bias_step = 0;
  const void* bias_rows = nullptr;

  int64_t width() const { return vectors * kLanes; }
  /// The number of different rows of the bias.
  int64_t bias_count() const { return shares_bias ? 1 : count; }
};

/// A walk over the rows of a task from `row` on, without the divisions of Task::query() and head().
class RowWalk {
 public:
  RowWalk(const Task& task, int64_t row)
      : query(task.query(row)), head(task.head(row)), task_(task) {}
  void next() {
    if (++query < task_.s.sq) return;
    query = 0;
    ++head;
  }
  /// The offset of the row in a tensor of q heads (q, out, dout, dq, lse).
  int64_t offset(const Layout& layout) const {
    return layout.offset(task_.b, task_.s.q_begin + query, head);
  }

  int64_t query, head;

 private:
  const Task& task_;
};

/// The offset of the bias of query i of head h of sequence b, or of its gradient.
inline int64_t bias_offset(const Problem::Bias& at, int64_t b, int64_t h, int64_t i) {
  return b * at.batch + h * at.head + i * at.row;
}

inline void make_row_tile(const Task& task, int64_t row_begin, int64_t row_end, RowTile* row_tile) {
  const Problem& p = task.problem;
  row_tile->count = row_end - row_begin;
  row_tile->vectors = (row_tile->count + kLanes - 1) / kLanes;
  row_tile->dropout_key = p.origin.key;
  row_tile->shares_bias = true;
  row_tile->mask = RowTileMask(p, task.s, tree_words(p, task.given.tree_mask, task.b, task.s));
  RowWalk row(task, row_begin);
  for (int64_t lane = 0; lane < kBr; ++lane) {
    const int64_t i = row.query;
    if (lane < row_tile->count) row_tile->mask.set_row(lane, i);
    const uint64_t index = dropout_head(p, task.b, row.head);
    row_tile->diagonal[lane] = diagonal_of(p.mask, task.s, i);
    row_tile->slope[lane] = task.slope(row.head) * kLog2e;
    row_tile->bias_row[lane] = bias_offset(p.bias, task.b, row.head, i);
    row_tile->shares_bias &= row_tile->bias_row[lane] == row_tile->bias_row[0];
    row_tile->dbias_row[lane] = bias_offset(task.given.dbias.at, task.b, row.head, i);
    row_tile->query[lane] = static_cast<uint32_t>(p.origin.query + i);
    row_tile->head_lo[lane] = static_cast<uint32_t>(index);
    row_tile->head_hi[lane] = static_cast<uint32_t>(index >> 32);
    if (lane + 1 < row_tile->count) row.next();
  }
}

/// High half of the 32 x 32 bit products, and the low half.
HWY_INLINE void multiply_wide(hn::Vec<U32> a, uint32_t factor, hn::Vec<U32>* high,
                              hn::Vec<U32>* low) {
  const U32 u;
  const hn::Repartition<uint64_t, U32> w;
  const auto b = hn::Set(u, factor);
  const auto even = hn::MulEven(a, b);
  const auto odd = hn::MulEven(hn::BitCast(u, hn::ShiftRight<32>(hn::BitCast(w, a))), b);
  *low = hn::OddEven(hn::BitCast(u, hn::ShiftLeft<32>(odd)), hn::BitCast(u, even));
  *high = hn::OddEven(hn::BitCast(u, odd), hn::BitCast(u, hn::ShiftRight<32>(even)));
}

/// Turns a counter in each lane into the words of dropout's random numbers
/// (kernels/host_device/dropout.h).
HWY_INLINE void random_words(kernels::PhiloxKey key, hn::Vec<U32> (&c)[kernels::kDropoutKeys]) {
  const U32 u;
  for (int round = 0; round < kernels::kPhiloxRounds; ++round, key = key.next()) {
    hn::Vec<U32> a_high, a_low, b_high, b_low;
    multiply_wide(c[0], kernels::kPhiloxMultiplier0, &a_high, &a_low);
    multiply_wide(c[2], kernels::kPhiloxMultiplier2, &b_high, &b_low);
    c[0] = hn::Xor(hn::Xor(b_high, c[1]), hn::Set(u, key[0]));
    c[1] = b_low;
    c[2] = hn::Xor(hn::Xor(a_high, c[3]), hn::Set(u, key[1]));
    c[3] = a_low;
  }
}

/// Dropout of P [n][ld] of a tile, and of `second` if it is not null: times 1 / (1 - p) if kept, 0
/// if dropped, even if NaN. The tile begins at a multiple of 4 keys.
HWY_INLINE void drop(const kernels::DropoutMask& mask, float keep_scale, const RowTile& row_tile,
                     const KeyTile& tile, int64_t ld, float* HWY_RESTRICT P,
                     float* HWY_RESTRICT second) {
  const F32 f;
  const int64_t n = tile.n, j = row_tile.dropout_key + tile.j;
  const U32 u;
  const auto threshold = hn::Set(u, mask.threshold);
  const V32 kept = hn::Set(f, keep_scale);
  for (int64_t jj = 0; jj < n; jj += kernels::kDropoutKeys) {
    for (int64_t v = 0; v < row_tile.vectors; ++v) {
      hn::Vec<U32> words[kernels::kDropoutKeys] = {
          hn::Set(u, static_cast<uint32_t>((j + jj) / kernels::kDropoutKeys)),
          hn::Load(u, row_tile.query + v * kLanes), hn::Load(u, row_tile.head_lo + v * kLanes),
          hn::Load(u, row_tile.head_hi + v * kLanes)};
      random_words(mask.key, words);
      for (int64_t w = 0; w < std::min<int64_t>(kernels::kDropoutKeys, n - jj); ++w) {
        const auto keeps = hn::RebindMask(f, hn::Not(hn::Lt(words[w], threshold)));
        for (float* values : {P, second}) {
          if (values == nullptr) continue;
          float* at = values + (jj + w) * ld + v * kLanes;
          hn::Store(hn::IfThenElseZero(keeps, hn::Mul(hn::Load(f, at), kept)), f, at);
        }
      }
    }
  }
}

/// The address of element `offset` of a tensor.
inline const void* address(const ConstTensor& t, int64_t offset) {
  return static_cast<const char*>(t.data) + bytes_of(t.dtype, offset);
}
inline void* address(const Tensor& t, int64_t offset) {
  return static_cast<char*>(t.data) + offset * size_of(t.dtype);
}

/// Widens keys [j, j + n) of K or V of a task to dst [n][ld]; returns whether all are finite.
HWY_INLINE bool load_keys(const Task& task, const ConstTensor& t, const Layout& layout, int64_t dim,
                          int64_t j, int64_t n, float* HWY_RESTRICT dst, int64_t ld,
                          const Scaling& scaling = {}) {
  bool finite = true;
  for (KvRuns run(task.keys, j, n); !run.done(); run.next()) {
    const void* from = address(t, layout.offset(run.entry, run.row, task.kv));
    if (scaling.given()) {
      const auto of = [&](const ScaleTensor& scale) {
        return RowScales(scale, task.b, task.kv, run.entry, run.row, task.kv);
      };
      finite &= load_scaled_rows(t.dtype, from, layout.row, run.count, dim, of(scaling.scale),
                                 of(scaling.zero_point), dst, ld);
    } else {
      finite &= load_rows(t.dtype, from, layout.row, run.count, dim, dst, ld);
    }
    dst += run.count * ld;
  }
  return finite;
}

/// The addresses of keys [j, j + n) of K or V of a task.
inline void key_addresses(const Task& task, const ConstTensor& t, const Layout& layout, int64_t j,
                          int64_t n, const char** to) {
  const int64_t entry = bytes_of(t.dtype, layout.batch), row = bytes_of(t.dtype, layout.row);
  const char* const head =
      static_cast<const char*>(t.data) + task.kv * bytes_of(t.dtype, layout.head);
  for (KvRuns run(task.keys, j, n); !run.done(); run.next()) {
    const char* const from = head + run.entry * entry + run.row * row;
    for (int64_t i = 0; i < run.count; ++i) to[i] = from + i * row;
    to += run.count;
  }
}

/// The offset of row r of a task in a tensor of q heads (q, out, dout, dq, lse).
inline int64_t row_offset(const Task& task, const Layout& layout, int64_t r) {
  return layout.offset(task.b, task.s.q_begin + task.query(r), task.head(r));
}

/// Widens rows [row, row + count) of q, out or dout to dst [width][ld], with zeros in the rows
/// after them; returns whether all are finite.
HWY_INLINE bool load_queries(const Task& task, const ConstTensor& t, const Layout& layout,
                             int64_t dim, int64_t row, int64_t count, int64_t width,
                             float* HWY_RESTRICT dst, int64_t ld, const Scaling& scaling = {}) {
  bool finite = true;
  for (int64_t r = 0; r < count; ++r) {
    const void* from = address(t, row_offset(task, layout, row + r));
    if (!scaling.given()) {
      finite &= load_rows(t.dtype, from, 0, 1, dim, dst + r * ld, ld);
      continue;
    }
    const int64_t query = task.s.q_begin + task.query(row + r), head = task.head(row + r);
    const auto of = [&](const ScaleTensor& scale) {
      return RowScales(scale, task.b, head / task.problem.group(), task.b, query, head);
    };
    finite &= load_scaled_rows(t.dtype, from, 0, 1, dim, of(scaling.scale), of(scaling.zero_point),
                               dst + r * ld, ld);
  }
  std::fill(dst + count * ld, dst + width * ld, 0.0f);
  return finite;
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

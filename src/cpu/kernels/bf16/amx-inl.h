// The matrix product of bf16 on tiles of 16 rows of 64 bytes (Intel's AMX), and how its operands
// are packed, for dot-inl.h, too. A product step is C [16][16] += A [16][32] B [32][16]. A tile of
// A is row-major. A tile of B has the rows of B in pairs, since 32 bits hold two values of the
// summed index: [16 pairs][16 columns][2]. The parts of elements (operands-inl.h) have tiles of
// their own, one after the other along the summed index, so that a product of f16 is one of bf16
// with three times the steps.
#if defined(FULGUR_CPU_AMX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef FULGUR_CPU_AMX_INL_H_
#undef FULGUR_CPU_AMX_INL_H_
#else
#define FULGUR_CPU_AMX_INL_H_
#endif

#include "cpu/kernels/bf16/operands-inl.h"

// Every CPU with AMX has this target.
#if HWY_TARGET == HWY_AVX3

#include <immintrin.h>

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

constexpr int64_t kTileRows = 16;   // of A and C; columns of B and C
constexpr int64_t kTileDepth = 32;  // values of the summed index in a tile
constexpr int64_t kTileSize = kTileRows * kTileDepth;

/// Tiles of bf16 that cover n values of the summed index, and of rows or columns.
constexpr int64_t steps_of(int64_t n) { return (n + kTileDepth - 1) / kTileDepth; }
constexpr int64_t blocks_of(int64_t n) { return (n + kTileRows - 1) / kTileRows; }

/// The instructions of AMX as inline assembly, which needs only an assembler that knows them. The
/// compiler does not allocate tile registers, which have numbers here. The clobber of memory keeps
/// stores of packed operands before the loads of tiles.
struct Amx {
  /// Configures the tile registers of this thread, of 16 rows of 64 bytes, for a scope.
  class Session {
   public:
    Session() { configure({}); }
    ~Session() { asm volatile("tilerelease" : :); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    /// Sets the rows of the tiles of C and A and the columns of those of C and B, at most 16. The
    /// registers lose their contents.
    void shape(int64_t rows, int64_t columns) {
      Config config;
      std::fill_n(config.rows, 6, static_cast<uint8_t>(rows));
      for (const int tile : {0, 1, 2, 3, 6, 7}) {
        config.row_bytes[tile] = static_cast<uint16_t>(4 * columns);
      }
      configure(config);
    }

   private:
    struct alignas(64) Config {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    };
    static void configure(const Config& config) { asm volatile("ldtilecfg %0" : : "m"(config)); }
  };

  template <int kTile>
  static HWY_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
  }
  /// Loads a tile, whose rows are `stride` bytes apart.
  template <int kTile>
  static HWY_INLINE void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(kTile), "r"(from), "r"(stride) : "memory");
  }
  /// Loads a tile without allocating lines in the L1 cache.
  template <int kTile>
  static HWY_INLINE void stream(const void* from, int64_t stride) {
    asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0"
                 :
                 : "i"(kTile), "r"(from), "r"(stride)
                 : "memory");
  }
  template <int kTile>
  static HWY_INLINE void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(kTile), "r"(to), "r"(stride) : "memory");
  }
  /// C += A B in f32. Denormal numbers count as 0.
  template <int kC, int kA, int kB>
  static HWY_INLINE void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
  }
};

/// An operand in tiles: the rows of a tile are `stride` bytes apart, tiles `block` elements along
/// the rows of A or the columns of B, and `step` elements along the summed index.
struct Operand {
  const uint16_t* data;
  int64_t stride, block, step;

  /// Tiles one after the other, those along the summed index first.
  static Operand packed(const uint16_t* data, int64_t steps) {
    return {data, 64, steps * kTileSize, kTileSize};
  }
  const uint16_t* at(int64_t b, int64_t s) const { return data + b * block + s * step; }
};

/// The size of a product without padding: rows, columns, and elements along the summed index.
struct Extent {
  int64_t rows, columns, depth;
};

/// A product of tiles: C [16 rows][16 columns] = A B, or C += A B, over `steps` tiles of the summed
/// index, those of all parts. Tiles multiply their padding, dot products only what is there.
struct Product {
  bool add;
  int64_t rows, columns, steps;
  Operand A, B;
  float* C;
  int64_t ldc;
  Extent there;
  bool past_l1 = false;  ///< A and B are both too large for the L1 cache: tiles stream both
};

/// The floats from a tile of C to the next tile of columns: 16, or 32 rows of 16 floats.
template <bool kBiased>
constexpr int64_t column_of() {
  return kBiased ? 2 * kTileRows * kTileRows : kTileRows;
}

/// Products on tiles, 2 x 2 tiles of C at a time. A register of C is stored only when the next
/// block needs it, after the loads for the first product that reuses it, because a sum has a long
/// latency and a store is slow. So C is complete in memory only after flush(). A, or B if kBiased,
/// is loaded past the L1 cache, which keeps C and the other operand. An operand of several parts is
/// too large to stay there, and is loaded likewise. If kBiased, C lies in columns of tiles
/// (row_scores-inl.h).
template <class Tiles, int kParts, bool kBiased = false>
class TileProducts {
 public:
  using Session = typename Tiles::Session;
  static constexpr bool kAtOnce = false;  // products that are put off are made later

  /// Makes a product at once. No product may be waiting.
  HWY_INLINE void multiply(const Product& p) {
    for (int64_t n = 0; n < p.columns; n += 2) {
      for (int64_t m = 0; m < p.rows; m += 2) {
        for (Block block(p, m, n); block.left > 0; block.next()) step(block);
      }
    }
  }

  /// Puts a product off: turn() makes it in steps of at most four products of tiles, and the caller
  /// does other work in between. At most two products may wait, and must outlive finish().
  HWY_INLINE void put_off(const Product& p) {
    if (p.rows == 0) return;
    queue_[(first_ + waiting_++) % 2] = &p;
    left_ += (p.rows + 1) / 2 * ((p.columns + 1) / 2) * p.steps;
  }
  /// The steps of the waiting products that are left.
  HWY_INLINE int64_t left() const { return left_; }
  /// Makes turn `turn` of the kTurns of the next step, if a step is left.
  template <int kTurns>
  HWY_INLINE void turn(int turn) {
    if (turn == 0) next_step();
    if (!active_) return;
    constexpr int kEach = 4 / kTurns;
    if (0 / kEach == turn) part<0>(block_);
    if (1 / kEach == turn) part<1>(block_);
    if (2 / kEach == turn) part<2>(block_);
    if (3 / kEach == turn) part<3>(block_);
  }
  HWY_INLINE void finish() {
    for (next_step(); active_; next_step()) step(block_);
  }

  HWY_INLINE void flush() {
    store<0>();
    store<1>();
    store<2>();
    store<3>();
  }

 private:
  /// The 2 x 2 tiles of C from tile (m, n) on, and the steps along the summed index that are left.
  struct Block {
    Block() = default;
    HWY_INLINE Block(const Product& p, int64_t m, int64_t n)
        : left(p.steps),
          A(p.A.at(m, 0)),
          B(p.B.at(n, 0)),
          A_stride(p.A.stride),
          B_stride(p.B.stride),
          A_block(p.A.block),
          B_block(p.B.block),
          A_step(p.A.step),
          B_step(p.B.step),
          C(p.C + m * kTileRows * p.ldc + n * column_of<kBiased>()),
          ldc(p.ldc),
          add(p.add),
          past_l1(p.past_l1),
          first(true),
          row(m + 1 < p.rows),
          column(n + 1 < p.columns) {}
    HWY_INLINE void next() {
      --left;
      A += A_step;
      B += B_step;
      first = false;
    }

    int64_t left = 0;
    const uint16_t *A, *B;  // the tiles of the next step
    int64_t A_stride, B_stride, A_block, B_block, A_step, B_step;
    float* C;
    int64_t ldc;
    bool add, past_l1, first;
    bool row, column;  // whether there is a second tile of rows, of columns
  };

  HWY_INLINE void next_step() {
    if (active_) {
      block_.next();
      --left_;
    }
    active_ = left_ > 0;
    if (!active_ || block_.left > 0) return;
    const Product& p = *queue_[first_];
    block_ = Block(p, m_, n_);
    m_ += 2;
    if (m_ < p.rows) return;
    m_ = 0;
    n_ += 2;
    if (n_ < p.columns) return;
    n_ = 0;
    first_ = 1 - first_;
    --waiting_;
  }

  HWY_INLINE void step(const Block& block) {
    part<0>(block);
    part<1>(block);
    part<2>(block);
    part<3>(block);
  }
  /// The product for register kPart of C. The operand that streams is loaded with parts 0 and 2.
  template <int kPart>
  HWY_INLINE void part(const Block& block) {
    constexpr int kRow = kBiased ? kPart % 2 : kPart / 2;
    constexpr int kColumn = kBiased ? kPart / 2 : kPart % 2;
    // A block at an edge does not use every register, so it would not store all of them.
    if (kPart == 0 && block.first && !(block.row && block.column)) flush();
    if ((kRow == 1 && !block.row) || (kColumn == 1 && !block.column)) return;
    if constexpr (kRow == 0) {
      load<6 + kColumn, kBiased>(block.B + kColumn * block.B_block, block.B_stride, block.past_l1);
    }
    if constexpr (kColumn == 0) {
      load<4 + kRow, !kBiased>(block.A + kRow * block.A_block, block.A_stride, block.past_l1);
    }
    if (block.first) {
      store<kPart>();
      C_[kPart] = block.C + kRow * kTileRows * block.ldc + kColumn * column_of<kBiased>();
      stride_[kPart] = block.ldc * 4;
      if (block.add) {
        Tiles::template load<kPart>(C_[kPart], stride_[kPart]);
      } else {
        Tiles::template zero<kPart>();
      }
    }
    Tiles::template multiply<kPart, 4 + kRow, 6 + kColumn>();
  }
  template <int kTile, bool kStreams>
  HWY_INLINE void load(const uint16_t* from, int64_t stride, bool past_l1) {
    if (!kStreams && kParts == kPartsOfBF16 && !past_l1) {
      Tiles::template load<kTile>(from, stride);
    } else {
      Tiles::template stream<kTile>(from, stride);
    }
  }
  template <int kTile>
  HWY_INLINE void store() {
    if (C_[kTile] != nullptr) Tiles::template store<kTile>(C_[kTile], stride_[kTile]);
    C_[kTile] = nullptr;
  }

  float* C_[4] = {};  // the addresses of the sums in the registers
  int64_t stride_[4] = {};
  const Product* queue_[2] = {};
  int64_t first_ = 0, waiting_ = 0;  // of the queue
  int64_t left_ = 0;                 // steps of the products in the queue
  int64_t m_ = 0, n_ = 0;            // the next block of the first product: its first tile of C
  Block block_;                      // the block whose step turns make
  bool active_ = false;              // whether there is such a block
};

/// Properties of packed values that decide whether tiles and dot products may multiply them.
class Census {
 public:
  // Not default member initializers, which are compiled for the baseline CPU.
  HWY_INLINE Census() : largest_(_mm512_setzero_si512()), smallest_(_mm512_set1_epi16(-1)) {}
  HWY_INLINE void add(__m512i halves) {
    const __m512i size = _mm512_and_si512(halves, _mm512_set1_epi16(0x7fff));
    largest_ = _mm512_max_epu16(largest_, size);
    smallest_ = _mm512_min_epu16(smallest_, _mm512_sub_epi16(size, _mm512_set1_epi16(1)));
  }
  bool finite() const { return _mm512_cmpge_epu16_mask(largest_, _mm512_set1_epi16(0x7f80)) == 0; }
  /// Whether all are below 2^40 in size, so that sums of products of two are far from overflow.
  bool moderate() const {
    return _mm512_cmpge_epu16_mask(largest_, _mm512_set1_epi16(0x5380)) == 0;
  }
  /// Whether some are denormal. Tiles and dot products take these for 0.
  bool denormal() const { return _mm512_cmplt_epu16_mask(smallest_, _mm512_set1_epi16(0x7f)) != 0; }

 private:
  // The maximum of the magnitudes, and the minimum of magnitude - 1, for which 0 is the largest.
  __m512i largest_, smallest_;
};

/// The first n of a vector of 16-bit elements, or all.
HWY_INLINE __mmask32 first_halves(int64_t n) {
  return n >= 32 ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
}

/// `count` rows of 16-bit elements. Rows and columns after the last are read as 0.
template <class RowAt>
struct Rows {
  RowAt at;  // at(i): the address of row i
  int64_t count, columns;

  /// Columns [c, c + 32) of row i. If kWhole, the row exists and has all of them.
  template <bool kWhole>
  HWY_INLINE __m512i load_32(int64_t i, int64_t c) const {
    if constexpr (kWhole) return _mm512_loadu_si512(at(i) + c);
    if (i >= count || c >= columns) return _mm512_setzero_si512();
    return _mm512_maskz_loadu_epi16(first_halves(columns - c), at(i) + c);
  }

  /// Calls body(whole) with whether all rows [i, i + n) and columns [c, c + m) exist, as a
  /// constant.
  template <class Body>
  HWY_INLINE void with_whole(int64_t i, int64_t n, int64_t c, int64_t m, const Body& body) const {
    if (i + n <= count && c + m <= columns) return body(std::true_type());
    return body(std::false_type());
  }
};
template <class RowAt>
Rows(RowAt, int64_t, int64_t) -> Rows<RowAt>;

/// Transposes 16 x 16 values of 32 bits: swaps lane j of r[i] with lane i of r[j].
HWY_INLINE void transpose_16(__m512i (&r)[16]) {
  __m512i t[16];
  FULGUR_UNROLL for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  FULGUR_UNROLL for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // r[4 g + i] holds columns i, i + 4, i + 8, i + 12 of rows 4 g to 4 g + 3.
  FULGUR_UNROLL for (int i = 0; i < 4; ++i) {
    const __m512i even_low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    t[i + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    t[i + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  FULGUR_UNROLL for (int i = 0; i < 16; ++i) r[i] = t[i];
}

HWY_INLINE void store_tile(const __m512i (&r)[16], uint16_t* HWY_RESTRICT to) {
  FULGUR_UNROLL for (int i = 0; i < 16; ++i) _mm512_store_si512(to + i * kTileDepth, r[i]);
}

/// Stores eight rows of a tile: four from `row` on, and four from `row` + 8 on.
HWY_INLINE void store_half_tile(const __m512i* r, int64_t row, uint16_t* HWY_RESTRICT to) {
  FULGUR_UNROLL for (int i = 0; i < 8; ++i) {
    _mm512_store_si512(to + (row + i / 4 * 8 + i % 4) * kTileDepth, r[i]);
  }
}

/// Packs rows as A, to be summed over their columns: tiles
/// [blocks_of(rows)][steps_of(columns)][kParts].
template <int kParts, class RowAt>
HWY_INLINE void pack_rows(const Rows<RowAt>& from, int64_t rows, uint16_t* HWY_RESTRICT to,
                          Census* census) {
  Census all = *census;
  for (int64_t b = 0; b < blocks_of(rows); ++b) {
    for (int64_t s = 0; s < steps_of(from.columns); ++s, to += kParts * kTileSize) {
      const int64_t i = b * kTileRows, c = s * kTileDepth;
      from.with_whole(i, kTileRows, c, kTileDepth, [&](auto whole) HWY_ATTR {
        FULGUR_UNROLL for (int r = 0; r < kTileRows; ++r) {
          __m512i x[kParts];
          split_row<Side::kA>(from.template load_32<decltype(whole)::value>(i + r, c), x);
          all.add(x[0]);
          FULGUR_UNROLL for (int p = 0; p < kParts; ++p) {
            _mm512_store_si512(to + p * kTileSize + r * kTileDepth, x[p]);
          }
        }
      });
    }
  }
  *census = all;
}

/// Packs rows as columns of B, to be summed over their columns: tiles
/// [blocks_of(rows)][steps_of(columns)][kParts].
template <int kParts, class RowAt>
HWY_INLINE void pack_columns(const Rows<RowAt>& from, int64_t rows, uint16_t* HWY_RESTRICT to,
                             Census* census) {
  Census all = *census;
  for (int64_t b = 0; b < blocks_of(rows); ++b) {
    for (int64_t s = 0; s < steps_of(from.columns); ++s) {
      const int64_t i = b * kTileRows, c = s * kTileDepth;
      __m512i r[kParts][16];
      from.with_whole(i, kTileRows, c, kTileDepth, [&](auto whole) HWY_ATTR {
        FULGUR_UNROLL for (int at = 0; at < 16; ++at) {
          __m512i x[kParts];
          split_row<Side::kB>(from.template load_32<decltype(whole)::value>(i + at, c), x);
          all.add(x[0]);
          FULGUR_UNROLL for (int p = 0; p < kParts; ++p) r[p][at] = x[p];
        }
      });
      for (int p = 0; p < kParts; ++p, to += kTileSize) {
        transpose_16(r[p]);
        store_tile(r[p], to);
      }
    }
  }
  *census = all;
}

/// Packs rows as B, to be summed over the rows: tiles [blocks_of(columns)][steps][kParts], of which
/// this fills step `step`. Each cache line is read once and completely, because rows a power of two
/// apart evict each other from the L1 cache. Calls between() before each two rows of 32 columns.
/// The rows of a pair are kApart from each other: neighbours, or rows of the two halves of the
/// step.
template <int kParts, int kApart = 1, class RowAt, class Between>
HWY_INLINE void pack_pairs(const Rows<RowAt>& from, int64_t step, int64_t steps,
                           uint16_t* HWY_RESTRICT to, Census* census, const Between& between) {
  static_assert(kApart == 1 || kApart == kTileDepth / 2);
  // Columns 0 to 15 are then the first four of every 8.
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  const int64_t blocks = blocks_of(from.columns);
  for (int64_t b = 0; b < blocks; b += 2) {
    const int64_t c = b * kTileRows;
    uint16_t* const tile = to + (b * steps + step) * kParts * kTileSize;
    uint16_t* const next = tile + steps * kParts * kTileSize;
    from.with_whole(0, kTileDepth, c, 2 * kTileRows, [&](auto whole) HWY_ATTR {
      FULGUR_UNROLL for (int pair = 0; pair < 16; ++pair) {
        between();
        const int64_t row = kApart == 1 ? 2 * pair : pair;
        const __m512i first = from.template load_32<decltype(whole)::value>(row, c);
        const __m512i second = from.template load_32<decltype(whole)::value>(row + kApart, c);
        __m512i x[kParts], y[kParts];
        split_pairs<Side::kB>(_mm512_permutexvar_epi64(order, first),
                              _mm512_permutexvar_epi64(order, second), x, y);
        census->add(x[0]);
        census->add(y[0]);
        FULGUR_UNROLL for (int p = 0; p < kParts; ++p) {
          const int64_t at = p * kTileSize + pair * kTileDepth;
          _mm512_store_si512(tile + at, x[p]);
          if (b + 1 < blocks) _mm512_store_si512(next + at, y[p]);
        }
      }
    });
  }
}

/// Packs columns as rows of A, to be summed over the rows: tiles
/// [blocks_of(columns)][steps][kParts], of which this fills steps_of(rows) from step `step` on.
template <int kParts, class RowAt>
HWY_INLINE void pack_transposed(const Rows<RowAt>& from, int64_t rows, int64_t step, int64_t steps,
                                uint16_t* HWY_RESTRICT to, Census* census) {
  Census all = *census;
  const int64_t blocks = blocks_of(from.columns);
  for (int64_t b = 0; b < blocks; b += 2) {
    for (int64_t s = 0; s < steps_of(rows); ++s) {
      const int64_t first = s * kTileDepth, c = b * kTileRows;
      __m512i low[kParts][16], high[kParts][16];
      from.with_whole(first, kTileDepth, c, 2 * kTileRows, [&](auto whole) HWY_ATTR {
        FULGUR_UNROLL for (int pair = 0; pair < 16; ++pair) {
          const int64_t i = first + 2 * pair;
          const __m512i even = from.template load_32<decltype(whole)::value>(i, c);
          const __m512i odd = from.template load_32<decltype(whole)::value>(i + 1, c);
          __m512i x[kParts], y[kParts];
          split_pairs<Side::kA>(even, odd, x, y);
          all.add(x[0]);
          all.add(y[0]);
          FULGUR_UNROLL for (int p = 0; p < kParts; ++p) {
            low[p][pair] = x[p];
            high[p][pair] = y[p];
          }
        }
      });
      for (int p = 0; p < kParts; ++p) {
        uint16_t* const tile = to + ((b * steps + step + s) * kParts + p) * kTileSize;
        uint16_t* const next = tile + steps * kParts * kTileSize;
        transpose_16(low[p]);
        store_half_tile(low[p], 0, tile);
        if (b + 1 < blocks) store_half_tile(low[p] + 8, 0, next);
        transpose_16(high[p]);
        store_half_tile(high[p], 4, tile);
        if (b + 1 < blocks) store_half_tile(high[p] + 8, 4, next);
      }
    }
  }
  *census = all;
}

/// Splits two vectors into parts, merges each part of both by kMerge, and stores the results
/// `stride` elements apart.
template <Side kSide, int kParts, auto kMerge>
HWY_INLINE void store_merged(V32 first, V32 second, int64_t stride, uint16_t* HWY_RESTRICT to) {
  __m512i x[kParts], y[kParts];
  split<kSide>(first, x);
  split<kSide>(second, y);
  FULGUR_UNROLL for (int p = 0; p < kParts; ++p) {
    _mm512_store_si512(to + p * stride, kMerge(x[p], y[p]));
  }
}

/// Stores two vectors as a row of A.
template <int kParts>
HWY_INLINE void store_row_of_a(V32 low, V32 high, int64_t stride, uint16_t* HWY_RESTRICT to) {
  store_merged<Side::kA, kParts, join_halves>(low, high, stride, to);
}

/// Stores two vectors, interleaved, as a row of A, for a B whose pairs of rows are a vector apart.
template <int kParts>
HWY_INLINE void store_pairs_of_a(V32 first, V32 second, int64_t stride, uint16_t* HWY_RESTRICT to) {
  store_merged<Side::kA, kParts, pair_halves>(first, second, stride, to);
}

/// Stores vectors of two rows, interleaved, as a row of B.
template <int kParts>
HWY_INLINE void store_pair_of_b(V32 even, V32 odd, int64_t stride, uint16_t* HWY_RESTRICT to) {
  store_merged<Side::kB, kParts, pair_halves>(even, odd, stride, to);
}

/// 2^r on [0, 1), exact at 0: relative-minimax coefficients.
constexpr float kExp2[] = {1.0f, 0.6930448412895203f, 0.241280198097229f, 0.052242472767829895f,
                           0.013426683843135834f};

/// 2^x for x <= 127, with a relative error of 2^-18: less than the rounding of bf16 and of parts,
/// and LSE averages it out. 0 for x < -126; if kFlushed, Flushing does that. NaN stays.
template <bool kFlushed = false>
HWY_INLINE V32 exp2_short(V32 x) {
  // 2^x = 2^floor(x) 2^r: reduce gives r in [0, 1), scalef multiplies by 2^floor(x).
  const __m512 r = _mm512_reduce_ps(x.raw, 0x09);
  __m512 p = _mm512_set1_ps(kExp2[4]);
  FULGUR_UNROLL for (int i = 3; i >= 0; --i) p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(kExp2[i]));
  if constexpr (kFlushed) return V32{_mm512_scalef_ps(p, x.raw)};
  const __mmask16 normal = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ);
  return V32{_mm512_maskz_scalef_ps(normal, p, x.raw)};
}

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif

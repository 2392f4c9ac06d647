// The matrix product of bf16 on tiles of 16 rows of 64 bytes (Intel's AMX), and the layout of its
// operands, for dot-inl.h, too. A product step is C [16][16] += A [16][32] B [32][16]. A tile of A
// is row-major. A tile of B has the rows of B in pairs, since 32 bits hold two values of the summed
// index: [16 pairs][16 columns][2]. The parts of elements (operands-inl.h) have tiles of their own,
// one after the other along the summed index, so that a product of f16 is one of bf16 with three
// times the steps. pack-inl.h packs operands.
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

  /// Queues a product: slice() makes it in steps of at most four products of tiles, and the caller
  /// does other work in between. At most two products may wait, and must outlive finish().
  HWY_INLINE void defer(const Product& p) {
    if (p.rows == 0) return;
    queue_[(first_ + waiting_++) % 2] = &p;
    left_ += (p.rows + 1) / 2 * ((p.columns + 1) / 2) * p.steps;
  }
  /// The steps of the waiting products that are left.
  HWY_INLINE int64_t left() const { return left_; }
  /// Makes slice `number` of kSlices of the next step, if a step is left: 4 / kSlices products of
  /// tiles.
  template <int kSlices>
  HWY_INLINE void slice(int number) {
    if (number == 0) next_step();
    if (!active_) return;
    constexpr int kEach = 4 / kSlices;
    if (0 / kEach == number) part<0>(block_);
    if (1 / kEach == number) part<1>(block_);
    if (2 / kEach == number) part<2>(block_);
    if (3 / kEach == number) part<3>(block_);
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
  Block block_;                      // the block of the current step
  bool active_ = false;              // whether there is such a block
};

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
#endif

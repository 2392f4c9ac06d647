// The kernels of bf16 on scalar models of tiles and of dot products, so that packing is tested on
// every machine with AVX-512; and the models against the instructions where there are these.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cpu/amx.h"
#include "cpu/scratch_memory.h"
#include "oracle.h"
#include "workload.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tile_test.cpp"
#include <hwy/foreach_target.h>
// Highway wants its own header after foreach_target.
#include "cpu/dot-inl.h"
#include "cpu/tile_backward-inl.h"
#include "random_numbers.h"

#if HWY_TARGET == HWY_AVX3

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

inline float flushed(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

/// Tiles as Intel's manual describes TDPBF16PS: even and odd elements are summed apart, each
/// product and sum rounded once, and denormal numbers are 0 on the way in and out.
struct TileModel {
  struct Session {
    Session() {}
  };
  struct Tile {
    uint8_t row[16][64];
    using Values = std::array<std::array<float, 32>, 16>;
    Values bf16() const {
      Values values;
      for (size_t r = 0; r < 16; ++r) {
        for (size_t c = 0; c < 32; ++c) {
          uint16_t half;
          std::memcpy(&half, &row[r][2 * c], 2);
          values[r][c] = flushed(f32_from_bf16(half));
        }
      }
      return values;
    }
    float f32(int64_t r, int64_t c) const {
      float x;
      std::memcpy(&x, &row[r][4 * c], 4);
      return x;
    }
    void set(int64_t r, int64_t c, float x) { std::memcpy(&row[r][4 * c], &x, 4); }
  };

  template <int kTile>
  static void zero() {
    tiles[kTile] = {};
  }
  template <int kTile>
  static void load(const void* from, int64_t stride) {
    for (int64_t r = 0; r < 16; ++r) {
      std::memcpy(tiles[kTile].row[r], static_cast<const uint8_t*>(from) + r * stride, 64);
    }
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    for (int64_t r = 0; r < 16; ++r) {
      std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles[kTile].row[r], 64);
    }
  }
  template <int kC, int kA, int kB>
  static void multiply() {
    const Tile::Values A = tiles[kA].bf16(), B = tiles[kB].bf16();
    for (int64_t m = 0; m < 16; ++m) {
      for (int64_t n = 0; n < 16; ++n) {
        const float *const a = A[m].data(), *const b = B[0].data() + 2 * n;
        float even = 0, odd = 0;
        for (int64_t k = 0; k < 16; ++k) {
          even = flushed(std::fma(a[2 * k], b[32 * k], even));
          odd = flushed(std::fma(a[2 * k + 1], b[32 * k + 1], odd));
        }
        const float C = flushed(tiles[kC].f32(m, n));
        tiles[kC].set(m, n, flushed(C + flushed(even + odd)));
      }
    }
  }

  static inline thread_local Tile tiles[8];
};

/// Dot products as Intel's manual describes VDPBF16PS: first the upper halves, then the lower ones,
/// each product added with one rounding, and denormal numbers are 0 on the way in and out.
struct DotModel {
  static __m512 add(__m512 c, __m512i a, __m512i b) {
    std::array<float, 16> sums;
    std::array<uint16_t, 32> A, B;
    std::memcpy(sums.data(), &c, 64);
    std::memcpy(A.data(), &a, 64);
    std::memcpy(B.data(), &b, 64);
    for (size_t i = 0; i < 16; ++i) {
      sums[i] = flushed(sums[i]);
      for (const size_t at : {2 * i + 1, 2 * i}) {
        const float x = flushed(f32_from_bf16(A[at])), y = flushed(f32_from_bf16(B[at]));
        sums[i] = flushed(std::fma(x, y, sums[i]));
      }
    }
    std::memcpy(&c, sums.data(), 64);
    return c;
  }
};

/// C = A B of one tile each; C is added to.
template <class Tiles>
void multiply_tiles(const uint16_t* A, const uint16_t* B, float* C) {
  const typename Tiles::Session session;
  Tiles::template load<0>(C, 64);
  Tiles::template load<4>(A, 64);
  Tiles::template load<6>(B, 64);
  Tiles::template multiply<0, 4, 6>();
  Tiles::template store<0>(C, 64);
}

/// Whether the instructions give the models' bits.
bool is_tile_model(const uint16_t* A, const uint16_t* B, const float* C) {
  float by_model[256], by_tiles[256];
  std::copy_n(C, 256, by_model);
  std::copy_n(C, 256, by_tiles);
  multiply_tiles<TileModel>(A, B, by_model);
  multiply_tiles<Amx>(A, B, by_tiles);
  return std::memcmp(by_model, by_tiles, sizeof by_model) == 0;
}

/// Of 16 pairs each.
bool is_dot_model(const uint16_t* A, const uint16_t* B, const float* C) {
  const __m512i a = _mm512_loadu_si512(A), b = _mm512_loadu_si512(B);
  const __m512 by_model = DotModel::add(_mm512_loadu_ps(C), a, b);
  const __m512 by_dots = Avx512Bf16::add(_mm512_loadu_ps(C), a, b);
  return std::memcmp(&by_model, &by_dots, sizeof by_model) == 0;
}

using Matrix = std::vector<uint16_t>;

auto rows_of(const Matrix& m, int64_t columns) {
  return Rows{[first = m.data(), columns](int64_t i) { return first + i * columns; },
              static_cast<int64_t>(m.size()) / columns, columns};
}

/// A B^T of row-major A [m][k], B [n][k], in whole blocks: [16 blocks][16 blocks].
template <class Products>
std::vector<float> rows_by_rows(const Matrix& A, const Matrix& B, int64_t k) {
  const int64_t m = A.size() / k, n = B.size() / k, steps = steps_of(k);
  const ScratchMemory memory(2 * (blocks_of(m) + blocks_of(n)) * steps * kTileSize);
  auto* const a = static_cast<uint16_t*>(memory.data());
  auto* const b = a + blocks_of(m) * steps * kTileSize;
  Census census;
  pack_rows(rows_of(A, k), m, a, &census);
  pack_columns(rows_of(B, k), n, b, &census);
  std::vector<float> C(blocks_of(m) * blocks_of(n) * 256, 1);
  Products products;
  products.multiply({false,
                     blocks_of(m),
                     blocks_of(n),
                     steps,
                     Operand::packed(a, steps),
                     Operand::packed(b, steps),
                     C.data(),
                     blocks_of(n) * 16,
                     {m, n, k}});
  products.flush();
  return C;
}

/// 1 + A^T B of row-major A [k][m], B [k][n], in whole blocks.
template <class Products>
std::vector<float> columns_by_columns(const Matrix& A, const Matrix& B, int64_t m, int64_t n) {
  const int64_t k = A.size() / m, steps = steps_of(k);
  const ScratchMemory memory(2 * (blocks_of(m) + blocks_of(n)) * steps * kTileSize);
  auto* const a = static_cast<uint16_t*>(memory.data());
  auto* const b = a + blocks_of(m) * steps * kTileSize;
  Census census;
  pack_transposed(rows_of(A, m), k, a, &census);
  for (int64_t s = 0; s < steps; ++s) {
    const int64_t row = s * kTileDepth, count = std::min(kTileDepth, k - row);
    const uint16_t* const first = B.data() + row * n;
    pack_pairs(Rows{[=](int64_t i) { return first + i * n; }, count, n}, s, steps, b, &census);
  }
  std::vector<float> C(blocks_of(m) * blocks_of(n) * 256, 1);
  Products products;
  products.multiply({true,
                     blocks_of(m),
                     blocks_of(n),
                     steps,
                     Operand::packed(a, steps),
                     Operand::packed(b, steps),
                     C.data(),
                     blocks_of(n) * 16,
                     {m, n, k}});
  products.flush();
  return C;
}

struct Found {
  bool finite, denormal;
};
Found census_of(const Matrix& m, int64_t columns) {
  const ScratchMemory memory(2 * kTileSize * blocks_of(m.size() / columns) * steps_of(columns));
  Census census;
  pack_rows(rows_of(m, columns), m.size() / columns, static_cast<uint16_t*>(memory.data()),
            &census);
  return {census.finite(), census.denormal()};
}

/// Scratch of NaN: no padding that has not been written may be read.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : memory_(4 * floats) {
    std::fill_n(data(), floats, std::numeric_limits<float>::quiet_NaN());
  }
  float* data() const { return static_cast<float*>(memory_.data()); }

 private:
  const ScratchMemory memory_;
};

/// In blocks of `block` rows.
template <class Products>
void run_forward(const Problem& p, const Given& given, const ForwardArgs& args, int64_t block) {
  const Sequences sequences(p, args);
  const KeyPlaces keys(p, sequences, args);
  const Scratch scratch(tile_forward_scratch(p));
  for (int64_t i = 0; i < p.batch * p.hk; ++i) {
    const int64_t b = i / p.hk;
    const Task task{p, given, sequences[b], keys.of(b, sequences[b]), b, i % p.hk};
    for (int64_t row = 0; row < task.rows(); row += block) {
      tile_forward<Products>(task, args, row, std::min(task.rows(), row + block), scratch.data());
    }
  }
}

template <class Products>
void run_backward(const Problem& p, const Given& given, const BackwardArgs& args) {
  const Sequences sequences(p, args);
  const KeyPlaces keys(p, sequences, args);
  const Scratch scratch(tile_backward_scratch(p));
  for (int64_t i = 0; i < p.batch * p.hk; ++i) {
    const int64_t b = i / p.hk;
    const Task task{p, given, sequences[b], keys.of(b, sequences[b]), b, i % p.hk};
    const int64_t size = tile_dq_floats(p, task.rows()), block = kTiles * kBc;
    const ScratchMemory memory(4 * (size + 1));
    auto* dq = static_cast<float*>(memory.data());
    std::fill_n(dq, size, 0.0f);
    std::vector<float> D(task.rows());
    backward_d(task, args, 0, task.rows(), D.data());
    for (int64_t key = 0; key < task.s.sk; key += block) {
      tile_backward<Products>(task, args, key, std::min(task.s.sk, key + block), D.data(), dq,
                              scratch.data());
    }
    tile_backward_dq(task, args, 0, task.rows(), &dq, 1);
  }
}

/// What makes the products, and all that is tested on it.
struct Path {
  const char* name;
  std::vector<float> (*rows_by_rows)(const Matrix&, const Matrix&, int64_t);
  std::vector<float> (*columns_by_columns)(const Matrix&, const Matrix&, int64_t, int64_t);
  void (*run_forward)(const Problem&, const Given&, const ForwardArgs&, int64_t block);
  void (*run_backward)(const Problem&, const Given&, const BackwardArgs&);
};
template <class Products>
constexpr Path path(const char* name) {
  return {name, rows_by_rows<Products>, columns_by_columns<Products>, run_forward<Products>,
          run_backward<Products>};
}
constexpr Path kPaths[] = {path<TileProducts<TileModel>>("tiles"),
                           path<DotProducts<DotModel>>("dot_products")};
constexpr int64_t kBlock = kTilePanels * kTilePanelRows;

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif

#if HWY_ONCE && (HWY_TARGETS & HWY_AVX3)
namespace fulgur::test {
namespace {

namespace tiles = cpu::N_AVX3;
using tiles::Matrix;

class Tiles : public testing::Test {
 protected:
  void SetUp() override {
    if ((hwy::SupportedTargets() & HWY_AVX3) == 0) GTEST_SKIP() << "this machine lacks AVX-512";
  }

  /// Whole numbers, whose products and sums are exact.
  Matrix whole(int64_t size) {
    Matrix m(size);
    for (uint16_t& x : m)
      x = bf16_from_f32(static_cast<float>(static_cast<int>(random_() % 17) - 8));
    return m;
  }
  std::mt19937 random_{1};
};

/// The same on every path.
class Paths : public Tiles, public testing::WithParamInterface<tiles::Path> {};
INSTANTIATE_TEST_SUITE_P(, Paths, testing::ValuesIn(tiles::kPaths),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(Tiles, ModelsAreTheInstructions) {
  const bool amx = cpu::amx_unavailable().empty(), dots = __builtin_cpu_supports("avx512bf16") != 0;
  if (!amx && !dots) GTEST_SKIP() << "this machine has neither";
  for (int round = 0; round < 300; ++round) {
    alignas(64) uint16_t A[512], B[512];
    alignas(64) float C[256];
    // Exponents of all sizes, denormal ones and sums below the least normal number among them.
    const int spread = round % 3 == 0 ? 8 : round % 3 == 1 ? 60 : 250;
    const auto number = [&](int middle) {
      const auto exponent = static_cast<uint32_t>(std::clamp<int>(
          middle + static_cast<int>(random_() % static_cast<uint32_t>(spread)) - spread / 2, 0,
          254));
      return static_cast<uint16_t>((random_() % 2) << 15 | exponent << 7 | random_() % 128);
    };
    const int middle = round % 2 == 0 ? 127 : 64;
    for (uint16_t& x : A) x = number(middle);
    for (uint16_t& x : B) x = number(middle);
    for (float& x : C) x = f32_from_bf16(number(2 * middle - 127));
    ASSERT_TRUE(!amx || tiles::is_tile_model(A, B, C)) << "round " << round;
    ASSERT_TRUE(!dots || tiles::is_dot_model(A, B, C)) << "round " << round;
  }
}

TEST_P(Paths, ProductsAlongRows) {
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{64, 32, 64},
                                {16, 16, 32},
                                {1, 1, 1},
                                {50, 20, 80},
                                {33, 65, 17},
                                {7, 40, 130}}) {
    const Matrix A = whole(m * k), B = whole(n * k);
    const std::vector<float> C = GetParam().rows_by_rows(A, B, k);
    const int64_t ldc = static_cast<int64_t>(C.size()) / (tiles::blocks_of(m) * 16);
    for (int64_t i = 0; i < m * n; ++i) {
      float want = 0;
      for (int64_t c = 0; c < k; ++c) {
        want += f32_from_bf16(A[i / n * k + c]) * f32_from_bf16(B[i % n * k + c]);
      }
      ASSERT_EQ(C[i / n * ldc + i % n], want) << m << " x " << n << " x " << k;
    }
  }
}

TEST_P(Paths, ProductsAlongColumns) {
  for (const auto& [m, n, k] : {std::tuple<int64_t, int64_t, int64_t>{64, 32, 64},
                                {16, 16, 32},
                                {1, 1, 1},
                                {80, 20, 50},
                                {17, 65, 33},
                                {130, 40, 7}}) {
    const Matrix A = whole(k * m), B = whole(k * n);
    const std::vector<float> C = GetParam().columns_by_columns(A, B, m, n);
    const int64_t ldc = static_cast<int64_t>(C.size()) / (tiles::blocks_of(m) * 16);
    for (int64_t i = 0; i < m * n; ++i) {
      float want = 1;
      for (int64_t r = 0; r < k; ++r) {
        want += f32_from_bf16(A[r * m + i / n]) * f32_from_bf16(B[r * n + i % n]);
      }
      ASSERT_EQ(C[i / n * ldc + i % n], want) << m << " x " << n << " x " << k;
    }
  }
}

TEST_F(Tiles, CensusFindsWhatTilesChange) {
  for (const int64_t at : {0, 31, 32, 40, 41 * 17 - 1}) {
    Matrix m = whole(41 * 17);
    EXPECT_TRUE(tiles::census_of(m, 41).finite);
    EXPECT_FALSE(tiles::census_of(m, 41).denormal);
    for (const uint16_t x : {0x7f80, 0xff80, 0x7fc0, 0xffff}) {
      m[at] = x;
      EXPECT_FALSE(tiles::census_of(m, 41).finite) << x;
      EXPECT_FALSE(tiles::census_of(m, 41).denormal) << x;
    }
    for (const uint16_t x : {0x0001, 0x807f}) {
      m[at] = x;
      EXPECT_TRUE(tiles::census_of(m, 41).finite) << x;
      EXPECT_TRUE(tiles::census_of(m, 41).denormal) << x;
    }
    for (const uint16_t x : {0x0000, 0x8000, 0x0080, 0x7f7f}) {
      m[at] = x;
      EXPECT_TRUE(tiles::census_of(m, 41).finite) << x;
      EXPECT_FALSE(tiles::census_of(m, 41).denormal) << x;
    }
  }
}

// The kernels themselves, as they are compiled for the instructions.
TEST_P(Paths, KernelsOnTheModelFollowTheReference) {
  const DType bf16 = DType::kBF16;
  const Case cases[] = {
      {.dtype = bf16, .sq = 130, .sk = 333},
      {.dtype = bf16,
       .batch = 2,
       .sq = 100,
       .sk = 200,
       .hq = 4,
       .hk = 2,
       .d = 80,
       .dv = 40,
       .mask = causal()},
      {.dtype = bf16, .sq = 65, .sk = 63, .d = 17, .dv = 1, .mask = window(16, 3), .softcap = 2},
      {.dtype = bf16,
       .sq = 40,
       .sk = 97,
       .hq = 3,
       .d = 1,
       .dv = 24,
       .alibi = Alibi::kHeads,
       .dropout = 0.25},
      {.dtype = bf16, .sq = 90, .sk = 70, .hq = 4, .hk = 2, .mask = causal(), .sinks = true},
      {.dtype = bf16,
       .sq = 7,
       .sk = 600,
       .hq = 8,
       .d = 128,
       .dv = 128,
       .mask = causal(),
       .layout = Layout::kPadded},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name());
    Workload w(c, c.seed());
    const ForwardArgs forward = w.forward;
    w.backward.dsinks = {};  // no work of tiles
    const BackwardArgs backward = w.backward;
    const Problem problem = make_problem(forward, w.options);
    const cpu::Given given{static_cast<const float*>(forward.alibi_slopes.data),
                           static_cast<const float*>(forward.sinks.data), forward.tree_mask,
                           dropout_of(problem, forward, w.run_options)};
    const Expected e = expect(w);
    GetParam().run_forward(problem, given, forward, tiles::kBlock);
    EXPECT_TRUE(forward_is_right(w, e));
    GetParam().run_backward(make_problem(backward, w.options), given, backward);
    EXPECT_TRUE(backward_is_right(w, e));
    EXPECT_TRUE(w.check_memory());
  }
}

// Scores that spread over hundreds of powers of two: rows outgrow their maximum in either half of a
// tile, beside rows that do not, and with values that vectors add.
TEST_P(Paths, RowsOutgrowTheirMaximum) {
  const DType bf16 = DType::kBF16;
  const Case cases[] = {
      {.dtype = bf16, .sq = 70, .sk = 300, .d = 64, .dv = 80},
      {.dtype = bf16, .sq = 70, .sk = 300, .d = 16, .dv = 16, .mask = causal(), .dropout = 0.25},
  };
  for (const Case& c : cases) {
    for (const bool denormal : {false, true}) {
      SCOPED_TRACE(c.name() + (denormal ? " denormal" : ""));
      Workload w(c, c.seed());
      w.options.scale = 1;
      std::vector<double> values = read(w.forward.v);
      if (denormal) values[40 * c.dv] = values[200 * c.dv] = 0x1p-130;
      write(w.forward.v, values);
      w.seal();
      const ForwardArgs forward = w.forward;
      const Problem problem = make_problem(forward, w.options);
      const cpu::Given given{nullptr, nullptr, {}, dropout_of(problem, forward, w.run_options)};
      const Expected e = expect(w);
      GetParam().run_forward(problem, given, forward, tiles::kBlock);
      EXPECT_TRUE(forward_is_right(w, e));
      // What a row's neighbours hold changes none of its bits.
      const auto out = bits(forward.out), lse = bits(forward.lse);
      GetParam().run_forward(problem, given, forward, 1);
      EXPECT_EQ(bits(forward.out), out);
      EXPECT_EQ(bits(forward.lse), lse);
    }
  }
}

}  // namespace
}  // namespace fulgur::test
#endif

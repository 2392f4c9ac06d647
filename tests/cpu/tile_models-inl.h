/// The kernels of bf16 and f16 on scalar models of tiles and of dot products, and packing by their
/// definitions. tile_test.cpp includes it once, after the kernels.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "call/padding.h"
#include "host/memory.h"

HWY_BEFORE_NAMESPACE();
namespace fulgur::cpu::HWY_NAMESPACE {

inline float flushed(float x) {
  return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

/// Tiles as Intel's manual describes TDPBF16PS: even and odd elements are summed apart, each
/// product and sum rounded once, and denormal numbers are 0 on the way in and out.
struct TileModel {
  struct Session {
    Session() { shape(16, 16); }
    void shape(int64_t m, int64_t n) { rows = m, columns = n; }
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
    zero<kTile>();
    for (int64_t r = 0; r < rows_of<kTile>(); ++r) {
      std::memcpy(tiles[kTile].row[r], static_cast<const uint8_t*>(from) + r * stride,
                  bytes_of<kTile>());
    }
  }
  template <int kTile>
  static void stream(const void* from, int64_t stride) {
    load<kTile>(from, stride);
  }
  template <int kTile>
  static void store(void* to, int64_t stride) {
    for (int64_t r = 0; r < rows_of<kTile>(); ++r) {
      std::memcpy(static_cast<uint8_t*>(to) + r * stride, tiles[kTile].row[r], bytes_of<kTile>());
    }
  }
  template <int kC, int kA, int kB>
  static void multiply() {
    const Tile::Values A = tiles[kA].bf16(), B = tiles[kB].bf16();
    std::array<std::array<float, 16>, 16> even_rows, odd_rows;  // of B, so that columns are vectors
    for (size_t k = 0; k < 16; ++k) {
      for (size_t n = 0; n < 16; ++n) {
        even_rows[k][n] = B[k][2 * n];
        odd_rows[k][n] = B[k][2 * n + 1];
      }
    }
    for (size_t m = 0; m < 16; ++m) {
      std::array<float, 16> even{}, odd{};
      for (size_t k = 0; k < 16; ++k) {
        for (size_t n = 0; n < 16; ++n) {
          even[n] = flushed(std::fma(A[m][2 * k], even_rows[k][n], even[n]));
          odd[n] = flushed(std::fma(A[m][2 * k + 1], odd_rows[k][n], odd[n]));
        }
      }
      for (size_t n = 0; n < 16; ++n) {
        const float C = flushed(tiles[kC].f32(m, n));
        tiles[kC].set(m, n, flushed(C + flushed(even[n] + odd[n])));
      }
    }
  }

  template <int kTile>
  static int64_t rows_of() {
    return kTile < 6 ? rows : 16;
  }
  template <int kTile>
  static size_t bytes_of() {
    return kTile < 4 || kTile > 5 ? 4 * columns : 64;
  }

  static inline thread_local Tile tiles[8];
  static inline thread_local int64_t rows, columns;  // of C
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

/// C = A B of one tile each, of so many rows and columns; C is added to.
template <class Tiles>
void multiply_tiles(int64_t rows, int64_t columns, const uint16_t* A, const uint16_t* B, float* C) {
  typename Tiles::Session session;
  session.shape(rows, columns);
  Tiles::template load<0>(C, 64);
  Tiles::template load<4>(A, 64);
  Tiles::template load<6>(B, 64);
  Tiles::template multiply<0, 4, 6>();
  Tiles::template store<0>(C, 64);
}

/// Whether the instructions give the models' bits.
bool is_tile_model(int64_t rows, int64_t columns, const uint16_t* A, const uint16_t* B,
                   const float* C) {
  float by_model[256], by_tiles[256];
  std::copy_n(C, 256, by_model);
  std::copy_n(C, 256, by_tiles);
  multiply_tiles<TileModel>(rows, columns, A, B, by_model);
  multiply_tiles<Amx>(rows, columns, A, B, by_tiles);
  return std::memcmp(by_model, by_tiles, sizeof by_model) == 0;
}

/// Whether the model gives the bits of the instruction for 16 pairs of A and of B.
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

/// The product of packed operands, of `steps` steps, to which `adds` adds 1: [16 blocks][16
/// blocks].
template <class Products>
std::vector<float> product_of(bool adds, const uint16_t* a, const uint16_t* b, int64_t steps,
                              const Extent& extent) {
  std::vector<float> C(blocks_of(extent.rows) * blocks_of(extent.columns) * 256, 1);
  const typename Products::Session session;
  Products products;
  products.multiply({adds, blocks_of(extent.rows), blocks_of(extent.columns), steps,
                     Operand::packed(a, steps), Operand::packed(b, steps), C.data(),
                     blocks_of(extent.columns) * 16, extent});
  products.flush();
  return C;
}

/// A B^T of row-major A [m][k], B [n][k], in whole blocks: [16 blocks][16 blocks].
template <class Products, int kParts>
std::vector<float> rows_by_rows(const Matrix& A, const Matrix& B, int64_t k) {
  const int64_t m = A.size() / k, n = B.size() / k, steps = kParts * steps_of(k);
  const host::ScratchMemory memory(2 * (blocks_of(m) + blocks_of(n)) * steps * kTileSize);
  auto* const a = static_cast<uint16_t*>(memory.data());
  auto* const b = a + blocks_of(m) * steps * kTileSize;
  Census census;
  pack_rows<kParts>(rows_of(A, k), m, a, &census);
  pack_columns<kParts>(rows_of(B, k), n, b, &census);
  return product_of<Products>(false, a, b, steps, {m, n, k});
}

/// 1 + A^T B of row-major A [k][m], B [k][n], in whole blocks.
template <class Products, int kParts>
std::vector<float> columns_by_columns(const Matrix& A, const Matrix& B, int64_t m, int64_t n) {
  const int64_t k = A.size() / m, row_steps = steps_of(k), steps = kParts * row_steps;
  const host::ScratchMemory memory(2 * (blocks_of(m) + blocks_of(n)) * steps * kTileSize);
  auto* const a = static_cast<uint16_t*>(memory.data());
  auto* const b = a + blocks_of(m) * steps * kTileSize;
  Census census;
  pack_transposed<kParts>(rows_of(A, m), k, 0, row_steps, a, &census);
  for (int64_t s = 0; s < row_steps; ++s) {
    const int64_t row = s * kTileDepth, count = std::min(kTileDepth, k - row);
    const uint16_t* const first = B.data() + row * n;
    pack_pairs<kParts>(Rows{[=](int64_t i) { return first + i * n; }, count, n}, s, row_steps, b,
                       &census, [] {});
  }
  return product_of<Products>(true, a, b, steps, {m, n, k});
}

struct Found {
  bool finite, denormal;
};
template <int kParts>
Found census_of(const Matrix& m, int64_t columns) {
  const host::ScratchMemory memory(2 * kParts * kTileSize * blocks_of(m.size() / columns) *
                                   steps_of(columns));
  Census census;
  pack_rows<kParts>(rows_of(m, columns), m.size() / columns, static_cast<uint16_t*>(memory.data()),
                    &census);
  return {census.finite(), census.denormal()};
}

/// The three parts of 32 elements of f16, as an operand's: of A where B's are.
using PartsOf32 = std::array<std::array<float, 32>, kPartsOfF16>;
template <Side kSide>
PartsOf32 parts_of_f16(const uint16_t* elements) {
  __m512i parts[kPartsOfF16];
  split_row<kSide>(_mm512_loadu_si512(elements), parts);
  PartsOf32 values;
  for (size_t p = 0; p < kPartsOfF16; ++p) {
    uint16_t halves[32];
    _mm512_storeu_si512(halves, parts[p]);
    for (size_t i = 0; i < 32; ++i) values[p][i] = f32_from_bf16(halves[i]);
  }
  return values;
}

/// The sum of the products of parts of 16 floats each, in double.
std::array<double, 16> products_of_parts(const float* x, const float* y) {
  const F32 f;
  __m512i a[kPartsOfF16], b[kPartsOfF16];
  split<Side::kA>(hn::LoadU(f, x), a);
  split<Side::kB>(hn::LoadU(f, y), b);
  std::array<double, 16> sums{};
  for (int p = 0; p < kPartsOfF16; ++p) {
    uint32_t bits_a[16], bits_b[16];
    _mm512_storeu_si512(bits_a, a[p]);
    _mm512_storeu_si512(bits_b, b[p]);
    for (size_t i = 0; i < 16; ++i) {
      sums[i] += static_cast<double>(f32_from_bf16(static_cast<uint16_t>(bits_a[i] >> 16))) *
                 f32_from_bf16(static_cast<uint16_t>(bits_b[i] >> 16));
    }
  }
  return sums;
}

/// Scratch of NaN: no padding that has not been written may be read.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : memory_(4 * floats) {
    std::fill_n(data(), floats, std::numeric_limits<float>::quiet_NaN());
  }
  float* data() const { return static_cast<float*>(memory_.data()); }

 private:
  const host::ScratchMemory memory_;
};

/// In blocks of `block` rows.
template <class Products, int kParts>
void run_forward(const Problem& p, const Given& given, const ForwardArgs& args, int64_t block) {
  const Sequences sequences(p, args);
  const KvLocator keys(p, sequences, args);
  const Scratch scratch(tile_forward_scratch<kParts>(p));
  write_padding(p, sequences, args);
  for (int64_t i = 0; i < p.batch * p.hk; ++i) {
    const int64_t b = i / p.hk;
    const Task task{p, given, sequences[b], keys.of(b, sequences[b]), b, i % p.hk};
    for (int64_t row = 0; row < task.rows(); row += block) {
      tile_forward<Products, kParts>(task, args, row, std::min(task.rows(), row + block),
                                     scratch.data());
    }
  }
}

template <class Products, int kParts>
void run_backward(const Problem& p, const Given& given, const BackwardArgs& args) {
  const Sequences sequences(p, args);
  const KvLocator keys(p, sequences, args);
  const Scratch scratch(tile_backward_scratch<kParts>(p));
  write_padding(p, sequences, args);
  for (int64_t i = 0; i < p.batch * p.hk; ++i) {
    const int64_t b = i / p.hk;
    const Task task{p, given, sequences[b], keys.of(b, sequences[b]), b, i % p.hk};
    const int64_t size = tile_dq_floats(p, task.rows()), block = kTiles * kBc;
    const host::ScratchMemory memory(4 * (size + 1));
    auto* dq = static_cast<float*>(memory.data());
    std::fill_n(dq, size, 0.0f);
    std::vector<float> D(task.rows());
    backward_d(task, args, 0, task.rows(), D.data());
    for (int64_t key = 0; key < task.s.sk; key += block) {
      tile_backward<Products, kParts>(task, args, key, std::min(task.s.sk, key + block), D.data(),
                                      dq, scratch.data());
    }
    tile_backward_dq(task, args, 0, task.rows(), &dq, 1);
  }
}

/// All heads of a sequence together, and its keys in parts of two tiles.
template <class Decode>
void run_decode(const Problem& p, const Given& given, const ForwardArgs& args, int64_t scratch_size,
                const Decode& decode) {
  const Sequences sequences(p, args);
  const KvLocator keys(p, sequences, args);
  const Scratch scratch(scratch_size);
  write_padding(p, sequences, args);
  for (int64_t b = 0; b < p.batch; ++b) {
    const auto task = [&](int64_t kv) {
      return Task{p, given, sequences[b], keys.of(b, sequences[b]), b, kv};
    };
    if (task(0).rows() == 0) continue;
    const int64_t part = 2 * kBc, parts = (sequences[b].sk + part - 1) / part;
    const int64_t head = task(0).rows() * (p.dv + 2);
    std::vector<float> states(p.hk * parts * head);
    for (int64_t i = 0; i < parts; ++i) {
      decode(task(0), i * part, std::min(sequences[b].sk, (i + 1) * part), &states[i * p.hk * head],
             scratch.data());
    }
    for (int64_t kv = 0; kv < p.hk; ++kv) {
      decode_merge(task(kv), args, states.data() + kv * head, parts, p.hk * head);
    }
  }
}

inline void decode_by_tiles(const Problem& p, const Given& given, const ForwardArgs& args) {
  run_decode(p, given, args, tile_decode_scratch(p, p.hk, p.group() * p.sq),
             [&](const Task& first, int64_t begin, int64_t end, float* states, float* scratch) {
               TileDecode<TileProducts<TileModel, kPartsOfBF16>> task(first, args, p.hk, scratch);
               task.run(begin, end);
               task.finish(states);
             });
}
inline void decode_by_dots(const Problem& p, const Given& given, const ForwardArgs& args) {
  run_decode(p, given, args, decode_scratch(p, p.hk, p.group() * p.sq),
             [&](const Task& first, int64_t begin, int64_t end, float* states, float* scratch) {
               decode_by<DottedPairs<DotModel>>(first, args, p.hk, begin, end, states, scratch);
             });
}

/// What makes the products, of which elements, and all that is tested on it.
struct Path {
  const char* name;
  DType dtype;
  std::vector<float> (*rows_by_rows)(const Matrix&, const Matrix&, int64_t);
  std::vector<float> (*columns_by_columns)(const Matrix&, const Matrix&, int64_t, int64_t);
  Found (*census_of)(const Matrix&, int64_t columns);
  void (*run_forward)(const Problem&, const Given&, const ForwardArgs&, int64_t block);
  void (*run_backward)(const Problem&, const Given&, const BackwardArgs&);
};
template <class Products, int kParts>
constexpr Path path(const char* name, DType dtype) {
  return {name,
          dtype,
          rows_by_rows<Products, kParts>,
          columns_by_columns<Products, kParts>,
          census_of<kParts>,
          run_forward<Products, kParts>,
          run_backward<Products, kParts>};
}
constexpr Path kPaths[] = {
    path<TileProducts<TileModel, kPartsOfBF16>, kPartsOfBF16>("tiles", DType::kBF16),
    path<DotProducts<DotModel>, kPartsOfBF16>("dot_products", DType::kBF16),
    path<TileProducts<TileModel, kPartsOfF16>, kPartsOfF16>("tiles_of_f16", DType::kF16)};
constexpr int64_t kBlock = kBlockRowTiles * kTileBr;

}  // namespace fulgur::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

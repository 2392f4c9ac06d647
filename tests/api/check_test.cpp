// Whether two strided tensors have memory in common, against a list of their bytes.
#include "base/check.h"

#include <gtest/gtest.h>

#include <array>
#include <random>
#include <set>

namespace fulgur::test {
namespace {

alignas(8) char memory[1 << 16];

Tensor strided(int64_t byte, DType dtype, std::initializer_list<int64_t> shape,
               std::initializer_list<int64_t> strides) {
  Tensor t = Tensor::contiguous(memory + byte, dtype, shape);
  std::copy(strides.begin(), strides.end(), t.strides.begin());
  return t;
}

std::set<const char*> bytes_of(const Tensor& t) {
  std::set<const char*> bytes;
  for (int64_t n = 0; n < t.numel(); ++n) {
    int64_t offset = 0;
    for (int64_t i = t.rank - 1, rest = n; i >= 0; rest /= t.shape[i], --i) {
      offset += rest % t.shape[i] * t.strides[i];
    }
    for (int64_t byte = 0; byte < size_of(t.dtype); ++byte) {
      bytes.insert(static_cast<const char*>(t.data) + offset * size_of(t.dtype) + byte);
    }
  }
  return bytes;
}

bool really_share(const Tensor& a, const Tensor& b) {
  const auto bytes_a = bytes_of(a), bytes_b = bytes_of(b);
  return std::any_of(bytes_a.begin(), bytes_a.end(),
                     [&](const char* byte) { return bytes_b.contains(byte); });
}

TEST(ShareMemory, NeverMissesACommonByte) {
  std::mt19937_64 random(1);
  int shared = 0, apart = 0;
  for (int round = 0; round < 20000; ++round) {
    Tensor t[2];
    for (Tensor& tensor : t) {
      tensor.dtype = random() % 2 ? DType::kF32 : DType::kF16;
      tensor.rank = 1 + static_cast<int>(random() % 3);
      tensor.data = memory + (1 << 15) + random() % 64 * 4;
      for (int i = 0; i < tensor.rank; ++i) {
        tensor.shape[i] = static_cast<int64_t>(random() % 4);
        tensor.strides[i] = static_cast<int64_t>(random() % 25) - 8;
      }
    }
    const bool share = really_share(t[0], t[1]);
    ++(share ? shared : apart);
    if (share) {
      ASSERT_TRUE(share_memory(t[0], t[1])) << "round " << round;
      ASSERT_TRUE(share_memory(t[1], t[0])) << "round " << round;
    }
  }
  EXPECT_GT(shared, 500);
  EXPECT_GT(apart, 1000);
}

TEST(ShareMemory, InterleavedTensorsShareNone) {
  const DType f = DType::kF32;
  const std::pair<Tensor, Tensor> apart[] = {
      // One after the other.
      {strided(0, f, {2, 3}, {3, 1}), strided(24, f, {2, 3}, {3, 1})},
      // q and k of (batch, seqlen, hq + 2 hk, dim); k and v.
      {strided(0, f, {2, 5, 4, 8}, {5 * 8 * 8, 8 * 8, 8, 1}),
       strided(4 * 8 * 4, f, {2, 5, 2, 8}, {5 * 8 * 8, 8 * 8, 8, 1})},
      {strided(4 * 8 * 4, f, {2, 5, 2, 8}, {5 * 8 * 8, 8 * 8, 8, 1}),
       strided(6 * 8 * 4, f, {2, 5, 2, 8}, {5 * 8 * 8, 8 * 8, 8, 1})},
      // k and v of one buffer per head, of different dims.
      {strided(0, f, {1, 5, 2, 8}, {80, 16, 8, 1}),
       strided(0 + 4 * 160, f, {1, 5, 2, 6}, {80, 16, 8, 1})},
      {strided(0, f, {5, 2, 8}, {28, 14, 1}), strided(32, f, {5, 2, 6}, {28, 14, 1})},
      // (batch, 2, heads, seqlen, dim).
      {strided(0, f, {2, 5, 3, 8}, {240, 8, 40, 1}),
       strided(480, f, {2, 5, 3, 8}, {240, 8, 40, 1})},
      // The same rows read backwards.
      {strided(0, f, {5, 8}, {16, 1}), strided(4 * (4 * 16 + 8), f, {5, 8}, {-16, 1})},
  };
  for (const auto& [a, b] : apart) {
    ASSERT_FALSE(really_share(a, b));
    EXPECT_FALSE(share_memory(a, b)) << list(a, a.strides) << " and " << list(b, b.strides);
    EXPECT_FALSE(share_memory(b, a)) << list(b, b.strides) << " and " << list(a, a.strides);
  }
}

TEST(ShareMemory, EmptyTensorsShareNone) {
  EXPECT_FALSE(share_memory(strided(0, DType::kF32, {2, 0}, {3, 1}),
                            strided(0, DType::kF32, {2, 3}, {3, 1})));
  EXPECT_FALSE(share_memory(strided(0, DType::kF32, {2, 3}, {3, 1}), Tensor{}));
}

}  // namespace
}  // namespace fulgur::test

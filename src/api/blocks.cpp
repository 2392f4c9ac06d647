#include <algorithm>

#include "base/check.h"
#include "fulgur/expression.h"

namespace fulgur {
namespace {

/// The numbers of a tensor of the host, row-major.
class Numbers {
 public:
  Numbers(const char* name, const ConstTensor& t, const char* dims, int rank) : t_(t) {
    if (t.dtype != DType::kI32 && t.dtype != DType::kI64)
      fail(name, "got {}, want i32 or i64", name_of(t.dtype));
    check_tensor(name, t, dims, rank, false);
    if (!on_host(t)) fail(name, "got a tensor on {}, want the host's memory", name_of(t.device));
    check_data(name, t);
  }
  int64_t operator[](int64_t i) const {
    int64_t at = 0;
    for (int n = t_.rank - 1; n >= 0; i /= t_.shape[n--]) at += i % t_.shape[n] * t_.strides[n];
    return t_.dtype == DType::kI32 ? static_cast<const int32_t*>(t_.data)[at]
                                   : static_cast<const int64_t*>(t_.data)[at];
  }

 private:
  const ConstTensor& t_;
};

constexpr const char* kBlockDims = "([[batch,] heads,] row blocks, key blocks)";

}  // namespace

void expand_blocks(const BlockLists& lists, const Tensor& blocks) {
  const auto& [offsets, indices] = lists;
  if (blocks.rank < 2) fail("blocks", "got {}, want bool {}", blocks.describe(), kBlockDims);
  if (blocks.dtype != DType::kBool) fail("blocks", "got {}, want bool", name_of(blocks.dtype));
  check_tensor("blocks", blocks, kBlockDims, blocks.rank, true);
  if (!on_host(blocks))
    fail("blocks", "got a tensor on {}, want the host's memory", name_of(blocks.device));
  check_data("blocks", blocks);
  const int last = blocks.rank - 2;
  std::array<int64_t, ConstTensor::kMaxRank> shape = blocks.shape;
  const int64_t rows = shape[last]++, keys = blocks.shape[last + 1];
  check_shape("offsets", offsets, "([[batch,] heads,] row blocks + 1)",
              std::span(shape).first(static_cast<size_t>(last) + 1), false);
  const Numbers begins("offsets", offsets, "([[batch,] heads,] row blocks + 1)", last + 1);
  const Numbers numbers("indices", indices, "(count)", 1);
  const int64_t count = indices.shape[0], maps = offsets.numel() / (rows + 1);
  // All numbers are checked before anything is written.
  for (int64_t i = 0; i < maps * (rows + 1); ++i) {
    const int64_t begin = begins[i], before = i % (rows + 1) == 0 ? 0 : begins[i - 1];
    if (begin < before || begin > count) {
      fail("offsets",
           "got {} after {} at {} of its numbers, want ascending ones up to {}, the indices", begin,
           before, i, count);
    }
  }
  for (int64_t i = 0; i < maps * (rows + 1); ++i) {
    if (i % (rows + 1) == rows) continue;
    for (int64_t n = begins[i]; n < begins[i + 1]; ++n) {
      const int64_t key = numbers[n];
      if (key < 0 || key >= keys)
        fail("indices", "got {} at {}, want blocks of keys from 0 to {}", key, n, keys - 1);
      if (n > begins[i] && key <= numbers[n - 1])
        fail("indices", "got {} after {} at {}, want ascending numbers in a list", key,
             numbers[n - 1], n);
    }
  }
  auto* const to = static_cast<bool*>(blocks.data);
  for (int64_t map = 0; map < maps; ++map) {
    int64_t at = 0, rest = map;
    for (int n = last - 1; n >= 0; rest /= blocks.shape[n--])
      at += rest % blocks.shape[n] * blocks.strides[n];
    for (int64_t row = 0; row < rows; ++row) {
      bool* const seen = to + at + row * blocks.strides[last];
      std::fill_n(seen, keys, false);
      const int64_t begin = map * (rows + 1) + row;
      for (int64_t n = begins[begin]; n < begins[begin + 1]; ++n) seen[numbers[n]] = true;
    }
  }
}

}  // namespace fulgur

#include "base/formats.h"

#include <string_view>

namespace fulgur {
namespace {

template <DType dtype>
float number(const void* codes, int64_t i) {
  using F = Format<dtype>;
  const uint8_t* const block = static_cast<const uint8_t*>(codes) + i / F::kBlock * F::kBytes;
  const float code = F::code(block, static_cast<int>(i % F::kBlock));
  if constexpr (!F::kScaled) return code;
  if constexpr (F::kScaled) return F::scale(block) * code + F::low(block);
}

template <DType dtype>
void unpack(const void* codes, int64_t n, float* x) {
  for (int64_t i = 0; i < n; ++i) x[i] = number<dtype>(codes, i);
}

template <DType dtype>
void pack(const float* x, int64_t n, void* codes) {
  using F = Format<dtype>;
  auto* block = static_cast<uint8_t*>(codes);
  for (int64_t i = 0; i < n; i += F::kBlock, block += F::kBytes) {
    if constexpr (F::kScaled) {
      F::pack(x + i, block);
    } else {
      for (int j = 0; j < F::kBlock; ++j) F::put(block, j, x[i + j]);
    }
  }
}

template <DType dtype>
constexpr FormatRow row() {
  using F = Format<dtype>;
  FormatRow r{dtype, F::kName, F::kBits, F::kBlock,     F::kBytes,     F::kScaled,
              false, 0,        0,        number<dtype>, unpack<dtype>, pack<dtype>};
  if constexpr (!F::kScaled) {
    r.integers = F::kLowest != -F::kLargest;
    r.lowest = F::kLowest;
    r.largest = F::kLargest;
  }
  return r;
}

#define FULGUR_ROW(name) row<DType::k##name>(),
constexpr FormatRow kRows[] = {FULGUR_FORMATS(FULGUR_ROW)};
#undef FULGUR_ROW

constexpr bool in_order() {
  int at = static_cast<int>(DType::kE4M3);
  for (const FormatRow& r : kRows) {
    if (static_cast<int>(r.dtype) != at++) return false;
  }
  return true;
}
static_assert(in_order());

}  // namespace

const FormatRow* format_of(DType dtype) {
  return is_low_bit(dtype) ? &kRows[static_cast<int>(dtype) - static_cast<int>(DType::kE4M3)]
                           : nullptr;
}

float load_code(const void* codes, DType format, int64_t i) {
  return format_of(format)->number(codes, i);
}

std::span<const FormatRow> formats() { return kRows; }

const FormatRow* find_format(const char* name) {
  for (const FormatRow& r : kRows) {
    if (std::string_view(r.name) == name) return &r;
  }
  return nullptr;
}

}  // namespace fulgur

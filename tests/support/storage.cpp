#include "storage.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numbers>
#include <numeric>

namespace fulgur::test {
namespace {

template <class T>
T at(const void* data, int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(data) + index * int64_t{sizeof(T)}, sizeof(T));
  return value;
}

template <class T>
void put(void* data, int64_t index, T value) {
  std::memcpy(static_cast<std::byte*>(data) + index * int64_t{sizeof(T)}, &value, sizeof(T));
}

uint16_t bf16_bits(double value) {
  const auto bits = std::bit_cast<uint32_t>(static_cast<float>(value));
  if (std::isnan(value)) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds by adding: the quantum of f16 at |value| is 2^max(exponent - 10, -24).
uint16_t f16_bits(double value) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  if (std::isnan(value)) return sign | 0x7e00;
  const double magnitude = std::fabs(value);
  if (magnitude >= 65520) return sign | 0x7c00;
  const int exponent = magnitude > 0 ? std::max(std::ilogb(magnitude), -14) : -14;
  // nearbyint rounds to nearest even; a carry into the next exponent comes out right by itself.
  const auto steps = static_cast<uint32_t>(std::nearbyint(std::ldexp(magnitude, 10 - exponent)));
  return static_cast<uint16_t>(sign | (((exponent + 14) << 10) + steps));
}

double f16_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  double magnitude;
  if (exponent == 31) {
    magnitude = fraction ? std::numeric_limits<double>::quiet_NaN()
                         : std::numeric_limits<double>::infinity();
  } else {
    magnitude = exponent ? std::ldexp(1024 + fraction, exponent - 25) : std::ldexp(fraction, -24);
  }
  return bits & 0x8000 ? -magnitude : magnitude;
}

double e4m3_value(uint8_t bits) {
  const int exponent = bits >> 3 & 15, fraction = bits & 7;
  const double magnitude =
      exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  if ((bits & 127) == 127) return std::numeric_limits<double>::quiet_NaN();
  return bits & 128 ? -magnitude : magnitude;
}

// The nearest number's, of two the one with an even code. Codes of positive numbers grow with them.
uint8_t e4m3_bits(double value) {
  const auto sign = static_cast<uint8_t>(std::signbit(value) ? 128 : 0);
  if (std::isnan(value)) return sign | 127;
  const double magnitude = std::fabs(value);
  int low = 0, high = 126;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (e4m3_value(static_cast<uint8_t>(middle)) <= magnitude ? low : high) = middle;
  }
  const double below = magnitude - e4m3_value(static_cast<uint8_t>(low));
  const double above = e4m3_value(static_cast<uint8_t>(high)) - magnitude;
  const bool down = below < above || (below == above && low % 2 == 0);
  return static_cast<uint8_t>(sign | (down ? low : high));
}

// Calls `body(offset)` with the element offset of every element, row-major.
template <class Body>
void for_each_element(const ConstTensor& tensor, Body body) {
  const int64_t count = tensor.numel();
  std::array<int64_t, Tensor::kMaxRank> index{};
  for (int64_t n = 0; n < count; ++n) {
    int64_t offset = 0;
    for (int i = 0; i < tensor.rank; ++i) offset += index[i] * tensor.strides[i];
    body(offset);
    for (int i = tensor.rank - 1; i >= 0 && ++index[i] == tensor.shape[i]; --i) index[i] = 0;
  }
}

// Every Storage there is, by its first byte.
std::map<const std::byte*, Storage*>& storages() {
  static std::map<const std::byte*, Storage*> all;
  return all;
}

}  // namespace

double load(const void* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kF16:
      return f16_value(at<uint16_t>(data, index));
    case DType::kBF16:
      return std::bit_cast<float>(uint32_t{at<uint16_t>(data, index)} << 16);
    case DType::kF32:
      return at<float>(data, index);
    case DType::kF64:
      return at<double>(data, index);
    case DType::kI32:
      return at<int32_t>(data, index);
    case DType::kI64:
      return static_cast<double>(at<int64_t>(data, index));
    case DType::kBool:
      return at<uint8_t>(data, index);
    case DType::kE4M3:
      return e4m3_value(at<uint8_t>(data, index));
    default:  // no test reads other codes by this
      return 0;
  }
}

void store(void* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kF16:
      return put(data, index, f16_bits(value));
    case DType::kBF16:
      return put(data, index, bf16_bits(value));
    case DType::kF32:
      return put(data, index, static_cast<float>(value));
    case DType::kF64:
      return put(data, index, value);
    case DType::kI32:
      return put(data, index, static_cast<int32_t>(value));
    case DType::kI64:
      return put(data, index, static_cast<int64_t>(value));
    case DType::kBool:
      return put(data, index, static_cast<uint8_t>(value));
    case DType::kE4M3:
      return put(data, index, e4m3_bits(value));
    default:
      return;
  }
}

double rounded(double value, DType dtype) {
  double cell = 0;
  store(&cell, dtype, 0, value);
  return load(&cell, dtype, 0);
}

double normal(std::mt19937_64& random) {
  const double u = (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53;
  const double w = static_cast<double>(random() >> 11) * 0x1p-53;
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * w);
}

std::vector<double> read(const ConstTensor& tensor) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(tensor.numel()));
  for_each_element(
      tensor, [&](int64_t offset) { values.push_back(load(tensor.data, tensor.dtype, offset)); });
  return values;
}

void write(const Tensor& tensor, std::span<const double> values) {
  auto value = values.begin();
  for_each_element(tensor,
                   [&](int64_t offset) { store(tensor.data, tensor.dtype, offset, *value++); });
}

void randomize(const Tensor& tensor, std::mt19937_64& random, double scale) {
  for_each_element(tensor, [&](int64_t offset) {
    store(tensor.data, tensor.dtype, offset, scale * normal(random));
  });
}

std::vector<std::byte> bits(const ConstTensor& tensor) {
  const int64_t size = size_of(tensor.dtype);
  std::vector<std::byte> result(static_cast<size_t>(tensor.numel() * size));
  auto* to = result.data();
  for_each_element(tensor, [&](int64_t offset) {
    std::memcpy(to, static_cast<const std::byte*>(tensor.data) + offset * size,
                static_cast<size_t>(size));
    to += size;
  });
  return result;
}

Storage::Storage(DType dtype, int64_t elements)
    : dtype_(dtype),
      elements_(elements + 2 * kGuard),
      bytes_(static_cast<size_t>(elements_ * size_of(dtype))),
      in_view_(static_cast<size_t>(elements_)) {
  poison();
  storages().emplace(bytes_.data(), this);
}

Storage::~Storage() { storages().erase(bytes_.data()); }

Storage* Storage::around(const void* data) {
  const auto after = storages().upper_bound(static_cast<const std::byte*>(data));
  if (after == storages().begin()) return nullptr;
  Storage* const storage = std::prev(after)->second;
  const std::span<std::byte> bytes = storage->bytes();
  return data < bytes.data() + bytes.size() ? storage : nullptr;
}

void Storage::poison() {
  const double poison = dtype_ == DType::kI32 || dtype_ == DType::kI64 ? 0x5a5a5a5b
                        : dtype_ == DType::kBool                       ? 1
                                                 : std::numeric_limits<double>::quiet_NaN();
  store(bytes_.data(), dtype_, 0, poison);
  for (size_t done = static_cast<size_t>(size_of(dtype_)); done < bytes_.size(); done *= 2) {
    std::copy_n(bytes_.data(), std::min(done, bytes_.size() - done), bytes_.data() + done);
  }
  seal();
}

Tensor Storage::view(int64_t offset, std::span<const int64_t> shape,
                     std::span<const int64_t> strides) {
  Tensor tensor;
  tensor.data = bytes_.data() + (kGuard + offset) * size_of(dtype_);
  tensor.dtype = dtype_;
  tensor.rank = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), tensor.shape.begin());
  std::copy(strides.begin(), strides.end(), tensor.strides.begin());
  for_each_element(tensor, [&](int64_t element) {
    in_view_.at(static_cast<size_t>(kGuard + offset + element)) = true;
  });
  return tensor;
}

testing::AssertionResult Storage::unchanged(bool also_views) const {
  if (std::memcmp(bytes_.data(), sealed_.data(), bytes_.size()) == 0)
    return testing::AssertionSuccess();
  const auto size = static_cast<size_t>(size_of(dtype_));
  for (size_t i = 0; i < in_view_.size(); ++i) {
    if (in_view_[i] && !also_views) continue;
    if (std::memcmp(&bytes_[i * size], &sealed_[i * size], size) != 0) {
      return testing::AssertionFailure()
             << "element " << static_cast<int64_t>(i) - kGuard << " of a buffer of "
             << elements_ - 2 * kGuard << " was overwritten with "
             << load(bytes_.data(), dtype_, static_cast<int64_t>(i));
    }
  }
  return testing::AssertionSuccess();
}

namespace {

int64_t product(std::initializer_list<int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

}  // namespace

Dense::Dense(DType dtype, std::initializer_list<int64_t> shape) : storage_(dtype, product(shape)) {
  std::vector<int64_t> strides(shape.size(), 1);
  for (size_t i = shape.size() - 1; i-- > 0;) strides[i] = strides[i + 1] * shape.begin()[i + 1];
  tensor_ = storage_.view(0, std::span(shape.begin(), shape.size()), strides);
}

}  // namespace fulgur::test

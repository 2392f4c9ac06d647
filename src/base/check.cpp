#include "base/check.h"

#include <algorithm>
#include <cstdlib>

namespace fulgur {

std::string list(const ConstTensor& t, const std::array<int64_t, ConstTensor::kMaxRank>& values) {
  return fmt::format("({})", fmt::join(values.begin(), values.begin() + t.rank, ", "));
}

namespace {

/// A tensor whose elements are the blocks of `t`; elements are often blocks of their own.
ConstTensor blocks_of(ConstTensor t) {
  const int64_t block = block_of(t.dtype);
  if (block == 1 || t.rank == 0) return t;
  for (int i = 0; i < t.rank - 1; ++i) t.strides[i] /= block;
  t.shape[t.rank - 1] /= block;
  return t;
}

/// Checks that rows have whole blocks and begin at blocks.
void check_blocks(const char* name, const ConstTensor& t) {
  const int64_t block = block_of(t.dtype);
  if (block == 1) return;
  const int64_t columns = t.shape[t.rank - 1];
  if (columns % block != 0) {
    fail(name, "got head dim {}, want a multiple of {}, the block of {}", columns, block,
         name_of(t.dtype));
  }
  for (int i = 0; i < t.rank - 1; ++i) {
    if (t.shape[i] <= 1 || t.strides[i] % block == 0) continue;
    fail(name, "got strides {}, want multiples of {}, the block of {}", list(t, t.strides), block,
         name_of(t.dtype));
  }
}

/// The stride of a dimension; 0 if the dimension has size 1, where the stride has no meaning.
int64_t used_stride(const ConstTensor& t, int i) { return t.shape[i] > 1 ? t.strides[i] : 0; }

}  // namespace

bool check_sizes(const char* name, const ConstTensor& given, const char* dims, int rank) {
  if (!given.given()) fail(name, "not given, want {} dimensions {}", rank, dims);
  if (given.rank != rank)
    fail(name, "got {} dimensions {}, want {} {}", given.rank, given.describe(), rank, dims);
  check_blocks(name, given);
  const ConstTensor t = blocks_of(given);
  int64_t bytes = size_of(t.dtype), extent = size_of(t.dtype);
  bool empty = false;
  for (int i = 0; i < rank; ++i) {
    if (t.shape[i] < 0)
      fail(name, "got negative size {} in shape {}", t.shape[i], list(given, given.shape));
    empty |= t.shape[i] == 0;
  }
  if (empty) return false;
  const auto fits = [](int64_t size) {
    return size >= -kMaxTensorBytes && size <= kMaxTensorBytes;
  };
  for (int i = 0; i < rank; ++i) {
    int64_t reach = 0;
    const int64_t stride = t.strides[i] < 0 ? -std::max(t.strides[i], -INT64_MAX) : t.strides[i];
    if (__builtin_mul_overflow(bytes, t.shape[i], &bytes) ||
        __builtin_mul_overflow(stride, t.shape[i] - 1, &reach) ||
        __builtin_mul_overflow(reach, size_of(t.dtype), &reach) ||
        __builtin_add_overflow(extent, reach, &extent) || !fits(bytes) || !fits(extent)) {
      fail(name, "shape {} with strides {} is of more than 2^47 bytes, which no process addresses",
           list(given, given.shape), list(given, given.strides));
    }
  }
  return true;
}

void check_tensor(const char* name, const ConstTensor& t, const char* dims, int rank,
                  bool written) {
  if (!check_sizes(name, t, dims, rank)) return;
  if (t.shape[rank - 1] > 1 && t.strides[rank - 1] != 1) {
    fail(name, "last stride is {}, want 1 (strides {}, in elements)", t.strides[rank - 1],
         list(t, t.strides));
  }
  if (written) check_no_overlap(name, t);
}

void check_no_overlap(const char* name, const ConstTensor& given) {
  if (given.numel() == 0) return;
  const ConstTensor t = blocks_of(given);
  std::array<std::pair<int64_t, int64_t>, ConstTensor::kMaxRank> by_stride;  // (|stride|, size)
  const auto used = std::span(by_stride).first(std::min<size_t>(t.rank, by_stride.size()));
  for (int i = 0; i < t.rank; ++i) used[i] = {std::abs(used_stride(t, i)), t.shape[i]};
  std::ranges::sort(used);
  int64_t reach = 0;
  for (int i = 0; i < t.rank; ++i) {
    const auto [stride, size] = used[i];
    if (size == 1) continue;
    if (stride <= reach) {
      fail(name, "elements overlap: shape {} with strides {}; an output needs its own memory",
           list(given, given.shape), list(given, given.strides));
    }
    reach += stride * (size - 1);
  }
}

void check_shape(const char* name, const ConstTensor& t, const char* dims,
                 std::span<const int64_t> want, bool written) {
  check_tensor(name, t, dims, static_cast<int>(want.size()), written);
  if (!std::equal(want.begin(), want.end(), t.shape.begin())) {
    fail(name, "got shape {}, want ({}) = {}", list(t, t.shape), fmt::join(want, ", "), dims);
  }
}

void check_dtype(const char* name, const ConstTensor& t, DType want, const char* why) {
  if (t.dtype != want) fail(name, "got {}, want {} ({})", name_of(t.dtype), name_of(want), why);
}

void check_device(const char* name, const ConstTensor& t, Device want, const char* like) {
  if (t.device != want) {
    fail(name, "on {}, want {} as {}", name_of(t.device), name_of(want), like);
  }
}

void check_device_or_host(const char* name, const ConstTensor& t, Device want, const char* like) {
  if (on_host(t)) return;
  if (want.type == DeviceType::kCpu) return check_device(name, t, want, like);
  if (t.device != want) {
    fail(name, "on {}, want {} as {}, or cpu", name_of(t.device), name_of(want), like);
  }
}

void check_indices(const char* name, const ConstTensor& t, int64_t size, const char* dims,
                   Device device, const char* like) {
  check_shape(name, t, dims, {size}, false);
  check_dtype(name, t, DType::kI32, "lengths are int32");
  check_device(name, t, device, like);
}

void check_lengths(const char* name, const ConstTensor& t, int64_t size, const char* dims,
                   Device device, const char* like) {
  check_shape(name, t, dims, {size}, false);
  check_dtype(name, t, DType::kI32, "lengths are int32");
  check_device_or_host(name, t, device, like);
}

void check_data(const char* name, const ConstTensor& t) {
  if (t.numel() == 0) return;
  if (t.data == nullptr) fail(name, "data is null");
  if (block_of(t.dtype) == 1 && reinterpret_cast<uintptr_t>(t.data) % size_of(t.dtype) != 0) {
    fail(name, "data {} is not aligned to the {} bytes of {}", t.data, size_of(t.dtype),
         name_of(t.dtype));
  }
}

namespace {

/// Bytes of a tensor, counted from `begin` modulo `pitch`; the whole extent without a pitch.
struct Extent {
  uint64_t begin, size;
};

/// The dimensions whose stride is no multiple of `pitch` bytes; all of them when it is 0.
Extent extent(const ConstTensor& given, int64_t pitch) {
  const ConstTensor t = blocks_of(given);
  const int64_t element = size_of(t.dtype);
  Extent e{reinterpret_cast<uintptr_t>(t.data), static_cast<uint64_t>(element)};
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 1 || (pitch > 0 && t.strides[i] * element % pitch == 0)) continue;
    const auto reach = static_cast<uint64_t>(std::abs(t.strides[i]) * element * (t.shape[i] - 1));
    if (t.strides[i] < 0) e.begin -= reach;
    e.size += reach;
  }
  return e;
}

bool intersect(const Extent& a, const Extent& b) {
  return a.begin - b.begin < b.size || b.begin - a.begin < a.size;
}

/// On a circle of `pitch` bytes.
bool intersect(const Extent& a, const Extent& b, uint64_t pitch) {
  const uint64_t ahead = (b.begin % pitch + pitch - a.begin % pitch) % pitch;
  return a.size > ahead || b.size > (pitch - ahead) % pitch;
}

}  // namespace

bool share_memory(const ConstTensor& a, const ConstTensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  if (!intersect(extent(a, 0), extent(b, 0))) return false;
  // The tensors are disjoint, too, if they have different parts of each period of some pitch.
  for (const ConstTensor& t : {blocks_of(a), blocks_of(b)}) {
    for (int i = 0; i < t.rank; ++i) {
      const int64_t pitch = t.shape[i] > 1 ? std::abs(t.strides[i]) * size_of(t.dtype) : 0;
      if (pitch == 0) continue;
      if (!intersect(extent(a, pitch), extent(b, pitch), static_cast<uint64_t>(pitch)))
        return false;
    }
  }
  return true;
}

Layout rows_layout(const ConstTensor& t) {
  const bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0;
  if (t.rank == 4) return {used_stride(t, 0), used_stride(t, 1), used_stride(t, 2), aligned};
  return {0, used_stride(t, 0), used_stride(t, 1), aligned};
}

Layout lse_layout(const ConstTensor& t) {
  if (t.rank == 3) return {used_stride(t, 0), used_stride(t, 2), used_stride(t, 1)};
  return {0, used_stride(t, 1), used_stride(t, 0)};
}

}  // namespace fulgur

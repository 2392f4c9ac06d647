#include "distributed/host_memory.h"

#include <cstring>

#include "base/convert.h"

namespace fulgur::distributed {
namespace {

constexpr int64_t kAlignment = 64;

template <class T>
void add_lines(const Lines& x) {
  for (int64_t line = 0; line < x.count; ++line) {
    const auto* const from = reinterpret_cast<const T*>(x.from + line * x.from_pitch);
    auto* const to = reinterpret_cast<T*>(x.to + line * x.to_pitch);
    for (size_t i = 0; i < x.width / sizeof(T); ++i) to[i] += from[i];
  }
}

}  // namespace

void HostMemory::copy(const Part& from, const Part& to) {
  each_lines(from, to, [](const Lines& x) {
    if (x.side_by_side()) {
      std::memcpy(x.to, x.from, x.count * x.width);
      return;
    }
    for (int64_t line = 0; line < x.count; ++line) {
      std::memcpy(x.to + line * x.to_pitch, x.from + line * x.from_pitch, x.width);
    }
  });
}

void HostMemory::add(const Part& from, const Part& to) {
  each_lines(from, to, [&](const Lines& x) {
    to.dtype == DType::kF64 ? add_lines<double>(x) : add_lines<float>(x);
  });
}

void HostMemory::round(const Part& from, const Part& to) {
  for (int64_t b = 0; b < to.shape[0]; ++b) {
    for (int64_t r = 0; r < to.shape[1]; ++r) {
      for (int64_t h = 0; h < to.shape[2]; ++h) {
        const auto at = [&](const Part& x) {
          return b * x.strides[0] + r * x.strides[1] + h * x.strides[2];
        };
        for (int64_t c = 0; c < to.shape[3]; ++c) {
          store_element(to.data, to.dtype, at(to) + c,
                        load_element(from.data, from.dtype, at(from) + c));
        }
      }
    }
  }
}

void HostMemory::clear(const Part& part) { std::memset(part.data, 0, part.bytes()); }

void HostMemory::download(void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, bytes);
}

void HostMemory::upload(void* to, const void* from, int64_t bytes) { std::memcpy(to, from, bytes); }

std::byte* HostMemory::room(Use use, int64_t bytes) {
  Room& room = rooms_[use];
  if (room.data == nullptr || room.bytes < bytes) {
    room = {};
    room = {std::unique_ptr<std::byte[]>(new std::byte[bytes + kAlignment]), bytes};
  }
  const auto address = reinterpret_cast<uintptr_t>(room.data.get());
  return room.data.get() + (kAlignment - address % kAlignment);
}

void HostMemory::exchange(std::span<const std::span<const std::byte>> sends,
                          std::span<const std::span<std::byte>> receives) {
  group_.exchange(sends, receives);
}

std::unique_ptr<Order> HostMemory::computing(const Run&) {
  return std::make_unique<HostMemory>(group_);
}

}  // namespace fulgur::distributed

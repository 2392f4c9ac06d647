/// Device memory in which what is written with tensors shows.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "fulgur/cuda.h"
#include "storage.h"

namespace fulgur::test {

/// One allocation in which tensors lie far apart, so that what is written with them is seen.
class Arena {
 public:
  /// Each of the tensors has so many bytes of room.
  explicit Arena(int64_t tensors = 8, int64_t room = int64_t{8} << 20)
      : room_(room),
        bytes_(static_cast<size_t>(tensors * room), kPattern),
        device_(static_cast<std::byte*>(cuda::allocate(size()))) {}
  ~Arena() { cuda::deallocate(device_); }
  Arena(const Arena&) = delete;

  /// A row-major tensor in the middle of the next room.
  Tensor place(DType dtype, std::initializer_list<int64_t> shape, bool output) {
    const int64_t offset = tensors_++ * room_ + room_ / 2;
    const Tensor host = Tensor::contiguous(bytes_.data() + offset, dtype, shape);
    Tensor there = host;
    there.data = device_ + offset;
    there.device = {DeviceType::kCuda, 0};
    if (output) outputs_.push_back({offset, host.numel() * size_of(dtype)});
    return there;
  }
  /// The same tensor in the picture of the arena that `send` copies to the device.
  Tensor host(Tensor there) {
    there.data = bytes_.data() + (static_cast<std::byte*>(there.data) - device_);
    there.device = {};
    return there;
  }
  void send() const {
    cuda::copy(device_, bytes_.data(), size());
    cuda::synchronize();
  }
  /// What the outputs hold; everything else must be as it was sent.
  std::vector<std::byte> outputs() const {
    std::vector<std::byte> now(bytes_.size()), outputs;
    cuda::copy(now.data(), device_, size());
    size_t begin = 0;
    const auto expect_untouched = [&](size_t end) {
      if (std::memcmp(&now[begin], &bytes_[begin], end - begin) == 0) return;  // 64 MiB at a time
      size_t changed = begin;
      while (now[changed] == bytes_[changed]) ++changed;
      const auto at = static_cast<int64_t>(changed);
      ADD_FAILURE() << "byte " << at % room_ - room_ / 2 << " of tensor " << at / room_
                    << " was written";
    };
    for (const auto& [offset, size] : outputs_) {
      expect_untouched(static_cast<size_t>(offset));
      outputs.insert(outputs.end(), now.begin() + offset, now.begin() + offset + size);
      begin = static_cast<size_t>(offset + size);
    }
    expect_untouched(now.size());
    return outputs;
  }
  /// What the picture says that they hold.
  std::vector<std::byte> pictured() const {
    std::vector<std::byte> outputs;
    for (const auto& [offset, size] : outputs_) {
      const auto begin = bytes_.begin() + offset;
      outputs.insert(outputs.end(), begin, begin + size);
    }
    return outputs;
  }
  /// The outputs of the picture as they were at first.
  void reset() {
    for (const auto& [offset, size] : outputs_)
      std::fill_n(bytes_.begin() + offset, size, kPattern);
  }

 private:
  struct Range {
    int64_t offset, size;
  };
  static constexpr auto kPattern = std::byte{0xa5};

  int64_t size() const { return static_cast<int64_t>(bytes_.size()); }

  int64_t room_;
  std::vector<std::byte> bytes_;
  std::byte* device_;
  int64_t tensors_ = 0;
  std::vector<Range> outputs_;  // by offset
};

}  // namespace fulgur::test

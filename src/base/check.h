#pragma once

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <initializer_list>
#include <span>
#include <string>
#include <utility>

#include "fulgur/error.h"
#include "fulgur/tensor.h"

namespace fulgur {

// What every check of a user's tensor is made of. All throw Error(kInvalidArgument) that names the
// argument, what it got and what it wants.

template <class... Args>
[[noreturn]] void fail(const char* name, fmt::format_string<Args...> what, Args&&... args) {
  throw Error(Status::kInvalidArgument,
              fmt::format("{}: {}", name, fmt::format(what, std::forward<Args>(args)...)));
}

/// The first `rank` of a tensor's shape or strides: "(2, 128, 64)".
std::string list(const ConstTensor& t, const std::array<int64_t, ConstTensor::kMaxRank>& values);

/// The most bytes that a tensor may have, counted once or at each place (a stride may be 0): what a
/// process addresses on x86-64, and so few that sizes of tensors times numbers of threads and heads
/// do not overflow.
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 47;

/// The ends of so many sequences and where the first begins: batch + 1, or INT64_MAX, which no
/// tensor has.
inline int64_t ends_of(int64_t batch) { return batch < INT64_MAX ? batch + 1 : batch; }

/// Rank, sizes >= 0, whole blocks, at most kMaxTensorBytes. `dims` names the dimensions: "(batch,
/// max_pages)". Returns whether there are elements.
bool check_sizes(const char* name, const ConstTensor& t, const char* dims, int rank);

/// check_sizes, and the last stride is 1. A `written` tensor must not overlap itself.
void check_tensor(const char* name, const ConstTensor& t, const char* dims, int rank, bool written);

/// No two elements of a tensor whose sizes are checked share memory.
void check_no_overlap(const char* name, const ConstTensor& t);

/// check_tensor, and the shape is `want`.
void check_shape(const char* name, const ConstTensor& t, const char* dims,
                 std::span<const int64_t> want, bool written);
inline void check_shape(const char* name, const ConstTensor& t, const char* dims,
                        std::initializer_list<int64_t> want, bool written) {
  check_shape(name, t, dims, std::span(want.begin(), want.size()), written);
}

/// Whether a tensor lies in the host's memory.
inline bool on_host(const ConstTensor& t) { return t.device.type == DeviceType::kCpu; }

/// f16, bf16, f32 and f64.
inline bool is_float(DType dtype) { return dtype <= DType::kF64; }

void check_dtype(const char* name, const ConstTensor& t, DType want, const char* why);

/// `t` lies on the device of `like`.
void check_device(const char* name, const ConstTensor& t, Device want, const char* like = "q");

/// An int32 vector of `size` on the device of `like`.
void check_indices(const char* name, const ConstTensor& t, int64_t size, const char* dims,
                   Device device, const char* like = "q");

/// `t` lies on the device of `like`, or in the host's memory.
void check_device_or_host(const char* name, const ConstTensor& t, Device want,
                          const char* like = "q");

/// An int32 vector of `size` on the device of `like`, or in the host's memory.
void check_lengths(const char* name, const ConstTensor& t, int64_t size, const char* dims,
                   Device device, const char* like = "q");

/// Data that is there and aligned to its dtype, unless there are no elements.
void check_data(const char* name, const ConstTensor& t);

/// Whether two tensors have a byte in common. Interleaved ones (q, k and v in one buffer) have
/// none; where that cannot be told, as in exotic interleavings, true.
bool share_memory(const ConstTensor& a, const ConstTensor& b);

/// Where the rows of a (batch, seqlen, heads, dim) or (total, heads, dim) tensor lie, in elements.
/// Packed tensors have batch stride 0: their rows are addressed from the start of the tensor.
struct Layout {
  int64_t batch = 0, row = 0, head = 0;
  bool aligned = true;  ///< the data lies at a multiple of 16 bytes, or is not there yet
  int64_t offset(int64_t b, int64_t r, int64_t h) const { return b * batch + r * row + h * head; }
  bool operator==(const Layout&) const = default;
};

/// Of a (batch, seqlen, heads, dim) or (total, heads, dim) tensor.
Layout rows_layout(const ConstTensor& t);
/// Of a (batch, heads, seqlen) or (heads, total) tensor.
Layout lse_layout(const ConstTensor& t);

}  // namespace fulgur

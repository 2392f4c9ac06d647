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

// The checks of a user's tensors. All throw Error(kInvalidArgument) that names the argument, what
// it got and what it wants.

template <class... Args>
[[noreturn]] void fail(const char* name, fmt::format_string<Args...> what, Args&&... args) {
  throw Error(Status::kInvalidArgument,
              fmt::format("{}: {}", name, fmt::format(what, std::forward<Args>(args)...)));
}

/// The shape or strides of a tensor as text: "(2, 128, 64)".
std::string list(const ConstTensor& t, const std::array<int64_t, ConstTensor::kMaxRank>& values);

/// The maximum bytes of a tensor, whether elements that share memory (a stride may be 0) count once
/// or each time. It is what a process can address on x86-64, and so small that products of it and
/// numbers of threads and heads do not overflow.
inline constexpr int64_t kMaxTensorBytes = int64_t{1} << 47;

/// The number of elements of cu_seqlens, batch + 1. INT64_MAX, which no tensor has, where that
/// overflows.
inline int64_t ends_of(int64_t batch) { return batch < INT64_MAX ? batch + 1 : batch; }

/// Checks rank, sizes >= 0, whole blocks, and at most kMaxTensorBytes. `dims` names the dimensions:
/// "(batch, max_pages)". Returns whether the tensor has elements.
bool check_sizes(const char* name, const ConstTensor& t, const char* dims, int rank);

/// check_sizes(), and checks that the last stride is 1, and that a `written` tensor does not
/// overlap itself.
void check_tensor(const char* name, const ConstTensor& t, const char* dims, int rank, bool written);

/// Checks that no two elements of a tensor, whose sizes are checked, share memory.
void check_no_overlap(const char* name, const ConstTensor& t);

/// check_tensor(), and checks that the shape is `want`.
void check_shape(const char* name, const ConstTensor& t, const char* dims,
                 std::span<const int64_t> want, bool written);
inline void check_shape(const char* name, const ConstTensor& t, const char* dims,
                        std::initializer_list<int64_t> want, bool written) {
  check_shape(name, t, dims, std::span(want.begin(), want.size()), written);
}

/// Whether a tensor lies in the host's memory.
inline bool on_host(const ConstTensor& t) { return t.device.type == DeviceType::kCpu; }

/// Whether a dtype is f16, bf16, f32 or f64.
inline bool is_float(DType dtype) { return dtype <= DType::kF64; }

void check_dtype(const char* name, const ConstTensor& t, DType want, const char* why);

/// Checks that `t` lies on the device `want`, that of the tensor `like`.
void check_device(const char* name, const ConstTensor& t, Device want, const char* like = "q");

/// Checks that `t` is an int32 vector of `size` on the device of the tensor `like`.
void check_indices(const char* name, const ConstTensor& t, int64_t size, const char* dims,
                   Device device, const char* like = "q");

/// Checks that `t` lies on the device `want`, that of the tensor `like`, or in host memory.
void check_device_or_host(const char* name, const ConstTensor& t, Device want,
                          const char* like = "q");

/// Checks that `t` is an int32 vector of `size` on the device of the tensor `like`, or in host
/// memory.
void check_lengths(const char* name, const ConstTensor& t, int64_t size, const char* dims,
                   Device device, const char* like = "q");

/// Checks that a tensor has data aligned to its dtype, unless it has no elements.
void check_data(const char* name, const ConstTensor& t);

/// Whether two tensors have a byte in common. Interleaved tensors (q, k and v in one buffer) have
/// none. True where that cannot be decided, as for unusual interleavings.
bool share_memory(const ConstTensor& a, const ConstTensor& b);

/// The strides, in elements, of the rows of a (batch, seqlen, heads, dim) or (total, heads, dim)
/// tensor. Packed tensors have batch stride 0: their rows are addressed from the start of the
/// tensor.
struct Layout {
  int64_t batch = 0, row = 0, head = 0;
  bool aligned = true;  ///< the data lies at a multiple of 16 bytes, or is not there yet
  int64_t offset(int64_t b, int64_t r, int64_t h) const { return b * batch + r * row + h * head; }
  bool operator==(const Layout&) const = default;
};

/// The layout of a (batch, seqlen, heads, dim) or (total, heads, dim) tensor.
Layout rows_layout(const ConstTensor& t);
/// The layout of a (batch, heads, seqlen) or (heads, total) tensor.
Layout lse_layout(const ConstTensor& t);

}  // namespace fulgur

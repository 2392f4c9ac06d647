#include "cuda/common/tensor_shape.h"

#include <fmt/format.h>

#include "base/check.h"
#include "cuda/common/kernel_key.h"

namespace fulgur::cuda {
namespace {

constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
constexpr int64_t kMaxExtent = int64_t{1} << 31;  // kernels count rows with ints

int64_t round_up(int64_t a, int64_t multiple) { return (a + multiple - 1) / multiple * multiple; }

TensorShape of_q(const Problem& p, DType dtype, int64_t dim, const Layout& strides, int box_rows) {
  return {dtype, dim, p.packed ? p.total_q : p.sq, p.hq, p.packed ? 1 : p.batch, strides, box_rows};
}

TensorShape of_k(const Problem& p, DType dtype, int64_t dim, const Layout& strides, int box_rows) {
  if (p.cache.paged()) {
    return {dtype, dim, p.cache.page, p.hk, p.cache.entries, strides, box_rows};
  }
  const int64_t batch = p.has(Arg::kCacheBatchIdx) ? p.cache.entries : p.batch;
  return {dtype,   dim,     p.packed_k ? p.total_k : p.sk, p.hk, p.packed_k ? 1 : batch,
          strides, box_rows};
}

/// The bias, in boxes of box_rows rows if each query has a row of it.
TensorShape of_bias(const Problem& p, int box_rows) {
  const Problem::Bias& b = p.bias;
  if (!p.has(Arg::kBias)) return {};
  const auto extent = [](int64_t stride, int64_t size) { return stride == 0 ? 1 : size; };
  return {b.dtype,
          p.sk,
          extent(b.row, p.sq),
          extent(b.head, p.hq),
          extent(b.batch, p.batch),
          {b.batch, b.row, b.head, b.aligned},
          b.row == 0 ? 1 : box_rows,
          b.key};
}

}  // namespace

std::array<Dimension, 3> outer_dimensions(const TensorShape& s) {
  return {{{"seqlen", s.rows, s.strides.row},
           {"heads", s.heads, s.strides.head},
           {"batch", s.batch, s.strides.batch}}};
}

KernelUse copy_kernel() { return {{"common/copy_rows.cu", ""}, "fulgur_forward_copy", 0}; }
KernelUse widen_kernel(DType from) {
  const std::string config = config_text({{}, {{"kFrom", element_of(from)}}});
  return {{"common/widen_rows.cu", config}, "fulgur_forward_widen", 0};
}

ForwardShapes forward_shapes(const Problem& p, int box_keys) {
  const OperandTypes types = p.dtypes;
  return {of_q(p, types.q, p.d, p.q, 64), of_k(p, types.k, p.d, p.k, box_keys),
          of_k(p, types.v, p.dv, p.v, box_keys), of_q(p, types.out, p.dv, p.out, 16),
          of_bias(p, 64)};
}

BackwardShapes backward_shapes(const Problem& p) {
  constexpr int kBox = 64;
  const OperandTypes types = p.dtypes;
  const DType dk = p.f32_key_gradients ? DType::kF32 : types.k;
  const DType dv = p.f32_key_gradients ? DType::kF32 : types.v;
  const auto if_wanted = [](bool wanted, const TensorShape& shape) {
    return wanted ? shape : TensorShape{};
  };
  return {of_q(p, types.q, p.d, p.q, kBox),
          of_k(p, types.k, p.d, p.k, kBox),
          of_k(p, types.v, p.dv, p.v, kBox),
          of_q(p, types.out, p.dv, p.dout, kBox),
          of_q(p, types.out, p.dv, p.out, kBox),
          if_wanted(p.wants_dq(), of_q(p, types.q, p.d, p.dq, kBox)),
          if_wanted(p.wants_dk_dv(), of_k(p, dk, p.d, p.dk, kBox)),
          if_wanted(p.wants_dk_dv(), of_k(p, dv, p.dv, p.dv_grad, kBox)),
          of_bias(p, kBox)};
}

std::string rows_unsupported(const TensorShape& shape) {
  if (shape.empty()) return {};
  for (const Dimension& d : outer_dimensions(shape)) {
    if (d.extent >= kMaxExtent) {
      return fmt::format("has {} of {}, want less than 2^31", d.name, d.extent);
    }
  }
  return {};
}

std::string not_addressable(const TensorShape& shape) {
  if (shape.empty()) return {};
  for (const Dimension& d : outer_dimensions(shape)) {
    if (d.extent == 1) continue;  // the stride of a dimension of size 1 is never used
    const int64_t bytes = d.stride * size_of(shape.dtype);
    if (d.stride <= 0 || bytes % kCopyAlignment != 0 || bytes >= kMaxStrideBytes) {
      return fmt::format("a stride of {} elements between {} is no positive multiple of 16 bytes",
                         d.stride, d.name);
    }
  }
  if (shape.column_stride != 1) {
    return fmt::format("elements of a row lie {} apart", shape.column_stride);
  }
  return shape.strides.aligned ? "" : "its data lies at no multiple of 16 bytes";
}

TensorShape copied(const TensorShape& shape, DType dtype) {
  TensorShape copy = shape;
  copy.dtype = dtype;
  const int64_t row = round_up(shape.dim, kCopyAlignment / size_of(dtype));
  copy.strides = {shape.rows * shape.heads * row, shape.heads * row, row};
  copy.column_stride = 1;
  return copy;
}

int64_t copied_bytes(const TensorShape& shape, const std::string& why, DType dtype) {
  if (why.empty()) return 0;
  return shape.batch * copied(shape, dtype).strides.batch * size_of(dtype);
}

void* aligned_data(const char* name, const ConstTensor& t, bool empty) {
  if (!empty && reinterpret_cast<uintptr_t>(t.data) % kCopyAlignment != 0) {
    fail(name, "data {} is not aligned to {} bytes, as that of the tensor was that was planned for",
         t.data, kCopyAlignment);
  }
  return const_cast<void*>(t.data);  // tensor maps have no const
}

ForwardCopyParams copy_params(const TensorShape& from, const TensorShape& to) {
  const Layout& strides = from.strides;
  return {nullptr,
          strides.batch,
          strides.row,
          strides.head,
          nullptr,
          to.strides.head * size_of(to.dtype) / kCopyAlignment,
          from.batch,
          from.rows,
          from.heads,
          from.dim,
          static_cast<int>(size_of(from.dtype)),
          from.column_stride};
}

}  // namespace fulgur::cuda

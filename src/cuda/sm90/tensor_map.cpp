#include "cuda/sm90/tensor_map.h"

#include <fmt/format.h>

#include <array>

#include "base/check.h"
#include "cuda/driver/driver.h"
#include "cuda/sm90/common.h"

namespace fulgur::cuda::sm90 {
namespace {

constexpr int64_t kMaxStrideBytes = int64_t{1} << 40;
constexpr int64_t kMaxExtent = int64_t{1} << 31;  // the kernel's row numbers are ints

constexpr int64_t kPanelBytes = 128;               // of a row, as the swizzle wants it
constexpr unsigned long long kUnusedStride = 512;  // of an extent of 1

int64_t round_up(int64_t a, int64_t multiple) { return (a + multiple - 1) / multiple * multiple; }

struct Dimension {
  const char* name;
  int64_t extent, stride;
};

std::array<Dimension, 3> outer(const TensorMapShape& s) {
  return {{{"seqlen", s.rows, s.strides.row},
           {"heads", s.heads, s.strides.head},
           {"batch", s.batch, s.strides.batch}}};
}

auto type_of(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return CU_TENSOR_MAP_DATA_TYPE_UINT8;
    case DType::kF32:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case DType::kF16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  }
}

TensorMapShape of_q(const Problem& p, DType dtype, int64_t dim, const Layout& strides,
                    int box_rows) {
  return {dtype, dim, p.packed ? p.total_q : p.sq, p.hq, p.packed ? 1 : p.batch, strides, box_rows};
}

TensorMapShape of_k(const Problem& p, DType dtype, int64_t dim, const Layout& strides,
                    int box_rows) {
  if (p.cache.paged()) {
    return {dtype, dim, p.cache.page, p.hk, p.cache.entries, strides, box_rows};
  }
  const int64_t batch = p.has(Arg::kCacheBatchIdx) ? p.cache.entries : p.batch;
  return {dtype,   dim,     p.packed_k ? p.total_k : p.sk, p.hk, p.packed_k ? 1 : batch,
          strides, box_rows};
}

/// The bias in boxes of the rows of a tile, where each has one of its own.
TensorMapShape of_bias(const Problem& p, int box_rows) {
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

KernelUse copy_kernel() {
  return {{"common/copy_rows.cu", "", native_architecture(kCapability)}, "fulgur_forward_copy", 0};
}
ForwardMaps forward_maps(const Problem& p, int box_keys) {
  const OperandTypes types = p.dtypes;
  return {of_q(p, types.q, p.d, p.q, 64), of_k(p, types.k, p.d, p.k, box_keys),
          of_k(p, types.v, p.dv, p.v, box_keys), of_q(p, types.out, p.dv, p.out, 16),
          of_bias(p, 64)};
}

BackwardMaps backward_maps(const Problem& p) {
  constexpr int kBox = 64;
  const OperandTypes types = p.dtypes;
  return {of_q(p, types.q, p.d, p.q, kBox),
          of_k(p, types.k, p.d, p.k, kBox),
          of_k(p, types.v, p.dv, p.v, kBox),
          of_q(p, types.out, p.dv, p.dout, kBox),
          of_q(p, types.out, p.dv, p.out, kBox),
          of_q(p, types.q, p.d, p.dq, kBox),
          of_k(p, types.k, p.d, p.dk, kBox),
          of_k(p, types.v, p.dv, p.dv_grad, kBox),
          of_bias(p, kBox)};
}

std::string map_unsupported(const TensorMapShape& shape) {
  if (shape.empty()) return {};
  for (const Dimension& d : outer(shape)) {
    if (d.extent >= kMaxExtent) {
      return fmt::format("has {} of {}, want less than 2^31", d.name, d.extent);
    }
  }
  return {};
}

std::string not_addressable(const TensorMapShape& shape) {
  if (shape.empty()) return {};
  for (const Dimension& d : outer(shape)) {
    if (d.extent == 1) continue;  // its stride is never used
    const int64_t bytes = d.stride * size_of(shape.dtype);
    if (d.stride <= 0 || bytes % kCopyAlignment != 0 || bytes >= kMaxStrideBytes) {
      return fmt::format("a stride of {} elements between {} is no positive multiple of 16 bytes",
                         d.stride, d.name);
    }
  }
  if (shape.column_stride != 1) {
    return fmt::format("elements of a row lie {} apart", shape.column_stride);
  }
  return shape.strides.aligned ? ""
                                 ""
                               : "its data lies at no multiple of 16 bytes";
}

TensorMapShape copied(const TensorMapShape& shape) {
  TensorMapShape copy = shape;
  const int64_t row = round_up(shape.dim, kCopyAlignment / size_of(shape.dtype));
  copy.strides = {shape.rows * shape.heads * row, shape.heads * row, row};
  copy.column_stride = 1;
  return copy;
}

int64_t copied_bytes(const TensorMapShape& shape) {
  return shape.batch * copied(shape).strides.batch * size_of(shape.dtype);
}

void encode(const TensorMapShape& shape, void* data, TensorMapBlob* map, Promotion promotion) {
  std::array<unsigned long long, 4> dims{1, 1, 1, 1};
  std::array<unsigned long long, 3> byte_strides{kUnusedStride, kUnusedStride, kUnusedStride};
  if (shape.empty()) {
    data = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(data) / kCopyAlignment *
                                   kCopyAlignment);
  } else {
    dims[0] = static_cast<unsigned long long>(shape.dim);
    const auto dimensions = outer(shape);
    for (size_t i = 0; i < dimensions.size(); ++i) {
      const Dimension& d = dimensions[i];
      dims[i + 1] = static_cast<unsigned long long>(d.extent);
      if (d.extent == 1) continue;
      byte_strides[i] = static_cast<unsigned long long>(d.stride * size_of(shape.dtype));
    }
  }
  const auto columns = static_cast<unsigned>(kPanelBytes / size_of(shape.dtype));
  const std::array<unsigned, 4> box{columns, static_cast<unsigned>(shape.box_rows), 1, 1};
  const std::array<unsigned, 4> every{1, 1, 1, 1};
  check(driver().cuTensorMapEncodeTiled(
            map, type_of(shape.dtype), 4, data, dims.data(), byte_strides.data(), box.data(),
            every.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
            promotion == Promotion::k128Bytes ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                              : CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
        "cuTensorMapEncodeTiled");
}

void* aligned_data(const char* name, const ConstTensor& t, bool empty) {
  if (!empty && reinterpret_cast<uintptr_t>(t.data) % kCopyAlignment != 0) {
    fail(name, "data {} is not aligned to {} bytes, as that of the tensor was that was planned for",
         t.data, kCopyAlignment);
  }
  return const_cast<void*>(t.data);  // a map does not say what it is for
}

ForwardCopyParams copy_params(const TensorMapShape& from, const TensorMapShape& to) {
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

}  // namespace fulgur::cuda::sm90

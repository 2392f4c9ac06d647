#include "distributed/group/part.h"

namespace fulgur::distributed {

int64_t Part::bytes() const { return shape[0] * shape[1] * shape[2] * shape[3] * size_of(dtype); }

Part Part::slice(int dim, int64_t begin, int64_t count) const {
  Part part = *this;
  part.data += begin * strides[dim] * size_of(dtype);
  part.shape[dim] = count;
  return part;
}

Part Part::of_rows(const ConstTensor& t) {
  Part part{static_cast<std::byte*>(const_cast<void*>(t.data)), t.dtype, t.shape, t.strides,
            t.device};
  if (t.rank == 4) return part;
  part.shape = {1, t.shape[0], t.shape[1], t.shape[2]};
  part.strides = {0, t.strides[0], t.strides[1], t.strides[2]};
  return part;
}

Part Part::of_lse(const ConstTensor& t) {
  Part part{static_cast<std::byte*>(const_cast<void*>(t.data)), t.dtype, {}, {}, t.device};
  const int at = t.rank - 2;  // the dimension of heads
  part.shape = {t.rank == 3 ? t.shape[0] : 1, t.shape[at + 1], t.shape[at], 1};
  part.strides = {t.rank == 3 ? t.strides[0] : 0, t.strides[at + 1], t.strides[at], 1};
  return part;
}

Tensor Part::tensor() const {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
  t.device = device;
  t.rank = 4;
  t.shape = shape;
  t.strides = strides;
  return t;
}

Tensor Part::lse() const {
  Tensor t = tensor();
  t.rank = 3;
  t.shape = {shape[0], shape[2], shape[1], 0};
  t.strides = {strides[0], strides[2], strides[1], 0};
  return t;
}

Part Part::packed(std::byte* to) const {
  const auto& [batches, rows, heads, dim] = shape;
  Part part = *this;
  part.data = to;
  part.strides = {rows * heads * dim, heads * dim, dim, 1};
  if (dim == 1) part.strides = {rows * heads, 1, rows, 1};
  return part;
}

}  // namespace fulgur::distributed

#include "distributed/shipment.h"

#include <cstring>
#include <memory>

namespace fulgur::distributed {
namespace {

/// Memory that is not cleared first.
struct Bytes {
  explicit Bytes(int64_t n) : data(new std::byte[n]), size(n) {}
  std::unique_ptr<std::byte[]> data;
  int64_t size;
};

/// Calls visit(row) for where each row of a head begins.
template <class Visit>
void each_row(const Part& p, const Visit& visit) {
  const int64_t element = size_of(p.dtype);
  for (int64_t b = 0; b < p.shape[0]; ++b) {
    for (int64_t r = 0; r < p.shape[1]; ++r) {
      for (int64_t h = 0; h < p.shape[2]; ++h) {
        visit(p.data + (b * p.strides[0] + r * p.strides[1] + h * p.strides[2]) * element);
      }
    }
  }
}

void copy(int64_t bytes, const std::byte* from, std::byte* to) { std::memcpy(to, from, bytes); }

template <class T>
void add(int64_t bytes, const std::byte* from, std::byte* to) {
  for (int64_t at = 0; at < bytes; at += sizeof(T)) {
    T sum, x;
    std::memcpy(&sum, to + at, sizeof(T));
    std::memcpy(&x, from + at, sizeof(T));
    sum += x;
    std::memcpy(to + at, &sum, sizeof(T));
  }
}

}  // namespace

int64_t Part::bytes() const { return shape[0] * shape[1] * shape[2] * shape[3] * size_of(dtype); }

Part Part::slice(int dim, int64_t begin, int64_t count) const {
  Part part = *this;
  part.data += begin * strides[dim] * size_of(dtype);
  part.shape[dim] = count;
  return part;
}

Part Part::of_rows(const ConstTensor& t) {
  Part part{static_cast<std::byte*>(const_cast<void*>(t.data)), t.dtype, t.shape, t.strides};
  if (t.rank == 4) return part;
  part.shape = {1, t.shape[0], t.shape[1], t.shape[2]};
  part.strides = {0, t.strides[0], t.strides[1], t.strides[2]};
  return part;
}

Part Part::of_lse(const ConstTensor& t) {
  Part part{static_cast<std::byte*>(const_cast<void*>(t.data)), t.dtype, {}, {}};
  const int at = t.rank - 2;  // of heads
  part.shape = {t.rank == 3 ? t.shape[0] : 1, t.shape[at + 1], t.shape[at], 1};
  part.strides = {t.rank == 3 ? t.strides[0] : 0, t.strides[at + 1], t.strides[at], 1};
  return part;
}

Tensor Part::tensor() const {
  Tensor t;
  t.data = data;
  t.dtype = dtype;
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

Shipment::Shipment(Group::Impl& group)
    : group_(group), sends_(group.ranks), receives_(group.ranks) {}

void Shipment::run(bool alone) {
  std::vector<Bytes> memory;
  memory.reserve(2 * sends_.size());
  std::vector<std::span<const std::byte>> sends(sends_.size());
  std::vector<std::span<std::byte>> receives(sends_.size());
  for (size_t to = 0; to < sends_.size(); ++to) {
    if (to > 0 && sends_[to] == sends_[to - 1]) {  // as a rule, where keys are gathered
      sends[to] = sends[to - 1];
      continue;
    }
    int64_t bytes = 0;
    for (const Part& part : sends_[to]) bytes += part.bytes();
    std::byte* at = memory.emplace_back(bytes).data.get();
    sends[to] = {at, static_cast<size_t>(bytes)};
    for (const Part& part : sends_[to]) {
      const int64_t row = part.shape[3] * size_of(part.dtype);
      each_row(part, [&](const std::byte* from) {
        std::memcpy(at, from, row);
        at += row;
      });
    }
  }
  const std::span<const std::byte> own = std::exchange(sends[group_.rank], {});
  for (size_t from = 0; from < receives_.size(); ++from) {
    if (static_cast<int>(from) == group_.rank) continue;
    int64_t bytes = 0;
    for (const Target& target : receives_[from]) bytes += target.part.bytes();
    receives[from] = {memory.emplace_back(bytes).data.get(), static_cast<size_t>(bytes)};
  }
  if (!alone) group_.exchange(sends, receives);
  for (size_t from = 0; from < receives_.size(); ++from) {
    const std::byte* at =
        static_cast<int>(from) == group_.rank ? own.data() : receives[from].data();
    for (const auto& [part, adds] : receives_[from]) {
      const int64_t row = part.shape[3] * size_of(part.dtype);
      const auto take = !adds ? copy : part.dtype == DType::kF64 ? add<double> : add<float>;
      each_row(part, [&](std::byte* to) {
        take(row, at, to);
        at += row;
      });
    }
  }
}

}  // namespace fulgur::distributed

/// Parts of tensors that ranks send each other in one step.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "distributed/group.h"
#include "fulgur/tensor.h"

namespace fulgur::distributed {

/// A part of a tensor in the host's memory: (batch, rows, heads, dim), and the strides of these.
struct Part {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  std::array<int64_t, 4> shape{}, strides{};

  int64_t bytes() const;
  Part rows(int64_t begin, int64_t count) const { return slice(1, begin, count); }
  Part heads(int64_t begin, int64_t count) const { return slice(2, begin, count); }
  Part slice(int dim, int64_t begin, int64_t count) const;
  bool operator==(const Part&) const = default;

  /// A tensor of rows, batched or packed, of which there is one batch then.
  static Part of_rows(const ConstTensor& t);
  /// LSE and its like, (batch, heads, rows) or (heads, rows).
  static Part of_lse(const ConstTensor& t);
  /// The tensor (batch, rows, heads, dim), or (batch, heads, rows).
  Tensor tensor() const;
  Tensor lse() const;
};

/// What a step brings. The parts for a rank are sent in the order of their calls, and received so.
class Shipment {
 public:
  explicit Shipment(Group::Impl& group);
  void send(int to, const Part& part) { sends_[to].push_back(part); }
  void receive(int from, const Part& part) { receives_[from].push_back({part, false}); }
  /// Adds what comes to what there is, rank after rank: of f32 or f64.
  void receive_sum(int from, const Part& part) { receives_[from].push_back({part, true}); }

  /// Makes the step. `alone`: all ranks send to themselves only.
  void run(bool alone);

 private:
  struct Target {
    Part part;
    bool adds;
  };
  Group::Impl& group_;
  std::vector<std::vector<Part>> sends_;
  std::vector<std::vector<Target>> receives_;
};

}  // namespace fulgur::distributed

/// Tensors of a rank on its GPU.
#pragma once

#include <map>

#include "fulgur/cuda.h"
#include "fulgur/tensor.h"

namespace fulgur::test {

/// Tensors on a GPU, copies of those of the host.
class OnGpu {
 public:
  explicit OnGpu(Device device) : device_(device) {}
  ~OnGpu() {
    for (const auto& [host, copy] : copies_) cuda::deallocate(copy.data, device_.index);
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  void place(ConstTensor& t) {
    Tensor copy;
    copy.data = const_cast<void*>(t.data);
    copy.dtype = t.dtype;
    copy.rank = t.rank;
    copy.shape = t.shape;
    copy.strides = t.strides;
    place(copy);
    t.data = copy.data;
    t.device = copy.device;
  }
  void place(Tensor& t) {
    if (device_ == Device{} || !t.given()) return;
    if (t.numel() == 0) {  // of a rank without rows
      t.device = device_;
      return;
    }
    const auto [at, fresh] = copies_.try_emplace(t.data);
    if (fresh) {
      int64_t last = 0;
      for (int i = 0; i < t.rank; ++i) last += (t.shape[i] - 1) * t.strides[i];
      at->second = {nullptr, (last + 1) * size_of(t.dtype)};
      at->second.data = cuda::allocate(at->second.bytes, device_.index);
      cuda::copy(at->second.data, t.data, at->second.bytes, device_.index);
      cuda::synchronize(device_.index);
    }
    t.data = at->second.data;
    t.device = device_;
  }
  void bring_back() {
    if (device_ == Device{}) return;
    cuda::synchronize(device_.index);
    for (const auto& [host, copy] : copies_) {
      cuda::copy(host, copy.data, copy.bytes, device_.index);
    }
  }

 private:
  struct Copy {
    void* data;
    int64_t bytes;
  };
  Device device_;
  std::map<void*, Copy> copies_;
};

}  // namespace fulgur::test

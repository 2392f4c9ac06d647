#include "engine_memory.h"

#include <algorithm>
#include <stdexcept>

#include "fulgur/cuda.h"
#include "storage.h"

namespace fulgur::test {
namespace {

int64_t longest(const Tensor& cu_seqlens) {
  const std::vector<double> starts = read(cu_seqlens);
  double most = 1;  // 0 would mean that it is not given
  for (size_t b = 1; b < starts.size(); ++b) most = std::max(most, starts[b] - starts[b - 1]);
  return static_cast<int64_t>(most);
}

template <class Tensors>
Options with_longest(Device device, const Tensors& t, Options options) {
  if (device.type == DeviceType::kCpu || !t.cu_seqlens_q.given()) return options;
  if (options.max_seqlen_q == 0) options.max_seqlen_q = longest(t.cu_seqlens_q);
  if (options.max_seqlen_k == 0 && t.cu_seqlens_k.given()) {
    options.max_seqlen_k = longest(t.cu_seqlens_k);
  }
  return options;
}

int64_t size(std::span<std::byte> bytes) { return static_cast<int64_t>(bytes.size()); }

}  // namespace

Device device_of(const std::string& engine) {
  return engine == "cuda" ? Device{DeviceType::kCuda, 0} : Device{};
}

EngineMemory::~EngineMemory() {
  for (const Copy& c : copies_) cuda::deallocate(c.device, device_.index);
}

const EngineMemory::Copy& EngineMemory::copy_of(const void* data) {
  const auto found = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& c) {
    return data >= c.host.data() && data < c.host.data() + c.host.size();
  });
  if (found != copies_.end()) return *found;
  Storage* const storage = Storage::around(data);
  if (storage == nullptr) throw std::logic_error("a test's tensor lies in no Storage");
  return add(storage->bytes());
}

const EngineMemory::Copy& EngineMemory::add(std::span<std::byte> host) {
  auto* device = static_cast<std::byte*>(cuda::allocate(size(host), device_.index));
  copies_.push_back({host, device});
  cuda::copy(device, host.data(), size(host), device_.index);
  cuda::synchronize(device_.index);  // a stream of its own does not wait for the copy
  return copies_.back();
}

Tensor EngineMemory::at(Tensor t) {
  if (!t.given() || t.device == device_) return t;
  t.device = device_;
  if (t.numel() == 0) return t;  // it may point anywhere
  const Copy& copy = copy_of(t.data);
  t.data = copy.device + (static_cast<std::byte*>(t.data) - copy.host.data());
  return t;
}

ForwardTensors EngineMemory::at(const ForwardTensors& t) {
  return {at(t.q),
          at(t.k),
          at(t.v),
          at(t.out),
          at(t.lse),
          at(t.alibi_slopes),
          at(t.cu_seqlens_q),
          at(t.cu_seqlens_k),
          at(t.seqused_q),
          at(t.seqused_k),
          at(t.rng_state),
          at(t.page_table),
          at(t.page_indptr),
          at(t.cache_batch_idx),
          at(t.leftpad_k),
          at(t.sinks),
          at(t.tree_mask),
          at(t.bias),
          at(t.prefix_groups),
          at(t.prefix_lens),
          at(t.q_descale),
          at(t.k_descale),
          at(t.v_descale),
          at(t.k_zero_point),
          at(t.v_zero_point),
          at(t.k_mean),
          at(t.tensors)};
}

BackwardTensors EngineMemory::at(const BackwardTensors& t) {
  return {at(t.dout),
          at(t.q),
          at(t.k),
          at(t.v),
          at(t.out),
          at(t.lse),
          at(t.dq),
          at(t.dk),
          at(t.dv),
          at(t.alibi_slopes),
          at(t.cu_seqlens_q),
          at(t.cu_seqlens_k),
          at(t.seqused_q),
          at(t.seqused_k),
          at(t.dlse),
          at(t.rng_state),
          at(t.sinks),
          at(t.dsinks),
          at(t.bias),
          at(t.dbias),
          at(t.tensors)};
}

AppendTensors EngineMemory::at(const AppendTensors& t) {
  return {at(t.k_cache),
          at(t.v_cache),
          at(t.k_new),
          at(t.v_new),
          at(t.cu_seqlens_k_new),
          at(t.cache_seqlens),
          at(t.page_table),
          at(t.page_indptr),
          at(t.cache_batch_idx),
          at(t.cos),
          at(t.sin),
          t.interleaved,
          at(t.rotary_seqlens),
          at(t.q),
          at(t.q_out),
          at(t.cu_seqlens_q),
          at(t.k_cache_descale),
          at(t.v_cache_descale),
          at(t.k_cache_zero_point),
          at(t.v_cache_zero_point),
          at(t.k_cache_mean)};
}

std::vector<TensorBinding> EngineMemory::at(std::vector<TensorBinding> tensors) {
  for (TensorBinding& t : tensors) {
    Tensor values;
    values.data = const_cast<void*>(t.tensor.data);
    values.dtype = t.tensor.dtype;
    values.rank = t.tensor.rank;
    values.shape = t.tensor.shape;
    values.strides = t.tensor.strides;
    values.device = t.tensor.device;
    t.tensor = at(values);
    t.grad = at(t.grad);
  }
  return tensors;
}

Options EngineMemory::options(const ForwardTensors& t, const Options& options) const {
  return with_longest(device_, t, options);
}
Options EngineMemory::options(const BackwardTensors& t, const Options& options) const {
  return with_longest(device_, t, options);
}

void EngineMemory::send() const {
  if (copies_.empty()) return;
  for (const Copy& c : copies_) cuda::copy(c.device, c.host.data(), size(c.host), device_.index);
  cuda::synchronize(device_.index);
}

void EngineMemory::bring_back() const {
  if (copies_.empty()) return;
  cuda::synchronize(device_.index);
  for (const Copy& c : copies_) cuda::copy(c.host.data(), c.device, size(c.host), device_.index);
}

void compute(const ForwardTensors& t, const Options& options, const Run& run) {
  EngineMemory memory(options.engine);
  const ForwardTensors there = memory.at(t);
  forward(there, memory.options(t, options), run);
  memory.bring_back();
}

void compute(const BackwardTensors& t, const Options& options, const Run& run) {
  EngineMemory memory(options.engine);
  const BackwardTensors there = memory.at(t);
  backward(there, memory.options(t, options), run);
  memory.bring_back();
}

void compute(const ForwardTensors& t, const AppendTensors& rows, const Options& options,
             const Run& run) {
  EngineMemory memory(options.engine);
  const AppendTensors rows_there = memory.at(rows);
  ForwardArgs there = appending(memory.at(t), rows_there);
  forward(there, memory.options(t, options), run);
  memory.bring_back();
}

void compute(const AppendTensors& t, const Options& options, const Run& run) {
  EngineMemory memory(options.engine);
  append(memory.at(t), options, run);
  memory.bring_back();
}

void compute(const std::vector<Merged>& parts, const Merged& result, const std::string& engine) {
  EngineMemory memory(engine);
  std::vector<Partial> there;
  for (const Merged& part : parts) there.push_back({memory.at(part.out), memory.at(part.lse)});
  merge(there, {memory.at(result.out), memory.at(result.lse)});
  memory.bring_back();
}

}  // namespace fulgur::test

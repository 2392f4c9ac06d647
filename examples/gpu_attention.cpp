// Attention on a GPU in a program that has no CUDA of its own: memory, a plan, a workspace, a run
// on a stream, and the result with that of the CPU. Without a usable GPU it says so and ends
// with 77.
#include <fulgur/cuda.h>
#include <fulgur/fulgur.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

namespace {

using fulgur::Device, fulgur::DType;

constexpr int64_t kShape[] = {2, 1000, 8, 128};  // batch, rows, heads, dim
constexpr int64_t kNumel = 2 * 1000 * 8 * 128;
using Host = std::vector<uint16_t>;  // bf16: the upper half of an f32

Host random_numbers(unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  Host x(kNumel);
  std::generate(x.begin(), x.end(), [&] { return std::bit_cast<uint32_t>(normal(random)) >> 16; });
  return x;
}

float to_float(uint16_t x) { return std::bit_cast<float>(uint32_t{x} << 16); }

/// A copy in device memory that frees itself.
template <class T>
std::shared_ptr<void> on_device(const std::vector<T>& host) {
  const auto bytes = static_cast<int64_t>(host.size() * sizeof(T));
  const std::shared_ptr<void> copy(fulgur::cuda::allocate(bytes),
                                   [](void* data) { fulgur::cuda::deallocate(data); });
  fulgur::cuda::copy(copy.get(), host.data(), bytes);
  return copy;
}

fulgur::ForwardArgs tensors(void* q, void* k, void* v, void* out, Device device) {
  const auto tensor = [&](void* data) {
    return fulgur::Tensor::contiguous(data, DType::kBF16, kShape, device);
  };
  return {.q = tensor(q), .k = tensor(k), .v = tensor(v), .out = tensor(out)};
}

/// Whether GPU and CPU agree.
bool run() {
  Host q = random_numbers(1), k = random_numbers(2), v = random_numbers(3), expected(kNumel);
  Host out(kNumel, 0xffff);  // NaN: what is not written is found
  const auto gq = on_device(q), gk = on_device(k), gv = on_device(v), gout = on_device(out);
  const fulgur::Options options{.mask = fulgur::causal()};
  const auto args = tensors(gq.get(), gk.get(), gv.get(), gout.get(), {fulgur::DeviceType::kCuda});

  // Once for each shape: check, choose, compile. Every thread may run the plan, on every stream.
  const fulgur::Plan plan = fulgur::plan(args, options);
  std::puts(plan.explain().c_str());

  // For one run at a time, zero at its beginning. Without it the library takes memory of its own.
  const fulgur::WorkspaceNeed need = plan.workspace();
  const auto workspace = on_device(std::vector<char>(static_cast<size_t>(need.bytes)));

  // A run only launches. The stream is a cudaStream_t of yours; null is the default one.
  plan.run(args, {.stream = nullptr, .workspace = {workspace.get(), need.bytes}});
  fulgur::cuda::copy(out.data(), gout.get(), kNumel * 2);  // work on the default stream comes first

  fulgur::forward(tensors(q.data(), k.data(), v.data(), expected.data(), {}), options);
  int wrong = 0;
  for (size_t i = 0; i < out.size(); ++i) {
    const float got = to_float(out[i]), want = to_float(expected[i]);
    wrong += !(std::fabs(got - want) <= 0.01f + 0.01f * std::fabs(want));  // NaN is wrong, too
  }
  std::printf("%d of %zu elements differ from those of the CPU\n", wrong, out.size());
  return wrong == 0;
}

}  // namespace

int main() try { return run() ? 0 : 1; } catch (const fulgur::Error& error) {
  std::fprintf(stderr, "gpu_attention: %s\n", error.what());
  return error.status() == fulgur::Status::kUnavailable ? 77 : 1;
}

#include <fulgur/fulgur.h>

#include <cmath>
#include <cstdio>
#include <vector>

extern "C" int version_is(const char* version);

int main() {
  // Two equal keys: the output is the mean of their values.
  const std::vector<float> q{1, 2}, k{3, 4, 3, 4}, v{1, 10, 3, 30};
  std::vector<float> out(2), lse(1);
  using fulgur::Tensor;
  fulgur::forward({.q = Tensor::contiguous(q.data(), fulgur::DType::kF32, {1, 1, 1, 2}),
                   .k = Tensor::contiguous(k.data(), fulgur::DType::kF32, {1, 2, 1, 2}),
                   .v = Tensor::contiguous(v.data(), fulgur::DType::kF32, {1, 2, 1, 2}),
                   .out = Tensor::contiguous(out.data(), fulgur::DType::kF32, {1, 1, 1, 2}),
                   .lse = Tensor::contiguous(lse.data(), fulgur::DType::kF32, {1, 1, 1})},
                  {.scale = 1});
  const bool right = std::fabs(out[0] - 2) < 1e-6 && std::fabs(out[1] - 20) < 1e-5 &&
                     std::fabs(lse[0] - (11 + std::log(2.0))) < 1e-5;
  std::printf("out %g %g, lse %g\n", out[0], out[1], lse[0]);
  return right && version_is(FULGUR_VERSION) ? 0 : 1;
}

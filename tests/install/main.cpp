#include <fulgur/fulgur.h>

#include <cmath>
#include <cstdio>
#include <span>
#include <vector>

extern "C" int version_is(const char* version);

int main() {
  // Two equal keys: the output is the mean of their values.
  const std::vector<float> q{1, 2}, k{3, 4, 3, 4}, v{1, 10, 3, 30};
  std::vector<float> out(2), lse(1);
  using fulgur::ConstTensor, fulgur::Tensor;
  fulgur::forward({.q = ConstTensor::of(std::span(q), {1, 1, 1, 2}),
                   .k = ConstTensor::of(std::span(k), {1, 2, 1, 2}),
                   .v = ConstTensor::of(std::span(v), {1, 2, 1, 2}),
                   .out = Tensor::of(std::span(out), {1, 1, 1, 2}),
                   .lse = Tensor::of(std::span(lse), {1, 1, 1})},
                  {.scale = 1});
  const bool right = std::fabs(out[0] - 2) < 1e-6 && std::fabs(out[1] - 20) < 1e-5 &&
                     std::fabs(lse[0] - (11 + std::log(2.0))) < 1e-5;
  std::printf("out %g %g, lse %g\n", out[0], out[1], lse[0]);
  return right && version_is(FULGUR_VERSION) ? 0 : 1;
}

// Masks and scores as expressions (docs/expressions.md), on the CPU: packed documents, a prefix
// that all queries see, sinks with a sliding window, and ALiBi with the gradient of its slopes.
#include <cmath>
#include <cstdio>
#include <vector>

#include "fulgur/fulgur.h"

namespace {

constexpr int64_t kTokens = 384, kHeads = 2, kDim = 32, kCount = kTokens * kHeads * kDim;

std::vector<float> numbers(int64_t count, float phase) {
  std::vector<float> x(count);
  for (int64_t i = 0; i < count; ++i) x[i] = std::sin(phase + 0.37f * static_cast<float>(i));
  return x;
}

fulgur::Tensor rows(std::vector<float>& x) {
  return fulgur::Tensor::of(std::span(x), {1, kTokens, kHeads, kDim});
}

}  // namespace

int main() {
  using namespace fulgur::symbols;
  using fulgur::Options, fulgur::TensorSymbol, fulgur::causal;

  std::vector<float> q_data = numbers(kCount, 0), k_data = numbers(kCount, 1),
                     v_data = numbers(kCount, 2);
  std::vector<float> out_data(kCount), lse_data(kTokens * kHeads);
  const fulgur::Tensor lse = fulgur::Tensor::of(std::span(lse_data), {1, kHeads, kTokens});
  fulgur::ForwardArgs args{
      .q = rows(q_data), .k = rows(k_data), .v = rows(v_data), .out = rows(out_data), .lse = lse};

  // Documents side by side: ids[b, i] says which one token i of sequence b belongs to.
  std::vector<int32_t> ids(kTokens);
  for (int64_t i = 0; i < kTokens; ++i) ids[i] = static_cast<int32_t>(i / 100);
  const TensorSymbol doc("doc", fulgur::DType::kI32, 2);
  const Options documents{.mask = causal(), .mask_mod = doc(b, q) == doc(b, k)};
  args.tensors = {{"doc", fulgur::ConstTensor::of(std::span(ids), {1, kTokens})}};
  fulgur::forward(args, documents);
  args.tensors = {};

  // The first 64 tokens are a prefix, which every query sees; the others see what is before them.
  const Options prefix{.mask_mod = k < 64 || delta <= 0};
  fulgur::forward(args, prefix);

  // A sliding window of 128 keys, and the first 4, which take up attention.
  const Options streaming{.mask = causal(), .mask_mod = k < 4 || delta > -128};
  fulgur::forward(args, streaming);

  // ALiBi, whose slopes get a gradient.
  std::vector<float> slopes = {0.25f, 0.0625f}, slope_gradients(kHeads);
  const TensorSymbol slope("slope", fulgur::DType::kF32, 1);
  const Options alibi{.mask = causal(), .score_mod = score - slope(h) * abs(delta)};
  const fulgur::Tensor slope_tensor = fulgur::Tensor::of(std::span(slopes), {kHeads});
  args.tensors = {{"slope", slope_tensor}};
  fulgur::forward(args, alibi);

  std::vector<float> dout_data = numbers(kCount, 3), dq(kCount), dk(kCount), dv(kCount);
  fulgur::BackwardArgs gradients{.dout = rows(dout_data),
                                 .q = args.q,
                                 .k = args.k,
                                 .v = args.v,
                                 .out = args.out,
                                 .lse = args.lse,
                                 .dq = rows(dq),
                                 .dk = rows(dk),
                                 .dv = rows(dv)};
  const fulgur::Tensor dslope = fulgur::Tensor::of(std::span(slope_gradients), {kHeads});
  gradients.tensors = {{"slope", slope_tensor, dslope}};
  fulgur::backward(gradients, alibi);
  std::printf("gradients of the slopes: %g, %g\n", slope_gradients[0], slope_gradients[1]);

  // The same by the option that ALiBi has.
  std::vector<float> same_data(kCount);
  args.out = rows(same_data);
  args.alibi_slopes = slope_tensor;
  args.tensors = {};
  fulgur::forward(args, {.mask = causal()});
  float off = 0;
  for (int64_t i = 0; i < kCount; ++i) off = std::fmax(off, std::fabs(same_data[i] - out_data[i]));
  std::printf("the option and the expression are %g apart\n", off);
  return off < 1e-5f && slope_gradients[0] != 0 ? 0 : 1;
}

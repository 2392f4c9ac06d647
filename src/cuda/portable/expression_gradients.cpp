#include "cuda/portable/expression_gradients.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/backward/expression_round_params.h"
#include "kernels/portable/backward/bias_tile.h"

namespace fulgur::cuda::portable {
namespace {

constexpr int kThreads = 128, kRoundThreads = 256, kRoundBlocks = 8;

int64_t elements_of(const expression::Expressions::TensorLayout& t) {
  int64_t count = t.rank > 0 ? 1 : 0;
  for (int i = 0; i < t.rank; ++i) count *= t.shape[i];
  return count;
}

/// Bytes of the sums of a number of elements.
int64_t bytes_of(int64_t elements) {
  constexpr int64_t kWord = sizeof(int64_t);
  return (elements + 1 + (elements + kWord - 1) / kWord) * kWord;
}

kernels::ExpressionSums sums_at(char* at, int64_t elements) {
  constexpr int64_t kWord = sizeof(int64_t);
  kernels::ExpressionSums s{};
  s.sums = reinterpret_cast<long long*>(at);
  s.largest = reinterpret_cast<int*>(at + elements * kWord);
  s.spoiled = reinterpret_cast<unsigned char*>(at + (elements + 1) * kWord);
  return s;
}

KernelUse add_kernel(const BackwardKey& key) {
  const int shared_bytes =
      kernels::portable_bias_layout(operands_of(key), key.head_dim, key.value_dim).bytes;
  return {{"portable/backward/expression_gradients.cu", kernel_config(key)},
          "fulgur_expression_gradients",
          shared_bytes};
}

KernelUse round_kernel() {
  return {{"backward/expression_round.cu", "#pragma once\n"}, "fulgur_expression_round", 0};
}

}  // namespace

std::vector<KernelUse> expression_gradient_kernels(const BackwardKey& key) {
  return {add_kernel(key), round_kernel()};
}

int64_t ExpressionGradients::bytes(const Problem& p) {
  int64_t bytes = 0;
  for (const auto& gradient : p.expressions.gradient_layouts()) {
    if (elements_of(gradient) > 0) bytes += bytes_of(elements_of(gradient));
  }
  return bytes;
}

ExpressionGradients::ExpressionGradients(const Problem& p, const BackwardKey& key, Gpu& gpu)
    : expressions_(p.expressions), bytes_(bytes(p)) {
  if (bytes_ == 0) return;
  const KernelUse add = add_kernel(key);
  add_ = gpu.kernel(add).function;
  round_ = gpu.kernel(round_kernel()).function;
  shared_bytes_ = add.shared_bytes;
  ctas_ = static_cast<int>(p.batch * p.hq * ceil_div(p.sq, kernels::kPortableBiasTile));
  const double scores = static_cast<double>(p.batch) * static_cast<double>(p.hq) *
                        static_cast<double>(p.sq) * static_cast<double>(p.sk);
  log_scores_ = static_cast<int>(std::ceil(std::log2(std::max(scores, 1.0))));
  round_ctas_ = kRoundBlocks * gpu.sms();
}

void ExpressionGradients::launch(CUstream stream, BackwardParams params, const BackwardArgs& args,
                                 char* sums) const {
  if (bytes_ == 0) return;
  check(driver().cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(sums), 0, bytes_, stream),
        "cuMemsetD8Async");
  const auto layouts = expressions_.gradient_layouts();
  for (size_t i = 0; i < layouts.size(); ++i) {
    const int64_t count = elements_of(layouts[i]);
    if (count == 0) continue;
    params.expression.tensors[i].sums = sums_at(sums, count);
    sums += bytes_of(count);
  }
  params.expression.log_scores = log_scores_;
  for (const bool finds_largest : {true, false}) {
    params.expression.finds_largest = finds_largest;
    if (ctas_ == 0) continue;
    cuda::launch(stream, add_, &params, {ctas_}, kThreads, shared_bytes_,
                 "launching the kernel of gradients of tensors");
  }
  const std::vector<TensorBinding> bound = expressions_.bound(args.tensors);
  for (size_t i = 0; i < layouts.size(); ++i) {
    const int64_t count = elements_of(layouts[i]);
    if (count == 0) continue;
    const Tensor& to = bound[i].grad;
    ExpressionRoundParams round{};
    round.sums = params.expression.tensors[i].sums;
    round.log_scores = log_scores_;
    round.data = to.data;
    round.type = static_cast<kernels::Element>(to.dtype);
    round.count = static_cast<int>(count);
    for (int d = 0; d < kernels::kMaxExpressionRank; ++d) {
      const int of = d - (kernels::kMaxExpressionRank - to.rank);
      round.shape[d] = of < 0 ? 1 : static_cast<int>(to.shape[of]);
      round.stride[d] = of < 0 ? 0 : to.strides[of];
    }
    cuda::launch(stream, round_, &round, {round_ctas_}, kRoundThreads, 0,
                 "launching the kernel that rounds gradients of tensors");
  }
}

}  // namespace fulgur::cuda::portable

#include "host/code_steps.h"

#include <limits>

#include "base/convert.h"
#include "base/hadamard.h"
#include "base/parallel.h"
#include "call/lengths.h"

namespace fulgur::host {
namespace {

class HostCodeSteps final : public CodeSteps {
 public:
  HostCodeSteps(const Problem& p, int threads) : p_(p), threads_(threads) {}

  int64_t bytes() const override { return 0; }

  void rotate(const HadamardCall& call, const Run&) const override { hadamard(call, threads_); }

  void add_means(const ForwardArgs& args, void*, const Run&) const override {
    for_each_row(args, [&](int64_t b, int64_t row, int64_t h, const auto& product) {
      const int64_t at = p_.lse.offset(b, row, h);
      const double before = load_element(args.lse.data, args.lse.dtype, at);
      if (!(before > -std::numeric_limits<double>::infinity())) return;  // it sees no key
      store_element(args.lse.data, args.lse.dtype, at, before + product());
    });
  }

  void multiply_means(const ForwardArgs& args, void* to, void*, const Run&) const override {
    for_each_row(args, [&](int64_t b, int64_t row, int64_t h, const auto& product) {
      const int64_t at = p_.packed ? h * p_.total_q + row : (b * p_.hq + h) * p_.sq + row;
      store_element(to, p_.lse_dtype(), at, product());
    });
  }

 private:
  /// Calls act(sequence, row, q head, a function that gives the product of the row and its mean).
  template <class Act>
  void for_each_row(const ForwardArgs& args, const Act& act) const {
    if (p_.total_q == 0) return;  // with no rows there may be any number of heads
    const Sequences sequences(p_, args);
    const Means means(args.descales.k_mean);
    const ScaleTensor scale{args.descales.q_descale.data, p_.q_descale};
    parallel_for(p_.batch * p_.hq, threads_, [&](int64_t item) {
      const int64_t b = item / p_.hq, h = item % p_.hq, kv = h / p_.group();
      const Sequence s = sequences[b];
      const float* const mean = means.of(b, kv);
      for (int64_t row = s.q_begin; row < s.q_begin + s.sq; ++row) {
        const int64_t first = p_.q.offset(b, row, h);
        act(b, row, h, [&] {
          double sum = 0;
          for (int64_t i = 0; i < p_.d; ++i) {
            double x = load_element(args.q.data, args.q.dtype, first + i);
            if (scale.given()) x *= scale.of(b, kv, b, row, h, i / (p_.d / scale.at.groups));
            sum += x * mean[i];
          }
          return p_.scale * sum;
        });
      }
    });
  }

  Problem p_;
  int threads_;
};

}  // namespace

std::unique_ptr<const CodeSteps> code_steps(const Problem& p, int threads) {
  return std::make_unique<HostCodeSteps>(p, threads);
}

}  // namespace fulgur::host

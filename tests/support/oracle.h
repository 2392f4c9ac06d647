/// What is right, and how far a result may be from it.
///
/// The rule: max|got - reference| <= factor * max|naive - reference| + tolerance * unit, where
///   reference  is standard attention in double precision,
///   naive      is the same computation as a framework without a fused kernel does it in the
///              tensors' dtype: S, P, O, dP, dS and the gradients are each rounded to the dtype,
///              sums are f32 (f64 for f64), D = rowsum(dO o O) is taken from the rounded O,
///   factor     is 2 for the forward pass and 3 for gradients,
///   unit       is the size that the terms of the sum have (not their sum, which may cancel),
///   tolerance  is 1e-5 for 16-bit tensors, 32 ulp for f32 and f64.
/// Of dsinks, a sum over all rows that is f32 in every naive computation, the unit is the sum of
/// the sizes of its terms. It takes D from the rounded O, by which it may be off, however lucky the
/// few sums of a naive computation were: by half an ulp of the root of its terms' squares. So may
/// dbias, each element of which may be a sum of many terms. LSE,
/// which is never rounded to 16 bits: max|got - reference| <= tolerance * max(1, |LSE|). Infinities
/// and NaN must stand exactly where the reference has them.
#pragma once

#include <vector>

#include "workload.h"

namespace fulgur::test {

/// Every output of a workload in row-major order of its tensor's shape.
struct Outputs {
  std::vector<double> out, lse, dq, dk, dv, dsinks, dbias;
};

struct Expected {
  Outputs reference, naive;
  struct {
    double out = 0, lse = 0, dq = 0, dk = 0, dv = 0, dsinks = 0, rounded_dsinks = 0;
    double dbias = 0, rounded_dbias = 0;
  } unit;
};

/// Computes what `w` should give. Runs on two threads.
Expected expect(const Workload& w);
/// O and LSE alone, in a third of the time.
Expected expect_forward(const Workload& w);

/// Whether the output tensors of `w` keep the rule.
testing::AssertionResult forward_is_right(const Workload& w, const Expected& e);
testing::AssertionResult backward_is_right(const Workload& w, const Expected& e);

/// The forward pass where scores are so large that the naive computation, which rounds them to 16
/// bits, says nothing. A fused kernel rounds P and O once each, and its scores have the error of
/// f32 sums: |got - reference| <= (2 half ulps of the dtype + 4 ulps of f32 * max|LSE|) * unit.
testing::AssertionResult forward_is_close(const Workload& w, const Expected& e);

/// The rule for one tensor.
testing::AssertionResult within(const char* name, const Tensor& got,
                                const std::vector<double>& reference,
                                const std::vector<double>& naive, double factor, double bound);
/// 1e-5 for 16-bit tensors, 32 ulp for the others.
double tolerance(DType dtype);

}  // namespace fulgur::test

#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// A family for k and v of codes, and q of bf16 or f32: a kernel converts k and v to the dtype of
/// q, once for all rows of q, and a kernel of `forward` computes the call on them. (Decode kernels
/// convert codes again for each block of rows.) `f32_alone`: of a family that computes codes itself
/// for any other q.
class ConvertedFamily final : public Family {
 public:
  explicit ConvertedFamily(const Family& forward, bool f32_alone = false)
      : forward_(forward), f32_alone_(f32_alone) {}

  bool is_for(const Problem& problem) const override;
  std::string rejects(const Problem& problem) const override;
  Candidates candidates(const Problem& problem, const Card& card,
                        std::vector<std::string>* rejected) const override;
  Candidates reachable(const Problem& problem, const Card& card) const override;

 private:
  const Family& forward_;
  bool f32_alone_;
};

/// The kernel that converts.
KernelUse convert_kernel(const OperandTypes& dtypes);

}  // namespace fulgur::cuda

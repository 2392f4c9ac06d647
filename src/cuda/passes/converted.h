#pragma once

#include "cuda/common/family.h"

namespace fulgur::cuda {

/// A family for k and v of codes, and q of bf16 or f32: a kernel converts k and v to the dtype of
/// q, once for all rows of q, and a kernel of `forward` computes the call on them. (Decode kernels
/// convert codes again for each block of rows.)
class ConvertedFamily final : public Family {
 public:
  explicit ConvertedFamily(const Family& forward) : forward_(forward) {}

  bool is_for(const Problem& problem) const override;
  std::string rejects(const Problem& problem) const override;
  Candidates candidates(const Problem& problem, const Card& card,
                        std::vector<std::string>* rejected) const override;

 private:
  const Family& forward_;
};

/// The kernel that converts.
KernelUse convert_kernel(const OperandTypes& dtypes);

}  // namespace fulgur::cuda

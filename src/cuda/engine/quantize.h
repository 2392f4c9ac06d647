#pragma once

#include "base/hadamard.h"
#include "base/quantize.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Puts kernels on the stream that make codes of numbers, or numbers of codes.
void quantize(const QuantizeCall& call, const Run& run);
void dequantize(const DequantizeCall& call, const Run& run);
void hadamard(const HadamardCall& call, const Run& run);

}  // namespace fulgur::cuda

#pragma once

#include <memory>

#include "base/hadamard.h"
#include "base/quantize.h"
#include "cuda/device/gpu.h"
#include "engine/engine.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Puts kernels on the stream that make codes of numbers, or numbers of codes.
void quantize(const QuantizeCall& call, const Run& run);
void dequantize(const DequantizeCall& call, const Run& run);
void hadamard(const HadamardCall& call, const Run& run);

/// Loads the kernels of calls over such codes.
std::unique_ptr<const CodeSteps> code_steps(const Problem& problem, Gpu& gpu);

}  // namespace fulgur::cuda

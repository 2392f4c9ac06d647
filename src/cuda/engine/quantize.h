#pragma once

#include <memory>

#include "base/hadamard.h"
#include "base/quantize.h"
#include "cuda/device/gpu.h"
#include "engine/engine.h"
#include "fulgur/attention.h"

namespace fulgur::cuda {

/// Launches the kernels that quantize or dequantize tensors.
void quantize(const QuantizeCall& call, const Run& run);
void dequantize(const DequantizeCall& call, const Run& run);
void hadamard(const HadamardCall& call, const Run& run);

/// The steps of calls over quantized tensors other than attention. Loads their kernels.
std::unique_ptr<const CodeSteps> code_steps(const Problem& problem, Gpu& gpu);

}  // namespace fulgur::cuda

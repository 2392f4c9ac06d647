// Where operands of warpgroup products lie.
#pragma once
#include "device/warp.cuh"
#include "sm90/ptx/wgmma.cuh"

// Low word of the descriptor of an operand, in a uniform register.
__device__ __forceinline__ u32 uniform_descriptor(u32 shared, u32 leading_bytes) {
  return u32(uniform(operand_descriptor(shared, leading_bytes)));
}

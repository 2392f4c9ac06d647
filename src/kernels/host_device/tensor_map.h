// Tensor maps of tensors that TMA reads and writes.
//
// Rank 4, dims innermost first {dim, seqlen, heads, batch}, element strides 1, interleave none,
// swizzle 128B, L2 promotion 256B, out-of-bounds fill zero. Byte strides are those of seqlen, heads and batch
// (multiples of 16; the base too). Packed: seqlen extent = total rows, batch extent = 1. Extents are the true d / dv
// (not rounded) and the true seqlen.
#pragma once

// A CUtensorMap: filled by cuTensorMapEncodeTiled, opaque here.
struct alignas(64) TensorMapBlob {
  unsigned long long words[16];
};

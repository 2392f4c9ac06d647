// Arguments of the kernels of standard attention, the same for the host and the device. S, P, dP and dS are matrices
// [b, hq, sq, stride] in memory. S has f32, because LSE is computed from its scores; the others have the dtype of q. A
// row of P replaces the row of S and begins at the same address.
//
// kernel_config.h has the constants of every kernel (sm90/forward/params.h) and for papers/product.cu
//   kColumns        columns of C that a CTA computes: 64 or 128
//   kTransposedA    1: A is in memory as [k, m], else as [m, k]
//   kTransposedB    1: B is in memory as [n, k], else as [k, n]
//   kScores         1: C is S: f32, with -inf where the mask hides a key
#pragma once
#include "host_device/attention_params.h"

// C = scale A B for every head of C, or the sum of several such products.
struct ProductParams : CallParams {
  StridedTensor a, b, c;
  int a_group, b_group;  // products that use the same head of A, and of B
  int summed;            // products whose sum is a head of C: one for each q head of a kv head in dK and dV, else 1
  int heads;             // of C
  int m, n, depth;       // C is [m, n], depth the columns of A
  float scale;
};

// P = softmax(S), which replaces S, and LSE; dS = P o (dP - D), which replaces dP, with D = P . dP - dLSE.
struct SoftmaxParams {
  float* s;
  void* dp;
  float* lse;         // null: not computed
  const float* dlse;  // null: 0
  long long stride;   // distance of rows, in elements: the same number for S and dP
  long long lse_batch_stride, lse_head_stride, dlse_batch_stride, dlse_head_stride;
  int rows;           // b * hq * sq
  int hq, sq, sk;
};

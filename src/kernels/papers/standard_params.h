// Arguments of the kernels of standard attention, the same for the host and the device. S, P, dP and dS are matrices
// [b, hq, sq, stride] in memory: S of f32, as LSE is of its scores, the others of elements of q. A row of P begins
// where that of S did.
//
// kernel_config.h has the constants of every kernel (sm90/forward/params.h) and for papers/product.cu
//   kColumns        of C that a CTA computes: 64 or 128
//   kTransposedA    1: memory has A [k, m], else [m, k]
//   kTransposedB    1: memory has B [n, k], else [k, n]
//   kScores         1: C is S: f32, and -inf where the mask hides a key
#pragma once
#include "host_device/attention_params.h"

// C = scale A B of every head of C.
struct ProductParams : CallParams {
  StridedTensor a, b, c;
  int a_group, b_group;  // heads of the product that share a head of A, of B
  int sums;              // of so many products a head of C is the sum: those of the q heads of a kv head
  int heads;             // of C
  int m, n, depth;       // C is [m, n], depth the columns of A
  float scale;
};

// P = softmax(S) in the place of S, and LSE; dS = P o (dP - D) in the place of dP, D = P . dP - dLSE.
struct SoftmaxParams {
  float* s;
  void* dp;
  float* lse;         // null: nobody wants it
  const float* dlse;  // null: 0
  long long stride;   // elements of a row of S, and of dP
  long long lse_batch_stride, lse_head_stride, dlse_batch_stride, dlse_head_stride;
  int rows;           // b * hq * sq
  int hq, sq, sk;
};

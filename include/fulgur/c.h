#ifndef FULGUR_C_H_
#define FULGUR_C_H_

/// The C API, on DLPack tensors. Every function returns a status; the message of the last failure
/// in this thread is fulgur_last_error(). Shapes, dtypes and meaning are those of attention.h.

#include <dlpack/dlpack.h>
#include <stddef.h>
#include <stdint.h>

#include "fulgur/export.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum fulgur_status {
  FULGUR_OK = 0,
  FULGUR_INVALID_ARGUMENT = 1,
  FULGUR_UNSUPPORTED = 2,
  FULGUR_UNAVAILABLE = 3,
  FULGUR_OUT_OF_MEMORY = 4,
  FULGUR_INTERNAL = 5
} fulgur_status;

/// Set up by fulgur_options_init; then change what you need. Null tensors are "not given".
typedef struct fulgur_options {
  size_t struct_size;                 ///< sizeof(fulgur_options), set by fulgur_options_init
  int64_t window_left, window_right;  ///< -1 = unbounded; causal is right = 0
  const double* scale;                ///< null = 1 / sqrt(d_qk)
  double softcap;                     ///< 0 = off
  const DLTensor* alibi_slopes;       ///< f32 (hq) or (batch, hq)
  double dropout_p;                   ///< 0 = off
  uint64_t dropout_seed, dropout_offset;
  const DLTensor* cu_seqlens_q;  ///< i32 (batch + 1); with cu_seqlens_k: packed layout
  const DLTensor* cu_seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;  ///< 0 = read from cu_seqlens
  const DLTensor* seqused_k;           ///< i32 (batch)
  int deterministic, invariant;
  int threads;         ///< 0 = all
  const char* engine;  ///< null or "" picks
  void* stream;
} fulgur_options;

FULGUR_API void fulgur_options_init(fulgur_options* options);

/// out, lse <- attention(q, k, v). lse may be null; options may be null for the defaults.
FULGUR_API fulgur_status fulgur_forward(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                                        const DLTensor* out, const DLTensor* lse,
                                        const fulgur_options* options);

/// dq, dk, dv <- gradients, given dout and the forward pass's out and lse.
FULGUR_API fulgur_status fulgur_backward(const DLTensor* dout, const DLTensor* q, const DLTensor* k,
                                         const DLTensor* v, const DLTensor* out,
                                         const DLTensor* lse, const DLTensor* dq,
                                         const DLTensor* dk, const DLTensor* dv,
                                         const fulgur_options* options);

/// Combines `count` partial results over disjoint keys into out, lse (lse may be null); see
/// merge.h.
FULGUR_API fulgur_status fulgur_merge(const DLTensor* const* part_outs,
                                      const DLTensor* const* part_lses, size_t count,
                                      const DLTensor* out, const DLTensor* lse);

/// The message of the last failure in this thread ("" before any). Valid until the next call.
FULGUR_API const char* fulgur_last_error(void);
/// "0.1.0".
FULGUR_API const char* fulgur_version(void);

#ifdef __cplusplus
}
#endif

#endif  // FULGUR_C_H_

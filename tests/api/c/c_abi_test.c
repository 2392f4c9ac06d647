/* The C ABI of this version on 64-bit machines: programs that were compiled against it go on
   working. It is checked by compiling. Fields are only ever added at the end of a struct, functions
   and statuses only ever added: then there are new lines here, and what stands here stays. */
#include "fulgur/c.h"

#define SIZE(type, size) _Static_assert(sizeof(type) == (size), #type)
#define FIELD(type, field, offset, size)                                                   \
  _Static_assert(offsetof(type, field) == (offset) && sizeof(((type*)0)->field) == (size), \
                 #type "." #field)
#define VALUE(name, value) _Static_assert((name) == (value), #name)

SIZE(fulgur_status, 4);
VALUE(FULGUR_OK, 0);
VALUE(FULGUR_INVALID_ARGUMENT, 1);
VALUE(FULGUR_UNSUPPORTED, 2);
VALUE(FULGUR_UNAVAILABLE, 3);
VALUE(FULGUR_OUT_OF_MEMORY, 4);
VALUE(FULGUR_INTERNAL, 5);

VALUE(FULGUR_SCORES_SCALED, 0);
VALUE(FULGUR_SCORES_SOFTCAP, 1);
VALUE(FULGUR_SCORES_MASKED, 2);
VALUE(FULGUR_SCORES_PROBABILITIES, 3);

VALUE(FULGUR_ROWS_CONTIGUOUS, 0);
VALUE(FULGUR_ROWS_ZIGZAG, 1);
VALUE(FULGUR_ROWS_BY_AREA, 2);

#if defined(__LP64__)

SIZE(fulgur_distribution, 24);
FIELD(fulgur_distribution, struct_size, 0, 8);
FIELD(fulgur_distribution, sharding, 8, 4);
FIELD(fulgur_distribution, head_ranks, 12, 4);
FIELD(fulgur_distribution, ring, 16, 4);

SIZE(fulgur_options, 144);
FIELD(fulgur_options, struct_size, 0, 8);
FIELD(fulgur_options, window_left, 8, 8);
FIELD(fulgur_options, window_right, 16, 8);
FIELD(fulgur_options, scale, 24, 8);
FIELD(fulgur_options, softcap, 32, 8);
FIELD(fulgur_options, dropout_p, 40, 8);
FIELD(fulgur_options, max_seqlen_q, 48, 8);
FIELD(fulgur_options, max_seqlen_k, 56, 8);
FIELD(fulgur_options, deterministic, 64, 4);
FIELD(fulgur_options, invariant, 68, 4);
FIELD(fulgur_options, threads, 72, 4);
FIELD(fulgur_options, engine, 80, 8);
FIELD(fulgur_options, max_workspace, 88, 8);
FIELD(fulgur_options, chunk, 96, 8);
FIELD(fulgur_options, top_left, 104, 4);
FIELD(fulgur_options, score_mod, 112, 8);
FIELD(fulgur_options, mask_mod, 120, 8);
FIELD(fulgur_options, algorithm, 128, 8);
FIELD(fulgur_options, fast_codes, 136, 4);
FIELD(fulgur_options, hadamard, 140, 4);

SIZE(fulgur_var_len, 40);
FIELD(fulgur_var_len, struct_size, 0, 8);
FIELD(fulgur_var_len, cu_seqlens_q, 8, 8);
FIELD(fulgur_var_len, cu_seqlens_k, 16, 8);
FIELD(fulgur_var_len, seqused_q, 24, 8);
FIELD(fulgur_var_len, seqused_k, 32, 8);

SIZE(fulgur_kv_cache, 40);
FIELD(fulgur_kv_cache, struct_size, 0, 8);
FIELD(fulgur_kv_cache, page_table, 8, 8);
FIELD(fulgur_kv_cache, page_indptr, 16, 8);
FIELD(fulgur_kv_cache, cache_batch_idx, 24, 8);
FIELD(fulgur_kv_cache, leftpad_k, 32, 8);

SIZE(fulgur_shared_prefix, 24);
FIELD(fulgur_shared_prefix, struct_size, 0, 8);
FIELD(fulgur_shared_prefix, prefix_groups, 8, 8);
FIELD(fulgur_shared_prefix, prefix_lens, 16, 8);

SIZE(fulgur_rotary, 40);
FIELD(fulgur_rotary, struct_size, 0, 8);
FIELD(fulgur_rotary, cos, 8, 8);
FIELD(fulgur_rotary, sin, 16, 8);
FIELD(fulgur_rotary, rotary_seqlens, 24, 8);
FIELD(fulgur_rotary, interleaved, 32, 4);

SIZE(fulgur_new_rows, 120);
FIELD(fulgur_new_rows, struct_size, 0, 8);
FIELD(fulgur_new_rows, k_cache, 8, 8);
FIELD(fulgur_new_rows, v_cache, 16, 8);
FIELD(fulgur_new_rows, k_new, 24, 8);
FIELD(fulgur_new_rows, v_new, 32, 8);
FIELD(fulgur_new_rows, cu_seqlens_k_new, 40, 8);
FIELD(fulgur_new_rows, cache_seqlens, 48, 8);
FIELD(fulgur_new_rows, rotary, 56, 8);
FIELD(fulgur_new_rows, k_cache_descale, 64, 8);
FIELD(fulgur_new_rows, v_cache_descale, 72, 8);
FIELD(fulgur_new_rows, k_cache_zero_point, 80, 8);
FIELD(fulgur_new_rows, v_cache_zero_point, 88, 8);
FIELD(fulgur_new_rows, k_cache_format, 96, 8);
FIELD(fulgur_new_rows, v_cache_format, 104, 8);
FIELD(fulgur_new_rows, k_cache_mean, 112, 8);

SIZE(fulgur_descales, 72);
FIELD(fulgur_descales, struct_size, 0, 8);
FIELD(fulgur_descales, q_descale, 8, 8);
FIELD(fulgur_descales, k_descale, 16, 8);
FIELD(fulgur_descales, v_descale, 24, 8);
FIELD(fulgur_descales, k_zero_point, 32, 8);
FIELD(fulgur_descales, v_zero_point, 40, 8);
FIELD(fulgur_descales, k_format, 48, 8);
FIELD(fulgur_descales, v_format, 56, 8);
FIELD(fulgur_descales, k_mean, 64, 8);

SIZE(fulgur_quantize_args, 80);
FIELD(fulgur_quantize_args, struct_size, 0, 8);
FIELD(fulgur_quantize_args, x, 8, 8);
FIELD(fulgur_quantize_args, codes, 16, 8);
FIELD(fulgur_quantize_args, scale, 24, 8);
FIELD(fulgur_quantize_args, zero_point, 32, 8);
FIELD(fulgur_quantize_args, format, 40, 8);
FIELD(fulgur_quantize_args, static_scale, 48, 4);
FIELD(fulgur_quantize_args, stream, 56, 8);
FIELD(fulgur_quantize_args, mean, 64, 8);
FIELD(fulgur_quantize_args, static_mean, 72, 4);

SIZE(fulgur_tensor_binding, 32);
FIELD(fulgur_tensor_binding, struct_size, 0, 8);
FIELD(fulgur_tensor_binding, name, 8, 8);
FIELD(fulgur_tensor_binding, tensor, 16, 8);
FIELD(fulgur_tensor_binding, grad, 24, 8);

SIZE(fulgur_forward_args, 144);
FIELD(fulgur_forward_args, struct_size, 0, 8);
FIELD(fulgur_forward_args, q, 8, 8);
FIELD(fulgur_forward_args, k, 16, 8);
FIELD(fulgur_forward_args, v, 24, 8);
FIELD(fulgur_forward_args, out, 32, 8);
FIELD(fulgur_forward_args, lse, 40, 8);
FIELD(fulgur_forward_args, alibi_slopes, 48, 8);
FIELD(fulgur_forward_args, rng_state, 56, 8);
FIELD(fulgur_forward_args, sinks, 64, 8);
FIELD(fulgur_forward_args, tree_mask, 72, 8);
FIELD(fulgur_forward_args, lengths, 80, 8);
FIELD(fulgur_forward_args, cache, 88, 8);
FIELD(fulgur_forward_args, shared_prefix, 96, 8);
FIELD(fulgur_forward_args, append, 104, 8);
FIELD(fulgur_forward_args, bias, 112, 8);
FIELD(fulgur_forward_args, descales, 120, 8);
FIELD(fulgur_forward_args, tensors, 128, 8);
FIELD(fulgur_forward_args, tensor_count, 136, 8);

SIZE(fulgur_backward_args, 160);
FIELD(fulgur_backward_args, struct_size, 0, 8);
FIELD(fulgur_backward_args, dout, 8, 8);
FIELD(fulgur_backward_args, q, 16, 8);
FIELD(fulgur_backward_args, k, 24, 8);
FIELD(fulgur_backward_args, v, 32, 8);
FIELD(fulgur_backward_args, out, 40, 8);
FIELD(fulgur_backward_args, lse, 48, 8);
FIELD(fulgur_backward_args, dq, 56, 8);
FIELD(fulgur_backward_args, dk, 64, 8);
FIELD(fulgur_backward_args, dv, 72, 8);
FIELD(fulgur_backward_args, alibi_slopes, 80, 8);
FIELD(fulgur_backward_args, rng_state, 88, 8);
FIELD(fulgur_backward_args, sinks, 96, 8);
FIELD(fulgur_backward_args, dlse, 104, 8);
FIELD(fulgur_backward_args, dsinks, 112, 8);
FIELD(fulgur_backward_args, lengths, 120, 8);
FIELD(fulgur_backward_args, bias, 128, 8);
FIELD(fulgur_backward_args, dbias, 136, 8);
FIELD(fulgur_backward_args, tensors, 144, 8);
FIELD(fulgur_backward_args, tensor_count, 152, 8);

SIZE(fulgur_run, 48);
FIELD(fulgur_run, struct_size, 0, 8);
FIELD(fulgur_run, stream, 8, 8);
FIELD(fulgur_run, workspace, 16, 8);
FIELD(fulgur_run, workspace_bytes, 24, 8);
FIELD(fulgur_run, dropout_seed, 32, 8);
FIELD(fulgur_run, dropout_offset, 40, 8);

SIZE(fulgur_append_args, 48);
FIELD(fulgur_append_args, struct_size, 0, 8);
FIELD(fulgur_append_args, rows, 8, 8);
FIELD(fulgur_append_args, cache, 16, 8);
FIELD(fulgur_append_args, q, 24, 8);
FIELD(fulgur_append_args, q_out, 32, 8);
FIELD(fulgur_append_args, cu_seqlens_q, 40, 8);

SIZE(fulgur_scores_args, 112);
FIELD(fulgur_scores_args, struct_size, 0, 8);
FIELD(fulgur_scores_args, q, 8, 8);
FIELD(fulgur_scores_args, k, 16, 8);
FIELD(fulgur_scores_args, scores, 24, 8);
FIELD(fulgur_scores_args, rows, 32, 8);
FIELD(fulgur_scores_args, alibi_slopes, 40, 8);
FIELD(fulgur_scores_args, sinks, 48, 8);
FIELD(fulgur_scores_args, tree_mask, 56, 8);
FIELD(fulgur_scores_args, bias, 64, 8);
FIELD(fulgur_scores_args, lengths, 72, 8);
FIELD(fulgur_scores_args, cache, 80, 8);
FIELD(fulgur_scores_args, stage, 88, 4);
FIELD(fulgur_scores_args, tensors, 96, 8);
FIELD(fulgur_scores_args, tensor_count, 104, 8);

SIZE(fulgur_workspace_need, 32);
FIELD(fulgur_workspace_need, struct_size, 0, 8);
FIELD(fulgur_workspace_need, bytes, 8, 8);
FIELD(fulgur_workspace_need, alignment, 16, 8);
FIELD(fulgur_workspace_need, zeroed_bytes, 24, 8);

#endif

/* Declared once more: a function that has become another one does not compile. */
fulgur_status fulgur_options_init(fulgur_options*, size_t);
fulgur_status fulgur_forward(const fulgur_forward_args*, const fulgur_options*, const fulgur_run*);
fulgur_status fulgur_backward(const fulgur_backward_args*, const fulgur_options*,
                              const fulgur_run*);
fulgur_status fulgur_plan_forward(const fulgur_forward_args*, const fulgur_options*, fulgur_plan**);
fulgur_status fulgur_plan_backward(const fulgur_backward_args*, const fulgur_options*,
                                   fulgur_plan**);
fulgur_status fulgur_plan_forward_for_card(const char*, const fulgur_forward_args*,
                                           const fulgur_options*, fulgur_plan**);
fulgur_status fulgur_plan_backward_for_card(const char*, const fulgur_backward_args*,
                                            const fulgur_options*, fulgur_plan**);
void fulgur_plan_free(fulgur_plan*);
fulgur_status fulgur_plan_run_forward(const fulgur_plan*, const fulgur_forward_args*,
                                      const fulgur_run*);
fulgur_status fulgur_plan_run_backward(const fulgur_plan*, const fulgur_backward_args*,
                                       const fulgur_run*);
fulgur_status fulgur_plan_workspace(const fulgur_plan*, fulgur_workspace_need*);
fulgur_status fulgur_plan_explain(const fulgur_plan*, char*, size_t, size_t*);
fulgur_status fulgur_plan_details(const fulgur_plan*, char*, size_t, size_t*);
fulgur_status fulgur_engines(char*, size_t, size_t*);
fulgur_status fulgur_cuda_allocate(int64_t, int, void**);
fulgur_status fulgur_cuda_free(void*, int);
fulgur_status fulgur_cuda_copy(void*, const void*, int64_t, int);
fulgur_status fulgur_cuda_synchronize(int);
fulgur_status fulgur_prewarm_forward(const fulgur_forward_args*, const fulgur_options*, const char*,
                                     int*, int*);
fulgur_status fulgur_prewarm_backward(const fulgur_backward_args*, const fulgur_options*,
                                      const char*, int*, int*);
fulgur_status fulgur_tune_forward(const fulgur_forward_args*, const fulgur_options*,
                                  const fulgur_run*, char*, size_t, size_t*);
fulgur_status fulgur_tune_backward(const fulgur_backward_args*, const fulgur_options*,
                                   const fulgur_run*, char*, size_t, size_t*);
fulgur_status fulgur_merge(const DLTensor* const*, const DLTensor* const*, size_t, const DLTensor*,
                           const DLTensor*, const fulgur_run*);
fulgur_status fulgur_append(const fulgur_append_args*, const fulgur_options*, const fulgur_run*);
fulgur_status fulgur_scores(const fulgur_scores_args*, const fulgur_options*, const fulgur_run*);
fulgur_status fulgur_expand_blocks(const DLTensor*, const DLTensor*, const DLTensor*);
fulgur_status fulgur_quantize(const fulgur_quantize_args*, const fulgur_options*);
fulgur_status fulgur_hadamard(const DLTensor*, const DLTensor*, int, const fulgur_options*,
                              const fulgur_run*);
fulgur_status fulgur_dequantize(const fulgur_quantize_args*, const fulgur_options*);
fulgur_status fulgur_rows_of(int, int64_t, int, int, const fulgur_options*, int64_t*, size_t,
                             size_t*);
fulgur_status fulgur_group_from_env(double, fulgur_group**);
fulgur_status fulgur_group_connect(int, int, const char*, int, double, fulgur_group**);
fulgur_status fulgur_group_from_nccl(void*, double, fulgur_group**);
fulgur_status fulgur_group_from_exchange(int, int, fulgur_exchange, void*, fulgur_group**);
fulgur_status fulgur_group_place(const fulgur_group*, int*, int*);
void fulgur_group_free(fulgur_group*);
fulgur_status fulgur_group_forward(const fulgur_forward_args*, const fulgur_options*,
                                   const fulgur_group*, const fulgur_distribution*,
                                   const fulgur_run*);
fulgur_status fulgur_group_backward(const fulgur_backward_args*, const fulgur_options*,
                                    const fulgur_group*, const fulgur_distribution*,
                                    const fulgur_run*);
const char* fulgur_last_error(void);
const char* fulgur_version(void);

#ifndef FULGUR_C_H_
#define FULGUR_C_H_

/// The C API, on DLPack tensors. Shapes, dtypes and meaning are those of attention.h.
///
/// Errors. Functions return a status; no exception leaves them. After one other than FULGUR_OK,
/// fulgur_last_error() says in words what was wrong, in the thread that made the call, and no
/// tensor has been written. Statuses may be added: take an unknown one for a failure.
///
/// Memory. Structs, shapes and strings are read during the call and never kept; tensors belong to
/// the caller, and work on a CUDA stream uses their memory until it is done. What is not given is
/// null. "Written" tensors are const because their description is; their data is not.
///
/// Threads. Every function may be called from any thread at any time. Plans may be run by several
/// threads at once; only fulgur_plan_free must come after all else.
///
/// Versions. Each struct begins with its size, as the caller was compiled to know it. A newer
/// library takes an older, shorter struct: what it lacks is not given. An older library refuses a
/// longer one if anything after what it knows is not 0. Fields are only ever added at the end.

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

/// What is computed (fulgur::Options). Set up by fulgur_options_init; then change what you need.
typedef struct fulgur_options {
  size_t struct_size;
  int64_t window_left, window_right;   ///< -1 = unbounded; causal is right = 0
  const double* scale;                 ///< null = 1 / sqrt(d_qk)
  double softcap;                      ///< 0 = off
  double dropout_p;                    ///< 0 = off
  int64_t max_seqlen_q, max_seqlen_k;  ///< 0 = read from cu_seqlens, on the CPU only
  int deterministic, invariant;
  int threads;            ///< 0 = all
  const char* engine;     ///< null or "" picks
  int64_t max_workspace;  ///< bytes that a plan may want besides the tensors; 0 = any number
  int64_t chunk;          ///< a query sees the keys of its chunk of so many alone; 0 = off
  int top_left;           ///< query 0 is at key 0; 0: the last query is at the last key
  /// What scores become, and which keys a query sees, as text (docs/expressions.md), which may
  /// index the tensors of the call; null = they stay, all that the mask shows.
  const char *score_mod, *mask_mod;
  const char* algorithm;  ///< null or "" picks; "standard", "fa1", "fa2", "fa3"
  int fast_codes;         ///< P V of e4m3 codes in e4m3, too, on Hopper GPUs
  int hadamard;           ///< k holds codes of rows that fulgur_hadamard has rotated
} fulgur_options;

/// The defaults, in a struct of `struct_size` = sizeof(fulgur_options) bytes as the caller knows
/// it. All 0 but struct_size is not the same: window_left and window_right would be 0.
FULGUR_API fulgur_status fulgur_options_init(fulgur_options* options, size_t struct_size);

/// Lengths of the sequences (fulgur::VarLen): all 0 but struct_size, then what you need. With
/// tensors on a GPU they may lie on the CPU.
typedef struct fulgur_var_len {
  size_t struct_size;                           ///< sizeof(fulgur_var_len)
  const DLTensor *cu_seqlens_q, *cu_seqlens_k;  ///< i32 (batch + 1): packed layout
  const DLTensor* seqused_q;  ///< i32 (batch): so many first queries of each sequence exist
  const DLTensor* seqused_k;  ///< i32 (batch): so many first keys of each sequence exist
} fulgur_var_len;

/// Where the sequences of caches of K and V lie (fulgur::KvCache), likewise. q may be packed by
/// cu_seqlens_q alone. With a page_table k is (pages, page, hk, d) and seqused_k must be given.
typedef struct fulgur_kv_cache {
  size_t struct_size;               ///< sizeof(fulgur_kv_cache)
  const DLTensor* page_table;       ///< i32 (batch, max_pages); with page_indptr i32 (ids)
  const DLTensor* page_indptr;      ///< i32 (batch + 1): where the ids of each sequence begin
  const DLTensor* cache_batch_idx;  ///< i32 (batch): the row of k and v of each sequence
  const DLTensor* leftpad_k;        ///< i32 (batch), or on the CPU: so many first keys do not exist
} fulgur_kv_cache;

/// Sequences that begin with the same keys (fulgur::SharedPrefix), with a page_table: so many first
/// keys are the same for all sequences from prefix_groups[g] to prefix_groups[g + 1] - 1. Both, on
/// the GPU or on the CPU.
typedef struct fulgur_shared_prefix {
  size_t struct_size;             ///< sizeof(fulgur_shared_prefix)
  const DLTensor* prefix_groups;  ///< i32 (groups + 1)
  const DLTensor* prefix_lens;    ///< i32 (groups)
} fulgur_shared_prefix;

/// What numbers the codes of low-bit formats in q, k and v stand for (fulgur::Descales): all 0 but
/// struct_size, then what you need. e4m3, e5m2 and int8 are dtypes of DLPack. Codes of the other
/// formats come as bytes, u8, whose last dimension counts those of a row.
typedef struct fulgur_descales {
  size_t struct_size;  ///< sizeof(fulgur_descales)
  const DLTensor *q_descale, *k_descale, *v_descale;
  const DLTensor *k_zero_point, *v_zero_point;
  const char *k_format, *v_format;  ///< of bytes: "int4", "q8_0", ...; null = as the dtype says
  const DLTensor* k_mean;           ///< f32 (batch or 1, hk, d): what k has besides
} fulgur_descales;

/// A tensor that the expressions of the options index (fulgur::TensorBinding): all 0 but
/// struct_size, then what you need. Calls take an array of them.
typedef struct fulgur_tensor_binding {
  size_t struct_size;      ///< sizeof(fulgur_tensor_binding), the same in all of an array
  const char* name;        ///< as the expressions have it, [a-z_][a-z0-9_]*
  const DLTensor* tensor;  ///< f32, bf16, f16, f64, i32, i64 or bool, of 1 to 4 dimensions
  const DLTensor* grad;    ///< backward, written: its gradient, f32 or its dtype; may be null
} fulgur_tensor_binding;

/// What rotates new keys, and queries with them (fulgur::Rotary).
typedef struct fulgur_rotary {
  size_t struct_size;              ///< sizeof(fulgur_rotary)
  const DLTensor *cos, *sin;       ///< (positions, rotary_dim / 2)
  const DLTensor* rotary_seqlens;  ///< i32 (batch): first positions; null = cache_seqlens
  int interleaved;                 ///< pairs (2 i, 2 i + 1), or 0: (i, i + rotary_dim / 2)
} fulgur_rotary;

/// New keys and values and the caches that they go to (fulgur::NewRows). With caches on a GPU the
/// lengths (cu_seqlens_k_new, cache_seqlens, rotary_seqlens) may lie on the CPU.
typedef struct fulgur_new_rows {
  size_t struct_size;                 ///< sizeof(fulgur_new_rows)
  const DLTensor *k_cache, *v_cache;  ///< written, where new rows go
  const DLTensor *k_new, *v_new;      ///< (batch, s_new, hk, dim) or packed (total, hk, dim)
  const DLTensor* cu_seqlens_k_new;   ///< i32 (batch + 1): packed layout
  const DLTensor* cache_seqlens;      ///< i32 (batch): rows that the caches have already
  const fulgur_rotary* rotary;        ///< null = keys are not rotated
  /// Scales of caches of codes: written if they are laid out like the rows of the cache, else read.
  /// The formats are those of caches that are bytes.
  const DLTensor *k_cache_descale, *v_cache_descale;
  const DLTensor *k_cache_zero_point, *v_cache_zero_point;
  const char *k_cache_format, *v_cache_format;
  const DLTensor* k_cache_mean;  ///< f32 (batch or 1, hk, d), as k_mean of fulgur_descales
} fulgur_new_rows;

/// Tensors of the forward pass (fulgur::ForwardArgs): all 0 but struct_size, then what you need.
/// Null tensors and structs are "not given". With tensors on a GPU alibi_slopes and sinks may lie
/// on the CPU.
typedef struct fulgur_forward_args {
  size_t struct_size;  ///< sizeof(fulgur_forward_args)
  const DLTensor *q, *k, *v;
  const DLTensor *out, *lse;     ///< written; lse may be null
  const DLTensor* alibi_slopes;  ///< f32 (hq) or (batch, hq)
  const DLTensor* rng_state;     ///< i64 (2): seed and offset of dropout, instead of fulgur_run's
  const DLTensor* sinks;  ///< (hq), f32 or as a 16-bit q: a score of each q head in every softmax,
                          ///< without a value
  const DLTensor* tree_mask;  ///< i64 (batch, sq): which of the last sq keys each query sees
  const fulgur_var_len* lengths;
  const fulgur_kv_cache* cache;
  const fulgur_shared_prefix* shared_prefix;
  /// New keys and values that the call appends before it attends. k, v, cu_seqlens_k and seqused_k
  /// are null then.
  const fulgur_new_rows* append;
  const DLTensor* bias;  ///< (batch, hq, sq, sk), each may be 1: added to the scores, -inf hides;
                         ///< or bool: true is seen
  const fulgur_descales* descales;       ///< of codes in q, k and v
  const fulgur_tensor_binding* tensors;  ///< those that expressions index
  size_t tensor_count;
} fulgur_forward_args;

/// Tensors of the backward pass (fulgur::BackwardArgs), likewise.
typedef struct fulgur_backward_args {
  size_t struct_size;  ///< sizeof(fulgur_backward_args)
  const DLTensor *dout, *q, *k, *v, *out, *lse;
  const DLTensor *dq, *dk, *dv;  ///< written; dq may be null, or dk and dv: not computed then
  const DLTensor* alibi_slopes;
  const DLTensor* rng_state;
  const DLTensor* sinks;   ///< as in fulgur_forward_args
  const DLTensor* dlse;    ///< gradient of lse, shaped like it; null = 0
  const DLTensor* dsinks;  ///< written: (hq) of their dtype, gradient of sinks; may be null
  const fulgur_var_len* lengths;
  const DLTensor* bias;   ///< as in fulgur_forward_args
  const DLTensor* dbias;  ///< written: in the shape of bias, f32 or its dtype; may be null
  const fulgur_tensor_binding* tensors;  ///< those that expressions index
  size_t tensor_count;
} fulgur_backward_args;

/// What else may change from call to call (fulgur::Run): all 0 but struct_size, then what you need.
typedef struct fulgur_run {
  size_t struct_size;       ///< sizeof(fulgur_run)
  void* stream;             ///< cuda: cudaStream_t; null = the default stream
  void* workspace;          ///< for one run at a time; null = the library's own
  int64_t workspace_bytes;  ///< of `workspace`; 0 where that is null
  uint64_t dropout_seed, dropout_offset;
} fulgur_run;

/// What a workspace must be (fulgur::WorkspaceNeed).
typedef struct fulgur_workspace_need {
  size_t struct_size;    ///< sizeof(fulgur_workspace_need), set by the caller
  int64_t bytes;         ///< at least
  int64_t alignment;     ///< of its first byte
  int64_t zeroed_bytes;  ///< at its beginning: 0 before the first run; every run leaves them 0
} fulgur_workspace_need;

/// out, lse <- attention(q, k, v). `options` and `run` may be null for the defaults.
FULGUR_API fulgur_status fulgur_forward(const fulgur_forward_args* args,
                                        const fulgur_options* options, const fulgur_run* run);

/// dq, dk, dv <- gradients, given dout and the forward pass's out and lse.
FULGUR_API fulgur_status fulgur_backward(const fulgur_backward_args* args,
                                         const fulgur_options* options, const fulgur_run* run);

/// Every decision about one shape of call (fulgur::Plan).
typedef struct fulgur_plan fulgur_plan;

/// `*plan` <- a new plan, which the caller frees; null on failure. Tensors may lack their data:
/// only that of lengths and page_indptr on the CPU is read, where it is there. A plan keeps no
/// tensor; its runs may take others of these shapes, and other lengths up to the longest planned.
FULGUR_API fulgur_status fulgur_plan_forward(const fulgur_forward_args* args,
                                             const fulgur_options* options, fulgur_plan** plan);
FULGUR_API fulgur_status fulgur_plan_backward(const fulgur_backward_args* args,
                                              const fulgur_options* options, fulgur_plan** plan);
/// The plan for one card by its name, such as "a100", which need not be here (cuda.h): it is
/// explained, and runs nowhere.
FULGUR_API fulgur_status fulgur_plan_forward_for_card(const char* card,
                                                      const fulgur_forward_args* args,
                                                      const fulgur_options* options,
                                                      fulgur_plan** plan);
FULGUR_API fulgur_status fulgur_plan_backward_for_card(const char* card,
                                                       const fulgur_backward_args* args,
                                                       const fulgur_options* options,
                                                       fulgur_plan** plan);
/// Frees a plan that no run uses any more on the host; what it has put on streams goes on. Null is
/// fine.
FULGUR_API void fulgur_plan_free(fulgur_plan* plan);

/// Runs a plan of that pass on tensors shaped as planned (fulgur::Plan::run). `run` may be null.
FULGUR_API fulgur_status fulgur_plan_run_forward(const fulgur_plan* plan,
                                                 const fulgur_forward_args* args,
                                                 const fulgur_run* run);
FULGUR_API fulgur_status fulgur_plan_run_backward(const fulgur_plan* plan,
                                                  const fulgur_backward_args* args,
                                                  const fulgur_run* run);

/// `*need` <- what a run needs besides its tensors.
FULGUR_API fulgur_status fulgur_plan_workspace(const fulgur_plan* plan,
                                               fulgur_workspace_need* need);

// Functions that give text write as much of it as fits to the `size` bytes of `text`, a 0 at its
// end, and to `*length` the length of the whole without that 0. `text` may be null with `size` 0,
// `length` null: call once for the length, then for the text.

/// The plan in words.
FULGUR_API fulgur_status fulgur_plan_explain(const fulgur_plan* plan, char* text, size_t size,
                                             size_t* length);

/// The plan as data: a JSON object (fulgur::Plan::details).
FULGUR_API fulgur_status fulgur_plan_details(const fulgur_plan* plan, char* text, size_t size,
                                             size_t* length);

/// The engines, a line each: name, tab, description, and where it cannot be used another tab and
/// why.
FULGUR_API fulgur_status fulgur_engines(char* text, size_t size, size_t* length);

// Device memory for programs that have no CUDA of their own (fulgur/cuda.h). FULGUR_UNAVAILABLE
// without a driver or such a device.

/// `*data` <- `bytes` (>= 0) of uninitialized memory of a device, aligned to 256, which the caller
/// frees; null for 0 bytes and on failure.
FULGUR_API fulgur_status fulgur_cuda_allocate(int64_t bytes, int device, void** data);
/// Frees what fulgur_cuda_allocate gave on that device, when its work is done. Null is fine.
FULGUR_API fulgur_status fulgur_cuda_free(void* data, int device);
/// Copies `bytes` between host and device, either way, or within the device; waits for the copy.
/// Work on the default stream comes first.
FULGUR_API fulgur_status fulgur_cuda_copy(void* to, const void* from, int64_t bytes, int device);
/// Waits for all work of a device. FULGUR_INTERNAL for an error of earlier work.
FULGUR_API fulgur_status fulgur_cuda_synchronize(int device);

/// Compiles ahead what calls like this one can need (fulgur::cuda::prewarm). `folder` may be null
/// for the default cache; `compiled` and `present`, which take counts of kernels, may be null.
FULGUR_API fulgur_status fulgur_prewarm_forward(const fulgur_forward_args* args,
                                                const fulgur_options* options, const char* folder,
                                                int* compiled, int* present);
FULGUR_API fulgur_status fulgur_prewarm_backward(const fulgur_backward_args* args,
                                                 const fulgur_options* options, const char* folder,
                                                 int* compiled, int* present);

/// Measures the tiles that can compute this call, for plans to come (fulgur::cuda::tune); tensors
/// that a call writes take the result, and `run` brings no workspace. The text: a line for each
/// tile, the fastest first: family of kernels, Br, Bc, microseconds. A second call for a longer
/// text would measure again, so provide enough room: 4096 bytes hold every tile.
FULGUR_API fulgur_status fulgur_tune_forward(const fulgur_forward_args* args,
                                             const fulgur_options* options, const fulgur_run* run,
                                             char* text, size_t size, size_t* length);
FULGUR_API fulgur_status fulgur_tune_backward(const fulgur_backward_args* args,
                                              const fulgur_options* options, const fulgur_run* run,
                                              char* text, size_t size, size_t* length);

/// Combines `count` partial results over disjoint keys into out, lse (lse may be null); see
/// merge.h. `run` may be null. Errors name part i as parts[i].out and parts[i].lse.
FULGUR_API fulgur_status fulgur_merge(const DLTensor* const* part_outs,
                                      const DLTensor* const* part_lses, size_t count,
                                      const DLTensor* out, const DLTensor* lse,
                                      const fulgur_run* run);

/// What append takes (fulgur::AppendArgs): all 0 but struct_size, then what you need.
typedef struct fulgur_append_args {
  size_t struct_size;  ///< sizeof(fulgur_append_args)
  const fulgur_new_rows* rows;
  const fulgur_kv_cache* cache;  ///< where the caches keep their sequences
  const DLTensor *q, *q_out;     ///< queries to rotate; q_out is written and may be q
  const DLTensor* cu_seqlens_q;  ///< i32 (batch + 1), or on the CPU: q is packed
} fulgur_append_args;

/// Writes new rows into caches of K and V and rotates keys and queries (fulgur::append). Of
/// `options` it takes the mask, the threads and the engine, of `run` the stream; both may be null.
FULGUR_API fulgur_status fulgur_append(const fulgur_append_args* args,
                                       const fulgur_options* options, const fulgur_run* run);

/// How far scores are computed (fulgur::ScoreStage).
typedef enum fulgur_score_stage {
  FULGUR_SCORES_SCALED = 0,
  FULGUR_SCORES_SOFTCAP = 1,
  FULGUR_SCORES_MASKED = 2,
  FULGUR_SCORES_PROBABILITIES = 3
} fulgur_score_stage;

/// What fulgur_scores takes (fulgur::ScoresArgs): all 0 but struct_size, then what you need.
typedef struct fulgur_scores_args {
  size_t struct_size;  ///< sizeof(fulgur_scores_args)
  const DLTensor *q, *k;
  const DLTensor* scores;  ///< written: (batch, hq, rows, sk), f32, f64 where q is
  const DLTensor* rows;    ///< i64 (rows): which queries of each sequence; null = all
  const DLTensor *alibi_slopes, *sinks, *tree_mask, *bias;  ///< as in fulgur_forward_args
  const fulgur_var_len* lengths;
  const fulgur_kv_cache* cache;
  int stage;                             ///< a fulgur_score_stage
  const fulgur_tensor_binding* tensors;  ///< those that expressions index
  size_t tensor_count;
} fulgur_scores_args;

/// scores <- the scores or the probabilities of attention (scores.h). `options` and `run` may be
/// null.
FULGUR_API fulgur_status fulgur_scores(const fulgur_scores_args* args,
                                       const fulgur_options* options, const fulgur_run* run);

/// blocks <- which blocks of queries and keys are seen, of lists of them
/// (fulgur::expand_blocks): bools for mask_mod to index.
FULGUR_API fulgur_status fulgur_expand_blocks(const DLTensor* offsets, const DLTensor* indices,
                                              const DLTensor* blocks);

/// What fulgur_quantize and fulgur_dequantize take (fulgur::QuantizeArgs): all 0 but struct_size,
/// then what you need.
typedef struct fulgur_quantize_args {
  size_t struct_size;     ///< sizeof(fulgur_quantize_args)
  const DLTensor* x;      ///< numbers, (batch, seqlen, heads, dim) or (total, heads, dim)
  const DLTensor* codes;  ///< as k of fulgur_forward_args
  const DLTensor *scale, *zero_point;  ///< may be null
  const char* format;                  ///< of codes that are bytes; null = as the dtype says
  int static_scale;      ///< scale and zero_point are read; 0: they are written (fulgur_quantize)
  void* stream;          ///< cuda: the stream (cudaStream_t) that the work is put on
  const DLTensor* mean;  ///< f32 (batch or 1, heads, dim): what x has besides codes; may be null
  int static_mean;       ///< mean is read; 0: it is written (fulgur_quantize)
} fulgur_quantize_args;

/// codes, scale, zero_point, mean <- x. `options` may be null.
FULGUR_API fulgur_status fulgur_quantize(const fulgur_quantize_args* args,
                                         const fulgur_options* options);
/// x <- the numbers of the codes. `options` may be null.
FULGUR_API fulgur_status fulgur_dequantize(const fulgur_quantize_args* args,
                                           const fulgur_options* options);

/// y <- the rows of x rotated, or rotated back (fulgur::hadamard). `options` and `run` may be
/// null.
FULGUR_API fulgur_status fulgur_hadamard(const DLTensor* x, const DLTensor* y, int inverse,
                                         const fulgur_options* options, const fulgur_run* run);

// Attention over sequences whose rows lie in several processes, on CPUs
// (fulgur/distributed/plan.h). All ranks make the same calls of a group in one order.
// FULGUR_UNAVAILABLE where a rank has left or hangs, from then on.

/// Which rows a rank has (fulgur::Sharding).
typedef enum fulgur_sharding {
  FULGUR_ROWS_CONTIGUOUS = 0,
  FULGUR_ROWS_ZIGZAG = 1,
  FULGUR_ROWS_BY_AREA = 2,
  FULGUR_ROWS_BY_PAGE = 3  ///< of caches; fulgur_group_forward alone
} fulgur_sharding;

/// How rows and heads are shared out (fulgur::Distribution).
typedef struct fulgur_distribution {
  size_t struct_size;  ///< sizeof(fulgur_distribution)
  int sharding;        ///< a fulgur_sharding
  int head_ranks;      ///< ranks that exchange heads for rows; 1: none
  int ring;            ///< keys of one rank at a time come, and results are merged
} fulgur_distribution;

/// `rows` <- as many as fit of the rows of a sequence that a rank has, `*count` <- how many there
/// are; both may be null. Of `options` it takes the mask, null = causal.
FULGUR_API fulgur_status fulgur_rows_of(int sharding, int64_t length, int ranks, int rank,
                                        const fulgur_options* options, int64_t* rows, size_t size,
                                        size_t* count);

/// The processes that compute together (fulgur::Group).
typedef struct fulgur_group fulgur_group;

/// A step of all ranks (fulgur::Exchange): sends[r], of send_bytes[r] bytes, goes to rank r, and
/// receives[r] comes from there. Any result but 0 is the end of the group.
typedef int (*fulgur_exchange)(void* context, const void* const* sends, const size_t* send_bytes,
                               void* const* receives, const size_t* receive_bytes);

/// `*group` <- a group that the caller frees; null on failure. By sockets between all processes of
/// torchrun, mpirun or srun; between those that know where rank 0 listens; by an ncclComm_t of the
/// caller (fulgur::Group::from_nccl); by the caller's function. A rank that makes no step for
/// `deadline` seconds hangs; 0 = 300.
FULGUR_API fulgur_status fulgur_group_from_env(double deadline, fulgur_group** group);
FULGUR_API fulgur_status fulgur_group_connect(int rank, int ranks, const char* host, int port,
                                              double deadline, fulgur_group** group);
FULGUR_API fulgur_status fulgur_group_from_nccl(void* comm, double deadline, fulgur_group** group);
FULGUR_API fulgur_status fulgur_group_from_exchange(int rank, int ranks, fulgur_exchange exchange,
                                                    void* context, fulgur_group** group);
/// `*rank` <- that of this process, `*ranks` <- how many there are.
FULGUR_API fulgur_status fulgur_group_place(const fulgur_group* group, int* rank, int* ranks);
/// Null is fine.
FULGUR_API void fulgur_group_free(fulgur_group* group);

/// fulgur_forward and fulgur_backward by all ranks, of tensors that hold the rows of each; packed
/// ones have the cu_seqlens of whole sequences.
FULGUR_API fulgur_status fulgur_group_forward(const fulgur_forward_args* args,
                                              const fulgur_options* options,
                                              const fulgur_group* group,
                                              const fulgur_distribution* distribution,
                                              const fulgur_run* run);
FULGUR_API fulgur_status fulgur_group_backward(const fulgur_backward_args* args,
                                               const fulgur_options* options,
                                               const fulgur_group* group,
                                               const fulgur_distribution* distribution,
                                               const fulgur_run* run);

/// The message of the last failure in this thread ("" before any), in English. Valid until the
/// thread's next failure or its end.
FULGUR_API const char* fulgur_last_error(void);
/// "0.1.0".
FULGUR_API const char* fulgur_version(void);

#ifdef __cplusplus
}
#endif

#endif  // FULGUR_C_H_

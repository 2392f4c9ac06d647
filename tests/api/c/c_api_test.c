/* The C API, compiled as C and linked like any user's program. */
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "fulgur/c.h"

static int failures = 0;

#define CHECK(condition)                                                             \
  do {                                                                               \
    if (!(condition)) {                                                              \
      printf("%s:%d: failed: %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
             fulgur_last_error());                                                   \
      ++failures;                                                                    \
    }                                                                                \
  } while (0)

enum { kRows = 3, kKeys = 4, kDim = 2 };

static DLTensor tensor(float* data, int ndim, int64_t* shape) {
  DLTensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.device_type = kDLCPU;
  t.ndim = ndim;
  t.dtype.code = kDLFloat;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape; /* strides null: row-major */
  return t;
}

static int near(float a, double b) { return fabs(a - b) < 1e-5; }

/* Attention of one head, causal when asked, by definition. */
static void expected_of(const float* q, int rows, const float* k, const float* v, int keys,
                        int causal, double* out, double* lse) {
  for (int i = 0; i < rows; ++i) {
    double sum = 0, value[kDim] = {0};
    for (int j = 0; j < keys; ++j) {
      if (causal && j > i + keys - rows) continue;
      double s = 0;
      for (int c = 0; c < kDim; ++c) s += q[i * kDim + c] * k[j * kDim + c];
      const double p = exp(s / sqrt(kDim));
      sum += p;
      for (int c = 0; c < kDim; ++c) value[c] += p * v[j * kDim + c];
    }
    lse[i] = log(sum);
    for (int c = 0; c < kDim; ++c) out[i * kDim + c] = sum > 0 ? value[c] / sum : 0;
  }
}

static void expected(const float* q, const float* k, const float* v, int causal, double* out,
                     double* lse) {
  expected_of(q, kRows, k, v, kKeys, causal, out, lse);
}

static DLTensor int_tensor(int32_t* data, int64_t* shape) {
  DLTensor t = tensor(NULL, 1, shape);
  t.data = data;
  t.dtype.code = kDLInt;
  return t;
}

/* Numbers around 0 that repeat late. */
static void fill(float* data, int count, int seed) {
  for (int n = 0; n < count; ++n) data[n] = (float)((n * 37 + seed * 11) % 41 - 20) / 16;
}

/* A plan of packed sequences, run with other lengths and data in memory of ours. */
static void plan_of_changing_lengths(void) {
  enum { kTotalQ = 7, kTotalK = 9, kBatch = 2 };
  float q[kTotalQ * kDim], k[kTotalK * kDim], v[kTotalK * kDim], out[kTotalQ * kDim], lse[kTotalQ];
  int32_t cu_q[] = {0, 4, 7}, cu_k[] = {0, 5, 9};
  int64_t q_shape[] = {kTotalQ, 1, kDim}, k_shape[] = {kTotalK, 1, kDim},
          lse_shape[] = {1, kTotalQ}, cu_shape[] = {kBatch + 1};
  DLTensor tq = tensor(q, 3, q_shape), tk = tensor(k, 3, k_shape), tv = tensor(v, 3, k_shape),
           to = tensor(out, 3, q_shape), tl = tensor(lse, 2, lse_shape),
           tcq = int_tensor(cu_q, cu_shape), tck = int_tensor(cu_k, cu_shape);
  const fulgur_var_len lengths = {
      .struct_size = sizeof lengths, .cu_seqlens_q = &tcq, .cu_seqlens_k = &tck};
  const fulgur_forward_args args = {.struct_size = sizeof args,
                                    .q = &tq,
                                    .k = &tk,
                                    .v = &tv,
                                    .out = &to,
                                    .lse = &tl,
                                    .lengths = &lengths};
  fulgur_options options;
  CHECK(fulgur_options_init(&options, sizeof options) == FULGUR_OK);
  options.window_right = 0;
  fulgur_plan* plan = NULL;
  CHECK(options.max_workspace == 0);
  options.max_workspace = 1;
  CHECK(fulgur_plan_forward(&args, &options, &plan) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "max_workspace: got 1 bytes, want at least ", 42) == 0);
  options.max_workspace = 1 << 30;
  CHECK(fulgur_plan_forward(&args, &options, &plan) == FULGUR_OK);
  memset(&options, 0xff, sizeof options); /* nothing of it is kept */

  fulgur_workspace_need need = {.struct_size = sizeof need};
  CHECK(fulgur_plan_workspace(plan, &need) == FULGUR_OK);
  CHECK(need.bytes >= 0 && need.alignment >= 1 && need.zeroed_bytes <= need.bytes);
  char* memory = calloc((size_t)(need.bytes + need.alignment), 1);
  fulgur_run run = {.struct_size = sizeof run};
  run.workspace = memory + need.alignment - (size_t)memory % (size_t)need.alignment;
  run.workspace_bytes = need.bytes;

  const int32_t values[][4] = {{4, 7, 5, 9}, {1, 3, 4, 6}, {0, 4, 0, 5}, {3, 7, 3, 3}};
  for (int n = 0; n < 4; ++n) {
    cu_q[1] = values[n][0], cu_q[2] = values[n][1];
    cu_k[1] = values[n][2], cu_k[2] = values[n][3];
    fill(q, kTotalQ * kDim, n);
    fill(k, kTotalK * kDim, n + 7);
    fill(v, kTotalK * kDim, n + 9);
    memset(out, 0x7f, sizeof out);
    CHECK(fulgur_plan_run_forward(plan, &args, &run) == FULGUR_OK);
    double want[kTotalQ * kDim] = {0}, want_lse[kTotalQ];
    for (int i = 0; i < kTotalQ; ++i) want_lse[i] = -INFINITY; /* rows after the last sequence */
    for (int b = 0; b < kBatch; ++b) {
      expected_of(q + cu_q[b] * kDim, cu_q[b + 1] - cu_q[b], k + cu_k[b] * kDim, v + cu_k[b] * kDim,
                  cu_k[b + 1] - cu_k[b], 1, want + cu_q[b] * kDim, want_lse + cu_q[b]);
    }
    for (int i = 0; i < kTotalQ * kDim; ++i) CHECK(near(out[i], want[i]));
    for (int i = 0; i < kTotalQ; ++i) CHECK(lse[i] == want_lse[i] || near(lse[i], want_lse[i]));
  }

  /* Longer than planned, and too small a workspace: no output is touched. */
  memset(out, 0x7f, sizeof out);
  memset(lse, 0x7f, sizeof lse);
  cu_q[1] = 1, cu_q[2] = 7;
  CHECK(fulgur_plan_run_forward(plan, &args, &run) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "cu_seqlens_q: ", 14) == 0);
  cu_q[1] = 4;
  if (need.bytes > 0) {
    run.workspace_bytes = need.bytes - 1;
    CHECK(fulgur_plan_run_forward(plan, &args, &run) == FULGUR_INVALID_ARGUMENT);
    CHECK(strncmp(fulgur_last_error(), "workspace: ", 11) == 0);
  }
  run.workspace = NULL;
  run.workspace_bytes = 1;
  CHECK(fulgur_plan_run_forward(plan, &args, &run) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "workspace: ", 11) == 0);
  for (size_t n = 0; n < sizeof out; ++n) CHECK(((const char*)out)[n] == 0x7f);
  for (size_t n = 0; n < sizeof lse; ++n) CHECK(((const char*)lse)[n] == 0x7f);
  free(memory);
  fulgur_plan_free(plan);
}

/* Sizes up to the bound of a tensor are explained, and those above it an error. */
static void huge_sizes(void) {
  int64_t q_shape[] = {1, 1, 1, 1}, k_shape[] = {1, (int64_t)1 << 45, 1, 1};
  const DLTensor tq = tensor(NULL, 4, q_shape), tk = tensor(NULL, 4, k_shape);
  const fulgur_forward_args args = {
      .struct_size = sizeof args, .q = &tq, .k = &tk, .v = &tk, .out = &tq};
  for (int reference = 0; reference < 2; ++reference) {
    fulgur_options options;
    CHECK(fulgur_options_init(&options, sizeof options) == FULGUR_OK);
    options.engine = reference ? "reference" : "cpu";
    options.threads = 2;
    fulgur_plan* plan = NULL;
    CHECK(fulgur_plan_forward(&args, &options, &plan) == FULGUR_OK);
    char text[4096];
    CHECK(fulgur_plan_explain(plan, text, sizeof text, NULL) == FULGUR_OK);
    CHECK(strstr(text, " -") == NULL);
    fulgur_plan_free(plan);
  }
  ++k_shape[1];
  fulgur_plan* plan = NULL;
  CHECK(fulgur_plan_forward(&args, NULL, &plan) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "k: ", 3) == 0 && plan == NULL);
}

/* A plan for a card that is not here, by one of the papers' algorithms. */
static void cards(void) {
  int64_t shape[] = {2, 1024, 8, 64};
  DLTensor t = tensor(NULL, 4, shape);
  t.device = (DLDevice){kDLCUDA, 0};
  t.dtype = (DLDataType){kDLBfloat, 16, 1};
  const fulgur_forward_args args = {
      .struct_size = sizeof args, .q = &t, .k = &t, .v = &t, .out = &t};
  fulgur_options options;
  CHECK(fulgur_options_init(&options, sizeof options) == FULGUR_OK);
  options.algorithm = "fa1";
  fulgur_plan* plan = NULL;
  CHECK(fulgur_plan_forward_for_card("a100", &args, &options, &plan) == FULGUR_OK);
  char text[4096];
  CHECK(fulgur_plan_explain(plan, text, sizeof text, NULL) == FULGUR_OK);
  CHECK(strstr(text, "one A100") != NULL && strstr(text, "FlashAttention") != NULL);
  fulgur_plan_free(plan);
  CHECK(fulgur_plan_forward_for_card("a1", &args, &options, &plan) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "card: got \"a1\", want one of ", 28) == 0 && plan == NULL);
  CHECK(fulgur_plan_forward_for_card(NULL, &args, &options, &plan) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "card: got null", 14) == 0);
  options.algorithm = "fa4";
  CHECK(fulgur_plan_forward_for_card("a100", &args, &options, &plan) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "algorithm: got \"fa4\"", 20) == 0);
}

/* Texts: the length first, then all of it, then what fits. */
static void texts(const fulgur_forward_args* args) {
  fulgur_plan* plan = NULL;
  CHECK(fulgur_plan_forward(args, NULL, &plan) == FULGUR_OK);
  size_t length = 0, again = 0;
  CHECK(fulgur_plan_explain(plan, NULL, 0, &length) == FULGUR_OK && length > 20);
  char *text = malloc(length + 1), few[8];
  memset(text, 'x', length + 1);
  CHECK(fulgur_plan_explain(plan, text, length + 1, &again) == FULGUR_OK);
  CHECK(again == length && strlen(text) == length);
  CHECK(strncmp(text, "forward attention, f32 on cpu", 29) == 0);
  memset(few, 'x', sizeof few);
  CHECK(fulgur_plan_explain(plan, few, 5, NULL) == FULGUR_OK);
  CHECK(memcmp(few, "forw\0xxx", 8) == 0);
  CHECK(fulgur_plan_explain(NULL, text, length, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "plan: ", 6) == 0);
  free(text);
  CHECK(fulgur_plan_details(plan, NULL, 0, &length) == FULGUR_OK && length > 20);
  text = malloc(length + 1);
  CHECK(fulgur_plan_details(plan, text, length + 1, NULL) == FULGUR_OK);
  CHECK(strncmp(text, "{\"engine\": \"cpu\", \"call\": {\"pass\": \"forward\"", 44) == 0);
  CHECK(text[length - 1] == '}');
  CHECK(fulgur_plan_details(NULL, text, length, NULL) == FULGUR_INVALID_ARGUMENT);
  free(text);
  fulgur_plan_free(plan);
  fulgur_plan_free(NULL);

  char engines[4096];
  CHECK(fulgur_engines(engines, sizeof engines, &length) == FULGUR_OK && length < sizeof engines);
  CHECK(strstr(engines, "cpu\t") != NULL && strstr(engines, "reference\t") != NULL);
  CHECK(engines[length - 1] == '\n');
}

/* One plan in several threads, each with data of its own and a failure of its own. */
typedef struct {
  const fulgur_plan* plan;
  const fulgur_forward_args* args;
  int number;
  int failed; /* CHECK counts in the first thread */
} Worker;

static void* work(void* given) {
  Worker* w = given;
  w->failed = strcmp(fulgur_last_error(), "") != 0;
  float q[kRows * kDim], out[kRows * kDim];
  fill(q, kRows * kDim, w->number);
  DLTensor tq = *w->args->q, to = *w->args->out;
  tq.data = q;
  to.data = out;
  fulgur_forward_args args = *w->args;
  args.q = &tq;
  args.out = &to;
  args.lse = NULL;
  double want[kRows * kDim], want_lse[kRows];
  expected(q, args.k->data, args.v->data, 0, want, want_lse);
  for (int times = 0; times < 100; ++times) {
    w->failed |= fulgur_plan_run_forward(w->plan, &args, NULL) != FULGUR_OK;
    for (int n = 0; n < kRows * kDim; ++n) w->failed |= !near(out[n], want[n]);
  }
  args.out = w->number % 2 ? NULL : &to;
  args.k = w->number % 2 ? args.k : NULL;
  w->failed |= fulgur_plan_run_forward(w->plan, &args, NULL) != FULGUR_INVALID_ARGUMENT;
  w->failed |= strncmp(fulgur_last_error(), w->number % 2 ? "out: " : "k: ", 3) != 0;
  return NULL;
}

static void plan_in_threads(const fulgur_forward_args* given) {
  fulgur_forward_args args = *given;
  args.lse = NULL;
  fulgur_options options;
  CHECK(fulgur_options_init(&options, sizeof options) == FULGUR_OK);
  options.threads = 1;
  fulgur_plan* plan = NULL;
  CHECK(fulgur_plan_forward(&args, &options, &plan) == FULGUR_OK);
  CHECK(fulgur_forward(NULL, NULL, NULL) == FULGUR_INVALID_ARGUMENT);
  enum { kThreads = 4 };
  pthread_t threads[kThreads];
  Worker workers[kThreads];
  for (int n = 0; n < kThreads; ++n) {
    workers[n] = (Worker){plan, &args, n, 0};
    CHECK(pthread_create(&threads[n], NULL, work, &workers[n]) == 0);
  }
  for (int n = 0; n < kThreads; ++n) {
    CHECK(pthread_join(threads[n], NULL) == 0);
    CHECK(!workers[n].failed);
  }
  CHECK(strncmp(fulgur_last_error(), "args: ", 6) == 0); /* still this thread's own */
  fulgur_plan_free(plan);
}

/* No GPU computes f64, and none is asked for tensors on the CPU. */
static void functions_of_gpus(void) {
  double numbers[5][kRows * kDim] = {{0}}, sums[kRows] = {0};
  int64_t shape[] = {1, kRows, 1, kDim}, sums_shape[] = {1, 1, kRows};
  DLTensor t[5], lse = tensor(NULL, 3, sums_shape);
  for (int n = 0; n < 5; ++n) {
    t[n] = tensor(NULL, 4, shape);
    t[n].data = numbers[n];
    t[n].dtype.bits = 64;
  }
  lse.data = sums;
  lse.dtype.bits = 64;
  const fulgur_forward_args forward = {
      .struct_size = sizeof forward, .q = &t[0], .k = &t[0], .v = &t[0], .out = &t[1], .lse = &lse};
  const fulgur_backward_args backward = {.struct_size = sizeof backward,
                                         .dout = &t[0],
                                         .q = &t[0],
                                         .k = &t[0],
                                         .v = &t[0],
                                         .out = &t[1],
                                         .lse = &lse,
                                         .dq = &t[2],
                                         .dk = &t[3],
                                         .dv = &t[4]};
  int compiled = 7, present = 7;
  char text[4096] = "untouched";
  size_t length = 7;
  const fulgur_status prewarmed = fulgur_prewarm_forward(&forward, NULL, NULL, &compiled, &present);
  CHECK(prewarmed == FULGUR_UNSUPPORTED || prewarmed == FULGUR_UNAVAILABLE);
  CHECK(strcmp(fulgur_last_error(), "") != 0);
  const fulgur_status tuned = fulgur_tune_forward(&forward, NULL, NULL, text, sizeof text, &length);
  CHECK(tuned == FULGUR_UNSUPPORTED || tuned == FULGUR_UNAVAILABLE);
  const fulgur_status prewarmed_gradient =
      fulgur_prewarm_backward(&backward, NULL, NULL, &compiled, &present);
  CHECK(prewarmed_gradient == FULGUR_UNSUPPORTED || prewarmed_gradient == FULGUR_UNAVAILABLE);
  const fulgur_status tuned_gradient =
      fulgur_tune_backward(&backward, NULL, NULL, text, sizeof text, &length);
  CHECK(tuned_gradient == FULGUR_UNSUPPORTED || tuned_gradient == FULGUR_UNAVAILABLE);
  CHECK(compiled == 7 && present == 7 && length == 7 && strcmp(text, "untouched") == 0);
  fulgur_options options;
  CHECK(fulgur_options_init(&options, sizeof options) == FULGUR_OK);
  options.engine = "cuda";
  const fulgur_status forced = fulgur_forward(&forward, &options, NULL);
  CHECK(forced == FULGUR_UNSUPPORTED || forced == FULGUR_UNAVAILABLE);
  CHECK(strstr(fulgur_last_error(), "cuda") != NULL);
}

/* Device memory: what is refused, what is unavailable, and there and back where there is a GPU. */
static void device_memory(void) {
  enum { kNowhere = 1000 };
  char from[300], to[300];
  for (size_t n = 0; n < sizeof from; ++n) from[n] = (char)n;
  memset(to, 0x7f, sizeof to);

  void* data = from;
  CHECK(fulgur_cuda_allocate(16, 0, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "data: got null, want where to put it") == 0);
  CHECK(fulgur_cuda_allocate(-1, 0, &data) == FULGUR_INVALID_ARGUMENT && data == NULL);
  CHECK(strcmp(fulgur_last_error(), "bytes: got -1, want >= 0") == 0);
  CHECK(fulgur_cuda_copy(to, from, -2, 0) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "bytes: got -2, want >= 0") == 0);
  CHECK(fulgur_cuda_copy(NULL, from, 1, 0) == FULGUR_INVALID_ARGUMENT);
  CHECK(strstr(fulgur_last_error(), "to: ") == fulgur_last_error());
  CHECK(fulgur_cuda_copy(to, NULL, 1, 0) == FULGUR_INVALID_ARGUMENT);
  CHECK(strstr(fulgur_last_error(), "from: ") == fulgur_last_error());
  CHECK(fulgur_cuda_free(NULL, kNowhere) == FULGUR_OK);

  data = from;
  CHECK(fulgur_cuda_allocate(16, kNowhere, &data) == FULGUR_UNAVAILABLE && data == NULL);
  CHECK(strcmp(fulgur_last_error(), "") != 0);
  CHECK(fulgur_cuda_copy(to, from, sizeof to, kNowhere) == FULGUR_UNAVAILABLE);
  CHECK(fulgur_cuda_free(from, kNowhere) == FULGUR_UNAVAILABLE);
  CHECK(fulgur_cuda_synchronize(kNowhere) == FULGUR_UNAVAILABLE);

  data = from;
  const fulgur_status allocated = fulgur_cuda_allocate(2 * sizeof from, 0, &data);
  if (allocated == FULGUR_OK) {
    char* upper = (char*)data + sizeof from;
    CHECK(data != NULL && (size_t)data % 256 == 0);
    CHECK(fulgur_cuda_copy(data, from, sizeof from, 0) == FULGUR_OK);
    CHECK(fulgur_cuda_copy(upper, data, sizeof from, 0) == FULGUR_OK);
    CHECK(fulgur_cuda_copy(to, upper, sizeof to, 0) == FULGUR_OK);
    CHECK(memcmp(to, from, sizeof to) == 0);
    CHECK(fulgur_cuda_synchronize(0) == FULGUR_OK);
    CHECK(fulgur_cuda_free(data, 0) == FULGUR_OK);
    CHECK(fulgur_cuda_allocate(0, 0, &data) == FULGUR_OK && data == NULL);
  } else {
    CHECK(allocated == FULGUR_UNAVAILABLE && data == NULL);
    CHECK(fulgur_cuda_copy(to, from, sizeof to, 0) == FULGUR_UNAVAILABLE);
    CHECK(fulgur_cuda_synchronize(0) == FULGUR_UNAVAILABLE);
    for (size_t n = 0; n < sizeof to; ++n) CHECK(to[n] == 0x7f);
  }
}

/* Lists of blocks of keys, as bools that a mask_mod may index. */
static void lists_of_blocks(void) {
  int32_t offsets[] = {0, 1, 3}, indices[] = {0, 0, 1};
  int64_t three[] = {3}, two_two[] = {2, 2};
  uint8_t blocks[] = {9, 9, 9, 9};
  const DLTensor to = int_tensor(offsets, three), ti = int_tensor(indices, three);
  DLTensor tb = tensor(NULL, 2, two_two);
  tb.data = blocks;
  tb.dtype.code = 6; /* kDLBool, which older headers lack */
  tb.dtype.bits = 8;
  CHECK(fulgur_expand_blocks(&to, &ti, &tb) == FULGUR_OK);
  CHECK(blocks[0] == 1 && blocks[1] == 0 && blocks[2] == 1 && blocks[3] == 1);
  indices[2] = 2;
  CHECK(fulgur_expand_blocks(&to, &ti, &tb) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "indices: got 2 at 2, want blocks of keys from 0 to 1") == 0);
  CHECK(fulgur_expand_blocks(NULL, &ti, &tb) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "offsets: ", 9) == 0);
}

/* Scores and masks by text: causal as the option is, a bias of keys with its gradient. */
static void expressions(const fulgur_forward_args* given, const fulgur_backward_args* of_plain) {
  float *out = given->out->data, *lse = given->lse->data, *q = given->q->data, *k = given->k->data,
        *v = given->v->data, gate[kKeys] = {0.5f, -1, 2, 0}, dgate[kKeys];
  int64_t gate_shape[] = {kKeys};
  const DLTensor tg = tensor(gate, 1, gate_shape), tdg = tensor(dgate, 1, gate_shape);
  double want[kRows * kDim], want_lse[kRows];
  fulgur_options options;
  CHECK(fulgur_options_init(&options, sizeof options) == FULGUR_OK);
  CHECK(options.score_mod == NULL && options.mask_mod == NULL);
  options.mask_mod = "delta <= 0";
  CHECK(fulgur_forward(given, &options, NULL) == FULGUR_OK);
  expected(q, k, v, 1, want, want_lse);
  for (int n = 0; n < kRows * kDim; ++n) CHECK(near(out[n], want[n]));
  options.struct_size = offsetof(fulgur_options, score_mod); /* of a caller that has no texts */
  CHECK(fulgur_forward(given, &options, NULL) == FULGUR_OK);
  expected(q, k, v, 0, want, want_lse);
  for (int n = 0; n < kRows * kDim; ++n) CHECK(near(out[n], want[n]));
  options.struct_size = sizeof options;

  /* d = 2: what q k^T / sqrt(2) + gate[k] makes is a third column of q and k. */
  fulgur_tensor_binding binding = {
      .struct_size = sizeof binding, .name = "gate", .tensor = &tg, .grad = NULL};
  fulgur_forward_args args = *given;
  args.tensors = &binding;
  args.tensor_count = 1;
  options.score_mod = "score + gate[k]";
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_OK);
  double P[kRows][kKeys];
  for (int i = 0; i < kRows; ++i) {
    double sum = 0, value[kDim] = {0};
    for (int j = 0; j < kKeys; ++j) {
      const double s = (q[i * kDim] * k[j * kDim] + q[i * kDim + 1] * k[j * kDim + 1]) / sqrt(kDim);
      P[i][j] = j <= i + kKeys - kRows ? exp(s + gate[j]) : 0;
      sum += P[i][j];
      for (int c = 0; c < kDim; ++c) value[c] += P[i][j] * v[j * kDim + c];
    }
    CHECK(near(lse[i], log(sum)));
    for (int c = 0; c < kDim; ++c) CHECK(near(out[i * kDim + c], value[c] / sum));
    for (int j = 0; j < kKeys; ++j) P[i][j] /= sum;
  }

  /* Probabilities, and the gradient: the sum of dS over the queries. */
  float scores[kRows * kKeys];
  int64_t scores_shape[] = {1, 1, kRows, kKeys};
  const DLTensor ts = tensor(scores, 4, scores_shape);
  const fulgur_scores_args of_scores = {.struct_size = sizeof of_scores,
                                        .q = given->q,
                                        .k = given->k,
                                        .scores = &ts,
                                        .stage = FULGUR_SCORES_PROBABILITIES,
                                        .tensors = &binding,
                                        .tensor_count = 1};
  CHECK(fulgur_scores(&of_scores, &options, NULL) == FULGUR_OK);
  for (int n = 0; n < kRows * kKeys; ++n) CHECK(near(scores[n], P[n / kKeys][n % kKeys]));
  fulgur_backward_args gradient = *of_plain;
  gradient.dlse = NULL;
  binding.grad = &tdg;
  gradient.tensors = &binding;
  gradient.tensor_count = 1;
  fulgur_plan* plan = NULL;
  CHECK(fulgur_plan_backward(&gradient, &options, &plan) == FULGUR_OK);
  CHECK(fulgur_plan_run_backward(plan, &gradient, NULL) == FULGUR_OK);
  fulgur_plan_free(plan);
  const float* dout = gradient.dout->data;
  for (int j = 0; j < kKeys; ++j) {
    double sum = 0;
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < kDim; ++c)
        sum += P[i][j] * dout[i * kDim + c] * (v[j * kDim + c] - out[i * kDim + c]);
    }
    CHECK(near(dgate[j], sum));
  }

  /* Errors, by the names of the arguments. */
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "gradient of gate: given in the forward pass") == 0);
  binding.grad = NULL;
  CHECK(fulgur_forward(given, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strstr(fulgur_last_error(), "score_mod: at character 9, ") == fulgur_last_error());
  CHECK(strstr(fulgur_last_error(), "want a tensor that is declared") != NULL);
  options.mask_mod = "score < 0";
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strstr(fulgur_last_error(), "mask_mod: depends on the score") == fulgur_last_error());
  options.mask_mod = "gate";
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "mask_mod: gate: got no indices of the tensor") == 0);
  options.mask_mod = NULL;
  args.tensor_count = 9;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "tensor_count: got 9, want at most 8") == 0);
  args.tensor_count = 1;
  binding.name = NULL;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "tensors[0].name: got null, want a name") == 0);
  binding.name = "gate";
  binding.tensor = NULL;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "gate: got null, want a tensor") == 0);
  args.tensors = NULL;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "tensors[0]: got null, want a struct") == 0);
  fulgur_tensor_binding two[3] = {{.struct_size = sizeof binding, .name = "gate", .tensor = &tg},
                                  {.struct_size = 0, .name = "gate", .tensor = &tg}};
  two[1].struct_size = 2 * sizeof binding; /* what is after it is 0 */
  args.tensors = two;
  args.tensor_count = 2;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strstr(fulgur_last_error(), "tensors[1]: struct_size is ") == fulgur_last_error());
  two[1].struct_size = sizeof binding;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "gate: given twice") == 0);
}

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED 1
#endif
#endif

/* std::bad_alloc of the C++ below arrives as a status. The sanitizers' own memory needs more
   address space than the limit here leaves. */
static void out_of_memory(void) {
#ifndef SANITIZED
  const int64_t batch = 1 << 22;
  int32_t* cu = calloc((size_t)batch + 1, sizeof *cu);
  float x[kDim] = {1, 1}, out[kDim] = {7, 7};
  int64_t shape[] = {1, 1, kDim}, cu_shape[] = {batch + 1};
  const DLTensor tx = tensor(x, 3, shape), to = tensor(out, 3, shape),
                 tcu = int_tensor(cu, cu_shape);
  const fulgur_var_len lengths = {
      .struct_size = sizeof lengths, .cu_seqlens_q = &tcu, .cu_seqlens_k = &tcu};
  const fulgur_forward_args args = {
      .struct_size = sizeof args, .q = &tx, .k = &tx, .v = &tx, .out = &to, .lengths = &lengths};
  unsigned long pages = 0;
  FILE* statm = fopen("/proc/self/statm", "r");
  CHECK(statm != NULL && fscanf(statm, "%lu", &pages) == 1);
  if (statm != NULL) fclose(statm);
  struct rlimit before;
  CHECK(getrlimit(RLIMIT_AS, &before) == 0);
  struct rlimit little = before;
  little.rlim_cur = pages * 4096 + (32 << 20);
  CHECK(setrlimit(RLIMIT_AS, &little) == 0);
  fulgur_plan* plan = (fulgur_plan*)&args;
  const fulgur_status planned = fulgur_plan_forward(&args, NULL, &plan);
  const fulgur_status computed = fulgur_forward(&args, NULL, NULL);
  CHECK(setrlimit(RLIMIT_AS, &before) == 0);
  CHECK(planned == FULGUR_OUT_OF_MEMORY && plan == NULL);
  CHECK(computed == FULGUR_OUT_OF_MEMORY && out[0] == 7);
  CHECK(strcmp(fulgur_last_error(), "out of memory") == 0);
  CHECK(fulgur_forward(&args, NULL, NULL) == FULGUR_OK); /* with memory it is a call like others */
  free(cu);
#endif
}

static int nothing_comes(void* context, const void* const* sends, const size_t* send_bytes,
                         void* const* receives, const size_t* receive_bytes) {
  (void)sends, (void)send_bytes, (void)receives, (void)receive_bytes;
  return *(int*)context;
}

/* Groups of processes: one alone, and one whose exchange fails. */
static void groups(const fulgur_forward_args* args, const fulgur_backward_args* gradient,
                   const fulgur_options* options) {
  int64_t rows[3] = {-1, -1, -1};
  size_t count = 0;
  CHECK(fulgur_rows_of(FULGUR_ROWS_ZIGZAG, 256, 2, 1, NULL, rows, 2, &count) == FULGUR_OK);
  CHECK(count == 128 && rows[0] == 64 && rows[1] == 65 && rows[2] == -1);
  CHECK(fulgur_rows_of(4, 256, 2, 1, NULL, NULL, 0, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "sharding: got 4, want a fulgur_sharding") == 0);

  fulgur_group* group;
  int rank = -1, ranks = -1;
  CHECK(fulgur_group_from_env(0, &group) == FULGUR_OK);
  CHECK(fulgur_group_place(group, &rank, &ranks) == FULGUR_OK && rank == 0 && ranks == 1);
  const fulgur_distribution alone = {sizeof alone, FULGUR_ROWS_CONTIGUOUS, 1, 0};
  CHECK(fulgur_group_forward(args, options, group, &alone, NULL) == FULGUR_OK);
  CHECK(fulgur_group_backward(gradient, options, group, &alone, NULL) == FULGUR_OK);
  const fulgur_distribution wrong = {sizeof wrong, FULGUR_ROWS_CONTIGUOUS, 2, 0};
  CHECK(fulgur_group_forward(args, options, group, &wrong, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(fulgur_group_forward(args, options, group, NULL, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "distribution: got null, want a struct") == 0);
  CHECK(fulgur_group_forward(args, options, NULL, &alone, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "group: got null, want a group") == 0);
  fulgur_group_free(group);

  CHECK(fulgur_group_from_nccl(NULL, 0, &group) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "comm: got null, want a communicator of NCCL") == 0);
  CHECK(group == NULL);

  int result = 5;
  CHECK(fulgur_group_from_exchange(0, 2, NULL, NULL, &group) == FULGUR_INVALID_ARGUMENT);
  CHECK(group == NULL);
  CHECK(fulgur_group_from_exchange(0, 2, nothing_comes, &result, &group) == FULGUR_OK);
  CHECK(fulgur_group_forward(args, options, group, &alone, NULL) == FULGUR_UNAVAILABLE);
  CHECK(strcmp(fulgur_last_error(), "exchange returned 5") == 0);
  fulgur_group_free(group);
  fulgur_group_free(NULL);
  CHECK(fulgur_group_connect(0, 1, NULL, 0, 0, &group) == FULGUR_INVALID_ARGUMENT);
}

int main(void) {
  float q[] = {0.5f, -1, 2, 0.25f, -0.75f, 1.5f}, k[] = {1, 2, -0.5f, 0, 0.3f, -2, 1, 1},
        v[] = {1, 2, 3, 4, 5, 6, 7, 8};
  float out[kRows * kDim], lse[kRows], dout[] = {1, 0, 0, 1, 1, 1}, dlse[] = {0.5f, -1, 2};
  float dq[kRows * kDim], dk[kKeys * kDim], dv[kKeys * kDim];
  int64_t q_shape[] = {1, kRows, 1, kDim}, k_shape[] = {1, kKeys, 1, kDim},
          lse_shape[] = {1, 1, kRows};
  const DLTensor tq = tensor(q, 4, q_shape), tk = tensor(k, 4, k_shape), tv = tensor(v, 4, k_shape),
                 to = tensor(out, 4, q_shape), tl = tensor(lse, 3, lse_shape),
                 tdo = tensor(dout, 4, q_shape), tdl = tensor(dlse, 3, lse_shape),
                 tdq = tensor(dq, 4, q_shape), tdk = tensor(dk, 4, k_shape),
                 tdv = tensor(dv, 4, k_shape);
  double want[kRows * kDim], want_lse[kRows];
  fulgur_forward_args args = {
      .struct_size = sizeof args, .q = &tq, .k = &tk, .v = &tv, .out = &to, .lse = &tl};

  CHECK(strcmp(fulgur_version(), "0.1.0") == 0);
  CHECK(strcmp(fulgur_last_error(), "") == 0);

  /* Defaults. */
  CHECK(fulgur_forward(&args, NULL, NULL) == FULGUR_OK);
  expected(q, k, v, 0, want, want_lse);
  for (int n = 0; n < kRows * kDim; ++n) CHECK(near(out[n], want[n]));
  for (int n = 0; n < kRows; ++n) CHECK(near(lse[n], want_lse[n]));

  /* Options, and no lse. */
  fulgur_options options;
  CHECK(fulgur_options_init(&options, sizeof options) == FULGUR_OK);
  CHECK(options.struct_size == sizeof options);
  CHECK(options.window_left == -1 && options.window_right == -1);
  options.window_right = 0;
  options.engine = "cpu";
  args.lse = NULL;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_OK);
  args.lse = &tl;
  expected(q, k, v, 1, want, want_lse);
  for (int n = 0; n < kRows * kDim; ++n) CHECK(near(out[n], want[n]));

  /* The gradient of sum(dout * out) + sum(dlse * lse), by central differences of the definition. */
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_OK);
  const fulgur_backward_args gradient = {.struct_size = sizeof gradient,
                                         .dout = &tdo,
                                         .q = &tq,
                                         .k = &tk,
                                         .v = &tv,
                                         .out = &to,
                                         .lse = &tl,
                                         .dq = &tdq,
                                         .dk = &tdk,
                                         .dv = &tdv,
                                         .dlse = &tdl};
  CHECK(fulgur_backward(&gradient, &options, NULL) == FULGUR_OK);
  groups(&args, &gradient, &options); /* writes the gradients again */
  struct {
    float *input, *gradient;
    int count;
  } inputs[] = {{q, dq, kRows * kDim}, {k, dk, kKeys * kDim}, {v, dv, kKeys * kDim}};
  for (int t = 0; t < 3; ++t) {
    for (int n = 0; n < inputs[t].count; ++n) {
      const float step = 1.0f / 64, saved = inputs[t].input[n];
      double difference = 0;
      for (int sign = -1; sign <= 1; sign += 2) {
        inputs[t].input[n] = saved + (float)sign * step;
        expected(q, k, v, 1, want, want_lse);
        for (int m = 0; m < kRows * kDim; ++m) difference += sign * dout[m] * want[m];
        for (int m = 0; m < kRows; ++m) difference += sign * dlse[m] * want_lse[m];
      }
      inputs[t].input[n] = saved;
      CHECK(fabs(inputs[t].gradient[n] - difference / (2 * step)) < 2e-3);
    }
  }

  /* A sink and its gradient. */
  float sink[] = {0.75f}, dsink[] = {7};
  int64_t sink_shape[] = {1};
  const DLTensor ts = tensor(sink, 1, sink_shape), tds = tensor(dsink, 1, sink_shape);
  fulgur_forward_args with_sink = args;
  with_sink.sinks = &ts;
  CHECK(fulgur_forward(&with_sink, &options, NULL) == FULGUR_OK);
  expected(q, k, v, 1, want, want_lse);
  double want_dsink = 0;
  for (int i = 0; i < kRows; ++i) {
    const double l = exp(want_lse[i]) + exp(0.75), share = exp(want_lse[i]) / l;
    double D = -dlse[i];
    CHECK(near(lse[i], log(l)));
    for (int c = 0; c < kDim; ++c) {
      CHECK(near(out[i * kDim + c], want[i * kDim + c] * share));
      D += dout[i * kDim + c] * want[i * kDim + c] * share;
    }
    want_dsink -= exp(0.75) / l * D;
  }
  fulgur_backward_args sink_gradient = gradient;
  sink_gradient.sinks = &ts;
  sink_gradient.dsinks = &tds;
  CHECK(fulgur_backward(&sink_gradient, &options, NULL) == FULGUR_OK);
  CHECK(near(dsink[0], want_dsink));
  sink_gradient.sinks = NULL;
  CHECK(fulgur_backward(&sink_gradient, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "dsinks: given without sinks") == 0);

  /* Tokens that are a chain see as causal queries do. */
  int64_t words[] = {1, 3, 7}, words_shape[] = {1, kRows};
  DLTensor tree = tensor(NULL, 2, words_shape);
  tree.data = words;
  tree.dtype = (DLDataType){kDLInt, 64, 1};
  fulgur_forward_args with_tree = args;
  with_tree.tree_mask = &tree;
  options.window_right = -1;
  CHECK(fulgur_forward(&with_tree, &options, NULL) == FULGUR_OK);
  for (int n = 0; n < kRows * kDim; ++n) CHECK(near(out[n], want[n]));
  expected(q, k, v, 0, want, want_lse);
  options.window_right = 0;

  /* Queries that do not exist: the last used one is at the last key. */
  int32_t used[] = {kRows - 1};
  int64_t used_shape[] = {1};
  DLTensor used_q = tensor(NULL, 1, used_shape);
  used_q.data = used;
  used_q.dtype = (DLDataType){kDLInt, 32, 1};
  fulgur_forward_args with_used = args;
  fulgur_var_len used_lengths = {.struct_size = sizeof used_lengths, .seqused_q = &used_q};
  with_used.lengths = &used_lengths;
  CHECK(fulgur_forward(&with_used, &options, NULL) == FULGUR_OK);
  fulgur_backward_args used_gradient = gradient;
  used_gradient.dlse = NULL;
  used_gradient.lengths = &used_lengths;
  CHECK(fulgur_backward(&used_gradient, &options, NULL) == FULGUR_OK);
  for (int c = 0; c < kDim; ++c)
    CHECK(out[(kRows - 1) * kDim + c] == 0 && dq[(kRows - 1) * kDim + c] == 0);
  CHECK(isinf(lse[kRows - 1]) && lse[kRows - 1] < 0);

  /* Chunks of one key, where the program knows of chunks: a row sees the key on its diagonal. */
  options.window_right = -1;
  options.chunk = 1;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_OK);
  for (int n = 0; n < kRows * kDim; ++n) CHECK(near(out[n], v[(kKeys - kRows) * kDim + n]));
  options.struct_size = offsetof(fulgur_options, chunk);
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_OK);
  for (int n = 0; n < kRows * kDim; ++n) CHECK(near(out[n], want[n]));
  options.struct_size = sizeof options;
  options.chunk = -1;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strcmp(fulgur_last_error(), "chunk: got -1, want 0 (off) or >= 1") == 0);
  options.chunk = 0;
  options.window_right = 0;

  /* The random numbers of dropout by a tensor, and by the run. */
  uint64_t numbers[] = {(uint64_t)-3, 9};
  float dropped[kRows * kDim];
  int64_t numbers_shape[] = {2};
  DLTensor tn = tensor(NULL, 1, numbers_shape);
  tn.data = numbers;
  tn.dtype = (DLDataType){kDLInt, 64, 1};
  fulgur_run run = {.struct_size = sizeof run, .dropout_seed = numbers[0], .dropout_offset = 9};
  options.dropout_p = 0.5;
  CHECK(fulgur_forward(&args, &options, &run) == FULGUR_OK);
  memcpy(dropped, out, sizeof out);
  memset(out, 0, sizeof out);
  args.rng_state = &tn;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_OK);
  CHECK(memcmp(dropped, out, sizeof out) == 0);
  numbers[1] = 10;
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_OK);
  CHECK(memcmp(dropped, out, sizeof out) != 0);
  CHECK(fulgur_forward(&args, &options, &run) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "rng_state: ", 11) == 0);
  args.rng_state = NULL;

  /* byte_offset and strides: the last two rows of q, read backwards. */
  DLTensor tail = tq, two = to;
  int64_t two_shape[] = {1, 2, 1, kDim}, strides[] = {0, -kDim, 0, 1};
  tail.byte_offset = (kRows - 1) * kDim * sizeof(float);
  tail.shape = two.shape = two_shape;
  tail.strides = strides;
  expected(q, k, v, 0, want, want_lse);
  const fulgur_forward_args backwards = {
      .struct_size = sizeof backwards, .q = &tail, .k = &tk, .v = &tv, .out = &two};
  CHECK(fulgur_forward(&backwards, NULL, NULL) == FULGUR_OK);
  for (int c = 0; c < kDim; ++c) {
    CHECK(near(out[c], want[(kRows - 1) * kDim + c]));
    CHECK(near(out[kDim + c], want[(kRows - 2) * kDim + c]));
  }

  /* Two halves of the keys, merged. */
  float out_a[kRows * kDim], out_b[kRows * kDim], lse_a[kRows], lse_b[kRows];
  int64_t half_shape[] = {1, kKeys / 2, 1, kDim};
  DLTensor ka = tensor(k, 4, half_shape), kb = tensor(k + kKeys, 4, half_shape),
           va = tensor(v, 4, half_shape), vb = tensor(v + kKeys, 4, half_shape),
           oa = tensor(out_a, 4, q_shape), ob = tensor(out_b, 4, q_shape),
           la = tensor(lse_a, 3, lse_shape), lb = tensor(lse_b, 3, lse_shape);
  const fulgur_forward_args half_a = {
      .struct_size = sizeof half_a, .q = &tq, .k = &ka, .v = &va, .out = &oa, .lse = &la};
  const fulgur_forward_args half_b = {
      .struct_size = sizeof half_b, .q = &tq, .k = &kb, .v = &vb, .out = &ob, .lse = &lb};
  CHECK(fulgur_forward(&half_a, NULL, NULL) == FULGUR_OK);
  CHECK(fulgur_forward(&half_b, NULL, NULL) == FULGUR_OK);
  const DLTensor *outs[] = {&oa, &ob}, *lses[] = {&la, &lb};
  CHECK(fulgur_merge(outs, lses, 2, &to, &tl, NULL) == FULGUR_OK);
  for (int n = 0; n < kRows * kDim; ++n) CHECK(near(out[n], want[n]));
  for (int n = 0; n < kRows; ++n) CHECK(near(lse[n], want_lse[n]));

  /* Errors: a status, a message, and no output touched. */
  memset(out, 0x7f, sizeof out);
  args.q = NULL;
  CHECK(fulgur_forward(&args, NULL, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strncmp(fulgur_last_error(), "q: ", 3) == 0);
  args.q = &tq;
  options.engine = "abacus";
  CHECK(fulgur_forward(&args, &options, NULL) == FULGUR_INVALID_ARGUMENT);
  CHECK(strstr(fulgur_last_error(), "abacus") != NULL);
  for (size_t n = 0; n < sizeof out; ++n) CHECK(((const char*)out)[n] == 0x7f);

  expressions(&args, &gradient);
  lists_of_blocks();
  plan_of_changing_lengths();
  cards();
  texts(&args);
  huge_sizes();
  plan_in_threads(&args);
  functions_of_gpus();
  device_memory();
  out_of_memory();

  if (failures == 0) printf("ok\n");
  return failures != 0;
}

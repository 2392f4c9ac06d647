/* Attention on a GPU from C, in a program that has no CUDA of its own: memory, a plan, a workspace,
   a run on a stream, and the result with that of the CPU. Without a usable GPU it says so and
   ends with 77. */
#include <fulgur/c.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { kBatch = 2, kRows = 1000, kHeads = 8, kDim = 128 };
enum { kNumel = kBatch * kRows * kHeads * kDim, kBytes = 2 * kNumel, kGpu = 0 };

/* bf16: the upper half of an f32. */
static uint16_t q[kNumel], k[kNumel], v[kNumel], out[kNumel], expected[kNumel];

static void check(fulgur_status status) {
  if (status == FULGUR_OK) return;
  fprintf(stderr, "c_gpu_attention: %s\n", fulgur_last_error());
  exit(status == FULGUR_UNAVAILABLE ? 77 : 1);
}

/* Random numbers between -2 and 2. */
static void fill(uint16_t* x) {
  static uint32_t state = 1;
  for (int i = 0; i < kNumel; ++i) {
    state = state * 1664525 + 1013904223;
    const float number = (float)(state >> 8) / (1 << 22) - 2;
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    x[i] = (uint16_t)(bits >> 16);
  }
}

static float to_float(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

/* A copy in device memory. */
static void* on_device(const void* host, int64_t bytes) {
  void* data;
  check(fulgur_cuda_allocate(bytes, kGpu, &data));
  check(fulgur_cuda_copy(data, host, bytes, kGpu));
  return data;
}

static DLTensor tensor(void* data, DLDevice device) {
  static int64_t shape[] = {kBatch, kRows, kHeads, kDim};
  return (DLTensor){
      .data = data, .device = device, .ndim = 4, .dtype = {kDLBfloat, 16, 1}, .shape = shape};
}

int main(void) {
  fill(q);
  fill(k);
  fill(v);
  memset(out, 0xff, sizeof out); /* NaN: what is not written is found */
  const DLDevice cpu = {kDLCPU, 0}, gpu = {kDLCUDA, kGpu};
  const DLTensor gq = tensor(on_device(q, kBytes), gpu), gk = tensor(on_device(k, kBytes), gpu),
                 gv = tensor(on_device(v, kBytes), gpu), go = tensor(on_device(out, kBytes), gpu);
  const fulgur_forward_args args = {
      .struct_size = sizeof args, .q = &gq, .k = &gk, .v = &gv, .out = &go};
  fulgur_options options;
  check(fulgur_options_init(&options, sizeof options));
  options.window_right = 0; /* no key after the query: causal */

  /* Once for each shape: check, choose, compile. Every thread may run the plan, on every stream. */
  fulgur_plan* plan;
  check(fulgur_plan_forward(&args, &options, &plan));
  char text[4096];
  check(fulgur_plan_explain(plan, text, sizeof text, NULL));
  puts(text);

  /* For one run at a time, zero at its beginning. Without it the library takes its own memory. */
  fulgur_workspace_need need = {.struct_size = sizeof need};
  check(fulgur_plan_workspace(plan, &need));
  void* zeros = calloc((size_t)need.bytes + 1, 1); /* calloc of 0 bytes may be null */
  if (zeros == NULL) return 1;
  void* workspace = on_device(zeros, need.bytes);
  free(zeros);

  /* A run only launches. The stream is a cudaStream_t of yours; null is the default one. */
  const fulgur_run run = {.struct_size = sizeof run,
                          .stream = NULL,
                          .workspace = workspace,
                          .workspace_bytes = need.bytes};
  check(fulgur_plan_run_forward(plan, &args, &run));
  check(fulgur_cuda_copy(out, go.data, kBytes, kGpu)); /* work on the default stream comes first */
  fulgur_plan_free(plan);
  void* const taken[] = {gq.data, gk.data, gv.data, go.data, workspace};
  for (int i = 0; i < 5; ++i) check(fulgur_cuda_free(taken[i], kGpu));

  const DLTensor tq = tensor(q, cpu), tk = tensor(k, cpu), tv = tensor(v, cpu),
                 to = tensor(expected, cpu);
  const fulgur_forward_args on_cpu = {
      .struct_size = sizeof on_cpu, .q = &tq, .k = &tk, .v = &tv, .out = &to};
  check(fulgur_forward(&on_cpu, &options, NULL));
  int wrong = 0;
  for (int i = 0; i < kNumel; ++i) {
    const float got = to_float(out[i]), want = to_float(expected[i]);
    wrong += !(fabsf(got - want) <= 0.01f + 0.01f * fabsf(want)); /* NaN is wrong, too */
  }
  printf("%d of %d elements differ from those of the CPU\n", wrong, kNumel);
  return wrong == 0 ? 0 : 1;
}

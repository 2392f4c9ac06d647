/* The C API, compiled as C and linked like any user's program. */
#include <math.h>
#include <stdio.h>
#include <string.h>

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
static void expected(const float* q, const float* k, const float* v, int causal, double* out,
                     double* lse) {
  for (int i = 0; i < kRows; ++i) {
    double sum = 0, value[kDim] = {0};
    for (int j = 0; j < kKeys; ++j) {
      if (causal && j > i + kKeys - kRows) continue;
      double s = 0;
      for (int c = 0; c < kDim; ++c) s += q[i * kDim + c] * k[j * kDim + c];
      const double p = exp(s / sqrt(kDim));
      sum += p;
      for (int c = 0; c < kDim; ++c) value[c] += p * v[j * kDim + c];
    }
    lse[i] = log(sum);
    for (int c = 0; c < kDim; ++c) out[i * kDim + c] = value[c] / sum;
  }
}

int main(void) {
  float q[] = {0.5f, -1, 2, 0.25f, -0.75f, 1.5f}, k[] = {1, 2, -0.5f, 0, 0.3f, -2, 1, 1},
        v[] = {1, 2, 3, 4, 5, 6, 7, 8};
  float out[kRows * kDim], lse[kRows], dout[] = {1, 0, 0, 1, 1, 1};
  float dq[kRows * kDim], dk[kKeys * kDim], dv[kKeys * kDim];
  int64_t q_shape[] = {1, kRows, 1, kDim}, k_shape[] = {1, kKeys, 1, kDim},
          lse_shape[] = {1, 1, kRows};
  const DLTensor tq = tensor(q, 4, q_shape), tk = tensor(k, 4, k_shape), tv = tensor(v, 4, k_shape),
                 to = tensor(out, 4, q_shape), tl = tensor(lse, 3, lse_shape),
                 tdo = tensor(dout, 4, q_shape), tdq = tensor(dq, 4, q_shape),
                 tdk = tensor(dk, 4, k_shape), tdv = tensor(dv, 4, k_shape);
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

  /* The gradient of sum(dout * out), by central differences of the definition. */
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
                                         .dv = &tdv};
  CHECK(fulgur_backward(&gradient, &options, NULL) == FULGUR_OK);
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
      }
      inputs[t].input[n] = saved;
      CHECK(fabs(inputs[t].gradient[n] - difference / (2 * step)) < 2e-3);
    }
  }

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
  CHECK(fulgur_merge(outs, lses, 2, &to, &tl) == FULGUR_OK);
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

  if (failures == 0) printf("ok\n");
  return failures != 0;
}

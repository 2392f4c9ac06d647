/* Causal attention from C: planned once, then run on new data. */
#include <fulgur/c.h>
#include <math.h>
#include <stdio.h>

enum { kQueries = 20, kKeys = 100, kQueryHeads = 8, kKeyHeads = 2, kDim = 64 };

static float q[kQueries * kQueryHeads * kDim], k[kKeys * kKeyHeads * kDim],
    v[kKeys * kKeyHeads * kDim], out[kQueries * kQueryHeads * kDim];

/* A row-major view of (1, rows, heads, kDim) floats; `shape` holds the sizes. */
static DLTensor view(float* data, int64_t shape[4], int64_t rows, int64_t heads) {
  shape[0] = 1, shape[1] = rows, shape[2] = heads, shape[3] = kDim;
  return (DLTensor){
      .data = data, .device = {kDLCPU, 0}, .ndim = 4, .dtype = {kDLFloat, 32, 1}, .shape = shape};
}

int main(void) {
  int64_t shapes[4][4];
  const DLTensor tq = view(q, shapes[0], kQueries, kQueryHeads),
                 tk = view(k, shapes[1], kKeys, kKeyHeads),
                 tv = view(v, shapes[2], kKeys, kKeyHeads),
                 to = view(out, shapes[3], kQueries, kQueryHeads);
  const fulgur_forward_args args = {
      .struct_size = sizeof args, .q = &tq, .k = &tk, .v = &tv, .out = &to};
  fulgur_options options;
  fulgur_options_init(&options, sizeof options);
  options.window_right = 0; /* no key after the query: causal */

  fulgur_plan* plan;
  if (fulgur_plan_forward(&args, &options, &plan) != FULGUR_OK) {
    fprintf(stderr, "%s\n", fulgur_last_error());
    return 1;
  }
  fulgur_status status = FULGUR_OK;
  for (int step = 1; step <= 3 && status == FULGUR_OK; ++step) {
    for (int i = 0; i < kKeys * kKeyHeads * kDim; ++i) v[i] = (float)step;
    status = fulgur_plan_run_forward(plan, &args, NULL);
    printf("step %d: out[0] = %g\n", step, out[0]); /* a mean of equal values */
  }
  if (status != FULGUR_OK) fprintf(stderr, "%s\n", fulgur_last_error());
  fulgur_plan_free(plan);
  return status == FULGUR_OK && fabsf(out[0] - 3) < 1e-5f ? 0 : 1;
}

#include "steps.h"

#include <algorithm>
#include <chrono>

#include "fulgur/cuda.h"
#include "progress.h"

namespace fulgur::app {
namespace {

constexpr double kLongFlops = 2e11;  // about a second on two cores
constexpr int64_t kMaxSteps = 64;

/// The sequences and the kv heads of one step.
struct Part {
  int64_t b, b_count, h, h_count;
};

Tensor narrowed(Tensor t, int axis, int64_t begin, int64_t count) {
  if (!t.given()) return t;
  t.data = static_cast<char*>(t.data) + begin * t.strides[axis] * size_of(t.dtype);
  t.shape[axis] = count;
  return t;
}

/// The heads of kv head group h in a tensor (..., heads, dim); `group` is 1 for k and v.
Tensor rows_part(const Tensor& t, const Part& p, int64_t group) {
  if (t.rank == 3) return narrowed(t, 1, p.h * group, p.h_count * group);
  return narrowed(narrowed(t, 0, p.b, p.b_count), 2, p.h * group, p.h_count * group);
}

Tensor lse_part(const Tensor& t, const Part& p, int64_t group) {
  if (t.rank == 2) return narrowed(t, 0, p.h * group, p.h_count * group);
  return narrowed(narrowed(t, 0, p.b, p.b_count), 1, p.h * group, p.h_count * group);
}

ForwardArgs part_of(const ForwardArgs& a, const Part& p, int64_t group) {
  return {rows_part(a.q, p, group), rows_part(a.k, p, 1), rows_part(a.v, p, 1),
          rows_part(a.out, p, group), lse_part(a.lse, p, group)};
}

BackwardArgs part_of(const BackwardArgs& a, const Part& p, int64_t group) {
  return {rows_part(a.dout, p, group), rows_part(a.q, p, group),   rows_part(a.k, p, 1),
          rows_part(a.v, p, 1),        rows_part(a.out, p, group), lse_part(a.lse, p, group),
          rows_part(a.dq, p, group),   rows_part(a.dk, p, 1),      rows_part(a.dv, p, 1)};
}

Options part_of(Options options, const Part& p, int64_t group) {
  Tensor& slopes = options.alibi_slopes;
  if (slopes.rank == 2) slopes = narrowed(slopes, 0, p.b, p.b_count);
  slopes = narrowed(slopes, slopes.rank - 1, p.h * group, p.h_count * group);
  if (!options.cu_seqlens_q.given()) {
    options.seqused_k = narrowed(options.seqused_k, 0, p.b, p.b_count);
  }
  return options;
}

template <class Args>
double run(const Args& args, const Options& options, const char* label) {
  const Plan whole = plan(args, options);
  const bool cuda = args.q.device.type == DeviceType::kCuda;
  const bool one_step = cuda || whole.flops() < kLongFlops || options.dropout.p > 0;
  const bool packed = args.q.rank == 3;
  const int heads = args.q.rank - 2;
  const int64_t batch = packed ? 1 : args.q.shape[0], hk = args.k.shape[heads];
  const int64_t group = args.q.shape[heads] / hk;
  const int64_t b_steps = one_step ? 1 : std::min(batch, kMaxSteps);
  const int64_t h_steps = one_step ? 1 : std::min(hk, kMaxSteps / b_steps);

  const auto start = std::chrono::steady_clock::now();
  if (b_steps * h_steps == 1) {
    whole.run(args);
    if (cuda) cuda::synchronize(args.q.device.index);
  } else {
    Progress progress(label, b_steps * h_steps);
    for (int64_t i = 0; i < b_steps; ++i) {
      for (int64_t j = 0; j < h_steps; ++j) {
        const int64_t b = i * batch / b_steps, h = j * hk / h_steps;
        const Part part{b, (i + 1) * batch / b_steps - b, h, (j + 1) * hk / h_steps - h};
        plan(part_of(args, part, group), part_of(options, part, group))
            .run(part_of(args, part, group));
        progress.step();
      }
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double run_in_steps(const ForwardArgs& args, const Options& options) {
  return run(args, options, "forward");
}

double run_in_steps(const BackwardArgs& args, const Options& options) {
  return run(args, options, "backward");
}

}  // namespace fulgur::app

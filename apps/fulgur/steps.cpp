#include "steps.h"

#include <algorithm>
#include <chrono>
#include <type_traits>

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

template <class AnyTensor>
AnyTensor narrowed(AnyTensor t, int axis, int64_t begin, int64_t count) {
  if (!t.given()) return t;
  const int64_t bytes = begin * t.strides[axis] * size_of(t.dtype);
  using Byte = std::conditional_t<AnyTensor::kConst, const char, char>;
  t.data = static_cast<Byte*>(t.data) + bytes;
  t.shape[axis] = count;
  return t;
}

/// The heads of kv head group h in a tensor (..., heads, dim); `group` is 1 for k and v.
template <class AnyTensor>
AnyTensor rows_part(const AnyTensor& t, const Part& p, int64_t group) {
  if (t.rank == 3) return narrowed(t, 1, p.h * group, p.h_count * group);
  return narrowed(narrowed(t, 0, p.b, p.b_count), 2, p.h * group, p.h_count * group);
}

template <class AnyTensor>
AnyTensor lse_part(const AnyTensor& t, const Part& p, int64_t group) {
  if (t.rank == 2) return narrowed(t, 0, p.h * group, p.h_count * group);
  return narrowed(narrowed(t, 0, p.b, p.b_count), 1, p.h * group, p.h_count * group);
}

/// Of a bias or its gradient, which may be the same for all sequences or heads.
template <class AnyTensor>
AnyTensor bias_part(AnyTensor t, bool packed, const Part& p, int64_t group) {
  if (t.given() && t.shape[0] > 1 && !packed) t = narrowed(t, 0, p.b, p.b_count);
  if (t.given() && t.shape[1] > 1) t = narrowed(t, 1, p.h * group, p.h_count * group);
  return t;
}

/// What both passes take besides.
template <class Args>
Args with_extras(const Args& whole, Args part, const Part& p, int64_t group) {
  ConstTensor slopes = whole.alibi_slopes;
  if (slopes.rank == 2) slopes = narrowed(slopes, 0, p.b, p.b_count);
  part.alibi_slopes = narrowed(slopes, slopes.rank - 1, p.h * group, p.h_count * group);
  part.bias = bias_part(whole.bias, whole.q.rank == 3, p, group);
  part.sinks = narrowed(whole.sinks, 0, p.h * group, p.h_count * group);
  part.lengths.cu_seqlens_q = whole.lengths.cu_seqlens_q;
  part.lengths.cu_seqlens_k = whole.lengths.cu_seqlens_k;
  const auto used = [&](const ConstTensor& t) {
    return whole.lengths.cu_seqlens_q.given() ? t : narrowed(t, 0, p.b, p.b_count);
  };
  part.lengths.seqused_q = used(whole.lengths.seqused_q);
  part.lengths.seqused_k = used(whole.lengths.seqused_k);
  return part;
}

ForwardArgs part_of(const ForwardArgs& a, const Part& p, int64_t group) {
  return with_extras(a,
                     {rows_part(a.q, p, group), rows_part(a.k, p, 1), rows_part(a.v, p, 1),
                      rows_part(a.out, p, group), lse_part(a.lse, p, group)},
                     p, group);
}

BackwardArgs part_of(const BackwardArgs& a, const Part& p, int64_t group) {
  BackwardArgs part =
      with_extras(a,
                  {rows_part(a.dout, p, group), rows_part(a.q, p, group), rows_part(a.k, p, 1),
                   rows_part(a.v, p, 1), rows_part(a.out, p, group), lse_part(a.lse, p, group),
                   rows_part(a.dq, p, group), rows_part(a.dk, p, 1), rows_part(a.dv, p, 1)},
                  p, group);
  part.dlse = lse_part(a.dlse, p, group);
  part.dsinks = narrowed(a.dsinks, 0, p.h * group, p.h_count * group);
  part.dbias = bias_part(a.dbias, a.q.rank == 3, p, group);
  return part;
}

/// A step of a server: keys that lie elsewhere than their queries, in pages, in other rows, or
/// with packed queries; or drafts, which are short.
bool serves(const ForwardArgs& a) {
  return a.cache.page_table.given() || a.cache.cache_batch_idx.given() ||
         a.cache.leftpad_k.given() || a.k.rank != a.q.rank || a.tree_mask.given();
}
bool serves(const BackwardArgs&) { return false; }

/// A result is a sum over the batch, which no step may have a part of.
bool sums_batch(const ForwardArgs&) { return false; }
bool sums_batch(const BackwardArgs& a) {
  return a.dsinks.given() || (a.dbias.given() && a.dbias.shape[0] == 1);
}

/// Likewise over the heads.
bool sums_heads(const ForwardArgs&) { return false; }
bool sums_heads(const BackwardArgs& a) { return a.dbias.given() && a.dbias.shape[1] == 1; }

template <class Args>
double run(const Args& args, const Options& options, const Run& run, const char* label) {
  const Plan whole = plan(args, options);
  const bool cuda = args.q.device.type == DeviceType::kCuda;
  // Dropout and expressions count sequences and heads from the first one of the call.
  const bool counts =
      options.dropout_p > 0 || options.score_mod.given() || options.mask_mod.given();
  const bool one_step = cuda || whole.flops() < kLongFlops || counts || serves(args);
  const bool packed = args.q.rank == 3;
  const int heads = args.q.rank - 2;
  const int64_t batch = packed ? 1 : args.q.shape[0], hk = args.k.shape[args.k.rank - 2];
  const int64_t group = args.q.shape[heads] / hk;
  const int64_t b_steps = one_step || sums_batch(args) ? 1 : std::min(batch, kMaxSteps);
  const int64_t h_steps = one_step || sums_heads(args) ? 1 : std::min(hk, kMaxSteps / b_steps);

  const auto start = std::chrono::steady_clock::now();
  if (b_steps * h_steps == 1) {
    whole.run(args, run);
    if (cuda) cuda::synchronize(args.q.device.index);
  } else {
    Progress progress(label, b_steps * h_steps);
    for (int64_t i = 0; i < b_steps; ++i) {
      for (int64_t j = 0; j < h_steps; ++j) {
        const int64_t b = i * batch / b_steps, h = j * hk / h_steps;
        const Part part{b, (i + 1) * batch / b_steps - b, h, (j + 1) * hk / h_steps - h};
        const Args mine = part_of(args, part, group);
        plan(mine, options).run(mine, run);
        progress.step();
      }
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double run_in_steps(const ForwardArgs& args, const Options& options, const Run& how) {
  return run(args, options, how, "forward");
}

double run_in_steps(const BackwardArgs& args, const Options& options, const Run& how) {
  return run(args, options, how, "backward");
}

}  // namespace fulgur::app

#include "problem.h"

#include <algorithm>
#include <cmath>

#include "check.h"

namespace fulgur {
namespace {

constexpr int kMostThreads = 1024;  // a thread takes scratch memory; OpenMP ends the process when
                                    // it cannot start one

std::vector<int32_t> read_on_cpu(const char* name, const Tensor& t) {
  if (t.device.type != DeviceType::kCpu) return {};
  check_data(name, t);
  const auto* values = static_cast<const int32_t*>(t.data);
  std::vector<int32_t> out(t.shape[0]);
  for (int64_t i = 0; i < t.shape[0]; ++i) out[i] = values[i * t.strides[0]];
  return out;
}

/// An int32 vector of `size`, on q's device, or (lengths only steer the plan) on the CPU.
void check_lengths(const char* name, const Tensor& t, int64_t size, const char* dims,
                   Device device) {
  check_shape(name, t, dims, {size}, false);
  check_dtype(name, t, DType::kI32, "lengths are int32");
  check_device(name, t, device);
}

void check_cumulative(const char* name, const std::vector<int32_t>& cu, const char* tensor,
                      int64_t total) {
  if (cu.empty()) return;
  if (cu[0] != 0) fail(name, "starts with {}, want 0", cu[0]);
  for (size_t i = 1; i < cu.size(); ++i) {
    if (cu[i] < cu[i - 1]) {
      fail(name, "decreases at {}: {} after {}, want non-decreasing", i, cu[i], cu[i - 1]);
    }
  }
  if (cu.back() > total) {
    fail(name, "ends with {}, want at most {} (rows of {})", cu.back(), total, tensor);
  }
}

int64_t longest(const char* name, const std::vector<int32_t>& cu, int64_t given) {
  if (given < 0) fail(name, "got {}, want >= 0", given);
  if (cu.empty()) {
    if (given == 0) fail(name, "not given, want the longest length (cu_seqlens is not on the CPU)");
    return given;
  }
  int64_t longest = 0;
  for (size_t i = 1; i < cu.size(); ++i) longest = std::max<int64_t>(longest, cu[i] - cu[i - 1]);
  if (given > 0 && given < longest) {
    fail(name, "got {}, want at least the longest sequence {}", given, longest);
  }
  return longest;
}

struct Inputs {
  const Tensor &q, &k, &v;
};

Problem make_shared(const Inputs& in, const Options& options) {
  Problem p;
  const Tensor &q = in.q, &k = in.k, &v = in.v;
  p.packed = options.cu_seqlens_q.given() || options.cu_seqlens_k.given();
  const char* dims = p.packed ? "(total, heads, dim)" : "(batch, seqlen, heads, dim)";
  const int rank = p.packed ? 3 : 4;
  check_tensor("q", q, dims, rank, false);
  check_tensor("k", k, dims, rank, false);
  check_tensor("v", v, dims, rank, false);
  if (q.dtype == DType::kI32) fail("q", "got i32, want f32, bf16, f16 or f64");
  p.dtype = q.dtype;
  p.device = q.device;
  check_dtype("k", k, q.dtype, "the dtype of q");
  check_dtype("v", v, q.dtype, "the dtype of q");
  check_device("k", k, q.device);
  check_device("v", v, q.device);

  const int heads = rank - 2, dim = rank - 1;
  p.hq = q.shape[heads];
  p.hk = k.shape[heads];
  p.d = q.shape[dim];
  p.dv = v.shape[dim];
  if (p.hq < 1) fail("q", "got {} heads, want at least 1", p.hq);
  if (p.hk < 1) fail("k", "got {} heads, want at least 1", p.hk);
  if (p.hq % p.hk != 0) {
    fail("q", "got {} heads, want a multiple of the {} heads of k", p.hq, p.hk);
  }
  if (p.d < 1 || p.d > 512) fail("q", "got head dim {}, want 1 to 512", p.d);
  if (p.dv < 1 || p.dv > 512) fail("v", "got head dim {}, want 1 to 512", p.dv);

  if (p.packed) {
    p.total_q = q.shape[0];
    p.total_k = k.shape[0];
    const Tensor &cu_q = options.cu_seqlens_q, &cu_k = options.cu_seqlens_k;
    if (!cu_q.given()) fail("cu_seqlens_q", "not given, want it beside cu_seqlens_k");
    if (!cu_k.given()) fail("cu_seqlens_k", "not given, want it beside cu_seqlens_q");
    if (cu_q.rank != 1 || cu_q.shape[0] < 1) {
      fail("cu_seqlens_q", "got {}, want i32 (batch + 1)", cu_q.describe());
    }
    p.batch = cu_q.shape[0] - 1;
    check_lengths("cu_seqlens_q", cu_q, p.batch + 1, "(batch + 1)", q.device);
    check_lengths("cu_seqlens_k", cu_k, p.batch + 1, "(batch + 1)", q.device);
    p.cu_seqlens_q = cu_q;
    p.cu_seqlens_k = cu_k;
    p.cu_q = read_on_cpu("cu_seqlens_q", cu_q);
    p.cu_k = read_on_cpu("cu_seqlens_k", cu_k);
    check_cumulative("cu_seqlens_q", p.cu_q, "q", p.total_q);
    check_cumulative("cu_seqlens_k", p.cu_k, "k", p.total_k);
    p.sq = longest("max_seqlen_q", p.cu_q, options.max_seqlen_q);
    p.sk = longest("max_seqlen_k", p.cu_k, options.max_seqlen_k);
    check_shape("k", k, "(total_k, hk, d)", {p.total_k, p.hk, p.d}, false);
    check_shape("v", v, "(total_k, hk, dv)", {p.total_k, p.hk, p.dv}, false);
  } else {
    if (options.max_seqlen_q != 0) fail("max_seqlen_q", "given without cu_seqlens_q");
    if (options.max_seqlen_k != 0) fail("max_seqlen_k", "given without cu_seqlens_k");
    p.batch = q.shape[0];
    p.sq = q.shape[1];
    p.sk = k.shape[1];
    check_shape("k", k, "(batch, sk, hk, d)", {p.batch, p.sk, p.hk, p.d}, false);
    check_shape("v", v, "(batch, sk, hk, dv)", {p.batch, p.sk, p.hk, p.dv}, false);
    p.total_q = p.batch * p.sq;
    p.total_k = p.batch * p.sk;
  }
  if (options.seqused_k.given()) {
    check_lengths("seqused_k", options.seqused_k, p.batch, "(batch)", q.device);
    p.seqused_k = options.seqused_k;
    p.used_k = read_on_cpu("seqused_k", options.seqused_k);
    for (size_t b = 0; b < p.used_k.size(); ++b) {
      const int64_t most = p.cu_k.empty() ? p.sk : p.cu_k[b + 1] - p.cu_k[b];
      if (p.used_k[b] < 0 || p.used_k[b] > most) {
        fail("seqused_k", "got {} at {}, want 0 to {}", p.used_k[b], b, most);
      }
    }
  }
  p.q = rows_layout(q);
  p.k = rows_layout(k);
  p.v = rows_layout(v);

  p.mask = options.mask;
  if (p.mask.left < -1) fail("mask.left", "got {}, want -1 (unbounded) or >= 0", p.mask.left);
  if (p.mask.right < -1) fail("mask.right", "got {}, want -1 (unbounded) or >= 0", p.mask.right);
  p.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(p.d)));
  if (!std::isfinite(p.scale)) fail("scale", "got {}, want a finite number", p.scale);
  p.softcap = options.softcap;
  if (!std::isfinite(p.softcap) || p.softcap < 0) {
    fail("softcap", "got {}, want a finite number >= 0 (0 = off)", p.softcap);
  }
  p.dropout = options.dropout;
  if (!(p.dropout.p >= 0 && p.dropout.p < 1)) {
    fail("dropout.p", "got {}, want 0 <= p < 1", p.dropout.p);
  }
  if (options.alibi_slopes.given()) {
    const Tensor& slopes = options.alibi_slopes;
    if (slopes.rank == 2) {
      check_shape("alibi_slopes", slopes, "(batch, hq)", {p.batch, p.hq}, false);
    } else {
      check_shape("alibi_slopes", slopes, "(hq) or (batch, hq)", {p.hq}, false);
    }
    check_dtype("alibi_slopes", slopes, DType::kF32, "slopes are f32");
    check_device("alibi_slopes", slopes, q.device);
    check_data("alibi_slopes", slopes);
    p.alibi_slopes = slopes;
  }
  p.deterministic = options.deterministic;
  p.invariant = options.invariant;
  if (options.threads < 0 || options.threads > kMostThreads) {
    fail("threads", "got {}, want >= 0 (0 = all) and <= {}", options.threads, kMostThreads);
  }
  p.threads = options.threads;
  p.engine = options.engine;
  p.stream = options.stream;
  return p;
}

/// A tensor with the rows and heads of q (out, dout, dq) or of k (dk, dv).
Layout check_like(const char* name, const Tensor& t, const Problem& p, bool of_q, int64_t dim,
                  bool written) {
  const int64_t heads = of_q ? p.hq : p.hk;
  if (p.packed) {
    check_shape(name, t, of_q ? "(total_q, hq, dim)" : "(total_k, hk, dim)",
                {of_q ? p.total_q : p.total_k, heads, dim}, written);
  } else {
    check_shape(name, t, of_q ? "(batch, sq, hq, dim)" : "(batch, sk, hk, dim)",
                {p.batch, of_q ? p.sq : p.sk, heads, dim}, written);
  }
  check_dtype(name, t, p.dtype, "the dtype of q");
  check_device(name, t, p.device);
  return rows_layout(t);
}

Layout check_lse(const Tensor& t, const Problem& p, bool written) {
  if (p.packed) {
    check_shape("lse", t, "(hq, total_q)", {p.hq, p.total_q}, written);
  } else {
    check_shape("lse", t, "(batch, hq, sq)", {p.batch, p.hq, p.sq}, written);
  }
  check_dtype("lse", t, p.dtype == DType::kF64 ? DType::kF64 : DType::kF32,
              "lse is f32, f64 where q is");
  check_device("lse", t, p.device);
  return lse_layout(t);
}

/// Nothing is written: no sequence is left, as the sizes beside a 0 may be too large to walk.
void drop_sequences(Problem& p) {
  if (!p.packed) p.batch = p.sq = p.sk = p.total_k = 0;
}

/// Strides that address the same elements: those of single rows and of empty tensors do not count.
bool same_strides(const Tensor& a, const Tensor& b) {
  if (a.numel() == 0) return true;
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] > 1 && a.strides[i] != b.strides[i]) return false;
  }
  return true;
}

struct Named {
  const char* name;
  const Tensor* tensor;
  bool written;
};

void check_pointers(std::initializer_list<std::pair<Named, const Tensor*>> tensors) {
  for (const auto& [now, planned] : tensors) {
    const Tensor &t = *now.tensor, &want = *planned;
    if (t.rank != want.rank || t.dtype != want.dtype || t.device != want.device ||
        t.shape != want.shape || !same_strides(t, want)) {
      fail(now.name, "got {} strides {} on {}, want {} strides {} on {} as planned", t.describe(),
           list(t, t.strides), name_of(t.device), want.describe(), list(want, want.strides),
           name_of(want.device));
    }
    check_data(now.name, t);
  }
  for (const auto& [now, unused] : tensors) {
    if (!now.written) continue;
    for (const auto& [other, unused2] : tensors) {
      if (now.tensor != other.tensor && share_memory(*now.tensor, *other.tensor)) {
        fail(now.name, "shares its memory with {}; an output needs its own", other.name);
      }
    }
  }
}

}  // namespace

Sequence Problem::sequence(int64_t b) const {
  Sequence s{0, 0, sq, sk};
  if (packed) {
    s = {cu_q[b], cu_k[b], cu_q[b + 1] - cu_q[b], cu_k[b + 1] - cu_k[b]};
  }
  if (!used_k.empty()) s.sk = used_k[b];
  return s;
}

Sequence Problem::padding() const {
  if (!packed) return {};
  return {cu_q.back(), cu_k.back(), total_q - cu_q.back(), total_k - cu_k.back()};
}

double Problem::slope(int64_t b, int64_t h) const {
  if (!alibi_slopes.given()) return 0;
  const auto* slopes = static_cast<const float*>(alibi_slopes.data);
  return alibi_slopes.rank == 1 ? slopes[h * alibi_slopes.strides[0]]
                                : slopes[b * alibi_slopes.strides[0] + h * alibi_slopes.strides[1]];
}

Problem make_problem(const ForwardArgs& args, const Options& options) {
  Problem p = make_shared({args.q, args.k, args.v}, options);
  p.out = check_like("out", args.out, p, true, p.dv, true);
  p.want_lse = args.lse.given();
  if (p.want_lse) p.lse = check_lse(args.lse, p, true);
  if (p.total_q == 0) drop_sequences(p);
  return p;
}

Problem make_problem(const BackwardArgs& args, const Options& options) {
  Problem p = make_shared({args.q, args.k, args.v}, options);
  p.pass = Pass::kBackward;
  p.dout = check_like("dout", args.dout, p, true, p.dv, false);
  p.out = check_like("out", args.out, p, true, p.dv, false);
  p.lse = check_lse(args.lse, p, false);
  p.want_lse = true;
  p.dq = check_like("dq", args.dq, p, true, p.d, true);
  p.dk = check_like("dk", args.dk, p, false, p.d, true);
  p.dv_grad = check_like("dv", args.dv, p, false, p.dv, true);
  if (p.total_q == 0 && p.total_k == 0) drop_sequences(p);
  return p;
}

void check_run(const ForwardArgs& planned, const ForwardArgs& args) {
  check_pointers({{{"q", &args.q, false}, &planned.q},
                  {{"k", &args.k, false}, &planned.k},
                  {{"v", &args.v, false}, &planned.v},
                  {{"out", &args.out, true}, &planned.out},
                  {{"lse", &args.lse, true}, &planned.lse}});
}

void check_run(const BackwardArgs& planned, const BackwardArgs& args) {
  check_pointers({{{"dout", &args.dout, false}, &planned.dout},
                  {{"q", &args.q, false}, &planned.q},
                  {{"k", &args.k, false}, &planned.k},
                  {{"v", &args.v, false}, &planned.v},
                  {{"out", &args.out, false}, &planned.out},
                  {{"lse", &args.lse, false}, &planned.lse},
                  {{"dq", &args.dq, true}, &planned.dq},
                  {{"dk", &args.dk, true}, &planned.dk},
                  {{"dv", &args.dv, true}, &planned.dv}});
}

}  // namespace fulgur

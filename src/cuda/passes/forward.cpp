#include "cuda/passes/forward.h"

#include <algorithm>
#include <utility>

namespace fulgur::cuda {

bool rows_decide(const Problem& p) {
  const bool codes = is_low_bit(p.dtypes.k) || is_low_bit(p.dtypes.v);
  return p.invariant && !codes && !has_cache(p) && !p.has(Arg::kTreeMask) && p.dropout_p == 0;
}

int64_t few_queries(const Problem& p) { return rows_decide(p) ? kFewRows / p.group() : 0; }

int64_t deciding_queries(const Problem& p) { return std::max(p.sq, p.origin.queries); }

bool takes_both(const Problem& p) {
  const int64_t few = few_queries(p);
  return few > 0 && p.sq > few && (p.packed || p.has(Arg::kSeqUsedQ));
}

AnyForwardKey forward_key_by_rows(const Problem& p) {
  AnyForwardKey key = any_forward_key(p);
  if (takes_both(p)) key.few_queries = static_cast<int>(few_queries(p));
  return key;
}

ForwardPassExecutable::ForwardPassExecutable(const Problem& problem, Gpu& gpu,
                                             Explanation explanation,
                                             const CallWorkspace& workspace, bool launches,
                                             bool out_aligned, bool has_padding)
    : AttentionExecutable(problem, gpu, std::move(explanation), workspace, launches),
      out_aligned_(out_aligned),
      padding_(padding_params(problem)) {
  if (has_padding) padding_kernel_ = gpu.kernel(padding_kernel()).function;
}

void ForwardPassExecutable::check_addresses(const ForwardArgs& args) const {
  AttentionExecutable::check_addresses(args);
  aligned_data("out", args.out, !out_aligned_);
}

void ForwardPassExecutable::launch_padding(const ForwardArgs& args, CUstream stream) const {
  if (padding_kernel_ == nullptr) return;
  ForwardPaddingParams padding = padding_;
  padding.o = args.out.data;
  padding.lse = static_cast<float*>(args.lse.data);
  padding.cu_seqlens_q = static_cast<const int*>(args.lengths.cu_seqlens_q.data);
  padding.seqused_q = static_cast<const int*>(args.lengths.seqused_q.data);
  cuda::launch_padding(stream, padding_kernel_, padding, gpu_.sms());
}

}  // namespace fulgur::cuda

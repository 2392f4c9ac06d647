/// An append through the C API.
#pragma once

#include "appended.h"
#include "call.h"

namespace fulgur::test {

inline fulgur_status append_c(const AppendTensors& a, const Options& options) {
  const Dl k(a.k_cache), v(a.v_cache), k_new(a.k_new), v_new(a.v_new), cu_k(a.cu_seqlens_k_new),
      seqlens(a.cache_seqlens), table(a.page_table), indptr(a.page_indptr),
      index(a.cache_batch_idx), cos(a.cos), sin(a.sin), positions(a.rotary_seqlens), q(a.q),
      q_out(a.q_out), cu_q(a.cu_seqlens_q);
  const fulgur_options o = c_options(options);
  const fulgur_append_args args{sizeof(args),  k,         v,      k_new, v_new, cu_k,
                                seqlens,       table,     indptr, index, cos,   sin,
                                a.interleaved, positions, q,      q_out, cu_q};
  return fulgur_append(&args, &o, nullptr);
}

}  // namespace fulgur::test

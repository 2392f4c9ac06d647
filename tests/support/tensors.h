/// The tensors of a call, all of which the tests may write.
#pragma once

#include "fulgur/attention.h"

namespace fulgur::test {

struct ForwardTensors {
  Tensor q{}, k{}, v{}, out{}, lse{}, alibi_slopes{}, cu_seqlens_q{}, cu_seqlens_k{}, seqused_k{};
  Tensor rng_state{}, page_table{}, page_indptr{}, cache_batch_idx{}, leftpad_k{};
  operator ForwardArgs() const {
    return {q,
            k,
            v,
            out,
            lse,
            alibi_slopes,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_k,
            rng_state,
            page_table,
            page_indptr,
            cache_batch_idx,
            leftpad_k};
  }
};

struct BackwardTensors {
  Tensor dout{}, q{}, k{}, v{}, out{}, lse{}, dq{}, dk{}, dv{};
  Tensor alibi_slopes{}, cu_seqlens_q{}, cu_seqlens_k{}, seqused_k{}, dlse{}, rng_state{};
  operator BackwardArgs() const {
    return {
        dout,         q,         k,    v,        out, lse, dq, dk, dv, alibi_slopes, cu_seqlens_q,
        cu_seqlens_k, seqused_k, dlse, rng_state};
  }
};

}  // namespace fulgur::test

/// The tensors of a call, all of which the tests may write.
#pragma once

#include "fulgur/append.h"
#include "fulgur/attention.h"

namespace fulgur::test {

struct ForwardTensors {
  Tensor q{}, k{}, v{}, out{}, lse{}, alibi_slopes{}, cu_seqlens_q{}, cu_seqlens_k{};
  Tensor seqused_q{}, seqused_k{}, rng_state{}, page_table{}, page_indptr{}, cache_batch_idx{};
  Tensor leftpad_k{}, sinks{}, tree_mask{}, prefix_groups{}, prefix_lens{};
  operator ForwardArgs() const {
    return {q,
            k,
            v,
            out,
            lse,
            alibi_slopes,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            rng_state,
            page_table,
            page_indptr,
            cache_batch_idx,
            leftpad_k,
            sinks,
            tree_mask,
            prefix_groups,
            prefix_lens};
  }
};

struct BackwardTensors {
  Tensor dout{}, q{}, k{}, v{}, out{}, lse{}, dq{}, dk{}, dv{};
  Tensor alibi_slopes{}, cu_seqlens_q{}, cu_seqlens_k{}, seqused_q{}, seqused_k{}, dlse{};
  Tensor rng_state{}, sinks{}, dsinks{};
  operator BackwardArgs() const {
    return {dout,
            q,
            k,
            v,
            out,
            lse,
            dq,
            dk,
            dv,
            alibi_slopes,
            cu_seqlens_q,
            cu_seqlens_k,
            seqused_q,
            seqused_k,
            dlse,
            rng_state,
            sinks,
            dsinks};
  }
};

struct AppendTensors {
  Tensor k_cache{}, v_cache{}, k_new{}, v_new{}, cu_seqlens_k_new{}, cache_seqlens{};
  Tensor page_table{}, page_indptr{}, cache_batch_idx{}, cos{}, sin{};
  bool interleaved = false;
  Tensor rotary_seqlens{}, q{}, q_out{}, cu_seqlens_q{};
  operator AppendArgs() const {
    return {
        k_cache,     v_cache,         k_new, v_new, cu_seqlens_k_new, cache_seqlens,  page_table,
        page_indptr, cache_batch_idx, cos,   sin,   interleaved,      rotary_seqlens, q,
        q_out,       cu_seqlens_q};
  }
};

}  // namespace fulgur::test

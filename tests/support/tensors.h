/// The tensors of a call, all of which the tests may write.
#pragma once

#include <vector>

#include "fulgur/append.h"
#include "fulgur/attention.h"

namespace fulgur::test {

struct ForwardTensors {
  Tensor q{}, k{}, v{}, out{}, lse{}, alibi_slopes{}, cu_seqlens_q{}, cu_seqlens_k{};
  Tensor seqused_q{}, seqused_k{}, rng_state{}, page_table{}, page_indptr{}, cache_batch_idx{};
  Tensor leftpad_k{}, sinks{}, tree_mask{}, bias{}, prefix_groups{}, prefix_lens{};
  Tensor q_descale{}, k_descale{}, v_descale{}, k_zero_point{}, v_zero_point{}, k_mean{};
  std::vector<TensorBinding> tensors{};
  operator ForwardArgs() const {
    return {.q = q,
            .k = k,
            .v = v,
            .out = out,
            .lse = lse,
            .alibi_slopes = alibi_slopes,
            .lengths = {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k},
            .rng_state = rng_state,
            .sinks = sinks,
            .tree_mask = tree_mask,
            .bias = bias,
            .tensors = tensors,
            .cache = {page_table, page_indptr, cache_batch_idx, leftpad_k},
            .shared_prefix = {prefix_groups, prefix_lens},
            .descales = {q_descale, k_descale, v_descale, k_zero_point, v_zero_point, k_mean}};
  }
};

struct BackwardTensors {
  Tensor dout{}, q{}, k{}, v{}, out{}, lse{}, dq{}, dk{}, dv{};
  Tensor alibi_slopes{}, cu_seqlens_q{}, cu_seqlens_k{}, seqused_q{}, seqused_k{}, dlse{};
  Tensor rng_state{}, sinks{}, dsinks{}, bias{}, dbias{};
  std::vector<TensorBinding> tensors{};
  operator BackwardArgs() const {
    return {.dout = dout,
            .q = q,
            .k = k,
            .v = v,
            .out = out,
            .lse = lse,
            .dq = dq,
            .dk = dk,
            .dv = dv,
            .alibi_slopes = alibi_slopes,
            .lengths = {cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k},
            .dlse = dlse,
            .rng_state = rng_state,
            .sinks = sinks,
            .dsinks = dsinks,
            .bias = bias,
            .dbias = dbias,
            .tensors = tensors};
  }
};

struct AppendTensors {
  Tensor k_cache{}, v_cache{}, k_new{}, v_new{}, cu_seqlens_k_new{}, cache_seqlens{};
  Tensor page_table{}, page_indptr{}, cache_batch_idx{}, cos{}, sin{};
  bool interleaved = false;
  Tensor rotary_seqlens{}, q{}, q_out{}, cu_seqlens_q{};
  Tensor k_cache_descale{}, v_cache_descale{}, k_cache_zero_point{}, v_cache_zero_point{};
  Tensor k_cache_mean{};
  NewRows new_rows() const {
    return {.k_cache = k_cache,
            .v_cache = v_cache,
            .k_new = k_new,
            .v_new = v_new,
            .cu_seqlens_k_new = cu_seqlens_k_new,
            .cache_seqlens = cache_seqlens,
            .rotary = {cos, sin, rotary_seqlens, interleaved},
            .k_cache_descale = k_cache_descale,
            .v_cache_descale = v_cache_descale,
            .k_cache_zero_point = k_cache_zero_point,
            .v_cache_zero_point = v_cache_zero_point,
            .k_cache_mean = k_cache_mean};
  }
  operator AppendArgs() const {
    return {.rows = new_rows(),
            .cache = {page_table, page_indptr, cache_batch_idx},
            .q = q,
            .q_out = q_out,
            .cu_seqlens_q = cu_seqlens_q};
  }
};

/// The call that appends `rows` and attends: their caches and tables are the call's.
inline ForwardArgs appending(const ForwardTensors& attention, const AppendTensors& rows) {
  ForwardArgs args = attention;
  args.cache.page_table = rows.page_table;
  args.cache.page_indptr = rows.page_indptr;
  args.cache.cache_batch_idx = rows.cache_batch_idx;
  args.append = rows.new_rows();
  return args;
}

}  // namespace fulgur::test

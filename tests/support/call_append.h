/// An append through the C API.
#pragma once

#include "appended.h"
#include "call.h"

namespace fulgur::test {

/// The arguments of append for the C API, of which they are a view.
class CAppend {
 public:
  explicit CAppend(const AppendTensors& a)
      : k_(a.k_cache),
        v_(a.v_cache),
        k_new_(a.k_new),
        v_new_(a.v_new),
        cu_k_(a.cu_seqlens_k_new),
        seqlens_(a.cache_seqlens),
        table_(a.page_table),
        indptr_(a.page_indptr),
        index_(a.cache_batch_idx),
        cos_(a.cos),
        sin_(a.sin),
        positions_(a.rotary_seqlens),
        q_(a.q),
        q_out_(a.q_out),
        cu_q_(a.cu_seqlens_q),
        args_{sizeof(args_), k_,         v_,      k_new_, v_new_, cu_k_,
              seqlens_,      table_,     indptr_, index_, cos_,   sin_,
              a.interleaved, positions_, q_,      q_out_, cu_q_} {}
  operator const fulgur_append_args*() const { return &args_; }

 private:
  Dl k_, v_, k_new_, v_new_, cu_k_, seqlens_, table_, indptr_, index_, cos_, sin_, positions_;
  Dl q_, q_out_, cu_q_;
  fulgur_append_args args_;
};

inline fulgur_status append_c(const AppendTensors& a, const Options& options) {
  const CAppend args(a);
  const fulgur_options o = c_options(options);
  return fulgur_append(args, &o, nullptr);
}

}  // namespace fulgur::test

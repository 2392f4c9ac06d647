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
        rotary_{sizeof(rotary_), cos_, sin_, positions_, a.interleaved},
        rows_{sizeof(rows_), k_,      v_,      k_new_,  v_new_,  cu_k_,   seqlens_, &rotary_,
              nullptr,       nullptr, nullptr, nullptr, nullptr, nullptr, nullptr},
        cache_{sizeof(cache_), table_, indptr_, index_, nullptr},
        args_{sizeof(args_), &rows_, &cache_, q_, q_out_, cu_q_} {}
  operator const fulgur_append_args*() const { return &args_; }
  const fulgur_new_rows* rows() const { return &rows_; }

 private:
  Dl k_, v_, k_new_, v_new_, cu_k_, seqlens_, table_, indptr_, index_, cos_, sin_, positions_;
  Dl q_, q_out_, cu_q_;
  fulgur_rotary rotary_;
  fulgur_new_rows rows_;
  fulgur_kv_cache cache_;
  fulgur_append_args args_;
};

inline fulgur_status append_c(const AppendTensors& a, const Options& options) {
  const CAppend args(a);
  const fulgur_options o = c_options(options);
  return fulgur_append(args, &o, nullptr);
}

}  // namespace fulgur::test

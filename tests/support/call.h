/// The arguments of a call, to be changed one by one, and the same call through the C API.
#pragma once

#include <gtest/gtest.h>
#include <regex.h>

#include <string>

#include "fulgur/c.h"
#include "workload.h"

namespace fulgur::test {

// All arguments of a forward and a backward call.
struct Call : ForwardTensors {
  Tensor dout, dq, dk, dv, dlse, dsinks, dbias;
  Options options;
  Run run;

  explicit Call(const Workload& w)
      : ForwardTensors(w.forward),
        dout(w.backward.dout),
        dq(w.backward.dq),
        dk(w.backward.dk),
        dv(w.backward.dv),
        dlse(w.backward.dlse),
        dsinks(w.backward.dsinks),
        dbias(w.backward.dbias),
        options(w.options),
        run(w.run_options) {}
  ForwardArgs forward() const { return *this; }
  BackwardArgs backward() const {
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
            .dbias = dbias};
  }
};

// The same tensor for the C API.
class Dl {
 public:
  explicit Dl(const ConstTensor& t) : tensor_(t) {
    dl_.data = const_cast<void*>(t.data);
    dl_.device = {t.device.type == DeviceType::kCpu ? kDLCPU : kDLCUDA, t.device.index};
    dl_.ndim = t.rank;
    dl_.shape = tensor_.shape.data();
    dl_.strides = tensor_.strides.data();
    const auto bits = static_cast<uint8_t>(8 * size_of(t.dtype));
    const uint8_t code = t.dtype == DType::kBF16                            ? kDLBfloat
                         : t.dtype == DType::kBool                          ? 6
                         : t.dtype == DType::kU8                            ? kDLUInt
                         : t.dtype == DType::kI32 || t.dtype == DType::kI64 ? kDLInt
                                                                            : kDLFloat;
    dl_.dtype = {code, bits, 1};
  }
  Dl(const Dl&) = delete;
  operator const DLTensor*() const { return dl_.ndim > 0 ? &dl_ : nullptr; }

 private:
  ConstTensor tensor_;
  DLTensor dl_{};
};

/// A struct of the C API with nothing given.
template <class Struct>
Struct c_struct() {
  Struct s{};
  s.struct_size = sizeof(Struct);
  return s;
}

/// Options for the C API, of which they are a view.
inline fulgur_options c_options(const Options& options) {
  fulgur_options o;
  fulgur_options_init(&o, sizeof(o));
  o.window_left = options.mask.left;
  o.window_right = options.mask.right;
  o.scale = options.scale ? &*options.scale : nullptr;
  o.softcap = options.softcap;
  o.dropout_p = options.dropout_p;
  o.max_seqlen_q = options.max_seqlen_q;
  o.max_seqlen_k = options.max_seqlen_k;
  o.threads = options.threads;
  o.engine = options.engine.c_str();
  o.max_workspace = options.max_workspace;
  o.fast_codes = options.fast_codes;
  o.hadamard = options.hadamard;
  o.chunk = options.mask.chunk;
  o.top_left = options.mask.top_left;
  return o;
}

/// `append`: of a forward call.
inline fulgur_status call_c(const Call& call, bool backward,
                            const fulgur_new_rows* append = nullptr) {
  const Dl q(call.q), k(call.k), v(call.v), out(call.out), lse(call.lse), dout(call.dout),
      dq(call.dq), dk(call.dk), dv(call.dv), alibi(call.alibi_slopes), cu_q(call.cu_seqlens_q),
      cu_k(call.cu_seqlens_k), used_q(call.seqused_q), used_k(call.seqused_k), dlse(call.dlse),
      rng(call.rng_state), table(call.page_table), indptr(call.page_indptr),
      index(call.cache_batch_idx), leftpad(call.leftpad_k), sinks(call.sinks), dsinks(call.dsinks),
      tree(call.tree_mask), bias(call.bias), dbias(call.dbias), groups(call.prefix_groups),
      lens(call.prefix_lens);
  const fulgur_options o = c_options(call.options);
  const fulgur_run run{sizeof(run),
                       call.run.stream,
                       call.run.workspace.data,
                       call.run.workspace.bytes,
                       call.run.dropout_seed,
                       call.run.dropout_offset};
  const fulgur_var_len lengths{sizeof(lengths), cu_q, cu_k, used_q, used_k};
  if (backward) {
    const fulgur_backward_args args{sizeof(args), dout,     q,    k,     v,       out,   lse,
                                    dq,           dk,       dv,   alibi, rng,     sinks, dlse,
                                    dsinks,       &lengths, bias, dbias, nullptr, 0};
    return fulgur_backward(&args, &o, &run);
  }
  const fulgur_kv_cache cache{sizeof(cache), table, indptr, index, leftpad};
  const fulgur_shared_prefix prefix{sizeof(prefix), groups, lens};
  const fulgur_forward_args args{sizeof(args), q,      k,     v,       out,      lse,
                                 alibi,        rng,    sinks, tree,    &lengths, &cache,
                                 &prefix,      append, bias,  nullptr, nullptr,  0};
  return fulgur_forward(&args, &o, &run);
}

inline Tensor resized(Tensor t, std::initializer_list<int64_t> shape) {
  return Tensor::contiguous(t.data, t.dtype, shape, t.device);
}

inline Tensor on_cuda(Tensor t) {
  t.device = {DeviceType::kCuda, 0};
  return t;
}

inline Tensor as(Tensor t, DType dtype) {
  t.dtype = dtype;
  return t;
}

/// Whether `text` starts with what the POSIX extended regular expression describes.
inline testing::AssertionResult starts_like(const std::string& text, const std::string& pattern) {
  regex_t compiled;
  if (regcomp(&compiled, pattern.c_str(), REG_EXTENDED) != 0) {
    return testing::AssertionFailure() << "not a regular expression: " << pattern;
  }
  regmatch_t match{};
  const bool found = regexec(&compiled, text.c_str(), 1, &match, 0) == 0 && match.rm_so == 0;
  regfree(&compiled);
  if (found) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "got \"" << text << "\", want " << pattern;
}

}  // namespace fulgur::test

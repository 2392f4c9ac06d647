#include "fulgur/c.h"

#include <fmt/format.h>

#include <new>
#include <string>
#include <vector>

#include "fulgur/attention.h"
#include "fulgur/error.h"
#include "fulgur/merge.h"
#include "fulgur/version.h"

namespace {

using fulgur::Tensor;

thread_local std::string last_error;

template <class Call>
fulgur_status guarded(Call call) {
  try {
    call();
    return FULGUR_OK;
  } catch (const fulgur::Error& e) {
    last_error = e.what();
    return static_cast<fulgur_status>(e.status());
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
    return FULGUR_OUT_OF_MEMORY;
  } catch (const std::exception& e) {
    last_error = e.what();
    return FULGUR_INTERNAL;
  }
}

Tensor optional(const DLTensor* t, const char* name) {
  return t == nullptr ? Tensor{} : Tensor::from_dlpack(*t, name);
}

Tensor required(const DLTensor* t, const char* name) {
  if (t == nullptr) {
    throw fulgur::Error(fulgur::Status::kInvalidArgument,
                        fmt::format("{}: got null, want a tensor", name));
  }
  return Tensor::from_dlpack(*t, name);
}

fulgur::Options convert(const fulgur_options* o) {
  fulgur::Options options;
  if (o == nullptr) return options;
  if (o->struct_size != sizeof(fulgur_options)) {
    throw fulgur::Error(fulgur::Status::kInvalidArgument,
                        fmt::format("options: struct_size is {}, want {}; call fulgur_options_init",
                                    o->struct_size, sizeof(fulgur_options)));
  }
  options.mask = fulgur::window(o->window_left, o->window_right);
  if (o->scale != nullptr) options.scale = *o->scale;
  options.softcap = o->softcap;
  options.alibi_slopes = optional(o->alibi_slopes, "alibi_slopes");
  options.dropout = {o->dropout_p, o->dropout_seed, o->dropout_offset};
  options.cu_seqlens_q = optional(o->cu_seqlens_q, "cu_seqlens_q");
  options.cu_seqlens_k = optional(o->cu_seqlens_k, "cu_seqlens_k");
  options.max_seqlen_q = o->max_seqlen_q;
  options.max_seqlen_k = o->max_seqlen_k;
  options.seqused_k = optional(o->seqused_k, "seqused_k");
  options.deterministic = o->deterministic != 0;
  options.invariant = o->invariant != 0;
  options.threads = o->threads;
  if (o->engine != nullptr) options.engine = o->engine;
  options.stream = o->stream;
  return options;
}

}  // namespace

void fulgur_options_init(fulgur_options* options) {
  *options = fulgur_options{};
  options->struct_size = sizeof(fulgur_options);
  options->window_left = options->window_right = -1;
}

fulgur_status fulgur_forward(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                             const DLTensor* out, const DLTensor* lse,
                             const fulgur_options* options) {
  return guarded([&] {
    fulgur::forward({.q = required(q, "q"),
                     .k = required(k, "k"),
                     .v = required(v, "v"),
                     .out = required(out, "out"),
                     .lse = optional(lse, "lse")},
                    convert(options));
  });
}

fulgur_status fulgur_backward(const DLTensor* dout, const DLTensor* q, const DLTensor* k,
                              const DLTensor* v, const DLTensor* out, const DLTensor* lse,
                              const DLTensor* dq, const DLTensor* dk, const DLTensor* dv,
                              const fulgur_options* options) {
  return guarded([&] {
    fulgur::backward({.dout = required(dout, "dout"),
                      .q = required(q, "q"),
                      .k = required(k, "k"),
                      .v = required(v, "v"),
                      .out = required(out, "out"),
                      .lse = required(lse, "lse"),
                      .dq = required(dq, "dq"),
                      .dk = required(dk, "dk"),
                      .dv = required(dv, "dv")},
                     convert(options));
  });
}

fulgur_status fulgur_merge(const DLTensor* const* part_outs, const DLTensor* const* part_lses,
                           size_t count, const DLTensor* out, const DLTensor* lse) {
  return guarded([&] {
    if (count > 0 && (part_outs == nullptr || part_lses == nullptr)) {
      throw fulgur::Error(fulgur::Status::kInvalidArgument,
                          fmt::format("parts: got null, want {} tensors", count));
    }
    std::vector<fulgur::Partial> parts;
    for (size_t i = 0; i < count; ++i) {
      parts.push_back({required(part_outs[i], fmt::format("parts[{}].out", i).c_str()),
                       required(part_lses[i], fmt::format("parts[{}].lse", i).c_str())});
    }
    fulgur::merge(parts, {required(out, "out"), optional(lse, "lse")});
  });
}

const char* fulgur_last_error(void) { return last_error.c_str(); }
const char* fulgur_version(void) { return FULGUR_VERSION; }

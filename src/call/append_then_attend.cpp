#include "call/append_then_attend.h"

#include <tuple>
#include <utility>

#include "base/check.h"
#include "base/convert.h"
#include "call/append_lengths.h"

namespace fulgur {
namespace {

/// Rows of queries that are rotated begin at multiples of 16 bytes.
int64_t rotated_head(int64_t d) { return d > AppendCall::kMaxDim ? d : (d + 7) / 8 * 8; }

void check_said_once(const ForwardArgs& args) {
  for (const auto& [name, t, there] :
       {std::tuple{"k", &args.k, "k_cache"}, std::tuple{"v", &args.v, "v_cache"},
        std::tuple{"k_descale", &args.descales.k_descale, "k_cache_descale"},
        std::tuple{"v_descale", &args.descales.v_descale, "v_cache_descale"},
        std::tuple{"k_zero_point", &args.descales.k_zero_point, "k_cache_zero_point"},
        std::tuple{"v_zero_point", &args.descales.v_zero_point, "v_cache_zero_point"},
        std::tuple{"k_mean", &args.descales.k_mean, "k_cache_mean"}}) {
    if (t->given()) fail(name, "given with append, want {} of it alone", there);
  }
  for (const auto& [name, t] : {std::pair{"cu_seqlens_k", &args.lengths.cu_seqlens_k},
                                std::pair{"seqused_k", &args.lengths.seqused_k}}) {
    if (t->given()) {
      fail(name, "given with append, want none: sequences have cache_seqlens and the new rows");
    }
  }
}

/// Queries as append may take them, and as the attention after it will.
void check_queries(const ForwardArgs& args) {
  const ConstTensor &q = args.q, &k = args.append.k_cache;
  const bool packed = args.lengths.cu_seqlens_q.given();
  const int rank = packed ? 3 : 4;
  check_tensor("q", q, packed ? "(total, heads, dim)" : "(batch, seqlen, heads, dim)", rank, false);
  const int64_t batch = args.append.cache_seqlens.shape[0];
  if (packed) {
    check_lengths("cu_seqlens_q", args.lengths.cu_seqlens_q, ends_of(batch), "(batch + 1)",
                  q.device);
  } else if (q.shape[0] != batch) {
    fail("q", "got {} sequences, want {}, as cache_seqlens has", q.shape[0], batch);
  }
  const bool codes = is_low_bit(k.dtype);
  check_dtype("q", q, codes ? args.append.k_new.dtype : k.dtype,
              codes ? "the dtype of k_new" : "the dtype of k_cache");
  check_device("q", q, k.device, AppendCall::kLike);
  if (q.shape[rank - 1] != k.shape[3]) {
    fail("q", "got head dim {}, want {}, that of k_cache", q.shape[rank - 1], k.shape[3]);
  }
}

AppendArgs rows_of(const ForwardArgs& args, bool hadamard) {
  check_said_once(args);
  AppendArgs rows{.rows = args.append, .cache = args.cache};
  if ((!args.append.rotary.cos.given() && !hadamard) || !args.q.given()) return rows;
  rows.q = args.q;
  rows.cu_seqlens_q = args.lengths.cu_seqlens_q;
  rows.q_out = args.q.rank < 3
                   ? Tensor{nullptr, args.q.dtype, args.q.device, args.q.rank, args.q.shape}
                   // which append refuses
                   : rotated_like(args.q, nullptr);
  return rows;
}

ForwardArgs attention_of(const ForwardArgs& args) {
  check_queries(args);
  ForwardArgs attention = args;
  attention.append = {};
  attention.k = args.append.k_cache;
  attention.v = args.append.v_cache;
  attention.descales.k_descale = args.append.k_cache_descale;
  attention.descales.v_descale = args.append.v_cache_descale;
  attention.descales.k_zero_point = args.append.k_cache_zero_point;
  attention.descales.v_zero_point = args.append.v_cache_zero_point;
  attention.descales.k_mean = args.append.k_cache_mean;
  attention.lengths.seqused_k = args.append.cache_seqlens;
  return attention;
}

}  // namespace

AppendThenAttend::AppendThenAttend(const ForwardArgs& args, const Mask& mask, bool hadamard)
    : rows_(rows_of(args, hadamard)),
      call_(checked_append(rows_, mask, hadamard, hadamard)),
      attention_(attention_of(args)) {
  set_lengths();
}

void AppendThenAttend::set_lengths() {
  const auto readable = [](const ConstTensor& t) { return on_host(t) && t.data != nullptr; };
  for (const auto& [name, t] : {std::pair{"cu_seqlens_k_new", &rows_.rows.cu_seqlens_k_new},
                                std::pair{"cache_seqlens", &rows_.rows.cache_seqlens},
                                std::pair{"rotary_seqlens", &rows_.rows.rotary.rotary_seqlens},
                                std::pair{"cu_seqlens_q", &rows_.cu_seqlens_q},
                                std::pair{"page_indptr", &rows_.cache.page_indptr}}) {
    if (!t->given() || !on_host(*t)) continue;
    if (t->data == nullptr) return;  // a plan may be made before there is data
    check_data(name, *t);
  }
  const AppendLengths checked(call_);
  if (!readable(rows_.rows.cache_seqlens)) return;
  if (call_.packed_new && !readable(rows_.rows.cu_seqlens_k_new)) return;
  for (int64_t b = 0; b < call_.p.batch; ++b) {
    const Sequence s = checked.new_keys(b);
    lengths_.push_back(static_cast<int32_t>(s.k_begin + s.sk));
  }
  attention_.lengths.seqused_k =
      ConstTensor::contiguous(lengths_.data(), DType::kI32, {call_.p.batch});
}

void AppendThenAttend::rotate_into(void* memory) {
  if (!rotates()) return;
  rows_.q_out.data = memory;
  attention_.q = rows_.q_out;
}

void AppendThenAttend::attend_to(const int32_t* lengths) {
  attention_.lengths.seqused_k =
      ConstTensor::contiguous(lengths, DType::kI32, {call_.p.batch}, call_.p.device);
}

Problem::Append append_of(const AppendThenAttend& a) {
  Problem::Append append{true, a.rotates(), a.call().p.batch, a.call().tokens, 0};
  if (a.call().p.device.type == DeviceType::kCpu) return append;
  const auto count = [&](const TensorRule& rule, const auto& t) {
    if (rule.place == Place::kHostToo && t.given() && on_host(t)) append.host_numbers += t.numel();
  };
  for_each_tensor(count, a.rows());
  return append;
}

Problem without_append(Problem p) {
  if (p.append.rotates) {
    p = with_rotated_queries(p);
    p.hadamard = false;  // append has transformed the queries, too
  }
  p.append = {};
  return p;
}

Problem with_rotated_queries(Problem p) {
  if (p.total_q == 0) return p;
  const int64_t head = rotated_head(p.d), row = p.hq * head;
  p.q = {p.packed ? 0 : p.sq * row, row, head, true};
  return p;
}

int64_t rotated_bytes(const Problem& p) {
  if (!p.append.rotates && !p.hadamard) return 0;
  return p.total_q == 0 ? 0 : p.total_q * p.hq * rotated_head(p.d) * size_of(p.dtypes.q);
}

Tensor rotated_like(const ConstTensor& q, void* memory) {
  Tensor to{memory, q.dtype, q.device, q.rank, q.shape};
  to.strides[to.rank - 1] = 1;
  to.strides[to.rank - 2] = rotated_head(to.shape[to.rank - 1]);
  for (int i = to.rank - 3; i >= 0; --i) {  // if strides overflow, append reports overlapping rows
    const auto stride = static_cast<uint64_t>(to.strides[i + 1]);
    to.strides[i] = static_cast<int64_t>(stride * static_cast<uint64_t>(to.shape[i + 1]));
  }
  return to;
}

}  // namespace fulgur

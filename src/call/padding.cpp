#include "call/padding.h"

#include <cstring>
#include <limits>

#include "base/convert.h"

namespace fulgur {
namespace {

void zero_rows(const Tensor& t, const Layout& layout, int64_t b, int64_t begin, int64_t count,
               int64_t heads, int64_t dim) {
  const int64_t element = size_of(t.dtype);
  for (int64_t r = begin; r < begin + count; ++r) {
    for (int64_t h = 0; h < heads; ++h) {  // all-zero bytes are 0 in every float dtype
      std::memset(static_cast<char*>(t.data) + layout.offset(b, r, h) * element, 0, dim * element);
    }
  }
}

/// Calls clear(b, first row, count) for the rows of q that belong to no sequence.
template <class Clear>
void each_padding_of_q(const Problem& p, const Sequences& sequences, const Clear& clear) {
  for (const Sequence& rows : sequences.padding()) clear(0, rows.q_begin, rows.sq);
  if (!p.has(Arg::kSeqUsedQ)) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequences[b];
    clear(b, s.q_begin + s.sq, sequences.room_q(b) - s.sq);
  }
}

}  // namespace

void write_padding(const Problem& p, const Sequences& sequences, const ForwardArgs& args) {
  each_padding_of_q(p, sequences, [&](int64_t b, int64_t begin, int64_t count) {
    zero_rows(args.out, p.out, b, begin, count, p.hq, p.dv);
    if (!p.has(Arg::kLse)) return;
    for (int64_t r = begin; r < begin + count; ++r) {
      for (int64_t h = 0; h < p.hq; ++h) {
        store_element(args.lse.data, args.lse.dtype, p.lse.offset(b, r, h),
                      -std::numeric_limits<double>::infinity());
      }
    }
  });
}

void write_padding(const Problem& p, const Sequences& sequences, const BackwardArgs& args) {
  if (p.wants_dq()) {
    each_padding_of_q(p, sequences, [&](int64_t b, int64_t begin, int64_t count) {
      zero_rows(args.dq, p.dq, b, begin, count, p.hq, p.d);
    });
  }
  if (!p.wants_dk_dv()) return;
  for (const Sequence& rows : sequences.padding()) {
    zero_rows(args.dk, p.dk, 0, rows.k_begin, rows.sk, p.hk, p.d);
    zero_rows(args.dv, p.dv_grad, 0, rows.k_begin, rows.sk, p.hk, p.dv);
  }
  if (!p.has(Arg::kSeqUsedK)) return;
  for (int64_t b = 0; b < p.batch; ++b) {
    const Sequence s = sequences[b];
    const int64_t missing = sequences.room_k(b) - s.sk;
    zero_rows(args.dk, p.dk, b, s.k_begin + s.sk, missing, p.hk, p.d);
    zero_rows(args.dv, p.dv_grad, b, s.k_begin + s.sk, missing, p.hk, p.dv);
  }
}

}  // namespace fulgur

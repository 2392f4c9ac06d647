#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>

#include "base/check.h"
#include "base/scales.h"
#include "call/tensors.h"
#include "expression/call.h"
#include "fulgur/attention.h"

namespace fulgur {

enum class Pass : uint8_t { kForward, kBackward, kScores };

/// The papers' algorithms of attention. kAny leaves the choice to the engines.
enum class Algorithm : uint8_t { kAny, kStandard, kFa1, kFa2, kFa3 };

/// The name of an algorithm, such as "fa2"; empty for kAny.
const char* name_of(Algorithm algorithm);

/// The algorithm of a name that a user gave. Throws Error(kInvalidArgument).
Algorithm algorithm_called(const std::string& name);

/// Why an engine with the algorithms `had` rejects a call that asks for `asked`; empty if it does
/// not.
std::string algorithm_rejected(Algorithm asked, std::initializer_list<Algorithm> had);

/// The dtypes of a call's operands. A gradient has the dtype of its operand.
struct OperandTypes {
  DType q = DType::kF32, k = DType::kF32, v = DType::kF32, out = DType::kF32;

  static OperandTypes all(DType dtype) { return {dtype, dtype, dtype, dtype}; }
  /// Whether each operand has one of `dtypes`.
  bool in(std::initializer_list<DType> dtypes) const {
    const auto among = [&](DType one) { return std::ranges::find(dtypes, one) != dtypes.end(); };
    return among(q) && among(k) && among(v) && among(out);
  }
  /// Whether some operand has this dtype.
  bool has(DType dtype) const { return q == dtype || k == dtype || v == dtype || out == dtype; }
  bool operator==(const OperandTypes&) const = default;
};

/// What a call computes, validated: all that is fixed when it is planned, nothing about how it is
/// computed, and nothing that may change from call to call. Equal problems have the same plan.
struct Problem {
  /// How the sequences of K and V lie in a cache. Tables give their places when the call runs.
  struct Cache {
    enum class Pages : uint8_t { kNone, kTable, kLists };  ///< (batch, max_pages), page_indptr

    Pages pages = Pages::kNone;
    int64_t entries = 0;       ///< the first dimension of k: pages, or rows of the batch
    int64_t page = 0;          ///< keys of a page
    int64_t ids = 0;           ///< the maximum of a sequence, or those of all lists
    int64_t table_stride = 0;  ///< from the ids of a sequence to those of the next
    int64_t id_stride = 1;     ///< from an id of a sequence to its next

    bool operator==(const Cache&) const = default;
    bool paged() const { return pages != Pages::kNone; }
  };

  /// New rows that a call appends before it attends (ForwardArgs::append).
  struct Append {
    bool given = false;
    bool rotates = false;      ///< keys and queries are rotated
    int64_t batch = 0;         ///< of the caches, even if there are no queries and p.batch is 0
    int64_t tokens = 0;        ///< the new rows of all sequences, padding included
    int64_t host_numbers = 0;  ///< lengths in host memory of caches that lie on a device

    bool operator==(const Append&) const = default;
  };

  Pass pass = Pass::kForward;
  OperandTypes dtypes;
  Device device;
  int64_t batch = 0, sq = 0, sk = 0;  ///< sq, sk: the longest sequence that a call may have
  int64_t hq = 0, hk = 0, d = 0, dv = 0;
  bool packed = false;    ///< q and the other tensors with a row for each query are packed
  bool packed_k = false;  ///< k and v are packed: q is, and they are no cache
  int64_t total_q = 0, total_k = 0;  ///< all rows of q and of k, padding included
  int64_t total_keys =
      0;  ///< the maximum of the keys of all sequences; above total_k with shared pages
  Cache cache;
  int64_t prefix_groups = 0;  ///< groups of sequences that share their first keys; 0: not given
  bool of_groups = false;     ///< each "sequence" is such a group, with the rows of its sequences
  Append append;
  TensorSet given;    ///< the tensors that a call has
  TensorSet on_host;  ///< those of them that lie in host memory though q lies on a device

  /// The strides of a dense bias or of its gradient; 0 in dimensions that share elements.
  struct Bias {
    DType dtype = DType::kF32;
    int64_t batch = 0, head = 0, row = 0, key = 0;
    bool aligned = true;  ///< see Layout::aligned

    bool operator==(const Bias&) const = default;
  };

  Layout q, k, v, out, dout, dq, dk, dv_grad;
  Layout lse;   ///< row stride of (batch, hq, sq) / (hq, total_q)
  Layout dlse;  ///< strides as those of lse

  Mask mask;
  double scale = 1, softcap = 0, dropout_p = 0;
  bool slopes_of_batch = false;               ///< alibi_slopes are (batch, hq)
  int64_t slopes_batch = 0, slopes_head = 0;  ///< strides of the slopes
  Bias bias, dbias;
  expression::Expressions expressions;
  Scales q_descale, k_descale, v_descale, k_zero_point, v_zero_point;
  bool deterministic = false, invariant = false, fast_codes = false, hadamard = false;
  Algorithm algorithm = Algorithm::kAny;
  bool f32_key_gradients = false;  ///< dk and dv are f32, whatever k and v are
  Origin origin;                   ///< where a part lies in a larger call; all 0 if it is no part
  int64_t max_workspace = 0;       ///< bytes; 0: no limit

  bool operator==(const Problem&) const = default;

  int64_t group() const { return hq / hk; }
  /// The bytes of q and out of a query, over all q heads, and of k and v of a key, over all kv
  /// heads.
  int64_t query_bytes() const { return hq * (bytes_of(dtypes.q, d) + bytes_of(dtypes.out, dv)); }
  int64_t key_bytes() const { return hk * (bytes_of(dtypes.k, d) + bytes_of(dtypes.v, dv)); }
  /// The dtype of lse and dlse.
  DType lse_dtype() const { return dtypes.q == DType::kF64 ? DType::kF64 : DType::kF32; }
  bool has(Arg tensor) const { return given.has(tensor); }
  /// Which gradients a backward pass computes: dq, dk with dv, or both.
  bool wants_dq() const { return has(Arg::kDq); }
  bool wants_dk_dv() const { return has(Arg::kDk); }
  /// All sequences have the same lengths, sq and sk.
  bool alike() const {
    return !packed && !packed_k && !has(Arg::kSeqUsedQ) && !has(Arg::kSeqUsedK) &&
           !has(Arg::kLeftpadK);
  }
  /// Whether a workspace of so many bytes is within the limit.
  bool has_room(int64_t bytes) const { return max_workspace == 0 || bytes <= max_workspace; }
  /// Whether a call writes nothing: it has no rows and, if it is a backward pass, no keys.
  bool nothing_to_do() const;
};

/// The scales and zero points of the codes of q, k and v of a forward call. Other calls have none.
struct OperandScaling {
  Scaling q{}, k{}, v{};

  template <class Args>
  OperandScaling(const Problem&, const Args&) {}
  OperandScaling(const Problem& p, const ForwardArgs& args)
      : q{{args.descales.q_descale.data, p.q_descale}},
        k{{args.descales.k_descale.data, p.k_descale},
          {args.descales.k_zero_point.data, p.k_zero_point}},
        v{{args.descales.v_descale.data, p.v_descale},
          {args.descales.v_zero_point.data, p.v_zero_point}} {}
};

/// The hash of a problem, for unordered containers.
struct HashOfProblem {
  size_t operator()(const Problem& problem) const;
};

/// 2 flops per multiply-add of the products of a visible score: S and O forward; S and dP, and dQ,
/// dK and dV where they are wanted, backward.
double flops_per_score(const Problem& problem);

/// Bytes of all tensors of the pass, each counted once.
double bytes(const Problem& problem);

}  // namespace fulgur

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

/// The papers' algorithms of attention. kAny: engines choose.
enum class Algorithm : uint8_t { kAny, kStandard, kFa1, kFa2, kFa3 };

/// "fa2"; empty for kAny.
const char* name_of(Algorithm algorithm);

/// The algorithm of a name that a user gave. Throws Error(kInvalidArgument).
Algorithm algorithm_called(const std::string& name);

/// Why an engine that has some of the algorithms does not compute by the one that is asked for, and
/// by which it does; empty where it has it, or none is asked for.
std::string algorithm_rejected(Algorithm asked, std::initializer_list<Algorithm> had);

/// The dtypes of a call's operands. A gradient has that of its tensor.
struct OperandTypes {
  DType q = DType::kF32, k = DType::kF32, v = DType::kF32, out = DType::kF32;

  static OperandTypes all(DType dtype) { return {dtype, dtype, dtype, dtype}; }
  /// Whether all are one of `dtypes`.
  bool in(std::initializer_list<DType> dtypes) const {
    const auto among = [&](DType one) { return std::ranges::find(dtypes, one) != dtypes.end(); };
    return among(q) && among(k) && among(v) && among(out);
  }
  /// Whether any is `dtype`.
  bool has(DType dtype) const { return q == dtype || k == dtype || v == dtype || out == dtype; }
  bool operator==(const OperandTypes&) const = default;
};

/// A validated shape of call: everything that is computed, nothing about how, and nothing that may
/// change from call to call. Immutable once made; equal problems have the same plan.
struct Problem {
  /// Where the sequences of K and V lie, if not side by side: tables say it when the call runs.
  struct Cache {
    enum class Pages : uint8_t { kNone, kTable, kLists };  ///< (batch, max_pages), page_indptr

    Pages pages = Pages::kNone;
    int64_t entries = 0;       ///< of k: pages, or rows of the batch
    int64_t page = 0;          ///< keys of a page
    int64_t ids = 0;           ///< of the table: of a sequence at most, or of all lists
    int64_t table_stride = 0;  ///< from the ids of a sequence to those of the next
    int64_t id_stride = 1;     ///< from an id of a sequence to its next

    bool operator==(const Cache&) const = default;
    bool paged() const { return pages != Pages::kNone; }
  };

  /// New rows that a call appends before it attends (ForwardArgs::append).
  struct Append {
    bool given = false;
    bool rotates = false;      ///< keys and queries are rotated
    int64_t batch = 0;         ///< of the caches, also where no query makes `batch` 0
    int64_t tokens = 0;        ///< of all sequences, padding included
    int64_t host_numbers = 0;  ///< lengths in the host's memory, though the caches lie on a device

    bool operator==(const Append&) const = default;
  };

  Pass pass = Pass::kForward;
  OperandTypes dtypes;
  Device device;
  int64_t batch = 0, sq = 0, sk = 0;  ///< sq, sk: the longest sequence that a call may have
  int64_t hq = 0, hk = 0, d = 0, dv = 0;
  bool packed = false;               ///< q, and what has its rows
  bool packed_k = false;             ///< k and v; where q is and they are no cache
  int64_t total_q = 0, total_k = 0;  ///< rows of q and k in all, padding included
  int64_t total_keys = 0;  ///< of all sequences at most: total_k, but that they may share pages
  Cache cache;
  int64_t prefix_groups = 0;  ///< of sequences that share their first keys; 0: none is named
  bool of_groups = false;     ///< sequences are such groups: all rows are shared out among them
  Append append;
  TensorSet given;    ///< the tensors that a call has
  TensorSet on_host;  ///< those of them that lie in the host's memory, though q lies on a device

  /// A dense bias or its gradient: strides, which are 0 where all have the same.
  struct Bias {
    DType dtype = DType::kF32;
    int64_t batch = 0, head = 0, row = 0, key = 0;
    bool aligned = true;  ///< as that of a layout

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
  Origin origin;                   ///< of a part of a larger call, with all sizes; else all 0
  int64_t max_workspace = 0;       ///< bytes; 0: any number

  bool operator==(const Problem&) const = default;

  int64_t group() const { return hq / hk; }
  /// Bytes of a row of q and of out, of all q heads; of a key's rows of k and v, of all kv heads.
  int64_t query_bytes() const { return hq * (bytes_of(dtypes.q, d) + bytes_of(dtypes.out, dv)); }
  int64_t key_bytes() const { return hk * (bytes_of(dtypes.k, d) + bytes_of(dtypes.v, dv)); }
  /// The dtype of lse and dlse.
  DType lse_dtype() const { return dtypes.q == DType::kF64 ? DType::kF64 : DType::kF32; }
  bool has(Arg tensor) const { return given.has(tensor); }
  /// Of a backward pass: which gradients of rows it has to compute, one of both at least.
  bool wants_dq() const { return has(Arg::kDq); }
  bool wants_dk_dv() const { return has(Arg::kDk); }
  /// All sequences have the same lengths, sq and sk.
  bool alike() const {
    return !packed && !packed_k && !has(Arg::kSeqUsedQ) && !has(Arg::kSeqUsedK) &&
           !has(Arg::kLeftpadK);
  }
  /// Whether a run may want so many bytes of workspace.
  bool has_room(int64_t bytes) const { return max_workspace == 0 || bytes <= max_workspace; }
  /// No row and no key: nothing is written.
  bool nothing_to_do() const;
};

/// What makes numbers of the codes of q, k and v of a call. The backward pass and scores() take
/// none.
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

/// What a hash table needs.
struct HashOfProblem {
  size_t operator()(const Problem& problem) const;
};

/// 2 flops per multiply-add of the products of a visible score: S and O forward; S and dP, and dQ,
/// dK and dV where they are wanted, backward.
double flops_per_score(const Problem& problem);

/// Bytes of all tensors of the pass, each counted once.
double bytes(const Problem& problem);

}  // namespace fulgur

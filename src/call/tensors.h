#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fulgur/append.h"
#include "fulgur/attention.h"

namespace fulgur {

// Every tensor of a call is one row of a table below. From a row come its checks (shape, dtype,
// device, alias, "as planned"), its name in errors, its bits in the problem, its part of the host
// metadata, and its conversion from C and from Python. A new tensor is a member of the public
// struct, of the C struct, and a row here.

/// A tensor by what it is, in whichever call.
enum class Arg : uint8_t {
  kQ,
  kK,
  kV,
  kOut,
  kLse,
  kDout,
  kDlse,
  kDq,
  kDk,
  kDv,
  kDsinks,
  kAlibiSlopes,
  kCuSeqlensQ,
  kCuSeqlensK,
  kSeqUsedQ,
  kSeqUsedK,
  kRngState,
  kSinks,
  kPageTable,
  kPageIndptr,
  kCacheBatchIdx,
  kLeftpadK,
  kTreeMask,
  kPrefixGroups,
  kPrefixLens,
  kKCache,
  kVCache,
  kKNew,
  kVNew,
  kCuSeqlensKNew,
  kCacheSeqlens,
  kCos,
  kSin,
  kRotarySeqlens,
  kQOut,
  kCount
};

/// A set of tensors.
class TensorSet {
 public:
  bool has(Arg a) const { return (bits_ >> static_cast<int>(a) & 1) != 0; }
  void set(Arg a, bool on) { bits_ = (bits_ & ~bit(a)) | (on ? bit(a) : 0); }
  uint64_t bits() const { return bits_; }
  bool operator==(const TensorSet&) const = default;

 private:
  static_assert(static_cast<int>(Arg::kCount) <= 64);
  static uint64_t bit(Arg a) { return uint64_t{1} << static_cast<int>(a); }
  uint64_t bits_ = 0;
};

/// The sizes of a tensor in terms of the problem's. Those of kOwn are checked where the problem
/// takes its sizes from them.
enum class TensorShape : uint8_t {
  kOwn,
  // By the batch, the heads and the groups of a call:
  kHeads,          ///< (hq)
  kSlopes,         ///< (hq) or (batch, hq)
  kBatch,          ///< (batch)
  kBatchPlusOne,   ///< (batch + 1)
  kGroups,         ///< (groups)
  kGroupsPlusOne,  ///< (groups + 1)
  kSeedAndOffset,  ///< (2)
  // By the rows and head dims, too:
  kRowsOfQ,        ///< (batch, sq, hq, d) or (total_q, hq, d)
  kRowsOfOut,      ///< (batch, sq, hq, dv) or (total_q, hq, dv)
  kRowsOfK,        ///< (batch, sk, hk, d) or (total_k, hk, d)
  kRowsOfV,        ///< (batch, sk, hk, dv) or (total_k, hk, dv)
  kRowStatistics,  ///< (batch, hq, sq) or (hq, total_q)
  kQueries,        ///< (batch, sq) or (total_q)
};

enum class TensorType : uint8_t {
  kInput,       ///< the dtype of q
  kStatistics,  ///< f32, f64 where q is
  kF32,
  kI32,
  kI64,
};

/// kDevice: that of q. kHostToo: there or in the host's memory, where each run reads it.
enum class Place : uint8_t { kDevice, kHostToo };

/// kUnlessAppend: required but in a call that appends, which names its caches instead.
enum class Need : uint8_t { kRequired, kUnlessAppend, kOptional };

enum class Access : uint8_t { kRead, kWritten };

struct TensorRule {
  Arg arg;
  const char* name;
  Need need;
  Access access;
  TensorShape shape;
  TensorType type;
  Place place;

  bool written() const { return access == Access::kWritten; }
};

// A row is T(member and name, Arg, Need, Access, Shape, Type, Place).

#define FULGUR_TENSORS_OF_BOTH_PASSES(T)                                        \
  T(alibi_slopes, kAlibiSlopes, kOptional, kRead, kSlopes, kF32, kHostToo)      \
  T(cu_seqlens_q, kCuSeqlensQ, kOptional, kRead, kBatchPlusOne, kI32, kHostToo) \
  T(cu_seqlens_k, kCuSeqlensK, kOptional, kRead, kBatchPlusOne, kI32, kHostToo) \
  T(seqused_q, kSeqUsedQ, kOptional, kRead, kBatch, kI32, kHostToo)             \
  T(seqused_k, kSeqUsedK, kOptional, kRead, kBatch, kI32, kHostToo)             \
  T(rng_state, kRngState, kOptional, kRead, kSeedAndOffset, kI64, kDevice)      \
  T(sinks, kSinks, kOptional, kRead, kHeads, kF32, kHostToo)

#define FULGUR_FORWARD_TENSORS(T)                                                   \
  T(q, kQ, kRequired, kRead, kOwn, kInput, kDevice)                                 \
  T(k, kK, kUnlessAppend, kRead, kOwn, kInput, kDevice)                             \
  T(v, kV, kUnlessAppend, kRead, kOwn, kInput, kDevice)                             \
  T(out, kOut, kRequired, kWritten, kRowsOfOut, kInput, kDevice)                    \
  T(lse, kLse, kOptional, kWritten, kRowStatistics, kStatistics, kDevice)           \
  FULGUR_TENSORS_OF_BOTH_PASSES(T)                                                  \
  T(page_table, kPageTable, kOptional, kRead, kOwn, kI32, kDevice)                  \
  T(page_indptr, kPageIndptr, kOptional, kRead, kBatchPlusOne, kI32, kDevice)       \
  T(cache_batch_idx, kCacheBatchIdx, kOptional, kRead, kBatch, kI32, kDevice)       \
  T(leftpad_k, kLeftpadK, kOptional, kRead, kBatch, kI32, kHostToo)                 \
  T(tree_mask, kTreeMask, kOptional, kRead, kQueries, kI64, kDevice)                \
  T(prefix_groups, kPrefixGroups, kOptional, kRead, kGroupsPlusOne, kI32, kHostToo) \
  T(prefix_lens, kPrefixLens, kOptional, kRead, kGroups, kI32, kHostToo)

#define FULGUR_BACKWARD_TENSORS(T)                                       \
  T(dout, kDout, kRequired, kRead, kRowsOfOut, kInput, kDevice)          \
  T(q, kQ, kRequired, kRead, kOwn, kInput, kDevice)                      \
  T(k, kK, kRequired, kRead, kOwn, kInput, kDevice)                      \
  T(v, kV, kRequired, kRead, kOwn, kInput, kDevice)                      \
  T(out, kOut, kRequired, kRead, kRowsOfOut, kInput, kDevice)            \
  T(lse, kLse, kRequired, kRead, kRowStatistics, kStatistics, kDevice)   \
  T(dq, kDq, kRequired, kWritten, kRowsOfQ, kInput, kDevice)             \
  T(dk, kDk, kRequired, kWritten, kRowsOfK, kInput, kDevice)             \
  T(dv, kDv, kRequired, kWritten, kRowsOfV, kInput, kDevice)             \
  FULGUR_TENSORS_OF_BOTH_PASSES(T)                                       \
  T(dlse, kDlse, kOptional, kRead, kRowStatistics, kStatistics, kDevice) \
  T(dsinks, kDsinks, kOptional, kWritten, kHeads, kF32, kDevice)

/// Of AppendArgs, where append checks shapes and dtypes by those of the caches.
#define FULGUR_APPEND_TENSORS(T)                                                       \
  T(k_cache, kKCache, kRequired, kWritten, kOwn, kInput, kDevice)                      \
  T(v_cache, kVCache, kRequired, kWritten, kOwn, kInput, kDevice)                      \
  T(k_new, kKNew, kRequired, kRead, kOwn, kInput, kDevice)                             \
  T(v_new, kVNew, kRequired, kRead, kOwn, kInput, kDevice)                             \
  T(cu_seqlens_k_new, kCuSeqlensKNew, kOptional, kRead, kBatchPlusOne, kI32, kHostToo) \
  T(cache_seqlens, kCacheSeqlens, kRequired, kRead, kBatch, kI32, kHostToo)            \
  T(page_table, kPageTable, kOptional, kRead, kOwn, kI32, kDevice)                     \
  T(page_indptr, kPageIndptr, kOptional, kRead, kBatchPlusOne, kI32, kDevice)          \
  T(cache_batch_idx, kCacheBatchIdx, kOptional, kRead, kBatch, kI32, kDevice)          \
  T(cos, kCos, kOptional, kRead, kOwn, kInput, kDevice)                                \
  T(sin, kSin, kOptional, kRead, kOwn, kInput, kDevice)                                \
  T(rotary_seqlens, kRotarySeqlens, kOptional, kRead, kBatch, kI32, kHostToo)          \
  T(cu_seqlens_q, kCuSeqlensQ, kOptional, kRead, kBatchPlusOne, kI32, kHostToo)        \
  T(q, kQ, kOptional, kRead, kOwn, kInput, kDevice)                                    \
  T(q_out, kQOut, kOptional, kWritten, kOwn, kInput, kDevice)

/// Calls visit(rule, tensor) for each tensor of a call, given or not, or visit(rule, tensor,
/// tensor) for those of two calls. `Args`: ForwardArgs, without what it appends, BackwardArgs or
/// AppendArgs; may be const.
template <class Visit, class Args, class... Other>
void for_each_tensor(Visit&& visit, Args& args, Other&... other) {
#define FULGUR_VISIT(member, arg, need, access, shape, type, place)                   \
  visit(TensorRule{Arg::arg, #member, Need::need, Access::access, TensorShape::shape, \
                   TensorType::type, Place::place},                                   \
        args.member, other.member...);
  using Plain = std::remove_const_t<Args>;
  if constexpr (std::is_same_v<Plain, ForwardArgs>) {
    FULGUR_FORWARD_TENSORS(FULGUR_VISIT)
  } else if constexpr (std::is_same_v<Plain, BackwardArgs>) {
    FULGUR_BACKWARD_TENSORS(FULGUR_VISIT)
  } else {
    static_assert(std::is_same_v<Plain, AppendArgs>);
    FULGUR_APPEND_TENSORS(FULGUR_VISIT)
  }
#undef FULGUR_VISIT
}

/// The rows of each table. The static_asserts fail where a struct has a tensor that its table
/// lacks.
#define FULGUR_COUNT(...) +1
inline constexpr size_t kForwardTensors = 0 FULGUR_FORWARD_TENSORS(FULGUR_COUNT);
inline constexpr size_t kBackwardTensors = 0 FULGUR_BACKWARD_TENSORS(FULGUR_COUNT);
inline constexpr size_t kAppendTensors = 0 FULGUR_APPEND_TENSORS(FULGUR_COUNT);
#undef FULGUR_COUNT
static_assert(sizeof(ForwardArgs) ==
              kForwardTensors * sizeof(Tensor) + sizeof(ForwardArgs::append));
static_assert(sizeof(BackwardArgs) == kBackwardTensors * sizeof(Tensor));
static_assert(sizeof(AppendArgs) ==
              kAppendTensors * sizeof(Tensor) + sizeof(void*));  // with `interleaved`

}  // namespace fulgur

#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "fulgur/append.h"
#include "fulgur/attention.h"
#include "fulgur/scores.h"

namespace fulgur {

// Every tensor of a call is one row of a table below. From a row come its checks (shape, dtype,
// device, alias, "as planned"), its name in errors, its bits in the problem, its part of the host
// metadata, and its conversion from C and from Python. A new tensor is a member of the public
// struct, of the C struct, and a row here.

/// The tensors of all calls. A tensor has the same name in every call that has it.
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
  kDbias,
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
  kBias,
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
  kScores,
  kRows,
  kQDescale,
  kKDescale,
  kVDescale,
  kKZeroPoint,
  kVZeroPoint,
  kKCacheDescale,
  kVCacheDescale,
  kKCacheZeroPoint,
  kVCacheZeroPoint,
  kKMean,
  kKCacheMean,
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

/// The sizes of a tensor in terms of the problem's. Tensors of kOwn define the problem's sizes, and
/// are checked there.
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
  kInput,        ///< the dtype of q
  kKeyGradient,  ///< the dtype of q, or f32
  kStatistics,   ///< f32, f64 where q is
  kSinkType,     ///< f32, or the dtype of q where that has 16 bits
  kF32,
  kI32,
  kI64,
  kBias,     ///< bool, f32 or a 16-bit float, f64 where q is
  kOutput,   ///< the dtype of q, or f32, bf16 or f16 where q has codes
  kDescale,  ///< f32 or f16; means are f32
};

/// kDevice: the device of q. kHostToo: the same, or host memory, which each run reads.
enum class Place : uint8_t { kDevice, kHostToo };

/// kUnlessAppend: required unless the call appends, whose caches are K and V.
/// kUnlessOther: required unless the call has other gradients of rows (make_problem).
enum class Need : uint8_t { kRequired, kUnlessAppend, kUnlessOther, kOptional };

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

// A row is T(member and name, Arg, Need, Access, Shape, Type, Place). A table has the tensors of
// one public struct, without those of the structs in it.

#define FULGUR_VAR_LEN_TENSORS(T)                                               \
  T(cu_seqlens_q, kCuSeqlensQ, kOptional, kRead, kBatchPlusOne, kI32, kHostToo) \
  T(cu_seqlens_k, kCuSeqlensK, kOptional, kRead, kBatchPlusOne, kI32, kHostToo) \
  T(seqused_q, kSeqUsedQ, kOptional, kRead, kBatch, kI32, kHostToo)             \
  T(seqused_k, kSeqUsedK, kOptional, kRead, kBatch, kI32, kHostToo)

/// The tensors of KvCache that append() reads: all but leftpad_k.
#define FULGUR_KV_LOCATION_TENSORS(T)                                         \
  T(page_table, kPageTable, kOptional, kRead, kOwn, kI32, kDevice)            \
  T(page_indptr, kPageIndptr, kOptional, kRead, kBatchPlusOne, kI32, kDevice) \
  T(cache_batch_idx, kCacheBatchIdx, kOptional, kRead, kBatch, kI32, kDevice)

#define FULGUR_KV_CACHE_TENSORS(T) \
  FULGUR_KV_LOCATION_TENSORS(T)    \
  T(leftpad_k, kLeftpadK, kOptional, kRead, kBatch, kI32, kHostToo)

#define FULGUR_SHARED_PREFIX_TENSORS(T)                                             \
  T(prefix_groups, kPrefixGroups, kOptional, kRead, kGroupsPlusOne, kI32, kHostToo) \
  T(prefix_lens, kPrefixLens, kOptional, kRead, kGroups, kI32, kHostToo)

#define FULGUR_DESCALES_TENSORS(T)                                        \
  T(q_descale, kQDescale, kOptional, kRead, kOwn, kDescale, kDevice)      \
  T(k_descale, kKDescale, kOptional, kRead, kOwn, kDescale, kDevice)      \
  T(v_descale, kVDescale, kOptional, kRead, kOwn, kDescale, kDevice)      \
  T(k_zero_point, kKZeroPoint, kOptional, kRead, kOwn, kDescale, kDevice) \
  T(v_zero_point, kVZeroPoint, kOptional, kRead, kOwn, kDescale, kDevice) \
  T(k_mean, kKMean, kOptional, kRead, kOwn, kDescale, kDevice)

#define FULGUR_ROTARY_TENSORS(T)                        \
  T(cos, kCos, kOptional, kRead, kOwn, kInput, kDevice) \
  T(sin, kSin, kOptional, kRead, kOwn, kInput, kDevice) \
  T(rotary_seqlens, kRotarySeqlens, kOptional, kRead, kBatch, kI32, kHostToo)

/// Append checks their shapes and dtypes by those of the caches.
#define FULGUR_NEW_ROWS_TENSORS(T)                                                      \
  T(k_cache, kKCache, kRequired, kWritten, kOwn, kInput, kDevice)                       \
  T(v_cache, kVCache, kRequired, kWritten, kOwn, kInput, kDevice)                       \
  T(k_new, kKNew, kRequired, kRead, kOwn, kInput, kDevice)                              \
  T(v_new, kVNew, kRequired, kRead, kOwn, kInput, kDevice)                              \
  T(cu_seqlens_k_new, kCuSeqlensKNew, kOptional, kRead, kBatchPlusOne, kI32, kHostToo)  \
  T(cache_seqlens, kCacheSeqlens, kRequired, kRead, kBatch, kI32, kHostToo)             \
  T(k_cache_descale, kKCacheDescale, kOptional, kWritten, kOwn, kDescale, kDevice)      \
  T(v_cache_descale, kVCacheDescale, kOptional, kWritten, kOwn, kDescale, kDevice)      \
  T(k_cache_zero_point, kKCacheZeroPoint, kOptional, kWritten, kOwn, kDescale, kDevice) \
  T(v_cache_zero_point, kVCacheZeroPoint, kOptional, kWritten, kOwn, kDescale, kDevice) \
  T(k_cache_mean, kKCacheMean, kOptional, kRead, kOwn, kDescale, kDevice)

#define FULGUR_FORWARD_TENSORS(T)                                          \
  T(q, kQ, kRequired, kRead, kOwn, kInput, kDevice)                        \
  T(k, kK, kUnlessAppend, kRead, kOwn, kInput, kDevice)                    \
  T(v, kV, kUnlessAppend, kRead, kOwn, kInput, kDevice)                    \
  T(out, kOut, kRequired, kWritten, kRowsOfOut, kOutput, kDevice)          \
  T(lse, kLse, kOptional, kWritten, kRowStatistics, kStatistics, kDevice)  \
  T(alibi_slopes, kAlibiSlopes, kOptional, kRead, kSlopes, kF32, kHostToo) \
  T(rng_state, kRngState, kOptional, kRead, kSeedAndOffset, kI64, kDevice) \
  T(sinks, kSinks, kOptional, kRead, kHeads, kSinkType, kHostToo)          \
  T(tree_mask, kTreeMask, kOptional, kRead, kQueries, kI64, kDevice)       \
  T(bias, kBias, kOptional, kRead, kOwn, kBias, kDevice)

#define FULGUR_BACKWARD_TENSORS(T)                                         \
  T(dout, kDout, kRequired, kRead, kRowsOfOut, kInput, kDevice)            \
  T(q, kQ, kRequired, kRead, kOwn, kInput, kDevice)                        \
  T(k, kK, kRequired, kRead, kOwn, kInput, kDevice)                        \
  T(v, kV, kRequired, kRead, kOwn, kInput, kDevice)                        \
  T(out, kOut, kRequired, kRead, kRowsOfOut, kInput, kDevice)              \
  T(lse, kLse, kRequired, kRead, kRowStatistics, kStatistics, kDevice)     \
  T(dq, kDq, kUnlessOther, kWritten, kRowsOfQ, kInput, kDevice)            \
  T(dk, kDk, kUnlessOther, kWritten, kRowsOfK, kKeyGradient, kDevice)      \
  T(dv, kDv, kUnlessOther, kWritten, kRowsOfV, kKeyGradient, kDevice)      \
  T(alibi_slopes, kAlibiSlopes, kOptional, kRead, kSlopes, kF32, kHostToo) \
  T(rng_state, kRngState, kOptional, kRead, kSeedAndOffset, kI64, kDevice) \
  T(sinks, kSinks, kOptional, kRead, kHeads, kSinkType, kHostToo)          \
  T(dlse, kDlse, kOptional, kRead, kRowStatistics, kStatistics, kDevice)   \
  T(dsinks, kDsinks, kOptional, kWritten, kHeads, kSinkType, kDevice)      \
  T(bias, kBias, kOptional, kRead, kOwn, kBias, kDevice)                   \
  T(dbias, kDbias, kOptional, kWritten, kOwn, kBias, kDevice)

/// Shapes of scores are checked by the requested rows.
#define FULGUR_SCORES_TENSORS(T)                                           \
  T(q, kQ, kRequired, kRead, kOwn, kInput, kDevice)                        \
  T(k, kK, kRequired, kRead, kOwn, kInput, kDevice)                        \
  T(scores, kScores, kRequired, kWritten, kOwn, kStatistics, kDevice)      \
  T(rows, kRows, kOptional, kRead, kOwn, kI64, kHostToo)                   \
  T(alibi_slopes, kAlibiSlopes, kOptional, kRead, kSlopes, kF32, kHostToo) \
  T(sinks, kSinks, kOptional, kRead, kHeads, kSinkType, kHostToo)          \
  T(tree_mask, kTreeMask, kOptional, kRead, kQueries, kI64, kDevice)       \
  T(bias, kBias, kOptional, kRead, kOwn, kBias, kDevice)

#define FULGUR_APPEND_TENSORS(T)                              \
  T(q, kQ, kOptional, kRead, kOwn, kInput, kDevice)           \
  T(q_out, kQOut, kOptional, kWritten, kOwn, kInput, kDevice) \
  T(cu_seqlens_q, kCuSeqlensQ, kOptional, kRead, kBatchPlusOne, kI32, kHostToo)

/// Calls visit(rule, tensor) for each tensor of a call, given or not, or visit(rule, tensor,
/// tensor) for those of two calls. `Args`: ForwardArgs, without what it appends, BackwardArgs,
/// ScoresArgs, AppendArgs or NewRows; may be const.
template <class Visit, class Args, class... Other>
void for_each_tensor(Visit&& visit, Args& args, Other&... other) {
#define FULGUR_VISIT(part, member, arg, need, access, shape, type, place)             \
  visit(TensorRule{Arg::arg, #member, Need::need, Access::access, TensorShape::shape, \
                   TensorType::type, Place::place},                                   \
        args.part member, other.part member...);
#define FULGUR_OWN(...) FULGUR_VISIT(, __VA_ARGS__)
#define FULGUR_LENGTHS(...) FULGUR_VISIT(lengths., __VA_ARGS__)
#define FULGUR_CACHE(...) FULGUR_VISIT(cache., __VA_ARGS__)
#define FULGUR_PREFIX(...) FULGUR_VISIT(shared_prefix., __VA_ARGS__)
#define FULGUR_DESCALES(...) FULGUR_VISIT(descales., __VA_ARGS__)
#define FULGUR_ROTARY(...) FULGUR_VISIT(rotary., __VA_ARGS__)
  using Plain = std::remove_const_t<Args>;
  if constexpr (std::is_same_v<Plain, ForwardArgs>) {
    FULGUR_FORWARD_TENSORS(FULGUR_OWN)
    FULGUR_VAR_LEN_TENSORS(FULGUR_LENGTHS)
    FULGUR_KV_CACHE_TENSORS(FULGUR_CACHE)
    FULGUR_SHARED_PREFIX_TENSORS(FULGUR_PREFIX)
    FULGUR_DESCALES_TENSORS(FULGUR_DESCALES)
  } else if constexpr (std::is_same_v<Plain, BackwardArgs>) {
    FULGUR_BACKWARD_TENSORS(FULGUR_OWN)
    FULGUR_VAR_LEN_TENSORS(FULGUR_LENGTHS)
  } else if constexpr (std::is_same_v<Plain, ScoresArgs>) {
    FULGUR_SCORES_TENSORS(FULGUR_OWN)
    FULGUR_VAR_LEN_TENSORS(FULGUR_LENGTHS)
    FULGUR_KV_CACHE_TENSORS(FULGUR_CACHE)
  } else if constexpr (std::is_same_v<Plain, NewRows>) {
    FULGUR_NEW_ROWS_TENSORS(FULGUR_OWN)
    FULGUR_ROTARY_TENSORS(FULGUR_ROTARY)
  } else {
    static_assert(std::is_same_v<Plain, AppendArgs>);
    for_each_tensor(visit, args.rows, other.rows...);
    FULGUR_KV_LOCATION_TENSORS(FULGUR_CACHE)
    FULGUR_APPEND_TENSORS(FULGUR_OWN)
  }
#undef FULGUR_VISIT
#undef FULGUR_OWN
#undef FULGUR_LENGTHS
#undef FULGUR_CACHE
#undef FULGUR_PREFIX
#undef FULGUR_DESCALES
#undef FULGUR_ROTARY
}

/// Whether a call appends new rows.
inline bool appends(const ForwardArgs& args) {
  bool any = false;
  for_each_tensor([&](const TensorRule&, const auto& t) { any = any || t.given(); }, args.append);
  return any;
}

/// The rows of each table. The static_asserts fail where a struct has a tensor that its table
/// lacks.
#define FULGUR_COUNT(...) +1
inline constexpr size_t kVarLenTensors = 0 FULGUR_VAR_LEN_TENSORS(FULGUR_COUNT);
inline constexpr size_t kKvCacheTensors = 0 FULGUR_KV_CACHE_TENSORS(FULGUR_COUNT);
inline constexpr size_t kSharedPrefixTensors = 0 FULGUR_SHARED_PREFIX_TENSORS(FULGUR_COUNT);
inline constexpr size_t kDescalesTensors = 0 FULGUR_DESCALES_TENSORS(FULGUR_COUNT);
inline constexpr size_t kRotaryTensors = 0 FULGUR_ROTARY_TENSORS(FULGUR_COUNT);
inline constexpr size_t kNewRowsTensors = 0 FULGUR_NEW_ROWS_TENSORS(FULGUR_COUNT);
inline constexpr size_t kForwardTensors = 0 FULGUR_FORWARD_TENSORS(FULGUR_COUNT);
inline constexpr size_t kBackwardTensors = 0 FULGUR_BACKWARD_TENSORS(FULGUR_COUNT);
inline constexpr size_t kScoresTensors = 0 FULGUR_SCORES_TENSORS(FULGUR_COUNT);
inline constexpr size_t kAppendTensors = 0 FULGUR_APPEND_TENSORS(FULGUR_COUNT);
#undef FULGUR_COUNT
static_assert(sizeof(VarLen) == kVarLenTensors * sizeof(Tensor));
static_assert(sizeof(KvCache) == kKvCacheTensors * sizeof(Tensor));
static_assert(sizeof(SharedPrefix) == kSharedPrefixTensors * sizeof(Tensor));
static_assert(sizeof(Descales) == kDescalesTensors * sizeof(Tensor));
static_assert(sizeof(Rotary) ==
              kRotaryTensors * sizeof(Tensor) + sizeof(void*));  // with `interleaved`
static_assert(sizeof(NewRows) == kNewRowsTensors * sizeof(Tensor) + sizeof(Rotary));
// ForwardArgs and BackwardArgs also have the tensors of expressions.
static_assert(sizeof(ForwardArgs) == kForwardTensors * sizeof(Tensor) + sizeof(VarLen) +
                                         sizeof(KvCache) + sizeof(SharedPrefix) + sizeof(Descales) +
                                         sizeof(NewRows) + sizeof(ForwardArgs::tensors));
static_assert(sizeof(BackwardArgs) ==
              kBackwardTensors * sizeof(Tensor) + sizeof(VarLen) + sizeof(BackwardArgs::tensors));
static_assert(sizeof(ScoresArgs) == kScoresTensors * sizeof(Tensor) + sizeof(VarLen) +
                                        sizeof(KvCache) + sizeof(ScoresArgs::tensors) +
                                        sizeof(void*));  // with `stage`
static_assert(sizeof(AppendArgs) ==
              kAppendTensors * sizeof(Tensor) + sizeof(NewRows) + sizeof(KvCache));

}  // namespace fulgur

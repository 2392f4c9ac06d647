#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "call/problem.h"
#include "cuda/common/family.h"
#include "engine/engine.h"
#include "kernels/host_device/attention_params.h"
#include "kernels/host_device/element.h"

namespace fulgur::cuda {

// What the plans of all attention kernels have in common.

/// Head dims of a call.
struct HeadDims {
  int64_t d = 0, dv = 0;
};
/// The maximum of d and dv of kernels whose warps hold whole rows of O, and of those made for wide
/// heads; and of rows of a sequence, which kernels count with ints.
inline constexpr int kMaxDim = 256;
inline constexpr HeadDims kMaxDims{kMaxDim, kMaxDim}, kMaxWideDims{576, 512};
inline constexpr int64_t kMaxRows = int64_t{1} << 29;

/// The element type of kernels for a dtype.
kernels::Element element_of(DType dtype);

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

/// Whether a bound of the mask hides any key. A bound that no row of the longest sequence reaches
/// does not, except with `invariant`, where plans must not depend on the longest sequence of the
/// batch, and in a part of a longer sequence. If chunks bind, both bounds of the window bind, too.
bool left_binds(const Problem& problem);
bool right_binds(const Problem& problem);
bool chunk_binds(const Problem& problem);

/// Sequences of a fixed length, by whose cost the tiles of an invariant call are compared: their
/// order must not depend on the lengths of the call, nor on which part of a larger call it is.
Problem long_sequences(const Problem& problem, int64_t batch);

/// Whether keys lie in a KV cache (pages, batch indices, padding), or only queries are packed.
bool has_cache(const Problem& problem);

// Keys hold what kernel_config.h fixes at compile time. A key calls f(name, value) for each of its
// fields, with the name in device text; the text of kernel_config.h and the equality of keys follow
// from that.

/// The constants of every attention kernel.
struct KernelKey {
  /// The types that products multiply, and that of out.
  OperandTypes dtypes = OperandTypes::all(DType::kBF16);
  int head_dim = 0, value_dim = 0;  ///< d and dv, rounded up to a step of a product
  bool has_left = false, has_right = false, has_chunk = false, top_left = false;
  bool part = false;  ///< the call is a part of a larger one
  bool tree = false;  ///< a tree mask hides some of the last sq keys
  bool transforms_scores = false, softcap = false, alibi = false;
  int bias = 0;            ///< 1 + the element type of a dense bias; 0: there is none
  bool bias_rows = false;  ///< each query has a row of it
  bool score_mod = false, mask_mod = false;  ///< expressions
  bool score_mod_slope = false;              ///< the derivative of score_mod is not 1 everywhere
  std::string expressions{};                 ///< their functions, as text of kernel_config.h
  bool maps_tiles = false;   ///< a map says which tiles a mask hides (cuda/maps/tile_map.h)
  bool mask_bits = false;    ///< the mask is a bool bias, which is packed to bits first
  std::string mask_hulls{};  ///< functions that classify tiles for it
  bool packed = false, seqused_q = false, seqused_k = false;

  /// Whether the derivative of a score by the product is not the scale everywhere.
  bool has_score_slope() const { return softcap || score_mod_slope; }
  /// Like `bias`, for a bias whose tiles lie in shared memory: a mask of bits has none.
  int bias_tile() const { return mask_bits ? 0 : bias; }
  /// Whether keys may be hidden by their scores (-inf).
  bool scores_hide() const { return bias != 0 || score_mod || mask_mod; }

  template <class F>
  void for_each_field(const F& f) const {
    f("kElementQ", dtypes.q);
    f("kElementK", dtypes.k);
    f("kElementV", dtypes.v);
    f("kElementO", dtypes.out);
    f("kHeadDim", head_dim);
    f("kValueDim", value_dim);
    f("kHasLeft", has_left);
    f("kHasRight", has_right);
    f("kHasChunk", has_chunk);
    f("kTopLeft", top_left);
    f("kPart", part);
    f("kTree", tree);
    f("kScoreMode", transforms_scores);
    f("kSoftcap", softcap);
    f("kAlibi", alibi);
    f("kBias", bias);
    f("kBiasRows", bias_rows);
    f("kMaskBits", mask_bits);
    f("kScoreMod", score_mod);
    f("kMaskMod", mask_mod);
    f("kMapsTiles", maps_tiles);
    f("kScoreModSlope", score_mod_slope);
    f("kPacked", packed);
    f("kSeqUsedQ", seqused_q);
    f("kSeqUsedK", seqused_k);
  }
};
KernelKey kernel_key(const Problem& problem);

/// The dtypes of products. Quantized V is multiplied with P as f16, unless the call allows products
/// of e4m3 (Options::fast_codes); quantized K is multiplied as the dtype of a q that is not.
OperandTypes multiplied(const Problem& problem);

/// The element types of kernels for the operands of a key.
kernels::Operands operands_of(const KernelKey& key);

/// Whether q has more than 16 bits: of such calls, kernels by mma.sync alone compute some, those of
/// f32.
bool exceeds_16_bits(const OperandTypes& dtypes);

/// Why no kernel computes operands of these dtypes; empty if one may. `takes_f32`: kernels of a
/// family that computes f32, too.
std::string dtypes_rejected(const OperandTypes& dtypes, bool takes_f32 = false);

/// Whether heads are too wide for kernels whose warps hold whole rows of O.
bool has_wide_heads(const Problem& problem);
/// Why kernels of heads up to `max` do not compute those of a problem; empty if they may.
std::string dims_rejected(const Problem& problem, const HeadDims& max = kMaxDims);
/// Why they do not compute these heads in sequences of so many rows, which most kernels count with
/// ints; empty if they may.
std::string sizes_rejected(const Problem& problem, const HeadDims& max = kMaxDims);

/// Why no kernel computes quantized operands with these formats; empty if one may.
std::string codes_rejected(const Problem& problem);

/// Why the tensor cores cannot multiply the codes of q and k of a forward pass as they are: they
/// take e4m3 with descales that all rows of a sequence and a head share. Empty if they can.
std::string products_of_codes_rejected(const Problem& problem);

/// The constants of every kernel of the forward pass.
struct AnyForwardKey : KernelKey {
  bool has_sinks = false, packed_k = false, has_lse = false;
  int page = 0;             ///< keys of a page; 0: there are none
  bool page_lists = false;  ///< page_indptr says where a sequence's begin
  bool batch_idx = false;   ///< cache_batch_idx names the row of the batch of K and V
  bool leftpad = false;     ///< leftpad_k says which key is the first
  /// The maximum of queries of the sequences that a decode kernel computes, not forward.cu.
  int few_queries = 0;

  template <class F>
  void for_each_field(const F& f) const {
    KernelKey::for_each_field(f);
    f("kHasSinks", has_sinks);
    f("kPackedK", packed_k);
    f("kHasLse", has_lse);
    f("kPage", page);
    f("kPageLists", page_lists);
    f("kBatchIdx", batch_idx);
    f("kLeftPad", leftpad);
    f("kFewQueries", few_queries);
  }
};
AnyForwardKey any_forward_key(const Problem& problem);

/// The mask as arguments of a kernel: its bounds, 0 for those that the key has not.
kernels::Band band_of(const KernelKey& key, const Mask& mask);
/// The mask of a problem, with the origin of a part in a larger call.
kernels::Band band_of(const KernelKey& key, const Problem& problem);

/// Why no kernel computes this part of a larger call; empty if one may, or if it is a whole call.
std::string origin_rejected(const Problem& problem);

/// scale * log2(e), the factor of scores in exponents of 2.
float scale_log2(const Problem& problem);

/// Whether scores are transformed before the softmax by more than a scale. A positive scale is part
/// of the exponent, unless it rounds to 0: 0 times the -inf of a hidden key is NaN. With quantized
/// operands a bias needs a transformation, because the scale of products is known only in a run.
bool transforms(const Problem& problem);

/// In how many numbers of bf16, 1 or 2, products that add a bias multiply it with 1 / scale
/// (kernels/attention/bias_products.cuh): two leave an error of 2^-17 of it. 0: a bias that they do
/// not add.
int bias_terms(const Problem& problem);

/// The arguments that describe a call, without addresses.
CallParams call_params(const Problem& problem, const kernels::Band& band);

/// The strides of a descale of sequences and kv heads, without its address.
Descale descale_of(const Scales& at);

/// The layout of the pages of keys, without addresses.
KeyPages key_pages(const Problem& problem);

Sinks sinks_of(const ConstTensor& sinks);

/// A tensor with these strides, without its address.
inline StridedTensor strided(const Layout& layout) {
  return {nullptr, layout.batch, layout.row, layout.head};
}

/// Sets the tensors that every pass reads besides q, k and v.
template <class Args>
void set_tensors(CallParams& params, const Args& args) {
  params.cu_seqlens_q = static_cast<const int*>(args.lengths.cu_seqlens_q.data);
  params.cu_seqlens_k = static_cast<const int*>(args.lengths.cu_seqlens_k.data);
  params.seqused_q = static_cast<const int*>(args.lengths.seqused_q.data);
  params.seqused_k = static_cast<const int*>(args.lengths.seqused_k.data);
  params.alibi_slopes = static_cast<const float*>(args.alibi_slopes.data);
  if constexpr (requires { args.rng_state; })
    params.rng_state = static_cast<const unsigned long long*>(args.rng_state.data);
  params.bias.data = args.bias.data;
}

/// Sets also those that forward passes and scores read.
template <class Params, class Args>
void set_forward_tensors(Params& params, const Args& args) {
  set_tensors(params, args);
  params.pages.table = static_cast<const int*>(args.cache.page_table.data);
  params.pages.indptr = static_cast<const int*>(args.cache.page_indptr.data);
  params.cache_batch_idx = static_cast<const int*>(args.cache.cache_batch_idx.data);
  params.leftpad_k = static_cast<const int*>(args.cache.leftpad_k.data);
  params.tree_mask = static_cast<const unsigned long long*>(args.tree_mask.data);
  params.sinks = sinks_of(args.sinks);
}

/// Sets seed and offset of a run's dropout, for calls without rng_state.
inline void set_random_numbers(CallParams& params, const Run& run) {
  params.dropout_seed = run.dropout_seed;
  params.dropout_offset = run.dropout_offset;
}

/// Describes the tile of a kernel, and d and dv as it computes them.
void describe_tile(const TileId& tile, const KernelKey& key, Details& details);

/// Describes which tensors are copied to rows of multiples of 16 bytes: those with a reason.
struct WhyCopied {
  const char* name;
  const std::string& why;
};
void describe_copies(std::initializer_list<WhyCopied> tensors, Explanation& plan);

/// The text of kernel_config.h: macros and constants.
struct KernelConfig {
  std::vector<std::pair<std::string_view, std::string>> macros;
  std::vector<std::pair<std::string_view, int>> constants;
};
std::string config_text(const KernelConfig& config);

/// The text of kernel_config.h of a key: a field that is text is a macro, others are constants.
template <class Key>
std::string kernel_config(const Key& key) {
  KernelConfig config;
  key.for_each_field([&](std::string_view name, auto value) {
    if constexpr (std::is_convertible_v<decltype(value), std::string>)
      config.macros.emplace_back(name, value);
    else
      config.constants.emplace_back(name, static_cast<int>(value));
  });
  return config_text(config) + key.expressions;
}

}  // namespace fulgur::cuda

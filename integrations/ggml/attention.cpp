#include "attention.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#include "fulgur/fulgur.h"

namespace fulgur_ggml {
namespace {

using fulgur::ConstTensor;
using fulgur::DType;

constexpr int64_t kMaxDimQK = 576, kMaxDimV = 512;  // of fulgur's CPU engine

std::optional<DType> dtype_of(ggml_type type) {
  switch (type) {
    case GGML_TYPE_F32:
      return DType::kF32;
    case GGML_TYPE_F16:
      return DType::kF16;
    case GGML_TYPE_BF16:
      return DType::kBF16;
    case GGML_TYPE_Q8_0:
      return DType::kQ8_0;
    case GGML_TYPE_Q4_0:
      return DType::kQ4_0;
    case GGML_TYPE_Q4_1:
      return DType::kQ4_1;
    case GGML_TYPE_Q5_0:
      return DType::kQ5_0;
    case GGML_TYPE_Q5_1:
      return DType::kQ5_1;
    case GGML_TYPE_IQ4_NL:
      return DType::kIQ4_NL;
    default:
      return {};
  }
}

/// The operation and what it is made of, by fulgur's names.
struct Attention {
  const ggml_tensor &out, &q, &k, &v;
  const ggml_tensor *mask, *sinks;
  float scale, max_bias, softcap;

  explicit Attention(const ggml_tensor& op)
      : out(op), q(*op.src[0]), k(*op.src[1]), v(*op.src[2]), mask(op.src[3]), sinks(op.src[4]) {
    float parameters[3];
    std::memcpy(parameters, op.op_params, sizeof parameters);
    scale = parameters[0];
    max_bias = parameters[1];
    softcap = std::fabs(parameters[2]);  // c tanh(s / c) is the same of -c
  }

  int64_t batch() const { return q.ne[3]; }
  int64_t sq() const { return q.ne[1]; }
  int64_t sk() const { return k.ne[1]; }
  int64_t hq() const { return q.ne[2]; }
  bool slopes() const { return max_bias > 0; }
  /// Whether the mask is what fulgur calls a bias: one for all heads and sequences, or for each.
  bool mask_is_bias() const {
    return !slopes() && (mask->ne[2] == 1 || mask->ne[2] == hq()) &&
           (mask->ne[3] == 1 || mask->ne[3] == batch());
  }
};

/// Whether elements of a row lie side by side, and strides are whole numbers of them.
bool has_rows(const ggml_tensor& t) {
  const size_t size = ggml_type_size(t.type);
  if (t.nb[0] != size) return false;
  for (int i = 1; i < GGML_MAX_DIMS; ++i) {
    if (t.ne[i] > 1 && t.nb[i] % size != 0) return false;
  }
  return true;
}

/// Elements between neighbors in a dimension.
int64_t stride(const ggml_tensor& t, int i) {
  return static_cast<int64_t>(t.nb[i] / ggml_type_size(t.type)) * ggml_blck_size(t.type);
}

/// (dim, rows, heads, batch) of ggml, whose first dimension lies side by side, as fulgur's
/// (batch, rows, heads, dim).
ConstTensor rows_of(const ggml_tensor& t) {
  return {.data = t.data,
          .dtype = *dtype_of(t.type),
          .device = {},
          .rank = 4,
          .shape = {t.ne[3], t.ne[1], t.ne[2], t.ne[0]},
          .strides = {stride(t, 3), stride(t, 1), stride(t, 2), 1}};
}

/// The mask as fulgur's (batch or fewer, heads or fewer, sq, sk); it may have been padded.
ConstTensor mask_of(const Attention& a) {
  const ggml_tensor& t = *a.mask;
  return {.data = t.data,
          .dtype = DType::kF16,
          .device = {},
          .rank = 4,
          .shape = {t.ne[3], t.ne[2], a.sq(), a.sk()},
          .strides = {stride(t, 3), stride(t, 2), stride(t, 1), 1}};
}

/// ALiBi's slope of each head, as ggml has them.
std::vector<float> slopes_of(const Attention& a) {
  int64_t n = 1;  // the largest power of 2 up to the number of heads
  while (2 * n <= a.hq()) n *= 2;
  const auto heads = static_cast<float>(n);
  const float even = std::exp2(-a.max_bias / heads), odd = std::exp2(-a.max_bias / 2 / heads);
  std::vector<float> slopes(a.hq());
  for (int64_t h = 0; h < a.hq(); ++h) {
    slopes[h] = h < n ? std::pow(even, static_cast<float>(h + 1))
                      : std::pow(odd, static_cast<float>(2 * (h - n) + 1));
  }
  return slopes;
}

/// score + slope * mask, of masks that are no bias.
fulgur::Expr masked_score(const Attention& a) {
  namespace sym = fulgur::symbols;
  const fulgur::TensorSymbol mask("mask", DType::kF16, 4), slope("slope", DType::kF32, 1);
  const auto mask_heads = static_cast<int32_t>(a.mask->ne[2]);
  const auto mask_batch = static_cast<int32_t>(a.mask->ne[3]);
  const fulgur::Expr value = mask(sym::b % mask_batch, sym::h % mask_heads, sym::q, sym::k);
  return sym::score + (a.slopes() ? slope(sym::h) * value : value);
}

}  // namespace

std::string kernel() try {
  fulgur::ForwardArgs args;
  args.q = args.k = args.v = ConstTensor::contiguous(nullptr, DType::kF32, {1, 1, 1, 1});
  args.out = fulgur::Tensor::contiguous(nullptr, DType::kF32, {1, 1, 1, 1});
  fulgur::Options options;
  options.engine = "cpu";
  return fulgur::plan(args, options).details().get<std::string>("kernel");
} catch (const std::exception&) {
  return {};
}

const char* why_not(const ggml_tensor& op) {
  const Attention a(op);
  if (a.q.type != GGML_TYPE_F32 || op.type != GGML_TYPE_F32) return "Q and the result are f32";
  if (!dtype_of(a.k.type) || !dtype_of(a.v.type)) {
    return "K and V are f32, f16, bf16, q8_0, q4_0, q4_1, q5_0, q5_1 or iq4_nl";
  }
  if (a.q.ne[0] > kMaxDimQK) return "heads of Q and K have at most 576 columns";
  if (a.v.ne[0] > kMaxDimV) return "heads of V have at most 512 columns";
  if (a.k.ne[2] != a.v.ne[2] || a.hq() % a.k.ne[2] != 0) {
    return "K and V have as many heads, which divide those of Q";
  }
  if (a.k.ne[1] != a.v.ne[1] || a.k.ne[3] != a.batch() || a.v.ne[3] != a.batch()) {
    return "K and V have as many rows, and the batch of Q";
  }
  if (!has_rows(a.q) || !has_rows(a.k) || !has_rows(a.v) || !ggml_is_contiguous(&op)) {
    return "rows lie side by side, with strides of whole elements";
  }
  if (!std::isfinite(a.scale) || !std::isfinite(a.softcap) || !std::isfinite(a.max_bias)) {
    return "scale, softcap and max_bias are finite";
  }
  if (a.mask != nullptr) {
    if (a.mask->type != GGML_TYPE_F16 || !has_rows(*a.mask)) return "the mask is rows of f16";
    if (a.mask->ne[0] < a.sk() || a.mask->ne[1] < a.sq()) {
      return "the mask has a number for each query and key";
    }
    if (a.hq() % a.mask->ne[2] != 0 || a.batch() % a.mask->ne[3] != 0) {
      return "heads and batch of the mask divide those of Q";
    }
  } else if (a.slopes()) {
    return "max_bias goes with a mask";
  }
  if (a.sinks != nullptr) {
    if (a.sinks->type != GGML_TYPE_F32 || !has_rows(*a.sinks) || a.sinks->ne[0] != a.hq()) {
      return "sinks are an f32 for each head of Q";
    }
  }
  return nullptr;
}

void compute(const ggml_tensor& op, int threads) {
  const Attention a(op);
  fulgur::Options options;
  options.scale = a.scale;
  options.softcap = a.softcap;
  options.threads = threads;
  options.engine = "cpu";
  fulgur::ForwardArgs args;
  args.q = rows_of(a.q);
  args.k = rows_of(a.k);
  args.v = rows_of(a.v);
  args.out =
      fulgur::Tensor::contiguous(op.data, DType::kF32, {a.batch(), a.sq(), a.hq(), a.v.ne[0]});
  if (a.sinks != nullptr) {
    args.sinks = ConstTensor::contiguous(a.sinks->data, DType::kF32, {a.hq()});
  }
  std::vector<float> slopes;
  if (a.mask != nullptr && a.mask_is_bias()) {
    args.bias = mask_of(a);
  } else if (a.mask != nullptr) {
    options.score_mod = masked_score(a);
    args.tensors.push_back({.name = "mask", .tensor = mask_of(a)});
    if (a.slopes()) {
      slopes = slopes_of(a);
      args.tensors.push_back(
          {.name = "slope",
           .tensor = ConstTensor::contiguous(slopes.data(), DType::kF32, {a.hq()})});
    }
  }
  fulgur::forward(args, options);
}

}  // namespace fulgur_ggml

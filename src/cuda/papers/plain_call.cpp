#include "cuda/papers/plain_call.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "call/tensors.h"
#include "cuda/common/kernel_key.h"
#include "cuda/common/tensor_shape.h"

namespace fulgur::cuda::papers {
namespace {

/// The name of a tensor of a call other than operands of attention; empty if there is none.
std::string besides_operands(const Problem& p) {
  std::string name;
  const auto look = [&](const TensorRule& rule, const auto&) {
    const bool operand = rule.arg <= Arg::kDv;
    if (name.empty() && !operand && p.has(rule.arg)) name = rule.name;
  };
  const ForwardArgs forward;
  const BackwardArgs backward;
  if (p.pass == Pass::kForward) {
    for_each_tensor(look, forward);
  } else {
    for_each_tensor(look, backward);
  }
  return name;
}

}  // namespace

std::string plain_call_rejects(const Problem& p, int64_t max_dim) {
  if (std::string why = dtypes_rejected(p.dtypes); !why.empty()) return why;
  if (p.dtypes.q != p.dtypes.v) return "multiplies operands of one dtype";
  if (const std::string name = besides_operands(p); !name.empty()) {
    return fmt::format("computes without {}", name);
  }
  if (p.softcap > 0) return "computes without softcap";
  if (p.expressions.given()) return "computes without score_mod and mask_mod";
  if (p.dropout_p > 0) return "computes without dropout";
  if (p.origin != Origin{}) return "computes no part of a larger call";
  if (p.f32_key_gradients) return "computes dk and dv in the dtype of k";
  if (p.pass == Pass::kBackward && !(p.wants_dq() && p.wants_dk_dv()))
    return "computes dq, dk and dv together";
  if (transforms(p)) return fmt::format("computes scales above 0, got {}", p.scale);
  if (p.d > max_dim || p.dv > max_dim || p.d % 8 != 0 || p.dv % 8 != 0) {
    return fmt::format("computes d and dv that are multiples of 8 up to {}, got {} and {}", max_dim,
                       p.d, p.dv);
  }
  const auto check = [&](const auto&... shapes) {
    std::string why;
    const auto look = [&](const char* name, const TensorShape& shape) {
      if (why.empty()) why = rows_unsupported(shape);
      if (why.empty()) why = not_addressable(shape);
      if (!why.empty() && why.find(": ") == why.npos) why = fmt::format("{}: {}", name, why);
    };
    (look(shapes.first, *shapes.second), ...);
    return why;
  };
  std::string why;
  if (p.pass == Pass::kForward) {
    const ForwardShapes s = forward_shapes(p, 64);
    why = check(std::pair{"q", &s.q}, std::pair{"k", &s.k}, std::pair{"v", &s.v},
                std::pair{"out", &s.o});
  } else {
    const BackwardShapes s = backward_shapes(p);
    why = check(std::pair{"q", &s.q}, std::pair{"k", &s.k}, std::pair{"v", &s.v},
                std::pair{"dout", &s.dout}, std::pair{"dq", &s.dq}, std::pair{"dk", &s.dk},
                std::pair{"dv", &s.dv});
  }
  if (!why.empty()) return "computes rows of multiples of 16 bytes, " + why;
  const double rows = static_cast<double>(p.batch) * static_cast<double>(p.hq) *
                      static_cast<double>(std::max(p.sq, p.sk));
  const double tiles = rows / 64 * static_cast<double>(std::min(p.sq, p.sk) / 64 + 1);
  if (std::max(rows, tiles) > std::numeric_limits<int>::max()) {
    return fmt::format("computes up to 2^31 rows and tiles of 64 x 64, got {:.3g} and {:.3g}", rows,
                       tiles);
  }
  return {};
}

}  // namespace fulgur::cuda::papers

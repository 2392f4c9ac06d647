#include "cuda/engine/shape_class.h"

#include <fmt/format.h>

#include <bit>
#include <utility>

namespace fulgur::cuda {
namespace {

/// Rounds positive numbers up to three significant binary digits.
int64_t rounded(int64_t n) {
  const int shift = n <= 8 ? 0 : std::bit_width(static_cast<uint64_t>(n - 1)) - 3;
  return (((n - 1) >> shift) + 1) << shift;
}

}  // namespace

std::string shape_class(const Problem& p) {
  std::string text = p.pass == Pass::kForward ? "" : "backward ";
  text += fmt::format("{} d {} dv {} sq {} sk {} heads {} group {}", name_of(p.dtypes.q),
                      (p.d + 15) / 16 * 16, (p.dv + 15) / 16 * 16, rounded(p.sq), rounded(p.sk),
                      rounded(p.batch * p.hq), p.group());
  const auto [before, after] = p.mask.top_left
                                   ? std::pair{p.sq, p.sk}
                                   : std::pair{p.sk, p.sq};  // keys before the diagonal of a row
  if (p.mask.left >= 0 && p.mask.left < before - 1)
    text += fmt::format(" left {}", rounded(p.mask.left));
  if (p.mask.right >= 0 && p.mask.right < after - 1)
    text += fmt::format(" right {}", rounded(p.mask.right));
  if (p.mask.chunk > 0 && p.mask.chunk < p.sk)
    text += fmt::format(" chunk {}", rounded(p.mask.chunk));
  const bool softcap = p.softcap > 0, alibi = p.has(Arg::kAlibiSlopes), bias = p.has(Arg::kBias);
  for (const auto& [is, name] :
       {std::pair{p.scale <= 0 || softcap || alibi || bias, "transformed"},
        std::pair{softcap, "softcap"}, std::pair{alibi, "alibi"}, std::pair{bias, "bias"},
        std::pair{p.packed, "packed"}, std::pair{p.has(Arg::kSeqUsedQ), "seqused_q"},
        std::pair{p.has(Arg::kSeqUsedK), "seqused_k"}, std::pair{p.has(Arg::kTreeMask), "tree"},
        std::pair{p.mask.top_left, "top_left"}, std::pair{p.dropout_p > 0, "dropout"},
        std::pair{p.pass == Pass::kBackward && p.deterministic, "deterministic"},
        std::pair{p.pass == Pass::kBackward && !p.wants_dk_dv(), "dq_alone"},
        std::pair{p.pass == Pass::kBackward && !p.wants_dq(), "dk_dv_alone"}}) {
    if (is) text += fmt::format(" {}", name);
  }
  if (p.algorithm != Algorithm::kAny) text += fmt::format(" {}", name_of(p.algorithm));
  return text;
}

}  // namespace fulgur::cuda

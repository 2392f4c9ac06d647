#include "call/merge_call.h"

namespace fulgur {
namespace {

MergeCall::Part check_part(const std::string& name, const Partial& p, const ConstTensor& like,
                           bool written) {
  const std::string out_name = name + "out", lse_name = name + "lse";
  const ConstTensor &out = p.out, &lse = p.lse;
  const bool packed = like.rank == 3;
  check_tensor(out_name.c_str(), out,
               packed ? "(total, heads, dim)" : "(batch, seqlen, heads, dim)", like.rank, written);
  if (!is_float(out.dtype))
    fail(out_name.c_str(), "got {}, want a float dtype", name_of(out.dtype));
  if (out.shape != like.shape) {
    fail(out_name.c_str(), "got shape {}, want {} of the result", list(out, out.shape),
         list(like, like.shape));
  }
  MergeCall::Part checked{out, lse, rows_layout(out), {}};
  check_device(out_name.c_str(), out, like.device, "out");
  check_data(out_name.c_str(), out);
  if (written && !lse.given()) return checked;
  if (packed) {
    check_shape(lse_name.c_str(), lse, "(heads, total)", {like.shape[1], like.shape[0]}, written);
  } else {
    check_shape(lse_name.c_str(), lse, "(batch, heads, seqlen)",
                {like.shape[0], like.shape[2], like.shape[1]}, written);
  }
  if (lse.dtype != DType::kF32 && lse.dtype != DType::kF64) {
    fail(lse_name.c_str(), "got {}, want f32 or f64", name_of(lse.dtype));
  }
  check_device(lse_name.c_str(), lse, like.device, "out");
  check_data(lse_name.c_str(), lse);
  checked.lse_rows = lse_layout(lse);
  return checked;
}

/// Checks that a result either is the tensor of a part, of which each row is read before it is
/// written, or has no memory in common with it.
void check_apart(const char* name, const ConstTensor& result, const std::string& part_name,
                 const ConstTensor& part) {
  const bool same = result.data == part.data && result.dtype == part.dtype &&
                    result.rank == part.rank && result.strides == part.strides;
  if (!same && share_memory(result, part)) {
    fail(name, "lies across {}; a result needs its own memory or all of a part's", part_name);
  }
}

}  // namespace

MergeCall checked_merge(std::span<const Partial> parts, const Merged& result) {
  const ConstTensor like = result.out;
  if (like.rank != 3 && like.rank != 4) {
    fail("out", "got {}, want (batch, seqlen, heads, dim) or (total, heads, dim)", like.describe());
  }
  if (parts.empty()) fail("parts", "got none, want at least one");
  const MergeCall::Part to = check_part("", {result.out, result.lse}, like, true);
  MergeCall call{.from = {},
                 .to = result,
                 .out_rows = to.out_rows,
                 .lse_rows = to.lse_rows,
                 .batch = like.rank == 3 ? 1 : like.shape[0],
                 .rows = like.shape[like.rank - 3],
                 .heads = like.shape[like.rank - 2],
                 .dim = like.shape[like.rank - 1]};
  if (call.heads < 1) fail("out", "got {} heads, want at least 1", call.heads);
  if (call.dim < 1) fail("out", "got head dim {}, want at least 1", call.dim);
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = fmt::format("parts[{}].", i);
    call.from.push_back(check_part(name, parts[i], like, false));
    check_apart("out", result.out, name + "out", parts[i].out);
    check_apart("out", result.out, name + "lse", parts[i].lse);
    check_apart("lse", result.lse, name + "out", parts[i].out);
    check_apart("lse", result.lse, name + "lse", parts[i].lse);
  }
  check_apart("lse", result.lse, "out", like);
  return call;
}

}  // namespace fulgur

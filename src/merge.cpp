#include "fulgur/merge.h"

#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "convert.h"
#include "parallel.h"

namespace fulgur {
namespace {

struct Checked {
  Partial tensors;
  Layout out, lse;
};

void check_on_cpu(const std::string& name, const ConstTensor& t) {
  if (t.device.type == DeviceType::kCpu) return;
  throw Error(Status::kUnsupported,
              fmt::format("{}: on {}, merge works on cpu", name, name_of(t.device)));
}

Checked check_partial(const std::string& name, const Partial& p, const ConstTensor& like,
                      bool written) {
  const std::string out_name = name + "out", lse_name = name + "lse";
  const ConstTensor &out = p.out, &lse = p.lse;
  const bool packed = like.rank == 3;
  check_tensor(out_name.c_str(), out,
               packed ? "(total, heads, dim)" : "(batch, seqlen, heads, dim)", like.rank, written);
  if (is_integer(out.dtype))
    fail(out_name.c_str(), "got {}, want a float dtype", name_of(out.dtype));
  if (out.shape != like.shape) {
    fail(out_name.c_str(), "got shape {}, want {} of the result", list(out, out.shape),
         list(like, like.shape));
  }
  Checked checked{p, rows_layout(out), {}};
  check_on_cpu(out_name, out);
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
  check_on_cpu(lse_name, lse);
  check_data(lse_name.c_str(), lse);
  checked.lse = lse_layout(lse);
  return checked;
}

/// A result may be the very tensor of a part (each row is read before it is written), but not lie
/// across one.
void check_apart(const char* name, const ConstTensor& result, const std::string& part_name,
                 const ConstTensor& part) {
  const bool same = result.data == part.data && result.dtype == part.dtype &&
                    result.rank == part.rank && result.strides == part.strides;
  if (!same && share_memory(result, part)) {
    fail(name, "lies across {}; a result needs its own memory or all of a part's", part_name);
  }
}

}  // namespace

void merge(std::span<const Partial> parts, const Merged& result) {
  const ConstTensor like = result.out;
  if (like.rank != 3 && like.rank != 4) {
    fail("out", "got {}, want (batch, seqlen, heads, dim) or (total, heads, dim)", like.describe());
  }
  if (parts.empty()) fail("parts", "got none, want at least one");
  const Checked to = check_partial("", {result.out, result.lse}, like, true);
  std::vector<Checked> from;
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string name = fmt::format("parts[{}].", i);
    from.push_back(check_partial(name, parts[i], like, false));
    check_apart("out", result.out, name + "out", parts[i].out);
    check_apart("out", result.out, name + "lse", parts[i].lse);
    check_apart("lse", result.lse, name + "out", parts[i].out);
    check_apart("lse", result.lse, name + "lse", parts[i].lse);
  }
  check_apart("lse", result.lse, "out", like);
  if (like.numel() == 0) return;
  const bool packed = like.rank == 3;
  const int64_t batch = packed ? 1 : like.shape[0], rows = like.shape[packed ? 0 : 1];
  const int64_t heads = like.shape[packed ? 1 : 2], dim = like.shape[packed ? 2 : 3];

  parallel_for(batch * rows, 0, [&](int64_t row) {
    const int64_t b = row / rows, r = row % rows;
    std::vector<double> weight(from.size()), sum(dim);
    for (int64_t h = 0; h < heads; ++h) {
      double m = -std::numeric_limits<double>::infinity(), total = 0;
      for (size_t i = 0; i < from.size(); ++i) {
        const ConstTensor& lse = from[i].tensors.lse;
        weight[i] = load_element(lse.data, lse.dtype, from[i].lse.offset(b, r, h));
        m = std::fmax(m, weight[i]);
      }
      // All parts saw no key: subtracting -inf from itself would give NaN instead of 0.
      const double shift = std::isinf(m) && m < 0 ? 0 : m;
      for (double& w : weight) total += w = std::exp(w - shift);
      std::fill(sum.begin(), sum.end(), 0.0);
      for (size_t i = 0; i < from.size(); ++i) {
        if (weight[i] == 0) continue;  // an unseen part may hold anything
        const ConstTensor& out = from[i].tensors.out;
        const int64_t at = from[i].out.offset(b, r, h);
        for (int64_t c = 0; c < dim; ++c) {
          sum[c] += weight[i] / total * load_element(out.data, out.dtype, at + c);
        }
      }
      const int64_t at = to.out.offset(b, r, h);
      for (int64_t c = 0; c < dim; ++c) {
        store_element(result.out.data, result.out.dtype, at + c, sum[c]);
      }
      if (result.lse.given()) {
        store_element(result.lse.data, result.lse.dtype, to.lse.offset(b, r, h),
                      shift + std::log(total));
      }
    }
  });
}

}  // namespace fulgur

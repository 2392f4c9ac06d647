#include <fmt/format.h>

#include "commands.h"
#include "flags.h"
#include "fulgur/cuda.h"

namespace fulgur::app {
namespace {

struct PrewarmRequest {
  std::string folder;
  std::vector<int64_t> dims = {64, 128};
  int64_t dv = -1;
  std::vector<std::string> dtypes = {"bf16", "f16"};
  bool backward = false, dlse = false, packed = false, alibi = false;
  bool seqused_q = false, seqused_k = false;
  OptionFlags flags;
};

/// A call like those to come, without data; any lengths and batch will do.
cuda::Prewarmed prewarm_one(const PrewarmRequest& r, int64_t d, DType dtype, Options options) {
  constexpr int64_t kLength = 1024, kHeads = 1;  // none of them is part of a kernel
  constexpr Device kDevice{DeviceType::kCuda, 0};
  const int64_t dv = r.dv < 0 ? d : r.dv;
  const auto rows = [&](int64_t heads, int64_t dim) {
    if (r.packed) return Tensor::contiguous(nullptr, dtype, {kLength, heads, dim}, kDevice);
    return Tensor::contiguous(nullptr, dtype, {1, kLength, heads, dim}, kDevice);
  };
  const auto vector = [&](DType type, int64_t size) {
    return Tensor::contiguous(nullptr, type, {size}, kDevice);
  };
  const Tensor q = rows(kHeads, d), k = rows(1, d), v = rows(1, dv), out = rows(kHeads, dv);
  const Tensor lse = r.packed
                         ? Tensor::contiguous(nullptr, DType::kF32, {kHeads, kLength}, kDevice)
                         : Tensor::contiguous(nullptr, DType::kF32, {1, kHeads, kLength}, kDevice);
  if (r.packed) options.max_seqlen_q = options.max_seqlen_k = kLength;
  const auto set_extras = [&](auto& args) {
    if (r.packed) args.cu_seqlens_q = args.cu_seqlens_k = vector(DType::kI32, 2);
    if (r.seqused_q) args.seqused_q = vector(DType::kI32, 1);
    if (r.seqused_k) args.seqused_k = vector(DType::kI32, 1);
    if (r.alibi) args.alibi_slopes = vector(DType::kF32, kHeads);
  };
  if (r.backward) {
    BackwardArgs args{out, q, k, v, out, lse, q, k, v};
    if (r.dlse) args.dlse = lse;
    set_extras(args);
    return cuda::prewarm(args, options, r.folder);
  }
  ForwardArgs args{q, k, v, out};
  set_extras(args);
  cuda::Prewarmed sum;
  for (const Tensor& wanted : {Tensor(), lse}) {
    args.lse = wanted;
    const cuda::Prewarmed one = cuda::prewarm(args, options, r.folder);
    sum.compiled += one.compiled;
    sum.present += one.present;
  }
  return sum;
}

void prewarm(const PrewarmRequest& r) {
  cuda::Prewarmed sum;
  for (const int64_t d : r.dims) {
    for (const std::string& dtype : r.dtypes) {
      const cuda::Prewarmed one = prewarm_one(r, d, dtype_called(dtype), r.flags.options());
      sum.compiled += one.compiled;
      sum.present += one.present;
      fmt::print("d {} {}: {} kernels compiled, {} were there\n", d, dtype, one.compiled,
                 one.present);
    }
  }
  fmt::print("{} kernels compiled, {} were there\n", sum.compiled, sum.present);
}

}  // namespace

void add_prewarm(CLI::App& app) {
  auto r = std::make_shared<PrewarmRequest>();
  auto* command = app.add_subcommand(
      "prewarm", "Compile CUDA kernels into a cache ahead of time; needs NVRTC, no GPU");
  command
      ->add_option("--folder", r->folder, "The cache; default FULGUR_CACHE_DIR or ~/.cache/fulgur")
      ->type_name("DIR");
  command->add_option("--d", r->dims, "Head dims; default 64 128")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  command->add_option("--dv", r->dv, "Head dim of v; default d")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  command->add_option("--dtype", r->dtypes, "Default bf16 f16")
      ->check(CLI::IsMember({"bf16", "f16"}))
      ->type_name("T");
  auto* backward = command->add_flag("--backward", r->backward, "The kernels of the gradient");
  command->add_flag("--dlse", r->dlse, "The gradient of LSE is given")->needs(backward);
  command->add_flag("--packed", r->packed, "Packed sequences (cu_seqlens)");
  command->add_flag("--alibi", r->alibi, "ALiBi slopes");
  command->add_flag("--seqused-q", r->seqused_q, "Lengths of the queries in use");
  command->add_flag("--seqused-k", r->seqused_k, "Lengths of the keys in use");
  r->flags.add_to(*command);
  command->footer(
      "Kernels serve every length and batch, with and without LSE.\nExamples:\n"
      "  fulgur prewarm --d 128 --dtype bf16 --causal\n"
      "  fulgur prewarm --d 128 --dtype bf16 --causal --backward\n"
      "  fulgur prewarm --folder /opt/fulgur --d 64 128 256");
  command->callback([r] { prewarm(*r); });
}

}  // namespace fulgur::app

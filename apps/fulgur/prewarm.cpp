#include <fmt/format.h>

#include "commands.h"
#include "flags.h"
#include "fulgur/cuda.h"

namespace fulgur::app {
namespace {

struct PrewarmRequest {
  std::string folder;
  std::vector<std::string> targets;
  std::vector<int64_t> dims = {64, 128};
  int64_t dv = -1;
  std::vector<std::string> dtypes = {"bf16", "f16"};
  int64_t hq = 1, hk = 1, page = 0;
  bool backward = false, dlse = false, packed = false, alibi = false, sinks = false;
  bool seqused_q = false, seqused_k = false, tree_mask = false;
  bool page_indptr = false, cache_batch_idx = false, leftpad_k = false, prefix_groups = false;
  OptionFlags flags;

  bool cache() const { return page > 0 || cache_batch_idx || leftpad_k; }
};

/// A call like those to come, without data; any lengths and batch will do.
cuda::Prewarmed prewarm_one(const PrewarmRequest& r, int64_t d, DType dtype, Options options) {
  const int64_t sq = 1, sk = 1024;  // none of them is part of a kernel
  const int64_t dv = r.dv < 0 ? d : r.dv;
  const auto tensor = [](DType type, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(nullptr, type, shape, {DeviceType::kCuda, 0});
  };
  const auto queries = [&](int64_t dim) {
    return r.packed ? tensor(dtype, {sq, r.hq, dim}) : tensor(dtype, {1, sq, r.hq, dim});
  };
  const auto keys = [&](int64_t dim) {
    if (r.page > 0) return tensor(dtype, {1, r.page, r.hk, dim});
    if (r.packed && !r.cache()) return tensor(dtype, {sk, r.hk, dim});
    return tensor(dtype, {1, sk, r.hk, dim});
  };
  const Tensor q = queries(d), k = keys(d), v = keys(dv), out = queries(dv);
  const Tensor lse =
      r.packed ? tensor(DType::kF32, {r.hq, sq}) : tensor(DType::kF32, {1, r.hq, sq});
  const Tensor one = tensor(DType::kI32, {1}), two = tensor(DType::kI32, {2});
  if (r.packed) options.max_seqlen_q = sq;
  if (r.packed && !r.cache()) options.max_seqlen_k = sk;
  const auto set_extras = [&](auto& args) {
    if (r.packed) args.lengths.cu_seqlens_q = two;
    if (r.packed && !r.cache()) args.lengths.cu_seqlens_k = two;
    if (r.seqused_q) args.lengths.seqused_q = one;
    if (r.seqused_k || r.page > 0) args.lengths.seqused_k = one;
    if (r.alibi) args.alibi_slopes = tensor(DType::kF32, {r.hq});
    if (r.sinks) args.sinks = tensor(DType::kF32, {r.hq});
  };
  if (r.backward) {
    BackwardArgs args{out, q, k, v, out, lse, q, k, v};
    if (r.dlse) args.dlse = lse;
    set_extras(args);
    return cuda::prewarm(args, options, r.folder, r.targets);
  }
  ForwardArgs args{q, k, v, out};
  set_extras(args);
  if (r.page > 0) args.cache.page_table = r.page_indptr ? one : tensor(DType::kI32, {1, 1});
  if (r.page_indptr) args.cache.page_indptr = two;
  if (r.cache_batch_idx) args.cache.cache_batch_idx = one;
  if (r.leftpad_k) args.cache.leftpad_k = one;
  if (r.tree_mask) args.tree_mask = tensor(DType::kI64, {1, sq});
  if (r.prefix_groups) args.shared_prefix.prefix_groups = two;
  if (r.prefix_groups) args.shared_prefix.prefix_lens = one;
  cuda::Prewarmed sum;
  for (const Tensor& wanted : {Tensor(), lse}) {
    args.lse = wanted;
    const cuda::Prewarmed one = cuda::prewarm(args, options, r.folder, r.targets);
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
  command
      ->add_option("--target", r->targets,
                   "What to compile for, as NVRTC names it; default: the cards here, or sm_90a")
      ->delimiter(',')
      ->type_name("sm_NN");
  const auto take_dims = [r](const std::vector<std::string>& texts) {
    r->dims.clear();
    for (const auto& text : texts) r->dims.push_back(whole_number<int64_t>("--d", text, 1));
  };
  command
      ->add_option_function<std::vector<std::string>>("--d", take_dims, "Head dims; default 64 128")
      ->type_name("N");
  const auto add_size = [&](const char* name, int64_t& size, const char* help) {
    return add_whole<int64_t>(*command, name, size, help, 1);
  };
  add_size("--dv", r->dv, "Head dim of v; default d");
  command->add_option("--dtype", r->dtypes, "Default bf16 f16")
      ->check(CLI::IsMember({"bf16", "f16", "f32"}))
      ->type_name("T");
  add_size("--hq", r->hq, "Heads of q; default 1. Decoding has kernels for each hq / hk");
  add_size("--hk", r->hk, "Heads of k and v; default 1");
  auto* backward = command->add_flag("--backward", r->backward, "The kernels of the gradient");
  command->add_flag("--dlse", r->dlse, "The gradient of LSE is given")->needs(backward);
  command->add_flag("--packed", r->packed,
                    "Packed sequences (cu_seqlens); with a cache those of q alone");
  command->add_flag("--alibi", r->alibi, "ALiBi slopes");
  command->add_flag("--sinks", r->sinks, "Attention sinks");
  command->add_flag("--seqused-q", r->seqused_q, "Lengths of the queries in use");
  command->add_flag("--seqused-k", r->seqused_k, "Lengths of the keys in use; those of pages are");
  auto* page =
      add_size("--page", r->page, "Keys in pages of so many; default: none")->excludes(backward);
  const auto add_cache = [&](const char* name, bool& is_there, const char* help) {
    return command->add_flag(name, is_there, help)->excludes(backward);
  };
  add_cache("--page-indptr", r->page_indptr, "Lists of pages in place of a table")->needs(page);
  add_cache("--cache-batch-idx", r->cache_batch_idx, "Sequences are rows of k and v by number")
      ->excludes(page);
  add_cache("--leftpad-k", r->leftpad_k, "First keys that do not exist");
  add_cache("--tree-mask", r->tree_mask, "A mask of drafted tokens");
  add_cache("--prefix-groups", r->prefix_groups, "Groups of sequences that share first pages")
      ->needs(page);
  r->flags.add_to(*command);
  command->footer(
      "Kernels serve every length and batch, with and without LSE.\nExamples:\n"
      "  fulgur prewarm --d 128 --dtype bf16 --causal\n"
      "  fulgur prewarm --d 128 --dtype bf16 --causal --backward\n"
      "  fulgur prewarm --d 128 --dtype bf16 --causal --hq 32 --hk 8 --packed --page 16\n"
      "  fulgur prewarm --folder /opt/fulgur --target sm_90a --d 64 128 256");
  command->callback([r] { prewarm(*r); });
}

}  // namespace fulgur::app

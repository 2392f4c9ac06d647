#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "commands.h"
#include "expressions.h"
#include "flags.h"
#include "io/file.h"
#include "io/npy.h"
#include "io/safetensors.h"
#include "placement.h"
#include "steps.h"

namespace fulgur::app {
namespace {

using io::Array;
using io::Arrays;

const std::vector<std::string> kInputs = {"q", "k", "v", "bias", "sinks", "dout", "dlse"};
const std::vector<std::string> kOutputs = {"out", "lse", "dq", "dk", "dv", "dbias", "dsinks"};
// ForwardArgs::alibi_slopes and its like, always .npy.
const std::vector<std::string> kExtras = {
    "alibi-slopes", "cu-seqlens-q",    "cu-seqlens-k", "seqused-q", "seqused-k",     "page-table",
    "page-indptr",  "cache-batch-idx", "leftpad-k",    "tree-mask", "prefix-groups", "prefix-lens"};
// Those of a cache and of drafts, which have no gradient.
const std::vector<std::string> kForwardExtras = {"page-table", "page-indptr", "cache-batch-idx",
                                                 "leftpad-k",  "tree-mask",   "prefix-groups",
                                                 "prefix-lens"};

struct AttendRequest {
  std::map<std::string, std::string> npy;  // path by the name of an input, output or extra
  std::string input, output;               // .safetensors
  std::string dtype, device = "cpu";
  OptionFlags flags;
  ExpressionFlags expressions;
  std::vector<std::string> gradients;  // NAME=F.npy
  std::map<std::string, std::string> gradient_paths;

  bool has(const std::string& name) const {
    const auto found = npy.find(name);
    return found != npy.end() && !found->second.empty();
  }
  std::vector<std::string> output_paths() const {
    std::vector<std::string> paths;
    if (!output.empty()) paths.push_back(output);
    for (const auto& name : kOutputs) {
      if (has(name)) paths.push_back(npy.at(name));
    }
    for (const auto& [name, path] : gradient_paths) paths.push_back(path);
    return paths;
  }
};

[[noreturn]] void usage(const std::string& option, const std::string& what) {
  throw CLI::ValidationError("--" + option, what);
}

/// Of two outputs into one file the second is refused.
void check_paths(const AttendRequest& r) {
  std::map<std::filesystem::path, std::string> names;
  const auto check = [&](const std::string& name, const std::string& file) {
    const auto path = std::filesystem::absolute(file);
    std::error_code error;
    const auto real = std::filesystem::weakly_canonical(path, error);
    // What leads to no file is for the writer to refuse.
    const auto [other, is_new] = names.emplace(error ? path : real, name);
    if (!is_new) usage(name, "names the same file as --" + other->second);
  };
  if (!r.output.empty()) check("output", r.output);
  for (const auto& name : kOutputs) {
    if (r.has(name)) check(name, r.npy.at(name));
  }
  for (const auto& [name, path] : r.gradient_paths) check("tensor-grad " + name, path);
}

void check_usage(AttendRequest& r) {
  for (const std::string& text : r.gradients) {
    const auto [name, path] = name_and_path("--tensor-grad", text);
    if (!r.gradient_paths.emplace(name, path).second)
      usage("tensor-grad", "names " + name + " twice");
  }
  check_paths(r);
  if (!r.input.empty()) {
    for (const auto& names : {kInputs, kOutputs}) {
      for (const auto& name : names) {
        if (r.has(name)) usage(name, "does not go with --input and --output");
      }
    }
    return;
  }
  for (const char* name : {"q", "k", "v", "out"}) {
    if (!r.has(name)) usage(name, "is required, or else --input and --output");
  }
  const std::vector<std::string> gradient = {"dout", "dq", "dk", "dv"};
  for (const auto& a : gradient) {
    for (const auto& b : gradient) {
      if (r.has(a) && !r.has(b)) usage(a, "needs --" + b);
    }
  }
  if (r.has("dlse") && !r.has("dout")) usage("dlse", "needs --dout");
  for (const std::string name : {"bias", "sinks"}) {
    for (const auto& needed : {std::string("dout"), name}) {
      if (r.has("d" + name) && !r.has(needed)) usage("d" + name, "needs --" + needed);
    }
  }
}

/// Of lse and dlse, where q has this one.
DType lse_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

Arrays read_inputs(const AttendRequest& r) {
  Arrays arrays;
  if (!r.input.empty()) {
    const std::string where = "--input " + r.input;
    arrays = io::read_safetensors(r.input, kInputs, where);
    for (const char* name : {"q", "k", "v"}) {
      if (!arrays.contains(name)) io::fail(where, "lacks the tensor '{}'", name);
    }
    if (arrays.contains("dlse") && !arrays.contains("dout")) {
      io::fail(where, "has a tensor 'dlse', but no 'dout'");
    }
  } else {
    for (const auto& name : kInputs) {
      if (!r.has(name)) continue;
      const std::string& path = r.npy.at(name);
      arrays.emplace(name, io::read_npy(path, fmt::format("--{} {}", name, path)));
    }
  }
  if (!r.dtype.empty()) {
    const DType dtype = dtype_called(r.dtype);
    for (auto& [name, array] : arrays) {
      // A bias has a dtype of its own, but float64 goes with float64 alone.
      if (name == "bias" && array.dtype() != DType::kF64) continue;
      const DType wanted = name == "dlse" || name == "bias" ? lse_dtype(dtype)
                           : name == "sinks"                ? DType::kF32
                                                            : dtype;
      if (array.dtype() != wanted) array = array.converted(wanted, name);
    }
  }
  return arrays;
}

Arrays read_extras(const AttendRequest& r) {
  Arrays arrays;
  for (const auto& name : kExtras) {
    if (!r.has(name)) continue;
    const std::string& path = r.npy.at(name);
    arrays.emplace(name, io::read_npy(path, fmt::format("--{} {}", name, path)));
  }
  return arrays;
}

/// The longest sequence of a valid cu_seqlens; 0 without one.
int64_t longest(const Arrays& extras, const char* name) {
  const auto found = extras.find(name);
  if (found == extras.end()) return 0;
  const auto* cu = reinterpret_cast<const int32_t*>(found->second.bytes().data());
  int64_t longest = 0;
  for (int64_t i = 1; i < found->second.numel(); ++i) {
    longest = std::max<int64_t>(longest, cu[i] - cu[i - 1]);
  }
  return longest;
}

using Tensors = std::map<std::string, Tensor>;

/// The name of the gradient of a tensor among a call's tensors.
std::string gradient_of(const std::string& name) { return "gradient of " + name; }

/// The extras where the call is computed.
Tensors placed_extras(const Arrays& extras, Placement& place) {
  Tensors tensors;
  for (const auto& [name, array] : extras) tensors[name] = place.input(array);
  return tensors;
}

/// The tensors of the call on `device` without their data: what can be planned.
Tensors shapes_of_call(const AttendRequest& r, const Arrays& inputs, Device device) {
  Tensors t;
  const auto add = [&](const std::string& name, DType dtype, std::span<const int64_t> shape) {
    t[name] = Tensor::contiguous(nullptr, dtype, shape, device);
  };
  for (const auto& [name, array] : inputs) add(name, array.dtype(), array.shape());
  const bool backward = inputs.contains("dout");
  const DType dtype = inputs.at("q").dtype();
  const std::vector<int64_t>& q = inputs.at("q").shape();
  std::vector<int64_t> out = q;
  out.back() = inputs.at("v").shape().back();
  add("out", dtype, out);
  if (q.size() > 2 && (backward || r.has("lse") || !r.output.empty())) {
    std::vector<int64_t> lse(q.begin(), q.end() - 1);
    std::swap(lse.end()[-1], lse.end()[-2]);
    add("lse", lse_dtype(dtype), lse);
  }
  if (backward) {
    for (const char* name : {"q", "k", "v"}) {
      add(std::string("d") + name, dtype, inputs.at(name).shape());
    }
    const auto bias = inputs.find("bias");
    const bool numbers = bias != inputs.end() && bias->second.dtype() != DType::kBool;
    if (r.has("dbias") || (numbers && !r.output.empty())) {
      add("dbias", DType::kF32, bias->second.shape());
    }
    if (inputs.contains("sinks") && (r.has("dsinks") || !r.output.empty())) {
      add("dsinks", DType::kF32, inputs.at("sinks").shape());
    }
    for (const auto& [name, path] : r.gradient_paths) {
      const auto of = r.expressions.tensors().find(name);
      if (of == r.expressions.tensors().end()) {
        usage("tensor-grad", "got " + name + ", want a name that --tensor gives");
      }
      add(gradient_of(name), lse_dtype(of->second.dtype()), of->second.shape());
    }
  }
  return t;
}

/// What the expressions of a call index, with gradients where it has them.
std::vector<TensorBinding> bindings_of(const AttendRequest& r, Tensors& t) {
  std::vector<TensorBinding> all = r.expressions.bindings();
  for (TensorBinding& binding : all) {
    const auto grad = t.find(gradient_of(binding.name));
    if (grad != t.end()) binding.grad = grad->second;
  }
  return all;
}

ForwardArgs forward_args(const AttendRequest& r, Tensors& t, Tensors& extras) {
  return {.q = t["q"],
          .k = t["k"],
          .v = t["v"],
          .out = t["out"],
          .lse = t["lse"],
          .alibi_slopes = extras["alibi-slopes"],
          .lengths = {.cu_seqlens_q = extras["cu-seqlens-q"],
                      .cu_seqlens_k = extras["cu-seqlens-k"],
                      .seqused_q = extras["seqused-q"],
                      .seqused_k = extras["seqused-k"]},
          .sinks = t["sinks"],
          .tree_mask = extras["tree-mask"],
          .bias = t["bias"],
          .tensors = r.expressions.bindings(),
          .cache = {.page_table = extras["page-table"],
                    .page_indptr = extras["page-indptr"],
                    .cache_batch_idx = extras["cache-batch-idx"],
                    .leftpad_k = extras["leftpad-k"]},
          .shared_prefix = {.prefix_groups = extras["prefix-groups"],
                            .prefix_lens = extras["prefix-lens"]}};
}

BackwardArgs backward_args(const AttendRequest& r, Tensors& t, Tensors& extras) {
  return {.dout = t["dout"],
          .q = t["q"],
          .k = t["k"],
          .v = t["v"],
          .out = t["out"],
          .lse = t["lse"],
          .dq = t["dq"],
          .dk = t["dk"],
          .dv = t["dv"],
          .alibi_slopes = extras["alibi-slopes"],
          .lengths = {.cu_seqlens_q = extras["cu-seqlens-q"],
                      .cu_seqlens_k = extras["cu-seqlens-k"],
                      .seqused_q = extras["seqused-q"],
                      .seqused_k = extras["seqused-k"]},
          .dlse = t["dlse"],
          .sinks = t["sinks"],
          .dsinks = t["dsinks"],
          .bias = t["bias"],
          .dbias = t["dbias"],
          .tensors = bindings_of(r, t)};
}

void write_outputs(const AttendRequest& r, Arrays outputs) {
  io::OutputFiles files;
  for (const auto& [name, path] : r.gradient_paths) {
    const auto array = outputs.find(gradient_of(name));
    io::write_npy(files, path, array->second);
    outputs.erase(array);
  }
  if (!r.output.empty()) {
    io::write_safetensors(files, r.output, outputs);
  } else {
    for (auto& [name, array] : outputs) {
      if (!r.has(name)) continue;
      if (array.dtype() == DType::kBF16) array = array.converted(DType::kF32);
      io::write_npy(files, r.npy.at(name), array);
    }
  }
  files.commit();
}

void report(const char* pass, double flops, double seconds, const std::string& engine) {
  fmt::print("{}: {:.3g} ms, {:.4g} GFLOP/s ({})\n", pass, 1e3 * seconds, 1e-9 * flops / seconds,
             engine);
}

void attend(AttendRequest& r) {
  check_usage(r);
  const Device device = device_called(r.device, "--device " + r.device);
  const Arrays inputs = read_inputs(r), extras = read_extras(r);
  const bool backward = inputs.contains("dout");
  r.expressions.read();
  if (!r.gradients.empty() && !backward) usage("tensor-grad", "needs dout");
  for (const auto& name : kForwardExtras) {
    if (!backward || !r.has(name)) continue;
    const char* things = name == "tree-mask" ? "tree masks" : "caches";
    usage(name, fmt::format("does not go with dout: {} have no gradient", things));
  }

  // Everything is checked on the shapes alone before memory is taken or time spent, and as CPU
  // tensors, whose lengths are read too; then whether the device's engine computes it.
  Placement host({}), place(device);
  Options options = r.flags.options();
  r.expressions.set(&options);
  Tensors e = placed_extras(extras, host);
  Tensors t = shapes_of_call(r, inputs, {});
  const Plan forward_plan = plan(forward_args(r, t, e), options);
  const double flops = forward_plan.flops();
  const double backward_flops = backward ? plan(backward_args(r, t, e), options).flops() : 0;
  if (device.type != DeviceType::kCpu) {
    e = placed_extras(extras, place);
    options.max_seqlen_q = longest(extras, "cu-seqlens-q");
    options.max_seqlen_k = longest(extras, "cu-seqlens-k");
    t = shapes_of_call(r, inputs, device);
    plan(forward_args(r, t, e), options);
    if (backward) plan(backward_args(r, t, e), options);
  }
  for (const auto& path : r.output_paths()) io::check_writable(path);

  Arrays outputs;
  for (auto& [name, tensor] : t) {
    if (inputs.contains(name)) {
      tensor = place.input(inputs.at(name));
    } else if (tensor.given()) {
      const std::vector<int64_t> shape(tensor.shape.begin(), tensor.shape.begin() + tensor.rank);
      tensor = place.output(outputs.emplace(name, Array(tensor.dtype, shape, name)).first->second);
    }
  }
  const double seconds = run_in_steps(forward_args(r, t, e), options, r.flags.run());
  const double backward_seconds =
      backward ? run_in_steps(backward_args(r, t, e), options, r.flags.run()) : 0;
  place.collect();
  write_outputs(r, std::move(outputs));
  const std::string engine =
      device.type == DeviceType::kCpu ? forward_plan.engine() : name_of(device);
  report("forward", flops, seconds, engine);
  if (backward) report("backward", backward_flops, backward_seconds, engine);
}

}  // namespace

void add_attend(CLI::App& app) {
  auto r = std::make_shared<AttendRequest>();
  auto* command = app.add_subcommand("attend", "Attention, and its gradient, of tensors in files");
  const auto file = [&](const std::string& name, const std::string& help) {
    return command->add_option("--" + name, r->npy[name], help)->type_name("F.npy");
  };
  file("q", "Queries (batch, sq, hq, d): float32, float16 or float64");
  file("k", "Keys (batch, sk, hk, d)");
  file("v", "Values (batch, sk, hk, dv)");
  file("bias",
       "Added to the scores, -inf hides: (batch, hq, sq, sk), each may be 1; float32, float16 or "
       "bool, true where a query sees the key");
  file("sinks", "A score of each q head in every softmax, without a value: float32 (hq)");
  file("out", "Output (batch, sq, hq, dv)");
  file("lse", "Output: log of the sum of exp(scores), float32 (batch, hq, sq)");
  file("dout", "Gradient of the output: compute dq, dk, dv too");
  file("dlse", "Gradient of lse, float32 (batch, hq, sq); default 0");
  file("dq", "Output: gradient of q");
  file("dk", "Output: gradient of k");
  file("dv", "Output: gradient of v");
  file("dbias", "Output: gradient of bias, float32, of its shape");
  file("dsinks", "Output: gradient of sinks, float32 (hq)");
  auto* input = command->add_option("--input", r->input,
                                    "Reads q, k, v and, if there, bias, sinks, dout and dlse");
  auto* output = command->add_option(
      "--output", r->output, "Writes out, lse and, if dout was there, dq, dk, dv (dbias, dsinks)");
  input->type_name("F.safetensors")->needs(output);
  output->type_name("F.safetensors")->needs(input);
  add_dtype(*command, r->dtype, "Convert the inputs to this dtype; default: keep theirs");
  add_device(*command, r->device, "Where to compute; default cpu");
  r->flags.add_to(*command);
  r->expressions.add_to(*command);
  command
      ->add_option("--tensor-grad", r->gradients,
                   "Output: gradient of a tensor that --tensor names, float32, of its shape")
      ->type_name("NAME=F.npy")
      ->allow_extra_args(false);
  file("alibi-slopes", "ALiBi slopes, float32 (hq) or (batch, hq)");
  auto* cu_q = file("cu-seqlens-q",
                    "Packed tensors (total, heads, dim): int32 (batch + 1) starts of sequences; of "
                    "q alone with a cache");
  file("cu-seqlens-k", "The same for k and v")->needs(cu_q);
  file("seqused-q", "int32 (batch): only so many queries of each sequence exist");
  file("seqused-k", "int32 (batch): only so many keys of each sequence exist");
  auto* table =
      file("page-table",
           "k and v are pages (pages, page, hk, dim): int32 (batch, most pages), those of "
           "each sequence");
  file("page-indptr", "--page-table is (ids) then: int32 (batch + 1) starts in it")->needs(table);
  file("cache-batch-idx", "int32 (batch): the row of k and v that has the sequence");
  file("leftpad-k", "int32 (batch): the first so many keys of each sequence do not exist");
  file(
      "tree-mask",
      "int64 (batch, sq) or packed (total): bit j says whether a query sees the jth of the last sq "
      "keys");
  auto* groups = file("prefix-groups",
                      "int32 (groups + 1): where groups of sequences whose first keys are the same "
                      "begin, and the batch at the end")
                     ->needs(table);
  auto* lens = file("prefix-lens", "int32 (groups): how many first keys of each are the same");
  groups->needs(lens);
  lens->needs(groups);
  command->footer(
      "Outputs have the dtype of the computation; .npy has no bf16, there it is written as "
      "float32.\nFiles appear complete, and all or none.\nExamples:\n"
      "  fulgur attend --q q.npy --k k.npy --v v.npy --out o.npy --lse l.npy --causal\n"
      "  fulgur attend --q q.npy --k k.npy --v v.npy --out o.npy --dtype bf16 --window 1024,0\n"
      "  fulgur attend --q q.npy --k k.npy --v v.npy --out o.npy \\\n"
      "                --dout do.npy --dq dq.npy --dk dk.npy --dv dv.npy\n"
      "  fulgur attend --input qkv.safetensors --output result.safetensors --softcap 30\n"
      "  fulgur attend --q q.npy --k k_cache.npy --v v_cache.npy --out o.npy --causal \\\n"
      "                --page-table table.npy --seqused-k lengths.npy\n"
      "  fulgur attend --q q.npy --k k.npy --v v.npy --out o.npy --causal \\\n"
      "                --mask-mod 'doc[b, q] == doc[b, k]' --tensor doc=ids.npy");
  command->callback([r] { attend(*r); });
}

}  // namespace fulgur::app

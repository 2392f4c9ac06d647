#include <fmt/format.h>

#include <array>
#include <limits>
#include <string>

#include "commands.h"
#include "expressions.h"
#include "flags.h"
#include "fulgur/cuda.h"
#include "fulgur/distributed/forecast.h"
#include "fulgur/error.h"
#include "io/array.h"
#include "io/file.h"
#include "io/npy.h"
#include "svg.h"

namespace fulgur::app {
namespace {

struct ExplainRequest {
  ShapeFlags shape;
  std::string dtype = "f32", device = "cpu", card;
  std::string kv_dtype;  ///< empty: that of q
  int64_t kv_group = 0;  ///< columns of a row of k or v that share a scale; 0: all
  bool backward = false;
  int64_t page = 0;
  std::string svg, algorithm;  ///< instead of that of the flags
  std::string bias_file;
  io::Array bias;
  bool json = false;
  Ranks ranks{1, 0, {375e9, 5e-6}, {50e9, 15e-6}};  // node 0: all ranks
  OptionFlags flags;
  ExpressionFlags expressions;

  Options options() const {
    Options options = flags.options();
    if (!algorithm.empty()) options.algorithm = algorithm;
    expressions.set(&options);
    return options;
  }
  /// Values of a bool mask join those of the tensors of expressions.
  std::vector<TensorBinding> values() const {
    std::vector<TensorBinding> all = expressions.bindings();
    if (bias.given() && bias.dtype() == DType::kBool) all.push_back({"bias", bias.tensor(), {}});
    return all;
  }
};

/// The scales of codes in `x`, k or v of (batch or pages, rows, hk, dim): for e4m3 and e5m2 one of
/// each sequence and kv head, for integers one of each row or group of its columns.
ConstTensor scales_of(const ConstTensor& x, int64_t batch, int64_t group) {
  const int64_t dim = x.shape[3];
  const bool integers = x.dtype == DType::kInt8 || x.dtype == DType::kInt4;
  if (group != 0 && !integers) {
    io::fail("--kv-group", "got {} columns, want none with {}: int8 and int4 have groups", group,
             name_of(x.dtype));
  }
  if (group != 0 && dim % group != 0) {
    io::fail("--kv-group", "got {} columns, want a divisor of the head dim {}", group, dim);
  }
  if (integers) {
    return Tensor::contiguous(nullptr, DType::kF16,
                              {x.shape[0], x.shape[1], x.shape[2], group == 0 ? 1 : dim / group},
                              x.device);
  }
  if (x.dtype != DType::kE4M3 && x.dtype != DType::kE5M2) return {};
  return Tensor::contiguous(nullptr, DType::kF32, {batch, x.shape[2]}, x.device);
}

/// The plan of a call, or the one for a card that need not be here.
template <class Args>
Plan plan_of(const ExplainRequest& r, const Args& args) {
  if (r.card.empty()) return plan(args, r.options());
  return cuda::plan_for_card(r.card, args, r.options());
}

Plan plan_of(const ExplainRequest& r) {
  const Device device = r.card.empty() ? device_called(r.device, "--device " + r.device)
                                       : Device{DeviceType::kCuda, 0};
  const ShapeFlags s = r.shape.complete();
  const auto tensor = [&](DType dtype, int64_t rows, int64_t heads, int64_t dim) {
    return Tensor::contiguous(nullptr, dtype, {s.batch, rows, heads, dim}, device);
  };
  const DType dtype = dtype_called(r.dtype);
  const DType kv_dtype = r.kv_dtype.empty() ? dtype : dtype_called(r.kv_dtype);
  const DType out_dtype = dtype == DType::kE4M3 ? DType::kBF16 : dtype;
  const Tensor q = tensor(dtype, s.sq, s.hq, s.d), out = tensor(out_dtype, s.sq, s.hq, s.dv);
  const Tensor k = tensor(kv_dtype, s.sk, s.hk, s.d), v = tensor(kv_dtype, s.sk, s.hk, s.dv);
  const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {s.batch, s.hq, s.sq}, device);
  std::vector<TensorBinding> tensors = r.expressions.bindings();
  for (TensorBinding& t : tensors) t.tensor.device = device;
  Tensor bias = r.bias.tensor();
  bias.data = nullptr;
  bias.device = device;
  if (r.backward) {
    BackwardArgs args{out, q, k, v, out, lse, q, k, v};
    args.tensors = tensors;
    args.bias = bias;
    return plan_of(r, args);
  }
  ForwardArgs args{q, k, v, out, lse};
  args.tensors = tensors;
  args.bias = bias;
  const auto planned = [&] {
    args.descales.k_descale = scales_of(args.k, s.batch, r.kv_group);
    args.descales.v_descale = scales_of(args.v, s.batch, r.kv_group);
    return plan_of(r, args);
  };
  if (r.page == 0) return planned();
  if (s.sk > std::numeric_limits<int32_t>::max()) {
    io::fail("--page", "got {} keys, want at most 2^31 - 1 in a cache", s.sk);
  }
  const int64_t pages = s.sk / r.page + (s.sk % r.page != 0);              // of a sequence
  io::size_bytes(DType::kI32, std::vector{s.batch, pages}, "page_table");  // or it is too large
  const auto cache = [&](int64_t dim) {
    return Tensor::contiguous(nullptr, kv_dtype, {s.batch * pages, r.page, s.hk, dim}, device);
  };
  args.k = cache(s.d);
  args.v = cache(s.dv);
  args.cache.page_table = Tensor::contiguous(nullptr, DType::kI32, {s.batch, pages}, device);
  std::vector<int32_t> lengths(static_cast<size_t>(s.batch), static_cast<int32_t>(s.sk));
  // Of a card that is not here, the time is of these lengths.
  const bool known = device.type == DeviceType::kCpu || !r.card.empty();
  args.lengths.seqused_k = Tensor::contiguous(known ? lengths.data() : nullptr, DType::kI32,
                                              {s.batch}, known ? Device{} : device);
  return planned();
}

/// "375e9,5us": bytes a second, and what a transfer takes besides.
Link parse_link(const std::string& name, const std::string& text) {
  const size_t comma = text.find(','), unit = text.find_first_of("mnus", comma + 1);
  const std::string of_time = unit < text.size() ? text.substr(unit) : "";
  const double seconds = of_time == "s"    ? 1
                         : of_time == "ms" ? 1e-3
                         : of_time == "us" ? 1e-6
                         : of_time == "ns" ? 1e-9
                                           : 0;
  if (comma < text.size() && seconds > 0) {
    const auto bytes = number_of<double>(text.substr(0, comma));
    const auto time = number_of<double>(text.substr(comma + 1, unit - comma - 1));
    if (bytes && time && *bytes > 0 && *time >= 0) return {*bytes, *time * seconds};
  }
  throw CLI::ValidationError(
      name, fmt::format("got '{}', want bytes a second and a time, such as 375e9,5us", text));
}

/// A line for each way to share out the call.
std::string forecast_of(const ExplainRequest& r, const Plan& plan) {
  if (r.ranks.count == 1) return {};
  Ranks ranks = r.ranks;
  if (ranks.node == 0) ranks.node = ranks.count;
  std::string text = fmt::format("\n{} ranks in nodes of {}, of each:\n", ranks.count, ranks.node);
  text += fmt::format("  {:<28}{:>13}{:>13}{:>13}{:>13}{:>13}\n", "", "MB received", "MB besides",
                      "ms computing", "ms waiting", "efficiency");
  for (const Forecast& f : forecast(plan, ranks)) {
    const std::string way =
        f.head_ranks > 1 ? fmt::format("{} ({} ranks)", f.way, f.head_ranks) : f.way;
    text +=
        fmt::format("  {:<28}{:>13.4g}{:>13.4g}{:>13.4g}{:>13.4g}{:>12.1f}%\n", way, f.bytes * 1e-6,
                    f.memory * 1e-6, f.compute * 1e3, f.exposed * 1e3, f.efficiency * 100);
  }
  return text;
}

/// Bytes and operations of each of the papers' algorithms in this call, if one is selected.
std::string counts_of(ExplainRequest& r) {
  if (r.options().algorithm.empty()) return {};
  constexpr std::array kCounts = {"bytes_read", "bytes_written", "products", "exponentials",
                                  "rescales"};
  std::string text = "\nof memory before caches, of tensor cores and of rows; +: by the scores\n  ";
  text += fmt::format("{:<10}", "");
  for (const char* const name : kCounts) text += fmt::format("{:>20}", name);
  bool any = false;
  for (const char* const algorithm : {"standard", "fa1", "fa2", "fa3"}) {
    r.algorithm = algorithm;
    text += fmt::format("\n  {:<10}", algorithm);
    try {
      const Details details = plan_of(r).details();
      if (!details.has("counts")) {
        text += "  is not counted with these options";
        continue;
      }
      any = true;
      const bool by_scores = !details.has("counts.rescales");
      for (const std::string name : kCounts) {
        const std::string path = "counts." + name;
        const bool grows = by_scores && (name == "exponentials" || name == "rescales");
        const int64_t count = details.has(path) ? details.get<int64_t>(path) : 0;
        const bool known = details.has(path) || grows;
        text += fmt::format("{:>20}", known ? fmt::format("{}{}", count, grows ? "+" : "") : "");
      }
    } catch (const Error& error) {
      if (error.status() != Status::kUnsupported) throw;
      text += "  is not of this device, or does not compute the call";
    }
  }
  return any ? text + "\n" : "";
}

void explain(ExplainRequest& r) {
  r.expressions.read();
  if (!r.bias_file.empty()) r.bias = io::read_npy(r.bias_file, "--bias " + r.bias_file);
  const Plan plan = plan_of(r);
  const std::string by_ranks = forecast_of(r, plan);
  const std::vector<TensorBinding> tensors = r.values();
  if (!r.svg.empty()) {
    const ShapeFlags s = r.shape.complete();
    if (s.batch * s.sq * s.hq == 0) io::fail("--svg", "a call without queries has no tiles");
    const std::string svg = tile_map_svg(plan.tiles(0, tensors), s.sq, s.sk,
                                         fmt::format("Tiles of the score matrix, {} pass, d = {}",
                                                     r.backward ? "backward" : "forward", s.d));
    const io::Bytes pieces[] = {std::as_bytes(std::span(svg))};
    io::OutputFiles files;
    files.add(r.svg, pieces);
    files.commit();
  }
  if (r.json) {
    fmt::print("{}\n", plan.details().json());
  } else {
    fmt::print("{}{}{}", plan.explain(tensors), by_ranks, counts_of(r));
  }
}

}  // namespace

void add_explain(CLI::App& app) {
  auto r = std::make_shared<ExplainRequest>();
  auto* command = app.add_subcommand(
      "explain",
      "The plan for a shape in words: engine, tiles, bytes, flops, what was rejected, on the CPU "
      "what it is expected to take");
  r->shape.add_to(*command);
  add_dtype(*command, r->dtype, "Default f32; with e4m3 out is of bf16", {"e4m3"});
  auto* device = add_device(*command, r->device, "Where the tensors are; default cpu");
  command
      ->add_option(
          "--card", r->card,
          "Plan for a GPU that need not be here, and say what it is expected to take: a100, "
          "h100, h200, l4, 3090, ...")
      ->type_name("NAME")
      ->excludes(device);
  auto* backward = command->add_flag("--backward", r->backward, "The plan of the gradient");
  add_whole<int64_t>(*command, "--page", r->page, "Keys in pages of so many; default: side by side",
                     1)
      ->excludes(backward);
  auto* kv_dtype =
      command
          ->add_option("--kv-dtype", r->kv_dtype,
                       "That of k and v; default that of q. Codes of e4m3 and e5m2 have a scale of "
                       "each sequence and kv head, those of int8 and int4 one of each row, in f16")
          ->check(
              CLI::IsMember({"f32", "bf16", "f16", "e4m3", "e5m2", "int8", "int4", "q8_0", "q4_0"}))
          ->type_name("T")
          ->excludes(backward);
  add_whole<int64_t>(*command, "--kv-group", r->kv_group,
                     "Columns of a row of int8 or int4 that share a scale; default all", 1)
      ->needs(kv_dtype);
  r->flags.add_to(*command);
  r->expressions.add_to(*command);
  command
      ->add_option("--bias", r->bias_file,
                   "A dense bias, (1 or batch, 1 or HQ, 1 or SQ, SK); of bools also what it hides "
                   "of the tiles")
      ->type_name("F.npy");
  auto* json = command->add_flag("--json", r->json, "The plan as data, a JSON object");
  auto* ranks =
      add_whole(*command, "--ranks", r->ranks.count,
                "What sharing out the rows among so many such devices is expected to take", 1);
  ranks->excludes(json);
  add_whole(*command, "--node", r->ranks.node, "Ranks of a node; default all of them", 1)
      ->needs(ranks);
  const auto add_link = [&](const char* name, Link& link, const char* help) {
    command
        ->add_option_function<std::string>(
            name, [name, &link](const std::string& text) { link = parse_link(name, text); }, help)
        ->type_name("B,T")
        ->needs(ranks);
  };
  add_link("--link", r->ranks.in_node,
           "Bytes a second that a rank receives from its node, and the time of a transfer besides; "
           "default "
           "375e9,5us");
  add_link("--node-link", r->ranks.between, "Likewise between nodes; default 50e9,15us");
  command->add_option("--svg", r->svg, "Draw the tiles (empty, partial, full) into this file")
      ->type_name("F.svg");
  command->footer(
      "Examples:\n"
      "  fulgur explain --sq 4096 --hq 32 --hk 8 --d 128 --dtype bf16 --causal --svg tiles.svg\n"
      "  fulgur explain --sq 1 --sk 16384 --hq 32 --hk 8 --d 128\n"
      "  fulgur explain --sq 1 --sk 16384 --hq 32 --hk 8 --d 128 --page 16\n"
      "  fulgur explain --sq 1 --sk 8192 --d 128 --dtype bf16 --kv-dtype int4 --kv-group 32 --card "
      "h200\n"
      "  fulgur explain --sq 4096 --window 512,0 --backward\n"
      "  fulgur explain --sq 16384 --causal --chunk 4096 --svg tiles.svg\n"
      "  fulgur explain --sq 4096 --causal --mask-mod 'doc[q] == doc[k]' --tensor doc=doc.npy\n"
      "  fulgur explain --sq 8192 --d 128 --dtype bf16 --device cuda\n"
      "  fulgur explain --sq 8192 --hq 32 --hk 8 --d 128 --dtype bf16 --causal --card h200\n"
      "  fulgur explain --sq 4096 --hq 16 --d 128 --dtype bf16 --card h100 --algorithm fa2\n"
      "  fulgur explain --sq 1 --sk 16384 --hq 32 --hk 8 --d 128 --json\n"
      "  fulgur explain --sq 1048576 --hq 32 --hk 8 --d 128 --dtype bf16 --causal --card h200 "
      "--ranks 64 --node 8");
  command->callback([r] { explain(*r); });
}

}  // namespace fulgur::app

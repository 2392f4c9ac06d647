#include "flags.h"

#include <fmt/format.h>

#include <charconv>

#include "fulgur/error.h"

namespace fulgur::app {
namespace {

Mask parse_window(const std::string& text) {
  Mask mask;
  const char* end = text.data() + text.size();
  const auto [comma, error] = std::from_chars(text.data(), end, mask.left);
  if (error == std::errc{} && comma != end && *comma == ',') {
    const auto [rest, error2] = std::from_chars(comma + 1, end, mask.right);
    if (error2 == std::errc{} && rest == end) return mask;
  }
  throw CLI::ValidationError("--window", "got '" + text + "', want L,R (two integers, -1: all)");
}

}  // namespace

void OptionFlags::add_to(CLI::App& command) {
  auto* causal = command.add_flag("--causal", causal_,
                                  "No query sees a key to its right; the last query sees the last "
                                  "key");
  command
      .add_option("--window", window_,
                  "Query i sees the L keys before and the R keys after its place; -1: all")
      ->type_name("L,R")
      ->excludes(causal);
  add_whole(command, "--chunk", chunk_,
            "Of these keys a query sees those of its chunk of N alone; default 0: off");
  command.add_flag(
      "--top-left", top_left_,
      "The first query is at the first key, instead of the last query at the last key");
  add_real(command, "--scale", scale_, "Scale of the scores; default 1 / sqrt(d)")->type_name("S");
  add_real(command, "--softcap", softcap_, "Scores become C tanh(score / C)")->type_name("C");
  auto* dropout = add_real(command, "--dropout", dropout_,
                           "Probability that an entry of the softmax is dropped");
  dropout->type_name("P");
  add_whole(command, "--seed", seed_, "Seed of the dropout; default 0")->needs(dropout);
  command.add_flag("--deterministic", deterministic_, "The same bits in every run, gradients too");
  command.add_flag("--invariant", invariant_,
                   "The bits of a sequence depend neither on the batch nor on the threads");
  command.add_flag("--fast-codes", fast_codes_, "P V of e4m3 tensors in e4m3, too, on Hopper GPUs");
  add_whole(command, "--max-workspace", max_workspace_,
            "Bytes that the call may want besides its tensors; default any number");
  command
      .add_option("--algorithm", algorithm_,
                  "standard, fa1, fa2 or fa3: one of the papers', of engines that have it")
      ->type_name("NAME");
  add_whole(command, "--threads", threads_, "Threads; default OMP_NUM_THREADS or all cores");
}

Options OptionFlags::options() const {
  Options options;
  options.mask = chunked(chunk_, causal_           ? causal()
                                 : window_.empty() ? full()
                                                   : parse_window(window_));
  options.mask.top_left = top_left_;
  options.scale = scale_;
  options.softcap = softcap_;
  options.dropout_p = dropout_;
  options.deterministic = deterministic_;
  options.invariant = invariant_;
  options.fast_codes = fast_codes_;
  options.max_workspace = max_workspace_;
  options.algorithm = algorithm_;
  options.threads = threads_;
  return options;
}

void ShapeFlags::add_to(CLI::App& command) {
  const auto size = [&](const char* name, int64_t& value, const char* help) {
    add_whole<int64_t>(command, name, value, help, 0);
  };
  size("--batch", batch, "Sequences; default 1");
  size("--sq", sq, "Queries of a sequence; default 1024");
  size("--sk", sk, "Keys of a sequence; default sq");
  size("--hq", hq, "Heads of q; default 8");
  size("--hk", hk, "Heads of k and v; default hq");
  size("--d", d, "Head dim of q and k; default 64");
  size("--dv", dv, "Head dim of v; default d");
}

ShapeFlags ShapeFlags::complete() const {
  ShapeFlags shape = *this;
  if (sk == kDefault) shape.sk = sq;
  if (hk == kDefault) shape.hk = hq;
  if (dv == kDefault) shape.dv = d;
  return shape;
}

CLI::Option* add_dtype(CLI::App& command, std::string& name, const std::string& help,
                       const std::vector<std::string>& more) {
  std::vector<std::string> names = {"f32", "bf16", "f16"};
  names.insert(names.end(), more.begin(), more.end());
  return command.add_option("--dtype", name, help)->check(CLI::IsMember(names))->type_name("T");
}

DType dtype_called(const std::string& name) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2,
                            DType::kInt8, DType::kInt4, DType::kQ8_0, DType::kQ4_0}) {
    if (name == name_of(dtype)) return dtype;
  }
  throw CLI::ValidationError(fmt::format("got '{}', want the name of a dtype", name));
}

CLI::Option* add_device(CLI::App& command, std::string& name, const std::string& help) {
  return command.add_option("--device", name, help)
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->type_name("D");
}

Device device_called(const std::string& name, const std::string& user) {
  for (const EngineInfo& engine : engines()) {
    if (engine.name != name) continue;
    if (!engine.unavailable.empty()) {
      throw Error(Status::kUnavailable, fmt::format("{}: {}", user, engine.unavailable));
    }
  }
  return {name == "cuda" ? DeviceType::kCuda : DeviceType::kCpu, 0};
}

std::string engine_of(Device device) { return device.type == DeviceType::kCuda ? "cuda" : "cpu"; }

std::string description_of(Device device) {
  std::string description;
  for (const EngineInfo& engine : engines()) {
    if (engine.name == engine_of(device)) description = engine.description;
  }
  return description;
}

}  // namespace fulgur::app

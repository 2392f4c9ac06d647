#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>

#include "commands.h"
#include "flags.h"
#include "fulgur/append.h"
#include "fulgur/error.h"
#include "io/array.h"
#include "io/safetensors.h"
#include "naive.h"
#include "placement.h"

namespace fulgur::app {
namespace {

using io::Array;
using io::Arrays;

struct CheckCase {
  const char* name;
  int64_t batch, sq, sk, hq, hk, d, dv;
  Mask mask = full();
  double softcap = 0;
  bool alibi = false;
  int64_t page = 0;  ///< keys of a page of the cache that the forward pass reads; 0 = no cache
  bool sinks = false;
  const char* format = nullptr;  ///< k and v are codes of it
  bool codes_of_q = false;       ///< and q is, too
};

const CheckCase kCases[] = {
    {"one block", 1, 64, 64, 1, 1, 64, 64},
    {"odd sizes", 2, 65, 127, 2, 2, 17, 17},
    {"causal", 1, 200, 200, 2, 2, 64, 64, causal()},
    {"causal, sq < sk", 2, 33, 190, 2, 1, 80, 80, causal()},
    {"causal, sq > sk", 1, 150, 70, 2, 2, 32, 32, causal()},
    {"window", 1, 257, 257, 1, 1, 128, 128, window(40, 7)},
    {"chunks", 2, 190, 300, 4, 2, 128, 128, chunked(100, causal())},
    {"top left", 2, 190, 300, 4, 2, 128, 128, top_left(causal())},
    {"grouped heads", 1, 96, 130, 8, 2, 64, 64, causal()},
    {"d != dv", 1, 100, 100, 2, 2, 192, 128},
    {"wide heads", 1, 40, 50, 1, 1, 512, 256},
    {"softcap", 1, 90, 90, 2, 2, 64, 64, causal(), 5},
    {"ALiBi", 1, 120, 120, 4, 4, 64, 64, causal(), 0, true},
    {"decode", 2, 1, 700, 8, 2, 128, 128},
    {"pages", 3, 5, 304, 8, 2, 128, 128, causal(), 0, false, 16},
    {"sinks", 2, 130, 130, 8, 2, 64, 64, window(60, 0), 0, false, 0, true},
    {"e4m3 cache", 2, 1, 700, 8, 2, 128, 128, full(), 0, false, 0, false, "e4m3"},
    {"int8 cache", 2, 3, 700, 8, 2, 128, 128, causal(), 0, false, 0, false, "int8"},
    {"int4 cache", 2, 1, 700, 16, 2, 64, 128, full(), 0, false, 0, false, "int4"},
    {"q8_0 cache", 2, 1, 700, 8, 2, 128, 128, full(), 0, false, 0, false, "q8_0"},
    {"q4_0 cache", 2, 5, 300, 4, 4, 64, 64, causal(), 0, false, 0, false, "q4_0"},
    {"e4m3", 2, 150, 300, 4, 2, 128, 128, causal(), 0, false, 0, false, "e4m3", true},
};

struct Pass {
  const char* name;
  std::vector<std::string> results;
};
const Pass kForward = {"forward", {"out", "lse"}}, kBackward = {"backward", {"dq", "dk", "dv"}};
const std::array<const Pass*, 2> kPasses = {&kForward, &kBackward};

/// What the engine under test said of one case.
struct Computed {
  Arrays results;                                   ///< by name
  std::map<const Pass*, std::string> not_computed;  ///< the engine's reason
};

/// The passes of all cases.
struct Tally {
  std::map<const Pass*, int64_t> passed, failed;
  std::map<std::string, int64_t> not_computed;  ///< by the engine's reason
};

/// The shape of a tensor of the case, by its name.
std::vector<int64_t> shape_of(const CheckCase& c, const std::string& name) {
  if (name == "lse") return {c.batch, c.hq, c.sq};
  if (name == "q" || name == "dq") return {c.batch, c.sq, c.hq, c.d};
  if (name == "k" || name == "dk") return {c.batch, c.sk, c.hk, c.d};
  if (name == "v" || name == "dv") return {c.batch, c.sk, c.hk, c.dv};
  return {c.batch, c.sq, c.hq, c.dv};  // out, dout
}

Arrays random_inputs(const CheckCase& c, DType dtype, std::mt19937& random) {
  Arrays inputs;
  std::normal_distribution<float> normal;
  for (const char* name : {"q", "k", "v", "dout"}) {
    Array array(DType::kF32, shape_of(c, name));
    auto* x = reinterpret_cast<float*>(array.data());
    std::generate_n(x, array.numel(), [&] { return normal(random); });
    inputs.emplace(name, array.converted(dtype));
  }
  return inputs;
}

/// The plan of a call; none, and the engine's reason, where the engine does not compute it.
template <class Args>
std::optional<Plan> planned(const Args& args, const Options& options, std::string* why) {
  try {
    return plan(args, options);
  } catch (const Error& error) {
    if (error.status() != Status::kUnsupported) throw;
    *why = error.what();
    return std::nullopt;
  }
}

/// The keys of a case in pages, the last sequence's last page first, and where they are.
struct Pages {
  Array k, v, table, lengths;

  Pages(const CheckCase& c, const Arrays& inputs)
      : k(paged(c, inputs.at("k"))), v(paged(c, inputs.at("v"))) {
    const int64_t pages = c.sk / c.page;
    table = Array(DType::kI32, {c.batch, pages});
    auto* ids = reinterpret_cast<int32_t*>(table.data());
    for (int64_t i = 0; i < c.batch * pages; ++i) {
      ids[i] = static_cast<int32_t>(c.batch * pages - 1 - i);
    }
    lengths = Array(DType::kI32, {c.batch});
    std::fill_n(reinterpret_cast<int32_t*>(lengths.data()), c.batch, static_cast<int32_t>(c.sk));
  }

 private:
  static Array paged(const CheckCase& c, const Array& keys) {
    const int64_t pages = c.batch * c.sk / c.page;
    Array cache(keys.dtype(), {pages, c.page, keys.shape()[2], keys.shape()[3]});
    const int64_t bytes = keys.size_bytes() / pages;
    for (int64_t i = 0; i < pages; ++i) {
      std::memcpy(cache.data() + (pages - 1 - i) * bytes, keys.bytes().data() + i * bytes,
                  static_cast<size_t>(bytes));
    }
    return cache;
  }
};

/// Rows as codes of a format: of e4m3 with a scale for each sequence and head, or for all of q, of
/// int8 for each token and head, of int4 for 32 columns.
struct Codes {
  Array codes, scale;

  /// Of `numbers`, which become what the codes stand for. `one_scale`: of all of them.
  Codes(const char* format, Array* numbers, bool one_scale = false)
      : codes(format_named(format), numbers->shape()) {
    const std::vector<int64_t>& shape = numbers->shape();
    if (one_scale) scale = Array(DType::kF32, {1});
    switch (one_scale ? DType::kF32 : codes.dtype()) {
      case DType::kE4M3:
        scale = Array(DType::kF32, {shape[0], shape[2]});
        break;
      case DType::kInt8:
        scale = Array(DType::kF32, {shape[0], shape[1], shape[2], 1});
        break;
      case DType::kInt4:
        scale = Array(DType::kF16, {shape[0], shape[1], shape[2], shape[3] / 32});
        break;
      default:
        break;  // it is there, or blocks have their own
    }
    const Tensor scales = scale.given() ? scale.tensor() : Tensor();
    quantize({.x = numbers->tensor(), .codes = codes.tensor(), .scale = scales});
    *numbers = Array(DType::kF32, shape);
    dequantize({.codes = codes.tensor(), .scale = scales, .x = numbers->tensor()});
  }
};
struct CodedRows {
  Codes k, v;
  std::optional<Codes> q;
};

/// The passes that the engine of `options` computes, on tensors of `device`, with results of a
/// dtype. The backward pass takes out and lse from the forward pass, which reads `pages` or codes
/// if there are any.
Computed compute(const CheckCase& c, DType dtype, const Arrays& inputs, const Array& slopes,
                 const Array& sinks, const std::optional<Pages>& pages,
                 const std::optional<CodedRows>& coded, const Options& options, Device device) {
  Computed computed;
  Placement place(device);
  std::map<std::string, Tensor> t;
  for (const auto& [name, array] : inputs) t[name] = place.input(array);
  for (const Pass* pass : kPasses) {
    for (const std::string& name : pass->results) {
      const bool f32 = name == "lse" && dtype != DType::kF64;
      Array& array =
          computed.results.emplace(name, Array(f32 ? DType::kF32 : dtype, shape_of(c, name)))
              .first->second;
      std::memset(array.data(), 0xff, array.bytes().size());  // NaN: what is not written is found
      t[name] = place.initialized_output(array);
    }
  }
  const ConstTensor alibi = slopes.given() ? place.input(slopes) : Tensor();
  ForwardArgs forward{t["q"], t["k"], t["v"], t["out"], t["lse"], alibi};
  if (sinks.given()) forward.sinks = place.input(sinks);
  if (pages) {
    forward.k = place.input(pages->k);
    forward.v = place.input(pages->v);
    forward.cache.page_table = place.input(pages->table);
    forward.lengths.seqused_k = place.input(pages->lengths);
  }
  if (coded) {
    const auto scale = [&](const Codes& of) {
      return of.scale.given() ? place.input(of.scale) : Tensor();
    };
    forward.k = place.input(coded->k.codes);
    forward.v = place.input(coded->v.codes);
    forward.descales.k_descale = scale(coded->k);
    forward.descales.v_descale = scale(coded->v);
    if (coded->q) {
      forward.q = place.input(coded->q->codes);
      forward.descales.q_descale = scale(*coded->q);
    }
  }
  BackwardArgs backward{t["dout"], t["q"],  t["k"],  t["v"],  t["out"],
                        t["lse"],  t["dq"], t["dk"], t["dv"], alibi};
  backward.sinks = forward.sinks;
  std::string why;
  const std::optional<Plan> forward_plan = planned(forward, options, &why);
  if (!forward_plan) computed.not_computed[&kForward] = computed.not_computed[&kBackward] = why;
  if (forward_plan) {
    forward_plan->run(forward);
    const std::optional<Plan> backward_plan =
        coded ? std::nullopt : planned(backward, options, &why);
    if (!backward_plan && !coded) computed.not_computed[&kBackward] = why;
    if (backward_plan) backward_plan->run(backward);
  }
  place.collect();
  return computed;
}

using Doubles = std::vector<double>;

Doubles doubles(const Array& array) {
  const Array wide = array.converted(DType::kF64);
  Doubles x(static_cast<size_t>(wide.numel()));
  if (!x.empty()) std::memcpy(x.data(), wide.bytes().data(), wide.bytes().size());
  return x;
}

/// The rows of one head of a (batch, rows, heads, dim) tensor.
struct HeadRows {
  int64_t rows, heads, dim, b, h;
  size_t at(int64_t row) const { return static_cast<size_t>(((b * rows + row) * heads + h) * dim); }
  Doubles gather(const Doubles& from) const {
    Doubles head;
    for (int64_t r = 0; r < rows; ++r) {
      head.insert(head.end(), from.begin() + at(r), from.begin() + at(r) + dim);
    }
    return head;
  }
  void add(const Doubles& head, Doubles& to) const {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t i = 0; i < dim; ++i) to[at(r) + i] += head[r * dim + i];
    }
  }
};

std::map<std::string, Doubles> naive(const CheckCase& c, DType dtype, const Arrays& inputs,
                                     const Options& options, const float* slopes,
                                     const float* sinks) {
  std::map<std::string, Doubles> in, out;
  for (const auto& [name, array] : inputs) in[name] = doubles(array);
  for (const Pass* pass : kPasses) {
    for (const std::string& name : pass->results) {
      const auto shape = shape_of(c, name);
      out[name].resize(io::size_bytes(DType::kF64, shape, name) / sizeof(double));
    }
  }
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.hq; ++h) {
      const int64_t hk = h / (c.hq / c.hk);
      const HeadRows q{c.sq, c.hq, c.d, b, h}, o{c.sq, c.hq, c.dv, b, h};
      const HeadRows k{c.sk, c.hk, c.d, b, hk}, v{c.sk, c.hk, c.dv, b, hk};
      const Doubles hq = q.gather(in["q"]), hkeys = k.gather(in["k"]), hv = v.gather(in["v"]);
      const Doubles hdout = o.gather(in["dout"]);
      const NaiveResult head = naive_attention(
          {c.sq, c.sk, c.d, c.dv, hq.data(), hkeys.data(), hv.data(), hdout.data(),
           1 / std::sqrt(static_cast<double>(c.d)), options.softcap, slopes ? slopes[h] : 0.0,
           sinks ? sinks[h] : -INFINITY, options.mask, dtype});
      o.add(head.out, out["out"]);
      q.add(head.dq, out["dq"]);
      k.add(head.dk, out["dk"]);
      v.add(head.dv, out["dv"]);
    }
  }
  return out;
}

/// max |a - b|; equal infinities differ by 0, a NaN by infinity.
double max_error(const Doubles& a, const Doubles& b) {
  double worst = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    const double e = a[i] == b[i] ? 0 : std::abs(a[i] - b[i]);
    worst = std::isnan(e) ? INFINITY : std::max(worst, e);
  }
  return worst;
}

double largest_finite(const Doubles& x) {
  double largest = 0;
  for (const double value : x) {
    if (std::isfinite(value)) largest = std::max(largest, std::abs(value));
  }
  return largest;
}

/// Prints a line of the table.
void check_one(const CheckCase& c, DType dtype, int threads, Device device, std::mt19937& random,
               Tally* tally) {
  Arrays inputs = random_inputs(c, dtype, random);
  Options options;
  options.mask = c.mask;
  options.softcap = c.softcap;
  options.threads = threads;
  Array slopes, sinks;
  if (c.alibi) {
    slopes = Array(DType::kF32, {c.hq});
    auto* slope = reinterpret_cast<float*>(slopes.data());
    for (int64_t h = 0; h < c.hq; ++h) slope[h] = std::exp2(-static_cast<float>(h + 1));
  }
  if (c.sinks) {
    sinks = Array(DType::kF32, {c.hq});
    auto* sink = reinterpret_cast<float*>(sinks.data());
    for (int64_t h = 0; h < c.hq; ++h) sink[h] = 4 - static_cast<float>(h);
  }
  options.engine = engine_of(device);
  std::optional<Pages> pages;
  if (c.page > 0) pages.emplace(c, inputs);
  std::optional<CodedRows> coded;
  if (c.format != nullptr) {
    coded = CodedRows{Codes(c.format, &inputs.at("k")), Codes(c.format, &inputs.at("v")), {}};
    if (c.codes_of_q) coded->q.emplace(c.format, &inputs.at("q"), true);
  }
  const Computed got = compute(c, dtype, inputs, slopes, sinks, pages, coded, options, device);
  Arrays wide;
  for (const auto& [name, array] : inputs) wide.emplace(name, array.converted(DType::kF64));
  options.engine = "reference";
  const Computed want = compute(c, DType::kF64, wide, slopes, sinks, {}, {}, options, {});
  const auto floats = [](Array& array) {
    return array.given() ? reinterpret_cast<const float*>(array.data()) : nullptr;
  };
  const auto expected = naive(c, dtype, inputs, options, floats(slopes), floats(sinks));

  bool any = false, right = true;
  std::string line = fmt::format("{:<17} {:<5}", c.name, name_of(dtype));
  for (const Pass* pass : kPasses) {
    const auto why = got.not_computed.find(pass);
    const bool none = coded && pass == &kBackward;  // codes have no gradients
    if (none || why != got.not_computed.end()) {
      if (!none) ++tally->not_computed[why->second];
      for (size_t i = 0; i < pass->results.size(); ++i) line += fmt::format(" {:^19}", "-");
      continue;
    }
    bool passed = true;
    for (const std::string& name : pass->results) {
      const Doubles ref = doubles(want.results.at(name));
      const double error = max_error(doubles(got.results.at(name)), ref);
      const double bound = name == "lse"
                               ? 1e-3 * std::max(1.0, largest_finite(ref))
                               : (name == "out" ? 2 : 3) * max_error(expected.at(name), ref) + 1e-5;
      passed &= error <= bound;
      line += fmt::format(" {:>8.1e} {}{:>7.1e}", error, error <= bound ? "<= " : "> !", bound);
    }
    ++(passed ? tally->passed : tally->failed)[pass];
    any = true;
    right &= passed;
  }
  fmt::print("{}  {}\n", line, !any ? "not computed" : right ? "ok" : "FAIL");
  std::fflush(stdout);
}

/// "36 forward and 36 backward".
std::string counts(const std::map<const Pass*, int64_t>& by_pass) {
  std::string text;
  for (const Pass* pass : kPasses) {
    const auto count = by_pass.find(pass);
    if (count == by_pass.end()) continue;
    text += fmt::format("{}{} {}", text.empty() ? "" : " and ", count->second, pass->name);
  }
  return text;
}

void check(const std::string& dtype, const std::string& device_name, int threads, uint32_t seed) {
  const Device device = device_called(device_name, "--device " + device_name);
  std::mt19937 random(seed);
  fmt::print("max |{} - reference| <= bound, for random inputs of seed {}\n{:<23}",
             engine_of(device), seed, "");
  for (const Pass* pass : kPasses) {
    for (const std::string& name : pass->results) fmt::print(" {:^19}", name);
  }
  fmt::print("\n");
  Tally tally;
  for (const char* name : {"f32", "bf16", "f16"}) {
    if (!dtype.empty() && dtype != name) continue;
    for (const CheckCase& c : kCases) {
      check_one(c, dtype_called(name), threads, device, random, &tally);
    }
  }
  for (const auto& [why, count] : tally.not_computed) {
    fmt::print("not computed, {} checks: {}\n", count, why);
  }
  if (!tally.failed.empty()) {
    throw std::runtime_error(fmt::format("{} checks failed, {} passed", counts(tally.failed),
                                         tally.passed.empty() ? "none" : counts(tally.passed)));
  }
  if (tally.passed.empty()) {
    throw Error(
        Status::kUnsupported,
        fmt::format("nothing was checked: the engine {} computes none of it", engine_of(device)));
  }
  fmt::print("{} checks passed\n", counts(tally.passed));
}

}  // namespace

void add_check(CLI::App& app) {
  struct CheckRequest {
    std::string dtype, device = "cpu";
    int threads = 0;
    std::optional<uint32_t> seed;
  };
  auto r = std::make_shared<CheckRequest>();
  auto* command = app.add_subcommand("check", "The engine against the reference on this machine");
  add_dtype(*command, r->dtype, "Only this dtype; default all");
  add_device(*command, r->device, "The engine of which device; default cpu");
  add_whole(*command, "--threads", r->threads, "Threads; default OMP_NUM_THREADS or all cores");
  command->add_option("--seed", r->seed, "Seed of the inputs; default: a new one each time")
      ->type_name("N");
  command->footer(
      "The reference computes the papers' formulas in double precision. An output may be off by\n"
      "twice, a gradient by three times, what the plain formula in the input's precision is off.\n"
      "What the engine does not compute is named with its reason and counts as not checked.\n"
      "Exit status 1 if a bound is broken or nothing was checked.\n"
      "Examples:\n"
      "  fulgur check\n"
      "  fulgur check --dtype bf16\n"
      "  fulgur check --device cuda");
  command->callback(
      [r] { check(r->dtype, r->device, r->threads, r->seed.value_or(std::random_device{}())); });
}

}  // namespace fulgur::app

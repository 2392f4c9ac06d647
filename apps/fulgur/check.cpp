#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>

#include "commands.h"
#include "flags.h"
#include "io/array.h"
#include "naive.h"

namespace fulgur::app {
namespace {

using io::Array;
using Tensors = std::map<std::string, Array>;

struct CheckCase {
  const char* name;
  int64_t batch, sq, sk, hq, hk, d, dv;
  Mask mask = full();
  double softcap = 0;
  bool alibi = false;
};

const CheckCase kCases[] = {
    {"one block", 1, 64, 64, 1, 1, 64, 64},
    {"odd sizes", 2, 65, 127, 2, 2, 17, 17},
    {"causal", 1, 200, 200, 2, 2, 64, 64, causal()},
    {"causal, sq < sk", 2, 33, 190, 2, 1, 80, 80, causal()},
    {"causal, sq > sk", 1, 150, 70, 2, 2, 32, 32, causal()},
    {"window", 1, 257, 257, 1, 1, 128, 128, window(40, 7)},
    {"grouped heads", 1, 96, 130, 8, 2, 64, 64, causal()},
    {"d != dv", 1, 100, 100, 2, 2, 192, 128},
    {"wide heads", 1, 40, 50, 1, 1, 512, 256},
    {"softcap", 1, 90, 90, 2, 2, 64, 64, causal(), 5},
    {"ALiBi", 1, 120, 120, 4, 4, 64, 64, causal(), 0, true},
    {"decode", 2, 1, 700, 8, 2, 128, 128},
};

const std::vector<std::string> kResults = {"out", "lse", "dq", "dk", "dv"};

/// The shape of a tensor of the case, by its name.
std::vector<int64_t> shape_of(const CheckCase& c, const std::string& name) {
  if (name == "lse") return {c.batch, c.hq, c.sq};
  if (name == "q" || name == "dq") return {c.batch, c.sq, c.hq, c.d};
  if (name == "k" || name == "dk") return {c.batch, c.sk, c.hk, c.d};
  if (name == "v" || name == "dv") return {c.batch, c.sk, c.hk, c.dv};
  return {c.batch, c.sq, c.hq, c.dv};  // out, dout
}

Tensors random_inputs(const CheckCase& c, DType dtype, std::mt19937& random) {
  Tensors inputs;
  std::normal_distribution<float> normal;
  for (const char* name : {"q", "k", "v", "dout"}) {
    Array array(DType::kF32, shape_of(c, name));
    auto* x = reinterpret_cast<float*>(array.data());
    std::generate_n(x, array.numel(), [&] { return normal(random); });
    inputs.emplace(name, array.converted(dtype));
  }
  return inputs;
}

/// out, lse, dq, dk, dv of the engine that `options` picks.
Tensors compute(const CheckCase& c, const Tensors& inputs, const ConstTensor& slopes,
                const Options& options) {
  const DType dtype = inputs.at("q").dtype();
  Tensors out;
  std::map<std::string, Tensor> t;
  for (const auto& [name, array] : inputs) t[name] = array.tensor();
  for (const auto& name : kResults) {
    const bool f32 = name == "lse" && dtype != DType::kF64;
    Array& array =
        out.emplace(name, Array(f32 ? DType::kF32 : dtype, shape_of(c, name))).first->second;
    std::memset(array.data(), 0xff, array.bytes().size());  // NaN: what is not written is found
    t[name] = array.tensor();
  }
  forward({t["q"], t["k"], t["v"], t["out"], t["lse"], slopes}, options);
  backward(
      {t["dout"], t["q"], t["k"], t["v"], t["out"], t["lse"], t["dq"], t["dk"], t["dv"], slopes},
      options);
  return out;
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

std::map<std::string, Doubles> naive(const CheckCase& c, const Tensors& inputs,
                                     const Options& options, const float* slopes) {
  std::map<std::string, Doubles> in, out;
  for (const auto& [name, array] : inputs) in[name] = doubles(array);
  for (const auto& name : kResults) {
    const auto shape = shape_of(c, name);
    out[name].resize(io::size_bytes(DType::kF64, shape, name) / sizeof(double));
  }
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.hq; ++h) {
      const int64_t hk = h / (c.hq / c.hk);
      const HeadRows q{c.sq, c.hq, c.d, b, h}, o{c.sq, c.hq, c.dv, b, h};
      const HeadRows k{c.sk, c.hk, c.d, b, hk}, v{c.sk, c.hk, c.dv, b, hk};
      const Doubles hq = q.gather(in["q"]), hkeys = k.gather(in["k"]), hv = v.gather(in["v"]);
      const Doubles hdout = o.gather(in["dout"]);
      const NaiveResult head =
          naive_attention({c.sq, c.sk, c.d, c.dv, hq.data(), hkeys.data(), hv.data(), hdout.data(),
                           1 / std::sqrt(static_cast<double>(c.d)), options.softcap,
                           slopes ? slopes[h] : 0.0, options.mask, inputs.at("q").dtype()});
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

/// Prints a line of the table; false if an error is over its bound.
bool check_one(const CheckCase& c, DType dtype, int threads, std::mt19937& random) {
  const Tensors inputs = random_inputs(c, dtype, random);
  Options options;
  options.mask = c.mask;
  options.softcap = c.softcap;
  options.threads = threads;
  std::vector<float> slopes;
  ConstTensor slopes_tensor;
  if (c.alibi) {
    for (int64_t h = 0; h < c.hq; ++h) slopes.push_back(std::exp2(-static_cast<float>(h + 1)));
    slopes_tensor = ConstTensor::contiguous(slopes.data(), DType::kF32, {c.hq});
  }
  const Tensors got = compute(c, inputs, slopes_tensor, options);
  Tensors wide;
  for (const auto& [name, array] : inputs) wide.emplace(name, array.converted(DType::kF64));
  options.engine = "reference";
  const Tensors want = compute(c, wide, slopes_tensor, options);
  auto expected = naive(c, inputs, options, c.alibi ? slopes.data() : nullptr);

  bool passed = true;
  std::string line = fmt::format("{:<17} {:<5}", c.name, name_of(dtype));
  for (const auto& name : kResults) {
    const Doubles ref = doubles(want.at(name));
    const double error = max_error(doubles(got.at(name)), ref);
    const double bound = name == "lse"
                             ? 1e-3 * std::max(1.0, largest_finite(ref))
                             : (name == "out" ? 2 : 3) * max_error(expected[name], ref) + 1e-5;
    passed &= error <= bound;
    line += fmt::format(" {:>8.1e} {}{:>7.1e}", error, error <= bound ? "<= " : "> !", bound);
  }
  fmt::print("{}  {}\n", line, passed ? "ok" : "FAIL");
  std::fflush(stdout);
  return passed;
}

void check(const std::string& dtype, int threads, uint32_t seed) {
  std::mt19937 random(seed);
  fmt::print("max |engine - reference| <= bound, for random inputs of seed {}\n{:<23}", seed, "");
  for (const auto& name : kResults) fmt::print(" {:^19}", name);
  fmt::print("\n");
  int64_t count = 0, failed = 0;
  for (const char* name : {"f32", "bf16", "f16"}) {
    if (!dtype.empty() && dtype != name) continue;
    for (const CheckCase& c : kCases) {
      ++count;
      failed += !check_one(c, dtype_called(name), threads, random);
    }
  }
  if (failed > 0) {
    throw std::runtime_error(fmt::format("{} of {} checks failed", failed, count));
  }
  fmt::print("{} checks passed\n", count);
}

}  // namespace

void add_check(CLI::App& app) {
  struct Request {
    std::string dtype;
    int threads = 0;
    std::optional<uint32_t> seed;
  };
  auto r = std::make_shared<Request>();
  auto* command = app.add_subcommand("check", "The engine against the reference on this machine");
  add_dtype(*command, r->dtype, "Only this dtype; default all");
  command->add_option("--threads", r->threads, "Threads; default OMP_NUM_THREADS or all cores")
      ->type_name("N");
  command->add_option("--seed", r->seed, "Seed of the inputs; default: a new one each time")
      ->type_name("N");
  command->footer(
      "The reference computes the papers' formulas in double precision. An output may be off by\n"
      "twice, a gradient by three times, what the plain formula in the input's precision is off.\n"
      "Exit status 1 if a bound is broken.\n"
      "Examples:\n"
      "  fulgur check\n"
      "  fulgur check --dtype bf16");
  command->callback([r] { check(r->dtype, r->threads, r->seed.value_or(std::random_device{}())); });
}

}  // namespace fulgur::app

// docs/contract.md names all values of Plan::details(), and no others.
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <string>
#include <variant>

#include "../plans/backward_call.h"
#include "calls.h"
#include "cpu/plan.h"
#include "fulgur/cuda.h"
#include "on_fake_gpu.h"

namespace fulgur::test {
namespace {

using Names = std::set<std::string>;

/// The names in the tables of the section of the contract; those in the table of `call` begin with
/// "call.".
Names documented() {
  std::ifstream file(FULGUR_DOCS "/contract.md");
  const std::regex name("`(\\w+)`");
  Names names;
  std::string line, part;
  bool inside = false;
  while (std::getline(file, line)) {
    if (line.starts_with("## ")) inside = line == "## What a plan says of itself";
    if (!inside) continue;
    if (line.ends_with(":")) part = line.starts_with("`call` ") ? "call." : "";
    if (!line.starts_with("| `")) continue;
    const std::string cell = line.substr(0, line.find(" | "));
    for (std::sregex_iterator match(cell.begin(), cell.end(), name), end; match != end; ++match) {
      names.insert(part + (*match)[1].str());
    }
  }
  return names;
}

/// A process of its own, as it tunes and has a compiler that spills.
class DocumentedDetails : public OnFakeGpu {
 protected:
  void TearDown() override { unsetenv("FAKE_NVRTC_SPILLS"); }

  void add(const Details& details, const std::string& part = "") {
    for (const auto& [name, value] : details.entries()) {
      names_.insert(part + name);
      const auto* const inner = std::get_if<Details>(&value);
      if (inner == nullptr || name == "copies") continue;
      add(*inner, name == "call" ? "call." : "");
    }
  }
  template <class Args>
  void add(const Args& args, const Options& options) {
    add(plan(args, options).details());
  }
  void add_forward(const ForwardShape& shape) {
    const ForwardCall call = forward_call(shape);
    add(call.args, call.options);
  }
  void add_backward(const ForwardShape& shape, const BackwardOptions& with = {}) {
    const BackwardCall call = backward_call(shape, with);
    add(call.args, call.options);
  }
  void add_on_host(const ForwardShape& shape, const char* engine, Options options = {}) {
    BackwardCall call = backward_call(shape);
    call.options.score_mod = options.score_mod;
    call.options.mask_mod = options.mask_mod;
    call.options.algorithm = options.algorithm;
    BackwardArgs& b = call.args;
    for (ConstTensor* t : {&b.dout, &b.q, &b.k, &b.v, &b.out, &b.lse}) t->device = {};
    for (Tensor* t : {&b.dq, &b.dk, &b.dv}) t->device = {};
    call.options.engine = engine;
    add(b, call.options);
    ForwardCall forward = forward_call(shape);
    ForwardArgs& f = forward.args;
    for (ConstTensor* t : {&f.q, &f.k, &f.v}) t->device = {};
    for (Tensor* t : {&f.out, &f.lse}) t->device = {};
    add(f, call.options);
  }

  Names names_;
};

TEST_F(DocumentedDetails, AreAll) {
  add_on_host({}, "cpu");
  add_on_host({.sq = 1, .sk = 9000}, "cpu");
  add_on_host({}, "reference",
              {.score_mod = parse_expression("score * 2"),
               .mask_mod = parse_expression("q >= k || k < 4"),
               .algorithm = "standard"});
  cpu::Kernels products = {};
  products.target = "AMX";
  add(cpu::describe({}, products, forward_problem({})).details);

  add_forward({.mask = chunked(400, window(300, 5)), .softcap = 9, .dropout = 0.5});
  add_forward({.mask = top_left(causal())});
  ForwardCall masked = forward_call({});
  masked.options.mask_mod = parse_expression("q >= k || k < 4");
  add(masked.args, masked.options);
  ForwardCall packed_mask =
      forward_call({.batch = 8, .sq = 8192, .sk = 8192, .bias = DType::kBool});
  packed_mask.args.bias.strides[1] = 0;
  add(packed_mask.args, packed_mask.options);
  BackwardCall of_a_paper = backward_call({});
  of_a_paper.options.algorithm = "fa1";
  add(of_a_paper.args, of_a_paper.options);
  add_forward({.dtype = DType::kE4M3, .fast_codes = true});
  ForwardCall rotated = forward_call({.sq = 1});
  rotated.args.k.dtype = rotated.args.v.dtype = DType::kInt8;
  rotated.options.hadamard = true;
  add(rotated.args, rotated.options);
  ForwardCall converted = forward_call({.sq = 2048, .sk = 8192});
  converted.args.k.dtype = converted.args.v.dtype = DType::kInt8;
  add(converted.args, converted.options);
  add_forward({.d = 17, .dv = 20, .max_workspace = int64_t{1} << 30});
  add_forward({.sq = 1, .hk = 1, .d = 576, .dv = 512});
  add_forward({.sq = 300, .sk = 9000, .packed = true, .invariant = true});
  for (const int64_t sq : {1, 700}) {
    for (const bool prefixes : {false, true}) {
      const ForwardCall call = call_over_pages(64, sq, 9000, prefixes);
      add(call.args, call.options);
    }
    const AppendingCall appending({.batch = 3, .sq = sq, .sk = 1000, .mask = causal()});
    add(appending.call.args, appending.call.options);
  }
  const CallWithHostLengths lengths(5);
  add(lengths.call.args, lengths.call.options);
  add_backward({.hk = 8, .d = 64});
  add_backward({.hk = 8, .d = 64}, {.deterministic = true});
  add_backward({.invariant = true});
  add_backward({.d = 512});

  const ForwardCall tuned = forward_call({.batch = 5});
  cuda::tune(placed(tuned.args, kBase), tuned.options);
  add(tuned.args, tuned.options);
  setenv("FAKE_NVRTC_SPILLS", "800", 1);
  add_forward({.d = 32});

  const auto without = [](const Names& all, const Names& others) {
    Names rest;
    std::ranges::set_difference(all, others, std::inserter(rest, rest.end()));
    return rest;
  };
  EXPECT_EQ(without(names_, documented()), Names()) << "are not documented";
  EXPECT_EQ(without(documented(), names_), Names()) << "are documented, and no plan here has them";
}

}  // namespace
}  // namespace fulgur::test

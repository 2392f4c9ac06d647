// NVRTC on a machine without a GPU: every kernel that the engine can ask for compiles without
// spills and without serialized wgmma, and a failure leaves nothing in the cache.
#include "cuda/jit/compile.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <regex>
#include <set>
#include <sstream>
#include <thread>

#include "cuda/common/call_kernel.h"
#include "cuda/common/host_metadata.h"
#include "cuda/common/launch.h"
#include "cuda/common/tensor_shape.h"
#include "cuda/decode/candidates.h"
#include "cuda/decode/family.h"
#include "cuda/decode/rejects.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/choose.h"
#include "cuda/engine/mma_rate.h"
#include "cuda/engine/reachable.h"
#include "cuda/passes/converted.h"
#include "cuda/portable/backward.h"
#include "cuda/portable/forward.h"
#include "cuda/portable/wide_backward.h"
#include "cuda/sm90/backward_candidates.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/families.h"
#include "cuda/sm90/forward_candidates.h"
#include "cuda/sm90/forward_rejects.h"
#include "engines.h"
#include "fulgur/cuda.h"
#include "plans/backward_call.h"
#include "plans/forward_call.h"

namespace fulgur::cuda {
namespace {

using namespace decode;
using namespace sm90;

namespace fs = std::filesystem;
using test::backward_problem;
using test::forward_problem;
using test::ForwardShape;

class Compile : public testing::Test {
 protected:
  void SetUp() override {
    // What NVRTC finds in the driver's cache has no log; both may read this when they are loaded.
    setenv("CUDA_CACHE_DISABLE", "1", 1);
    if (!nvrtc_unavailable().empty()) GTEST_SKIP() << nvrtc_unavailable();
  }
};

/// What ptxas says that a kernel must not do; empty when it says nothing of the kind.
std::string complaint(const std::string& log) {
  static const std::regex kSpill("([1-9][0-9]*) bytes (stack frame|spill stores|spill loads)");
  static const std::regex kSerialized("C75[0-9][0-9]");
  std::smatch match;
  if (std::regex_search(log, match, kSpill) || std::regex_search(log, match, kSerialized)) {
    return match.str();
  }
  if (log.find("0 bytes spill stores") == std::string::npos) return "no word on spills";
  return {};
}

TEST(Complaint, SaysNothingOfAFewSpillsToPlans) {
  const auto defect = [](const std::string& log) { return defect_of({"", log}); };
  EXPECT_EQ(defect("8 bytes stack frame, 144 bytes spill stores, 144 bytes spill loads"), "");
  EXPECT_EQ(defect("0 bytes spill stores\n148 bytes spill stores"),
            "spills 148 bytes of registers");
}

TEST(Complaint, FindsWhatItIsFor) {
  const std::string clean = "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads";
  EXPECT_EQ(complaint(clean), "");
  EXPECT_EQ(complaint("0 bytes stack frame, 16 bytes spill stores"), "16 bytes spill stores");
  EXPECT_EQ(complaint("8 bytes stack frame, 0 bytes spill stores"), "8 bytes stack frame");
  EXPECT_EQ(complaint(clean + "\n(C7514) Potential Performance Loss: wgmma"), "C7514");
  EXPECT_NE(complaint(""), "");
}

/// The second half of its queries; gradients of keys are f32.
Problem part_of(Problem p) {
  p.origin = {.query = p.sq, .heads = p.hq, .queries = 2 * p.sq, .keys = p.sq + p.sk};
  p.f32_key_gradients = p.pass == Pass::kBackward;
  return p;
}

/// Problems whose plans cover every head dim with plain options, and every option with the head
/// dims that matter.
std::vector<Problem> problems() {
  std::vector<Problem> all;
  const std::vector<Mask> masks = {full(), causal(), window(128, -1), window(128, 64)};
  for (int64_t d = 16; d <= 256; d += 16)
    all.push_back(forward_problem({.d = d, .mask = causal()}));
  for (const auto& [d, dv] : {std::pair{192, 128}, {128, 64}, {64, 256}, {256, 16}, {16, 256}}) {
    all.push_back(forward_problem({.d = d, .dv = dv, .mask = causal()}));
  }
  for (const int64_t d : {17, 65, 120, 129, 250}) {  // O leaves by elements, or strides are copied
    all.push_back(forward_problem({.d = d, .mask = causal()}));
    all.push_back(forward_problem({.d = d, .packed = true}));
  }
  all.push_back(forward_problem({.d = 80, .bias = DType::kF16}));
  all.push_back(forward_problem({.d = 64, .scale = 0.3, .bias = DType::kBF16}));
  for (const int64_t d : {64, 128, 256}) {
    for (const Mask& mask : masks) {
      all.push_back(forward_problem({.d = d, .mask = mask}));
      all.push_back(forward_problem({.d = d, .mask = mask, .packed = true}));
    }
    all.push_back(forward_problem({.dtype = DType::kF16, .d = d, .mask = causal()}));
    all.push_back(forward_problem({.d = d, .mask = causal(), .softcap = 30}));
    all.push_back(forward_problem({.d = d, .mask = causal(), .alibi = true}));
    all.push_back(forward_problem({.d = d, .scale = -1.0}));
    all.push_back(forward_problem({.d = d, .seqused = true}));
    all.push_back(forward_problem({.d = d, .mask = causal(), .seqused_q = true}));
    all.push_back(forward_problem({.d = d, .mask = causal(), .lse = false}));
    all.push_back(forward_problem({.d = d, .mask = causal(), .sinks = true}));
    all.push_back(forward_problem({.d = d, .bias = DType::kBF16}));
    all.push_back(forward_problem({.d = d, .mask = causal(), .bias = DType::kBF16}));
    all.push_back(forward_problem({.d = d, .mask = causal(), .bias = DType::kF32}));
    all.push_back(forward_problem({.d = d, .bias = DType::kBool}));
    all.push_back(forward_problem({.dtype = DType::kF16,
                                   .d = d,
                                   .mask = window(100, 20),
                                   .softcap = 9,
                                   .alibi = true,
                                   .packed = true,
                                   .seqused = true,
                                   .sinks = true,
                                   .dropout = 0.1,
                                   .bias = DType::kF16,
                                   .bias_of_columns = true}));
    all.push_back(forward_problem({.d = d,
                                   .mask = window(100, 20),
                                   .softcap = 9,
                                   .alibi = true,
                                   .packed = true,
                                   .seqused = true,
                                   .sinks = true}));
    all.push_back(forward_problem({.d = d, .mask = causal(), .dropout = 0.1}));
    all.push_back(forward_problem({.d = d, .dropout = 0.1}));
    all.push_back(part_of(forward_problem({.d = d, .mask = causal()})));
    all.push_back(part_of(forward_problem({.d = d, .mask = causal(), .dropout = 0.1})));
    all.push_back(forward_problem({.dtype = DType::kF16,
                                   .d = d,
                                   .mask = window(100, 20),
                                   .softcap = 9,
                                   .alibi = true,
                                   .packed = true,
                                   .seqused = true,
                                   .sinks = true,
                                   .dropout = 0.1}));
    for (const double dropout : {0.0, 0.1}) {
      all.push_back(forward_problem({.d = d,
                                     .mask = chunked(300, window(100, 20)),
                                     .softcap = 9,
                                     .alibi = true,
                                     .packed = true,
                                     .seqused = true,
                                     .sinks = true,
                                     .dropout = dropout}));
    }
  }
  for (const int64_t d : {32, 64, 96, 128, 192, 256})
    all.push_back(forward_problem({.d = d, .mask = chunked(300, causal())}));
  for (const int64_t d : {64, 128, 256}) {
    all.push_back(forward_problem(
        {.d = d, .mask = top_left(causal()), .alibi = true, .packed = true, .seqused = true}));
  }
  for (const auto& [d, dv] : {std::pair{64, 64}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
    Problem pages = forward_problem({.d = d, .dv = dv, .mask = causal(), .seqused = true});
    pages.cache.pages = Problem::Cache::Pages::kTable;
    pages.cache.page = 16;
    all.push_back(pages);
    pages.mask = chunked(300, causal());
    if (d <= 192) all.push_back(pages);
    pages = forward_problem({.dtype = DType::kF16,
                             .d = d,
                             .dv = dv,
                             .mask = window(100, 20),
                             .softcap = 9,
                             .alibi = true,
                             .packed = true,
                             .seqused = true,
                             .sinks = true,
                             .dropout = d == 128 ? 0.1 : 0});
    pages.packed_k = false;
    pages.cache.pages = Problem::Cache::Pages::kLists;
    pages.cache.page = 64;
    all.push_back(pages);
  }
  for (const auto& [d, dv] : {std::pair{32, 32},
                              {64, 64},
                              {96, 96},
                              {112, 112},
                              {128, 128},
                              {192, 128},
                              {192, 192},
                              {224, 224},
                              {256, 256}}) {
    const DType codes = DType::kE4M3;
    all.push_back(forward_problem({.dtype = codes, .d = d, .dv = dv}));
    all.push_back(forward_problem({.dtype = codes, .d = d, .dv = dv, .mask = causal()}));
    all.push_back(all.back());
    all.back().dtypes.k = all.back().dtypes.v = DType::kE5M2;
    all.push_back(forward_problem(
        {.dtype = codes, .d = d, .dv = dv, .mask = causal(), .bias = DType::kBF16}));
    for (const bool lengths : {false, true}) {
      for (const double softcap : {0.0, 9.0}) {
        for (const Mask& mask : {full(), causal(), chunked(300, causal())}) {
          all.push_back(forward_problem({.dtype = codes,
                                         .d = d,
                                         .dv = dv,
                                         .mask = mask,
                                         .softcap = softcap,
                                         .alibi = softcap > 0,
                                         .packed = lengths,
                                         .seqused_q = lengths,
                                         .seqused = lengths,
                                         .sinks = lengths,
                                         .fast_codes = true}));
        }
      }
    }
    for (const double dropout : {0.0, 0.1}) {
      for (const Mask& mask : {window(100, 20), chunked(300, causal())}) {
        all.push_back(forward_problem({.dtype = codes,
                                       .d = d,
                                       .dv = dv,
                                       .mask = mask,
                                       .softcap = 9,
                                       .alibi = true,
                                       .packed = true,
                                       .seqused_q = true,
                                       .seqused = true,
                                       .sinks = true,
                                       .dropout = dropout}));
        all.push_back(forward_problem({.dtype = codes,
                                       .d = d,
                                       .dv = dv,
                                       .mask = mask,
                                       .packed = true,
                                       .seqused = true,
                                       .sinks = true,
                                       .dropout = dropout}));
      }
    }
  }
  for (const int64_t d : {17, 32, 96, 192})  // the other tiles that dropout takes
    all.push_back(forward_problem({.d = d, .mask = causal(), .dropout = 0.1}));
  all.push_back(forward_problem({.d = 192, .dv = 128, .dropout = 0.1}));
  for (const auto& [d, dv] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {256, 256}}) {
    all.push_back(forward_problem(
        {.d = d, .dv = dv, .mask = causal(), .packed = true, .invariant = true, .sinks = true}));
    all.push_back(forward_problem({.dtype = DType::kF16,
                                   .d = d,
                                   .dv = dv,
                                   .mask = window(100, 20),
                                   .softcap = 9,
                                   .alibi = true,
                                   .packed = true,
                                   .seqused_q = true,
                                   .seqused = true,
                                   .invariant = true}));
  }
  return all;
}

/// Problems for the decode kernel: every number of warps that a warp group may have, with the dims
/// and options that take the most registers.
std::vector<Problem> decode_problems() {
  std::vector<Problem> all;
  const auto add = [&](ForwardShape shape, auto change) {
    const auto add_one = [&] {
      shape.hq = 4 * shape.hk;  // rows of a kv head for each query
      Problem p = forward_problem(shape);
      p.cache.pages = Problem::Cache::Pages::kTable;
      p.cache.page = 16;
      change(p);
      all.push_back(p);
    };
    for (const int64_t sq : {1, 2, 4, 8, 16, 32, 64}) {
      shape.sq = sq;
      add_one();
    }
    // More q blocks of the warp path than are split, and as many as are taken whole.
    for (const int64_t q_blocks : {80, 160}) {
      shape.batch = q_blocks / shape.hk;
      for (const int64_t sq : {1, 2, 4}) {
        shape.sq = sq;
        add_one();
      }
    }
  };
  const auto paged = [](Problem&) {};
  for (const auto& [d, dv] : {std::pair{16, 16}, {80, 80}, {128, 128}, {192, 128}, {256, 256}}) {
    add({.d = d, .dv = dv, .mask = causal(), .seqused = true}, paged);
    if (d >= 128) add({.d = d, .dv = dv, .mask = chunked(300, causal()), .seqused = true}, paged);
  }
  for (const auto& [d, dv] : {std::pair{576, 512}, {512, 512}, {320, 256}}) {  // wide heads
    add({.hk = 1, .d = d, .dv = dv, .seqused = true}, paged);
    add({.dtype = DType::kF16,
         .hk = 16,
         .d = d,
         .dv = dv,
         .mask = causal(),
         .seqused = true,
         .sinks = true},
        paged);
  }
  for (const int64_t d : {64, 128, 256})  // splits of more sequences than a warp has lanes
    add({.batch = 40, .hk = 1, .d = d, .dv = d, .mask = causal(), .seqused = true}, paged);
  for (const int64_t d : {64, 128, 248}) {
    add({.dtype = DType::kF16,
         .d = d,
         .mask = window(100, 20),
         .softcap = 9,
         .alibi = true,
         .packed = true,
         .seqused = true,
         .sinks = true},
        [](Problem& p) {
          p.packed_k = false;
          p.cache.pages = Problem::Cache::Pages::kLists;
          p.cache.page = 1;
          p.given.set(Arg::kLeftpadK, true);
        });
  }
  add({.mask = top_left(window(100, 20)), .alibi = true, .seqused = true}, paged);
  for (const Mask& mask : {window(100, 20), chunked(300, window(100, 20))}) {
    add({.d = 256, .dv = 256, .mask = mask, .softcap = 9, .alibi = true, .seqused = true},
        [](Problem& p) { p.given.set(Arg::kTreeMask, true); });
  }
  for (const int64_t d : {192, 256}) {
    add({.d = d,
         .dv = d,
         .mask = window(100, 20),
         .softcap = 9,
         .alibi = true,
         .seqused = true,
         .sinks = true},
        paged);
  }
  for (const int64_t d : {64, 128, 256}) {
    add({.d = d, .dv = d, .seqused = true, .bias = DType::kBF16}, paged);
    if (d > 64) continue;  // of all at once 4 to 16 bytes spill
    add({.d = d,
         .dv = d,
         .mask = window(100, 20),
         .softcap = 9,
         .alibi = true,
         .seqused = true,
         .bias = DType::kF32,
         .bias_of_columns = true},
        paged);
  }
  for (const int64_t d : {60, 124}) {  // rows by elements, K and V copied
    add({.d = d, .mask = window(100, 20), .softcap = 9, .alibi = true, .seqused = true}, paged);
  }
  for (const int64_t d : {248, 256}) {  // the same of q and out alone
    add({.d = d, .mask = causal(), .seqused = true},
        [](Problem& p) { p.q.aligned = p.out.aligned = false; });
  }
  add({.batch = 64, .sk = 65536, .seqused = true}, paged);  // two CTAs an SM
  for (const auto& [d, dv] : {std::pair{512, 512}, {576, 512}, {320, 300}, {64, 512}})
    add({.d = d, .dv = dv, .mask = causal(), .seqused = true}, paged);
  for (const Mask& mask : {full(), window(100, 20), chunked(300, causal())})
    add({.d = 512, .dv = 512, .mask = mask}, [](Problem& p) { p.cache = {}; });
  add({.d = 512, .dv = 512, .mask = window(100, 20), .softcap = 9, .alibi = true, .packed = true},
      paged);
  add({.d = 576, .dv = 512, .mask = causal(), .seqused = true},
      [](Problem& p) { p.given.set(Arg::kTreeMask, true); });
  add({.d = 512, .dv = 512, .bias = DType::kBF16}, [](Problem& p) { p.cache = {}; });
  add({.mask = causal(), .packed = true, .seqused_q = true}, [](Problem& p) { p.cache = {}; });
  add({.seqused = true, .invariant = true, .sinks = true}, [](Problem& p) {
    p.cache = {};
    p.given.set(Arg::kCacheBatchIdx, true);
  });
  for (const int64_t d : {64, 128, 192, 256}) {  // contiguous, by rows
    for (const auto& [sq, softcap] : {std::pair{1, 0.0}, {16, 9.0}}) {
      all.push_back(forward_problem({.sq = sq,
                                     .hq = 8,
                                     .d = d,
                                     .mask = window(100, 20),
                                     .softcap = softcap,
                                     .packed = true,
                                     .seqused = true,
                                     .invariant = true}));
    }
  }
  return all;
}

/// The same of the backward pass, whose kernels are many: every head dim with a mask, and the
/// options where a plan has most to hold in registers.
std::vector<Problem> backward_problems() {
  std::vector<Problem> all;
  for (int64_t d = 16; d <= 256; d += 16)
    all.push_back(backward_problem({.d = d, .mask = causal()}));
  for (const auto& [d, dv] :
       {std::pair{192, 128}, {128, 64}, {64, 128}, {64, 256}, {256, 16}, {16, 256}}) {
    all.push_back(backward_problem({.d = d, .dv = dv, .mask = causal()}));
  }
  for (const int64_t d : {17, 129}) {  // gradients leave by elements
    all.push_back(
        backward_problem({.d = d, .packed = true, .sinks = true}, {.dlse = true, .dsinks = true}));
  }
  for (const int64_t d : {64, 128, 192, 256}) {
    const int64_t dv = std::min<int64_t>(d, d == 192 ? 128 : 256);
    const auto add = [&](test::ForwardShape shape) {
      shape.d = d;
      shape.dv = dv;
      all.push_back(backward_problem(shape));
    };
    add({});
    add({.packed = true});
    add({.mask = window(128, -1), .packed = true});
    add({.mask = window(128, 64)});
    add({.mask = causal(), .softcap = 30});
    add({.mask = causal(), .alibi = true});
    add({.bias = DType::kBF16});
    add({.mask = causal(), .bias = DType::kBool});
    add({.bias = DType::kF32});
    add({.seqused = true});
    add({.mask = causal(), .seqused_q = true});
    add({.dtype = DType::kF16,
         .mask = window(100, 20),
         .softcap = 9,
         .alibi = true,
         .packed = true,
         .seqused = true});
    add({.mask = causal(), .dropout = 0.1});
    add({.packed = true, .dropout = 0.1});
    add({.mask = chunked(300, causal())});
    for (const Mask& mask :
         {window(100, 20), chunked(300, window(100, 20)), top_left(window(100, 20))}) {
      add({.dtype = DType::kF16,
           .mask = mask,
           .softcap = 9,
           .alibi = true,
           .packed = true,
           .seqused = true,
           .dropout = 0.1});
    }
    if (d == 256) continue;  // of all at once a few bytes spill
    add({.mask = window(100, 20),
         .softcap = 9,
         .alibi = true,
         .packed = true,
         .seqused = true,
         .dropout = 0.1,
         .bias = DType::kF32,
         .bias_of_columns = true});
  }
  for (const double softcap : {0.0, 9.0}) {  // the most dims of tiles that dropout takes
    all.push_back(backward_problem({.d = 96, .softcap = softcap, .dropout = 0.1}));
    all.push_back(backward_problem({.d = 112, .softcap = softcap, .dropout = 0.1}));
  }
  all.push_back(backward_problem({.sinks = true}, {.dsinks = true}));
  for (const int64_t d : {64, 128, 192, 256}) {
    for (const bool invariant : {false, true}) {
      all.push_back(part_of(backward_problem({.d = d, .mask = causal(), .invariant = invariant})));
    }
  }
  all.push_back(part_of(backward_problem({.mask = chunked(300, causal()), .dropout = 0.1})));
  return all;
}

/// A forward kernel of a head dim.
KernelRequest some_kernel(int64_t d) {
  std::vector<std::string> rejected;
  return all_candidates(forward_problem({.d = d}), architecture_of(kTarget).families, {}, &rejected)
      .at(0)
      ->kernels()
      .at(0)
      .request;
}

std::string name(const KernelRequest& request) {
  return request.source + "\n" + request.kernel_config;
}

/// Whether a line of kernel_config.h is read outside of the loops over tiles alone: of the lengths
/// of sequences, of how blocks are shared out, of how results leave.
bool outside_loops(std::string_view line) {
  constexpr std::string_view kConstants[] = {"Packed", "SeqUsedK", "FewQueries", "HasSinks",
                                             "HasLse", "HasDlse",  "SplitTail",  "TileRows",
                                             "Store",  "Elements"};
  const size_t end = line.find(" = ");
  return line.starts_with("  k") && end != line.npos &&
         std::ranges::count(kConstants, line.substr(3, end - 3)) > 0;
}

/// What compiling a kernel shows: its loops, and what is outside of them with every constant.
std::set<std::string> shown_by(const KernelRequest& request) {
  std::vector<std::string> lines;
  std::istringstream header(request.kernel_config);
  for (std::string line; std::getline(header, line);) lines.push_back(line);
  std::set<std::string> shown;
  std::string loops = request.source;
  for (const std::string& line : lines) {
    if (!outside_loops(line)) {
      loops += line;
      continue;
    }
    for (const std::string& other : lines) {
      shown.insert(request.source + std::min(line, other) + std::max(line, other));
    }
  }
  shown.insert(loops);
  return shown;
}

/// Requests that show what all do. Registers are full in the loops, so that each is compiled; what
/// is outside of them takes registers too, so that a loop is compiled with the most of it, and else
/// as often as each such constant has met each other constant.
std::vector<KernelRequest> enough_of(const std::vector<KernelRequest>& all) {
  struct Shows {
    KernelRequest request;
    std::set<std::string> shown;
    std::ptrdiff_t outside;  ///< constants outside of loops that are not 0
  };
  std::vector<Shows> requests;
  std::map<std::string, int> times;
  for (const KernelRequest& request : all) {
    std::ptrdiff_t outside = 0;
    std::istringstream header(request.kernel_config);
    for (std::string line; std::getline(header, line);)
      outside += outside_loops(line) && !line.ends_with("= 0,");
    requests.push_back({request, shown_by(request), outside});
    for (const std::string& what : requests.back().shown) ++times[what];
  }
  std::ranges::stable_sort(requests, {}, &Shows::outside);
  std::vector<KernelRequest> enough;
  for (const Shows& r : requests) {
    const bool again = std::ranges::all_of(r.shown, [&](const auto& s) { return times[s] > 1; });
    if (!again) enough.push_back(r.request);
    for (const std::string& what : r.shown) times[what] -= again;
  }
  return enough;
}

TEST(Enough, ShowsWhatAllDo) {
  const auto request = [](const std::string& loop, int packed, int lse) {
    return KernelRequest{"a.cu", fmt::format("enum {{\n  kHeadDim = {},\n  kPacked = {},\n"
                                             "  kHasLse = {},\n}};\n",
                                             loop, packed, lse)};
  };
  const std::vector<KernelRequest> two = {request("64", 1, 1), request("128", 0, 0)};
  std::vector<KernelRequest> all = two;
  EXPECT_EQ(enough_of(all).size(), 2u);  // each is the only one with its loop
  all.push_back(request("64", 0, 1));
  EXPECT_EQ(enough_of(all).size(), 3u);  // kPacked 0 with kHasLse 1
  all.push_back(request("64", 1, 0));
  all.push_back(request("64", 0, 0));  // now every two have met with 64
  const std::vector<KernelRequest> enough = enough_of(all);
  EXPECT_EQ(enough.size(), 4u);
  EXPECT_EQ(std::ranges::count(enough, request("64", 0, 0)), 0);
  EXPECT_EQ(std::ranges::count(enough, request("64", 1, 1)), 1);
}

/// The seed of the sample: FULGUR_COMPILE_SEED, or the number of today.
uint64_t sample_seed() {
  const char* seed = getenv("FULGUR_COMPILE_SEED");
  if (seed != nullptr) return std::stoull(seed);
  using std::chrono::days, std::chrono::floor, std::chrono::system_clock;
  return static_cast<uint64_t>(floor<days>(system_clock::now()).time_since_epoch().count());
}

/// `sample` of so many indices, others every day; all of them with FULGUR_COMPILE_ALL=1.
std::vector<size_t> sample_of(size_t count, size_t sample) {
  std::vector<size_t> indices(count), drawn;
  std::iota(indices.begin(), indices.end(), 0);
  if (getenv("FULGUR_COMPILE_ALL") != nullptr) return indices;
  const uint64_t seed = sample_seed();
  fmt::print("{} of {} kernels, drawn by FULGUR_COMPILE_SEED={}\n", sample, count, seed);
  std::ranges::sample(indices, std::back_inserter(drawn), static_cast<std::ptrdiff_t>(sample),
                      std::mt19937_64(seed));
  return drawn;
}

/// Every kernel that a plan may ask for, as far as one shows something that no other one does.
std::vector<KernelRequest> requests_of_plans() {
  std::vector<KernelRequest> reachable;
  std::set<std::string> seen;
  std::vector<Problem> all = problems();
  for (const Problem& problem : all) EXPECT_EQ(forward_rejects(problem), "");
  for (const Problem& problem : backward_problems()) {
    EXPECT_EQ(backward_rejects(problem), "");
    all.push_back(problem);
  }
  for (Problem problem : {forward_problem({.d = 64}), forward_problem({.d = 80,
                                                      .mask = window(100, 20),
                                                      .softcap = 9,
                                                      .alibi = true,
                                                      .packed = true,
                                                      .seqused = true,
                                                      .sinks = true,
                                                      .bias = DType::kF32})}) {
    problem.pass = Pass::kScores;
    all.push_back(problem);
  }
  const auto add = [&](const Candidate& candidate) {
    for (const KernelUse& use : candidate.kernels()) {
      if (seen.insert(name(use.request)).second) reachable.push_back(use.request);
    }
  };
  // The decode kernel, which is among the candidates of most problems, has problems of its own.
  for (const Problem& problem : all) {
    for_reachable(problem, kTarget, [&](const Candidates& candidates) {
      const auto other = std::ranges::find_if(
          candidates, [](const auto& c) { return c->tile.family != "sm90_decode"; });
      if (other != candidates.end()) add(**other);
    });
  }
  for (const Problem& problem : decode_problems()) {
    EXPECT_EQ(decode_rejects(problem), "");
    for (const DecodePlan& plan : decode_plans(problem, {})) {
      const DecodeCandidate candidate(problem, {plan, plan.cycles, {}});
      add(candidate);
      std::string why_not;
      const auto fused = candidate.fused({.given = true, .rotates = true}, &why_not);
      if (fused != nullptr) add(*fused);
    }
  }
  for (const int64_t d : {64, 128, 256}) {  // by tuning, where what spills loses
    for (const Problem& problem : {forward_problem({.d = d, .mask = causal()}),
                                   forward_problem({.d = d, .mask = causal(), .dropout = 0.1}),
                                   backward_problem({.d = d, .mask = causal()}),
                                   backward_problem({.d = d, .mask = causal(), .dropout = 0.1})}) {
      std::vector<std::string> rejected;
      const auto families = architecture_of(kTarget).families;
      for (const auto& candidate : all_candidates(problem, families, {}, &rejected))
        add(*candidate);
    }
  }
  EXPECT_GT(reachable.size(), 500u);
  return enough_of(reachable);
}

/// A kernel with what it is compiled for.
struct Wanted {
  KernelRequest request;
  Target target;
  int shared_bytes = 0;  ///< of shared memory that a launch asks for
};

/// The bytes of shared memory of the variables of a kernel, as ptxas says.
int bytes_of_variables(const std::string& log) {
  static const std::regex kShared("([0-9]+) bytes smem");
  std::smatch match;
  return std::regex_search(log, match, kShared) ? std::stoi(match[1]) : 0;
}

/// What the compiler said of each kernel, by its key in the cache: lines of the file that
/// FULGUR_COMPILE_LIST names. What another run has found is not compiled again, so that a run may
/// go on, on another machine too, where the last one ended.
class FoundBefore {
 public:
  FoundBefore() {
    const char* path = getenv("FULGUR_COMPILE_LIST");
    if (path == nullptr) return;
    std::ifstream lines(path);
    for (std::string line; std::getline(lines, line);) {
      const size_t key = line.find('\t'), log = line.find('\t', key + 1);
      if (log != line.npos) logs_.insert({line.substr(0, key), line.substr(log + 1)});
    }
    file_.open(path, std::ios::app);
    EXPECT_TRUE(file_.is_open()) << path;
  }
  bool given() const { return file_.is_open(); }

  /// The log of a kernel: what an earlier run has found, or else that of compile().
  template <class Compile>
  Cubin get(const std::string& key, const Wanted& kernel, const Compile& compile) {
    if (const auto found = logs_.find(key); found != logs_.end()) return {"", found->second};
    Cubin cubin = compile();
    std::string line =
        fmt::format("{}\t{} {}\t{}", key, kernel.target.name(), name(kernel.request), cubin.log);
    std::ranges::replace(line, '\n', ' ');
    const std::lock_guard lock(mutex_);
    file_ << line << std::endl;
    return cubin;
  }

 private:
  std::map<std::string, std::string> logs_;
  std::ofstream file_;
  std::mutex mutex_;
};

/// Expects that the compiler finds no fault with a sample of kernels, which changes every day; with
/// FULGUR_COMPILE_ALL=1 with all of them (`make test-kernels`). `spills`: so many bytes are no
/// fault.
void expect_clean(const std::vector<Wanted>& kernels, size_t sample, int spills = 0) {
  const std::vector<size_t> indices = sample_of(kernels.size(), sample);
  // What was found clean once stays so: the keys of the cache are those of the compilation.
  CubinCache cache(fs::path(FULGUR_TEST_CACHE));
  FoundBefore found;
  std::atomic<size_t> next = 0, compiled = 0;
  const auto start = std::chrono::steady_clock::now();
  const auto work = [&] {
    for (size_t n; (n = next++) < indices.size();) {
      const Wanted& kernel = kernels[indices[n]];
      try {
        const std::string key = cache_key(kernel.request, kernel.target);
        const auto compiles = [&] {
          ++compiled;
          return compile(kernel.request, kernel.target);
        };
        const Cubin cubin =
            found.given() ? found.get(key, kernel, compiles) : cache.get(key, compiles);
        // The wide paths spill a few registers at the ends of tiles and work tiles, which costs
        // less than a tile of fewer keys.
        const bool wide = kernel.request.source.starts_with("decode/wide/");
        const int limit = wide ? kSpilledBytesOutsideOfLoops : spills;
        const std::string fault = limit > 0 ? defect_of(cubin, limit) : complaint(cubin.log);
        EXPECT_EQ(fault, "") << kernel.target.name() << name(kernel.request) << cubin.log;
        EXPECT_LE(kernel.shared_bytes + bytes_of_variables(cubin.log),
                  features_of(kernel.target).shared_bytes)
            << kernel.target.name() << name(kernel.request) << cubin.log;
      } catch (const Error& error) {
        ADD_FAILURE() << kernel.target.name() << name(kernel.request) << error.what();
      }
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::max(std::thread::hardware_concurrency(), 1u); ++i)
    threads.emplace_back(work);
  for (std::thread& t : threads) t.join();
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  fmt::print("{} judged, {} compiled now, {:.1f} s\n", indices.size(), compiled.load(), seconds);
}

// No kernel for Hopper spills registers or serializes its products.
TEST_F(Compile, EveryReachablePlanIsClean) {
  std::vector<Wanted> kernels;
  for (const KernelRequest& request : requests_of_plans()) kernels.push_back({request, kTarget});
  expect_clean(kernels, 8);
}

// Kernels have what their target has, also for cards whose own target has more.
TEST(Reachable, KernelsAreOfTheirTarget) {
  for (const Target target : {Target{90, Target::Form::kCubin}, Target{80, Target::Form::kPtx}}) {
    const bool adds_four = features_of(target).has_red_v4;
    size_t decoding = 0, adding = 0;
    for (const Problem& problem : {forward_problem({.d = 64}), backward_problem({.d = 64})}) {
      for_reachable(problem, target, [&](const Candidates& candidates) {
        for (const auto& candidate : candidates) {
          for (const KernelUse& use : candidate->kernels()) {
            EXPECT_NE(use.request.source, "decode/decode_warpgroup.cu");
            decoding += use.request.source.starts_with("decode/");
            if (use.request.source != "portable/backward/keys.cu") continue;
            ++adding;
            const bool four = use.request.kernel_config.find("kDqByFours = 1") != std::string::npos;
            EXPECT_EQ(four, adds_four) << target.name();
          }
        }
      });
    }
    EXPECT_GT(decoding, 0u);
    EXPECT_GT(adding, 0u);
  }
}

constexpr std::array kPortableTargets = {"sm_75", "sm_80",  "sm_86", "sm_89",
                                         "sm_90", "sm_100", "sm_120"};

/// The kernels of the portable tiles that a target's cards have for each of some problems. `tiles`:
/// the candidates of a problem on a card. Of all targets, or of those in FULGUR_COMPILE_TARGETS.
template <class Tiles>
std::vector<Wanted> portable_kernels(const std::vector<Problem>& problems, const Tiles& tiles) {
  std::vector<Wanted> kernels;
  const char* only = getenv("FULGUR_COMPILE_TARGETS");
  for (const char* name_of_target : kPortableTargets) {
    if (only != nullptr && std::string_view(only).find(name_of_target) == std::string_view::npos) {
      continue;
    }
    const Target target = target_called(name_of_target, "target", nvrtc_capabilities());
    std::map<std::string, int> shared_bytes;
    std::vector<KernelRequest> reachable;
    for (const Problem& problem : problems) {
      for (Card card : architecture_of(target).cards) {
        if (!runs(card.capability, target)) continue;
        card.target = target;
        for (const KernelUse& use : tiles(problem, card)) {
          EXPECT_LE(use.shared_bytes, features_of(target).shared_bytes) << name(use.request);
          if (shared_bytes.emplace(name(use.request), use.shared_bytes).second)
            reachable.push_back(use.request);
        }
      }
    }
    EXPECT_GT(reachable.size(), 10u) << target.name();  // few of wide heads fit 64 KB
    for (const KernelRequest& request : enough_of(reachable))
      kernels.push_back({request, target, shared_bytes.at(name(request))});
  }
  return kernels;
}

/// Problems that the portable forward kernel computes.
std::vector<Problem> portable_problems() {
  std::vector<Problem> all = problems();
  const std::vector<Problem> caches = decode_problems();
  all.insert(all.end(), caches.begin(), caches.end());
  std::erase_if(all, [](const Problem& p) {  // Hopper's, and the decode kernels'
    return p.dtypes.q == DType::kE4M3 || has_wide_heads(p);
  });
  return all;
}

std::vector<Problem> of_f32(std::vector<Problem> all) {
  for (Problem& problem : all) problem.dtypes = OperandTypes::all(DType::kF32);
  return all;
}

void expect_portable_clean(const std::vector<Problem>& all) {
  for (const Problem& problem : all) EXPECT_EQ(portable::forward_rejects(problem), "");
  const auto tiles = [](const Problem& problem, const Card& card) {
    std::vector<std::string> rejected;
    std::vector<KernelUse> kernels;
    for (const auto& tile : portable::forward_candidates(problem, card, &rejected))
      kernels.push_back(portable::forward_kernels(tile.plan).at(0));
    // Rows of f32 may be too long for the shared memory of 7.5.
    const bool fits = card.capability >= 80 || problem.dtypes.q != DType::kF32;
    EXPECT_TRUE(!kernels.empty() || !fits) << card.name << problem.d;
    return kernels;
  };
  expect_clean(portable_kernels(all, tiles), 10, kFewSpilledBytes);
}

// No portable kernel spills on any card: every tile that a plan may have, with every option.
TEST_F(Compile, EveryPortablePlanIsClean) { expect_portable_clean(portable_problems()); }
TEST_F(Compile, EveryPortablePlanOfF32IsClean) {
  expect_portable_clean(of_f32(portable_problems()));
}

void expect_portable_decode_clean(std::vector<Problem> all, int spills) {
  std::erase_if(all,
                [](const Problem& p) { return !decode::portable_family().rejects(p).empty(); });
  const auto tiles = [](const Problem& problem, const Card& card) {
    std::vector<KernelUse> kernels;
    if (features_of(card.target).has_wgmma) return kernels;
    for (const DecodePlan& plan : decode_plans(problem, card)) {
      if (plan.shared_bytes > card.shared_bytes) continue;
      const DecodeCandidate candidate(problem, {plan, plan.cycles, {}});
      kernels.push_back(candidate.kernels().at(0));
      std::string why_not;
      const auto fused = candidate.fused({.given = true, .rotates = true}, &why_not);
      if (fused != nullptr) kernels.push_back(fused->kernels().at(0));
    }
    return kernels;
  };
  expect_clean(portable_kernels(all, tiles), 6, spills);
}

TEST_F(Compile, EveryPortableDecodePlanIsClean) {
  expect_portable_decode_clean(decode_problems(), kFewSpilledBytes);
}
TEST_F(Compile, EveryPortableDecodePlanOfF32IsClean) {
  std::vector<Problem> all = decode_problems();
  std::erase_if(all, [](const Problem& p) { return is_low_bit(p.dtypes.k); });
  expect_portable_decode_clean(of_f32(all), kSpilledBytesOutsideOfLoops);
}

/// Problems that the portable backward kernels compute.
std::vector<Problem> portable_backward_problems() {
  std::vector<Problem> all = backward_problems();
  for (const int64_t d : {64, 128, 192, 256}) {  // CTAs share the q heads of a kv head
    for (const Mask& mask : {full(), causal()}) {
      all.push_back(backward_problem(
          {.batch = 1, .sq = 8192, .sk = 512, .hq = 64, .hk = 1, .d = d, .mask = mask}));
    }
    all.push_back(backward_problem({.sq = 8192, .sk = 8192, .d = d, .mask = causal()},
                                   {.deterministic = true}));
  }
  return all;
}

void expect_portable_gradients_clean(const std::vector<Problem>& all) {
  for (const Problem& problem : all) EXPECT_EQ(portable::backward_rejects(problem), "");
  const auto tiles = [](const Problem& problem, const Card& card) {
    std::vector<std::string> rejected;
    std::vector<KernelUse> kernels;
    for (const auto& tile : portable::backward_candidates(problem, card, &rejected))
      std::ranges::move(portable::backward_kernels(tile.plan), std::back_inserter(kernels));
    return kernels;
  };
  expect_clean(portable_kernels(all, tiles), 10, kFewSpilledBytes);
}

TEST_F(Compile, EveryPortableBackwardPlanIsClean) {
  expect_portable_gradients_clean(portable_backward_problems());
}
TEST_F(Compile, EveryPortableBackwardPlanOfF32IsClean) {
  expect_portable_gradients_clean(of_f32(portable_backward_problems()));
}

/// Problems of heads that the portable backward kernel of wide heads computes: their dims, and the
/// options where a plan has most to hold in registers.
std::vector<Problem> wide_backward_problems() {
  std::vector<Problem> all;
  for (const auto& [d, dv] : {std::pair{272, 272},
                              {320, 320},
                              {384, 384},
                              {512, 256},
                              {512, 512},
                              {576, 512},
                              {64, 512},
                              {512, 64},
                              {257, 300}})
    all.push_back(backward_problem({.d = d, .dv = dv, .mask = causal()}));
  for (const int64_t d : {512, 576}) {
    const auto add = [&](test::ForwardShape shape, const test::BackwardOptions& with = {}) {
      shape.d = d;
      shape.dv = 512;
      all.push_back(backward_problem(shape, with));
    };
    add({});
    add({.dtype = DType::kF16, .packed = true});
    add({.mask = causal(), .sinks = true}, {.dlse = true, .dsinks = true});
    add({.mask = causal(), .softcap = 30});
    add({.mask = causal(), .alibi = true});
    add({.bias = DType::kBF16});
    add({.mask = causal(), .bias = DType::kBool});
    add({.bias = DType::kF32});
    add({.mask = causal(), .seqused_q = true, .seqused = true});
    add({.mask = causal(), .dropout = 0.1});
    add({.batch = 1, .sq = 8192, .sk = 512, .hq = 64, .hk = 1, .mask = causal()});
    for (const Mask& mask :
         {window(100, 20), chunked(300, window(100, 20)), top_left(window(100, 20))}) {
      add({.dtype = DType::kF16,
           .mask = mask,
           .softcap = 9,
           .alibi = true,
           .packed = true,
           .seqused = true,
           .dropout = 0.1});
    }
    all.push_back(part_of(backward_problem({.d = d, .dv = 512, .mask = causal()})));
  }
  return all;
}

TEST_F(Compile, EveryWideBackwardPlanIsClean) {
  const std::vector<Problem> all = wide_backward_problems();
  for (const Problem& problem : all) EXPECT_EQ(portable::wide_backward_rejects(problem), "");
  const auto tiles = [](const Problem& problem, const Card& card) {
    std::vector<std::string> rejected;
    std::vector<KernelUse> kernels;
    for (const auto& tile : portable::wide_backward_candidates(problem, card, &rejected))
      std::ranges::move(portable::wide_backward_kernels(tile.plan), std::back_inserter(kernels));
    return kernels;
  };
  expect_clean(portable_kernels(all, tiles), 10, kFewSpilledBytes);
}

// No kernel of the papers' older algorithms spills.
TEST_F(Compile, KernelsOfThePapersAreClean) {
  std::vector<Problem> all;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t d : {40, 64, 128, 192, 256}) {
      for (const Mask& mask : {full(), causal(), window(100, 20), chunked(64)}) {
        for (Problem p :
             {forward_problem({.d = d, .mask = mask}), backward_problem({.d = d, .mask = mask})}) {
          p.dtypes = OperandTypes::all(dtype);
          for (const Algorithm algorithm : {Algorithm::kStandard, Algorithm::kFa1}) {
            p.algorithm = algorithm;
            all.push_back(p);
          }
        }
      }
    }
  }
  const auto tiles = [](const Problem& problem, const Card& card) {
    std::vector<std::string> rejected;
    std::vector<KernelUse> kernels;
    for (const auto& candidate :
         all_candidates(problem, families_of(card.target, problem.algorithm), card, &rejected)) {
      std::ranges::move(candidate->kernels(), std::back_inserter(kernels));
    }
    // FlashAttention's blocks of more than 192 columns do not fit the shared memory of 7.5.
    const bool fits = card.capability >= 80 || problem.d <= 192;
    EXPECT_TRUE(!kernels.empty() || !fits) << fmt::format("{}", fmt::join(rejected, "; "));
    return kernels;
  };
  expect_clean(portable_kernels(all, tiles), 6, kFewSpilledBytes);
}

/// Every kernel of every candidate of some problems on the first card of each target.
std::vector<Wanted> candidates_on(std::initializer_list<const char*> targets,
                                  const std::vector<Problem>& problems) {
  std::vector<Wanted> kernels;
  for (const char* name_of_target : targets) {
    const Target target = target_called(name_of_target, "target", nvrtc_capabilities());
    Card card = *std::ranges::find_if(architecture_of(target).cards, [&](const Card& known) {
      return runs(known.capability, target);
    });
    card.target = target;
    std::set<std::string> seen;
    for (const Problem& problem : problems) {
      std::vector<std::string> rejected;
      const Candidates all =
          all_candidates(problem, families_of(target, problem.algorithm), card, &rejected);
      EXPECT_FALSE(all.empty()) << target.name() << fmt::format(" {}", fmt::join(rejected, "; "));
      for (const auto& candidate : all) {
        for (const KernelUse& use : candidate->kernels()) {
          if (seen.insert(name(use.request)).second)
            kernels.push_back({use.request, target, use.shared_bytes});
        }
      }
    }
  }
  return kernels;
}

// With expressions, whose text is written for each call.
TEST_F(Compile, KernelsWithExpressionsAreClean) {
  static float elements[2 * 4096];
  const Device device{DeviceType::kCuda, 0};
  const TensorSymbol table("table", DType::kF32, 2), doc("doc", DType::kI32, 2);
  const Tensor biases = Tensor::contiguous(elements, DType::kF32, {8, 32}, device);
  std::vector<TensorBinding> tensors = {
      {"table", biases, {}},
      {"doc", Tensor::contiguous(elements, DType::kI32, {2, 1024}, device), {}}};
  Options scores, masks;
  scores.score_mod =
      parse_expression("tanh(score / 30) * 30 + table[h, t5_bucket(delta, 32, 128)]", {table});
  masks.mask_mod = parse_expression("doc[b, q] == doc[b, k] && delta > -300", {doc});
  std::vector<Problem> problems;
  for (const int64_t d : {64, 128, 192}) {
    for (Problem p : {forward_problem({.d = d}), forward_problem({.d = d, .mask = causal()}),
                      forward_problem({.d = d,
                      .mask = window(100, 20),
                      .packed = true,
                      .seqused_q = true,
                      .seqused = true,
                      .sinks = true}),
                      forward_problem({.d = d, .mask = chunked(300, causal()), .softcap = 9}),
                      forward_problem({.d = d, .dropout = 0.1}), backward_problem({.d = d}),
                      forward_problem({.sq = 1, .sk = 8192, .d = d})}) {
      const expression::Caller caller{device, p.pass == Pass::kBackward};
      tensors[0].grad = caller.backward ? biases : Tensor{};
      p.expressions = expression::Expressions(scores, std::span(tensors).first(1), caller);
      problems.push_back(p);
      p.expressions = expression::Expressions(masks, std::span(tensors).last(1), caller);
      problems.push_back(p);
    }
  }
  expect_clean(candidates_on({"sm_75", "sm_80", "sm_120", "sm_90a"}, problems), 6,
               kFewSpilledBytes);
}

// Decoding over caches of codes.
TEST_F(Compile, KernelsOfCodesAreClean) {
  static float scale = 1;
  const Device device{DeviceType::kCuda, 0};
  std::vector<Problem> problems;
  for (const DType codes :
       {DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt4, DType::kQ8_0, DType::kQ4_0}) {
    for (const int64_t d : {64, 128}) {
      for (const int64_t groups : {0, 1, 2}) {  // no scales, of tokens, of halves of their columns
        if (groups > 0 && codes > DType::kInt4) continue;
        // Of 64 sequences, heads of some formats come together. Warps convert codes of many
        // queries.
        for (const auto& [batch, sq] :
             {std::pair<int64_t, int64_t>{2, 1}, {64, 1}, {2, 8}, {2, 16}, {2, 64}}) {
          const int64_t hk = batch == 2 ? 2 : 8;
          test::ForwardCall call = test::forward_call(
              {.batch = batch, .sq = sq, .sk = 8192, .hq = 4 * hk, .hk = hk, .d = d});
          for (ConstTensor* t : {&call.args.k, &call.args.v})
            *t = Tensor::contiguous(nullptr, codes, {batch, 8192, hk, d}, device);
          if (groups > 0) {
            call.args.descales.k_descale = call.args.descales.v_descale =
                Tensor::contiguous(&scale, DType::kF16, {batch, 8192, hk, groups}, device);
          }
          for (const bool invariant : {false, true}) {
            call.options.invariant = invariant;
            problems.push_back(make_problem(call.args, call.options));
          }
          call.options.invariant = false;
          call.args.q.dtype = DType::kE4M3;  // out stays what it is
          problems.push_back(make_problem(call.args, call.options));
        }
      }
    }
  }
  expect_clean(candidates_on({"sm_75", "sm_80", "sm_86", "sm_120", "sm_90a"}, problems), 6,
               kSpilledBytesOutsideOfLoops);
}

// No kernel without tiles (append, merge and others) spills, on every device that runs it, or has
// warnings as PTX.
TEST_F(Compile, KernelsOfNoTileAreClean) {
  constexpr size_t kSample = 20;
  constexpr std::array kTargets = {"sm_75",  "sm_80",  "sm_86",  "sm_89",
                                   "sm_90a", "sm_100", "sm_120", "compute_75"};
  std::vector<KernelUse> kernels = {padding_kernel(), copy_kernel(), mma_rate_kernel()};
  for (const CallKernel kernel :
       {CallKernel::kAppendF16, CallKernel::kAppendBF16, CallKernel::kAppendF32,
        CallKernel::kQuantizeF16, CallKernel::kQuantizeBF16, CallKernel::kQuantizeF32,
        CallKernel::kMerge, CallKernel::kUpload, CallKernel::kDivide, CallKernel::kMeasureBF16,
        CallKernel::kNumbersF16, CallKernel::kHadamardBF16, CallKernel::kMeansBF16,
        CallKernel::kAddMeansBF16, CallKernel::kFit}) {
    kernels.push_back(use_of(kernel));
  }
  for (const DType q : {DType::kBF16, DType::kF32}) {
    const DType all[] = {
        q, DType::kE4M3, DType::kE5M2, DType::kInt8, DType::kInt4, DType::kQ8_0, DType::kQ4_0};
    for (size_t i = 1; i < std::size(all); ++i) {
      kernels.push_back(convert_kernel({q, all[i], all[i], q}));
      kernels.push_back(convert_kernel({q, all[i], all[i - 1], q}));
    }
  }
  for (const size_t i : sample_of(kernels.size() * kTargets.size(), kSample)) {
    const KernelRequest& request = kernels[i / kTargets.size()].request;
    const Target target =
        target_called(kTargets[i % kTargets.size()], "target", nvrtc_capabilities());
    const Cubin cubin = compile(request, target);
    EXPECT_EQ(cubin.log.find("warning"), std::string::npos) << target.name() << cubin.log;
    if (target.form == Target::Form::kPtx) {
      EXPECT_NE(cubin.image.find(".target sm_75"), std::string::npos) << name(request);
    } else {
      EXPECT_EQ(defect_of(cubin), "") << target.name() << name(request) << cubin.log;
    }
  }
}

/// Compiles a text for Hopper, as kernels are.
Cubin compile_text(const std::string& text, const std::string& header) {
  KernelSources sources = embedded_sources();
  sources["text.cu"] = text;
  const std::vector<std::string> options = {"--gpu-architecture=" + kTarget.name(), "--std=c++20",
                                            "--modify-stack-limit=false", "--ptxas-options=-v"};
  return nvrtc_compile(sources, "text.cu", header, options);
}

// Products with every transposition and place of A that the kernels need.
TEST_F(Compile, EveryProduct) {
  const auto registers = [](const char* b) {
    return fmt::format("multiply<{}>(D, A, b, keep);\n", b);
  };
  const auto shared = [](const char* a, const char* b) {
    return fmt::format("multiply<{}, {}>(D, a, b, keep);\n", a, b);
  };
  const std::string products[] = {registers("kAlongK"),          registers("kAcrossK"),
                                  shared("kAlongK", "kAlongK"),  shared("kAlongK", "kAcrossK"),
                                  shared("kAcrossK", "kAlongK"), shared("kAcrossK", "kAcrossK")};
  std::set<std::string> images;
  for (const char* type : {"kBF16", "kF16"}) {
    for (const std::string& product : products) {
      const std::string text =
          "#include \"device/warp.cuh\"\n#include \"sm90/ptx/wgmma.cuh\"\n"
          "extern \"C\" __global__ void __launch_bounds__(128)\n"
          "    product(float* out, u32 a, u32 b, int keep) {\n"
          "  float D[32];\n"
          "  u32 A[4] = {a, a + 1, a + 2, a + 3};\n"
          "  for (float& d : D) d = 1;\n"
          "  register_fence(D);\n"
          "  wgmma_fence();\n" +
          fmt::format("  Wgmma<64, {}>::", type) + product +
          "  wgmma_commit();\n"
          "  wgmma_wait<0>();\n"
          "  register_fence(D);\n"
          "  for (int i = 0; i < 32; ++i) out[128 * i + threadIdx.x] = D[i];\n"
          "}\n";
      const Cubin cubin = compile_text(text, "");
      EXPECT_EQ(complaint(cubin.log), "") << product << cubin.log;
      EXPECT_TRUE(images.insert(cubin.image).second) << product << " is as one before it";
    }
  }
}

// The mask of dropout as a kernel computes it.
TEST_F(Compile, DropoutOnTheDevice) {
  const std::string text =
      "#include \"host_device/dropout.h\"\n"
      "extern \"C\" __global__ void dropout(const u64* rng_state, u32 threshold, u32* out) {\n"
      "  const DropoutMask mask = dropout_mask(threshold, rng_state[0], rng_state[1]);\n"
      "  const PhiloxWords words = mask.words(blockIdx.x, blockIdx.y, 4 * threadIdx.x);\n"
      "  for (int i = 0; i < kDropoutKeys; ++i)\n"
      "    out[4 * threadIdx.x + i] = words[i] >= mask.threshold;\n"
      "}\n";
  const Cubin cubin = compile_text(text, "");
  EXPECT_EQ(complaint(cubin.log), "") << cubin.log;
}

TEST_F(Compile, ColdAndWarmTimes) {
  const KernelRequest request = some_kernel(128);
  std::string folder = (fs::temp_directory_path() / "fulgur_times_XXXXXX").string();
  CubinCache cache{fs::path(mkdtemp(folder.data()))};
  const auto seconds = [&] {
    const auto start = std::chrono::steady_clock::now();
    cache.get(cache_key(request, kTarget), [&] { return compile(request, kTarget); });
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  const double cold = seconds(), warm = seconds();
  fmt::print("cold {:.3f} s, warm {:.2f} ms\n", cold, 1e3 * warm);
  EXPECT_LT(warm, 0.02);
  EXPECT_LT(warm, cold);
  fs::remove_all(folder);
}

TEST_F(Compile, FailureCarriesTheLogAndKeepsNothing) {
  std::string folder = (fs::temp_directory_path() / "fulgur_broken_XXXXXX").string();
  CubinCache cache{fs::path(mkdtemp(folder.data()))};
  KernelRequest request = some_kernel(64);
  request.kernel_config += "int broken = undeclared_name;\n";
  const auto get = [&] {
    cache.get(cache_key(request, kTarget), [&] { return compile(request, kTarget); });
  };
  EXPECT_EQ(test::status_of(get), Status::kInternal);
  const std::string message = test::message_of(get);
  EXPECT_NE(message.find("undeclared_name"), std::string::npos) << message;
  EXPECT_NE(message.find("sm90/forward/forward.cu"), std::string::npos) << message;
  EXPECT_TRUE(fs::is_empty(folder));
  fs::remove_all(folder);
}

TEST_F(Compile, KeyDependsOnAllThatMatters) {
  const KernelRequest base = some_kernel(64);
  KernelRequest plan = base, source = base;
  plan.kernel_config += "\n";
  source.source = "common/padding.cu";
  std::set<std::string> keys;
  for (const auto& request : {base, plan, source}) keys.insert(cache_key(request, kTarget));
  for (const auto form : {Target::Form::kCubin, Target::Form::kPtx})
    keys.insert(cache_key(base, {90, form}));
  keys.insert(cache_key(base, {100, Target::Form::kSpecific}));
  EXPECT_EQ(keys.size(), 6u);
  EXPECT_EQ(cache_key(base, kTarget), cache_key(KernelRequest(base), kTarget));
  KernelSources sources = embedded_sources();
  const std::string before = digest(sources);
  sources.begin()->second += " ";
  EXPECT_NE(digest(sources), before);
}

TEST(Sources, EmbeddedTextIsThatOfTheFiles) {
  const KernelSources sources = embedded_sources();
  size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(FULGUR_KERNELS)) {
    if (!entry.is_regular_file() || entry.path().filename() == ".clang-format") continue;
    ++files;
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string text(std::istreambuf_iterator<char>(file), {});
    EXPECT_EQ(sources.at(fs::relative(entry.path(), FULGUR_KERNELS)), text) << entry.path();
  }
  EXPECT_EQ(sources.size(), files);
}

TEST(Sources, ReportsNameThemByTheSameHash) {
  FILE* pipe = popen("python3 " FULGUR_TOOLS "/kernel_hash.py", "r");
  ASSERT_NE(pipe, nullptr);
  char line[128] = {};
  EXPECT_NE(std::fgets(line, sizeof(line), pipe), nullptr);
  EXPECT_EQ(pclose(pipe), 0);
  EXPECT_EQ(line, digest(embedded_sources()) + "\n");
}

TEST_F(Compile, PrewarmFillsAFolder) {
  std::string folder = (fs::temp_directory_path() / "fulgur_prewarm_XXXXXX").string();
  folder = mkdtemp(folder.data());
  const test::ForwardCall call = test::forward_call({.d = 16, .invariant = true});
  const Prewarmed first = prewarm(call.args, call.options, folder);
  EXPECT_GT(first.compiled, 0);
  EXPECT_EQ(first.present, 0);
  const Prewarmed again = prewarm(call.args, call.options, folder);
  EXPECT_EQ(again.compiled, 0);
  EXPECT_EQ(again.present, first.compiled);
  const test::ForwardCall wide = test::forward_call({.d = 320, .invariant = true});
  EXPECT_EQ(test::status_of([&] { prewarm(wide.args, wide.options, folder); }),
            Status::kUnsupported);
  EXPECT_EQ(test::status_of([&] { prewarm(call.args, call.options, "/dev/null/x"); }),
            Status::kUnavailable);
  fs::remove_all(folder);
}

}  // namespace
}  // namespace fulgur::cuda

// Measures every candidate of decode calls (src/cuda/decode/candidates.h), with which
// notes/decode_cost.md compares the cost model (decode_cost.h). `decode_candidates_bench compile`
// compiles their kernels into the cache, on any machine; `decode_candidates_bench SECONDS SEED
// FILE` measures calls drawn at random from a grid, on a GPU, and writes a line of JSON for each.
#include <dlfcn.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "call/make_problem.h"
#include "cuda/decode/candidates.h"
#include "cuda/decode/family.h"
#include "cuda/device/gpu.h"
#include "cuda/driver/driver.h"
#include "cuda/engine/devices.h"
#include "cuda/jit/compile.h"
#include "cuda/sm90/common.h"
#include "cuda/sm90/families.h"

namespace fulgur::cuda {
namespace {

using decode::DecodeCandidate;
using decode::DecodePlan;

constexpr int64_t kColdBytes = 120'000'000;  // of the copies of a cache: more than any L2
constexpr int64_t kMaxBytes = 3'000'000'000;
constexpr int64_t kPool = 8'000'000'000;
constexpr int kRounds = 5;

enum Lengths { kAlike, kSpread, kOneLong };

struct Cell {
  int64_t batch, keys, hk, group, queries, d, page;
  Lengths lengths;

  int64_t key_bytes() const { return batch * keys * hk * d * 2; }  // of K

  std::vector<int> used() const {
    std::mt19937 random(7);
    std::vector<int> n(static_cast<size_t>(batch), static_cast<int>(keys));
    for (size_t i = 1; i < n.size(); ++i) {
      if (lengths == kSpread) n[i] = static_cast<int>(keys / 16 + random() % (keys - keys / 16));
      if (lengths == kOneLong) n[i] = static_cast<int>(std::max<int64_t>(keys / 64, 100));
    }
    return n;
  }
};

std::vector<Cell> grid() {
  struct Kernels {
    int64_t group, queries, d, page;
  };
  std::vector<Kernels> kernels;
  const auto add = [&](int64_t d, int64_t page,
                       std::initializer_list<std::pair<int64_t, int64_t>> rows) {
    for (const auto& [group, queries] : rows) kernels.push_back({group, queries, d, page});
  };
  add(128, 0, {{1, 1}, {4, 1}, {8, 1}, {4, 4}, {8, 4}, {4, 16}, {8, 16}});
  add(128, 16, {{4, 1}, {8, 1}, {4, 4}, {8, 16}});
  add(128, 64, {{1, 1}, {4, 1}, {8, 4}, {4, 16}});
  add(64, 0, {{1, 1}, {8, 1}, {8, 4}, {8, 16}});
  add(64, 64, {{4, 1}, {4, 4}, {4, 16}});
  add(256, 0, {{4, 1}, {8, 4}, {8, 16}});
  add(256, 64, {{1, 1}, {8, 1}, {4, 16}});
  std::vector<Cell> cells;
  for (const auto& [group, queries, d, page] : kernels) {
    for (const int64_t batch : {1, 2, 4, 6, 8, 12, 16, 17, 24, 32, 48, 64, 128, 256}) {
      for (const int64_t hk : {1, 2, 4, 8}) {
        for (const int64_t keys : {256, 512, 1024, 2048, 4096, 8192, 32768, 131072}) {
          for (const Lengths lengths : {kAlike, kAlike, kSpread, kOneLong}) {  // half of them alike
            const Cell cell{batch, keys, hk, group, queries, d, page, lengths};
            if (2 * cell.key_bytes() > kMaxBytes || (batch == 1 && lengths != kAlike)) continue;
            if (lengths != kAlike && keys < 1024) continue;
            cells.push_back(cell);
          }
        }
      }
    }
  }
  return cells;
}

/// The call of a cell, with data where it has some.
struct Data {
  char *k = nullptr, *v = nullptr, *q = nullptr, *out = nullptr, *used = nullptr, *table = nullptr;
};

ForwardArgs arguments(const Cell& c, const Data& data) {
  constexpr Device kDevice{DeviceType::kCuda, 0};
  static int anything = 0;
  const auto at = [](char* given) {
    return given == nullptr ? static_cast<void*>(&anything) : given;
  };
  const auto tensor = [&](char* given, std::initializer_list<int64_t> shape,
                          DType dtype = DType::kBF16) {
    return Tensor::contiguous(at(given), dtype, shape, kDevice);
  };
  ForwardArgs args;
  args.q = tensor(data.q, {c.batch, c.queries, c.hk * c.group, c.d});
  args.out = tensor(data.out, {c.batch, c.queries, c.hk * c.group, c.d});
  const int64_t blocks = c.page > 0 ? c.batch * c.keys / c.page : c.batch;
  const int64_t rows = c.page > 0 ? c.page : c.keys;
  args.k = tensor(data.k, {blocks, rows, c.hk, c.d});
  args.v = tensor(data.v, {blocks, rows, c.hk, c.d});
  args.lengths.seqused_k = tensor(data.used, {c.batch}, DType::kI32);
  if (c.page > 0)
    args.cache.page_table = tensor(data.table, {c.batch, c.keys / c.page}, DType::kI32);
  return args;
}

Problem problem_of(const Cell& c) {
  Options options;
  options.mask = causal();
  return make_problem(arguments(c, {}), options);
}

void compile_all() {
  std::map<std::string, KernelRequest> requests;
  for (const Cell& cell : grid()) {
    const Problem p = problem_of(cell);
    for (const DecodePlan& plan : decode::decode_plans(p, {}))
      for (const KernelUse& use : decode::decode_kernels(plan))
        requests.emplace(use.request.kernel_config + use.request.source, use.request);
  }
  std::vector<KernelRequest> all;
  for (const auto& [key, request] : requests) all.push_back(request);
  std::shuffle(all.begin(), all.end(), std::mt19937(1));
  fmt::print("{} kernels\n", all.size());
  parallel_for(static_cast<int64_t>(all.size()), 0,
               [&](int64_t i) { cached(all[static_cast<size_t>(i)], sm90::kTarget); });
}

template <class... Args>
void call_driver(const char* name, Args... args) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW);
  auto* function = reinterpret_cast<int (*)(Args...)>(dlsym(library, name));
  if (function == nullptr || function(args...) != 0)
    throw std::runtime_error(std::string(name) + " failed");
}

char* allocate(int64_t bytes) {
  CUdeviceptr data = 0;
  check(driver().cuMemAlloc(&data, static_cast<size_t>(bytes)), "cuMemAlloc");
  return reinterpret_cast<char*>(data);
}

void copy(void* to, const void* from, int64_t bytes) {
  check(driver().cuMemcpy(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from),
                          static_cast<size_t>(bytes)),
        "cuMemcpy");
}

/// Numbers of about 1 in bf16, all over a pool.
char* random_pool() {
  constexpr int64_t kBlock = 64 << 20;
  std::vector<uint16_t> block(kBlock / 2);
  std::mt19937 random(3);
  for (uint16_t& x : block) {
    const uint32_t bits = random();
    x = static_cast<uint16_t>((bits & 1) << 15 | (122 + (bits >> 1 & 3) + (bits >> 3 & 1)) << 7 |
                              (bits >> 8 & 127));
  }
  char* const pool = allocate(kPool + kBlock);
  copy(pool, block.data(), kBlock);
  for (int64_t at = kBlock; at < kPool; at += kBlock) copy(pool + at, pool, kBlock);
  return pool;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  return values[values.size() / 2];
}

class Measuring {
 public:
  Measuring() : gpu_(Gpu::at(0)), current_(gpu_.context()) {
    pool_ = random_pool();
    q_ = allocate(1 << 27);
    copy(q_, pool_ + 12345 * 2, 1 << 27);
    out_ = allocate(1 << 27);
    used_ = allocate(1 << 16);
    table_ = allocate(1 << 24);
    check(driver().cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    check(driver().cuEventCreate(&start_, 0), "cuEventCreate");
    check(driver().cuEventCreate(&end_, 0), "cuEventCreate");
  }

  /// A line of JSON.
  std::string measure(const Cell& c) {
    const Card card = card_of(gpu_);
    const Problem p = problem_of(c);
    const std::vector<int> used = c.used();
    copy(used_, used.data(), c.batch * 4);
    if (c.page > 0) {
      std::vector<int> table(static_cast<size_t>(c.batch * c.keys / c.page));
      for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int>(i);
      std::shuffle(table.begin(), table.end(), std::mt19937(5));
      copy(table_, table.data(), static_cast<int64_t>(table.size()) * 4);
    }
    double live = 0;
    for (const int n : used) live += n;
    live *= static_cast<double>(4 * c.hk * c.d);
    // Copies of K and V, each at an offset of its own.
    const int64_t bytes = (2 * c.key_bytes() + 255) / 256 * 256;
    const int copies =
        static_cast<int>(std::clamp<int64_t>(static_cast<int64_t>(std::ceil(kColdBytes / live)), 1,
                                             std::min<int64_t>(24, kPool / bytes)));
    const double guess = 8 + live / 2.5e6;  // us
    const int launches = std::max({2, static_cast<int>(std::min(24.0, std::ceil(500 / guess)))});
    std::vector<ForwardArgs> calls;
    for (int i = 0; i < launches; ++i) {
      char* const at = pool_ + i % copies * bytes;
      calls.push_back(
          arguments(c, {at, at + c.key_bytes(), q_, out_, used_, c.page > 0 ? table_ : nullptr}));
    }
    const DecodePlan chosen = decode::decode_candidate(p, card).plan;
    const std::vector<DecodePlan> plans = decode::decode_plans(p, card);
    std::vector<std::unique_ptr<const Executable>> executables;
    std::vector<void*> graphs;
    std::vector<std::vector<uint16_t>> outs;
    const int64_t out_elements =
        std::min<int64_t>(c.batch * c.queries * c.hk * c.group * c.d, 1 << 18);
    for (const DecodePlan& plan : plans) {
      executables.push_back(DecodeCandidate(p, {plan, 0, {}}).executable(gpu_, {}));
      const Executable& executable = *executables.back();
      Run run;
      run.stream = stream_;
      check(driver().cuMemsetD8Async(
                reinterpret_cast<CUdeviceptr>(out_), 0xff,
                static_cast<size_t>(c.batch * c.queries * c.hk * c.group * c.d * 2), stream_),
            "cuMemsetD8Async");
      executable.run(&calls[0], run);
      check(driver().cuStreamSynchronize(stream_), "running a candidate");
      outs.emplace_back(static_cast<size_t>(out_elements));
      copy(outs.back().data(), out_, out_elements * 2);
      void *graph = nullptr, *instance = nullptr;
      call_driver("cuStreamBeginCapture_v2", stream_, 2);
      for (const ForwardArgs& call : calls) executable.run(&call, run);
      call_driver("cuStreamEndCapture", stream_, &graph);
      call_driver("cuGraphInstantiateWithFlags", &instance, graph, 0ull);
      call_driver("cuGraphDestroy", graph);
      graphs.push_back(instance);
    }
    std::vector<std::vector<double>> times(plans.size());
    for (int round = -1; round < kRounds; ++round) {
      for (size_t i = 0; i < plans.size(); ++i) {
        check(driver().cuEventRecord(start_, stream_), "cuEventRecord");
        call_driver("cuGraphLaunch", graphs[i], stream_);
        check(driver().cuEventRecord(end_, stream_), "cuEventRecord");
        check(driver().cuEventSynchronize(end_), "cuEventSynchronize");
        float ms = 0;
        check(driver().cuEventElapsedTime(&ms, start_, end_), "cuEventElapsedTime");
        if (round >= 0) times[i].push_back(1e3 * ms / launches);
      }
    }
    for (void* graph : graphs) call_driver("cuGraphExecDestroy", graph);
    std::vector<std::string> results;
    for (size_t i = 0; i < plans.size(); ++i) {
      const DecodePlan& plan = plans[i];
      results.push_back(fmt::format(
          R"({{"warps":{},"residents":{},"Bc":{},"schedule":{},"us":{:.3f},"cycles":{:.0f},"chosen":{},"off":{:.2g}}})",
          plan.warps_per_group, plan.residents, plan.block_keys, static_cast<int>(plan.schedule),
          median(times[i]), plan.expected_cycles, plan == chosen ? 1 : 0,
          difference(outs[i], outs[0])));
    }
    return fmt::format(
        R"({{"batch":{},"keys":{},"hk":{},"group":{},"queries":{},"d":{},"page":{},"lengths":{},"live":{},"card":"{}","plans":[{}]}})",
        c.batch, c.keys, c.hk, c.group, c.queries, c.d, c.page, static_cast<int>(c.lengths), live,
        gpu_.name(), fmt::join(results, ","));
  }

 private:
  static double difference(const std::vector<uint16_t>& x, const std::vector<uint16_t>& y) {
    const auto value = [](uint16_t bits) {
      const uint32_t wide = uint32_t{bits} << 16;
      float f;
      static_assert(sizeof(f) == sizeof(wide));
      __builtin_memcpy(&f, &wide, 4);
      return static_cast<double>(f);
    };
    double off = 0, norm = 0;
    for (size_t i = 0; i < x.size(); ++i) {
      off += std::pow(value(x[i]) - value(y[i]), 2);
      norm += std::pow(value(y[i]), 2);
    }
    const double ratio = std::sqrt(off / norm);
    return std::isfinite(ratio) ? ratio : 9e9;
  }

  Gpu& gpu_;
  CurrentContext current_;
  char *pool_, *q_, *out_, *used_, *table_;
  CUstream stream_ = nullptr;
  CUevent start_ = nullptr, end_ = nullptr;
};

}  // namespace
}  // namespace fulgur::cuda

int main(int argc, char** argv) {
  using namespace fulgur::cuda;
  if (argc == 2 && argv[1] == std::string("compile")) {
    compile_all();
    return 0;
  }
  if (argc != 4) return 2;
  const auto start = std::chrono::steady_clock::now();
  const auto seconds = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  };
  std::vector<Cell> cells = grid();
  std::shuffle(cells.begin(), cells.end(), std::mt19937(static_cast<unsigned>(atoi(argv[2]))));
  Measuring measuring;
  fmt::print("ready after {:.1f} s\n", seconds());
  std::ofstream file(argv[3]);
  int done = 0;
  for (const Cell& cell : cells) {
    if (seconds() > atof(argv[1])) break;
    file << measuring.measure(cell) << std::endl;
    ++done;
  }
  fmt::print("{} of {} cells in {:.1f} s\n", done, cells.size(), seconds());
}

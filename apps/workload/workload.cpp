#include "workload/workload.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <set>
#include <sstream>

#include "fulgur/cuda.h"
#include "fulgur/error.h"

namespace fulgur::bench {
namespace {

bool is_quick(const std::string& grid) {
  if (grid == "quick" || grid == "standard") return grid == "quick";
  throw Error(Status::kInvalidArgument, "grid: got '" + grid + "', want quick or standard");
}

Case attention(const char* pass, DType dtype, int64_t n, int64_t d, bool causal, int threads,
               int64_t heads = 2) {
  return {pass, dtype, 1, n, n, heads, heads, d, causal, threads};
}

Case decode(DType dtype, int64_t group, int threads) {
  return {"decode", dtype, 2, 1, 16384, 4 * group, 4, 128, false, threads};
}

Case cuda_attention(const char* pass, int64_t n, int64_t d, bool causal, Device device) {
  constexpr int64_t kRows = 16384, kWidth = 2048;
  const int64_t heads = kWidth / d;
  return {pass, DType::kBF16, kRows / n, n, n, heads, heads, d, causal, 1, device};
}

Case cuda_decode(int64_t batch, int64_t group, Device device) {
  return {"decode", DType::kBF16, batch, 1, 8192, 8 * group, 8, 128, false, 1, device};
}

uint32_t next(uint32_t& state) {  // xorshift32
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

uint16_t cut_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x * 0x1p-112f);  // with the exponents of f16
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | (bits & 0x7fffffff) >> 13);
}

/// `count` normal-like numbers.
std::vector<uint16_t> random_elements(DType dtype, int64_t count, uint32_t seed) {
  std::vector<uint16_t> elements(count * size_of(dtype) / sizeof(uint16_t));
  uint32_t state = seed * 2654435769u;
  for (int64_t i = 0; i < count; ++i) {
    // The sum of four uniforms: mean 0, variance 1 up to the factor.
    float x = 0;
    for (int u = 0; u < 4; ++u) x += static_cast<float>(next(state) >> 8) * 0x1p-24f - 0.5f;
    x *= 1.7320508f;
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    // bf16 is the upper half of an f32; rounding does not matter here.
    const auto upper = static_cast<uint16_t>(bits >> 16);
    if (dtype == DType::kF32) elements[2 * i] = static_cast<uint16_t>(bits);
    elements[dtype == DType::kF32 ? 2 * i + 1 : i] = dtype == DType::kF16 ? cut_to_f16(x) : upper;
  }
  return elements;
}

/// The numbers from 0 to `count` - 1 in a random order.
std::vector<int32_t> shuffled(int64_t count) {
  std::vector<int32_t> numbers(static_cast<size_t>(count));
  uint32_t state = 1;
  for (size_t i = 0; i < numbers.size(); ++i) {
    const size_t other = next(state) % (i + 1);
    numbers[i] = numbers[other];
    numbers[other] = static_cast<int32_t>(i);
  }
  return numbers;
}

/// The pages of each sequence, in a random order; so many first ones are those of the first.
std::vector<int32_t> page_table(int64_t batch, int64_t pages, int64_t shared) {
  const std::vector<int32_t> ids = shuffled(batch * pages - (batch - 1) * shared);
  std::vector<int32_t> table;
  for (int64_t b = 0, next = 0; b < batch; ++b) {
    for (int64_t j = 0; j < pages; ++j) {
      table.push_back(b > 0 && j < shared ? table[static_cast<size_t>(j)]
                                          : ids[static_cast<size_t>(next++)]);
    }
  }
  return table;
}

/// Memory that the system says can be had, and of the machine, in bytes.
struct HostMemory {
  int64_t available = 0, total = 0;

  HostMemory() {
    std::ifstream file("/proc/meminfo");
    int64_t kilobytes = 0;
    for (std::string name, unit; file >> name >> kilobytes && std::getline(file, unit);) {
      if (name == "MemTotal:") total = kilobytes * 1024;
      if (name == "MemAvailable:") available = kilobytes * 1024;
    }
  }
};

std::shared_ptr<void> allocated(int64_t bytes, Device device) {
  if (device.type == DeviceType::kCpu) {
    constexpr std::align_val_t kAlign{64};
    // What the system promises beyond that, it may take back by ending the process.
    const HostMemory memory;
    void* const data = bytes > memory.available - memory.total / 4
                           ? nullptr
                           : ::operator new(static_cast<size_t>(bytes), kAlign, std::nothrow);
    if (data == nullptr) throw Error(Status::kOutOfMemory, fmt::format("{} bytes on cpu", bytes));
    return {data, [](void* block) { ::operator delete(block, kAlign); }};
  }
  const auto take = [device](int64_t size) {
    return std::shared_ptr<void>(cuda::allocate(size, device.index), [device](void* data) {
      try {
        cuda::deallocate(data, device.index);
      } catch (const Error&) {
        // The failure that leads here has been reported; the process is about to end.
      }
    });
  };
  // The probe and the engine take memory, too.
  const std::shared_ptr<void> spare = take(int64_t{2} << 30);
  return take(bytes);
}

/// The workspace of all workloads of a GPU, whose runs follow each other: that of the one that
/// wants most. Without it the engine would keep one for each size that it ever had.
class SharedWorkspace {
 public:
  explicit SharedWorkspace(Device device) : device_(device) {}

  static SharedWorkspace& of(Device device) {
    static auto& all = *new std::map<int, SharedWorkspace>;
    return all.try_emplace(device.index, device).first->second;
  }

  void reserve(const WorkspaceNeed& need) {
    if (kZeroed + need.bytes <= bytes_) return;
    cuda::synchronize(device_.index);
    memory_ = allocated(kZeroed + need.bytes, device_);
    bytes_ = kZeroed + need.bytes;
    const std::vector<char> zeros(kZeroed);
    cuda::copy(memory_.get(), zeros.data(), kZeroed, device_.index);
  }

  /// Those that want no zeros leave the first bytes alone.
  Workspace of(const WorkspaceNeed& need) const {
    const int64_t begin = need.zeroed_bytes > 0 ? 0 : kZeroed;
    return {static_cast<char*>(memory_.get()) + begin, need.bytes};
  }

 private:
  static constexpr int64_t kZeroed = 1 << 16;

  Device device_;
  std::shared_ptr<void> memory_;
  int64_t bytes_ = 0;
};

}  // namespace

std::string Case::name() const {
  const std::string where =
      device.type == DeviceType::kCpu ? fmt::format("threads:{}", threads) : name_of(device);
  if (pass == "decode") {
    return fmt::format("decode/{}/batch:{}/keys:{}/hq:{}/hk:{}/d:{}/tokens:{}/{}/{}/{}/{}",
                       name_of(dtype), batch, sk, hq, hk, d, sq,
                       page == 0 ? "page:none" : fmt::format("page:{}", page),
                       prefix == 0 ? "prefix:none" : fmt::format("prefix:{}", prefix),
                       uneven ? "uneven" : "even", where);
  }
  return fmt::format("{}/{}/n:{}/hq:{}/d:{}/{}{}{}/{}", pass, name_of(dtype), sk, hq, d,
                     causal ? "causal" : "full", algorithm.empty() ? "" : "/", algorithm, where);
}

double Case::bytes() const {
  int64_t rows = 2 * batch * sq * hq;
  for (int64_t b = 0; b < batch; ++b) rows += 2 * (keys(b) - (b > 0 ? prefix : 0)) * hk;
  return static_cast<double>(rows * d * size_of(dtype));
}

std::vector<Case> cpu_grid(const std::string& name, int threads) {
  const bool quick = is_quick(name);
  const std::vector<int64_t> lengths =
      quick ? std::vector<int64_t>{1024, 2048} : std::vector<int64_t>{1024, 2048, 4096, 8192};
  const std::vector<int> counts = threads > 1 ? std::vector<int>{1, threads} : std::vector<int>{1};
  std::vector<Case> cases;
  for (const char* pass : {"forward", "backward"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const int64_t d : {64, 128}) {
        for (const int64_t n : lengths) {
          for (const int t : counts) cases.push_back(attention(pass, dtype, n, d, false, t));
        }
      }
    }
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool causal : {false, true}) {
      if (quick || causal) cases.push_back(attention("forward", dtype, 8192, 64, causal, threads));
    }
  }
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t group : {4, 8}) cases.push_back(decode(dtype, group, threads));
  }
  if (quick) return cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t heads : {1, 4, 16}) {
      for (const int64_t n : {128, 256, 512}) {
        for (const int t : counts)
          cases.push_back(attention("forward", dtype, n, 64, false, t, heads));
      }
    }
  }
  return cases;
}

std::vector<Case> cache_grid(int threads) {
  std::vector<Case> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t group : {1, 4}) {
      for (const int64_t page : {0, 1, 16, 64, 256}) {
        Case c = decode(dtype, group, threads);
        c.batch = 3;  // in no grid of contiguous keys
        c.page = page;
        cases.push_back(c);
      }
    }
  }
  return cases;
}

std::vector<Case> cuda_grid(const std::string& name, Device device) {
  const bool quick = is_quick(name);
  const std::vector<int64_t> lengths =
      quick ? std::vector<int64_t>{4096} : std::vector<int64_t>{1024, 2048, 4096, 8192, 16384};
  std::vector<Case> cases;
  for (const char* pass : {"forward", "backward"}) {
    for (const int64_t d : {64, 128, 256}) {
      for (const int64_t n : lengths) {
        for (const bool causal : {false, true}) {
          cases.push_back(cuda_attention(pass, n, d, causal, device));
        }
      }
    }
  }
  for (const int64_t batch : {1, 16}) {
    for (const int64_t group : {4, 8}) {
      if (!quick || (batch == 16 && group == 4)) cases.push_back(cuda_decode(batch, group, device));
    }
  }
  return cases;
}

std::vector<Case> paper_grid(const std::string& paper, Device device) {
  std::vector<std::string> algorithms = {"standard", "fa1"};
  if (paper != "fa1") algorithms.emplace_back("fa2");
  if (paper == "fa3") algorithms.emplace_back("fa3");
  std::vector<Case> cases;
  for (const int64_t d : {64, 128}) {
    for (const bool causal : {false, true}) {
      for (const std::string& algorithm : algorithms) {
        for (int64_t n = 512; n <= 16384; n *= 2) {
          for (const char* pass : {"forward", "backward"}) {
            cases.push_back(cuda_attention(pass, n, d, causal, device));
            cases.back().algorithm = algorithm;
          }
        }
      }
    }
  }
  return cases;
}

std::vector<Case> decode_grid(int threads, Device device) {
  struct Heads {
    int64_t hq, hk, d;
  };
  constexpr Heads kHeads[] = {{32, 8, 128}, {64, 8, 128}, {8, 1, 128}, {32, 32, 128},
                              {28, 4, 128}, {64, 8, 64},  {16, 8, 256}};
  std::vector<Case> cases;
  const auto add = [&](const Heads& heads, int64_t tokens, bool uneven, bool shared = false) {
    for (const int64_t batch : {1, 4, 8, 32, 64, 128}) {
      if ((uneven || shared) && batch == 1) continue;
      for (const int64_t keys : {1024, 4096, 8192, 32768}) {
        for (const int64_t page : {0, 16, 64, 256}) {
          if (shared && page == 0) continue;
          cases.push_back({"decode", DType::kBF16, batch, tokens, keys, heads.hq, heads.hk, heads.d,
                           tokens > 1, threads, device, page, uneven, shared ? keys / 4 * 3 : 0});
        }
      }
    }
  };
  for (const Heads& heads : kHeads) add(heads, 1, false);
  for (const int64_t tokens : {2, 4, 16}) add(kHeads[0], tokens, false);
  add(kHeads[0], 1, true);
  add(kHeads[0], 1, false, true);
  if (device.type == DeviceType::kCuda) return cases;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t group : {1, 4, 8, 16}) {
      for (const int64_t tokens : {1, 4}) {
        for (const int64_t batch : {1, 16}) {
          for (const int64_t keys : {4096, 16384, 65536}) {
            Case c = decode(dtype, group, threads);
            c.batch = batch;
            c.sq = tokens;
            c.sk = keys;
            c.causal = tokens > 1;
            cases.push_back(c);
          }
        }
      }
    }
  }
  return cases;
}

std::vector<Case> only(const std::vector<Case>& cases, const std::vector<std::string>& parts) {
  std::map<std::string, std::set<std::string>> wanted;  // by their kind
  for (const std::string& part : parts) wanted[part.substr(0, part.find(':'))].insert(part);
  std::set<std::string> there;
  std::vector<Case> chosen;
  for (const Case& c : cases) {
    std::istringstream name(c.name());
    std::set<std::string> of_case;
    for (std::string part; std::getline(name, part, '/');) of_case.insert(part);
    const bool all = std::all_of(wanted.begin(), wanted.end(), [&](const auto& kind) {
      return std::any_of(kind.second.begin(), kind.second.end(),
                         [&](const std::string& part) { return of_case.contains(part); });
    });
    if (all) chosen.push_back(c);
    there.merge(of_case);
  }
  for (const std::string& part : parts) {
    if (there.contains(part)) continue;
    throw Error(Status::kInvalidArgument,
                fmt::format("only: got {}, want parts of names of the grid: {}", part,
                            fmt::join(there, ", ")));
  }
  if (chosen.empty()) {
    throw Error(Status::kInvalidArgument,
                fmt::format("only: no shape of the grid is {}", fmt::join(parts, " and ")));
  }
  return chosen;
}

void* Workload::take(int64_t bytes) {
  return memory_.emplace_back(allocated(bytes, device_)).get();
}

void Workload::copy(void* to, const void* from, int64_t bytes) const {
  if (device_.type == DeviceType::kCpu) {
    std::memcpy(to, from, static_cast<size_t>(bytes));
  } else {
    cuda::copy(to, from, bytes, device_.index);
  }
}

Tensor Workload::filled(Tensor tensor) {
  constexpr int64_t kMaxRandom = 1 << 20;  // larger tensors repeat themselves
  const int64_t bytes = tensor.numel() * size_of(tensor.dtype);
  tensor.data = take(bytes);
  const std::vector<uint16_t> some = random_elements(
      tensor.dtype, std::min(tensor.numel(), kMaxRandom), static_cast<uint32_t>(memory_.size()));
  int64_t done = static_cast<int64_t>(some.size() * sizeof(uint16_t));
  copy(tensor.data, some.data(), done);
  while (done < bytes) {
    const int64_t more = std::min(done, bytes - done);
    copy(static_cast<char*>(tensor.data) + done, tensor.data, more);
    done += more;
  }
  return tensor;
}

ConstTensor Workload::filled(ConstTensor tensor, const std::vector<int32_t>& values) {
  if (!tensor.given()) return tensor;
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(int32_t));
  void* const data = take(bytes);
  copy(data, values.data(), bytes);
  tensor.data = data;
  return tensor;
}

Workload::Workload(const Case& c)
    : device_(c.device), backward_(c.pass == "backward"), plan_(nullptr) {
  const int64_t pages = c.page == 0 ? 0 : c.sk / c.page;  // of a sequence
  const int64_t shared = c.page == 0 ? 0 : c.prefix / c.page;
  const auto tensor = [&](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(nullptr, dtype, shape, c.device);
  };
  const Tensor q = tensor(c.dtype, {c.batch, c.sq, c.hq, c.d});
  const Tensor kv =
      c.page == 0 ? tensor(c.dtype, {c.batch, c.sk, c.hk, c.d})
                  : tensor(c.dtype, {c.batch * pages - (c.batch - 1) * shared, c.page, c.hk, c.d});
  const Tensor lse = tensor(DType::kF32, {c.batch, c.hq, c.sq});
  Options options;
  options.mask = c.causal ? causal() : full();
  options.threads = c.threads;
  options.engine = c.device.type == DeviceType::kCpu ? "cpu" : "cuda";
  options.algorithm = c.algorithm;
  forward_ = {q, kv, kv, q, lse};
  if (c.page > 0) forward_.cache.page_table = tensor(DType::kI32, {c.batch, pages});
  if (c.page > 0 || c.uneven) forward_.lengths.seqused_k = tensor(DType::kI32, {c.batch});
  if (c.prefix > 0) {
    forward_.shared_prefix.prefix_groups = tensor(DType::kI32, {2});
    forward_.shared_prefix.prefix_lens = tensor(DType::kI32, {1});
  }
  const auto timed_plan = [&](const auto& args) {
    const auto start = std::chrono::steady_clock::now();
    Plan made = plan(args, options);
    plan_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    return made;
  };
  const Plan forward_plan = timed_plan(forward_);
  plan_ = backward_ ? timed_plan(BackwardArgs{q, q, kv, kv, q, lse, q, kv, kv}) : forward_plan;
  const auto bytes_of = [](const Tensor& t) { return t.numel() * size_of(t.dtype); };
  extra_bytes_ =
      plan_.workspace().bytes + bytes_of(q) + (backward_ ? 2 * bytes_of(kv) : bytes_of(lse));
  const bool on_gpu = device_.type == DeviceType::kCuda;
  const WorkspaceNeed before = on_gpu ? forward_plan.workspace() : WorkspaceNeed{};
  need_ = on_gpu ? plan_.workspace() : WorkspaceNeed{};
  for (const WorkspaceNeed& need : {before, need_}) {
    if (need.bytes > 0) SharedWorkspace::of(device_).reserve(need);
  }
  forward_.q = filled(q);
  forward_.k = filled(kv);
  forward_.v = filled(kv);
  forward_.out = filled(q);
  forward_.lse = filled(lse);
  forward_.cache.page_table = filled(forward_.cache.page_table, page_table(c.batch, pages, shared));
  std::vector<int32_t> keys;
  for (int64_t b = 0; b < c.batch; ++b) keys.push_back(static_cast<int32_t>(c.keys(b)));
  forward_.lengths.seqused_k = filled(forward_.lengths.seqused_k, keys);
  forward_.shared_prefix.prefix_groups =
      filled(forward_.shared_prefix.prefix_groups, {0, static_cast<int32_t>(c.batch)});
  forward_.shared_prefix.prefix_lens =
      filled(forward_.shared_prefix.prefix_lens, {static_cast<int32_t>(c.prefix)});
  if (!backward_) return;
  forward_plan.run(forward_, run_with(before));
  backward_args_ = {filled(q),    forward_.q, forward_.k, forward_.v, forward_.out,
                    forward_.lse, filled(q),  filled(kv), filled(kv)};
}

Run Workload::run_with(const WorkspaceNeed& need) const {
  Run run;
  if (need.bytes > 0) run.workspace = SharedWorkspace::of(device_).of(need);
  return run;
}

void Workload::run() const {
  if (backward_) {
    plan_.run(backward_args_, run_with(need_));
  } else {
    plan_.run(forward_, run_with(need_));
  }
}

void Workload::wait() const {
  if (device_.type == DeviceType::kCuda) cuda::synchronize(device_.index);
}

}  // namespace fulgur::bench

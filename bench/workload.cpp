#include "bench/workload.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

#include "fulgur/cuda.h"
#include "fulgur/error.h"

namespace fulgur::bench {
namespace {

bool is_quick(const std::string& grid) {
  if (grid == "quick" || grid == "standard") return grid == "quick";
  throw Error(Status::kInvalidArgument, "grid: got '" + grid + "', want quick or standard");
}

Case attention(const char* pass, DType dtype, int64_t n, int64_t d, bool causal, int threads) {
  return {pass, dtype, 1, n, n, 2, 2, d, causal, threads};
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

/// `count` normal-like numbers.
std::vector<uint16_t> random_elements(DType dtype, int64_t count, uint32_t seed) {
  std::vector<uint16_t> elements(count * size_of(dtype) / sizeof(uint16_t));
  uint32_t state = seed * 2654435769u;
  for (int64_t i = 0; i < count; ++i) {
    // The sum of four uniforms: mean 0, variance 1 up to the factor.
    float x = 0;
    for (int u = 0; u < 4; ++u) x += static_cast<float>(next(state) >> 8) * 0x1p-24f - 0.5f;
    const uint32_t bits = std::bit_cast<uint32_t>(x * 1.7320508f);
    // bf16 is the upper half of an f32; rounding does not matter here.
    if (dtype == DType::kF32) elements[2 * i] = static_cast<uint16_t>(bits);
    elements[dtype == DType::kF32 ? 2 * i + 1 : i] = static_cast<uint16_t>(bits >> 16);
  }
  return elements;
}

std::shared_ptr<void> allocated(int64_t bytes, Device device) {
  if (device.type == DeviceType::kCpu) {
    constexpr std::align_val_t kAlign{64};
    return {::operator new(static_cast<size_t>(bytes), kAlign),
            [](void* data) { ::operator delete(data, kAlign); }};
  }
  return {cuda::allocate(bytes, device.index), [device](void* data) {
            try {
              cuda::deallocate(data, device.index);
            } catch (const Error&) {
              // The failure that leads here has been reported; the process is about to end.
            }
          }};
}

}  // namespace

std::string Case::name() const {
  const std::string where =
      device.type == DeviceType::kCpu ? fmt::format("threads:{}", threads) : name_of(device);
  if (pass == "decode") {
    const std::string pages = page == 0 ? "" : fmt::format("page:{}/", page);
    return fmt::format("decode/{}/batch:{}/keys:{}/group:{}/{}{}", name_of(dtype), batch, sk,
                       hq / hk, pages, where);
  }
  return fmt::format("{}/{}/n:{}/d:{}/{}/{}", pass, name_of(dtype), sk, d,
                     causal ? "causal" : "full", where);
}

std::vector<Case> cpu_grid(const std::string& name, int threads) {
  const bool quick = is_quick(name);
  const std::vector<int64_t> lengths =
      quick ? std::vector<int64_t>{1024, 2048} : std::vector<int64_t>{1024, 2048, 4096, 8192};
  const std::vector<int> counts = threads > 1 ? std::vector<int>{1, threads} : std::vector<int>{1};
  std::vector<Case> cases;
  for (const char* pass : {"forward", "backward"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
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

Tensor Workload::filled(Tensor tensor) {
  constexpr int64_t kMostRandom = 1 << 20;  // larger tensors repeat themselves
  const int64_t bytes = tensor.numel() * size_of(tensor.dtype);
  tensor.data = memory_.emplace_back(allocated(bytes, device_)).get();
  const std::vector<uint16_t> some = random_elements(
      tensor.dtype, std::min(tensor.numel(), kMostRandom), static_cast<uint32_t>(memory_.size()));
  const auto step = static_cast<int64_t>(some.size() * sizeof(uint16_t));
  for (int64_t at = 0; at < bytes; at += step) {
    char* const to = static_cast<char*>(tensor.data) + at;
    const int64_t count = std::min(step, bytes - at);
    if (device_.type == DeviceType::kCpu) {
      std::memcpy(to, some.data(), static_cast<size_t>(count));
    } else {
      cuda::copy(to, some.data(), count, device_.index);
    }
  }
  return tensor;
}

Workload::Workload(const Case& c)
    : device_(c.device), backward_(c.pass == "backward"), plan_(nullptr) {
  const auto rows = [&](int64_t n, int64_t heads) {
    return Tensor::contiguous(nullptr, c.dtype, {c.batch, n, heads, c.d}, c.device);
  };
  const Tensor q = rows(c.sq, c.hq), kv = rows(c.sk, c.hk);
  const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {c.batch, c.hq, c.sq}, c.device);
  Options options;
  options.mask = c.causal ? causal() : full();
  options.threads = c.threads;
  options.engine = c.device.type == DeviceType::kCpu ? "cpu" : "cuda";
  const Plan forward_plan = plan(ForwardArgs{q, kv, kv, q, lse}, options);
  plan_ = backward_ ? plan(BackwardArgs{q, q, kv, kv, q, lse, q, kv, kv}, options) : forward_plan;
  forward_ = {filled(q), filled(kv), filled(kv), filled(q), filled(lse)};
  if (c.page > 0) {
    make_pages(c);
    plan_ = plan(forward_, options);
  }
  if (!backward_) return;
  forward_plan.run(forward_);
  backward_args_ = {filled(q),    forward_.q, forward_.k, forward_.v, forward_.out,
                    forward_.lse, filled(q),  filled(kv), filled(kv)};
}

void Workload::make_pages(const Case& c) {
  const int64_t pages = c.sk / c.page;
  for (ConstTensor* t : {&forward_.k, &forward_.v}) {
    *t = ConstTensor::contiguous(t->data, c.dtype, {c.batch * pages, c.page, c.hk, c.d});
  }
  const auto vector = [&](int64_t size) {
    memory_.push_back(allocated(size * 4, device_));
    return static_cast<int32_t*>(memory_.back().get());
  };
  int32_t* const ids = vector(c.batch * pages);
  uint32_t state = 1;
  for (int64_t i = 0; i < c.batch * pages; ++i) {
    const auto other = static_cast<int64_t>(next(state)) % (i + 1);
    ids[i] = ids[other];
    ids[other] = static_cast<int32_t>(i);
  }
  int32_t* const used = vector(c.batch);
  std::fill_n(used, c.batch, static_cast<int32_t>(c.sk));
  forward_.page_table = ConstTensor::contiguous(ids, DType::kI32, {c.batch, pages});
  forward_.seqused_k = ConstTensor::contiguous(used, DType::kI32, {c.batch});
}

void Workload::run() const {
  if (backward_) {
    plan_.run(backward_args_);
  } else {
    plan_.run(forward_);
  }
}

void Workload::wait() const {
  if (device_.type == DeviceType::kCuda) cuda::synchronize(device_.index);
}

}  // namespace fulgur::bench

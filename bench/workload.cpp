#include "bench/workload.h"

#include <fmt/format.h>

#include <bit>

#include "fulgur/error.h"

namespace fulgur::bench {
namespace {

Case attention(const char* pass, DType dtype, int64_t n, int64_t d, bool causal, int threads) {
  return {pass, dtype, 1, n, n, 2, 2, d, causal, threads};
}

Case decode(DType dtype, int64_t group, int threads) {
  return {"decode", dtype, 2, 1, 16384, 4 * group, 4, 128, false, threads};
}

uint32_t next(uint32_t& state) {  // xorshift32
  state ^= state << 13;
  state ^= state >> 17;
  state ^= state << 5;
  return state;
}

}  // namespace

std::string Case::name() const {
  if (pass == "decode") {
    return fmt::format("decode/{}/keys:{}/group:{}/threads:{}", name_of(dtype), sk, hq / hk,
                       threads);
  }
  return fmt::format("{}/{}/n:{}/d:{}/{}/threads:{}", pass, name_of(dtype), sk, d,
                     causal ? "causal" : "full", threads);
}

std::vector<Case> grid(const std::string& name, int threads) {
  const bool quick = name == "quick";
  if (!quick && name != "standard") {
    throw Error(Status::kInvalidArgument, "grid: got '" + name + "', want quick or standard");
  }
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

Tensor Workload::random(std::initializer_list<int64_t> shape, DType dtype) {
  const Tensor view = Tensor::contiguous(nullptr, dtype, shape);
  auto& memory = memory_.emplace_back(view.numel() * size_of(dtype) / 2);
  uint32_t state = static_cast<uint32_t>(memory_.size()) * 2654435769u;
  for (int64_t i = 0; i < view.numel(); ++i) {
    // The sum of four uniforms: mean 0, variance 1 up to the factor.
    float x = 0;
    for (int u = 0; u < 4; ++u) x += static_cast<float>(next(state) >> 8) * 0x1p-24f - 0.5f;
    const uint32_t bits = std::bit_cast<uint32_t>(x * 1.7320508f);
    // bf16 is the upper half of an f32; rounding does not matter here.
    if (dtype == DType::kF32) memory[2 * i] = static_cast<uint16_t>(bits);
    memory[dtype == DType::kF32 ? 2 * i + 1 : i] = static_cast<uint16_t>(bits >> 16);
  }
  return Tensor::contiguous(memory.data(), dtype, shape);
}

Workload::Workload(const Case& c) : backward_(c.pass == "backward"), plan_(nullptr) {
  const auto rows = [&](int64_t n, int64_t heads) {
    return random({c.batch, n, heads, c.d}, c.dtype);
  };
  forward_ = {rows(c.sq, c.hq), rows(c.sk, c.hk), rows(c.sk, c.hk), rows(c.sq, c.hq),
              random({c.batch, c.hq, c.sq}, DType::kF32)};
  Options options;
  options.mask = c.causal ? causal() : full();
  options.threads = c.threads;
  plan_ = plan(forward_, options);
  if (!backward_) return;
  plan_.run(forward_);
  backward_args_ = {rows(c.sq, c.hq), forward_.q,       forward_.k,
                    forward_.v,       forward_.out,     forward_.lse,
                    rows(c.sq, c.hq), rows(c.sk, c.hk), rows(c.sk, c.hk)};
  plan_ = plan(backward_args_, options);
}

void Workload::run() const {
  if (backward_) {
    plan_.run(backward_args_);
  } else {
    plan_.run(forward_);
  }
}

}  // namespace fulgur::bench

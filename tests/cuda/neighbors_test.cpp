// Packed sequences on a GPU: the bits of one depend on nothing that lies beside it, and lengths on
// the device that are not what the host was told move no access out of the tensors.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "engines.h"
#include "fulgur/cuda.h"
#include "storage.h"

namespace fulgur::test {
namespace {

class Neighbors : public testing::Test {
 protected:
  void SetUp() override {
    for (const EngineInfo& engine : engines()) {
      if (engine.name == "cuda" && !engine.unavailable.empty()) {
        GTEST_SKIP() << "cuda: " << engine.unavailable;
      }
    }
  }
};

/// A vector in device memory.
template <class T>
class Uploaded {
 public:
  explicit Uploaded(const std::vector<T>& host)
      : size_(host.size()), data_(static_cast<T*>(cuda::allocate(bytes()))) {
    cuda::copy(data_, host.data(), bytes());
  }
  ~Uploaded() { cuda::deallocate(data_); }
  Uploaded(const Uploaded&) = delete;
  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> now(size_);
    cuda::copy(now.data(), data_, bytes());
    return now;
  }

 private:
  int64_t bytes() const { return static_cast<int64_t>(size_ * sizeof(T)); }
  size_t size_;
  T* data_;
};

using Bits = std::vector<uint16_t>;  // of 16-bit elements
constexpr uint16_t kNan = 0x7fff;    // in bf16 and in f16
constexpr Device kGpu{DeviceType::kCuda, 0};

struct Options16 {
  DType dtype = DType::kBF16;
  int64_t d = 128;
  Mask mask{};
  double softcap = 0;
  bool seqused = false;
};

/// Rows of q, k and v of all sequences, one after another, and rows of padding behind them.
struct Batch {
  static constexpr int64_t kHq = 2, kHk = 1, kPadding = 37;
  Options16 how;
  std::vector<int32_t> cu_q{0}, cu_k{0}, used;
  Bits q, k, v;

  explicit Batch(const Options16& how) : how(how) {
    const std::pair<int, int> lengths[] = {{70, 1},  {1, 300},   {0, 5}, {130, 90},
                                           {64, 64}, {200, 333}, {3, 0}};
    for (const auto& [sq, sk] : lengths) {
      cu_q.push_back(cu_q.back() + sq);
      cu_k.push_back(cu_k.back() + sk);
      used.push_back(std::max(0, sk - 9));
    }
    std::mt19937_64 random(7);
    const auto fill = [&](int64_t rows, int64_t heads) {
      Bits values(static_cast<size_t>(rows * heads * how.d));
      randomize(Tensor::contiguous(values.data(), how.dtype, {rows, heads, how.d}), random);
      return values;
    };
    q = fill(total_q(), kHq);
    k = fill(total_k(), kHk);
    v = fill(total_k(), kHk);
  }
  int64_t total_q() const { return cu_q.back() + kPadding; }
  int64_t total_k() const { return cu_k.back() + kPadding; }
  size_t sequences() const { return used.size(); }

  /// Everything that is no data of sequence b becomes `value`.
  void overwrite_all_but(size_t b, uint16_t value) {
    const auto keep = [&](Bits& values, int64_t row, int64_t begin, int64_t end) {
      std::fill(values.begin(), values.begin() + begin * row, value);
      std::fill(values.begin() + end * row, values.end(), value);
    };
    const int64_t keys = how.seqused ? used[b] : cu_k[b + 1] - cu_k[b];
    keep(q, kHq * how.d, cu_q[b], cu_q[b + 1]);
    keep(k, kHk * how.d, cu_k[b], cu_k[b] + keys);
    keep(v, kHk * how.d, cu_k[b], cu_k[b] + keys);
  }
};

struct Result {
  Bits out;                // of a sequence, (sq, hq, d)
  std::vector<float> lse;  // (hq, sq)
  bool operator==(const Result& other) const {
    const auto same = [](const auto& x, const auto& y) {
      return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(x[0])) == 0;
    };
    return same(out, other.out) && same(lse, other.lse);
  }
};

Options options_of(const Options16& how) {
  Options options;
  options.engine = "cuda";
  options.invariant = true;
  options.mask = how.mask;
  options.softcap = how.softcap;
  return options;
}

/// Sequence b of a run of the whole batch.
std::vector<Result> run_packed(const Batch& batch) {
  const Options16& how = batch.how;
  const int64_t count = static_cast<int64_t>(batch.sequences());
  const Uploaded q(batch.q), k(batch.k), v(batch.v);
  const Uploaded out(Bits(batch.q.size(), kNan));
  const Uploaded lse(std::vector<float>(static_cast<size_t>(Batch::kHq * batch.total_q()), -7));
  const Uploaded cu_q(batch.cu_q), cu_k(batch.cu_k), used(batch.used);
  const auto rows = [&](uint16_t* data, int64_t total, int64_t heads) {
    return Tensor::contiguous(data, how.dtype, {total, heads, how.d}, kGpu);
  };
  Options options = options_of(how);
  options.cu_seqlens_q = Tensor::contiguous(cu_q.data(), DType::kI32, {count + 1}, kGpu);
  options.cu_seqlens_k = Tensor::contiguous(cu_k.data(), DType::kI32, {count + 1}, kGpu);
  options.max_seqlen_q = 200;
  options.max_seqlen_k = 333;
  if (how.seqused) options.seqused_k = Tensor::contiguous(used.data(), DType::kI32, {count}, kGpu);
  forward(
      {rows(q.data(), batch.total_q(), Batch::kHq), rows(k.data(), batch.total_k(), Batch::kHk),
       rows(v.data(), batch.total_k(), Batch::kHk), rows(out.data(), batch.total_q(), Batch::kHq),
       Tensor::contiguous(lse.data(), DType::kF32, {Batch::kHq, batch.total_q()}, kGpu)},
      options);
  const Bits all = out.values();
  const std::vector<float> all_lse = lse.values();
  std::vector<Result> results;
  const int64_t row = Batch::kHq * how.d;
  for (size_t b = 0; b < batch.sequences(); ++b) {
    Result result;
    result.out.assign(all.begin() + batch.cu_q[b] * row, all.begin() + batch.cu_q[b + 1] * row);
    for (int64_t head = 0; head < Batch::kHq; ++head) {
      const auto first = all_lse.begin() + head * batch.total_q();
      result.lse.insert(result.lse.end(), first + batch.cu_q[b], first + batch.cu_q[b + 1]);
    }
    results.push_back(std::move(result));
  }
  // The padding is no sequence: zeros and -inf, whatever its inputs hold.
  EXPECT_TRUE(std::all_of(all.begin() + batch.cu_q.back() * row, all.end(),
                          [](uint16_t x) { return x == 0; }));
  return results;
}

/// Sequence b alone, as a batch of one that is not packed.
Result run_alone(const Batch& batch, size_t b) {
  const Options16& how = batch.how;
  const int64_t sq = batch.cu_q[b + 1] - batch.cu_q[b], sk = batch.cu_k[b + 1] - batch.cu_k[b];
  const auto part = [&](const Bits& values, int64_t begin, int64_t count, int64_t heads) {
    const auto first = values.begin() + begin * heads * how.d;
    return Bits(first, first + count * heads * how.d);
  };
  const Uploaded q(part(batch.q, batch.cu_q[b], sq, Batch::kHq));
  const Uploaded k(part(batch.k, batch.cu_k[b], sk, Batch::kHk));
  const Uploaded v(part(batch.v, batch.cu_k[b], sk, Batch::kHk));
  const Uploaded out(Bits(static_cast<size_t>(sq * Batch::kHq * how.d), kNan));
  const Uploaded lse(std::vector<float>(static_cast<size_t>(Batch::kHq * sq), -7));
  const Uploaded used(std::vector<int32_t>{batch.used[b]});
  const auto rows = [&](uint16_t* data, int64_t count, int64_t heads) {
    return Tensor::contiguous(data, how.dtype, {1, count, heads, how.d}, kGpu);
  };
  Options options = options_of(how);
  if (how.seqused) options.seqused_k = Tensor::contiguous(used.data(), DType::kI32, {1}, kGpu);
  forward({rows(q.data(), sq, Batch::kHq), rows(k.data(), sk, Batch::kHk),
           rows(v.data(), sk, Batch::kHk), rows(out.data(), sq, Batch::kHq),
           Tensor::contiguous(lse.data(), DType::kF32, {1, Batch::kHq, sq}, kGpu)},
          options);
  return {out.values(), lse.values()};
}

std::vector<Options16> ways() {
  std::vector<Options16> all;
  for (const int64_t d : {64, 128, 192, 256}) {
    for (const Mask& mask : {full(), causal(), window(33, 5), window(40, -1), window(-1, 250)}) {
      for (const bool seqused : {false, true}) {
        all.push_back({.d = d, .mask = mask, .seqused = seqused});
      }
    }
    all.push_back({.dtype = DType::kF16, .d = d, .mask = causal()});
    all.push_back({.d = d, .mask = causal(), .softcap = 3, .seqused = true});
  }
  return all;
}

std::string name(const Options16& how) {
  return (how.dtype == DType::kF16 ? "f16 d " : "bf16 d ") + std::to_string(how.d) + " mask " +
         std::to_string(how.mask.left) + " " + std::to_string(how.mask.right) +
         (how.softcap > 0 ? " softcap" : "") + (how.seqused ? " seqused" : "");
}

TEST_F(Neighbors, AWholeBatchHasTheBitsOfItsSequencesAlone) {
  for (const Options16& how : ways()) {
    const Batch batch(how);
    const std::vector<Result> packed = run_packed(batch);
    for (size_t b = 0; b < batch.sequences(); ++b) {
      if (batch.cu_q[b + 1] == batch.cu_q[b]) continue;
      EXPECT_TRUE(packed[b] == run_alone(batch, b)) << name(how) << ", sequence " << b;
    }
  }
}

// What neighbors, padding and keys beyond seqused_k hold: the largest finite number, which moves
// every maximum, and NaN.
TEST_F(Neighbors, OutliersAndNanBesideASequenceAreNotRead) {
  for (const Options16& how : ways()) {
    const Batch batch(how);
    const std::vector<Result> clean = run_packed(batch);
    const uint16_t huge = how.dtype == DType::kF16 ? 0x7bff : 0x7f7f;
    for (size_t b = 0; b < batch.sequences(); ++b) {
      for (const uint16_t value : {huge, kNan}) {
        Batch poisoned = batch;
        poisoned.overwrite_all_but(b, value);
        EXPECT_TRUE(run_packed(poisoned)[b] == clean[b])
            << name(how) << ", sequence " << b
            << (value == kNan ? " beside NaN" : " beside outliers");
      }
    }
  }
}

// Lengths on the device are not checked by anyone. Whatever they say, nothing beside out and lse is
// written, and the call ends.
TEST_F(Neighbors, LengthsThatLieMoveNoAccessOutOfTheTensors) {
  constexpr int64_t kRows = 300, kHeads = 2, kGuard = 512, kD = 64;
  constexpr int kFar = 1 << 30, kMost = std::numeric_limits<int>::max(),
                kLeast = std::numeric_limits<int>::min();
  const std::vector<std::vector<int32_t>> lies = {{0, 100, 10, 300},
                                                  {-50, 100, 200, 300},
                                                  {0, kFar, 2 * (kFar - 1), kMost},
                                                  {kMost, kMost, kMost, kMost},
                                                  {kLeast, -1, 5, 9},
                                                  {300, 200, 100, 0},
                                                  {0, 250, 400, -7},
                                                  {kMost, kLeast, kMost, kLeast}};
  const Bits input(static_cast<size_t>(kRows * kHeads * kD), 0x3c00);
  const Uploaded q(input), k(input), v(input);
  const Bits guarded(static_cast<size_t>((kRows + 2 * kGuard) * kHeads * kD), kNan);
  const std::vector<float> guarded_lse(static_cast<size_t>(kRows * kHeads + 2 * kGuard), -7);
  for (const Mask& mask : {full(), causal(), window(20, 5)}) {
    for (const std::vector<int32_t>& lie_q : lies) {
      for (const std::vector<int32_t>& lie_k : lies) {
        for (const int used : {-5, 7, kMost, kLeast}) {
          const Uploaded out(guarded);
          const Uploaded lse(guarded_lse);
          const Uploaded cu_q(lie_q), cu_k(lie_k), used_k(std::vector<int32_t>(3, used));
          const auto rows = [&](uint16_t* data) {
            return Tensor::contiguous(data, DType::kBF16, {kRows, kHeads, kD}, kGpu);
          };
          Options options;
          options.engine = "cuda";
          options.mask = mask;
          options.cu_seqlens_q = Tensor::contiguous(cu_q.data(), DType::kI32, {4}, kGpu);
          options.cu_seqlens_k = Tensor::contiguous(cu_k.data(), DType::kI32, {4}, kGpu);
          options.seqused_k = Tensor::contiguous(used_k.data(), DType::kI32, {3}, kGpu);
          options.max_seqlen_q = options.max_seqlen_k = 120;
          forward({rows(q.data()), rows(k.data()), rows(v.data()),
                   rows(out.data() + kGuard * kHeads * kD),
                   Tensor::contiguous(lse.data() + kGuard, DType::kF32, {kHeads, kRows}, kGpu)},
                  options);
          cuda::synchronize();
          const Bits now = out.values();
          const std::vector<float> now_lse = lse.values();
          const int64_t edge = kGuard * kHeads * kD;
          const auto untouched = [](const auto& x, const auto& before, int64_t edge) {
            return std::equal(x.begin(), x.begin() + edge, before.begin()) &&
                   std::equal(x.end() - edge, x.end(), before.end() - edge);
          };
          ASSERT_TRUE(untouched(now, guarded, edge));
          ASSERT_TRUE(untouched(now_lse, guarded_lse, kGuard));
        }
      }
    }
  }
}

}  // namespace
}  // namespace fulgur::test

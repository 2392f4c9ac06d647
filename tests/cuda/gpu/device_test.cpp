// What only a GPU can show: split tiles, odd dims and addresses, every tile, poison, and the host's
// time.
#include "device.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <memory>

#include "call/make_problem.h"
#include "cuda/common/launch.h"
#include "cuda/device/launch_memory.h"
#include "cuda/engine/architectures.h"
#include "cuda/engine/choose.h"
#include "cuda/engine/cuda_engine.h"
#include "cuda/engine/devices.h"
#include "engine_memory.h"
#include "fulgur/append.h"
#include "fulgur/merge.h"
#include "kernels/common/padding_params.h"

namespace fulgur::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

/// A case with `key` of K or V, or of both, set to `value`, in every column or in every third.
testing::AssertionResult right_with_poison(const Case& c, int64_t key, double value, bool in_k,
                                           bool in_v, int64_t step) {
  Workload w(c, c.seed());
  w.options.engine = "cuda";
  for (const auto& [tensor, poisoned] : {std::pair{w.forward.k, in_k}, {w.forward.v, in_v}}) {
    if (!poisoned) continue;
    std::vector<double> values = read(tensor);
    const int64_t row = tensor.shape[2] * tensor.shape[3];
    for (int64_t i = 0; i < row; i += step) values[static_cast<size_t>(key * row + i)] = value;
    write(tensor, values);
  }
  w.seal();
  w.run_forward();
  if (auto result = w.check_memory(); !result) return result;
  return forward_is_right(w, expect_forward(w)) << " in " << c.name() << ", key " << key;
}

TEST_F(OnGpu, TilesSplitOverKeys) {
  const auto bf16 = DType::kBF16, f16 = DType::kF16;
  // Few tiles: all are split; then full waves of tiles and a split rest.
  EXPECT_TRUE(right({.dtype = bf16, .sq = 1, .sk = 9000, .hq = 8, .hk = 2, .d = 128, .dv = 128}));
  EXPECT_TRUE(right({.dtype = f16, .batch = 2, .sq = 1, .sk = 5001, .hq = 4, .hk = 1, .d = 64}));
  EXPECT_TRUE(
      right({.dtype = bf16, .sq = 3, .sk = 4000, .hq = 4, .d = 256, .dv = 256, .mask = causal()}));
  EXPECT_TRUE(right({.dtype = bf16,
                     .batch = 3,
                     .sq = 2,
                     .sk = 3000,
                     .hq = 2,
                     .d = 96,
                     .dv = 96,
                     .seqused = true}));
  EXPECT_TRUE(right(
      {.dtype = bf16, .batch = 10, .sq = 192, .sk = 700, .hq = 16, .hk = 4, .d = 32, .dv = 32}));
}

// Few blocks under a band: the longest are cut, and a NaN that the mask hides reaches no row
// through any part.
TEST_F(OnGpu, LongBlocksOfABandSplitOverKeys) {
  for (const int64_t d : {64, 128, 256}) {
    for (const Mask& mask : {causal(), window(1500, -1), window(1500, 0), window(-1, 700)}) {
      for (const auto& [sq, sk] : {std::pair{3, 6000}, {700, 5000}, {2048, 2048}}) {
        EXPECT_TRUE(right(
            {.dtype = DType::kBF16, .sq = sq, .sk = sk, .hq = 2, .d = d, .dv = d, .mask = mask}));
      }
    }
    // More parts than SMs: a CTA takes several.
    for (const int64_t sk : {900, 3000}) {
      EXPECT_TRUE(right({.dtype = DType::kBF16,
                         .sq = 700,
                         .sk = sk,
                         .hq = 20,
                         .d = d,
                         .dv = d,
                         .mask = causal()}));
    }
    const Case c{
        .dtype = DType::kBF16, .sq = 700, .sk = 5000, .hq = 2, .d = d, .dv = d, .mask = causal()};
    for (const int64_t key : {4999, 4400, 2000}) {
      EXPECT_TRUE(right_with_poison(c, key, kNan, false, true, 3));
    }
  }
}

// Head dims of every tile, packed and not; most rows are none that TMA can address.
TEST_F(OnGpu, EvenAndOddHeadDims) {
  for (const int64_t d : {1, 7, 8, 17, 31, 40, 63, 65, 80, 96, 100, 127, 129, 160, 191, 200, 255}) {
    const int64_t dv = d % 16 == 0 ? d : 257 - d;
    EXPECT_TRUE(right({.dtype = d % 3 == 0 ? DType::kF16 : DType::kBF16,
                       .batch = 2,
                       .sq = 300,
                       .sk = 333,
                       .hq = 2,
                       .d = d,
                       .dv = dv,
                       .mask = d % 5 == 0 ? full() : causal(),
                       .layout = d % 4 == 3 ? Layout::kPacked : Layout::kBshd}));
  }
}

// NaN and infinity at keys that the mask hides from some rows of a tile, and from whole tiles.
TEST_F(OnGpu, PoisonInHiddenKeysReachesNoOtherRow) {
  struct {
    int64_t sq, sk;
    Mask mask;
  } const cases[] = {{300, 300, causal()},       {300, 300, window(20, 5)},
                     {130, 400, window(33, -1)}, {3, 300, causal()},
                     {300, 120, causal()},       {700, 700, window(-1, 3)},
                     {200, 500, window(100, 64)}};
  for (const int64_t d : {24, 65, 128, 256}) {
    for (const auto& [sq, sk, mask] : cases) {
      for (const int64_t key : {sk - 1, sk / 2, int64_t{0}}) {
        const Case c{.dtype = d == 65 ? DType::kF16 : DType::kBF16,
                     .sq = sq,
                     .sk = sk,
                     .hq = 2,
                     .hk = 1,
                     .d = d,
                     .dv = d,
                     .mask = mask};
        EXPECT_TRUE(right_with_poison(c, key, kNan, true, true, 1));
        EXPECT_TRUE(right_with_poison(c, key, kNan, false, true, 3));
        EXPECT_TRUE(right_with_poison(c, key, -kInf, false, true, 3));
      }
    }
  }
}

// The same with scores that are more than scaled, which the rows are computed again from, too.
TEST_F(OnGpu, PoisonBesideTransformedScores) {
  for (const int64_t key : {299, 150}) {
    const Case c{.dtype = DType::kBF16,
                 .sq = 300,
                 .sk = 300,
                 .hq = 2,
                 .hk = 2,
                 .mask = causal(),
                 .softcap = 2,
                 .alibi = Alibi::kHeads};
    EXPECT_TRUE(right_with_poison(c, key, kNan, false, true, 3));
  }
}

// NaN in a query or a key is NaN in every score of it, a cap or not.
TEST_F(OnGpu, NanBesideASoftcap) {
  const Case c{.dtype = DType::kBF16, .sq = 70, .sk = 100, .softcap = 5};
  for (const int64_t key : {0, 99}) EXPECT_TRUE(right_with_poison(c, key, kNan, true, false, 1));
}

// Scores of -inf that no mask made: a row of them is a row without keys.
TEST_F(OnGpu, ScoresOfMinusInfinity) {
  for (const int64_t dead : {1, 64, 150}) {
    Workload w({.dtype = DType::kBF16, .sq = 20, .sk = 150, .d = 8, .dv = 8}, 4);
    w.options.engine = "cuda";
    write(w.forward.q, std::vector<double>(20 * 8, 0.5));
    std::vector<double> k = read(w.forward.k);
    std::fill_n(k.begin(), dead * 8, -kInf);
    write(w.forward.k, k);
    w.seal();
    w.run_forward();
    EXPECT_TRUE(forward_is_right(w, expect_forward(w))) << dead << " keys of -inf";
  }
}

// Whichever tile tuning finds fastest, the result is right.
TEST_F(OnGpu, EveryTileThatFits) {
  cuda::Gpu& gpu = cuda::Gpu::at(0);
  for (const int64_t d : {16, 64, 96, 128, 192, 256}) {
    for (const Mask& mask : {full(), causal(), window(150, 0)}) {
      Workload w({.dtype = DType::kBF16,
                  .batch = 2,
                  .sq = 700,
                  .sk = 777,
                  .hq = 4,
                  .hk = 2,
                  .d = d,
                  .dv = d,
                  .mask = mask},
                 static_cast<uint64_t>(d));
      const auto expected = expect(w);
      EngineMemory memory("cuda");
      const ForwardArgs args = memory.at(w.forward);
      const Problem problem = make_problem(args, w.options);
      std::vector<std::string> rejected;
      const auto families = cuda::architecture_of(gpu.target()).families;
      for (const auto& candidate :
           cuda::all_candidates(problem, families, cuda::card_of(gpu), &rejected)) {
        w.seal();
        memory.send();
        candidate->executable(gpu, {})->run(&args, {});
        memory.bring_back();
        EXPECT_TRUE(w.check_memory());
        EXPECT_TRUE(forward_is_right(w, expected)) << "d " << d << ": " << candidate->tile.text();
      }
    }
  }
}

TEST_F(OnGpu, EveryRunGivesTheSameBits) {
  const DeviceCall call(3, 1000, 1000, 16, 64);
  const Plan plan = fulgur::plan(call.args());
  const auto result = call.result_of(plan);
  for (int i = 0; i < 20; ++i) ASSERT_EQ(call.result_of(plan), result);
}

TEST_F(OnGpu, BroadcastHeadsAreThoseOfOneKeyHead) {
  const DeviceCall call(1, 256, 256, 4, 64);
  ForwardArgs args = call.args();
  args.k.strides[2] = args.v.strides[2] = 0;
  forward(args);
  const auto result = call.result();
  call.poison();
  args.k.shape[2] = args.v.shape[2] = 1;
  forward(args);
  EXPECT_EQ(call.result(), result);
}

// Views that begin at odd addresses, of all tensors, give the bits of those that do not.
TEST_F(OnGpu, OddAddresses) {
  constexpr int64_t kBatch = 2, kLength = 300, kHeads = 2;
  for (const int64_t room : {64, 200}) {
    const int64_t d = room - 8;
    const DeviceCall p(kBatch, kLength, kLength, kHeads, room);
    // Moves the d values of each row by a number of elements.
    const auto move = [&](const Tensor& t, int64_t from, int64_t to) {
      std::vector<uint16_t> values(static_cast<size_t>(t.numel()));
      cuda::copy(values.data(), t.data, t.numel() * 2);
      for (auto row = values.begin(); row != values.end(); row += room) {
        const std::vector<uint16_t> kept(row + from, row + from + d);
        std::copy(kept.begin(), kept.end(), row + to);
      }
      cuda::copy(t.data, values.data(), t.numel() * 2);
    };
    const auto view = [&](Tensor t, int64_t at) {
      t.shape[3] = d;
      t.data = static_cast<uint16_t*>(t.data) + at;
      return t;
    };
    const auto run = [&](int64_t at) {
      forward({view(p.q, at), view(p.k, at), view(p.v, at), view(p.out, at), p.lse});
    };
    run(0);
    const auto lse = p.lse.bits();
    const auto even = p.out.bits();
    for (const Tensor& t : {Tensor(p.q), Tensor(p.k), Tensor(p.v)}) move(t, 0, 3);
    run(3);
    EXPECT_EQ(p.lse.bits(), lse);
    const auto odd = p.out.bits();
    for (size_t row = 0; row < odd.size(); row += 2 * room) {
      for (int64_t i = 0; i < 2 * d; ++i) ASSERT_EQ(odd[row + 6 + i], even[row + i]);
    }
  }
}

// Packed rows whose elements lie beyond the 2^31st. All but the last sequence hold one number.
TEST_F(OnGpu, PackedRowsBeyond2To31Elements) {
  constexpr unsigned char kByte = 0x3c;  // twice it is a bf16 near 0.01
  Workload last({.dtype = DType::kBF16, .sq = 64, .sk = 64, .hq = 2, .hk = 2, .mask = causal()}, 1);
  const int64_t row = 2 * 64, sequences = (int64_t{1} << 31) / (64 * row) + 2,
                rows = 64 * sequences;
  struct Free {
    void operator()(void* data) const { cuda::deallocate(data); }
  };
  std::vector<std::unique_ptr<void, Free>> memory;
  const auto tensor = [&](DType dtype, std::initializer_list<int64_t> shape) {
    Tensor t = Tensor::contiguous(nullptr, dtype, shape, {DeviceType::kCuda, 0});
    const int64_t bytes = t.numel() * size_of(dtype);
    t.data = memory.emplace_back(cuda::allocate(bytes)).get();
    fill(t.data, bytes, kByte);
    return t;
  };
  const auto last_rows = [&](Tensor t) {
    t.data = static_cast<uint16_t*>(t.data) + (rows - 64) * row;
    return t;
  };
  const int64_t sequence_bytes = 64 * row * 2;
  ForwardTensors t;
  try {
    for (Tensor* each : {&t.q, &t.k, &t.v, &t.out}) *each = tensor(DType::kBF16, {rows, 2, 64});
    t.lse = tensor(DType::kF32, {2, rows});
    t.cu_seqlens_q = t.cu_seqlens_k = tensor(DType::kI32, {sequences + 1});
  } catch (const Error& error) {
    if (error.status() != Status::kOutOfMemory) throw;
    GTEST_SKIP() << error.what();
  }
  std::vector<int32_t> starts;
  for (int64_t b = 0; b <= sequences; ++b) starts.push_back(static_cast<int32_t>(64 * b));
  cuda::copy(t.cu_seqlens_q.data, starts.data(), static_cast<int64_t>(4 * starts.size()));
  cuda::copy(last_rows(t.q).data, last.forward.q.data, sequence_bytes);
  cuda::copy(last_rows(t.k).data, last.forward.k.data, sequence_bytes);
  cuda::copy(last_rows(t.v).data, last.forward.v.data, sequence_bytes);
  forward(t, {.mask = causal(), .max_seqlen_q = 64, .max_seqlen_k = 64});
  cuda::synchronize();
  cuda::copy(last.forward.out.data, last_rows(t.out).data, sequence_bytes);
  for (int64_t h = 0; h < 2; ++h) {
    cuda::copy(static_cast<float*>(last.forward.lse.data) + 64 * h,
               static_cast<float*>(t.lse.data) + (h + 1) * rows - 64, 64 * 4);
  }
  EXPECT_TRUE(last.check_memory());
  EXPECT_TRUE(forward_is_right(last, expect(last)));
  for (const int64_t b : {int64_t{0}, sequences / 2, sequences - 2}) {
    std::vector<unsigned char> out(static_cast<size_t>(sequence_bytes));
    cuda::copy(out.data(), static_cast<unsigned char*>(t.out.data) + b * sequence_bytes,
               sequence_bytes);
    EXPECT_EQ(out, std::vector<unsigned char>(out.size(), kByte)) << "sequence " << b;
  }
}

TEST_F(OnGpu, HostTime) {
  const DeviceCall p(1, 64, 64, 1, 64);
  const auto best = [](auto&& call) {
    double least = 1;
    for (int round = 0; round < 50; ++round) {
      cuda::synchronize();
      const auto start = std::chrono::steady_clock::now();
      for (int i = 0; i < 100; ++i) call();
      const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
      least = std::min(least, time.count() / 100);
    }
    return 1e6 * least;
  };
  const Plan plan = fulgur::plan(p.args());
  const double run = best([&] { plan.run(p.args()); });
  const double forward = best([&] { fulgur::forward(p.args()); });
  // A row to each of 64 sequences of a batch, which is turned, and parts of two.
  const DeviceTensor k_new(DType::kBF16, {64, 1, 8, 128}, 1),
      cache(DType::kBF16, {64, 16, 8, 128}, 2);
  const DeviceTensor v_cache(DType::kBF16, {64, 16, 8, 128}, 3), cos(DType::kBF16, {16, 64}, 4);
  const DeviceTensor old(DType::kI32, {64}, 5), merged(DType::kBF16, {1, 64, 1, 64}, 6);
  fill(static_cast<const Tensor&>(old).data, old.bytes(), 0);
  const AppendArgs rows{.rows = {.k_cache = cache,
                                 .v_cache = v_cache,
                                 .k_new = k_new,
                                 .v_new = k_new,
                                 .cache_seqlens = old,
                                 .rotary = {.cos = cos, .sin = cos}}};
  const double append = best([&] { fulgur::append(rows); });
  const std::vector<Partial> parts{{p.out, p.lse}, {p.q, p.lse}};
  const double merge = best([&] { fulgur::merge(parts, {merged, {}}); });
  cuda::Gpu& gpu = cuda::Gpu::at(0);
  const cuda::CurrentContext current(gpu.context());
  const cuda::CUfunction kernel = gpu.kernel(cuda::padding_kernel()).function;
  const DeviceTensor lengths(DType::kI32, {1}, 1);
  const Tensor& no_rows = lengths;
  fill(no_rows.data, lengths.bytes(), 0);
  ForwardPaddingParams nothing{};
  nothing.cu_seqlens_q = static_cast<const int*>(no_rows.data);
  const double launch = best([&] {
    cuda::launch(nullptr, kernel, &nothing, {}, 32, 0, "launching a kernel that does nothing");
  });
  fmt::print(
      "host time: run() {:.2f} us, an empty kernel's launch {:.2f} us, plan and run {:.2f} us, "
      "append {:.2f} us, merge {:.2f} us\n",
      run, launch, forward, append, merge);
  // Far above what is expected: only a wait for the device is that slow.
  for (const double time : {run, append, merge}) EXPECT_LT(time, 20);
}

}  // namespace
}  // namespace fulgur::test

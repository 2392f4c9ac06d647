// Lengths that lie on the device, where the host cannot check them: too large, decreasing,
// negative.
#include <algorithm>
#include <functional>
#include <limits>

#include "arena.h"
#include "device.h"

namespace fulgur::test {
namespace {

using Lengths = OnGpu;

constexpr double kMax = std::numeric_limits<int32_t>::max();
constexpr double kMin = std::numeric_limits<int32_t>::min();

struct Wild {
  std::vector<double> cu_q, cu_k, used_q, used_k;
};

// Lengths of 4 sequences of at most 150 queries and 200 keys, in tensors of 300 and 400 rows.
const Wild kRight{
    {0, 80, 80, 200, 300}, {0, 100, 200, 300, 400}, {70, 0, 30, 65}, {50, 100, 0, 100}};

std::vector<Wild> wild_lengths() {
  const auto& [q, k, uq, uk] = kRight;
  std::vector<Wild> all = {
      {{0, 80, 80, 200, 5000}, k, uq, uk},                         // more rows than exist
      {q, {0, 100, 200, 300, 5000}, uq, uk},                       //
      {{0, 300, 300, 300, 300}, {0, 400, 400, 400, 400}, uq, uk},  // longer than planned for
      {{0, 200, 80, 60, 300}, k, uq, uk},                          // decreasing
      {q, {0, 300, 100, 350, 20}, uq, uk},                         //
      {{300, 200, 100, 50, 0}, {400, 300, 200, 100, 0}, uq, uk},
      {{-50, 80, 80, 200, 300}, k, uq, uk},  // negative
      {q, {-70, 100, 200, 300, 400}, uq, uk},
      {{0, -80, 80, 200, 300}, {0, -100, 200, -300, 400}, uq, uk},
      {{0, 80, 80, 200, kMax}, {0, 100, 200, 300, kMax}, uq, uk},  // differences that overflow
      {{kMin, 80, kMax, 200, 300}, {kMin, 100, kMax, kMin, kMax}, uq, uk},
      {{0, 80, 200, kMin, 300}, k, uq, uk},
      {q, {0, 100, 200, kMin, 400}, uq, uk},
      {{kMax, kMax, kMax, kMax, kMax}, k, uq, uk},
      {{kMin, kMin, kMin, kMin, kMin}, k, uq, uk},
      {q, k, {5000, 101, -1, 100}, uk},  // of the queries
      {q, k, {kMax, kMin, kMax, kMin}, uk},
      {q, k, uq, {5000, 101, -1, 100}},  // of the keys
      {q, k, uq, {kMax, kMin, kMax, kMin}}};
  std::mt19937_64 random(1);
  for (int n = 0; n < 8; ++n) {
    Wild any = kRight;
    for (auto* lengths : {&any.cu_q, &any.cu_k, &any.used_q, &any.used_k}) {
      for (double& x : *lengths) {
        x = n % 2 ? static_cast<double>(random() % 1000) - 300
                  : static_cast<double>(static_cast<int32_t>(random()));
      }
    }
    all.push_back(any);
  }
  return all;
}

// Runs with each of the wild lengths, then with right ones, which must give what they gave before.
void survives(Arena& arena, const ForwardArgs& args, const Options& options,
              const std::vector<Tensor>& lengths,
              const std::function<std::vector<std::vector<double>>(const Wild&)>& values) {
  const auto send = [&](const Wild& wild) {
    const auto each = values(wild);
    for (size_t i = 0; i < lengths.size(); ++i) write(arena.host(lengths[i]), each[i]);
    arena.send();
  };
  const Plan plan = fulgur::plan(args, options);
  send(kRight);
  plan.run(args);
  cuda::synchronize();
  const auto right = arena.outputs();
  const auto all = wild_lengths();
  for (size_t n = 0; n < all.size(); ++n) {
    SCOPED_TRACE("lengths " + std::to_string(n));
    send(all[n]);
    plan.run(args);
    // Nothing on this device works any more after a fault.
    ASSERT_EQ(message_of([] { cuda::synchronize(); }), "");
    arena.outputs();
    send(kRight);
    plan.run(args);
    ASSERT_EQ(message_of([] { cuda::synchronize(); }), "");
    ASSERT_EQ(arena.outputs(), right);
  }
}

constexpr Mask kMasks[] = {full(), causal(), window(40, 3)};

TEST_F(Lengths, WildPackedOnes) {
  for (const int64_t d : {64, 60}) {  // with TMA, and by elements
    for (const bool seqused : {false, true}) {
      for (const Mask& mask : kMasks) {
        SCOPED_TRACE("d " + std::to_string(d) + (seqused ? ", seqused" : "") + ", window " +
                     std::to_string(mask.left) + " " + std::to_string(mask.right));
        Arena arena(9);
        ForwardArgs args;
        std::mt19937_64 random(2);
        const auto input = [&](int64_t rows, int64_t heads) {
          const Tensor t = arena.place(DType::kBF16, {rows, heads, d}, false);
          randomize(arena.host(t), random);
          return t;
        };
        args.q = input(300, 4);
        args.k = input(400, 2);
        args.v = input(400, 2);
        args.out = arena.place(DType::kBF16, {300, 4, d}, true);
        args.lse = arena.place(DType::kF32, {4, 300}, true);
        std::vector<Tensor> lengths = {arena.place(DType::kI32, {5}, false),
                                       arena.place(DType::kI32, {5}, false)};
        args.lengths.cu_seqlens_q = lengths[0];
        args.lengths.cu_seqlens_k = lengths[1];
        if (seqused) {
          lengths.push_back(arena.place(DType::kI32, {4}, false));
          lengths.push_back(arena.place(DType::kI32, {4}, false));
          args.lengths.seqused_q = lengths[2];
          args.lengths.seqused_k = lengths[3];
        }
        survives(arena, args, {.mask = mask, .max_seqlen_q = 150, .max_seqlen_k = 200}, lengths,
                 [](const Wild& wild) {
                   return std::vector<std::vector<double>>{wild.cu_q, wild.cu_k, wild.used_q,
                                                           wild.used_k};
                 });
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_F(Lengths, WildUsedRows) {
  for (const Mask& mask : kMasks) {
    Arena arena;
    ForwardArgs args;
    std::mt19937_64 random(3);
    const auto input = [&](int64_t rows, int64_t heads) {
      const Tensor t = arena.place(DType::kBF16, {4, rows, heads, 64}, false);
      randomize(arena.host(t), random);
      return t;
    };
    args.q = input(70, 4);
    args.k = input(100, 2);
    args.v = input(100, 2);
    args.out = arena.place(DType::kBF16, {4, 70, 4, 64}, true);
    args.lse = arena.place(DType::kF32, {4, 4, 70}, true);
    const Tensor used_q = arena.place(DType::kI32, {4}, false);
    const Tensor used_k = arena.place(DType::kI32, {4}, false);
    args.lengths.seqused_q = used_q;
    args.lengths.seqused_k = used_k;
    survives(arena, args, {.mask = mask}, {used_q, used_k}, [](const Wild& wild) {
      return std::vector<std::vector<double>>{wild.used_q, wild.used_k};
    });
    if (HasFatalFailure()) return;
  }
}

}  // namespace
}  // namespace fulgur::test

// With `invariant`, what a sequence gives is the same in any batch, bit for bit: whatever its
// neighbours are and hold, however many there are, packed or not.
#include <algorithm>
#include <cmath>
#include <limits>

#include "device.h"

namespace fulgur::test {
namespace {

using Batch = OnGpu;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Rows [begin, begin + count) of a packed tensor, or of one sequence alone.
Tensor rows(Tensor t, int64_t begin, int64_t count) {
  const int at = t.rank == 4 ? 1 : 0;
  t.data = static_cast<std::byte*>(t.data) + begin * t.strides[at] * size_of(t.dtype);
  t.shape[at] = count;
  return t;
}

// LSE of sequence b, of all heads.
std::vector<std::byte> lse_bits(const Workload& w, size_t b) {
  Tensor t = w.forward.lse;
  const int64_t first = w.lse_index(b, 0, 0);
  t.data = static_cast<float*>(t.data) + first;
  t.shape[t.rank - 1] = w.sequences[b].sq;
  if (t.rank == 3) t.shape[0] = 1;
  return bits(t);
}

std::vector<std::byte> out_bits(const Workload& w, size_t b) {
  const Rows& s = w.sequences[b];
  return bits(rows(w.forward.out, s.q_begin, s.sq));
}

// Numbers of `size`; where it is not finite, a few of them are that.
void fill(const Tensor& t, double size, std::mt19937_64& random) {
  std::vector<double> values(static_cast<size_t>(t.numel()));
  for (double& x : values) {
    x = std::isfinite(size) ? size * normal(random) : random() % 64 == 0 ? size : normal(random);
  }
  write(t, values);
}

// Sequence b of a packed batch, alone: packed or not.
Workload& copy_alone(Workload& alone, const Workload& batch, size_t b) {
  const Rows& s = batch.sequences[b];
  alone.options = batch.options;
  write(rows(alone.forward.q, 0, s.sq), read(rows(batch.forward.q, s.q_begin, s.sq)));
  for (const auto& [to, from] :
       {std::pair{alone.forward.k, batch.forward.k}, std::pair{alone.forward.v, batch.forward.v}}) {
    write(rows(to, 0, s.sk), read(rows(from, s.k_begin, s.sk)));
  }
  alone.seal();
  return alone;
}

// Lengths about the sizes of tiles, and anything between.
std::vector<Rows> random_lengths(std::mt19937_64& random) {
  constexpr int64_t kQueries[] = {0, 1, 2, 16, 63, 64, 65, 128, 191, 192, 193, 300, 700};
  constexpr int64_t kKeys[] = {0, 1, 63, 64, 80, 112, 113, 128, 500, 2000};
  const auto pick = [&](const auto& values) { return values[random() % std::size(values)]; };
  // Fewer tiles than SMs, about as many, and more.
  constexpr size_t kSizes[] = {2, 5, 40};
  std::vector<Rows> lengths;
  for (size_t n = pick(kSizes); n > 0; --n) {
    const auto any = static_cast<int64_t>(random() % 600);
    lengths.push_back({0, 0, pick(kQueries), random() % 2 ? pick(kKeys) : any});
  }
  return lengths;
}

TEST_F(Batch, NeighboursDoNotMatter) {
  const Case cases[] = {
      {.dtype = DType::kBF16, .hq = 4, .hk = 2, .d = 128, .dv = 128, .mask = causal()},
      {.dtype = DType::kF16, .hq = 2, .hk = 2},
      {.dtype = DType::kBF16, .hq = 8, .hk = 1, .mask = window(100, 0)},
      {.dtype = DType::kBF16, .hq = 2, .hk = 1, .d = 40, .dv = 24, .mask = causal()},
      {.dtype = DType::kF16, .hq = 2, .hk = 2, .d = 192, .dv = 128, .mask = window(150, 20)},
      {.dtype = DType::kBF16, .hq = 2, .hk = 1, .d = 256, .dv = 256},
      {.dtype = DType::kBF16, .hq = 4, .hk = 2, .mask = causal(), .softcap = 3},
      {.dtype = DType::kBF16,
       .hq = 4,
       .hk = 2,
       .mask = causal(),
       .alibi = Alibi::kHeads,
       .seqused = true}};
  constexpr double kSizes[] = {1, 1, 1, 1e4, kInf, kNan};
  for (Case c : cases) {
    for (uint64_t round = 0; round < 6; ++round) {
      std::mt19937_64 random(c.seed() + round);
      const std::vector<Rows> lengths = random_lengths(random);
      c.layout = Layout::kPacked;
      c.sq = c.sk = 1;
      for (const Rows& s : lengths) {
        c.sq = std::max(c.sq, s.sq);
        c.sk = std::max(c.sk, s.sk);
      }
      Workload batch(c, round, lengths);
      batch.options.engine = "cuda";
      batch.options.invariant = true;
      std::vector<double> sizes;
      for (const Rows& s : batch.sequences) {
        sizes.push_back(kSizes[random() % std::size(kSizes)]);
        fill(rows(batch.forward.q, s.q_begin, s.sq), sizes.back(), random);
        fill(rows(batch.forward.k, s.k_begin, s.sk), sizes.back(), random);
        fill(rows(batch.forward.v, s.k_begin, s.sk), sizes.back(), random);
      }
      batch.seal();
      batch.run_forward();
      EXPECT_TRUE(batch.check_memory());
      for (int n = 0; n < 5; ++n) {
        const size_t b = random() % batch.sequences.size();
        const Rows& s = batch.sequences[b];
        SCOPED_TRACE(c.name() + " round " + std::to_string(round) + ": sequence " +
                     std::to_string(b) + " of " + std::to_string(batch.sequences.size()) + ", " +
                     std::to_string(s.sq) + " x " + std::to_string(s.sk) + ", numbers of " +
                     std::to_string(sizes[b]));
        Case one = c;
        one.batch = 1;
        one.seqused = false;
        one.sq = s.sq;
        one.sk = s.sk;
        Workload packed(one, 1, {{0, 0, s.sq, s.sk}});
        copy_alone(packed, batch, b).run_forward();
        EXPECT_EQ(out_bits(packed, 0), out_bits(batch, b)) << "packed alone";
        EXPECT_EQ(lse_bits(packed, 0), lse_bits(batch, b)) << "packed alone";
        one.layout = Layout::kBshd;
        Workload unpacked(one, 1);
        copy_alone(unpacked, batch, b).run_forward();
        EXPECT_EQ(out_bits(unpacked, 0), out_bits(batch, b)) << "alone, not packed";
        EXPECT_EQ(lse_bits(unpacked, 0), lse_bits(batch, b)) << "alone, not packed";
        if (sizes[b] == 1) {
          EXPECT_TRUE(forward_is_right(unpacked, expect(unpacked)));
        }
      }
    }
  }
}

// The same of batches that are not packed: each sequence in the memory that all have, of whose
// queries and keys some do not exist and are NaN.
TEST_F(Batch, SequencesOfAPaddedBatch) {
  for (const auto& [sq, sk] : {std::pair{1, 3000}, {70, 600}, {400, 500}}) {
    for (const Mask& mask : {full(), causal(), window(200, 0)}) {
      const Case c{.dtype = DType::kBF16,
                   .batch = 9,
                   .sq = sq,
                   .sk = sk,
                   .hq = 4,
                   .hk = 2,
                   .mask = mask,
                   .seqused_q = true,
                   .seqused = true};
      Workload batch(c, 1);
      batch.options.engine = "cuda";
      batch.options.invariant = true;
      batch.run_forward();
      for (const size_t b : {size_t{0}, size_t{2}, size_t{3}}) {
        SCOPED_TRACE(c.name() + " sequence " + std::to_string(b));
        const Rows& s = batch.sequences[b];
        Case one = c;
        one.batch = 1;
        one.seqused_q = one.seqused = false;
        one.sq = s.sq;
        one.sk = s.sk;
        Workload alone(one, 1);
        alone.options = batch.options;
        const auto of_batch = [b](Tensor t) {
          t.data = static_cast<std::byte*>(t.data) +
                   static_cast<int64_t>(b) * t.strides[0] * size_of(t.dtype);
          t.shape[0] = 1;
          return t;
        };
        write(alone.forward.q, read(rows(of_batch(batch.forward.q), 0, s.sq)));
        write(alone.forward.k, read(rows(of_batch(batch.forward.k), 0, s.sk)));
        write(alone.forward.v, read(rows(of_batch(batch.forward.v), 0, s.sk)));
        alone.seal();
        alone.run_forward();
        EXPECT_EQ(bits(alone.forward.out), bits(rows(of_batch(batch.forward.out), 0, s.sq)));
        Tensor lse = of_batch(batch.forward.lse);
        lse.shape[2] = s.sq;
        EXPECT_EQ(bits(alone.forward.lse), bits(lse));
        EXPECT_TRUE(forward_is_right(alone, expect(alone)));
      }
    }
  }
}

}  // namespace
}  // namespace fulgur::test

// The same bits again: run to run, with other threads, in another batch, with another plan.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <set>
#include <tuple>

#include "engine_memory.h"
#include "engines.h"
#include "kernels/host_device/dropout.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

class Repeat : public EveryEngine {};

using Bits = std::vector<std::byte>;

std::vector<Bits> all_bits(const Workload& w) {
  std::vector<Bits> all = {bits(w.forward.out), bits(w.forward.lse), bits(w.backward.dq),
                           bits(w.backward.dk), bits(w.backward.dv)};
  if (w.c.sinks) all.push_back(bits(w.backward.dsinks));
  return all;
}

// Shapes that engines plan differently: many rows, few rows over many keys, uneven work.
std::vector<Case> shapes() {
  return {
      {.dtype = DType::kF32, .batch = 2, .sq = 333, .sk = 333, .hq = 4, .hk = 2, .mask = causal()},
      {.dtype = DType::kBF16, .sq = 130, .sk = 700, .hq = 3, .hk = 3, .d = 128, .dv = 80},
      {.dtype = DType::kF16, .batch = 2, .sq = 1, .sk = 3000, .hq = 8, .hk = 2},
      {.dtype = DType::kF32, .sq = 5, .sk = 2048, .hq = 1, .hk = 1, .mask = causal()},
      {.dtype = DType::kBF16,
       .sq = 90,
       .sk = 120,
       .hq = 4,
       .hk = 1,
       .layout = Layout::kPacked,
       .dropout = 0.2},
      {.dtype = DType::kBF16, .batch = 2, .sq = 200, .sk = 300, .hq = 4, .hk = 2, .sinks = true},
      {.dtype = DType::kF32,
       .batch = 3,
       .sq = 2,
       .sk = 1500,
       .hq = 8,
       .hk = 2,
       .mask = window(300, 0),
       .sinks = true},
  };
}

TEST_P(Repeat, SameBitsRunToRun) {
  for (const Case& c : shapes()) {
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    w.options.engine = engine();
    w.options.deterministic = true;
    w.options.threads = 2;
    if (!runs(w)) continue;
    const auto first = all_bits(w);
    for (int run = 0; run < 5; ++run) {
      w.seal();
      runs(w);
      ASSERT_EQ(all_bits(w), first) << "run " << run + 2;
    }
  }
}

// In as much workspace as a pass wants, in less, and in the least that it says: as right, and with
// the same bits where they are promised.
TEST_P(Repeat, GradientsInLessWorkspace) {
  const Case cases[] = {
      // Fewer heads and sequences at a time, the same packed, and fewer rows.
      {.dtype = DType::kBF16, .batch = 2, .sq = 200, .sk = 300, .hq = 4, .hk = 2, .mask = causal()},
      {.dtype = DType::kBF16, .sq = 150, .sk = 150, .hq = 4, .hk = 2, .layout = Layout::kPacked},
      {.dtype = DType::kF16, .sq = 1100, .sk = 130, .hq = 4, .d = 16, .dv = 16}};
  for (const Case& c : cases) {
    for (const auto& [deterministic, invariant] :
         {std::pair{true, false}, {false, true}, {false, false}}) {
      SCOPED_TRACE(testing::Message() << c.name() << ", deterministic " << deterministic
                                      << ", invariant " << invariant);
      Workload w(c, 1);
      w.options.engine = engine();
      w.options.deterministic = deterministic;
      w.options.invariant = invariant;
      w.options.threads = 2;
      if (!runs(w)) continue;
      const auto all = all_bits(w);
      const Expected e = expect(w);
      EngineMemory memory(engine());
      const BackwardTensors there = memory.at(w.backward);
      const auto plan_within = [&](int64_t bytes) {
        Options options = memory.options(w.backward, w.options);
        options.max_workspace = bytes;
        return plan(there, options);
      };
      const int64_t most = plan_within(0).workspace().bytes;
      if (most == 0) continue;
      const std::string says = message_of([&] { plan_within(1); });
      const std::string least_is = "max_workspace: got 1 bytes, want at least ";
      ASSERT_TRUE(says.starts_with(least_is)) << says;
      const int64_t least = std::stoll(says.substr(least_is.size()));
      // Hopper's kernels have ways that take less, the portable ones for some calls, hosts never.
      const bool hoppers = engine() == "cuda" &&
                           plan_within(0).details().get<std::string>("kernel").starts_with("sm90");
      if (engine() != "cuda" || hoppers) {
        EXPECT_EQ(least < most, hoppers);
      }
      EXPECT_EQ(message_of([&] { plan_within(least - 1); }),
                fmt::format("max_workspace: got {} bytes, want at least {}", least - 1, least));
      for (const int64_t bytes : {least, (least + most) / 2, most}) {
        EXPECT_LE(plan_within(bytes).workspace().bytes, bytes);
        w.seal();
        w.options.max_workspace = 0;
        w.run_forward();
        w.options.max_workspace = bytes;
        w.run_backward();
        EXPECT_TRUE(w.check_memory());
        EXPECT_TRUE(backward_is_right(w, e)) << bytes << " bytes";
        const auto bits = all_bits(w);
        if (invariant) {
          EXPECT_EQ(bits, all) << bytes << " bytes";
        } else if (deterministic) {  // another tile may have been taken, the same in each run
          w.run_backward();
          EXPECT_EQ(all_bits(w), bits) << bytes << " bytes";
        }
      }
    }
  }
}

// Without any option, the forward pass repeats itself too.
TEST_P(Repeat, ForwardNeedsNoOption) {
  for (const Case& c : shapes()) {
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    w.options.engine = engine();
    if (!computes([&] { w.run_forward(); })) continue;
    const Bits out = bits(w.forward.out), lse = bits(w.forward.lse);
    for (int run = 0; run < 3; ++run) {
      w.seal();
      w.run_forward();
      ASSERT_EQ(bits(w.forward.out), out);
      ASSERT_EQ(bits(w.forward.lse), lse);
    }
  }
}

TEST_P(Repeat, InvariantToThreads) {
  for (const Case& c : shapes()) {
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    w.options.engine = engine();
    w.options.invariant = w.options.deterministic = true;
    w.options.threads = 1;
    if (!runs(w)) continue;
    const auto first = all_bits(w);
    for (const int threads : {2, 3, 5}) {
      w.seal();
      w.options.threads = threads;
      runs(w);
      ASSERT_EQ(all_bits(w), first) << threads << " threads";
    }
  }
}

// A slice of a contiguous (batch, ...) tensor: batch b alone.
Tensor alone(Tensor t, int64_t b) {
  t.data = static_cast<std::byte*>(t.data) + b * t.strides[0] * size_of(t.dtype);
  t.shape[0] = 1;
  return t;
}

TEST_P(Repeat, InvariantToTheBatch) {
  for (Case c : shapes()) {
    if (c.packed() || c.dropout > 0) continue;  // dropout knows the batch
    c.batch = 4;
    SCOPED_TRACE(c.name());
    Workload w(c, 2);
    w.options.engine = engine();
    w.options.invariant = w.options.deterministic = true;
    if (!runs(w)) continue;
    const auto all = all_bits(w);
    for (int64_t b : {0, 2, 3}) {
      ForwardTensors f = w.forward;
      BackwardTensors g = w.backward;
      for (Tensor* t : {&f.q, &f.k, &f.v, &f.out, &f.lse, &g.dout, &g.q, &g.k, &g.v, &g.out, &g.lse,
                        &g.dq, &g.dk, &g.dv}) {
        *t = alone(*t, b);
      }
      g.dsinks = {};
      w.seal();
      compute(f, w.options, w.run_options);
      computes([&] { compute(g, w.options, w.run_options); });
      const Bits parts[] = {bits(f.out), bits(f.lse), bits(g.dq), bits(g.dk), bits(g.dv)};
      for (size_t i = 0; i < std::size(parts); ++i) {  // dsinks is a sum over the batch
        const size_t size = parts[i].size();
        ASSERT_EQ(std::memcmp(parts[i].data(), all[i].data() + static_cast<size_t>(b) * size, size),
                  0)
            << "output " << i << " of sequence " << b;
      }
    }
  }
}

TEST_P(Repeat, InvariantToPacking) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& [sq, sk] : {std::pair{100, 150}, {1, 2000}, {65, 64}}) {
      const Case packed{.dtype = dtype,
                        .sq = sq,
                        .sk = sk,
                        .hq = 4,
                        .hk = 2,
                        .mask = causal(),
                        .layout = Layout::kPacked,
                        .sinks = sq == 65};
      SCOPED_TRACE(packed.name());
      Workload w(packed, 3);
      w.options.engine = engine();
      w.options.invariant = w.options.deterministic = true;
      if (!runs(w)) continue;
      for (const size_t b : {size_t{0}, size_t{3}}) {
        const Rows& s = w.sequences[b];
        Case single = packed;
        single.layout = Layout::kBshd;
        single.sq = s.sq;
        single.sk = s.sk;
        Workload one(single, 4);
        one.options = {
            .mask = causal(), .deterministic = true, .invariant = true, .engine = engine()};
        // Rows of the packed tensors, in the same order of elements.
        auto rows = [](Tensor t, int64_t begin, int64_t count) {
          t.data = static_cast<std::byte*>(t.data) + begin * t.strides[0] * size_of(t.dtype);
          t.shape[0] = count;
          return t;
        };
        auto q_rows = [&](const Tensor& t) { return rows(t, s.q_begin, s.sq); };
        auto k_rows = [&](const Tensor& t) { return rows(t, s.k_begin, s.sk); };
        write(one.forward.q, read(q_rows(w.forward.q)));
        write(one.forward.k, read(k_rows(w.forward.k)));
        write(one.forward.v, read(k_rows(w.forward.v)));
        write(one.backward.dout, read(q_rows(w.backward.dout)));
        if (packed.sinks) write(one.forward.sinks, read(w.forward.sinks));
        runs(one);
        EXPECT_EQ(bits(one.forward.out), bits(q_rows(w.forward.out)));
        EXPECT_EQ(bits(one.backward.dq), bits(q_rows(w.backward.dq)));
        EXPECT_EQ(bits(one.backward.dk), bits(k_rows(w.backward.dk)));
        EXPECT_EQ(bits(one.backward.dv), bits(k_rows(w.backward.dv)));
      }
    }
  }
}

// A sequence: its inputs as rows of [heads][dim].
struct Sample {
  int64_t sq, sk;
  std::vector<double> q, k, v, dout;
};

// Sequences of one shape of heads under one set of options.
struct Recipe {
  DType dtype;
  int64_t hq, hk, d, dv;
  Options options;
  Tensor slopes, sinks;
  bool gradients = true;

  // Values of `size`; of size infinity or NaN, a few of them are that.
  Sample sample(int64_t sq, int64_t sk, double size, std::mt19937_64& random) const {
    const auto values = [&](int64_t n) {
      std::vector<double> all(static_cast<size_t>(n));
      for (double& x : all) {
        x = std::isfinite(size)  ? size * normal(random)
            : random() % 64 == 0 ? size
                                 : normal(random);
      }
      return all;
    };
    return {sq,
            sk,
            values(sq * hq * d),
            values(sk * hk * d),
            values(sk * hk * dv),
            values(sq * hq * dv)};
  }
};

// Memory of a batch: NaN wherever no sequence lies.
struct Batch {
  Batch(const Recipe& s, int64_t rows, int64_t keys)
      : q(s.dtype, {rows, s.hq, s.d}),
        k(s.dtype, {keys, s.hk, s.d}),
        v(s.dtype, {keys, s.hk, s.dv}),
        out(s.dtype, {rows, s.hq, s.dv}),
        dout(s.dtype, {rows, s.hq, s.dv}),
        dq(s.dtype, {rows, s.hq, s.d}),
        dk(s.dtype, {keys, s.hk, s.d}),
        dv(s.dtype, {keys, s.hk, s.dv}),
        lse(DType::kF32, {rows * s.hq}) {}

  struct Lengths {
    Tensor cu_q{}, cu_k{}, used_q{}, used_k{};
  };

  // False where the engine does not compute such; gradients are left out where it lacks them.
  bool run(const Recipe& s, int threads, const Lengths& lengths,
           const std::function<Tensor(const Tensor&)>& of_q,
           const std::function<Tensor(const Tensor&)>& of_k, const Tensor& lse_view) const {
    Options options = s.options;
    options.invariant = options.deterministic = true;
    options.threads = threads;
    const auto& [cu_q, cu_k, used_q, used_k] = lengths;
    const auto computes = [](const auto& call) { return status_of(call) != Status::kUnsupported; };
    ForwardTensors f{of_q(q),  of_k(k), of_k(v), of_q(out), lse_view,
                     s.slopes, cu_q,    cu_k,    used_q,    used_k};
    f.sinks = s.sinks;
    const BackwardTensors b{of_q(dout), of_q(q),  of_k(k),  of_k(v), of_q(out), lse_view, of_q(dq),
                            of_k(dk),   of_k(dv), s.slopes, cu_q,    cu_k,      used_q,   used_k};
    const auto run_forward = [&] { compute(f, options); };
    if (!computes(run_forward)) return false;
    if (s.gradients) computes([&] { compute(b, options); });
    return true;
  }
  // The inputs of a sequence whose first row and key are these.
  void write_sample(const Sample& s, int64_t row, int64_t key) const {
    write(slice(q, row, s.sq), s.q);
    write(slice(dout, row, s.sq), s.dout);
    write(slice(k, key, s.sk), s.k);
    write(slice(v, key, s.sk), s.v);
  }
  // The results of a sample, without LSE.
  std::vector<Bits> read_sample(const Sample& s, int64_t row, int64_t key) const {
    return {bits(slice(out, row, s.sq)), bits(slice(dq, row, s.sq)), bits(slice(dk, key, s.sk)),
            bits(slice(dv, key, s.sk))};
  }
  static Tensor slice(Tensor t, int64_t begin, int64_t count) {
    t.data = static_cast<std::byte*>(t.data) + begin * t.strides[0] * size_of(t.dtype);
    t.shape[0] = count;
    return t;
  }

  Dense q, k, v, out, dout, dq, dk, dv, lse;
};

// out, dq, dk, dv, lse of each sequence of a packed batch with rows after the last; nothing where
// the engine refuses.
std::vector<std::vector<Bits>> run_packed(const Recipe& s, const std::vector<Sample>& samples,
                                          int threads) {
  std::vector<double> cu_q{0}, cu_k{0};
  for (const Sample& one : samples) {
    cu_q.push_back(cu_q.back() + static_cast<double>(one.sq));
    cu_k.push_back(cu_k.back() + static_cast<double>(one.sk));
  }
  const auto size = static_cast<int64_t>(cu_q.size());
  const auto rows = static_cast<int64_t>(cu_q.back()) + 5;
  const Batch batch(s, rows, static_cast<int64_t>(cu_k.back()) + 70);
  for (size_t b = 0; b < samples.size(); ++b) {
    batch.write_sample(samples[b], static_cast<int64_t>(cu_q[b]), static_cast<int64_t>(cu_k[b]));
  }
  Dense lengths_q(DType::kI32, {size}), lengths_k(DType::kI32, {size});
  write(lengths_q, cu_q);
  write(lengths_k, cu_k);
  const auto same = [](const Tensor& t) { return t; };
  Tensor lse = Tensor::contiguous(batch.lse.tensor().data, DType::kF32, {s.hq, rows});
  if (!batch.run(s, threads, {lengths_q, lengths_k, {}, {}}, same, same, lse)) return {};
  std::vector<std::vector<Bits>> results;
  for (size_t b = 0; b < samples.size(); ++b) {
    const auto row = static_cast<int64_t>(cu_q[b]), key = static_cast<int64_t>(cu_k[b]);
    results.push_back(batch.read_sample(samples[b], row, key));
    Tensor part = lse;
    part.data = static_cast<float*>(lse.data) + row;
    part.shape[1] = samples[b].sq;
    results.back().push_back(bits(part));
  }
  return results;
}

// The same of a padded batch: all sequences have room for `rows` queries and `keys` keys, of which
// seqused_q and seqused_k say how many exist.
std::vector<std::vector<Bits>> run_padded(const Recipe& s, const std::vector<Sample>& samples,
                                          int64_t rows, int64_t keys, int threads) {
  const auto size = static_cast<int64_t>(samples.size());
  const Batch batch(s, size * rows, size * keys);
  std::vector<double> used_q, used_k;
  for (int64_t b = 0; b < size; ++b) {
    batch.write_sample(samples[b], b * rows, b * keys);
    used_q.push_back(static_cast<double>(samples[b].sq));
    used_k.push_back(static_cast<double>(samples[b].sk));
  }
  Dense lengths_q(DType::kI32, {size}), lengths_k(DType::kI32, {size});
  write(lengths_q, used_q);
  write(lengths_k, used_k);
  Batch::Lengths given;
  if (size > 1 || rows != samples[0].sq) given.used_q = lengths_q;
  if (size > 1 || keys != samples[0].sk) given.used_k = lengths_k;
  const auto with_batch = [size](int64_t length) {
    return [size, length](const Tensor& t) {
      return Tensor::contiguous(t.data, t.dtype, {size, length, t.shape[1], t.shape[2]});
    };
  };
  const Tensor lse = Tensor::contiguous(batch.lse.tensor().data, DType::kF32, {size, s.hq, rows});
  if (!batch.run(s, threads, given, with_batch(rows), with_batch(keys), lse)) return {};
  std::vector<std::vector<Bits>> results;
  for (int64_t b = 0; b < size; ++b) {
    results.push_back(batch.read_sample(samples[b], b * rows, b * keys));
    Tensor part = Batch::slice(lse, b, 1);
    part.shape[2] = samples[b].sq;
    results.back().push_back(bits(part));
  }
  return results;
}

// What a sequence gives does not depend on its neighbours, whatever they are and hold, on how many
// there are, on how the batch lies in memory, or on threads.
class RepeatRound : public OnEngine<std::tuple<int, EngineInfo>> {};

TEST_P(RepeatRound, InvariantToNeighbours) {
  const int round = std::get<int>(GetParam());
  constexpr int64_t kQueries[] = {1, 2, 5, 8, 9, 15, 16, 17, 33, 100, 200};
  constexpr int64_t kGroups[] = {1, 2, 4};
  constexpr DType kDtypes[] = {DType::kF32, DType::kBF16, DType::kF16};
  constexpr double kSizes[] = {1,
                               1,
                               1,
                               1e4,
                               std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()};
  const Mask masks[] = {full(),
                        causal(),
                        window(100, 0),
                        window(700, 30),
                        chunked(150, causal()),
                        top_left(window(-1, 60))};
  const char* const names[] = {"out", "dq", "dk", "dv", "lse"};
  std::mt19937_64 random(static_cast<uint64_t>(round));
  const auto pick = [&](const auto& values) { return values[random() % std::size(values)]; };
  const int64_t hk = 1 + static_cast<int64_t>(random() % 2), hq = hk * pick(kGroups);
  Recipe s{pick(kDtypes), hq, hk, 40, 24, {}, {}, {}};
  s.options.mask = pick(masks);
  s.options.softcap = round % 5 == 0 ? 3 : 0;
  s.options.engine = engine();
  Dense slopes(DType::kF32, {hq});
  write(slopes, std::vector<double>(static_cast<size_t>(hq), 0.1));
  if (round % 4 == 0) s.slopes = slopes;
  Dense sinks(DType::kF32, {hq});
  write(sinks, std::vector<double>(static_cast<size_t>(hq), 2.5));
  if (round % 3 == 0) s.sinks = sinks;

  const bool packed = round % 4 != 3;  // else a padded batch
  int64_t max_rows = 0, max_keys = 0;
  std::vector<Sample> samples;
  for (uint64_t n = 2 + random() % 5; n > 0; --n) {
    const int64_t sq = random() % 8 == 0 ? 0 : pick(kQueries);
    const int64_t most = sq > 33 || engine() == "reference" ? 400 : 2500;
    const auto sk = static_cast<int64_t>(random()) & INT64_MAX;
    samples.push_back(s.sample(sq, sk % 8 == 0 ? 0 : sk % most, pick(kSizes), random));
    max_rows = std::max(max_rows, sq);
    max_keys = std::max(max_keys, samples.back().sk);
  }
  const auto threads = [&] { return 1 + static_cast<int>(random() % 4); };
  const auto whole = packed ? run_packed(s, samples, threads())
                            : run_padded(s, samples, max_rows + 6, max_keys + 13, threads());
  if (whole.empty()) GTEST_SKIP() << "the engine refuses the call";
  for (size_t b = 0; b < samples.size(); ++b) {
    const Sample& one = samples[b];
    const std::vector<Bits> alone[] = {run_packed(s, {one}, threads())[0],
                                       run_padded(s, {one}, one.sq, one.sk, threads())[0],
                                       run_padded(s, {one}, one.sq, one.sk + 100, threads())[0],
                                       run_padded(s, {one}, one.sq + 70, one.sk, threads())[0]};
    for (size_t way = 0; way < std::size(alone); ++way) {
      for (size_t i = 0; i < std::size(names); ++i) {
        EXPECT_TRUE(whole[b][i] == alone[way][i])
            << names[i] << " in round " << round << " of sequence " << b << ", " << one.sq << " x "
            << one.sk << ", is not that of the sequence alone, way " << way;
      }
    }
  }
}

std::vector<std::tuple<int, EngineInfo>> rounds() {
  std::vector<std::tuple<int, EngineInfo>> all;
  for (const EngineInfo& engine : engines_here()) {
    for (int round = 0; round < (engine.name == "reference" ? 4 : 30); ++round)
      all.emplace_back(round, engine);
  }
  return all;
}

std::string round_name(const testing::TestParamInfo<RepeatRound::ParamType>& info) {
  const auto& [round, engine] = info.param;
  return engine.name + "_" + std::to_string(round);
}

INSTANTIATE_TEST_SUITE_P(, RepeatRound, testing::ValuesIn(rounds()), round_name);

// Few queries with many keys have kernels of their own, which split the keys. How they split them
// depends on the sequence's own rows and keys only: here the sequence is alone, with one that has
// too many rows for these kernels, with any number of others, and in memory that is not aligned to
// 16 bytes.
TEST_P(Repeat, FewQueriesInAnyBatch) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  for (const auto& [dtype, d, mask] : {std::tuple{DType::kBF16, 40, causal()},
                                       {DType::kF16, 20, window(1500, 0)},
                                       {DType::kF32, 20, full()}}) {
    SCOPED_TRACE(testing::Message() << name_of(dtype) << " d " << d);
    Recipe s{dtype, 4, 2, d, d - 8, {}, {}, {}, /*gradients=*/false};
    s.options.mask = mask;
    s.options.engine = engine();
    Dense sinks(DType::kF32, {4});
    write(sinks, std::vector{0.5, -1.0, 2.0, 3.0});
    s.sinks = sinks;
    std::mt19937_64 random(static_cast<uint64_t>(d));
    const auto sample = [&](int64_t sq, int64_t sk, double size = 1) {
      return s.sample(sq, sk, size, random);
    };
    // Up to 64 rows of a kv head, with keys that are cut and that are not, between 300 and 66.
    const std::vector<Sample> few = {
        sample(1, 2600), sample(32, 1100), sample(3, 1030, kNan), sample(2, 70),
        sample(1, 0),    sample(0, 40),    sample(1, 900, 1e4),   sample(5, 1025, kInf)};
    std::vector<Sample> all = few;
    all.insert(all.begin(), sample(150, 90, 1e4));
    all.push_back(sample(33, 1100));

    const auto packed = run_packed(s, all, 2);
    if (packed.empty()) continue;
    const auto padded = run_padded(s, all, 151, 2611, 3);
    EXPECT_TRUE(padded == packed) << "padded";
    const std::vector<std::vector<Bits>> of_few(packed.begin() + 1, packed.end() - 1);
    EXPECT_TRUE(run_packed(s, few, 1) == of_few) << "packed, without longer ones";
    EXPECT_TRUE(run_padded(s, few, 32, 2600, 2) == of_few) << "padded, without longer ones";
    for (size_t b = 0; b < all.size(); ++b) {
      const Sample& one = all[b];
      if (one.sk < 1000) continue;
      SCOPED_TRACE(testing::Message() << one.sq << " x " << one.sk);
      EXPECT_TRUE(run_padded(s, {one}, one.sq, one.sk, 1)[0] == packed[b]) << "alone";
      EXPECT_TRUE(run_packed(s, {one}, 4)[0] == packed[b]) << "alone, packed";
      EXPECT_TRUE(run_padded(s, {one}, one.sq + 100, one.sk + 900, 2)[0] == packed[b]) << "padded";
      const std::vector<Sample> same(5, one);
      EXPECT_TRUE(run_padded(s, same, one.sq, one.sk, 2)[3] == packed[b]) << "five times";
    }
  }
}

// Where heads and rows lie in memory decides what is read together, not what is computed.
TEST_P(Repeat, InvariantToLayout) {
  for (Case c : shapes()) {
    if (c.packed()) continue;
    SCOPED_TRACE(c.name());
    std::vector<Bits> first;
    for (const Layout layout : {Layout::kBshd, Layout::kBhsd, Layout::kPadded}) {
      c.layout = layout;
      Workload w(c, 7);
      w.options.engine = engine();
      w.options.invariant = w.options.deterministic = true;
      if (!runs(w)) continue;
      if (first.empty()) first = all_bits(w);
      ASSERT_EQ(all_bits(w), first) << c.name();
    }
  }
}

TEST_P(Repeat, PlanServesOtherData) {
  for (const Case& c : shapes()) {
    SCOPED_TRACE(c.name());
    Workload a(c, 5), b(c, 6);
    a.options.engine = engine();
    a.options.deterministic = true;
    a.run_options = b.run_options;
    std::optional<Plan> forward_plan, backward_plan;
    {
      EngineMemory memory(engine());
      const ForwardTensors a_forward = memory.at(a.forward), b_forward = memory.at(b.forward);
      const BackwardTensors a_backward = memory.at(a.backward), b_backward = memory.at(b.backward);
      const Options options = memory.options(a.forward, a.options);
      if (!computes([&] { forward_plan = plan(a_forward, options); })) continue;
      computes([&] { backward_plan = plan(a_backward, options); });
      forward_plan->run(a_forward, a.run_options);
      if (backward_plan) backward_plan->run(a_backward, a.run_options);
      forward_plan->run(b_forward, b.run_options);
      if (backward_plan) backward_plan->run(b_backward, b.run_options);
      memory.bring_back();
    }
    const auto planned = all_bits(b);
    b.options.engine = engine();
    b.options.deterministic = true;
    b.seal();
    runs(b);
    EXPECT_EQ(all_bits(b), planned);
  }
}

/// A dtype that an engine computes.
DType some_dtype(const std::string& engine) {
  return engine == "cuda" ? DType::kBF16 : DType::kF32;
}

// With k = 0 every probability is 1 / sk; with v = I the output shows the dropout mask itself.
struct DropoutProbe {
  static constexpr int64_t kKeys = 250;

  DropoutProbe(const std::string& engine, int64_t batch, int64_t sq, int64_t hq, double p,
               uint64_t seed, uint64_t offset)
      : w({.dtype = some_dtype(engine),
           .batch = batch,
           .sq = sq,
           .sk = kKeys,
           .hq = hq,
           .d = 8,
           .dv = kKeys},
          1) {
    w.options.engine = engine;
    write(w.forward.k, std::vector<double>(w.forward.k.numel()));
    std::vector<double> identity(w.forward.v.numel());
    for (int64_t n = 0; n < w.forward.v.numel(); ++n) {
      identity[n] = n / kKeys % kKeys == n % kKeys;
    }
    write(w.forward.v, identity);
    w.options.dropout_p = p;
    w.run_options = {.dropout_seed = seed, .dropout_offset = offset};
    w.seal();
  }

  // [b, i, h, j]: what each probability was multiplied with, times 1 - p.
  std::vector<bool> kept() {
    w.run_forward();
    const double rounding = w.c.dtype == DType::kF32 ? 1e-5 : 1e-2;
    std::vector<bool> mask;
    for (const double o : read(w.forward.out)) {
      const double z = o * kKeys * (1 - w.options.dropout_p);
      EXPECT_TRUE(std::fabs(z) < rounding || std::fabs(z - 1) < rounding) << z;
      mask.push_back(z > 0.5);
    }
    return mask;
  }

  Workload w;
};

TEST_P(Repeat, DropoutMaskIsTheDocumentedOne) {
  DropoutProbe probe(engine(), 2, 40, 3, 0.3, 77, 5);
  std::vector<bool> kept;
  if (!computes([&] { kept = probe.kept(); })) return;
  const auto mask = kernels::dropout_mask(kernels::dropout_threshold(0.3), 77, 5);
  size_t n = 0;
  for (uint64_t b = 0; b < 2; ++b) {
    for (uint64_t i = 0; i < 40; ++i) {
      for (uint64_t h = 0; h < 3; ++h) {
        for (uint64_t j = 0; j < DropoutProbe::kKeys; ++j) {
          ASSERT_EQ(kept[n++], mask.keeps(b * 3 + h, i, j));
        }
      }
    }
  }
}

// rng_state is read when a run computes: one plan, other numbers in the same memory.
TEST_P(Repeat, DropoutByRngState) {
  const auto results = [](const Workload& w) {
    return std::vector{bits(w.forward.out), bits(w.backward.dq), bits(w.backward.dv)};
  };
  Workload w({.dtype = some_dtype(engine()),
              .batch = 2,
              .sq = 20,
              .sk = 50,
              .hq = 2,
              .hk = 1,
              .dropout = 0.3},
             1),
      same(w.c, 1);
  w.options.engine = same.options.engine = engine();
  w.options.deterministic = same.options.deterministic = true;
  Dense state(DType::kI64, {2});
  w.forward.rng_state = w.backward.rng_state = state;
  w.run_options = {};
  EngineMemory memory(engine());
  const ForwardTensors f = memory.at(w.forward);
  const BackwardTensors b = memory.at(w.backward);
  std::optional<Plan> forward_plan, backward_plan;
  if (!computes([&] { forward_plan = plan(f, memory.options(f, w.options)); })) return;
  const bool both = computes([&] { backward_plan = plan(b, memory.options(b, w.options)); });
  std::set<std::vector<double>> different;
  for (const auto& [seed, offset] :
       {std::pair<uint64_t, uint64_t>{0, 0}, {7, 0}, {0, 7}, {UINT64_MAX, uint64_t{1} << 63}}) {
    const uint64_t numbers[] = {seed, offset};
    std::memcpy(state.tensor().data, numbers, sizeof numbers);
    w.seal();
    memory.send();
    forward_plan->run(f);
    if (both) backward_plan->run(b);
    memory.bring_back();
    same.seal();
    same.run_options = {.dropout_seed = seed, .dropout_offset = offset};
    same.run_forward();
    if (both) same.run_backward();
    EXPECT_EQ(results(w), results(same));
    different.insert(read(w.forward.out));
  }
  EXPECT_EQ(different.size(), 4u);
}

TEST_P(Repeat, DropoutMaskIgnoresThreadsAndTiling) {
  DropoutProbe probe(engine(), 2, 130, 2, 0.5, 1, 2);
  std::vector<bool> reference;
  if (!computes([&] { reference = probe.kept(); })) return;
  for (const int threads : {1, 2, 3}) {
    probe.w.options.threads = threads;
    EXPECT_EQ(probe.kept(), reference);
  }
  // One query alone (a decode plan) has the mask of query 0.
  DropoutProbe decode(engine(), 2, 1, 2, 0.5, 1, 2);
  const auto first = decode.kept();
  for (size_t b = 0; b < 2; ++b) {
    for (size_t n = 0; n < 2 * DropoutProbe::kKeys; ++n) {
      ASSERT_EQ(first[b * 2 * DropoutProbe::kKeys + n],
                reference[b * 130 * 2 * DropoutProbe::kKeys + n]);
    }
  }
}

TEST_P(Repeat, DropoutKeepsItsRate) {
  for (const double p : {0.0, 0.1, 0.5, 0.9, 0.99}) {
    DropoutProbe probe(engine(), 1, 100, 2, p, 3, 0);
    std::vector<bool> kept;
    if (!computes([&] { kept = probe.kept(); })) continue;
    const auto n = static_cast<double>(kept.size());
    const auto count = static_cast<double>(std::count(kept.begin(), kept.end(), true));
    EXPECT_NEAR(count / n, 1 - p, 5 * std::sqrt(p * (1 - p) / n));
  }
}

TEST_P(Repeat, DropoutMasksDiffer) {
  std::set<std::vector<bool>> masks;
  for (const auto& [seed, offset] : {std::pair<uint64_t, uint64_t>{1, 0},
                                     {2, 0},
                                     {1, 1},
                                     {uint64_t{1} << 32, 0},
                                     {0, uint64_t{1} << 32}}) {
    DropoutProbe probe(engine(), 1, 8, 1, 0.5, seed, offset);
    if (!computes([&] { masks.insert(probe.kept()); })) return;
  }
  EXPECT_EQ(masks.size(), 5);
  DropoutProbe probe(engine(), 2, 1, 2, 0.5, 1,
                     0);  // rows, heads and sequences differ from each other
  const auto kept = probe.kept();
  std::set<std::vector<bool>> rows;
  for (int64_t row = 0; row < 4; ++row) {
    rows.emplace(kept.begin() + row * DropoutProbe::kKeys,
                 kept.begin() + (row + 1) * DropoutProbe::kKeys);
  }
  EXPECT_EQ(rows.size(), 4);
}

TEST_P(Repeat, DropoutKeepsTheExpectation) {
  Workload w({.dtype = some_dtype(engine()), .sq = 4, .sk = 100, .d = 16, .dv = 16}, 8);
  w.options.engine = engine();
  const double p = 0.3;
  w.options.dropout_p = p;
  if (!computes([&] { w.run_forward(); })) return;
  w.options.dropout_p = 0;
  w.run_forward();
  const auto out = read(w.forward.out), lse = read(w.forward.lse);
  constexpr int kRuns = 600;
  std::vector<double> sum(out.size()), squares(out.size());
  for (int run = 0; run < kRuns; ++run) {
    w.options.dropout_p = p;
    w.run_options = {.dropout_seed = static_cast<uint64_t>(run)};
    w.run_forward();
    const auto sample = read(w.forward.out);
    for (size_t n = 0; n < out.size(); ++n) {
      sum[n] += sample[n];
      squares[n] += sample[n] * sample[n];
    }
    ASSERT_EQ(read(w.forward.lse), lse) << "dropout changes the LSE";
  }
  for (size_t n = 0; n < out.size(); ++n) {
    const double mean = sum[n] / kRuns, variance = squares[n] / kRuns - mean * mean;
    ASSERT_NEAR(mean, out[n], 5 * std::sqrt(variance / kRuns));
  }
}

FULGUR_EVERY_ENGINE(Repeat);

}  // namespace
}  // namespace fulgur::test

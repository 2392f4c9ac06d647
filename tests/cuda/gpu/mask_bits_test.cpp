// Bool masks as bits with a map of their tiles: every tile that takes them so, which the cost model
// would take for long calls, over masks with tiles of every kind.
#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "every_tile.h"

namespace fulgur::test {
namespace {

/// Where keys are hidden.
enum class Pattern { kRandom, kNowhere, kDocuments, kChecked, kRows, kEverywhere };

struct MaskCase {
  Case c;
  Pattern pattern;
  bool of_batch = false, of_heads = false, of_rows = true;
  int sms = 0;  ///< that are planned for; 0: those there are
};

bool is_seen(Pattern pattern, int64_t row, int64_t key, uint64_t number) {
  switch (pattern) {
    case Pattern::kRandom:
      return number % 8 != 0;
    case Pattern::kNowhere:
      return true;
    case Pattern::kDocuments:
      return row / 150 == key / 150;
    case Pattern::kChecked:
      return (row / 128 + key / 160) % 2 == 0;
    case Pattern::kRows:
      return row >= 70 && key != 5;
    case Pattern::kEverywhere:
      break;
  }
  return false;
}

std::vector<MaskCase> mask_cases() {
  const auto shape = [](int64_t sq, int64_t sk, int64_t d, Mask mask = full()) {
    return Case{.dtype = DType::kBF16,
                .batch = 2,
                .sq = sq,
                .sk = sk,
                .hq = 4,
                .hk = 2,
                .d = d,
                .dv = d,
                .mask = mask,
                .bias = Bias::kAll};
  };
  std::vector<MaskCase> all = {
      {shape(1, 90, 128, causal()), Pattern::kRandom, true, false, false},
      {shape(200, 300, 64, window(70, 20)), Pattern::kDocuments},
      {shape(300, 520, 128), Pattern::kRandom, false, false, true, 132},
      {shape(460, 460, 128, causal()), Pattern::kDocuments, true},
      {shape(200, 300, 128), Pattern::kChecked, false, true},
      {shape(260, 401, 96), Pattern::kNowhere},
      {shape(130, 250, 128), Pattern::kRows, false, false, true, 132},
      {shape(70, 200, 64), Pattern::kEverywhere},
      {shape(150, 330, 64, causal()), Pattern::kRandom, true, true},
      {shape(140, 260, 128), Pattern::kDocuments},
      {shape(130, 200, 192), Pattern::kChecked},
      {shape(66, 140, 256, causal()), Pattern::kRandom},
      {shape(190, 333, 128, window(100, 40)), Pattern::kRandom, false, false, false, 132},
      // With key blocks that are cut: more than two for each SM.
      {shape(330, 300, 128), Pattern::kRandom, false, false, true, 5},
      {shape(300, 300, 64), Pattern::kDocuments, true, false, true, 5},
  };
  all[4].c.seqused = all[4].c.seqused_q = true;
  all[8].c.sinks = true;
  all[9].c.dropout = 0.25;
  all[9].c.dlse = true;
  all[10].c.dv = 128;
  all[10].c.dtype = DType::kF16;
  return all;
}

class MaskBits : public OnGpu, public testing::WithParamInterface<MaskCase> {};

/// Tiles that take the mask otherwise, of both passes.
template <class Args>
std::set<std::string> other_tiles(Workload& w, const Args& tensors, int sms) {
  cuda::Gpu& gpu = cuda::Gpu::at(0);
  cuda::Card card = cuda::card_of(gpu);
  if (sms > 0) card.sms = sms;
  EngineMemory memory("cuda");
  const Args args = memory.at(tensors);
  std::vector<std::string> rejected;
  std::set<std::string> others;
  for (const auto& candidate :
       cuda::all_candidates(make_problem(args, memory.options(tensors, w.options)),
                            cuda::architecture_of(gpu.target()).families, card, &rejected)) {
    if (!candidate->tile.family.ends_with("_bits")) others.insert(candidate->tile.text());
  }
  return others;
}

TEST_P(MaskBits, FollowReference) {
  const auto& [c, pattern, of_batch, of_heads, of_rows, sms] = GetParam();
  Workload w(c, c.seed());
  w.options.engine = "cuda";
  const int64_t batch = of_batch ? c.batch : 1, heads = of_heads ? c.hq : 1;
  const int64_t rows = of_rows ? c.sq : 1;
  std::vector<double> seen(static_cast<size_t>(batch * heads * rows * c.sk));
  std::mt19937_64 random(c.seed());
  for (size_t i = 0; i < seen.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    seen[i] = is_seen(pattern, at / c.sk % rows, at % c.sk, random());
  }
  // It lies where the numbers of a bias of every dimension do.
  w.forward.bias = Tensor::contiguous(const_cast<void*>(w.forward.bias.data), DType::kBool,
                                      {batch, heads, rows, c.sk});
  write(w.forward.bias, seen);
  w.backward.bias = w.forward.bias;
  w.backward.dbias = {};
  const Expected e = expect(w);
  std::set<std::string> others = other_tiles(w, w.forward, sms);
  const size_t before = others.size();
  run_tiles<ForwardArgs>(
      w, w.forward, others, [] {}, [&] { return forward_is_right(w, e); }, sms);
  const bool is_hopper = cuda::Gpu::at(0).target().name() == "sm_90a";
  EXPECT_EQ(others.size() > before, is_hopper);
  others = other_tiles(w, w.backward, sms);
  run_tiles<BackwardArgs>(
      w, w.backward, others, [&] { w.run_forward(); }, [&] { return backward_is_right(w, e); },
      sms);
}

INSTANTIATE_TEST_SUITE_P(Cases, MaskBits, testing::ValuesIn(mask_cases()),
                         [](const auto& info) { return "n" + std::to_string(info.index); });

}  // namespace
}  // namespace fulgur::test

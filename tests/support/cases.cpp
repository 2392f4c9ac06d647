#include "cases.h"

#include <algorithm>
#include <array>
#include <random>
#include <set>
#include <sstream>
#include <utility>

namespace fulgur::test {
namespace {

using Pair = std::pair<int64_t, int64_t>;

// The factors. A row of the plan picks one level of each.
constexpr DType kDtypes[] = {DType::kF32, DType::kBF16, DType::kF16, DType::kF64};
constexpr int64_t kBatches[] = {1, 2, 3};
constexpr Pair kDims[] = {{1, 1},    {8, 8},     {17, 17},   {64, 64},   {80, 80},
                          {96, 96},  {128, 128}, {192, 192}, {256, 256}, {576, 512},
                          {64, 128}, {192, 128}, {128, 64},  {1, 17},    {96, 8}};
constexpr Pair kLengths[] = {{0, 0},    {0, 7},    {7, 0},    {1, 1},     {2, 2},     {7, 7},
                             {63, 63},  {64, 64},  {65, 65},  {127, 127}, {333, 333}, {1, 64},
                             {1, 333},  {63, 64},  {64, 63},  {2, 127},   {127, 65},  {333, 64},
                             {7, 1024}, {1024, 7}, {65, 333}, {1, 4096},  {4096, 2}};
constexpr Mask kMasks[] = {full(),         causal(),       window(0, 0),
                           window(16, 16), window(100, 0), window(-1, 5),
                           window(3, -1),  window(0, 70),  window(200, 40)};
constexpr Mask kChunkMasks[] = {chunked(1),
                                chunked(7),
                                chunked(100),
                                chunked(1000),
                                chunked(2, causal()),
                                chunked(16, causal()),
                                chunked(64, causal()),
                                chunked(200, causal()),
                                chunked(50, window(20, 0)),
                                chunked(30, window(40, 12)),
                                chunked(90, window(-1, 5)),
                                chunked(24, window(3, -1))};
constexpr Pair kHeads[] = {{1, 1}, {2, 2}, {3, 3}, {4, 2}, {6, 3}, {4, 1}, {8, 1}};
constexpr Layout kLayouts[] = {Layout::kBshd,   Layout::kBhsd,   Layout::kQkv,
                               Layout::kPadded, Layout::kPacked, Layout::kPackedPadded};
constexpr double kSoftcaps[] = {0, 0, 2};
constexpr Alibi kAlibis[] = {Alibi::kNone, Alibi::kNone, Alibi::kHeads, Alibi::kBatchHeads};
constexpr double kDropouts[] = {0, 0, 0.25};
constexpr bool kSequseds[] = {false, false, true};  // of q, of k
constexpr bool kSinks[] = {false, false, true};

constexpr size_t kFactors = 13;
using Row = std::array<size_t, kFactors>;
constexpr Row kLevels = {std::size(kDtypes),   std::size(kBatches),  std::size(kDims),
                         std::size(kLengths),  std::size(kMasks),    std::size(kHeads),
                         std::size(kLayouts),  std::size(kSoftcaps), std::size(kAlibis),
                         std::size(kDropouts), std::size(kSequseds), std::size(kSinks),
                         std::size(kSequseds)};
constexpr int64_t kMaxCost = 120'000'000;
constexpr int64_t kMaxSmallCost = 2'000'000;

Case to_case(const Row& row) {
  Case c;
  c.dtype = kDtypes[row[0]];
  c.batch = kBatches[row[1]];
  std::tie(c.d, c.dv) = kDims[row[2]];
  std::tie(c.sq, c.sk) = kLengths[row[3]];
  c.mask = kMasks[row[4]];
  std::tie(c.hq, c.hk) = kHeads[row[5]];
  c.layout = kLayouts[row[6]];
  c.softcap = kSoftcaps[row[7]];
  c.alibi = kAlibis[row[8]];
  c.dropout = kDropouts[row[9]];
  c.seqused = kSequseds[row[10]];
  c.sinks = kSinks[row[11]];
  c.seqused_q = kSequseds[row[12]];
  return c;
}

bool possible(const Case& c) {
  if (c.layout == Layout::kQkv && (c.sq != c.sk || c.d != c.dv)) return false;
  return c.cost() <= kMaxCost;
}

// Greedy all-pairs: of a few dozen random rows keep the one that covers most pairs of levels not
// seen together yet, until no random row covers a new one.
std::vector<Case> pairwise() {
  std::mt19937_64 random(1);
  std::set<std::array<size_t, 4>> seen;
  auto uncovered = [&](const Row& row) {
    std::vector<std::array<size_t, 4>> pairs;
    for (size_t a = 0; a < kFactors; ++a) {
      for (size_t b = a + 1; b < kFactors; ++b) {
        if (!seen.contains({a, row[a], b, row[b]})) pairs.push_back({a, row[a], b, row[b]});
      }
    }
    return pairs;
  };
  std::vector<Case> cases;
  for (int misses = 0; misses < 20;) {
    Row best{};
    size_t most = 0;
    for (int candidate = 0; candidate < 50; ++candidate) {
      Row row;
      for (size_t f = 0; f < kFactors; ++f) row[f] = random() % kLevels[f];
      if (!possible(to_case(row))) continue;
      if (const size_t count = uncovered(row).size(); count > most) {
        best = row;
        most = count;
      }
    }
    if (most == 0) {
      ++misses;
      continue;
    }
    for (const auto& pair : uncovered(best)) seen.insert(pair);
    cases.push_back(to_case(best));
    cases.back().dlse = cases.size() % 2 == 1;
  }
  return cases;
}

// Long sequences: many tiles, long sums, split keys.
std::vector<Case> long_cases() {
  const DType f32 = DType::kF32, bf16 = DType::kBF16, f16 = DType::kF16;
  return {
      {.dtype = f32, .sq = 1024, .sk = 1024, .mask = causal(), .dlse = true},
      {.dtype = bf16, .sq = 1024, .sk = 1024, .d = 128, .dv = 128},
      {.dtype = f16, .sq = 1024, .sk = 1024, .mask = window(300, 0), .layout = Layout::kQkv},
      {.dtype = f32, .sq = 4096, .sk = 4096, .d = 17, .dv = 17, .mask = causal()},
      {.dtype = bf16, .sq = 333, .sk = 4096, .mask = causal()},
      {.dtype = f32, .sq = 4096, .sk = 333, .mask = causal()},
      {.dtype = f32, .sq = 1, .sk = 4096, .hq = 8, .hk = 2, .d = 128, .dv = 128},
      {.dtype = bf16, .batch = 3, .sq = 1, .sk = 4096, .hq = 8, .hk = 1, .seqused = true},
      {.dtype = bf16,  // a decoded part and a whole block of gpt-oss
       .batch = 2,
       .sq = 1,
       .sk = 4096,
       .hq = 8,
       .hk = 1,
       .mask = window(127, 0),
       .sinks = true},
      {.dtype = bf16,
       .sq = 700,
       .sk = 700,
       .hq = 8,
       .hk = 1,
       .mask = window(127, 0),
       .dlse = true,
       .sinks = true},
      {.dtype = bf16,  // a q block of many rows in many splits
       .sq = 4,
       .sk = 4096,
       .hq = 8,
       .hk = 1,
       .mask = causal(),
       .sinks = true},
      {.dtype = f16,
       .batch = 3,
       .sq = 2,
       .sk = 4096,
       .hq = 8,
       .hk = 2,
       .mask = causal(),
       .layout = Layout::kPacked,
       .dlse = true,
       .sinks = true},
      {.dtype = f16, .batch = 2, .sq = 3, .sk = 4096, .hq = 4, .hk = 1, .mask = causal()},
      {.dtype = f32,
       .batch = 3,
       .sq = 2,
       .sk = 4096,
       .hq = 4,
       .hk = 2,
       .mask = causal(),
       .layout = Layout::kPacked},
      {.dtype = bf16,
       .sq = 1,
       .sk = 4096,
       .hq = 4,
       .hk = 1,
       .mask = window(1000, 0),
       .alibi = Alibi::kHeads},
      {.dtype = DType::kF64, .sq = 333, .sk = 1024, .mask = causal()},
      {.dtype = f32,  // gradients of two keys that are sums over 32768 rows
       .batch = 2,
       .sq = 4096,
       .sk = 2,
       .hq = 8,
       .hk = 1,
       .d = 1,
       .dv = 1,
       .layout = Layout::kPackedPadded,
       .alibi = Alibi::kHeads,
       .dropout = 0.25},
      {.dtype = bf16,  // many row tiles and key tiles, each with random numbers of its own
       .batch = 2,
       .sq = 500,
       .sk = 700,
       .hq = 4,
       .hk = 2,
       .d = 96,
       .dv = 96,
       .mask = causal(),
       .dropout = 0.25},
      {.dtype = bf16,
       .sq = 700,
       .sk = 500,
       .hq = 2,
       .hk = 1,
       .d = 128,
       .dv = 128,
       .softcap = 2,
       .dropout = 0.25},
      {.dtype = f16,
       .batch = 2,
       .sq = 400,
       .sk = 400,
       .hq = 2,
       .hk = 2,
       .d = 256,
       .dv = 256,
       .mask = window(200, 40),
       .layout = Layout::kPacked,
       .dropout = 0.25},
  };
}

// Drafts of a few tokens and of as many as a word has, over keys of which some are no tokens, all
// are, or not even these.
std::vector<Case> tree_cases() {
  constexpr Pair kTreeLengths[] = {{1, 70},  {2, 2},   {5, 333}, {7, 7},    {8, 3},   {16, 1024},
                                   {33, 65}, {40, 20}, {63, 64}, {64, 200}, {64, 64}, {13, 0}};
  constexpr Layout kTreeLayouts[] = {Layout::kBshd, Layout::kPacked, Layout::kBhsd,
                                     Layout::kPackedPadded};
  constexpr Mask kTreeMasks[] = {full(), causal(), full(), window(20, 0), window(6, 3)};
  constexpr Pair kTreeHeads[] = {{4, 1}, {2, 2}, {6, 2}};
  constexpr Pair kTreeDims[] = {{64, 64}, {128, 128}, {40, 24}, {17, 80}, {256, 192}};
  std::vector<Case> cases;
  for (size_t i = 0; i < 36; ++i) {
    Case c;
    c.dtype = i % 9 == 8 ? DType::kF64 : kDtypes[i % 3];
    c.batch = kBatches[i % 2 + 1];
    std::tie(c.sq, c.sk) = kTreeLengths[i % std::size(kTreeLengths)];
    std::tie(c.hq, c.hk) = kTreeHeads[i / 2 % std::size(kTreeHeads)];
    std::tie(c.d, c.dv) = kTreeDims[i % std::size(kTreeDims)];
    c.mask = kTreeMasks[i / 3 % std::size(kTreeMasks)];
    c.layout = kTreeLayouts[i / 5 % std::size(kTreeLayouts)];
    c.softcap = i % 7 == 3 ? 2 : 0;
    c.alibi = i % 5 == 4 ? Alibi::kHeads : Alibi::kNone;
    c.dropout = i % 11 == 5 ? 0.25 : 0;
    c.seqused_q = i % 5 == 2;
    c.seqused = i % 4 == 1;
    c.sinks = i % 7 == 1;
    c.tree = i % 2 == 0 ? Tree::kAncestors : Tree::kRandom;
    cases.push_back(c);
  }
  // All that a step of decoding may have at once.
  for (const auto& [d, dv] : {Pair{64, 64}, {128, 64}, {256, 192}}) {
    cases.push_back({.dtype = d == 128 ? DType::kF16 : DType::kBF16,
                     .batch = d == 256 ? 1 : 2,
                     .sq = 7,
                     .sk = 70,
                     .hq = 4,
                     .hk = 1,
                     .d = d,
                     .dv = dv,
                     .mask = window(40, 2),
                     .layout = d == 64 ? Layout::kPacked : Layout::kBshd,
                     .softcap = 2,
                     .alibi = Alibi::kHeads,
                     .seqused_q = true,
                     .seqused = true,
                     .sinks = true,
                     .tree = Tree::kAncestors});
  }
  return cases;
}

// Chunks shorter and longer than tiles, in sequences whose last chunk is cut, and rows in front of
// the first key.
std::vector<Case> chunk_cases() {
  constexpr Pair kChunkLengths[] = {{64, 64},   {333, 333}, {65, 333}, {127, 65},
                                    {1, 333},   {7, 1024},  {7, 40},   {333, 64},
                                    {128, 256}, {300, 301}, {33, 20}};
  constexpr Pair kChunkDims[] = {{64, 64},   {128, 128}, {17, 17}, {256, 256},
                                 {192, 128}, {40, 24},   {8, 8}};
  std::vector<Case> cases;
  for (size_t i = 0; i < 5 * std::size(kChunkMasks); ++i) {
    const size_t turn = i + i / std::size(kChunkMasks);  // others go on while masks begin anew
    Case c;
    c.dtype = turn % 10 == 9 ? DType::kF64 : kDtypes[turn % 3];
    c.batch = kBatches[i / 5 % 2 + 1];
    std::tie(c.sq, c.sk) = kChunkLengths[turn % std::size(kChunkLengths)];
    std::tie(c.hq, c.hk) = kHeads[i % std::size(kHeads)];
    std::tie(c.d, c.dv) = kChunkDims[turn / 2 % std::size(kChunkDims)];
    c.mask = kChunkMasks[i % std::size(kChunkMasks)];
    c.layout = i % 5 < 2 ? Layout::kPacked : i % 5 == 2 ? Layout::kBhsd : Layout::kBshd;
    c.softcap = i % 7 == 3 ? 2 : 0;
    c.alibi = i % 11 == 4 ? Alibi::kHeads : Alibi::kNone;
    c.dropout = i % 13 == 5 ? 0.25 : 0;
    c.seqused_q = turn % 5 == 2;
    c.seqused = turn % 4 == 1;
    c.dlse = turn % 2 == 1;
    c.sinks = i % 13 > 10;
    cases.push_back(c);
  }
  // Decoding in the middle of a chunk and at its beginning, and whole tiles in one chunk of
  // several.
  cases.push_back({.dtype = DType::kBF16,
                   .batch = 3,
                   .sq = 4,
                   .sk = 4096,
                   .hq = 8,
                   .hk = 2,
                   .mask = chunked(1500, causal()),
                   .seqused = true});
  cases.push_back({.dtype = DType::kF16,
                   .batch = 3,
                   .sq = 1,
                   .sk = 4001,
                   .hq = 8,
                   .hk = 1,
                   .d = 128,
                   .dv = 128,
                   .mask = chunked(1000, causal()),
                   .seqused = true});
  for (const int64_t d : {64, 128, 256}) {
    cases.push_back({.dtype = DType::kBF16,
                     .sq = 900,
                     .sk = 1000,
                     .hq = 2,
                     .hk = 1,
                     .d = d,
                     .dv = d,
                     .mask = chunked(384, d == 128 ? full() : causal()),
                     .dlse = true});
  }
  return cases;
}

// Masks aligned top-left: fewer queries than keys, so that no row sees the last keys, and more, so
// that the last rows see few keys or none.
std::vector<Case> top_left_cases() {
  const Mask kMasks[] = {causal(),       window(-1, 30), window(20, -1),           window(40, 2),
                         window(100, 0), full(),         chunked(100, causal()),   chunked(48),
                         window(0, 0),   causal(),       chunked(64, window(9, 3))};
  constexpr Pair kLengths[] = {{64, 333},  {333, 64}, {1, 333},  {4, 1024}, {127, 127}, {300, 1000},
                               {1000, 65}, {65, 127}, {16, 200}, {7, 2},    {128, 256}, {640, 512}};
  constexpr Pair kDims[] = {{64, 64}, {128, 128}, {17, 17}, {256, 256}, {192, 128}, {40, 24}};
  std::vector<Case> cases;
  for (size_t i = 0; i < 5 * std::size(kLengths); ++i) {
    const size_t turn = i + i / std::size(kLengths);
    Case c;
    c.dtype = turn % 11 == 9 ? DType::kF64 : kDtypes[turn % 3];
    c.batch = kBatches[i / 3 % 2 + 1];
    std::tie(c.sq, c.sk) = kLengths[i % std::size(kLengths)];
    std::tie(c.hq, c.hk) = kHeads[turn % std::size(kHeads)];
    std::tie(c.d, c.dv) = kDims[turn / 2 % std::size(kDims)];
    c.mask = top_left(kMasks[turn % std::size(kMasks)]);
    c.layout = i % 5 < 2 ? Layout::kPacked : i % 5 == 2 ? Layout::kBhsd : Layout::kBshd;
    c.softcap = i % 7 == 3 ? 2 : 0;
    c.alibi = c.mask == top_left(full()) || i % 9 == 4 ? Alibi::kHeads : Alibi::kNone;
    c.dropout = i % 13 == 5 ? 0.25 : 0;
    c.seqused_q = turn % 5 == 2;
    c.seqused = turn % 4 == 1;
    c.dlse = turn % 2 == 1;
    c.sinks = i % 13 > 10;
    cases.push_back(c);
  }
  return cases;
}

// Heads wider than 256 columns: of Gemma 4, of absorbed MLA, and of widths that no tile divides,
// with few rows of a kv head and many.
std::vector<Case> wide_cases() {
  constexpr Pair kWideDims[] = {{512, 512}, {576, 512}, {320, 320}, {257, 260},
                                {40, 288},  {512, 64},  {576, 72},  {500, 129}};
  constexpr Pair kWideLengths[] = {{1, 333}, {65, 333}, {2, 127},  {127, 65}, {4, 1024},
                                   {64, 64}, {333, 64}, {70, 200}, {0, 7},    {7, 0}};
  constexpr Pair kWideHeads[] = {{16, 1}, {2, 2}, {4, 1}, {32, 1}, {6, 2}, {3, 1}};
  const Mask kWideMasks[] = {causal(),      full(),        window(40, 0),
                             window(9, 20), window(0, 70), chunked(50, causal()),
                             causal(),      chunked(30),   top_left(causal())};
  std::vector<Case> cases;
  for (size_t i = 0; i < 40; ++i) {
    Case c;
    c.dtype = i % 10 == 9 ? DType::kF32 : i % 3 == 1 ? DType::kF16 : DType::kBF16;
    c.batch = kBatches[i % 3];
    std::tie(c.d, c.dv) = kWideDims[(i + i / 10) % std::size(kWideDims)];
    std::tie(c.sq, c.sk) = kWideLengths[i % std::size(kWideLengths)];
    std::tie(c.hq, c.hk) = kWideHeads[(i + i / 6) % std::size(kWideHeads)];
    c.mask = kWideMasks[i % std::size(kWideMasks)];
    c.layout = kLayouts[i % 5 == 2 ? 0 : (i + i / 6) % std::size(kLayouts)];
    if (c.layout == Layout::kQkv) c.layout = Layout::kBshd;
    c.softcap = i % 7 == 3 ? 2 : 0;
    c.alibi = i % 5 == 4 ? Alibi::kHeads : Alibi::kNone;
    c.dropout = i % 19 == 12 ? 0.25 : 0;
    c.seqused_q = i % 5 == 2;
    c.seqused = i % 4 == 1;
    c.dlse = i % 2 == 1;
    c.sinks = i % 6 == 2;
    cases.push_back(c);
  }
  // Drafts of a model with absorbed MLA: 32 rows of a kv head, and 112.
  for (const int64_t hq : {4, 16}) {
    cases.push_back({.dtype = DType::kBF16,
                     .batch = 2,
                     .sq = 7,
                     .sk = 200,
                     .hq = hq,
                     .hk = 1,
                     .d = 576,
                     .dv = 512,
                     .mask = hq == 4 ? causal() : full(),
                     .seqused = true,
                     .tree = Tree::kAncestors});
  }
  return cases;
}

std::vector<Case> select(bool small) {
  std::vector<Case> selected;
  int cheap = 0;
  for (const Case& c : all_cases()) {
    const bool is_small = c.cost() <= kMaxSmallCost && ++cheap % 4 == 0;
    if (is_small == small) selected.push_back(c);
  }
  return selected;
}

const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::kBshd:
      return "bshd";
    case Layout::kBhsd:
      return "bhsd";
    case Layout::kQkv:
      return "qkv";
    case Layout::kPadded:
      return "padded";
    case Layout::kPacked:
      return "packed";
    case Layout::kPackedPadded:
      return "packedpadded";
  }
  return "";
}

std::string name_of(const Mask& mask) {
  if (mask.top_left) return "topleft_" + name_of(Mask{mask.left, mask.right, mask.chunk});
  if (mask.chunk > 0) {
    return name_of(window(mask.left, mask.right)) + "_chunk" + std::to_string(mask.chunk);
  }
  if (mask == full()) return "full";
  if (mask == causal()) return "causal";
  auto side = [](int64_t keys) { return keys < 0 ? std::string("inf") : std::to_string(keys); };
  return "window" + side(mask.left) + "x" + side(mask.right);
}

}  // namespace

std::string Case::name() const {
  std::ostringstream s;
  s << fulgur::name_of(dtype) << "_b" << batch << "_q" << sq << "_k" << sk << "_h" << hq << "x"
    << hk << "_d" << d << "x" << dv << "_" << test::name_of(mask) << "_" << test::name_of(layout);
  if (softcap > 0) s << "_softcap";
  if (alibi == Alibi::kHeads) s << "_alibi";
  if (alibi == Alibi::kBatchHeads) s << "_alibibatch";
  if (dropout > 0) s << "_dropout";
  if (seqused_q) s << "_sequsedq";
  if (seqused) s << "_seqused";
  if (dlse) s << "_dlse";
  if (sinks) s << "_sinks";
  if (tree == Tree::kAncestors) s << "_tree";
  if (tree == Tree::kRandom) s << "_treerandom";
  if (bias != Bias::kNone) s << "_bias" << static_cast<int>(bias);
  return s.str();
}

uint64_t Case::seed() const {
  uint64_t hash = 0xcbf29ce484222325;
  for (const char letter : name()) hash = (hash ^ static_cast<uint8_t>(letter)) * 0x100000001b3;
  return hash;
}

std::vector<Case> all_cases() {
  std::vector<Case> cases = pairwise();
  for (const Case& c : long_cases()) cases.push_back(c);
  for (const Case& c : tree_cases()) cases.push_back(c);
  for (const Case& c : chunk_cases()) cases.push_back(c);
  for (const Case& c : top_left_cases()) cases.push_back(c);
  for (const Case& c : wide_cases()) cases.push_back(c);
  return cases;
}

std::vector<Case> small_cases() { return select(true); }
std::vector<Case> large_cases() { return select(false); }

}  // namespace fulgur::test

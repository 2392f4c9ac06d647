// The tests' own tools: the case list covers what it claims, and the checks fail when they should.
#include "oracle.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <set>

namespace fulgur::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

TEST(Cases, NamesAreUnique) {
  std::set<std::string> names;
  for (const Case& c : all_cases()) EXPECT_TRUE(names.insert(c.name()).second) << c.name();
  EXPECT_EQ(small_cases().size() + large_cases().size(), all_cases().size());
}

// Every dtype meets every dim, mask, group, layout and length.
TEST(Cases, EveryDtypeMeetsEveryLevel) {
  using Level = std::pair<std::string, std::vector<int64_t>>;
  std::map<DType, std::set<Level>> seen;
  for (const Case& c : all_cases()) {
    // Lists of their own.
    if (c.tree != Tree::kNone || c.mask.chunk > 0 || c.mask.top_left) continue;
    seen[c.dtype].insert({{"dims", {c.d, c.dv}},
                          {"length", {c.sq}},
                          {"length", {c.sk}},
                          {"mask", {c.mask.left, c.mask.right}},
                          {"heads", {c.hq, c.hk}},
                          {"layout", {static_cast<int64_t>(c.layout)}},
                          {"alibi", {static_cast<int64_t>(c.alibi)}},
                          {"softcap", {c.softcap > 0}},
                          {"dropout", {c.dropout > 0}},
                          {"seqused_q", {c.seqused_q}},
                          {"seqused", {c.seqused}},
                          {"dlse", {c.dlse}},
                          {"sinks", {c.sinks}}});
  }
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const int64_t length : {0, 1, 2, 7, 63, 64, 65, 127, 333, 1024, 4096}) {
      EXPECT_TRUE(seen[dtype].contains({"length", {length}})) << name_of(dtype) << " " << length;
    }
    for (const int64_t dim : {1, 8, 17, 64, 80, 96, 128, 192, 256}) {
      EXPECT_TRUE(seen[dtype].contains({"dims", {dim, dim}})) << name_of(dtype) << " " << dim;
    }
    EXPECT_TRUE(seen[dtype].contains({"dims", {576, 512}})) << name_of(dtype);  // the largest
    for (const auto& level : seen[DType::kF64]) {  // has no hand-picked masks
      EXPECT_TRUE(seen[dtype].contains(level)) << name_of(dtype) << " lacks a " << level.first;
    }
  }
}

TEST(Storage, RoundsToNearestEven) {
  EXPECT_EQ(rounded(1 + 0x1p-8, DType::kBF16), 1);
  EXPECT_EQ(rounded(1 + 3 * 0x1p-8, DType::kBF16), 1 + 0x1p-6);
  EXPECT_EQ(rounded(1 + 0x1p-11, DType::kF16), 1);
  EXPECT_EQ(rounded(1 + 3 * 0x1p-11, DType::kF16), 1 + 0x1p-9);
  EXPECT_EQ(rounded(65519, DType::kF16), 65504);
  EXPECT_EQ(rounded(-65520, DType::kF16), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(rounded(0x1p-24, DType::kF16), 0x1p-24);
  EXPECT_EQ(rounded(0x1p-25, DType::kF16), 0);
  EXPECT_EQ(rounded(0x1.ffcp-15, DType::kF16), 0x1p-14);
  EXPECT_TRUE(std::isnan(rounded(kNan, DType::kF16)));
  EXPECT_TRUE(std::isnan(rounded(kNan, DType::kBF16)));
  for (int bits = 0; bits < 0x7c00; ++bits) {  // every finite f16 stands for itself
    const auto cell = static_cast<uint16_t>(bits);
    const double value = load(&cell, DType::kF16, 0);
    uint16_t back = 0;
    store(&back, DType::kF16, 0, value);
    ASSERT_EQ(back, cell);
  }
}

TEST(Storage, IsFoundFromAnyAddressInIt) {
  const void* begin = nullptr;
  {
    Storage one(DType::kF32, 10), other(DType::kBF16, 0);
    for (Storage* s : {&one, &other}) {
      begin = s->bytes().data();
      EXPECT_EQ(Storage::around(begin), s);
      EXPECT_EQ(Storage::around(s->bytes().data() + s->bytes().size() - 1), s);
      EXPECT_NE(Storage::around(s->bytes().data() + s->bytes().size()), s);
      EXPECT_NE(Storage::around(s->bytes().data() - 1), s);
    }
    EXPECT_EQ(Storage::around(&one), nullptr);
  }
  EXPECT_EQ(Storage::around(begin), nullptr);
}

class Oracle : public testing::Test {
 protected:
  Case c{.dtype = DType::kBF16,
         .batch = 2,
         .sq = 40,
         .sk = 50,
         .hq = 4,
         .hk = 2,
         .d = 24,
         .dv = 16,
         .mask = causal(),
         .layout = Layout::kPadded,
         .sinks = true};
  Workload w{c, 1};
  Expected e = expect(w);

  void write_reference() {
    write(w.forward.out, e.reference.out);
    write(w.forward.lse, e.reference.lse);
    write(w.backward.dq, e.reference.dq);
    write(w.backward.dk, e.reference.dk);
    write(w.backward.dv, e.reference.dv);
    write(w.backward.dsinks, e.reference.dsinks);
  }
};

TEST_F(Oracle, AcceptsTheReference) {
  write_reference();
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(backward_is_right(w, e));
  EXPECT_TRUE(w.check_memory());
}

TEST_F(Oracle, RejectsOutputsThatWereNotWritten) {
  EXPECT_FALSE(forward_is_right(w, e));
  EXPECT_FALSE(backward_is_right(w, e));
  EXPECT_TRUE(w.nothing_written());
}

TEST_F(Oracle, RejectsOneWrongElement) {
  for (const Tensor& t : {w.forward.out, w.forward.lse, w.backward.dq, w.backward.dk, w.backward.dv,
                          w.backward.dsinks}) {
    for (const double wrong : {kNan, 0.05}) {
      write_reference();
      auto values = read(t);
      values[std::min(values.size() - 1, values.size() / 2 + 3)] += wrong;
      write(t, values);
      EXPECT_FALSE(forward_is_right(w, e) && backward_is_right(w, e)) << t.describe();
    }
  }
}

TEST_F(Oracle, RejectsAnotherProblem) {
  Workload other(c, 1);
  other.options.mask = full();
  const Expected full_mask = expect(other);
  write_reference();
  EXPECT_FALSE(forward_is_right(w, full_mask));
  EXPECT_FALSE(backward_is_right(w, full_mask));
}

TEST_F(Oracle, SeesWritesBetweenTheRows) {
  Tensor t = w.forward.out;
  t.data = static_cast<std::byte*>(t.data) + c.dv * size_of(t.dtype);  // after the first row
  t.rank = 1;
  t.shape = {1};
  t.strides = {1};
  write(t, std::vector{1.0});
  EXPECT_FALSE(w.check_memory());
  EXPECT_FALSE(w.nothing_written());
}

TEST_F(Oracle, SeesWritesToInputs) {
  auto q = read(w.forward.q);
  q[5] += 1;
  write(w.forward.q, q);
  EXPECT_FALSE(w.check_memory());
}

}  // namespace
}  // namespace fulgur::test

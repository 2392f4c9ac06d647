// How tensors lie for TMA and the tensor cores: maps, and that descriptors and swizzles agree with
// a model of both.
#include <gtest/gtest.h>

#include <string>

#include "cuda/common/tensor_map.h"
#include "cuda/sm90/common.h"

// The device text, read by the host's compiler: the instructions in it are never emitted.
#define __device__
#define __forceinline__ inline
#include "kernels/host_device/key_walk.h"
using namespace fulgur::kernels;
#include "kernels/sm90/ptx/wgmma.cuh"

namespace fulgur::cuda {
namespace {

using namespace sm90;

/// Where TMA puts element (row, column) of a box of 64 16-bit columns, swizzled by 128
/// bytes: the 16-byte chunk's number is xored with the row's in its group of 8 (CUDA driver API).
int swizzled(int row, int column) {
  return row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
}

/// Where the tensor cores read the 16-bit element of a matrix descriptor (PTX ISA, "matrix
/// descriptor"): groups of 8 lines of 128 bytes, `stride` bytes apart; the address is swizzled
/// last.
struct Descriptor {
  uint64_t bits;
  uint32_t start() const { return (bits & 0x3fff) << 4; }
  uint32_t leading() const { return (bits >> 16 & 0x3fff) << 4; }
  uint32_t stride() const { return (bits >> 32 & 0x3fff) << 4; }
  int swizzle() const { return static_cast<int>(bits >> 62); }
  uint32_t address(uint32_t line, uint32_t byte) const {
    const uint32_t at = start() + line / 8 * stride() + line % 8 * 128 + byte;
    return at ^ (at >> 7 & 7) << 4;
  }
};

Descriptor descriptor(u32 low) {
  const u64 high = std::stoul(FULGUR_DESCRIPTOR_HIGH, nullptr, 16);
  return {high << 32 | low};
}

TEST(Descriptors, OperandsWithKAlongTheirColumns) {  // Q and K: a panel is rows x 64 columns
  for (const int rows : {64, 80, 96, 128, 176}) {
    const u32 base = 3 * 1024 * 8;
    for (int step = 0; step < 16; ++step) {  // as issue_scores advances
      const int panel = step / 4, inside = step % 4 * 32;
      const Descriptor d =
          descriptor(operand_descriptor(base, 0) + ((panel * rows * 128 + inside) >> 4));
      ASSERT_EQ(d.swizzle(), 1);  // 128 bytes
      ASSERT_EQ(d.stride(), 1024u);
      for (int row = 0; row < rows; ++row) {
        for (int k = 0; k < 16; ++k) {
          const int column = step * 16 + k;
          ASSERT_EQ(d.address(row, 2 * k), base + panel * rows * 128 + swizzled(row, column % 64))
              << "row " << row << " column " << column;
        }
      }
    }
  }
}

TEST(Descriptors, OperandWithKAlongItsRows) {  // V: 16 rows are a step, panels of 64 columns apart
  for (const int rows : {80, 96, 128}) {
    const u32 base = 5 * 1024 * 8;
    for (int step = 0; step < rows / 16; ++step) {
      const Descriptor d =
          descriptor(operand_descriptor(base, rows * 128) + (step * 16 * 128 >> 4));
      ASSERT_EQ(d.leading(), static_cast<u32>(rows * 128));
      for (int k = 0; k < 16; ++k) {
        for (int column = 0; column < 256; ++column) {
          const u32 at = d.address(k, column % 64 * 2) + column / 64 * d.leading();
          ASSERT_EQ(at, base + column / 64 * rows * 128 + swizzled(step * 16 + k, column % 64));
        }
      }
    }
  }
}

TEST(TensorMaps, SayWhatTheyCannotAddress) {
  TensorShape shape{DType::kBF16, 64, 100, 4, 2, {100 * 256, 256, 64}, 64};
  EXPECT_EQ(not_addressable(shape), "");
  TensorShape odd = shape;
  odd.strides.head = 68;
  EXPECT_NE(not_addressable(odd).find("a stride of 68 elements between heads"), std::string::npos);
  odd.heads = 1;  // then it is never used
  EXPECT_EQ(not_addressable(odd), "");
  for (const int64_t stride : {-256, 0}) {
    TensorShape backwards = shape;
    backwards.strides.row = stride;
    EXPECT_NE(not_addressable(backwards).find("between seqlen"), std::string::npos);
  }
  TensorShape shifted = shape;
  shifted.strides.aligned = false;
  EXPECT_NE(not_addressable(shifted).find("no multiple of 16 bytes"), std::string::npos);
  shifted.batch = 0;
  EXPECT_EQ(not_addressable(shifted), "");
  TensorShape long_one = shape;
  long_one.rows = int64_t{1} << 31;
  EXPECT_NE(rows_unsupported(long_one).find("less than 2^31"), std::string::npos);
  long_one.batch = 0;
  EXPECT_EQ(rows_unsupported(long_one), "");
}

TEST(TensorMaps, CopiesHaveAddressableRows) {
  const TensorShape odd{DType::kBF16, 17, 100, 4, 2, {-7000, 0, 17, false}, 64};
  EXPECT_EQ(not_addressable(copied(odd)), "");
  EXPECT_EQ(copied(odd).strides, (Layout{100 * 4 * 24, 4 * 24, 24}));
  EXPECT_EQ(copied(odd).dim, 17);
  EXPECT_GE(copied_bytes(odd, "odd"), 2 * 100 * 4 * 24 * 2);
  EXPECT_EQ(copied_bytes(odd, "odd") % 256, 0);
  EXPECT_EQ(copied_bytes(odd, ""), 0) << "what is not copied takes no memory";
}

}  // namespace
}  // namespace fulgur::cuda

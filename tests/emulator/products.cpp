// Products of tensor cores: mma.sync and wgmma (PTX ISA 8.x).
#include <memory>
#include <utility>

#include "instruction.h"

namespace emulator {
// Of 16 columns of A, or of the first 8.
void multiply_warp(Context& c, const Instruction& i) {
  const int halves = i.has("m16n8k8") ? 1 : 2;
  current->uses_loads();
  emulator_counts.products += 16 * 8 * 8 * halves / 32;
  struct Lane {
    float c[4];
    uint32_t a[4], b[2];
    Widen widen;
  } mine{};
  const int b = 4 + 2 * halves;  // after C and A
  for (int k = 0; k < 2 * halves; ++k) mine.a[k] = c.get32(i.atoms[k + 4]);
  for (int k = 0; k < halves; ++k) mine.b[k] = c.get32(i.atoms[k + b]);
  for (int k = 0; k < 4; ++k) mine.c[k] = c.get_float(i.atoms[k + b + halves]);
  mine.widen = widen(i);
  meet(~0u, &mine, [](void* const* lanes, uint32_t) {
    float a[16][16], b[16][8];
    const auto lane_of = [&](int lane) -> Lane& { return *static_cast<Lane*>(lanes[lane]); };
    const Widen wide = lane_of(0).widen;
    for (int lane = 0; lane < 32; ++lane)
      for (int half = 0; half < 2; ++half) {
        const int r = lane / 4, q = lane % 4 * 2 + half;
        const auto value = [&](uint32_t x) { return wide(static_cast<uint16_t>(x >> 16 * half)); };
        a[r][q] = value(lane_of(lane).a[0]);
        a[r + 8][q] = value(lane_of(lane).a[1]);
        a[r][q + 8] = value(lane_of(lane).a[2]);
        a[r + 8][q + 8] = value(lane_of(lane).a[3]);
        b[q][r] = value(lane_of(lane).b[0]);
        b[q + 8][r] = value(lane_of(lane).b[1]);
      }
    for (int lane = 0; lane < 32; ++lane)
      for (int k = 0; k < 4; ++k) {
        const int row = lane / 4 + k / 2 * 8, column = lane % 4 * 2 + k % 2;
        float sum = 0;
        for (int j = 0; j < 16; ++j) sum += a[row][j] * b[j][column];
        lane_of(lane).c[k] += sum;
      }
  });
  for (int k = 0; k < 4; ++k) c.set_float(i.atoms[k], mine.c[k]);
}

namespace {

/// A number of tf32: the lower 13 bits do not count.
double f64_of_tf32(uint32_t x) { return bits_of<float>(x & 0xffffe000); }

/// Sums are rounded toward zero.
float toward_zero(double x) {
  const auto nearest = static_cast<float>(x);
  return std::fabs(static_cast<double>(nearest)) > std::fabs(x) && std::isfinite(x)
             ? std::nextafter(nearest, 0.F)
             : nearest;
}

}  // namespace

void multiply_tf32_warp(Context& c, const Instruction& i) {
  current->uses_loads();
  emulator_counts.products += 16 * 8 * 8 / 32;
  struct Lane {
    float c[4];
    uint32_t a[4], b[2];
  } mine;
  for (int k = 0; k < 4; ++k) mine.a[k] = c.get32(i.atoms[k + 4]);
  for (int k = 0; k < 2; ++k) mine.b[k] = c.get32(i.atoms[k + 8]);
  for (int k = 0; k < 4; ++k) mine.c[k] = c.get_float(i.atoms[k + 10]);
  meet(~0u, &mine, [](void* const* lanes, uint32_t) {
    double a[16][8], b[8][8];
    for (int lane = 0; lane < 32; ++lane) {
      const Lane& from = *static_cast<Lane*>(lanes[lane]);
      const int r = lane / 4, q = lane % 4;
      for (int k = 0; k < 4; ++k) a[r + k % 2 * 8][q + k / 2 * 4] = f64_of_tf32(from.a[k]);
      for (int k = 0; k < 2; ++k) b[q + k * 4][r] = f64_of_tf32(from.b[k]);
    }
    for (int lane = 0; lane < 32; ++lane)
      for (int k = 0; k < 4; ++k) {
        const int row = lane / 4 + k / 2 * 8, column = lane % 4 * 2 + k % 2;
        float& to = static_cast<Lane*>(lanes[lane])->c[k];
        double sum = to;
        for (int j = 0; j < 8; ++j) sum += a[row][j] * b[j][column];
        to = toward_zero(sum);
      }
  });
  for (int k = 0; k < 4; ++k) c.set_float(i.atoms[k], mine.c[k]);
}

namespace {

/// An operand of a product: how many elements 16 bytes hold, of which two are a step along k.
struct Elements {
  float (*code)(uint8_t);  ///< those of 8 bits; null: there are none
  Widen wide;              ///< those of 16 bits

  int in_16_bytes() const { return code ? 16 : 8; }
  int depth() const { return 2 * in_16_bytes(); }
  void read(const unsigned char* from, float* x) const {
    for (int i = 0; i < in_16_bytes(); ++i) {
      uint16_t bits;
      if (!code) std::memcpy(&bits, from + 2 * i, 2);
      x[i] = code ? code(from[i]) : wide(bits);
    }
  }
};

/// Calls act(row or column n, k, address) for each 16 bytes of elements of a 64 x 16 or 16 x N
/// operand (32 of 8 bits) that lie with each other in shared memory, `count` rows or columns with
/// k. `across`: k counts rows of 128 bytes, and n their elements, which have 16 bits. Rows are of
/// 128 bytes, or of 32, the bytes of a step.
template <class Act>
void for_operand(uint64_t descriptor, int count, bool across, int in_16_bytes, const Act& act) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const auto leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
  const auto stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  const bool steps = descriptor >> 62 == 3;
  if (descriptor >> 62 != 1 && !steps) fail("a product of an unknown layout");
  for (int n = 0; n < count; n += across ? in_16_bytes : 1)
    for (int k = 0; k < 2 * in_16_bytes; k += across ? 1 : in_16_bytes) {
      const int row = across ? k : n, column = across ? n : k;
      if (steps) {
        const auto at = start + static_cast<uint32_t>(row / 8) * stride +
                        static_cast<uint32_t>(row % 8 * 32 + column);
        act(n, k, at ^ (at >> 7 & 1) << 4);
        continue;
      }
      act(n, k,
          swizzled(start + static_cast<uint32_t>(row / 8) * stride +
                   static_cast<uint32_t>(row % 8) * 128 +
                   static_cast<uint32_t>(column / 64) * leading +
                   static_cast<uint32_t>(column % 64 * 16 / in_16_bytes)));
    }
}
/// out[k][n], rows of `width`.
void read_operand(Block& block, uint64_t descriptor, int count, bool across,
                  const Elements& elements, float* out, int width) {
  const int together = elements.in_16_bytes();
  for_operand(descriptor, count, across, together, [&](int n, int k, uint32_t address) {
    float x[16];
    elements.read(block.at(address, 16), x);
    for (int i = 0; i < together; ++i) out[across ? k * width + n + i : (k + i) * width + n] = x[i];
  });
}

constexpr int kMaxColumns = 256;

/// What a thread brings to a product of its warpgroup.
struct Share {
  float* D;  ///< N / 2 registers
  uint32_t a[4];
  uint64_t A, B;
};

void compute(Block& block, const std::vector<Share>& shares, int N, bool A_shared, bool A_across,
             bool B_across, bool keep, const Elements& of_A, const Elements& of_B) {
  for (const Share& share : shares)
    if (share.B != shares[0].B || share.A != shares[0].A)
      fail("threads of a product name different operands");
  float a[32][64], b[32][kMaxColumns];
  if (A_shared) {
    read_operand(block, shares[0].A, 64, A_across, of_A, a[0], 64);
  } else {
    for (int t = 0; t < 128; ++t)
      for (int word = 0; word < 4; ++word) {
        const int row = t / 32 * 16 + t % 32 / 4 + word % 2 * 8;
        const int in_word = of_A.in_16_bytes() / 4;
        for (int i = 0; i < in_word; ++i) {
          const int column = (t % 4 + word / 2 * 4) * in_word + i;
          const uint32_t bits = shares[static_cast<size_t>(t)].a[word] >> 32 / in_word * i;
          a[column][row] = of_A.code ? of_A.code(static_cast<uint8_t>(bits))
                                     : of_A.wide(static_cast<uint16_t>(bits));
        }
      }
  }
  read_operand(block, shares[0].B, N, B_across, of_B, b[0], kMaxColumns);
  for (int row = 0; row < 64; ++row) {
    float sums[kMaxColumns] = {};
    for (int j = 0; j < of_A.depth(); ++j)
      for (int column = 0; column < N; ++column) sums[column] += a[j][row] * b[j][column];
    // Four threads hold a row, two columns of each eight.
    const int warp = row / 16, lane = row % 8 * 4, low = row % 16 / 8 * 2;
    for (int column = 0; column < N; ++column) {
      const int t = warp * 32 + lane + column % 8 / 2;
      float& d = shares[static_cast<size_t>(t)].D[column / 8 * 4 + low + column % 2];
      d = keep ? d + sums[column] : sums[column];
    }
  }
}

}  // namespace

void multiply_warpgroup(Context& c, const Instruction& i) {
  const int N = i.columns;
  const auto registers = static_cast<size_t>(N / 2);
  const bool codes = i.has("e4m3");  // they have no transpositions
  const Elements of_A{codes ? f32_of_e4m3 : nullptr, widen(i)};
  const Elements of_B{i.has("e5m2") ? f32_of_e5m2 : of_A.code, of_A.wide};
  const bool A_shared = i.atoms.size() == registers + (codes ? 5 : 7);
  const size_t behind_A = registers + (A_shared ? 1 : 4);
  Share mine = {static_cast<float*>(c.variable(i.atoms[0])), {}, 0, 0};
  for (size_t k = 1; k < registers; ++k)
    if (c.variable(i.atoms[k]) != mine.D + k) fail("a product's registers are no array");
  if (A_shared) mine.A = c.get(i.atoms[registers]);
  for (size_t k = 0; !A_shared && k < 4; ++k) mine.a[k] = c.get32(i.atoms[registers + k]);
  mine.B = c.get(i.atoms[behind_A]);
  const bool keep = c.get(i.atoms[behind_A + 1]) != 0;
  const bool A_across = A_shared && !codes && c.get(i.atoms[behind_A + 4]) != 0;
  const bool B_across = !codes && c.get(i.atoms[i.atoms.size() - 1]) != 0;
  current->uses_loads();
  emulator_counts.products += static_cast<uint64_t>(64 * N * of_A.depth() / 128);
  Warpgroup& group = *current->warpgroup;
  const uint64_t number = current->products++;
  if (number - group.first >= group.products.size()) {
    Product product;
    auto shares = std::make_shared<std::vector<Share>>(128);
    product.shares = shares;
    Block* const block = current->block;
    product.compute = [=] {
      compute(*block, *shares, N, A_shared, A_across, B_across, keep, of_A, of_B);
    };
    group.products.push_back(std::move(product));
  }
  Product& product = group.products[number - group.first];
  const size_t thread = place->thread.x % 128;
  auto& shares = *static_cast<std::vector<Share>*>(product.shares.get());
  shares[thread] = mine;
  if (product.arrived == 0)
    product.writes = current->views.fenced;
  else
    product.writes.intersect(current->views.fenced);
  if (++product.arrived < 128) return;
  Block& block = *current->block;
  if (!group.actor) {
    group.actor =
        block.races.add_actor("a product of warpgroup " + std::to_string(place->thread.x / 128));
  }
  const auto read = [&](int, int, uint32_t address) {
    block.races.read(block.place_of(address, 16), 16, {*group.actor, uint32_t(number + 1)},
                     product.writes);
  };
  if (A_shared) for_operand(mine.A, 64, A_across, of_A.in_16_bytes(), read);
  for_operand(mine.B, N, B_across, of_B.in_16_bytes(), read);
  if (at_once()) group.finish(number + 1);
}
void commit_products(Context&, const Instruction&) {
  current->product_groups.push_back(current->products);
}
void wait_products(Context& c, const Instruction& i) {
  synchronize_warp(~0u);
  const uint64_t pending = c.get(i.atoms[0]);
  const auto& groups = current->product_groups;
  if (groups.size() <= pending) return;
  const uint64_t end = groups[groups.size() - 1 - pending];
  Warpgroup& group = *current->warpgroup;
  wait_until([&] { return group.arrived(end); });
  group.finish(end);
  if (group.actor) current->learn(*group.actor, static_cast<uint32_t>(end));
}

bool Warpgroup::arrived(uint64_t end) const {
  if (end <= first) return true;
  return end - first <= products.size() && products[end - first - 1].arrived == 128;
}

void Warpgroup::finish(uint64_t end) {
  for (; first < end; ++first) {
    products.front().compute();
    products.pop_front();
  }
}

}  // namespace emulator

// Inline PTX, as the kernels use it (PTX ISA 8.x, the sections named as the instructions are).
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <unordered_map>

#include "base/convert.h"
#include "fake_driver.h"
#include "machine.h"

namespace emulator {
namespace {

struct Instruction;

/// A value in an instruction's text.
struct Atom {
  enum Kind { kVariable, kValue, kRegister, kNumber, kLane, kNothing } kind;
  uint64_t value;
  size_t bytes = 0;  ///< of a variable
};

struct Context {
  const uint64_t* operands;
  uint64_t registers[16] = {};

  uint64_t get(const Atom& atom) const {
    switch (atom.kind) {
      case Atom::kVariable: {
        uint64_t value = 0;
        std::memcpy(&value, variable(atom), atom.bytes);
        return value;
      }
      case Atom::kValue:
        return operands[atom.value];
      case Atom::kRegister:
        return registers[atom.value];
      case Atom::kNumber:
        return atom.value;
      case Atom::kLane:
        return place->thread.x % 32;
      default:
        return 0;
    }
  }
  void* variable(const Atom& atom) const { return reinterpret_cast<void*>(operands[atom.value]); }
  float get_float(const Atom& atom) const {
    return bits_of<float>(static_cast<uint32_t>(get(atom)));
  }
  uint32_t get32(const Atom& atom) const { return static_cast<uint32_t>(get(atom)); }
  void set(const Atom& atom, uint64_t value) {
    if (atom.kind == Atom::kRegister) registers[atom.value] = value;
    if (atom.kind == Atom::kValue) fail("an instruction writes an operand that is only read");
    if (atom.kind == Atom::kVariable) std::memcpy(variable(atom), &value, atom.bytes);
  }
  // A NaN that an instruction makes has no sign or payload.
  void set_float(const Atom& atom, float x) {
    set(atom, std::isnan(x) ? 0x7fffffff : bits_of<uint32_t>(x));
  }
};

using Handler = void (*)(Context&, const Instruction&);

struct Instruction {
  std::string name;
  Handler handler;
  std::vector<Atom> atoms;
  bool guarded = false, negated = false;
  uint64_t guard = 0;
  bool bf16 = false;  ///< its elements of 16 bits
  size_t count = 1;   ///< registers of 4 bytes that a load or a store moves
  int columns = 0;    ///< of a product

  bool has(std::string_view part) const { return name.find(part) != std::string::npos; }
};

// Numbers.

using Widen = float (*)(uint16_t);
using Narrow = uint16_t (*)(float);

float f32_of_f16(uint16_t x) { return fulgur::f32_from_f16(x); }
float f32_of_bf16(uint16_t x) { return bits_of<float>(static_cast<uint32_t>(x) << 16); }
// A NaN that is rounded has no sign: kernels use the sign of what is not negative.
uint16_t f16_of(float x) { return std::isnan(x) ? 0x7fff : fulgur::f16_from_f32(x); }
uint16_t bf16_of(float x) { return std::isnan(x) ? 0x7fff : fulgur::bf16_from_f32(x); }
Widen widen(const Instruction& i) { return i.bf16 ? f32_of_bf16 : f32_of_f16; }
Narrow narrow(const Instruction& i) { return i.bf16 ? bf16_of : f16_of; }

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }

void ex2(Context& c, const Instruction& i) {
  c.set_float(i.atoms[0], flushed(std::exp2(flushed(c.get_float(i.atoms[1])))));
}
void lg2(Context& c, const Instruction& i) {
  c.set_float(i.atoms[0], std::log2(flushed(c.get_float(i.atoms[1]))));
}
void rcp(Context& c, const Instruction& i) {
  c.set_float(i.atoms[0], flushed(1 / flushed(c.get_float(i.atoms[1]))));
}
void narrow_pair(Context& c, const Instruction& i) {
  const uint32_t high = narrow(i)(c.get_float(i.atoms[1])),
                 low = narrow(i)(c.get_float(i.atoms[2]));
  c.set(i.atoms[0], high << 16 | low);
}
void narrow_one(Context& c, const Instruction& i) {
  c.set(i.atoms[0], narrow(i)(c.get_float(i.atoms[1])));
}
void widen_one(Context& c, const Instruction& i) {
  c.set_float(i.atoms[0], widen(i)(static_cast<uint16_t>(c.get(i.atoms[1]))));
}
void fma_pair(Context& c, const Instruction& i) {
  uint32_t result = 0;
  for (int half = 0; half < 32; half += 16) {
    const auto part = [&](int at) {
      return widen(i)(static_cast<uint16_t>(c.get(i.atoms[at]) >> half));
    };
    const double sum = static_cast<double>(part(1)) * part(2) + part(3);
    result |= static_cast<uint32_t>(narrow(i)(static_cast<float>(sum))) << half;
  }
  c.set(i.atoms[0], result);
}
void prmt(Context& c, const Instruction& i) {
  c.set(i.atoms[0], __byte_perm(c.get32(i.atoms[1]), c.get32(i.atoms[2]), c.get32(i.atoms[3])));
}
void bit_or(Context& c, const Instruction& i) {
  c.set(i.atoms[0], c.get(i.atoms[1]) | c.get(i.atoms[2]));
}
template <class Compare>
void setp(Context& c, const Instruction& i) {
  c.set(i.atoms[0], Compare()(c.get32(i.atoms[1]), c.get32(i.atoms[2])));
}
void selp(Context& c, const Instruction& i) {
  c.set(i.atoms[0], c.get(c.get(i.atoms[3]) != 0 ? i.atoms[1] : i.atoms[2]));
}
void mov(Context& c, const Instruction& i) {
  c.set(i.atoms[0],
        i.atoms.size() == 3 ? c.get(i.atoms[2]) << 32 | c.get32(i.atoms[1]) : c.get(i.atoms[1]));
}

// Memory.

void load_shared(Context& c, const Instruction& i) {
  const size_t count = i.count;
  const uint32_t address = c.get32(i.atoms[count]);
  if (address % (4 * count) != 0) fail("an unaligned load: " + i.name);
  const unsigned char* const from = current->block->at(address, 4 * count);
  current->reads(from, 4 * count);
  for (size_t k = 0; k < count; ++k) c.set(i.atoms[k], reinterpret_cast<const uint32_t*>(from)[k]);
}
void store_shared(Context& c, const Instruction& i) {
  const size_t count = i.count;
  const uint32_t address = c.get32(i.atoms[0]);
  if (address % (4 * count) != 0) fail("an unaligned store: " + i.name);
  unsigned char* const to = current->block->at(address, 4 * count);
  current->writes(to, 4 * count);
  for (size_t k = 0; k < count; ++k) {
    const uint32_t x = c.get32(i.atoms[k + 1]);
    std::memcpy(to + 4 * k, &x, 4);
  }
}
void load_global(Context& c, const Instruction& i) {
  const size_t count = i.count;
  const auto* const from = reinterpret_cast<const uint32_t*>(c.get(i.atoms[count]));
  current->reads_global(from, 4 * count);
  for (size_t k = 0; k < count; ++k) c.set(i.atoms[k], from[k]);
}
/// A thread that asks again at once waits for other news.
void load_global_again(Context& c, const Instruction& i) {
  const auto* const from = reinterpret_cast<const volatile uint32_t*>(c.get(i.atoms[1]));
  Thread& thread = *current;
  thread.reads_global(const_cast<const uint32_t*>(from), 4);
  if (thread.asked == from) wait_until([&] { return *from != thread.answer; });
  thread.asked = from;
  thread.answer = *from;
  c.set(i.atoms[0], thread.answer);
}
void store_global(Context& c, const Instruction& i) {
  auto* const to = reinterpret_cast<uint32_t*>(c.get(i.atoms[0]));
  current->writes_global(to, 4);
  *to = c.get32(i.atoms[1]);
}
void atomic_inc(Context& c, const Instruction& i) {
  auto* const at = reinterpret_cast<unsigned*>(c.get(i.atoms[1]));
  current->writes_global(at, 4);
  c.set(i.atoms[0], atomicInc(at, c.get32(i.atoms[2])));
}

void atomic_add(Context& c, const Instruction& i) {
  auto* const at = reinterpret_cast<int*>(c.get(i.atoms[1]));
  current->writes_global(at, 4);
  c.set(i.atoms[0], atomicAdd(at, static_cast<int>(c.get32(i.atoms[2]))));
}

/// Rows of 8 elements of four 8 x 8 matrices, at the addresses of the lanes.
struct Matrices {
  uint32_t address;
  uint32_t x[4];
};
void gather(void* const* lanes, uint16_t (&m)[4][8][8]) {
  for (int row = 0; row < 32; ++row) {
    const uint32_t address = static_cast<Matrices*>(lanes[row])->address;
    if (address % 16 != 0) fail("a row of a matrix is not aligned");
    std::memcpy(m[row / 8][row % 8], current->block->at(address, 16), 16);
  }
}
void load_matrices(Context& c, const Instruction& i) {
  Matrices mine{c.get32(i.atoms[4]), {}};
  current->reads_matrix(current->block->at(mine.address, 16));
  const auto straight = [](void* const* lanes, uint32_t) {
    uint16_t m[4][8][8];
    gather(lanes, m);
    for (int lane = 0; lane < 32; ++lane)
      for (int k = 0; k < 4; ++k)
        std::memcpy(&static_cast<Matrices*>(lanes[lane])->x[k], &m[k][lane / 4][lane % 4 * 2], 4);
  };
  const auto transposed = [](void* const* lanes, uint32_t) {
    uint16_t m[4][8][8];
    gather(lanes, m);
    for (int lane = 0; lane < 32; ++lane)
      for (int k = 0; k < 4; ++k)
        static_cast<Matrices*>(lanes[lane])->x[k] =
            m[k][lane % 4 * 2][lane / 4] | static_cast<uint32_t>(m[k][lane % 4 * 2 + 1][lane / 4])
                                               << 16;
  };
  meet(~0u, &mine, i.has(".trans") ? +transposed : +straight);
  for (int k = 0; k < 4; ++k) c.set(i.atoms[k], mine.x[k]);
}
void store_matrices(Context& c, const Instruction& i) {
  Matrices mine{c.get32(i.atoms[0]), {}};
  for (int k = 0; k < 4; ++k) mine.x[k] = c.get32(i.atoms[k + 1]);
  current->writes(current->block->at(mine.address, 16), 16);
  meet(~0u, &mine, [](void* const* lanes, uint32_t) {
    for (int row = 0; row < 32; ++row) {
      const uint32_t address = static_cast<Matrices*>(lanes[row])->address;
      if (address % 16 != 0) fail("a row of a matrix is not aligned");
      for (int four = 0; four < 4; ++four) {
        const Matrices& from = *static_cast<Matrices*>(lanes[row % 8 * 4 + four]);
        std::memcpy(current->block->at(address, 16) + 4 * four, &from.x[row / 8], 4);
      }
    }
  });
}

// Waiting.

void wait_for_kernels(Context&, const Instruction&) { wait_for_earlier_kernels(); }
void nothing(Context&, const Instruction&) {}
void elect(Context& c, const Instruction& i) {
  synchronize_warp(~0u);
  c.set(i.atoms[0], place->thread.x % 32 == 0);
}
void barrier(Context& c, const Instruction& i) {
  named_barrier(c.get32(i.atoms[0]), c.get32(i.atoms[1]), i.has("sync"));
}
void mbarrier_init(Context& c, const Instruction& i) {
  const uint32_t arrivals = c.get32(i.atoms[1]);
  if (c.get32(i.atoms[0]) % 8 != 0) fail("a barrier is not aligned");
  current->block->mbarriers[c.get32(i.atoms[0])] = {arrivals, arrivals};
}
void arrive(Mbarrier& barrier) {
  if (barrier.missing == 0) fail("more arrive at a barrier than it waits for");
  --barrier.missing;
  barrier.settle();
}
void mbarrier_arrive(Context& c, const Instruction& i) {
  const bool expects = i.has("expect_tx");
  Mbarrier& barrier = current->block->mbarrier(c.get32(i.atoms[1]));
  if (expects) barrier.bytes += c.get32(i.atoms[2]);
  current->pass_on(barrier.views.arrived);
  arrive(barrier);
}
void fence_async_proxy(Context&, const Instruction&) { current->fence(); }
void mbarrier_wait(Context& c, const Instruction& i) {
  const Mbarrier& barrier = current->block->mbarrier(c.get32(i.atoms[1]));
  const uint64_t parity = c.get(i.atoms[2]);
  wait_until([&] { return barrier.phase % 2 != parity; });
  current->learn(barrier.views.passed);
  c.set(i.atoms[0], 1);
}

// Copies that are waited for.

/// Happens at once, at some time, or when it is waited for.
void start(Groups& groups, std::function<void()> action) {
  const auto done = std::make_shared<bool>(false);
  const auto once = [done, action = std::move(action)] {
    if (!std::exchange(*done, true)) action();
  };
  groups.open.actions.push_back(once);
  if (at_once())
    once();
  else if (at_once())
    later(once);
}
void cp_async(Context& c, const Instruction& i) {
  const uint32_t address = c.get32(i.atoms[0]);
  const auto* const from = reinterpret_cast<const unsigned char*>(c.get(i.atoms[1]));
  const uint64_t bytes = i.atoms.size() > 3 ? c.get32(i.atoms[3]) : 16;
  if (address % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes > 16)
    fail("a copy is not aligned");
  Block* const block = current->block;
  const View& seen = current->views.seen;
  current->reads_global(from, bytes);
  block->races.write(block->place_of(address, 16), 16, current->copies.access(), seen, seen);
  start(current->copies, [=] {
    unsigned char* const to = block->at(address, 16);
    std::memset(to, 0, 16);
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
}
void cp_async_arrive(Context& c, const Instruction& i) {
  const Groups& copies = current->copies;
  std::vector<std::function<void()>> before = copies.open.actions;
  for (const Groups::Group& group : copies.closed)
    before.insert(before.end(), group.actions.begin(), group.actions.end());
  Block* const block = current->block;
  const uint32_t address = c.get32(i.atoms[0]);
  later([=, actor = copies.actor, last = copies.open.last] {
    for (const auto& action : before) action();
    Mbarrier& barrier = block->mbarrier(address);
    if (actor) barrier.views.arrived.seen.raise(*actor, last);
    arrive(barrier);
  });
}
void cp_async_commit(Context&, const Instruction&) { current->copies.commit(); }
void cp_async_wait(Context& c, const Instruction& i) { current->copies.finish(c.get(i.atoms[0])); }
void bulk_commit(Context&, const Instruction&) { current->stores.commit(); }
void bulk_wait(Context& c, const Instruction& i) {
  const uint64_t pending = c.get(i.atoms[0]);
  if (i.has("read"))
    current->stores.read(pending);
  else
    current->stores.finish(pending);
}

uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

/// Calls move(address in shared memory, address in global memory or null, bytes) for each 16 bytes
/// of a box.
template <class Move>
void for_box(const fulgur::test::FakeMap& map, uint32_t shared, const int64_t (&at)[4],
             const Move& move) {
  const uint32_t bytes = map.type == 7 ? 4 : 2;
  const uint32_t row_bytes = map.box[0] * bytes;
  if (map.swizzle != 3 || row_bytes != 128 || shared % 1024 % 128 != 0)
    fail("a box of an unknown layout");
  uint32_t line = 0;
  for (int64_t batch = 0; batch < map.box[3]; ++batch)
    for (int64_t head = 0; head < map.box[2]; ++head)
      for (int64_t row = 0; row < map.box[1]; ++row, ++line)
        for (uint32_t column = 0; column < map.box[0]; ++column) {
          const int64_t index[4] = {at[0] + column, at[1] + row, at[2] + head, at[3] + batch};
          const char* address = static_cast<const char*>(map.address) + index[0] * bytes;
          bool inside = index[0] >= 0 && index[0] < static_cast<int64_t>(map.dims[0]);
          for (int i = 1; i < 4; ++i) {
            inside = inside && index[i] >= 0 && index[i] < static_cast<int64_t>(map.dims[i]);
            address += index[i] * static_cast<int64_t>(map.byte_strides[i - 1]);
          }
          move(swizzled(shared + line * 128 + column * bytes),
               inside ? const_cast<char*>(address) : nullptr, bytes);
        }
}
uint32_t bytes_of_box(const fulgur::test::FakeMap& map) {
  return map.box[0] * map.box[1] * map.box[2] * map.box[3] * (map.type == 7 ? 4 : 2);
}

/// A load by the asynchronous proxy begins, and has landed.
void start_load(uint32_t barrier, uint32_t shared, uint32_t bytes) {
  Block& block = *current->block;
  Mbarrier& full = block.mbarrier(barrier);
  if (!full.actor)
    full.actor = block.races.add_actor("a load for the barrier at " + std::to_string(barrier));
  const Views& views = current->views;
  block.races.write(block.place_of(shared, bytes), bytes, {*full.actor, ++full.started},
                    views.fenced, views.loaded);
}
void landed(Block* block, uint32_t barrier, uint32_t bytes) {
  Mbarrier& full = block->mbarrier(barrier);
  full.bytes -= bytes;
  ++full.landed;
  full.settle();
}
/// A store by the asynchronous proxy begins: store(bytes) gets those that it reads, which may be
/// before it stores them.
template <class Store>
void start_store(uint32_t shared, uint32_t bytes, const Store& store) {
  Block* const block = current->block;
  block->races.read(block->place_of(shared, bytes), bytes, current->stores.access(),
                    current->views.fenced);
  const auto data = std::make_shared<std::vector<unsigned char>>();
  const auto read = [=] {
    const unsigned char* const from = block->at(shared, bytes);
    if (data->empty()) data->assign(from, from + bytes);
  };
  current->stores.open.reads.emplace_back(read);
  start(current->stores, [=] {
    read();
    store(data->data());
  });
}

void tma_load(Context& c, const Instruction& i) {
  const uint32_t shared = c.get32(i.atoms[0]);
  const auto map = fulgur::test::FakeMap::of(reinterpret_cast<const void*>(c.get(i.atoms[1])));
  const int64_t at[4] = {int(c.get(i.atoms[2])), int(c.get(i.atoms[3])), int(c.get(i.atoms[4])),
                         int(c.get(i.atoms[5]))};
  const uint32_t barrier = c.get32(i.atoms[6]);
  Block* const block = current->block;
  start_load(barrier, shared, bytes_of_box(map));
  for_box(map, shared, at, [](uint32_t, const char* from, uint32_t bytes) {
    if (from != nullptr) current->reads_global(from, bytes);
  });
  later([=] {
    for_box(map, shared, at, [&](uint32_t to, const char* from, uint32_t bytes) {
      unsigned char* const there = block->at(to, bytes);
      if (from == nullptr)
        std::memset(there, 0, bytes);
      else
        std::memcpy(there, from, bytes);
    });
    landed(block, barrier, bytes_of_box(map));
  });
}
void tma_store(Context& c, const Instruction& i) {
  const auto map = fulgur::test::FakeMap::of(reinterpret_cast<const void*>(c.get(i.atoms[0])));
  const int64_t at[4] = {int(c.get(i.atoms[1])), int(c.get(i.atoms[2])), int(c.get(i.atoms[3])),
                         int(c.get(i.atoms[4]))};
  const uint32_t shared = c.get32(i.atoms[5]);
  for_box(map, shared, at, [](uint32_t, const char* to, uint32_t bytes) {
    if (to != nullptr) current->writes_global(to, bytes);
  });
  start_store(shared, bytes_of_box(map), [=](const unsigned char* data) {
    for_box(map, shared, at, [&](uint32_t from, char* to, uint32_t bytes) {
      if (to != nullptr) std::memcpy(to, data + (from - shared), bytes);
    });
  });
}
void bulk_load(Context& c, const Instruction& i) {
  const uint32_t shared = c.get32(i.atoms[0]), bytes = c.get32(i.atoms[2]),
                 barrier = c.get32(i.atoms[3]);
  const auto* const from = reinterpret_cast<const void*>(c.get(i.atoms[1]));
  if (shared % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0)
    fail("a bulk load is not aligned");
  Block* const block = current->block;
  start_load(barrier, shared, bytes);
  current->reads_global(from, bytes);
  later([=] {
    std::memcpy(block->at(shared, bytes), from, bytes);
    landed(block, barrier, bytes);
  });
}
void bulk_store(Context& c, const Instruction& i) {
  auto* const to = reinterpret_cast<float*>(c.get(i.atoms[0]));
  const uint32_t shared = c.get32(i.atoms[1]), bytes = c.get32(i.atoms[2]);
  if (shared % 16 != 0 || bytes % 16 != 0 || reinterpret_cast<uintptr_t>(to) % 16 != 0)
    fail("a bulk store is not aligned");
  const bool adds = i.has("reduce");
  current->writes_global(to, bytes);
  start_store(shared, bytes, [=](const unsigned char* data) {
    const auto* const from = reinterpret_cast<const float*>(data);
    if (!adds) std::memcpy(to, from, bytes);
    for (size_t k = 0; adds && k < bytes / 4; ++k) to[k] += from[k];
  });
}

// Products.

void multiply_warp(Context& c, const Instruction& i) {
  current->uses_loads();
  struct Lane {
    float c[4];
    uint32_t a[4], b[2];
    Widen widen;
  } mine;
  for (int k = 0; k < 4; ++k) mine.a[k] = c.get32(i.atoms[k + 4]);
  for (int k = 0; k < 2; ++k) mine.b[k] = c.get32(i.atoms[k + 8]);
  for (int k = 0; k < 4; ++k) mine.c[k] = c.get_float(i.atoms[k + 10]);
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

/// Calls act(row or column n, k, address) for each 8 elements of a 64 x 16 or 16 x N operand that
/// lie with each other in shared memory, `count` rows or columns with k. `across`: k counts
/// rows of 128 bytes, and n their elements.
template <class Act>
void for_operand(uint64_t descriptor, int count, bool across, const Act& act) {
  const auto start = static_cast<uint32_t>(descriptor & 0x3fff) << 4;
  const auto leading = static_cast<uint32_t>(descriptor >> 16 & 0x3fff) << 4;
  const auto stride = static_cast<uint32_t>(descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) fail("a product of an unknown layout");
  for (int n = 0; n < count; n += across ? 8 : 1)
    for (int k = 0; k < 16; k += across ? 1 : 8) {
      const int row = across ? k : n, column = across ? n : k;
      act(n, k,
          swizzled(start + static_cast<uint32_t>(row / 8) * stride +
                   static_cast<uint32_t>(row % 8) * 128 +
                   static_cast<uint32_t>(column / 64) * leading +
                   static_cast<uint32_t>(column % 64) * 2));
    }
}
/// out[k][n], rows of `width`.
void read_operand(Block& block, uint64_t descriptor, int count, bool across, Widen wide, float* out,
                  int width) {
  for_operand(descriptor, count, across, [&](int n, int k, uint32_t address) {
    uint16_t x[8];
    std::memcpy(x, block.at(address, 16), 16);
    for (int i = 0; i < 8; ++i) out[across ? k * width + n + i : (k + i) * width + n] = wide(x[i]);
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
             bool B_across, bool keep, Widen wide) {
  for (const Share& share : shares)
    if (share.B != shares[0].B || share.A != shares[0].A)
      fail("threads of a product name different operands");
  float a[16][64], b[16][kMaxColumns];
  if (A_shared) {
    read_operand(block, shares[0].A, 64, A_across, wide, a[0], 64);
  } else {
    for (int t = 0; t < 128; ++t)
      for (int k = 0; k < 8; ++k) {
        const int row = t / 32 * 16 + t % 32 / 4 + k / 2 % 2 * 8,
                  column = t % 4 * 2 + k % 2 + k / 4 * 8;
        a[column][row] =
            wide(static_cast<uint16_t>(shares[static_cast<size_t>(t)].a[k / 2] >> 16 * (k % 2)));
      }
  }
  read_operand(block, shares[0].B, N, B_across, wide, b[0], kMaxColumns);
  for (int row = 0; row < 64; ++row) {
    float sums[kMaxColumns] = {};
    for (int j = 0; j < 16; ++j)
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

void multiply_warpgroup(Context& c, const Instruction& i) {
  const int N = i.columns;
  const auto registers = static_cast<size_t>(N / 2);
  const bool A_shared = i.atoms.size() == registers + 7;
  const size_t behind_A = registers + (A_shared ? 1 : 4);
  Share mine = {static_cast<float*>(c.variable(i.atoms[0])), {}, 0, 0};
  for (size_t k = 1; k < registers; ++k)
    if (c.variable(i.atoms[k]) != mine.D + k) fail("a product's registers are no array");
  if (A_shared) mine.A = c.get(i.atoms[registers]);
  for (size_t k = 0; !A_shared && k < 4; ++k) mine.a[k] = c.get32(i.atoms[registers + k]);
  mine.B = c.get(i.atoms[behind_A]);
  const bool keep = c.get(i.atoms[behind_A + 1]) != 0;
  const bool A_across = A_shared && c.get(i.atoms[behind_A + 4]) != 0;
  const bool B_across = c.get(i.atoms[i.atoms.size() - 1]) != 0;
  current->uses_loads();
  Warpgroup& group = *current->warpgroup;
  const uint64_t number = current->products++;
  if (number - group.first >= group.products.size()) {
    Product product;
    auto shares = std::make_shared<std::vector<Share>>(128);
    product.shares = shares;
    Block* const block = current->block;
    const Widen wide = widen(i);
    product.compute = [=] {
      compute(*block, *shares, N, A_shared, A_across, B_across, keep, wide);
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
  if (A_shared) for_operand(mine.A, 64, A_across, read);
  for_operand(mine.B, N, B_across, read);
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

struct Known {
  std::string_view prefix;
  Handler handler;
};
// The first that fits.
constexpr Known kKnown[] = {
    {"ex2.approx.ftz.f32", ex2},
    {"lg2.approx.ftz.f32", lg2},
    {"rcp.approx.ftz.f32", rcp},
    {"cvt.rn.bf16x2.f32", narrow_pair},
    {"cvt.rn.f16x2.f32", narrow_pair},
    {"cvt.rn.bf16.f32", narrow_one},
    {"cvt.rn.f16.f32", narrow_one},
    {"cvt.f32.", widen_one},
    {"fma.rn.bf16x2", fma_pair},
    {"fma.rn.f16x2", fma_pair},
    {"prmt.b32", prmt},
    {"or.b32", bit_or},
    {"setp.ne.", setp<std::not_equal_to<uint32_t>>},
    {"setp.eq.", setp<std::equal_to<uint32_t>>},
    {"setp.ge.u", setp<std::greater_equal<uint32_t>>},
    {"selp.u32", selp},
    {"mov.", mov},
    {"ld.shared.", load_shared},
    {"ld.volatile.shared.", load_shared},
    {"st.shared.", store_shared},
    {"ld.global.cg.", load_global},
    {"ld.acquire.gpu.global.s32", load_global_again},
    {"st.release.gpu.global.s32", store_global},
    {"atom.global.acq_rel.gpu.inc.u32", atomic_inc},
    {"atom.global.relaxed.gpu.inc.u32", atomic_inc},
    {"atom.global.acq_rel.gpu.add.u32", atomic_add},
    {"ldmatrix.sync.aligned.m8n8.x4", load_matrices},
    {"stmatrix.sync.aligned.m8n8.x4", store_matrices},
    {"setmaxnreg.", nothing},
    {"griddepcontrol.wait", wait_for_kernels},
    {"griddepcontrol.launch_dependents", nothing},
    {"fence.proxy.async", fence_async_proxy},
    {"fence.mbarrier_init", nothing},
    {"prefetch.tensormap", nothing},
    {"cp.async.bulk.prefetch.tensor", nothing},
    {"cp.async.bulk.prefetch.L2", nothing},
    {"wgmma.fence", nothing},
    {"bra", nothing},
    {"elect.sync", elect},
    {"bar.", barrier},
    {"mbarrier.init.", mbarrier_init},
    {"mbarrier.arrive.", mbarrier_arrive},
    {"mbarrier.try_wait.parity.", mbarrier_wait},
    {"cp.async.mbarrier.arrive.noinc.", cp_async_arrive},
    {"cp.async.cg.shared.global", cp_async},
    {"cp.async.commit_group", cp_async_commit},
    {"cp.async.wait_group", cp_async_wait},
    {"cp.async.bulk.commit_group", bulk_commit},
    {"cp.async.bulk.wait_group", bulk_wait},
    {"cp.async.bulk.tensor.4d.shared::cluster.global", tma_load},
    {"cp.async.bulk.tensor.4d.global.shared::cta", tma_store},
    {"cp.async.bulk.shared::cluster.global", bulk_load},
    {"cp.async.bulk.global.shared::cta", bulk_store},
    {"cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", bulk_store},
    {"mma.sync.aligned.m16n8k16.row.col.f32.", multiply_warp},
    {"wgmma.mma_async.sync.aligned.m64n", multiply_warpgroup},
    {"wgmma.commit_group", commit_products},
    {"wgmma.wait_group", wait_products},
};

/// The instructions of a text of inline PTX, and how many operands it names.
class Program {
 public:
  /// `operands`: in turns a constraint and the operand.
  Program(std::string_view text, va_list operands) {
    for (size_t at = 0; (at = text.find('%', at)) != std::string_view::npos; ++at) {
      const std::string number(text.substr(at + 1, 3));
      if (std::isdigit(static_cast<unsigned char>(number[0])))
        operands_ = std::max(operands_, size_t{std::strtoul(number.c_str(), nullptr, 10)} + 1);
    }
    if (operands_ > kMaxOperands) fail("too many operands of a text");
    for (size_t k = 0; k < operands_; ++k) {
      constraints_.emplace_back(va_arg(operands, const char*));
      va_arg(operands, uint64_t);
    }
    std::string statement;
    for (const char x : text) {
      if (x != ';') {
        statement += x == '\n' || x == '\t' ? ' ' : x;
        continue;
      }
      add(statement);
      statement.clear();
    }
    add(statement);
  }

  void run(va_list arguments) const {
    uint64_t operands[kMaxOperands];
    for (size_t k = 0; k < operands_; ++k) {
      va_arg(arguments, const char*);
      operands[k] = va_arg(arguments, uint64_t);
    }
    Context context{operands};
    for (const Instruction& instruction : instructions_) {
      if (instruction.guarded && (context.registers[instruction.guard] != 0) == instruction.negated)
        continue;
      instruction.handler(context, instruction);
    }
  }

 private:
  void add(std::string_view text) {
    const auto skip = [&] {
      while (!text.empty() && (text[0] == ' ' || text[0] == '{' || text[0] == '}'))
        text.remove_prefix(1);
    };
    skip();
    if (text.empty()) return;
    if (text.starts_with(".reg")) return;
    Instruction instruction;
    const size_t label = text.find(": ");
    if (label != std::string_view::npos && text.find(' ') > label) text.remove_prefix(label + 2);
    skip();
    if (text[0] == '@') {
      instruction.guarded = true;
      instruction.negated = text[1] == '!';
      const size_t end = text.find(' ');
      instruction.guard = number_of(std::string(
          text.substr(instruction.negated ? 2 : 1, end - (instruction.negated ? 2 : 1))));
      text.remove_prefix(end);
      skip();
    }
    const size_t end = std::min(text.find(' '), text.size());
    instruction.name = text.substr(0, end);
    instruction.bf16 = instruction.has("bf16");
    instruction.count = instruction.has(".v4.") ? 4 : instruction.has(".v2.") ? 2 : 1;
    const size_t columns = instruction.name.find("m64n");
    if (columns != std::string::npos)
      instruction.columns = std::atoi(instruction.name.c_str() + columns + 4);
    text.remove_prefix(end);
    const auto* const known = std::find_if(
        std::begin(kKnown), std::end(kKnown),
        [&](const Known& k) { return std::string_view(instruction.name).starts_with(k.prefix); });
    if (known == std::end(kKnown)) fail("an unknown instruction: " + instruction.name);
    instruction.handler = known->handler;
    std::string word;
    const auto flush = [&] {
      if (!word.empty()) instruction.atoms.push_back(atom_of(word));
      word.clear();
    };
    for (const char x : text) {
      if (std::isalnum(static_cast<unsigned char>(x)) || x == '%' || x == '_' || x == '-' ||
          x == '|')
        word += x;
      else
        flush();
    }
    flush();
    instructions_.push_back(std::move(instruction));
  }

  uint64_t number_of(const std::string& name) {
    const auto found = std::find(names_.begin(), names_.end(), name);
    if (found != names_.end()) return static_cast<uint64_t>(found - names_.begin());
    if (names_.size() == std::size(Context{}.registers)) fail("too many registers in a text");
    names_.push_back(name);
    return names_.size() - 1;
  }

  Atom atom_of(const std::string& word) {
    if (word == "%laneid" || word == "%%laneid") return {Atom::kLane, 0};
    if (word[0] == '%') {
      const uint64_t number = std::strtoull(word.c_str() + 1, nullptr, 10);
      const std::string& constraint = constraints_[number];
      if (constraint[0] != '=' && constraint[0] != '+') return {Atom::kValue, number};
      const char type = constraint[1];
      return {Atom::kVariable, number, type == 'h' ? 2u : type == 'r' || type == 'f' ? 4u : 8u};
    }
    if (std::isdigit(static_cast<unsigned char>(word[0])))
      return {Atom::kNumber, std::strtoull(word.c_str(), nullptr, 0)};
    if (word == "_") return {Atom::kNothing, 0};
    const size_t bar = word.find('|');
    return {Atom::kRegister, number_of(bar == std::string::npos ? word : word.substr(bar + 1))};
  }

  static constexpr size_t kMaxOperands = 160;

  size_t operands_ = 0;
  std::vector<std::string> constraints_;
  std::vector<Instruction> instructions_;
  std::vector<std::string> names_;
};

}  // namespace

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

void execute(const char* text, ...) {
  static std::unordered_map<const char*, Program> programs;  // texts stay where they are
  if (text[0] == '\0') return;
  va_list operands;
  auto found = programs.find(text);
  if (found == programs.end()) {
    va_start(operands, text);
    found = programs.emplace(text, Program(text, operands)).first;
    va_end(operands);
  }
  va_start(operands, text);
  found->second.run(operands);
  va_end(operands);
}

}  // namespace emulator

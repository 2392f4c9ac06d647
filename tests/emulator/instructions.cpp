// Inline PTX, as the kernels use it (PTX ISA 8.x, the sections named as the instructions are):
// numbers, memory, waiting, and the table of all instructions.
#include <algorithm>
#include <bit>
#include <cctype>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <unordered_map>

#include "instruction.h"

namespace emulator {
namespace {

// Numbers.

float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }

void min_or_nan(Context& c, const Instruction& i) {
  const float a = c.get_float(i.atoms[1]), b = c.get_float(i.atoms[2]);
  c.set_float(i.atoms[0], a != a ? a : b != b ? b : std::min(a, b));
}
void max_or_nan(Context& c, const Instruction& i) {
  const float a = c.get_float(i.atoms[1]), b = c.get_float(i.atoms[2]);
  c.set_float(i.atoms[0], a != a ? a : b != b ? b : std::max(a, b));
}
void ex2(Context& c, const Instruction& i) {
  ++emulator_counts.exponentials;
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
void widen_e4m3_pair(Context& c, const Instruction& i) {
  const uint64_t codes = c.get(i.atoms[1]);
  const uint32_t low = f16_of(f32_of_e4m3(static_cast<uint8_t>(codes))),
                 high = f16_of(f32_of_e4m3(static_cast<uint8_t>(codes >> 8)));
  c.set(i.atoms[0], high << 16 | low);
}
uint8_t e4m3_of(float x) {
  uint8_t code;
  fulgur::Format<fulgur::DType::kE4M3>::put(&code, 0, x);
  return code;
}
void narrow_e4m3_pair(Context& c, const Instruction& i) {
  const bool halves = i.has("f16x2");
  const uint64_t pair = halves ? c.get(i.atoms[1]) : 0;
  const float high =
                  halves ? f32_of_f16(static_cast<uint16_t>(pair >> 16)) : c.get_float(i.atoms[1]),
              low = halves ? f32_of_f16(static_cast<uint16_t>(pair)) : c.get_float(i.atoms[2]);
  c.set(i.atoms[0], e4m3_of(high) << 8 | e4m3_of(low));
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
struct MaxOrNan {
  float operator()(float a, float b) const {
    return std::isnan(a) || std::isnan(b) ? NAN : std::max(a, b);
  }
};
// Words of two numbers: each result rounded.
template <class Operation>
void of_pairs(Context& c, const Instruction& i) {
  uint32_t result = 0;
  for (int half = 0; half < 32; half += 16) {
    const auto part = [&](int at) {
      return widen(i)(static_cast<uint16_t>(c.get(i.atoms[at]) >> half));
    };
    result |= static_cast<uint32_t>(narrow(i)(Operation()(part(1), part(2)))) << half;
  }
  c.set(i.atoms[0], result);
}
/// All bits of a half are 1 where the number of the first word is less.
void set_less_pair(Context& c, const Instruction& i) {
  uint32_t result = 0;
  for (int half = 0; half < 32; half += 16) {
    const auto part = [&](int at) {
      return widen(i)(static_cast<uint16_t>(c.get(i.atoms[at]) >> half));
    };
    if (part(1) < part(2)) result |= 0xffffU << half;
  }
  c.set(i.atoms[0], result);
}
void prmt(Context& c, const Instruction& i) {
  c.set(i.atoms[0], __byte_perm(c.get32(i.atoms[1]), c.get32(i.atoms[2]), c.get32(i.atoms[3])));
}
// A bit of the result is that of the table which those of the operands number.
void lop3(Context& c, const Instruction& i) {
  const uint32_t table = c.get32(i.atoms[4]);
  uint32_t result = 0;
  for (int bit = 0; bit < 32; ++bit) {
    const auto of = [&](int at) { return c.get32(i.atoms[at]) >> bit & 1; };
    result |= (table >> (of(1) << 2 | of(2) << 1 | of(3)) & 1) << bit;
  }
  c.set(i.atoms[0], result);
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
  if (i.atoms[0].kind == Atom::kNothing) {  // {_, the upper half}
    c.set(i.atoms[1], c.get32(i.atoms[2]) >> 16);
    return;
  }
  c.set(i.atoms[0], i.atoms.size() == 2 ? c.get(i.atoms[1])
                    : i.has("b64")      ? c.get(i.atoms[2]) << 32 | c.get32(i.atoms[1])
                                        : c.get(i.atoms[2]) << 16 | (c.get(i.atoms[1]) & 0xffff));
}

// Memory.

void load_shared(Context& c, const Instruction& i) {
  const size_t count = i.count, bytes = i.has("u8") ? 1 : i.has("u16") ? 2 : 4;
  const uint32_t address = c.get32(i.atoms[count]);
  if (address % (bytes * count) != 0) fail("an unaligned load: " + i.name);
  const unsigned char* const from = current->block->at(address, bytes * count);
  current->reads(from, bytes * count);
  for (size_t k = 0; k < count; ++k) {
    uint32_t x = 0;
    std::memcpy(&x, from + k * bytes, bytes);
    c.set(i.atoms[k], x);
  }
}
void store_shared(Context& c, const Instruction& i) {
  const size_t count = i.count, bytes = i.has("u16") ? 2 : 4;
  const uint32_t address = c.get32(i.atoms[0]);
  if (address % (bytes * count) != 0) fail("an unaligned store: " + i.name);
  unsigned char* const to = current->block->at(address, bytes * count);
  current->writes(to, bytes * count);
  for (size_t k = 0; k < count; ++k) {
    const uint32_t x = c.get32(i.atoms[k + 1]);
    std::memcpy(to + bytes * k, &x, bytes);
  }
}
void load_global(Context& c, const Instruction& i) {
  const size_t count = i.count;
  const auto* const from = reinterpret_cast<const uint32_t*>(c.get(i.atoms[count]));
  current->reads_global(from, 4 * count);
  for (size_t k = 0; k < count; ++k) c.set(i.atoms[k], from[k]);
}
/// A thread that loads the same number again waits until another thread has changed it.
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
  const size_t count = i.count;
  if (reinterpret_cast<uintptr_t>(to) % (4 * count) != 0) fail("an unaligned store: " + i.name);
  current->writes_global(to, 4 * count);
  for (size_t k = 0; k < count; ++k) to[k] = c.get32(i.atoms[k + 1]);
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

void add_floats(Context& c, const Instruction& i) {
  auto* const at = reinterpret_cast<float*>(c.get(i.atoms[0]));
  const size_t bytes = 4 * size_t{i.count};
  if (reinterpret_cast<uintptr_t>(at) % bytes != 0) fail("an unaligned addition: " + i.name);
  current->writes_global(at, bytes);
  for (size_t k = 0; k < i.count; ++k)
    atomicAdd(at + k, std::bit_cast<float>(c.get32(i.atoms[k + 1])));
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
void transpose_matrix(Context& c, const Instruction& i) {
  struct Words {
    uint32_t given, transposed;
  } mine{c.get32(i.atoms[1]), 0};
  meet(~0u, &mine, [](void* const* lanes, uint32_t) {
    const auto element = [&](int row, int column) {
      return static_cast<Words*>(lanes[row * 4 + column / 2])->given >> column % 2 * 16 & 0xffff;
    };
    for (int lane = 0; lane < 32; ++lane)
      static_cast<Words*>(lanes[lane])->transposed =
          element(lane % 4 * 2, lane / 4) | element(lane % 4 * 2 + 1, lane / 4) << 16;
  });
  c.set(i.atoms[0], mine.transposed);
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

struct Known {
  std::string_view prefix;
  Handler handler;
};
// The first that fits.
constexpr Known kKnown[] = {
    {"ex2.approx.ftz.f32", ex2},
    {"min.NaN.f32", min_or_nan},
    {"max.NaN.f32", max_or_nan},
    {"lg2.approx.ftz.f32", lg2},
    {"rcp.approx.ftz.f32", rcp},
    {"cvt.rn.bf16x2.f32", narrow_pair},
    {"cvt.rn.f16x2.f32", narrow_pair},
    {"cvt.rn.bf16.f32", narrow_one},
    {"cvt.rn.f16.f32", narrow_one},
    {"cvt.f32.", widen_one},
    {"cvt.rn.f16x2.e4m3x2", widen_e4m3_pair},
    {"cvt.rn.satfinite.e4m3x2.", narrow_e4m3_pair},
    {"fma.rn.bf16x2", fma_pair},
    {"fma.rn.f16x2", fma_pair},
    {"add.rn.f16x2", of_pairs<std::plus<>>},
    {"mul.rn.f16x2", of_pairs<std::multiplies<>>},
    {"max.NaN.f16x2", of_pairs<MaxOrNan>},
    {"max.NaN.bf16x2", of_pairs<MaxOrNan>},
    {"set.lt.u32.bf16x2", set_less_pair},
    {"prmt.b32", prmt},
    {"lop3.b32", lop3},
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
    {"ld.global.nc.", load_global},
    {"ld.acquire.gpu.global.s32", load_global_again},
    {"ld.acquire.gpu.global.u32", load_global},
    {"ld.relaxed.gpu.global.s32", load_global},
    {"st.global.cs.", store_global},
    {"st.release.gpu.global.s32", store_global},
    {"atom.global.acq_rel.gpu.inc.u32", atomic_inc},
    {"atom.global.relaxed.gpu.inc.u32", atomic_inc},
    {"atom.global.acq_rel.gpu.add.u32", atomic_add},
    {"red.global.add.", add_floats},
    {"ldmatrix.sync.aligned.m8n8.x4", load_matrices},
    {"stmatrix.sync.aligned.m8n8.x4", store_matrices},
    {"movmatrix.sync.aligned.m8n8.trans", transpose_matrix},
    {"setmaxnreg.", nothing},
    {"griddepcontrol.wait", wait_for_kernels},
    {"griddepcontrol.launch_dependents", nothing},
    {"fence.proxy.async", fence_async_proxy},
    {"fence.mbarrier_init", nothing},
    {"prefetch.tensormap", nothing},
    {"prefetch.global.L1", nothing},
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
    {"cp.async.ca.shared.global", cp_async},
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
    {"mma.sync.aligned.m16n8k8.row.col.f32.tf32.", multiply_tf32_warp},
    {"mma.sync.aligned.m16n8k8.row.col.f32.", multiply_warp},
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

/// An instruction of inline PTX: its operands, and what executes it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "base/convert.h"
#include "base/formats.h"
#include "machine.h"

namespace emulator {

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

using Widen = float (*)(uint16_t);
using Narrow = uint16_t (*)(float);

inline float f32_of_f16(uint16_t x) { return fulgur::f32_from_f16(x); }
inline float f32_of_bf16(uint16_t x) { return bits_of<float>(static_cast<uint32_t>(x) << 16); }
inline float f32_of_e4m3(uint8_t x) { return fulgur::Format<fulgur::DType::kE4M3>::code(&x, 0); }
inline float f32_of_e5m2(uint8_t x) { return fulgur::Format<fulgur::DType::kE5M2>::code(&x, 0); }
// A NaN that is rounded has no sign: kernels use the sign of what is not negative.
inline uint16_t f16_of(float x) { return std::isnan(x) ? 0x7fff : fulgur::f16_from_f32(x); }
inline uint16_t bf16_of(float x) { return std::isnan(x) ? 0x7fff : fulgur::bf16_from_f32(x); }
inline Widen widen(const Instruction& i) { return i.bf16 ? f32_of_bf16 : f32_of_f16; }
inline Narrow narrow(const Instruction& i) { return i.bf16 ? bf16_of : f16_of; }

/// Where 16 bytes of a panel of rows of 128 bytes lie, whose 16 byte chunks are swizzled.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

/// A thread, or a copy, comes to a barrier.
inline void arrive(Mbarrier& barrier) {
  if (barrier.missing == 0) fail("more arrive at a barrier than it waits for");
  --barrier.missing;
  barrier.settle();
}

// copies.cpp
void cp_async(Context& c, const Instruction& i);
void cp_async_arrive(Context& c, const Instruction& i);
void cp_async_commit(Context& c, const Instruction& i);
void cp_async_wait(Context& c, const Instruction& i);
void bulk_commit(Context& c, const Instruction& i);
void bulk_wait(Context& c, const Instruction& i);
void tma_load(Context& c, const Instruction& i);
void tma_store(Context& c, const Instruction& i);
void bulk_load(Context& c, const Instruction& i);
void bulk_store(Context& c, const Instruction& i);

// products.cpp
void multiply_warp(Context& c, const Instruction& i);
void multiply_tf32_warp(Context& c, const Instruction& i);
void multiply_warpgroup(Context& c, const Instruction& i);
void commit_products(Context& c, const Instruction& i);
void wait_products(Context& c, const Instruction& i);

}  // namespace emulator

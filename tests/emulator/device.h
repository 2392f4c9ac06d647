/// What a kernel's text finds in CUDA C++, for the host's compiler: nvrtc.cpp puts it before the
/// text, whose inline PTX has become calls of emulator::execute.
#pragma once

#include <cstddef>  // <cmath> would take as long to compile as a kernel
#include <cstdint>

#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __builtin_assume(...) static_cast<void>(0)

struct uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};

namespace emulator {

struct Index {
  unsigned x, y, z;
};

/// The indices and sizes that the running thread sees.
struct Place {
  Index thread, block, threads, blocks;
};
extern const Place* place;

/// An operand of inline PTX after its constraint: the address of a variable that is written, or
/// the bits of a value.
template <class T>
[[gnu::always_inline]] inline uint64_t variable(T& x) {
  return reinterpret_cast<uint64_t>(&x);
}
template <class T>
[[gnu::always_inline]] inline uint64_t value(T x) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &x, sizeof(T));
  return bits;
}

/// Executes inline PTX. After the text: a constraint and an operand, in turns, and then perhaps
/// clobbers.
void execute(const char* text, ...);

void synchronize_block();
bool vote_of_block(bool vote);  ///< whether a thread of the block votes for it
void synchronize_warp(unsigned mask);
unsigned shuffle(unsigned mask, unsigned bits, int from);  ///< the value of lane `from`
unsigned ballot(unsigned mask, bool vote);

/// Shared memory of the CTA: the launch's own, and variables by their line.
unsigned char* dynamic_shared();
void* static_shared(int line, size_t bytes);
size_t shared_address(const void* at);

template <class T, int line>
T& shared_variable() {
  return *static_cast<T*>(static_shared(line, sizeof(T)));
}

template <class T>
T shuffle_bits(unsigned mask, T x, int from) {
  static_assert(sizeof(T) == 4);
  unsigned bits;
  __builtin_memcpy(&bits, &x, 4);
  bits = shuffle(mask, bits, from);
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

template <class To, class From>
To bits_of(From x) {
  static_assert(sizeof(To) == sizeof(From));
  To y;
  __builtin_memcpy(&y, &x, sizeof(y));
  return y;
}

}  // namespace emulator

#define threadIdx (emulator::place->thread)
#define blockIdx (emulator::place->block)
#define blockDim (emulator::place->threads)
#define gridDim (emulator::place->blocks)

/// There is no clock: nothing takes any time.
inline long long clock64() { return 0; }
inline void __syncthreads() { emulator::synchronize_block(); }
inline int __syncthreads_or(int vote) { return emulator::vote_of_block(vote != 0); }
inline void __syncwarp(unsigned mask = 0xffffffff) { emulator::synchronize_warp(mask); }
inline void __threadfence() {}
inline unsigned lane_() { return threadIdx.x % 32; }
template <class T>
T __shfl_sync(unsigned mask, T x, int from) {
  return emulator::shuffle_bits(mask, x, from & 31);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  return emulator::shuffle_bits(mask, x, int(lane_()) ^ distance);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int distance) {
  const int from = int(lane_()) - distance;
  return emulator::shuffle_bits(mask, x, from < 0 ? int(lane_()) : from);
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, int distance) {
  const int from = int(lane_()) + distance;
  return emulator::shuffle_bits(mask, x, from > 31 ? int(lane_()) : from);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) { return emulator::ballot(mask, vote); }
inline bool __any_sync(unsigned mask, bool vote) { return emulator::ballot(mask, vote) != 0; }
inline bool __all_sync(unsigned mask, bool vote) { return emulator::ballot(mask, vote) == mask; }
/// A reduction over a whole warp.
template <class T, class Join>
T reduced_(unsigned mask, T x, const Join& join) {
  for (int step = 1; step < 32; step *= 2) x = join(x, __shfl_xor_sync(mask, x, step));
  return x;
}
template <class T>
T __reduce_max_sync(unsigned mask, T x) {
  return reduced_(mask, x, [](T a, T b) { return a > b ? a : b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T x) {
  return reduced_(mask, x, [](T a, T b) { return a < b ? a : b; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned x) {
  return reduced_(mask, x, [](unsigned a, unsigned b) { return a | b; });
}

inline size_t __cvta_generic_to_shared(const void* at) { return emulator::shared_address(at); }

// CTAs take turns in one thread of the host.
inline int atomicAdd(int* at, int x) {
  const int before = *at;
  *at += x;
  return before;
}
inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long x) {
  const unsigned long long before = *at;
  *at += x;
  return before;
}
inline int atomicMax(int* at, int x) {
  const int before = *at;
  if (before < x) *at = x;
  return before;
}
inline float atomicAdd(float* at, float x) {
  const float before = *at;
  *at += x;
  return before;
}
inline unsigned atomicInc(unsigned* at, unsigned last) {
  const unsigned before = *at;
  *at = before >= last ? 0 : before + 1;
  return before;
}

inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
inline float __double2float_rn(double x) { return static_cast<float>(x); }
inline float __int_as_float(int x) { return emulator::bits_of<float>(x); }
inline int __float_as_int(float x) { return emulator::bits_of<int>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits_of<float>(x); }
inline unsigned __float_as_uint(float x) { return emulator::bits_of<unsigned>(x); }
inline double __longlong_as_double(long long x) { return emulator::bits_of<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x)); }
inline unsigned __umulhi(unsigned a, unsigned b) {
  return unsigned((unsigned long long)(a)*b >> 32);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 32; i += 8) sum += (a >> i & 255) * (b >> i & 255);
  return sum;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned nibble = selector >> 4 * i & 15;
    unsigned byte = unsigned(bytes >> 8 * (nibble & 7)) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
extern "C" {
double exp(double) noexcept;
double fabs(double) noexcept;
double floor(double) noexcept;
double fmax(double, double) noexcept;
double log(double) noexcept;
double trunc(double) noexcept;
float fabsf(float) noexcept;
float rintf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float floorf(float) noexcept;
float sqrtf(float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float erff(float) noexcept;
float powf(float, float) noexcept;
}

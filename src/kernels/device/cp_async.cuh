// Copies from global to shared memory that a thread starts and waits for in groups (cp.async). Before compute capability
// 8.0 a copy is a load and a store instead, and complete when it has started.
#pragma once
#include "device/memory.cuh"

enum : int { kHasAsyncCopies = __CUDA_ARCH__ >= 800 };

// The first `count` bytes of a word, and 0 for the others.
__device__ __forceinline__ u32 first_bytes(u32 word, int count) {
  return count >= 4 ? word : count <= 0 ? 0 : word & ((1u << 8 * count) - 1);
}

// Copies `size` (4, 8 or 16) bytes by loads and stores: the first `bytes` of them, and 0 for the others, which are read
// where they lie in the same 4 or 16 bytes.
template <int size>
__device__ __forceinline__ void copy_at_once(u32 shared, const void* from, u32 bytes) {
  constexpr int kStep = size == 16 ? 16 : 4;
#pragma unroll
  for (int at = 0; at < size; at += kStep) {
    u32 x[kStep / 4];
    load_global_if(int(bytes) > at, static_cast<const char*>(from) + at, x);
#pragma unroll
    for (int i = 0; i < kStep / 4; ++i) x[i] = first_bytes(x[i], int(bytes) - at - 4 * i);
    if constexpr (kStep == 16) store_shared16(shared, x);
    else store_shared(shared + at, int(x[0]));
  }
}

// Copies 16 bytes, of which the first `bytes` are read and the others are 0.
__device__ __forceinline__ void async_copy16(u32 shared, const void* from, u32 bytes) {
  if constexpr (!kHasAsyncCopies) return copy_at_once<16>(shared, from, bytes);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void async_copy16(u32 shared, const void* from) {
  if constexpr (!kHasAsyncCopies) return copy_at_once<16>(shared, from, 16);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// Copies 4 bytes, likewise.
__device__ __forceinline__ void async_copy4(u32 shared, const void* from, u32 bytes) {
  if constexpr (!kHasAsyncCopies) return copy_at_once<4>(shared, from, bytes);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}

// Copies `bytes` (4, 8 or 16) bytes, which are aligned to `bytes`; writes 0 unless `there`.
template <int bytes>
__device__ __forceinline__ void async_copy_piece(u32 shared, const void* from, bool there) {
  if constexpr (!kHasAsyncCopies) return copy_at_once<bytes>(shared, from, there ? bytes : 0);
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(bytes),
               "r"(there ? bytes : 0)
               : "memory");
}

// Copies `bytes` bytes, likewise, of which the first `read` are read and the others are 0; other lanes copy the rest of
// the row.
template <int bytes>
__device__ __forceinline__ void async_copy_part(u32 shared, const void* from, u32 read) {
  if (bytes == 16) return async_copy16(shared, from, read);
  if constexpr (!kHasAsyncCopies) return copy_at_once<bytes>(shared, from, read);
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(bytes), "r"(read)
               : "memory");
}

// How many of the 16 bytes from column `column` on exist in a row of `dim` columns of `bits` bits.
__device__ __forceinline__ u32 bytes_of_chunk(int bits, int column, int dim) {
  const int columns = min(max(dim - column, 0), 128 / bits);
  return bits < 8 ? u32(columns) / (8 / bits) : columns * (bits / 8);
}

// Arrives at an mbarrier, as one of its expected arrivals, when all copies that this thread has started are complete.
__device__ __forceinline__ void async_copy_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void async_copy_commit() {
  if constexpr (kHasAsyncCopies) asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until all but the last `pending` groups of this thread are complete.
template <int pending>
__device__ __forceinline__ void async_copy_wait() {
  if constexpr (kHasAsyncCopies) asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

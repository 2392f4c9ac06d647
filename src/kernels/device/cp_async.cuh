// Copies from global to shared memory that a thread starts and waits for in groups (cp.async).
#pragma once
#include "host_device/host_device.h"

__device__ __forceinline__ void async_copy16(u32 shared, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// 16 bytes, of which the first `bytes` are read and the others are 0.
__device__ __forceinline__ void async_copy16(u32 shared, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
               : "memory");
}

// 4 bytes, likewise.
__device__ __forceinline__ void async_copy4(u32 shared, const void* from, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}

// `bytes` of 4, 8 or 16, which lie at a multiple of them; zeros if they are not `there`.
template <int bytes>
__device__ __forceinline__ void async_copy_piece(u32 shared, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(bytes),
               "r"(there ? bytes : 0)
               : "memory");
}

// `bytes` likewise of a row that other lanes have more of, the first `read` of them read and the others 0.
template <int bytes>
__device__ __forceinline__ void async_copy_part(u32 shared, const void* from, u32 read) {
  if (bytes == 16) return async_copy16(shared, from, read);
  asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(bytes), "r"(read)
               : "memory");
}

// Bytes of the 16 from column `column` on that a row of `dim` columns of `bits` has.
__device__ __forceinline__ u32 bytes_of_chunk(int bits, int column, int dim) {
  const int columns = min(max(dim - column, 0), 128 / bits);
  return bits < 8 ? u32(columns) / (8 / bits) : columns * (bits / 8);
}

// Arrives at an mbarrier, as one of those that it counts, when all copies that this thread has started are there.
__device__ __forceinline__ void async_copy_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `pending` groups of this thread are there.
template <int pending>
__device__ __forceinline__ void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

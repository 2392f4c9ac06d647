// Copies from global to shared memory that a thread starts and waits for in groups (cp.async).
#pragma once
#include "host_device/host_device.h"

__device__ __forceinline__ void async_copy16(u32 shared, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
}

// Copies 16 bytes, of which the first `bytes` are read and the others are 0.
__device__ __forceinline__ void async_copy16(u32 shared, const void* from, u32 bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes)
               : "memory");
}

// Copies 4 bytes, likewise.
__device__ __forceinline__ void async_copy4(u32 shared, const void* from, u32 bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}

// Copies `bytes` (4, 8 or 16) bytes, which are aligned to `bytes`; writes 0 unless `there`.
template <int bytes>
__device__ __forceinline__ void async_copy_piece(u32 shared, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(shared), "l"(from), "n"(bytes),
               "r"(there ? bytes : 0)
               : "memory");
}

// Copies `bytes` bytes, likewise, of which the first `read` are read and the others are 0; other lanes copy the rest of
// the row.
template <int bytes>
__device__ __forceinline__ void async_copy_part(u32 shared, const void* from, u32 read) {
  if (bytes == 16) return async_copy16(shared, from, read);
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

__device__ __forceinline__ void async_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the last `pending` groups of this thread are complete.
template <int pending>
__device__ __forceinline__ void async_copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

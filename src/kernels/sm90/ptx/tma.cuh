// TMA: bulk copies, of boxes of tensors and of plain bytes, between global and shared memory.
#pragma once
#include "host_device/host_device.h"

__device__ __forceinline__ void tma_prefetch_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Where a box begins in a tensor [batch, row, head, dim].
struct BoxStart {
  int dim, row, head, batch;
};

// How long L2 keeps what is loaded: cache policies as createpolicy.fractional makes them for all of it.
enum class Keep : u64 { kShort = 0x12f0000000000000, kLong = 0x14f0000000000000 };

__device__ __forceinline__ void tma_load(u32 shared, const void* map, u32 barrier, const BoxStart& at, Keep keep) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint\n"
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(shared),
      "l"(map), "r"(barrier), "r"(at.dim), "r"(at.row), "r"(at.head), "r"(at.batch), "l"(u64(keep))
      : "memory");
}

// Into L2 alone.
__device__ __forceinline__ void tma_prefetch(const void* map, const BoxStart& at) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(at.dim),
               "r"(at.row), "r"(at.head), "r"(at.batch)
               : "memory");
}

__device__ __forceinline__ void tma_store(const void* map, u32 shared, const BoxStart& at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group\n"
      "[%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
      "r"(shared), "r"(at.dim), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// Copies contiguous bytes, in multiples of 16 and aligned to 16, to shared memory.
__device__ __forceinline__ void bulk_load(u32 shared, const void* from, u32 bytes, u32 barrier, Keep keep) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(shared),
      "l"(from), "r"(bytes), "r"(barrier), "l"(u64(keep))
      : "memory");
}

// Loads such bytes into L2 only.
__device__ __forceinline__ void bulk_prefetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void bulk_store(void* to, u32 shared, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(shared), "r"(bytes)
               : "memory");
}

// Adds floats to floats, each at once, in any order.
__device__ __forceinline__ void bulk_add(float* to, u32 shared, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(shared),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until this thread's stores are done.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Waits until all but the last `pending` groups of this thread's stores have read their shared memory.
template <int pending = 0>
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(pending) : "memory");
}

// Orders ordinary accesses to shared memory before later ones by TMA or the tensor cores.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

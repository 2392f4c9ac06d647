// The division of work in a CTA of the portable backward kernels: its warps, its shared memory and the loads of
// its steps.
#pragma once
#include "attention/fragment_store.cuh"
#include "backward/layout.cuh"
#include "portable/backward/layout.h"
#include "portable/backward/steps.cuh"
#include "portable/common/copy_rows.cuh"

__device__ constexpr PortableBackwardLayout kLayout = portable_backward_layout(
    {kOperands, kHeadDim, kValueDim, kBlockRows, kBlockKeys, kStages, kDsStages});

// What a warp computes in a step: everything (keys.cu), or P and dV, or dS and dK (keys_wide.cu).
enum Role : int { kOfBoth, kOfValues, kOfKeys };

enum : int {
  kThreads = 32 * kWarps,
  kRoleThreads = kThreads / kRoles,
  kKeyWarps = kWarps / kRoles / 2,       // of a role, each with its own keys
  kDqGroups = kWarps / 2,                // groups of columns of dQ
  kWarpKeys = kBlockKeys / kKeyWarps,
  kKeyTiles = kWarpKeys / 16,            // tiles of 16 keys per warp
  kHalfRows = kBlockRows / 2,            // rows of a step for which a warp computes P or dS, and dQ
  kRowTiles = kHalfRows / 16,            // tiles of 16 of these rows
  kKeyPanelBytes = kBlockKeys * kPanelRowBytes,
  kRowPanelBytes = kBlockRows * kPanelRowBytes,
  // The warp's keys of K and V stay in registers.
  kKeepsKeys = ElementK::kBytes == 2 && kRoles == 1 && kStages == 3 && kHeadDim <= 64 && kValueDim <= 64,
};

// The part of a warp: keys [key, key + kWarpKeys) of the block, half of the rows, and half of the columns of dK and dV.
struct Part {
  int key, half;
  int columns;  // of dQ: the number of one of kDqGroups interleaved groups
};
__device__ __forceinline__ Part part_of_warp() {
  const int warp = uniform(threadIdx.x / 32);
  const int pair = kRoles == 1 ? warp / 2 : warp / 2 % kKeyWarps;
  return {pair * kWarpKeys, warp % 2, warp / 2};
}

// Starts copies of rows [row, row + rows) of a head by the threads of a role. `count` rows exist; the others become 0,
// since they are multiplied with P = 0 or dS = 0, and 0 * NaN is NaN.
template <class Type, int rows, int columns>
__device__ __forceinline__ void start_rows(u32 to, const StridedTensor& t, int dim, int batch, int start, int head,
                                           int row, int count) {
  const typename Type::Memory* const from = row_of<Type>(t, batch, start + row, head);
  const u32 thread = kRoles == 1 ? threadIdx.x : threadIdx.x % kRoleThreads;
  if (row + rows <= count) {
    copy_rows<Type, kRoleThreads, rows, columns, true>(
        to, t.data, dim, [&](int i) { return from + i * t.row; }, thread);
  } else {
    copy_rows<Type, kRoleThreads, rows, columns, false>(
        to, t.data, dim, [&](int i) { return row + i < count ? from + i * t.row : nullptr; }, thread);
  }
}

// The copies of the operands that a role multiplies first, step by step: Q and LSE, dO and D, or all of these.
template <Role role>
class StepLoader {
 public:
  __device__ __forceinline__ StepLoader(const BackwardParams& p, u32 smem, const Keys& keys)
      : p_(p), smem_(smem), keys_(keys), steps_(p, keys) {}

  // Starts the copies of the next step, if there is one.
  __device__ __forceinline__ void start() {
    if (steps_.more()) {
      const u32 to = smem_ + kLayout.stages + stage_ * kLayout.stage_bytes;
      const Lengths& n = keys_.n;
      if constexpr (role != kOfKeys) {
        start_rows<ElementQ, kBlockRows, kHeadDim>(to, p_.q, p_.d, keys_.batch, n.q_start, steps_.head(), steps_.row(),
                                                   n.sq);
      }
      if constexpr (role != kOfValues) {
        start_rows<ElementO, kBlockRows, kValueDim>(to + kLayout.dout, p_.dout, p_.dv, keys_.batch, n.q_start,
                                                    steps_.head(), steps_.row(), n.sq);
      }
      start_statistics();
      steps_.advance();
      stage_ = stage_ + 1 == kStages ? 0 : stage_ + 1;
    }
    async_copy_commit();
  }

 private:
  __device__ __forceinline__ void start_statistics() {
    constexpr int kQuarter = kBlockRows / 4;  // threads that copy LSE, and as many D
    const u32 to = smem_ + kLayout.statistics + stage_ * 8 * kBlockRows;
    if constexpr (role == kOfBoth) {
      const int i = threadIdx.x;
      if (i < 2 * kQuarter) {
        const float* from = (i < kQuarter ? p_.shift : p_.delta) + steps_.statistics(p_, keys_);
        async_copy16(to + 16 * i, from + i % kQuarter * 4);
      }
    } else {
      const int i = threadIdx.x % kRoleThreads;
      if (i < kQuarter) {
        async_copy16(to + (role == kOfKeys ? 4 * kBlockRows : 0) + 16 * i,
                     (role == kOfKeys ? p_.delta : p_.shift) + steps_.statistics(p_, keys_) + 4 * i);
      }
    }
  }

  const BackwardParams& p_;
  u32 smem_;
  const Keys& keys_;
  Steps steps_;
  int stage_ = 0;
};

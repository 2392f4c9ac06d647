// The end of a tile: normalized O and LSE to global memory, and the sum of the parts of a split tile.
#pragma once
#include "sm90/forward_repair.cuh"

__device__ __forceinline__ void write_lse(const ForwardParams& p, const Place& place, const Lengths& n, int row, const Rows& rows) {
  float* lse = p.lse + place.batch * p.lse_batch_stride + place.head * p.lse_head_stride + n.q_start;
  if (threadIdx.x % 4 == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i)  // a row without keys has sum 0 and gets log(0) = -inf
      if (row + 8 * i < n.sq)
        lse[row + 8 * i] = rows.sum[i] == 0 ? -__int_as_float(0x7f800000) : (log2_fast(rows.sum[i]) - rows.shift[i]) * 0.693147180559945f;
  }
}

// Packed values on their way out, and whether all so far were finite.
struct Finite {
  u32 trace = 0;  // 0 * everything
  __device__ __forceinline__ void add(u32 packed) {
    if (kHasLeft || kHasRight) asm("fma.rn." FULGUR_INPUT "x2 %0, %1, %2, %0;" : "+r"(trace) : "r"(packed), "r"(0));
  }
};

// 8 columns of a row of O, of which `count` exist.
__device__ __forceinline__ void store_columns(unsigned short* to, const u32 (&x)[4], int count) {
  if (kStore != kStoreElements) {
    if (count > 0) *reinterpret_cast<uint4*>(to) = {x[0], x[1], x[2], x[3]};
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (i < count) to[i] = static_cast<unsigned short>(x[i / 2] >> (i % 2 * 16));
  }
}

// The 16 rows of a warp straight from registers: quads exchange so that a thread holds 8 adjacent columns of a row, 16 bytes.
__device__ __forceinline__ void store_output(const ForwardParams& p, const Place& place, const Lengths& n, int row, const float (&O)[kValueDim / 2],
                                             float scale0, float scale1, Finite& finite) {
  const u32 quad = threadIdx.x % 4;
  row += threadIdx.x % 32 / 4;
  auto* out = const_cast<unsigned short*>(row_of(p.o, place.batch, n.q_start + row, place.head));
#pragma unroll
  for (int i = 0; i < kValueDim / 2; i += 16) {  // 32 columns, the last time perhaps 16
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = half ? scale1 : scale0;
      u32 x[4];  // x[j]: this thread's pair of columns of the j-th group of 8
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int at = i + 4 * j + 2 * half;
        x[j] = at < kValueDim / 2 ? pack(O[at] * scale, O[at + 1] * scale) : 0;
        if (half == 0) finite.add(x[j]);
      }
      // A 4 x 4 transposition over the quad in two exchanges.
#pragma unroll
      for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (!(j & bit)) {
            const u32 give = quad & bit ? x[j] : x[j + bit];
            const u32 got = __shfl_xor_sync(0xffffffff, give, bit);
            if (quad & bit) x[j] = got;
            else x[j + bit] = got;
          }
      }
      const int column = 2 * i + 8 * quad;
      if (row + 8 * half < n.sq) store_columns(out + 8 * half * p.o.row + column, x, p.dv - column);
    }
  }
}

// O leaves through the shared memory of this warp's rows of Q; from registers where the plan says so, and where a store of 16 rows would overwrite the
// next packed sequence. False when the rows are not all finite.
__device__ __forceinline__ bool write_output(const ForwardParams& p, const Place& place, const Lengths& n, int row, float (&O)[kValueDim / 2],
                                             const Rows& rows, u32 shared) {
  const u32 lane = threadIdx.x % 32;
  const float scale0 = rows.sum[0] == 0 ? 0 : reciprocal_fast(rows.sum[0]), scale1 = rows.sum[1] == 0 ? 0 : reciprocal_fast(rows.sum[1]);
  Finite finite;
  if (kStore != kStoreTiles || (kPacked && row + 16 > n.sq)) {
    store_output(p, place, n, row, O, scale0, scale1, finite);
    return finite.trace == 0;
  }
  const u32 line = shared + lane % 16 * kPanelRowBytes, flip = lane % 8;
#pragma unroll
  for (int i = 0; i < kValueDim / 2; i += 8) {  // 16 columns
    const u32 chunk = (i / 4 + lane / 16) % 8;
    const u32 x0 = pack(O[i] * scale0, O[i + 1] * scale0), x2 = pack(O[i + 4] * scale0, O[i + 5] * scale0);
    finite.add(x0), finite.add(x2);
    store_matrix_x4(line + i / 32 * 64 * kPanelRowBytes + ((chunk ^ flip) << 4), x0, pack(O[i + 2] * scale1, O[i + 3] * scale1), x2,
                    pack(O[i + 6] * scale1, O[i + 7] * scale1));
  }
  fence_async_proxy();
  __syncwarp();
  if (elect_one()) {
#pragma unroll
    for (int panel = 0; panel < kValuePanels; ++panel)
      tma_store(&p.o_map, shared + panel * 64 * kPanelRowBytes, 64 * panel, n.q_start + row, place.head, kPacked ? 0 : place.batch);
    tma_store_commit();
  }
  return finite.trace == 0;
}

// A part of a split tile leaves its O and row statistics for the last part to finish, which adds all parts in order. True for that one.
__device__ __forceinline__ bool combine_parts(const ForwardParams& p, const Place& place, Rows& rows, float (&O)[kValueDim / 2], u32 smem) {
  if (place.part < 0) return true;
  const float infinity = __int_as_float(0x7f800000);
  const int group = threadIdx.x / 128 - 1, thread = threadIdx.x % 128;
  const int slot = place.split * kConsumers + group;
  constexpr int kFloats = (kValueDim / 2 + 4) * 128;
  float* parts = p.partial + slot * p.split_parts * kFloats + thread;
  float* mine = parts + place.part * kFloats;
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) mine[i * 128] = O[i];
#pragma unroll
  for (int i = 0; i < 2; ++i) mine[(kValueDim / 2 + i) * 128] = rows.shift[i], mine[(kValueDim / 2 + 2 + i) * 128] = rows.sum[i];
  __threadfence();
  named_barrier_sync(kBarrierConsumer + group, 128);
  const u32 flag = smem + sLast + 4 * group;
  if (thread == 0) {
    const int last = atomicInc(reinterpret_cast<unsigned*>(p.tickets) + slot, p.split_parts - 1) == unsigned(p.split_parts - 1);
    __threadfence();
    asm volatile("st.shared.s32 [%0], %1;" ::"r"(flag), "r"(last) : "memory");
  }
  named_barrier_sync(kBarrierConsumer + group, 128);
  int last;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(last) : "r"(flag) : "memory");
  if (!last) return false;
  rows = {{infinity, infinity}, {0, 0}};
  for (int part = 0; part < p.split_parts; ++part)
#pragma unroll
    for (int i = 0; i < 2; ++i) rows.shift[i] = fminf(rows.shift[i], load_shared_by_all(parts + part * kFloats + (kValueDim / 2 + i) * 128));
#pragma unroll
  for (int i = 0; i < kValueDim / 2; ++i) O[i] = 0;
#pragma unroll 1
  for (int part = 0; part < p.split_parts; ++part) {
    const float* from = parts + part * kFloats;
    float factor[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float shift = load_shared_by_all(from + (kValueDim / 2 + i) * 128);
      factor[i] = shift == infinity ? 0 : exp2_fast(rows.shift[i] - shift);
      rows.sum[i] += factor[i] * load_shared_by_all(from + (kValueDim / 2 + 2 + i) * 128);
    }
#pragma unroll
    for (int i = 0; i < kValueDim / 2; ++i) O[i] += factor[i / 2 % 2] * load_shared_by_all(from + i * 128);
  }
  return true;
}

// Writes this warp's 16 rows.
__device__ __forceinline__ void finish(const ForwardParams& p, const Place& place, const Rows& rows, float (&O)[kValueDim / 2], u32 smem, u32 stage) {
  const u32 group = threadIdx.x / 128 - 1, warp_row = threadIdx.x % 128 / 32 * 16;
  const Lengths n = lengths_of(p, place.batch);
  const int row = place.row + warp_row;
  if (row >= n.sq) return;
  const bool finite = write_output(p, place, n, row, O, rows, smem + sQ + stage * kQBytes + group * kQGroupBytes + warp_row * kPanelRowBytes);
  if (kHasLse) write_lse(p, place, n, row + threadIdx.x % 32 / 4, rows);
  if ((kHasLeft || kHasRight) && __any_sync(0xffffffff, !finite)) repair_rows(p, place, n, row, rows);
}

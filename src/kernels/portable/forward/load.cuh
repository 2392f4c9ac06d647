// Copies of tiles of Q, K and V to shared memory by cp.async.
#pragma once
#include "attention/pages.cuh"
#include "portable/common/copy_rows.cuh"
#include "portable/forward/layout.h"
#include "portable/forward/params.h"

__device__ constexpr PortableForwardLayout kLayout = portable_forward_layout(
    {kOperands, kHeadDim, kValueDim, kStrips, kBlockKeys, kStages, bool(kQInRegisters), bool(kDropout)});

enum : int {
  kThreads = 128 * kStrips / kWarpStrips,
  kStripPanelBytes = kStripRows * kPanelRowBytes,  // of a strip of Q
  kPanelBytes = kBlockKeys * kPanelRowBytes,       // of K and V
};

// Copies Q of the strips of a q tile; strip_row(i) is the first row of strip i. Rows after the end of the sequence
// become 0: the lazy rescale is decided by all rows of a warp, so that the bits of a row depend on the others, which
// must depend on nothing but the length of the sequence.
template <class StripRow>
__device__ __forceinline__ void start_q(const PortableForwardParams& p, u32 smem, const QTile& tile, const Lengths& n,
                                        const StripRow& strip_row) {
#pragma unroll
  for (int strip = 0; strip < kStrips; ++strip)
    copy_rows<ElementQ, kThreads, kStripRows, kHeadDim, false>(
        smem + kLayout.q + strip * kLayout.strip_bytes, p.q.data, p.d, [&](int i) {
          const int row = strip_row(strip) + i;
          return row < n.sq ? row_of<ElementQ>(p.q, tile.batch, n.q_start + row, tile.head) : nullptr;
        });
  async_copy_commit();
}

// Copies K and V of the key tiles of a q tile, from right to left, to kStages buffers. With two buffers the next K and
// V are copied while this tile is computed, which needs one barrier per tile. With one buffer V of a tile is copied
// during S = Q K^T, and the next K during the rest, which needs two barriers.
class KeyValueTiles {
 public:
  template <class Walk>
  __device__ __forceinline__ KeyValueTiles(const PortableForwardParams& p, u32 smem, const QTile& q_tile,
                                           const Lengths& n, const Walk& first)
      : p_(p), buffers_(smem + kLayout.stages), batch_(q_tile.batch), head_(q_tile.head / p.group), n_(n) {
    if (first.more()) {
      start_k(first.tile, buffers_);
      if (kStages > 1) start_v(first.tile, buffers_);
    }
    async_copy_commit();
  }

  // Waits until K of a tile is loaded and all warps have computed the previous tile. Returns its address. `next`: the
  // iterator after this tile.
  template <class Walk>
  __device__ __forceinline__ u32 keys(int tile, const Walk& next) {
    async_copy_wait<0>();
    __syncthreads();
    if (kStages == 1) {
      start_v(tile, buffers_);
      async_copy_commit();
      return buffers_;
    }
    const u32 here = buffers_ + stage_ * kLayout.stage_bytes;
    stage_ ^= 1;
    if (next.more()) {
      const u32 to = buffers_ + stage_ * kLayout.stage_bytes;
      start_k(next.tile, to);
      start_v(next.tile, to);
      async_copy_commit();
    }
    return here;
  }

  // Waits until V of the same tile is loaded and all warps have read its K at `k`. Returns its address.
  template <class Walk>
  __device__ __forceinline__ u32 values(u32 k, const Walk& next) {
    if (kStages == 1) {
      async_copy_wait<0>();
      __syncthreads();
      if (next.more()) {
        start_k(next.tile, buffers_);
        async_copy_commit();
      }
    }
    return k + kLayout.k_bytes;
  }

 private:
  __device__ __forceinline__ void start_k(int tile, u32 to) const {
    start<ElementK, kHeadDim>(p_.k, p_.d, tile * kBlockKeys, to);
  }
  __device__ __forceinline__ void start_v(int tile, u32 to) const {
    start<ElementV, kValueDim>(p_.v, p_.dv, tile * kBlockKeys, to + kLayout.k_bytes);
  }

  // Keys after the end become 0: they are multiplied with P = 0, and 0 * NaN is NaN.
  template <class Type, int columns>
  __device__ __forceinline__ void start(const StridedTensor& t, int dim, int key, u32 to) const {
    using Memory = typename Type::Memory;
    const bool whole = key + kBlockKeys <= n_.sk;
    if constexpr (kPage > 0) {
      copy_rows<Type, kThreads, kBlockKeys, columns, false>(to, t.data, dim, [&](int i) -> const Memory* {
        const PageRow at = page_row(p_.pages, batch_, n_.k_start, n_.sk, key + i);
        if (at.page < 0) return nullptr;
        return static_cast<const Memory*>(t.data) + at.page * t.batch + at.row * t.row + head_ * t.head;
      });
    } else {
      const Memory* const rows = static_cast<const Memory*>(t.data) + head_ * t.head +
                                 key_entry(p_, batch_) * t.batch + (n_.k_start + key) * t.row;
      if (whole) {
        copy_rows<Type, kThreads, kBlockKeys, columns, true>(to, t.data, dim, [&](int i) { return rows + i * t.row; });
      } else {
        copy_rows<Type, kThreads, kBlockKeys, columns, false>(
            to, t.data, dim, [&](int i) { return key + i < n_.sk ? rows + i * t.row : nullptr; });
      }
    }
  }

  const PortableForwardParams& p_;
  u32 buffers_;
  int batch_, head_;
  const Lengths& n_;
  u32 stage_ = 0;
};

// Tiles of Q, K and V on their way into shared memory by cp.async.
#pragma once
#include "attention/pages.cuh"
#include "portable/common/copy_rows.cuh"
#include "portable/forward/layout.h"
#include "portable/forward/params.h"

__device__ constexpr PortableForwardLayout kLayout = portable_forward_layout(
    {kOperands, kHeadDim, kValueDim, kStrips, kBlockKeys, kStages, bool(kQInRegisters)});

enum : int {
  kThreads = 128 * kStrips / kWarpStrips,
  kStripPanelBytes = kStripRows * kPanelRowBytes,  // of Q
  kPanelBytes = kBlockKeys * kPanelRowBytes,       // of K and V
};

// Q of the strips of a q tile; strip_row(i) is where strip i begins. Rows after the end of the sequence become zeros:
// the lazy rescale votes over the rows of a warp, so that the bits of a row depend on the others, and zeros depend on
// nothing but where the sequence ends.
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

// K and V of the key tiles of a q tile, from right to left, in kStages buffers. With two, the next K and V are on their
// way while this tile is computed, and a tile takes one barrier. With one, V of a tile is on its way during S = Q K^T,
// and the next K during the rest, which takes two.
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

  // K of a tile, once it is there for all warps, which are done with the tile before. `next`: the walk after it.
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

  // V of the same tile, whose K lies at `k`; all warps are done with that.
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

  // Keys after the end become zeros: they would meet P = 0, and 0 * NaN is NaN.
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

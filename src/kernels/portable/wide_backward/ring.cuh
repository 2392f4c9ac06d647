// The ring of chunks of the rows that a CTA streams: dQ streams K and V, dK and dV stream Q and dO. A chunk has panels
// of the rows of a step: for S and dP as many for each role, for the gradient adjacent ones. All threads fill it by
// cp.async, kStages - 1 chunks before they are computed, over the ends of steps.
#pragma once
#include "attention/fragment_store.cuh"
#include "device/cp_async.cuh"
#include "device/mma_sync.cuh"
#include "portable/wide_backward/tile.cuh"

enum : int {
  kRolePanels = kChunkPanels / 2,
  kHalfPanels = (kHeadPanels + 1) / 2,  // of Q and K, for dV those of the first role
  // Chunks of a step: first for S and dP, then for the gradient.
  kScoreChunks = ((kOfV ? int(kHalfPanels) : max_of(kHeadPanels, kValuePanels)) + kRolePanels - 1) / kRolePanels,
  kGradientChunks = (kGradientPanels + kChunkPanels - 1) / kChunkPanels,
  kChunks = kScoreChunks + kGradientChunks,
};

// The first panel that a role multiplies of its tensor, and how many.
__device__ constexpr int first_panel(int role) { return kOfV && role == 1 ? kHalfPanels : 0; }
__device__ constexpr int panels_of_role(int role) {
  if (kOfV) return role == 0 ? kHalfPanels : kHeadPanels - kHalfPanels;
  return role == 0 ? kHeadPanels : kValuePanels;
}

// Copies a row's 16 bytes of a panel from column `column` on; 0 where there is no row (null) or no column.
template <class Type>
__device__ __forceinline__ void copy_columns(u32 to, const typename Type::Memory* row, const void* any, int column,
                                             int dim) {
  const u32 bytes = row == nullptr ? 0 : bytes_of_chunk(16, column, dim);
  async_copy16(to, bytes > 0 ? row + column : static_cast<const typename Type::Memory*>(any), bytes);
}

// Starts the copies of the CTA's own rows of a tensor, of which `count` exist from its first one on.
template <class Type, int panels>
__device__ __forceinline__ void start_own_rows(u32 to, const StridedTensor& t, int dim, const Own& own, int start,
                                               int head, int count) {
  const int column = threadIdx.x % 8 * 8;
#pragma unroll 1
  for (int row = threadIdx.x / 8; row < kOwnRows; row += kThreads / 8) {
    const auto* from = row < count ? row_of<Type>(t, own.batch, start + own.first() + row, head) : nullptr;
    const u32 place = to + swizzled(row, threadIdx.x % 8);
#pragma unroll
    for (int panel = 0; panel < panels; ++panel)
      copy_columns<Type>(place + panel * kOwnPanelBytes, from, t.data, kPanelColumns * panel + column, dim);
  }
}

class ChunkRing {
 public:
  // Starts the copies of the CTA's own rows, too.
  __device__ __forceinline__ ChunkRing(const BackwardParams& p, const Own& own, u32 smem)
      : p_(p), own_(own), smem_(smem), tiles_(p, own) {
    const Lengths& n = own.n;
    if constexpr (kOfQ) {
      start_own_rows<ElementQ, kHeadPanels>(smem, p.q, p.d, own, n.q_start, own.head, n.sq - own.first());
      start_own_rows<ElementO, kValuePanels>(smem + kLayout.values, p.dout, p.dv, own, n.q_start, own.head,
                                             n.sq - own.first());
      start_statistics();
    } else {
      start_own_rows<ElementK, kHeadPanels>(smem, p.k, p.d, own, n.k_start, own.head, n.sk - own.first());
      if constexpr (!kOfV)
        start_own_rows<ElementV, kValuePanels>(smem + kLayout.values, p.v, p.dv, own, n.k_start, own.head,
                                               n.sk - own.first());
    }
    set_rows();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) start();
  }

  // Waits for the next chunk, and until all warps have computed the one before. Returns the address of the chunk.
  __device__ __forceinline__ u32 next() {
    async_copy_wait<kAhead - 1>();
    __syncthreads();
    const u32 here = smem_ + kLayout.ring + stage_ * kLayout.chunk_bytes;
    if (++stage_ == kStages) stage_ = 0;
    return here;
  }

  // Starts the copies of the next chunk, if there is one, into the place of the chunk before the one that next() has
  // returned. They are one group of cp.async, which may be empty.
  __device__ __forceinline__ void start() {
    if (tiles_.more()) {
      const u32 to = smem_ + kLayout.ring + free_ * kLayout.chunk_bytes + swizzled(threadIdx.x / 8, threadIdx.x % 8);
      if (whole_) copy_chunk<true>(to);
      else copy_chunk<false>(to);
      if (!kOfQ && chunk_ == 0) start_statistics();
      if (++chunk_ == kChunks) {
        chunk_ = 0;
        tiles_.advance();
        if (tiles_.more()) set_rows();
      }
    }
    async_copy_commit();
    if (++free_ == kStages) free_ = 0;
  }

 private:
  enum : int {
    kAhead = kStages - 1,
    kRowsAtOnce = kThreads / 8,
    kWholePanels = kWholeColumns && kHeadDim % kPanelColumns == 0 && kValueDim % kPanelColumns == 0,
  };
  // A step's statistics are read before those of the step after the next one are copied.
  static_assert(kAhead > 0 && kAhead <= kChunks);

  using First = Conditional<kOfQ, ElementK, ElementQ>;
  using Second = Conditional<kOfQ, ElementV, ElementO>;

  // Finds the thread's rows of the step that is copied next.
  __device__ __forceinline__ void set_rows() {
    const int head = kOfQ ? own_.head / p_.group : tiles_.head();
    const int start = kOfQ ? own_.n.k_start : own_.n.q_start;
    const int first = kOfQ ? tiles_.key() : tiles_.row(), end = kOfQ ? own_.n.sk : own_.n.sq;
    const int row = first + int(threadIdx.x / 8);
    const int column = threadIdx.x % 8 * 8;
    first_ = row_of<First>(kOfQ ? p_.k : p_.q, own_.batch, start + row, head) + column;
    second_ = row_of<Second>(kOfQ ? p_.v : p_.dout, own_.batch, start + row, head) + column;
    count_ = end - row;
    whole_ = kWholePanels && first + kStreamedRows <= end;
  }

  // `whole`: all rows of the step exist, and all columns of panels.
  template <bool whole, class Type>
  __device__ __forceinline__ void copy_panel(u32 to, const typename Type::Memory* from, const StridedTensor& t, int dim,
                                             int panel) const {
    if (whole) from += kPanelColumns * panel;
#pragma unroll
    for (int row = 0; row < kStreamedRows; row += kRowsAtOnce) {
      const u32 place = to + row * kPanelRowBytes;
      if (whole) {
        async_copy16(place, from + row * t.row);
      } else {
        const int column = kPanelColumns * panel + int(threadIdx.x % 8) * 8;
        const auto* const start = from - int(threadIdx.x % 8) * 8 + row * t.row;
        copy_columns<Type>(place, row < count_ ? start : nullptr, t.data, column, dim);
      }
    }
  }
  template <bool whole>
  __device__ __forceinline__ void copy_first(u32 to, int panel) const {
    copy_panel<whole, First>(to, first_, kOfQ ? p_.k : p_.q, p_.d, panel);
  }
  template <bool whole>
  __device__ __forceinline__ void copy_second(u32 to, int panel) const {
    copy_panel<whole, Second>(to, second_, kOfQ ? p_.v : p_.dout, p_.dv, panel);
  }

  // Starts the copies of the next chunk to `to`, the thread's first 16 bytes.
  template <bool whole>
  __device__ __forceinline__ void copy_chunk(u32 to) const {
    if (chunk_ < kScoreChunks) {
#pragma unroll
      for (int i = 0; i < kRolePanels; ++i) {
        const int panel = kRolePanels * chunk_ + i;
        const u32 second = to + (kRolePanels + i) * kStreamedPanelBytes;
        if (panel < panels_of_role(0)) copy_first<whole>(to + i * kStreamedPanelBytes, panel);
        if (panel < panels_of_role(1)) {
          if constexpr (kOfV) copy_first<whole>(second, first_panel(1) + panel);
          else copy_second<whole>(second, panel);
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < kChunkPanels; ++i) {
        const int panel = kChunkPanels * (chunk_ - kScoreChunks) + i;
        if (panel >= kGradientPanels) continue;
        if constexpr (kOfV) copy_second<whole>(to + i * kStreamedPanelBytes, panel);
        else copy_first<whole>(to + i * kStreamedPanelBytes, panel);
      }
    }
  }

  // Starts the copies of shift and delta of the rows of a step, or of the CTA.
  __device__ __forceinline__ void start_statistics() {
    constexpr int kQuarter = kBlockRows / 4;  // threads that copy each of them
    const int i = threadIdx.x;
    if (i < 2 * kQuarter) {
      const float* const from = (i < kQuarter ? p_.shift : p_.delta) + tiles_.statistics(p_, own_);
      async_copy16(smem_ + kLayout.statistics + copied_ * 8 * kBlockRows + 16 * i, from + i % kQuarter * 4);
    }
    copied_ ^= 1;
  }

  const BackwardParams& p_;
  const Own& own_;
  u32 smem_;
  TileWalk tiles_;  // from the one that is copied next on
  const typename First::Memory* first_;  // the thread's first columns of a panel
  const typename Second::Memory* second_;
  int count_;         // of rows that exist from the thread's first one on
  bool whole_;        // all rows and columns of the step exist
  int chunk_ = 0;     // of the step, the next one to copy
  int copied_ = 0;    // which of the two places the next statistics have
  int stage_ = 0, free_ = 0;
};

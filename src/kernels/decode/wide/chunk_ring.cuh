// The ring of chunks of K and V. All threads fill it by cp.async, kAhead chunks before they are computed, over the ends
// of tiles and of work tiles.
#pragma once
#include "device/cp_async.cuh"
#include "decode/schedule/schedule.cuh"
#include "decode/wide/tile.cuh"

class ChunkRing {
 public:
  // `first`: the first work tile of the CTA.
  __device__ __forceinline__ ChunkRing(const DecodeParams& p, const WorkTiles& first)
      : p_(p), following_(kComputeWarps + uniform(threadIdx.x / 32)), buffers_(shared_base() + kLayout.k) {
    row_ = threadIdx.x / 8 % 16;
    take(first.tile.has_keys() ? first.tile : following(first).tile);
    if (more()) fetch_ids();
#pragma unroll 1
    for (int i = 0; i < kAhead; ++i) start();
  }

  // Finds the work tile whose loads follow those of this one, before this one is computed: the registers for it are
  // free then.
  __device__ __forceinline__ void look_ahead(const WorkTiles& now) const {
    if (now.tile.has_keys()) following_.save(following(now));
  }

  // Waits for the next chunk, and until all warps have computed the one before. Returns the address of the chunk.
  __device__ __forceinline__ u32 next() {
    async_copy_wait<kAhead - 1>();
    __syncthreads();
    const u32 here = buffers_ + stage_ * kChunkBytes;
    if (++stage_ == kKStages) stage_ = 0;
    return here;
  }

  // Starts the loads of the next chunk, if there is one, into the place of the chunk before the one that next() has
  // returned: a thread does so after its products, lest all of them wait. They are one group of cp.async, which may be
  // empty.
  __device__ __forceinline__ void start() {
    if (more()) {
      const u32 to = buffers_ + free_ * kChunkBytes;
      const bool whole = kWholeColumns && kPage == 0 && (tile_ + 1) * kBlockKeys <= sequence_.n.sk;
      if (chunk_ < kKChunks) {
        if (whole) copy_keys<true>(to);
        else copy_keys<false>(to);
      } else {
        if (whole) copy_values<true>(to);
        else copy_values<false>(to);
      }
      if (++chunk_ == kKChunks + kVChunks) {
        chunk_ = 0;
        next_tile();
      }
      if (more()) fetch_ids();
    }
    async_copy_commit();
    if (++free_ == kKStages) free_ = 0;
  }

 private:
  enum : int {
    kAhead = kKStages - 1,
    // Eight threads copy a row of a panel, all threads 16 rows of two panels, or 32 rows of a single one. Times 16 rows
    // of a chunk of K that a thread copies, and of V.
    kHalves = 2,
    kKRows = kBlockKeys / 16 / (kKChunkPanels == 1 ? int(kHalves) : 1),
    kVRows = kVChunkKeys / 16,
  };
  static_assert(kComputeThreads == 128 * kHalves && kAhead > 0);
  // Loads never come to the end of a work tile before it is looked ahead from there.
  static_assert(kAhead < kKChunks + kVChunks);

  // The next work tile that has keys; else one without.
  __device__ __forceinline__ WorkTiles following(WorkTiles work_tiles) const {
    while (work_tiles.next(p_, /*ahead=*/true))
      if (work_tiles.tile.has_keys()) return work_tiles;
    work_tiles.tile.begin = work_tiles.tile.end = 0;
    return work_tiles;
  }
  __device__ __forceinline__ void take(const WorkTile& tile) {
    tile_ = tile.begin;
    end_ = tile.end;
    head_ = tile.head;
    batch_ = tile.batch;
    sequence_ = tile.sequence;
  }
  // Whether there is a chunk to load.
  __device__ __forceinline__ bool more() const { return tile_ < end_; }
  __device__ __forceinline__ void next_tile() {
    if (++tile_ == end_) take(following_.load().tile);
  }

  static __device__ __forceinline__ int half() { return threadIdx.x / 128; }

  // The thread's i-th key in a chunk of K or V, counted from the first one of the sequence.
  __device__ __forceinline__ int k_key(int i) const {
    const int row = 16 * (kKChunkPanels == 1 ? kHalves * i + half() : i) + row_;
    return tile_ * kBlockKeys + row;
  }
  __device__ __forceinline__ int v_key(int i) const {
    return tile_ * kBlockKeys + (chunk_ - kKChunks) * kVChunkKeys + 16 * i + row_;
  }
  __device__ __forceinline__ bool is_there(int key, int i) const {
    return key < sequence_.n.sk && (kPage == 0 || u32(ids_[i]) < u32(p_.pages.entries));
  }

  // Loads the page ids of the rows of the next chunk, a chunk ahead.
  __device__ __forceinline__ void fetch_ids() {
    if constexpr (kPage > 0) {
      const bool of_k = chunk_ < kKChunks;
      if (of_k && chunk_ > 0) return;  // as of the chunk before
      const int* const ids = page_ids(p_, batch_, sequence_);
#pragma unroll
      for (int i = 0; i < max_of(kKRows, kVRows); ++i) {
        const int key = of_k ? k_key(i) : v_key(i);
        const bool needed = i < (of_k ? int(kKRows) : int(kVRows)) && key < sequence_.n.sk;
        ids_[i] = needed ? page_id(p_, ids, (sequence_.n.k_start + key) / max_of(kPage, 1)) : -1;
      }
    }
  }

  // The thread's 16 bytes of a row of K or V: those of panel 0.
  template <class Type>
  __device__ __forceinline__ const typename Type::Memory* row(const StridedTensor& t, int key, int i) const {
    const long long entry = kPage > 0 ? ids_[i] : kPackedK ? 0 : sequence_.entry;
    const int in_page = kPage > 0 ? (sequence_.n.k_start + key) % max_of(kPage, 1) : sequence_.n.k_start + key;
    return static_cast<const typename Type::Memory*>(t.data) + entry * t.batch + in_page * t.row +
           head_ * t.head + threadIdx.x % 8 * chunk_columns(Type::kType);
  }

  // Copies 16 bytes of panel `panel`, of which `dim` columns exist in the row `from`; none in a null.
  template <class Type, bool whole>
  __device__ __forceinline__ void copy(u32 to, const typename Type::Memory* from, const StridedTensor& t, int dim,
                                       int panel) const {
    const int before = panel * Type::kPanelColumns;
    if (whole) return async_copy16(to, from + before);
    const int column = before + int(threadIdx.x % 8) * chunk_columns(Type::kType);
    const u32 bytes = from == nullptr ? 0 : bytes_of_chunk(bits_of(Type::kType), column, dim);
    async_copy16(to, bytes > 0 ? from + before : static_cast<const typename Type::Memory*>(t.data), bytes);
  }

  // The row of the thread's i-th key, `step` keys after the one before. `first`: its first row, without pages.
  template <class Type, int step>
  __device__ __forceinline__ const typename Type::Memory* row(const StridedTensor& t, int key, int i,
                                                              const typename Type::Memory* first) const {
    return kPage > 0 ? row<Type>(t, key + i * step, i) : first + i * (step * t.row);
  }

  template <bool whole>
  __device__ __forceinline__ void copy_keys(u32 to) const {
    constexpr int kStep = kKChunkPanels == 1 ? 16 * kHalves : 16;
    const int key = k_key(0);
    const ElementK::Memory* const first = kPage > 0 ? nullptr : row<ElementK>(p_.k, key, 0);
    to += swizzled(key - tile_ * kBlockKeys, threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < kKRows; ++i) {
      const bool there = whole || is_there(key + i * kStep, i);
      const auto* const from = there ? row<ElementK, kStep>(p_.k, key, i, first) : nullptr;
#pragma unroll
      for (int of_half = 0; of_half < kKChunkPanels; of_half += kHalves) {
        const int panel_of_chunk = of_half + (kKChunkPanels == 1 ? 0 : half());
        const int panel = chunk_ * kKChunkPanels + panel_of_chunk;
        if (panel >= kKPanels || panel * ElementK::kPanelColumns + threadIdx.x % 8 * 8 >= kHeadDim) continue;
        copy<ElementK, whole>(to + i * kStep * kPanelRowBytes + panel_of_chunk * kPanelBytes, from, p_.k, p_.d, panel);
      }
    }
  }

  template <bool whole>
  __device__ __forceinline__ void copy_values(u32 to) const {
    const int key = v_key(0);
    const ElementV::Memory* const first = kPage > 0 ? nullptr : row<ElementV>(p_.v, key, 0);
    to += swizzled(row_, threadIdx.x % 8);
#pragma unroll
    for (int i = 0; i < kVRows; ++i) {
      const bool there = whole || is_there(key + i * 16, i);
      const auto* const from = there ? row<ElementV, 16>(p_.v, key, i, first) : nullptr;
#pragma unroll
      for (int of_half = 0; of_half < kVPanels; of_half += kHalves) {
        const int panel = of_half + half();
        if (panel >= kVPanels || panel * ElementV::kPanelColumns + threadIdx.x % 8 * 8 >= kValueDim) continue;
        copy<ElementV, whole>(to + i * 16 * kPanelRowBytes + panel * kVChunkPanelBytes, from, p_.v, p_.dv, panel);
      }
    }
  }

  const DecodeParams& p_;
  SavedWorkTiles following_;  // the work tile to load after this one
  int tile_, end_, head_, batch_;
  DecodeSequence sequence_;
  u32 buffers_;
  int row_;                // of 16 rows that threads copy together
  int chunk_ = 0;          // of the tile, the next one to load: first those of K, then those of V
  int stage_ = 0, free_ = 0;
  int ids_[max_of(kKRows, kVRows)];  // pages of the thread's rows of that chunk
};

// Loads of K and V by cp.async: the lanes of a warp copy rows of any strides, in any pages.
#pragma once
#include "device/cp_async.cuh"
#include "decode/codes/code_loader.cuh"

class LaneLoader : public CodeLoader {
 public:
  using CodeLoader::CodeLoader;

  // Whether this tile has all rows, and as many columns as are computed with.
  __device__ __forceinline__ bool whole() const {
    bool whole = kWholeColumns;
#pragma unroll
    for (int i = 0; i < kRows; ++i) whole = whole && is_there(i);
    return __all_sync(0xffffffff, whole);
  }

  // Starts the copies of this lane's part of the tile.
  template <int tensor>
  __device__ __forceinline__ void copy(u32 to) const {
    const bool all = whole();
    if (tensor == kOfK && all) copy_keys<true>(to);
    if (tensor == kOfK && !all) copy_keys<false>(to);
    if (tensor == kOfV && all) copy_values<true>(to);
    if (tensor == kOfV && !all) copy_values<false>(to);
  }
  template <bool whole>
  __device__ __forceinline__ void copy_keys(u32 to) const {
    if constexpr (is_block(StoredK::kType))
      copy_blocks<kOfK, whole>(p_.k, to);
    else
      copy_rows<StoredK, kHeadDim, whole>(p_.k, p_.d, to);
  }
  template <bool whole>
  __device__ __forceinline__ void copy_values(u32 to) const {
    if constexpr (is_block(StoredV::kType))
      copy_blocks<kOfV, whole>(p_.v, to);
    else
      copy_rows<StoredV, kValueDim, whole>(p_.v, p_.dv, to);
  }

 private:
  // Copies the lane's 16 bytes of its rows in all panels. Of the columns `dim` exist.
  template <class Type, int columns, bool whole>
  __device__ __forceinline__ void copy_rows(const StridedTensor& t, int dim, u32 to) const {
    constexpr int kRowBytes = panel_row_bytes(Type::kType, columns);
    // Lines of 128 bytes from one row of the lane to the next. The swizzle of a chunk changes with the line.
    constexpr int kLines = kRowsAtOnce * kRowBytes / 128;
    if (kRowBytes < 16 * kRowLanes && column_ >= kRowBytes / 2) return;
    const u32 first = to + chunk_place<kRowBytes>(row_, column_ / 8);
    const typename Type::Memory* from = nullptr;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      from = i % kRunRows == 0 ? row<Type>(t, i) : from + kRowsAtOnce * t.row;
      const bool there = whole || is_there(i);
      copy_row<Type, columns, whole>((first ^ 16 * (i * kLines & (kRowBytes / 16 - 1))) + i * kLines * 128,
                                     there ? from : static_cast<const typename Type::Memory*>(t.data),
                                     there ? dim : 0);
    }
  }

  // Copies the lane's 16 bytes of a row in all panels.
  template <class Type, int columns, bool whole>
  __device__ __forceinline__ void copy_row(u32 to, const typename Type::Memory* from, int dim) const {
    constexpr int kPanelColumns = Type::kPanelColumns, kChunkColumns = chunk_columns(Type::kType);
    constexpr int kStep = kPanelRowBytes / sizeof(typename Type::Memory);
    constexpr int kBytes = kBlockKeys * panel_row_bytes(Type::kType, columns);
#pragma unroll
    for (int panel = 0; panel < panels_of(Type::kType, columns); ++panel) {
      const int at = kPanelColumns * panel + kChunkColumns * (column_ / 8);
      if (kPanelColumns * panel + kPanelColumns > columns && at >= columns) continue;
      if (whole) {
        async_copy16(to + panel * kBytes, from + kStep * panel);
      } else {
        const u32 bytes = bytes_of_chunk(bits_of(Type::kType), at, dim);
        async_copy16(to + panel * kBytes, bytes > 0 ? from + kStep * panel : from, bytes);
      }
    }
  }
};

// Single codes of V and their scales: what is not finite at a key, and what it adds to O.
#pragma once
#include "decode/codes/scales.cuh"
#include "sm90/ptx/tma.cuh"

// V of a tile, as codes and scales in shared memory.
struct CodedValues {
  u32 v, scales;

  // The address of the word that has the code of a column.
  __device__ __forceinline__ u32 word_place(int key, int column) const {
    constexpr int kColumns = 8 * CodesOfV::kCodesPerHalf;
    return CodeChunks<kOfV>::place(v, key, column / kColumns) + CodesOfV::place(column % kColumns).word * 4;
  }
  // The 16 bits that have the code of a column, in their half of a word.
  __device__ __forceinline__ u32 codes(int key, int column) const {
    if constexpr (!is_block(StoredV::kType)) return load_shared(word_place(key, column));
    const CodesOfV::Place at = CodesOfV::place(column % kBlockColumns);
    return load_shared_u16(scale_place<kOfV>(scales, key, column / kBlockColumns) + 2 + 4 * at.word + 2 * at.half)
           << 16 * at.half;
  }
  // The scales of a key, and its zero points after them.
  enum : int { kNumbers = kVScales * (1 + kVZeroPoint) };
  __device__ __forceinline__ float scale(int i, int key) const {
    return i < kVScales ? load_scale<kOfV>(scales, key, i) : load_scale<kZeroOfV>(scales, key, i - kVScales);
  }
  static __device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity(); }

  // Whether a lane finds no NaN or infinity in its part of a key.
  __device__ __forceinline__ bool is_finite_key(int key, int lane) const {
    bool finite = true;
    // Heads whose rows share 16 bytes check the rows of all heads, so that they agree on the barriers around `clear`.
    if constexpr (kHeads > 1 && kVPiece == kMiddle) {
      using HeadRows = RowsOfHeads<kOfV>;
      const u32 first = scales + key * HeadRows::kPitch - head_of_warp() * HeadRows::kBytes;
      for (int i = lane; i < kHeads * kNumbers; i += 32)
        finite = finite && is_finite(half_to_float(static_cast<unsigned short>(load_shared_u16(
                               first + i / kNumbers * HeadRows::kBytes + i % kNumbers * block_bytes(StoredV::kType)))));
      return finite;
    }
    for (int i = lane; i < kNumbers; i += 32) finite = finite && is_finite(scale(i, key));
    if constexpr (is_block(StoredV::kType)) return finite;  // their codes are integers
    for (int column = lane * 2 * CodesOfV::kCodesPerHalf; column < kValueDim; column += 64 * CodesOfV::kCodesPerHalf)
      finite = finite && CodesOfV::is_finite(load_shared(word_place(key, column)));
    return finite;
  }

  // What a column of a key adds to O where it is NaN or infinity, else 0.
  __device__ __forceinline__ float addend(int key, int column) const {
    constexpr int kCodesPerHalf = CodesOfV::kCodesPerHalf;
    u32 x[kCodesPerHalf];
    CodesOfV::numbers(codes(key, column), x);
    const CodesOfV::Place at = CodesOfV::place(column % (8 * kCodesPerHalf));
    u32 pair = 0;
#pragma unroll
    for (int j = 0; j < kCodesPerHalf; ++j)
      if (at.number == j) pair = x[j];
    float number = at.half == 1 ? CodesOfV::Number::high(pair) : CodesOfV::Number::low(pair);
    number = number * CodesOfV::scale(at.number) - CodesOfV::kBias;
    if (kVScales > 0) {
      const int group = column / (kValueDim / max_of(kVScales, 1));
      if (kVZeroPoint) number -= load_scale<kZeroOfV>(scales, key, group);
      number *= load_scale<kOfV>(scales, key, group);
    }
    return is_finite(number) ? 0 : number;
  }

  // Replaces NaN and infinity of a key by 0.
  __device__ __forceinline__ void clear(int key, int lane) const {
    for (int i = lane; i < kNumbers; i += 32) {
      if (is_finite(scale(i, key))) continue;
      if (i < kVScales)
        clear_scale<kOfV>(scales, key, i);
      else
        clear_scale<kZeroOfV>(scales, key, i - kVScales);
    }
    if constexpr (is_block(StoredV::kType)) return;
    for (int column = lane * 2 * CodesOfV::kCodesPerHalf; column < kValueDim; column += 64 * CodesOfV::kCodesPerHalf) {
      const u32 at = word_place(key, column);
      store_shared(at, int(CodesOfV::finite(load_shared(at))));
    }
  }
};

// Clears V after the last of the `keys` of a tile that TMA brought. `sync` is a barrier of the warp group.
template <class Sync>
__device__ __forceinline__ void clear_tail(u32 v, int keys, Sync sync) {
  using Chunks = CodeChunks<kOfV>;
  if (kBoxKeys == 0 || !kMayBeNan<kOfV> || keys >= kBlockKeys) return;
  if constexpr (kHeads > 1) {
    constexpr int kPairs = RowsOfHeads<kOfV>::kBytes / 2;  // of bytes, of this warp's head
    for (int at = threadIdx.x % 32; at < (kBlockKeys - keys) * kPairs; at += 32)
      store_shared_u16(v + (keys + at / kPairs) * Chunks::kPitch + 2 * (at % kPairs), 0);
    fence_async_proxy();
    return sync();
  }
  clear_rows<kOfV>(v, keys, kBlockKeys, threadIdx.x % kWarpGroupThreads, kWarpGroupThreads);
  fence_async_proxy();
  sync();
}

// Scales and zero points of codes: where they lie in shared memory, and how warps read them.
#pragma once
#include "decode/codes/rows.cuh"

// The place of a scale or zero point of a key: that of a group of columns. `scales` is where the tensors of scales of
// the tile begin; of blocks it is where the codes of the tile begin, as these hold the scales.
template <int tensor>
__device__ __forceinline__ u32 scale_place(u32 scales, int key, int group) {
  if constexpr (scales_in_rows(tensor))
    return scales + key * BlockRows<tensor>::kStride + group * block_bytes(BlockRows<tensor>::kType);
  if constexpr (kHeads > 1)
    return scales + scale_pitches_before(tensor) * kBlockKeys + key * scale_pitch(tensor) +
           head_of_warp() * scale_bytes(tensor) + group * bytes_of(scale_type(tensor));
  constexpr int kWords = scale_words(scale_count(tensor), scale_type(tensor));
  return scales + 4 * (scale_words_before(tensor) * kBlockKeys + key * kWords) + group * bytes_of(scale_type(tensor));
}

template <int tensor>
__device__ __forceinline__ float load_scale(u32 scales, int key, int group) {
  const u32 at = scale_place<tensor>(scales, key, group);
  if constexpr (scale_type(tensor) == kF32)
    return __int_as_float(load_shared(at));
  else
    return half_to_float(static_cast<unsigned short>(load_shared_u16(at)));
}

template <int tensor>
__device__ __forceinline__ void clear_scale(u32 scales, int key, int group) {
  const u32 at = scale_place<tensor>(scales, key, group);
  if constexpr (scale_type(tensor) == kF32)
    store_shared(at, 0);
  else
    store_shared_u16(at, 0);
}

// The scales of a key in registers. Those in rows of blocks stay in shared memory, as there are many of them.
template <int tensor>
class ScalesOfKey {
 public:
  ScalesOfKey() = default;
  __device__ __forceinline__ ScalesOfKey(u32 scales, int key) {
    const u32 at = scale_place<tensor>(scales, key, 0);
    if constexpr (scales_in_rows(tensor)) {
      words_[0] = at;
    } else if constexpr (kHeads > 1 && scale_bytes(tensor) % 4 != 0) {
      words_[0] = load_shared_u16(at);
    } else {
#pragma unroll
      for (int i = 0; i < kWords / kLoadWords; ++i)
        load_shared_words<kLoadWords>(at + 4 * kLoadWords * i, words_ + kLoadWords * i);
    }
  }
  __device__ __forceinline__ float operator[](int group) const {
    if constexpr (scales_in_rows(tensor))
      return load_scale<tensor>(words_[0], 0, group);
    else if constexpr (scale_type(tensor) == kF32)
      return __uint_as_float(words_[group]);
    else
      return group % 2 == 0 ? Half::low(words_[group / 2]) : Half::high(words_[group / 2]);
  }

 private:
  enum : int {
    kWords = scales_in_rows(tensor) ? 1 : max_of(scale_words(scale_count(tensor), scale_type(tensor)), 1),
    kLoadWords = kWords % 4 == 0 ? 4 : kWords % 2 == 0 ? 2 : 1,  // by one instruction
  };
  u32 words_[kWords];  // of blocks, the address of the first scale
};

// The scale `bytes` after the first one of a tensor in global memory.
__device__ __forceinline__ float scale_at(const CodeScales& t, long long bytes) {
  const auto* const at = static_cast<const unsigned char*>(t.data) + bytes;
  return t.type == kF32 ? *reinterpret_cast<const float*>(at)
                        : half_to_float(*reinterpret_cast<const unsigned short*>(at));
}

// A descale of rows of Q or K, or NaN if it is not finite, as sums of infinities of both signs are.
__device__ __forceinline__ float nan_unless_finite(float descale) {
  return fabsf(descale) < infinity() ? descale : __int_as_float(0x7fffffff);
}

// The scale that all keys of a sequence and kv head have in common, 1 where the call has none.
__device__ __forceinline__ float scale_of_sequence(const CodeScales& t, const WorkTile& tile) {
  if (t.data == nullptr) return 1;
  const int head = tile.head * kHeads + head_of_warp();
  return scale_at(t, tile.batch * t.batch + head * t.head);
}

// The max of a key's scales. With several groups of columns NaN and infinity do not count, so that they change no
// columns but their own.
template <int tensor>
__device__ __forceinline__ float max_scale_of_key(u32 scales, int key) {
  constexpr int kCount = scale_count(tensor);
  const ScalesOfKey<tensor> of_key(scales, key);
  float max_scale = 0;
#pragma unroll
  for (int group = 0; group < kCount; ++group) {
    const float scale = fabsf(of_key[group]);
    max_scale = fmaxf(max_scale, kCount == 1 || scale < infinity() ? scale : 0);
  }
  return max_scale;
}

// A scale of V within the exponents that P may have.
__device__ __forceinline__ float within_exponents_of_p(float scale) { return fminf(fmaxf(scale, 0x1p-90f), 0x1p104f); }

__device__ __forceinline__ float max_v_scale_of_key(u32 scales, int key) {
  return within_exponents_of_p(max_scale_of_key<kOfV>(scales, key));
}

// The max over the keys of a tile.
__device__ __forceinline__ float max_v_scale_of_tile(u32 scales) {
  if (kVScales == 0) return 1;
  u32 max_bits = 0;  // positive floats are in the order of their bits
#pragma unroll
  for (int key = threadIdx.x % 32; key < kBlockKeys; key += 32)
    max_bits = max(max_bits, __float_as_uint(max_v_scale_of_key(scales, key)));
  return __uint_as_float(max_of_warp(max_bits));
}

// The formats of Q, K and V in memory, and the tensors of scales and zero points that codes come with.
#pragma once
#include "device/codes.cuh"
#include "device/operands.cuh"
#include "decode/layout.h"
#include "decode/params.h"

// The element types of q, k and v in memory. Codes of K and V, and of a Q with them, become operands of f16.
using StoredQ = ElementType<Element(kStoredQ)>;
using StoredK = ElementType<Element(kStoredK)>;
using StoredV = ElementType<Element(kStoredV)>;
using CodesOfK = Codes<StoredK::kType>;
using CodesOfV = Codes<StoredV::kType>;

enum : int {
  kCodesQ = is_code(StoredQ::kType),
  kCodesK = is_code(StoredK::kType),
  kCodesV = is_code(StoredV::kType),
  kScalesOfKey = kKScales * (1 + kKZeroPoint) + kVScales * (1 + kVZeroPoint),
};
static_assert(!kCodesQ || (kCodesK && kCodesV));

// A tensor of codes, scales or zero points belongs to K if its number is even, else to V.
enum : int { kOfK, kOfV, kZeroOfK, kZeroOfV, kScaleTensors };
__device__ constexpr bool is_of_k(int tensor) { return tensor % 2 == 0; }
__device__ constexpr Element stored_type(int tensor) { return is_of_k(tensor) ? StoredK::kType : StoredV::kType; }
__device__ constexpr int columns_of(int tensor) { return is_of_k(tensor) ? kHeadDim : kValueDim; }

// How many scales, or zero points, a key has in a tensor, and of which type. 0: a scale of the whole sequence and kv
// head, or none.
__device__ constexpr int scale_count(int tensor) {
  const int count = is_of_k(tensor) ? kKScales : kVScales;
  return tensor == kZeroOfK ? count * kKZeroPoint : tensor == kZeroOfV ? count * kVZeroPoint : count;
}
__device__ constexpr Element scale_type(int tensor) {
  return Element(tensor == kOfK       ? kKScaleType
                 : tensor == kOfV     ? kVScaleType
                 : tensor == kZeroOfK ? kKZeroPointType
                                      : kVZeroPointType);
}
// Whether scales lie in the rows of codes, at the front of each block.
__device__ constexpr bool scales_in_rows(int tensor) { return is_block(stored_type(tensor)); }

// Other scales lie after the codes of a tile in shared memory: one tensor after another, each with the words of one key
// after those of another. scale_words_before: the words of a key in the tensors before this one.
__device__ constexpr int scale_words_before(int tensor) {
  if (tensor == 0) return 0;
  const int words = scale_words(scale_count(tensor - 1), scale_type(tensor - 1));
  return scale_words_before(tensor - 1) + (scales_in_rows(tensor - 1) ? 0 : words);
}

// With kHeads, the scales of a key are those of all heads of the CTA, side by side. scale_bytes: bytes of a head;
// scale_pitch: bytes from one key to the next; scale_pitches_before: pitches of the tensors before this one.
__device__ constexpr int scale_bytes(int tensor) {
  return scales_in_rows(tensor) ? 0 : scale_count(tensor) * bytes_of(scale_type(tensor));
}
__device__ constexpr int scale_pitch(int tensor) {
  return scale_bytes(tensor) == 0 ? 0 : pitch_of_heads(kHeads * scale_bytes(tensor));
}
__device__ constexpr int scale_pitches_before(int tensor) {
  return tensor == 0 ? 0 : scale_pitches_before(tensor - 1) + scale_pitch(tensor - 1);
}

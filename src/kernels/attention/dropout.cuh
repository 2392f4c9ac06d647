// Dropout on the fragments of a warpgroup: which of its accumulators are kept. The four words of one call of Philox are
// for four keys of one query, which four threads hold, or two; so each thread makes the calls of one in four, or in
// two, of the queries and keys that it shares with the others, keeps a bit of each word, and they exchange the bits.
#pragma once
#include "kernel_config.h"
#include "host_device/attention_params.h"
#include "host_device/dropout.h"
#include "attention/fragment.cuh"

// The mask of a call. Where the call has an rng_state, it depends on what that is now.
__device__ __forceinline__ DropoutMask dropout_of(const CallParams& p) {
  const u64 seed = p.rng_state ? p.rng_state[0] : p.dropout_seed;
  const u64 offset = p.rng_state ? p.rng_state[1] : p.dropout_offset;
  return dropout_mask(p.dropout_threshold, seed, offset);
}

// The number of a q head among those of all sequences.
__device__ __forceinline__ u32 dropout_head(const CallParams& p, int batch, int head) {
  return kPart ? p.part.head + batch * p.part.heads + head : batch * p.hq + head;
}
// Queries and keys of a part of a call are counted as in the whole call (kPart).
__device__ __forceinline__ u32 dropout_query_of(const CallParams& p, int query) {
  return kPart ? p.part.query + query : query;
}
__device__ __forceinline__ u32 dropout_key_of(const CallParams& p, int key) { return kPart ? p.part.key + key : key; }
__device__ __forceinline__ bool keeps(const CallParams& p, const DropoutMask& mask, int batch, int head, int query,
                                      int key) {
  return mask.keeps(dropout_head(p, batch, head), dropout_query_of(p, query), dropout_key_of(p, key));
}

// The key of Philox lies in shared memory and is loaded each time it is used. If a register had it, the compiler would
// compute the keys of all rounds before a loop, and have no registers for them.
__device__ __forceinline__ void store_dropout_key(const CallParams& p, u32 address) {
  const PhiloxKey key = dropout_of(p).key;
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(key[0]), "r"(key[1]) : "memory");
}
__device__ __forceinline__ DropoutMask load_dropout(const CallParams& p, u32 address) {
  PhiloxKey key;
  asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];" : "=r"(key.word[0]), "=r"(key.word[1]) : "r"(address));
  return {key, p.dropout_threshold};
}

// Which accumulators of `columns` columns are kept: bit 8 i + 7 - j of word u is that of x[4 (8 u + j) + i].
template <int columns>
struct Kept {
  u32 word[(columns + 63) / 64];

  // All ones in the halves of the i-th packed pair that are kept, 0 in the others: the highest bits of two bytes,
  // spread.
  __device__ __forceinline__ u32 pair(int i) const {
    u32 mask;
    asm("prmt.b32 %0, %1, %1, %2;" : "=r"(mask) : "r"(word[i / 16] << i / 2 % 8), "r"(i % 2 ? 0xbbaa : 0x9988));
    return mask;
  }
  template <int words>
  __device__ __forceinline__ void drop(u32 (&P)[words], int first = 0, int count = words) const {
#pragma unroll
    for (int i = first; i < first + count; ++i) P[i] &= pair(i);
  }
  // All ones if accumulator i is kept, else 0.
  __device__ __forceinline__ u32 element(int i) const {
    return u32(int(word[i / 32] << (24 - i % 4 * 8 + i / 4 % 8)) >> 31);
  }
  // Clears the elements of a type that are not kept, in words of pack_words.
  template <class Type, int words>
  __device__ __forceinline__ void drop_words(u32 (&P)[words]) const {
#pragma unroll
    for (int i = 0; i < words; ++i) P[i] &= Type::kBytes == 4 ? element(accumulator_of_word(i)) : pair(i);
  }
};

// The decisions on four keys of a query join those before them: bit 0 of byte w for the key of word w. `keys`: the
// first of the four, divided by four.
__device__ __forceinline__ void decide(u32& bits, const DropoutMask& mask, u32 head, u32 query, u32 keys) {
  const PhiloxWords words = mask.words(head, query, u64(keys) * kDropoutKeys);
  bits <<= 1;
#pragma unroll
  for (int w = 0; w < kDropoutKeys; ++w)  // spelled out: the compiler takes three instructions
    asm("{.reg .pred kept; setp.ge.u32 kept, %1, %2;\n"
        "@kept or.b32 %0, %0, %3;}"
        : "+r"(bits)
        : "r"(words[w]), "r"(mask.threshold), "r"(1u << (8 * w)));
}

// Exchanges halves of the words of two lanes: the first lane gets the lower halves of both, the second lane the upper
// halves. That of the first lane comes first.
__device__ __forceinline__ u32 exchange_halves(u32 bytes, u32 distance) {
  const u32 other = __shfl_xor_sync(0xffffffff, bytes, distance);
  return __byte_perm(bytes, other, threadIdx.x & distance ? 0x3276 : 0x5410);
}
// Exchanges every second byte likewise: the first lane gets the even bytes of both words, the second the odd ones.
__device__ __forceinline__ u32 exchange_seconds(u32 bytes, u32 distance) {
  const u32 other = __shfl_xor_sync(0xffffffff, bytes, distance);
  return __byte_perm(bytes, other, threadIdx.x & distance ? 0x3715 : 0x6240);
}

// `decide(bits, mask, call)` makes the calls of a thread, one for each 8 columns, and `exchange(bits)` gives the thread
// those of its own accumulators. A loop: unrolled, the compiler would move it in front of the products that it
// overlaps.
template <int columns, class Decide, class Exchange>
__device__ __forceinline__ Kept<columns> kept_of_calls(const CallParams& p, u32 dropout_key, Decide decide,
                                                       Exchange exchange) {
  Kept<columns> kept;
#pragma unroll
  for (int u = 0; u < (columns + 63) / 64; ++u) {
    const int end = min_of(columns / 8, 8 * u + 8);
    u32 bits = 0;
#pragma unroll 1
    for (int call = 8 * u; call < end; ++call) decide(bits, load_dropout(p, dropout_key), call);
    kept.word[u] = exchange(bits << (8 * u + 8 - end));
  }
  return kept;
}

// Which entries of S are kept. Rows are queries, from the warp's first one on, and columns keys, from `key` on. Two
// lanes of a quad hold the four keys of a call in rows r and r + 8, and make one of the two calls each. `dropout_key`:
// where the key of Philox lies in shared memory.
template <int columns>
__device__ __forceinline__ Kept<columns> kept_scores(const CallParams& p, u32 dropout_key, u32 head, u32 query,
                                                     u32 key) {
  const u32 lane = threadIdx.x % 32;
  const u32 mine = dropout_query_of(p, query) + lane / 4 + lane % 2 * 8;
  const u32 keys = dropout_key_of(p, key) / kDropoutKeys + lane % 4 / 2;
  return kept_of_calls<columns>(
      p, dropout_key,
      [&](u32& bits, const DropoutMask& mask, int call) { decide(bits, mask, head, mine, keys + 2 * call); },
      [](u32 bits) { return exchange_halves(bits, 1); });
}

// Which entries of S^T are kept. Rows are keys, from the warp's first one on, and columns queries, from `query` on.
// Four lanes hold the four keys of a call in two columns and rows r and r + 8, and make one of the four calls each.
template <int columns>
__device__ __forceinline__ Kept<columns> kept_transposed(const CallParams& p, u32 dropout_key, u32 head, u32 query,
                                                         u32 key) {
  const u32 lane = threadIdx.x % 32;
  const u32 which = lane / 4 % 4;
  const u32 mine = dropout_query_of(p, query) + lane % 4 * 2 + which % 2;
  const u32 keys = dropout_key_of(p, key) / kDropoutKeys + which / 2 * 2 + lane / 16;
  return kept_of_calls<columns>(
      p, dropout_key,
      [&](u32& bits, const DropoutMask& mask, int call) { decide(bits, mask, head, mine + 8 * call, keys); },
      [](u32 bits) { return exchange_halves(exchange_seconds(bits, 4), 8); });
}

// Copies of rows to caches of K and V, or of rotated queries: the place of each row, and the copy by lanes. The values
// of lengths, tables and positions have not been checked: a row without a place is not written.
#pragma once
#include "common/append_params.h"
#include "device/elements.cuh"

// Row i of sequence b; `row` is its row in the tensor.
struct AppendToken {
  bool exists;
  int b, i, row;
};

// The number of new rows of a sequence.
__device__ __forceinline__ int new_rows(const AppendTokens& tokens, int b) {
  if (tokens.cu_seqlens == nullptr) return tokens.each;
  return int(u32(tokens.cu_seqlens[b + 1]) - u32(tokens.cu_seqlens[b]));
}

// The length of a sequence with its new rows.
__device__ __forceinline__ int appended_length(const AppendParams& p, int b) {
  return int(u32(p.cache_seqlens[b]) + u32(new_rows(p.tokens, b)));
}

// New row i of a sequence.
__device__ __forceinline__ AppendToken new_token(const AppendTokens& tokens, int b, int i) {
  if (tokens.cu_seqlens == nullptr) return {true, b, i, i};
  const int begin = tokens.cu_seqlens[b];
  const u32 row = u32(begin) + u32(i);
  return {begin >= 0 && row < u32(tokens.count), b, i, int(row)};
}

// The last sequence that begins at or before a packed row. A warp reads 32 boundaries at a time.
__device__ __forceinline__ int packed_sequence_of(const int* cu_seqlens, int batch, int row) {
  const int lane = threadIdx.x % 32;
  int first = 0;
  for (int count = batch; count > 1;) {
    const int step = (count + 31) / 32;
    const int probe = lane * step;
    const u32 before = __ballot_sync(~0u, probe < count && cu_seqlens[first + probe] <= row);
    const int last = before == 0 ? 0 : 31 - __clz(before);
    first += last * step;
    count = min_of(step, count - last * step);
  }
  return first;
}

// Row n of all sequences, found by a warp.
__device__ __forceinline__ AppendToken token_of(const AppendTokens& tokens, int batch, int n) {
  if (tokens.cu_seqlens == nullptr) {
    const int b = n / tokens.each;
    const int i = n - b * tokens.each;
    return {true, b, i, i};
  }
  const int b = packed_sequence_of(tokens.cu_seqlens, batch, n);
  const int begin = tokens.cu_seqlens[b];
  return {begin >= 0 && begin <= n && n < tokens.cu_seqlens[b + 1], b, n - begin, n};
}

// The row of cos and sin for the token `ahead` tokens after the first new one of its sequence; -1 if there is none.
__device__ __forceinline__ long long position_of(const AppendParams& p, int b, int ahead) {
  const int first = p.first_positions[b];
  const u32 position = u32(first) + u32(ahead);
  return first < 0 || position >= p.positions ? -1ll : static_cast<long long>(position);
}

// The row to which a token is written, and the position to which it is rotated.
struct AppendPlace {
  bool exists;
  int entry;
  u32 row;
  long long position;
};

// The place of a new row.
__device__ __forceinline__ AppendPlace place_of(const AppendParams& p, const AppendToken& token) {
  const int length = p.cache_seqlens == nullptr ? 0 : p.cache_seqlens[token.b];
  const u32 row = u32(length) + u32(token.i);
  const long long position = p.k.pairs > 0 ? position_of(p, token.b, token.i) : 0;
  if (!token.exists || length < 0 || row >= p.capacity || position < 0) return {false};
  if (p.page_table != nullptr) {
    const u32 page = row / p.page;
    long long at = token.b * p.table_stride + page * p.id_stride;
    if (p.page_indptr != nullptr) {
      const int begin = p.page_indptr[token.b];
      const long long id = static_cast<long long>(begin) + page;
      if (begin < 0 || id >= p.page_indptr[token.b + 1] || id >= p.ids) return {false};
      at = id * p.id_stride;
    }
    const int entry = p.page_table[at];
    return {entry >= 0 && entry < p.entries, entry, row - page * p.page, position};
  }
  const int entry = p.cache_batch_idx == nullptr ? token.b : p.cache_batch_idx[token.b];
  return {entry >= 0 && entry < p.entries, entry, row, position};
}

// The place of a rotated query.
__device__ __forceinline__ AppendPlace place_of_query(const AppendParams& p, const AppendToken& token) {
  const long long position = p.q.pairs > 0 ? position_of(p, token.b, p.advance ? token.i : 0) : 0;
  return {token.exists && position >= 0, token.b, u32(token.row), position};
}

template <Element kType, int N>
__device__ __forceinline__ void load_angles(const void* angles, long long at, int f32, float (&to)[N]) {
  using T = typename InMemory<kType>::Type;
  if (f32) {
    const Pack<float, N> pack = load_pack<N>(static_cast<const float*>(angles) + at);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = pack.x[j];
  } else {
    const Pack<T, N> pack = load_pack<N>(static_cast<const T*>(angles) + at);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = to_f32<kType>(pack.x[j]);
  }
}

// Rotates N pairs, the first of which is `pair`. Products and sums are rounded separately, as on the CPU.
template <Element kType, int N, bool kInterleaved, class T>
__device__ __forceinline__ void turn_pairs(const AppendParams& p, const T* x, T* y, int pairs, int pair,
                                           long long position) {
  const int low = kInterleaved ? 2 * pair : pair;
  const int high = kInterleaved ? low + N : pairs + pair;
  const Pack<T, N> a = load_pack<N>(x + low);
  const Pack<T, N> b = load_pack<N>(x + high);
  float cos[N], sin[N];
  load_angles<kType>(p.cos, position * p.cos_row + pair, p.f32_angles, cos);
  load_angles<kType>(p.sin, position * p.sin_row + pair, p.f32_angles, sin);
  T in[2 * N], out[2 * N];
#pragma unroll
  for (int j = 0; j < N; ++j) {
    in[j] = a.x[j];
    in[N + j] = b.x[j];
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const int one = kInterleaved ? 2 * j : j;
    const int other = kInterleaved ? 2 * j + 1 : N + j;
    const float u = to_f32<kType>(in[one]);
    const float v = to_f32<kType>(in[other]);
    out[one] = from_f32<kType>(__fsub_rn(__fmul_rn(u, cos[j]), __fmul_rn(v, sin[j])));
    out[other] = from_f32<kType>(__fadd_rn(__fmul_rn(u, sin[j]), __fmul_rn(v, cos[j])));
  }
  Pack<T, N> c, d;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    c.x[j] = out[j];
    d.x[j] = out[N + j];
  }
  store_pack(y + low, c);
  store_pack(y + high, d);
}

// Rotates the pairs of a row and copies the columns after them by its lanes, N elements per lane and step.
template <Element kType, int N, class T>
__device__ __forceinline__ void write_row(const AppendParams& p, const T* x, T* y, int dim, int pairs,
                                          long long position, int lane) {
  const int step = N << p.lanes_log2;
  for (int pair = lane * N; pair < pairs; pair += step) {
    if (p.interleaved) {
      turn_pairs<kType, N, true>(p, x, y, pairs, pair, position);
    } else {
      turn_pairs<kType, N, false>(p, x, y, pairs, pair, position);
    }
  }
  for (int c = 2 * pairs + lane * N; c < dim; c += step) store_pack(y + c, load_pack<N>(x + c));
}

// Copies a head of a row to its place by a group of lanes. `rows`: those of K, V or Q.
template <Element kType>
__device__ __forceinline__ void append_head(const AppendParams& p, const AppendRows& rows, const AppendToken& token,
                                            const AppendPlace& to, int head, int lane) {
  using T = typename InMemory<kType>::Type;
  constexpr int kWidePack = 16 / sizeof(T);
  const T* x =
      static_cast<const T*>(rows.from) + token.b * rows.from_batch + token.row * rows.from_row + head * rows.from_head;
  T* y = static_cast<T*>(rows.to) + to.entry * rows.to_batch + to.row * rows.to_row + head * rows.to_head;
  if (p.wide) {
    write_row<kType, kWidePack>(p, x, y, rows.dim, rows.pairs, to.position, lane);
  } else {
    write_row<kType, 1>(p, x, y, rows.dim, rows.pairs, to.position, lane);
  }
}

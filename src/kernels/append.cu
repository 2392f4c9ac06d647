// New rows of K and V to their places in caches, keys turned by rotary position embedding, and queries turned beside. A
// thread block takes a token, a group of lanes a head of it.
#include "append_params.h"
#include "plan.h"
#include "shared/elements.cuh"
#include "shared/heads.h"

using T = InMemory<kElement>::Type;

constexpr int kWide = 16 / sizeof(T);  // elements of 16 bytes

// Row i of sequence b; `row` is that of the tensor.
struct Token {
  bool exists;
  int b, i, row;
};

// The last sequence that begins at or before a packed row: a warp looks at 32 of them at a time.
__device__ __forceinline__ int sequence_of(const int* cu_seqlens, int batch, int row) {
  const int lane = threadIdx.x % 32;
  int first = 0;
  for (int count = batch; count > 1;) {
    const int step = (count + 31) / 32;
    const int probe = lane * step;
    const u32 before = __ballot_sync(~0u, probe < count && cu_seqlens[first + probe] <= row);
    const int last = before == 0 ? 0 : 31 - __clz(before);
    first += last * step;
    count = least(step, count - last * step);
  }
  return first;
}

__device__ __forceinline__ Token token_of(const AppendTokens& tokens, int batch, int n) {
  if (tokens.cu_seqlens == nullptr) {
    const int b = n / tokens.each;
    const int i = n - b * tokens.each;
    return {true, b, i, i};
  }
  const int b = sequence_of(tokens.cu_seqlens, batch, n);
  const int begin = tokens.cu_seqlens[b];
  return {begin >= 0 && begin <= n && n < tokens.cu_seqlens[b + 1], b, n - begin, n};
}

// The row that takes a token.
struct Place {
  bool exists;
  int entry;
  u32 row;
};

__device__ __forceinline__ Place place_of(const AppendParams& p, const Token& token) {
  const int length = p.cache_seqlens[token.b];
  const u32 row = u32(length) + u32(token.i);
  if (length < 0 || row >= p.room) return {false};
  if (p.page_table != nullptr) {
    const u32 page = row / p.page;
    long long id = token.b * p.table_stride + page;
    if (p.page_indptr != nullptr) {
      const int begin = p.page_indptr[token.b];
      id = static_cast<long long>(begin) + page;
      if (begin < 0 || id >= p.page_indptr[token.b + 1] || id >= p.ids) return {false};
    }
    const int entry = p.page_table[id];
    return {entry >= 0 && entry < p.entries, entry, row - page * p.page};
  }
  const int entry = p.cache_batch_idx == nullptr ? token.b : p.cache_batch_idx[token.b];
  return {entry >= 0 && entry < p.entries, entry, row};
}

// The row of cos and sin of the token that is `ahead` of the first new one of its sequence; -1 where there is none.
__device__ __forceinline__ long long position_of(const AppendParams& p, int b, int ahead) {
  const int first = p.first_positions[b];
  const u32 position = u32(first) + u32(ahead);
  return first < 0 || position >= p.positions ? -1ll : static_cast<long long>(position);
}

template <int N>
__device__ __forceinline__ void load_angles(const void* angles, long long at, int f32, float (&to)[N]) {
  if (f32) {
    const Pack<float, N> pack = load_pack<N>(static_cast<const float*>(angles) + at);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = pack.x[j];
  } else {
    const Pack<T, N> pack = load_pack<N>(static_cast<const T*>(angles) + at);
#pragma unroll
    for (int j = 0; j < N; ++j) to[j] = to_f32<kElement>(pack.x[j]);
  }
}

// Turns N pairs, the first of which is `pair`. Products and sums are rounded one by one, as the CPU rounds them.
template <int N, bool kInterleaved>
__device__ __forceinline__ void turn_pairs(const AppendParams& p, const T* x, T* y, int pairs, int pair,
                                           long long position) {
  const int low = kInterleaved ? 2 * pair : pair;
  const int high = kInterleaved ? low + N : pairs + pair;
  const Pack<T, N> a = load_pack<N>(x + low);
  const Pack<T, N> b = load_pack<N>(x + high);
  float cos[N], sin[N];
  load_angles(p.cos, position * p.cos_row + pair, p.f32_angles, cos);
  load_angles(p.sin, position * p.sin_row + pair, p.f32_angles, sin);
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
    const float u = to_f32<kElement>(in[one]);
    const float v = to_f32<kElement>(in[other]);
    out[one] = from_f32<kElement>(__fsub_rn(__fmul_rn(u, cos[j]), __fmul_rn(v, sin[j])));
    out[other] = from_f32<kElement>(__fadd_rn(__fmul_rn(u, sin[j]), __fmul_rn(v, cos[j])));
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

// The lanes of a row: turns its pairs and copies the columns behind them, N elements a lane and step.
template <int N>
__device__ __forceinline__ void write_row(const AppendParams& p, const T* x, T* y, int dim, int pairs,
                                          long long position, int lane) {
  const int step = N << p.lanes_log2;
  for (int pair = lane * N; pair < pairs; pair += step) {
    if (p.interleaved) {
      turn_pairs<N, true>(p, x, y, pairs, pair, position);
    } else {
      turn_pairs<N, false>(p, x, y, pairs, pair, position);
    }
  }
  for (int c = 2 * pairs + lane * N; c < dim; c += step) store_pack(y + c, load_pack<N>(x + c));
}

extern "C" __global__ void __launch_bounds__(kHeadThreads) fulgur_append(const __grid_constant__ AppendParams p) {
  const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
  const int groups = blockDim.x >> p.lanes_log2;
  const int group = threadIdx.x >> p.lanes_log2;
  for (long long n = blockIdx.x; n < p.tokens.count + p.queries.count; n += gridDim.x) {
    const bool is_new = n < p.tokens.count;
    const Token token =
        token_of(is_new ? p.tokens : p.queries, p.batch, static_cast<int>(is_new ? n : n - p.tokens.count));
    if (!token.exists) continue;
    const Place to = is_new ? place_of(p, token) : Place{true, token.b, u32(token.row)};
    const bool turns = !is_new || p.k.pairs > 0;
    const long long position = turns ? position_of(p, token.b, is_new || p.advance ? token.i : 0) : 0;
    if (!to.exists || position < 0) continue;
    const int heads = is_new ? p.k.heads + p.v.heads : p.q.heads;
    for (int h = blockIdx.y * groups + group; h < heads; h += gridDim.y * groups) {
      const bool of_v = is_new && h >= p.k.heads;
      const AppendRows& rows = of_v ? p.v : is_new ? p.k : p.q;
      const int head = of_v ? h - p.k.heads : h;
      const T* x = static_cast<const T*>(rows.from) + token.b * rows.from_batch + token.row * rows.from_row +
                   head * rows.from_head;
      T* y = static_cast<T*>(rows.to) + to.entry * rows.to_batch + to.row * rows.to_row + head * rows.to_head;
      if (p.wide) {
        write_row<kWide>(p, x, y, rows.dim, rows.pairs, position, lane);
      } else {
        write_row<1>(p, x, y, rows.dim, rows.pairs, position, lane);
      }
    }
  }
}

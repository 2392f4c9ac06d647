// Writes new rows of K and V to their places in caches. Keys, and queries, may be rotated (rotary position embedding).
// A CTA computes a token, a group of lanes a head of it. With kCodes caches may be quantized; then a warp quantizes a
// head.
#include "kernel_config.h"
#include "device/append.cuh"
#include "device/quantize.cuh"
#include "host_device/heads.h"

// CTAs per SM: enough to hide the latency of memory.
constexpr int kAppendCtas = 3;

// Shared memory for rows that are rotated before they are quantized, one row per warp.
enum : int { kRowsOfWarps = kCodes ? kHeadThreads / 32 : 1, kRowColumns = kCodes ? kMaxHadamardColumns : 1 };

extern "C" __global__ void __launch_bounds__(kHeadThreads, kAppendCtas)
    fulgur_append(const __grid_constant__ AppendParams p) {
  __shared__ float rows_of_warps[kRowsOfWarps][kRowColumns];
  if (p.lengths != nullptr && blockIdx.x == 0 && blockIdx.y == 0)
    for (int b = threadIdx.x; b < p.batch; b += blockDim.x) p.lengths[b] = appended_length(p, b);
  const int lane = threadIdx.x & ((1 << p.lanes_log2) - 1);
  const int groups = blockDim.x >> p.lanes_log2;
  const int group = threadIdx.x >> p.lanes_log2;
  for (long long n = blockIdx.x; n < p.tokens.count + p.queries.count; n += gridDim.x) {
    const bool is_new = n < p.tokens.count;
    const AppendToken token =
        token_of(is_new ? p.tokens : p.queries, p.batch, static_cast<int>(is_new ? n : n - p.tokens.count));
    if (!token.exists) continue;
    const AppendPlace to = is_new ? place_of(p, token) : place_of_query(p, token);
    if (!to.exists) continue;
    const int heads = is_new ? p.k.heads + p.v.heads : p.q.heads;
    for (int h = blockIdx.y * groups + group; h < heads; h += gridDim.y * groups) {
      const bool of_v = is_new && h >= p.k.heads;
      const AppendRows& rows = of_v ? p.v : is_new ? p.k : p.q;
      const int head = of_v ? h - p.k.heads : h;
      if (kCodes && (rows.codes.format != 0 || rows.hadamard))
        quantize_head<kElement>(p, rows, token, to, head, lane, rows_of_warps[threadIdx.x / 32 % kRowsOfWarps]);
      else
        append_head<kElement>(p, rows, token, to, head, lane);
    }
  }
}

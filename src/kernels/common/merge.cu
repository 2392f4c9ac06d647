// Merges the results of attention over disjoint parts of the keys, in f64 as on the CPU. Parts are added in their
// order. A CTA computes a row of the batch, a group of lanes a head of it.
#include "common/merge_params.h"
#include "device/elements.cuh"
#include "host_device/heads.h"

constexpr int kGroups = kHeadThreads / kMergeLanes;

template <Element kType, int N>
__device__ __forceinline__ void load_row(const void* row, int column, double (&to)[N]) {
  using T = InMemory<kType>::Type;
  const Pack<T, N> pack = load_pack<N>(static_cast<const T*>(row) + column);
#pragma unroll
  for (int j = 0; j < N; ++j) to[j] = to_f32<kType>(pack.x[j]);
}

template <Element kType, int N>
__device__ __forceinline__ void store_row(void* row, int column, const double (&from)[N]) {
  using T = InMemory<kType>::Type;
  Pack<T, N> pack;
#pragma unroll
  for (int j = 0; j < N; ++j) pack.x[j] = from_f32<kType>(__double2float_rn(from[j]));
  store_pack(static_cast<T*>(row) + column, pack);
}

__device__ __forceinline__ int size_of(int type) { return type == kF32 ? 4 : 2; }

__device__ __forceinline__ char* row_of(const MergeTensors& t, int type, int b, int row, int head) {
  return static_cast<char*>(t.out) + (b * t.batch + row * t.row + head * t.head) * size_of(type);
}

__device__ __forceinline__ float* lse_of(const MergeTensors& t, int b, int row, int head) {
  return t.lse + b * t.lse_batch + head * t.lse_head + row;
}

// The columns of one row: sum_i weight_i / total * out_i.
template <int N>
__device__ __forceinline__ void merge_row(const MergeParams& p, const double* weights, double total, int b, int row,
                                          int head, int lane) {
  char* const to = row_of(p.to, p.type, b, row, head);
  for (int column = lane * N; column < p.dim; column += N << p.lanes_log2) {
    double sum[N] = {};
    for (int i = 0; i < p.parts; ++i) {
      if (weights[i] == 0) continue;  // a part without keys may hold any values
      const int type = p.types[i];
      const char* const from = row_of(p.from[i], type, b, row, head);
      double x[N];
      if (type == kF32) {
        load_row<kF32>(from, column, x);
      } else if (type == kBF16) {
        load_row<kBF16>(from, column, x);
      } else {
        load_row<kF16>(from, column, x);
      }
      const double weight = __ddiv_rn(weights[i], total);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = __dadd_rn(sum[j], __dmul_rn(weight, x[j]));
    }
    if (p.type == kF32) {
      store_row<kF32>(to, column, sum);
    } else if (p.type == kBF16) {
      store_row<kBF16>(to, column, sum);
    } else {
      store_row<kF16>(to, column, sum);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kHeadThreads) fulgur_merge(const __grid_constant__ MergeParams p) {
  __shared__ double all_weights[kGroups][kMergeParts];
  const int lanes = 1 << p.lanes_log2;
  const int lane = threadIdx.x & (lanes - 1);
  const u32 mask = ~0u >> (32 - lanes) << (threadIdx.x % 32 - lane);  // the lanes of this row
  const int groups = blockDim.x >> p.lanes_log2;
  const int group = threadIdx.x >> p.lanes_log2;
  double* const weights = all_weights[group];
  for (long long n = blockIdx.x; n < p.tokens; n += gridDim.x) {
    const int b = static_cast<int>(n) / p.rows;
    const int row = static_cast<int>(n) - b * p.rows;
    for (int head = blockIdx.y * groups + group; head < p.heads; head += gridDim.y * groups) {
      for (int i = lane; i < p.parts; i += lanes) weights[i] = *lse_of(p.from[i], b, row, head);
      __syncwarp(mask);
      double largest = -__longlong_as_double(0x7ff0000000000000);
      for (int i = 0; i < p.parts; ++i) largest = fmax(largest, weights[i]);
      // If no part has any key, -inf - -inf would be NaN instead of -inf.
      const double shift = largest == -__longlong_as_double(0x7ff0000000000000) ? 0 : largest;
      __syncwarp(mask);
      // An infinite sink has all of the weight: inf - inf would be NaN.
      for (int i = lane; i < p.parts; i += lanes) weights[i] = weights[i] == shift ? 1 : exp(weights[i] - shift);
      __syncwarp(mask);
      double total = 0;
      for (int i = 0; i < p.parts; ++i) total = __dadd_rn(total, weights[i]);
      if (p.wide) {
        merge_row<kMergeWidth>(p, weights, total, b, row, head, lane);
      } else {
        merge_row<1>(p, weights, total, b, row, head, lane);
      }
      // The lse of a part may be that of the result; every lane has read it by now.
      if (lane == 0 && p.to.lse != nullptr) *lse_of(p.to, b, row, head) = __double2float_rn(shift + log(total));
      __syncwarp(mask);
    }
  }
}

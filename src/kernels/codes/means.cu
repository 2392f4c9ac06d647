// Means of the columns of keys, which are subtracted before keys are quantized (Descales::k_mean), and their terms of
// LSE.
#include "kernel_config.h"
#include "codes/means_params.h"
#include "device/quantize.cuh"

// Computes the means of the finite numbers of 32 columns of a head of a sequence. A lane has a column, a warp every
// eighth slice of the rows. The order of sums is that of the CPU.
extern "C" __global__ void __launch_bounds__(kHeadThreads) fulgur_means(const __grid_constant__ MeansParams p) {
  constexpr int kWarps = kHeadThreads / 32, kOfWarp = kMeanSlices / kWarps;
  __shared__ double sums[kMeanSlices][32];
  __shared__ int counts[kWarps][32];
  const AppendRows& rows = p.rows;
  const int head = blockIdx.x % rows.heads, b = blockIdx.x / rows.heads;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = blockIdx.y * 32 + lane;
  const auto* const from = static_cast<const InMemory<kElement>::Type*>(rows.from) + b * rows.from_batch +
                           head * rows.from_head + column;
  double sum[kOfWarp] = {};
  int count = 0;
  for (int first = 0; first < p.rows_each; first += kMeanSlices) {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i) {
      const int row = first + i * kWarps + warp;
      if (row >= p.rows_each || column >= rows.dim) continue;
      const float x = to_f32<kElement>(from[row * rows.from_row]);
      if (!(fabsf(x) < infinity())) continue;
      sum[i] += x;
      ++count;
    }
  }
#pragma unroll
  for (int i = 0; i < kOfWarp; ++i) sums[i * kWarps + warp][lane] = sum[i];
  counts[warp][lane] = count;
  __syncthreads();
  if (warp > 0 || column >= rows.dim) return;
  double all = 0;
  for (int slice = 0; slice < kMeanSlices; ++slice) all += sums[slice][lane];
  for (int other = 1; other < kWarps; ++other) count += counts[other][lane];
  const_cast<float*>(rows.mean)[b * rows.mean_batch + head * rows.mean_head + column] =
      count == 0 ? 0 : float(all / count);
}

// A warp computes a head of a row.
extern "C" __global__ void __launch_bounds__(kHeadThreads) fulgur_add_means(const __grid_constant__ AddMeansParams p) {
  const int lane = threadIdx.x % 32;
  const int columns = p.dim / max_of(p.codes.groups, 1);
  const long long sequences = p.cu_seqlens == nullptr ? p.batch : 1;
  for (long long n = blockIdx.x; n < sequences * p.rows_each; n += gridDim.x) {
    const int b = static_cast<int>(n / p.rows_each), row = static_cast<int>(n % p.rows_each);
    const int sequence = p.cu_seqlens == nullptr ? b : packed_sequence_of(p.cu_seqlens, p.batch, row);
    for (int head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32; head < p.heads;
         head += gridDim.y * (blockDim.x / 32)) {
      float* const lse = p.lse + b * p.lse_batch + head * p.lse_head + row;
      const float before = p.adds ? *lse : 0;
      if (!(before > -infinity())) continue;  // the row sees no key, or does not exist
      const int kv = head / p.group;
      const float* const mean = p.mean + sequence * p.mean_batch + kv * p.mean_head;
      const long long at = b * p.q_batch + row * p.q_row + head * p.q_head;
      float sum = 0;
      for (int i = lane; i < p.dim; i += 32) {
        float x;
        if (p.codes.format == 0) {
          x = to_f32<kElement>(static_cast<const InMemory<kElement>::Type*>(p.q)[at + i]);
        } else {
          x = code_number(p.codes.format, static_cast<const unsigned char*>(p.q), at + i);
          if (p.codes.groups > 0)
            x *= read_scales(p.codes, sequence, b, row, p.codes.of_rows ? head : kv, i / columns).scale;
        }
        sum += x * mean[i];
      }
#pragma unroll
      for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffff, sum, step);
      if (lane == 0) *lse = before + p.scale * sum;
    }
  }
}

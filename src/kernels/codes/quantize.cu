// Computes scales that rows share, and dequantizes rows. Tensors are quantized by append.cu, to which they are empty
// caches.
#include "kernel_config.h"
#include "codes/quantize_params.h"
#include "device/quantize.cuh"
#include "host_device/heads.h"

// Computes the extremes of a slice of the rows of a head of a sequence (every `slices`-th row), by a warp.
extern "C" __global__ void __launch_bounds__(kHeadThreads) fulgur_measure(const __grid_constant__ MeasureParams p) {
  const AppendRows& rows = p.rows;
  const int head = blockIdx.x % rows.heads, b = blockIdx.x / rows.heads;
  const int slice = blockIdx.y * (kHeadThreads / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  const auto* const from =
      static_cast<const InMemory<kElement>::Type*>(rows.from) + b * rows.from_batch + head * rows.from_head;
  const float* const mean = rows.mean == nullptr ? nullptr : rows.mean + b * rows.mean_batch + head * rows.mean_head;
  Extremes e;
  for (int row = slice; row < p.rows_each; row += p.slices)
    for (int i = lane; i < rows.dim; i += 32) {
      const float x = to_f32<kElement>(from[row * rows.from_row + i]);
      e.add(mean == nullptr ? x : __fsub_rn(x, mean[i]));
    }
  e.join_lanes();
  if (lane == 0) e.store(p.measured + 4 * (static_cast<long long>(blockIdx.x) * p.slices + slice));
}

// Computes the scale of each set of rows, by a warp.
extern "C" __global__ void __launch_bounds__(32) fulgur_fit(const __grid_constant__ MeasureParams p) {
  const AppendCodes& c = p.rows.codes;
  const int heads = p.rows.heads, head = blockIdx.x % heads, b = blockIdx.x / heads;
  const bool of_batch = c.scale.batch == 0, of_heads = c.scale.head == 0;
  if ((of_batch && b > 0) || (of_heads && head > 0)) return;
  Extremes e;
  for (int i = b; i < (of_batch ? p.batch : b + 1); ++i)
    for (int h = head; h < (of_heads ? heads : head + 1); ++h)
      for (int slice = threadIdx.x; slice < p.slices; slice += 32)
        e.add_stored(p.measured + 4 * ((static_cast<long long>(i) * heads + h) * p.slices + slice));
  e.join_lanes();
  if (threadIdx.x != 0) return;
  const GroupScale by = fitted_scale(c, e);
  write_scale(c.scale, b * c.scale.batch + head * c.scale.head, by.scale);
  write_scale(c.zero_point, b * c.zero_point.batch + head * c.zero_point.head, by.zero_point);
}

// Dequantizes rows, a warp for each head of a row.
extern "C" __global__ void __launch_bounds__(kHeadThreads) fulgur_dequantize(const __grid_constant__ MeasureParams p) {
  const AppendRows& rows = p.rows;
  const AppendCodes& c = rows.codes;
  const int lane = threadIdx.x % 32;
  const int columns = rows.dim / max_of(c.groups, 1);
  for (long long n = blockIdx.x; n < static_cast<long long>(p.batch) * p.rows_each; n += gridDim.x) {
    const int b = static_cast<int>(n / p.rows_each), row = static_cast<int>(n % p.rows_each);
    for (int head = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32; head < rows.heads;
         head += gridDim.y * (blockDim.x / 32)) {
      const unsigned char* const codes =
          static_cast<const unsigned char*>(rows.from) +
          codes_before(c.format, b * rows.from_batch + row * rows.from_row + head * rows.from_head);
      auto* const to = static_cast<InMemory<kElement>::Type*>(rows.to) + b * rows.to_batch + row * rows.to_row +
                       head * rows.to_head;
      for (int i = lane; i < rows.dim; i += 32) {
        float x = is_block(c.format) ? block_number(c.format, codes + codes_before(c.format, i), i % 32)
                                     : code_number(c.format, codes, i);
        if (c.groups > 0) {
          const GroupScale by = read_scales(c, b, b, row, head, i / columns);
          x = __fmul_rn(__fsub_rn(x, by.zero_point), by.scale);
        }
        if (rows.mean != nullptr) x = __fadd_rn(x, rows.mean[b * rows.mean_batch + head * rows.mean_head + i]);
        to[i] = from_f32<kElement>(x);
      }
    }
  }
}

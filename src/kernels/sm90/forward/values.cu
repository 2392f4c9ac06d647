// V for products of e4m3: centred, rounded to codes again, and laid out as key tiles lie in shared memory. A CTA takes
// 32 columns of a segment (sm90/forward/values.cuh), whose codes lie in registers: a thread has four columns of a step.
#include "device/codes.cuh"
#include "device/cp_async.cuh"
#include "device/dependent_launch.cuh"
#include "device/memory.cuh"
#include "sm90/forward/values.cuh"
#include "sm90/ptx/tma.cuh"

enum : int {
  kColumns = kStepBytes,                // of a CTA
  kWords = kColumns / 4,                // of a row of codes, one a thread
  kStepKeys = ElementV::kStep,          // of a thread
  kSteps = 32 / kWords,                 // of a warp
  kWarps = kValuesThreads / 32,         // at most
  kRowsTogether = 8,                    // whose sum f16 holds
  kImageBytes = kColumns * kStepBytes,  // of a step
};
static_assert(kSteps * kStepKeys == kValuesWarpKeys);
static_assert(kSteps * kImageBytes + 2 * kColumns * sizeof(float) == kValuesWarpBytes);

extern __shared__ __align__(1024) unsigned char raw[];

// The key of a step whose code is byte j of word i of a column, in the order in which a thread of the forward kernel
// holds P: byte 4 q + 2 f + g of 16 is key 8 f + 2 q + g.
__device__ __forceinline__ constexpr int place(int i, int j) { return i / 4 * 16 + j / 2 * 8 + i % 4 * 2 + j % 2; }

// The four codes of each key of a step from `from` on, of which `keys` keys and `columns` columns exist; the others are
// 0. `aligned`: they lie at multiples of 4 bytes. What is not loaded at once goes through the warp's shared memory.
__device__ __forceinline__ void load_step(u32 (&x)[kStepKeys], const unsigned char* from, long long row, int keys,
                                          int columns, bool aligned, u32* of_warp) {
  aligned = aligned && columns >= 4;
  if (aligned && keys == kStepKeys) {
#pragma unroll
    for (int key = 0; key < kStepKeys; ++key, from += row) x[key] = load_global_of_line(from);
    return;
  }
  u32* const mine = of_warp + threadIdx.x % 32;
  if (aligned) {
#pragma unroll 8
    for (int key = 0; key < kStepKeys; ++key, from += row)
      async_copy_piece<4>(u32(__cvta_generic_to_shared(mine + 32 * key)), from, key < keys);
    async_copy_commit();
    async_copy_wait<0>();
  } else {
#pragma unroll 4
    for (int key = 0; key < kStepKeys; ++key, from += row) {
      const uint2 codes = load_codes(from, key < keys ? min(columns, 4) : 0, 1, false);
      mine[32 * key] = codes.x;
    }
  }
#pragma unroll
  for (int key = 0; key < kStepKeys; ++key) x[key] = mine[32 * key];
}

// Sums of a thread's columns over the threads of its warp that have the same ones.
__device__ __forceinline__ void add_up_in_warp(float (&sum)[4], float* of_warp) {
#pragma unroll
  for (int bit = kWords; bit < 32; bit *= 2)
#pragma unroll
    for (float& x : sum) x += __shfl_xor_sync(0xffffffff, x, bit);
  if (threadIdx.x % 32 < kWords)
    reinterpret_cast<float4*>(of_warp)[threadIdx.x % kWords] = {sum[0], sum[1], sum[2], sum[3]};
}

// The sum of a column.
__device__ __forceinline__ float sum_of(const float (*of_warps)[kColumns], int column) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp)
    if (warp < int(blockDim.x) / 32) sum += of_warps[warp][column];
  return sum;
}

// 0 where some of the numbers are NaN.
__device__ __forceinline__ float mean_of(float sum, int count) { return sum == sum ? sum / float(count) : 0; }

// The row in the image of column i of a thread's four, columns 4 w to 4 w + 3 of 32: accumulators 2 q and 2 q + 1 of
// the j-th 8 are columns 8 q + 2 j and 8 q + 2 j + 1.
__device__ __forceinline__ int row_of_column(int w, int i) { return w % 2 * 16 + i / 2 * 8 + w / 2 * 2 + i % 2; }

// The mean of a column of the accumulators as rows of a step. After the last segment of a sequence come zeros, which
// rows' shares of zero are multiplied with.
__device__ __forceinline__ void store_in_step(unsigned char* step, int column, float mean, int segment, bool last) {
  const u32 of_mean = ElementType<kBF16>::pack(mean, 0);
  const u32 left = ElementType<kBF16>::pack(mean - ElementType<kBF16>::low(of_mean), 0);
  const int rows = last ? kSegmentsOfStep * kRowsOfMean : (segment + 1) * kRowsOfMean;
  for (int row = segment * kRowsOfMean; row < rows; ++row) {
    const int of_segment = row - segment * kRowsOfMean;
    const u32 x = of_segment < kRowsOfMean / 2 ? of_mean : of_segment < kRowsOfMean ? left : 0;
    *reinterpret_cast<unsigned short*>(step + place_in_mean_step(row, column)) = static_cast<unsigned short>(x);
  }
}

extern "C" __global__ void __launch_bounds__(kValuesThreads, 3)
    fulgur_forward_values(const __grid_constant__ ForwardParams p) {
  let_next_kernel_start();
  constexpr int kSlabs = kValueDim / kColumns;
  const int kv_heads = p.hq / p.group;
  const int slab = blockIdx.x % kSlabs;
  const int kv_head = blockIdx.x / kSlabs % kv_heads;
  const int segment = blockIdx.x / kSlabs / kv_heads % p.values.segments;
  const int batch = blockIdx.x / kSlabs / kv_heads / p.values.segments;
  const Lengths n = lengths_of(p, batch);
  const int first = segment * kSegmentKeys;
  if (first >= n.sk) return;
  const int keys = min(n.sk - first, +kSegmentKeys);
  const int word = threadIdx.x % kWords;
  const int step = threadIdx.x / kWords;
  const int mine = min(max(keys - step * kStepKeys, 0), +kStepKeys);  // keys of this step

  const StridedTensor& v = p.v;
  const int column = slab * kColumns + 4 * word;
  const unsigned char* const from = static_cast<const unsigned char*>(v.data) + kv_head * v.head +
                                    (kPackedK ? 0 : batch * v.batch) +
                                    (n.k_start + first + step * kStepKeys) * v.row + column;
  u32 x[kStepKeys];
  load_step(x, from, v.row, mine, p.dv - column,
            (v.batch | v.row | v.head | reinterpret_cast<long long>(v.data)) % 4 == 0,
            reinterpret_cast<u32*>(raw + threadIdx.x / 32 * kSteps * kImageBytes));

  float(*const sums)[kColumns] = reinterpret_cast<float(*)[kColumns]>(raw + blockDim.x / kWords * kImageBytes);
  float(*const sums_of_w)[kColumns] = sums + blockDim.x / 32;
  float sum[4] = {};
#pragma unroll
  for (int key = 0; key < kStepKeys; key += kRowsTogether)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 both = e4m3_to_f16(x[key], half);
#pragma unroll
      for (int i = 1; i < kRowsTogether; ++i) both = Half::add(both, e4m3_to_f16(x[key + i], half));
      sum[2 * half] += Half::low(both);
      sum[2 * half + 1] += Half::high(both);
    }
  add_up_in_warp(sum, sums[threadIdx.x / 32]);
  __syncthreads();

  // W = (V - mean) / 2, for which no code is too large. M is the mean of what is left of V.
  u32* const shifts = reinterpret_cast<u32*>(sums);  // of columns, two of each
  float all = 0;                                     // of the column of this thread's number
  if (threadIdx.x < kColumns) {
    all = sum_of(sums, int(threadIdx.x));
    const float half = -0.5f * mean_of(all, keys);
    shifts[threadIdx.x] = Half::pack(half, half);
  }
  __syncthreads();
  const uint4 four = reinterpret_cast<const uint4*>(shifts)[word];
  const u32 shift[4] = {four.x, four.y, four.z, four.w};
  u32 of_step[4];  // sums of half of the keys each, few enough for f16
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const u32 y[4] = {x[place(i, 0)], x[place(i, 1)], x[place(i, 2)], x[place(i, 3)]};
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // column j of two keys a word, which takes the place of key j
      const u32 order = j / 2 == 0 ? 0x5140 : 0x7362;
      const u32 a = e4m3_to_f16(__byte_perm(y[0], y[1], order), j % 2);
      const u32 b = e4m3_to_f16(__byte_perm(y[2], y[3], order), j % 2);
      const u32 w = f16_to_e4m3(Half::fma(a, 0x38003800, shift[j]), Half::fma(b, 0x38003800, shift[j]));  // 0.5
      x[place(i, j)] = w;
      const u32 both = Half::add(e4m3_to_f16(w, 0), e4m3_to_f16(w, 1));
      of_step[j] = i == 0 ? both : Half::add(of_step[j], both);
    }
  }

  // Rows of the image, whose halves lie as the swizzle wants: the other way round in rows 4 to 7 of 8.
  unsigned char* const image_of_step = raw + step * kImageBytes;
#pragma unroll
  for (int j = 0; j < 4; ++j)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      reinterpret_cast<uint4*>(image_of_step + row_of_column(word, j) * kStepBytes)[half ^ word / 4] = {
          x[place(4 * half, j)], x[place(4 * half + 1, j)], x[place(4 * half + 2, j)], x[place(4 * half + 3, j)]};
  unsigned char* const image =
      p.values.image + (first_image_tile(p, batch, kv_head, n.k_start) + first / kBlockKeys) * kBlockKeys * kValueDim +
      slab * kImageBytes;
  fence_async_proxy();
  __syncwarp();
  if (word == 0 && mine > 0) {
    bulk_store(image + step * kVStepBytes, u32(__cvta_generic_to_shared(image_of_step)), kImageBytes);
    tma_store_commit();
  }
  // What follows in the last tile: P is 0 there, and what it is multiplied with must be a number.
  const int steps = (keys + kStepKeys - 1) / kStepKeys;
  const int end = (keys + kBlockKeys - 1) / kBlockKeys * (kBlockKeys / kStepKeys);
  for (int at = steps * 2 * kColumns + threadIdx.x; at < end * 2 * kColumns; at += blockDim.x)
    *reinterpret_cast<uint4*>(image + at / (2 * kColumns) * kVStepBytes + at % (2 * kColumns) * 16) = {0, 0, 0, 0};

  float sum_of_w[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // keys after the last one were zeros
    const float of_zero = Half::low(e4m3_to_f16(f16_to_e4m3(shift[j], shift[j]), 0));
    sum_of_w[j] =
        mine > 0 ? Half::low(of_step[j]) + Half::high(of_step[j]) - float(kStepKeys - mine) * of_zero : 0;
  }
  add_up_in_warp(sum_of_w, sums_of_w[threadIdx.x / 32]);
  __syncthreads();
  if (threadIdx.x < kColumns) {
    const int mine = int(threadIdx.x), head = batch * kv_heads + kv_head;
    const float mean = mean_of(all - 2 * sum_of(sums_of_w, mine), keys);
    means_of(p, head)[segment * kValueDim + slab * kColumns + mine] = mean;
    if constexpr (kMeanSteps > 0)
      store_in_step(mean_steps_of(p, head) + segment / kSegmentsOfStep * kMeanStepBytes,
                    slab * kColumns + row_of_column(mine / 4, mine % 4), mean, segment % kSegmentsOfStep,
                    first + kSegmentKeys >= n.sk);
  }
  tma_store_wait_read();
}

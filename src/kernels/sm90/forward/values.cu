// V for products of e4m3: centred, rounded to codes again, and laid out as key tiles lie in shared memory. A CTA takes
// 32 columns of a stretch (sm90/forward/values.cuh), whose codes it keeps in shared memory.
#include "device/codes.cuh"
#include "device/cp_async.cuh"
#include "device/dependent_launch.cuh"
#include "sm90/forward/values.cuh"

enum : int {
  kWarps = kValuesThreads / 32,
  kColumns = kStepBytes,                   // of a CTA
  kGroups = kColumns / kCodesAtOnce,       // of columns that a thread loads
  kRowsAtOnce = kValuesThreads / kGroups,
  kRowsTogether = 8,                       // whose sum f16 holds
  kWords = kColumns / 4,                   // of a row in shared memory, one a thread
  kStepsAtOnce = kValuesThreads / kWords,
};

extern __shared__ __align__(1024) unsigned char raw[];

// Where the codes of a key lie in shared memory.
__device__ __forceinline__ int offset_of(int key) {
  return 2 * kValuesSumsBytes + key / ElementV::kStep * kValuesStepBytes + key % ElementV::kStep * kColumns;
}

__device__ __forceinline__ uint2* codes_at(int offset) { return reinterpret_cast<uint2*>(raw + offset); }

// Half of a word of codes.
__device__ __forceinline__ u32 numbers_of(u32 codes, int half) {
  return e4m3_to_f16(static_cast<unsigned short>(codes >> 16 * half));
}

// The key of a step whose code is byte j of word i of a column, in the order in which a thread of the forward kernel
// holds P: byte 4 q + 2 f + g of 16 is key 8 f + 2 q + g.
__device__ __forceinline__ constexpr int place(int i, int j) { return i / 4 * 16 + j / 2 * 8 + i % 4 * 2 + j % 2; }

// Sums of a thread's columns over the threads of its warp that have the same ones; `sharers` lanes have all columns.
template <int columns, int sharers>
__device__ __forceinline__ void add_up_in_warp(const float (&x)[columns], float* of_warp) {
#pragma unroll
  for (int i = 0; i < columns; ++i) {
    float sum = x[i];
#pragma unroll
    for (int bit = sharers; bit < 32; bit *= 2) sum += __shfl_xor_sync(0xffffffff, sum, bit);
    if (threadIdx.x % 32 < sharers) of_warp[threadIdx.x % sharers * columns + i] = sum;
  }
}

// The sum of a column.
__device__ __forceinline__ float sum_of(const float (*of_warps)[kColumns], int column) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warps[warp][column];
  return sum;
}

// 0 where some of the numbers are NaN.
__device__ __forceinline__ float mean_of(float sum, int count) { return sum == sum ? sum / float(count) : 0; }

// The row in the image of column i of a thread's four, columns 4 w to 4 w + 3 of 32: accumulators 2 q and 2 q + 1 of
// the j-th 8 are columns 8 q + 2 j and 8 q + 2 j + 1.
__device__ __forceinline__ int row_of_column(int w, int i) { return w % 2 * 16 + i / 2 * 8 + w / 2 * 2 + i % 2; }

// A row of the image. Lanes exchange halves with their neighbours, whose columns are the next four or those before, so
// that a pair stores whole rows. Halves lie as the swizzle wants: the other way round in rows 4 to 7 of 8.
__device__ __forceinline__ void store_row(unsigned char* row, const u32 (&word)[8]) {
  constexpr int kToNeighbour = 16 * kStepBytes;
  const bool odd = threadIdx.x % 2, swapped = threadIdx.x % kWords / 4;
  u32 got[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) got[i] = __shfl_xor_sync(0xffffffff, odd ? word[i] : word[4 + i], 1);
  uint4* const of_even = reinterpret_cast<uint4*>(row - (odd ? kToNeighbour : 0));
  uint4* const of_odd = reinterpret_cast<uint4*>(row + (odd ? 0 : kToNeighbour));
  of_even[odd != swapped] = odd ? uint4{got[0], got[1], got[2], got[3]} : uint4{word[0], word[1], word[2], word[3]};
  of_odd[odd != swapped] = odd ? uint4{word[4], word[5], word[6], word[7]} : uint4{got[0], got[1], got[2], got[3]};
}

extern "C" __global__ void __launch_bounds__(kValuesThreads, 4)
    fulgur_forward_values(const __grid_constant__ ForwardParams p) {
  let_next_kernel_start();
  constexpr int kSlabs = kValueDim / kColumns;
  float(*const sums)[kColumns] = reinterpret_cast<float(*)[kColumns]>(raw);
  float(*const sums_of_w)[kColumns] = reinterpret_cast<float(*)[kColumns]>(raw + kValuesSumsBytes);
  const int kv_heads = p.hq / p.group;
  const int slab = blockIdx.x % kSlabs;
  const int kv_head = blockIdx.x / kSlabs % kv_heads;
  const int stretch = blockIdx.x / kSlabs / kv_heads % p.values.stretches;
  const int batch = blockIdx.x / kSlabs / kv_heads / p.values.stretches;
  const Lengths n = lengths_of(p, batch);
  const int first = stretch * kStretchKeys;
  if (first >= n.sk) return;
  const int keys = min(n.sk - first, +kStretchKeys);
  const int steps = (keys + ElementV::kStep - 1) / ElementV::kStep;

  {
    const StridedTensor& v = p.v;
    const bool aligned = (v.batch | v.row | v.head | reinterpret_cast<long long>(v.data)) % kCodesAtOnce == 0;
    const int group = threadIdx.x % kGroups, mine = threadIdx.x / kGroups;
    const int column = slab * kColumns + group * kCodesAtOnce;
    const bool whole = aligned && column + kCodesAtOnce <= p.dv;
    const unsigned char* const from = static_cast<const unsigned char*>(v.data) + kv_head * v.head +
                                      (kPackedK ? 0 : batch * v.batch) + (n.k_start + first) * v.row + column;
    const int rows = steps * ElementV::kStep;
    const u32 shared = u32(__cvta_generic_to_shared(raw));
#pragma unroll 4
    for (int key = mine; key < rows; key += kRowsAtOnce) {
      const int to = offset_of(key) + group * kCodesAtOnce;
      if (whole) async_copy_piece<kCodesAtOnce>(shared + to, from + key * v.row, key < keys);
      else *codes_at(to) = load_codes(from + key * v.row, key < keys ? p.dv - column : 0, 1, false);
    }
    async_copy_commit();
    async_copy_wait<0>();
    float sum[kCodesAtOnce] = {};
#pragma unroll 1
    for (int row = mine; row < rows; row += kRowsTogether * kRowsAtOnce) {
      uint2 x[kRowsTogether];
#pragma unroll
      for (int i = 0; i < kRowsTogether; ++i) {
        const int key = row + i * kRowsAtOnce;
        x[i] = key < rows ? *codes_at(offset_of(key) + group * kCodesAtOnce) : uint2{0, 0};
      }
#pragma unroll
      for (int pair = 0; pair < kCodesAtOnce / 2; ++pair) {
        u32 both = code_pair<kE4M3>(x[0], pair);
#pragma unroll
        for (int i = 1; i < kRowsTogether; ++i) both = Half::add(both, code_pair<kE4M3>(x[i], pair));
        sum[2 * pair] += Half::low(both);
        sum[2 * pair + 1] += Half::high(both);
      }
    }
    add_up_in_warp<kCodesAtOnce, kGroups>(sum, sums[threadIdx.x / 32]);
  }
  __syncthreads();

  // W = (V - mean) / 2, for which no code is too large. M is the mean of what is left of V.
  const int word = threadIdx.x % kWords;
  u32* const shifts = reinterpret_cast<u32*>(sums);  // of columns, two of each
  if (threadIdx.x < kColumns) {
    const float all = sum_of(sums, int(threadIdx.x));
    sums[1][threadIdx.x] = all;
    const float half = -0.5f * mean_of(all, keys);
    shifts[threadIdx.x] = Half::pack(half, half);
  }
  __syncthreads();
  const uint4 four = reinterpret_cast<const uint4*>(shifts)[word];
  const u32 shift[4] = {four.x, four.y, four.z, four.w};
  unsigned char* const image =
      p.values.image + (first_image_tile(p, batch, kv_head, n.k_start) + first / kBlockKeys) * kBlockKeys * kValueDim +
      slab * kColumns * kStepBytes;
  float sum_of_w[4] = {};
#pragma unroll 1
  for (int at = threadIdx.x / kWords; at < (steps + 3) / 4 * 4; at += kStepsAtOnce) {  // whole warps
    const int step = min(at, steps - 1);
    u32 of_column[4][8];
    u32 of_step[4];  // sums of half of the keys each, few enough for f16
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[j] = *reinterpret_cast<const u32*>(raw + offset_of(step * ElementV::kStep + place(i, j)) + 4 * word);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {  // two keys of columns j and j + 1 a word
        const u32 first = __byte_perm(x[0], x[1], j == 0 ? 0x5140 : 0x7362);
        const u32 second = __byte_perm(x[2], x[3], j == 0 ? 0x5140 : 0x7362);
#pragma unroll
        for (int k = j; k < j + 2; ++k) {
          const u32 a = numbers_of(first, k - j), b = numbers_of(second, k - j);
          const u32 w = f16_to_e4m3(Half::fma(a, 0x38003800, shift[k]), Half::fma(b, 0x38003800, shift[k]));  // 0.5
          of_column[k][i] = w;
          const u32 both = Half::add(numbers_of(w, 0), numbers_of(w, 1));
          of_step[k] = i == 0 ? both : Half::add(of_step[k], both);
        }
      }
    }
    // Keys after the last one were zeros.
    const int missing = at != step ? 0 : min(max((step + 1) * ElementV::kStep - keys, 0), +ElementV::kStep);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (at == step) sum_of_w[j] += Half::low(of_step[j]) + Half::high(of_step[j]);
      if (missing > 0) {
        const u32 of_zero = numbers_of(f16_to_e4m3(shift[j], shift[j]), 0);
        sum_of_w[j] -= float(missing) * Half::low(of_zero);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
      store_row(image + step * kVStepBytes + row_of_column(word, j) * kStepBytes, of_column[j]);
  }
  // What follows in the last tile: P is 0 there, and what it is multiplied with must be a number.
  const int end = (keys + kBlockKeys - 1) / kBlockKeys * (kBlockKeys / ElementV::kStep);
  for (int at = steps * 2 * kColumns + threadIdx.x; at < end * 2 * kColumns; at += kValuesThreads)
    *reinterpret_cast<uint4*>(image + at / (2 * kColumns) * kVStepBytes + at % (2 * kColumns) * 16) = {0, 0, 0, 0};
  add_up_in_warp<4, kWords>(sum_of_w, sums_of_w[threadIdx.x / 32]);
  __syncthreads();
  if (threadIdx.x < kColumns)
    means_of(p, batch * kv_heads + kv_head)[stretch * kValueDim + slab * kColumns + threadIdx.x] =
        mean_of(sums[1][threadIdx.x] - 2 * sum_of(sums_of_w, int(threadIdx.x)), keys);
}

// V for products of e4m3: centred, rounded to codes again, and laid out as key tiles lie in shared memory. A CTA takes
// 32 columns of a stretch (sm90/forward/values.cuh), whose codes it keeps in shared memory.
#include "device/codes.cuh"
#include "sm90/forward/values.cuh"

enum : int {
  kWarps = kValuesThreads / 32,
  kColumns = kStepBytes,                   // of a CTA
  kGroups = kColumns / kCodesAtOnce,       // of columns that a thread loads
  kRowsAtOnce = kValuesThreads / kGroups,
  kRowsAhead = 8,
  kWords = kColumns / 4,                   // of a row in shared memory, one a thread
  kStepsAtOnce = kValuesThreads / kWords,
};

extern __shared__ __align__(1024) unsigned char raw[];

// Where the codes of a key lie in shared memory.
__device__ __forceinline__ int offset_of(int key) {
  return 2 * kValuesSumsBytes + key / ElementV::kStep * kValuesStepBytes + key % ElementV::kStep * kColumns;
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

// The mean of a column over `count` keys; 0 where some of them are NaN.
__device__ __forceinline__ float mean_of(const float (*sums)[kColumns], int column, float count) {
  float sum = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += sums[warp][column];
  return sum == sum ? sum / count : 0;
}

// The row of one of a thread's columns in the image. Lanes exchange halves with their neighbours, whose columns are the
// next four or those before, so that a pair stores whole rows. Halves lie as the swizzle wants: the other way round in
// the rows of odd lanes.
__device__ __forceinline__ void store_row(unsigned char* row, const u32 (&word)[8]) {
  constexpr int kToNeighbour = 4 * kStepBytes;
  const bool odd = threadIdx.x % 2;
  u32 got[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) got[i] = __shfl_xor_sync(0xffffffff, odd ? word[i] : word[4 + i], 1);
  uint4* const of_even = reinterpret_cast<uint4*>(row - (odd ? kToNeighbour : 0));
  uint4* const of_odd = reinterpret_cast<uint4*>(row + (odd ? 0 : kToNeighbour));
  of_even[odd] = odd ? uint4{got[0], got[1], got[2], got[3]} : uint4{word[0], word[1], word[2], word[3]};
  of_odd[!odd] = odd ? uint4{word[4], word[5], word[6], word[7]} : uint4{got[0], got[1], got[2], got[3]};
}

extern "C" __global__ void __launch_bounds__(kValuesThreads, 2)
    fulgur_forward_values(const __grid_constant__ ForwardParams p) {
  constexpr int kSlabs = kValueDim / kColumns;
  float(*const sums)[kColumns] = reinterpret_cast<float(*)[kColumns]>(raw);
  float(*const rests)[kColumns] = reinterpret_cast<float(*)[kColumns]>(raw + kValuesSumsBytes);
  const int kv_heads = p.hq / p.group;
  const int slab = blockIdx.x % kSlabs;
  const int kv_head = blockIdx.x / kSlabs % kv_heads;
  const int stretch = blockIdx.x / kSlabs / kv_heads % p.values.stretches;
  const int batch = blockIdx.x / kSlabs / kv_heads / p.values.stretches;
  const Lengths n = lengths_of(p, batch);
  const int first = stretch * kStretchKeys;
  if (first >= n.sk) return;
  const int keys = min(n.sk - first, +kStretchKeys);
  // Up to the end of its last tile: P is 0 there, and what it is multiplied with must be a number.
  const int steps = (keys + kBlockKeys - 1) / kBlockKeys * (kBlockKeys / ElementV::kStep);

  {
    const StridedTensor& v = p.v;
    const bool aligned = (v.batch | v.row | v.head | reinterpret_cast<long long>(v.data)) % kCodesAtOnce == 0;
    const int group = threadIdx.x % kGroups, mine = threadIdx.x / kGroups;
    const int column = slab * kColumns + group * kCodesAtOnce;
    const unsigned char* const from = static_cast<const unsigned char*>(v.data) + kv_head * v.head +
                                      (kPackedK ? 0 : batch * v.batch) + (n.k_start + first) * v.row + column;
    float sum[kCodesAtOnce] = {};
#pragma unroll 1
    for (int row = mine; row < steps * ElementV::kStep; row += kRowsAhead * kRowsAtOnce) {
      uint2 x[kRowsAhead];
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        const int key = row + i * kRowsAtOnce;
        x[i] = load_codes(from + key * v.row, key < keys ? p.dv - column : 0, 1, aligned);
      }
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        const int key = row + i * kRowsAtOnce;
        if (key < steps * ElementV::kStep)
          *reinterpret_cast<uint2*>(raw + offset_of(key) + group * kCodesAtOnce) = x[i];
      }
#pragma unroll
      for (int pair = 0; pair < kCodesAtOnce / 2; ++pair)
#pragma unroll
        for (int i = 0; i < kRowsAhead; i += 2) {
          const u32 both = Half::add(code_pair<kE4M3>(x[i], pair), code_pair<kE4M3>(x[i + 1], pair));
          sum[2 * pair] += Half::low(both);
          sum[2 * pair + 1] += Half::high(both);
        }
    }
    add_up_in_warp<kCodesAtOnce, kGroups>(sum, sums[threadIdx.x / 32]);
  }
  __syncthreads();

  // W = (V - mean) / 2, for which no code is too large. M is the mean of what is left of V.
  const int word = threadIdx.x % kWords;
  const int column = slab * kColumns + 4 * word;
  u32 shift[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    shift[i] = Half::pack(-0.5f * mean_of(sums, 4 * word + 2 * i, float(keys)),
                          -0.5f * mean_of(sums, 4 * word + 2 * i + 1, float(keys)));
  unsigned char* const image =
      p.values.image + (first_image_tile(p, batch, kv_head, n.k_start) + first / kBlockKeys) * kBlockKeys * kValueDim +
      column * kStepBytes;
  float rest[4] = {};
#pragma unroll 1
  for (int at = threadIdx.x / kWords; at < (steps + 3) / 4 * 4; at += kStepsAtOnce) {  // whole warps
    const int step = min(at, steps - 1);
    u32 of_column[4][8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      u32 x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        x[j] = *reinterpret_cast<const u32*>(raw + offset_of(step * ElementV::kStep + place(i, j)) + 4 * word);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        u32 w[4], left[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = step * ElementV::kStep + place(i, j);
          const u32 v = e4m3_to_f16(static_cast<unsigned short>(x[j] >> 16 * pair));
          w[j] = f16_to_e4m3(Half::fma(v, 0x38003800, shift[pair]));                             // 0.5
          left[j] = Half::fma(e4m3_to_f16(static_cast<unsigned short>(w[j])), 0xc000c000, v);  // -2
          if (key >= keys || at != step) left[j] = 0;
        }
        const u32 lefts = Half::add(Half::add(left[0], left[1]), Half::add(left[2], left[3]));
        rest[2 * pair] += Half::low(lefts);
        rest[2 * pair + 1] += Half::high(lefts);
        const u32 low = w[0] | w[1] << 16, high = w[2] | w[3] << 16;
        of_column[2 * pair][i] = __byte_perm(low, high, 0x6420);
        of_column[2 * pair + 1][i] = __byte_perm(low, high, 0x7531);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) store_row(image + step * kVStepBytes + j * kStepBytes, of_column[j]);
  }
  add_up_in_warp<4, kWords>(rest, rests[threadIdx.x / 32]);
  __syncthreads();
  if (threadIdx.x < kColumns)
    means_of(p, batch, kv_head)[stretch * kValueDim + slab * kColumns + threadIdx.x] =
        mean_of(rests, int(threadIdx.x), float(keys));
}

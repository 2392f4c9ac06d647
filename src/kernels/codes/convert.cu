// Converts K and V to kTo, the dtype of q, for a forward kernel, where one of them holds codes: each code once, not for
// every block of query rows. Keys of caches become contiguous rows of their sequences; those after the last key of a
// sequence are not written.
#include "kernel_config.h"
#include "codes/convert_params.h"
#include "device/codes.cuh"
#include "device/lengths.cuh"

// The keys of a sequence: `count` from row `start` on, of an entry of the batch or of the list of its pages; the
// first one goes to row `to`, where the sequence begins without leftpad_k.
struct SequenceRows {
  int start, count, entry;
  long long list, to;
};

__device__ __forceinline__ SequenceRows keys_of(const ConvertParams& p, int b) {
  SequenceRows s = {0, p.sk, b, 0, static_cast<long long>(b) * p.sk};
  if (p.cu_seqlens_k != nullptr) {
    packed_rows(p.cu_seqlens_k, b, p.total_k, p.sk, s.start, s.count);
    s.entry = 0;
    s.to = s.start;
  }
  if (p.seqused_k != nullptr) s.count = used_rows(p.seqused_k, b, s.count);
  s.list = b * p.pages.table_stride;
  if (p.pages.indptr != nullptr) {
    int first, ids;
    packed_rows(p.pages.indptr, b, p.pages.ids, p.pages.ids, first, ids);
    s.list = first * p.pages.id_stride;
    s.count = min(s.count, ids * p.page);
  }
  if (p.cache_batch_idx != nullptr) {
    s.entry = p.cache_batch_idx[b];
    if (u32(s.entry) >= u32(p.pages.entries)) s.count = 0;
  }
  if (p.leftpad_k != nullptr) {
    const int begin = min(max(p.leftpad_k[b], 0), s.count);
    s.start += begin;
    s.count -= begin;
  }
  return s;
}

// Where a key lies; the entry of a page has not been checked, which would wait for it.
struct KeyPlace {
  int entry, row;
};

__device__ __forceinline__ KeyPlace place_of(const ConvertParams& p, const SequenceRows& s, int key) {
  const int row = s.start + key;
  if (p.pages.table == nullptr) return {s.entry, row};
  const int page = row / p.page;
  return {p.pages.table[s.list + page * p.pages.id_stride], row - page * p.page};
}

__device__ __forceinline__ u32 scale_bits(const AppendScales& t, long long at) {
  return t.f32 ? static_cast<const u32*>(t.data)[at] : static_cast<const unsigned short*>(t.data)[at];
}
__device__ __forceinline__ float scale_of(const AppendScales& t, u32 bits) {
  return t.f32 ? __uint_as_float(bits) : half_to_float(static_cast<unsigned short>(bits));
}

// kConvertColumns columns of a row as they lie in memory, so that nothing waits for the loads of several rows.
template <Element type>
struct Columns {
  // Of q4_0 a byte has the codes of two columns, 16 apart. Blocks have odd numbers of halves of words.
  enum : int {
    kBytes = type == kQ4_0 ? kConvertColumns : kConvertColumns * bits_of(type) / 8,
    kWordBytes = is_block(type) ? 2 : 4,
    kWords = kBytes / kWordBytes,
  };
  u32 x[kWords] = {};
  u32 scale = 0, zero_point = 0;  // their bits

  // Bytes before a column of a row.
  static __device__ __forceinline__ int bytes_before(int column) {
    if (!is_block(type)) return column * bits_of(type) / 8;
    return row_of_blocks(type, column) + 2 + column % (type == kQ4_0 ? 16 : kBlockColumns);
  }

  // Whether whole words may be loaded.
  static __device__ __forceinline__ bool is_aligned(const ConvertedTensor& t) {
    const u32 any = u32(t.from.batch | t.from.row | t.from.head | reinterpret_cast<long long>(t.from.data));
    return any % (is_block(type) ? 2 : min_of(kBytes, 16)) == 0 && t.dim % kConvertColumns == 0;
  }
  // `at`: the first byte. `count`: how many bytes exist.
  template <bool aligned>
  __device__ __forceinline__ void load(const unsigned char* at, int count) {
    if constexpr (aligned && is_block(type)) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) x[i] = reinterpret_cast<const unsigned short*>(at)[i];
    } else if constexpr (aligned) {
      const auto all = load_pack<kWords>(reinterpret_cast<const u32*>(at));
#pragma unroll
      for (int i = 0; i < kWords; ++i) x[i] = all.x[i];
    } else {
#pragma unroll
      for (int i = 0; i < kBytes; ++i)
        if (i < count) x[i / kWordBytes] |= u32(at[i]) << i % kWordBytes * 8;
    }
  }
  template <bool aligned>
  __device__ __forceinline__ void load_block_scale(const unsigned char* at) {
    scale = aligned ? *reinterpret_cast<const unsigned short*>(at) : at[0] | at[1] << 8;
  }

  // 2^23 + an integer of 0 to 255, as bits, less 2^23 + `bias`, which is faster than a conversion of the integer.
  static __device__ __forceinline__ float less(u32 bits, int bias) { return __uint_as_float(bits) - (0x1p23f + bias); }

  // Column i, without a scale of a tensor. `upper`: codes of q4_0 lie in the upper halves of bytes.
  __device__ __forceinline__ float number(int i, bool upper) const {
    constexpr u32 k2_23 = 0x4b000000;
    if constexpr (type == kF32) {
      return __uint_as_float(x[i]);
    } else if constexpr (!is_code(type)) {
      return i % 2 == 0 ? ElementType<type>::low(x[i / 2]) : ElementType<type>::high(x[i / 2]);
    } else if constexpr (type == kE4M3 || type == kE5M2) {
      const u32 pair = code_pair<type>({x[0], x[1]}, i / 2);
      return i % 2 == 0 ? Half::low(pair) : Half::high(pair);
    } else if constexpr (type == kInt4) {
      return less(and_xor(x[0] >> 4 * i, 15, k2_23 | 8), 8);
    } else if constexpr (type == kQ4_0) {
      return less(and_xor(x[i / 2] >> (i % 2 * 8 + (upper ? 4 : 0)), 15, k2_23), 8);
    } else {
      return less(__byte_perm(x[i / kWordBytes] ^ 0x80808080, k2_23, 0x7440 | i % kWordBytes), 128);
    }
  }
};

// kConvertColumns numbers of kTo.
__device__ __forceinline__ void store(const float (&x)[kConvertColumns], void* to) {
  Pack<u32, kTo == kF32 ? kConvertColumns : kConvertColumns / 2> all;
#pragma unroll
  for (int i = 0; i < kConvertColumns; ++i) {
    if constexpr (kTo == kF32) {
      all.x[i] = __float_as_uint(x[i]);
    } else if (i % 2 == 0) {
      all.x[i / 2] = ElementType<Element(kTo)>::pack(x[i], x[i + 1]);
    }
  }
  store_pack(static_cast<u32*>(to), all);
}

// Some keys of sequence b.
template <Element type, bool aligned>
__device__ __forceinline__ void convert(const ConvertParams& p, const ConvertedTensor& t, const SequenceRows& s, int b,
                                        int cta) {
  const int chunks = convert_chunks(t.dim), units = t.heads * chunks;
  const int threads_of_row = min(units, int(kConvertThreads)), rows_at_once = convert_rows(units);
  const int mine = int(threadIdx.x) / threads_of_row, step = rows_at_once / kConvertRows;
  if (mine >= step) return;
  const AppendCodes& c = t.codes;
  const bool scaled = is_code(type) && !is_block(type) && c.groups > 0, has_zero_point = c.zero_point.data != nullptr;
  for (int unit = int(threadIdx.x) % threads_of_row; unit < units; unit += threads_of_row) {
    const int head = unit / chunks, column = unit % chunks * kConvertColumns;
    const int count = is_block(type) ? Columns<type>::kBytes : ((t.dim - column) * bits_of(type) + 7) / 8;
    const int group = scaled ? column / (t.dim / c.groups) : 0;
    const auto* const from = static_cast<const unsigned char*>(t.from.data) + head * t.from.head;
    const auto scale_at = [&](const AppendScales& of, const KeyPlace& at) {
      return (c.of_rows ? at.entry * of.batch + at.row * of.row : b * of.batch) + head * of.head + group * of.group;
    };
    for (int first = cta * rows_at_once + mine; first < s.count; first += p.ctas * rows_at_once) {
      KeyPlace at[kConvertRows];
#pragma unroll
      for (int i = 0; i < kConvertRows; ++i) at[i] = place_of(p, s, min(first + i * step, s.count - 1));
      Columns<type> x[kConvertRows];
#pragma unroll
      for (int i = 0; i < kConvertRows; ++i) {
        if (p.pages.table != nullptr && u32(at[i].entry) >= u32(p.pages.entries)) continue;  // zeros
        const auto* const row = from + at[i].entry * t.from.batch + at[i].row * t.from.row;
        x[i].template load<aligned>(row + Columns<type>::bytes_before(column), count);
        if (is_block(type)) x[i].template load_block_scale<aligned>(row + row_of_blocks(type, column));
        if (scaled) x[i].scale = scale_bits(c.scale, scale_at(c.scale, at[i]));
        if (scaled && has_zero_point) x[i].zero_point = scale_bits(c.zero_point, scale_at(c.zero_point, at[i]));
      }
#pragma unroll
      for (int i = 0; i < kConvertRows; ++i) {
        const int key = first + i * step;
        if (key >= s.count) break;
        float scale = 1, zero_point = 0;
        if (is_block(type)) scale = half_to_float(static_cast<unsigned short>(x[i].scale));
        if (scaled) scale = scale_of(c.scale, x[i].scale);
        if (scaled && has_zero_point) zero_point = scale_of(c.zero_point, x[i].zero_point);
        float numbers[kConvertColumns];
#pragma unroll
        for (int j = 0; j < kConvertColumns; ++j)
          numbers[j] = (x[i].number(j, column % kBlockColumns >= 16) - zero_point) * scale;
        store(numbers, static_cast<unsigned char*>(t.to) +
                           ((s.to + key) * units + unit) * (kConvertColumns * bytes_of(Element(kTo))));
      }
    }
  }
}

template <Element type>
__device__ __forceinline__ void convert(const ConvertParams& p, const ConvertedTensor& t, const SequenceRows& s, int b,
                                        int cta) {
  Columns<type>::is_aligned(t) ? convert<type, true>(p, t, s, b, cta) : convert<type, false>(p, t, s, b, cta);
}

// blockIdx.x: a sequence and a CTA of it; blockIdx.y: K or V.
extern "C" __global__ void __launch_bounds__(kConvertThreads)
    fulgur_convert_codes(const __grid_constant__ ConvertParams p) {
  const int b = blockIdx.x / p.ctas, cta = blockIdx.x % p.ctas;
  const SequenceRows keys = keys_of(p, b);
  if (blockIdx.y == 1) return convert<Element(kFromV)>(p, p.v, keys, b, cta);
  if (cta == 0 && threadIdx.x == 0) {
    p.lengths[b] = keys.count;
    if (p.starts != nullptr) p.starts[b] = b * p.sk;
    if (p.starts != nullptr && b == p.batch - 1) p.starts[p.batch] = p.batch * p.sk;
  }
  convert<Element(kFromK)>(p, p.k, keys, b, cta);
}

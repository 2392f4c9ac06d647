// A bool mask packed to bits in the order of accumulators (attention/mask_bits.cuh), and the map of tiles that it
// gives with the bounds of the call. The mask is read once; of the words of a warpgroup a state of each warp says
// whether some key is seen and whether some key is hidden, which is all that the map reads.
//
// kernel_config.h has what attention/tile_map.cu wants (host_device/tile_map.h), and
//   kBiasRows       1: each query has a row of the mask; 0: all have the same
#include "kernel_config.h"
#include "attention/fragment.cuh"
#include "attention/tile_map.cuh"

enum : int {
  kWordsOfTile = kMapByKeys ? 1 : mask_words(kBlockKeys),
  kCells = 4,   // that a CTA packs: 64 rows of scores with up to 64 keys, of which each thread has a word
  kChunk = 16,  // keys that a thread loads at a time
  kRows = kMapByKeys ? kCells * kStripRows : +kStripRows,
  kChunks = kMapByKeys ? kMaskWordColumns / kChunk : kCells / kWordsOfTile * kBlockKeys / kChunk,  // of a row
  kLoads = kRows * kChunks / kMaskThreads,
  kChunksOfCell = kMaskWordColumns / kChunk,
  // By chunks and rows or the other way round, so that threads read few words, of different banks.
  kLines = kMapByKeys ? +kChunks : +kRows,
  kColumns = kMapByKeys ? kRows + 8 : +kChunks,
};
static_assert(kCells % kWordsOfTile == 0 && kRows * kChunks % kMaskThreads == 0);

using KeyBits = unsigned short;  // of a chunk

using PartBits = KeyBits[kLines][kColumns];

// A bit for each of four bytes, 1 where it is not 0.
__device__ __forceinline__ u32 bits_of_bytes(u32 x) {
  const u32 ones = (((x & 0x7f7f7f7f) + 0x7f7f7f7f) | x) >> 7 & 0x01010101;
  return ones * 0x10204080 >> 28;
}
__device__ __forceinline__ u32 bits_of_bytes(const uint4& x) {
  return bits_of_bytes(x.x) | bits_of_bytes(x.y) << 4 | bits_of_bytes(x.z) << 8 | bits_of_bytes(x.w) << 12;
}

// Ones for the keys of a chunk that there are, of `keys` from its first one on.
__device__ __forceinline__ u32 ones_of_chunk(int keys) { return (1u << min(max(keys, 0), +kChunk)) - 1; }

// Rows and keys of the mask that a CTA has: its first ones, and how many there are.
struct Part {
  int row, rows;
  int key, keys;
};

// The bits of all chunks of a part: `wide` loads of a chunk, all before the first is used, or loads of a key.
template <bool wide>
__device__ __forceinline__ void load_part(const DenseBias& bias, const unsigned char* mask, const Part& part,
                                          PartBits& bits_of) {
  const auto place = [](int i) { return i * kMaskThreads + int(threadIdx.x); };
  const auto store = [&](int row, int chunk, u32 bits) {
    if (row >= part.rows) bits = ones_of_chunk(part.keys - chunk * kChunk);
    (kMapByKeys ? bits_of[chunk][row] : bits_of[row][chunk]) = static_cast<KeyBits>(bits);
  };
  if constexpr (wide) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = place(i) / kChunks, key = place(i) % kChunks * kChunk;
      loaded[i] = {0, 0, 0, 0};
      if (row < part.rows && key < part.keys)
        loaded[i] = *reinterpret_cast<const uint4*>(mask + (part.row + row) * bias.row + part.key + key);
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) store(place(i) / kChunks, place(i) % kChunks, bits_of_bytes(loaded[i]));
  } else {
#pragma unroll 1
    for (int i = 0; i < kLoads; ++i) {
      const int row = place(i) / kChunks, key = place(i) % kChunks * kChunk;
      const unsigned char* const at = mask + (part.row + row) * bias.row + (part.key + key) * bias.key;
      unsigned char loaded[kChunk];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) loaded[j] = row < part.rows && key + j < part.keys ? at[j * bias.key] : 0;
      u32 bits = 0;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) bits |= u32(loaded[j] != 0) << j;
      store(row, key / kChunk, bits);
    }
  }
}

// Of a row's bits of 64 keys those of a thread's columns, in the order of half a word.
__device__ __forceinline__ u32 half_of_columns(u32 low, u32 high) {
  const u32 a = low >> thread_column() & 0x03030303, b = high >> thread_column() & 0x03030303;
  return ((a | a >> 14) & 0x0f0f) | ((b | b >> 14) & 0x0f0f) << 4;
}

// The word of a thread for a cell of the CTA. With its rows and keys the other way round for kMapByKeys: a thread has
// bits r and r + 8 of the 16 keys of its warp, of two rows in 32 bits.
__device__ __forceinline__ u32 word_of_cell(const PartBits& bits_of, int cell) {
  if constexpr (kMapByKeys) {
    u32 sums[2] = {0, 0};  // of odd and even eights of rows: bits of keys r and r + 8 of a row, and of the next one
#pragma unroll
    for (int eight = 0; eight < 8; ++eight) {
      const int row = kStripRows * cell + 8 * eight + int(thread_column());
      const u32 two = *reinterpret_cast<const u32*>(&bits_of[threadIdx.x / 32][row]);
      sums[eight % 2] |= (two >> thread_row() & 0x01010101) << eight / 2 * 2;
    }
    return __byte_perm(sums[0] | sums[0] >> 15, sums[1] | sums[1] >> 15, 0x5140);
  } else {
    u32 word = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 bits[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < kChunksOfCell; ++i) {
        const int chunk = cell % kWordsOfTile * kChunksOfCell + i;  // of the tile
        if (chunk < kBlockKeys / kChunk)
          bits[i / 2] |= u32(bits_of[warp_row() + thread_row() + 8 * half]
                                    [cell / kWordsOfTile * (kBlockKeys / kChunk) + chunk])
                         << i % 2 * kChunk;
      }
      word |= half_of_columns(bits[0], bits[1]) << 16 * half;
    }
    return word;
  }
}

// The bits of a thread's word of which there are rows and keys.
__device__ __forceinline__ u32 bits_that_exist(const Part& part, int cell) {
  // Rows of accumulators, of which bits are a half, and columns.
  const int tile = cell / kWordsOfTile, word = cell % kWordsOfTile;
  const int rows = (kMapByKeys ? part.keys : part.rows) - int(warp_row() + thread_row());
  const int columns = kMapByKeys ? part.rows - kStripRows * cell
                                 : min(part.keys - tile * kBlockKeys, +kBlockKeys) - word * kMaskWordColumns;
  const u64 ones = columns >= kMaskWordColumns ? ~u64(0) : (u64(1) << max(columns, 0)) - 1;
  return half_of_columns(u32(ones), u32(ones >> 32)) * ((rows > 0) | (rows > 8) << 16);
}

// A CTA takes cells of a line.
extern "C" __global__ void __launch_bounds__(kMaskThreads) fulgur_pack_mask(const __grid_constant__ TileMapParams p) {
  let_next_kernel_start();
  __shared__ KeyBits bits_of_rows[kLines][kColumns];
  const MaskBits& to = p.expression.bits;
  const MaskShape& of = p.mask;
  const int chunks = (of.cells + kCells - 1) / kCells;
  const int line = int(blockIdx.x / chunks) % of.lines, map = int(blockIdx.x / chunks) / of.lines;
  const int first = int(blockIdx.x % chunks) * kCells;
  const int batch = map / of.heads, head = map % of.heads;
  const unsigned char* const mask =
      static_cast<const unsigned char*>(p.bias.data) + batch * p.bias.batch + head * p.bias.head;
  const long long words = batch * to.batch + head * to.head + line * to.strip + (long long)(first) * kMaskThreads;

  Part part;
  part.row = kStripRows * (kMapByKeys ? first : line);
  part.rows = kBiasRows ? min(p.sq - part.row, +kRows) : +kRows;
  part.key = kMapByKeys ? kMaskWordColumns * line : first / kWordsOfTile * kBlockKeys;
  part.keys = min(p.sk - part.key, kChunks * kChunk);
  const bool aligned = p.bias.key == 1 && ((reinterpret_cast<u64>(mask) | u64(p.bias.row)) & (kChunk - 1)) == 0;
  if (aligned && part.keys % kChunk == 0) load_part<true>(p.bias, mask, part, bits_of_rows);
  else load_part<false>(p.bias, mask, part, bits_of_rows);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCells; ++i) {
    if (first + i >= of.cells) break;
    const u32 word = word_of_cell(bits_of_rows, i), exists = bits_that_exist(part, i);
    to.words[words + i * kMaskThreads + threadIdx.x] = word;
    const int state = (__any_sync(0xffffffff, (word & exists) != 0) ? +kShowsSome : 0) |
                      (__any_sync(0xffffffff, (~word & exists) != 0) ? +kHidesSome : 0);
    if (threadIdx.x % 32 == 0)
      reinterpret_cast<unsigned char*>(to.states + words / kMaskThreads + i)[threadIdx.x / 32] =
          static_cast<unsigned char>(state);
  }
}

// Whether a tile has keys that are seen, and whether the mask hides some of them, the bounds of the call apart.
__device__ __forceinline__ TileState tile_state(const TileMapParams& p, int map, int row_block, int key_tile) {
  const MapShape& of = p.shape;
  const int batch = map / of.heads, head = map % of.heads * of.heads_of_map;
  const Lengths n = lengths_of(p, batch);
  const RowRange rows = rows_of_block(n, row_block);
  if (row_block >= of.row_blocks || key_tile >= of.key_tiles || !band_shows(p, n, rows, key_tile))
    return {false, false};
  const MaskBits& bits = p.expression.bits;
  const u32* const states = bits.states + (batch * bits.batch + head * bits.head) / kMaskThreads;
  const long long strip = bits.strip / kMaskThreads;
  const int first = kBiasRows ? rows.begin / kStripRows : 0, last = kBiasRows ? (rows.end - 1) / kStripRows : 0;
  u32 state = 0;
  if constexpr (kMapByKeys) {
    const int keys = (min(kBlockKeys * (key_tile + 1), p.sk) - 1) / kMaskWordColumns;
#pragma unroll 1
    for (int key = kBlockKeys * key_tile / kMaskWordColumns; key <= keys; ++key)
      for (int row = first; row <= last; ++row) state |= states[key * strip + row];
  } else {
#pragma unroll 1
    for (int row = first; row <= last; ++row)
#pragma unroll
      for (int word = 0; word < kWordsOfTile; ++word)
        state |= states[row * strip + key_tile * kWordsOfTile + word];
  }
  state |= state >> 16;
  state |= state >> 8;
  return {bool(state & kShowsSome), bool(state & kHidesSome)};
}

extern "C" __global__ void __launch_bounds__(128) fulgur_tile_map(const __grid_constant__ TileMapParams p) {
  map_tiles(p, [&](int map, int row_block, int key_tile) { return tile_state(p, map, row_block, key_tile); });
}

extern "C" __global__ void __launch_bounds__(128) fulgur_map_of_rows(const __grid_constant__ TileMapParams p) {
  map_rows(p);
}

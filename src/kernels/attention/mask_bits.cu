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
  kCells = 4,  // that a CTA packs: 64 rows of scores with up to 64 keys, of which each thread has a word
  kWordsOfTile = kMapByKeys ? 1 : (kBlockKeys + kMaskWordColumns - 1) / kMaskWordColumns,
};

using KeyBits = unsigned short;  // of 16 keys

// Which rows and keys of the mask a cell has.
struct Cell {
  int row, rows;
  int key, keys;
};

// `line`: the strip of rows, or of 64 keys where the map is by keys; `at`: the cell in it.
__device__ __forceinline__ Cell cell_of(const TileMapParams& p, int line, int at) {
  if constexpr (kMapByKeys)
    return {kStripRows * at, kBiasRows ? min(p.sq - kStripRows * at, kStripRows) : +kStripRows,
            kMaskWordColumns * line, min(p.sk - kMaskWordColumns * line, kMaskWordColumns)};
  const int column = at % kWordsOfTile * kMaskWordColumns;
  const int key = at / kWordsOfTile * kBlockKeys + column;
  return {kStripRows * line, kBiasRows ? min(p.sq - kStripRows * line, kStripRows) : +kStripRows, key,
          min(p.sk - key, min(kBlockKeys - column, kMaskWordColumns))};
}

// A bit for each of four bytes, 1 where it is not 0.
__device__ __forceinline__ u32 bits_of_bytes(u32 x) {
  const u32 ones = (((x & 0x7f7f7f7f) + 0x7f7f7f7f) | x) >> 7 & 0x01010101;
  return ones * 0x10204080 >> 28;
}

// The bits of 16 keys of a row, of which there are `keys`.
__device__ __forceinline__ u32 load_bits(const unsigned char* at, long long stride, int keys, bool aligned) {
  if (aligned && keys >= 16) {
    const uint4 x = *reinterpret_cast<const uint4*>(at);
    return bits_of_bytes(x.x) | bits_of_bytes(x.y) << 4 | bits_of_bytes(x.z) << 8 | bits_of_bytes(x.w) << 12;
  }
  u32 bits = 0;
#pragma unroll 4
  for (int i = 0; i < 16; ++i)
    if (i < keys && at[i * stride] != 0) bits |= 1u << i;
  return bits;
}

// Of a row's bits of 64 keys those of a thread's columns, in the order of half a word.
__device__ __forceinline__ u32 half_of_columns(u32 low, u32 high) {
  const u32 a = low >> thread_column() & 0x03030303, b = high >> thread_column() & 0x03030303;
  return ((a | a >> 14) & 0x0f0f) | ((b | b >> 14) & 0x0f0f) << 4;
}

// A CTA takes cells of a line.
extern "C" __global__ void __launch_bounds__(kMaskThreads) fulgur_pack_mask(const __grid_constant__ TileMapParams p) {
  let_next_kernel_start();
  __shared__ KeyBits bits_of_rows[kCells][kStripRows][4];
  const MaskBits& to = p.expression.bits;
  const MaskShape& of = p.mask;
  const int chunks = (of.cells + kCells - 1) / kCells;
  const int line = int(blockIdx.x / chunks) % of.lines, map = int(blockIdx.x / chunks) / of.lines;
  const int first = int(blockIdx.x % chunks) * kCells;
  const int batch = map / of.heads, head = map % of.heads;
  const unsigned char* const mask =
      static_cast<const unsigned char*>(p.bias.data) + batch * p.bias.batch + head * p.bias.head;
  const long long words = batch * to.batch + head * to.head + line * to.strip + (long long)(first) * kMaskThreads;
  const bool aligned = p.bias.key == 1 && ((reinterpret_cast<u64>(mask) | u64(p.bias.row)) & 15) == 0;
  const int warp = threadIdx.x / 32;

  u32 loaded[kCells][2];
#pragma unroll
  for (int i = 0; i < kCells; ++i) {
    const Cell cell = cell_of(p, line, first + i);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = int(threadIdx.x) / 4 + 32 * half, column = int(threadIdx.x) % 4 * 16;
      const bool has = first + i < of.cells && row < cell.rows && column < cell.keys;
      const unsigned char* const at =
          mask + (cell.row + row) * p.bias.row + (cell.key + column) * p.bias.key;
      loaded[i][half] = has ? load_bits(at, p.bias.key, cell.keys - column, aligned) : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kCells; ++i) {
    if (first + i >= of.cells) break;
    const Cell cell = cell_of(p, line, first + i);
    bool shows = false, hides = false;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = int(threadIdx.x) / 4 + 32 * half, column = int(threadIdx.x) % 4 * 16;
      const u32 all = (1u << min(max(cell.keys - column, 0), 16)) - 1;
      if (row < cell.rows) {
        shows = shows || loaded[i][half] != 0;
        hides = hides || loaded[i][half] != all;
      }
      bits_of_rows[i][row][threadIdx.x % 4] = static_cast<KeyBits>(row < cell.rows ? loaded[i][half] : all);
    }
    const int state = (__any_sync(0xffffffff, shows) ? +kShowsSome : 0) |
                      (__any_sync(0xffffffff, hides) ? +kHidesSome : 0);
    if (threadIdx.x % 32 == 0)
      reinterpret_cast<unsigned char*>(to.states + words / kMaskThreads + i)[warp] =
          static_cast<unsigned char>(state);
  }
  __syncthreads();
  const int r = int(warp_row() + thread_row());
#pragma unroll
  for (int i = 0; i < kCells; ++i) {
    if (first + i >= of.cells) break;
    u32 word = 0;
    if constexpr (kMapByKeys) {
#pragma unroll
      for (int bit = 0; bit < 16; ++bit) {
        const int row = (bit % 8 / 2 * 2 + bit / 8) * 8 + int(thread_column()) + bit % 2;
        const u32 keys = u32(bits_of_rows[i][row][warp]) >> thread_row();
        word |= ((keys & 1) | (keys & 0x100) << 8) << bit;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const KeyBits* const row = bits_of_rows[i][r + 8 * half];
        word |= half_of_columns(row[0] | u32(row[1]) << 16, row[2] | u32(row[3]) << 16) << 16 * half;
      }
    }
    to.words[words + i * kMaskThreads + threadIdx.x] = word;
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

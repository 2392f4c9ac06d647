// A bool mask packed to bits in the order of accumulators (attention/mask_bits.cuh), and its map of tiles
// (host_device/tile_map.h). The mask is cut into cells of 64 rows x 64 keys, of which each thread of a warpgroup has a
// word of bits. It is read once: with the words of a cell each warp stores whether it shows and whether it hides some
// key (MaskStates), and the map is made of these states alone.
//
// kernel_config.h has the constants of host_device/tile_map.h, and
//   kBiasRows       1: each query has a row of the mask; 0: all have the same
#include "kernel_config.h"
#include "attention/fragment.cuh"
#include "attention/pages.cuh"
#include "maps/map_words.cuh"

enum : int {
  kWordsOfTile = kMapByKeys ? 1 : mask_words(kBlockKeys),
  kCells = 8,   // of a line, that a CTA packs
  kChunk = 16,  // keys that a thread loads at a time
  kChunksOfCell = kMaskWordColumns / kChunk,
  kChunksOfTile = kMapByKeys ? +kChunksOfCell : kBlockKeys / kChunk,
  kRows = kMapByKeys ? kCells * kStripRows : +kStripRows,
  kChunks = kMapByKeys ? +kChunksOfCell : kCells / kWordsOfTile * kChunksOfTile,  // of a row
  kRowsAtOnce = kMaskThreads / kChunks,  // rows that are loaded together: a thread has a chunk of one
  kLoads = (kRows + kRowsAtOnce - 1) / kRowsAtOnce,
  // The shape of the bits in shared memory: [chunks][rows] by keys, else [rows][cells], so that threads read few words,
  // which lie in different banks.
  kLines = kMapByKeys ? +kChunks : +kRows,
  kColumns = kMapByKeys ? kRows / 4 + 2 : kCells + 1,
};
static_assert(kCells % kWordsOfTile == 0 && kRowsAtOnce > 0 && kCells <= 32);

using KeyBits = unsigned short;  // a bit for each key of a chunk

// The bits of a chunk of four rows (kMapByKeys), or of the four chunks of a cell in a row.
struct alignas(8) FourBits {
  KeyBits of[kChunksOfCell];
};
using PartBits = FourBits[kLines][kColumns];

// A bit for each byte, 1 where the byte is not 0: dp4a adds the highest bits of the bytes with the weights of the bits.
__device__ __forceinline__ u32 bits_of_bytes(const uint4& x) {
  const auto highest = [](u32 bytes) { return (((bytes & 0x7f7f7f7f) + 0x7f7f7f7f) | bytes) & 0x80808080; };
  const u32 low = __dp4a(highest(x.y), 0x80402010u, __dp4a(highest(x.x), 0x08040201u, 0u));
  const u32 high = __dp4a(highest(x.w), 0x80402010u, __dp4a(highest(x.z), 0x08040201u, 0u));
  return (low + (high << 8)) >> 7;
}

// Ones for the keys of a chunk that exist, where `keys` exist from its first one on.
__device__ __forceinline__ u32 ones_of_chunk(int keys) { return (1u << min(max(keys, 0), +kChunk)) - 1; }

// The rows and keys of the mask that a CTA packs: the first ones, and how many of them exist.
struct Part {
  int row, rows;
  int key, keys;
};

// Loads the bits of all chunks of a part: with `wide` a chunk by one load, and all of these before the first is used,
// else key by key. Rows that do not exist see all keys that exist.
template <bool wide>
__device__ __forceinline__ void load_part(const DenseBias& bias, const unsigned char* mask, const Part& part,
                                          PartBits& bits_of) {
  const int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks, keys = part.keys - chunk * kChunk;
  if (first >= kRowsAtOnce) return;
  const unsigned char* at = mask + (part.row + first) * bias.row + (part.key + chunk * kChunk) * bias.key;
  const u32 ones = ones_of_chunk(keys);
  const int in_tile = chunk % kChunksOfTile;
  const int cell = chunk / kChunksOfTile * kWordsOfTile + in_tile / kChunksOfCell;
  const auto store = [&](int row, u32 bits) {
    if (row >= kRows) return;
    KeyBits& to = kMapByKeys ? bits_of[chunk][row / 4].of[row % 4] : bits_of[row][cell].of[in_tile % kChunksOfCell];
    to = static_cast<KeyBits>(bits);
  };
  if constexpr (wide) {
    uint4 loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      loaded[i] = {0, 0, 0, 0};
      if (first + i * kRowsAtOnce < part.rows && keys > 0) loaded[i] = *reinterpret_cast<const uint4*>(at);
      at += kRowsAtOnce * bias.row;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int row = first + i * kRowsAtOnce;
      store(row, row < part.rows ? bits_of_bytes(loaded[i]) : ones);
    }
  } else {
#pragma unroll 1
    for (int row = first; row < kRows; row += kRowsAtOnce) {
      unsigned char loaded[kChunk];
#pragma unroll
      for (int j = 0; j < kChunk; ++j) loaded[j] = row < part.rows && j < keys ? at[j * bias.key] : 0;
      u32 bits = 0;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) bits |= u32(loaded[j] != 0) << j;
      store(row, row < part.rows ? bits : ones);
      at += kRowsAtOnce * bias.row;
    }
  }
}

// The word of a thread from the bits of 64 keys in its rows r and r + 8: the bits of its columns.
__device__ __forceinline__ u32 word_of_columns(const uint2& row, const uint2& row8) {
  const auto own = [](u32 x, u32 y) {
    const u32 fours = (x >> thread_column() & 0x03030303) | (y >> thread_column() & 0x03030303) << 2;
    return fours | fours >> 4;
  };
  return __byte_perm(own(row.x, row8.x), own(row.y, row8.y), 0x6420);
}

// The word of a thread for a cell of the CTA. With kMapByKeys rows and keys are transposed: a thread has bits r and
// r + 8 of the 16 keys of its warp, and finds those of two rows in 32 bits.
__device__ __forceinline__ u32 word_of_cell(const PartBits& bits_of, int cell) {
  if constexpr (kMapByKeys) {
    u32 word = 0;
#pragma unroll
    for (int eight = 0; eight < 8; ++eight) {
      const int row = kStripRows * cell + 8 * eight + int(thread_column());
      const u32 two = *reinterpret_cast<const u32*>(&bits_of[threadIdx.x / 32][row / 4].of[row % 4]);
      // Bits 0, 8, 16 and 24 are of keys r and r + 8 of a row, and of the next one: bits 0, 2, 1 and 3 of four.
      word |= (two >> thread_row() & 0x01010101) * 0x01040208 >> 24 << 4 * eight;
    }
    return word;
  } else {
    // A cell that the tile does not fill has bits of keys after the tile, which no kernel reads.
    const auto bits_of_row = [&](int row) { return *reinterpret_cast<const uint2*>(&bits_of[row][cell]); };
    const int row = int(warp_row() + thread_row());
    return word_of_columns(bits_of_row(row), bits_of_row(row + 8));
  }
}

// The bits of a thread's word whose rows and keys exist.
__device__ __forceinline__ u32 bits_that_exist(const Part& part, int cell) {
  // Rows and columns of accumulators; a word has a bit for half of the columns of each of two rows.
  const int tile = cell / kWordsOfTile, word = cell % kWordsOfTile;
  const int rows = (kMapByKeys ? part.keys : part.rows) - int(warp_row() + thread_row());
  const int max_columns =
      kMapByKeys ? +kMaskWordColumns : min(kBlockKeys - word * kMaskWordColumns, +kMaskWordColumns);
  const int columns = min(kMapByKeys ? part.rows - kStripRows * cell
                                     : part.keys - tile * kBlockKeys - word * kMaskWordColumns,
                          max_columns);
  if (rows > 8 && columns == max_columns) return u32((u64(1) << max_columns / 2) - 1);
  const u64 ones = columns >= kMaskWordColumns ? ~u64(0) : (u64(1) << max(columns, 0)) - 1;
  const uint2 all = {u32(ones), u32(ones >> 32)}, none = {0, 0};
  return word_of_columns(rows > 0 ? all : none, rows > 8 ? all : none);
}

// A CTA packs kCells cells of a line.
extern "C" __global__ void __launch_bounds__(kMaskThreads) fulgur_pack_mask(const __grid_constant__ TileMapParams p) {
  let_next_kernel_start();
  __shared__ FourBits bits_of_rows[kLines][kColumns];
  const MaskBits& to = p.expression.bits;
  const MaskShape& of = p.mask;
  const int parts = (of.cells + kCells - 1) / kCells;  // of a line
  int line = int(blockIdx.x) / parts, batch = 0, head = 0;
  const int first = (int(blockIdx.x) - line * parts) * kCells;
  if (of.batches * of.heads > 1) {
    const int map = line / of.lines;
    line -= map * of.lines;
    batch = map / of.heads;
    head = map - batch * of.heads;
  }
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
  const int cells = min(of.cells - first, +kCells), lane = threadIdx.x % 32;
  int state = 0;  // of the cell of this lane
#pragma unroll
  for (int i = 0; i < kCells; ++i) {
    if (i >= cells) break;
    const u32 word = word_of_cell(bits_of_rows, i), exists = bits_that_exist(part, i);
    to.words[words + i * kMaskThreads + threadIdx.x] = word;
    const int shows = __any_sync(0xffffffff, (word & exists) != 0) ? +kShowsSome : 0;
    const int hides = __any_sync(0xffffffff, (~word & exists) != 0) ? +kHidesSome : 0;
    if (lane == i) state = shows | hides;
  }
  if (lane < cells)
    reinterpret_cast<unsigned char*>(to.states + words / kMaskThreads + lane)[threadIdx.x / 32] =
        static_cast<unsigned char>(state);
}

// The state of a tile by those of its cells.
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
#pragma unroll
    for (int i = 0; i < kBlockKeys / kMaskWordColumns; ++i)
#pragma unroll
      for (int j = 0; j < kBlockRows / kStripRows; ++j) {
        const int key = kBlockKeys * key_tile / kMaskWordColumns + i, row = first + j;
        if (key <= keys && row <= last) state |= states[key * strip + row];
      }
  } else {
#pragma unroll
    for (int i = 0; i < kBlockStrips; ++i)
#pragma unroll
      for (int word = 0; word < kWordsOfTile; ++word)
        if (first + i <= last) state |= states[(first + i) * strip + key_tile * kWordsOfTile + word];
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

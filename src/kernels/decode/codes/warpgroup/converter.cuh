// Codes on the warpgroup path: a warp that loads copies the codes and scales of its keys of K or V to a ring of its
// own, codes by TMA where it can address them, some tiles ahead, and converts them to the tiles of f16 that wgmma
// reads, up to 32 keys at a time. A lane converts a key or a part of its columns; eight successive lanes have
// successive keys, which share no banks.
//
// Scales multiply the numbers, divided by a power of 2 that the largest of them is below. That is the factor of the
// key's scores, or of its P. The keys of a tile that a warp converts share it, unless their scales are far apart, or
// heads are wide: warps take longer to find it there than the products with factors do.
#pragma once
#include "decode/codes/warpgroup/natural_numbers.cuh"
#include "decode/loads/warpgroup_loads.cuh"

// Successive keys that a warp converts at a time: several lanes have a key where there are few or heads are wide.
template <int tensor>
constexpr int kRunKeys = 32 / max_of(32 / min_of(int(LaneLoader::kKeysOfLoader), 32), columns_of(tensor) > 128 ? 4 : 1);

enum : int { kKeysShareFactors = kBlockKeys > 32 && max_of(kHeadDim, kValueDim) <= 128 };

// The exponent of the factor that the keys of a tile share which a warp converts, as f32 has it.
struct SharedExponent {
  bool exists;  // else each key has its own
  int biased;
};

// What a lane converts of a key: its columns, or a part of these where they are many or keys fewer than lanes.
template <int tensor>
class KeyPart {
 public:
  using Chunks = CodeChunks<tensor>;
  static constexpr Element kType = Chunks::kType;
  using Numbers = NaturalNumbers<kType>;
  enum : int {
    kWarpKeys = LaneLoader::kKeysOfLoader,
    kKeys = kRunKeys<tensor>,
    kLanes = 32 / kKeys,  // that have a key
    kRounds = kWarpKeys / kKeys,
    kColumns = kLanes == 1 ? int(columns_of(tensor)) : columns_of(tensor) > 32 * kLanes ? 64 : 32,
    kParts = (columns_of(tensor) + kColumns - 1) / kColumns,  // the last one may have fewer columns
    kPieces = kColumns / Numbers::kColumns,                   // of 16 bytes of codes
    kWholeParts = columns_of(tensor) % kColumns == 0,
    kGroups = scale_count(tensor),
    kZero = tensor == kOfK ? kZeroOfK : kZeroOfV,
    kScales = kGroups > 0,
    kZeroPoints = scale_count(kZero) > 0,
  };
  static_assert(columns_of(tensor) % Numbers::kColumns == 0 && kParts <= kLanes);

  // Loads the codes, scales and zero points of number `key` of the tile. Rows of blocks begin `begin` bytes after a
  // multiple of 16.
  __device__ __forceinline__ void load(u32 codes, u32 scales, int key, int part, u32 begin) {
    if (part >= kParts) {  // there are more lanes than parts, and nothing to convert
      max_scale_ = 0;
      return;
    }
    load_codes(codes, key, part, begin);
    if constexpr (kScales) {
      max_scale_ = max_scale_of_key<tensor>(scales, key);
#pragma unroll
      for (int i = 0; i < kPartGroups; ++i) {
        scales_[i] = load_scale<tensor>(scales, key, group(part, i));
        if (kZeroPoints) zero_points_[i] = load_scale<kZero>(scales, key, group(part, i));
      }
    } else if constexpr (kZeroPoints) {
      zero_points_[0] = load_scale<kZero>(scales, key, 0);
    }
  }
  // Stores the numbers and the factor.
  __device__ __forceinline__ void convert(u32 numbers, u32 factors, int key, int part, SharedExponent shared) {
    // The numbers are divided by 2^exponent.
    const int exponent = !kScales ? 0 : (shared.exists ? shared.biased : exponent_of(max_scale_)) - 127;
    const int columns = kParts == kLanes && kWholeParts ? int(kColumns) : columns_of(tensor) - part * kColumns;
    // Parts are multiples of 32 columns, which are half of a panel.
    const int half = part * (kColumns / 32);
    const u32 row = (numbers + swizzled(key, 0) ^ half % 2 * 64) + half / 2 * kPanelBytes;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      u32 codes[4], x[Numbers::kWords];
      piece(i, part, codes);
      const int of_part = i * Numbers::kColumns / kScaleColumns;
      numbers_of(codes, exponent, of_part, x);
#pragma unroll
      for (int j = 0; j < Numbers::kWords; j += 4) {
        const int column = i * Numbers::kColumns + 2 * j;
        if (column < columns) store_shared16((row ^ column % 64 / 8 * 16) + column / 64 * kPanelBytes, x + j);
      }
    }
    // A number and its bias or zero point, times infinity, would be NaN.
#pragma unroll
    for (int i = 0; kFuses && i < kPartGroups; ++i) {
      if (is_finite(i)) continue;
#pragma unroll 1
      for (int column = i * kScaleColumns; column < min(columns, (i + 1) * kScaleColumns); column += 2) {
        const u32 at = (row ^ column % 64 / 8 * 16) + column / 64 * kPanelBytes + column % 8 * 2;
        store_shared(at, int(Half::multiply(load_shared(at), Half::pack(scales_[i], scales_[i]))));
      }
    }
    if (kScales && part == 0) store_shared(factors + 4 * key, exponent + 127 << 23);
  }

  // The exponent that the warp's keys of a tile share: that of the largest scale, unless others are so far below that
  // their numbers would lose bits, or it is beyond 2^48 or 2^-48, where sums of P times it would underflow. Hidden
  // keys, which may have any scale, spoil no others. First of keys that the lanes have loaded, all at once.
  __device__ __forceinline__ SharedExponent shared_exponent() const { return shared_by_lanes(max_scale_, max_scale_); }
  static __device__ __forceinline__ SharedExponent shared_exponent(u32 scales, int first_key) {
    float largest = 0, least = infinity();
#pragma unroll
    for (int key = threadIdx.x % 32; key < kWarpKeys; key += 32) {
      const float scale = max_scale_of_key<tensor>(scales, first_key + key);
      if (scale < infinity()) largest = fmaxf(largest, scale);
      if (scale > 0) least = fminf(least, scale);
    }
    return shared_by_lanes(largest, least);
  }

 private:
  enum : int {
    kFuses = kScales && Numbers::kIntegers,  // a scale multiplies the number and what is added to it at once
    kFusesBias = kFuses && !kZeroPoints,
    kIntegerExponent = kFusesBias ? 9 : 0,  // of what f16 has no room for in a scale times 2^24
    kGroupColumns = columns_of(tensor) / max_of(kGroups, 1),
    // Columns of a part that surely have one scale.
    kScaleColumns = kGroups <= 1 || kGroupColumns % kColumns == 0 ? int(kColumns)
                    : kColumns % kGroupColumns == 0               ? int(kGroupColumns)
                                                                  : int(Numbers::kColumns),
    kPartGroups = kColumns / kScaleColumns,
    kBlockBytes = Chunks::kIsBlocks ? block_bytes(kType) : kBlockColumns * bits_of(kType) / 8,  // of 32 columns
    kPartBytes = kColumns / kBlockColumns * kBlockBytes,
    kLoadBytes = kParts == 1 || kPartBytes % 16 == 0 ? 16 : 4,  // that begin at a multiple of them in each part
    kWords = Chunks::kIsBlocks ? (kPartBytes + kLoadBytes - 1) / kLoadBytes * (kLoadBytes / 4) : 4 * kPieces,
    // Rows that begin in the middle of 16 bytes are loaded from there, and moved to the first words.
    kMoves = Chunks::kIsBlocks && BlockRows<tensor>::kPiece == kMiddle && kLoadBytes == 16,
    kMovesWord = may_begin_in_middle(columns_of(tensor), 4),  // else two words or none
  };

  // The exponent of the power of 2 that scales up to this one are divided by.
  static __device__ __forceinline__ int exponent_of(float scale) {
    const float finite = scale < infinity() ? scale : 0;
    return (__float_as_int(within_exponents_of_p(finite)) >> 23) + 1 + kIntegerExponent;
  }
  // The largest scale, and the least one that is not 0, of a lane's keys.
  static __device__ __forceinline__ SharedExponent shared_by_lanes(float largest, float least) {
    constexpr int kFar = bits_of(kType) == 4 && kFusesBias ? 4 : 8;
    const int of_all = int(__reduce_max_sync(0xffffffff, u32(exponent_of(largest))));
    const bool far = least > 0 && least < infinity() && exponent_of(least) + kFar < of_all;
    return {!__any_sync(0xffffffff, far) && u32(of_all) - (127 - 48) < 96, of_all};
  }
  __device__ __forceinline__ bool is_finite(int i) const { return fabsf(scales_[i]) < infinity(); }
  // Makes numbers of 16 bytes of codes, with a scale and a zero point over 2^exponent.
  __device__ __forceinline__ void numbers_of(const u32 (&codes)[4], int exponent, int of_part,
                                             u32 (&x)[Numbers::kWords]) const {
    const auto twice = [](float value) { return Half::pack(value, value); };
    const float inverse = __int_as_float(127 - exponent << 23);
    const float scale = !kScales ? 1 : kFuses && !is_finite(of_part) ? 0x1p-10f : scales_[of_part] * inverse;
    if constexpr (kFuses) {
      // (u - bias) * scale of u 2^-24. With a zero point u becomes code 2^-10 first: the number is rounded once.
      using Times = typename Numbers::Times;
      constexpr float kMinusBias = Codes<kType>::kBias * -0x1p-10f;
      const u32 factor = kZeroPoints ? 0x74007400 : twice(scale * 0x1p24f);  // 2^14
      const u32 offset = kZeroPoints ? twice(kMinusBias) : Half::multiply(factor, Codes<kType>::minus_bias(0));
      const Times times(factor);
      Numbers::subnormal(codes, x);
#pragma unroll
      for (int j = 0; j < Numbers::kWords; ++j) x[j] = Half::fma(x[j], times.of_word(j), offset);
      if constexpr (kZeroPoints) {
        const u32 f16_scale = twice(scale * 0x1p10f);
        const u32 zero = twice(zero_points_[of_part] * Half::low(f16_scale) * -0x1p-10f);
#pragma unroll
        for (int j = 0; j < Numbers::kWords; ++j) x[j] = Half::fma(x[j], f16_scale, zero);
      }
    } else {
      Numbers::convert(codes, x);
#pragma unroll
      for (int j = 0; kZeroPoints && j < Numbers::kWords; ++j) x[j] = Half::add(x[j], twice(-zero_points_[of_part]));
    }
#pragma unroll
    for (int j = 0; kScales && !Numbers::kIntegers && j < Numbers::kWords; ++j)
      x[j] = Half::multiply(x[j], twice(scale));
  }

  static __device__ __forceinline__ int group(int part, int i) {
    if (kParts == 1) return i * kScaleColumns / kGroupColumns;
    return min((part * kColumns + i * kScaleColumns) / kGroupColumns, kGroups - 1);
  }
  __device__ __forceinline__ void load_codes(u32 codes, int key, int part, u32 begin) {
    if constexpr (Chunks::kIsBlocks) {
      // The padding after a row takes what the last load reads too much.
      const u32 first = codes + key * Chunks::kPitch + part * kPartBytes / 4 * 4 + (kMoves ? 0 : begin);
#pragma unroll
      for (int i = 0; i < kWords; i += kLoadBytes / 4) {
        const u32 end_of_row = codes + (key + 1) * Chunks::kPitch;
        const u32 at = kWholeParts ? first + 4 * i : min(first + 4 * i, end_of_row - kLoadBytes);
        load_shared_words<kLoadBytes / 4>(at, words_ + i);
      }
      if constexpr (kMoves) {
#pragma unroll
        for (int i = 0; i < kWords; ++i) words_[i] = begin >= 8 ? words_[min(i + 2, kWords - 1)] : words_[i];
#pragma unroll
        for (int i = 0; kMovesWord && i < kWords; ++i)
          words_[i] = begin % 8 > 0 ? words_[min(i + 1, kWords - 1)] : words_[i];
      }
    } else {
      constexpr int kOfRow = Chunks::kPanelChunks;
      const int first = part * kPieces;
      const u32 row = codes + chunk_place<Chunks::kRowBytes>(key, 0);
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const int chunk = kParts == 1 ? i : min(first + i, columns_of(tensor) / Numbers::kColumns - 1);
        const int panel = chunk / kOfRow * (kBlockKeys * Chunks::kRowBytes);
        load_shared16((row ^ 16 * (chunk % kOfRow)) + panel, words_ + 4 * i);
      }
    }
  }
  // The i-th 16 bytes of codes. Blocks lie at any multiple of 2 bytes.
  __device__ __forceinline__ void piece(int i, int part, u32 (&codes)[4]) const {
    if constexpr (Chunks::kIsBlocks) {
      constexpr int kOfBlock = bits_of(kType) / 4;
      const int begin = i / kOfBlock * kBlockBytes + 2 + i % kOfBlock * 16;
      const int odd = kPartBytes % 4 == 0 ? 0 : part % 2 * 2;
      const u32 selector = 0x3210 + 0x1111 * (begin % 4 + odd);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        codes[j] = kPartBytes % 4 == 0 && begin % 4 == 0
                       ? words_[begin / 4 + j]
                       : __byte_perm(words_[begin / 4 + j], words_[min(begin / 4 + j + 1, kWords - 1)], selector);
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j] = words_[4 * i + j];
    }
  }

  u32 words_[kWords];
  float max_scale_, scales_[kPartGroups], zero_points_[kPartGroups];
};

// Where the factors of a tile lie that the keys of each warp share, 0 if they do not.
template <int tensor>
__device__ __forceinline__ u32 shared_factors(u32 buffers, u32 stage) {
  return buffers + kLayout.shared_factors + 4 * kTileLoaders * ((tensor == kOfV ? kKStages : 0) + stage);
}

// The ring of codes of a warp: its keys of K or of V, as many tiles ahead as there are stages.
template <int tensor>
class CodesRing {
 public:
  __device__ __forceinline__ CodesRing(const LaneLoader& load, u32 buffers)
      : load_(load),
        codes_(buffers + kLayout.codes),
        full_(buffers + full_of(tensor == kOfV, load.first_key() / LaneLoader::kKeysOfLoader)) {
#pragma unroll 1
    for (int i = 0; i < kCodeStages; ++i) start();
  }

  // Whether there is a tile to convert.
  __device__ __forceinline__ bool more() const { return tiles_ > 0; }
  // Sets up the barriers of the rings of a warp group.
  static __device__ __forceinline__ void init(u32 buffers) {
    for (int i = 0; kBoxKeys > 0 && i < kTileLoaders * kCodeStages; ++i)
      mbarrier_init(buffers + full_of(tensor == kOfV, 0) + 8 * i, 1);
  }
  // Waits for the next tile.
  __device__ __forceinline__ void wait() const {
    if constexpr (kByLanes) async_copy_wait<kCodeStages - 1>();
    if constexpr (kBoxKeys > 0) mbarrier_wait(full_ + 8 * stage_, parity_);
    if constexpr (kHalfScales) load_.take_lower_halves(u32(upper_halves_ >> kHalfBits * (kCodeStages - 1)), scales());
    __syncwarp();
    if constexpr (BlockRows<tensor>::kPiece == 2) {
      load_.align_rows<tensor>(codes());
      __syncwarp();
    }
    if constexpr (kClears) {
      const int keys = ends_ >> kKeyBits * (kCodeStages - 1) & (1 << kKeyBits) - 1;
      if (keys > 0) {
        const int end = load_.first_key() + LaneLoader::kKeysOfLoader;
        clear_rows<tensor>(codes(), end - keys, end, threadIdx.x % 32, 32);
        fence_async_proxy();
        __syncwarp();
      }
    }
  }
  // Loads the lane's part of a key of this tile.
  __device__ __forceinline__ void load(KeyPart<tensor>& to, int key, int part) const {
    to.load(codes(), scales_of_tile(), key, part, begin());
  }
  // The exponent that the warp's keys of this tile share.
  __device__ __forceinline__ SharedExponent shared_exponent() const {
    return KeyPart<tensor>::shared_exponent(scales_of_tile(), load_.first_key());
  }
  // Starts the copies of another tile in place of this one, whose numbers have been stored.
  __device__ __forceinline__ void next() {
    --tiles_;
    start();
  }

 private:
  enum : int {
    kHalfBits = LaneLoader::kHalfBits,
    kHalfScales = kKScaleType == kF16 || kVScaleType == kF16 || kKZeroPointType == kF16 || kVZeroPointType == kF16,
    kByLanes = kBoxKeys == 0 || kLayout.scale_bytes > 0,  // lanes copy scales at least
    kClears = kBoxKeys > 0 && tensor == kOfV && kMayBeNan<tensor>,
    kMiddles = BlockRows<tensor>::kPiece == kMiddle,
    kKeyBits = 8,
  };
  static_assert(kHalfBits * kCodeStages <= 64 && kKeyBits * kCodeStages <= 64);

  // The barriers of a warp.
  static __device__ __forceinline__ constexpr u32 full_of(bool of_v, int warp) {
    return kLayout.code_full + (of_v * kTileLoaders + warp) * (8 * kCodeStages);
  }

  __device__ __forceinline__ u32 codes() const {
    return codes_ + stage_ * kLayout.code_bytes + (tensor == kOfV ? kLayout.coded_v : 0);
  }
  __device__ __forceinline__ u32 scales() const {
    return codes_ + stage_ * kLayout.code_bytes + kLayout.coded_scales;
  }
  // How far after a multiple of 16 bytes rows of this tile begin.
  __device__ __forceinline__ u32 begin() const { return u32(begins_ >> 4 * (kCodeStages - 1)) % 16; }
  __device__ __forceinline__ u32 scales_of_tile() const {
    return scales_in_rows(tensor) ? codes() + begin() : scales();
  }
  __device__ __forceinline__ void start() {
    upper_halves_ <<= kHalfBits;
    if constexpr (kClears) ends_ <<= kKeyBits;
    if constexpr (kMiddles) begins_ <<= 4;
    if (load_.more()) {
      if constexpr (kLayout.scale_bytes > 0)
        upper_halves_ |= load_.copy_scales<tensor == kOfK, tensor == kOfV>(scales());
      if constexpr (kBoxKeys > 0)
        load_.copy_boxes_of_warp<tensor>(codes(), full_ + 8 * stage_);
      else
        load_.copy<tensor>(codes());
      if constexpr (kClears) ends_ |= load_.keys_after_end();
      if constexpr (kMiddles) begins_ |= load_.begin_of_row<tensor>();
      load_.next();
      ++tiles_;
    }
    if constexpr (kByLanes) async_copy_commit();
    if (++stage_ == kCodeStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  LaneLoader load_;
  u32 codes_, full_;
  int stage_ = 0;   // of the next tile to convert, whose place the next tile to load takes
  u32 parity_ = 1;  // of the boxes of that tile: 0 after the first round
  int tiles_ = 0;   // in flight
  // Of these, the last one in the lowest bits: what copy_scales returned, how many of the warp's keys no sequence has,
  // and how far after a multiple of 16 bytes rows begin.
  unsigned long long upper_halves_ = 0, ends_ = 0;
  u32 begins_ = 0;
};

static_assert(!kConverts || !kKeysShareFactors ||
              (kLayout.code_full + 16 * kTileLoaders * kCodeStages <= kLayout.shared_factors &&
               kTileLoaders * (kKStages + kVStages) <= 16));

// Loads and converts K or V of a warp group.
template <int tensor, class To>
__device__ __forceinline__ void convert_codes(const LaneLoader& load, To to, u32 factors) {
  using Part = KeyPart<tensor>;
  constexpr bool kShares = kKeysShareFactors && Part::kScales;
  CodesRing<tensor> codes(load, to.smem);
  const int lane = threadIdx.x % 32, part = lane / Part::kKeys;
#pragma unroll 1
  while (codes.more()) {
    codes.wait();
    SharedExponent shared = {};
    if constexpr (kShares && Part::kRounds > 1) shared = codes.shared_exponent();
#pragma unroll 1
    for (int round = 0; round < Part::kRounds; ++round) {
      const int key = load.first_key() + round * Part::kKeys + lane % Part::kKeys;
      Part of_key;
      codes.load(of_key, key, part);
      if constexpr (kShares && Part::kRounds == 1) shared = of_key.shared_exponent();
      if (round == 0) to.wait_empty();
      of_key.convert(to.address(), to.smem + factors + to.ring.stage() * (kBlockKeys * 4), key, part, shared);
    }
    if (kShares && lane == 0)
      store_shared(shared_factors<tensor>(to.smem, to.ring.stage()) + 4 * (load.first_key() / Part::kWarpKeys),
                   shared.exists ? shared.biased << 23 : 0);
    __syncwarp();
    mbarrier_arrive_if(to.full(), threadIdx.x % 32 == 0);  // the warpgroups fence what they read for wgmma
    to.advance();
    codes.next();
  }
}

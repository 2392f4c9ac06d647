// The formulas of the schedules of the decode kernels (decode/schedule/).
//
// A q block is a block of rows with the keys that it sees. Stream-K lays the q blocks end to end, each as long as its
// keys in chunks and kTileOverhead for its beginning and end, and gives every CTA a slice of equal length. A slice may
// begin and end inside q blocks, of which it has splits. Which slice has a chunk is a formula, so that nobody but the
// CTAs themselves needs the lengths (LeanAttention, arXiv 2405.10480).
#pragma once
#include "host_device/mask.h"

namespace fulgur::kernels {

enum : int {
  kChunkKeys = 64,       // keys of a chunk, at least
  kTileOverhead = 1,     // chunks that a q block counts for in addition to its keys
  kMaxSlices = 320,      // the most slices, and so the most splits of a q block
  kMinSplitChunks = 16,  // InvariantSplits: chunks of a split, at least
  kMaxSplits = 64,       // the most splits of a q block that decode/combine.cu combines
  kFillSequences = 64,   // SplitToFill: the most sequences, one or two for each lane of a warp
  // InvariantSplits of packed keys: so many keys have room for one split of each kv head. Q blocks of several splits
  // have more than twice as many keys, and so all their splits lie in the room of their own keys.
  kPackedSplitKeys = kMinSplitChunks * kChunkKeys / 2,
};

// The keys of a chunk: whole tiles, as many as have kChunkKeys or more.
FULGUR_SHARED int chunk_keys(int block_keys) { return (kChunkKeys + block_keys - 1) / block_keys * block_keys; }

// `count` slices, of which the first `longer` have a chunk more than `each`.
struct Slices {
  int count, each, longer;
};

// No slice is empty, lest a q block have splits that no CTA computes.
FULGUR_SHARED Slices slices_of(int chunks, int ctas) {
  const int count = min_of(chunks, ctas);
  return count == 0 ? Slices{0, 0, 0} : Slices{count, chunks / count, chunks % count};
}

FULGUR_SHARED int slice_begin(const Slices& slices, int slice) {
  return slices.each * slice + min_of(slice, slices.longer);
}

FULGUR_SHARED int slice_of_chunk(const Slices& slices, int chunk) {
  const int rest = chunk - slices.longer * (slices.each + 1);
  return rest < 0 ? chunk / (slices.each + 1) : slices.longer + rest / slices.each;
}

// Whether whole q blocks, dealt out to the CTAs in turn, take at most a sixteenth longer than equal slices: `chunks`
// are those of all q blocks, `longest` those of the longest one.
FULGUR_SHARED bool round_robin_is_even(int q_blocks, int longest, int chunks, int ctas) {
  const long long rounds = (q_blocks + ctas - 1) / ctas;
  return 16 * rounds * longest * ctas <= 17 * (long long)(chunks);
}

// Dynamic: the most splits of a q block that the last CTA at it combines; those of q blocks with more all CTAs combine
// at the end.
enum : int { kFewSplits = 8 };

// Dynamic: the most chunks of a split, where all q blocks have `chunks`: three quarters of what a CTA has in all. A q
// block is split where it has half as many again, so that there are never more than two such splits for each CTA.
FULGUR_SHARED int dynamic_max_chunks(int chunks, int ctas, int at_least) {
  return max_of(chunks / ctas - chunks / ctas / 4 + 1, at_least);
}

// Dynamic: how many splits of equal length a q block has.
FULGUR_SHARED int dynamic_splits(int chunks, int max_chunks) {
  if (chunks < max_chunks + (max_chunks + 1) / 2) return 1;  // as most have: divisions take long
  return int(u32(chunks + max_chunks / 2) / u32(max_chunks));
}

// Dynamic: where q blocks are about as long as each other, the last round may have few of them. How many of the last
// sequences have their q blocks split: those of the round, where it has q blocks for less than half of the CTAs.
FULGUR_SHARED int last_round_sequences(int sequences, int heads, int ctas) {
  const int q_blocks = sequences * heads;
  const int last = q_blocks % ctas;
  return q_blocks > ctas && 2 * last < ctas ? (last + heads - 1) / heads : 0;
}

// Dynamic: the splits of one of these `q_blocks`, so that every CTA has one: none shorter than an eighth of what a CTA
// has in all.
FULGUR_SHARED int last_round_splits(int chunks, int max_chunks, int at_least, int q_blocks, int ctas) {
  return max_of(1, min_of(min_of(ctas / q_blocks, int(kFewSplits)), chunks / max_of(max_chunks / 6, at_least)));
}

// Chunks of the keys [begin, end) of a q block, whose borders are those of the sequence.
struct Chunks {
  int first, count;
};

FULGUR_SHARED Chunks chunks_of(const KeyRange& keys, int keys_per_chunk) {
  if (keys.begin >= keys.end) return {0, 0};
  const int first = keys.begin / keys_per_chunk;
  return {first, (keys.end + keys_per_chunk - 1) / keys_per_chunk - first};
}

// The chunks of a q block that a slice has: none where `any` is false. A q block without keys is in one slice, which
// has {0, 0} of it, as some CTA has to store its zeros.
struct ChunkRange {
  int begin, end;
  FULGUR_SHARED bool any() const { return end >= 0; }
};

// What the slice [begin, end) has of a q block of `count` chunks that stands at `at`. A q block without keys is in the
// slice in which it begins.
FULGUR_SHARED ChunkRange chunks_in_slice(int at, int count, int begin, int end) {
  if (count == 0) return {0, at >= begin && at < end ? 0 : -1};
  const int keys = at + kTileOverhead;
  const int from = max_of(begin - keys, 0);
  const int to = min_of(end - keys, count);
  return to > from ? ChunkRange{from, to} : ChunkRange{0, -1};
}

// The splits of a q block, each of `chunks` chunks, of which the last one may have fewer.
struct Splits {
  int count, chunks;
};

// InvariantSplits: the most splits of a q block of so many chunks, and its splits: each has about kMinSplitChunks or
// more where there are several.
FULGUR_SHARED int max_splits(int chunks) {
  return max_of(1, min_of((chunks + kMinSplitChunks - 1) / kMinSplitChunks, int(kMaxSplits)));
}
FULGUR_SHARED Splits invariant_splits(int chunks) {
  const int count = max_splits(chunks);
  const int each = (chunks + count - 1) / count;
  return {each == 0 ? 1 : (chunks + each - 1) / each, each};
}

// Divides numbers that are not negative by a number of the host's, as a product. The quotient is exact up to 2^31 / by,
// and one too large at most beyond.
struct Divisor {
  int by;
  u32 inverse;
};

FULGUR_SHARED Divisor divisor(int by) { return {by, u32(((u64(1) << 31) + u32(by) - 1) / u32(by))}; }
FULGUR_SHARED int quotient(int x, const Divisor& divisor) {
  return int(u64(u32(x)) * divisor.inverse >> 31);
}

// SplitToFill: the most chunks of a split, where all q blocks have `chunks` and want `splits` splits. If that is the
// number of CTAs less that of q blocks, there are never more splits than CTAs, as each q block rounds up once.
FULGUR_SHARED int fill_max_chunks(int chunks, const Divisor& splits) {
  return max_of(quotient(chunks + splits.by - 1, splits), 1);
}

// SplitToFill: the splits of a q block. Few splits are made equal, as the last one may be much shorter than the others.
FULGUR_SHARED Splits fill_splits(int chunks, int max_chunks) {
  const auto rounded_up = [](int x, int by) { return int(u32(x + by - 1) / u32(by)); };
  const Splits splits = {max_of(rounded_up(chunks, max_chunks), 1), max_chunks};
  if (splits.count == 1 || max_chunks <= splits.count) return splits;
  const int each = rounded_up(chunks, splits.count);
  return {rounded_up(chunks, each), each};
}

// InvariantSplits: where a split of a q block at `at` begins, whose slice has all of it; and the first split in a slice
// that begins at `begin`, which is after the last one where there is none.
FULGUR_SHARED int split_begin(int at, const Splits& splits, int split) {
  return split == 0 ? at : at + kTileOverhead + split * splits.chunks;
}
FULGUR_SHARED int first_split(int at, const Splits& splits, int begin) {
  if (at >= begin) return 0;
  return splits.chunks == 0 ? 1 : max_of(1, (begin - at - kTileOverhead + splits.chunks - 1) / splits.chunks);
}

}  // namespace fulgur::kernels

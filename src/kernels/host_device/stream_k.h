// How the keys of a launch are shared out among CTAs that stay for all of it.
//
// A q block is a block of rows with the keys that it sees. Q blocks stand after each other, each as long as its keys in
// chunks and an entry that stands for its beginning and end. The slice of a CTA is a stretch of all that, as long as
// every other: it begins and ends inside q blocks, and each of these it computes a part of. Which slice a chunk is in
// is a formula, so that nobody but the CTAs themselves need know the lengths (stream-K; LeanAttention, arXiv
// 2405.10480).
#pragma once
#include "host_device/band.h"

namespace fulgur::kernels {

enum : int {
  kChunkKeys = 64,     // the least of a chunk
  kTileOverhead = 1,    // what a q block takes with its keys
  kMaxSlices = 320,  // so many parts a q block may have
  kMinSplitChunks = 16,   // the least of a split
  kMaxSplits = 64,   // of a q block that another kernel puts together
  kFillSequences = 64,  // most, of splits that fill the card: a lane of a warp has one or two
  // Of packed keys, for each of which there is room for a split of each kv head: q blocks of more than one split have
  // more than twice as many, and so begin in the room of their own keys and end there.
  kPackedSplitKeys = kMinSplitChunks * kChunkKeys / 2,
};

// How q blocks are cut besides: not at all; where each q block's own keys say, so that its bits depend on nothing else;
// where the keys of all q blocks say, into about as many splits as there are CTAs, each of which has one at most.
enum : int { kSplitBySlices = 0, kInvariantSplits = 1, kSplitToFill = 2 };

// The keys of a chunk: it is as many tiles as have kChunkKeys or more, so that work tiles begin and end where tiles do.
FULGUR_SHARED int chunk_keys(int block_keys) { return (kChunkKeys + block_keys - 1) / block_keys * block_keys; }

// `count` slices, of which the first `longer` have a chunk more than `each`.
struct Slices {
  int count, each, longer;
};

// No slice is empty, lest a q block have parts that nobody computes.
FULGUR_SHARED Slices slices_of(int chunks, int blocks) {
  const int count = min_of(chunks, blocks);
  return count == 0 ? Slices{0, 0, 0} : Slices{count, chunks / count, chunks % count};
}

FULGUR_SHARED int slice_begin(const Slices& slices, int slice) {
  return slices.each * slice + min_of(slice, slices.longer);
}

FULGUR_SHARED int slice_of_chunk(const Slices& slices, int unit) {
  const int rest = unit - slices.longer * (slices.each + 1);
  return rest < 0 ? unit / (slices.each + 1) : slices.longer + rest / slices.each;
}

// Whether q blocks that are taken whole, one after the other by each CTA, take hardly longer than equal slices:
// `chunks` are those of all q blocks, `longest` those of one.
FULGUR_SHARED bool round_robin_is_even(int lines, int longest, int chunks, int blocks) {
  const long long rounds = (lines + blocks - 1) / blocks;
  return 16 * rounds * longest * blocks <= 17 * (long long)(chunks);
}

// Q blocks go by the dynamic scheduler as splits, mostly one each. Where a q block has more, the last CTA at it puts up
// to so many together; where it has still more, all CTAs do at the end.
enum : int { kFewSplits = 8 };

// The most chunks of a split of q blocks that go by the dynamic scheduler, of which all have `chunks`: three quarters
// of what a CTA has in all. A q block is cut where it has half as many again, so that there are never more than two
// splits of cut q blocks for each CTA.
FULGUR_SHARED int dynamic_max_chunks(int chunks, int blocks, int at_least) {
  return max_of(chunks / blocks - chunks / blocks / 4 + 1, at_least);
}

// And how many splits such a q block has, which are slices of it.
FULGUR_SHARED int dynamic_splits(int chunks, int max_chunks) {
  if (chunks < max_chunks + (max_chunks + 1) / 2) return 1;  // as most have: divisions take long
  return int(u32(chunks + max_chunks / 2) / u32(max_chunks));
}

// Of q blocks that go by the dynamic scheduler and are about as long as each other a last round may have few: the q
// blocks of so many of the last sequences are cut, where it has less than half as many as there are CTAs.
FULGUR_SHARED int last_round_sequences(int sequences, int heads, int blocks) {
  const int lines = sequences * heads;
  const int last = lines % blocks;
  return lines > blocks && 2 * last < blocks ? (last + heads - 1) / heads : 0;
}

// And into so many splits each, so that every CTA has one of these `q blocks`: no shorter than an eighth of what
// it has in all.
FULGUR_SHARED int last_round_splits(int chunks, int max_chunks, int at_least, int lines, int blocks) {
  return max_of(1, min_of(min_of(blocks / lines, int(kFewSplits)), chunks / max_of(max_chunks / 6, at_least)));
}

// Units of the keys [begin, end) of a q block, whose borders are those of the sequence.
struct Chunks {
  int first, count;
};

FULGUR_SHARED Chunks chunks_of(const KeyRange& keys, int of_unit) {
  if (keys.begin >= keys.end) return {0, 0};
  const int first = keys.begin / of_unit;
  return {first, (keys.end + of_unit - 1) / of_unit - first};
}

// The chunks of a q block, of `count`, that a slice computes. A q block without keys has one that computes none of it:
// {0, 0} there, {0, -1} elsewhere.
struct ChunkRange {
  int begin, end;
  FULGUR_SHARED bool any() const { return end >= 0; }
};

// Of a q block that stands at `at`, the slice [begin, end) computes the chunks that lie in it; a q block without keys
// is with the slice that it begins in.
FULGUR_SHARED ChunkRange chunks_in_slice(int at, int count, int begin, int end) {
  if (count == 0) return {0, at >= begin && at < end ? 0 : -1};
  const int keys = at + kTileOverhead;
  const int from = max_of(begin - keys, 0);
  const int to = min_of(end - keys, count);
  return to > from ? ChunkRange{from, to} : ChunkRange{0, -1};
}

// What a q block is cut into: splits of so many chunks each.
struct Splits {
  int count, chunks;
};

// kInvariantSplits: about kMinSplitChunks or more where there is more than one.
FULGUR_SHARED int max_splits(int chunks) {
  return max_of(1, min_of((chunks + kMinSplitChunks - 1) / kMinSplitChunks, int(kMaxSplits)));
}
FULGUR_SHARED Splits invariant_splits(int chunks) {
  const int count = max_splits(chunks);
  const int each = (chunks + count - 1) / count;
  return {each == 0 ? 1 : (chunks + each - 1) / each, each};
}

// Divides numbers that are not negative by what the host knows, as products: one too many at most, and none up to
// 2^31 / by.
struct Divisor {
  int by;
  u32 inverse;
};

FULGUR_SHARED Divisor divisor(int by) { return {by, u32(((u64(1) << 31) + u32(by) - 1) / u32(by))}; }
FULGUR_SHARED int quotient(int x, const Divisor& divisor) {
  return int(u64(u32(x)) * divisor.inverse >> 31);
}

// kSplitToFill: the most chunks of a split, of q blocks that have `chunks` in all. With `splits` the CTAs less
// the q blocks there are never more of them than CTAs, as each q block rounds up once.
FULGUR_SHARED int fill_max_chunks(int chunks, const Divisor& pieces) {
  return max_of(quotient(chunks + pieces.by - 1, pieces), 1);
}

// And what that makes of a q block. Where there are few splits the last one may be much shorter than the others.
FULGUR_SHARED Splits fill_splits(int chunks, int max_chunks) {
  const auto rounded_up = [](int x, int by) { return int(u32(x + by - 1) / u32(by)); };
  const Splits pieces = {max_of(rounded_up(chunks, max_chunks), 1), max_chunks};
  if (pieces.count == 1 || max_chunks <= pieces.count) return pieces;
  const int each = rounded_up(chunks, pieces.count);
  return {rounded_up(chunks, each), each};
}

// kInvariantSplits: a split is with the slice that it begins in: where it stands, of a q block at `at`, and the first
// one that a slice from `begin` on computes, which is after the last where there is none.
FULGUR_SHARED int split_begin(int at, const Splits& pieces, int piece) {
  return piece == 0 ? at : at + kTileOverhead + piece * pieces.chunks;
}
FULGUR_SHARED int first_split(int at, const Splits& pieces, int begin) {
  if (at >= begin) return 0;
  return pieces.chunks == 0 ? 1 : max_of(1, (begin - at - kTileOverhead + pieces.chunks - 1) / pieces.chunks);
}

}  // namespace fulgur::kernels

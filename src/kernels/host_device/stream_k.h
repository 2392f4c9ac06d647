// The formulas of the schedules of the decode kernels (decode/schedule/).
//
// A q block is a block of query rows together with the keys that these rows see. Stream-K lays the q blocks end to end;
// the length of each is the number of its chunks of keys plus kTileOverhead for its prologue and epilogue. Every CTA
// computes a slice of equal length, which may begin and end inside a q block and then computes a split of it. The slice
// that contains a chunk follows from a formula, so only the CTAs read the lengths (LeanAttention, arXiv 2405.10480).
#pragma once
#include "host_device/mask.h"

namespace fulgur::kernels {

enum : int {
  kChunkKeys = 64,       // min keys of a chunk
  kTileOverhead = 1,     // length of a q block beyond that of its keys, in chunks
  kMaxSlices = 320,      // also the max number of splits of a q block
  kMinSplitChunks = 16,  // InvariantSplits: min chunks of a split
  kMaxSplits = 64,       // max splits of a q block that decode/combine.cu combines
  kFillSequences = 64,   // SplitToFill: max sequences, one or two for each lane of a warp
  // InvariantSplits with packed keys: the workspace has a slot for one split of each kv head per so many keys. A q
  // block of several splits has more keys per split, so the slots of its own keys suffice.
  kPackedSplitKeys = kMinSplitChunks * kChunkKeys / 2,
};

// The number of keys of a chunk: the smallest whole number of tiles with at least kChunkKeys keys.
FULGUR_SHARED int chunk_keys(int block_keys) { return (kChunkKeys + block_keys - 1) / block_keys * block_keys; }

// `count` slices of `each` chunks; the first `longer` of them have one chunk more.
struct Slices {
  int count, each, longer;
};

// No slice is empty: otherwise a q block could have splits that no CTA computes.
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

// Whether whole q blocks, assigned to the CTAs round-robin, take at most a sixteenth longer than equal slices. `chunks`
// is the number of chunks of all q blocks, `longest` that of the longest one.
FULGUR_SHARED bool round_robin_is_even(int q_blocks, int longest, int chunks, int ctas) {
  const long long rounds = (q_blocks + ctas - 1) / ctas;
  return 16 * rounds * longest * ctas <= 17 * (long long)(chunks);
}

// Dynamic: the max number of splits of a q block that the CTA which finishes last combines alone. The splits of other q
// blocks are combined by all CTAs at the end of the kernel.
enum : int { kFewSplits = 8 };

// Dynamic: the max number of chunks of a split: three quarters of the average number per CTA, where all q blocks
// together have `chunks`. A q block is split if it has at least one and a half times as many, so that there are never
// more than two such splits per CTA.
FULGUR_SHARED int dynamic_max_chunks(int chunks, int ctas, int at_least) {
  return max_of(chunks / ctas - chunks / ctas / 4 + 1, at_least);
}

// Dynamic: the number of splits of a q block, all of about the same length.
FULGUR_SHARED int dynamic_splits(int chunks, int max_chunks) {
  if (chunks < max_chunks + (max_chunks + 1) / 2) return 1;  // the common case, without a slow division
  return int(u32(chunks + max_chunks / 2) / u32(max_chunks));
}

// Dynamic: where q blocks are about equally long, CTAs compute them in rounds. If the last round has q blocks for less
// than half of the CTAs, its q blocks are split: those of the last sequences, whose number this is.
FULGUR_SHARED int last_round_sequences(int sequences, int heads, int ctas) {
  const int q_blocks = sequences * heads;
  const int last = q_blocks % ctas;
  return q_blocks > ctas && 2 * last < ctas ? (last + heads - 1) / heads : 0;
}

// Dynamic: the number of splits of each of the `q_blocks` of that last round, so that every CTA computes one. None is
// shorter than an eighth of the average number of chunks per CTA.
FULGUR_SHARED int last_round_splits(int chunks, int max_chunks, int at_least, int q_blocks, int ctas) {
  return max_of(1, min_of(min_of(ctas / q_blocks, int(kFewSplits)), chunks / max_of(max_chunks / 6, at_least)));
}

// The chunks that contain the keys of a q block. Chunks are aligned to the first key of the sequence.
struct Chunks {
  int first, count;
};

FULGUR_SHARED Chunks chunks_of(const KeyRange& keys, int keys_per_chunk) {
  if (keys.begin >= keys.end) return {0, 0};
  const int first = keys.begin / keys_per_chunk;
  return {first, (keys.end + keys_per_chunk - 1) / keys_per_chunk - first};
}

// The chunks of a q block that a slice contains; none if any() is false. A q block without keys is in one slice, as the
// range {0, 0}, because some CTA has to store its zeros.
struct ChunkRange {
  int begin, end;
  FULGUR_SHARED bool any() const { return end >= 0; }
};

// The chunks that the slice [begin, end) contains of a q block of `count` chunks which begins at `at`. A q block
// without keys is in the slice in which it begins.
FULGUR_SHARED ChunkRange chunks_in_slice(int at, int count, int begin, int end) {
  if (count == 0) return {0, at >= begin && at < end ? 0 : -1};
  const int keys = at + kTileOverhead;
  const int from = max_of(begin - keys, 0);
  const int to = min_of(end - keys, count);
  return to > from ? ChunkRange{from, to} : ChunkRange{0, -1};
}

// The splits of a q block: `count` of them, each of `chunks` chunks; the last one may have fewer.
struct Splits {
  int count, chunks;
};

// InvariantSplits: the max number of splits of a q block of so many chunks, and its splits. If there are several, each
// has about kMinSplitChunks chunks or more.
FULGUR_SHARED int max_splits(int chunks) {
  return max_of(1, min_of((chunks + kMinSplitChunks - 1) / kMinSplitChunks, int(kMaxSplits)));
}
FULGUR_SHARED Splits invariant_splits(int chunks) {
  const int count = max_splits(chunks);
  const int each = (chunks + count - 1) / count;
  return {each == 0 ? 1 : (chunks + each - 1) / each, each};
}

// Divides non-negative numbers by a divisor that the host knows, by a multiplication. The quotient of a number up to
// 2^31 / by is exact; that of a larger one may be too large by one.
struct Divisor {
  int by;
  u32 inverse;
};

FULGUR_SHARED Divisor divisor(int by) { return {by, u32(((u64(1) << 31) + u32(by) - 1) / u32(by))}; }
FULGUR_SHARED int quotient(int x, const Divisor& divisor) {
  return int(u64(u32(x)) * divisor.inverse >> 31);
}

// SplitToFill: the max number of chunks of a split, where all q blocks together have `chunks` and are to have `splits`
// splits. If that is the number of CTAs minus that of q blocks, there are never more splits than CTAs, because each q
// block rounds up once.
FULGUR_SHARED int fill_max_chunks(int chunks, const Divisor& splits) {
  return max_of(quotient(chunks + splits.by - 1, splits), 1);
}

// SplitToFill: the splits of a q block. A few long ones are made equally long; the last one might otherwise be much
// shorter than the others.
FULGUR_SHARED Splits fill_splits(int chunks, int max_chunks) {
  const auto rounded_up = [](int x, int by) { return int(u32(x + by - 1) / u32(by)); };
  const Splits splits = {max_of(rounded_up(chunks, max_chunks), 1), max_chunks};
  if (splits.count == 1 || max_chunks <= splits.count) return splits;
  const int each = rounded_up(chunks, splits.count);
  return {rounded_up(chunks, each), each};
}

// InvariantSplits: a split belongs to the slice in which it begins. Where a split begins, of a q block that begins at
// `at`; and the first split that belongs to a slice which begins at `begin`, splits.count or more if there is none.
FULGUR_SHARED int split_begin(int at, const Splits& splits, int split) {
  return split == 0 ? at : at + kTileOverhead + split * splits.chunks;
}
FULGUR_SHARED int first_split(int at, const Splits& splits, int begin) {
  if (at >= begin) return 0;
  return splits.chunks == 0 ? 1 : max_of(1, (begin - at - kTileOverhead + splits.chunks - 1) / splits.chunks);
}

}  // namespace fulgur::kernels

// How the keys of a launch are shared out among CTAs that stay for all of it.
//
// A line is a block of rows with the keys that it sees. Lines stand after each other, each as long as its keys in
// units and an entry that stands for its beginning and end. The share of a CTA is a stretch of all that, as
// long as every other: it begins and ends inside lines, and each of these it computes a part of. Which share a unit is
// in is a formula, so that nobody but the CTAs themselves need know the lengths (stream-K; LeanAttention,
// arXiv 2405.10480).
#pragma once
#include "host_device/band.h"

namespace fulgur::kernels {

enum : int {
  kUnitKeys = 64,     // the least of a unit
  kEntryUnits = 1,    // what a line takes with its keys
  kMaxShares = 320,  // so many parts a line may have
  kPieceUnits = 16,   // the least of a piece
  kMaxPieces = 64,   // of a line that another kernel puts together
  kFillingSequences = 64,  // most, of pieces that fill the card: a lane of a warp has one or two
  // Of packed keys, for each of which there is room for a piece of each kv head: lines of more than one piece have more
  // than twice as many, and so begin in the room of their own keys and end there.
  kPackedPieceKeys = kPieceUnits * kUnitKeys / 2,
};

// How lines are cut besides: not at all; where each line's own keys say, so that its bits depend on nothing else; where
// the keys of all lines say, into about as many pieces as there are CTAs, each of which has one at most.
enum : int { kNoPieces = 0, kOwnPieces = 1, kFillingPieces = 2 };

// The keys of a unit: it is as many tiles as have kUnitKeys or more, so that items begin and end where tiles do.
FULGUR_SHARED int unit_keys(int block_keys) { return (kUnitKeys + block_keys - 1) / block_keys * block_keys; }

// `count` shares, of which the first `longer` have a unit more than `each`.
struct Shares {
  int count, each, longer;
};

// No share is empty, lest a line have parts that nobody computes.
FULGUR_SHARED Shares shares_of(int units, int blocks) {
  const int count = min_of(units, blocks);
  return count == 0 ? Shares{0, 0, 0} : Shares{count, units / count, units % count};
}

FULGUR_SHARED int share_begin(const Shares& shares, int share) {
  return shares.each * share + min_of(share, shares.longer);
}

FULGUR_SHARED int share_of_unit(const Shares& shares, int unit) {
  const int rest = unit - shares.longer * (shares.each + 1);
  return rest < 0 ? unit / (shares.each + 1) : shares.longer + rest / shares.each;
}

// Whether lines that are taken whole, one after the other by each CTA, take hardly longer than equal shares:
// `units` are those of all lines, `longest` those of one.
FULGUR_SHARED bool whole_lines_do(int lines, int longest, int units, int blocks) {
  const long long rounds = (lines + blocks - 1) / blocks;
  return 16 * rounds * longest * blocks <= 17 * (long long)(units);
}

// Lines go by turns as pieces, mostly one each. Where a line has more, the last CTA at it puts up to so many
// together; where it has still more, all CTAs do at the end.
enum : int { kFewParts = 8 };

// The most units of a piece of lines that go by turns, of which all have `units`: three quarters of what a CTA
// has in all. A line is cut where it has half as many again, so that there are never more than two pieces of cut lines
// for each CTA.
FULGUR_SHARED int turn_units(int units, int blocks, int at_least) {
  return max_of(units / blocks - units / blocks / 4 + 1, at_least);
}

// And how many pieces such a line has, which are shares of it.
FULGUR_SHARED int turn_pieces(int units, int max_units) {
  if (units < max_units + (max_units + 1) / 2) return 1;  // as most have: divisions take long
  return int(u32(units + max_units / 2) / u32(max_units));
}

// Of lines that go by turns and are about as long as each other a last round may have few: the lines of so many of the
// last sequences are cut, where it has less than half as many as there are CTAs.
FULGUR_SHARED int last_round(int sequences, int heads, int blocks) {
  const int lines = sequences * heads;
  const int last = lines % blocks;
  return lines > blocks && 2 * last < blocks ? (last + heads - 1) / heads : 0;
}

// And into so many pieces each, so that every CTA has one of these `lines`: no shorter than an eighth of what
// it has in all.
FULGUR_SHARED int last_pieces(int units, int max_units, int at_least, int lines, int blocks) {
  return max_of(1, min_of(min_of(blocks / lines, int(kFewParts)), units / max_of(max_units / 6, at_least)));
}

// Units of the keys [begin, end) of a line, whose borders are those of the sequence.
struct Units {
  int first, count;
};

FULGUR_SHARED Units units_of(const KeyRange& keys, int of_unit) {
  if (keys.begin >= keys.end) return {0, 0};
  const int first = keys.begin / of_unit;
  return {first, (keys.end + of_unit - 1) / of_unit - first};
}

// The units of a line, of `count`, that a share computes. A line without keys has one that computes none of it: {0, 0}
// there, {0, -1} elsewhere.
struct UnitRange {
  int begin, end;
  FULGUR_SHARED bool any() const { return end >= 0; }
};

// Of a line that stands at `at`, the share [begin, end) computes the units that lie in it; a line without keys is with
// the share that it begins in.
FULGUR_SHARED UnitRange units_in_share(int at, int count, int begin, int end) {
  if (count == 0) return {0, at >= begin && at < end ? 0 : -1};
  const int keys = at + kEntryUnits;
  const int from = max_of(begin - keys, 0);
  const int to = min_of(end - keys, count);
  return to > from ? UnitRange{from, to} : UnitRange{0, -1};
}

// What a line is cut into: pieces of so many units each.
struct Pieces {
  int count, units;
};

// kOwnPieces: about kPieceUnits or more where there is more than one.
FULGUR_SHARED int max_pieces(int units) {
  return max_of(1, min_of((units + kPieceUnits - 1) / kPieceUnits, int(kMaxPieces)));
}
FULGUR_SHARED Pieces pieces_of(int units) {
  const int count = max_pieces(units);
  const int each = (units + count - 1) / count;
  return {each == 0 ? 1 : (units + each - 1) / each, each};
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

// kFillingPieces: the most units of a piece, of lines that have `units` in all. With `pieces` the CTAs less
// the lines there are never more of them than CTAs, as each line rounds up once.
FULGUR_SHARED int filling_units(int units, const Divisor& pieces) {
  return max_of(quotient(units + pieces.by - 1, pieces), 1);
}

// And what that makes of a line. Where there are few pieces the last one may be much shorter than the others.
FULGUR_SHARED Pieces filling_pieces(int units, int max_units) {
  const auto rounded_up = [](int x, int by) { return int(u32(x + by - 1) / u32(by)); };
  const Pieces pieces = {max_of(rounded_up(units, max_units), 1), max_units};
  if (pieces.count == 1 || max_units <= pieces.count) return pieces;
  const int each = rounded_up(units, pieces.count);
  return {rounded_up(units, each), each};
}

// kOwnPieces: a piece is with the share that it begins in: where it stands, of a line at `at`, and the first one that a
// share from `begin` on computes, which is after the last where there is none.
FULGUR_SHARED int piece_begin(int at, const Pieces& pieces, int piece) {
  return piece == 0 ? at : at + kEntryUnits + piece * pieces.units;
}
FULGUR_SHARED int first_piece(int at, const Pieces& pieces, int begin) {
  if (at >= begin) return 0;
  return pieces.units == 0 ? 1 : max_of(1, (begin - at - kEntryUnits + pieces.units - 1) / pieces.units);
}

}  // namespace fulgur::kernels

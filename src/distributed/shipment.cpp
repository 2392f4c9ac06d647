#include "distributed/shipment.h"

#include <algorithm>
#include <span>

namespace fulgur::distributed {
namespace {

/// Bytes of a part in a buffer, padded to 64.
int64_t bytes_of(const Part& part) { return (part.bytes() + 63) / 64 * 64; }

/// Bytes of all parts, or of the parts of all targets.
template <class Parts>
int64_t bytes_of_all(const Parts& parts) {
  int64_t bytes = 0;
  for (const auto& x : parts) {
    if constexpr (requires { x.part; }) {
      bytes += bytes_of(x.part);
    } else {
      bytes += bytes_of(x);
    }
  }
  return bytes;
}

}  // namespace

Shipment::Shipment(const Group::Impl& group, Memory& memory)
    : rank_(group.rank), memory_(memory), sends_(group.ranks), receives_(group.ranks) {}

void Shipment::take(const Part& from, const Target& to) {
  to.take ? to.take(from) : memory_.copy(from, to.part);
}

std::vector<Memory::Place> Shipment::places_of(int rank) const {
  std::vector<Memory::Place> places;
  int64_t at = 0;
  for (const auto& [part, take] : receives_[rank]) {
    int64_t pieces = 0;
    each_lines(part, part.packed(part.data),
               [&](const Lines& x) { pieces += x.side_by_side() ? 1 : 2; });
    if (take || pieces > 1) return {};
    places.push_back({at, part.bytes(), part.data});
    at += bytes_of(part);
  }
  return places;
}

void Shipment::run(bool alone) {
  const auto ranks = static_cast<int>(sends_.size());
  // Where keys are gathered, consecutive ranks mostly get the same parts, which are packed once.
  std::vector<int64_t> send_at(ranks), receive_bytes(ranks);
  int64_t send_bytes = 0;
  int last = -1;
  for (int r = 0; r < ranks; ++r) {
    if (r == rank_) continue;
    const bool again = last >= 0 && sends_[r] == sends_[last];
    send_at[r] = again ? send_at[last] : send_bytes;
    if (!again) send_bytes += bytes_of_all(sends_[r]);
    last = r;
    receive_bytes[r] = bytes_of_all(receives_[r]);
  }
  std::vector<std::span<const std::byte>> sends(ranks);
  std::vector<std::span<std::byte>> receives(ranks);
  std::vector<std::vector<Memory::Place>> places(ranks);
  if (!alone) {
    std::byte* const out = memory_.buffer(Memory::kSends, send_bytes);
    int64_t packed = 0;
    for (int r = 0; r < ranks; ++r) {
      if (r == rank_) continue;
      int64_t at = send_at[r];
      for (const Part& part : sends_[r]) {
        if (send_at[r] >= packed) memory_.copy(part, part.packed(out + at));
        at += bytes_of(part);
      }
      packed = std::max(packed, at);
      sends[r] = {out + send_at[r], static_cast<size_t>(at - send_at[r])};
    }
    for (int r = 0; r < ranks; ++r) {
      if (r != rank_) places[r] = places_of(r);
    }
    receives = memory_.exchange(Memory::kSends, sends, receive_bytes, places);
  }
  take_all(receives);
}

void Shipment::run_in(Memory::Use use, const std::byte* buffer) {
  const auto ranks = static_cast<int>(sends_.size());
  std::vector<std::span<const std::byte>> sends(ranks);
  std::vector<int64_t> bytes(ranks);
  int64_t all = 0;
  for (int r = 0; r < ranks; ++r) {
    if (r == rank_) continue;
    sends[r] = {buffer, static_cast<size_t>(bytes_of_all(sends_[r]))};
    bytes[r] = bytes_of_all(receives_[r]);
    all += bytes[r];
  }
  std::byte* at = memory_.buffer(Memory::kReceives, all);
  std::vector<std::span<std::byte>> receives(ranks);
  std::vector<std::vector<Memory::Place>> places(ranks);
  for (int r = 0; r < ranks; ++r) {
    if (r == rank_) continue;
    receives[r] = {at, static_cast<size_t>(bytes[r])};
    for (const Part& part : sends_[rank_]) {
      for (int64_t b = 0; b < part.shape[0]; ++b) {  // the rows of a sequence are contiguous
        const Part rows = part.slice(0, b, 1);
        places[r].push_back({rows.data - buffer, rows.bytes(), at + b * rows.bytes()});
      }
      at += bytes_of(part);
    }
  }
  memory_.exchange(use, sends, bytes, places);
  take_all(receives);
}

void Shipment::take_all(const std::vector<std::span<std::byte>>& receives) {
  for (int r = 0; r < std::ssize(receives); ++r) {
    std::byte* at = receives[r].data();
    for (size_t i = 0; i < receives_[r].size(); ++i) {
      const Target& to = receives_[r][i];
      if (r == rank_) {
        take(sends_[r][i], to);
      } else if (!receives[r].empty()) {
        take(to.part.packed(at), to);
        at += bytes_of(to.part);
      }
    }
  }
}

}  // namespace fulgur::distributed

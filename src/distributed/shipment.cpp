#include "distributed/shipment.h"

#include <algorithm>
#include <span>

namespace fulgur::distributed {
namespace {

/// Of a part among others.
int64_t bytes_of(const Part& part) { return (part.bytes() + 63) / 64 * 64; }

template <class Parts, class Of>
int64_t bytes_of(const Parts& parts, const Of& of) {
  int64_t bytes = 0;
  for (const auto& part : parts) bytes += bytes_of(of(part));
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
  const auto itself = [](const Part& part) -> const Part& { return part; };
  const auto target = [](const Target& of) -> const Part& { return of.part; };
  // What goes to ranks side by side is the same as a rule, where keys are gathered.
  std::vector<int64_t> send_at(ranks), receive_bytes(ranks);
  int64_t send_bytes = 0;
  int last = -1;
  for (int r = 0; r < ranks; ++r) {
    if (r == rank_) continue;
    const bool again = last >= 0 && sends_[r] == sends_[last];
    send_at[r] = again ? send_at[last] : send_bytes;
    if (!again) send_bytes += bytes_of(sends_[r], itself);
    last = r;
    receive_bytes[r] = bytes_of(receives_[r], target);
  }
  std::vector<std::span<const std::byte>> sends(ranks);
  std::vector<std::span<std::byte>> receives(ranks);
  std::vector<std::vector<Memory::Place>> places(ranks);
  if (!alone) {
    std::byte* const out = memory_.room(Memory::kSends, send_bytes);
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
    receives = memory_.exchange(sends, receive_bytes, places);
  }
  for (int r = 0; r < ranks; ++r) {
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

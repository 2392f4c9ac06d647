#include "distributed/host_memory.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/convert.h"
#include "distributed/elements.h"

namespace fulgur::distributed {
namespace {

constexpr int64_t kAlignment = 64;

template <class T>
void add_lines(const Lines& x) {
  for (int64_t line = 0; line < x.count; ++line) {
    const auto* const from = reinterpret_cast<const T*>(x.from + line * x.from_pitch);
    auto* const to = reinterpret_cast<T*>(x.to + line * x.to_pitch);
    for (size_t i = 0; i < x.width / sizeof(T); ++i) to[i] += from[i];
  }
}

/// Rounds f32 to 16 bits; columns lie side by side.
template <uint16_t (*kRound)(float)>
void round_rows(const Part& from, const Part& to) {
  for (int64_t b = 0; b < from.shape[0]; ++b) {
    for (int64_t row = 0; row < from.shape[1]; ++row) {
      for (int64_t h = 0; h < from.shape[2]; ++h) {
        const auto at = [&](const Part& x) {
          return x.data +
                 (b * x.strides[0] + row * x.strides[1] + h * x.strides[2]) * size_of(x.dtype);
        };
        const auto* const x = reinterpret_cast<const float*>(at(from));
        auto* const y = reinterpret_cast<uint16_t*>(at(to));
        for (int64_t i = 0; i < from.shape[3]; ++i) y[i] = kRound(x[i]);
      }
    }
  }
}

}  // namespace

template <class Interface>
void OnHost<Interface>::copy(const Part& from, const Part& to) {
  each_lines(from, to, [](const Lines& x) {
    if (x.side_by_side()) {
      std::memcpy(x.to, x.from, x.count * x.width);
      return;
    }
    for (int64_t line = 0; line < x.count; ++line) {
      std::memcpy(x.to + line * x.to_pitch, x.from + line * x.from_pitch, x.width);
    }
  });
}

template <class Interface>
void OnHost<Interface>::sum(const Part& from, const Part& with, const Part& to) {
  if (with != to) {  // by rows that stay in a cache
    constexpr int64_t kRows = 64;
    std::vector<std::byte> room;
    for (int64_t row = 0; row < from.shape[1]; row += kRows) {
      const auto some = [&](const Part& x) {
        return x.rows(row, std::min(kRows, from.shape[1] - row));
      };
      room.resize(some(from).bytes());
      const Part sums = some(from).packed(room.data());
      copy(some(from), sums);
      sum(some(with), sums, sums);
      round(sums, some(to));
    }
    return;
  }
  if (from.dtype != to.dtype) {
    return each_element(from.tensor(), to.tensor(), [&](int64_t x, int64_t y) {
      const double sum =
          load_element(to.data, to.dtype, y) + load_element(from.data, from.dtype, x);
      store_element(to.data, to.dtype, y, sum);
    });
  }
  each_lines(from, to, [&](const Lines& x) {
    to.dtype == DType::kF64 ? add_lines<double>(x) : add_lines<float>(x);
  });
}

template <class Interface>
void OnHost<Interface>::round(const Part& from, const Part& to) {
  const bool side_by_side = from.strides[3] == 1 && to.strides[3] == 1;  // columns
  if (side_by_side && from.dtype == to.dtype) return copy(from, to);
  if (side_by_side && from.dtype == DType::kF32 && to.dtype == DType::kBF16) {
    return round_rows<bf16_from_f32>(from, to);
  }
  if (side_by_side && from.dtype == DType::kF32 && to.dtype == DType::kF16) {
    return round_rows<f16_from_f32>(from, to);
  }
  convert(from.tensor(), to.tensor());
}

template <class Interface>
void OnHost<Interface>::clear(const Part& part) {
  std::memset(part.data, 0, part.bytes());
}

template <class Interface>
void OnHost<Interface>::download(void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, bytes);
}

template <class Interface>
void OnHost<Interface>::upload(void* to, const void* from, int64_t bytes) {
  std::memcpy(to, from, bytes);
}

template class OnHost<Order>;
template class OnHost<Memory>;

HostMemory::HostMemory(Group::Impl& group) : group_(group), others_(group.ranks) {
  if (group.ranks == 1) return;
  SharedRoom mine;
  bool opened = true;
  const auto trial = [&](const auto& of) {
    try {
      of();
    } catch (const Error&) {
      opened = false;
    }
  };
  trial([&] {
    mine = SharedRoom::make(sizeof(SharedRoom::Name));
    std::memcpy(mine.data(), &mine.name(), sizeof(SharedRoom::Name));
  });
  const auto theirs = group.tell(std::vector(group.ranks, mine.name()));
  for (int r = 0; r < group.ranks; ++r) {
    if (r == group.rank) continue;
    trial([&] {
      const SharedRoom room = SharedRoom::open(theirs[r], sizeof(SharedRoom::Name));
      opened &= std::memcmp(room.data(), &theirs[r], sizeof(SharedRoom::Name)) == 0;
      opened &= theirs[r] != mine.name();
    });
  }
  const auto all = group.agree({}, {}, {opened});
  one_machine_ = std::ranges::all_of(all, [](const auto& of_rank) { return of_rank[0] == 1; });
}

std::byte* HostMemory::room(Use use, int64_t bytes) {
  if (use == kSends && one_machine_) {
    SharedRoom& room = sends_[turn_];
    if (room.bytes() < bytes || room.data() == nullptr) {
      room = SharedRoom::make(std::max<int64_t>(bytes, 1 << 16));
      fresh_ = true;
    }
    return room.data();
  }
  Room& room = rooms_[use];
  if (room.data == nullptr || room.bytes < bytes) {
    room = {};
    room = {std::unique_ptr<std::byte[]>(new std::byte[bytes + kAlignment]), bytes};
  }
  const auto address = reinterpret_cast<uintptr_t>(room.data.get());
  return room.data.get() + (kAlignment - address % kAlignment);
}

std::vector<std::span<std::byte>> HostMemory::exchange(
    Use, std::span<const std::span<const std::byte>> sends, std::span<const int64_t> bytes,
    std::span<const std::vector<Place>>) {
  if (!one_machine_) {
    const auto receives = room_to_receive(bytes);
    group_.exchange(sends, receives);
    return receives;
  }
  const SharedRoom& room = sends_[turn_];
  std::vector<Offer> mine(group_.ranks);
  for (int r = 0; r < group_.ranks; ++r) {
    mine[r] = {room.name(), room.bytes(), sends[r].empty() ? 0 : sends[r].data() - room.data(),
               std::ssize(sends[r]), fresh_};
  }
  bool fresh = std::exchange(fresh_, false);
  const std::vector<Offer> theirs = group_.tell(mine);
  std::vector<std::span<std::byte>> receives(group_.ranks);
  for (int r = 0; r < group_.ranks; ++r) {
    if (r == group_.rank) continue;
    const Offer& offer = theirs[r];
    group_.check_bytes(r, offer.bytes, bytes[r]);
    SharedRoom& other = others_[r][turn_];
    if (other.name() != offer.room) other = SharedRoom::open(offer.room, offer.size);
    receives[r] = {other.data() + offer.offset, static_cast<size_t>(offer.bytes)};
    fresh |= offer.fresh;
  }
  if (fresh) group_.meet();  // a rank that ends now has been opened by all
  turn_ = 1 - turn_;
  return receives;
}

void HostMemory::reserve(int64_t bytes, int64_t of_work) {
  reserve(common_, bytes);
  reserve(work_, of_work);
}

void HostMemory::reserve(std::span<SharedRoom> rooms, int64_t bytes) {
  if (!one_machine_ || rooms[0].bytes() >= bytes) return;
  std::optional<Error> error;
  const auto trial = [&](const auto& of) {
    try {
      of();
    } catch (const Error& failed) {
      error = failed;
    }
  };
  std::vector<int64_t> names;
  trial([&] {
    if (group_.rank != 0) return;
    for (SharedRoom& room : rooms) {
      room = SharedRoom::make(bytes);
      const SharedRoom::Name& name = room.name();
      names.insert(names.end(), {name.process, name.file, name.mark});
    }
  });
  const std::vector<int64_t> made = group_.agree(error, {}, names)[0];
  trial([&] {
    if (group_.rank == 0) return;
    for (size_t i = 0; i < rooms.size(); ++i) {
      rooms[i] = SharedRoom::open({made[3 * i], made[3 * i + 1], made[3 * i + 2]}, bytes);
    }
  });
  group_.agree(error, {}, {});
}

std::byte* HostMemory::common() {
  next_common_ = (next_common_ + 1) % kInCommon;
  return common_[next_common_].data();
}

void HostMemory::meet() { group_.meet(); }

std::unique_ptr<Order> HostMemory::computing(const Run&) {
  return std::make_unique<OnHost<Order>>();
}

}  // namespace fulgur::distributed

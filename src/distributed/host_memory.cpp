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

/// Rounds f32 to 16 bits, where columns are contiguous.
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
  if (with != to) {  // by few rows at a time, which stay in the CPU's cache
    constexpr int64_t kRows = 64;
    std::vector<std::byte> buffer;
    for (int64_t row = 0; row < from.shape[1]; row += kRows) {
      const auto some = [&](const Part& x) {
        return x.rows(row, std::min(kRows, from.shape[1] - row));
      };
      buffer.resize(some(from).bytes());
      const Part sums = some(from).packed(buffer.data());
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
  const bool contiguous = from.strides[3] == 1 && to.strides[3] == 1;
  if (contiguous && from.dtype == to.dtype) return copy(from, to);
  if (contiguous && from.dtype == DType::kF32 && to.dtype == DType::kBF16) {
    return round_rows<bf16_from_f32>(from, to);
  }
  if (contiguous && from.dtype == DType::kF32 && to.dtype == DType::kF16) {
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

template class OnHost<Queue>;
template class OnHost<Memory>;

HostMemory::HostMemory(Group::Impl& group) : group_(group), others_(group.ranks) {
  if (group.ranks == 1) return;
  SharedMemory mine;
  bool opened = true;
  const auto trial = [&](const auto& of) {
    try {
      of();
    } catch (const Error&) {
      opened = false;
    }
  };
  trial([&] {
    mine = SharedMemory::make(sizeof(SharedMemory::Name));
    std::memcpy(mine.data(), &mine.name(), sizeof(SharedMemory::Name));
  });
  const auto theirs = group.all_to_all(std::vector(group.ranks, mine.name()));
  for (int r = 0; r < group.ranks; ++r) {
    if (r == group.rank) continue;
    trial([&] {
      const SharedMemory buffer = SharedMemory::open(theirs[r], sizeof(SharedMemory::Name));
      opened &= std::memcmp(buffer.data(), &theirs[r], sizeof(SharedMemory::Name)) == 0;
      opened &= theirs[r] != mine.name();
    });
  }
  const auto all = group.agree({}, {}, {opened});
  one_machine_ = std::ranges::all_of(all, [](const auto& of_rank) { return of_rank[0] == 1; });
}

std::byte* HostMemory::buffer(Use use, int64_t bytes) {
  if (use == kSends && one_machine_) {
    SharedMemory& buffer = sends_[turn_];
    if (buffer.bytes() < bytes || buffer.data() == nullptr) {
      buffer = SharedMemory::make(std::max<int64_t>(bytes, 1 << 16));
      fresh_ = true;
    }
    return buffer.data();
  }
  Buffer& buffer = buffers_[use];
  if (buffer.data == nullptr || buffer.bytes < bytes) {
    buffer = {};
    buffer = {std::unique_ptr<std::byte[]>(new std::byte[bytes + kAlignment]), bytes};
  }
  const auto address = reinterpret_cast<uintptr_t>(buffer.data.get());
  return buffer.data.get() + (kAlignment - address % kAlignment);
}

std::vector<std::span<std::byte>> HostMemory::exchange(
    Use, std::span<const std::span<const std::byte>> sends, std::span<const int64_t> bytes,
    std::span<const std::vector<Place>>) {
  if (!one_machine_) {
    const auto receives = receive_buffers(bytes);
    group_.exchange(sends, receives);
    return receives;
  }
  const SharedMemory& buffer = sends_[turn_];
  std::vector<Offer> mine(group_.ranks);
  for (int r = 0; r < group_.ranks; ++r) {
    mine[r] = {buffer.name(), buffer.bytes(),
               sends[r].empty() ? 0 : sends[r].data() - buffer.data(), std::ssize(sends[r]),
               fresh_};
  }
  bool fresh = std::exchange(fresh_, false);
  const std::vector<Offer> theirs = group_.all_to_all(mine);
  std::vector<std::span<std::byte>> receives(group_.ranks);
  std::optional<Error> error;
  for (int r = 0; r < group_.ranks; ++r) {
    if (r == group_.rank) continue;
    const Offer& offer = theirs[r];
    group_.check_bytes(r, offer.bytes, bytes[r]);
    fresh |= offer.fresh;
    SharedMemory& other = others_[r][turn_];
    try {
      if (other.name() != offer.buffer) other = SharedMemory::open(offer.buffer, offer.size);
      receives[r] = {other.data() + offer.offset, static_cast<size_t>(offer.bytes)};
    } catch (const Error& failed) {
      error = failed;
    }
  }
  if (fresh) wait_until_opened(error);
  turn_ = 1 - turn_;
  return receives;
}

void HostMemory::wait_until_opened(const std::optional<Error>& error) {
  const auto failed = group_.all_to_all(std::vector<uint8_t>(group_.ranks, error.has_value()));
  if (error || std::ranges::count(failed, 1) > 0) group_.barrier();
  if (error) throw *error;
}

void HostMemory::reserve(int64_t bytes, int64_t of_work) {
  reserve(shared_, bytes);
  reserve(work_, of_work);
}

void HostMemory::reserve(std::span<SharedMemory> buffers, int64_t bytes) {
  if (!one_machine_ || buffers[0].bytes() >= bytes) return;
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
    for (SharedMemory& buffer : buffers) {
      buffer = SharedMemory::make(bytes);
      const SharedMemory::Name& name = buffer.name();
      names.insert(names.end(), {name.process, name.file, name.id});
    }
  });
  const std::vector<int64_t> made = group_.agree(error, {}, names)[0];
  trial([&] {
    if (group_.rank == 0) return;
    for (size_t i = 0; i < buffers.size(); ++i) {
      buffers[i] = SharedMemory::open({made[3 * i], made[3 * i + 1], made[3 * i + 2]}, bytes);
    }
  });
  group_.agree(error, {}, {});
}

std::byte* HostMemory::shared_buffer() {
  next_shared_ = (next_shared_ + 1) % kSharedBuffers;
  return shared_[next_shared_].data();
}

void HostMemory::barrier() { group_.barrier(); }

std::unique_ptr<Queue> HostMemory::compute_queue(const Run&) {
  return std::make_unique<OnHost<Queue>>();
}

}  // namespace fulgur::distributed

#include "distributed/device/signals.h"

#include <atomic>
#include <cstddef>
#include <optional>
#include <utility>

#include "cuda/device/gpu.h"

namespace fulgur::distributed {

using namespace cuda;

Signals::Signals(Group::Impl& group) : rank_(group.rank), ranks_(group.ranks) {
  const int64_t bytes = int64_t{ranks_} * ranks_ * int64_t{sizeof(Cell)};
  std::optional<Error> error;
  const auto attempt = [&](const auto& body) {
    try {
      body();
    } catch (const Error& failed) {
      error = failed;
    }
  };
  SharedRoom made;
  if (rank_ == 0) attempt([&] { made = SharedRoom::make(bytes); });
  const auto& [process, file, mark] = made.name();
  const std::vector<int64_t> name = group.agree(error, {}, {process, file, mark})[0];
  attempt([&] {
    use(rank_ == 0 ? std::move(made) : SharedRoom::open({name[0], name[1], name[2]}, bytes));
  });
  group.agree(error, {}, {});  // all have opened it
}

void Signals::use(SharedRoom room) {
  check(driver().cuMemHostRegister(room.data(), room.bytes(),
                                   CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP),
        "cuMemHostRegister");
  room_ = std::move(room);
  check(driver().cuMemHostGetDevicePointer(&on_device_, room_.data(), 0),
        "cuMemHostGetDevicePointer");
}

Signals::~Signals() {
  if (room_.data() != nullptr) driver().cuMemHostUnregister(room_.data());
}

CUdeviceptr Signals::address(const uint32_t& count) const {
  return on_device_ + (reinterpret_cast<const std::byte*>(&count) - room_.data());
}

void Signals::tell(CUstream stream, int to, What what, uint32_t count) const {
  check(driver().cuStreamWriteValue32(stream, address(cell(to, rank_).counts[what]), count, 0),
        "cuStreamWriteValue32");
}

void Signals::wait(CUstream stream, int from, What what, uint32_t count) const {
  check(driver().cuStreamWaitValue32(stream, address(cell(rank_, from).counts[what]), count,
                                     CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
}

bool Signals::told(int to, What what, uint32_t count) const {
  const uint32_t last = std::atomic_ref(cell(to, rank_).counts[what]).load();
  return static_cast<int32_t>(last - count) >= 0;  // as GPUs compare
}

void Signals::end_waits(uint32_t count) const {
  for (int from = 0; from < ranks_; ++from) {
    for (uint32_t& counted : cell(rank_, from).counts) {
      std::atomic_ref(counted).store(count + (1u << 30));  // as GPUs compare: by the difference
    }
  }
}

}  // namespace fulgur::distributed

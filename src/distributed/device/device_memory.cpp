#include "distributed/device/device_memory.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/check.h"
#include "cuda/common/call_kernel.h"
#include "cuda/common/launch.h"
#include "cuda/device/launch_memory.h"
#include "kernels/backward/add_rows_params.h"

namespace fulgur::distributed {
namespace {

using namespace cuda;

constexpr int kPriority = -8;                   // the driver takes the highest that there is
constexpr int kAddBlocks = 4;                   // of an SM
constexpr std::chrono::milliseconds kBeat{20};  // after which ranks say that they still wait

CUdeviceptr address(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

/// Rounds rows of f32, or their sums with others.
void add_rows(Gpu& gpu, CUstream stream, const Part& from, const Part* with, const Part& to) {
  if (to.bytes() == 0) return;
  const auto strided = [](const Part& x) {
    return AddedRows{x.data, static_cast<kernels::Element>(x.dtype), x.strides[0], x.strides[1],
                     x.strides[2]};
  };
  const AddRowsParams params{strided(from), strided(with == nullptr ? from : *with),
                             strided(to),   with != nullptr,
                             to.shape[0],   to.shape[1],
                             to.shape[2],   to.shape[3]};
  const CurrentContext current(gpu.context());
  launch(stream, loaded(CallKernel::kAddRows, gpu, stream), &params, {kAddBlocks * gpu.sms()},
         kAddRowsThreads, 0, "launching the kernel that adds rows");
}

/// What names the machine that a process runs on.
std::string machine() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

}  // namespace

template <class Interface>
void OnStream<Interface>::copy(const Part& from, const Part& to) {
  const CurrentContext current(gpu_.context());
  each_lines(from, to, [&](const Lines& x) {
    if (x.side_by_side()) {
      check(driver().cuMemcpyAsync(address(x.to), address(x.from), x.count * x.width, stream_),
            "cuMemcpyAsync");
      return;
    }
    if (std::min(x.from_pitch, x.to_pitch) < x.width) {  // rows that lie over each other
      for (int64_t line = 0; line < x.count; ++line) {
        check(driver().cuMemcpyAsync(address(x.to + line * x.to_pitch),
                                     address(x.from + line * x.from_pitch), x.width, stream_),
              "cuMemcpyAsync");
      }
      return;
    }
    CUDA_MEMCPY2D lines;
    lines.srcDevice = address(x.from);
    lines.srcPitch = x.from_pitch;
    lines.dstDevice = address(x.to);
    lines.dstPitch = x.to_pitch;
    lines.WidthInBytes = x.width;
    lines.Height = x.count;
    check(driver().cuMemcpy2DAsync(&lines, stream_), "cuMemcpy2DAsync");
  });
}

template <class Interface>
void OnStream<Interface>::sum(const Part& from, const Part& with, const Part& to) {
  add_rows(gpu_, stream_, from, &with, to);
}

template <class Interface>
void OnStream<Interface>::round(const Part& from, const Part& to) {
  add_rows(gpu_, stream_, from, nullptr, to);
}

template <class Interface>
void OnStream<Interface>::clear(const Part& part) {
  if (part.bytes() == 0) return;
  const CurrentContext current(gpu_.context());
  check(driver().cuMemsetD8Async(address(part.data), 0, part.bytes(), stream_), "cuMemsetD8Async");
}

template <class Interface>
void OnStream<Interface>::download(void* to, const void* from, int64_t bytes) {
  upload(to, from, bytes);
}

template <class Interface>
void OnStream<Interface>::upload(void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  const CurrentContext current(gpu_.context());
  check(driver().cuMemcpyAsync(address(to), address(from), bytes, stream_), "cuMemcpyAsync");
  finish();
}

template <class Interface>
auto OnStream<Interface>::mark() -> Mark {
  const CurrentContext current(gpu_.context());
  CUevent event = nullptr;
  check(driver().cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  Mark mark(event, [](void* made) { driver().cuEventDestroy(static_cast<CUevent>(made)); });
  check(driver().cuEventRecord(event, stream_), "cuEventRecord");
  return mark;
}

template <class Interface>
void OnStream<Interface>::after(const Mark& mark) {
  if (mark == nullptr) return;
  const CurrentContext current(gpu_.context());
  check(driver().cuStreamWaitEvent(stream_, static_cast<CUevent>(mark.get()), 0),
        "cuStreamWaitEvent");
}

template <class Interface>
void OnStream<Interface>::finish() {
  const CurrentContext current(gpu_.context());
  check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

template class OnStream<Order>;
template class OnStream<Memory>;

DeviceMemory::DeviceMemory(Group::Impl& group, int index)
    : OnStream(Gpu::at(index), nullptr),
      group_(group),
      carrier_(group.of_gpus()),
      opened_(group.ranks) {
  std::optional<Error> error;
  try {
    const CurrentContext current(gpu_.context());
    check(driver().cuStreamCreateWithPriority(&stream_, CU_STREAM_NON_BLOCKING, kPriority),
          "cuStreamCreate");
    check(driver().cuStreamCreate(&second_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  } catch (const Error& failed) {
    error = failed;
  }
  if (carrier_ != nullptr && carrier_->device() != GpuTransport::kAnyDevice &&
      carrier_->device() != index) {
    error = Error(Status::kInvalidArgument,
                  fmt::format("q: got cuda:{}, want cuda:{} as the communicator of the group",
                              index, carrier_->device()));
  }
  Fields fields;
  if (carrier_ == nullptr) fields.emplace_back("machine", machine());
  group.agree(error, fields, {});
  if (carrier_ != nullptr) return;
  const CurrentContext current(gpu_.context());
  signals_.emplace(group);
}

DeviceMemory::~DeviceMemory() {
  try {
    const CurrentContext current(gpu_.context());
    driver().cuStreamSynchronize(stream_);
    driver().cuStreamSynchronize(second_);
    signals_.reset();
    for (const auto& of_rank : opened_) {
      for (const Opened& other : of_rank) {
        if (other.data != 0) driver().cuIpcCloseMemHandle(other.data);
      }
    }
    for (const Room& room : rooms_) {
      if (room.data != 0) driver().cuMemFree(room.data);
    }
    for (const CUdeviceptr data : replaced_) driver().cuMemFree(data);
    driver().cuStreamDestroy(stream_);
    driver().cuStreamDestroy(second_);
  } catch (const Error&) {  // the process ends, and the driver has
  }
}

std::byte* DeviceMemory::room(Use use, int64_t bytes) {
  Room& room = room_of(use);
  if (room.data == 0 || room.bytes < bytes) {
    const CurrentContext current(gpu_.context());
    if (room.data != 0) replaced_.push_back(room.data);
    room = {};
    const int64_t size = std::max<int64_t>(bytes, 1 << 21);
    check(driver().cuMemAlloc(&room.data, size),
          fmt::format("{} bytes for rows of other ranks", size).c_str());
    room.bytes = size;
    if ((use == kSends || use == kStep || use == kNextStep) && carrier_ == nullptr) {
      check(driver().cuIpcGetMemHandle(&room.handle, room.data), "cuIpcGetMemHandle");
    }
  }
  if (use == kSends && signals_) {  // of the exchange before the last one
    const CurrentContext current(gpu_.context());
    each_other([&](int r) { signals_->wait(stream_, r, Signals::kTaken, count_ - 1); });
  }
  return reinterpret_cast<std::byte*>(room.data);
}

CUdeviceptr DeviceMemory::open(int rank, const Offer& offer) {
  if (offer.process == static_cast<uint64_t>(getpid())) return offer.room + offer.offset;
  Opened& other = opened_[rank].at(offer.number);
  if (other.data == 0 || std::memcmp(&other.handle, &offer.handle, sizeof(CUipcMemHandle)) != 0) {
    if (other.data != 0) check(driver().cuIpcCloseMemHandle(other.data), "cuIpcCloseMemHandle");
    other = {};
    check(
        driver().cuIpcOpenMemHandle(&other.data, offer.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
        fmt::format("opening the memory of rank {}", rank).c_str());
    other.handle = offer.handle;
  }
  return other.data + offer.offset;
}

std::vector<std::span<std::byte>> DeviceMemory::exchange(
    Use from, std::span<const std::span<const std::byte>> sends, std::span<const int64_t> bytes,
    std::span<const std::vector<Place>> places) {
  const CurrentContext current(gpu_.context());
  std::vector<int64_t> to_room(bytes.begin(), bytes.end());
  for (int r = 0; r < group_.ranks; ++r) {
    if (carrier_ == nullptr && !places[r].empty()) to_room[r] = 0;
  }
  const std::vector<std::span<std::byte>> receives = room_to_receive(to_room);
  unsettled_ = true;
  if (carrier_ != nullptr) {
    carrier_->exchange(sends, receives, stream_);
    return receives;
  }
  const Room& room = room_of(from);
  std::vector<Offer> mine(group_.ranks, {.handle = room.handle,
                                         .process = static_cast<uint64_t>(getpid()),
                                         .room = room.data,
                                         .number = room_number(from)});
  for (int r = 0; r < group_.ranks; ++r) {
    mine[r].offset = address(sends[r].data()) - room.data;
    mine[r].bytes = sends[r].size();
  }
  ++count_;
  each_other([&](int r) { signals_->tell(stream_, r, Signals::kReady, count_); });
  const std::vector<Offer> theirs = group_.tell(mine);
  turn_ = 1 - turn_;
  each_other([&](int r) {
    group_.check_bytes(r, theirs[r].bytes, bytes[r]);
    signals_->wait(stream_, r, Signals::kReady, count_);
    const auto take = [&](const Place& place) {
      if (place.bytes == 0) return;
      check(driver().cuMemcpyAsync(address(place.to), open(r, theirs[r]) + place.begin, place.bytes,
                                   stream_),
            "cuMemcpyAsync");
    };
    for (const Place& place : places[r]) take(place);
    take({0, std::ssize(receives[r]), receives[r].data()});
    signals_->tell(stream_, r, Signals::kTaken, count_);
  });
  return receives;
}

bool DeviceMemory::done() const {
  const CurrentContext current(gpu_.context());
  const CUresult result = driver().cuStreamQuery(stream_);
  if (result != CUDA_ERROR_NOT_READY) check(result, "cuStreamQuery");
  return result != CUDA_ERROR_NOT_READY;
}

bool DeviceMemory::taken() const {
  bool all = true;
  each_other([&](int r) { all = all && signals_->told(r, Signals::kTaken, count_); });
  return all;
}

void DeviceMemory::settle() {
  if (!std::exchange(unsettled_, false)) return;
  for (bool all = carrier_ != nullptr;
       !all;) {  // a rank that has left is noticed when it says nothing
    const auto end = std::chrono::steady_clock::now() + kBeat;
    char mine = 0;
    do {
      mine = taken() || done() ? 1 : 0;
      std::this_thread::yield();
    } while (mine == 0 && std::chrono::steady_clock::now() < end);
    std::vector<char> theirs = group_.tell(std::vector<char>(group_.ranks, mine));
    theirs[group_.rank] = mine;
    all = std::ranges::find(theirs, 0) == theirs.end();
  }
  if (replaced_.empty()) return;
  finish();  // what came may be taken from there yet
  const CurrentContext current(gpu_.context());
  for (const CUdeviceptr data : std::exchange(replaced_, {})) {
    check(driver().cuMemFree(data), "cuMemFree");
  }
}

void DeviceMemory::abandon() {
  try {
    const OutsideCapture outside;
    while (signals_ && !done()) signals_->end_waits(count_);
  } catch (const Error&) {  // the device does nothing more
  }
}

std::unique_ptr<Order> DeviceMemory::computing(const Run& run) {
  const CurrentContext current(gpu_.context());
  if (is_capturing(static_cast<CUstream>(run.stream))) {
    fail("stream", "is being captured, want calls of groups outside of graphs");
  }
  return std::make_unique<OnStream<Order>>(gpu_, static_cast<CUstream>(run.stream));
}

std::optional<Run> DeviceMemory::second(const Run& run) {
  Run other = run;
  other.stream = second_;
  return other;
}

}  // namespace fulgur::distributed

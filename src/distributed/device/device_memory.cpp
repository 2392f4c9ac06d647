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

constexpr int kPriority = -8;  // the driver clamps it to its highest priority
constexpr int kAddBlocks = 4;  // CTAs per SM
constexpr std::chrono::milliseconds kHeartbeat{
    20};  // period in which waiting ranks signal that they are alive

CUdeviceptr address(const void* data) { return reinterpret_cast<CUdeviceptr>(data); }

/// Rounds rows of f32 to `to`, or the sums of rows and `with`.
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

/// An id of the machine that this process runs on.
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
    if (std::min(x.from_pitch, x.to_pitch) <
        x.width) {  // overlapping rows, which a 2D copy does not take
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
  synchronize();
}

template <class Interface>
auto OnStream<Interface>::record() -> Event {
  const CurrentContext current(gpu_.context());
  CUevent handle = nullptr;
  check(driver().cuEventCreate(&handle, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  Event event(handle, [](void* made) { driver().cuEventDestroy(static_cast<CUevent>(made)); });
  check(driver().cuEventRecord(handle, stream_), "cuEventRecord");
  return event;
}

template <class Interface>
void OnStream<Interface>::wait(const Event& event) {
  if (event == nullptr) return;
  const CurrentContext current(gpu_.context());
  check(driver().cuStreamWaitEvent(stream_, static_cast<CUevent>(event.get()), 0),
        "cuStreamWaitEvent");
}

template <class Interface>
void OnStream<Interface>::synchronize() {
  const CurrentContext current(gpu_.context());
  check(driver().cuStreamSynchronize(stream_), "cuStreamSynchronize");
}

template class OnStream<Queue>;
template class OnStream<Memory>;

DeviceMemory::DeviceMemory(Group::Impl& group, int index)
    : OnStream(Gpu::at(index), nullptr),
      group_(group),
      carrier_(group.gpu_transport()),
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
    for (const Buffer& buffer : buffers_) {
      if (buffer.data != 0) driver().cuMemFree(buffer.data);
    }
    for (const CUdeviceptr data : replaced_) driver().cuMemFree(data);
    driver().cuStreamDestroy(stream_);
    driver().cuStreamDestroy(second_);
  } catch (const Error&) {  // at the end of the process the driver may be gone already
  }
}

std::byte* DeviceMemory::buffer(Use use, int64_t bytes) {
  Buffer& buffer = buffer_of(use);
  if (buffer.data == 0 || buffer.bytes < bytes) {
    const CurrentContext current(gpu_.context());
    if (buffer.data != 0) replaced_.push_back(buffer.data);
    buffer = {};
    const int64_t size = std::max<int64_t>(bytes, 1 << 21);
    check(driver().cuMemAlloc(&buffer.data, size),
          fmt::format("{} bytes for rows of other ranks", size).c_str());
    buffer.bytes = size;
    if ((use == kSends || use == kStep || use == kNextStep) && carrier_ == nullptr) {
      check(driver().cuIpcGetMemHandle(&buffer.handle, buffer.data), "cuIpcGetMemHandle");
    }
  }
  if (use == kSends &&
      signals_) {  // other ranks still read the data of the exchange before the last one
    const CurrentContext current(gpu_.context());
    each_other([&](int r) { signals_->wait(stream_, r, Signals::kTaken, count_ - 1); });
  }
  return reinterpret_cast<std::byte*>(buffer.data);
}

CUdeviceptr DeviceMemory::open(int rank, const Offer& offer) {
  if (offer.process == static_cast<uint64_t>(getpid())) return offer.buffer + offer.offset;
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
  std::vector<int64_t> to_buffer(bytes.begin(), bytes.end());
  for (int r = 0; r < group_.ranks; ++r) {
    if (carrier_ == nullptr && !places[r].empty()) to_buffer[r] = 0;
  }
  const std::vector<std::span<std::byte>> receives = receive_buffers(to_buffer);
  has_transfers_ = true;
  if (carrier_ != nullptr) {
    carrier_->exchange(sends, receives, stream_);
    return receives;
  }
  const Buffer& buffer = buffer_of(from);
  std::vector<Offer> mine(group_.ranks, {.handle = buffer.handle,
                                         .process = static_cast<uint64_t>(getpid()),
                                         .buffer = buffer.data,
                                         .number = buffer_number(from)});
  for (int r = 0; r < group_.ranks; ++r) {
    mine[r].offset = address(sends[r].data()) - buffer.data;
    mine[r].bytes = sends[r].size();
  }
  ++count_;
  each_other([&](int r) { signals_->signal(stream_, r, Signals::kReady, count_); });
  const std::vector<Offer> theirs = group_.all_to_all(mine);
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
    signals_->signal(stream_, r, Signals::kTaken, count_);
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
  each_other([&](int r) { all = all && signals_->has_signaled(r, Signals::kTaken, count_); });
  return all;
}

void DeviceMemory::complete_transfers() {
  if (!std::exchange(has_transfers_, false)) return;
  // All ranks exchange messages while they wait, so that a rank that has left is noticed.
  for (bool all = carrier_ != nullptr; !all;) {
    const auto end = std::chrono::steady_clock::now() + kHeartbeat;
    char mine = 0;
    do {
      mine = taken() || done() ? 1 : 0;
      std::this_thread::yield();
    } while (mine == 0 && std::chrono::steady_clock::now() < end);
    std::vector<char> theirs = group_.all_to_all(std::vector<char>(group_.ranks, mine));
    theirs[group_.rank] = mine;
    all = std::ranges::find(theirs, 0) == theirs.end();
  }
  if (replaced_.empty()) return;
  synchronize();  // copies from the old buffers may still run
  const CurrentContext current(gpu_.context());
  for (const CUdeviceptr data : std::exchange(replaced_, {})) {
    check(driver().cuMemFree(data), "cuMemFree");
  }
}

void DeviceMemory::abandon() {
  try {
    const OutsideCapture outside;
    while (signals_ && !done()) signals_->end_waits(count_);
  } catch (const Error&) {  // the device executes nothing any more
  }
}

std::unique_ptr<Queue> DeviceMemory::compute_queue(const Run& run) {
  const CurrentContext current(gpu_.context());
  if (is_capturing(static_cast<CUstream>(run.stream))) {
    fail("stream", "is being captured, want calls of groups outside of graphs");
  }
  return std::make_unique<OnStream<Queue>>(gpu_, static_cast<CUstream>(run.stream));
}

std::optional<Run> DeviceMemory::second_stream(const Run& run) {
  Run other = run;
  other.stream = second_;
  return other;
}

}  // namespace fulgur::distributed

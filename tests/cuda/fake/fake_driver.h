/// What the fake driver (cuda_fake_driver.cpp) records for the tests.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "cuda/driver/driver.h"

namespace fulgur::test {

/// A kernel launch.
struct FakeLaunch {
  const char* kernel;
  unsigned grid, grid_y, block, shared_bytes;
  const void* stream;
  std::vector<unsigned char> params;  ///< the first kernel argument's bytes
  bool early = false;                 ///< while the kernel before it runs
};

/// The arguments that the fake cuTensorMapEncodeTiled leaves in a tensor map.
struct FakeMap {
  const void* address;
  unsigned long long dims[4], byte_strides[3];
  unsigned box[4];
  int type, swizzle;

  static FakeMap of(const void* blob) {
    FakeMap map;
    std::memcpy(&map, blob, sizeof(map));
    return map;
  }
};
static_assert(sizeof(FakeMap) <= 128);

/// Whether a kernel may start while the one before it runs.
inline bool starts_early(const cuda::CUlaunchConfig& config) {
  return std::any_of(config.attrs, config.attrs + config.numAttrs, [](const auto& attribute) {
    return attribute.id == cuda::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION &&
           attribute.value.programmaticStreamSerializationAllowed != 0;
  });
}

/// Whether memory that the driver has allocated lies there.
bool is_allocated(const void* at);

/// What a graph holds until it is destroyed.
struct FakeUserObject {
  void* data;
  void (*destroy)(void*);
};

/// Counts since the start of the process, and launches since the last look.
struct FakeState {
  int encoded = 0, allocated = 0, freed = 0, loaded = 0, contexts = 0;
  bool record = true;
  double clock_ms = 0;  ///< as events see it
  unsigned fast_block = 0,
           fast_keys = 0;  ///< threads and Bc of launches that take a quarter as long
  std::vector<FakeLaunch> launches;
  const void* capturing = nullptr;   ///< the stream that is being captured, into one graph
  unsigned long long capture = 1;    ///< the number of that graph
  std::vector<FakeUserObject> held;  ///< by it
  int unsafe_in_capture = 0;         ///< calls that would have ended the capture

  void destroy_graph() {
    ++capture;
    for (const FakeUserObject& object : std::exchange(held, {})) object.destroy(object.data);
  }
};

/// The compute capability of the device: 90 is 9.0.
int fake_capability();

/// A call that a capture does not bear, unless its thread says that it has nothing to do with it.
void unsafe_in_capture();

}  // namespace fulgur::test

/// The fake driver's only function that is none of the driver's.
extern "C" fulgur::test::FakeState* fulgur_fake_state();

// The part of the fake driver that loads and launches kernels, which do nothing, in a millisecond.
// That which measures mma.sync says that it took FAKE_CUDA_MMA_CYCLES.
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

#include "cuda/driver/driver.h"
#include "fake_driver.h"
#include "kernels/backward/params.h"
#include "kernels/codes/convert_params.h"
#include "kernels/codes/hadamard_params.h"
#include "kernels/codes/means_params.h"
#include "kernels/common/append_params.h"
#include "kernels/common/copy_rows_params.h"
#include "kernels/common/merge_params.h"
#include "kernels/common/mma_rate_params.h"
#include "kernels/common/padding_params.h"
#include "kernels/common/upload_metadata_params.h"
#include "kernels/decode/params.h"
#include "kernels/host_device/prefix_split.h"
#include "kernels/host_device/tile_map.h"
#include "kernels/portable/forward/params.h"
#include "kernels/sm90/forward/params.h"

namespace {

using fulgur::cuda::CUlaunchConfig;
using fulgur::test::FakeMap;
using fulgur::test::FakeState;

/// The kernels there are, and the bytes of their arguments.
struct Kernel {
  const char* name;
  size_t params;
};
constexpr Kernel kKernels[] = {
    {"fulgur_append", sizeof(AppendParams)},
    {"fulgur_convert_codes", sizeof(ConvertParams)},
    {"fulgur_hadamard", sizeof(HadamardParams)},
    {"fulgur_add_means", sizeof(AddMeansParams)},
    {"fulgur_merge", sizeof(MergeParams)},
    {"fulgur_mma_rate", sizeof(MmaRateParams)},
    {"fulgur_upload_metadata", sizeof(UploadMetadataParams)},
    {"fulgur_shared_prefix", sizeof(fulgur::kernels::PrefixSplit)},
    {"fulgur_forward", sizeof(ForwardParams)},
    {"fulgur_portable_forward", sizeof(PortableForwardParams)},
    {"fulgur_portable_backward", sizeof(BackwardParams)},
    {"fulgur_wide_gradient", sizeof(BackwardParams)},
    {"fulgur_portable_bias_gradient", sizeof(BackwardParams)},
    {"fulgur_portable_reduce", sizeof(BackwardParams)},
    {"fulgur_decode", sizeof(DecodeAppendParams)},  // where the plan appends, and else more
    {"fulgur_decode_combine", sizeof(DecodeAppendParams)},
    {"fulgur_forward_copy", sizeof(ForwardCopyParams)},
    {"fulgur_forward_widen", sizeof(ForwardCopyParams)},
    {"fulgur_forward_values", sizeof(ForwardParams)},
    {"fulgur_forward_padding", sizeof(ForwardPaddingParams)},
    {"fulgur_backward_prepare", sizeof(BackwardParams)},
    {"fulgur_backward_keys", sizeof(BackwardParams)},
    {"fulgur_backward_rows", sizeof(BackwardParams)},
    {"fulgur_backward_round", sizeof(BackwardParams)},
    {"fulgur_backward_sinks", sizeof(BackwardParams)},
    {"fulgur_backward_reduce", sizeof(BackwardParams)},
    {"fulgur_backward_repair", sizeof(BackwardParams)},
    {"fulgur_node_hulls", sizeof(TileMapParams)},
    {"fulgur_pack_mask", sizeof(TileMapParams)},
    {"fulgur_tile_map", sizeof(TileMapParams)},
    {"fulgur_fused_map", sizeof(TileMapParams)},
    {"fulgur_map_of_rows", sizeof(TileMapParams)}};

std::mutex launching;

/// Whether the device runs code for an architecture: "sm_80", "sm_90a", "compute_80".
bool runs(const char* architecture) {
  const int device = fulgur::test::fake_capability();
  const bool is_ptx = std::strncmp(architecture, "compute_", 8) == 0;
  char* end = nullptr;
  const long its = std::strtol(architecture + (is_ptx ? 8 : 3), &end, 10);
  return *end == 'a' ? its == device : its <= device && (is_ptx || its / 10 == device / 10);
}

}  // namespace

extern "C" {

int cuCtxGetCurrent(void** context);

int cuModuleLoadData(void** module, const void* image) {
  // The fake NVRTC's images say what they are for.
  const std::string text(static_cast<const char*>(image), 32);
  if (text.starts_with("--gpu-architecture=") && !runs(text.c_str() + 19)) return 209;
  fulgur::test::unsafe_in_capture();
  ++fulgur_fake_state()->loaded;
  *module = fulgur_fake_state();
  return 0;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  for (const Kernel& kernel : kKernels) {
    if (std::strcmp(name, kernel.name) != 0) continue;
    *function = const_cast<Kernel*>(&kernel);
    return 0;
  }
  return 500;
}
int cuLaunchKernelEx(const CUlaunchConfig* config, void* function, void** arguments, void**) {
  void* current = nullptr;
  cuCtxGetCurrent(&current);
  if (current == nullptr) return 201;
  FakeState& state = *fulgur_fake_state();
  const auto& [grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, attributes,
               count] = *config;
  if (grid_x == 0 || grid_y == 0 || grid_y > 65535 || grid_z != 1 || block_y != 1 || block_z != 1)
    return 1;
  const bool early = fulgur::test::starts_early(*config);
  const auto* bytes = static_cast<const unsigned char*>(arguments[0]);
  const auto [name, size] = *static_cast<const Kernel*>(function);
  if (const char* cycles = std::getenv("FAKE_CUDA_MMA_CYCLES");
      cycles != nullptr && std::strcmp(name, "fulgur_mma_rate") == 0) {
    MmaRateParams params;
    std::memcpy(&params, bytes, sizeof(params));
    *params.cycles = std::atoll(cycles);
  }
  unsigned keys = 0;  // of a key tile of the forward kernel
  if (size == sizeof(ForwardParams)) {
    ForwardParams params;
    std::memcpy(&params, bytes, size);
    keys = FakeMap::of(&params.k_map).box[1];
  }
  state.clock_ms += block_x == state.fast_block && keys == state.fast_keys ? 0.25 : 1;
  if (!state.record) return 0;
  const std::scoped_lock lock(launching);
  state.launches.push_back(
      {name, grid_x, grid_y, block_x, shared_bytes, stream, {bytes, bytes + size}, early});
  return 0;
}

}  // extern "C"

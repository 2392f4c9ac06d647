// Stores numbers of the host that are arguments of the launch, which keeps their current values.
#include "common/upload_metadata_params.h"

extern "C" __global__ void __launch_bounds__(256)
    fulgur_upload_metadata(const __grid_constant__ UploadMetadataParams p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.count) p.to[i] = p.numbers[i];
}

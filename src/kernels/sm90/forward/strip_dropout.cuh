// Dropout of a strip's P. Which entries of a key tile are kept is decided while its products run.
#pragma once
#include "attention/dropout.cuh"
#include "sm90/common/work_tiles.cuh"
#include "sm90/forward/layout.cuh"
#include "sm90/forward/params.h"

// `dropout_key`: where the key of Philox lies in shared memory. `view`: where the View of the strip does.
__device__ __forceinline__ Kept<kBlockKeys> kept_of_tile(const ForwardParams& p, u32 dropout_key, u32 view,
                                                         int key_tile) {
  const Place at = load_place(view);
  return kept_scores<kBlockKeys>(p, dropout_key, dropout_head(p, at.batch, at.head), at.row + warp_row(),
                                 key_tile * kBlockKeys);
}

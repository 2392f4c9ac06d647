// Arguments of the backward kernels of every architecture, the same for the host and the device.
//
// kernel_config.h, generated per plan, holds an anonymous enum of ints; those that all kernels have:
//   kElementQ, kElementK, kElementV, kElementO    the element types of the operands (host_device/element.h)
//   kHeadDim        d rounded up to 16 (<= 576)
//   kValueDim       dv rounded up to 16 (<= 512)
//   kBlockRows      Br: rows of Q of a step of the kernel by keys
//   kBlockKeys      Bc: keys of a key block
//   kDqMethod       a DqMethod
//   kDqParts        kOrdered: semaphores of 64 rows of dQ, or of a row tile if that is smaller
//   kDqByFours      1: four sums of dQ of a thread are added by one instruction, and are contiguous in dq_accum
//   kRoundsDq       1: the CTA that completes dQ of 64 rows rounds them, and the warps of keys.cu repair the gradients
//                   that they store, so that round.cu is not launched. Each CTA has one key block, with at most 1024
//                   rows
//   kEarlyStarts    1: kernels start while the previous one runs (device/dependent_launch.cuh)
//   kHasLeft, kHasRight, kHasChunk, kTopLeft, kPart, kScoreMode, kSoftcap, kAlibi, kBias, kBiasRows, kPacked,
//   kSeqUsedQ, kSeqUsedK, kDropout
//                   as in sm90/forward/params.h
//   kHasDlse        1: the gradient of LSE is given
//   kKeyGradients   1: dK and dV are computed
//   kF32KeyGradients    1: dK and dV are stored in f32
//   kElements       1: gradients are stored one element at a time, as their rows are not multiples of 16 bytes
//   kMakesMap       1: the kernel that prepares rows makes the map of tiles (backward/prepare_map.cuh)
#pragma once
#include "host_device/attention_params.h"
#include "backward/work.h"
#include "host_device/tensor_map.h"

// Tensor maps (host_device/tensor_map.h), used by the kernels of Hopper only. All boxes are {64, 64, 1, 1}.
struct BackwardShapes {
  TensorMapBlob q_map;     // dims {d,  sq, hq, b}
  TensorMapBlob k_map;     // dims {d,  sk, hk, b}
  TensorMapBlob v_map;     // dims {dv, sk, hk, b}
  TensorMapBlob dout_map;  // dims {dv, sq, hq, b}
  TensorMapBlob bias_map;  // dims {sk, sq, hq, b} or 1, of a panel's columns and 64 rows or one; unused unless kBias
};

// A tensor [batch, head, row] of f32; strides in elements, of any sign. Packed: no batch stride.
struct StridedRows {
  const float* data;
  long long batch, head;
};

// The gradient of a dense bias [b or 1, hq or 1, rows, keys], and its work tiles: a tile of rows and chunk_tiles tiles
// of 64 keys.
struct BiasSums {
  void* data;
  fulgur::kernels::Element type;
  int rows, keys;
  long long batch_stride, head_stride, row_stride, key_stride;  // in elements; 0 if the size is 1
  bool of_batch, of_heads, of_rows, of_keys;                    // 0: elements are sums over this dimension
  int heads, row_tiles, key_tiles;
  int key_chunks, chunk_tiles;
  long long work_tiles;
};

struct BackwardParams : BackwardShapes, CallParams {
  StridedTensor out, dout;  // for D
  StridedTensor dq, dk, dv_grad;
  StridedRows lse, dlse;
  float p_log2;    // the kernels by keys compute 2^p_log2 P; the scales below contain 2^-p_log2
  float scale;     // of dQ and dK
  float dv_scale;  // of dV, with 1 / (1 - p) of dropout
  float p_scale;   // 2^-p_log2

  fulgur::kernels::Wave wave;
  fulgur::kernels::ScoreTiles score_tiles;
  fulgur::kernels::BlockSchedule key_blocks, row_blocks;
  int batch;
  int splits;           // of a kv head, computed by different CTAs; if > 1, reduce.cu adds their partial dK and dV
  int split_heads;      // q heads of a split: the group or an equal part of it
  int row_splits;       // splits that have the same q heads and different rows; 1 with stored dS
  int row_split_tiles;  // row tiles of each of them
  int cut_blocks;       // key blocks that are cut into two work tiles (backward/work.h); 0 unless kCuts
  int first_partial;    // heads before it (batch * heads + head) have no partial dK and dV
  int statistics_rows;  // rows of statistics per q head

  // The workspace.
  int* counters;      // 2, zero before and after a launch: work tiles taken, CTAs that have finished
  int* not_finite;    // nonzero: some gradient is not finite; the kernel that repairs them sets it to 0
  float* shift;       // [hq][statistics_rows]: p_log2 - LSE log2(e); -inf for LSE = -inf and after the last row
  float* delta;       // [hq][statistics_rows]: -(D - dLSE); 0 after the last row
  float* dq_accum;    // [hq][statistics_rows / 64][panels][64 x columns of the panel, in the order of accumulators]
  unsigned char* ds;  // score tiles of the wave, DqMethod::kStored
  unsigned char* zeros;  // a dS tile of zeros
  float* partial_dk;  // [b, hk * splits, from first_partial on][key blocks][head dims / 2][2 kBlockKeys]
  float* partial_dv;  // [b, hk * splits, from first_partial on][key blocks][value dims / 2][2 kBlockKeys]
  int* first_parts;   // warps that have stored partial dK and dV of first parts of cut blocks

  // For sinks.cu, if the gradient of the sinks is requested.
  Sinks sinks;
  void* dsinks;  // [hq]
  fulgur::kernels::Element dsinks_type;

  BiasSums bias_sums;  // for bias_gradient.cu, if the gradient of the bias is requested

  // The workspace with kOrderedDq: semaphores of dQ tiles.
  int* dq_semaphore;  // [hq][statistics_rows / 64][panels]: the key block that adds next; with a map 1 + the last one

  // The workspace with kRoundsDq.
  int* dq_additions;  // [hq][statistics_rows / 64]: the number of complete additions to dq_accum of these rows

  [[no_unique_address]] fulgur::kernels::ExpressionArguments expression;
};

// Arguments of the kernels of the Hopper backward pass (sm90/backward_*.cu), the same for the host and the device.
//
// kernel_config.h, generated per plan, holds one `#define` and one anonymous enum of ints:
//   #define FULGUR_INPUT "bf16"     PTX type of every tensor but the statistics: "bf16" or "f16"
//   kHeadDim        d rounded up to 16 (<= 256); columns beyond d are zero-filled by the tensor maps
//   kValueDim       dv rounded up to 16 (<= 256)
//   kConsumers      consumer warpgroups: 2, or 1 for a short call
//   kBlockRows      Br: rows of Q that a step of sm90/backward/keys.cu takes, 64 or 128
//   kBlockKeys      Bc: keys of a block of it, 64 a warpgroup; of sm90/backward/keys_wide.cu 64 for both, as Br
//   kKStages        buffers of K; with two, the next block begins with the last products of the one before
//   kQStages, kOStages, kDsStages    buffers of Q with LSE, of dO with D, and of dS
//   kSums           1: dQ is summed up in f32 by a third consumer warpgroup of sm90/backward/keys.cu, and rounded by
//                   sm90/backward/round.cu. 0: dS is stored, and sm90/backward/rows.cu computes dQ from it
//   kOrdered        1: with kSums, blocks of keys add to a tile of rows one after another: the same bits in every run
//   kHalfP          1: P of bf16 inputs crosses in sm90/backward/keys_wide.cu as f16, which has three bits more
//   kRowTiles       tiles of 64 rows of dQ that a warpgroup of sm90/backward/rows.cu holds
//   kRowStages      buffers of dS and K of it
//   kProducerRegisters, kConsumerRegisters, kSumsRegisters    registers a thread after setmaxnreg
//   kHasLeft, kHasRight, kHasChunk, kSoftcap, kAlibi, kPacked, kSeqUsedQ, kSeqUsedK, kDropout    as in
//                   sm90/forward/params.h
//   kHasDlse        1: the gradient of LSE is given
//   kElements       1: gradients are stored by elements, where their rows are not multiples of 16 bytes
#pragma once
#include "host_device/attention_params.h"
#include "sm90/backward/work.h"
#include "sm90/common/tensor_map.h"

// As sm90/common/tensor_map.h says; all boxes are {64, 64, 1, 1}.
struct BackwardMaps {
  TensorMapBlob q_map;     // dims {d,  sq, hq, b}
  TensorMapBlob k_map;     // dims {d,  sk, hk, b}
  TensorMapBlob v_map;     // dims {dv, sk, hk, b}
  TensorMapBlob dout_map;  // dims {dv, sq, hq, b}
};

// A tensor [batch, head, row] of f32; strides in elements, of any sign. Packed: no batch stride.
struct StridedRows {
  const float* data;
  long long batch, head;
};

struct BackwardParams : BackwardMaps, CallParams {
  StridedTensor out, dout;   // for D
  StridedTensor dq, dk, dv_grad;
  StridedRows lse, dlse;
  float p_log2;    // the kernels by keys have 2^p_log2 of P, which what follows makes up for:
  float scale;     // of dQ and dK, with 2^-p_log2
  float dv_scale;  // of dV, likewise, and 1 / (1 - p) of dropout
  float p_scale;   // 2^-p_log2

  fulgur::kernels::Wave wave;
  fulgur::kernels::ScoreTiles score_tiles;
  fulgur::kernels::Blocks key_blocks, row_blocks;
  int batch;
  int parts;            // pairs that share a head of k and v, whose dK and dV sm90/backward/reduce.cu adds up
  int pair_heads;       // q heads of a pair: all of a group or a part of them
  int row_parts;        // pairs that have the same q heads and
  int part_tiles;       // so many tiles of rows each, with kSums; 1 otherwise, and waves decide about rows
  int cut_blocks;       // of keys, the last ones, whose rows are two items (sm90/backward/work.h); 0 unless kCuts
  int first_carry;      // pairs in front of it leave no sums
  int statistics_rows;  // of a head

  // Memory of the launch.
  int* counters;      // 2, zero before a launch and after it: blocks given out, CTAs that have finished
  int* not_finite;    // after them: some gradient is not; left 0 by what repairs them
  float* shift;       // [hq][statistics_rows]: p_log2 - LSE log2(e); -inf where LSE is -inf and where there is no row
  float* delta;       // [hq][statistics_rows]: -(D - dLSE), 0 where there is no row
  float* dq_sums;     // [hq][statistics_rows / 64][panels of 64 columns][64 x its columns as accumulators lie], kSums
  unsigned char* ds;  // tiles of dS of the wave, unless kSums
  unsigned char* zeros;  // a piece of zeros
  float* carry_dk;    // [b, hk * parts, from first_carry on][key blocks][head or value dims / 2][2 kBlockKeys]: sums
  float* carry_dv;    // that wait
  int* first_parts;   // warps that have left the sums of a first part, where blocks are cut

  // For sm90/backward/sinks.cu, where the gradient of the sinks is wanted.
  const float* sinks;  // [hq]
  float* dsinks;       // [hq]

  // Memory of the launch, with kOrdered.
  int* turns;  // [hq][statistics_rows / 64][panels]: the block of keys that adds next to each unit of dQ
};

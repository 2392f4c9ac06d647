// Arguments of merge.cu, the same for the host and the device. Strides are in elements.
#pragma once

constexpr int kMergeParts = 64;  // maximum, as the arguments of a kernel have at most 4096 bytes
constexpr int kMergeWidth = 8;   // elements that a lane loads by one instruction
constexpr int kMergeLanes = 8;   // minimum of lanes per row

// The tensors of a part, or of the result.
struct MergeTensors {
  void* out;
  float* lse;                     // of the result it may be null
  long long batch, row, head;     // strides of out
  long long lse_batch, lse_head;  // the stride of rows is 1
};

struct MergeParams {
  MergeTensors to;
  MergeTensors from[kMergeParts];
  unsigned char types[kMergeParts];  // element types of the parts' out
  int type;                          // element type of the result's out
  int parts;
  int tokens;  // rows of all sequences
  int rows;    // rows of each sequence
  int heads, dim;
  int wide;        // 1: all rows consist of aligned pieces of 16 bytes
  int lanes_log2;  // log2 of the lanes of a row
};

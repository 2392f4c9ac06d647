// Arguments of merge.cu, the same for the host and the device. Strides count elements.
#pragma once

constexpr int kMergeParts = 64;  // at most, since all arguments of a kernel are no more than 4096 bytes
constexpr int kMergeWidth = 8;   // elements that a lane takes at once
constexpr int kMergeLanes = 8;   // that share a row at least

// Of a part, or of the result.
struct MergeTensors {
  void* out;
  float* lse;                     // of the result: or null
  long long batch, row, head;     // strides of out
  long long lse_batch, lse_head;  // that of rows is 1
};

struct MergeParams {
  MergeTensors to;
  MergeTensors from[kMergeParts];
  unsigned char types[kMergeParts];  // of the parts' out
  int type;                          // of the result's
  int parts;
  int tokens;  // rows of the whole batch
  int rows;    // of each of the batch
  int heads, dim;
  int wide;        // kMergeWidth elements of a row lie at multiples of 16 bytes, everywhere
  int lanes_log2;  // that share a row
};

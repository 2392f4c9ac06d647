// The only place that reads lengths on the device, where they have not been checked: with any values, no access leaves
// the tensors, and no sequence is longer than the plan allows.
#pragma once

// The first row of packed sequence `batch`, inside the `total` rows, and its number of rows, at most `longest`.
__device__ __forceinline__ void packed_rows(const int* cu_seqlens, int batch, int total, int longest, int& start,
                                            int& count) {
  start = min(max(cu_seqlens[batch], 0), total);
  count = min(max(min(cu_seqlens[batch + 1], total), start) - start, longest);
}

// How many of the `count` rows of a sequence exist.
__device__ __forceinline__ int used_rows(const int* seqused, int batch, int count) {
  return min(count, max(seqused[batch], 0));
}

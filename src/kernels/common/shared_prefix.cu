// Divides a call at the ends of its groups' shared prefixes: computes the lengths and pages for attention over prefixes
// and over the remaining keys. A warp computes a group.
#include "host_device/prefix_split.h"

extern "C" __global__ void __launch_bounds__(256)
    fulgur_shared_prefix(const __grid_constant__ PrefixSplit p) {
  const int group = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (group >= p.groups) return;
  const int begin = first_member(p, group);
  const int end = first_member(p, group + 1);
  int keys = within(p.prefix_lens[group], p.sk);
  for (int b = begin + lane; b < end; b += 32) keys = min(keys, keys_in_front(p, b));
  for (int bit = 1; bit < 32; bit *= 2) keys = min(keys, __shfl_xor_sync(0xffffffff, keys, bit));
  keys = shared_keys(end - begin, keys);
  for (int b = begin + lane; b < end; b += 32) p.leftpad_k[b] = keys;
  if (lane != 0) return;
  p.group_keys[group] = keys;
  p.group_rows[group] = first_row(p, begin);
  p.group_ids[group] = first_id(p, begin);
  if (group + 1 < p.groups) return;
  p.group_rows[p.groups] = first_row(p, p.batch);
  p.group_ids[p.groups] = first_id(p, p.batch);
}

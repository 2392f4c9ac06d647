// The division of a call at the ends of its groups' prefixes, the same for the host and the device: into attention of
// all rows of a group over its prefix, and of each sequence over the keys after it. The values of lengths and tables on
// the device have not been checked: numbers computed from them are limited to the tensors, unless the kernels of
// attention do so themselves.
#pragma once
#include "host_device/host_device.h"

namespace fulgur::kernels {

// A prefix is computed separately if it saves the reads of at least so many keys; for less, another work tile costs
// more.
enum : int { kMinSavedKeys = 256 };

struct PrefixSplit {
  int groups, batch;
  int sq;                   // rows of a sequence, without cu_seqlens_q
  int total_q;              // rows of q
  int sk;                   // maximum of keys of a sequence
  int ids;                  // number of ids in page_table
  long long table_stride;   // from the ids of a sequence to those of the next, without page_indptr
  const int* prefix_groups;  // [groups + 1]
  const int* prefix_lens;    // [groups]
  const int* cu_seqlens_q;   // [batch + 1] or null
  const int* seqused_k;      // [batch]
  const int* page_indptr;    // [batch + 1] or null

  // Results for groups, each as a sequence.
  int* group_rows;  // [groups + 1], their cu_seqlens_q
  int* group_keys;  // [groups], their seqused_k
  int* group_ids;   // [groups + 1], their page_indptr
  // Results for sequences.
  int* leftpad_k;  // [batch]
};

// x clamped to [0, bound].
FULGUR_SHARED int within(int x, int bound) { return max_of(0, min_of(x, bound)); }

// The first sequence of a group, which is the end of the previous group. Each sequence belongs to a group.
FULGUR_SHARED int first_member(const PrefixSplit& p, int group) {
  if (group == 0) return 0;
  return group == p.groups ? p.batch : within(p.prefix_groups[group], p.batch);
}

// The first row of a sequence, which is the end of the previous sequence.
FULGUR_SHARED int first_row(const PrefixSplit& p, int b) {
  return p.cu_seqlens_q == nullptr ? b * p.sq : within(p.cu_seqlens_q[b], p.total_q);
}

// The index of a sequence's first page id. The list of a group may end anywhere after its prefix.
FULGUR_SHARED int first_id(const PrefixSplit& p, int b) {
  if (p.page_indptr != nullptr) return p.page_indptr[b];
  return b == p.batch ? p.ids : static_cast<int>(b * p.table_stride);
}

// The number of keys before those of a sequence's own queries.
FULGUR_SHARED int keys_in_front(const PrefixSplit& p, int b) {
  return within(p.seqused_k[b], p.sk) - (first_row(p, b + 1) - first_row(p, b));
}

// How many of the `keys` that the members of a group share are read once for all: all of them or none.
FULGUR_SHARED int shared_keys(int members, int keys) {
  return keys > 0 && (members - 1LL) * keys >= kMinSavedKeys ? keys : 0;
}

}  // namespace fulgur::kernels

#ifdef __CUDACC__
using namespace fulgur::kernels;
#endif

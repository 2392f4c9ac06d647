// Keys in caches: which row of the batch, or which page, holds a key of a sequence.
#pragma once
#include "attention/fragment_store.cuh"
#include "device/schedule.cuh"

// The lengths of a sequence whose keys may be in a cache; n.k_start is the row of its first key. The list of its pages
// counts as rows from there on. A sequence that another kernel computes counts as one without queries.
__device__ __forceinline__ Lengths lengths_of(const AttentionParams& p, int batch) {
  Lengths n = lengths_of(static_cast<const CallParams&>(p), batch);
  if (kFewQueries > 0 && n.sq <= kFewQueries) n.sq = 0;
  if (kPageLists) {
    int first, ids;
    packed_rows(p.pages.indptr, batch, p.pages.ids, p.pages.ids, first, ids);
    n.k_start = first * kPage;
    n.sk = min(n.sk, ids * kPage);
  }
  if (kBatchIdx && u32(p.cache_batch_idx[batch]) >= u32(p.pages.entries)) n.sk = 0;
  if (kLeftPad) {
    const int begin = min(max(p.leftpad_k[batch], 0), n.sk);
    n.k_start += begin;
    n.sk -= begin;
  }
  return n;
}

// The row of the batch of K and V that a sequence has; without pages.
__device__ __forceinline__ int key_entry(const AttentionParams& p, int batch) {
  return kPackedK ? 0 : kBatchIdx ? p.cache_batch_idx[batch] : batch;
}

// Where a key is.
struct PageRow {
  int page;  // < 0: nowhere
  int row;
};

// The first key of a sequence is row `start`, and it has `count`. The table is read only where it must hold an id, and
// an id that names no page is none.
__device__ __forceinline__ PageRow page_row(const KeyPages& pages, int batch, int start, int count, int key) {
  const int row = start + key;
  if (key >= count) return {-1, 0};
  const long long list = kPageLists ? 0 : batch * pages.table_stride;
  const int id = pages.table[list + row / max_of(kPage, 1) * pages.id_stride];
  return {u32(id) < u32(pages.entries) ? id : -1, row % max_of(kPage, 1)};
}

// A row of K or V; null where no page holds it.
template <class Type>
__device__ __forceinline__ const typename Type::Memory* key_row(const AttentionParams& p, const StridedTensor& t,
                                                                const Place& place, const Lengths& n, int key) {
  const int head = place.head / p.group;
  const auto* const data = static_cast<const typename Type::Memory*>(t.data) + head * t.head;
  if (kPage == 0) return data + key_entry(p, place.batch) * t.batch + (n.k_start + key) * t.row;
  const PageRow at = page_row(p.pages, place.batch, n.k_start, n.sk, key);
  if (at.page < 0) return nullptr;
  return data + at.page * t.batch + at.row * t.row;
}

// An element of a row of a cache; 0 if the row is null.
template <class Type>
__device__ __forceinline__ float element_of(const typename Type::Memory* row, int column) {
  return kPage == 0 || row != nullptr ? Type::to_float(row[column]) : 0;
}

// Arguments of append.cu, and of kernels that append what they attend, the same for the host and the device. Strides
// count elements. Nobody has checked what lengths, tables and indices hold.
#pragma once

// Scales of codes, or their zero points, [f32 or f16]; strides are 0 where all have the same.
struct AppendScales {
  void* data;
  int f32;
  long long batch, row, head, group;
};

// What makes codes of rows.
struct AppendCodes {
  int format;   // the Element (host_device/element.h); 0: rows stay as they are
  int groups;   // of columns with a scale each; 0: codes have no scales in tensors of their own
  int of_rows;  // scales lie as the rows do; else by sequence and head
  int fits;     // scales are made of the numbers, and written; else they are read
  AppendScales scale, zero_point;  // data is null where there is none
};

// Rows that go from one tensor to another.
struct AppendRows {
  const void* from;
  long long from_batch, from_row, from_head;
  void* to;
  long long to_batch, to_row, to_head;
  int heads, dim;
  int pairs;     // of columns that are turned to a position
  int hadamard;  // all columns are rotated by H then; codes are made of them, or it is kCodes's kernel
  const float* mean;                // of the columns, which codes have not; or null
  long long mean_batch, mean_head;  // from those of a sequence to those of the next, and likewise
  AppendCodes codes;
};

// How rows of sequences follow each other.
struct AppendTokens {
  int count;              // in all, those after the last sequence included
  int each;               // of a sequence, where there are no cu_seqlens
  const int* cu_seqlens;  // [batch + 1] or null
};

struct AppendParams {
  AppendRows k, v, q;
  AppendTokens tokens, queries;

  int batch;
  const int* cache_seqlens;    // [batch], or null: there are no rows yet
  const int* page_table;       // or null
  const int* page_indptr;      // [batch + 1] or null
  const int* cache_batch_idx;  // [batch] or null
  long long table_stride;      // from the ids of a sequence to those of the next, without page_indptr
  long long id_stride;         // from an id to the next
  long long ids;               // of all lists
  long long capacity;          // maximum of rows of a sequence
  long long entries;           // of a cache: pages, or rows of the batch
  unsigned page;               // rows; 1 without pages

  const void *cos, *sin;
  long long cos_row, sin_row;
  long long positions;         // rows of both
  const int* first_positions;  // [batch]
  int f32_angles;              // cos and sin are f32, and not as the caches
  int interleaved, advance;

  int* lengths;    // [batch]: takes those that sequences have with their new rows; or null

  int wide;        // rows are made of 16 bytes that lie at multiples of 16 bytes, and so are halves that are rotated
  int lanes_log2;  // that share a row
};

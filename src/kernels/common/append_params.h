// Arguments of append.cu, and of kernels that append before they attend, the same for the host and the device. Strides
// are in elements. The values of lengths, tables and indices have not been checked.
#pragma once

// Scales, or zero points, of a quantized tensor, f32 or f16; strides are 0 where all have the same.
struct AppendScales {
  void* data;
  int f32;
  long long batch, row, head, group;
};

// How rows are quantized.
struct AppendCodes {
  int format;   // the Element of codes (host_device/element.h); 0: rows are not quantized
  int groups;   // groups of columns with a scale each; 0: the format has no separate scales
  int of_rows;  // 1: each row has scales; 0: each sequence and head
  int fits;     // 1: scales are computed from the rows and written; 0: they are read
  AppendScales scale, zero_point;  // data is null without one
};

// Rows that are copied from one tensor to another.
struct AppendRows {
  const void* from;
  long long from_batch, from_row, from_head;
  void* to;
  long long to_batch, to_row, to_head;
  int heads, dim;
  int pairs;     // pairs of columns that are rotated to a position
  int hadamard;  // 1: all columns are multiplied by H then; only with kCodes
  const float* mean;                // means of columns, which are subtracted before rows are quantized; or null
  long long mean_batch, mean_head;  // from one sequence, or head, to the next
  AppendCodes codes;
};

// The new rows of all sequences.
struct AppendTokens {
  int count;              // of all rows, also after the last sequence
  int each;               // rows of a sequence, without cu_seqlens
  const int* cu_seqlens;  // [batch + 1] or null
};

struct AppendParams {
  AppendRows k, v, q;
  AppendTokens tokens, queries;

  int batch;
  const int* cache_seqlens;    // [batch], or null: caches are empty
  const int* page_table;       // or null
  const int* page_indptr;      // [batch + 1] or null
  const int* cache_batch_idx;  // [batch] or null
  long long table_stride;      // from the ids of a sequence to those of the next, without page_indptr
  long long id_stride;         // from an id to the next
  long long ids;               // number of ids in all lists
  long long capacity;          // maximum of rows of a sequence
  long long entries;           // of a cache: pages, or sequences
  unsigned page;               // rows of a page; 1 without pages

  const void *cos, *sin;
  long long cos_row, sin_row;
  long long positions;         // rows of cos and sin
  const int* first_positions;  // [batch]
  int f32_angles;              // 1: cos and sin are f32; 0: of the dtype of caches
  int interleaved, advance;

  int* lengths;    // [batch]: receives the lengths with the new rows; or null

  int wide;        // 1: rows, and rotated halves of rows, consist of aligned pieces of 16 bytes
  int lanes_log2;  // log2 of the lanes of a row
};

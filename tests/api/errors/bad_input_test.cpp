// Every wrong argument, through the C++ and the C API: one error that names it, what it got and
// what it wants, and nothing written.
#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include "call.h"
#include "engines.h"

namespace fulgur::test {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

enum Passes { kBoth, kForwardOnly, kBackwardOnly };

struct Wrong {
  const char* what;
  std::function<void(Call&)> change;
  const char* message;  // what the message starts like (a regular expression)
  Passes passes = kBoth;
  bool packed = false;
};

void PrintTo(const Wrong& wrong, std::ostream* os) { *os << wrong.what; }

// Element 0.. of a tensor of lengths.
void set_lengths(const Tensor& t, std::initializer_list<double> values) { write(t, values); }

constexpr int64_t kHuge = int64_t{1} << 40;

// The call with a bias (1, 4, 1, 10) and its gradient.
Call with_bias(Call c, DType dtype) {
  static float bias[40], dbias[40];
  c.bias = Tensor::contiguous(bias, dtype, {1, 4, 1, 10});
  c.dbias = Tensor::contiguous(dbias, DType::kF32, {1, 4, 1, 10});
  return c;
}

// The base: q (2, 8, 4, 16), k (2, 10, 2, 16), v (2, 10, 2, 24), out (2, 8, 4, 24), lse (2, 4, 8).
// Packed: 2 + 8 + 0 + 3 + 4 + 3 = 20 rows of q, 1 + 10 + 5 + 0 + 4 + 3 = 23 of k, in 4 sequences.
const std::vector<Wrong>& wrongs() {
  static const std::vector<Wrong> kWrongs = {
      // Rank.
      {"q_of_rank_3",
       [](Call& c) {
         c.q = resized(c.q, {8, 4, 16});
       },
       "q: got 3 dim.*want 4"},
      {"q_of_rank_2",
       [](Call& c) {
         c.q = resized(c.q, {8, 16});
       },
       "q: got 2 dim.*want 4"},
      {"k_of_rank_3",
       [](Call& c) {
         c.k = resized(c.k, {10, 2, 16});
       },
       "k: got 3 dim.*want 4"},
      {"v_of_rank_1", [](Call& c) { c.v = resized(c.v, {10}); }, "v: got 1 dim.*want 4"},
      {"out_of_rank_3",
       [](Call& c) {
         c.out = resized(c.out, {8, 4, 24});
       },
       "out: got 3 dim.*want 4"},
      {"lse_of_rank_2",
       [](Call& c) {
         c.lse = resized(c.lse, {4, 8});
       },
       "lse: got 2 dim.*want 3"},
      {"dout_of_rank_3",
       [](Call& c) {
         c.dout = resized(c.dout, {8, 4, 24});
       },
       "dout: got 3 dim.*want 4", kBackwardOnly},
      {"dk_of_rank_1", [](Call& c) { c.dk = resized(c.dk, {10}); }, "dk: got 1 dim.*want 4",
       kBackwardOnly},
      {"packed_q_of_rank_4",
       [](Call& c) {
         c.q = resized(c.q, {1, 20, 4, 16});
       },
       "q: got 4 dim.*want 3", kBoth, true},
      {"packed_lse_of_rank_3",
       [](Call& c) {
         c.lse = resized(c.lse, {1, 4, 20});
       },
       "lse: got 3 dim.*want 2", kBoth, true},
      // Not given.
      {"no_q", [](Call& c) { c.q = {}; }, "q: (not given|got null), want"},
      {"no_k", [](Call& c) { c.k = {}; }, "k: (not given|got null), want"},
      {"no_v", [](Call& c) { c.v = {}; }, "v: (not given|got null), want"},
      {"no_out", [](Call& c) { c.out = {}; }, "out: (not given|got null), want"},
      {"no_lse", [](Call& c) { c.lse = {}; }, "lse: (not given|got null), want", kBackwardOnly},
      {"no_dout", [](Call& c) { c.dout = {}; }, "dout: (not given|got null), want", kBackwardOnly},
      {"no_gradient", [](Call& c) { c.dq = c.dk = c.dv = {}; },
       "dq: not given, want it, or dk and dv", kBackwardOnly},
      {"no_dk", [](Call& c) { c.dk = {}; }, "dk: not given, want it with dv", kBackwardOnly},
      {"no_dv", [](Call& c) { c.dv = {}; }, "dv: not given, want it with dk", kBackwardOnly},
      // Shape.
      {"k_of_another_batch", [](Call& c) { c.k.shape[0] = 1; },
       "k: got .*\\(1, 10, 2, 16\\).*want .*2, 10, 2, 16"},
      {"k_of_another_dim", [](Call& c) { c.k.shape[3] = 15; },
       "k: got .*15\\).*want .*2, 10, 2, 16"},
      {"v_of_another_length", [](Call& c) { c.v.shape[1] = 9; },
       "v: got .*\\(2, 9, 2, 24\\).*want .*2, 10, 2, 24"},
      {"v_of_other_heads", [](Call& c) { c.v.shape[2] = 1; },
       "v: got .*\\(2, 10, 1, 24\\).*want .*2, 10, 2, 24"},
      {"v_of_another_batch", [](Call& c) { c.v.shape[0] = 1; },
       "v: got .*\\(1, 10, 2, 24\\).*want .*2, 10, 2, 24"},
      {"out_of_another_length", [](Call& c) { c.out.shape[1] = 7; },
       "out: got .*\\(2, 7, 4, 24\\).*want .*2, 8, 4, 24"},
      {"out_of_other_heads", [](Call& c) { c.out.shape[2] = 2; },
       "out: got .*\\(2, 8, 2, 24\\).*want .*2, 8, 4, 24"},
      {"out_of_the_dim_of_q", [](Call& c) { c.out.shape[3] = 16; },
       "out: got .*\\(2, 8, 4, 16\\).*want .*2, 8, 4, 24"},
      {"dlse_of_rank_4",
       [](Call& c) {
         c.dlse = resized(c.dlse, {2, 4, 8, 1});
       },
       "dlse: got 4 dim.*want 3", kBackwardOnly},
      {"dlse_with_rows_before_heads",
       [](Call& c) {
         c.dlse = resized(c.dlse, {2, 8, 4});
       },
       "dlse: got .*\\(2, 8, 4\\).*want .*2, 4, 8", kBackwardOnly},
      {"packed_dlse_of_other_rows", [](Call& c) { c.dlse.shape[1] = 17; },
       "dlse: got .*\\(4, 17\\).*want .*4, 20", kBackwardOnly, true},
      {"lse_with_rows_before_heads",
       [](Call& c) {
         c.lse = resized(c.lse, {2, 8, 4});
       },
       "lse: got .*\\(2, 8, 4\\).*want .*2, 4, 8"},
      {"dout_of_another_dim", [](Call& c) { c.dout.shape[3] = 16; },
       "dout: got .*16\\).*want .*2, 8, 4, 24", kBackwardOnly},
      {"dq_of_another_dim", [](Call& c) { c.dq.shape[3] = 8; },
       "dq: got .*8\\).*want .*2, 8, 4, 16", kBackwardOnly},
      {"dk_with_heads_of_q",
       [](Call& c) {
         c.dk = resized(c.dk, {2, 5, 4, 16});
       },
       "dk: got .*\\(2, 5, 4, 16\\).*want .*2, 10, 2, 16", kBackwardOnly},
      {"dv_of_the_dim_of_k", [](Call& c) { c.dv.shape[3] = 16; },
       "dv: got .*16\\).*want .*2, 10, 2, 24", kBackwardOnly},
      {"packed_out_of_other_rows", [](Call& c) { c.out.shape[0] = 17; },
       "out: got .*\\(17, 4, 24\\).*want .*20, 4, 24", kBoth, true},
      {"packed_v_of_other_rows", [](Call& c) { c.v.shape[0] = 21; },
       "v: got .*\\(21, 2, 24\\).*want .*23, 2, 24", kBoth, true},
      {"packed_lse_of_other_rows", [](Call& c) { c.lse.shape[1] = 17; },
       "lse: got .*\\(4, 17\\).*want .*4, 20", kBoth, true},
      // Sizes.
      {"heads_not_a_multiple", [](Call& c) { c.q.shape[2] = c.out.shape[2] = 3; },
       "q: got 3 heads.*multiple of the 2"},
      {"fewer_heads_than_keys", [](Call& c) { c.q.shape[2] = 1; },
       "q: got 1 heads.*multiple of the 2"},
      {"no_heads_of_q", [](Call& c) { c.q.shape[2] = 0; }, "q: got 0 heads.*at least 1"},
      {"no_heads_of_k", [](Call& c) { c.k.shape[2] = 0; }, "k: got 0 heads.*at least 1"},
      {"dim_0_of_q", [](Call& c) { c.q.shape[3] = c.k.shape[3] = 0; },
       "q: got head dim 0.*1 to 576"},
      {"dim_0_of_v", [](Call& c) { c.v.shape[3] = 0; }, "v: got head dim 0.*1 to 512"},
      {"dim_577_of_q",
       [](Call& c) {
         c.q = resized(c.q, {2, 8, 4, 577});
       },
       "q: got head dim 577.*1 to 576"},
      {"dim_513_of_v",
       [](Call& c) {
         c.v = resized(c.v, {2, 10, 2, 513});
       },
       "v: got head dim 513.*1 to 512"},
      {"negative_size_of_q", [](Call& c) { c.q.shape[1] = -8; }, "q: got negative size -8"},
      {"negative_size_of_k", [](Call& c) { c.k.shape[0] = -1; }, "k: got negative size -1"},
      {"negative_size_of_lse", [](Call& c) { c.lse.shape[2] = -8; }, "lse: got negative size -8"},
      {"smallest_size", [](Call& c) { c.v.shape[1] = INT64_MIN; },
       "v: got negative size -9223372036854775808"},
      {"overflow_of_size",
       [](Call& c) {
         c.q = resized(c.q, {kHuge, kHuge, 4, 16});
       },
       "q: .*1099511627776.*bytes"},
      {"more_bytes_than_are_addressed",
       [](Call& c) {
         c.k.shape[1] = kHuge;  // all of them in one place
         c.k.strides[1] = 0;
         c.k.shape[3] = 512;
       },
       "k: shape .*1099511627776.* is of more than 2\\^47 bytes"},
      {"overflow_of_strides", [](Call& c) { c.k.strides[0] = INT64_MAX; },
       "k: .*9223372036854775807.*bytes"},
      {"overflow_of_negative_strides", [](Call& c) { c.k.strides[1] = INT64_MIN; },
       "k: .*-9223372036854775808.*bytes"},
      {"overflow_of_out", [](Call& c) { c.out.strides[0] = INT64_MAX / 4; },
       "out: .*2305843009213693951.*bytes"},
      // Dtype.
      {"q_of_i32", [](Call& c) { c.q.dtype = DType::kI32; }, "q: got i32, want .*f32"},
      {"k_of_bf16", [](Call& c) { c.k.dtype = DType::kBF16; }, "k: got bf16, want f32",
       kBackwardOnly},
      {"v_of_f16", [](Call& c) { c.v.dtype = DType::kF16; }, "v: got f16, want f32", kBackwardOnly},
      {"k_of_f64", [](Call& c) { c.k.dtype = DType::kF64; }, "k: got f64, want f32"},
      {"v_of_i32", [](Call& c) { c.v.dtype = DType::kI32; }, "v: got i32, want f32"},
      {"out_of_bf16", [](Call& c) { c.out.dtype = DType::kBF16; }, "out: got bf16, want f32"},
      {"lse_of_f64",
       [](Call& c) {
         c.lse = as(resized(c.lse, {2, 4, 8}), DType::kF64);
       },
       "lse: got f64, want f32"},
      {"lse_of_f32_for_f64",
       [](Call& c) {
         for (Tensor* t : {&c.q, &c.k, &c.v, &c.out, &c.dout, &c.dq, &c.dk, &c.dv}) {
           t->dtype = DType::kF64;
         }
       },
       "lse: got f32, want f64"},
      {"dlse_of_f64",
       [](Call& c) {
         c.dlse = as(resized(c.dlse, {2, 4, 8}), DType::kF64);
       },
       "dlse: got f64, want f32", kBackwardOnly},
      {"dlse_of_bf16", [](Call& c) { c.dlse.dtype = DType::kBF16; }, "dlse: got bf16, want f32",
       kBackwardOnly},
      {"dout_of_f16", [](Call& c) { c.dout.dtype = DType::kF16; }, "dout: got f16, want f32",
       kBackwardOnly},
      {"dq_of_f64", [](Call& c) { c.dq.dtype = DType::kF64; }, "dq: got f64, want f32",
       kBackwardOnly},
      {"dv_of_i32", [](Call& c) { c.dv.dtype = DType::kI32; }, "dv: got i32, want f32",
       kBackwardOnly},
      {"q_of_i64", [](Call& c) { c.q = as(c.q, DType::kI64); }, "q: got i64, want .*f32"},
      {"bias_of_i64", [](Call& c) { c.bias = Tensor::contiguous(c.q.data, DType::kI64, {1, 1, 1, 1}); },
       "bias: got i64, want bool, f32"},
      {"bias_of_f64", [](Call& c) { c.bias = Tensor::contiguous(c.q.data, DType::kF64, {1, 1, 1, 1}); },
       "bias: got f64, want bool, f32"},
      {"bias_of_rank_3", [](Call& c) { c.bias = Tensor::contiguous(c.q.data, c.q.dtype, {1, 1, 1}); },
       "bias: got 3 dimensions"},
      {"bias_of_fewer_keys",
       [](Call& c) { c.bias = Tensor::contiguous(c.q.data, c.q.dtype, {1, 1, 1, c.k.shape[1] - 1}); },
       "bias: got shape .*want .*or 1 for any of them"},
      {"bias_on_another_device",
       [](Call& c) { c.bias = on_cuda(Tensor::contiguous(c.q.data, c.q.dtype, {1, 1, 1, 1})); },
       "bias: on cuda:0, want cpu"},
      {"bias_that_is_an_output",
       [](Call& c) { c.bias = Tensor::contiguous(c.dq.data, DType::kF32, {1, 1, 1, 1}); },
       "dq: shares its memory with bias", kBackwardOnly},
      {"dbias_without_bias", [](Call& c) { c.dbias = with_bias(c, DType::kF32).dbias; },
       "dbias: given without bias", kBackwardOnly},
      {"dbias_of_bools", [](Call& c) { c = with_bias(c, DType::kBool); },
       "dbias: given with a bias of bools", kBackwardOnly},
      {"dbias_of_another_shape",
       [](Call& c) {
         c = with_bias(c, DType::kF32);
         c.dbias.shape[1] = 1;
       },
       "dbias: got shape \\(1, 1, 1, 10\\), want \\(1, 4, 1, 10\\) of the bias", kBackwardOnly},
      {"dbias_of_rank_3",
       [](Call& c) {
         c = with_bias(c, DType::kF32);
         c.dbias.rank = 3;
       },
       "dbias: got 3 dimensions", kBackwardOnly},
      {"dbias_of_bf16",
       [](Call& c) {
         c = with_bias(c, DType::kF32);
         c.dbias.dtype = DType::kBF16;
       },
       "dbias: got bf16, want f32 \\(that of bias, or f32\\)", kBackwardOnly},
      {"dbias_that_overlaps",
       [](Call& c) {
         c = with_bias(c, DType::kF32);
         c.dbias.strides[1] = 0;
       },
       "dbias: elements overlap", kBackwardOnly},
      {"dbias_null",
       [](Call& c) {
         c = with_bias(c, DType::kF32);
         c.dbias.data = nullptr;
       },
       "dbias: data is null", kBackwardOnly},
      {"dbias_on_another_device",
       [](Call& c) {
         c = with_bias(c, DType::kF32);
         c.dbias = on_cuda(c.dbias);
       },
       "dbias: on cuda:0, want cpu", kBackwardOnly},
      {"dbias_that_is_bias",
       [](Call& c) {
         c = with_bias(c, DType::kF32);
         c.dbias.data = c.bias.data;
       },
       "dbias: shares its memory with bias", kBackwardOnly},
      {"rng_state_of_i32", [](Call& c) { c.rng_state.dtype = DType::kI32; },
       "rng_state: got i32, want i64"},
      {"rng_state_of_one", [](Call& c) { c.rng_state.shape[0] = 1; },
       "rng_state: got .*\\(1\\).*want .*2"},
      {"rng_state_of_rank_2",
       [](Call& c) {
         c.rng_state = resized(c.rng_state, {1, 2});
       },
       "rng_state: got 2 dim.*want 1"},
      {"rng_state_on_cuda", [](Call& c) { c.rng_state = on_cuda(c.rng_state); },
       "rng_state: on cuda:0, want cpu"},
      {"null_rng_state", [](Call& c) { c.rng_state.data = nullptr; }, "rng_state: data is null"},
      {"rng_state_and_seed", [](Call& c) { c.run.dropout_seed = 5; },
       "rng_state: given with a dropout_seed of 5 .*want one"},
      {"rng_state_and_offset", [](Call& c) { c.run.dropout_offset = 6; },
       "rng_state: given with .* a dropout_offset of 6.*want one"},
      {"out_is_rng_state", [](Call& c) { c.rng_state.data = c.out.data; },
       "out: .*memory.* rng_state", kForwardOnly},
      // Strides.
      {"last_stride_of_q", [](Call& c) { c.q.strides[3] = 2; }, "q: last stride is 2, want 1"},
      {"last_stride_of_v", [](Call& c) { c.v.strides[3] = 0; }, "v: last stride is 0, want 1"},
      {"last_stride_of_out", [](Call& c) { c.out.strides[3] = -1; },
       "out: last stride is -1, want 1"},
      {"last_stride_of_lse", [](Call& c) { c.lse.strides[2] = 4; },
       "lse: last stride is 4, want 1"},
      {"last_stride_of_dlse", [](Call& c) { c.dlse.strides[2] = 4; },
       "dlse: last stride is 4, want 1", kBackwardOnly},
      {"last_stride_of_dk", [](Call& c) { c.dk.strides[3] = 3; }, "dk: last stride is 3, want 1",
       kBackwardOnly},
      {"overlapping_rows_of_out", [](Call& c) { c.out.strides[1] = 90; },
       "out: elements overlap.*90", kForwardOnly},
      {"broadcast_out", [](Call& c) { c.out.strides[0] = 0; }, "out: elements overlap",
       kForwardOnly},
      {"overlapping_heads_of_out", [](Call& c) { c.out.strides[2] = 8; }, "out: elements overlap",
       kForwardOnly},
      {"broadcast_lse", [](Call& c) { c.lse.strides[1] = 0; }, "lse: elements overlap",
       kForwardOnly},
      {"overlapping_dq", [](Call& c) { c.dq.strides[1] = 63; }, "dq: elements overlap",
       kBackwardOnly},
      {"broadcast_dk", [](Call& c) { c.dk.strides[2] = 0; }, "dk: elements overlap", kBackwardOnly},
      {"overlapping_dv", [](Call& c) { c.dv.strides[0] = -24; }, "dv: elements overlap",
       kBackwardOnly},
      // Device.
      {"k_on_cuda", [](Call& c) { c.k = on_cuda(c.k); }, "k: on cuda:0, want cpu"},
      {"v_on_cuda", [](Call& c) { c.v = on_cuda(c.v); }, "v: on cuda:0, want cpu"},
      {"q_alone_on_cuda", [](Call& c) { c.q = on_cuda(c.q); }, "k: on cpu, want cuda:0"},
      {"out_on_cuda", [](Call& c) { c.out = on_cuda(c.out); }, "out: on cuda:0, want cpu"},
      {"lse_on_cuda", [](Call& c) { c.lse = on_cuda(c.lse); }, "lse: on cuda:0, want cpu"},
      {"dlse_on_cuda", [](Call& c) { c.dlse = on_cuda(c.dlse); }, "dlse: on cuda:0, want cpu",
       kBackwardOnly},
      {"dq_on_cuda", [](Call& c) { c.dq = on_cuda(c.dq); }, "dq: on cuda:0, want cpu",
       kBackwardOnly},
      {"cu_seqlens_on_cuda", [](Call& c) { c.cu_seqlens_q = on_cuda(c.cu_seqlens_q); },
       "cu_seqlens_q: on cuda:0, want cpu", kBoth, true},
      // Data.
      {"null_q", [](Call& c) { c.q.data = nullptr; }, "q: data is null"},
      {"null_k", [](Call& c) { c.k.data = nullptr; }, "k: data is null"},
      {"null_v", [](Call& c) { c.v.data = nullptr; }, "v: data is null"},
      {"null_out", [](Call& c) { c.out.data = nullptr; }, "out: data is null"},
      {"null_lse", [](Call& c) { c.lse.data = nullptr; }, "lse: data is null"},
      {"null_dout", [](Call& c) { c.dout.data = nullptr; }, "dout: data is null", kBackwardOnly},
      {"null_dlse", [](Call& c) { c.dlse.data = nullptr; }, "dlse: data is null", kBackwardOnly},
      {"null_dq", [](Call& c) { c.dq.data = nullptr; }, "dq: data is null", kBackwardOnly},
      {"null_dk", [](Call& c) { c.dk.data = nullptr; }, "dk: data is null", kBackwardOnly},
      {"null_dv", [](Call& c) { c.dv.data = nullptr; }, "dv: data is null", kBackwardOnly},
      {"misaligned_v", [](Call& c) { c.v.data = static_cast<char*>(c.v.data) + 1; },
       "v: data .*aligned to .*4 bytes"},
      {"misaligned_out", [](Call& c) { c.out.data = static_cast<char*>(c.out.data) + 2; },
       "out: data .*aligned to .*4 bytes"},
      // Outputs in the memory of others.
      {"out_is_q", [](Call& c) { c.out.data = c.q.data; }, "out: .*memory.* q", kForwardOnly},
      {"out_is_v", [](Call& c) { c.out.data = c.v.data; }, "out: .*memory.* [kv]", kForwardOnly},
      {"out_inside_q", [](Call& c) { c.out.data = static_cast<float*>(c.q.data) + 100; },
       "out: .*memory.* q", kForwardOnly},
      {"out_reaches_into_k", [](Call& c) { c.out.data = static_cast<float*>(c.k.data) - 8; },
       "out: .*memory.* [qkv];", kForwardOnly},
      {"lse_inside_out", [](Call& c) { c.lse.data = static_cast<float*>(c.out.data) + 64; },
       "(lse: .*memory.* out|out: .*memory.* lse)", kForwardOnly},
      {"dq_is_q", [](Call& c) { c.dq.data = c.q.data; }, "dq: .*memory.* q", kBackwardOnly},
      {"dk_is_dv", [](Call& c) { c.dk.data = c.dv.data; }, "(dk: .*memory.* dv|dv: .*memory.* dk)",
       kBackwardOnly},
      {"dq_is_dlse", [](Call& c) { c.dlse.data = c.dq.data; }, "dq: .*memory.* dlse",
       kBackwardOnly},
      {"dv_is_out", [](Call& c) { c.dv.data = c.out.data; }, "dv: .*memory.* out", kBackwardOnly},
      {"dk_inside_dout", [](Call& c) { c.dk.data = static_cast<float*>(c.dout.data) + 8; },
       "dk: .*memory.* dout", kBackwardOnly},
      // Packed lengths.
      {"only_cu_seqlens_q", [](Call& c) { c.cu_seqlens_k = {}; }, "cu_seqlens_k: not given", kBoth,
       true},
      {"only_cu_seqlens_k", [](Call& c) { c.cu_seqlens_q = {}; }, "cu_seqlens_q: not given", kBoth,
       true},
      {"cu_seqlens_of_f32", [](Call& c) { c.cu_seqlens_q.dtype = DType::kF32; },
       "cu_seqlens_q: got f32, want i32", kBoth, true},
      {"cu_seqlens_k_of_f32", [](Call& c) { c.cu_seqlens_k.dtype = DType::kF32; },
       "cu_seqlens_k: got f32, want i32", kBoth, true},
      {"cu_seqlens_of_rank_2", [](Call& c) { c.cu_seqlens_q = resized(c.cu_seqlens_q, {1, 5}); },
       "cu_seqlens_q: got .*\\(1, 5\\).*want", kBoth, true},
      {"cu_seqlens_empty", [](Call& c) { c.cu_seqlens_q.shape[0] = 0; },
       "cu_seqlens_q: got .*\\(0\\).*want", kBoth, true},
      {"cu_seqlens_negative_size", [](Call& c) { c.cu_seqlens_k.shape[0] = -3; },
       "cu_seqlens_k: got negative size -3", kBoth, true},
      {"cu_seqlens_of_another_batch", [](Call& c) { c.cu_seqlens_k.shape[0] = 4; },
       "cu_seqlens_k: got .*\\(4\\).*want .*5", kBoth, true},
      {"cu_seqlens_strided", [](Call& c) { c.cu_seqlens_k.strides[0] = 2; },
       "cu_seqlens_k: .*stride.* 2", kBoth, true},
      {"cu_seqlens_null", [](Call& c) { c.cu_seqlens_q.data = nullptr; },
       "cu_seqlens_q: data is null", kBoth, true},
      {"cu_seqlens_starting_early",
       [](Call& c) { set_lengths(c.cu_seqlens_q, {-1, 8, 8, 11, 15}); },
       "cu_seqlens_q: starts with -1, want >= 0", kBoth, true},
      {"cu_seqlens_starting_negative",
       [](Call& c) { set_lengths(c.cu_seqlens_k, {-1, 10, 15, 15, 19}); },
       "cu_seqlens_k: starts with -1, want >= 0", kBoth, true},
      {"cu_seqlens_decreasing", [](Call& c) { set_lengths(c.cu_seqlens_q, {0, 8, 7, 11, 15}); },
       "cu_seqlens_q: .*7 after 8", kBoth, true},
      {"cu_seqlens_k_decreasing", [](Call& c) { set_lengths(c.cu_seqlens_k, {0, 10, 15, 2, 19}); },
       "cu_seqlens_k: .*2 after 15", kBoth, true},
      {"cu_seqlens_beyond_q", [](Call& c) { set_lengths(c.cu_seqlens_q, {0, 8, 8, 11, 21}); },
       "cu_seqlens_q: .*21.*20", kBoth, true},
      {"cu_seqlens_beyond_k",
       [](Call& c) { set_lengths(c.cu_seqlens_k, {0, 10, 15, 15, INT32_MAX}); },
       "cu_seqlens_k: .*2147483647.*23", kBoth, true},
      {"max_seqlen_q_negative", [](Call& c) { c.options.max_seqlen_q = -1; },
       "max_seqlen_q: got -1, want", kBoth, true},
      {"max_seqlen_q_too_small", [](Call& c) { c.options.max_seqlen_q = 7; },
       "max_seqlen_q: got 7, want .*8", kBoth, true},
      {"max_seqlen_k_too_small", [](Call& c) { c.options.max_seqlen_k = 9; },
       "max_seqlen_k: got 9, want .*10", kBoth, true},
      {"max_seqlen_without_cu_seqlens", [](Call& c) { c.options.max_seqlen_k = 10; },
       "max_seqlen_k: .*cu_seqlens"},
      // Used rows.
      {"seqused_q_negative", [](Call& c) { set_lengths(c.seqused_q, {3, -1}); },
       "seqused_q: got -1 at 1, want 0 to 8"},
      {"seqused_q_too_long", [](Call& c) { set_lengths(c.seqused_q, {9, 0}); },
       "seqused_q: got 9 at 0, want 0 to 8"},
      {"seqused_q_of_another_batch", [](Call& c) { c.seqused_q.shape[0] = 3; },
       "seqused_q: got .*\\(3\\).*want .*2"},
      {"seqused_q_of_i64", [](Call& c) { c.seqused_q.dtype = DType::kI64; },
       "seqused_q: got i64, want i32"},
      {"seqused_q_null", [](Call& c) { c.seqused_q.data = nullptr; }, "seqused_q: data is null"},
      {"seqused_q_on_cuda", [](Call& c) { c.seqused_q = on_cuda(c.seqused_q); },
       "seqused_q: on cuda:0, want cpu"},
      {"packed_seqused_q_too_long", [](Call& c) { set_lengths(c.seqused_q, {8, 0, 4, 4}); },
       "seqused_q: got 4 at 2, want 0 to 3", kBoth, true},
      {"seqused_negative", [](Call& c) { set_lengths(c.seqused_k, {3, -1}); },
       "seqused_k: got -1.*0 to 10"},
      {"seqused_too_long", [](Call& c) { set_lengths(c.seqused_k, {11, 0}); },
       "seqused_k: got 11.*0 to 10"},
      {"seqused_of_another_batch", [](Call& c) { c.seqused_k.shape[0] = 1; },
       "seqused_k: got .*\\(1\\).*want .*2"},
      {"seqused_of_f32", [](Call& c) { c.seqused_k.dtype = DType::kF32; },
       "seqused_k: got f32, want i32"},
      {"seqused_null", [](Call& c) { c.seqused_k.data = nullptr; }, "seqused_k: data is null"},
      {"seqused_on_cuda", [](Call& c) { c.seqused_k = on_cuda(c.seqused_k); },
       "seqused_k: on cuda:0, want cpu"},
      {"packed_seqused_too_long", [](Call& c) { set_lengths(c.seqused_k, {10, 5, 1, 4}); },
       "seqused_k: got 1 .*0 to 0", kBoth, true},
      // ALiBi.
      {"alibi_of_other_heads", [](Call& c) { c.alibi_slopes.shape[0] = 3; },
       "alibi_slopes: got .*\\(3\\).*want .*4"},
      {"alibi_of_another_batch", [](Call& c) { c.alibi_slopes = resized(c.alibi_slopes, {3, 4}); },
       "alibi_slopes: got .*\\(3, 4\\).*want .*2, 4"},
      {"alibi_of_rank_3", [](Call& c) { c.alibi_slopes = resized(c.alibi_slopes, {1, 1, 4}); },
       "alibi_slopes: got 3 dim.*want"},
      {"alibi_of_f64", [](Call& c) { c.alibi_slopes.dtype = DType::kF64; },
       "alibi_slopes: got f64, want f32"},
      {"alibi_null", [](Call& c) { c.alibi_slopes.data = nullptr; }, "alibi_slopes: data is null"},
      {"alibi_on_cuda", [](Call& c) { c.alibi_slopes = on_cuda(c.alibi_slopes); },
       "alibi_slopes: on cuda:0, want cpu"},
      // Sinks.
      {"sinks_of_other_heads", [](Call& c) { c.sinks.shape[0] = 3; },
       "sinks: got .*\\(3\\).*want .*4"},
      {"sinks_of_rank_2", [](Call& c) { c.sinks = resized(c.sinks, {1, 4}); },
       "sinks: got 2 dim.*want 1"},
      {"sinks_of_f64", [](Call& c) { c.sinks.dtype = DType::kF64; }, "sinks: got f64, want f32"},
      {"sinks_of_bf16", [](Call& c) { c.sinks.dtype = DType::kBF16; }, "sinks: got bf16, want f32"},
      {"sinks_strided", [](Call& c) { c.sinks.strides[0] = 2; }, "sinks: .*stride.* 2, want 1"},
      {"sinks_null", [](Call& c) { c.sinks.data = nullptr; }, "sinks: data is null"},
      {"sinks_on_cuda", [](Call& c) { c.sinks = on_cuda(c.sinks); }, "sinks: on cuda:0, want cpu"},
      {"dsinks_of_other_heads", [](Call& c) { c.dsinks.shape[0] = 5; },
       "dsinks: got .*\\(5\\).*want .*4", kBackwardOnly},
      {"dsinks_of_f64", [](Call& c) { c.dsinks.dtype = DType::kF64; }, "dsinks: got f64, want f32",
       kBackwardOnly},
      {"dsinks_strided", [](Call& c) { c.dsinks.strides[0] = 0; },
       "dsinks: last stride is 0, want 1", kBackwardOnly},
      {"dsinks_null", [](Call& c) { c.dsinks.data = nullptr; }, "dsinks: data is null",
       kBackwardOnly},
      {"dsinks_on_cuda", [](Call& c) { c.dsinks = on_cuda(c.dsinks); },
       "dsinks: on cuda:0, want cpu", kBackwardOnly},
      {"dsinks_of_another_dtype",
       [](Call& c) {
         for (Tensor* t : {&c.q, &c.k, &c.v, &c.out, &c.dout, &c.dq, &c.dk, &c.dv, &c.sinks})
           t->dtype = DType::kBF16;
       },
       "dsinks: got f32, want bf16", kBackwardOnly},
      {"dsinks_without_sinks", [](Call& c) { c.sinks = {}; }, "dsinks: given without sinks",
       kBackwardOnly},
      {"dsinks_are_sinks", [](Call& c) { c.dsinks.data = c.sinks.data; },
       "dsinks: .*memory.* sinks", kBackwardOnly},
      {"out_is_sinks", [](Call& c) { c.sinks.data = c.out.data; }, "out: .*memory.* sinks",
       kForwardOnly},
      // Tree masks.
      {"tree_of_another_batch", [](Call& c) { c.tree_mask.shape[0] = 1; },
       "tree_mask: got .*\\(1, 8\\).*want .*2, 8.*batch, sq", kForwardOnly},
      {"tree_of_other_queries", [](Call& c) { c.tree_mask.shape[1] = 7; },
       "tree_mask: got .*\\(2, 7\\).*want .*2, 8", kForwardOnly},
      {"tree_of_rank_1", [](Call& c) { c.tree_mask = resized(c.tree_mask, {16}); },
       "tree_mask: got 1 dim.*want 2 \\(batch, sq\\)", kForwardOnly},
      {"packed_tree_of_other_rows", [](Call& c) { c.tree_mask.shape[0] = 17; },
       "tree_mask: got .*\\(17\\).*want .*20.*total_q", kForwardOnly, true},
      {"packed_tree_of_rank_2", [](Call& c) { c.tree_mask = resized(c.tree_mask, {1, 20}); },
       "tree_mask: got 2 dim.*want 1 \\(total_q\\)", kForwardOnly, true},
      {"tree_of_i32", [](Call& c) { c.tree_mask.dtype = DType::kI32; },
       "tree_mask: got i32, want i64", kForwardOnly},
      {"tree_of_f64", [](Call& c) { c.tree_mask.dtype = DType::kF64; },
       "tree_mask: got f64, want i64", kForwardOnly},
      {"tree_with_gaps", [](Call& c) { c.tree_mask.strides[0] = 9; },
       "tree_mask: got strides \\(9, 1\\), want rows side by side: \\(8, 1\\)", kForwardOnly},
      {"tree_strided", [](Call& c) { c.tree_mask.strides[1] = 2; },
       "tree_mask: last stride is 2, want 1", kForwardOnly},
      {"tree_of_a_top_left_mask", [](Call& c) { c.options.mask.top_left = true; },
       "top_left: given with a tree_mask, want a mask aligned bottom-right", kForwardOnly},
      {"tree_null", [](Call& c) { c.tree_mask.data = nullptr; }, "tree_mask: data is null",
       kForwardOnly},
      {"tree_on_cuda", [](Call& c) { c.tree_mask = on_cuda(c.tree_mask); },
       "tree_mask: on cuda:0, want cpu", kForwardOnly},
      {"out_is_tree", [](Call& c) { c.tree_mask.data = c.out.data; }, "out: .*memory.* tree_mask",
       kForwardOnly},
      // Numbers.
      {"scale_nan", [](Call& c) { c.options.scale = kNan; }, "scale: got nan, want .*finite"},
      {"scale_beyond_f32", [](Call& c) { c.options.scale = 1e39; },
       "scale: got 1e\\+39, want .* within the range of f32"},
      {"scale_beyond_f32_in_log2", [](Call& c) { c.options.scale = -3e38; },
       "scale: got -3e\\+38, want .* within the range of f32"},
      {"scale_infinite", [](Call& c) { c.options.scale = -kInf; },
       "scale: got -inf, want .*finite"},
      {"softcap_nan", [](Call& c) { c.options.softcap = kNan; }, "softcap: got nan, want"},
      {"softcap_negative", [](Call& c) { c.options.softcap = -3; }, "softcap: got -3.*want"},
      {"softcap_infinite", [](Call& c) { c.options.softcap = kInf; }, "softcap: got inf, want"},
      {"dropout_negative", [](Call& c) { c.options.dropout_p = -0.25; },
       "dropout.*: got -0.25, want 0 <= p < 1"},
      {"dropout_of_one", [](Call& c) { c.options.dropout_p = 1; },
       "dropout.*: got 1.*want 0 <= p < 1"},
      {"dropout_above_one", [](Call& c) { c.options.dropout_p = 1.5; },
       "dropout.*: got 1.5, want 0 <= p < 1"},
      {"dropout_nan", [](Call& c) { c.options.dropout_p = kNan; },
       "dropout.*: got nan, want 0 <= p < 1"},
      {"mask_left", [](Call& c) { c.options.mask.left = -2; },
       "window_left: got -2, want -1.*>= 0"},
      {"mask_right", [](Call& c) { c.options.mask.right = INT64_MIN; },
       "window_right: got -9223372036854775808, want -1"},
      {"mask_chunk", [](Call& c) { c.options.mask.chunk = -1; },
       "chunk: got -1, want 0 \\(off\\) or >= 1"},
      {"max_workspace_negative", [](Call& c) { c.options.max_workspace = -1; },
       "max_workspace: got -1 bytes, want >= 0"},
      {"max_workspace_too_small",
       [](Call& c) { c.options = {.max_workspace = 1, .engine = "cpu"}; },
       "max_workspace: got 1 bytes, want at least [0-9]{3,}$"},
      {"threads_negative", [](Call& c) { c.options.threads = -1; }, "threads: got -1, want >= 0"},
      {"engine_unknown", [](Call& c) { c.options.engine = "tpu"; },
       "engine: got \"tpu\", want .*cpu.*reference"},
  };
  return kWrongs;
}

class BadInput : public testing::TestWithParam<Wrong> {
 protected:
  static Case base() {
    Case c{.batch = 2, .sq = 8, .sk = 10, .hq = 4, .hk = 2, .d = 16, .dv = 24};
    c.alibi = Alibi::kHeads;
    c.seqused_q = c.seqused = c.dlse = c.sinks = true;
    c.tree = Tree::kAncestors;
    if (GetParam().packed) c.layout = Layout::kPacked;
    return c;
  }

  void expect_error(bool backward) {
    SCOPED_TRACE(backward ? "backward" : "forward");
    const Wrong& wrong = GetParam();
    Workload w(base(), 1);
    Call call(w);
    const Dense numbers(DType::kI64, {2});
    call.rng_state = numbers;
    call.run = {};
    wrong.change(call);
    w.seal();
    std::string message;
    try {
      if (backward) {
        fulgur::backward(call.backward(), call.options, call.run);
      } else {
        fulgur::forward(call.forward(), call.options, call.run);
      }
    } catch (const Error& error) {
      message = error.what();
      EXPECT_EQ(error.status(), Status::kInvalidArgument);
    }
    EXPECT_TRUE(starts_like(message, wrong.message));
    EXPECT_TRUE(w.nothing_written());

    EXPECT_EQ(call_c(call, backward), FULGUR_INVALID_ARGUMENT);
    EXPECT_TRUE(starts_like(fulgur_last_error(), wrong.message)) << "(C API)";
    EXPECT_TRUE(w.nothing_written());
  }
};

TEST_P(BadInput, IsNamedAndNothingIsWritten) {
  if (GetParam().passes != kBackwardOnly) expect_error(false);
  if (GetParam().passes != kForwardOnly) expect_error(true);
}

// The base itself is right: the errors come from the change alone.
TEST(BadInputs, AreBadByTheirChangeAlone) {
  for (const Layout layout : {Layout::kBshd, Layout::kPacked}) {
    Workload w({.batch = 2,
                .sq = 8,
                .sk = 10,
                .hq = 4,
                .hk = 2,
                .d = 16,
                .dv = 24,
                .layout = layout,
                .alibi = Alibi::kHeads,
                .seqused_q = true,
                .seqused = true,
                .dlse = true,
                .sinks = true,
                .tree = Tree::kAncestors},
               1);
    const Dense numbers(DType::kI64, {2});
    Call call(w);
    call.rng_state = numbers;
    call.run = {};
    EXPECT_EQ(message_of([&] { w.run(); }), "");
    EXPECT_EQ(call_c(call, false), FULGUR_OK) << fulgur_last_error();
    EXPECT_EQ(call_c(call, true), FULGUR_OK) << fulgur_last_error();
  }
}

INSTANTIATE_TEST_SUITE_P(, BadInput, testing::ValuesIn(wrongs()),
                         [](const auto& info) { return std::string(info.param.what); });

/// None of the numbers of a plan may have overflowed.
void expect_sizes(const Details& plan) {
  for (const auto& [name, value] : plan.entries()) {
    if (const auto* part = std::get_if<Details>(&value)) expect_sizes(*part);
    if (const auto* count = std::get_if<int64_t>(&value)) {
      EXPECT_GE(*count, 0) << name;
    }
    if (const auto* number = std::get_if<double>(&value)) {
      EXPECT_GE(*number, 0) << name;
    }
  }
}
void expect_sizes(const Plan& plan) { expect_sizes(plan.details()); }

// Sizes at the bound, times threads, heads and sequences.
TEST(HugeInputs, HaveSizes) {
  const auto tensor = [](DType dtype, std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(nullptr, dtype, shape);
  };
  const auto f32 = [&](std::initializer_list<int64_t> shape) { return tensor(DType::kF32, shape); };
  const auto i32 = [&](int64_t size) { return tensor(DType::kI32, {size}); };
  for (const char* engine : {"cpu", "reference"}) {
    for (const bool invariant : {false, true}) {
      Options options{.threads = 2, .engine = engine};  // whose peaks are measured
      options.invariant = invariant;
      SCOPED_TRACE(engine);
      const Tensor q = f32({1, 1, 1, 1}), k = f32({1, int64_t{1} << 45, 1, 1});
      expect_sizes(plan(ForwardArgs{.q = q, .k = k, .v = k, .out = q}, options));

      // Packed, all rows perhaps in one sequence.
      const int64_t rows = int64_t{1} << 44;
      const Tensor packed = f32({rows, 1, 1}), lse = f32({1, rows}), cu = i32(rows + 1);
      options.max_seqlen_q = options.max_seqlen_k = rows;
      options.threads = 1024;
      expect_sizes(plan(ForwardArgs{.q = packed,
                                    .k = packed,
                                    .v = packed,
                                    .out = packed,
                                    .lse = lse,
                                    .lengths = {.cu_seqlens_q = cu, .cu_seqlens_k = cu}},
                        options));
      expect_sizes(plan(BackwardArgs{.dout = packed,
                                     .q = packed,
                                     .k = packed,
                                     .v = packed,
                                     .out = packed,
                                     .lse = lse,
                                     .dq = packed,
                                     .dk = packed,
                                     .dv = packed,
                                     .lengths = {.cu_seqlens_q = cu, .cu_seqlens_k = cu}},
                        options));

      // Lists of pages, all of which may be one sequence's, in one group.
      const int64_t batch = int64_t{1} << 30;
      const Tensor queries = f32({batch, 1, 1, 8}), pages = f32({16, 1, 1, 8});
      options.max_seqlen_q = options.max_seqlen_k = 0;
      expect_sizes(
          plan(ForwardArgs{.q = queries,
                           .k = pages,
                           .v = pages,
                           .out = queries,
                           .lengths = {.seqused_k = i32(batch)},
                           .cache = {.page_table = i32(batch), .page_indptr = i32(batch + 1)},
                           .shared_prefix = {.prefix_groups = i32(2), .prefix_lens = i32(1)}},
               options));
    }
  }
}

TEST(HugeInputs, HaveNoMap) {
  const Tensor q = Tensor::contiguous(nullptr, DType::kF32, {1, int64_t{1} << 30, 1, 1});
  const Tensor k = Tensor::contiguous(nullptr, DType::kF32, {1, int64_t{1} << 40, 1, 1});
  const Plan made = plan(ForwardArgs{.q = q, .k = k, .v = k, .out = q}, {.engine = "reference"});
  try {
    made.tiles();
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kUnsupported);
    EXPECT_STREQ(error.what(),
                 "tiles: the map has 16777216 x 17179869184 of them, want at most 2^31");
  }
}

}  // namespace
}  // namespace fulgur::test

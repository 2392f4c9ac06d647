// Big tensors and little memory.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <deque>
#include <fstream>
#include <string>

#include "engine_memory.h"
#include "engines.h"
#include "fulgur/cuda.h"
#include "oracle.h"

namespace fulgur::test {
namespace {

class Memory : public EveryEngine {};

// Uninitialized memory of an engine's device; on the CPU zeros that take memory only where they are
// written. Larger than a Storage may be, and no copy of the host's.
class BigBuffer {
 public:
  BigBuffer(Device device, int64_t bytes) : device_(device), bytes_(static_cast<size_t>(bytes)) {
    if (device_.type == DeviceType::kCuda) {
      try {
        data_ = cuda::allocate(bytes, device_.index);
      } catch (const Error& error) {
        if (error.status() != Status::kOutOfMemory) throw;
      }
      return;
    }
    void* const mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped != MAP_FAILED) data_ = mapped;
  }
  ~BigBuffer() {
    if (data_ == nullptr) return;
    if (device_.type == DeviceType::kCuda) {
      cuda::deallocate(data_, device_.index);
    } else {
      munmap(data_, bytes_);
    }
  }
  BigBuffer(const BigBuffer&) = delete;
  /// Null where the machine has not that much.
  void* data() const { return data_; }

 private:
  Device device_;
  size_t bytes_;
  void* data_ = nullptr;
};

// Calls body(offset) with the element offset of every row, row-major.
template <class Body>
void for_each_row(const Tensor& t, Body body) {
  for (int64_t b = 0; b < t.shape[0]; ++b) {
    for (int64_t i = 0; i < t.shape[1]; ++i) {
      for (int64_t h = 0; h < t.shape[2]; ++h) {
        body(b * t.strides[0] + i * t.strides[1] + h * t.strides[2]);
      }
    }
  }
}

// Copies the elements of a tensor (batch, seqlen, heads, dim) on either device.
void copy_rows(const Tensor& to, const Tensor& from) {
  std::vector<int64_t> from_offsets;
  for_each_row(from, [&](int64_t offset) { from_offsets.push_back(offset); });
  const bool cuda = to.device != from.device;
  const int64_t size = size_of(to.dtype);
  auto next = from_offsets.begin();
  for_each_row(to, [&](int64_t offset) {
    void* const target = static_cast<std::byte*>(to.data) + offset * size;
    const void* const source = static_cast<std::byte*>(from.data) + *next++ * size;
    if (cuda) {
      cuda::copy(target, source, to.shape[3] * size);
    } else {
      std::memcpy(target, source, static_cast<size_t>(to.shape[3] * size));
    }
  });
}

// Peak resident memory of this process in KiB since the last reset.
int64_t peak_kib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::stoll(line.substr(6));
  }
  return -1;
}

bool reset_peak() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

// Sequences, rows and heads that lie more than 2^31 elements apart, one of them or all, in every
// tensor but lse, forward and backward.
TEST_P(Memory, StridesBeyond32Bits) {
  const int64_t batch = 2, s = 3, h = 2, d = 8, near = 16, far = (int64_t{1} << 31) + 64;
  const Device device = device_of(engine());
  const std::array<int64_t, 4> layouts[] = {{far, near * h, near, 1},
                                            {near * h, 2 * near * h, far, 1},
                                            {near * h, far, near, 1},
                                            {far * s * h, far, far * s, 1}};
  int laid_out = 0;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const Case c{.dtype = dtype,
                 .batch = batch,
                 .sq = s,
                 .sk = s,
                 .hq = h,
                 .hk = h,
                 .d = d,
                 .dv = d,
                 .mask = causal()};
    for (const auto& strides : layouts) {
      SCOPED_TRACE(testing::PrintToString(strides));
      Workload w(c, 1);
      w.options.engine = engine();
      const Expected e = expect(w);
      const auto spread = [&](Tensor t) {
        t.device = device;
        t.data = nullptr;
        t.strides = strides;
        return t;
      };
      ForwardTensors f = w.forward;
      BackwardTensors g = w.backward;
      for (Tensor* t : {&f.q, &f.k, &f.v, &f.out, &g.dout, &g.dq, &g.dk, &g.dv}) *t = spread(*t);
      g.q = f.q;
      g.k = f.k;
      g.v = f.v;
      g.out = f.out;
      // Tensors without data can be planned for: memory is taken for what the engine computes.
      EngineMemory memory(engine());
      f.lse = g.lse = memory.at(w.forward.lse);
      if (!computes([&] { plan(ForwardArgs(f), w.options); })) continue;
      const bool backwards = computes([&] { plan(BackwardArgs(g), w.options); });
      std::vector<Tensor*> places = {&f.q, &f.k, &f.v, &f.out};
      if (backwards) places.insert(places.end(), {&g.dout, &g.dq, &g.dk, &g.dv});
      const int64_t elements =
          (batch - 1) * strides[0] + (s - 1) * strides[1] + (h - 1) * strides[2] + d;
      std::deque<BigBuffer> buffers;
      for (Tensor* t : places) {
        t->data = buffers.emplace_back(device, elements * size_of(dtype)).data();
      }
      if (std::any_of(places.begin(), places.end(), [](Tensor* t) { return t->data == nullptr; })) {
        continue;
      }
      ++laid_out;
      copy_rows(f.q, w.forward.q);
      copy_rows(f.k, w.forward.k);
      copy_rows(f.v, w.forward.v);
      forward(f, w.options);
      memory.bring_back();
      copy_rows(w.forward.out, f.out);
      EXPECT_TRUE(forward_is_right(w, e));
      if (!backwards) continue;
      g.q = f.q;
      g.k = f.k;
      g.v = f.v;
      g.out = f.out;
      copy_rows(g.dout, w.backward.dout);
      backward(g, w.options);
      copy_rows(w.backward.dq, g.dq);
      copy_rows(w.backward.dk, g.dk);
      copy_rows(w.backward.dv, g.dv);
      EXPECT_TRUE(backward_is_right(w, e));
    }
  }
  RecordProperty("laid_out", laid_out);
  if (laid_out == 0) GTEST_SKIP() << "this machine has not the memory";
}

// A key cache of more than 2^31 elements of which a window sees the end.
TEST_P(Memory, MoreThan2To31Elements) {
  if (engine() == "reference") GTEST_SKIP() << "it would copy all keys into 34 GB of doubles";
  const int64_t d = 64, sk = (int64_t{1} << 31) / d + 1000, left = 150;
  const Device device = device_of(engine());
  const BigBuffer k(device, sk * d * 2), v(device, sk * d * 2);
  if (k.data() == nullptr || v.data() == nullptr) GTEST_SKIP() << "this machine has no 9 GB for it";
  const Case c{.dtype = DType::kBF16, .sq = 1, .sk = left + 1, .d = d, .dv = d};
  Workload w(c, 2);
  w.options.engine = engine();
  const Expected e = expect(w);
  ForwardTensors args = w.forward;
  for (auto [tensor, buffer] : {std::pair{&args.k, &k}, {&args.v, &v}}) {
    const Tensor tail = *tensor;
    *tensor = Tensor::contiguous(buffer->data(), c.dtype, {1, sk, 1, d}, device);
    Tensor end = *tensor;
    end.data = static_cast<std::byte*>(end.data) + (sk - left - 1) * d * 2;
    end.shape[1] = left + 1;
    copy_rows(end, tail);
  }
  w.options.mask = window(left, 0);
  compute(args, w.options);
  EXPECT_TRUE(forward_is_right(w, e));
}

// Pages, rows and heads of a cache that lie more than 2^31 elements apart.
TEST_P(Memory, PagesBeyond32Bits) {
  const int64_t page = 4, used = 9, h = 2, d = 8, far = (int64_t{1} << 31) + 64;
  const Device device = device_of(engine());
  Workload w({.dtype = DType::kBF16, .sq = 2, .sk = used, .hq = h, .hk = h, .d = d, .dv = d}, 4);
  w.options.engine = engine();
  const Expected e = expect(w);
  const std::array<int64_t, 3> ids{2, 0, 1};
  const Dense table(DType::kI32, {1, 3}), lengths(DType::kI32, {1});
  write(table, std::vector<double>(ids.begin(), ids.end()));
  write(lengths, std::vector<double>{used});
  const std::array<int64_t, 4> layouts[] = {
      {far, h * d, d, 1}, {page * h * d, h * d, far, 1}, {h * d, far, d, 1}, {-far, h * d, d, 1}};
  for (const auto& strides : layouts) {
    SCOPED_TRACE(testing::PrintToString(strides));
    w.seal();
    EngineMemory memory(engine());
    ForwardTensors args = memory.at(w.forward);
    args.seqused_k = memory.at(lengths);
    args.page_table = memory.at(table);
    std::deque<BigBuffer> buffers;
    for (auto [to, from] : {std::pair{&args.k, w.forward.k}, {&args.v, w.forward.v}}) {
      const int64_t back = std::max<int64_t>(0, -2 * strides[0]);
      int64_t elements = d;
      for (int i = 0; i < 3; ++i) {
        elements += std::abs(strides[i]) * (std::array<int64_t, 3>{3, page, h}[i] - 1);
      }
      auto* const data = static_cast<std::byte*>(buffers.emplace_back(device, elements * 2).data());
      if (data == nullptr) GTEST_SKIP() << "this machine has not the memory";
      Tensor cache = Tensor::contiguous(data + back * 2, DType::kBF16, {3, page, h, d}, device);
      cache.strides = strides;
      *to = cache;
      for (int64_t j = 0; j < used; ++j) {
        Tensor row = cache, key = from;
        row.shape = key.shape = {1, 1, h, d};
        row.data = static_cast<std::byte*>(cache.data) +
                   (ids.at(static_cast<size_t>(j / page)) * strides[0] + j % page * strides[1]) * 2;
        key.data = static_cast<std::byte*>(from.data) + j * from.strides[1] * 2;
        copy_rows(row, key);
      }
    }
    if (!computes([&] { forward(args, w.options); })) return;
    memory.bring_back();
    EXPECT_TRUE(forward_is_right(w, e));
  }
}

// The score matrix would take 4 GiB; the plan says how much it takes besides the tensors.
TEST_P(Memory, GrowsWithTheSequenceNotItsSquare) {
  if (engine() != "cpu") GTEST_SKIP() << "measured on the CPU engine";
  const auto long_case = [](int64_t n) {
    return Case{.sq = n, .sk = n, .d = 64, .dv = 64, .mask = causal()};
  };
  Workload first(long_case(1024), 3), w(long_case(32768), 3);
  first.options.engine = w.options.engine = engine();
  first.run();  // first-use costs (threads, code pages) are not the algorithm's
  if (!reset_peak()) GTEST_SKIP() << "/proc/self/clear_refs is not writable here";
  const int64_t before = peak_kib();
  w.run();
  EXPECT_LE(peak_kib() - before, 64 * 1024);
  for (const int64_t bytes : {plan(w.forward, w.options).workspace().bytes,
                              plan(w.backward, w.options).workspace().bytes}) {
    EXPECT_LE(bytes, 64 << 20);
  }
}

// Doubling the length at most doubles the workspace (plus a constant), for every shape of plan.
TEST_P(Memory, WorkspaceIsLinear) {
  for (const int64_t sq : {1, 8, 0}) {  // 0: as many queries as keys
    for (const int64_t heads : {1, 8}) {
      auto bytes = [&](int64_t n, bool backward) {
        const int64_t rows = sq ? sq : n;
        const Device device = device_of(engine());
        const auto q = Tensor::contiguous(nullptr, DType::kBF16, {1, rows, heads, 64}, device);
        const auto k = Tensor::contiguous(nullptr, DType::kBF16, {1, n, heads, 64}, device);
        const auto lse = Tensor::contiguous(nullptr, DType::kF32, {1, heads, rows}, device);
        Options options;
        options.engine = engine();
        options.deterministic = true;
        options.threads = 4;
        return backward ? plan(BackwardArgs{q, q, k, k, q, lse, q, k, k}, options).workspace().bytes
                        : plan(ForwardArgs{q, k, k, q, lse}, options).workspace().bytes;
      };
      for (const bool backward : {false, true}) {
        int64_t one = 0, two = 0;
        if (!computes([&] { one = bytes(16384, backward), two = bytes(32768, backward); })) {
          continue;
        }
        EXPECT_LE(two, 2 * one + (1 << 20)) << "sq " << sq << ", heads " << heads;
        // At most a few copies of the tensors, and 256 MB of dS; the reference engine's are of
        // doubles.
        EXPECT_LE(one, (256 << 20) + 64 * 16384 * heads * 64 * int64_t{sizeof(float)});
      }
    }
  }
}

// With a size of 0 there may be any number of heads and sequences: nothing walks over them.
TEST_P(Memory, NothingToDoTakesNoTime) {
  if (device_of(engine()).type != DeviceType::kCpu)
    GTEST_SKIP() << "of tensors in the CPU's memory";
  const int64_t many = int64_t{1} << 62;
  std::vector<float> memory(64);
  const auto tensor = [&](std::initializer_list<int64_t> shape) {
    return Tensor::contiguous(memory.data(), DType::kF32, shape);
  };
  // The same element at every place but along the last dimension.
  const auto broadcast = [&](std::initializer_list<int64_t> shape) {
    Tensor t = tensor(shape);
    std::fill_n(t.strides.begin(), t.rank - 1, 0);
    return t;
  };
  Options options;
  options.engine = engine();
  Dense none(DType::kI32, {4}), keys(DType::kI32, {4});
  write(none, std::vector<double>(4));
  write(keys, std::vector{0.0, 1.0, 1.0, 4.0});

  const Tensor no_q = broadcast({0, many, 8}), no_lse = broadcast({many, 0});
  const auto run_forward = [&](const Tensor& q, const Tensor& k, const Tensor& lse,
                               const Tensor& cu_q, const Tensor& cu_k) {
    forward(ForwardTensors{.q = q,
                           .k = k,
                           .v = k,
                           .out = q,
                           .lse = lse,
                           .cu_seqlens_q = cu_q,
                           .cu_seqlens_k = cu_k},
            options);
  };
  const auto run_backward = [&](const Tensor& q, const Tensor& k, const Tensor& lse,
                                const Tensor& dk, const Tensor& dv, const Tensor& cu_q,
                                const Tensor& cu_k) {
    backward(BackwardTensors{.dout = q,
                             .q = q,
                             .k = k,
                             .v = k,
                             .out = q,
                             .lse = lse,
                             .dq = q,
                             .dk = dk,
                             .dv = dv,
                             .cu_seqlens_q = cu_q,
                             .cu_seqlens_k = cu_k},
             options);
  };
  run_forward(no_q, no_q, no_lse, none, none);
  run_backward(no_q, no_q, no_lse, no_q, no_q, none, none);

  const int64_t heads = int64_t{1} << 40;
  run_forward(broadcast({0, heads, 8}), broadcast({4, heads, 8}), broadcast({heads, 0}), none,
              keys);
  Dense dk(DType::kF32, {4, 1, 8}), dv(DType::kF32, {4, 1, 8});
  run_backward(no_q, broadcast({4, 1, 8}), no_lse, dk, dv, none, keys);
  for (const Dense* t : {&dk, &dv}) EXPECT_EQ(read(*t), std::vector<double>(4 * 8));

  const Tensor empty = broadcast({many, 0, many, 8}), empty_lse = broadcast({many, many, 0});
  run_forward(empty, empty, empty_lse, {}, {});
  run_backward(empty, empty, empty_lse, empty, empty, {}, {});
}

// Time and memory depend on the keys that a window shows, not on all keys: for rows in blocks and
// for splits.
TEST_P(Memory, HiddenKeysTakeNoTime) {
  if (engine() == "reference") GTEST_SKIP() << "it would copy all keys";
  if (device_of(engine()).type != DeviceType::kCpu)
    GTEST_SKIP() << "of tensors in the CPU's memory";
  std::vector<float> memory(64, 1);
  Tensor k = Tensor::contiguous(memory.data(), DType::kF32, {1, int64_t{1} << 40, 1, 8});
  k.strides = {0, 0, 0, 1};
  for (const int64_t sq : {1, 3, 50}) {
    for (const bool invariant : {false, true}) {
      for (const Mask& mask : {window(1000, 0), chunked(1000), chunked(1000, causal())}) {
        Workload w({.sq = sq, .d = 8, .dv = 8}, 1);
        w.options.engine = engine();
        w.options.mask = mask;
        w.options.invariant = invariant;
        const ForwardArgs args{w.forward.q, k, k, w.forward.out, w.forward.lse};
        if (!computes([&] { forward(args, w.options); })) continue;
        for (const double x : read(w.forward.out)) ASSERT_NEAR(x, 1, 1e-5);
        EXPECT_LE(plan(args, w.options).workspace().bytes, 1 << 20);
      }
    }
  }
}

// The longest sequence may end where a chunk begins and see one key, and a shorter one a whole
// chunk: a plan has room for that.
TEST_P(Memory, WorkspaceHasRoomForWholeChunks) {
  const auto bytes = [&](int64_t sk, const Mask& mask) {
    const Device device = device_of(engine());
    const auto q = Tensor::contiguous(nullptr, DType::kBF16, {3, 1, 8, 64}, device);
    const auto k = Tensor::contiguous(nullptr, DType::kBF16, {3, sk, 1, 64}, device);
    const auto used = Tensor::contiguous(nullptr, DType::kI32, {3}, device);
    const Options options{.mask = mask, .threads = 4, .engine = engine()};
    const ForwardArgs args{.q = q, .k = k, .v = k, .out = q, .lengths = {.seqused_k = used}};
    return plan(args, options).workspace().bytes;
  };
  int64_t whole = 0, one = 0;
  if (!computes([&] { whole = bytes(40000, chunked(10000, causal())); })) return;
  one = bytes(40001, chunked(10000, causal()));
  EXPECT_GE(one, whole);
}

// Lengths that are not there yet may be those of any number of sequences, most of them empty.
TEST_P(Memory, PlansAnyNumberOfSequences) {
  if (engine() == "cuda") GTEST_SKIP() << "needs a GPU to plan";
  const Tensor rows = Tensor::contiguous(nullptr, DType::kF32, {100, 3, 8});
  const Tensor lse = Tensor::contiguous(nullptr, DType::kF32, {3, 100});
  const Tensor cu = Tensor::contiguous(nullptr, DType::kI32, {10'000'000'000'001});
  const Options options{.max_seqlen_q = 100, .max_seqlen_k = 100, .engine = engine()};
  const ForwardArgs forward{.q = rows,
                            .k = rows,
                            .v = rows,
                            .out = rows,
                            .lengths = {.cu_seqlens_q = cu, .cu_seqlens_k = cu}};
  const BackwardArgs backward{.dout = rows,
                              .q = rows,
                              .k = rows,
                              .v = rows,
                              .out = rows,
                              .lse = lse,
                              .dq = rows,
                              .dk = rows,
                              .dv = rows,
                              .lengths = {.cu_seqlens_q = cu, .cu_seqlens_k = cu}};
  for (const int64_t bytes :
       {plan(forward, options).workspace().bytes, plan(backward, options).workspace().bytes}) {
    EXPECT_GE(bytes, 0);
    EXPECT_LT(bytes, int64_t{1} << 30);
  }
}

FULGUR_EVERY_ENGINE(Memory);

}  // namespace
}  // namespace fulgur::test

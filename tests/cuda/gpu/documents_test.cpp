// Masks that a tensor decides, by maps of tiles: a million tokens of documents, and numbers of
// documents that change between runs of one plan and between replays of a graph.
#include <cmath>
#include <map>

#include "device.h"
#include "fulgur/expression.h"

namespace fulgur::test {
namespace {

using Documents = OnGpu;

constexpr DType kDType = DType::kBF16;

Expr same_document() {
  return parse_expression("doc[b, q] == doc[b, k]", {TensorSymbol("doc", DType::kI32, 2)});
}

/// Rows of random numbers in device memory: the same ones over and over, so that the host makes
/// few of them.
class RepeatedRows {
 public:
  static constexpr int64_t kRows = 1 << 15;

  RepeatedRows(int64_t rows, int64_t heads, int64_t d, uint64_t seed)
      : host_(kDType, {1, kRows, heads, d}),
        tensor_(Tensor::contiguous(nullptr, kDType, {1, rows, heads, d}, {DeviceType::kCuda, 0})) {
    std::mt19937_64 random(seed);
    randomize(host_, random);
    const int64_t bytes = kRows * heads * d * size_of(kDType);
    auto* const data = static_cast<std::byte*>(cuda::allocate(rows / kRows * bytes));
    for (int64_t i = 0; i < rows / kRows; ++i)
      cuda::copy(data + i * bytes, host_.tensor().data, bytes);
    tensor_.data = data;
  }
  ~RepeatedRows() { cuda::deallocate(tensor_.data); }
  RepeatedRows(const RepeatedRows&) = delete;
  operator const Tensor&() const { return tensor_; }
  operator ConstTensor() const { return tensor_; }

 private:
  Dense host_;
  Tensor tensor_;
};

/// Rows of (1, rows, heads, d), or of an LSE (1, heads, rows), in device memory, as doubles.
std::vector<double> rows_of(const Tensor& t, int64_t begin, int64_t count) {
  const int64_t lines = t.rank == 3 ? t.shape[1] : 1;
  const int64_t size = size_of(t.dtype) * (t.rank == 3 ? 1 : t.shape[2] * t.shape[3]);
  std::vector<std::byte> bytes(static_cast<size_t>(lines * count * size));
  const auto* const data = static_cast<const std::byte*>(t.data);
  for (int64_t line = 0; line < lines; ++line) {
    cuda::copy(bytes.data() + line * count * size,
               data + (line * t.shape[t.rank - 1] + begin) * size, count * size);
  }
  const auto elements = static_cast<int64_t>(bytes.size()) / size_of(t.dtype);
  return read(Tensor::contiguous(bytes.data(), t.dtype, {elements}));
}

/// The norm of the difference by that of what is wanted.
double difference(const std::vector<double>& got, const std::vector<double>& want) {
  double error = 0, all = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    error += (got[i] - want[i]) * (got[i] - want[i]);
    all += want[i] * want[i];
  }
  return std::sqrt(error / all);
}

/// The document of each token, of about 1000 tokens each.
struct Ragged {
  std::vector<int32_t> of_tokens;
  std::vector<int64_t> begins;

  explicit Ragged(int64_t tokens) {
    std::mt19937_64 random(5);
    for (int64_t i = 0; i < tokens; ++i) {
      if (i == 0 || random() % 1000 == 0) begins.push_back(i);
      of_tokens.push_back(static_cast<int32_t>(begins.size()));
    }
    begins.push_back(tokens);
  }
};

TEST_F(Documents, OfAMillionTokensAreThoseOfCallsOfEach) {
  constexpr int64_t kTokens = 1 << 20, kHq = 2, kHk = 1, kDim = 64;
  constexpr double kBound = 0.006;  // bf16 rounds P, dS and the result
  const Ragged documents(kTokens);
  const RepeatedRows q(kTokens, kHq, kDim, 1), k(kTokens, kHk, kDim, 2), v(kTokens, kHk, kDim, 3),
      dout(kTokens, kHq, kDim, 4), out(kTokens, kHq, kDim, 5), dq(kTokens, kHq, kDim, 6),
      dk(kTokens, kHk, kDim, 7), dv(kTokens, kHk, kDim, 8);
  const DeviceTensor lse(DType::kF32, {1, kHq, kTokens}, 9), numbers(documents.of_tokens);
  Tensor doc = numbers;
  doc.rank = 2;
  doc.shape[0] = 1, doc.shape[1] = kTokens;
  doc.strides[0] = kTokens, doc.strides[1] = 1;
  for (const Mask& mask : {causal(), full()}) {
    SCOPED_TRACE(mask == causal() ? "causal" : "full");
    Options options{.mask = mask, .engine = "cuda"};
    options.mask_mod = same_document();
    ForwardArgs forward{q, k, v, out, lse};
    forward.tensors = {{"doc", doc, {}}};
    BackwardArgs backward{dout, q, k, v, out, lse, dq, dk, dv};
    backward.tensors = forward.tensors;
    fulgur::forward(forward, options);
    fulgur::backward(backward, options);
    cuda::synchronize();

    const auto count = static_cast<int64_t>(documents.begins.size()) - 1;
    for (const int64_t n : {int64_t{0}, count / 3, count / 2, count - 1}) {
      const int64_t begin = documents.begins[n];
      const int64_t rows = std::min<int64_t>(documents.begins[n + 1] - begin, 1500);
      if (rows < documents.begins[n + 1] - begin && mask != causal()) continue;
      SCOPED_TRACE("document " + std::to_string(n));
      const auto on_host = [&](const Tensor& from) {
        auto to = std::make_unique<Dense>(
            DType::kF64, std::initializer_list<int64_t>{1, rows, from.shape[2], kDim});
        write(*to, rows_of(from, begin, rows));
        return to;
      };
      const auto its_q = on_host(q), its_k = on_host(k), its_v = on_host(v),
                 its_dout = on_host(dout);
      const auto its_out = on_host(out), its_dq = on_host(dq), its_dk = on_host(dk),
                 its_dv = on_host(dv);
      Dense its_lse(DType::kF64, {1, kHq, rows});
      const Options plain{.mask = mask, .engine = "reference"};
      fulgur::forward({*its_q, *its_k, *its_v, *its_out, its_lse}, plain);
      EXPECT_LT(difference(rows_of(out, begin, rows), read(*its_out)), kBound);
      EXPECT_LT(difference(rows_of(lse, begin, rows), read(its_lse)), 1e-5);
      fulgur::backward(
          {*its_dout, *its_q, *its_k, *its_v, *its_out, its_lse, *its_dq, *its_dk, *its_dv}, plain);
      EXPECT_LT(difference(rows_of(dq, begin, rows), read(*its_dq)), kBound);
      if (rows < documents.begins[n + 1] - begin) continue;  // its keys have other queries, too
      EXPECT_LT(difference(rows_of(dk, begin, rows), read(*its_dk)), kBound);
      EXPECT_LT(difference(rows_of(dv, begin, rows), read(*its_dv)), kBound);
    }
  }
}

// A map that each CTA makes, and one of kernels before it.
TEST_F(Documents, ChangeBetweenRunsAndReplays) {
  const Stream stream;
  for (const int64_t rows : {700, 20000}) {
    SCOPED_TRACE(rows);
    const DeviceCall call(1, rows, rows, 2, 64);
    std::vector<std::vector<int32_t>> all(3);
    for (int64_t i = 0; i < rows; ++i) {
      all[0].push_back(static_cast<int32_t>(i / 150));
      all[1].push_back(static_cast<int32_t>(i * 3 / rows));
      all[2].push_back(static_cast<int32_t>(i % 2));
    }
    const DeviceTensor numbers(all[0]);
    Tensor doc = numbers;
    doc.rank = 2;
    doc.shape[0] = 1, doc.shape[1] = rows;
    doc.strides[0] = rows, doc.strides[1] = 1;
    ForwardArgs args = call.args();
    args.tensors = {{"doc", doc, {}}};
    Options options{.engine = "cuda"};
    options.mask_mod = same_document();
    const Plan plan = fulgur::plan(args, options);
    const Graph graph(stream, [&] { plan.run(args, stream.run()); });
    std::map<size_t, std::vector<std::byte>> results;
    for (const size_t i : {0, 1, 2, 0, 2}) {
      cuda::copy(doc.data, all[i].data(), numbers.bytes());
      call.poison(stream.get());
      graph.launch(stream);
      stream.synchronize();
      const std::vector<std::byte> replayed = call.result();
      call.poison(stream.get());
      plan.run(args, stream.run());
      stream.synchronize();
      EXPECT_EQ(call.result(), replayed);
      const auto [before, is_new] = results.try_emplace(i, replayed);
      EXPECT_TRUE(is_new || before->second == replayed);
      for (const auto& [other, bits] : results) EXPECT_TRUE(other == i || bits != replayed);
    }
  }
}

}  // namespace
}  // namespace fulgur::test

#include "distributed_cases.h"

#include <algorithm>
#include <cmath>

namespace fulgur::test {

void add_expressions(Workload& w) {
  constexpr int64_t kWidth = 40;
  static const Dense table(DType::kF32, {4, kWidth}), gradient(DType::kF32, {4, kWidth});
  static const Dense of_rows(DType::kI32, {2, 512});
  static std::vector<double> documents(2 * 512);
  static std::vector<double> values(4 * kWidth);
  for (size_t i = 0; i < values.size(); ++i) values[i] = std::sin(static_cast<float>(i));
  for (size_t i = 0; i < documents.size(); ++i) documents[i] = static_cast<double>(i % 512 / 90);
  write(table, values);
  write(of_rows, documents);
  const TensorSymbol of_table("table", DType::kF32, 2), of_documents("doc", DType::kI32, 2);
  w.options.score_mod = parse_expression(
      "score + table[h, clamp(q - k, 0, 39)] * (1 + to_float(b) / to_float(sk + sq + hk))",
      {of_table});
  w.options.mask_mod = parse_expression("doc[b, q] == doc[b, k] || k < 5", {of_documents});
  w.score_value = [](const ScorePlace& p) {
    const int64_t at = std::clamp<int64_t>(p.q - p.k, 0, 39);
    return p.score + values[p.h * kWidth + at] *
                         (1 + static_cast<double>(p.b) / static_cast<double>(p.sk + p.sq + p.hk));
  };
  w.mask_value = [](const ScorePlace& p) {
    return documents[p.b * 512 + p.q] == documents[p.b * 512 + p.k] || p.k < 5 ? 1.0 : 0.0;
  };
  w.forward.tensors = {{"table", table}, {"doc", of_rows}};
  w.backward.tensors = w.forward.tensors;
  w.backward.tensors[0].grad = gradient;
}

std::vector<DistributedCase> distributed_cases() {
  const std::vector<Rows> documents = {{0, 0, 200, 200},
                                       {200, 200, 1, 1},
                                       {201, 201, 0, 0},
                                       {201, 201, 130, 130},
                                       {331, 331, 300, 300}};
  const Case base{.dtype = DType::kF32,
                  .batch = 2,
                  .sq = 300,
                  .sk = 300,
                  .hq = 4,
                  .hk = 2,
                  .d = 32,
                  .dv = 32,
                  .mask = causal()};
  std::vector<DistributedCase> all;
  const auto add = [&](Sharding sharding, DType dtype, int64_t batch, int64_t sq, int64_t sk,
                       const std::function<void(Case&)>& change) {
    DistributedCase& problem = all.emplace_back(DistributedCase{base, {sharding}});
    problem.c.dtype = dtype;
    problem.c.batch = batch;
    problem.c.sq = sq;
    problem.c.sk = sk;
    change(problem.c);
  };
  add(Sharding::kZigzag, DType::kF32, 2, 600, 600, [](Case& c) {
    c.dv = 48;
    c.dlse = true;
  });
  add(Sharding::kContiguous, DType::kBF16, 1, 530, 530, [](Case& c) {
    c.hk = 4;
    c.d = c.dv = 64;
    c.mask = window(100, 30);
    c.alibi = Alibi::kBatchHeads;
    c.dropout = 0.2;
  });
  add(Sharding::kByArea, DType::kF16, 5, 300, 300, [](Case& c) {
    c.layout = Layout::kPacked;
    c.softcap = 8;
    c.dropout = 0.1;
    c.dlse = c.sinks = true;
  });
  all.back().lengths = documents;
  add(Sharding::kContiguous, DType::kF32, 2, 200, 330, [](Case& c) {
    c.hq = 2;
    c.hk = 1;
    c.d = c.dv = 40;
    c.mask = full();
    c.sinks = true;
  });
  add(Sharding::kZigzag, DType::kBF16, 1, 400, 500, [](Case& c) {
    c.hk = 1;
    c.d = 64;
    c.mask = chunked(150, causal());
    c.alibi = Alibi::kHeads;
    c.dropout = 0.3;
  });
  add(Sharding::kZigzag, DType::kF64, 1, 150, 150, [](Case& c) {
    c.hq = c.hk = 2;
    c.d = c.dv = 16;
    c.mask = top_left(causal());
  });
  add(Sharding::kZigzag, DType::kF32, 3, 300, 330, [](Case& c) {
    c.d = 16;
    c.dropout = 0.1;
    c.seqused_q = c.seqused = c.dlse = c.sinks = true;
    c.bias = Bias::kAll;
  });
  add(Sharding::kContiguous, DType::kBF16, 2, 330, 330, [](Case& c) {
    c.hq = c.hk = 2;
    c.mask = window(150, 20);
    c.alibi = Alibi::kBatchHeads;
    c.seqused = true;
    c.bias = Bias::kKeys;
  });
  add(Sharding::kZigzag, DType::kF16, 1, 260, 260, [](Case& c) {
    c.hk = 4;
    c.bias = Bias::kHeads;
  });
  add(Sharding::kZigzag, DType::kF32, 2, 300, 300, [](Case&) {});
  all.back().add = add_expressions;
  return all;
}

}  // namespace fulgur::test

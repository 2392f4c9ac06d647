#include "ranks.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>

#include "on_gpu.h"

namespace fulgur::test {

Taken take(const Tensor& from, int dim, const std::vector<int64_t>& rows) {
  Taken taken;
  std::vector<int64_t> shape(from.shape.begin(), from.shape.begin() + from.rank);
  shape[dim] = static_cast<int64_t>(rows.size());
  const int64_t elements =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies());
  taken.memory.resize(elements * size_of(from.dtype) + 1);
  taken.tensor = Tensor::contiguous(taken.memory.data(), from.dtype, shape);
  const int64_t size = size_of(from.dtype);
  each_pair(from, taken.tensor, dim, rows,
            [&](std::byte* x, std::byte* y) { std::memcpy(y, x, size); });
  return taken;
}

Bytes compute_rank(const DistributedWorkload& s, const Group& group, Device device) {
  const std::vector<int64_t> q_rows = s.rows(true, group.size(), group.rank());
  const std::vector<int64_t> k_rows = s.rows(false, group.size(), group.rank());
  std::deque<Taken> memory;
  ForwardTensors f = s.w.forward;
  BackwardTensors g = s.w.backward;
  std::map<void*, Tensor> local;
  const auto own = [&](Tensor& t, int dim, const std::vector<int64_t>& rows) {
    if (!t.given()) return;
    const auto [at, fresh] = local.try_emplace(t.data);
    if (fresh) {
      memory.push_back(take(t, dim, rows));
      at->second = memory.back().tensor;
    }
    t = at->second;
  };
  for (Tensor* t : {&f.q, &f.out, &g.q, &g.out, &g.dout, &g.dq}) own(*t, s.row_dim(), q_rows);
  for (Tensor* t : {&f.k, &f.v, &g.k, &g.v, &g.dk, &g.dv}) own(*t, s.row_dim(), k_rows);
  for (Tensor* t : {&f.lse, &g.lse, &g.dlse}) own(*t, s.lse_dim(), q_rows);
  Options options = s.w.options;
  options.threads = 1;
  options.max_seqlen_q = options.max_seqlen_k = 0;
  OnGpu gpu(device);
  for (Tensor* t : {&f.q, &f.k, &f.v, &f.out, &f.lse, &f.alibi_slopes, &f.sinks, &f.bias}) {
    gpu.place(*t);
  }
  for (Tensor* t : {&g.q, &g.k, &g.v, &g.out, &g.dout, &g.dq, &g.dk, &g.dv, &g.lse, &g.dlse,
                    &g.alibi_slopes, &g.sinks, &g.dsinks, &g.bias, &g.dbias}) {
    gpu.place(*t);
  }
  for (TensorBinding& t : f.tensors) gpu.place(t.tensor);
  for (TensorBinding& t : g.tensors) {
    gpu.place(t.tensor);
    gpu.place(t.grad);
  }
  forward(f, options, group, s.problem.distribution, s.w.run_options);
  backward(g, options, group, s.problem.distribution, s.w.run_options);
  gpu.bring_back();
  Bytes all;
  for (const Output& x : s.outputs()) {
    const auto at = local.find(x.tensor.data);
    const Bytes its = bits(at == local.end() ? x.tensor : at->second);
    all.insert(all.end(), its.begin(), its.end());
  }
  return all;
}

testing::AssertionResult put(const DistributedWorkload& s, int ranks, int rank,
                             const Bytes& bytes) {
  size_t at = 0;
  for (const Output& x : s.outputs()) {
    const Tensor& to = x.tensor;
    const std::vector<int64_t> rows = s.rows(x, ranks, rank);
    Taken taken = take(to, x.dim, rows);
    const size_t size = taken.tensor.numel() * size_of(to.dtype);
    if (at + size > bytes.size()) {
      return testing::AssertionFailure()
             << "rank " << rank << ": "
             << std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    }
    std::copy_n(bytes.begin() + at, size, taken.memory.begin());
    at += size;
    const int64_t element = size_of(to.dtype);
    each_pair(to, taken.tensor, x.dim, rows,
              [&](std::byte* x, std::byte* y) { std::memcpy(x, y, element); });
  }
  return testing::AssertionSuccess();
}

std::vector<Bytes> all_bits(const Workload& w) {
  std::vector<Bytes> all = {bits(w.forward.out), bits(w.forward.lse), bits(w.backward.dq),
                            bits(w.backward.dk), bits(w.backward.dv)};
  if (w.backward.dsinks.given()) all.push_back(bits(w.backward.dsinks));
  if (w.backward.dbias.given()) all.push_back(bits(w.backward.dbias));
  return all;
}

void compute_by(int ranks, const DistributedWorkload& s, int gpus,
                const std::function<void(int rank)>& connected) {
  s.w.seal();
  const int port = free_port();
  Processes processes(ranks, [&](int rank) {
    const Device device = gpus == 0 ? Device{} : Device{DeviceType::kCuda, rank % gpus};
    const Group group = Group::connect(rank, ranks, "127.0.0.1", port, 60);
    connected(rank);
    return compute_rank(s, group, device);
  });
  // Rows of no sequence belong to no rank.
  for (const Tensor* t :
       {&s.w.forward.out, &s.w.forward.lse, &s.w.backward.dq, &s.w.backward.dk, &s.w.backward.dv}) {
    if (s.problem.c.packed()) write(*t, std::vector<double>(t->numel(), 0.0));
  }
  for (int rank = 0; rank < ranks; ++rank) {
    ASSERT_TRUE(put(s, ranks, rank, processes.result(rank)));
  }
}

}  // namespace fulgur::test

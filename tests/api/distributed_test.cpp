// Attention over several processes: rows of ranks, the bits of one process, what is refused, and
// what becomes of the others when one of them dies or hangs.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <numeric>
#include <optional>
#include <random>
#include <thread>

#include "call/mask.h"
#include "engines.h"
#include "fulgur/cuda.h"
#include "fulgur/distributed/plan.h"
#include "oracle.h"
#include "seed.h"

namespace fulgur::test {
namespace {

using Bytes = std::vector<std::byte>;

// ------------------------------------------------------------------------------------- processes

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(at);
  bind(fd, reinterpret_cast<sockaddr*>(&at), size);
  getsockname(fd, reinterpret_cast<sockaddr*>(&at), &size);
  close(fd);
  return ntohs(at.sin_port);
}

/// Processes that each compute what `body` of their rank returns. The parent has had no threads.
class Processes {
 public:
  Processes(int ranks, const std::function<Bytes(int rank)>& body) {
    for (int rank = 0; rank < ranks; ++rank) {
      int ends[2];
      EXPECT_EQ(pipe(ends), 0);
      const pid_t pid = fork();
      if (pid == 0) {
        close(ends[0]);
        Bytes all;
        try {
          all = body(rank);
        } catch (const std::exception& error) {
          const std::string text = std::string("error: ") + error.what();
          all.resize(text.size());
          std::memcpy(all.data(), text.data(), text.size());
        }
        for (size_t done = 0; done < all.size();) {
          const ssize_t n = ::write(ends[1], all.data() + done, all.size() - done);
          if (n <= 0) break;
          done += n;
        }
        _exit(0);
      }
      close(ends[1]);
      pids_.push_back(pid);
      pipes_.push_back(ends[0]);
    }
  }
  ~Processes() {
    for (const pid_t pid : pids_) {
      kill(pid, SIGKILL);
      waitpid(pid, nullptr, 0);
    }
    for (const int fd : pipes_) close(fd);
  }
  /// What a rank returned: of one that was killed nothing.
  Bytes result(int rank) {
    Bytes all;
    std::byte some[4096];
    for (ssize_t n = 0; (n = ::read(pipes_[rank], some, sizeof(some))) > 0;) {
      all.insert(all.end(), some, some + n);
    }
    return all;
  }
  std::string text(int rank) {
    const Bytes all = result(rank);
    return {reinterpret_cast<const char*>(all.data()), all.size()};
  }

 private:
  std::vector<pid_t> pids_;
  std::vector<int> pipes_;
};

Bytes bytes_of(const std::string& text) {
  Bytes all(text.size());
  std::memcpy(all.data(), text.data(), text.size());
  return all;
}

// --------------------------------------------------------------------------------- rows of tensors

/// A tensor of some indices of a dimension of another one.
struct Taken {
  Bytes memory;
  Tensor tensor;
};

/// Calls visit(element of `from`, element of `to`) for the elements that `to` has of `from`.
template <class Visit>
void each_pair(const Tensor& from, const Tensor& to, int dim, const std::vector<int64_t>& rows,
               const Visit& visit) {
  const int64_t size = size_of(from.dtype);
  for (int64_t n = 0; n < to.numel(); ++n) {
    int64_t rest = n, at_from = 0, at_to = 0;
    for (int i = to.rank - 1; i >= 0; --i) {
      const int64_t index = rest % to.shape[i];
      rest /= to.shape[i];
      at_to += index * to.strides[i];
      at_from += (i == dim ? rows[index] : index) * from.strides[i];
    }
    visit(static_cast<std::byte*>(from.data) + at_from * size,
          static_cast<std::byte*>(to.data) + at_to * size);
  }
}

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

// -------------------------------------------------------------------------------------- workloads

struct Problem {
  Case c;
  Distribution distribution;
  std::vector<Rows> lengths = {};                     // packed
  std::function<void(Workload&)> add = [](auto&) {};  // expressions
};

/// What the rows of a tensor belong to: queries, keys, or neither; then all ranks have it whole.
enum class Of { kQueries, kKeys, kAll };

struct Output {
  Tensor tensor;
  int dim;  // of the rows
  Of of;
};

/// A workload and how its rows are shared out.
struct Shared {
  const Problem& problem;
  Workload& w;

  std::vector<int64_t> rows(bool of_q, int ranks, int rank) const {
    const Case& c = problem.c;
    if (!c.packed()) {
      return rows_of(problem.distribution.sharding, of_q ? c.sq : c.sk, ranks, rank, c.mask);
    }
    const Tensor& cu = of_q ? w.forward.cu_seqlens_q : w.forward.cu_seqlens_k;
    const auto* const ends = static_cast<const int32_t*>(cu.data);
    return rows_of(problem.distribution.sharding, {ends, static_cast<size_t>(cu.shape[0])}, ranks,
                   rank, c.mask);
  }
  int row_dim() const { return problem.c.packed() ? 0 : 1; }
  int lse_dim() const { return problem.c.packed() ? 1 : 2; }

  /// The outputs; gradients of tensors of expressions come last.
  std::vector<Output> outputs() const {
    const BackwardTensors& g = w.backward;
    std::vector<Output> all = {{w.forward.out, row_dim(), Of::kQueries},
                               {w.forward.lse, lse_dim(), Of::kQueries},
                               {g.dq, row_dim(), Of::kQueries},
                               {g.dk, row_dim(), Of::kKeys},
                               {g.dv, row_dim(), Of::kKeys}};
    if (g.dsinks.given()) all.push_back({g.dsinks, 0, Of::kAll});
    if (g.dbias.given()) all.push_back({g.dbias, 0, Of::kAll});
    for (const TensorBinding& t : g.tensors) {
      if (t.grad.given()) all.push_back({t.grad, 0, Of::kAll});
    }
    return all;
  }
  /// Which rows of an output a rank has.
  std::vector<int64_t> rows(const Output& x, int ranks, int rank) const {
    if (x.of != Of::kAll) return rows(x.of == Of::kQueries, ranks, rank);
    std::vector<int64_t> all(x.tensor.shape[x.dim]);
    std::iota(all.begin(), all.end(), 0);
    return all;
  }
};

/// Tensors on a GPU, copies of those of the host.
class OnGpu {
 public:
  explicit OnGpu(Device device) : device_(device) {}
  ~OnGpu() {
    for (const auto& [host, copy] : copies_) cuda::deallocate(copy.data, device_.index);
  }
  OnGpu(const OnGpu&) = delete;
  OnGpu& operator=(const OnGpu&) = delete;

  void place(ConstTensor& t) {
    Tensor copy;
    copy.data = const_cast<void*>(t.data);
    copy.dtype = t.dtype;
    copy.rank = t.rank;
    copy.shape = t.shape;
    copy.strides = t.strides;
    place(copy);
    t.data = copy.data;
    t.device = copy.device;
  }
  void place(Tensor& t) {
    if (device_ == Device{} || !t.given()) return;
    if (t.numel() == 0) {  // of a rank without rows
      t.device = device_;
      return;
    }
    const auto [at, fresh] = copies_.try_emplace(t.data);
    if (fresh) {
      int64_t last = 0;
      for (int i = 0; i < t.rank; ++i) last += (t.shape[i] - 1) * t.strides[i];
      at->second = {nullptr, (last + 1) * size_of(t.dtype)};
      at->second.data = cuda::allocate(at->second.bytes, device_.index);
      cuda::copy(at->second.data, t.data, at->second.bytes, device_.index);
      cuda::synchronize(device_.index);
    }
    t.data = at->second.data;
    t.device = device_;
  }
  void bring_back() {
    if (device_ == Device{}) return;
    cuda::synchronize(device_.index);
    for (const auto& [host, copy] : copies_) {
      cuda::copy(host, copy.data, copy.bytes, device_.index);
    }
  }

 private:
  struct Copy {
    void* data;
    int64_t bytes;
  };
  Device device_;
  std::map<void*, Copy> copies_;
};

/// Both passes of a rank: the bytes of its outputs, one after the other.
Bytes compute_rank(const Shared& s, const Group& group, Device device = {}) {
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

/// Writes the outputs of a rank to their rows.
testing::AssertionResult put(const Shared& s, int ranks, int rank, const Bytes& bytes) {
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

/// The number of GPUs of this machine. It is queried in a process of its own, as the processes that
/// compute are forked from one without a CUDA context.
int gpus() {
  const std::string text = Processes(1, [](int) {
                             int count = 0;
                             while (message_of([&] { cuda::allocate(1, count); }).empty()) ++count;
                             return bytes_of(std::to_string(count));
                           }).text(0);
  return std::atoi(text.c_str());
}

/// All ranks, each a process, into the workload's outputs; on GPUs where there are any to use.
/// connected(rank) is called in each process before it computes.
void compute_by(
    int ranks, const Shared& s, int gpus = 0,
    const std::function<void(int rank)>& connected = [](int) {}) {
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

/// Scores of a table of heads and distances, which wants its gradient, and a mask of documents; by
/// the sequence and its lengths, too.
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

std::vector<Problem> problems() {
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
  std::vector<Problem> all;
  const auto add = [&](Sharding sharding, DType dtype, int64_t batch, int64_t sq, int64_t sk,
                       const std::function<void(Case&)>& change) {
    Problem& problem = all.emplace_back(Problem{base, {sharding}});
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

// Any number of processes gives the bits of one device.
TEST(Distributed, InvariantToRanks) {
  for (const Problem& problem : problems()) {
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 1, problem.lengths);
    w.options.threads = 1;
    w.options.invariant = true;
    problem.add(w);
    const Shared s{problem, w};
    if (problem.c.packed()) {
      for (const Output& x : s.outputs()) {
        write(x.tensor, std::vector<double>(x.tensor.numel(), 0.0));
      }
    }
    w.run();
    std::vector<Bytes> want;
    for (const Output& x : s.outputs()) {
      // Only the rows of sequences are compared: packed tensors have others.
      want.push_back(bits(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor));
    }
    const size_t exact = want.size() - (w.backward.tensors.empty() ? 0 : 1);
    const auto table =
        exact < want.size() ? read(w.backward.tensors[0].grad) : std::vector<double>();
    for (const int ranks : {1, 2, 3, 4, 8}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s));
      const std::vector<Output> outputs = s.outputs();
      for (size_t i = 0; i < exact; ++i) {
        const Output& x = outputs[i];
        EXPECT_EQ(bits(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor) == want[i], true)
            << "output " << i;
      }
      for (size_t i = 0; i < table.size(); ++i) {
        EXPECT_NEAR(read(w.backward.tensors[0].grad)[i], table[i], 1e-5);
      }
    }
  }
}

// Less memory takes more steps of fewer heads, down to one kv head, and gives the same bits.
TEST(Distributed, WorkspaceIsBounded) {
  Workload w({.dtype = DType::kF32, .sq = 300, .sk = 300, .hq = 8, .hk = 8, .mask = causal()}, 11);
  w.options.threads = 1;
  const Group alone = Group::from_env();
  const Distribution zigzag{.sharding = Sharding::kZigzag};
  for (const bool invariant : {false, true}) {
    const auto bounded = [&](const auto& tensors) {
      SCOPED_TRACE(testing::Message() << (invariant ? "invariant" : "fast"));
      Options options = w.options;
      options.invariant = invariant;
      const auto planned = [&](int64_t bytes) {
        options.max_workspace = bytes;
        return plan(tensors, options, alone, zigzag);
      };
      const DistributedPlan fastest = planned(0);
      fastest.run(tensors);
      const auto want = all_bits(w);
      const std::string said = message_of([&] { planned(1); });
      const std::string before = "max_workspace: got 1 bytes, want at least ";
      ASSERT_EQ(said.substr(0, before.size()), before);
      const int64_t least = std::stoll(said.substr(before.size()));
      EXPECT_LT(least, fastest.workspace_bytes());
      for (int64_t bytes = least; bytes < fastest.workspace_bytes(); bytes += bytes / 3) {
        const DistributedPlan smaller = planned(bytes);
        EXPECT_LE(smaller.workspace_bytes(), bytes);
        EXPECT_GE(smaller.workspace_bytes(), least);
        EXPECT_NE(smaller.explain(), fastest.explain());
        smaller.run(tensors);
        EXPECT_EQ(all_bits(w), want);
      }
      EXPECT_NE(message_of([&] { planned(least - 1); }), "");
    };
    bounded(static_cast<ForwardArgs>(w.forward));
    bounded(static_cast<BackwardArgs>(w.backward));
  }
}

// Ranks that have no memory in common, as one of them can make none. Files it may open, as
// UndefinedBehaviorSanitizer does.
TEST(Distributed, RowsByMessages) {
  const Problem problem = problems().front();
  Workload w(problem.c, 9);
  w.options.threads = 1;
  for (const bool invariant : {true, false}) {
    w.options.invariant = invariant;
    w.run();
    const auto want = all_bits(w);
    const Expected e = expect(w);
    ASSERT_NO_FATAL_FAILURE(compute_by(3, {problem, w}, 0, [](int rank) {
      if (rank != 1) return;
      std::signal(SIGXFSZ, SIG_IGN);
      const rlimit bytes{0, 0};
      setrlimit(RLIMIT_FSIZE, &bytes);
    }));
    if (invariant) {
      EXPECT_EQ(all_bits(w) == want, true);
    }
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

// Ranks that exchange heads for rows, all of them or those of a node.
TEST(Distributed, RanksThatShareOutHeads) {
  Problem problem{{.dtype = DType::kBF16,
                   .batch = 2,
                   .sq = 300,
                   .sk = 300,
                   .hq = 8,
                   .hk = 4,
                   .d = 32,
                   .dv = 32,
                   .mask = causal(),
                   .alibi = Alibi::kHeads,
                   .dropout = 0.2,
                   .sinks = true},
                  {}};
  Workload w(problem.c, 2);
  w.options.threads = 1;
  const Expected e = expect(w);
  for (const bool invariant : {true, false}) {
    w.options.invariant = invariant;
    w.run();
    const auto want = all_bits(w);
    for (const auto& [ranks, head_ranks] : {std::pair{4, 4}, {4, 2}, {2, 2}, {8, 4}}) {
      SCOPED_TRACE(testing::Message() << head_ranks << " of " << ranks << " share out heads");
      problem.distribution = {head_ranks == ranks ? Sharding::kContiguous : Sharding::kZigzag,
                              head_ranks};
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}));
      if (invariant) {
        EXPECT_EQ(all_bits(w) == want, true);
      }
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(backward_is_right(w, e));
    }
  }
}

// Keys of one rank at a time: as right, and the same in every run.
TEST(Distributed, Ring) {
  for (Problem problem : problems()) {
    SCOPED_TRACE(problem.c.name());
    problem.distribution.ring = true;
    Workload w(problem.c, 12, problem.lengths);
    w.options.threads = 1;
    problem.add(w);
    const Shared s{problem, w};
    if (problem.c.packed()) {
      for (const Output& x : s.outputs()) {
        write(x.tensor, std::vector<double>(x.tensor.numel(), 0.0));
      }
    }
    w.run();
    std::vector<std::vector<double>> want;
    for (const Output& x : s.outputs()) {
      want.push_back(read(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor));
    }
    // The oracle knows rows of no sequence, too.
    std::optional<Expected> e;
    if (!problem.c.packed()) e = expect(w);
    for (const int ranks : {2, 3, 4}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s));
      if (e) {
        EXPECT_TRUE(forward_is_right(w, *e));
        EXPECT_TRUE(backward_is_right(w, *e));
      }
      const std::vector<Output> outputs = s.outputs();
      for (size_t i = 0; i < want.size(); ++i) {
        const Output& x = outputs[i];
        const auto got = read(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor);
        double most = 0, off = 0;
        for (size_t at = 0; at < got.size(); ++at) {
          if (std::isfinite(want[i][at])) most = std::max(most, std::abs(want[i][at]));
          if (got[at] != want[i][at]) off = std::max(off, std::abs(got[at] - want[i][at]));
        }
        EXPECT_LE(off, 0.02 * most) << "output " << i;
      }
      if (ranks != 3) continue;
      const auto first = all_bits(w);
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s));
      EXPECT_EQ(all_bits(w) == first, true);
    }
  }
}

// A bound that no gather keeps makes ranks a ring, but where bits of one process are wanted.
TEST(Distributed, RingInLessWorkspace) {
  const Problem problem{{.dtype = DType::kF32, .sq = 512, .sk = 512, .mask = causal()},
                        {Sharding::kZigzag}};
  Workload w(problem.c, 13);
  const Shared s{problem, w};
  const int ranks = 4, port = free_port();
  Processes processes(ranks, [&](int rank) {
    const Group group = Group::connect(rank, ranks, "127.0.0.1", port, 60);
    const std::vector<int64_t> rows = s.rows(true, ranks, rank);
    BackwardTensors g = w.backward;
    std::deque<Taken> memory;
    for (Tensor* t : {&g.q, &g.k, &g.v, &g.out, &g.dout, &g.dq, &g.dk, &g.dv}) {
      memory.push_back(take(*t, 1, rows));
      *t = memory.back().tensor;
    }
    memory.push_back(take(g.lse, 2, rows));
    g.lse = memory.back().tensor;
    Options options = w.options;
    options.threads = 1;
    const auto planned = [&](int64_t bytes) {
      options.max_workspace = bytes;
      return plan(g, options, group, problem.distribution);
    };
    const int64_t gathered = planned(0).workspace_bytes();
    const DistributedPlan ring = planned(gathered - 1);
    std::string said = ring.workspace_bytes() < gathered ? "less, " : "not less, ";
    said += ring.explain().find("one rank at a time") == std::string::npos ? "no ring\n" : "ring\n";
    options.invariant = true;
    said += message_of([&] { planned(1000); }).substr(0, 32);
    return bytes_of(said);
  });
  for (int rank = 0; rank < ranks; ++rank) {
    EXPECT_EQ(processes.text(rank), "less, ring\nmax_workspace: got 1000 bytes, w");
  }
}

/// Has a thread of this process sleep whenever that has computed for some milliseconds, a few
/// times.
void slow_down() {
  static volatile std::sig_atomic_t times;
  times = 8;
  struct sigaction action {};
  action.sa_handler = [](int) {
    if (times == 0) return;
    times = times - 1;
    const timespec time{0, 300'000'000};
    nanosleep(&time, nullptr);
  };
  action.sa_flags = SA_RESTART;
  sigaction(SIGPROF, &action, nullptr);
  const itimerval timer{{0, 2000}, {0, 2000}};
  setitimer(ITIMER_PROF, &timer, nullptr);
}

double cpu_seconds() {
  timespec time{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// A rank of this machine that is done computes rows of slower ones, with the same bits. The work
// takes a multiple of the 4 ms or so by which a kernel may count what a process has computed.
TEST(Distributed, RanksComputeRowsOfSlowerOnes) {
  std::vector<Problem> problems = {{{.dtype = DType::kF32,
                                     .batch = 2,
                                     .sq = 4500,
                                     .sk = 4500,
                                     .hq = 4,
                                     .hk = 2,
                                     .mask = causal(),
                                     .dropout = 0.1,
                                     .seqused_q = true,
                                     .seqused = true,
                                     .sinks = true,
                                     .bias = Bias::kShared},
                                    {Sharding::kZigzag}},
                                   {{.dtype = DType::kBF16,
                                     .batch = 2,
                                     .sq = 6000,
                                     .sk = 6000,
                                     .hq = 4,
                                     .hk = 4,
                                     .mask = causal(),
                                     .alibi = Alibi::kHeads},
                                    {Sharding::kByArea}}};
  problems.back().c.layout = Layout::kPacked;
  problems.back().lengths = {{0, 0, 6000, 6000}, {6000, 6000, 2600, 2600}};
  for (const Problem& problem : problems) {
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 14, problem.lengths);
    w.options.threads = 1;
    w.options.invariant = true;
    w.run_forward();
    const double before_all = cpu_seconds();
    w.run_forward();
    const double all = cpu_seconds() - before_all;
    const Shared s{problem, w};
    for (const int threads : {1, 2}) {
      const int port = free_port();
      Processes processes(2, [&](int rank) {
        const Group group = Group::connect(rank, 2, "127.0.0.1", port, 60);
        ForwardTensors f = w.forward;
        std::deque<Taken> memory;
        const auto own = [&](Tensor& t, int dim, bool of_q) {
          memory.push_back(take(t, dim, s.rows(of_q, 2, rank)));
          t = memory.back().tensor;
        };
        own(f.q, s.row_dim(), true);
        own(f.out, s.row_dim(), true);
        own(f.k, s.row_dim(), false);
        own(f.v, s.row_dim(), false);
        own(f.lse, s.lse_dim(), true);
        Options options = w.options;
        options.threads = threads;
        options.max_seqlen_q = options.max_seqlen_k = 0;
        const DistributedPlan made = plan(f, options, group, problem.distribution);
        if (rank == 1) slow_down();
        const double before = cpu_seconds();
        made.run(f, w.run_options);
        const double seconds = cpu_seconds() - before;
        Bytes all = bits(f.out);
        const Bytes lse = bits(f.lse);
        all.insert(all.end(), lse.begin(), lse.end());
        all.resize(all.size() + sizeof(double));
        std::memcpy(&*all.end() - sizeof(double), &seconds, sizeof(double));
        return all;
      });
      double seconds = 0;  // of the slow rank, which waits for no other
      for (int rank = 0; rank < 2; ++rank) {
        const std::vector<int64_t> rows = s.rows(true, 2, rank);
        Bytes want = bits(take(w.forward.out, s.row_dim(), rows).tensor);
        const Bytes lse = bits(take(w.forward.lse, s.lse_dim(), rows).tensor);
        want.insert(want.end(), lse.begin(), lse.end());
        Bytes got = processes.result(rank);
        ASSERT_EQ(got.size(), want.size() + sizeof(double))
            << std::string(reinterpret_cast<const char*>(got.data()), got.size());
        std::memcpy(&seconds, got.data() + want.size(), sizeof(double));
        got.resize(want.size());
        EXPECT_EQ(got == want, true) << "rank " << rank;
      }
      // Half of the rows are its own; it offers three quarters of these. With two threads one goes
      // on while the other sleeps.
      if (threads == 1) {
        EXPECT_LT(seconds, 0.4 * all);
      }
    }
  }
}

// A rank alone, for which its own rows stand for those of the others.
void expect_simulated(Device device) {
  const DType dtype = device == Device{} ? DType::kF32 : DType::kBF16;
  const Problem problem{{.dtype = dtype, .sq = 512, .sk = 512, .hq = 4, .mask = causal()},
                        {Sharding::kZigzag}};
  Workload w(problem.c, 15);
  w.options.invariant = true;
  w.options.threads = 1;
  const Shared s{problem, w};
  const std::vector<int64_t> rows = s.rows(true, 4, 1);
  for (const Tensor* t : {&w.forward.k, &w.forward.v}) {
    const Taken own = take(*t, 1, rows);
    for (int rank = 0; rank < 4; ++rank) {
      each_pair(*t, own.tensor, 1, s.rows(false, 4, rank),
                [&](std::byte* x, std::byte* y) { std::memcpy(x, y, size_of(t->dtype)); });
    }
  }
  const std::string said =
      Processes(1, [&](int) {
        ForwardTensors whole = w.forward, f = w.forward;
        std::deque<Taken> memory;
        for (Tensor* t : {&f.q, &f.k, &f.v, &f.out}) {
          memory.push_back(take(*t, 1, rows));
          *t = memory.back().tensor;
        }
        f.lse = {};
        whole.lse = {};
        const Tensor all = whole.out, own = f.out;
        OnGpu gpu(device);
        for (ForwardTensors* tensors : {&whole, &f}) {
          for (Tensor* t : {&tensors->q, &tensors->k, &tensors->v, &tensors->out}) {
            gpu.place(*t);
          }
        }
        forward(whole, w.options);
        forward(f, w.options, Group::simulated(1, 4), problem.distribution);
        gpu.bring_back();
        const bool same = bits(take(all, 1, rows).tensor) == bits(own);
        return bytes_of(same ? "same bits" : "other bits");
      }).text(0);
  EXPECT_EQ(said, "same bits");
}

TEST(Distributed, SimulatedRank) { expect_simulated({}); }

// Without `invariant` gradients are sums of parts: as right, and the same in every run.
TEST(Distributed, FastGradients) {
  for (const Problem& problem : problems()) {
    if (problem.c.packed()) continue;  // the oracle knows rows of no sequence, too
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 3);
    w.options.threads = 1;
    problem.add(w);
    w.run();
    const Expected e = expect(w);
    for (const int ranks : {2, 3}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}));
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(backward_is_right(w, e));
      const auto first = all_bits(w);
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}));
      EXPECT_EQ(all_bits(w) == first, true);
    }
  }
}

// ------------------------------------------------------------------------------------------ pages

/// The pages of a tensor of keys that lie on a rank, and their table.
struct Pages {
  static constexpr int64_t kSize = 16;
  Bytes memory;
  std::vector<int32_t> ids;
  Tensor tensor, table;

  Pages(const Tensor& keys, int ranks, int rank) {
    const int64_t batch = keys.shape[0], all = (keys.shape[1] + kSize - 1) / kSize;
    const int64_t pages = (all - rank + ranks - 1) / ranks, count = batch * pages;
    memory.resize((count * kSize + 1) * keys.shape[2] * keys.shape[3] * size_of(keys.dtype));
    tensor =
        Tensor::contiguous(memory.data(), keys.dtype, {count, kSize, keys.shape[2], keys.shape[3]});
    for (int64_t n = 0; n < count; ++n) {  // the last page of all comes first
      ids.push_back(static_cast<int32_t>(count - 1 - n));
      const int64_t first = (n % pages * ranks + rank) * kSize;
      for (int64_t row = 0; row < std::min(kSize, keys.shape[1] - first); ++row) {
        for (int64_t h = 0; h < keys.shape[2]; ++h) {
          const int64_t from =
              n / pages * keys.strides[0] + (first + row) * keys.strides[1] + h * keys.strides[2];
          const int64_t to = ((count - 1 - n) * kSize + row) * keys.shape[2] + h;
          std::memcpy(memory.data() + to * keys.shape[3] * size_of(keys.dtype),
                      static_cast<std::byte*>(keys.data) + from * size_of(keys.dtype),
                      keys.shape[3] * size_of(keys.dtype));
        }
      }
    }
    ids.push_back(0);
    table = Tensor::contiguous(ids.data(), DType::kI32, {batch, pages});
  }
};

/// Decode calls over a distributed cache; on GPUs with 16-bit floats only.
std::vector<Case> decoding_cases() {
  const Case base{.dtype = DType::kBF16,
                  .batch = 3,
                  .sq = 1,
                  .sk = 300,
                  .hq = 8,
                  .hk = 2,
                  .mask = causal(),
                  .seqused = true,
                  .sinks = true};
  std::vector<Case> all(4, base);
  const auto change = [](Case& c, DType dtype, int64_t batch, int64_t sq, int64_t sk, int64_t h) {
    c.dtype = dtype;
    c.batch = batch;
    c.sq = sq;
    c.sk = sk;
    c.hq = c.hk = h;
    c.sinks = false;
  };
  change(all[1], DType::kF16, 2, 3, 150, 3);
  all[1].d = all[1].dv = 16;
  all[1].mask = chunked(60, causal());
  all[1].softcap = 5;
  all[1].alibi = Alibi::kHeads;
  change(all[2], DType::kF32, 2, 4, 200, 4);
  all[2].d = 32;
  all[2].dv = 48;
  all[2].mask = window(90, 0);
  all[2].alibi = Alibi::kBatchHeads;
  change(all[3], DType::kF64, 1, 2, 70, 2);
  all[3].hk = 1;
  all[3].mask = top_left(causal());
  return all;
}

/// All ranks compute a call twice, over pages that they share out, into the workload's outputs.
void compute_by_pages(int ranks, Workload& w, int gpus = 0) {
  w.seal();
  const int port = free_port();
  Processes processes(ranks, [&](int rank) {
    const Group group = Group::connect(rank, ranks, "127.0.0.1", port, 60);
    ForwardTensors f = w.forward;
    Pages k(f.k, ranks, rank), v(f.v, ranks, rank);
    f.k = k.tensor;
    f.v = v.tensor;
    f.page_table = k.table;
    OnGpu gpu(gpus == 0 ? Device{} : Device{DeviceType::kCuda, rank % gpus});
    for (Tensor* t : {&f.q, &f.k, &f.v, &f.out, &f.lse, &f.alibi_slopes, &f.sinks, &f.page_table}) {
      gpu.place(*t);
    }
    const auto compute = [&] {
      forward(f, w.options, group, {.sharding = Sharding::kByPage});
      gpu.bring_back();
      Bytes all = bits(w.forward.out);
      const Bytes lse = bits(w.forward.lse);
      all.insert(all.end(), lse.begin(), lse.end());
      return all;
    };
    const Bytes first = compute();
    return compute() == first ? first : bytes_of("error: other bits in the second run");
  });
  const Bytes first = processes.result(0);
  const Tensor &out = w.forward.out, &lse = w.forward.lse;
  const size_t size = bits(out).size();
  ASSERT_EQ(first.size(), size + bits(lse).size())
      << std::string(reinterpret_cast<const char*>(first.data()), first.size());
  for (int rank = 1; rank < ranks; ++rank) EXPECT_EQ(processes.result(rank) == first, true);
  const auto store = [](const Tensor& t, const std::byte* from) {
    std::vector<int64_t> rows(t.shape[0]);
    std::iota(rows.begin(), rows.end(), 0);
    const int64_t element = size_of(t.dtype);
    Taken taken = take(t, 0, rows);
    std::memcpy(taken.memory.data(), from, t.numel() * element);
    each_pair(t, taken.tensor, 0, rows,
              [&](std::byte* x, std::byte* y) { std::memcpy(x, y, element); });
  };
  store(out, first.data());
  store(lse, first.data() + size);
}

TEST(DistributedPages, ResultsOfAllRanksAreMerged) {
  for (const Case& c : decoding_cases()) {
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    w.options.threads = 1;
    const Expected e = expect(w);
    for (const int ranks : {1, 2, 3, 5}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by_pages(ranks, w));
      EXPECT_TRUE(forward_is_right(w, e));
    }
  }
}

TEST(DistributedPages, Errors) {
  Workload w({.dtype = DType::kF32,
              .sq = 2,
              .sk = 70,
              .hq = 2,
              .hk = 2,
              .d = 16,
              .dv = 16,
              .seqused = true},
             1);
  const Group alone = Group::from_env();
  const Pages k(w.forward.k, 1, 0), v(w.forward.v, 1, 0);
  ForwardArgs args = w.forward;
  args.k = k.tensor;
  args.v = v.tensor;
  args.cache.page_table = k.table;
  const auto says = [&](ForwardArgs changed, Options options = {}, Distribution d = {}) {
    return message_of([&] { forward(changed, options, alone, d); });
  };
  const Distribution pages{.sharding = Sharding::kByPage};
  EXPECT_EQ(says(args, {}, pages), "");
  EXPECT_EQ(says(args), "rank 0: page_table: given, want rows by page with it");
  EXPECT_EQ(says(w.forward, {}, pages), "rank 0: page_table: not given, want it with rows by page");
  EXPECT_EQ(says(args, {}, {Sharding::kByPage, 2}),
            "rank 0: head_ranks: got 2, want 1 with rows by page");
  EXPECT_EQ(says(args, {.dropout_p = 0.5}, pages),
            "rank 0: dropout_p: given with rows by page, which take none");
  EXPECT_EQ(says(args, {.max_workspace = 8}, pages).substr(0, 41),
            "rank 0: max_workspace: got 8 bytes, want ");
  int32_t many = 10000;
  ForwardArgs longer = args;
  longer.lengths.seqused_k = ConstTensor::contiguous(&many, DType::kI32, {1});
  EXPECT_EQ(says(longer, {}, pages),
            "rank 0: seqused_k: got 10000 at 0, of which 10000 lie here, want at most the 80 of "
            "page_table");
  EXPECT_EQ(message_of([&] { backward(w.backward, {}, alone, pages); }),
            "rank 0: sharding: got by_page, want rows of sequences: caches have no gradients");
  EXPECT_EQ(message_of([] { rows_of(Sharding::kByPage, int64_t{64}, 2, 0); }),
            "sharding: got by_page, which shares out pages of caches, want one of rows");
}

// ------------------------------------------------------------------------------------------- rows

TEST(RowsOf, CoverAllOnceAndShareOutEvenly) {
  const auto area = [](const std::vector<int64_t>& rows, int64_t length) {
    double sum = 0;
    for (const int64_t row : rows) {
      const auto keys = visible_keys(causal(), {0, 0, length, length}, row);
      sum += static_cast<double>(keys.end - keys.begin);
    }
    return sum;
  };
  for (const Sharding sharding : {Sharding::kContiguous, Sharding::kZigzag, Sharding::kByArea}) {
    for (const int64_t length : {0, 1, 64, 100, 1000, 8192}) {
      for (const int ranks : {1, 2, 3, 4, 8, 1000}) {
        std::vector<int> seen(length);
        double most = 0, all = 0;
        for (int rank = 0; rank < ranks; ++rank) {
          const auto rows = rows_of(sharding, length, ranks, rank);
          ASSERT_TRUE(std::ranges::is_sorted(rows));
          for (size_t i = 0; i < rows.size(); ++i) {
            ++seen[rows[i]];
            if (i == 0 || rows[i] != rows[i - 1] + 1) {
              ASSERT_EQ(rows[i] % 64, 0);
            }
          }
          most = std::max(most, area(rows, length));
          all += area(rows, length);
        }
        ASSERT_TRUE(std::ranges::all_of(seen, [](int n) { return n == 1; })) << length << " rows";
        if (sharding != Sharding::kContiguous && length == 8192 && ranks <= 8) {
          EXPECT_LE(most * ranks, 1.13 * all) << ranks << " ranks";
        }
      }
    }
  }
}

TEST(RowsOf, DocumentsByArea) {
  const std::vector<int32_t> cu = {5, 3000, 3001, 3001, 9000, 9700, 16389};
  std::vector<double> load;
  std::vector<int> seen(cu.back());
  for (int rank = 0; rank < 4; ++rank) {
    load.push_back(0);
    for (const int64_t row : rows_of(Sharding::kByArea, cu, 4, rank)) {
      ++seen[row];
      const auto next = std::ranges::upper_bound(cu, static_cast<int32_t>(row));
      load.back() += static_cast<double>(row - *(next - 1) + 1);
    }
  }
  for (size_t row = 0; row < seen.size(); ++row) ASSERT_EQ(seen[row], row >= 5 ? 1 : 0);
  EXPECT_LE(*std::ranges::max_element(load), 1.1 * *std::ranges::min_element(load));
}

TEST(RowsOf, Errors) {
  const auto says = [](auto... args) {
    return message_of([&] { rows_of(Sharding::kZigzag, args...); });
  };
  EXPECT_EQ(says(int64_t{64}, 0, 0), "ranks: got 0, want at least 1");
  EXPECT_EQ(says(int64_t{64}, 2, 2), "rank: got 2, want 0 to 1");
  EXPECT_EQ(says(int64_t{-1}, 2, 0), "length: got -1, want >= 0");
  EXPECT_EQ(says(std::vector<int32_t>{0, 5, 3}, 2, 0),
            "cu_seqlens: decreases, want non-decreasing");
}

// ----------------------------------------------------------------------------------------- errors

struct Wrong {
  const char* message;
  std::function<void(ForwardTensors&, Options&, Distribution&)> change;
};

// What is wrong on one rank alone is said on all of them, and the group goes on.
TEST(DistributedErrors, NameTheRankAndTheArgument) {
  const Problem problem{{.dtype = DType::kF32,
                         .sq = 256,
                         .sk = 256,
                         .hq = 4,
                         .hk = 2,
                         .d = 16,
                         .dv = 16,
                         .mask = causal()},
                        {Sharding::kZigzag}};
  const auto cut = [](Tensor& t, int dim, int64_t size) { t.shape[dim] = size; };
  const std::vector<Wrong> all = {
      {"q: rank 1 has f32, 4 heads of 8 columns in a batch of 1, rank 0 has f32, 4 heads of 16 "
       "columns in a batch of 1",
       [&](auto& f, auto&, auto&) { cut(f.q, 3, 8), cut(f.k, 3, 8); }},
      {"q: rank 1 has f32, 2 heads of 16 columns in a batch of 1, rank 0 has f32, 4 heads of 16 "
       "columns in a batch of 1",
       [&](auto& f, auto&, auto&) { cut(f.q, 2, 2), cut(f.out, 2, 2), cut(f.lse, 1, 2); }},
      {"k: rank 1 has f32, 1 heads of 16 columns in a batch of 1, rank 0 has f32, 2 heads of 16 "
       "columns in a batch of 1",
       [&](auto& f, auto&, auto&) { cut(f.k, 2, 1), cut(f.v, 2, 1); }},
      {"q: ranks have 128, 64 rows, want 64, 128 of the 192 (zigzag)",
       [&](auto& f, auto&, auto&) { cut(f.q, 1, 64), cut(f.out, 1, 64), cut(f.lse, 2, 64); }},
      {"rank 1: v: got shape (1, 64, 2, 16), want (1, 128, 2, 16) = (batch, sk, hk, dv)",
       [&](auto& f, auto&, auto&) { cut(f.v, 1, 64); }},
      {"rank 1: k: not given, want 4 dimensions (batch, seqlen, heads, dim)",
       [](auto& f, auto&, auto&) { f.k = {}; }},
      {"lse: rank 1 has none, rank 0 has f32", [](auto& f, auto&, auto&) { f.lse = {}; }},
      {"rank 1: seqused_q: got 4 dimensions f32 (1, 128, 4, 16), want 1 (batch)",
       [](auto& f, auto&, auto&) { f.seqused_q = f.q; }},
      {"bias: rank 1 has f32, rank 0 has none", [](auto& f, auto&, auto&) { f.bias = f.q; }},
      {"score_mod: rank 1 has score * 2.0, rank 0 has none",
       [](auto&, auto& o, auto&) { o.score_mod = symbols::score * 2; }},
      {"mask_mod: rank 1 has k < q, rank 0 has none",
       [](auto&, auto& o, auto&) { o.mask_mod = symbols::k < symbols::q; }},
      {"window_right: rank 1 has -1, rank 0 has 0", [](auto&, auto& o, auto&) { o.mask = full(); }},
      {"window_left: rank 1 has 9, rank 0 has -1", [](auto&, auto& o, auto&) { o.mask.left = 9; }},
      {"chunk: rank 1 has 8, rank 0 has 0", [](auto&, auto& o, auto&) { o.mask.chunk = 8; }},
      {"top_left: rank 1 has true, rank 0 has false",
       [](auto&, auto& o, auto&) { o.mask.top_left = true; }},
      {"scale: rank 1 has 2, rank 0 has 0.25", [](auto&, auto& o, auto&) { o.scale = 2; }},
      {"softcap: rank 1 has 3, rank 0 has 0", [](auto&, auto& o, auto&) { o.softcap = 3; }},
      {"dropout_p: rank 1 has 0.5, rank 0 has 0", [](auto&, auto& o, auto&) { o.dropout_p = 0.5; }},
      {"invariant: rank 1 has true, rank 0 has false",
       [](auto&, auto& o, auto&) { o.invariant = true; }},
      {"max_workspace: rank 1 has 1000000000, rank 0 has 0",
       [](auto&, auto& o, auto&) { o.max_workspace = 1000000000; }},
      {"rank 1: softcap: got -1, want a finite number >= 0 (0 = off)",
       [](auto&, auto& o, auto&) { o.softcap = -1; }},
      {"rank 1: origin: given with a group, which sets it",
       [](auto&, auto& o, auto&) { o.origin.query = 64; }},
      {"sharding: rank 1 has contiguous, rank 0 has zigzag",
       [](auto&, auto&, auto& d) { d.sharding = Sharding::kContiguous; }},
      {"head_ranks: rank 1 has 2, rank 0 has 1", [](auto&, auto&, auto& d) { d.head_ranks = 2; }},
      {"ring: rank 1 has true, rank 0 has false", [](auto&, auto&, auto& d) { d.ring = true; }},
      {"rank 1: ring: given with invariant, want none: it divides the sums of a row among ranks",
       [](auto&, auto& o, auto& d) { d.ring = o.invariant = true; }},
      {"rank 1: ring: given with 2 ranks that share out heads, want head_ranks 1",
       [](auto&, auto&, auto& d) {
         d.ring = true;
         d.head_ranks = 2;
       }},
      {"rank 1: k: on cpu, want cuda:0 as q",
       [](auto& f, auto&, auto&) {
         f.q.device = {DeviceType::kCuda, 0};
       }},
      {"rank 1: head_ranks: got 3, want a divisor of the 2 ranks and of the 2 heads of k",
       [](auto&, auto&, auto& d) { d.head_ranks = 3; }},
  };
  Workload w(problem.c, 1);
  const Shared s{problem, w};
  const int port = free_port();
  Processes processes(2, [&](int rank) {
    const Group group = Group::connect(rank, 2, "127.0.0.1", port, 60);
    const std::vector<int64_t> rows = s.rows(true, 2, rank);
    std::string said;
    // The first call is right, so that all have its plan when one of them makes another one.
    const auto made = [&](size_t i, const auto& call) {
      ForwardTensors f = w.forward;
      std::deque<Taken> memory;
      for (Tensor* t : {&f.q, &f.k, &f.v, &f.out}) {
        memory.push_back(take(*t, 1, rows));
        *t = memory.back().tensor;
      }
      memory.push_back(take(f.lse, 2, rows));
      f.lse = memory.back().tensor;
      Options options = w.options;
      options.threads = 1;
      Distribution distribution = problem.distribution;
      if (rank == 1 && i < all.size()) all[i].change(f, options, distribution);
      said += message_of([&] { call(f, options, distribution); }) + "\n";
    };
    const auto at_once = [&](const ForwardArgs& f, const Options& options, const Distribution& d) {
      forward(f, options, group, d);
    };
    made(all.size(), at_once);
    for (size_t i = 0; i <= all.size(); ++i) made(i, at_once);
    // A rank plans a call, whose plan the others have.
    made(all.size(), [&](const ForwardArgs& f, const Options& options, const Distribution& d) {
      rank == 1 ? plan(f, options, group, d).run(f) : forward(f, options, group, d);
    });
    return bytes_of(said);
  });
  std::string want = "\n";
  for (const Wrong& wrong : all) want += std::string(wrong.message) + "\n";
  want += "\n\n";  // the group goes on
  EXPECT_EQ(processes.text(0), want);
  EXPECT_EQ(processes.text(1), want);
}

// What all ranks have whole, all of them look at.
TEST(DistributedErrors, WholeTensors) {
  Workload w({.sq = 70, .sk = 90, .hq = 2, .hk = 1, .d = 16, .dv = 16}, 1);
  const Group alone = Group::from_env();
  const auto says = [&](const ForwardArgs& args, const Options& options = {}) {
    return message_of([&] { forward(args, options, alone, {}); });
  };
  std::vector<float> numbers(70 * 90);
  std::vector<int32_t> lengths = {71};
  ForwardArgs args = w.forward;
  args.bias = ConstTensor::contiguous(numbers.data(), DType::kF32, {1, 1, 70, 89});
  EXPECT_EQ(says(args),
            "bias: got shape (1, 1, 70, 89), want (1, 2, 70, 90), or 1 for any of them");
  args.bias = {};
  args.lengths.seqused_q = ConstTensor::contiguous(lengths.data(), DType::kI32, {1});
  EXPECT_EQ(says(args), "seqused_q: got 71 at 0, want 0 to 70");
  const Problem documents{
      {.batch = 1, .sq = 70, .sk = 70, .layout = Layout::kPacked}, {}, {{0, 0, 70, 70}}};
  Workload packed(documents.c, 1, documents.lengths);
  EXPECT_EQ(
      says(packed.forward, {.mask_mod = symbols::q0 < symbols::k}),
      "rank 0: score_mod, mask_mod: ask for q0 with a group, want q, a query of its sequence");
}

TEST(DistributedErrors, Groups) {
  EXPECT_EQ(message_of([] { Group::connect(2, 2, "127.0.0.1", 1); }), "rank: got 2, want 0 to 1");
  EXPECT_EQ(message_of([] { Group::connect(0, 0, "127.0.0.1", 1); }),
            "ranks: got 0, want at least 1");
  EXPECT_EQ(message_of([] { Group::connect(0, 2, "127.0.0.1", 1, 0); }),
            "deadline: got 0, want a number of seconds > 0");
  EXPECT_EQ(message_of([] { Group::from_exchange(0, 1, {}); }),
            "exchange: not given, want a function");
  EXPECT_EQ(message_of([] { Group::from_nccl(nullptr); }),
            "comm: got null, want a communicator of NCCL");
  int other = 0;
  EXPECT_EQ(message_of([&] { Group::from_nccl(&other); }),
            "comm: this process has not loaded libnccl.so.2, want a communicator of it");
  EXPECT_EQ(message_of([&] { Group::from_nccl(&other, 0); }),
            "deadline: got 0, want a number of seconds > 0");
  const int port = free_port();
  EXPECT_EQ(message_of([&] { Group::connect(0, 2, "127.0.0.1", port, 0.1); }),
            "rank 1 did not come within the deadline");
  EXPECT_EQ(message_of([&] { Group::connect(1, 2, "127.0.0.1", port, 0.1); }),
            fmt::format("rank 0 at 127.0.0.1:{} cannot be reached: Connection refused", port));
}

TEST(Distributed, GroupOfTheEnvironment) {
  const int port = free_port();
  const std::pair<const char*, const char*> names[] = {
      {"RANK", "WORLD_SIZE"},
      {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
      {"SLURM_PROCID", "SLURM_NTASKS"}};
  for (const auto& [rank_name, size_name] : names) {
    Processes processes(2, [&, rank_name = rank_name, size_name = size_name](int rank) {
      setenv(rank_name, std::to_string(rank).c_str(), 1);
      setenv(size_name, "2", 1);
      setenv("FULGUR_PORT", std::to_string(port).c_str(), 1);
      const Group group = Group::from_env(60);
      return bytes_of(fmt::format("{} of {}", group.rank(), group.size()));
    });
    EXPECT_EQ(processes.text(0), "0 of 2");
    EXPECT_EQ(processes.text(1), "1 of 2");
  }
  EXPECT_EQ(Group::from_env().size(), 1);
}

// A function that exchanges bytes is enough to make a group.
TEST(Distributed, ExchangeByTheCaller) {
  const Problem problem{{.dtype = DType::kF32,
                         .sq = 200,
                         .sk = 200,
                         .hq = 2,
                         .hk = 2,
                         .d = 16,
                         .dv = 16,
                         .mask = causal()},
                        {Sharding::kZigzag}};
  constexpr int kRanks = 3;
  Workload w(problem.c, 4);
  w.options.threads = 1;
  w.options.invariant = true;
  w.run();
  const auto want = all_bits(w);
  w.seal();
  const Shared s{problem, w};
  std::barrier<> meeting(kRanks);
  std::span<const std::span<const std::byte>> said[kRanks];
  std::vector<Bytes> results(kRanks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const Group group = Group::from_exchange(rank, kRanks, [&, rank](auto sends, auto receives) {
        said[rank] = sends;
        meeting.arrive_and_wait();
        for (int r = 0; r < kRanks; ++r) {
          if (r == rank) continue;
          std::memcpy(receives[r].data(), said[r][rank].data(), receives[r].size());
        }
        meeting.arrive_and_wait();
      });
      results[rank] = compute_rank(s, group);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < kRanks; ++rank) ASSERT_TRUE(put(s, kRanks, rank, results[rank]));
  EXPECT_EQ(all_bits(w) == want, true);
}

// --------------------------------------------------------------------------------------- failures

/// What ranks compute when one of them gets a signal.
Problem interrupted(int gpus) {
  return {{.dtype = gpus > 0 ? DType::kBF16 : DType::kF32,
           .sq = 512,
           .sk = 512,
           .hq = 4,
           .hk = 4,
           .d = 32,
           .dv = 32,
           .mask = causal()},
          {Sharding::kZigzag}};
}

/// Ranks that compute until an error, which they return with what the group says afterwards; rank 1
/// gets a signal after a while.
std::vector<std::string> after_signal(int signal, int milliseconds, double deadline, int gpus = 0) {
  const Problem problem = interrupted(gpus);
  Workload w(problem.c, 5);
  const Shared s{problem, w};
  const int port = free_port();
  constexpr int kRanks = 3;
  Processes processes(kRanks, [&](int rank) {
    const Group group = Group::connect(rank, kRanks, "127.0.0.1", port, deadline);
    std::thread killer;
    if (rank == 1) {
      killer = std::thread([=] {
        std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
        kill(getpid(), signal);
      });
    }
    const Device device = gpus == 0 ? Device{} : Device{DeviceType::kCuda, rank % gpus};
    const auto error_of_a_call = [&] {
      return message_of([&] { compute_rank(s, group, device); });
    };
    std::string error;
    while (error.empty()) error = error_of_a_call();
    return bytes_of(fmt::format("{}|{}|{}", error, group.dead(), error_of_a_call()));
  });
  return {processes.text(0), processes.text(2)};
}

TEST(DistributedFailures, ARankThatIsKilled) {
  std::mt19937 random(test_seed());
  for (int i = 0; i < 6; ++i) {
    const auto milliseconds = static_cast<int>(i == 0 ? 0 : random() % 100);
    SCOPED_TRACE(testing::Message() << milliseconds << " ms");
    const auto before = std::chrono::steady_clock::now();
    for (const std::string& text : after_signal(SIGKILL, milliseconds, 60)) {
      EXPECT_EQ(text, "rank 1 left|rank 1 left|group: it is dead, as rank 1 left; make a new one");
    }
    EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(20));
  }
}

/// What ranks return where rank 1 hangs.
std::string said_of_hanging(int seconds) {
  const std::string what = fmt::format("rank 1 made no step for {} s", seconds);
  return fmt::format("{}|{}|group: it is dead, as {}; make a new one", what, what, what);
}

TEST(DistributedFailures, ARankThatHangs) {
  for (const std::string& text : after_signal(SIGSTOP, 30, 1)) EXPECT_EQ(text, said_of_hanging(1));
}

// ------------------------------------------------------------------------------------------- GPUs

class DistributedOnGpus : public testing::Test {
 protected:
  void SetUp() override {
    static const int count = gpus();
    if (count == 0) GTEST_SKIP() << "no GPU";
    count_ = count;
  }
  /// The outputs of the workload, of rows of sequences.
  static std::vector<Bytes> outputs_of(const Shared& s) {
    std::vector<Bytes> all;
    for (const Output& x : s.outputs()) {
      all.push_back(bits(take(x.tensor, x.dim, s.rows(x, 1, 0)).tensor));
    }
    return all;
  }
  /// What a GPU alone computes, into the workload's outputs.
  static void compute_alone(const Shared& s) {
    const Bytes all = Processes(1, [&](int) {
                        s.w.options.engine = "cuda";
                        s.w.run();
                        Bytes all;
                        for (const Bytes& its : outputs_of(s)) {
                          all.insert(all.end(), its.begin(), its.end());
                        }
                        return all;
                      }).result(0);
    ASSERT_TRUE(put(s, 1, 0, all));
  }
  /// Every second one of the problems that GPUs compute, by the day: their kernels take seconds to
  /// compile.
  static std::vector<Problem> problems() {
    std::vector<Problem> all, some;
    for (Problem& problem : test::problems()) {
      const Case& c = problem.c;
      Workload w(c, 1, problem.lengths);
      problem.add(w);
      if (c.dtype == DType::kF64) continue;
      if (c.dtype == DType::kF32) problem.c.dtype = DType::kBF16;
      all.push_back(problem);
    }
    all.push_back({{.dtype = DType::kBF16,
                    .sq = 400,
                    .sk = 400,
                    .hq = 8,
                    .hk = 4,
                    .d = 128,
                    .dv = 128,
                    .mask = causal(),
                    .dropout = 0.2,
                    .sinks = true},
                   {Sharding::kZigzag, 2}});
    for (size_t n = test_seed() % 2; n < all.size(); n += 2) some.push_back(all[n]);
    return some;
  }
  int count_ = 0;
};

TEST_F(DistributedOnGpus, SimulatedRank) { expect_simulated({DeviceType::kCuda, 0}); }

TEST_F(DistributedOnGpus, OfFewRows) {
  for (const bool invariant : {false, true}) {
    const Problem problem{{.dtype = DType::kBF16,
                           .sq = 130,
                           .sk = 130,
                           .hq = 4,
                           .hk = 2,  // two steps
                           .d = 32,
                           .dv = 32,
                           .mask = causal(),
                           .dropout = 0.2,
                           .sinks = true},
                          {Sharding::kZigzag}};
    Workload w(problem.c, 8);
    w.options.invariant = invariant;
    const Expected e = expect(w);
    ASSERT_NO_FATAL_FAILURE(compute_by(2, {problem, w}, count_));
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

// A rank computes expressions with the batch, head, query and key of the whole call.
TEST_F(DistributedOnGpus, Expressions) {
  Problem problem{{.dtype = DType::kBF16,
                   .batch = 2,
                   .sq = 140,
                   .sk = 140,
                   .hq = 4,
                   .hk = 2,
                   .d = 32,
                   .dv = 32,
                   .mask = causal(),
                   .seqused = true},
                  {Sharding::kZigzag},
                  {},
                  add_expressions};
  Workload w(problem.c, 11);
  problem.add(w);
  const Expected e = expect(w);
  ASSERT_NO_FATAL_FAILURE(compute_by(2, {problem, w}, count_));
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(backward_is_right(w, e));
}

// Lengths of sequences of the batch, and a bias, whose gradient all ranks get.
TEST_F(DistributedOnGpus, WholeTensors) {
  const Problem problem{{.dtype = DType::kBF16,
                         .batch = 2,
                         .sq = 100,
                         .sk = 140,
                         .hq = 2,
                         .hk = 1,
                         .d = 32,
                         .dv = 32,
                         .mask = causal(),
                         .seqused_q = true,
                         .seqused = true,
                         .bias = Bias::kHeads},
                        {Sharding::kContiguous}};
  Workload w(problem.c, 10);
  const Expected e = expect(w);
  ASSERT_NO_FATAL_FAILURE(compute_by(2, {problem, w}, count_));
  EXPECT_TRUE(forward_is_right(w, e));
  EXPECT_TRUE(backward_is_right(w, e));
}

// Caches whose pages lie on all of them.
TEST_F(DistributedOnGpus, Pages) {
  for (const Case& c : decoding_cases()) {
    if (size_of(c.dtype) != 2) continue;
    SCOPED_TRACE(c.name());
    Workload w(c, 1);
    const Expected e = expect(w);
    for (const int ranks : {2, 3}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by_pages(ranks, w, count_));
      EXPECT_TRUE(forward_is_right(w, e));
    }
  }
}

TEST_F(DistributedOnGpus, InvariantToRanks) {
  for (const Problem& problem : problems()) {
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 6, problem.lengths);
    w.options.invariant = w.options.deterministic = true;
    problem.add(w);
    const Shared s{problem, w};
    ASSERT_NO_FATAL_FAILURE(compute_alone(s));
    const auto want = outputs_of(s);
    for (const int ranks : {2, 4}) {
      SCOPED_TRACE(testing::Message() << ranks << " ranks");
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s, count_));
      const auto got = outputs_of(s);
      for (size_t i = 0; i < got.size(); ++i) {
        const Tensor of = s.outputs()[i].tensor;
        // Sums over the rows of all ranks: tensors of expressions, and a bias but for kAll.
        const bool sums =
            i >= 5 && of.data != w.backward.dsinks.data && problem.c.bias != Bias::kAll;
        if (!sums) {
          EXPECT_EQ(got[i] == want[i], true) << "output " << i;
        }
      }
    }
  }
}

TEST_F(DistributedOnGpus, FastGradientsAndRings) {
  for (Problem problem : problems()) {
    if (problem.c.packed()) continue;  // the oracle knows rows of no sequence, too
    SCOPED_TRACE(problem.c.name());
    Workload w(problem.c, 7);
    w.options.deterministic = true;
    problem.add(w);
    const Expected e = expect(w);
    for (const auto& [ranks, ring] : {std::pair{2, false}, {3, false}, {2, true}, {3, true}}) {
      const int head_ranks = problem.distribution.head_ranks;
      if (ranks % head_ranks != 0 || (ring && head_ranks > 1)) continue;
      SCOPED_TRACE(testing::Message() << ranks << (ring ? " ranks in a ring" : " ranks"));
      problem.distribution.ring = ring;
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}, count_));
      EXPECT_TRUE(forward_is_right(w, e));
      EXPECT_TRUE(backward_is_right(w, e));
      const auto first = all_bits(w);
      ASSERT_NO_FATAL_FAILURE(compute_by(ranks, {problem, w}, count_));
      EXPECT_EQ(all_bits(w) == first, true);
    }
  }
}

TEST_F(DistributedOnGpus, ARankThatIsKilled) {
  for (const int milliseconds : {0, 300, 1500, 3000}) {
    for (const std::string& text : after_signal(SIGKILL, milliseconds, 60, count_)) {
      EXPECT_EQ(text, "rank 1 left|rank 1 left|group: it is dead, as rank 1 left; make a new one");
    }
  }
}

TEST_F(DistributedOnGpus, ARankThatHangs) {
  const Problem problem = interrupted(count_);
  Workload w(problem.c, 5);
  ASSERT_NO_FATAL_FAILURE(compute_by(3, {problem, w}, count_));  // compiles the kernels
  for (const int milliseconds : {1500, 3000}) {
    const auto before = std::chrono::steady_clock::now();
    for (const std::string& text : after_signal(SIGSTOP, milliseconds, 4, count_)) {
      EXPECT_EQ(text, said_of_hanging(4));
    }
    EXPECT_LT(std::chrono::steady_clock::now() - before, std::chrono::seconds(20));
  }
}

/// A communicator of processes that each see one GPU; the first one sends its id to the others.
class NcclComms {
 public:
  explicit NcclComms(int ranks) : ranks_(ranks) { EXPECT_EQ(pipe(ids_), 0); }
  static bool loads() { return dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL) != nullptr; }
  void* connect(int rank) const {
    struct Id {
      char bytes[128];
    } id{};
    setenv("CUDA_VISIBLE_DEVICES", std::to_string(rank).c_str(), 1);
    setenv("NCCL_NVLS_ENABLE", "0", 1);
    void* const library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    const auto get_id = reinterpret_cast<int (*)(Id*)>(dlsym(library, "ncclGetUniqueId"));
    const auto init =
        reinterpret_cast<int (*)(void**, int, Id, int)>(dlsym(library, "ncclCommInitRank"));
    if (rank == 0) {
      get_id(&id);
      for (int r = 1; r < ranks_; ++r) EXPECT_EQ(::write(ids_[1], &id, sizeof id), sizeof id);
    } else {
      EXPECT_EQ(::read(ids_[0], &id, sizeof id), sizeof id);
    }
    void* comm = nullptr;
    if (init(&comm, ranks_, id, rank) != 0) throw std::runtime_error("no communicator");
    return comm;
  }

 private:
  int ranks_, ids_[2] = {};
};

// Rows and what ranks say by NCCL, which takes a GPU for each of them.
TEST_F(DistributedOnGpus, RowsByNccl) {
  if (Processes(1, [](int) { return bytes_of(NcclComms::loads() ? "yes" : "no"); }).text(0) ==
      "no") {
    GTEST_SKIP() << "no NCCL";
  }
  const int ranks = std::min(count_, 2);
  for (const int head_ranks : {1, ranks}) {
    SCOPED_TRACE(testing::Message() << head_ranks << " share out heads");
    const Problem problem{{.dtype = DType::kBF16,
                           .batch = 2,
                           .sq = 300,
                           .sk = 300,
                           .hq = 8,
                           .hk = 4,
                           .d = 64,
                           .dv = 64,
                           .mask = causal(),
                           .sinks = true},
                          {Sharding::kZigzag, head_ranks}};
    Workload w(problem.c, 12);
    w.options.deterministic = true;
    const Expected e = expect(w);
    const Shared s{problem, w};
    ASSERT_NO_FATAL_FAILURE(compute_by(ranks, s, count_));
    const auto want = all_bits(w);
    w.seal();
    const NcclComms comms(ranks);
    Processes processes(ranks, [&](int rank) {
      const Group group = Group::from_nccl(comms.connect(rank), 60);
      return compute_rank(s, group, {DeviceType::kCuda, 0});
    });
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_TRUE(put(s, ranks, rank, processes.result(rank)));
    }
    EXPECT_EQ(all_bits(w) == want, true);
    EXPECT_TRUE(forward_is_right(w, e));
    EXPECT_TRUE(backward_is_right(w, e));
  }
}

// One that never comes ends the call of the other one.
TEST_F(DistributedOnGpus, ARankOfNcclThatHangs) {
  const Problem problem = interrupted(count_);
  Workload w(problem.c, 5);
  const Shared s{problem, w};
  Processes processes(1, [&](int) {
    if (dlopen(FAKE_NCCL, RTLD_NOW) == nullptr) return bytes_of("no fake");
    int comm = 0;
    const Group group = Group::from_nccl(&comm, 0.5);
    const auto compute = [&] {
      return message_of([&] { compute_rank(s, group, {DeviceType::kCuda, 0}); });
    };
    const std::string first = compute();
    return bytes_of(fmt::format("{}|{}", first, compute()));
  });
  const std::string said = processes.text(0);
  if (said == "no fake") GTEST_SKIP() << said;
  EXPECT_EQ(said,
            "a rank made no step for 0.5 s|group: it is dead, as a rank made no step for 0.5 s; "
            "make a new one");
}

}  // namespace
}  // namespace fulgur::test

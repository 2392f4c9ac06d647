#include "cpu/cpu_engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "cpu/cpu_plan.h"
#include "cpu/kernels.h"
#include "cpu/scratch_memory.h"
#include "fulgur/error.h"
#include "padding.h"
#include "parallel.h"
#include "tiles.h"

namespace fulgur::cpu {
namespace {

/// A part of the work of a kv head: rows of a block (kPanels), keys (kDecode), or one of the splits
/// (kBackward).
struct Item {
  int64_t b, kv, begin, end, work;
};

/// One call.
template <class Args>
class Work {
 public:
  Work(const Problem& problem, const Kernels& kernels, const CpuPlan& plan, const Args& args,
       const Run& run, float* memory)
      : p_(problem),
        k_(kernels),
        plan_(plan),
        args_(args),
        sequences_(problem, args),
        given_{static_cast<const float*>(args.alibi_slopes.data), run.dropout_seed,
               run.dropout_offset},
        scratch_(memory),
        shared_(memory + plan.threads * plan.scratch) {}

  void forward() const {
    if (plan_.schedule == Schedule::kDecode) {
      decode();
    } else {
      panels();
    }
    write_padding(p_, sequences_, args_);
  }

  void backward() const {
    gradients();
    write_padding(p_, sequences_, args_);
  }

 private:
  Task task(int64_t b, int64_t kv) const { return {p_, given_, sequences_[b], b, kv}; }
  float* scratch() const { return scratch_ + thread_index() * plan_.scratch; }

  template <class Body>
  void each(int64_t n, const Body& body) const {
    parallel_for(n, plan_.threads, body);
  }

  /// Calls add(task) for every kv head.
  template <class Add>
  void each_head(const Add& add) const {
    for (int64_t b = 0; b < p_.batch; ++b) {
      for (int64_t kv = 0; kv < p_.hk; ++kv) add(task(b, kv));
    }
  }

  void panels() const {
    std::vector<Item> items;
    each_head([&](const Task& t) {
      for (int64_t row = 0; row < t.rows(); row += plan_.Br) {
        const int64_t end = std::min(t.rows(), row + plan_.Br);
        const int64_t last = t.query(end - 1);
        items.push_back({t.b, t.kv, row, end, visible_keys(p_.mask, t.s, last).end});
      }
    });
    // The longest first: what is left at the end is short.
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& x, const Item& y) { return x.work > y.work; });
    each(static_cast<int64_t>(items.size()), [&](int64_t i) {
      const Item& item = items[i];
      k_.forward(task(item.b, item.kv), args_, item.begin, item.end, scratch());
    });
  }

  void decode() const {
    const int64_t heads = plan_.heads, state = p_.group() * p_.sq * (p_.dv + 2);
    std::vector<Item> items;
    std::vector<int64_t> first;  // of the items of each run of kv heads
    each_head([&](const Task& t) {
      if (t.kv % heads != 0) return;
      first.push_back(static_cast<int64_t>(items.size()));
      if (t.rows() == 0) return;  // a packed sequence without queries
      for (int64_t key = 0; key < t.s.sk; key += plan_.split_keys) {
        items.push_back({t.b, t.kv, key, std::min(t.s.sk, key + plan_.split_keys), 0});
      }
    });
    first.push_back(static_cast<int64_t>(items.size()));
    each(static_cast<int64_t>(items.size()), [&](int64_t i) {
      const Item& item = items[i];
      k_.decode(task(item.b, item.kv), args_, heads, item.begin, item.end,
                shared_ + i * heads * state, scratch());
    });
    each(p_.batch * p_.hk, [&](int64_t head) {
      const Task t = task(head / p_.hk, head % p_.hk);
      const int64_t run = head / heads, part = t.rows() * (p_.dv + 2);
      const int64_t parts = first[run + 1] - first[run];
      const float* states = parts == 0 ? nullptr  // no keys: there may be no memory either
                                       : shared_ + first[run] * heads * state + head % heads * part;
      k_.decode_merge(t, args_, states, parts, heads * state);
    });
  }

  void gradients() const {
    const int64_t heads = p_.batch * p_.hk, splits = plan_.splits;
    const int64_t stride = k_.dq_stride(p_), accumulator = p_.group() * p_.sq * stride;
    float* const D = shared_;  // [batch, hk, group * sq] of the longest sequence
    float* const dq = D + plan_.dq_offset;
    const auto D_of = [&](const Task& t) {
      return D +
             (p_.packed ? t.s.q_begin * p_.hq + t.kv * t.rows() : (t.b * p_.hk + t.kv) * t.rows());
    };

    std::vector<Item> blocks;  // of rows
    each_head([&](const Task& t) {
      for (int64_t row = 0; row < t.rows(); row += kRowBlock) {
        blocks.push_back({t.b, t.kv, row, std::min(t.rows(), row + kRowBlock), 0});
      }
    });
    each(static_cast<int64_t>(blocks.size()), [&](int64_t i) {
      const Task t = task(blocks[i].b, blocks[i].kv);
      k_.backward_d(t, args_, blocks[i].begin, blocks[i].end, D_of(t));
    });

    each(heads * splits, [&](int64_t i) {
      const int64_t head = i / splits, split = i % splits;
      const Task t = task(head / p_.hk, head % p_.hk);
      float* const part = dq + (splits > 1 ? i : thread_index()) * accumulator;
      std::fill_n(part, t.rows() * stride, 0.0f);
      // Every splits-th group of tiles, so that a causal mask loads the splits alike.
      for (int64_t key = split * kTiles * kBc; key < t.s.sk; key += splits * kTiles * kBc) {
        k_.backward(t, args_, key, std::min(t.s.sk, key + kTiles * kBc), D_of(t), part, scratch());
      }
      if (splits == 1) k_.backward_dq(t, args_, 0, t.rows(), &part, 1);
    });
    if (splits == 1) return;
    each(static_cast<int64_t>(blocks.size()), [&](int64_t i) {
      const Item& block = blocks[i];
      std::vector<float*> parts(splits);
      for (int64_t split = 0; split < splits; ++split) {
        parts[split] = dq + ((block.b * p_.hk + block.kv) * splits + split) * accumulator;
      }
      k_.backward_dq(task(block.b, block.kv), args_, block.begin, block.end, parts.data(), splits);
    });
  }

  static constexpr int64_t kRowBlock = 1024;  // rows of a task that only streams memory

  const Problem& p_;
  const Kernels& k_;
  const CpuPlan& plan_;
  const Args& args_;
  Sequences sequences_;
  Given given_;
  float *scratch_, *shared_;
};

class CpuExecutable final : public Executable {
 public:
  CpuExecutable(const Problem& problem, int threads)
      : p_(problem), k_(kernels()), plan_(make_plan(p_, threads, k_, &rejected_)) {}

  void run(const Call& call, const Run& run) const override {
    const bool own = run.workspace.data == nullptr;
    const ScratchMemory memory(own ? plan_.workspace_bytes() : 0);
    auto* const floats = static_cast<float*>(own ? memory.data() : run.workspace.data);
    if (p_.pass == Pass::kForward) {
      Work(p_, k_, plan_, *std::get<const ForwardArgs*>(call), run, floats).forward();
    } else {
      Work(p_, k_, plan_, *std::get<const BackwardArgs*>(call), run, floats).backward();
    }
  }

  Explanation explain() const override {
    return {describe(plan_, p_), rejected_, plan_.Br, plan_.Bc};
  }

  WorkspaceNeed workspace() const override {
    return {plan_.workspace_bytes(), ScratchMemory::kAlignment, 0};
  }

 private:
  Problem p_;
  const Kernels& k_;
  std::vector<std::string> rejected_;
  CpuPlan plan_;
};

class CpuEngine final : public Engine {
 public:
  std::string name() const override { return "cpu"; }
  std::string description() const override {
    if (!unavailable().empty()) return "SIMD";
    return fmt::format("{} vectors, {} threads", kernels().target, thread_count(0));
  }
  std::string unavailable() const override {
    try {
      kernels();
      return {};
    } catch (const Error& error) {
      return error.what();
    }
  }
  std::string rejects(const Problem& p) const override {
    if (p.device.type != DeviceType::kCpu) return "computes tensors on cpu";
    if (p.dtype == DType::kF64) return "computes f32, bf16 and f16";
    return {};
  }
  std::unique_ptr<const Executable> plan(const Problem& problem, int threads) const override {
    return std::make_unique<CpuExecutable>(problem, threads);
  }
};

}  // namespace

const Engine& engine() {
  static const CpuEngine kEngine;
  return kEngine;
}

}  // namespace fulgur::cpu

#include "cpu/run.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <type_traits>
#include <vector>

#include "base/parallel.h"
#include "base/sinks.h"
#include "call/dropout.h"
#include "call/mask.h"
#include "call/padding.h"

namespace fulgur::cpu {
namespace {

/// A task of a kv head: the rows [begin, end) of a block, or, if it decodes, the keys [begin, end),
/// whose results go to `states`.
struct Item {
  int64_t b, kv, begin, end;
  int64_t work = 0;         // an estimate
  float* states = nullptr;  // null unless the task decodes
};

/// A merge of the states of all parts of the keys of consecutive kv heads.
struct Merge {
  int64_t b, kv;
  const float* states;
  int64_t parts;
};

/// The computation of one call.
template <class Args>
class Work {
 public:
  Work(const Problem& problem, const Kernels& kernels, const CpuPlan& plan,
       const expression::StagedGraph* expressions, const Args& args, const Run& run, float* memory)
      : p_(problem),
        k_(kernels),
        plan_(plan),
        args_(args),
        sequences_(problem, args),
        keys_(problem, sequences_, args),
        given_{static_cast<const float*>(args.alibi_slopes.data),
               args.sinks,
               tree_mask_of(args),
               args.bias,
               dropout_of(problem, args, run),
               OperandScaling(problem, args)},
        scratch_(memory),
        shared_(memory + plan.threads * plan.scratch) {
    if (expressions != nullptr) bind(*expressions);
    if constexpr (std::is_same_v<Args, BackwardArgs>) {
      if (!args.dbias.given()) return;
      given_.dbias = {plan.dbias_sums > 0 ? shared_ + plan.dbias_offset : args.dbias.data,
                      plan.dbias};
    }
  }

  // With Options::invariant, nothing that decides in which order the sums of a row are taken may
  // look beyond the row's own sequence and its heads: not the schedule (its number of rows picks
  // it), not where row tiles and key tiles begin (at multiples of their size, counted from the
  // sequence's first row and key), not which tiles need care for values that are not finite, not
  // the parts of its keys. What threads and neighbours decide, the row tiles of a block and the
  // heads of a decode task, is only what shares loads of K and V. Without `invariant`, neighbours
  // and threads also decide how many parts a sequence is cut into.
  void forward() const {
    std::vector<Item> items;
    std::vector<Merge> merges;
    const int64_t decoded = keys_to_decode();
    float* states = shared_;
    each_head([&](const Task& t) {
      if (!plan_.decodes(t)) return cut_rows(t, &items);
      if (t.kv % plan_.decode_heads == 0) cut_keys(t, decoded, &states, &items, &merges);
    });
    // The longest tasks first, so that threads end at about the same time.
    std::stable_sort(items.begin(), items.end(),
                     [](const Item& x, const Item& y) { return x.work > y.work; });
    each(static_cast<int64_t>(items.size()), [&](int64_t i) {
      const Item& item = items[i];
      const Task t = task(item.b, item.kv);
      if (item.states == nullptr) {
        k_.forward(t, args_, item.begin, item.end, scratch());
      } else {
        k_.decode(t, args_, plan_.decode_heads, item.begin, item.end, item.states, scratch());
      }
    });
    const int64_t heads = plan_.decode_heads;
    each(static_cast<int64_t>(merges.size()) * heads, [&](int64_t i) {
      const Merge& merge = merges[i / heads];
      const Task t = task(merge.b, merge.kv + i % heads);
      const int64_t state = t.rows() * (p_.dv + 2);
      k_.decode_merge(t, args_, merge.states + i % heads * state, merge.parts, heads * state);
    });
    write_padding(p_, sequences_, args_);
  }

  void backward() {
    if (p_.has(Arg::kDbias)) clear_dbias();
    if (p_.expressions.wants_gradients()) clear_tensor_sums();
    gradients();
    if (p_.expressions.wants_gradients()) round_tensor_sums();
    if (plan_.dbias_sums > 0) round_dbias();
    write_padding(p_, sequences_, args_);
  }

 private:
  /// Binds the tensors of expressions, and finds which tiles of each sequence their mask hides.
  void bind(const expression::StagedGraph& graph) {
    bound_ = p_.expressions.bound(args_.tensors);
    expressions_.emplace(GivenExpressions{.graph = graph, .tensors = {}});
    expressions_->scratch = plan_.expressions;
    for (const TensorBinding& t : bound_) expressions_->tensors.push_back(t.tensor);
    given_.expressions = &*expressions_;
    if (graph.call.mask < 0) return;
    std::vector<std::optional<expression::MaskHulls>> hulls(p_.batch);
    each(p_.batch, [&](int64_t b) {
      hulls[b].emplace(graph, expressions_->tensors, place_of(p_, b, 0, sequences_[b]), kBc);
    });
    for (auto& one : hulls) expressions_->hulls.push_back(std::move(*one));
  }

  Task task(int64_t b, int64_t kv) const {
    const Sequence s = sequences_[b];
    return {p_, given_, s, keys_.of(b, s), b, kv};
  }
  float* scratch() const { return scratch_ + thread_index() * plan_.scratch; }

  template <class Body>
  void each(int64_t n, const Body& body) const {
    parallel_for(n, plan_.threads, body);
  }

  /// Calls add(task) for every kv head of every sequence that has results. Sequences without rows
  /// may have any number of heads.
  template <class Add>
  void each_head(const Add& add) const {
    for (int64_t b = 0; b < p_.batch; ++b) {
      const Sequence s = sequences_[b];
      if (s.sq == 0 && (p_.pass == Pass::kForward || s.sk == 0)) continue;
      for (int64_t kv = 0; kv < p_.hk; ++kv) add(task(b, kv));
    }
  }

  /// The sum of the keys of all decode tasks.
  int64_t keys_to_decode() const {
    int64_t sum = 0;
    each_head([&](const Task& t) {
      if (!plan_.decodes(t) || t.kv % plan_.decode_heads != 0) return;
      const KeyRange keys = decoded_keys(p_.mask, t.s);
      sum += keys.end - keys.begin;
    });
    return sum;
  }

  void cut_rows(const Task& t, std::vector<Item>* items) const {
    for (int64_t row = 0; row < t.rows(); row += plan_.block_rows) {
      const int64_t end = std::min(t.rows(), row + plan_.block_rows);
      const int64_t keys = visible_keys(p_.mask, t.s, t.query(end - 1)).end;
      items->push_back({t.b, t.kv, row, end, (end - row) * keys});
    }
  }

  void cut_keys(const Task& t, int64_t all_keys, float** states, std::vector<Item>* items,
                std::vector<Merge>* merges) const {
    const KeyRange keys = decoded_keys(p_.mask, t.s);
    const int64_t part = plan_.part_keys(keys.end - keys.begin, all_keys);
    merges->push_back({t.b, t.kv, *states, 0});
    for (int64_t key = keys.begin; key < keys.end; key += part) {
      const int64_t end = std::min(keys.end, key + part), rows = plan_.decode_heads * t.rows();
      items->push_back({t.b, t.kv, key, end, rows * (end - key), *states});
      *states += rows * (p_.dv + 2);
      ++merges->back().parts;
    }
  }

  void gradients() const {
    float* const D = shared_;  // [batch, hk, group * sq], with sq of the longest sequence
    const auto D_of = [&](const Task& t) {
      return D + (p_.packed ? t.s.q_begin * p_.hq : t.b * p_.sq * p_.hq) + t.kv * t.rows();
    };

    std::vector<Item> heads, blocks;  // kv heads, and the blocks of their rows
    each_head([&](const Task& t) {
      heads.push_back({t.b, t.kv, 0, t.rows()});
      cut(heads.back(), [&](const Item& block) { blocks.push_back(block); });
    });
    each(static_cast<int64_t>(blocks.size()), [&](int64_t i) {
      const Task t = task(blocks[i].b, blocks[i].kv);
      k_.backward_d(t, args_, blocks[i].begin, blocks[i].end, D_of(t));
    });

    if (p_.has(Arg::kDsinks)) sink_gradients(D_of);

    // Tasks that add to the same elements of dbias are in different rounds, which follow each
    // other.
    std::map<int64_t, std::vector<Item>> rounds;
    for (const Item& head : heads) rounds[round_of(head)].push_back(head);
    for (const auto& [number, round] : rounds) key_gradients(round, D_of);
  }

  int64_t round_of(const Item& head) const {
    if (!p_.has(Arg::kDbias)) return 0;
    const int64_t kv_heads = p_.dbias.head == 0 ? p_.hk : 1;
    return (p_.dbias.batch == 0 ? head.b * kv_heads : 0) + head.kv % kv_heads;
  }

  /// Computes dK, dV, dQ and dbias of kv heads.
  template <class Rows>
  void key_gradients(const std::vector<Item>& heads, const Rows& D_of) const {
    const int64_t splits = plan_.splits;
    const int64_t accumulator = p_.wants_dq() ? k_.dq_floats(p_, p_.group() * p_.sq) : 0;
    float* const dq = shared_ + plan_.dq_offset;
    const auto compute = [&](int64_t i, double* tensor_sums) {
      const int64_t split = i % splits;
      Task t = task(heads[i / splits].b, heads[i / splits].kv);
      t.tensor_sums = tensor_sums;
      float* part = dq + (splits > 1 ? i : thread_index()) * accumulator;
      if (p_.wants_dq()) std::fill_n(part, k_.dq_floats(p_, t.rows()), 0.0f);
      // Every splits-th group of tiles, so that a causal mask loads the splits alike.
      for (int64_t key = split * kTiles * kBc; key < t.s.sk; key += splits * kTiles * kBc) {
        k_.backward(t, args_, key, std::min(t.s.sk, key + kTiles * kBc), D_of(t), part, scratch());
      }
      if (p_.wants_dq() && splits == 1) k_.backward_dq(t, args_, 0, t.rows(), &part, 1);
    };
    const int64_t tasks = static_cast<int64_t>(heads.size()) * splits;
    if (!p_.expressions.wants_gradients()) {
      each(tasks, [&](int64_t i) { compute(i, nullptr); });
    } else {  // each sum always has the same tasks, in the same order, so that its bits do not vary
      each(sums_, [&](int64_t sum) {
        for (int64_t i = sum; i < tasks; i += sums_) {
          compute(i, tensor_sums_.get() + sum * sum_doubles_);
        }
      });
    }
    if (splits == 1 || !p_.wants_dq()) return;
    std::vector<Item> blocks;  // `work` is the index of the head
    for (int64_t i = 0; i < static_cast<int64_t>(heads.size()); ++i) {
      cut(heads[i], [&](Item block) {
        block.work = i;
        blocks.push_back(block);
      });
    }
    each(static_cast<int64_t>(blocks.size()), [&](int64_t i) {
      const auto& [b, kv, begin, end, head, states] = blocks[i];
      std::vector<float*> parts(splits);
      for (int64_t split = 0; split < splits; ++split) {
        parts[split] = dq + (head * splits + split) * accumulator;
      }
      k_.backward_dq(task(b, kv), args_, begin, end, parts.data(), splits);
    });
  }

  /// Calls add(block) for blocks of the rows of a head.
  template <class Add>
  static void cut(const Item& head, const Add& add) {
    for (int64_t row = 0; row < head.end; row += kRowBlock) {
      add(Item{head.b, head.kv, row, std::min(head.end, row + kRowBlock)});
    }
  }

  /// Calls body(b, h, i) for every row of dbias.
  template <class Body>
  void each_row_of_dbias(const Body& body) const {
    if (args_.dbias.numel() == 0) return;
    const int64_t batch = args_.dbias.shape[0], heads = args_.dbias.shape[1],
                  rows = args_.dbias.shape[2];
    const int64_t blocks = ceil_div(rows, kRowBlock);
    each(batch * heads * blocks, [&](int64_t item) {
      const int64_t head = item / blocks, begin = item % blocks * kRowBlock;
      for (int64_t i = begin; i < std::min(rows, begin + kRowBlock); ++i) {
        body(head / heads, head % heads, i);
      }
    });
  }

  /// Zeros the sums of dbias, which may be dbias itself.
  void clear_dbias() const {
    if (plan_.dbias_sums > 0) {
      const int64_t block = kRowBlock * kBc;
      each(ceil_div(plan_.dbias_sums, block), [&](int64_t i) {
        std::fill_n(shared_ + plan_.dbias_offset + i * block,
                    std::min(block, plan_.dbias_sums - i * block), 0.0f);
      });
      return;
    }
    const auto& strides = args_.dbias.strides;
    const int64_t keys = args_.dbias.shape[3], size = size_of(args_.dbias.dtype);
    each_row_of_dbias([&](int64_t b, int64_t h, int64_t i) {
      char* const row = static_cast<char*>(args_.dbias.data) +
                        (b * strides[0] + h * strides[1] + i * strides[2]) * size;
      if (strides[3] == 1) {
        std::memset(row, 0, keys * size);  // 0 of every dtype
      } else {
        for (int64_t j = 0; j < keys; ++j) std::memset(row + j * strides[3] * size, 0, size);
      }
    });
  }

  /// Rounds the sums to dbias, with 0 for rows and keys that no sequence has.
  void round_dbias() const {
    const auto& strides = args_.dbias.strides;
    const Problem::Bias& own = plan_.dbias;
    each_row_of_dbias([&](int64_t b, int64_t h, int64_t i) {
      const float* const sums =
          shared_ + plan_.dbias_offset + b * own.batch + h * own.head + i * own.row;
      for (int64_t j = 0; j < args_.dbias.shape[3]; ++j) {
        const double sum = i < p_.sq && j < p_.sk ? sums[j * own.key] : 0;
        store_element(args_.dbias.data, args_.dbias.dtype,
                      b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3], sum);
      }
    });
  }

  /// Zeros the sums of the gradients of the tensors of expressions: a set for each thread, or fewer
  /// where these would exceed kMaxSumDoubles.
  void clear_tensor_sums() {
    for (const TensorBinding& t : bound_) {
      expressions_->sums.push_back(sum_doubles_);
      if (t.grad.given()) sum_doubles_ += t.grad.numel();
    }
    sums_ =
        std::clamp<int64_t>(kMaxSumDoubles / std::max<int64_t>(sum_doubles_, 1), 1, plan_.threads);
    tensor_sums_ = std::make_unique<double[]>(sums_ * sum_doubles_);
  }

  void round_tensor_sums() const {
    for (size_t n = 0; n < bound_.size(); ++n) {
      const Tensor& to = bound_[n].grad;
      for (int64_t at = 0; at < to.numel(); ++at) {
        double total = 0;
        for (int64_t sum = 0; sum < sums_; ++sum) {
          total += tensor_sums_[sum * sum_doubles_ + expressions_->sums[n] + at];
        }
        int64_t element = 0, rest = at;
        for (int i = to.rank - 1; i >= 0; --i) {
          element += rest % to.shape[i] * to.strides[i];
          rest /= to.shape[i];
        }
        store_element(to.data, to.dtype, element, total);
      }
    }
  }

  /// dsink_h = sum of P_sink (dLSE - rowsum(dO o O)) over the rows of head h, in order and in f64.
  template <class Rows>
  void sink_gradients(const Rows& D_of) const {
    const auto* lse = static_cast<const float*>(args_.lse.data);
    each(p_.hq, [&](int64_t h) {
      const double sink = given_.sink(h);
      double sum = 0;
      for (int64_t b = 0; b < p_.batch; ++b) {
        const Task t = task(b, h / p_.group());
        const float* const D = D_of(t) + h % p_.group() * t.s.sq;
        for (int64_t i = 0; i < t.s.sq; ++i) {
          const double P = sink_probability(sink, lse[p_.lse.offset(b, t.s.q_begin + i, h)]);
          if (P != 0) sum -= P * D[i];
        }
      }
      store_element(args_.dsinks.data, args_.dsinks.dtype, h, sum);
    });
  }

  static constexpr int64_t kMaxSumDoubles = int64_t{1} << 25;
  static constexpr int64_t kRowBlock = 1024;  // rows of a task that only streams memory

  const Problem& p_;
  const Kernels& k_;
  const CpuPlan& plan_;
  const Args& args_;
  Sequences sequences_;
  KvLocator keys_;
  Given given_;
  float *scratch_, *shared_;
  std::vector<TensorBinding> bound_;
  std::optional<GivenExpressions> expressions_;
  std::unique_ptr<double[]> tensor_sums_;  // [sums_][sum_doubles_]
  int64_t sums_ = 0, sum_doubles_ = 0;
};

}  // namespace

void compute(const Problem& problem, const Kernels& kernels, const CpuPlan& plan,
             const expression::StagedGraph* expressions, const ForwardArgs& args, const Run& run,
             float* memory) {
  Work(problem, kernels, plan, expressions, args, run, memory).forward();
}

void compute(const Problem& problem, const Kernels& kernels, const CpuPlan& plan,
             const expression::StagedGraph* expressions, const BackwardArgs& args, const Run& run,
             float* memory) {
  Work(problem, kernels, plan, expressions, args, run, memory).backward();
}

}  // namespace fulgur::cpu
